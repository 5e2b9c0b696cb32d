"""The guard: products watched after tuning, refused where they are beyond the tolerance, and measured again."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._backend import Plan, Rejection
from dispatch._decision import Decision
from dispatch._measurement import BASELINE
from dispatch._problem import Problem
from dispatch.measuring.probe import ESTIMATED, beyond

if TYPE_CHECKING:
    from dispatch.frameworks import Framework
    from dispatch.policies.policy import Policy

logger = logging.getLogger("dispatch")


class Guard:
    """What is watched, for one process: counts, and the trips that are not measured again yet.

    forget: drops every known call, so that the next one asks again. clock: seconds.
    """

    def __init__(self, forget: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self.counts: Counter[str] = Counter(probed=0, tripped=0, refused=0)
        self._forget, self._clock = forget, clock
        self._trips: dict[Hashable, tuple[float, str]] = {}
        self._again: set[Hashable] = set()
        self._lock = threading.Lock()
        self._seeds = itertools.count(1)

    def watching(
        self, plan: Plan, own: Plan, room: Framework, decision: Decision, policy: Policy, scope: str | None
    ) -> Plan:
        """Return `plan` as the policy wants it watched: itself where it does not, or where there are no values.

        plan, own: the chosen and the framework's own product, for operands in canonical shapes. What is beyond the
        tolerance is not returned but multiplied again by `own`, which then serves for the policy's cool-down.
        """
        every = 1 if policy.guard.mode == "strict" else policy.guard.probe_every
        if decision.backend in (BASELINE.backend, "bf16_fallback"):  # the framework's own product in either case
            return plan
        if not every or "traced" in decision.problem.modes or unguardable(decision.problem, policy):
            return plan
        problem, key = replace(decision.problem, modes=()), _key(decision.problem, scope, policy)
        metric, limit, calls = policy.error.metric, policy.error.tolerance, itertools.count(1)

        def watched(*operands: Any) -> Any:
            trip = self._trips.get(key)
            if trip is not None:
                if self._clock() >= trip[0]:
                    self._cooled(key)
                return own(*operands)
            out = plan(*operands)
            if next(calls) % every or room.measurable(out) is not None:  # nothing is read under graph capture
                return out
            self.counts["probed"] += 1
            seed = next(self._seeds)
            error = room.isolated(lambda: beyond(room, problem, out, operands, metric, limit, seed))
            if error is None:
                return out
            self._tripped(key, decision, f"{metric} {error:.2g} against {limit:.2g}", policy.guard.cool_down_s)
            return own(*operands)

        return watched

    def _tripped(self, key: Hashable, decision: Decision, figures: str, cool_down_s: float) -> None:
        with self._lock:
            self.counts["refused"] += 1
            if key in self._trips:  # another thread's call
                return
            self.counts["tripped"] += 1
            self._trips[key] = self._clock() + cool_down_s, figures
        logger.warning(
            "dispatch: the guard refused a result of %s for %s: %s; the framework's own product serves for %g s",
            decision.candidate, decision.problem, figures, cool_down_s,
        )  # fmt: skip

    def _cooled(self, key: Hashable) -> None:
        with self._lock:
            if self._trips.pop(key, None) is not None:
                self._again.add(key)
        self._forget()

    def distrusts(self, problem: Problem, scope: str | None, policy: Policy) -> bool:
        """Return whether what is remembered for a problem is to be measured again, after a cool-down."""
        if policy.tuning.mode != "measure" or "traced" in problem.modes:
            return False
        return _key(problem, scope, policy) in self._again

    def measured(self, problem: Problem, scope: str | None, policy: Policy) -> None:
        """Take note that a problem was measured, and the decision is remembered."""
        with self._lock:
            self._again.discard(_key(problem, scope, policy))

    def noted(self, decision: Decision, scope: str | None, policy: Policy) -> Decision:
        """Return a decision, with what the guard knows of it in its reason."""
        trip = self._trips.get(_key(decision.problem, scope, policy))
        if trip is None:
            return decision
        left = max(0.0, trip[0] - self._clock())
        note = f"the guard refused a result ({trip[1]}): the framework's own product serves for {left:.0f} s more"
        return replace(decision, reason=f"{decision.reason}; {note}")


def unguardable(problem: Problem, policy: Policy) -> list[Rejection]:
    """Return why a product cannot be watched as the policy wants, or []."""
    if policy.guard.mode == "off" and not policy.guard.probe_every:
        return []
    found = []
    if problem.activation is not None:
        found.append(Rejection("activation", problem.activation, "none: probes see through no activation ([guard])"))
    if policy.error.metric not in ESTIMATED:
        found.append(Rejection("metric", policy.error.metric, f"one that probes estimate: {', '.join(ESTIMATED)}"))
    return found


def _key(problem: Problem, scope: str | None, policy: Policy) -> Hashable:
    return replace(problem, modes=()), scope, policy.choice_fingerprint
