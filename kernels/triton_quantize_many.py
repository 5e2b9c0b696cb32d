"""Several operands quantized in one launch, with one scale a row of the output: for sizes where launches dominate.

The rules are those of `triton_quantize`; operands that are not K-major are transposed as in `triton_quantize_columns`.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from dispatch.kernels.triton_quantize import quantize_row_tile
from dispatch.kernels.triton_quantize_columns import quantize_column_tile, whole_columns_tile
from dispatch.kernels.triton_quantize_common import SHIFT, Launch, wait_for_predecessor

MAX_OPERANDS = 4
ROW_LIMIT = 8192
"""The most columns of an operand that lies as its output does."""


class Source(NamedTuple):
    """What a launch has to know of one operand: x (rows, cols) of inner stride 1, and the shape of its output.

    transposed: whether the output is as x transposed.
    """

    shape: tuple[int, int]
    stride: int
    out_shape: tuple[int, int]
    transposed: bool


@triton.jit
def quantize_tile_of(
    x,
    out,
    scale,
    sums,
    trip,
    program,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    transposed: tl.constexpr,
    whole: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Do what is a program's of one operand, if it is one of its programs; return which it is of the operands after."""
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    lines: tl.constexpr = block_cols if transposed else block_rows
    count = tl.cdiv(out_rows, lines)
    if (program >= 0) & (program < count):
        if transposed:
            quantize_column_tile(
                x,
                out,
                scale,
                sums,
                trip,
                program,
                rows,
                cols,
                stride,
                out_rows,
                out_cols,
                whole,
                block_rows,
                block_cols,
            )
        else:
            quantize_row_tile(
                x, out, scale, sums, trip, program, rows, cols, stride, out_rows, out_cols, block_rows, block_cols
            )
    return program - count


@triton.jit
def quantize_many_kernel(
    x0,
    out0,
    scale0,
    sums0,
    trip0,
    x1,
    out1,
    scale1,
    sums1,
    trip1,
    x2,
    out2,
    scale2,
    sums2,
    trip2,
    x3,
    out3,
    scale3,
    sums3,
    trip3,
    rows0,
    cols0,
    stride0,
    out_rows0,
    out_cols0,
    rows1,
    cols1,
    stride1,
    out_rows1,
    out_cols1,
    rows2,
    cols2,
    stride2,
    out_rows2,
    out_cols2,
    rows3,
    cols3,
    stride3,
    out_rows3,
    out_cols3,
    transposed0: tl.constexpr,
    whole0: tl.constexpr,
    block_rows0: tl.constexpr,
    block_cols0: tl.constexpr,
    transposed1: tl.constexpr,
    whole1: tl.constexpr,
    block_rows1: tl.constexpr,
    block_cols1: tl.constexpr,
    transposed2: tl.constexpr,
    whole2: tl.constexpr,
    block_rows2: tl.constexpr,
    block_cols2: tl.constexpr,
    transposed3: tl.constexpr,
    whole3: tl.constexpr,
    block_rows3: tl.constexpr,
    block_cols3: tl.constexpr,
    dependent: tl.constexpr = False,
):
    """Quantize up to four operands, one tile of one of them a program. What belongs to absent ones is None."""
    wait_for_predecessor(dependent)
    program = tl.program_id(0)
    program = quantize_tile_of(
        x0,
        out0,
        scale0,
        sums0,
        trip0,
        program,
        rows0,
        cols0,
        stride0,
        out_rows0,
        out_cols0,
        transposed0,
        whole0,
        block_rows0,
        block_cols0,
    )
    if x1 is not None:
        program = quantize_tile_of(
            x1,
            out1,
            scale1,
            sums1,
            trip1,
            program,
            rows1,
            cols1,
            stride1,
            out_rows1,
            out_cols1,
            transposed1,
            whole1,
            block_rows1,
            block_cols1,
        )
    if x2 is not None:
        program = quantize_tile_of(
            x2,
            out2,
            scale2,
            sums2,
            trip2,
            program,
            rows2,
            cols2,
            stride2,
            out_rows2,
            out_cols2,
            transposed2,
            whole2,
            block_rows2,
            block_cols2,
        )
    if x3 is not None:
        quantize_tile_of(
            x3,
            out3,
            scale3,
            sums3,
            trip3,
            program,
            rows3,
            cols3,
            stride3,
            out_rows3,
            out_cols3,
            transposed3,
            whole3,
            block_rows3,
            block_cols3,
        )


class Operand(NamedTuple):
    """One operand to quantize: x (rows, cols) of inner stride 1, its output and scales, whether it is transposed.

    sums, trip: None, or what `triton_quantize_common.judge` says, for the guard.
    """

    x: Any
    out: Any
    scale: Any
    transposed: bool
    sums: Any | None = None
    trip: Any | None = None

    def source(self) -> Source:
        """Return what a launch has to know of it."""
        x, out = self.x, self.out
        shape, out_shape = (x.shape[0], x.shape[1]), (out.shape[0], out.shape[1])
        return Source(shape, x.stride(0), out_shape, self.transposed)


def tile_of(source: Source) -> tuple[int, int] | None:
    """Return what one program keeps of an operand, None where rows or columns are too long for a launch with others."""
    out_cols = source.out_shape[1]
    if source.transposed:
        return whole_columns_tile(out_cols)
    if out_cols > ROW_LIMIT:
        return None
    block_cols = max(16, triton.next_power_of_2(out_cols))
    return max(1, (2048 if block_cols <= 1024 else 4096) // block_cols), block_cols


def many_launch(sources: Sequence[Source]) -> Launch:
    """Return the launch of `quantize_many`; its pointers are x, out, scale, sums and trip of each of four operands.

    All that belongs to an absent one is None.

    Programs of one operand start before those of the next: the one whose tiles take longest is best the first.
    """
    if not 1 <= len(sources) <= MAX_OPERANDS:
        raise ValueError(f"quantize_many: {len(sources)} operands; allowed: 1 to {MAX_OPERANDS}")
    sizes: list[int | None] = []
    options: dict[str, Any] = {"num_warps": 4}
    programs = 0
    for i, source in enumerate(sources):
        tile = tile_of(source)
        if tile is None:
            raise ValueError(f"quantize_many: operand {i}, {source}, is too long; launch it alone")
        out_rows, out_cols = source.out_shape
        sizes += [source.shape[0] + SHIFT.value, source.shape[1] + SHIFT.value, source.stride]
        sizes += [out_rows + SHIFT.value, out_cols + SHIFT.value]
        options |= {f"transposed{i}": source.transposed, f"whole{i}": out_cols % 4 == 0}
        options |= {f"block_rows{i}": tile[0], f"block_cols{i}": tile[1]}
        programs += triton.cdiv(out_rows, tile[1] if source.transposed else tile[0])
    for i in range(len(sources), MAX_OPERANDS):
        sizes += [None] * 5
        options |= {f"transposed{i}": False, f"whole{i}": True, f"block_rows{i}": 1, f"block_cols{i}": 1}
    return Launch(quantize_many_kernel, (programs, 1, 1), tuple(sizes), options)


def quantize_many(operands: Sequence[Operand]) -> None:
    """Quantize up to four operands in one launch, with one scale a row of the output.

    out: (>= rows, >= cols), transposed (>= cols, >= rows), FP8, contiguous. scale: one float32 or uint8 (e8m0) a row of
    out. Raises ValueError for more operands, and for one that is too long (`tile_of` gives None).
    """
    launch = many_launch([operand.source() for operand in operands])
    pointers = [pointer for x in operands for pointer in (x.x, x.out, x.scale, x.sums, x.trip)]
    launch.run(*pointers, *[None] * 5 * (MAX_OPERANDS - len(operands)))
