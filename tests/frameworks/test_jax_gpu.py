"""Products that stand in JAX traces, on NVIDIA GPUs: values and gradients against float64, and a mesh of two."""

from __future__ import annotations

import re
from collections import Counter
from functools import partial
from typing import Any

import numpy as np
import pytest

import dispatch

jax = pytest.importorskip("jax")

from dispatch.integrations.jax import measure_parts  # noqa: E402

jnp = jax.numpy
P = jax.sharding.PartitionSpec
pytestmark = pytest.mark.gpu
TOLERANCE = 0.1  # relative L2 of the whole: FP8 of normal data measures about 0.04
FP8 = {"gate": {"min_speedup": 0.0}, "tuning": {"budget_ms": 500}}


def normal(shape: tuple[int, ...], seed: int) -> Any:
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def off(found: Any, wanted: Any) -> float:
    """Return the relative L2 distance."""
    x, y = (np.asarray(v, np.float64) for v in (found, wanted))
    assert np.isfinite(x).all()
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


@pytest.mark.parametrize("backend", [None, "triton_tma_fp8", "pallas_fp8"])
@pytest.mark.parametrize("shape", [(512, 768, 1024), (259, 136, 520)])
def test_values_and_gradients_against_float64(shape: tuple[int, int, int], backend: str | None) -> None:
    m, n, k = shape
    a, b, cotangent = normal((m, k), 0), normal((k, n), 1), normal((m, n), 2)
    allow = ["*"] if backend is None else [backend, "bf16_fallback"]

    @jax.jit
    def product(x: Any, y: Any, g: Any) -> Any:
        out, back = jax.vjp(dispatch.matmul, x, y)
        return out, *back(g)

    with dispatch.use_policy(**FP8, backends={"allow": allow}):
        out, da, db = product(a, b, cotangent)
    a64, b64, g64 = (np.asarray(x, np.float64) for x in (a, b, cotangent))
    assert off(out, a64 @ b64) < TOLERANCE
    assert off(da, g64 @ b64.T) < TOLERANCE
    assert off(db, a64.T @ g64) < TOLERANCE


def test_vmap_and_scan_against_float64() -> None:
    a, b = normal((4, 256, 512), 0), normal((512, 512), 1)
    with dispatch.use_policy(**FP8):
        mapped = jax.jit(jax.vmap(dispatch.matmul, (0, None)))(a, b)
        both = jax.jit(jax.vmap(dispatch.matmul))(a, jnp.stack([b, -b, b, -b]))
        last = jax.jit(lambda x: jax.lax.scan(lambda c, _: (dispatch.matmul(c, b) / 16, 0), x, None, length=2)[0])(a[0])
    a64, b64 = np.asarray(a, np.float64), np.asarray(b, np.float64)
    assert off(mapped, a64 @ b64) < TOLERANCE
    assert off(both, a64 @ b64 * np.asarray([1, -1, 1, -1])[:, None, None]) < TOLERANCE
    assert off(last, a64[0] @ b64 @ b64 / 256) < TOLERANCE


def on_two_gpus() -> Any:
    """Return put(x, *spec), which spreads an array over a mesh of two GPUs."""
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])

    def put(x: Any, *spec: Any) -> Any:
        return jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    return put


def measured(way: Any, *operands: Any) -> Any:
    """Return a program whose products have been measured: not while XLA compiles, which would wait for itself."""
    jax.jit(way).lower(*operands).compile()
    assert measure_parts() > 0
    compiled = jax.jit(way).lower(*operands).compile()
    assert measure_parts() == 0
    return compiled


def mlp(product: Any) -> Any:
    return lambda x, up, down: product(jax.nn.silu(product(x, up)), down)


def collectives(program: Any) -> Counter[str]:
    kinds = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    return Counter(re.findall(kinds, program.as_text()))


def test_a_tensor_parallel_mlp_on_two_gpus() -> None:
    put = on_two_gpus()
    x = put(normal((1024, 1024), 0), None, None)
    up, down = put(normal((1024, 4096), 1) / 32, None, "x"), put(normal((4096, 1024), 2) / 64, "x", None)

    def trained(product: Any) -> Any:
        return jax.grad(lambda *y: jnp.square(mlp(product)(*y).astype("float32")).mean(), (0, 1, 2))

    for way in (mlp, trained):
        with dispatch.use_policy(**FP8):
            compiled = measured(way(dispatch.matmul), x, up, down)
        own = jax.jit(way(jnp.matmul)).lower(x, up, down).compile()
        assert collectives(compiled) == collectives(own)
        distances = jax.tree.map(off, compiled(x, up, down), own(x, up, down))
        assert max(jax.tree.leaves(distances)) < TOLERANCE


def test_weights_quantized_once_on_two_gpus() -> None:
    """Forward and gradient have the collectives of jnp.matmul by the weights; so have shard_map's."""
    put = on_two_gpus()
    x = put(normal((1024, 1024), 0), None, None)
    up, down = put(normal((1024, 4096), 1) / 32, None, "x"), put(normal((4096, 1024), 2) / 64, "x", None)
    once = jax.jit(lambda w: dispatch.quantize(w.mT, "e4m3:row"))
    quantized = once(up), once(down)
    ours = mlp(lambda a, b: dispatch.matmul(a, b.mT))
    gradient = partial(jax.grad, argnums=0)
    summed = {"forward": (ours, mlp(jnp.matmul))}
    summed["gradient"] = tuple(
        gradient(lambda *y, f=f: jnp.square(f(*y).astype("float32")).mean()) for f in summed["forward"]
    )
    for way, own in summed.values():
        with dispatch.use_policy(**FP8):
            compiled = measured(way, x, *quantized)
        plain = jax.jit(own).lower(x, up, down).compile()
        assert collectives(compiled) == collectives(plain)
        assert off(compiled(x, *quantized), plain(x, up, down)) < TOLERANCE
    specs = P(), *(jax.tree.map(lambda leaf: leaf.sharding.spec, q) for q in quantized)

    def local(*operands: Any) -> Any:
        return jax.lax.psum(ours(*operands), "x")

    mapped = jax.shard_map(local, mesh=x.sharding.mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with dispatch.use_policy(**FP8):
        assert off(jax.jit(mapped)(x, *quantized), jax.jit(mlp(jnp.matmul))(x, up, down)) < TOLERANCE
