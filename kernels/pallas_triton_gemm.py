"""Portable GEMM in Pallas by its Triton lowering: any GPU that Triton knows, plain pointers, one program a tile.

C (m, n) = A (m, k) times B (n, k), both K-major, of FP8, bfloat16 or float16; float32 accumulators; scales of rows and
columns, or of 1x128 blocks of A and 128x128 blocks of B; bias and activation in the epilogue. It has neither
TMA nor warp specialization: on an H200 a third as fast as the kernel for Hopper. `interpret=True` runs it on a CPU.
JAX is to drop this lowering (see pallas_by_triton).
"""

# JAX is not seen by mypy: its decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from dispatch.kernels.pallas_by_triton import by_triton
from dispatch.kernels.pallas_common import BLOCK, activated, check, narrow, padded, traced, up, vector
from jax import lax
from jax.experimental.pallas import triton as plt

DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")


@dataclass(frozen=True)
class Config:
    """How the kernel runs: sizes in elements, powers of two from 16; `group` in rows of tiles that share L2."""

    block_m: int = 128
    block_n: int = 128
    block_k: int = 128
    stages: int = 3
    warps: int = 8
    group: int = 8

    def complaint(self, *, blocks: bool = False) -> str:
        """Return what is wrong with the config, nothing where it will do."""
        sizes = (self.block_m, self.block_n, self.block_k)
        if any(size < 16 or size & (size - 1) for size in sizes):
            return f"blocks of {sizes} are no powers of two from 16"
        if blocks and (self.block_k != BLOCK or BLOCK % self.block_n):
            return f"with block scales block_k is {BLOCK} and block_n divides {BLOCK}"
        return ""

    def tile(self, index: Any, tiles_m: int, tiles_n: int) -> tuple[Any, Any]:
        """Return the row and column of a tile: columns of `group` rows of tiles."""
        width = self.group * tiles_n
        first = lax.div(index, width) * self.group
        height = jnp.minimum(tiles_m - first, self.group)
        inside = lax.rem(index, width)
        return first + lax.rem(inside, height), lax.div(inside, height)


def _gelu(x: Any) -> Any:
    """Return gelu of float32 values: this lowering has no erf.

    Abramowitz and Stegun's 7.1.26: erfc within 1.5e-7 by a polynomial in t times exp(-z^2), taken of the tail.
    """
    z = jnp.abs(x) * 0.7071067811865476
    t = 1.0 / (1.0 + 0.3275911 * z)
    sums = ((((1.061405429 * t - 1.453152027) * t + 1.421413741) * t - 0.284496736) * t + 0.254829592) * t
    tail = 0.5 * sums * jnp.exp(-z * z)
    return x * jnp.where(x < 0.0, tail, 1.0 - tail)


def _scales(scale: Any, rows: int) -> Any:
    """Return a scale for each of `rows` at least."""
    return jnp.broadcast_to(scale, (rows,)) if scale.shape == (1,) else vector(scale, rows)


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "blocks", "activation", "interpret"))
def _gemm(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    *,
    config: Config,
    out_dtype: Any,
    blocks: bool,
    activation: str | None,
    interpret: bool,
) -> Any:
    """Pad, multiply, and cut; see `gemm`."""
    (m, k), n = a.shape, b.shape[0]
    whole_m, whole_n, whole_k = up(m, config.block_m), up(n, config.block_n), up(k, config.block_k)
    tiles_m, tiles_n, steps = whole_m // config.block_m, whole_n // config.block_n, whole_k // config.block_k

    def row(index: Any) -> Any:
        return config.tile(index, tiles_m, tiles_n)[0]

    def col(index: Any) -> Any:
        return config.tile(index, tiles_m, tiles_n)[1]

    operands = [padded(a, whole_m, whole_k), padded(b, whole_n, whole_k)]
    specs = [
        pl.BlockSpec((config.block_m, whole_k), lambda i: (row(i), 0)),
        pl.BlockSpec((config.block_n, whole_k), lambda i: (col(i), 0)),
    ]
    if blocks:
        operands += [padded(scale_a, whole_m, steps)]
        operands += [padded(scale_b, up(whole_n, BLOCK) // BLOCK, steps)]
        specs += [
            pl.BlockSpec((config.block_m, steps), lambda i: (row(i), 0)),
            pl.BlockSpec((1, steps), lambda i: (lax.div(col(i) * config.block_n, BLOCK), 0)),
        ]
    elif scale_a is not None:
        operands += [_scales(scale_a, whole_m), _scales(scale_b, whole_n)]
        specs += [
            pl.BlockSpec((config.block_m,), lambda i: (row(i),)),
            pl.BlockSpec((config.block_n,), lambda i: (col(i),)),
        ]
    if bias is not None:
        operands += [padded(bias, whole_n)]
        specs += [pl.BlockSpec((config.block_n,), lambda i: (col(i),))]

    def body(a_ref: Any, b_ref: Any, *rest: Any) -> None:
        *more, out_ref = rest
        scales = None if scale_a is None else (more.pop(0), more.pop(0))

        def step(index: Any, acc: Any) -> Any:
            depth = pl.ds(index * config.block_k, config.block_k)
            left, right = a_ref[:, depth], b_ref[:, depth]
            if left.dtype != right.dtype:  # Triton's dot in Pallas takes one dtype
                left, right = left.astype(jnp.float16), right.astype(jnp.float16)
            part = lax.dot_general(left, right, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
            if scales is not None and blocks:
                part = part * (scales[0][:, index] * scales[1][0, index])[:, None]
            return acc + part

        acc = lax.fori_loop(0, steps, step, jnp.zeros((config.block_m, config.block_n), jnp.float32))
        if scales is not None and not blocks:
            acc = acc * scales[0][...][:, None] * scales[1][...][None, :]
        if more:
            acc = acc + more[0][...][None, :]
        done = _gelu(acc) if activation == "gelu" else activated(acc, activation)
        out_ref[...] = done.astype(out_ref.dtype)

    out = pl.pallas_call(
        body,
        grid=(tiles_m * tiles_n,),
        out_shape=jax.ShapeDtypeStruct((whole_m, whole_n), out_dtype),
        in_specs=specs,
        out_specs=pl.BlockSpec((config.block_m, config.block_n), lambda i: (row(i), col(i))),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=config.warps, num_stages=config.stages),
    )(*operands)
    return out if out.shape == (m, n) else out[:m, :n]


def gemm(
    a: Any,
    b: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    *,
    config: Config,
    out_dtype: Any = jnp.bfloat16,
    blocks: bool = False,
    activation: str | None = None,
    interpret: bool = False,
) -> Any:
    """Return activation(A times B^T times the scales, plus bias) of shape (m, n), rounded once to out_dtype.

    a: (m, k), b: (n, k), K-major, of FP8 (e4m3 or e5m2; mixed, they are multiplied as float16, which holds both),
    bfloat16 or float16. scale_a, scale_b: float32, decoding, (m,) and (n,), or (1,)
    for all; with `blocks` (m, ceil(k / 128)) and (ceil(n / 128), ceil(k / 128)). bias: (n,) of any float dtype.
    out_dtype: bfloat16, float16 or float32. activation: relu, gelu (by erf), gelu_tanh or silu.

    Any m, n and k, padded inside to multiples of the config's blocks. Traceable, with everything after bias static.
    Raises ValueError for shapes that do not match and for a config that the kernel cannot run.
    """
    m, n, _ = check(a, b, scale_a, scale_b, bias, blocks=blocks, activation=activation, dtypes=DTYPES)
    if complaint := config.complaint(blocks=blocks):
        raise ValueError(f"{config}: {complaint}")
    out_dtype = jnp.dtype(out_dtype)
    if m == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    static = {"config": config, "out_dtype": out_dtype, "blocks": blocks, "activation": activation}
    arrays = (a, b, narrow(scale_a), narrow(scale_b), narrow(bias))
    if interpret:
        return traced(_gemm, *arrays, **static, interpret=True)
    given = [array for array in arrays if array is not None]

    def kernel(*given: Any) -> Any:
        left = iter(given)
        return _gemm(*(None if array is None else next(left) for array in arrays), **static, interpret=False)

    return traced(by_triton, kernel, *given)
