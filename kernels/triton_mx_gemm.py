"""MX GEMM in Triton: C (batch, m, n) = activation(A (batch, m, k) B (batch, n, k)^T + bias), block-scaled in hardware.

A and B are K-major e4m3 or e5m2 with one e8m0 scale (a biased exponent: 2**(byte - 127), 255 is NaN) for each 32 values
of k, as the OCP Microscaling Formats specification 1.0 has it. On sm100 and sm120 the tensor core applies the scales;
on sm90 Triton decodes to bfloat16 first, exactly. C is bfloat16, float16 or float32. Operands come by TMA, scales by
pointers: uint8 views of shape ([batch,] rows, k/32) in any layout. Either operand may have no batch.

The functions take anything that Triton takes as a pointer and that has shape, stride(), dtype and data_ptr(); the
caller allocates C and chooses the config.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from dispatch.kernels._triton_tile import (
    Launch,
    block_strides,
    check_config,
    descriptor,
    finish_tile,
    grouped_tile,
    launch_grid,
    load_tile,
    matrix,
    sizes,
    tma_writes,
)
from triton._utils import canonicalize_dtype

GROUP_SIZE = tl.constexpr(32)
"""Values of k that share a scale."""
ONE = tl.constexpr(127)
"""The e8m0 byte of a scale of 1."""


@triton.jit
def _exponents(
    scale, row, group, rows, groups, row_step, k_step, ROWS: tl.constexpr, GROUPS: tl.constexpr, WHOLE_K: tl.constexpr
):
    """Return the scales (ROWS, GROUPS) from (row, group) on; past the end of k they are 1, over operands that are 0.

    Rows past the end get the last row's scales. WHOLE_K: k has no end inside a step, and the loads are vectorized.
    """
    r = tl.minimum(row + tl.arange(0, ROWS), rows - 1)
    g = group + tl.arange(0, GROUPS)
    at = scale + r.to(tl.int64)[:, None] * row_step + g.to(tl.int64)[None, :] * k_step
    return tl.load(at) if WHOLE_K else tl.load(at, mask=(g < groups)[None, :], other=ONE)


@triton.jit(do_not_specialize=["batch_size", "m", "n", "k", "a_batch", "b_batch"])
def mx_gemm_kernel(
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
    WHOLE_K: tl.constexpr,
    FORMAT_A: tl.constexpr,
    FORMAT_B: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STORE_TMA: tl.constexpr,
):
    """Multiply with A and B by TMA descriptors and block scales in the tensor core; c: a descriptor if STORE_TMA.

    a_batch, b_batch: 1, or 0 for an operand without batch. WHOLE_K: BLOCK_K divides k.
    FORMAT: "e4m3" or "e5m2".
    """
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    groups = tl.cdiv(k, GROUP_SIZE)
    GROUPS: tl.constexpr = BLOCK_K // GROUP_SIZE
    for tile in tl.range(tl.program_id(0), batch_size * tiles_m * tiles_n, tl.num_programs(0)):
        batch, tile_m, tile_n = grouped_tile(tile, tiles_m, tiles_n, GROUP)
        row = tile_m * BLOCK_M
        col = tile_n * BLOCK_N
        of_a = scale_a + batch.to(tl.int64) * scale_a_batch
        of_b = scale_b + batch.to(tl.int64) * scale_b_batch
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for step in tl.range(0, tl.cdiv(k, BLOCK_K)):
            tile_a = load_tile((a, a_batch, 0), batch, row, step * BLOCK_K, m, k, BLOCK_M, BLOCK_K, True)
            tile_b = load_tile((b, b_batch, 0), batch, col, step * BLOCK_K, n, k, BLOCK_N, BLOCK_K, True)
            group = step * GROUPS
            exponent_a = _exponents(of_a, row, group, m, groups, scale_a_row, scale_a_k, BLOCK_M, GROUPS, WHOLE_K)
            exponent_b = _exponents(of_b, col, group, n, groups, scale_b_row, scale_b_k, BLOCK_N, GROUPS, WHOLE_K)
            acc = tl.dot_scaled(tile_a, exponent_a, FORMAT_A, tile_b.T, exponent_b, FORMAT_B, acc)
        finish_tile(
            acc,
            (c, c_batch, c_row),
            (scale_a, 0, 0, 0),
            (scale_b, 0, 0, 0),
            bias,
            batch,
            row,
            col,
            m,
            n,
            BLOCK_M,
            BLOCK_N,
            HALVES,
            False,
            HAS_BIAS,
            ACTIVATION,
            STORE_TMA,
        )


def _format_of(x: Any) -> str:
    """Return dot_scaled's name of an FP8 dtype."""
    return {"fp8e4nv": "e4m3", "fp8e5": "e5m2"}[canonicalize_dtype(x.dtype)]


def mx_gemm_launch(
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any,
    scale_b: Any,
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
    activation: str | None = None,
) -> Launch:
    """Return the launch of `mx_gemm_kernel`: kernel, grid, arguments, options.

    a: ([batch,] m, k). b: ([batch,] n, k). c: ([batch,] m, n). scale_a: ([batch,] m, k/32) and scale_b: ([batch,] n,
    k/32), uint8. bias: (n,) of any float dtype. Raises ValueError for operands that do not fit together, for scales of
    another dtype, or that TMA cannot take.
    """
    check_config(block_k, None, activation)
    size = sizes(a, b, c)
    for scale in (scale_a, scale_b):
        if "uint8" not in str(scale.dtype):
            raise ValueError(f"MX scales of dtype {scale.dtype}: pass the e8m0 bytes as uint8")
    strides_a = block_strides(scale_a, size.batch, size.m, size.k, 1, GROUP_SIZE.value)
    strides_b = block_strides(scale_b, size.batch, size.n, size.k, 1, GROUP_SIZE.value)
    out = matrix(c)
    store_tma = tma_writes(c)
    args = (
        descriptor(a, block_m, block_k),
        descriptor(b, block_n, block_k),
        descriptor(c, block_m, block_n // epilogue_halves) if store_tma else c,
        scale_a,
        scale_b,
        b if bias is None else bias,
        *size,
        int(matrix(a).batch_stride > 0),
        int(matrix(b).batch_stride > 0),
        out.batch_stride,
        out.row_stride,
        *strides_a,
        *strides_b,
        block_m,
        block_n,
        block_k,
        group,
        epilogue_halves,
        size.k % block_k == 0,
        _format_of(a),
        _format_of(b),
        bias is not None,
        activation or "none",
        store_tma,
    )
    options = {"num_warps": warps, "num_stages": stages}
    return Launch(mx_gemm_kernel, launch_grid(size, block_m, block_n, programs), args, options)


def mx_gemm(*operands: Any, **config: Any) -> None:
    """Multiply MX operands into c; arguments as `mx_gemm_launch`."""
    mx_gemm_launch(*operands, **config).run()
