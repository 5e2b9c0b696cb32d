"""What the Triton quantizers share: the scale of a maximum, the cast, and a launch that is kept apart from its run.

The rules are in `triton_quantize`. Device functions take pointers for the dtypes they point to.
"""

# Triton reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

LEAST_SCALE = tl.constexpr(2.0**-126)
SHIFT = tl.constexpr(16)
"""Sizes are passed to kernels larger by this: Triton makes an argument of 1 a constant, and 3.6 then evaluates a mask
`i < 1` once for several i (found on an H200: padding of a source with one row was not zero)."""
E4M3_MAX, E4M3_RECIPROCAL = tl.constexpr(448.0), tl.constexpr(1 / 448)
E5M2_MAX, E5M2_RECIPROCAL = tl.constexpr(57344.0), tl.constexpr(1 / 57344)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
SAMPLE = tl.constexpr(16)
"""The guard's sums are taken of one tile of so many, of the next one in the next launch: of all in as many launches."""
SUMS_HEAD = tl.constexpr(8)
"""Float32 values before the tables of the guard's sums."""
LEARNT = tl.constexpr(256)
"""Launches from which the guard learns what is usual: every tile of whatever operand is sampled 16 times."""
TABLES = tl.constexpr(4)
"""Tables of the guard's sums: of this launch, of the last, of the next, and one to be cleared. A power of two."""
JUDGED = tl.constexpr(128)
"""Rows that one program judges at once."""


class Launch(NamedTuple):
    """One launch without its pointers: `kernel[grid](*pointers, *sizes, **options)`.

    grid: three extents. sizes: the integers after the pointers, in the kernel's order. options: the kernel's constants
    and `num_warps`. None of them depends on a pointer or a value, so that a caller may keep a Launch for a shape.
    """

    kernel: Any
    grid: tuple[int, int, int]
    sizes: tuple[int | None, ...]
    options: dict[str, Any]

    def run(self, *pointers: Any) -> None:
        """Launch on the current stream. An optional pointer is None where it is not wanted."""
        self.kernel[self.grid](*pointers, *self.sizes, **self.options)


@triton.jit
def wait_for_predecessor(dependent: tl.constexpr):
    """Wait for the end of the kernel before this one in the stream, which `dependent` says it was launched beside.

    Programmatic dependent launch (sm90 and later, Triton's option launch_pdl): the next kernel may be launched once
    every program is here, and waits in its turn.
    """
    if dependent:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def finite_or_nan(x):
    """Return x, and NaN for Inf, in one instruction: Inf times 0 is NaN."""
    return tl.fma(x, 0.0, x)


@triton.jit
def magnitude(x):
    """Return abs(x), and NaN for Inf. A maximum leaves NaN out unless there is nothing else."""
    if INTERPRETED:  # its maximum does not leave NaN out
        return tl.where(tl.abs(x) < float("inf"), tl.abs(x), 0.0)
    return tl.abs(finite_or_nan(x))


@triton.jit
def scales_of(amax, out, scale):
    """Return the float32 scales of maxima, and their reciprocals. Maxima that are not finite count as 0.

    They are computed by every thread that needs them, so no division is spent on them. Where `scale` points to uint8
    (e8m0) they are powers of two, rounded up: both formats end at 1.75 times a power of two.
    """
    wide = out.dtype.element_ty == tl.float8e5
    amax = tl.where(amax < float("inf"), amax, 0.0)
    if scale.dtype.element_ty == tl.uint8:
        # From 2**-126 to 2**120: neither end of e8m0 is reached.
        exponent = ((amax.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23) - (15 if wide else 8)
        exponent = tl.maximum(exponent, 1)
        value = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        largest = E5M2_MAX if wide else E4M3_MAX
        reciprocal = E5M2_RECIPROCAL if wide else E4M3_RECIPROCAL
        if INTERPRETED:  # its fma rounds twice
            value = tl.div_rn(amax, tl.full(amax.shape, largest, tl.float32))
        else:
            # A quotient, mended by its remainder, is the correctly rounded one (Markstein, IBM J. Res. Dev. 34, 1990).
            quotient = amax * reciprocal
            value = tl.fma(tl.fma(quotient, -largest, amax), reciprocal, quotient)
        value = tl.maximum(value, LEAST_SCALE)
        inverse = 1.0 / value  # to 2 units in the last place
    return value, inverse


@triton.jit
def store_scale(pointer, value, mask):
    """Store float32 scales, as the exponents of e8m0 where `pointer` points to uint8."""
    if pointer.dtype.element_ty == tl.uint8:
        tl.store(pointer, (value.to(tl.int32, bitcast=True) >> 23).to(tl.uint8), mask=mask)
    else:
        tl.store(pointer, value, mask=mask)


@triton.jit
def encode(x, inverse, out):
    """Return x * inverse in the dtype that `out` points to. The hardware's cast saturates Inf, so Inf is set apart.

    The select is on purpose: from 8-bit sums ptxas (of Triton 3.6) made wrong code, a shift of a register that the
    conversion writes only afterwards.
    """
    if out.dtype.element_ty == tl.float8e5:
        bits = (x * inverse).to(tl.float8e5).to(tl.uint8, bitcast=True)
        infinity = tl.where(x < 0, 0xFC, 0x7C).to(tl.uint8)
        encoded = tl.where(tl.abs(x) == float("inf"), infinity, bits).to(tl.float8e5, bitcast=True)
    else:
        encoded = (finite_or_nan(x) * inverse).to(out.dtype.element_ty)
    return encoded


@triton.jit
def load_four(x, quad, col, rows, cols, stride):
    """Return the values of x in the rows 4 * quad to 4 * quad + 3, one tile each, in float32; 0 outside.

    quad and col broadcast to a tile.
    """
    row = 4 * quad
    source = x + row * stride + col
    first = tl.load(source, mask=(row < rows) & (col < cols), other=0.0).to(tl.float32)
    second = tl.load(source + stride, mask=(row + 1 < rows) & (col < cols), other=0.0).to(tl.float32)
    third = tl.load(source + 2 * stride, mask=(row + 2 < rows) & (col < cols), other=0.0).to(tl.float32)
    fourth = tl.load(source + 3 * stride, mask=(row + 3 < rows) & (col < cols), other=0.0).to(tl.float32)
    return first, second, third, fourth


@triton.jit
def four_magnitudes(first, second, third, fourth):
    """Return the largest of four magnitudes."""
    return tl.maximum(
        tl.maximum(magnitude(first), magnitude(second)),
        tl.maximum(magnitude(third), magnitude(fourth)),
    )


@triton.jit
def _word(first, second, third, fourth):
    low = first.to(tl.uint32) | second.to(tl.uint32) << 8
    high = third.to(tl.uint32) | fourth.to(tl.uint32) << 8
    return low | high << 16


@triton.jit
def _saturated(x, inverse, out):
    return (x * inverse).to(out.dtype.element_ty).to(tl.uint8, bitcast=True)


@triton.jit
def encode_four(first, second, third, fourth, inverse, out, whole: tl.constexpr):
    """Return four tiles, encoded as by `encode`, as one of words, the first lowest.

    Words are ready to be transposed: bytes are slow to, each alone through shared memory. whole: as in `store_four`;
    words that are stored in bytes are computed in bytes by LLVM, and `encode` says what comes of sums then.
    """
    if out.dtype.element_ty == tl.float8e5 and not whole:
        word = _word(
            encode(first, inverse, out).to(tl.uint8, bitcast=True),
            encode(second, inverse, out).to(tl.uint8, bitcast=True),
            encode(third, inverse, out).to(tl.uint8, bitcast=True),
            encode(fourth, inverse, out).to(tl.uint8, bitcast=True),
        )
    elif out.dtype.element_ty == tl.float8e5:
        word = _word(
            _saturated(first, inverse, out),
            _saturated(second, inverse, out),
            _saturated(third, inverse, out),
            _saturated(fourth, inverse, out),
        )
        infinity = float("inf")  # its code follows that of the largest number, which Inf became
        word += _word(
            tl.abs(first) == infinity,
            tl.abs(second) == infinity,
            tl.abs(third) == infinity,
            tl.abs(fourth) == infinity,
        )
    else:
        word = _word(
            _saturated(finite_or_nan(first), inverse, out),
            _saturated(finite_or_nan(second), inverse, out),
            _saturated(finite_or_nan(third), inverse, out),
            _saturated(finite_or_nan(fourth), inverse, out),
        )
    return word


@triton.jit
def store_four(out, word, row, quad, out_rows, out_cols, whole: tl.constexpr):
    """Store words at out[row, 4 * quad to 4 * quad + 3]. whole: whether out_cols is a multiple of 4."""
    col = 4 * quad
    written = (row < out_rows) & (col < out_cols)
    if whole:
        target = out.to(tl.pointer_type(tl.uint32), bitcast=True) + row * (out_cols // 4) + quad
        tl.store(target, word, mask=written)
    else:
        target = out.to(tl.pointer_type(tl.uint8), bitcast=True) + row * out_cols + col
        tl.store(target, (word & 0xFF).to(tl.uint8), mask=written)
        tl.store(target + 1, (word >> 8 & 0xFF).to(tl.uint8), mask=(row < out_rows) & (col + 1 < out_cols))
        tl.store(target + 2, (word >> 16 & 0xFF).to(tl.uint8), mask=(row < out_rows) & (col + 2 < out_cols))
        tl.store(target + 3, (word >> 24).to(tl.uint8), mask=(row < out_rows) & (col + 3 < out_cols))


def sums_size(rows: int) -> int:
    """Return how many float32 values the guard's sums of an operand take; rows: those of the quantizer's output."""
    return int(SUMS_HEAD.value) + 2 * int(TABLES.value) * (rows // int(SAMPLE.value) + int(JUDGED.value))


def sums_head(limit: float, band: float, rounding: float) -> list[float]:
    """Return what the guard's sums begin with, zeros behind it: see `end_launch`."""
    return [0.0, 0.0, limit, band, rounding, 0.0, float("inf"), 0.0]


@triton.jit
def launch_read(sums):
    """Return the number of this launch of its quantizer, as each thread reads it: best before the values are loaded."""
    number = sums.to(tl.pointer_type(tl.int32), bitcast=True)
    if INTERPRETED:
        return tl.load(number + tl.zeros((1,), tl.int32))
    return tl.load(number + tl.zeros((tl.extra.cuda.num_threads(),), tl.int32), volatile=True)


@triton.jit
def launch_agreed(read):
    """Return the number that all threads of a program agree on: best while the values are on their way.

    The last program of a launch may advance it between two reads; a branch that depends on it has barriers.
    """
    return tl.max(read, 0)


@triton.jit
def end_launch(sums, trip, launch, program, programs, out_rows):
    """Do what a program has to do for all: the first ones judge the last launch's sums, the last one ends the launch.

    launch: its number; program: which of the `programs` that quantize this operand. sums: float32
    (`sums_size(out_rows)`), first of all the number of the launch (int32, from 0, wrapping around), the limit of error
    / square, the factor of the band, what errors rounding alone can make, the largest and the least ratio seen (0 and
    Inf at first); then four tables. trip: float32 (2), written where a ratio is not in the band: the ratio, and +1
    above it or -1 below.

    The last program starts after all others. It advances the number on the device, so that a replayed graph moves it
    too, and nobody waits for it. A program that reads late, or beside another launch with the same sums, may see the
    next number: it samples another tile, and adds to the table of the next launch, which is not cleared in this one.
    A row that is missing tells nothing, one that misses parts is judged by the rest, and what is added twice leaves a
    ratio between the two.
    """
    capacity = out_rows // SAMPLE + JUDGED
    if program * JUDGED < capacity:
        judge(sums, trip, launch, program * JUDGED, programs * JUDGED, capacity)
    if program == programs - 1:
        tl.atomic_add(sums.to(tl.pointer_type(tl.int32), bitcast=True), 1, sem="relaxed")


@triton.jit
def judge(sums, trip, launch, first, step, capacity):
    """Compare rows of the last launch's table with the limit and the band, and clear that of the one after the next."""
    last = sums + SUMS_HEAD + ((launch + TABLES - 1) & (TABLES - 1)) * 2 * capacity
    cleared = sums + SUMS_HEAD + ((launch + 2) & (TABLES - 1)) * 2 * capacity
    largest = tl.zeros((JUDGED,), tl.float32)
    least = tl.full((JUDGED,), float("inf"), tl.float32)
    for start in range(first, capacity, step):
        row = start + tl.arange(0, JUDGED)
        inside = row < capacity
        square = tl.load(last + row, mask=inside, other=0.0, volatile=True)
        error = tl.load(last + capacity + row, mask=inside, other=0.0, volatile=True)
        tl.store(cleared + row, 0.0, mask=inside)
        tl.store(cleared + capacity + row, 0.0, mask=inside)
        finite = (square < float("inf")) & (error < float("inf"))  # false for NaN
        ratio = tl.where(square > 0.0, error / tl.where(square > 0.0, square, 1.0), 0.0)
        largest = tl.maximum(largest, tl.where(finite, ratio, float("inf")))
        least = tl.minimum(least, tl.where(finite & (ratio > 0.0), ratio, float("inf")))
    high, low = tl.max(largest, 0), tl.min(least, 0)
    limit, band, rounding = tl.load(sums + 2), tl.load(sums + 3), tl.load(sums + 4)
    most_seen, least_seen = tl.load(sums + 5, volatile=True), tl.load(sums + 6, volatile=True)
    known = (launch > LEARNT) | (launch < 0)  # past 2**31
    if not known:  # bits of floats that are not negative are in the floats' order
        bits = sums.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(bits + 5, high.to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_min(bits + 6, low.to(tl.int32, bitcast=True), sem="relaxed")
    limit = tl.where(known, tl.minimum(limit, tl.maximum(band * most_seen, rounding)), limit)
    floor = tl.where(known & (least_seen < float("inf")), least_seen / band, 0.0)
    if high > limit:
        tl.store(trip + 1, high)
        tl.store(trip, 1.0)
    elif low < floor:
        tl.store(trip + 1, low)
        tl.store(trip, -1.0)


@triton.jit
def sampled(tile, launch):
    """Return whether this launch samples the rows of a tile."""
    return ((tile ^ launch) & (SAMPLE - 1)) == 0


@triton.jit
def squares_of(value, inverse, out):
    """Return the squares of values in units of their scales, and of their rounding errors; not finite for what is not.

    The value is cast again: of a branch that few programs take, what all of them keep should know nothing.
    """
    scaled = value * inverse
    error = scaled - encode(value, inverse, out).to(tl.float32)
    return scaled * scaled, error * error


@triton.jit
def _add_pairs(square, error, more_square, more_error):
    return square + more_square, error + more_error


@triton.jit
def sums_of(square, error, axis: tl.constexpr):
    """Return the sums of squares and of errors over one axis, in one pass of their reduction."""
    return tl.reduce((square, error), axis, _add_pairs)


@triton.jit
def add_to_table(sums, launch, tile, square, error, out_rows, tile_rows: tl.constexpr):
    """Add the sums of the rows of a sampled tile, or of a part of each, to this launch's table; nobody waits for it."""
    capacity = out_rows // SAMPLE + JUDGED
    table = sums + SUMS_HEAD + (launch & (TABLES - 1)) * 2 * capacity
    place = table + tile // SAMPLE * tile_rows + tl.arange(0, tile_rows)
    tl.atomic_add(place, square, sem="relaxed")
    tl.atomic_add(place + capacity, error, sem="relaxed")


@triton.jit
def sample_rows(
    x,
    out,
    sums,
    launch,
    tile,
    first,
    end,
    rows,
    cols,
    stride,
    out_rows,
    inverse,
    tile_rows: tl.constexpr,
    piece: tl.constexpr,
):
    """Add up the sums of a tile of rows, columns first to end, if this launch samples it.

    inverse: (tile_rows,) or (1,). The values are read again, `piece` columns at a time: to keep them would take
    registers of all programs, and so would larger pieces.
    """
    if sampled(tile, launch):
        row = tile.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        square_sum = tl.zeros((tile_rows, piece), tl.float32)
        error_sum = tl.zeros((tile_rows, piece), tl.float32)
        col = first + tl.arange(0, piece)
        source = x + row[:, None] * stride
        following = tl.load(source + col[None, :], mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
        for _ in range(first, tl.minimum(end, cols), piece):
            value = following.to(tl.float32)
            col += piece
            following = tl.load(source + col[None, :], mask=(row < rows)[:, None] & (col < cols)[None, :], other=0.0)
            square, error = squares_of(value, inverse[:, None], out)
            square_sum += square
            error_sum += error
        square, error = sums_of(square_sum, error_sum, 1)
        add_to_table(sums, launch, tile, square, error, out_rows, tile_rows)


@triton.jit
def sample_columns(
    x,
    out,
    sums,
    launch,
    tile,
    first,
    end,
    rows,
    cols,
    stride,
    out_rows,
    inverse,
    tile_cols: tl.constexpr,
    piece: tl.constexpr,
):
    """Do the same for a tile of columns, rows first to end; inverse: (tile_cols,) or (1,)."""
    if sampled(tile, launch):
        col = tile.to(tl.int64) * tile_cols + tl.arange(0, tile_cols)
        square_sum = tl.zeros((piece, tile_cols), tl.float32)
        error_sum = tl.zeros((piece, tile_cols), tl.float32)
        row = first + tl.arange(0, piece).to(tl.int64)
        source = x + col[None, :]
        inside = (row < rows)[:, None] & (col < cols)[None, :]
        following = tl.load(source + row[:, None] * stride, mask=inside, other=0.0)
        for _ in range(first, tl.minimum(end, rows), piece):
            value = following.to(tl.float32)
            row += piece
            inside = (row < rows)[:, None] & (col < cols)[None, :]
            following = tl.load(source + row[:, None] * stride, mask=inside, other=0.0)
            square, error = squares_of(value, inverse[None, :], out)
            square_sum += square
            error_sum += error
        square, error = sums_of(square_sum, error_sum, 0)
        add_to_table(sums, launch, tile, square, error, out_rows, tile_cols)
