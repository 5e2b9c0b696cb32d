"""What the integrations' tests share: a backend that really quantizes, and the judgement of trained losses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

import dispatch
from dispatch import Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered


class Quantizing(FakeBackend):
    """Multiplies what the reference quantizer leaves of both operands, and keeps the problems it served."""

    def __init__(self, recipe: str = "e4m3:row") -> None:
        super().__init__("quantizing", recipes=(recipe,))
        self.problems: list[Problem] = []

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product of quantized operands."""
        own, recipe = dispatch.native(problem), problem.recipe
        assert recipe is not None

        def product(a: Any, b: Any, *bias: Any) -> Any:
            self.problems.append(problem)
            x = dispatch.quantize(a, recipe.a, axis=-1).dequantize()
            y = dispatch.quantize(b, recipe.b, axis=-2).dequantize()
            return own(x, y, *bias)

        return product


@pytest.fixture
def quantizing() -> Iterator[Quantizing]:
    """A backend that quantizes to e4m3 with a scale a row, and wins every choice."""
    backend = Quantizing()
    policy = dispatch.use_policy(recipes={"inputs": ["float32"]}, error={"tolerance": 0.02})
    with registered(backend), fake_timings({"quantizing": 1.0, "baseline": 100.0}), policy:
        yield backend
    assert "quantizing" not in dispatch.stats()["quarantined"]


@pytest.fixture
def judged(quantizing: Quantizing) -> Callable[[Callable[[bool, int], tuple[float, float]]], None]:
    """Check a training, loss(dispatched, seed) -> (before, after): quantized, it ends where another seed would."""

    def judge(loss: Callable[[bool, int], tuple[float, float]]) -> None:
        before, own = loss(False, 0)
        assert not quantizing.problems
        start, found = loss(True, 0)
        assert {x.op for x in quantizing.problems} == {"matmul", "dgrad", "wgrad"}
        assert found != own
        assert abs(start - before) < 0.05 * before
        assert own < 0.9 * before
        assert abs(found - own) <= abs(loss(False, 1)[1] - own)

    return judge
