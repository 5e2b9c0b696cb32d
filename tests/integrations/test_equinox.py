"""Equinox models whose products are dispatched."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
equinox = pytest.importorskip("equinox")

from dispatch.integrations.equinox import Linear, convert  # noqa: E402

jnp = jax.numpy


class Watching(FakeBackend):
    """A backend that quantizes, if its recipe is to be believed; it keeps the problems it served."""

    def __init__(self) -> None:
        super().__init__("watching", recipes=("e4m3:row",))
        self.problems: list[Problem] = []

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the own product."""
        own = dispatch.native(problem)

        def product(*operands: Any) -> Any:
            self.problems.append(problem)
            return own(*operands)

        return product


@pytest.fixture
def watching() -> Iterator[Watching]:
    backend = Watching()
    policy = dispatch.use_policy(recipes={"inputs": ["float32"]})
    with registered(backend), fake_timings({"watching": 1.0, "baseline": 100.0}), policy:
        yield backend


class Block(equinox.Module):
    """Attention and MLP, each beside its input."""

    attention: equinox.nn.MultiheadAttention
    mlp: equinox.nn.MLP
    head: equinox.nn.Linear

    def __init__(self, key: Any) -> None:
        one, two, three = jax.random.split(key, 3)
        self.attention = equinox.nn.MultiheadAttention(2, 8, key=one)
        self.mlp = equinox.nn.MLP(8, 8, 24, 1, jax.nn.silu, key=two)
        self.head = equinox.nn.Linear(8, "scalar", key=three)

    def __call__(self, x: Any) -> Any:
        """Return one value a row of x (rows, 8)."""
        x = x + self.attention(x, x, x)
        return jax.vmap(self.head)(x + jax.vmap(self.mlp)(x))


def batch(seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(3, 4, 8)), "float32")


def loss(model: Any, x: Any) -> Any:
    return jnp.square(jax.vmap(model)(x) - 1).mean()


def close(found: Any, wanted: Any) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5), found, wanted)


def arrays(model: Any) -> Any:
    return jax.tree.leaves(equinox.filter(model, equinox.is_array))


def test_values_and_gradients_are_the_own(watching: Watching) -> None:
    plain = Block(jax.random.key(0))
    ours = convert(plain, scope="block")
    found = equinox.filter_jit(equinox.filter_value_and_grad(loss))(ours, batch())
    wanted = equinox.filter_jit(equinox.filter_value_and_grad(loss))(plain, batch())
    close([found[0], *arrays(found[1])], [wanted[0], *arrays(wanted[1])])
    assert {x.op for x in watching.problems} == {"matmul", "dgrad", "wgrad"}


def test_scopes_are_paths_and_arrays_the_same() -> None:
    plain = Block(jax.random.key(0))
    ours = convert(plain, scope="block", policy="strict")
    assert ours.attention.query_proj.scope == "block.attention.query_proj"
    assert ours.mlp.layers[0].scope == "block.mlp.layers.0"
    assert isinstance(ours.mlp.layers[1], Linear)
    assert ours.mlp.layers[1].policy == "strict"
    assert all(x is y for x, y in zip(arrays(ours), arrays(plain), strict=True))
    assert convert(ours).head.scope == "head"


def test_rows_of_a_vmap_are_one_problem(watching: Watching) -> None:
    layer = Linear(8, 24, key=jax.random.key(0), scope="up")
    found = jax.jit(jax.vmap(layer))(batch()[0])
    assert {(x.m, x.n, x.k, x.batch) for x in watching.problems} == {(4, 24, 8, ())}
    close(found, batch()[0] @ layer.weight.T + layer.bias)


def test_training_moves_the_loss_as_without() -> None:
    optax = pytest.importorskip("optax")

    def trained(model: Any) -> list[float]:
        optimizer, losses = optax.MultiSteps(optax.adam(0.01), 2), []
        state = optimizer.init(equinox.filter(model, equinox.is_array))

        @equinox.filter_jit
        def step(model: Any, state: Any, x: Any) -> Any:
            value, grads = equinox.filter_value_and_grad(loss)(model, x)
            updates, state = optimizer.update(grads, state)
            return value, equinox.apply_updates(model, updates), state

        for seed in range(6):
            value, model, state = step(model, state, batch(seed))
            losses.append(float(value))
        return losses

    plain = Block(jax.random.key(0))
    with dispatch.use_policy(tuning={"mode": "off"}):
        np.testing.assert_allclose(trained(convert(plain)), trained(plain), rtol=1e-4)


def test_fifty_steps_end_where_another_seed_would(judged: Any) -> None:
    optax = pytest.importorskip("optax")

    def run(dispatched: bool, seed: int) -> tuple[float, float]:
        model = Block(jax.random.key(seed))
        model = convert(model) if dispatched else model
        optimizer = optax.adam(0.01, eps=1e-3)
        state = optimizer.init(equinox.filter(model, equinox.is_array))

        @equinox.filter_jit
        def step(model: Any, state: Any, x: Any) -> Any:
            grads = equinox.filter_grad(loss)(model, x)
            updates, state = optimizer.update(grads, state)
            return equinox.apply_updates(model, updates), state

        before = float(loss(model, batch(99)))
        for number in range(50):
            model, state = step(model, state, batch(number))
        return before, float(loss(model, batch(99)))

    judged(run)


def test_a_saved_tree_of_the_one_is_the_others(tmp_path: Path) -> None:
    plain, ours = Block(jax.random.key(0)), convert(Block(jax.random.key(1)))
    equinox.tree_serialise_leaves(tmp_path / "model.eqx", plain)
    close(arrays(equinox.tree_deserialise_leaves(tmp_path / "model.eqx", ours)), arrays(plain))
