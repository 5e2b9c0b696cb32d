"""What the guard is told of operands that a plan quantizes: errors of a sample of rows, by whoever quantizes them.

A row's ratio is the sum of the squares of its rounding errors over that of its values, both in units of its scale. The
relative error of an output row is about sqrt(ratio of its row of a + mean ratio of b), where errors are independent.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch._recipe import FORMATS, ScalingRecipe
from dispatch.frameworks import framework_of

if TYPE_CHECKING:
    from dispatch._decision import Decision
    from dispatch.policies.policy import Policy

SAMPLE = 16
"""One row of so many is looked at in a JAX program, in which calls are not counted."""
TURNS = 13
"""Where the host looks, one row of so many; the next one in the next call, so all within as many calls. Operands of one
shape may take turns, as the layers of a model do: a prime sees all rows of each, unless their number is a
multiple of it."""
LEARNT = 1664
"""Calls from which it is learnt what is usual: all rows of up to 128 operands that take turns, unless their number is a
multiple of TURNS."""
BAND = 4.0
"""How many times the largest ratio seen while learning, and the least one's reciprocal, is still usual."""
SPREAD = 16.0
"""How many times the least ratio seen while learning the largest may be for the band to have a lower end."""
BANDED = 64
"""Least k for a band: ratios of shorter rows scatter by more than it allows."""
NEVER = 1e30
"""A limit that no finite ratio reaches."""

Hear = Callable[[float, float], None]
Trip = Sequence[float]
"""(0, 0) until a ratio leaves its band: then (1, ratio) above it, (-1, ratio) below. Reading it waits for nothing."""


class Watch:
    """The guard's ear in one plan: what each operand may be off by, and where to say that it is.

    limit: of a row's ratio in a. band: the factor around what is usual. report: told once what has tripped.
    """

    def __init__(self, limit: float, band: float = BAND) -> None:
        self.limit, self.band = limit, band
        self.trips: list[tuple[str, Trip]] = []
        self.report: Callable[[str], None] | None = None

    def listen(self, side: str, trip: Trip) -> None:
        """Look at `trip` before each call from now on. side: `a` or `b`."""
        self.trips.append((side, trip))

    def bounds(self, side: str, recipe: ScalingRecipe, k: int) -> tuple[float, float, float]:
        """Return the limit of a row's ratio, the factor of the band, and the ratio that rounding alone can reach.

        Of b there is no limit: by rows of the output a column that is all wrong counts by what it adds to the row.
        """
        limit = self.limit if side == "a" else NEVER
        return (limit, NEVER, NEVER) if k < BANDED else (limit, self.band, _rounding(recipe))

    def by_rows(self, side: str, recipe: ScalingRecipe, k: int) -> Callable[[Any, Any], None]:
        """Return look(x, decoded), which does by the framework's own operations what a quantizing kernel would.

        x: the operand, (..., m, k) or (..., k, n); decoded: what it decodes to after quantizing, of the same shape. The
        sampled rows go to the host: on a GPU that waits for it. In a JAX program two numbers go there as it runs.
        """
        rows = _Rows(self.bounds(side, recipe, k))
        self.listen(side, rows.trip)

        def look(x: Any, decoded: Any) -> None:
            room: Any = framework_of(x)
            if "traced" in room.modes(x, decoded):
                room.tell([(self._hearing(rows), x, decoded, -1 if side == "a" else -2)])
            else:
                rows.look(*(y if side == "a" else y.swapaxes(-1, -2) for y in (x, decoded)))

        return look

    def by_ratios(self, side: str, recipe: ScalingRecipe, k: int) -> Hear:
        """Return hear(most, least), to be called with the ratios of a call's sampled rows: their largest and least.

        A row with what is not finite has Inf. Exact rows, and those of zeros, are none of the least: 0 and Inf where
        all are such.
        """
        rows = _Rows(self.bounds(side, recipe, k))
        self.listen(side, rows.trip)
        return self._hearing(rows)

    def _hearing(self, rows: _Rows) -> Hear:
        def hear(most: float, least: float) -> None:
            rows.hear(most, least)
            self.tripped()  # a program that runs by itself asks for nothing

        return hear

    def tripped(self) -> bool:
        """Return whether something has left its band, and report it the first time.

        It costs reading one number of the host for each operand.
        """
        for side, trip in self.trips:
            if trip[0]:
                than = "more than usual or allowed" if trip[0] > 0 else "less than usual"
                report, self.report = self.report, None
                if report is not None:
                    report(f"a row of {side} is off by {trip[1] ** 0.5:.2g} of itself, {than}")
                return True
        return False

    @property
    def finite(self) -> bool:
        """Whether what has tripped, if anything has, was a finite ratio."""
        return all(np.isfinite(trip[1]) for _, trip in self.trips)


class _Rows:
    """Ratios of one operand's rows, sampled on the host."""

    def __init__(self, bounds: tuple[float, float, float]) -> None:
        self.limit, self.band, self.rounding = bounds
        self.trip = [0.0, 0.0]
        self._calls = itertools.count()
        self._most, self._least = 0.0, np.inf

    def look(self, x: Any, decoded: Any) -> None:
        call = next(self._calls)
        room = framework_of(x)
        assert room is not None
        sampled = (y[..., call % TURNS :: TURNS, :] for y in (x, decoded))
        values, found = (room.to_numpy(room.cast(y, "float32")).astype(np.float64) for y in sampled)
        with np.errstate(all="ignore"):
            squares, errors = np.square(values).sum(-1).ravel(), np.square(values - found).sum(-1).ravel()
            ratios = np.where(squares == 0.0, np.where(errors == 0.0, np.nan, np.inf), errors / squares)
        wild = ~(np.isfinite(squares) & np.isfinite(errors))
        known = ratios[~wild & ~np.isnan(ratios)]
        most = np.inf if wild.any() else known.max(initial=0.0)
        self._judge(call, float(most), float(known[known > 0.0].min(initial=np.inf)))

    def hear(self, most: float, least: float) -> None:
        self._judge(next(self._calls), most, least)

    def _judge(self, call: int, most: float, least: float) -> None:
        limit, floor = self.limit, 0.0
        if call < LEARNT:
            self._most, self._least = max(self._most, most), min(self._least, least)
        else:
            limit = min(limit, max(self.band * self._most, self.rounding))
            floor = self._least / self.band if self._most <= SPREAD * self._least < np.inf else 0.0
        if most > limit or least < floor:
            self.trip[1] = most if most > limit else least
            self.trip[0] = 1.0 if most > limit else -1.0


def _rounding(recipe: ScalingRecipe) -> float:
    """Return the ratio of values that are all as far as can be from what they round to, with a tenth for scales."""
    import ml_dtypes  # noqa: PLC0415 - only where something is quantized

    mantissa: int = ml_dtypes.finfo(FORMATS[recipe.dtype]).nmant
    return float(1.1 * 4.0 ** -(mantissa + 1))


def watch_of(decision: Decision, policy: Policy, trips: int) -> Watch:
    """Return a watch for a decision: a row of a may be off by what the tolerance leaves beside b's share.

    trips: of this problem before; each makes the band wider by its own factor.
    """
    squared = policy.error.tolerance * (2.0 if policy.error.metric == "similarity_loss" else policy.error.tolerance)
    found = decision.measurement
    seen = found.error.relative_l2**2 if found is not None and found.error is not None else 0.0
    seen = seen if np.isfinite(seen) else 0.0
    allowed = max(squared, 1.25 * seen)  # what was measured was taken
    return Watch(allowed - seen / 2, BAND ** (1 + min(trips, 8)))


telling: ContextVar[bool] = ContextVar("dispatch_telling", default=False)
"""Whether a JAX program is being lowered that can call the host as it runs."""
_watch: ContextVar[Watch | None] = ContextVar("dispatch_watch", default=None)


def watch() -> Watch | None:
    """Return the watch of the plan that is being made, or None where the guard wants none.

    For a backend's plan(): one that quantizes may then sum the errors of rows and say so by `listen`.
    """
    return _watch.get()


@contextmanager
def watching(wanted: Watch | None) -> Iterator[None]:
    """Make `watch` return `wanted` inside."""
    token = _watch.set(wanted)
    try:
        yield
    finally:
        _watch.reset(token)
