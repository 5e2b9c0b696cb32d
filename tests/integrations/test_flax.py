"""Flax models, linen's and nnx's, whose products are dispatched."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
flax = pytest.importorskip("flax")
optax = pytest.importorskip("optax")
import orbax.checkpoint as ocp  # noqa: E402
from flax import linen, nnx  # noqa: E402

from dispatch.integrations.flax import DotGeneral, Einsum, LinenDotGeneral, convert  # noqa: E402
from dispatch.integrations.jax import DelayedScaling  # noqa: E402

jnp = jax.numpy
FACTOR = 1.015625


class Rough(FakeBackend):
    """A backend that quantizes, if its recipe is to be believed; it keeps the problems it served."""

    def __init__(self) -> None:
        super().__init__("rough", recipes=("e4m3:row",))
        self.problems: list[Problem] = []

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return a product that is off by FACTOR."""
        own = dispatch.native(problem)

        def product(*operands: Any) -> Any:
            self.problems.append(problem)
            return own(*operands) * FACTOR

        return product


@pytest.fixture
def rough() -> Iterator[Rough]:
    backend = Rough()
    policy = dispatch.use_policy(recipes={"inputs": ["float32"]})
    with registered(backend), fake_timings({"rough": 1.0, "baseline": 100.0}), policy:
        yield backend


class Block(linen.Module):
    """A transformer's block."""

    product: Any = None

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Return attention and MLP, each beside its input."""
        attention = linen.MultiHeadDotProductAttention(
            2, qkv_dot_general_cls=self.product, out_dot_general_cls=self.product, name="attention"
        )
        x = x + attention(linen.LayerNorm()(x))
        up = linen.Dense(24, dot_general_cls=self.product, name="up")
        down = linen.DenseGeneral(8, dot_general_cls=self.product, name="down")
        return x + down(linen.silu(up(linen.LayerNorm()(x))))


class Model(nnx.Module):
    """A block in nnx."""

    def __init__(self, rngs: Any) -> None:
        self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(8, 24, rngs=rngs), nnx.Linear(24, 8, rngs=rngs)
        self.mix = nnx.Einsum("abc,cd->abd", (8, 8), rngs=rngs)

    def __call__(self, x: Any) -> Any:
        """Return attention and MLP, each beside its input."""
        x = x + self.attention(x)
        return x + self.mix(self.down(nnx.silu(self.up(x))))


def batch(seed: int = 0) -> Any:
    return jnp.asarray(np.random.default_rng(seed).normal(size=(2, 4, 8)), "float32")


def trained(model: Any, parameters: Any, steps: int = 3, optimizer: Any = None) -> Any:
    optimizer = optimizer or optax.adam(0.01)
    state = optimizer.init(parameters)

    @jax.jit
    def step(parameters: Any, state: Any, x: Any) -> Any:
        grads = jax.grad(lambda p: jnp.square(model.apply(p, x) - 1).mean())(parameters)
        updates, state = optimizer.update(grads, state, parameters)
        return optax.apply_updates(parameters, updates), state

    for seed in range(steps):
        parameters, state = step(parameters, state, batch(seed))
    return parameters


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), found, wanted)


ADAM = optax.adam(0.01, eps=1e-3)  # the gradient of a key's bias is rounding alone: a small eps would make steps of it


@pytest.mark.parametrize("optimizer", [ADAM, optax.MultiSteps(ADAM, 2)], ids=["adam", "accumulated"])
def test_linen_trains_as_without(optimizer: Any) -> None:
    plain, ours = Block(), Block(LinenDotGeneral)
    parameters = plain.init(jax.random.key(0), batch())
    again = ours.init(jax.random.key(0), batch())
    assert jax.tree.structure(parameters) == jax.tree.structure(again)
    close(again, parameters)
    with dispatch.use_policy(tuning={"mode": "off"}):
        found = trained(ours, parameters, 4, optimizer)
    close(found, trained(plain, parameters, 4, optimizer))


def value(model: Any, parameters: Any) -> float:
    return float(jnp.square(model.apply(parameters, batch(99)) - 1).mean())


def test_fifty_steps_of_linen_end_where_another_seed_would(judged: Any) -> None:
    def loss(dispatched: bool, seed: int) -> tuple[float, float]:
        model = Block(LinenDotGeneral if dispatched else None)
        parameters = Block().init(jax.random.key(seed), batch())
        return value(model, parameters), value(model, trained(model, parameters, 50, ADAM))

    judged(loss)


def test_fifty_steps_of_nnx_end_where_another_seed_would(judged: Any) -> None:
    def loss(dispatched: bool, seed: int) -> tuple[float, float]:
        model = Model(nnx.Rngs(seed))
        model = convert(model) if dispatched else model
        optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)

        @nnx.jit
        def step(model: Any, optimizer: Any, x: Any) -> None:
            optimizer.update(model, nnx.grad(lambda m: jnp.square(m(x) - 1).mean())(model))

        before = float(jnp.square(model(batch(99)) - 1).mean())
        for number in range(50):
            step(model, optimizer, batch(number))
        return before, float(jnp.square(model(batch(99)) - 1).mean())

    judged(loss)


def test_scopes_are_linens_paths(rough: Rough) -> None:
    rules = [{"match": {"scope": ["attention.*", "down"]}, "recipes": {"allow": []}}]
    ours = Block(LinenDotGeneral)
    parameters = ours.init(jax.random.key(0), batch())
    rough.problems.clear()
    with dispatch.use_policy(rules=rules):
        jax.jit(ours.apply)(parameters, batch())
    assert {(x.m, x.n, x.k) for x in rough.problems} == {(8, 24, 8)}


def test_linens_gradients_are_dispatched(rough: Rough) -> None:
    ours = Block(partial(LinenDotGeneral, backend="rough"))
    parameters = ours.init(jax.random.key(0), batch())
    found = jax.jit(jax.grad(lambda p: ours.apply(p, batch()).sum()))(parameters)
    assert {x.op for x in rough.problems} == {"matmul", "dgrad", "wgrad"}
    plain = jax.jit(jax.grad(lambda p: Block().apply(p, batch()).sum()))(parameters)
    close(found, plain, 0.2)


def test_linens_attention_takes_it_for_its_einsums(rough: Rough) -> None:
    q, k, v = (jax.random.normal(jax.random.key(seed), (2, 4, 2, 8)) for seed in range(3))
    found = linen.dot_product_attention(q, k, v, einsum_dot_general=DotGeneral("attention"))
    np.testing.assert_allclose(found, linen.dot_product_attention(q, k, v), rtol=0.1, atol=0.1)
    assert {x.batch for x in rough.problems} == {(2, 2)}


def test_nnx_scopes_are_paths_and_values_the_own(rough: Rough) -> None:
    plain, ours = Model(nnx.Rngs(0)), convert(Model(nnx.Rngs(0)), scope="block")
    assert ours.up.dot_general == DotGeneral("block.up")
    assert ours.attention.query.dot_general == DotGeneral("block.attention.query")
    assert convert(ours, scope="other").up.dot_general == DotGeneral("other.up")
    with dispatch.use_policy("native"):
        close(nnx.jit(lambda m, x: m(x))(ours, batch()), plain(batch()))
    assert not rough.problems
    nnx.jit(lambda m, x: m(x))(ours, batch())
    assert (8, 24, 8) in {(x.m, x.n, x.k) for x in rough.problems}


def test_nnx_keeps_a_dot_general_that_was_given() -> None:
    def mine(*operands: Any, **options: Any) -> Any:
        return jax.lax.dot_general(*operands, **options)

    layer = convert(nnx.Linear(8, 4, dot_general=mine, rngs=nnx.Rngs(0)))
    assert layer.dot_general is mine


def test_nnx_traces_once_a_model(rough: Rough) -> None:
    model, traces = convert(Model(nnx.Rngs(0))), []

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        traces.append(1)
        loss, grads = nnx.value_and_grad(lambda m: jnp.square(m(x) - 1).mean())(model)
        optimizer.update(model, grads)
        return loss

    optimizer = nnx.Optimizer(model, optax.adam(0.01), wrt=nnx.Param)
    losses = [float(step(model, optimizer, batch())) for _ in range(4)]
    assert losses[-1] < losses[0]
    assert len(traces) == 1
    assert {x.op for x in rough.problems} == {"matmul", "dgrad", "wgrad"}


@pytest.mark.parametrize("optimizer", [ADAM, optax.MultiSteps(ADAM, 2)], ids=["adam", "accumulated"])
def test_nnx_trains_as_without(optimizer: Any) -> None:
    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        optimizer.update(model, nnx.grad(lambda m: jnp.square(m(x) - 1).mean())(model))

    models = Model(nnx.Rngs(0)), convert(Model(nnx.Rngs(0)))
    with dispatch.use_policy(tuning={"mode": "off"}):
        for model in models:
            state = nnx.Optimizer(model, optimizer, wrt=nnx.Param)
            for number in range(4):
                step(model, state, batch(number))
    close(nnx.state(models[1], nnx.Param), nnx.state(models[0], nnx.Param))


def test_a_checkpoint_of_delayed_scaling(tmp_path: Path) -> None:
    layer, other = (convert(nnx.Linear(8, 4, rngs=nnx.Rngs(seed)), delayed=DelayedScaling(4)) for seed in (0, 1))
    layer(batch()[0])
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(layer))
        checkpointer.wait_until_finished()
        nnx.update(other, checkpointer.restore(tmp_path / "state", nnx.state(other)))
    close(nnx.state(other), nnx.state(layer))
    assert float(other.dot_general.lhs.get_value().history[0]) == float(jnp.abs(batch()[0]).max())


def test_a_checkpoint_of_the_one_is_the_others(tmp_path: Path) -> None:
    plain, ours = Model(nnx.Rngs(0)), convert(Model(nnx.Rngs(1)))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(plain))
        checkpointer.wait_until_finished()
        nnx.update(ours, checkpointer.restore(tmp_path / "state", nnx.state(ours)))
    with dispatch.use_policy("native"):
        close(ours(batch()), plain(batch()))


def test_a_checkpoint_keeps_quantized_and_prepared_parameters(tmp_path: Path) -> None:
    w = jax.random.normal(jax.random.key(0), (32, 16))
    params = {"up": dispatch.prepare(w), "down": dispatch.quantize(w, "e4m3:row", axis=-2)}
    empty = jax.tree.map(jnp.zeros_like, params)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", params)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", empty)
    assert jax.tree.structure(restored) == jax.tree.structure(params)
    assert restored["down"].recipe == params["down"].recipe
    np.testing.assert_array_equal(restored["up"].array, w)
    np.testing.assert_array_equal(restored["down"].dequantize(), params["down"].dequantize())
    x = jnp.ones((4, 32))
    np.testing.assert_array_equal(dispatch.matmul(x, restored["down"]), dispatch.matmul(x, params["down"]))


class Mixed(linen.Module):
    """Two einsum layers, of linen's own class or ours."""

    layer: Any = linen.Einsum

    @linen.compact
    def __call__(self, x: Any) -> Any:
        """Return what both make of x (2, 4, 8)."""
        x = self.layer((8, 3, 5), "abc,cde->abde")(x)
        return self.layer((3, 5, 6), use_bias=False, name="out")(x, "...de, def -> ...f")


class TestLinenEinsum:
    """linen's Einsum calls jnp.einsum and takes no dot_general: a class of its own stands for it."""

    def test_it_is_linen_s_with_the_same_parameters(self) -> None:
        own, ours = Mixed(), Mixed(Einsum)
        parameters = own.init(jax.random.key(0), batch())
        found = ours.init(jax.random.key(0), batch())
        assert jax.tree.structure(found) == jax.tree.structure(parameters)
        jax.tree.map(np.testing.assert_array_equal, found, parameters)
        with dispatch.use_policy(tuning={"mode": "off"}):
            close(ours.apply(parameters, batch()), own.apply(parameters, batch()))
            close(trained(ours, parameters), trained(own, parameters))

    def test_its_products_are_dispatched_by_path(self, rough: Rough) -> None:
        own, ours = Mixed(), Mixed(Einsum)
        parameters = own.init(jax.random.key(0), batch())
        rule = {"match": {"scope": "out"}, "recipes": {"allow": []}}
        with dispatch.use_policy(rules=[rule]):
            found = jax.jit(ours.apply)(parameters, batch())
        assert {(x.m, x.n, x.k) for x in rough.problems if "traced" in x.modes} == {(8, 15, 8)}
        first = linen.Einsum((8, 3, 5), "abc,cde->abde")
        middle = first.apply({"params": parameters["params"]["Einsum_0"]}, batch())
        bias = parameters["params"]["Einsum_0"]["bias"]
        wanted = jnp.einsum("abde,def->abf", (middle - bias) * FACTOR + bias, parameters["params"]["out"]["kernel"])
        close(found, wanted)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
    def test_dtypes(self, dtype: str) -> None:
        layers = [kind((8, 6), "abc,cd->abd", dtype=dtype) for kind in (linen.Einsum, Einsum)]
        parameters = layers[0].init(jax.random.key(0), batch())
        with dispatch.use_policy(tuning={"mode": "off"}):
            own, found = (layer.apply(parameters, batch()) for layer in layers)
        assert found.dtype == own.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found, np.float64), np.asarray(own, np.float64))

    @pytest.mark.parametrize("equation", ["abc,cd", "abc->abc", "abc,cd,de->abe"])
    def test_what_linen_refuses_is_refused(self, equation: str) -> None:
        with pytest.raises(ValueError, match=r"->|two operands"):
            Einsum((8, 6), equation).init(jax.random.key(0), batch())
