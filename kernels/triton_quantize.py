"""One-pass quantizers in Triton: bf16, fp16 or fp32 to e4m3 or e5m2 with one scale per row, column or tensor.

All share these rules. amax is taken over finite values only; scale = clamp(amax / format max, 2**-126, float32 max) and
decodes; a value is saturated times 1/scale. NaN stays NaN; Inf becomes NaN in e4m3, which has no Inf, and stays Inf in
e5m2. The output is K-major and contiguous; where it is larger than the source, the rest is written with zeros (and the
least scale), so that padding costs no pass of its own. The format is that of the output's dtype.

The functions below take anything that Triton takes as a pointer; strides are in elements.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

LEAST_SCALE = tl.constexpr(2.0**-126)
SHIFT = tl.constexpr(16)
"""Sizes are passed to kernels larger by this: Triton makes an argument of 1 a constant, and 3.6 then evaluates a mask
`i < 1` once for several i (found on an H200: padding of a source with one row was not zero)."""
ROW_LIMIT = 16384
"""Columns up to which a row is kept in registers; longer ones are read twice, the second time from L2."""
TENSOR_PARTIALS = 512
"""Float32 values of workspace that `quantize_tensor` needs."""
COLUMN_SPLITS = 16
"""Rows of float32 workspace, as long as the source has columns, that `quantize_columns` needs for large sources."""


@triton.jit
def _finite_magnitude(x):
    magnitude = tl.abs(x)
    return tl.where(magnitude < float("inf"), magnitude, 0.0)


@triton.jit
def _scale_of(amax, out):
    largest = 57344.0 if out.dtype.element_ty == tl.float8e5 else 448.0
    return tl.maximum(tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32)), LEAST_SCALE)


@triton.jit
def _encode(x, inverse, out):
    """Return x * inverse in the dtype that `out` points to. The hardware's cast saturates Inf, so Inf is set apart."""
    infinite = tl.abs(x) == float("inf")
    if out.dtype.element_ty == tl.float8e5:
        bits = (x * inverse).to(tl.float8e5).to(tl.uint8, bitcast=True)
        infinity = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
        encoded = tl.where(infinite, infinity, bits).to(tl.float8e5, bitcast=True)
    else:
        encoded = tl.where(infinite, float("nan"), x * inverse).to(out.dtype.element_ty)
    return encoded


@triton.jit
def quantize_rows_kernel(
    x, out, scale, rows, cols, stride, out_rows, out_cols, block_rows: tl.constexpr, block_cols: tl.constexpr
):
    """Quantize `block_rows` rows, each whole in registers: one read, one write."""
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = tl.arange(0, block_cols)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    row_scale = _scale_of(tl.max(_finite_magnitude(value), 1), out)
    inverse = tl.div_rn(tl.full(row_scale.shape, 1.0, tl.float32), row_scale)
    encoded = _encode(value, inverse[:, None], out)
    written = (row < out_rows)[:, None] & (col < out_cols)[None, :]
    tl.store(out + row[:, None] * out_cols + col[None, :], encoded, mask=written)
    tl.store(scale + row, row_scale, mask=row < out_rows)


@triton.jit
def quantize_long_rows_kernel(x, out, scale, rows, cols, stride, out_cols, block_cols: tl.constexpr):
    """Quantize one row in two loops; the second read of it comes from L2."""
    rows, cols, out_cols = rows - SHIFT, cols - SHIFT, out_cols - SHIFT
    row = tl.program_id(0).to(tl.int64)
    offset = tl.arange(0, block_cols)
    source = x + row * stride
    largest = tl.zeros((block_cols,), tl.float32)
    for start in range(0, cols, block_cols):
        inside = (start + offset < cols) & (row < rows)
        value = tl.load(source + start + offset, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, _finite_magnitude(value))
    row_scale = _scale_of(tl.max(largest, 0, keep_dims=True), out)
    inverse = tl.div_rn(tl.full(row_scale.shape, 1.0, tl.float32), row_scale)
    for start in range(0, out_cols, block_cols):
        inside = (start + offset < cols) & (row < rows)
        value = tl.load(source + start + offset, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        encoded = _encode(value, inverse, out)
        tl.store(out + row * out_cols + start + offset, encoded, mask=start + offset < out_cols)
    tl.store(scale + row + tl.arange(0, 1), row_scale)


@triton.jit
def quantize_columns_kernel(
    x, out, scale, rows, cols, stride, out_rows, out_cols, block_rows: tl.constexpr, block_cols: tl.constexpr
):
    """Quantize and transpose `block_cols` columns: x (rows, cols) to out (out_rows >= cols, out_cols >= rows).

    The columns are read twice; the second read hits L2 while all that the running programs own fits in it.
    """
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    col = tl.program_id(0).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    offset = tl.arange(0, block_rows)
    largest = tl.zeros((block_rows, block_cols), tl.float32)
    for start in range(0, rows, block_rows):
        row = start + offset
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        source = x + row.to(tl.int64)[:, None] * stride + col[None, :]
        value = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
        largest = tl.maximum(largest, _finite_magnitude(value))
    col_scale = _scale_of(tl.max(largest, 0), out)
    inverse = tl.div_rn(tl.full(col_scale.shape, 1.0, tl.float32), col_scale)
    tl.store(scale + col, col_scale, mask=col < out_rows)
    for start in range(0, out_cols, block_rows):
        row = start + offset
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        source = x + row.to(tl.int64)[:, None] * stride + col[None, :]
        value = tl.load(source, mask=inside, other=0.0, eviction_policy="evict_first").to(tl.float32)
        encoded = tl.trans(_encode(value, inverse[None, :], out))
        written = (col < out_rows)[:, None] & (row < out_cols)[None, :]
        tl.store(out + col[:, None] * out_cols + row[None, :], encoded, mask=written)


@triton.jit
def column_amax_kernel(
    x, partial, rows, cols, stride, rows_per_split, block_rows: tl.constexpr, block_cols: tl.constexpr
):
    """Store the finite amax of each column over one split of the rows in partial[split, column]."""
    rows, cols = rows - SHIFT, cols - SHIFT
    col = tl.program_id(0).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    first = tl.program_id(1) * rows_per_split
    largest = tl.zeros((block_rows, block_cols), tl.float32)
    for start in range(first, first + rows_per_split, block_rows):
        row = start + tl.arange(0, block_rows)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        source = x + row.to(tl.int64)[:, None] * stride + col[None, :]
        largest = tl.maximum(largest, _finite_magnitude(tl.load(source, mask=inside, other=0.0).to(tl.float32)))
    tl.store(partial + tl.program_id(1).to(tl.int64) * cols + col, tl.max(largest, 0), mask=col < cols)


@triton.jit
def scale_columns_kernel(
    x,
    partial,
    out,
    scale,
    rows,
    cols,
    stride,
    out_rows,
    out_cols,
    splits: tl.constexpr,
    block_rows: tl.constexpr,
    block_cols: tl.constexpr,
):
    """Scale, cast and transpose one tile of x (rows, cols), given the partial maxima of its columns."""
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    row = tl.program_id(0).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = tl.program_id(1).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    split = tl.arange(0, splits).to(tl.int64)
    maxima = tl.load(partial + split[:, None] * cols + col[None, :], mask=(col < cols)[None, :], other=0.0)
    col_scale = _scale_of(tl.max(maxima, 0), out)
    inverse = tl.div_rn(tl.full(col_scale.shape, 1.0, tl.float32), col_scale)
    if tl.program_id(0) == 0:
        tl.store(scale + col, col_scale, mask=col < out_rows)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    encoded = tl.trans(_encode(value, inverse[None, :], out))
    written = (col < out_rows)[:, None] & (row < out_cols)[None, :]
    tl.store(out + col[:, None] * out_cols + row[None, :], encoded, mask=written)


@triton.jit
def tensor_amax_kernel(
    x, partial, rows, cols, stride, row_tiles, col_tiles, block_rows: tl.constexpr, block_cols: tl.constexpr
):
    """Store the finite amax of every num_programs-th tile of x (rows, cols) in partial[program]."""
    rows, cols = rows - SHIFT, cols - SHIFT
    largest = tl.zeros((block_rows, block_cols), tl.float32)
    for tile in range(tl.program_id(0), row_tiles * col_tiles, tl.num_programs(0)):
        row = (tile // col_tiles).to(tl.int64) * block_rows + tl.arange(0, block_rows)
        col = (tile % col_tiles).to(tl.int64) * block_cols + tl.arange(0, block_cols)
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, _finite_magnitude(value))
    tl.store(partial + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def scale_tensor_kernel(
    x,
    partial,
    out,
    scale,
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
):
    """Scale and cast one tile of x (rows, cols), transposed if asked, given the partial maxima of the whole.

    Tiles go from the last to the first: the last were read most recently and are likelier still in L2.
    """
    rows, cols, out_rows, out_cols = rows - SHIFT, cols - SHIFT, out_rows - SHIFT, out_cols - SHIFT
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    row = (tile // col_tiles).to(tl.int64) * block_rows + tl.arange(0, block_rows)
    col = (tile % col_tiles).to(tl.int64) * block_cols + tl.arange(0, block_cols)
    whole_scale = _scale_of(tl.max(tl.load(partial + tl.arange(0, partials)), 0, keep_dims=True), out)
    inverse = tl.div_rn(tl.full(whole_scale.shape, 1.0, tl.float32), whole_scale)
    if tl.program_id(0) == 0:
        tl.store(scale + tl.arange(0, 1), whole_scale)
    inside = (row < rows)[:, None] & (col < cols)[None, :]
    value = tl.load(x + row[:, None] * stride + col[None, :], mask=inside, other=0.0).to(tl.float32)
    encoded = _encode(value, inverse[None, :], out)
    if transposed:
        written = (col < out_rows)[:, None] & (row < out_cols)[None, :]
        tl.store(out + col[:, None] * out_cols + row[None, :], tl.trans(encoded), mask=written)
    else:
        written = (row < out_rows)[:, None] & (col < out_cols)[None, :]
        tl.store(out + row[:, None] * out_cols + col[None, :], encoded, mask=written)


def quantize_rows(x: Any, out: Any, scale: Any) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale a row.

    out: (>= rows, >= cols) FP8, contiguous. scale: one float32 for each row of out.
    """
    rows, cols = x.shape
    out_rows, out_cols = out.shape
    shift = SHIFT.value
    if out_cols > ROW_LIMIT:
        quantize_long_rows_kernel[(out_rows,)](
            x, out, scale, rows + shift, cols + shift, x.stride(0), out_cols + shift, block_cols=4096, num_warps=8
        )
        return
    block_cols = max(16, triton.next_power_of_2(out_cols))
    block_rows = max(1, 4096 // block_cols)
    warps = 4 if block_cols <= 4096 else 8 if block_cols <= 8192 else 16
    quantize_rows_kernel[(triton.cdiv(out_rows, block_rows),)](
        x,
        out,
        scale,
        rows + shift,
        cols + shift,
        x.stride(0),
        out_rows + shift,
        out_cols + shift,
        block_rows,
        block_cols,
        num_warps=warps,
    )


def column_workspace(rows: int, cols: int, itemsize: int) -> int:
    """Return how many float32 values of workspace `quantize_columns` needs: 0 where one launch is faster.

    One launch reads its columns twice and wins while the source fits in L2 and has columns enough to fill the GPU
    (measured on an H200: 32 us against 54 us at 4096 x 4096, equal at 8192 x 8192).
    """
    return 0 if cols >= 2048 and rows * cols * itemsize <= 64 << 20 else COLUMN_SPLITS * cols


def quantize_columns(x: Any, out: Any, scale: Any, partial: Any | None) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale a column, and transpose it.

    out: (>= cols, >= rows) FP8, contiguous. scale: one float32 for each row of out. partial: the workspace of
    `column_workspace`, None where that is 0.
    """
    rows, cols = x.shape
    out_rows, out_cols = out.shape
    shift = SHIFT.value
    stride = x.stride(0)
    if partial is None:
        quantize_columns_kernel[(triton.cdiv(out_rows, 32),)](
            x,
            out,
            scale,
            rows + shift,
            cols + shift,
            stride,
            out_rows + shift,
            out_cols + shift,
            block_rows=256,
            block_cols=32,
            num_warps=8,
        )
        return
    rows_per_split = triton.cdiv(triton.cdiv(rows, COLUMN_SPLITS), 32) * 32
    column_amax_kernel[(triton.cdiv(cols, 128), COLUMN_SPLITS)](
        x, partial, rows + shift, cols + shift, stride, rows_per_split, block_rows=32, block_cols=128, num_warps=8
    )
    scale_columns_kernel[(triton.cdiv(out_cols, 128), triton.cdiv(out_rows, 64))](
        x,
        partial,
        out,
        scale,
        rows + shift,
        cols + shift,
        stride,
        out_rows + shift,
        out_cols + shift,
        splits=COLUMN_SPLITS,
        block_rows=128,
        block_cols=64,
        num_warps=8,
    )


def quantize_tensor(x: Any, out: Any, scale: Any, partial: Any, *, transposed: bool = False) -> None:
    """Quantize x (rows, cols), inner stride 1, with one scale, and transpose it if asked.

    out: (>= rows, >= cols), transposed (>= cols, >= rows), FP8, contiguous. scale: one float32. partial:
    TENSOR_PARTIALS float32 values of workspace.
    """
    rows, cols = x.shape
    out_rows, out_cols = out.shape
    shift = SHIFT.value
    stride = x.stride(0)
    height, width = (128, 64) if transposed else (16, 512)
    tensor_amax_kernel[(TENSOR_PARTIALS,)](
        x,
        partial,
        rows + shift,
        cols + shift,
        stride,
        triton.cdiv(rows, 16),
        triton.cdiv(cols, 512),
        16,
        512,
        num_warps=8,
    )
    grid_rows, grid_cols = (out_cols, out_rows) if transposed else (out_rows, out_cols)
    col_tiles = triton.cdiv(grid_cols, width)
    scale_tensor_kernel[(triton.cdiv(grid_rows, height) * col_tiles,)](
        x,
        partial,
        out,
        scale,
        rows + shift,
        cols + shift,
        stride,
        out_rows + shift,
        out_cols + shift,
        col_tiles,
        partials=TENSOR_PARTIALS,
        transposed=transposed,
        block_rows=height,
        block_cols=width,
        num_warps=8,
    )
