"""The guard of JAX programs over eight simulated devices, run by test_watch_jax.py in a process that has them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import use_policy
from dispatch.frameworks import _jax_guard
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
jnp = jax.numpy
P = jax.sharding.PartitionSpec
AUTO, EXPLICIT = jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit
M, N, K = 128, 64, 96

pytestmark = pytest.mark.usefixtures("engine")


class Telling(FakeBackend):
    """The framework's own product, which tells the guard that nothing of `a` was lost."""

    def __init__(self) -> None:
        super().__init__("fp8", recipes=("e4m3:row",))

    def plan(self, problem: dispatch.Problem, config: str | None = None) -> dispatch.Plan:
        own, watch = dispatch.native(problem), dispatch.watch()
        assert problem.recipe is not None
        look = None if watch is None else watch.by_rows("a", problem.recipe.a, problem.k)

        def product(a: Any, b: Any) -> Any:
            if look is not None:
                look(a, a)
            return own(a, b)

        return product


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What callbacks were told while the backend serves."""
    found: list[Any] = []
    own = _jax_guard._heard
    monkeypatch.setattr(_jax_guard, "_heard", lambda hears, x: found.append(np.asarray(x)) or own(hears, x))
    policy = use_policy(guard={"traced": "callback"}, recipes={"allow": ["e4m3:row"]})
    with registered(Telling()), fake_timings({"baseline": 100.0, "fp8": 5.0}), policy:
        yield found
        assert not dispatch.stats()["quarantined"]


def operands() -> tuple[Any, Any]:
    draw = np.random.default_rng(0).standard_normal
    return jnp.asarray(draw((M, K)), "bfloat16"), jnp.asarray(draw((K, N)), "bfloat16")


def mesh_of(kind: Any) -> Any:
    return jax.make_mesh((2, 4), ("x", "y"), axis_types=(kind, kind))


def run(function: Any, *arrays: Any) -> Any:
    out = jax.block_until_ready(function(*arrays))
    jax.effects_barrier()
    return out


def test_in_shard_map_each_device_tells(heard: list[Any]) -> None:
    mesh, (a, b) = mesh_of(AUTO), operands()
    spread = partial(jax.shard_map, mesh=mesh, in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y")))
    out = run(jax.jit(spread(dispatch.matmul)), a, b)
    assert len(heard) == 8
    np.testing.assert_array_equal(np.asarray(out), np.asarray(jax.jit(spread(jnp.matmul))(a, b)))


def test_in_shard_map_one_device_s_data_trip(heard: list[Any]) -> None:
    mesh, (a, b) = mesh_of(AUTO), operands()
    spread = jax.shard_map(dispatch.matmul, mesh=mesh, in_specs=(P(("x", "y")), P()), out_specs=P(("x", "y")))
    multiply = jax.jit(spread)
    run(multiply, a.at[:16].set(np.nan), b)
    assert dispatch.stats()["guard"]["tripped"] == 1
    told = len(heard)
    run(multiply, a, b)
    assert len(heard) == told, "traced anew, without it"


def test_with_explicit_sharding_each_device_tells(heard: list[Any]) -> None:
    mesh = mesh_of(EXPLICIT)
    a, b = operands()
    with jax.set_mesh(mesh):
        given = jax.device_put(a, jax.NamedSharding(mesh, P("x"))), jax.device_put(b, jax.NamedSharding(mesh, P()))
        out = run(jax.jit(dispatch.matmul), *given)
        wanted = jax.jit(jnp.matmul)(*given)
    assert len(heard) == 8
    np.testing.assert_array_equal(np.asarray(out), np.asarray(wanted))


def test_the_partitioner_s_parts_are_not_told(heard: list[Any]) -> None:
    """JAX lowers a part by itself, and would lose the callback."""
    mesh, (a, b) = mesh_of(AUTO), operands()
    given = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in ((a, P("x")), (b, P(None, "y")))]
    np.testing.assert_array_equal(
        np.asarray(run(jax.jit(dispatch.matmul), *given)), np.asarray(jax.jit(jnp.matmul)(*given))
    )
    assert heard == []


def test_a_part_and_a_product_of_its_shape_have_plans_of_their_own(heard: list[Any]) -> None:
    """Told on one device, not by the partitioner, whichever comes first."""
    mesh, (a, b) = mesh_of(AUTO), operands()
    part = a[: M // 2], b[:, : N // 4]
    given = [jax.device_put(x, jax.NamedSharding(mesh, spec)) for x, spec in ((a, P("x")), (b, P(None, "y")))]
    run(jax.jit(dispatch.matmul), *part)
    assert len(heard) == 1
    run(jax.jit(dispatch.matmul), *given)
    assert len(heard) == 1
    dispatch.forget()
    run(jax.jit(lambda x, y: dispatch.matmul(x, y)), *given)
    run(jax.jit(lambda x, y: dispatch.matmul(x, y)), *part)
    assert len(heard) == 2
