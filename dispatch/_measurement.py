"""Measured facts: how fast and how wrong one candidate is on one problem."""

from __future__ import annotations

from dataclasses import dataclass

from dispatch._recipe import RecipePair

METRICS = ("similarity_loss", "relative_l2", "max_abs_over_scale")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A backend with one scaling recipe pair, one accumulation mode and, when autotuned, one kernel config."""

    backend: str
    recipe: RecipePair | None = None
    accumulation: str | None = None
    config: str | None = None

    @property
    def scaled(self) -> bool:
        """Whether it quantizes, and so may lose accuracy."""
        return self.recipe is not None

    def __str__(self) -> str:
        parts = (self.backend, self.recipe, self.accumulation, self.config)
        return "/".join(str(part) for part in parts if part is not None)


BASELINE = Candidate("baseline")
"""The framework's own matmul on the caller's unquantized arrays: what every candidate is measured against."""
FRAMEWORKS_OWN = (BASELINE.backend, "bf16_fallback")  # what they raise is the framework's own error


@dataclass(frozen=True, slots=True)
class Error:
    """The worst sampled row's error by each metric (docs/accuracy.md); 0 is exact. `rows`: how many were sampled."""

    similarity_loss: float
    relative_l2: float
    max_abs_over_scale: float
    rows: int = 0

    def value(self, metric: str) -> float:
        """Return the error by `metric`, one of METRICS."""
        return float(getattr(self, metric))


@dataclass(frozen=True, slots=True)
class Measurement:
    """Latency and error of one candidate on one problem.

    latency_us: device time of one call, everything included: the least of the rounds on a CPU, their median on a GPU.
    median_us, spread_us: the median and the interquartile range of the rounds. speedup: baseline / candidate, from
    rounds interleaved with the baseline's. error_data: what the error was measured on, `caller`, `calibration` or
    `random`. settled: False where least and median disagree about a gate: a tie, never stored. rounding: of the
    baseline alone, the error of the exact product rounded to out_dtype.
    """

    latency_us: float
    median_us: float
    spread_us: float
    rounds: int
    speedup: float
    error: Error | None = None
    error_data: str | None = None
    settled: bool = True
    rounding: Error | None = None
