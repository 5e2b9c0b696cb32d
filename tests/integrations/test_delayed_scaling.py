"""Delayed scaling: scales from the maxima of earlier steps, as state of JAX functions and of layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
jnp = jax.numpy

from dispatch.integrations.jax import Amax, DelayedScaling, quantized  # noqa: E402

E4M3 = dispatch.ScalingRecipe.parse("e4m3:tensor")
NUMBERS = (((1,), (0,)), ((), ()))


def normal(shape: tuple[int, ...], seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


def test_scales_follow_a_history_computed_by_hand() -> None:
    """scale = max(history) * 2**margin / 448, of the steps before; what leaves the window counts no more."""
    scaling, steps = DelayedScaling(length=3, margin=1), [2.0, 8.0, 1.0, 4.0, 0.5, 0.25]
    largest = [2.0, 8.0, 8.0, 8.0, 4.0, 4.0]
    state, scales = scaling.start(), []
    for amax in steps:
        state = jax.jit(partial(scaling.update, recipe=E4M3))(jnp.asarray([[-amax, 0.1]]), state)
        scales.append(float(state.scale))
    np.testing.assert_allclose(scales, [x * 2 / 448 for x in largest], rtol=1e-6)
    np.testing.assert_array_equal(state.history, [0.25, 0.5, 4.0])


def test_a_step_is_quantized_by_the_steps_before() -> None:
    scaling, x = DelayedScaling(length=2), jnp.asarray([[1.0, 448.0]])
    state = scaling.start()
    _, state, _ = scaling.dot_general(x, jnp.eye(2), NUMBERS, state, scaling.start())
    assert float(state.scale) == 1.0
    assert int(state.clipped) == 0
    out, state, _ = scaling.dot_general(4 * x, jnp.eye(2), NUMBERS, state, scaling.start())
    assert int(state.clipped) == 1
    np.testing.assert_array_equal(out, [[4.0, 448.0]])
    out, state, _ = scaling.dot_general(4 * x, jnp.eye(2), NUMBERS, state, scaling.start())
    assert int(state.clipped) == 1
    np.testing.assert_array_equal(out, [[4.0, 4 * 448.0]])


def test_what_is_beyond_the_scale_is_clipped_counted_and_never_inf() -> None:
    x = jnp.asarray([[1e4, -1e30, 3.0], [448.0, 449.0, 0.0]])
    found = quantized(x, jnp.ones(()), E4M3, -1)
    np.testing.assert_array_equal(found.dequantize(), [[448.0, -448.0, 3.0], [448.0, 448.0, 0.0]])
    assert int(DelayedScaling().update(x, DelayedScaling().start(), E4M3).clipped) == 3


def test_inf_and_nan_become_nan_and_leave_the_history_alone() -> None:
    x = jnp.asarray([[jnp.inf, jnp.nan, 3.0]])
    np.testing.assert_array_equal(quantized(x, jnp.ones(()), E4M3, -1).dequantize(), [[np.nan, np.nan, 3.0]])
    state = DelayedScaling(length=2).update(x, DelayedScaling(length=2).start(), E4M3)
    np.testing.assert_array_equal(state.history, [3.0, 0.0])
    assert int(state.clipped) == 0


def test_zeros_leave_the_scale_where_it_was() -> None:
    scaling = DelayedScaling(length=1)
    state = scaling.update(jnp.full((2, 2), 4.0), scaling.start(), E4M3)
    after = scaling.update(jnp.zeros((2, 2)), state, E4M3)
    assert float(after.scale) == float(state.scale) == np.float32(4 / 448)


def test_a_count_saturates() -> None:
    state = Amax(jnp.zeros(1), jnp.ones(()), jnp.asarray(2**31 - 2, jnp.int32))
    assert int(DelayedScaling(length=1).update(jnp.full((3, 1), 1e4), state, E4M3).clipped) == 2**31 - 1


@pytest.mark.parametrize("arguments", [{"recipe": "e4m3:row"}, {"recipe": "mxfp8:1x32"}, {"length": 0}])
def test_wrong_settings_are_refused(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"recipe|length"):
        DelayedScaling(**arguments)


def test_batch_dimensions_are_refused() -> None:
    x, scaling = jnp.ones((2, 3, 3)), DelayedScaling()
    with pytest.raises(ValueError, match="batch"):
        scaling.dot_general(x, x, (((2,), (1,)), ((0,), (0,))), scaling.start(), scaling.start())


def test_values_and_straight_through_gradients() -> None:
    """Against float64 products of what the operands were quantized to; some contracted and free axes out of order."""
    scaling, x, w = DelayedScaling(), normal((4, 6, 8), 0), normal((5, 6, 4), 1)
    numbers = (((0, 1), (2, 1)), ((), ()))
    states = [scaling.update(y, scaling.start(), E4M3) for y in (x, w)]
    cotangent = normal((8, 5), 2)

    @jax.jit
    def product(x: Any, w: Any) -> Any:
        out, back = jax.vjp(lambda *y: scaling.dot_general(*y, numbers, *states)[0], x, w)
        return out, *back(cotangent)

    a, b = (
        np.asarray(quantized(y.reshape(1, -1), s.scale, E4M3, -1).dequantize().reshape(y.shape), "f8")
        for y, s in zip((x, w), states, strict=True)
    )
    out, dx, dw = product(x, w)
    np.testing.assert_allclose(out, np.einsum("ijk,lji->kl", a, b), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dx, np.einsum("kl,lji->ijk", cotangent, b), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(dw, np.einsum("kl,ijk->lji", cotangent, a), rtol=1e-5, atol=1e-4)
    found = jax.jvp(lambda y: scaling.dot_general(y, w, numbers, *states)[0], (x,), (x,))[1]
    np.testing.assert_allclose(found, np.einsum("ijk,lji->kl", np.asarray(x, "f8"), b), rtol=1e-5, atol=1e-4)


def test_gradients_are_dispatched_with_current_scaling(quantizing: Any) -> None:
    scaling, x, w = DelayedScaling(), normal((16, 32), 0), normal((32, 24), 1)
    states = [scaling.update(y, scaling.start(), E4M3) for y in (x, w)]
    jax.jit(jax.grad(lambda *y: scaling.dot_general(*y, NUMBERS, *states)[0].sum(), (0, 1)))(x, w)
    assert {(x.op, str(x.recipe)) for x in quantizing.problems} == {("dgrad", "e4m3:row"), ("wgrad", "e4m3:row")}


def test_the_product_is_one_of_two_scaled_arrays() -> None:
    seen: list[dispatch.Problem] = []
    backend = FakeBackend("tensors", recipes=("e4m3:tensor",), on_plan=seen.append)
    scaling, x, w = DelayedScaling(), normal((16, 32), 0), normal((32, 24), 1)
    states = [scaling.update(y, scaling.start(), E4M3) for y in (x, w)]
    policy = dispatch.use_policy(recipes={"inputs": ["float32"], "allow": ["e4m3:tensor"]})
    with registered(backend), fake_timings({"tensors": 1.0, "baseline": 100.0}), policy:
        jax.jit(lambda *y: scaling.dot_general(*y, NUMBERS, *states)[0])(x, w)
    assert {(str(x.a.recipe), str(x.b.recipe), x.m, x.n, x.k) for x in seen} == {
        ("e4m3:tensor", "e4m3:tensor", 16, 24, 32)
    }


class TestFlax:
    """State in a collection (linen) and in variables (nnx)."""

    def test_linen(self) -> None:
        linen = pytest.importorskip("flax").linen
        from dispatch.integrations.flax import LinenDelayedDotGeneral

        product = partial(LinenDelayedDotGeneral, scaling=DelayedScaling(length=4))
        layer, x = linen.Dense(24, dot_general_cls=product), normal((16, 32), 0)
        variables = layer.init(jax.random.key(0), x)
        (state,) = variables["delayed_scaling"].values()
        assert float(state["lhs"].history.max()) == 0.0
        out, moved = jax.jit(partial(layer.apply, mutable=["delayed_scaling"]))(variables, x)
        (state,) = moved["delayed_scaling"].values()
        np.testing.assert_allclose(state["lhs"].history, [float(jnp.abs(x).max()), 0, 0, 0])
        again = layer.apply({**variables, **moved}, x)
        plain = linen.Dense(24).apply({"params": variables["params"]}, x)
        for found in (out, again):
            assert float(jnp.linalg.norm(found - plain) / jnp.linalg.norm(plain)) < 0.06
        assert float(jnp.abs(again - plain).max()) > 0

    def test_fifty_steps_end_where_another_seed_would(self) -> None:
        linen, optax = pytest.importorskip("flax").linen, pytest.importorskip("optax")
        from dispatch.integrations.flax import LinenDelayedDotGeneral

        class Net(linen.Module):
            product: Any = None

            @linen.compact
            def __call__(self, x: Any) -> Any:
                y = linen.silu(linen.Dense(32, dot_general_cls=self.product)(x))
                return linen.Dense(8, dot_general_cls=self.product)(y)

        def trained(product: Any, seed: int) -> tuple[float, Any]:
            model, optimizer = Net(product), optax.adam(0.01)
            variables = model.init(jax.random.key(seed), normal((16, 8), 0))
            parameters, state = variables["params"], variables.get("delayed_scaling", {})
            moments = optimizer.init(parameters)

            def loss(parameters: Any, state: Any, x: Any) -> Any:
                out, moved = model.apply(
                    {"params": parameters, "delayed_scaling": state}, x, mutable=["delayed_scaling"]
                )
                return jnp.square(out - jnp.sin(x)).mean(), moved.get("delayed_scaling", {})

            @jax.jit
            def step(parameters: Any, state: Any, moments: Any, x: Any) -> Any:
                grads, state = jax.grad(loss, has_aux=True)(parameters, state, x)
                updates, moments = optimizer.update(grads, moments)
                return optax.apply_updates(parameters, updates), state, moments

            for number in range(50):
                parameters, state, moments = step(parameters, state, moments, normal((16, 8), number))
            return float(loss(parameters, state, normal((16, 8), 99))[0]), state

        own, other = (trained(None, seed)[0] for seed in (0, 1))
        found, state = trained(partial(LinenDelayedDotGeneral, scaling=DelayedScaling(length=8)), 0)
        assert found != own
        assert abs(found - own) <= abs(other - own)
        amaxes = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, Amax))
        assert all(0 < float(x.scale) < 1 for x in amaxes)
        assert len(amaxes) == 4

    def test_nnx(self) -> None:
        nnx = pytest.importorskip("flax").nnx
        from dispatch.integrations.flax import DelayedState, convert

        plain = nnx.Linear(32, 24, rngs=nnx.Rngs(0))
        layer, x = convert(nnx.Linear(32, 24, rngs=nnx.Rngs(0)), delayed=DelayedScaling(length=4)), normal((16, 32), 0)
        step = nnx.jit(lambda layer, x: layer(x))
        found = [step(layer, x) for _ in range(2)]
        state = layer.dot_general.lhs.get_value()
        np.testing.assert_allclose(state.history, [float(jnp.abs(x).max())] * 2 + [0, 0])
        for out in found:
            assert float(jnp.linalg.norm(out - plain(x)) / jnp.linalg.norm(plain(x))) < 0.06
        assert len(jax.tree.leaves(nnx.state(layer, DelayedState))) == 6
        assert jax.tree.structure(nnx.state(layer, nnx.Param)) == jax.tree.structure(nnx.state(plain, nnx.Param))
        grads = nnx.grad(lambda m: jnp.square(m(x)).mean())(layer)
        assert float(jnp.abs(jax.tree.leaves(grads)[0]).max()) > 0


def test_equinox() -> None:
    equinox = pytest.importorskip("equinox")
    from dispatch.integrations.equinox import DelayedLinear

    def made() -> Any:
        return DelayedLinear(equinox.nn.Linear(32, 24, key=jax.random.key(0)), DelayedScaling(length=4))

    layer, state = equinox.nn.make_with_state(made)()
    x = normal((16, 32), 0)

    @equinox.filter_jit
    def step(layer: Any, state: Any) -> Any:
        def loss(layer: Any) -> Any:
            out, after = layer(x, state)
            return jnp.square(out).mean(), (out, after)

        return equinox.filter_grad(loss, has_aux=True)(layer)

    plain = jax.vmap(layer.linear)(x)
    for steps in (1, 2):
        grads, (out, state) = step(layer, state)
        history = state.get(layer.of_x).history
        np.testing.assert_allclose(history, [float(jnp.abs(x).max())] * steps + [0] * (4 - steps))
        assert float(jnp.linalg.norm(out - plain) / jnp.linalg.norm(plain)) < 0.06
        assert float(jnp.abs(grads.linear.weight).max()) > 0
