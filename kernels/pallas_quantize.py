"""Quantizers in Pallas by its Triton lowering: bfloat16, float16 or float32 to FP8 and scales, in one pass over memory.

The rules are those of `dispatch.quantize`: scale = amax / max over the finite values that share it, no less than
2**-126; quantized = x / scale, rounded to nearest even; NaN stays, Inf stays in e5m2 and is NaN in e4m3. A quotient is
a product with the reciprocal, mended by its remainder, which gives the correctly rounded one (Markstein, IBM J. Res.
Dev. 34, 1990) in four instructions.

The result is K-major whichever way the source lies: (rows, k), or transposed, (k, rows), and then the bytes of four
neighbours along k travel together. Rows of a K-major source are kept in registers by one program up to WHOLE_ROW;
columns of a transposed one up to WHOLE_COLUMN. Longer ones are read twice, as a tensor's is: maxima, then the cast.
"""

# JAX is not seen by mypy: its decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from dispatch.kernels.pallas_by_triton import by_triton
from dispatch.kernels.pallas_common import BLOCK, padded, traced, up
from jax import lax
from jax.experimental.pallas import triton as plt

SOURCES = ("bfloat16", "float16", "float32")
FORMATS = ("float8_e4m3fn", "float8_e5m2")
GRANULARITIES = ("row", "tensor", "1x128", "128x128")
LEAST_SCALE = 2.0**-126
WHOLE_ROW, WHOLE_COLUMN = 32_768, 2048
CHUNK = 8192
"""Values that a program holds at once, where it can be chosen."""
QUAD = 4
"""Bytes that are transposed together."""
PROGRAMS = 1024
"""About how many programs find maxima: a wave on a large GPU."""
TURNED = (64, 128, 4)
"""Tile, k by rows, that a program transposes, and its warps."""


@dataclass(frozen=True)
class _Format:
    """What a kernel quantizes to, and whether it is interpreted on a CPU."""

    dtype: Any
    interpret: bool

    def scale_of(self, amax: Any) -> Any:
        """Return the float32 scales of maxima."""
        largest = jnp.full(amax.shape, float(jnp.finfo(self.dtype).max), jnp.float32)
        if self.interpret:  # XLA multiplies by the reciprocal of a constant, one bit off
            quotient = amax / (amax * 0.0 + largest)
        else:
            quotient = _assembled("div.rn.f32 $0, $1, $2;", amax, largest)
        return jnp.maximum(quotient, LEAST_SCALE)

    def encode(self, x: Any, scale: Any) -> Any:
        """Return x / scale in the format; scale broadcasts to x."""
        value = _rounded_quotient(x, scale, self.dtype) if self.interpret else _quotient(x, scale)
        encoded = value.astype(self.dtype)
        if self.dtype != jnp.float8_e5m2 and not self.interpret:
            return encoded  # from Inf came NaN
        bits = lax.bitcast_convert_type(encoded, jnp.uint8)
        bits = jnp.where(jnp.abs(x) < jnp.inf, bits, jnp.uint8(0x7F))  # casts disagree about a NaN's bits
        if self.dtype == jnp.float8_e5m2:
            infinity = jnp.where(x < 0, jnp.uint8(0xFC), jnp.uint8(0x7C))
            bits = jnp.where(jnp.abs(x) == jnp.inf, infinity, bits)
        return lax.bitcast_convert_type(bits, self.dtype)


def _assembled(asm: str, *arrays: Any) -> Any:
    """Return the float32 result of PTX on float32 arrays of one shape."""
    (found,) = plt.elementwise_inline_asm(
        asm,
        args=arrays,
        constraints="=f" + ",f" * len(arrays),
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(arrays[0].shape, jnp.float32)],
    )
    return found


def _quotient(x: Any, scale: Any) -> Any:
    """Return x / scale, correctly rounded, and NaN of Inf.

    Tiny scales are lifted, or remainders would be subnormal. The remainder is negated twice, or -0.0 would become 0.0.
    """
    lift = jnp.where(scale < 2.0**-60, 2.0**100, 1.0)
    lifted = scale * lift
    inverse = _assembled("rcp.rn.f32 $0, $1;", lifted)
    given = [jnp.broadcast_to(value, x.shape) for value in (lift, lifted, inverse)]
    asm = """{
        .reg .f32 x, q, r;
        mul.rn.f32 x, $1, $2;
        mul.rn.f32 q, x, $4;
        neg.f32 x, x;
        fma.rn.f32 r, q, $3, x;
        neg.f32 r, r;
        fma.rn.f32 $0, r, $4, q;
    }"""
    return _assembled(asm, x, *given)


def _rounded_quotient(x: Any, scale: Any, dtype: Any) -> Any:
    """Return x / scale as a number of the format, for XLA on a CPU, whose casts round twice.

    It also takes subnormal numbers for zero: those are divided in units of 2**-126.
    """
    bits = lax.bitcast_convert_type(x, jnp.int32)
    magnitude = bits & 0x7FFFFFFF
    subnormal = magnitude < 1 << 23
    units = magnitude.astype(jnp.float32) * 2.0**-23
    x = jnp.where(subnormal, jnp.where(bits < 0, -units, units), jnp.where(jnp.isfinite(x), x, 0.0))
    quotient = x / jnp.where(subnormal, jnp.clip(scale, LEAST_SCALE, 1.0) * 2.0**126, scale)
    info = jnp.finfo(dtype)
    quotient = jnp.clip(quotient, -float(info.max), float(info.max))
    power = lax.bitcast_convert_type(lax.bitcast_convert_type(quotient, jnp.int32) & (0xFF << 23), jnp.float32)
    step = jnp.clip(power, 2.0**info.minexp, float(info.max)) * 2.0**-info.nmant
    return jnp.round(quotient / step) * step


def _magnitude(x: Any) -> Any:
    """Return abs(x) of finite values, 0 of others."""
    size = jnp.abs(x)
    return jnp.where(size < jnp.inf, size, 0.0)


def _inside(first: Any, count: int, limit: int, exact: bool) -> Any:
    """Return which of `count` indices from `first` on are below the limit; None where all always are."""
    return None if exact else first + lax.iota(jnp.int32, count) < limit


def _both(rows: Any, cols: Any, shape: tuple[int, int]) -> Any:
    """Return the mask of a tile from those of its rows and columns."""
    found = [x[:, None] if dim == 0 else x[None, :] for dim, x in ((0, rows), (1, cols)) if x is not None]
    if not found:
        return None
    return functools.reduce(jnp.logical_and, [jnp.broadcast_to(x, shape) for x in found])


def _load(ref: Any, mask: Any) -> Any:
    """Return a tile in float32, 0 where it is masked out."""
    value = plt.load(ref) if mask is None else plt.load(ref, mask=mask, other=jnp.zeros((), ref.dtype))
    return value.astype(jnp.float32)


def _store(ref: Any, value: Any, mask: Any) -> None:
    plt.store(ref, value) if mask is None else plt.store(ref, value, mask=mask)


def _warps(values: int) -> int:
    return max(1, min(16, values // 512))


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()


def _call(body: Any, name: str, grid: Any, inputs: Any, outputs: Any, form: _Format, warps: int) -> Any:
    """Run a kernel. inputs: array, block and index map each; outputs: shape, dtype, block and index map each."""
    body.__name__ = name
    return pl.pallas_call(
        body,
        grid=grid,
        in_specs=[pl.BlockSpec(block, place) for _, block, place in inputs],
        out_specs=[pl.BlockSpec(block, place) for *_, block, place in outputs],
        out_shape=[jax.ShapeDtypeStruct(shape, dtype) for shape, dtype, *_ in outputs],
        interpret=form.interpret,
        compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
    )(*(x for x, *_ in inputs))


def _rows(x: Any, out: tuple[int, int], form: _Format) -> tuple[Any, Any]:
    """Return (rows, k) quantized by row, each row read once, or twice where it is longer than WHOLE_ROW."""
    (rows, k), (out_rows, out_k) = x.shape, out
    whole = _power(out_k) <= WHOLE_ROW
    chunk = _power(out_k) if whole else CHUNK
    chunks = 1 if whole else -(-out_k // chunk)
    height = max(1, min(_power(out_rows), CHUNK // chunk))
    square = (height, chunk)
    full = rows % height == 0 and rows == out_rows
    width = chunk * chunks

    def body(x_ref: Any, out_ref: Any, scale_ref: Any) -> None:
        first = pl.program_id(0) * height
        row_in, row_out = (_inside(first, height, size, full) for size in (rows, out_rows))

        def read(start: Any) -> Any:
            mask = _both(row_in, _inside(start, chunk, k, width == k), square)
            return _load(x_ref.at[:, pl.ds(start, chunk)], mask)

        def write(start: Any, values: Any, scale: Any) -> None:
            mask = _both(row_out, _inside(start, chunk, out_k, width == out_k), square)
            _store(out_ref.at[:, pl.ds(start, chunk)], form.encode(values, scale[:, None]), mask)

        if whole:
            values = read(0)
            scale = form.scale_of(_magnitude(values).max(1))
            write(0, values, scale)
        else:
            zeros = jnp.zeros(square, jnp.float32)
            largest = lax.fori_loop(0, chunks, lambda i, best: jnp.maximum(best, _magnitude(read(i * chunk))), zeros)
            scale = form.scale_of(largest.max(1))

            def again(i: Any, _: Any) -> None:
                write(i * chunk, read(i * chunk), scale)

            lax.fori_loop(0, chunks, again, None)
        _store(scale_ref, scale, row_out)

    values, scale = _call(
        body,
        "quantize_rows",
        (-(-out_rows // height),),
        [(x, (height, width), lambda i: (i, 0))],
        [
            (out, form.dtype, (height, width), lambda i: (i, 0)),
            ((out_rows,), jnp.float32, (height,), lambda i: (i,)),
        ],
        form,
        _warps(height * chunk),
    )
    return values, scale


def _maxima(x: Any, form: _Format) -> Any:
    """Return the finite maxima of the columns of x (rows, cols), (splits, cols): each of a part of the rows."""
    rows, cols = x.shape
    tall, wide = 32, 128
    across = -(-cols // wide)
    splits = min(64, _power(-(-PROGRAMS // across)), _power(-(-rows // tall)))
    steps = -(-rows // (splits * tall))
    height = steps * tall
    full, even = rows % (splits * tall) == 0, cols % wide == 0

    def body(x_ref: Any, out_ref: Any) -> None:
        first, start = pl.program_id(1) * height, pl.program_id(0) * wide
        col_in = _inside(start, wide, cols, even)

        def step(i: Any, best: Any) -> Any:
            row_in = _inside(first + i * tall, tall, rows, full)
            values = _load(x_ref.at[pl.ds(i * tall, tall), :], _both(row_in, col_in, (tall, wide)))
            return jnp.maximum(best, _magnitude(values))

        best = lax.fori_loop(0, steps, step, jnp.zeros((tall, wide), jnp.float32))
        mask = None if col_in is None else col_in[None, :]
        _store(out_ref, best.max(0)[None, :], mask)

    (found,) = _call(
        body,
        "column_maxima",
        (across, splits),
        [(x, (height, wide), lambda i, j: (j, i))],
        [((splits, cols), jnp.float32, (1, wide), lambda i, j: (j, i))],
        form,
        8,
    )
    return found


def _cast(x: Any, amax: Any, out: tuple[int, int], form: _Format) -> tuple[Any, Any]:
    """Return (rows, k) quantized by the scale of one maximum, amax of shape (1, 1)."""
    (rows, k), (out_rows, out_k) = x.shape, out
    wide = min(1024, _power(out_k))
    tall = CHUNK // wide
    full, even = rows % tall == 0 and rows == out_rows, k % wide == 0 and k == out_k

    def body(x_ref: Any, amax_ref: Any, out_ref: Any, scale_ref: Any) -> None:
        first, start = pl.program_id(0) * tall, pl.program_id(1) * wide
        scale = form.scale_of(plt.load(amax_ref))
        row_in, row_out = (_inside(first, tall, size, full) for size in (rows, out_rows))
        col_in, col_out = (_inside(start, wide, size, even) for size in (k, out_k))
        values = _load(x_ref, _both(row_in, col_in, (tall, wide)))
        _store(out_ref, form.encode(values, scale), _both(row_out, col_out, (tall, wide)))
        _store(scale_ref, scale, None)  # every program the same

    values, scale = _call(
        body,
        "quantize_tensor",
        (-(-out_rows // tall), -(-out_k // wide)),
        [(x, (tall, wide), lambda i, j: (i, j)), (amax, (1, 1), lambda i, j: (0, 0))],
        [(out, form.dtype, (tall, wide), lambda i, j: (i, j)), ((1, 1), jnp.float32, (1, 1), lambda i, j: (0, 0))],
        form,
        16,
    )
    return values, scale.reshape(1)


def _blocks(x: Any, out: tuple[int, int], form: _Format, extent: int) -> tuple[Any, Any]:
    """Return (rows, k) quantized in blocks of `extent` rows, 1 or 128, by 128."""
    (rows, k), (out_rows, out_k) = x.shape, out
    tall = 64 if extent == 1 else BLOCK
    full, even = rows % tall == 0 and rows == out_rows, k % BLOCK == 0 and k == out_k

    def body(x_ref: Any, out_ref: Any, scale_ref: Any) -> None:
        first, start = pl.program_id(0) * tall, pl.program_id(1) * BLOCK
        row_in, row_out = (_inside(first, tall, size, full) for size in (rows, out_rows))
        col_in, col_out = (_inside(start, BLOCK, size, even) for size in (k, out_k))
        values = _load(x_ref, _both(row_in, col_in, (tall, BLOCK)))
        amax = _magnitude(values).max(1)
        scale = form.scale_of(amax if extent == 1 else amax.max(0, keepdims=True))
        _store(out_ref, form.encode(values, scale[:, None]), _both(row_out, col_out, (tall, BLOCK)))
        _store_scales(scale_ref, scale, row_out if extent == 1 else None)

    inputs = [(x, (tall, BLOCK), lambda i, j: (i, j))]
    return _with_block_scales(body, "quantize_blocks", inputs, out, (tall, -(-out_k // BLOCK)), form, extent)


def _store_scales(ref: Any, scale: Any, mask: Any) -> None:
    """Store the scales of one step of k, (rows,), to a row of `ref`."""
    _store(ref, scale[None, :], None if mask is None else mask[None, :])


def _with_block_scales(
    body: Any,
    name: str,
    inputs: list[Any],
    out: tuple[int, int],
    size: tuple[int, int],
    form: _Format,
    extent: int,
) -> tuple[Any, Any]:
    """Run a kernel of block scales, a program for each `size[0]` rows and each of `size[1]` steps of k.

    Scales are stored with the rows innermost, which is how the GEMM kernel loads them, and seen transposed.
    """
    tall, steps = size
    height = -(-out[0] // extent)
    values, scale = _call(
        body,
        name,
        (-(-out[0] // tall), steps),
        inputs,
        [
            (out, form.dtype, (tall, BLOCK), lambda i, j: (i, j)),
            ((steps, height), jnp.float32, (1, tall // extent), lambda i, j: (j, i)),
        ],
        form,
        _warps(tall * BLOCK),
    )
    return values, scale.T


def _quads(x: Any) -> Any:
    """Return x (k, rows) as (k / 4, 4, rows), padded where it has to be."""
    k, rows = x.shape
    return padded(x, up(k, QUAD), rows).reshape(-1, QUAD, rows)


def _quad_inputs(source: Any, tall: int, wide: int) -> list[Any]:
    """Return the source four times: a kernel's tile of the first of each four along k, of the second ..."""
    block = (tall // QUAD, None, wide)
    return [(source, block, lambda i, j, place=place: (j, place, i)) for place in range(QUAD)]


def _largest(tiles: list[Any]) -> Any:
    """Return the finite maxima of each column over four tiles."""
    return functools.reduce(jnp.maximum, [_magnitude(tile) for tile in tiles]).max(0)


def _turned(tiles: list[Any], scale: Any, form: _Format) -> Any:
    """Return four tiles (k / 4, rows), quantized by the scales of the rows, as one of (rows, k)."""
    first, second, third, fourth = (form.encode(tile, scale[None, :]) for tile in tiles)
    word = jnp.stack([jnp.stack([first, third], -1), jnp.stack([second, fourth], -1)], -1)
    deep, wide = first.shape
    return word.transpose(1, 0, 2, 3).reshape(wide, QUAD * deep)


def _columns(x: Any, partial: Any, out: tuple[int, int], form: _Format) -> tuple[Any, Any]:
    """Return x (k, rows) transposed and quantized by column.

    partial: the maxima of parts of each column, (splits, rows) or (1, 1); None to find them in columns kept whole.
    """
    (k, rows), (out_rows, out_k) = x.shape, out
    if partial is not None:
        tall, wide, warps = TURNED
    else:
        tall, warps = max(64, _power(out_k)), 4
        wide = 16 if tall <= 1024 else 8
    source, one = _quads(x), partial is not None and partial.shape == (1, 1)
    full = k % tall == 0 and k == out_k
    even = rows % wide == 0 and rows == out_rows

    def body(*refs: Any) -> None:
        *quads, out_ref, scale_ref = refs
        maxima = quads[QUAD:]
        first, start = pl.program_id(0) * wide, pl.program_id(1) * tall
        row_in, row_out = (_inside(first, wide, size, even) for size in (rows, out_rows))
        quad_in = _inside(start // QUAD, tall // QUAD, source.shape[0], full)
        mask = _both(quad_in, row_in, (tall // QUAD, wide))
        tiles = [_load(ref, mask) for ref in quads[:QUAD]]
        if maxima:
            splits = maxima[0].shape[0]
            mask = None if row_in is None or one else jnp.broadcast_to(row_in[None, :], (splits, wide))
            amax = _load(maxima[0], mask).max(0)
        else:
            amax = _largest(tiles)
        scale = jnp.broadcast_to(form.scale_of(amax), (wide,))
        k_out = _inside(start, tall, out_k, full)
        _store(out_ref, _turned(tiles, scale, form), _both(row_out, k_out, (wide, tall)))
        if partial is None:
            _store(scale_ref, scale, row_out)
        else:
            pl.when(start == 0)(lambda: _store(scale_ref, scale, row_out))

    inputs = _quad_inputs(source, tall, wide)
    if partial is not None:
        place = (lambda i, j: (0, 0)) if one else (lambda i, j: (0, i))
        inputs.append((partial, (partial.shape[0], 1 if one else wide), place))
    values, scale = _call(
        body,
        "quantize_columns",
        (-(-out_rows // wide), -(-out_k // tall)),
        inputs,
        [
            (out, form.dtype, (wide, tall), lambda i, j: (i, j)),
            ((out_rows,), jnp.float32, (wide,), lambda i, j: (i,)),
        ],
        form,
        warps,
    )
    return values, scale[:1] if one else scale


def _turned_blocks(x: Any, out: tuple[int, int], form: _Format, extent: int) -> tuple[Any, Any]:
    """Return x (k, rows) transposed and quantized in blocks of 128 along k by `extent` rows, 1 or 128."""
    (k, rows), (out_rows, out_k) = x.shape, out
    source, tall = _quads(x), BLOCK
    full, even = k % BLOCK == 0 and k == out_k, rows % tall == 0 and rows == out_rows

    def body(*refs: Any) -> None:
        *quads, out_ref, scale_ref = refs
        first, start = pl.program_id(0) * tall, pl.program_id(1) * BLOCK
        row_in, row_out = (_inside(first, tall, size, even) for size in (rows, out_rows))
        quad_in = _inside(start // QUAD, BLOCK // QUAD, source.shape[0], full)
        mask = _both(quad_in, row_in, (BLOCK // QUAD, tall))
        tiles = [_load(ref, mask) for ref in quads]
        amax = _largest(tiles)
        scale = form.scale_of(amax if extent == 1 else amax.max(0, keepdims=True))
        k_out = _inside(start, BLOCK, out_k, full)
        values = _turned(tiles, jnp.broadcast_to(scale, (tall,)), form)
        _store(out_ref, values, _both(row_out, k_out, (tall, BLOCK)))
        _store_scales(scale_ref, scale, row_out if extent == 1 else None)

    size = (tall, -(-out_k // BLOCK))
    inputs = _quad_inputs(source, BLOCK, tall)
    return _with_block_scales(body, "quantize_turned_blocks", inputs, out, size, form, extent)


@functools.partial(jax.jit, static_argnames=("form", "granularity", "transposed", "out"))
def _quantize(x: Any, *, form: _Format, granularity: str, transposed: bool, out: tuple[int, int]) -> tuple[Any, Any]:
    """Choose the kernels; see `quantize`."""
    if granularity == "tensor":
        amax = _maxima(x, form).max().reshape(1, 1)
        return (_columns if transposed else _cast)(x, amax, out, form)
    if granularity == "row":
        if not transposed:
            return _rows(x, out, form)
        return _columns(x, _maxima(x, form) if out[1] > WHOLE_COLUMN else None, out, form)
    blocks = _turned_blocks if transposed else _blocks
    return blocks(x, out, form, 1 if granularity == "1x128" else BLOCK)


def quantize(
    x: Any,
    dtype: Any,
    granularity: str = "row",
    *,
    transposed: bool = False,
    multiple: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> tuple[Any, Any]:
    """Return x quantized, (rows, k) K-major, and the float32 scales that decode it: value = quantized * scale.

    x: (rows, k), or (k, rows) if transposed, of bfloat16, float16 or float32. dtype: float8_e4m3fn or float8_e5m2.
    granularity: `row`, scales (rows,); `tensor`, (1,); `1x128`, (rows, ceil(k / 128)); `128x128`, (ceil(rows / 128),
    ceil(k / 128)). multiple: rows and k of the result are the least multiples of these, filled with zeros; there are
    scales for the rows that were added, too. interpret: run on a CPU.

    The same bits as `dispatch.quantize`. Traceable, with everything after x static. Raises ValueError for what is no
    such array, for an empty one and for unknown names.
    """
    dtype = jnp.dtype(dtype)
    if x.ndim != 2 or x.size == 0 or str(x.dtype) not in SOURCES:
        raise ValueError(f"cannot quantize {x.dtype} of shape {x.shape}: a matrix of {', '.join(SOURCES)} is needed")
    if str(dtype) not in FORMATS or granularity not in GRANULARITIES:
        allowed = f"{', '.join(FORMATS)}; {', '.join(GRANULARITIES)}"
        raise ValueError(f"cannot quantize to {dtype} by {granularity!r}; allowed: {allowed}")
    rows, k = x.shape[::-1] if transposed else x.shape
    out = (up(rows, multiple[0]), up(k, multiple[1]))
    form = _Format(dtype, bool(interpret))
    static = {"form": form, "granularity": granularity, "transposed": transposed, "out": out}
    kernels = functools.partial(_quantize, **static)
    found: tuple[Any, Any] = traced(kernels, x) if form.interpret else traced(by_triton, kernels, x)
    return found
