"""What the Triton GEMM kernels share: a tile's loads, its products, its epilogue, and how operands become arguments.

In the jitted functions x and y are the two operands of the tensor core, each K-major: the tile is x times y transposed.
The dense kernel takes A for x, the decode kernel B. They are handed on in tuples: an operand or output is what it is in
memory and its steps over batch and rows, scales are a pointer and its steps over batch, rows and k.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from typing import Any, NamedTuple

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

SHIFT = tl.constexpr(16)
"""Sizes are passed larger by this to kernels that load by pointers: Triton makes an argument of 1 a constant, and 3.6
then evaluates a mask `i < 1` wrongly. A multiple of 16 stays one, which vectorizes masked loads."""
ALIGNMENT = 16
"""Bytes of which TMA wants the base and every stride to be a multiple."""
GELU_TANH_SCALE = tl.constexpr(2 * math.sqrt(2 / math.pi))
SQRT_HALF = tl.constexpr(math.sqrt(0.5))
PROMOTION = tl.constexpr(128)
"""Values of k after which a promoted product leaves the tensor core's accumulator."""


@triton.constexpr_function
def _promotes_in_dot():
    """Return whether Triton itself promotes at `max_num_imprecise_acc`: only for wgmma."""
    return tl.target_info.cuda_capability_geq(9, 0) and not tl.target_info.cuda_capability_geq(10, 0)


@triton.jit
def load_tile(operand, batch, row, col, rows, cols, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    """Return (ROWS, COLS) of an operand (batch, rows, cols) from (row, col) on, zeros outside.

    TMA: it is a descriptor and its batch step 1, or 0 for one without batch; else a pointer, steps in elements.
    """
    source, batch_step, row_step = operand
    if TMA:
        tile = source.load([batch * batch_step, row, col]).reshape(ROWS, COLS)
    else:
        r = row + tl.arange(0, ROWS)
        c = col + tl.arange(0, COLS)
        at = source + batch.to(tl.int64) * batch_step + r.to(tl.int64)[:, None] * row_step + c[None, :]
        tile = tl.load(at, mask=(r < rows)[:, None] & (c < cols)[None, :], other=0.0)
    return tile


@triton.jit
def block_scales(scale, first, rows, row_step, ROWS: tl.constexpr, EXTENT: tl.constexpr):
    """Return the scales of rows first to first + ROWS, one every EXTENT rows: a scalar if they share one.

    Rows past the end get the last scale: a masked load is waited for before the tensor core is started.
    """
    if EXTENT % ROWS == 0:
        values = tl.load(scale + (first // EXTENT).to(tl.int64) * row_step)
    else:
        row = tl.minimum(first + tl.arange(0, ROWS), rows - 1)
        values = tl.load(scale + (row // EXTENT).to(tl.int64) * row_step)
    return values


@triton.jit
def multiply_add(x, y, acc, BLOCK_K: tl.constexpr, PROMOTED: tl.constexpr):
    """Return acc + x y^T. Promoted, no more than PROMOTION values of k are summed in the tensor core's accumulator.

    Outside Hopper `max_num_imprecise_acc` only keeps Triton from folding the addition into the instruction.
    """
    if not PROMOTED:
        acc = tl.dot(x, y.T, acc)
    elif _promotes_in_dot():
        acc = tl.dot(x, y.T, acc, max_num_imprecise_acc=PROMOTION if BLOCK_K > PROMOTION else BLOCK_K)
    else:
        acc += tl.dot(x, y.T, max_num_imprecise_acc=BLOCK_K)
    return acc


@triton.jit
def multiply_add_scaled(x, y, acc, scales_x, scales_y, row_x, row_y, rows_x, rows_y, group, blocks, extents):
    """Return acc + (x y^T) decoded by the scales of a group of k."""
    scale_x, _, step_x, step_x_k = scales_x
    scale_y, _, step_y, step_y_k = scales_y
    BLOCK_X: tl.constexpr = blocks[0]
    BLOCK_Y: tl.constexpr = blocks[1]
    EXTENT_X: tl.constexpr = extents[0]
    EXTENT_Y: tl.constexpr = extents[1]
    values_x = block_scales(scale_x + group * step_x_k, row_x, rows_x, step_x, BLOCK_X, EXTENT_X)
    values_y = block_scales(scale_y + group * step_y_k, row_y, rows_y, step_y, BLOCK_Y, EXTENT_Y)
    product = tl.dot(x, y.T)
    if EXTENT_Y % BLOCK_Y == 0:
        if EXTENT_X % BLOCK_X == 0:
            acc += product * (values_x * values_y)
        else:
            acc += product * (values_x * values_y)[:, None]
    elif EXTENT_X % BLOCK_X == 0:
        acc += product * (values_x * values_y)[None, :]
    else:
        acc += product * values_x[:, None] * values_y[None, :]
    return acc


@triton.jit
def of_batch(scales, batch):
    """Return the scales of one batch entry."""
    scale, batch_step, row_step, k_step = scales
    return scale + batch.to(tl.int64) * batch_step, batch_step, row_step, k_step


@triton.jit
def sum_over_k(
    x,
    y,
    scales_x,
    scales_y,
    batch,
    row_x,
    row_y,
    rows_x,
    rows_y,
    k,
    first_step,
    last_step,
    blocks,
    extents,
    PROMOTED: tl.constexpr,
    TMA: tl.constexpr,
):
    """Return the float32 tile (BLOCK_X, BLOCK_Y) of x y^T over the K steps first_step to last_step.

    blocks: BLOCK_X, BLOCK_Y, BLOCK_K. extents: EXTENT_X, EXTENT_Y, EXTENT_K; the last above 0: block scales, each of
    EXTENT_X or EXTENT_Y rows by EXTENT_K values of k, which BLOCK_K divides.
    """
    BLOCK_X: tl.constexpr = blocks[0]
    BLOCK_Y: tl.constexpr = blocks[1]
    BLOCK_K: tl.constexpr = blocks[2]
    EXTENT_K: tl.constexpr = extents[2]
    scales_x = of_batch(scales_x, batch)
    scales_y = of_batch(scales_y, batch)
    acc = tl.zeros((BLOCK_X, BLOCK_Y), tl.float32)
    for step in tl.range(first_step, last_step):
        col = step * BLOCK_K
        tile_x = load_tile(x, batch, row_x, col, rows_x, k, BLOCK_X, BLOCK_K, TMA)
        tile_y = load_tile(y, batch, row_y, col, rows_y, k, BLOCK_Y, BLOCK_K, TMA)
        if EXTENT_K > 0:
            group = (col // EXTENT_K).to(tl.int64)
            acc = multiply_add_scaled(
                tile_x, tile_y, acc, scales_x, scales_y, row_x, row_y, rows_x, rows_y, group, blocks, extents
            )
        else:
            acc = multiply_add(tile_x, tile_y, acc, BLOCK_K, PROMOTED)
    return acc


@triton.jit
def row_scales(scales, batch, index, limit):
    """Return the scales at `index` of a batch entry in float32, 0 from limit on; a row step of 0 is one for all."""
    scale, _, step, _ = of_batch(scales, batch)
    return tl.load(scale + index.to(tl.int64) * step, mask=index < limit, other=0.0).to(tl.float32)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """Return ACTIVATION(x) in float32: none, relu, gelu (by erf), gelu_tanh or silu; NaN stays NaN."""
    if ACTIVATION == "relu":
        x = tl.where(x < 0.0, 0.0, x)
    elif ACTIVATION == "gelu":
        x = x * 0.5 * (1.0 + tl.erf(x * SQRT_HALF))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(u)) / 2 is sigmoid(2 u)
        x = x * tl.sigmoid(GELU_TANH_SCALE * (x + 0.044715 * x * x * x))
    elif ACTIVATION == "silu":
        x = x * tl.sigmoid(x)
    return x


@triton.jit
def store_tile(target, value, batch, row, col, m, n, ROWS: tl.constexpr, COLS: tl.constexpr, TMA: tl.constexpr):
    c, c_batch, c_row = target
    if TMA:
        c.store([batch, row, col], value.reshape(1, ROWS, COLS))
    else:
        r = row + tl.arange(0, ROWS)
        j = col + tl.arange(0, COLS)
        at = c + batch.to(tl.int64) * c_batch + r.to(tl.int64)[:, None] * c_row + j[None, :]
        tl.store(at, value, mask=(r < m)[:, None] & (j < n)[None, :])


@triton.jit
def finish_tile(
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
    HALVES: tl.constexpr,
    SCALED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    STORE_TMA: tl.constexpr,
):
    """Scale, bias, activate and store one tile, in one piece or in two halves of the columns.

    Scales and bias come before the halves part: after it their layout would cost each thread a load for each column.
    """
    r = row + tl.arange(0, BLOCK_M)
    j = col + tl.arange(0, BLOCK_N)
    if SCALED:
        of_a = row_scales(scales_a, batch, r, m)
        of_b = row_scales(scales_b, batch, j, n)
        acc = acc * of_a[:, None] * of_b[None, :]
    if HAS_BIAS:
        acc += tl.load(bias + j, mask=j < n, other=0.0).to(tl.float32)[None, :]
    if HALVES == 1:
        store_tile(target, activate(acc, ACTIVATION), batch, row, col, m, n, BLOCK_M, BLOCK_N, STORE_TMA)
    else:
        HALF: tl.constexpr = BLOCK_N // 2
        left, right = tl.split(tl.permute(tl.reshape(acc, (BLOCK_M, 2, HALF)), (0, 2, 1)))
        store_tile(target, activate(left, ACTIVATION), batch, row, col, m, n, BLOCK_M, HALF, STORE_TMA)
        store_tile(target, activate(right, ACTIVATION), batch, row, col + HALF, m, n, BLOCK_M, HALF, STORE_TMA)


@triton.jit
def grouped_tile(tile, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return batch, tile row and tile column of a linear tile: GROUP tile rows share the columns of B in L2."""
    tiles = tiles_m * tiles_n
    batch = tile // tiles
    rest = tile % tiles
    first = rest // (GROUP * tiles_n) * GROUP
    height = min(tiles_m - first, GROUP)
    within = rest % (GROUP * tiles_n)
    return batch, first + within % height, within // height


class Launch(NamedTuple):
    """One kernel launch: `kernel[grid](*args, **options)`; args end with the kernel's constexprs."""

    kernel: Any
    grid: tuple[int, int, int]
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch on the current stream."""
        self.kernel[self.grid](*self.args, **self.options)


def launch_grid(size: Any, block_m: int, block_n: int, programs: int) -> tuple[int, int, int]:
    """Return the grid of a persistent kernel: `programs`, or one for each tile where there are fewer."""
    tiles = size.batch * triton.cdiv(size.m, block_m) * triton.cdiv(size.n, block_n)
    return min(programs, tiles), 1, 1


class Matrix(NamedTuple):
    """A K-major operand or an output: extents, and strides in elements; a broadcast batch has stride 0."""

    batch: int
    rows: int
    cols: int
    batch_stride: int
    row_stride: int


def matrix(x: Any) -> Matrix:
    """Return the extents and strides of x, (batch, rows, cols) or (rows, cols).

    Raises ValueError for another rank, an empty operand, and rows that are not dense.
    """
    shape, stride = tuple(x.shape), tuple(x.stride())
    if len(shape) not in (2, 3):
        raise ValueError(f"an operand of shape {shape}: 2 or 3 dimensions are taken; fold or add the others")
    if min(shape) == 0:
        raise ValueError(f"an operand of shape {shape}: an empty product needs no kernel; fill the output instead")
    if stride[-1] != 1 and shape[-1] > 1:
        raise ValueError(f"strides {stride}: the last must be 1 (A and B K-major); copy or transpose first")
    batch, rows, cols = shape if len(shape) == 3 else (1, *shape)
    itemsize = x.dtype.itemsize
    row_stride = stride[-2] if rows > 1 else -(-cols * itemsize // ALIGNMENT) * ALIGNMENT // itemsize
    return Matrix(batch, rows, cols, stride[0] if batch > 1 else 0, row_stride)


def tma_takes(x: Any) -> bool:
    """Return whether x, (batch, rows, cols) or (rows, cols), can be read by TMA: 16-byte alignment."""
    it, itemsize = matrix(x), x.dtype.itemsize
    steps = (it.batch_stride, it.row_stride)
    return x.data_ptr() % ALIGNMENT == 0 and it.row_stride > 0 and all(s * itemsize % ALIGNMENT == 0 for s in steps)


def tma_writes(c: Any) -> bool:
    """Return whether TMA can write c: besides alignment, rows of a multiple of 16 bytes.

    A store to a row of 2 bytes wrote more than those on an H200; loads are exact to the element.
    """
    return tma_takes(c) and c.shape[-1] * c.dtype.itemsize % ALIGNMENT == 0


def descriptor(x: Any, block_rows: int, block_cols: int) -> TensorDescriptor:
    """Return the TMA descriptor of x as (batch, rows, cols) in blocks of (1, block_rows, block_cols).

    Raises ValueError where TMA cannot take x. A broadcast batch has extent 1: index it with 0.
    """
    if not tma_takes(x):
        raise ValueError(f"TMA needs 16-byte aligned rows: shape {tuple(x.shape)}, strides {x.stride()}; pad or copy")
    it = matrix(x)
    batch = it.batch if it.batch_stride else 1
    strides = [it.batch_stride or it.row_stride * it.rows, it.row_stride, 1]
    return TensorDescriptor(x, [batch, it.rows, it.cols], strides, [1, block_rows, block_cols])


class Sizes(NamedTuple):
    """The extents of one product: C (batch, m, n) = A (batch, m, k) B (batch, n, k)^T."""

    batch: int
    m: int
    n: int
    k: int


def sizes(a: Any, b: Any, c: Any) -> Sizes:
    """Return the product's extents. Raises ValueError where a, b and c do not fit together."""
    left, right, out = matrix(a), matrix(b), matrix(c)
    batch = max(left.batch, right.batch)
    fits = {left.batch, right.batch} <= {1, batch} and left.cols == right.cols
    if not fits or (batch, left.rows, right.rows) != out[:3]:
        raise ValueError(f"a {tuple(a.shape)} by b {tuple(b.shape)} into c {tuple(c.shape)}: (m, k), (n, k), (m, n)")
    return Sizes(batch, left.rows, right.rows, left.cols)


def epilogue_strides(scale: Any | None, batch: int, rows: int) -> tuple[int, int, int]:
    """Return the strides over batch, rows and k (0) of an epilogue scale whose shape broadcasts to (batch, rows)."""
    if scale is None:
        return 0, 0, 0
    shape, stride = tuple(scale.shape), tuple(scale.stride())
    steps = [0, 0]
    for axis in range(-1, -len(shape) - 1, -1):
        if shape[axis] == 1:
            continue
        if axis < -2 or shape[axis] != (batch, rows)[axis]:
            raise ValueError(f"a scale of shape {shape} does not broadcast to (batch, rows) = {(batch, rows)}")
        steps[axis] = stride[axis]
    return steps[0], steps[1], 0


def block_strides(scale: Any | None, batch: int, rows: int, k: int, extent: int, extent_k: int) -> tuple[int, int, int]:
    """Return the strides of a scale ([batch,] row blocks, k blocks) in any layout: over batch, row and k blocks."""
    wanted = (batch, -(-rows // extent), -(-k // extent_k))
    shape = None if scale is None else tuple(scale.shape)
    if scale is None or shape not in (wanted, (1, *wanted[1:]), wanted[1:]):
        raise ValueError(f"block scales of shape {shape} where {wanted} or {wanted[1:]} is needed")
    stride = tuple(scale.stride())
    return (stride[0] if scale.shape[0] > 1 and len(stride) == 3 else 0), stride[-2], stride[-1]


class Scaling(NamedTuple):
    """The scales' part of a kernel's arguments: six strides, then the constexprs."""

    strides: tuple[int, int, int, int, int, int]
    scaled: bool
    extent_a: int
    extent_b: int
    extent_k: int


def scaling(size: Sizes, scale_a: Any | None, scale_b: Any | None, block: tuple[int, int, int] | None) -> Scaling:
    """Return what the kernels need to know of the scales. block: rows of a, rows of b and values of k a block scale."""
    if (scale_a is None) != (scale_b is None):
        raise ValueError("one operand has a scale and the other none; give a scale of 1 to that one")
    if block is None:
        step_a = epilogue_strides(scale_a, size.batch, size.m)
        step_b = epilogue_strides(scale_b, size.batch, size.n)
        return Scaling((*step_a, *step_b), scale_a is not None, 1, 1, 0)
    extent_a, extent_b, extent_k = block
    step_a = block_strides(scale_a, size.batch, size.m, size.k, extent_a, extent_k)
    step_b = block_strides(scale_b, size.batch, size.n, size.k, extent_b, extent_k)
    return Scaling((*step_a, *step_b), False, extent_a, extent_b, extent_k)


def check_config(block_k: int, block: tuple[int, int, int] | None, activation: str | None) -> None:
    """Raise ValueError for a K step that straddles block scales and for an unknown activation."""
    if block is not None and block[2] % block_k:
        raise ValueError(f"block_k={block_k} does not divide the {block[2]} values of k that share a block scale")
    if activation not in (None, "relu", "gelu", "gelu_tanh", "silu"):
        raise ValueError(f"activation {activation!r} is unknown: None, 'relu', 'gelu', 'gelu_tanh' or 'silu'")
