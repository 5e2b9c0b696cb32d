"""Products spread over eight simulated devices, run by test_jax_sharding.py in a process that has them."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import Plan, Problem
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
jnp = jax.numpy
P = jax.sharding.PartitionSpec
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
FACTOR = 1.015625  # what the rough backend is off by


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

    def sizes(self, op: str = "matmul") -> set[tuple[int, ...]]:
        """Return batch, m, n and k of what it served for an op."""
        return {(*x.batch, x.m, x.n, x.k) for x in self.problems if x.op == op}


@pytest.fixture
def rough() -> Iterator[Rough]:
    backend = Rough()
    policy = dispatch.use_policy(recipes={"inputs": ["float32"]})
    with registered(backend), fake_timings({"rough": 1.0, "baseline": 100.0}), policy:
        yield backend
        assert "rough" not in dispatch.stats()["quarantined"]


def mesh_of(kind: Any) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def array(shape: tuple[int, ...], seed: int) -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4, "float32")


def put(x: Any, mesh: Any, *spec: Any) -> Any:
    return jax.device_put(x, jax.sharding.NamedSharding(mesh, P(*spec)))


def biased(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b) * FACTOR


def collectives(fun: Callable[..., Any], *args: Any) -> Counter[str]:
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    text = jax.jit(fun).lower(*args).compile().as_text()
    return Counter(re.findall(rf"\b({kinds})(?:-start)?\(", text))


def close(found: Any, wanted: Any) -> None:
    """Compare values, and how they are spread."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-4), found, wanted)
    assert jax.tree.map(lambda x: x.sharding.spec, found) == jax.tree.map(lambda x: x.sharding.spec, wanted)


def gradients(product: Callable[..., Any]) -> Callable[..., Any]:
    return jax.value_and_grad(lambda *x: jnp.sin(product(*x)).sum(), (0, 1))


SPECS = {
    "rows and columns": (("x", None), (None, "y"), (8, 6, 32)),
    "contracted": ((None, "x"), ("x", None), (16, 24, 16)),
    "rows and contracted": (("x", "y"), ("y", None), (8, 24, 8)),
    "contracted by two axes": ((None, ("x", "y")), (("x", "y"), None), (16, 24, 4)),
    "contracted in one alone": ((None, "x"), (None, None), (16, 24, 32)),
    "whole": ((None, None), (None, None), (16, 24, 32)),
}


@pytest.mark.parametrize(("of_a", "of_b", "local"), SPECS.values(), ids=list(SPECS))
def test_collectives_are_the_own_products(of_a: Any, of_b: Any, local: tuple[int, ...], rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = put(array((16, 32), 0), mesh, *of_a), put(array((32, 24), 1), mesh, *of_b)
    for way in (lambda product: product, gradients):
        rough.problems.clear()
        dispatch.forget()
        assert collectives(way(dispatch.matmul), a, b) == collectives(way(jnp.matmul), a, b)
        close(jax.jit(way(dispatch.matmul))(a, b), jax.jit(way(biased))(a, b))
        assert rough.sizes() == {local}


def test_gradients_are_decided_for_what_one_device_multiplies(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = put(array((16, 40), 0), mesh, "x", None), put(array((40, 24), 1), mesh, None, "y")
    jax.jit(gradients(dispatch.matmul))(a, b)
    assert rough.sizes("dgrad") == {(8, 40, 6)}
    assert rough.sizes("wgrad") == {(40, 6, 8)}


def test_a_tensor_parallel_mlp(rough: Rough) -> None:
    """Columns, then rows, of the weights over the axis y: one sum of the result, and one of the input's gradient."""
    mesh = mesh_of(AUTO)
    x = put(array((2, 8, 32), 0), mesh, "x", None, None)
    up, down = put(array((32, 48), 1), mesh, None, "y"), put(array((48, 32), 2), mesh, "y", None)

    def mlp(product: Any) -> Any:
        return lambda x, up, down: product(jax.nn.silu(product(x, up)), down)

    def trained(product: Any) -> Any:
        return jax.grad(lambda *y: jnp.square(mlp(product)(*y)).mean(), (0, 1, 2))

    for way in (mlp, trained):
        assert collectives(way(dispatch.matmul), x, up, down) == collectives(way(jnp.matmul), x, up, down)
        close(jax.jit(way(dispatch.matmul))(x, up, down), jax.jit(way(biased))(x, up, down))
    assert rough.sizes() == {(8, 12, 32), (8, 32, 12)}


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_batches_and_vmap(axis: int, rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    spec = [None, None, None]
    spec[axis] = "x"
    a, b = put(array((2, 16, 32), 0), mesh, *spec), put(array((2, 32, 24), 1), mesh, None, None, "y")
    for given in ((a, b), (a, b[0])):
        close(jax.jit(dispatch.matmul)(*given), jax.jit(biased)(*given))
    close(jax.jit(jax.vmap(dispatch.matmul))(a, b), jax.jit(jax.vmap(biased))(a, b))
    assert rough.problems


def test_a_bias_that_is_spread(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = put(array((16, 32), 0), mesh, None, "y"), put(array((32, 24), 1), mesh, "y", None)
    bias = put(array((24,), 2), mesh, "x")
    found = jax.jit(lambda *x: dispatch.matmul(x[0], x[1], bias=x[2], activation="silu"))(a, b, bias)
    np.testing.assert_allclose(found, jax.nn.silu(biased(a, b) + bias), rtol=1e-4, atol=1e-4)
    assert {(x.bias, x.activation) for x in rough.problems} == {(None, None)}


def test_eager_gradients_of_arrays_that_are_spread(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = put(array((16, 32), 0), mesh, "x", None), put(array((32, 24), 1), mesh, None, "y")
    close(gradients(dispatch.matmul)(a, b), gradients(biased)(a, b))
    assert rough.sizes("dgrad") == {(8, 32, 6)}


@pytest.mark.parametrize("jit", [True, False])
def test_inside_shard_map(jit: bool, rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = array((16, 32), 0), array((32, 24), 1)

    def spread(product: Any, of_b: Any) -> Any:
        @partial(jax.shard_map, mesh=mesh, in_specs=(P("x", of_b), P(of_b, None)), out_specs=P("x"))
        def mapped(x: Any, y: Any) -> Any:
            out = product(x, y)
            return out if of_b is None else jax.lax.psum(out, of_b)

        return jax.jit(mapped) if jit else mapped

    for of_b in (None, "y"):
        for way in (lambda f: f, gradients):
            close(way(spread(dispatch.matmul, of_b))(a, b), way(spread(biased, of_b))(a, b))
    assert rough.sizes() == {(8, 24, 32), (8, 24, 8)}


def test_shard_map_over_one_of_two_axes(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    a, b = array((16, 32), 0), array((32, 24), 1)

    @jax.jit
    @partial(jax.shard_map, mesh=mesh, in_specs=(P("x"), P()), out_specs=P("x"), axis_names={"x"})
    def mapped(x: Any, y: Any) -> Any:
        return dispatch.matmul(x, y)

    np.testing.assert_allclose(mapped(a, b), a @ b, rtol=1e-4, atol=1e-4)
    assert not rough.problems


@pytest.mark.parametrize("jit", [True, False])
def test_a_mesh_with_explicit_sharding(jit: bool, rough: Rough) -> None:
    mesh = mesh_of(EXPLICIT)
    compiled = jax.jit if jit else lambda f: f
    with jax.set_mesh(mesh):
        a, b = put(array((16, 32), 0), mesh, "x", None), put(array((32, 24), 1), mesh, None, "y")
        stack = put(array((2, 16, 32), 2), mesh, "x", None, None)
        close(compiled(gradients(dispatch.matmul))(a, b), compiled(gradients(biased))(a, b))
        close(compiled(gradients(dispatch.matmul))(stack, b), compiled(gradients(biased))(stack, b))
        assert jax.typeof(dispatch.matmul(a, b)).sharding.spec == P("x", "y")
        assert rough.sizes("dgrad") == {(8, 32, 6), (16, 32, 6)}
        for product in (dispatch.matmul, jnp.matmul):
            with pytest.raises(Exception, match="ambiguous how the output should be sharded"):
                jax.jit(product)(put(a, mesh, None, "x"), put(b, mesh, "x", None))


def weights(mesh: Any, recipe: str = "e4m3:row") -> tuple[Any, ...]:
    """Return an MLP's weights, (32, 512) by columns and (512, 32) by rows over y, and both quantized as (n, k)."""
    plain = put(array((32, 512), 1), mesh, None, "y"), put(array((512, 32), 2), mesh, "y", None)
    return (*plain, *(dispatch.quantize(w.mT, recipe) for w in plain))


def decoded(q: Any) -> Any:
    return q.mT.dequantize("float32")


def mlp_of(product: Any) -> Callable[..., Any]:
    return lambda x, up, down: product(jax.nn.silu(product(x, up)), down)


def test_a_tensor_parallel_mlp_of_weights_quantized_once(rough: Rough) -> None:
    """The same collectives as for weights that are not, and each device's part is the problem."""
    mesh = mesh_of(AUTO)
    x = put(array((2, 8, 32), 0), mesh, "x", None, None)
    up, down, quantized_up, quantized_down = weights(mesh)
    ours = mlp_of(lambda a, b: dispatch.matmul(a, b.mT))

    def gradient(mlp: Any) -> Any:
        return jax.grad(lambda *y: jnp.square(mlp(*y)).mean())

    for way in (lambda mlp: mlp, gradient):
        rough.problems.clear()
        dispatch.forget()
        found = jax.jit(way(ours))(x, quantized_up, quantized_down)
        wanted = jax.jit(way(mlp_of(biased)))(x, decoded(quantized_up), decoded(quantized_down))
        np.testing.assert_allclose(found, wanted, rtol=0.05, atol=0.05 * float(np.abs(wanted).max()))
        assert found.sharding.spec == wanted.sharding.spec
        assert rough.sizes() == {(8, 128, 32), (8, 32, 128)}
        assert {str(problem.b.recipe) for problem in rough.problems} == {"e4m3:row"}
        ours_and_plain = (way(ours), (x, quantized_up, quantized_down)), (way(mlp_of(jnp.matmul)), (x, up, down))
        found, wanted = (collectives(fun, *operands) for fun, operands in ours_and_plain)
        assert found == wanted


@pytest.mark.parametrize(
    ("recipe", "size"),
    [("e4m3:row", 192), ("e4m3:tensor", 192), ("e4m3:128x128", 512), ("e4m3:128x128", 192), ("e4m3:1x128", 512)],
)
def test_scales_are_spread_as_their_values_are(recipe: str, size: int) -> None:
    """Blocks of 128 do not fit into a fourth of 192: such a weight is gathered, and the product right all the same."""
    mesh, backend = mesh_of(AUTO), Rough()
    backend.capabilities = FakeBackend("rough", recipes=(f"e4m3:row@{recipe}",)).capabilities
    x, w = put(array((8, size), 0), mesh, "x", "y"), array((size, size), 1)
    policy = dispatch.use_policy(recipes={"inputs": ["float32"], "allow": [f"e4m3:row@{recipe}"]})
    with registered(backend), fake_timings({"rough": 1.0, "baseline": 100.0}), policy:
        for spec in (("y", None), (None, "y")):
            q = dispatch.quantize(put(w, mesh, *spec), recipe, axis=-2)
            found = jax.jit(dispatch.matmul)(x, q)
            np.testing.assert_allclose(found, biased(x, q.dequantize("float32")), rtol=1e-4, atol=1e-3)
    assert backend.problems
    assert "rough" not in dispatch.stats()["quarantined"]


def test_a_weight_quantized_once_with_an_epilogue_on_a_mesh(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    x = put(array((8, 32), 0), mesh, "x", None)
    *_, up, _ = weights(mesh)
    bias = put(array((512,), 3), mesh, "y")
    found = jax.jit(lambda a, b, c: dispatch.matmul(a, b.mT, bias=c, activation="silu"))(x, up, bias)
    np.testing.assert_allclose(found, jax.nn.silu(biased(x, decoded(up)) + bias), rtol=1e-4, atol=1e-3)
    assert {(x.bias, x.activation) for x in rough.problems} == {(None, None)}


@pytest.mark.parametrize("jit", [True, False])
def test_weights_quantized_once_inside_shard_map(jit: bool, rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    x = array((16, 32), 0)
    *_, up, down = weights(mesh)

    specs = P("x"), *(jax.tree.map(lambda leaf: leaf.sharding.spec, q) for q in (up, down))

    @partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P("x"))
    def mlp(x: Any, up: Any, down: Any) -> Any:
        return jax.lax.psum(mlp_of(lambda a, b: dispatch.matmul(a, b.mT))(x, up, down), "y")

    found = (jax.jit(mlp) if jit else mlp)(x, up, down)
    wanted = mlp_of(biased)(x, decoded(up), decoded(down))
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3 * float(np.abs(wanted).max()))
    assert rough.sizes() == {(8, 128, 32), (8, 32, 128)}


def test_a_weight_quantized_once_on_a_mesh_with_explicit_sharding(rough: Rough) -> None:
    mesh = mesh_of(EXPLICIT)
    with jax.set_mesh(mesh):
        x = put(array((16, 32), 0), mesh, "x", None)
        w = put(array((32, 24), 1), mesh, None, "y")
        q = dispatch.quantize(w, "e4m3:row", axis=-2)
        found = jax.jit(dispatch.matmul)(x, q)
        close(found, biased(x, q.dequantize("float32")))
    assert rough.sizes() == {(8, 6, 32)}


def test_two_scaled_operands_on_a_mesh(rough: Rough) -> None:
    mesh = mesh_of(AUTO)
    x = dispatch.quantize(put(array((16, 32), 0), mesh, "x", "y"), "e4m3:row")
    w = dispatch.quantize(put(array((32, 24), 1), mesh, "y", None), "e4m3:row", axis=-2)
    own = (x.dequantize("float32"), w.dequantize("float32"))
    close(jax.jit(dispatch.matmul)(x, w), jax.jit(biased)(*own))
    assert rough.sizes() == {(8, 24, 8)}
    assert collectives(dispatch.matmul, x, w) == collectives(jnp.matmul, *own)


def test_what_cannot_be_measured_while_xla_compiles_waits(rough: Rough, monkeypatch: Any, caplog: Any) -> None:
    """As for GPUs, for which XLA compiles one program at a time."""
    from dispatch.frameworks import _jax_sharding
    from dispatch.integrations.jax import measure_parts

    monkeypatch.setattr(_jax_sharding, "one_at_a_time", lambda: True)
    mesh = mesh_of(AUTO)
    x = put(array((16, 32), 0), mesh, "x", None)
    up, down = put(array((32, 56), 1), mesh, None, "y"), put(array((56, 32), 2), mesh, "y", None)

    def mlp(product: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *y: jnp.square(product(product(*y[:2]), y[2])).mean(), (0, 1, 2)))

    before, ours = dispatch.stats()["measured"], mlp(dispatch.matmul)
    close(ours(x, up, down), mlp(jnp.matmul)(x, up, down))
    assert dispatch.stats()["measured"] == before
    assert not rough.problems
    assert caplog.text.count("measure_parts") == 1
    assert measure_parts() >= 6
    assert dispatch.stats()["measured"] == before + 6
    close(ours(x, up, down), mlp(biased)(x, up, down))
    assert measure_parts() == 0
    assert rough.sizes() == {(8, 14, 32), (8, 32, 14)}


def test_a_mesh_with_one_explicit_axis(rough: Rough) -> None:
    """The partitioner's parts are traced under no mesh: its types would be no part's."""
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(EXPLICIT, AUTO))
    with jax.set_mesh(mesh):
        a, b = put(array((16, 32), 0), mesh, "x", None), put(array((32, 24), 1), mesh, None, None)
        close(jax.jit(gradients(dispatch.matmul))(a, b), jax.jit(gradients(biased))(a, b))
    assert (8, 24, 32) in rough.sizes()


@pytest.mark.parametrize("named", [False, True])
def test_another_default_device(named: bool, rough: Rough) -> None:
    """What is traced is decided for that device, and measured there; JAX takes a platform's name too."""
    a, b = np.asarray(array((16, 32), 0)), np.asarray(array((32, 24), 1))
    product = jax.jit(dispatch.matmul)
    product(a, b)
    with jax.default_device("cpu" if named else jax.devices()[3]):
        found = jax.jit(lambda x, y: dispatch.matmul(x, y) + 0)(a, b)
    np.testing.assert_allclose(found, biased(a, b), rtol=1e-4, atol=1e-4)
    assert [problem.device for problem in rough.problems][-1] == ("cpu" if named else "cpu:3")


def test_parts_that_take_long_to_compile_are_measured_in_turns(rough: Rough, monkeypatch: Any) -> None:
    """What waits for a later call, for it takes longer than compile_ms, must not keep the rest from being chosen."""
    from dispatch.frameworks import _jax_sharding
    from dispatch.integrations.jax import measure_parts

    class Slow(Rough):
        compiled = False

        def plan(self, problem: Problem, config: str | None = None) -> Plan:
            product = super().plan(problem, config)

            def slow(*operands: Any) -> Any:
                time.sleep(0 if self.compiled else 0.3)
                self.compiled = True
                return product(*operands)

            return slow

    monkeypatch.setattr(_jax_sharding, "one_at_a_time", lambda: True)
    mesh, slow, last = mesh_of(AUTO), Slow(), Rough()
    slow.name, last.name = "slow", "last"
    a, b = put(array((16, 36), 0), mesh, "x", None), put(array((36, 24), 1), mesh, None, "y")
    policy = dispatch.use_policy(recipes={"inputs": ["float32"]}, tuning={"compile_ms": 100})
    with registered(slow, last), fake_timings({"last": 1.0, "baseline": 100.0}), policy:
        close(jax.jit(dispatch.matmul)(a, b), jax.jit(jnp.matmul)(a, b))
        assert measure_parts() == 1
        close(jax.jit(dispatch.matmul)(a, b), jax.jit(biased)(a, b))
        assert measure_parts() == 0
    assert last.problems
