"""Dense GEMM in Triton: C (batch, m, n) = activation(A (batch, m, k) B (batch, n, k)^T * scales + bias).

A and B are K-major: e4m3, e5m2 (not both), bfloat16 or float16. C is bfloat16, float16 or float32. Either operand may
have no batch. Accumulation, scales, bias and activation are float32, rounded once. Two kernels: operands by TMA
(`gemm`, sm90 and later) and by pointers (`gemm_pointer`, any GPU, any alignment). Both are persistent: `programs`
programs walk the tiles, `group` tile rows at a time so that they share columns of B in L2.

Scales decode (value = quantized * scale), float32: none; in the epilogue, of a shape that broadcasts to (batch, m) and
(batch, n); or, with `block=(extent_a, extent_b, extent_k)`, one for each extent_a rows of A (extent_b of B) by extent_k
values of k, of shape ([batch,] row blocks, k blocks) in any layout.

The functions take anything that Triton takes as a pointer and that has shape, stride(), dtype and data_ptr(); the
caller allocates C. They choose nothing: the config is the caller's.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from dispatch.kernels._triton_tile import (
    SHIFT,
    Launch,
    check_config,
    descriptor,
    finish_tile,
    grouped_tile,
    launch_grid,
    matrix,
    scaling,
    sizes,
    sum_over_k,
    tma_writes,
)


@triton.jit
def _walk(
    a,
    b,
    target,
    scales_a,
    scales_b,
    bias,
    size,
    blocks,
    extents,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SCALED: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
    STORE_TMA: tl.constexpr,
):
    """Compute every num_programs-th tile."""
    batch_size, m, n, k = size
    BLOCK_M: tl.constexpr = blocks[0]
    BLOCK_N: tl.constexpr = blocks[1]
    BLOCK_K: tl.constexpr = blocks[2]
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    steps = tl.cdiv(k, BLOCK_K)
    for tile in tl.range(tl.program_id(0), batch_size * tiles_m * tiles_n, tl.num_programs(0)):
        batch, tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        acc = sum_over_k(a, b, scales_a, scales_b, batch, row, col, m, n, k, 0, steps, blocks, extents, PROMOTED, TMA)
        finish_tile(
            acc,
            target,
            scales_a,
            scales_b,
            bias,
            batch,
            row,
            col,
            m,
            n,
            BLOCK_M,
            BLOCK_N,
            HALVES,
            SCALED,
            HAS_BIAS,
            ACTIVATION,
            STORE_TMA,
        )


@triton.jit(do_not_specialize=["batch_size", "m", "n", "k", "a_batch", "b_batch", "scale_a_batch", "scale_b_batch"])
def gemm_tma_kernel(
    a,
    b,
    c,
    scale_a,
    scale_b,
    bias,
    batch_size,
    m,
    n,
    k,
    a_batch,
    b_batch,
    c_batch,
    c_row,
    scale_a_batch,
    scale_a_row,
    scale_a_k,
    scale_b_batch,
    scale_b_row,
    scale_b_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SCALED: tl.constexpr,
    EXTENT_A: tl.constexpr,
    EXTENT_B: tl.constexpr,
    EXTENT_K: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STORE_TMA: tl.constexpr,
):
    """Multiply with A and B by TMA. a, b: descriptors; c: a descriptor if STORE_TMA, else a pointer.

    a_batch, b_batch: 1, or 0 for an operand without batch. Sizes are not specialized: Triton 3.6 would make a size of 1
    a constant and then evaluate masks against it wrongly.
    """
    _walk(
        (a, a_batch, 0),
        (b, b_batch, 0),
        (c, c_batch, c_row),
        (scale_a, scale_a_batch, scale_a_row, scale_a_k),
        (scale_b, scale_b_batch, scale_b_row, scale_b_k),
        bias,
        (batch_size, m, n, k),
        (BLOCK_M, BLOCK_N, BLOCK_K),
        (EXTENT_A, EXTENT_B, EXTENT_K),
        GROUP,
        HALVES,
        SCALED,
        PROMOTED,
        HAS_BIAS,
        ACTIVATION,
        True,
        STORE_TMA,
    )


@triton.jit(do_not_specialize=["batch_size", "m", "scale_a_batch", "scale_b_batch"])
def gemm_pointer_kernel(
    a,
    b,
    c,
    scale_a,
    scale_b,
    bias,
    batch_size,
    m,
    n,
    k,
    a_batch,
    a_row,
    b_batch,
    b_row,
    c_batch,
    c_row,
    scale_a_batch,
    scale_a_row,
    scale_a_k,
    scale_b_batch,
    scale_b_row,
    scale_b_k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    HALVES: tl.constexpr,
    SCALED: tl.constexpr,
    EXTENT_A: tl.constexpr,
    EXTENT_B: tl.constexpr,
    EXTENT_K: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiply with masked pointer loads and stores; n and k come larger by SHIFT, strides in elements."""
    _walk(
        (a, a_batch, a_row),
        (b, b_batch, b_row),
        (c, c_batch, c_row),
        (scale_a, scale_a_batch, scale_a_row, scale_a_k),
        (scale_b, scale_b_batch, scale_b_row, scale_b_k),
        bias,
        (batch_size, m, n - SHIFT, k - SHIFT),
        (BLOCK_M, BLOCK_N, BLOCK_K),
        (EXTENT_A, EXTENT_B, EXTENT_K),
        GROUP,
        HALVES,
        SCALED,
        PROMOTED,
        HAS_BIAS,
        ACTIVATION,
        False,
        False,
    )


def gemm_launch(
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    group: int,
    stages: int,
    warps: int,
    programs: int,
    epilogue_halves: int = 1,
    promoted: bool = False,
    activation: str | None = None,
    block: tuple[int, int, int] | None = None,
) -> Launch:
    """Return the launch of `gemm_tma_kernel`: kernel, grid, arguments, options.

    a: ([batch,] m, k). b: ([batch,] n, k). c: ([batch,] m, n). bias: (n,) of any float dtype. Scales and block: see the
    module. promoted: FP8 sums leave the tensor core's accumulator every 128 values of k. C is written by TMA where its
    rows are aligned multiples of 16 bytes, else by masked stores; epilogue_halves: in 1 or 2 halves of a tile's
    columns, 2 taking half the shared memory. Raises ValueError for operands that do not fit together or that TMA cannot
    take.
    """
    check_config(block_k, block, activation)
    size = sizes(a, b, c)
    scales = scaling(size, scale_a, scale_b, block)
    out = matrix(c)
    store_tma = tma_writes(c)
    args = (
        descriptor(a, block_m, block_k),
        descriptor(b, block_n, block_k),
        descriptor(c, block_m, block_n // epilogue_halves) if store_tma else c,
        b if scale_a is None else scale_a,
        b if scale_b is None else scale_b,
        b if bias is None else bias,
        *size,
        int(matrix(a).batch_stride > 0),
        int(matrix(b).batch_stride > 0),
        out.batch_stride,
        out.row_stride,
        *scales.strides,
        block_m,
        block_n,
        block_k,
        group,
        epilogue_halves,
        scales.scaled,
        scales.extent_a,
        scales.extent_b,
        scales.extent_k,
        promoted and a.dtype.itemsize == 1,
        bias is not None,
        activation or "none",
        store_tma,
    )
    options = {"num_warps": warps, "num_stages": stages}
    return Launch(gemm_tma_kernel, launch_grid(size, block_m, block_n, programs), args, options)


def gemm_pointer_launch(
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    group: int,
    stages: int,
    warps: int,
    programs: int,
    epilogue_halves: int = 1,
    promoted: bool = False,
    activation: str | None = None,
    block: tuple[int, int, int] | None = None,
) -> Launch:
    """Return the launch of `gemm_pointer_kernel`, which takes any alignment; else as `gemm_launch`."""
    check_config(block_k, block, activation)
    size = sizes(a, b, c)
    scales = scaling(size, scale_a, scale_b, block)
    left, right, out = matrix(a), matrix(b), matrix(c)
    args = (
        a,
        b,
        c,
        b if scale_a is None else scale_a,
        b if scale_b is None else scale_b,
        b if bias is None else bias,
        size.batch,
        size.m,
        size.n + SHIFT.value,
        size.k + SHIFT.value,
        left.batch_stride,
        left.row_stride,
        right.batch_stride,
        right.row_stride,
        out.batch_stride,
        out.row_stride,
        *scales.strides,
        block_m,
        block_n,
        block_k,
        group,
        epilogue_halves,
        scales.scaled,
        scales.extent_a,
        scales.extent_b,
        scales.extent_k,
        promoted and a.dtype.itemsize == 1,
        bias is not None,
        activation or "none",
    )
    options = {"num_warps": warps, "num_stages": stages}
    return Launch(gemm_pointer_kernel, launch_grid(size, block_m, block_n, programs), args, options)


def gemm(*operands: Any, **config: Any) -> None:
    """Multiply into c with operands by TMA; arguments as `gemm_launch`."""
    gemm_launch(*operands, **config).run()


def gemm_pointer(*operands: Any, **config: Any) -> None:
    """Multiply into c with operands by pointers; arguments as `gemm_pointer_launch`."""
    gemm_pointer_launch(*operands, **config).run()
