"""Block quantizers in Triton: 1x128, 128x128, 64x64, 32x32 and MX 1x32, of either order, one read and one write.

The rules are those of `triton_quantize`; a scale belongs to height x width neighbours of the output, a partial last
block included.
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

TILES = {(1, 128): (16, 512), (128, 128): (128, 128), (64, 64): (64, 128), (32, 32): (32, 128), (1, 32): (8, 512)}
"""The rows and columns of a program's tile for each block, the fastest on an H200."""
TRANSPOSED_TILE = (128, 64)
"""The same of the source where it is transposed: one line of 128 bytes each of the source and of the output."""


@triton.jit
def look_at_blocks(
    x,
    out,
    scale,
    sums,
    trip,
    number,
    look,
    tile,
    part,
    lines,
    line_stride,
    length,
    stride,
    out_rows,
    blocks: tl.constexpr,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    height: tl.constexpr,
    piece: tl.constexpr,
):
    """Look at a tile of `blocks` blocks side by side of each line for the guard, and judge, in launches that do.

    Lines are rows of the output. width: of a block along a line; height: how many lines it has, of the tile's.
    """
    if part == 0:
        judge_sums(sums, trip, number, tile, out_rows, tile_rows)
    if look:
        line, first = tile.to(tl.int64) * tile_rows + tl.arange(0, tile_rows), part * blocks * width
        square, error = tl.zeros((tile_rows,), tl.float32), tl.zeros((tile_rows,), tl.float32)
        for start in range(first, tl.minimum(first + blocks * width, length), width):
            more_square, more_error = errors_of(
                x,
                out,
                scale,
                None,
                line,
                lines,
                line_stride,
                start,
                start + width,
                stride,
                length,
                tile_rows,
                height,
                piece,
                width // piece,
                height > 1,
            )
            square += more_square
            error += more_error
        add_to(sums, tile, square, error, out_rows, tile_rows)
    if tl.program_id(0) == tl.num_programs(0) - 1:
        count_on(sums, number)


@triton.jit
def quantize_blocks_kernel(
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
    scale_stride_row,
    scale_stride_col,
    down: tl.constexpr,
    height: tl.constexpr,
    across: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize `down` by `across` blocks of height x width values of x (rows, cols).

    scale_stride_row and scale_stride_col, in elements, step from block to block along the rows and columns of out.
    """
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    col_tiles = tl.cdiv(out_cols, across * width)
    program = tl.program_id(0)
    number = number_of(sums)
    block_row = (program // col_tiles).to(tl.int64) * down + tl.arange(0, down)
    block_col = (program % col_tiles).to(tl.int64) * across + tl.arange(0, across)
    row = (block_row[:, None] * height + tl.arange(0, height)[None, :])[:, :, None, None]
    col = (block_col[:, None] * width + tl.arange(0, width)[None, :])[None, None, :, :]
    value = tl.load(x + row * stride + col, mask=(row < rows) & (col < cols), other=0.0).to(tl.float32)
    amax = tl.max(tl.max(magnitude(value), 3), 1)  # (down, across)
    look = looks(number, program // col_tiles, tl.cdiv(out_rows, down * height))
    block_scale, inverse = scales_of(amax, out, scale)
    encoded = encode(value, inverse[:, None, :, None], out)
    tl.store(out + row * out_cols + col, encoded, mask=(row < out_rows) & (col < out_cols))
    present = (block_row * height < out_rows)[:, None] & (block_col * width < out_cols)[None, :]
    place = scale + block_row[:, None] * scale_stride_row + block_col[None, :] * scale_stride_col
    store_scale(place, block_scale, present)
    if sums is not None:
        piece: tl.constexpr = min(width, max(16, 1024 // (down * height)))
        look_at_blocks(
            x,
            out,
            scale,
            sums,
            trip,
            number,
            look,
            program // col_tiles,
            program % col_tiles,
            rows,
            stride,
            cols,
            1,
            out_rows,
            across,
            width,
            down * height,
            height,
            piece,
        )


@triton.jit
def transpose_blocks_kernel(
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
    scale_stride_row,
    scale_stride_col,
    whole: tl.constexpr,
    down: tl.constexpr,
    quarter: tl.constexpr,
    across: tl.constexpr,
    width: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize and transpose `down` by `across` blocks of x (rows, cols), each of 4 * quarter x width values."""
    wait_for_predecessor(dependent)
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    height: tl.constexpr = 4 * quarter
    col_tiles = tl.cdiv(out_rows, across * width)
    program = tl.program_id(0)
    number = number_of(sums)
    tile_row = (program // col_tiles).to(tl.int64)
    tile_col = (program % col_tiles).to(tl.int64)
    # The tile has two dimensions, so that lines of out are stored whole; only what is shared has four.
    quad = tile_row * (down * quarter) + tl.arange(0, down * quarter)[:, None]
    col = tile_col * (across * width) + tl.arange(0, across * width)[None, :]
    first, second, third, fourth = load_four(x, quad, col, rows, cols, stride)
    largest = four_magnitudes(first, second, third, fourth).reshape(down, quarter, across, width)
    amax = tl.max(tl.max(largest, 3), 1)  # (down, across)
    look = looks(number, tile_col, col_tiles)
    block_scale, inverse = scales_of(amax, out, scale)
    inverse = tl.broadcast_to(inverse[:, None, :, None], (down, quarter, across, width))
    inverse = inverse.reshape(down * quarter, across * width)
    word = tl.trans(encode_four(first, second, third, fourth, inverse, out, whole))
    store_four(out, word, tl.trans(col), tl.trans(quad), out_rows, out_cols, whole)
    block_row = tile_row * down + tl.arange(0, down)
    block_col = tile_col * across + tl.arange(0, across)
    present = (block_row * height < out_cols)[:, None] & (block_col * width < out_rows)[None, :]
    place = scale + block_col[None, :] * scale_stride_row + block_row[:, None] * scale_stride_col
    store_scale(place, block_scale, present)
    if sums is not None:
        piece: tl.constexpr = min(height, 16)
        look_at_blocks(
            x,
            out,
            scale,
            sums,
            trip,
            number,
            look,
            program % col_tiles,
            program // col_tiles,
            cols,
            1,
            rows,
            stride,
            out_rows,
            down,
            height,
            across * width,
            width,
            piece,
        )


def blocks_launch(
    shape: tuple[int, int],
    stride: int,
    out_shape: tuple[int, int],
    block: tuple[int, int],
    scale_strides: tuple[int, int],
    *,
    transposed: bool = False,
) -> Launch:
    """Return the launch of `quantize_blocks`; its pointers are x, out, scale, sums and trip."""
    (rows, cols), (out_rows, out_cols) = shape, out_shape
    height, width = reversed(block) if transposed else block
    tile_rows, tile_cols = TRANSPOSED_TILE if transposed else TILES[block]
    span_rows, span_cols = reversed(out_shape) if transposed else out_shape
    down, across = max(1, tile_rows // height), max(1, tile_cols // width)
    row_tiles, col_tiles = triton.cdiv(span_rows, down * height), triton.cdiv(span_cols, across * width)
    programs = row_tiles * col_tiles
    shift = SHIFT.value
    sizes = (rows + shift, cols + shift, stride, out_rows + shift, out_cols + shift, *scale_strides)
    options = {"down": down, "across": across, "width": width}
    options["num_warps"] = max(4, down * height * across * width // 2048)
    if transposed:
        options |= {"whole": out_cols % 4 == 0, "quarter": height // 4}
        return Launch(transpose_blocks_kernel, (programs, 1, 1), sizes, options)
    return Launch(quantize_blocks_kernel, (programs, 1, 1), sizes, {**options, "height": height})


def quantize_blocks(
    x: Any,
    out: Any,
    scale: Any,
    block: tuple[int, int],
    sums: Any | None = None,
    trip: Any | None = None,
    *,
    transposed: bool = False,
) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale for each block, and transpose it if asked.

    out: (>= rows, >= cols), transposed (>= cols, >= rows), FP8, contiguous. block: the extents (height, width) of one
    scale's values in out, one of TILES. scale: (out_rows / height, out_cols / width), rounded up, of
    any strides; float32, or uint8 that hold e8m0. sums, trip: None, or what `triton_quantize_common.judge` says,
    for the guard.
    """
    out_shape = (out.shape[0], out.shape[1])
    strides = (scale.stride(0), scale.stride(1))
    shape = (x.shape[0], x.shape[1])
    launch = blocks_launch(shape, x.stride(0), out_shape, block, strides, transposed=transposed)
    launch.run(x, out, scale, sums, trip)
