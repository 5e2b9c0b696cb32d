"""Latencies for a bucket of m: measured at both ends, of each candidate the worse speedup counts.

Errors are measured on the caller's own operands, and no backend is asked for what it cannot run at the caller's own m.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._decision import as_good
from dispatch._measurement import BASELINE, Candidate, Error
from dispatch._problem import Problem
from dispatch.frameworks.operands import array_of
from dispatch.measuring.buckets import bucket
from dispatch.measuring.latency import Timing
from dispatch.measuring.session import Entrant, Operands, Table, Timings, measure, worse_error

if TYPE_CHECKING:
    from dispatch.frameworks import Framework
    from dispatch.policies.policy import Policy


def at_ends(
    room: Framework,
    problem: Problem,
    operands: Operands,
    entrants: Callable[[Problem, set[Candidate]], Sequence[Entrant]],
    policy: Policy,
    table: Table,
) -> None:
    """Fill `table` with the worse timings and errors of both ends of the problem's bucket, and say what failed there.

    operands: in canonical shapes; a is replaced by random values. entrants: gives the candidates that can run at an
    m, without some. One that can run at neither end is timed at the problem's own m. Nothing is done where one m has a
    bucket of its own.
    """
    first, last = bucket(problem)
    if first == last:
        return
    ends: list[Timings] = []
    timed: set[Candidate] = set()
    for m in dict.fromkeys((first, last, problem.m)):
        asked, there, between = replace(problem, m=m), Table(), m not in (first, last)
        able = entrants(asked, timed if between else set())
        if between and not able:
            break
        measure(room, asked, able, _of_height(room, m, operands), policy, there)
        table.faults |= there.faults
        table.out_of_memory |= there.out_of_memory
        table.postponed += there.postponed
        ends.append(there.timings)
        timed |= set(there.timings)
        for candidate, error in _beyond(there, policy).items():
            table.elsewhere[candidate] = worse_error(table.elsewhere.get(candidate, error), error)
    table.timings = worse(*ends)


def _beyond(table: Table, policy: Policy) -> dict[Candidate, Error]:
    """Return the errors that do not pass: beyond the tolerance, and worse than what the baseline makes there."""
    own, metric = table.measurements[BASELINE], policy.error.metric
    errors = {candidate: x.error for candidate, x in table.measurements.items() if x.error is not None}
    base = own.error
    return {
        candidate: error
        for candidate, error in errors.items()
        if base is not None
        and error.value(metric) > policy.error.tolerance
        and not as_good(error, base, own.rounding, metric)
    }


def worse(first: Timings, last: Timings, *others: Timings) -> Timings:
    """Return the baseline's timing at the last m, and of each candidate the worst speedup, as a latency there.

    So latencies of candidates compare with one another, whichever m each is worst at.
    """
    ends, base = (first, last, *others), last[BASELINE]
    found = {BASELINE: replace(base, settled=all(timings[BASELINE].settled for timings in ends))}
    for candidate in dict.fromkeys(candidate for timings in ends for candidate in timings):
        if candidate != BASELINE:
            timings = [own[candidate] for own in ends if candidate in own]
            worst = min(timings, key=lambda timing: timing.speedup)
            settled = all(timing.settled for timing in timings)
            found[candidate] = worst if worst is last.get(candidate) else _scaled(worst, base)
            found[candidate] = replace(found[candidate], settled=settled)
    return found


def _scaled(timing: Timing, base: Timing) -> Timing:
    """Return a timing as it would be if the baseline took what `base` says."""
    factor = base.latency_us / timing.speedup / timing.latency_us
    latency, median, spread = (factor * us for us in (timing.latency_us, timing.median_us, timing.spread_us))
    return replace(timing, latency_us=latency, median_us=median, spread_us=spread)


def _of_height(room: Framework, m: int, operands: Operands) -> Operands:
    """Return the operands with m rows of random values as a, and a bias for as many rows."""
    a, b, *bias = operands
    array: Any = array_of(a)
    values = room.normal((m, int(array.shape[-1])), room.dtype_name(array), m, room.device(array))
    return (values, b, *(x[:1] if len(x.shape) > 1 else x for x in bias))
