"""Two ways to serve every product of a test: the framework's own, and a fake backend that wins each choice."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest

import dispatch
from dispatch import Plan, Problem, Rejection
from dispatch.testing import FakeBackend, fake_timings, registered


class Winner(FakeBackend):
    """Serves floats and integers by the framework's own product, and keeps a record.

    calls: how often its plans ran. faults: operands that a plan was given but must not be.
    """

    def __init__(self) -> None:
        super().__init__("winner")
        self.calls = 0
        self.problems: list[Problem] = []
        self.faults: list[str] = []

    def rejections(self, problem: Problem) -> list[Rejection]:
        """Return why not: complex and bool are the framework's own business."""
        odd = {problem.a.dtype, problem.b.dtype} & {"bool", "complex32", "complex64", "complex128"}
        return [Rejection("dtype", dtype, "a float or an integer") for dtype in sorted(odd)]

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the own product, checking that it gets what the protocol promises."""
        own = dispatch.native(problem)
        shapes = ((*problem.a.batch, problem.m, problem.k), (*problem.b.batch, problem.k, problem.n))

        def product(a: Any, b: Any, *bias: Any) -> Any:
            self.calls += 1
            self.problems.append(problem)
            if tuple(map(tuple, (a.shape, b.shape))) != shapes or bool(bias) != bool(problem.bias):
                self.faults.append(f"{problem}: was given {a.shape} {b.shape} {[x.shape for x in bias]}")
            return own(a, b, *bias)

        return product


class Failing(FakeBackend):
    """Serves by the framework's own product, and raises what `errors` has for a problem's op."""

    def __init__(self) -> None:
        super().__init__("failing")
        self.errors: dict[str, BaseException] = {}

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the own product, or what raises in its place."""
        own = dispatch.native(problem)

        def product(*operands: Any) -> Any:
            if problem.op in self.errors:
                raise self.errors[problem.op]
            return own(*operands)

        return product


@contextmanager
def winning() -> Iterator[Winner]:
    """Let a fake backend win every choice by fake clocks."""
    backend = Winner()
    with registered(backend), fake_timings({"winner": 1.0, "baseline": 100.0}):
        yield backend
        assert "winner" not in dispatch.stats()["quarantined"], dispatch.stats()["quarantined"]
    assert backend.faults == []


@contextmanager
def untuned() -> Iterator[None]:
    """Measure nothing: the framework's own product serves."""
    with dispatch.use_policy(tuning={"mode": "off"}):
        yield


@pytest.fixture(params=["native", "winner"])
def serving(request: pytest.FixtureRequest) -> Callable[[], AbstractContextManager[Winner | None]]:
    """A context in which the framework's own product serves (and gives None), or a backend that wins."""
    return untuned if request.param == "native" else winning


@pytest.fixture
def winner() -> Iterator[Winner]:
    """A backend that wins every choice."""
    with winning() as backend:
        yield backend


@pytest.fixture
def failing() -> Iterator[Failing]:
    """A backend that wins every choice until it is told to fail."""
    backend = Failing()
    with registered(backend), fake_timings({"failing": 1.0, "baseline": 100.0}):
        yield backend


@pytest.fixture
def ways() -> dict[str, AbstractContextManager[Any]]:
    """The same contexts by name."""
    return {"native": untuned(), "winner": winning()}
