"""Backends and clocks that do what a test says."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import dispatch
from dispatch import ACTIVATIONS, FP8_DTYPES, Backend, Capability, Plan, Problem, RecipePair, Rejection, ScalingRecipe

FLOATS = ("float64", "float32", "float16", "bfloat16", *FP8_DTYPES)


class FakeBackend:
    """A backend whose plan is `product`, a callable (a, b, bias=None); by default the framework's own product.

    recipes: what it claims to run; (None,) is unscaled. rejects: what it says of every problem.
    """

    def __init__(
        self,
        name: str,
        product: Callable[..., Any] | None = None,
        *,
        recipes: Sequence[str | None] = (None,),
        rejects: Sequence[Rejection] = (),
        on_plan: Callable[[Problem], None] | None = None,
    ) -> None:
        self.name = name
        self.product = product
        self.rejects = tuple(rejects)
        self.on_plan = on_plan
        self.capabilities = (
            Capability(
                frameworks=("numpy", "torch", "jax"),
                archs=("*",),
                dtypes=FLOATS,
                out_dtypes=FLOATS,
                recipes=tuple(None if x is None else RecipePair.parse(x) for x in recipes),
                activations=ACTIVATIONS,
            ),
        )

    def rejections(self, problem: Problem) -> Sequence[Rejection]:
        """Return what the test said."""
        return self.rejects

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return the operand."""
        return operand

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product that the test gave."""
        if self.on_plan is not None:
            self.on_plan(problem)
        if self.product is None:
            own = dispatch.native(problem)
            return lambda *operands: own(*operands)
        return self.product


@contextmanager
def registered(*backends: Backend, distribution: str = "tests") -> Iterator[None]:
    """Register backends for the time of a `with` block, as if `distribution` had brought them."""
    for backend in backends:
        dispatch.register(backend, distribution=distribution)
    try:
        yield
    finally:
        for backend in backends:
            dispatch.unregister(backend.name, distribution=distribution)


@contextmanager
def fake_timings(latency_us: Mapping[str, float] | Callable[[str], float], device_time: bool = False) -> Iterator[None]:
    """Replace every clock: `latency_us` gives what a run of a candidate takes, by its text or its backend's name.

    `baseline` is the framework's own product. The products still run once, for their error.
    """
    give = latency_us if callable(latency_us) else _lookup(latency_us)
    rooms = [dispatch.framework(name) for name in dispatch.installed()]

    def stopwatch(calls: Sequence[Any], memory_bytes: int) -> _FakeStopwatch:
        return _FakeStopwatch([call.__name__ for call, _ in calls], give, device_time)

    with ExitStack() as stack:
        for room in rooms:
            stack.enter_context(patch.object(room, "stopwatch", stopwatch))
        yield


def _lookup(latency_us: Mapping[str, float]) -> Callable[[str], float]:
    def give(name: str) -> float:
        return latency_us.get(name, latency_us.get(name.split("/")[0], latency_us.get("baseline", 10.0)))

    return give


class _FakeStopwatch:
    def __init__(self, names: list[str], give: Callable[[str], float], device_time: bool) -> None:
        self.names, self.give, self.device_time = names, give, device_time

    def prepare(self) -> None:
        """Do nothing."""

    def round(self, order: Sequence[int]) -> list[float]:
        """Return what the test says of each."""
        return [self.give(self.names[index]) for index in order]
