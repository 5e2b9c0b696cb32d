"""Warp-specialized GEMM for Hopper (sm90) in Pallas Mosaic GPU: TMA loads, wgmma, TMA stores, persistent programs.

C (m, n) = A (m, k) times B (n, k), both K-major, of FP8 (each e4m3 or e5m2), bfloat16 or float16 (these two also with B
as (k, n)); float32 accumulators; the epilogue, in registers: times the scales of the rows and columns, plus a bias of
one value a column, activation, one rounding to bfloat16, float16 or float32.

One warpgroup loads tiles into a ring of stages, one or two others multiply them:

cooperative: each consumer has its half of the rows of every tile. Measured with 128x256 in four stages.
pingpong: each has tiles of its own and half of the stages; they take turns at the tensor core, and the epilogue of one
runs while the other multiplies. Not measured yet.

The ring runs on across output tiles: while a tile is finished and stored, the loads for the next are under way.
(JAX's own `emit_pipeline_warp_specialized` drains at each tile, and gave wrong sums with `delay_release` in a
persistent loop.) In a cluster two programs work on tiles side by side, and what both need is loaded once, by multicast.

Accumulation is fast (the tensor core adds, and keeps about 14 bits of sums of FP8 products) or promoted: each block_k
of k is added in float32 by the CUDA cores, with the scales of 1x128 blocks of A and 128x128 blocks of B where there are
such. Then two steps of k are in flight in each consumer, one multiplied while the other is added.

TMA fills with zeros what it reads beyond the edge and drops what it writes there, so tiles need not divide a matrix;
but Mosaic's tilings of shared memory must divide the dimensions (m by 8, n by 64, k by 128 bytes). What does not fit
is padded, by copies that belong to the time of the product.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from dispatch.kernels.pallas_common import (
    BLOCK,
    OLD_INTERPRETER,
    check,
    columns,
    interpreter,
    itemsize,
    narrow,
    padded,
    traced,
    up,
    vector,
)
from dispatch.kernels.pallas_hopper_kernel import SHARED_LIMIT, SWIZZLE, Config, Form, Kernel
from jax.experimental.pallas import mosaic_gpu as plgpu

__all__ = ["DTYPES", "SHARED_LIMIT", "Config", "Form", "gemm"]

DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")


def _scratch(config: Config, form: Form, a: Any, b: Any) -> dict[str, Any]:
    """Return the shared memory of a program: the ring, pieces of C, barriers."""
    size, out_size, stages = itemsize(a.dtype), itemsize(form.out_dtype), config.stages

    def swizzled(values: int) -> tuple[Any, ...]:
        return () if form.plain else (plgpu.TilingTransform((8, values)), plgpu.SwizzleTransform(SWIZZLE))

    b_shape = (config.block_k, config.block_n) if form.k_by_n else (config.block_n, config.block_k)
    make_empty = (
        functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if config.cluster else plgpu.Barrier
    )
    pieces = (config.consumers, config.slots(out_size), 64, SWIZZLE // out_size)
    scratch = {
        "a_smem": plgpu.SMEM((stages, config.block_m, config.block_k), a.dtype, transforms=swizzled(SWIZZLE // size)),
        "b_smem": plgpu.SMEM((stages, *b_shape), b.dtype, transforms=swizzled(SWIZZLE // size)),
        "out_smem": plgpu.SMEM(pieces, form.out_dtype, transforms=swizzled(SWIZZLE // out_size)),
        "full": plgpu.Barrier(num_arrivals=2 + form.blocks, num_barriers=stages),
        "empty": make_empty(num_arrivals=1 if config.pingpong else config.consumers, num_barriers=stages),
    }
    if config.pingpong:
        scratch["turn"] = plgpu.Barrier(num_arrivals=1, num_barriers=2)
    if form.blocks:
        scratch["scale_smem"] = plgpu.SMEM((stages, config.block_m), jnp.float32)
    return scratch


@functools.partial(jax.jit, static_argnames=("config", "form", "programs", "interpret"))
def _gemm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *, config: Config, form: Form, programs: int, interpret: Any
) -> Any:
    """Pad, multiply, and cut; see `gemm`."""
    (m, k), n = a.shape, b.shape[form.across]
    high, wide = config.cluster_tile()
    deep = SWIZZLE // itemsize(a.dtype)
    if form.plain or interpret is not None:  # interpreters stop at the edge of an array
        whole_m, whole_n, whole_k = up(m, high), up(n, wide), up(k, config.block_k)
    else:
        whole_m, whole_n, whole_k = up(m, 8), columns(n, form.out_dtype), up(k, deep)
    kernel = Kernel(
        config=config,
        form=form,
        tiles_m=-(-whole_m // high),
        tiles_n=-(-whole_n // wide),
        steps=-(-whole_k // config.block_k),
    )
    rows, cols = kernel.tiles_m * high, kernel.tiles_n * wide
    if form.blocks:
        scale_a = padded(scale_a.T, kernel.steps, rows)
        scale_b = padded(scale_b, up(cols, BLOCK) // BLOCK, kernel.steps)
    else:
        scale_a, scale_b = vector(scale_a, rows), vector(scale_b, cols)
    if bias is not None:
        bias = padded(bias, cols)
    a, b = padded(a, whole_m, whole_k), padded(b, *((whole_k, whole_n) if form.across else (whole_n, whole_k)))
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((whole_m, whole_n), form.out_dtype),
        grid=(max(1, min(programs // config.programs, kernel.tiles)),),
        grid_names=("grid",),
        cluster=(config.programs,),
        cluster_names=("cluster",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(config, form, a, b),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )(a, b.T if form.plain and not form.across else b, scale_a, scale_b, bias)
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
    promoted: bool = False,
    blocks: bool = False,
    activation: str | None = None,
    across: bool = False,
    programs: int = 132,
    interpret: Any = False,
) -> Any:
    """Return activation(A times B^T times the scales, plus bias) of shape (m, n), rounded once to out_dtype.

    a: (m, k), b: (n, k), K-major (b is what a row-major product would call its transpose), of FP8 (e4m3 or e5m2, the
    two mixed from JAX 0.11), bfloat16 or float16. scale_a, scale_b: float32, decoding, (m,) and (n,), or (1,) for all;
    with `blocks` (m, ceil(k / 128)) and (ceil(n / 128), ceil(k / 128)). bias: (n,) of any float dtype. out_dtype:
    bfloat16, float16 or float32. promoted: block_k of k at a time are added in float32 outside the tensor core, as
    with `blocks` always. activation: relu, gelu (by erf), gelu_tanh or silu. across: b is (k, n), as 16-bit operands
    alone can be. programs: at most so many run, one a multiprocessor. interpret: True, or parameters of JAX's GPU
    interpreter, to run on a CPU.

    Any m, n and k; padded inside where they do not fit Mosaic's tilings. Traceable, with everything after bias static.
    Raises ValueError for shapes that do not match and for a config that the kernel cannot run.
    """
    of_rows = jax.ShapeDtypeStruct(b.shape[::-1], b.dtype) if across else b
    dtypes = DTYPES[2:] if across else DTYPES  # the tensor core reads FP8 K-major
    m, n, _ = check(a, of_rows, scale_a, scale_b, bias, blocks=blocks, activation=activation, dtypes=dtypes)
    size, out_dtype = itemsize(a.dtype), jnp.dtype(out_dtype)
    if complaint := config.complaint(size, itemsize(out_dtype), blocks=blocks):
        raise ValueError(f"{config}: {complaint}")
    if m == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    chosen = interpreter(interpret)
    plain = chosen is not None and OLD_INTERPRETER
    form = Form(out_dtype, promoted or blocks, blocks, activation, across, plain)
    arrays = (a, b, narrow(scale_a), narrow(scale_b), narrow(bias))
    return traced(_gemm, *arrays, config=config, form=form, programs=programs, interpret=chosen)
