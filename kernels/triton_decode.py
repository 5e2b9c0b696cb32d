"""Decode GEMM in Triton: few rows of activations by a wide weight, C (batch, m, n) = A (batch, m, k) B (batch, n, k)^T.

For m up to 256. The operands are swapped, so that a tile of the weight B is the tensor core's M and the few rows of A
its N; wide K steps keep enough bytes in flight. Where n has too few tiles to fill the GPU, k is split: each split
writes its partial sums to a workspace and the last to arrive adds them up in a fixed order, in the same launch, so that
results are the same in each run. Dtypes, scales, bias and activation are those of `dispatch.kernels.triton_gemm`.

The functions take anything that Triton takes as a pointer and that has shape, stride(), dtype and data_ptr(); the
caller allocates C and the workspace, and chooses the config.
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
    activate,
    check_config,
    descriptor,
    matrix,
    row_scales,
    scaling,
    sizes,
    sum_over_k,
)


@triton.jit
def _finish(
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Scale, bias, activate and store acc (BLOCK_N, BLOCK_M), a tile of C transposed."""
    c, c_batch, c_row = target
    r = row + tl.arange(0, BLOCK_M)
    j = col + tl.arange(0, BLOCK_N)
    if SCALED:
        of_a = row_scales(scales_a, batch, r, m)
        of_b = row_scales(scales_b, batch, j, n)
        acc = acc * of_a[None, :] * of_b[:, None]
    if HAS_BIAS:
        acc += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[:, None]
    acc = activate(acc, ACTIVATION)
    at = c + batch.to(tl.int64) * c_batch + r.to(tl.int64)[None, :] * c_row + j[:, None]
    tl.store(at, acc, mask=(j < n)[:, None] & (r < m)[None, :])


@triton.jit
def _decode(
    a,
    b,
    target,
    scales_a,
    scales_b,
    bias,
    partials,
    arrived,
    size,
    blocks,
    extents,
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    TMA: tl.constexpr,
):
    """Compute one split of one tile. blocks and extents: of the operands as they are swapped, B's first."""
    m, n, k = size
    BLOCK_N: tl.constexpr = blocks[0]
    BLOCK_M: tl.constexpr = blocks[1]
    BLOCK_K: tl.constexpr = blocks[2]
    tiles_m = tl.cdiv(m, BLOCK_M)
    tiles_n = tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    tile_n = program % tiles_n
    split = program // tiles_n % SPLITS
    outer = program // tiles_n // SPLITS
    batch = outer // tiles_m
    row = outer % tiles_m * BLOCK_M
    col = tile_n * BLOCK_N
    steps = tl.cdiv(k, BLOCK_K)
    share = tl.cdiv(steps, SPLITS)
    first, last = split * share, min(split * share + share, steps)
    acc = sum_over_k(b, a, scales_b, scales_a, batch, col, row, n, m, k, first, last, blocks, extents, PROMOTED, TMA)
    if SPLITS > 1:
        within = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
        tile = outer * tiles_n + tile_n
        mine = partials + tile.to(tl.int64) * (SPLITS * BLOCK_N * BLOCK_M)
        tl.store(mine + split * (BLOCK_N * BLOCK_M) + within, acc, cache_modifier=".cg")
        tl.debug_barrier()
        if tl.atomic_add(arrived + tile, 1, sem="acq_rel") == SPLITS - 1:
            acc = tl.zeros((BLOCK_N, BLOCK_M), tl.float32)
            for i in tl.range(0, SPLITS, num_stages=1):
                acc += tl.load(mine + i * (BLOCK_N * BLOCK_M) + within, cache_modifier=".cg")
            tl.store(arrived + tile, 0)
            _finish(
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
                SCALED,
                HAS_BIAS,
                ACTIVATION,
            )
    else:
        _finish(
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
            SCALED,
            HAS_BIAS,
            ACTIVATION,
        )


@triton.jit(do_not_specialize=["m", "k", "a_batch", "b_batch", "scale_a_batch", "scale_b_batch"])
def decode_tma_kernel(
    a,
    b,
    c,
    scale_a,
    scale_b,
    bias,
    partials,
    arrived,
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
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    EXTENT_A: tl.constexpr,
    EXTENT_B: tl.constexpr,
    EXTENT_K: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """Multiply with A and B by TMA descriptors; n comes larger by SHIFT, so that stores to C are vectorized.

    a_batch, b_batch: 1, or 0 for an operand without batch. DEPENDENT: launched beside the kernel before it in the
    stream, for whose end it waits.
    """
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    _decode(
        (a, a_batch, 0),
        (b, b_batch, 0),
        (c, c_batch, c_row),
        (scale_a, scale_a_batch, scale_a_row, scale_a_k),
        (scale_b, scale_b_batch, scale_b_row, scale_b_k),
        bias,
        partials,
        arrived,
        (m, n - SHIFT, k),
        (BLOCK_N, BLOCK_M, BLOCK_K),
        (EXTENT_B, EXTENT_A, EXTENT_K),
        SPLITS,
        SCALED,
        PROMOTED,
        HAS_BIAS,
        ACTIVATION,
        True,
    )


@triton.jit(do_not_specialize=["m", "scale_a_batch", "scale_b_batch"])
def decode_pointer_kernel(
    a,
    b,
    c,
    scale_a,
    scale_b,
    bias,
    partials,
    arrived,
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
    SPLITS: tl.constexpr,
    SCALED: tl.constexpr,
    EXTENT_A: tl.constexpr,
    EXTENT_B: tl.constexpr,
    EXTENT_K: tl.constexpr,
    PROMOTED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiply with masked pointer loads; n and k come larger by SHIFT, strides in elements."""
    _decode(
        (a, a_batch, a_row),
        (b, b_batch, b_row),
        (c, c_batch, c_row),
        (scale_a, scale_a_batch, scale_a_row, scale_a_k),
        (scale_b, scale_b_batch, scale_b_row, scale_b_k),
        bias,
        partials,
        arrived,
        (m, n - SHIFT, k - SHIFT),
        (BLOCK_N, BLOCK_M, BLOCK_K),
        (EXTENT_B, EXTENT_A, EXTENT_K),
        SPLITS,
        SCALED,
        PROMOTED,
        HAS_BIAS,
        ACTIVATION,
        False,
    )


def decode_workspace(m: int, n: int, batch: int, *, block_m: int, block_n: int, splits: int) -> tuple[int, int]:
    """Return how many float32 partial sums and how many int32 counters a launch needs: (0, 0) for one split.

    The counters must be zero before the first launch; each launch leaves them zero. Launches that may overlap need
    workspaces of their own.
    """
    if splits == 1:
        return 0, 0
    tiles = batch * triton.cdiv(m, block_m) * triton.cdiv(n, block_n)
    return tiles * splits * block_m * block_n, tiles


def decode_launch(
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    workspace: tuple[Any, Any] | None = None,
    *,
    block_m: int,
    block_n: int,
    block_k: int,
    splits: int,
    stages: int,
    warps: int,
    tma: bool = True,
    promoted: bool = False,
    activation: str | None = None,
    block: tuple[int, int, int] | None = None,
    dependent: bool = False,
) -> Launch:
    """Return the launch of `decode_tma_kernel`, or of `decode_pointer_kernel` where tma is False.

    a: ([batch,] m, k). b: ([batch,] n, k). c: ([batch,] m, n). bias: (n,). Scales and block: see
    `dispatch.kernels.triton_gemm`. block_m: columns of the tensor core's tile, at least 16; block_n: its rows.
    dependent: programmatic
    dependent launch, with tma on sm90 and later. workspace: partial sums and counters as `decode_workspace` counts
    them, needed where splits > 1. Splits without a K step add zeros. Raises ValueError for operands that do not fit
    together or that TMA cannot take.
    """
    check_config(block_k, block, activation)
    if splits > 1 and workspace is None:
        raise ValueError(f"splits={splits} needs a workspace: see decode_workspace")
    size = sizes(a, b, c)
    scales = scaling(size, scale_a, scale_b, block)
    left, right, out = matrix(a), matrix(b), matrix(c)
    partials, arrived = workspace or (c, c)
    pointers = (
        c,
        b if scale_a is None else scale_a,
        b if scale_b is None else scale_b,
        b if bias is None else bias,
        partials,
        arrived,
    )
    head: tuple[Any, ...]
    if tma:
        head = (
            descriptor(a, block_m, block_k),
            descriptor(b, block_n, block_k),
            *pointers,
            size.m,
            size.n + SHIFT.value,
            size.k,
            int(left.batch_stride > 0),
            int(right.batch_stride > 0),
        )
    else:
        steps = (left.batch_stride, left.row_stride, right.batch_stride, right.row_stride)
        head = (a, b, *pointers, size.m, size.n + SHIFT.value, size.k + SHIFT.value, *steps)
    args = (
        *head,
        out.batch_stride,
        out.row_stride,
        *scales.strides,
        block_m,
        block_n,
        block_k,
        splits,
        scales.scaled,
        scales.extent_a,
        scales.extent_b,
        scales.extent_k,
        promoted and a.dtype.itemsize == 1,
        bias is not None,
        activation or "none",
        *((dependent,) if tma else ()),
    )
    tiles = size.batch * triton.cdiv(size.m, block_m) * triton.cdiv(size.n, block_n)
    kernel = decode_tma_kernel if tma else decode_pointer_kernel
    options = {"num_warps": warps, "num_stages": stages, **({"launch_pdl": True} if dependent and tma else {})}
    return Launch(kernel, (tiles * splits, 1, 1), args, options)


def decode(*operands: Any, **config: Any) -> None:
    """Multiply few rows into c; arguments as `decode_launch`."""
    decode_launch(*operands, **config).run()
