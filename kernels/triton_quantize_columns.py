"""Quantize and transpose, one scale a column of the source: for operands that are not K-major.

The rules are those of `triton_quantize`. Short columns are kept whole by a program: one launch, one read, one write.
Longer ones take two launches, which read twice: the maxima, then the cast. Tried on an H200 and not faster at 4096^2
to 16384 x 4096: one launch that reads twice (113 us at 8192^2 bf16), one whose programs exchange maxima and wait for
one another, which reads once (118 us; the waiting takes longer than the second read), and whole columns of 4096 values
that a program keeps as bf16.
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
    encode_four,
    errors_of,
    four_magnitudes,
    judge,
    judge_sums,
    load_four,
    looks,
    magnitude,
    number_of,
    scales_of,
    store_four,
    store_scale,
    wait_for_predecessor,
)

WHOLE_COLUMN = 2048
"""Length of columns up to which a program keeps whole ones."""
COLUMN_SPLITS = 16
"""Parts of the maximum of a longer column: so many float32 values of workspace for each column of the source."""


@triton.jit
def quantize_column_tile(
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
    whole: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Quantize and transpose `block_cols` columns of x (rows, cols), each whole in registers, and look at them.

    Sizes are not shifted.
    """
    number = number_of(sums)
    quad = tl.arange(0, block_rows // 4).to(tl.int64)[:, None]
    col = tile.to(tl.int64) * block_cols + tl.arange(0, block_cols)
    first, second, third, fourth = load_four(x, quad, col[None, :], rows, cols, stride)
    amax = tl.max(four_magnitudes(first, second, third, fourth), 0)
    look = looks(number, tile, tl.cdiv(out_rows, block_cols))
    col_scale, inverse = scales_of(amax, out, scale)
    store_scale(scale + col, col_scale, col < out_rows)
    word = tl.trans(encode_four(first, second, third, fourth, inverse[None, :], out, whole))
    store_four(out, word, col[:, None], tl.trans(quad), out_rows, out_cols, whole)
    if sums is not None:
        if look:
            piece: tl.constexpr = block_rows // 16
            square, error = errors_of(
                x, out, scale, inverse, col, cols, 1, 0, rows, stride, rows, block_cols, 1, piece, 4, False
            )
            judge(sums, trip, number, square, error)
        if tile == tl.cdiv(out_rows, block_cols) - 1:
            count_on(sums, number)


@triton.jit
def quantize_columns_kernel(
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
    whole: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize and transpose `block_cols` columns a program. whole: whether out_cols is a multiple of 4."""
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    tile = tl.program_id(0)
    quantize_column_tile(
        x, out, scale, sums, trip, tile, rows, cols, stride, out_rows, out_cols, whole, block_rows, block_cols
    )


@triton.jit
def column_amax_kernel(
    x,
    partial,
    rows,
    cols,
    stride,
    rows_per_split,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Store the finite amax of each column over one split of the rows in partial[column, split]."""
    wait_for_predecessor(dependent)
    rows, cols = rows - SHIFT, cols - SHIFT
    col = tl.program_id(0).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    first = tl.program_id(1) * rows_per_split
    largest = tl.zeros((block_rows, block_cols), tl.float32)
    for start in range(first, first + rows_per_split, block_rows):
        row = start + tl.arange(0, block_rows)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        source = x + row.to(tl.int64)[:, None] * stride + col[None, :]
        largest = tl.maximum(largest, magnitude(tl.load(source, mask=inside, other=0.0).to(tl.float32)))
    tl.store(partial + col * tl.num_programs(1) + tl.program_id(1), tl.max(largest, 0), mask=col < cols)


@triton.jit
def column_scales(partial, out, scale, col, cols, splits: tl.constexpr):
    """Return the scales of columns, given their partial maxima, and the reciprocals.

    The maxima of a column lie side by side, so that the threads of one warp have them all, and their maximum takes no
    shared memory.
    """
    split = tl.arange(0, splits)
    maxima = tl.load(partial + col[:, None] * splits + split[None, :], mask=(col < cols)[:, None], other=0.0)
    return scales_of(tl.max(maxima, 1), out, scale)


@triton.jit
def scale_columns_kernel(
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
    inside: tl.constexpr,
    splits: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Scale, cast and transpose one tile of x (rows, cols), given the partial maxima of its columns.

    inside: whether every tile lies inside, and rows are aligned. Others go byte by byte: their loads are not
    vectorized, their values change their layout, and words came out wrong on an H200 (Triton 3.6).
    """
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    row_tiles = tl.cdiv(out_cols, block_rows)
    program = tl.program_id(0)
    number = number_of(sums)
    row_tile, col_tile = program % row_tiles, program // row_tiles
    if inside:
        quad = row_tile.to(tl.int64) * (block_rows // 4) + tl.arange(0, block_rows // 4)[:, None]
    else:
        row = row_tile.to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = col_tile.to(tl.int64) * block_cols + tl.arange(0, block_cols)
    if inside:
        first, second, third, fourth = load_four(x, quad, col[None, :], rows, cols, stride)
    col_scale, inverse = column_scales(partial, out, scale, col, cols, splits)
    look = looks(number, col_tile, tl.cdiv(out_rows, block_cols))
    if row_tile == 0:
        store_scale(scale + col, col_scale, col < out_rows)
    if inside:
        word = tl.trans(encode_four(first, second, third, fourth, inverse[None, :], out, True))
        store_four(out, word, col[:, None], tl.trans(quad), out_rows, out_cols, True)
    else:
        present = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(x + row[:, None] * stride + col[None, :], mask=present, other=0.0).to(tl.float32)
        encoded = tl.trans(encode(value, inverse[None, :], out))
        written = (col < out_rows)[:, None] & (row < out_cols)[None, :]
        tl.store(out + col[:, None] * out_cols + row[None, :], encoded, mask=written)
    if sums is not None:
        if row_tile == 0:
            judge_sums(sums, trip, number, col_tile, out_rows, block_cols)
        if look:
            piece: tl.constexpr = block_rows // 32
            begin = row_tile * block_rows
            square, error = errors_of(
                x,
                out,
                scale,
                inverse,
                col,
                cols,
                1,
                begin,
                begin + block_rows,
                stride,
                rows,
                block_cols,
                1,
                piece,
                8,
                False,
            )
            add_to(sums, col_tile, square, error, out_rows, block_cols)
        if program == tl.num_programs(0) - 1:
            count_on(sums, number)


def whole_columns_tile(out_cols: int) -> tuple[int, int] | None:
    """Return the extents of the source that one program keeps in registers, None where columns are too long."""
    if out_cols > WHOLE_COLUMN:
        return None
    block_rows = max(64, triton.next_power_of_2(out_cols))
    return block_rows, 16 if block_rows <= 1024 else 8


def columns_workspace(shape: tuple[int, int], out_shape: tuple[int, int]) -> int:
    """Return how many float32 values of workspace `quantize_columns` needs: 0 where one launch does."""
    return COLUMN_SPLITS * shape[1] if whole_columns_tile(out_shape[1]) is None else 0


def columns_launches(
    shape: tuple[int, int],
    stride: int,
    out_shape: tuple[int, int],
    *,
    aligned: bool = True,
    wide: bool = False,
) -> tuple[Launch, ...]:
    """Return the launches of `quantize_columns`.

    aligned: the address of x is a multiple of 16. wide: x is float32.

    Either one, with the pointers x, out, scale, sums, trip; or two, with x, partial and x, partial, out, scale, sums,
    trip.
    """
    (rows, cols), (out_rows, out_cols) = shape, out_shape
    shift = SHIFT.value
    source = (rows + shift, cols + shift, stride)
    sizes = (*source, out_rows + shift, out_cols + shift)
    whole = out_cols % 4 == 0
    tile = whole_columns_tile(out_cols)
    if tile is not None:
        options = {"whole": whole, "block_rows": tile[0], "block_cols": tile[1], "num_warps": 4}
        return (Launch(quantize_columns_kernel, (triton.cdiv(out_rows, tile[1]), 1, 1), sizes, options),)
    block_rows = (
        64 if rows <= 256 * COLUMN_SPLITS else 32
    )  # on an H200 12.9 us and 14.8 us at 4096^2, 41 and 37 at 8192^2
    rows_per_split = triton.cdiv(triton.cdiv(rows, COLUMN_SPLITS), block_rows) * block_rows
    amax = Launch(
        column_amax_kernel,
        (triton.cdiv(cols, 128), COLUMN_SPLITS, 1),
        (*source, rows_per_split),
        {"block_rows": block_rows, "block_cols": 128, "num_warps": 4},
    )
    inside = rows == out_cols and rows % 128 == 0 and cols == out_rows and cols % 64 == 0
    inside = inside and aligned and stride % 16 == 0
    cast = Launch(
        scale_columns_kernel,
        (triton.cdiv(out_cols, 128) * triton.cdiv(out_rows, 64), 1, 1),
        sizes,
        {
            "inside": inside,
            "splits": COLUMN_SPLITS,
            "block_rows": 128,
            "block_cols": 64,
            "num_warps": 4 if inside else 8,
            "maxnreg": 80 if inside and not wide else None,  # 6 programs a multiprocessor, not 4 or 5
        },
    )
    return amax, cast


def quantize_columns(
    x: Any, out: Any, scale: Any, partial: Any | None = None, sums: Any | None = None, trip: Any | None = None
) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale a column, and transpose it.

    out: (>= cols, >= rows) FP8, contiguous. scale: one float32 or uint8 (e8m0) for each row of out. partial: the
    workspace of `columns_workspace`, of any content, None where that is 0. sums, trip: None, or what
    `triton_quantize_common.judge` says, for the guard.
    """
    shape, out_shape = (x.shape[0], x.shape[1]), (out.shape[0], out.shape[1])
    first, *rest = columns_launches(
        shape, x.stride(0), out_shape, aligned=x.data_ptr() % 16 == 0, wide=x.element_size() == 4
    )
    if not rest:
        first.run(x, out, scale, sums, trip)
        return
    first.run(x, partial)
    rest[0].run(x, partial, out, scale, sums, trip)
