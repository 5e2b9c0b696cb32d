"""How fast: interleaved rounds of the baseline and the candidates, and what they say about each gate."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dispatch.frameworks import Framework  # noqa: F401
    from dispatch.frameworks._base import Stopwatch

LEAST_ROUNDS = 10
BUDGET_ROUNDS = 3  # no budget goes below: one sample decides nothing
LEAST_S = 0.05
UNDECIDED_S = 1.0  # as long as the least and the median of the rounds disagree about a gate
DEVICE_ROUNDS = 20
FAR = 5.0  # times beyond its gate: a candidate there needs fewer runs
LONG_RUN_US = 1e5  # of the baseline: one such run is enough for a candidate that is FAR beyond
FAR_RUNS = 5


@dataclass(frozen=True, slots=True)
class Timing:
    """The latency of one call and its ratio to the first call's; see dispatch.Measurement."""

    latency_us: float
    median_us: float
    spread_us: float
    rounds: int
    speedup: float
    settled: bool


def measure_latency(stopwatch: Stopwatch, gates: Sequence[float], budget_ms: float) -> list[Timing]:
    """Return a timing for each call of `stopwatch`; call 0 is the baseline.

    gates[i]: the speedup that call i has to reach. Rounds run every call once, in alternating order. On a device there
    are DEVICE_ROUNDS of them and medians decide; on a CPU at least LEAST_ROUNDS and LEAST_S, and minima decide: where
    minimum and median disagree about a gate there are rounds for UNDECIDED_S, and a call that is still undecided is
    not settled; nor is one on a device whose gate lies in the middle half of its rounds. `budget_ms` ends the rounds
    early.
    """
    stopwatch.prepare()
    session = _Session(stopwatch, gates)
    end = time.perf_counter() + budget_ms / 1e3
    session.run_round()
    if not stopwatch.device_time and session.samples[0][0] >= LONG_RUN_US:
        session.run_candidates(FAR_RUNS - 1, end)
    while not session.done() and (time.perf_counter() < end or len(session.samples[0]) < BUDGET_ROUNDS):
        session.run_round()
    return [session.timing(index) for index in range(len(gates))]


class _Session:
    def __init__(self, stopwatch: Stopwatch, gates: Sequence[float]) -> None:
        self.stopwatch = stopwatch
        self.gates = gates
        self.samples: list[list[float]] = [[] for _ in gates]
        self.start = time.perf_counter()
        self.forward = True

    def run_round(self) -> None:
        """Time every call once."""
        order = list(range(len(self.gates)))
        self._run(order if self.forward else order[::-1])
        self.forward = not self.forward

    def run_candidates(self, times: int, end: float) -> None:
        """Time every call but the baseline `times` times; after `end` only those that take next to nothing."""
        base = self.samples[0][0]
        for _ in range(times):
            quick = [
                i for i in range(1, len(self.gates)) if self.samples[i][0] * FAR <= base or time.perf_counter() < end
            ]
            self._run(quick)

    def _run(self, order: Sequence[int]) -> None:
        for index, spent in zip(order, self.stopwatch.round(order), strict=True):
            self.samples[index].append(spent)

    def done(self) -> bool:
        """Return whether the rounds so far are enough."""
        rounds = len(self.samples[0])
        if self.stopwatch.device_time:
            return rounds >= DEVICE_ROUNDS
        if self.samples[0][0] >= LONG_RUN_US and all(map(self._far, range(1, len(self.gates)))):
            return True
        elapsed = time.perf_counter() - self.start
        if rounds < LEAST_ROUNDS or elapsed < LEAST_S:
            return False
        return elapsed >= UNDECIDED_S or all(self._agreed(index) for index in range(1, len(self.gates)))

    def _far(self, index: int) -> bool:
        ratio = min(self.samples[0]) / min(self.samples[index])
        many = len(self.samples[index]) >= FAR_RUNS
        return many and (ratio >= FAR * self.gates[index] or ratio * FAR <= self.gates[index])

    def _agreed(self, index: int) -> bool:
        """Return whether minimum and median, on a device the middle half of the rounds, say the same of the gate."""
        base, own, gate = self.samples[0], self.samples[index], self.gates[index]
        if self.stopwatch.device_time:
            low, high = np.percentile(np.divide(base, own), [25, 75])
            return bool((low >= gate) == (high >= gate))
        return (min(base) / min(own) >= gate) == (np.median(base) / np.median(own) >= gate)

    def timing(self, index: int) -> Timing:
        """Return what the rounds say of one call."""
        own, base = np.array(self.samples[index]), np.array(self.samples[0])
        low, median, high = np.percentile(own, [25, 50, 75])
        least = own.min()
        if self.stopwatch.device_time:
            latency, spread, speedup = median, high - low, np.median(base) / median
        else:
            latency, spread, speedup = least, low - least, base.min() / least
        settled = index == 0 or self._agreed(index)
        return Timing(float(latency), float(median), float(spread), len(own), float(speedup), bool(settled))
