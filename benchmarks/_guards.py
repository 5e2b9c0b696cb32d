"""What both benchmarks of the guard share: a backend for a trial on a CPU, and the interval of what something adds."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import dispatch
from dispatch.testing import FakeBackend


class Emulated(FakeBackend):
    """Products of what the reference quantizer makes, which tells the guard what it made: for a CPU."""

    def plan(self, problem: dispatch.Problem, config: str | None = None) -> dispatch.Plan:
        """Return the product."""
        pair, watch, room = problem.recipe, dispatch.watch(), dispatch.framework(problem.framework)
        assert pair is not None
        sides = (("a", pair.a, -1), ("b", pair.b, -2))
        looks = {side: watch.by_rows(side, recipe, problem.k) for side, recipe, _ in sides} if watch else {}

        def product(a: Any, b: Any, bias: Any = None) -> Any:
            decoded = {}
            for (side, recipe, axis), x in zip(sides, (a, b), strict=True):
                decoded[side] = dispatch.quantize(x, recipe, axis=axis).dequantize("float32")
                if side in looks:
                    looks[side](x, decoded[side])
            return room.cast(decoded["a"] @ decoded["b"], problem.out_dtype)

        return product


def interval(off: Sequence[float], on: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean of on / off - 1 over pairs, and its 95% interval."""
    ratios = [y / x - 1 for x, y in zip(off, on, strict=True)]
    mean, half = statistics.mean(ratios), 1.96 * statistics.stdev(ratios) / len(ratios) ** 0.5
    return mean, mean - half, mean + half
