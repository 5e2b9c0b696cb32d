"""One-pass quantizers in Triton: bf16, fp16 or fp32 to e4m3 or e5m2 with one scale per row, column or tensor.

All share these rules, and so do `triton_quantize_blocks`, `_columns` and `_many`. amax is taken over finite values
only; scale = clamp(amax / format max, 2**-126, float32 max) and decodes; an e8m0 scale is that rounded up to a power of
two. A value is saturated times 1/scale (the reference quantizer divides by the scale: where 1/scale is rounded, a value
a few 2**-24 from the middle between two codes may take the other one). NaN stays NaN; Inf becomes NaN in e4m3, which
has no Inf, and stays Inf in e5m2. The output is K-major and contiguous; where it is larger than the source, the rest is
written with zeros (and the least scale), so that padding costs no pass of its own. The format is that of the output's
dtype; scales are float32, or uint8 that hold e8m0.

The functions below take anything that Triton takes as a pointer, with a shape and strides in elements. Those named
`..._launch` return a launch without running it.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from dispatch.kernels.triton_quantize_common import (
    SHIFT,
    Launch,
    add_to,
    count_on,
    encode,
    errors_of,
    judge,
    judge_sums,
    looks,
    magnitude,
    number_of,
    scales_of,
    store_scale,
    wait_for_predecessor,
)

ROW_LIMIT = 16384
"""Columns up to which a row is kept in registers; longer ones are read twice, the second time from L2."""
TENSOR_PARTIALS = 512
"""Float32 values of workspace that `quantize_tensor` needs."""


@triton.jit
def quantize_row_tile(
    x,
    out,
    scale,
    sums,
    trip,
    tile,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Quantize `block_rows` rows, each whole in registers, and look at them for the guard. Sizes are not shifted."""
    number = number_of(sums)
    first = tile.to(tl.int64) * block_rows
    row = first + tl.arange(0, block_rows)
    col = tl.arange(0, block_cols)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    source = x + row[:, None] * stride + col[None, :]
    value = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    amax = tl.max(magnitude(value), 1)
    look = looks(number, tile, tl.cdiv(out_rows, block_rows))
    row_scale, inverse = scales_of(amax, out, scale)
    encoded = encode(value, inverse[:, None], out)
    written = (row < out_rows)[:, None] & (col < out_cols)[None, :]
    tl.store(out + row[:, None] * out_cols + col[None, :], encoded, mask=written)
    store_scale(scale + row, row_scale, row < out_rows)
    if sums is not None:
        if look:
            piece: tl.constexpr = max(1, block_cols // 4)
            square, error = errors_of(
                x, out, scale, inverse, row, rows, stride, 0, cols, 1, cols, block_rows, 1, piece, 2, False
            )
            judge(sums, trip, number, square, error)
        if tile == tl.cdiv(out_rows, block_rows) - 1:
            count_on(sums, number)


@triton.jit
def quantize_rows_kernel(
    x,
    out,
    scale,
    sums,
    trip,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize `block_rows` rows a program: one read, one write."""
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    tile = tl.program_id(0)
    quantize_row_tile(x, out, scale, sums, trip, tile, rows, cols, stride, out_rows, out_cols, block_rows, block_cols)


@triton.jit
def quantize_long_rows_kernel(
    x,
    out,
    scale,
    sums,
    trip,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize one row in two loops; the second read of it comes from L2."""
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    tile = tl.program_id(0)
    number = number_of(sums)
    row = tile.to(tl.int64)
    offsets = tl.arange(0, block_cols)
    source = x + row * stride
    largest = tl.zeros((block_cols,), tl.float32)
    for start in range(0, cols, block_cols):
        inside = (start + offsets < cols) & (row < rows)
        value = tl.load(source + start + offsets, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    amax = tl.max(largest, 0, keep_dims=True)
    look = looks(number, tile, out_rows)
    row_scale, inverse = scales_of(amax, out, scale)
    for start in range(0, out_cols, block_cols):
        inside = (start + offsets < cols) & (row < rows)
        value = tl.load(source + start + offsets, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        encoded = encode(value, inverse, out)
        tl.store(out + row * out_cols + start + offsets, encoded, mask=start + offsets < out_cols)
    one = tl.arange(0, 1)
    store_scale(scale + row + one, row_scale, one == 0)
    if sums is not None:
        if look:
            piece: tl.constexpr = block_cols // 4
            square, error = errors_of(
                x, out, scale, inverse, row + one, rows, stride, 0, cols, 1, cols, 1, 1, piece, 4, False
            )
            judge(sums, trip, number, square, error)
        if tile == out_rows - 1:
            count_on(sums, number)


@triton.jit
def tensor_amax_kernel(
    x,
    partial,
    rows,
    cols,
    stride,
    row_tiles,
    col_tiles,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Store the finite amax of every num_programs-th tile of x (rows, cols) in partial[program]."""
    wait_for_predecessor(dependent)
    rows, cols = rows - SHIFT, cols - SHIFT
    largest = tl.zeros((block_rows, block_cols), tl.float32)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row = (tile // col_tiles).to(tl.int64) * block_rows + tl.arange(0, block_rows)
        col = (tile % col_tiles).to(tl.int64) * block_cols + tl.arange(0, block_cols)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, magnitude(value))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def scale_tensor_kernel(
    x,
    partial,
    out,
    scale,
    sums,
    trip,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    col_tiles,
    partials: tl.constexpr,
    transposed: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Scale and cast one tile of x (rows, cols), transposed if asked, given the partial maxima of the whole.

    Tiles go from the last to the first: the last were read most recently and are likelier still in L2.
    """
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    program, programs = tl.program_id(0), tl.num_programs(0)
    number = number_of(sums)
    amax = tl.max(tl.load(partial + tl.arange(0, partials)), 0, keep_dims=True)
    whole_scale, inverse = scales_of(amax, out, scale)
    tile = programs - 1 - program
    lines: tl.constexpr = block_cols if transposed else block_rows
    across, part = tile % col_tiles, tile // col_tiles
    if not transposed:
        across, part = part, across
    look = looks(number, across, tl.cdiv(out_rows, lines))
    row = (tile // col_tiles).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = (tile % col_tiles).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    if program == 0:
        one = tl.arange(0, 1)
        store_scale(scale + one, whole_scale, one == 0)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    encoded = encode(value, inverse[None, :], out)
    if transposed:
        written = (col < out_rows)[:, None] & (row < out_cols)[None, :]
        tl.store(out + col[:, None] * out_cols + row[None, :], tl.trans(encoded), mask=written)
    else:
        written = (row < out_rows)[:, None] & (col < out_cols)[None, :]
        tl.store(out + row[:, None] * out_cols + col[None, :], encoded, mask=written)
    if sums is not None:
        span: tl.constexpr = block_rows if transposed else block_cols
        if part == 0:
            judge_sums(sums, trip, number, across, out_rows, lines)
        if look:
            first = part * span
            piece: tl.constexpr = span // 16
            if transposed:
                square, error = errors_of(
                    x, out, scale, inverse, col, cols, 1, first, first + span, stride, rows, lines, 1, piece, 1, True
                )
            else:
                square, error = errors_of(
                    x, out, scale, inverse, row, rows, stride, first, first + span, 1, cols, lines, 1, piece, 4, True
                )
            add_to(sums, across, square, error, out_rows, lines)
        if tile == 0:
            count_on(sums, number)


def rows_launch(shape: tuple[int, int], stride: int, out_shape: tuple[int, int]) -> Launch:
    """Return the launch of `quantize_rows`; its pointers are x, out, scale, sums and trip."""
    (rows, cols), (out_rows, out_cols) = shape, out_shape
    shift = SHIFT.value
    sizes = (rows + shift, cols + shift, stride, out_rows + shift, out_cols + shift)
    if out_cols > ROW_LIMIT:
        options = {"block_cols": 8192, "num_warps": 16}
        return Launch(quantize_long_rows_kernel, (out_rows, 1, 1), sizes, options)
    block_cols = max(16, triton.next_power_of_2(out_cols))
    block_rows = min(16, max(1, 4096 // block_cols))
    warps = 4 if block_cols <= 4096 else 8
    options = {"block_rows": block_rows, "block_cols": block_cols, "num_warps": warps}
    return Launch(quantize_rows_kernel, (triton.cdiv(out_rows, block_rows), 1, 1), sizes, options)


def quantize_rows(x: Any, out: Any, scale: Any, sums: Any | None = None, trip: Any | None = None) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale a row.

    out: (>= rows, >= cols) FP8, contiguous. scale: one float32 or uint8 (e8m0) for each row of out.

    sums, trip: None, or what `triton_quantize_common.judge` says, for the guard.
    """
    shape, out_shape = (x.shape[0], x.shape[1]), (out.shape[0], out.shape[1])
    rows_launch(shape, x.stride(0), out_shape).run(x, out, scale, sums, trip)


def tensor_launches(
    shape: tuple[int, int],
    stride: int,
    out_shape: tuple[int, int],
    *,
    transposed: bool = False,
) -> tuple[Launch, Launch]:
    """Return the two launches of `quantize_tensor`; their pointers: x, partial; x, partial, out, scale, sums, trip."""
    (rows, cols), (out_rows, out_cols) = shape, out_shape
    shift = SHIFT.value
    sizes = (rows + shift, cols + shift, stride)
    amax = Launch(
        tensor_amax_kernel,
        (TENSOR_PARTIALS, 1, 1),
        (*sizes, triton.cdiv(rows, 16), triton.cdiv(cols, 512)),
        {"block_rows": 16, "block_cols": 512, "num_warps": 8},
    )
    height, width = (128, 64) if transposed else (16, 512)
    grid_rows, grid_cols = (out_cols, out_rows) if transposed else (out_rows, out_cols)
    col_tiles = triton.cdiv(grid_cols, width)
    options = {"partials": TENSOR_PARTIALS, "transposed": transposed}
    cast = Launch(
        scale_tensor_kernel,
        (triton.cdiv(grid_rows, height) * col_tiles, 1, 1),
        (*sizes, out_rows + shift, out_cols + shift, col_tiles),
        {**options, "block_rows": height, "block_cols": width, "num_warps": 8},
    )
    return amax, cast


def quantize_tensor(
    x: Any,
    out: Any,
    scale: Any,
    partial: Any,
    sums: Any | None = None,
    trip: Any | None = None,
    *,
    transposed: bool = False,
) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale, and transpose it if asked.

    out: (>= rows, >= cols), transposed (>= cols, >= rows), FP8, contiguous. scale: one float32 or uint8 (e8m0).
    partial: TENSOR_PARTIALS float32 values of workspace. sums, trip: as in `quantize_rows`.
    """
    shape, out_shape = (x.shape[0], x.shape[1]), (out.shape[0], out.shape[1])
    amax, cast = tensor_launches(shape, x.stride(0), out_shape, transposed=transposed)
    amax.run(x, partial)
    cast.run(x, partial, out, scale, sums, trip)
