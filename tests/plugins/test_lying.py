"""Operands that a JAX program transposes for a product alone are quantized from where they lie."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from dispatch.plugins._fp8 import lying

import dispatch
from dispatch import Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax", reason="JAX is not installed")
jnp = jax.numpy


class Looking(FakeBackend):
    """A backend that quantizes, if its recipe is to be believed; it keeps where the operands of each op lay."""

    def __init__(self) -> None:
        super().__init__("looking", recipes=("e4m3:row",))
        self.seen: dict[str, tuple[int, int]] = {}

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the own product."""
        own = dispatch.native(problem)

        def product(a: Any, b: Any, *bias: Any) -> Any:
            (left, of_a), (right, of_b) = lying(a, -1), lying(b, -2)
            assert left.shape == (a.shape if of_a == -1 else a.shape[::-1])
            assert right.shape == (b.shape if of_b == -2 else b.shape[::-1])
            self.seen[problem.op] = (of_a, of_b)
            return own(a, b, *bias)

        return product


@pytest.fixture
def looking() -> Iterator[Looking]:
    backend = Looking()
    with registered(backend), fake_timings({"looking": 1.0, "baseline": 100.0}):
        yield backend


def test_an_array_lies_as_it_is() -> None:
    x = jnp.ones((3, 4))
    assert [lying(x, axis)[1] for axis in (-1, -2)] == [-1, -2]
    assert lying(x.T, -2)[1] == -2


def test_a_transposed_matrix_is_seen_in_a_trace() -> None:
    seen = []

    def look(w: Any, batch: Any) -> Any:
        seen.extend([lying(w, -2)[1], lying(w.T, -2)[1], lying(w.T, -1)[1], lying(jnp.swapaxes(w, 0, 1), -2)[1]])
        seen.extend([lying(batch.mT, -2)[1], lying(w.T + 1, -2)[1], lying(w.T.T, -2)[1]])
        assert lying(w.T, -2)[0] is w
        return w

    jax.jit(look).trace(jnp.ones((3, 4)), jnp.ones((2, 3, 4)))
    assert seen == [-2, -1, -2, -1, -2, -2, -1]


def test_the_operands_of_gradients_lie_transposed(looking: Looking) -> None:
    a, w = jnp.ones((8, 16), "bfloat16"), jnp.ones((16, 32), "bfloat16")

    def loss(a: Any, w: Any) -> Any:
        return (dispatch.matmul(a, w).astype("float32") ** 2).sum()

    found = jax.jit(jax.grad(loss, (0, 1)))(a, w)
    wanted = jax.jit(jax.grad(lambda a, w: ((a @ w).astype("float32") ** 2).sum(), (0, 1)))(a, w)
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(x, y)
    assert looking.seen["matmul"] == (-1, -2)
    assert looking.seen["dgrad"] == (-1, -1), "w is K-major for the gradient of a"
    assert looking.seen["wgrad"] == (-2, -2), "a is transposed for the gradient of w"


def test_a_transposed_weight_is_contracted_as_it_lies(looking: Looking) -> None:
    a, w = jnp.ones((2, 8, 16), "bfloat16"), jnp.ones((32, 16), "bfloat16")
    for x in (a, a[0]):
        found = jax.jit(lambda a, w: dispatch.matmul(a, w.T))(x, w)
        np.testing.assert_array_equal(found, x @ w.T)
        assert looking.seen.pop("matmul") == (-1, -1)

    def loss(product: Any) -> Any:
        return jax.grad(jax.jit(lambda a, w: (product(a, w.T).astype("float32") ** 2).sum()), (0, 1))

    for x, y in zip(loss(dispatch.matmul)(a, w), loss(jnp.matmul)(a, w), strict=True):
        np.testing.assert_array_equal(x, y)
