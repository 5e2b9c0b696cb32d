"""What authors of plugins use: check() passes a right backend, and says of a wrong one what is wrong with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import Capability, Operand, Problem, RecipePair, Rejection
from dispatch.testing import FakeBackend, check, operands, problems

SQUARE = Problem(
    8, 8, 8, Operand("float32"), Operand("float32"), "float32", "numpy", dispatch.machine()["archs"]["numpy"][0]
)


def right(a: Any, b: Any, bias: Any = None) -> Any:
    return a @ b


def writes(side: int) -> Callable[..., Any]:
    def product(*given: Any) -> Any:
        out = given[0] @ given[1]
        given[side][0, 0] += 1.0
        return out

    return product


def drifting() -> Callable[..., Any]:
    calls = itertools.count()
    return lambda a, b, bias=None: (a @ b) * np.float32(1.0 + 1e-6 * next(calls))


WRONG = {
    "shape": (lambda a, b, bias=None: (a @ b)[:-1], r"shape \(7, 8\)"),
    "dtype": (lambda a, b, bias=None: (a @ b).astype(np.float64), "dtype float64"),
    "writes to a": (writes(0), "an input was written to"),
    "writes to b": (writes(1), "an input was written to"),
    "differs": (drifting(), "differs from run to run"),
    "values": (lambda a, b, bias=None: a @ b * np.float32(1.001), r"relative error 0\.001, at most 1e-05"),
    "nan": (lambda a, b, bias=None: a @ b * np.float32(np.nan), "relative error nan"),
}


def test_passes_what_is_right() -> None:
    check(FakeBackend("fine", right), SQUARE)


@pytest.mark.parametrize("fault", WRONG)
def test_says_what_is_wrong(fault: str) -> None:
    product, said = WRONG[fault]
    with pytest.raises(AssertionError, match=said):
        check(FakeBackend("wrong", product), SQUARE)


def test_says_that_a_result_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(dispatch.framework("numpy")), "device", lambda self, array: "elsewhere")
    with pytest.raises(AssertionError, match="device elsewhere"):
        check(FakeBackend("lost", right), SQUARE)


def test_checks_the_epilogue() -> None:
    fused = Problem(8, 8, 8, SQUARE.a, SQUARE.b, "float32", "numpy", SQUARE.arch, bias="float32", activation="relu")
    check(FakeBackend("fine", lambda a, b, bias: np.maximum(a @ b + bias, 0.0)), fused)
    for product in (lambda a, b, bias: np.maximum(a @ b, 0.0), lambda a, b, bias: a @ b + bias):
        with pytest.raises(AssertionError, match="relative error"):
            check(FakeBackend("wrong", product), fused)


def test_a_recipe_may_lose_what_its_rounding_costs_and_no_more() -> None:
    scaled = SQUARE.proposing(RecipePair.parse("e4m3:row"))
    check(FakeBackend("fine", lambda a, b, bias=None: a @ b * np.float32(1.05)), scaled)
    with pytest.raises(AssertionError, match=r"at most 0\.06"):
        check(FakeBackend("wrong", lambda a, b, bias=None: a @ b * np.float32(1.07)), scaled)


def test_draws_only_what_a_backend_declares_and_does_not_reject() -> None:
    class Even(FakeBackend):
        def rejections(self, problem: Problem) -> list[Rejection]:
            return [] if problem.m % 4 == 0 else [Rejection("m", str(problem.m), "a multiple of 4")]

    backend = Even("even")
    backend.capabilities = (
        Capability(("numpy",), ("cpu-*",), ("float32",), ("float32",), multiple_of=(2, 1, 8), activations=()),
    )
    drawn = problems(backend)
    assert drawn
    assert all(p.m % 4 == 0 and p.k % 8 == 0 and p.framework == "numpy" and p.activation is None for p in drawn)
    assert {p.bias for p in drawn} == {None, "float32"}


def test_operands_lie_as_the_problem_says_and_follow_the_seed() -> None:
    problem = Problem(4, 6, 8, Operand("float32"), Operand("float32", (), "col"), "float32", "numpy", SQUARE.arch)
    a, b, bias = operands(problem)
    assert (a.shape, b.shape, bias) == ((4, 8), (8, 6), None)
    assert b.strides[0] == b.itemsize
    again, other = operands(problem), operands(problem, seed=5)
    np.testing.assert_array_equal(a, again[0])
    assert (a != other[0]).any()
    assert (a[:, :6] != b[:4]).any()  # two streams of random values
