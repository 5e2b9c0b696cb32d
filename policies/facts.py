"""The parts of a policy: its sections, and which products a rule is for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

from dispatch._problem import Problem
from dispatch._recipe import RecipePair


@dataclass(frozen=True, slots=True)
class Gate:
    """The least speedup of a candidate that loses accuracy, and of one that does not."""

    min_speedup: float
    min_speedup_lossless: float


@dataclass(frozen=True, slots=True)
class ErrorGate:
    """The largest error by `metric`; traced: whether one on `random` operands counts, or only on `calibrated` data."""

    metric: str
    tolerance: float
    traced: str


@dataclass(frozen=True, slots=True)
class Recipes:
    """The lossy candidates: their recipes, in order of preference, the dtypes they are for, accumulation modes."""

    allow: tuple[RecipePair, ...]
    inputs: tuple[str, ...]
    accumulation: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Whether an unknown problem is measured (`measure`, `off`, `locked`), and within which limits."""

    mode: str
    budget_ms: float
    compile_ms: float
    memory_mb: int


@dataclass(frozen=True, slots=True)
class Guard:
    """How outputs are watched after tuning.

    mode: `off`; `async`: quantizers sum the rounding errors of a sample of rows, and nothing waits for that; `strict`:
    each is probed before it is returned. probe_every: with the other two, only every so many of a known call's; 0 for
    none. cool_down_s: how long the framework's own product serves after a trip, before the problem is measured again.
    traced: `callback`: JAX programs sum the rounding errors too, and tell them to the host as they run; `off`: not.
    """

    mode: str
    probe_every: int
    cool_down_s: float
    traced: str


@dataclass(frozen=True, slots=True)
class Fallback:
    """The backends that serve, the first able one, where nothing was fast enough or accurate enough."""

    too_slow: tuple[str, ...]
    too_wrong: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Backends:
    """The backends that may be candidates, as globs: allowed and not denied."""

    allow: tuple[str, ...]
    deny: tuple[str, ...]

    def permits(self, name: str) -> bool:
        """Return whether the backend of that name may be a candidate."""
        return any_glob(name, self.allow) and not any_glob(name, self.deny)


@dataclass(frozen=True, slots=True)
class Range:
    """Whole numbers from `least` to `most`, both included; None for no upper end."""

    least: int = 0
    most: int | None = None

    def __contains__(self, value: int) -> bool:
        return self.least <= value and (self.most is None or value <= self.most)


@dataclass(frozen=True, slots=True)
class Match:
    """Which problems a rule is for: all that is stated must hold; None states nothing."""

    op: tuple[str, ...] | None = None
    scope: tuple[str, ...] | None = None
    m: Range | None = None
    n: Range | None = None
    k: Range | None = None
    dtype: tuple[str, ...] | None = None
    arch: tuple[str, ...] | None = None
    framework: tuple[str, ...] | None = None

    def covers(self, problem: Problem, scope: str | None) -> bool:
        """Return whether the rule is for `problem` in `scope`; no scope counts as an empty one."""
        named = ((problem.op, self.op), (scope or "", self.scope), (problem.arch, self.arch))
        sizes = ((problem.m, self.m), (problem.n, self.n), (problem.k, self.k))
        return (
            all(globs is None or any_glob(name, globs) for name, globs in named)
            and all(sizes is None or size in sizes for size, sizes in sizes)
            and (self.dtype is None or problem.a.dtype in self.dtype or problem.b.dtype in self.dtype)
            and (self.framework is None or problem.framework in self.framework)
        )


@dataclass(frozen=True, slots=True)
class Rule:
    """One entry in a policy: overrides, as (dotted key, value), for what it matches; origin: where it was stated."""

    match: Match
    overrides: tuple[tuple[str, Any], ...]
    origin: str


SECTIONS: Final[dict[str, type]] = {
    "gate": Gate,
    "error": ErrorGate,
    "recipes": Recipes,
    "tuning": Tuning,
    "guard": Guard,
    "fallback": Fallback,
    "backends": Backends,
}
"""The sections of a policy file, by name."""


def any_glob(name: str, globs: Iterable[str]) -> bool:
    """Return whether `name` matches one of `globs`, capitals told apart."""
    return any(fnmatchcase(name, glob) for glob in globs)
