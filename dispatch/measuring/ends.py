"""Latencies for a bucket of m: measured at both ends, of each candidate the worse speedup counts.

Errors are measured on the caller's own operands, and no backend is asked for what it cannot run at the caller's own m.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._measurement import BASELINE
from dispatch._problem import Problem
from dispatch.frameworks.operands import array_of
from dispatch.measuring.buckets import bucket
from dispatch.measuring.latency import Timing
from dispatch.measuring.session import Entrant, Operands, Table, Timings, measure

if TYPE_CHECKING:
    from dispatch.frameworks import Framework
    from dispatch.policies.policy import Policy


def at_ends(
    room: Framework,
    problem: Problem,
    operands: Operands,
    entrants: Callable[[Problem], Sequence[Entrant]],
    policy: Policy,
    table: Table,
) -> None:
    """Fill `table.timings` with the worse of both ends of the problem's bucket, and say what failed there.

    operands: in canonical shapes; a is replaced by random values. entrants: gives the candidates that can run at an
    end. A candidate that can run at neither is not timed here, and nothing is where one m has a bucket of its own.
    """
    first, last = bucket(problem)
    if first == last:
        return
    ends: list[Timings] = []
    for m in (first, last):
        asked, there = replace(problem, m=m), Table()
        measure(room, asked, entrants(asked), _of_height(room, m, operands), policy, there)
        table.faults |= there.faults
        table.out_of_memory |= there.out_of_memory
        table.postponed += there.postponed
        ends.append(there.timings)
    table.timings = worse(*ends)


def worse(first: Timings, last: Timings) -> Timings:
    """Return the baseline's timing at the last m, and of each candidate the worse speedup, as a latency there.

    So latencies of candidates compare with one another, whichever end each is worse at.
    """
    base = last[BASELINE]
    found = {BASELINE: replace(base, settled=base.settled and first[BASELINE].settled)}
    for candidate in dict.fromkeys((*first, *last)):
        if candidate != BASELINE:
            timings = [ends[candidate] for ends in (first, last) if candidate in ends]
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
