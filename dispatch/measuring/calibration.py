"""Calibration: errors measured on batches of real data, the worst of them kept for each problem and scope."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

from dispatch._decision import Decision
from dispatch._measurement import BASELINE, Candidate, Error, Measurement
from dispatch.measuring.latency import Timing
from dispatch.measuring.session import Timings, worse_error
from dispatch.remembering.known import retrace

logger = logging.getLogger("dispatch")


class Calibration:
    """What one calibration has found so far: the decisions by key, and the worst errors."""

    def __init__(self) -> None:
        self.decisions: dict[str, Decision] = {}
        self._errors: dict[tuple[str, Candidate], Error] = {}

    def worst(self, key: str, measured: Mapping[Candidate, Measurement]) -> dict[Candidate, Measurement | None]:
        """Return the measurements of one batch, with the worst error of every batch so far."""
        found: dict[Candidate, Measurement | None] = {}
        own = measured[BASELINE]
        base = replace(own, error=self._worst(key, BASELINE, own), error_data="calibration")
        for candidate, one in measured.items():
            twin = one is own  # the framework's own product itself: decisions know it by that
            error = base.error if twin else self._worst(key, candidate, one)
            found[candidate] = base if twin else replace(one, error=error, error_data="calibration")
        return found

    def _worst(self, key: str, candidate: Candidate, measured: Measurement) -> Error | None:
        if measured.error is not None:
            before = self._errors.get((key, candidate), measured.error)
            self._errors[key, candidate] = worse_error(before, measured.error)
        return self._errors.get((key, candidate))


_in_force: ContextVar[Calibration | None] = ContextVar("dispatch_calibration", default=None)
in_force = _in_force.get


def timings_of(decision: Decision) -> Timings:
    """Return the latencies that a decision was made by."""
    measured = {v.candidate: v.measurement for v in decision.candidates} | {BASELINE: decision.baseline}
    return {
        candidate: Timing(one.latency_us, one.median_us, one.spread_us, one.rounds, one.speedup, one.settled)
        for candidate, one in measured.items()
        if one is not None
    }


def calibrate(fn: Callable[..., Any], *batches: Any) -> list[Decision]:
    """Call fn on batches of real data, and decide anew for every product in it by the worst error of all batches.

    batches: each is passed to fn, a tuple as its arguments. Errors belong to a problem and a scope, and take the place
    of those that were measured on the data of a first call; latencies are measured only where they are not known. Kept
    in the decision store with `error_data = "calibration"`, for the policy in force. Constant operands, and those that
    hold NaN or Inf, say nothing of others and are left out. Functions that JAX has jitted run without jit, and are
    traced again at their next call; what is traced all the same (under grad, vmap, scan) has no values, and what runs
    on other threads is not seen.

    Returns the decisions, one for each problem and scope; none for a product that only the framework's own matmul can
    serve. Without any it logs a warning. Raises what fn raises.
    """
    from dispatch import forget  # noqa: PLC0415 - the core is made after this room

    calibration = Calibration()
    jax = sys.modules.get("jax")
    forget()  # a call that is known would be served as it is; meanwhile none becomes known
    token = _in_force.set(calibration)
    try:
        with jax.disable_jit() if jax else nullcontext():
            for batch in batches:
                fn(*batch) if isinstance(batch, tuple) else fn(batch)
    finally:
        _in_force.reset(token)
        forget()
        if calibration.decisions:
            retrace()
    if not calibration.decisions:
        logger.warning(
            "dispatch: calibrate decided nothing in %d batches: no product there can be served by a backend and has "
            "operands that say anything (not constant, finite, not traced)",
            len(batches),
        )
    return list(calibration.decisions.values())
