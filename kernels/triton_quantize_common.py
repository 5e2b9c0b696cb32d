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
LOOK_SLICES = tl.constexpr(14)
"""Into how many slices of neighbouring tiles the guard divides the rows of an operand: it looks at one in a launch."""
LOOK_CYCLE = tl.constexpr(29)
"""Launches in which it looks at every slice twice, and once at none: each row at most 15 launches apart, judged in the
next one at the latest. Operands of one shape may take turns, as the layers of a model do: a prime sees all slices of
them all, unless their number is a multiple of it."""
SUMS_HEAD = tl.constexpr(8)
"""Float32 values before the sums of the rows; the last one is an int32, the number of the launch."""
SUMS_TILE = tl.constexpr(128)
"""What the rows of the guard's sums are rounded up to: the most rows of the output that one program has."""
LEARNT = tl.constexpr(29 * 128)
"""Launches from which the guard learns what is usual: 256 looks at each row of an operand, two where 128 take turns."""
SPREAD = tl.constexpr(16.0)
"""How many times the least ratio seen the largest may be for the band to have a lower end: rows that few values rule
come as near to 0 as chance has it."""


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
def _saturated(first, second, third, fourth, out):
    """Return four tiles of float32 in the dtype that `out` points to, as one of words; Inf saturates, NaN stays.

    The conversion makes two neighbours of what it is given. Left to the compiler these are of one tile, and must be
    taken apart for the words: three instructions more for each value.
    """
    if INTERPRETED:
        fmt: tl.constexpr = out.dtype.element_ty
        word = _word(
            first.to(fmt).to(tl.uint8, bitcast=True),
            second.to(fmt).to(tl.uint8, bitcast=True),
            third.to(fmt).to(tl.uint8, bitcast=True),
            fourth.to(fmt).to(tl.uint8, bitcast=True),
        )
    else:
        pair: tl.constexpr = "e5m2x2" if out.dtype.element_ty == tl.float8e5 else "e4m3x2"
        convert: tl.constexpr = "cvt.rn.satfinite." + pair + ".f32 "
        low: tl.constexpr = convert + "low, $2, $1; "
        high: tl.constexpr = convert + "high, $4, $3; "
        asm: tl.constexpr = "{.reg .b16 low, high; " + low + high + "mov.b32 $0, {low, high};}"
        given = [first, second, third, fourth]
        word = tl.inline_asm_elementwise(asm, "=r,f,f,f,f", given, dtype=tl.uint32, is_pure=True, pack=1)
    return word


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
        word = _saturated(first * inverse, second * inverse, third * inverse, fourth * inverse, out)
        infinity = float("inf")  # its code follows that of the largest number, which Inf became
        word += _word(
            tl.abs(first) == infinity,
            tl.abs(second) == infinity,
            tl.abs(third) == infinity,
            tl.abs(fourth) == infinity,
        )
    else:
        word = _saturated(
            finite_or_nan(first) * inverse,
            finite_or_nan(second) * inverse,
            finite_or_nan(third) * inverse,
            finite_or_nan(fourth) * inverse,
            out,
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
    """Return how many float32 values the guard's sums of an operand take; rows: of the quantizer's output."""
    return int(SUMS_HEAD.value) + 2 * int(triton.cdiv(rows, SUMS_TILE.value) * SUMS_TILE.value)


def sums_head(limit: float, band: float, rounding: float) -> list[float]:
    """Return what the guard's sums begin with, zeros behind it: see `judge`."""
    return [limit, band, rounding, 0.0, float("inf"), 0.0, 0.0, 0.0]


@triton.jit
def number_of(sums):
    """Return the number of this launch, for `looks`; None without sums.

    To be called first of all. It is waited for only by `looks`, and most programs find it in L1. The barrier of a warp
    costs nothing here; without it ptxas moves the load down to its use, when the last program may have changed it.
    """
    number = None
    if sums is not None:
        place = (sums + (SUMS_HEAD - 1)).to(tl.pointer_type(tl.int32), bitcast=True)
        if INTERPRETED:
            number = tl.load(place)
        else:
            asm: tl.constexpr = "ld.global.b32 $0, [$1]; bar.warp.sync 0xffffffff;"
            number = tl.inline_asm_elementwise(asm, "=r,l", [place.to(tl.int64)], tl.int32, is_pure=False, pack=1)
    return number


@triton.jit
def looks(number, tile, tiles, turn: tl.constexpr = 0):
    """Return whether this launch is one of those in which the guard looks at a tile of rows. False without a number.

    tile, tiles: which it is, and how many there are. turn: 1 for the launch after such a one. The answer is the same in
    all threads of a program, whatever each has read. To be called where they have just met, and before the last
    stores: a program that ends later for it ends the launch later.

    A slice is of neighbours: where the programs of a launch follow the rows, those that look are the last ones of it in
    one launch of 14.
    Tried on an H200, at 4096^3: to look at all rows in two launches of 29, which costs the same, all of it in those
    two. And dearer: to look at one tile in 16 in each launch, by itself or by programs that quantize nothing; to count
    by every program, be it one count for all or one of each.
    """
    look = False
    if number is not None:
        place = (number + (LOOK_CYCLE - turn)) % LOOK_CYCLE
        place = tl.where(place > LOOK_SLICES, place - (LOOK_SLICES + 1), place)  # LOOK_SLICES itself is behind all
        each = tl.cdiv(tiles, LOOK_SLICES)
        wanted = (tile >= place * each) & (tile < place * each + each)
        if INTERPRETED:
            look = wanted
        else:
            asm: tl.constexpr = "{.reg .pred p; setp.ne.b32 p, $1, 0; bar.red.and.pred p, 0, p; selp.b32 $0, 1, 0, p;}"
            bits = [wanted.to(tl.int32)]
            look = tl.inline_asm_elementwise(asm, "=r,r", bits, dtype=tl.int32, is_pure=False, pack=1) != 0
    return look


@triton.jit
def count_on(sums, number):
    """Move the number of the launch on. For the last program of an operand, last of all.

    It is taken for granted that every other program has read it by then: each does so first of all, and the last one to
    begin ends microseconds later. One that had not would look at the next slice, or judge what others still add to.
    """
    tl.debug_barrier()
    number = tl.where(number == LOOK_CYCLE << 25, LOOK_CYCLE << 24, number)
    tl.store((sums + (SUMS_HEAD - 1)).to(tl.pointer_type(tl.int32), bitcast=True), number + 1)


@triton.jit
def squares_of(value, inverse, out, shared: tl.constexpr):
    """Return the squares of values in units of their scales, and of their errors.

    shared: whether rows share scales; both are times 2**64 then. Without that, squares of a row that is lost entirely
    could be 0 like those of zeros, which are exact; those of values below 2**-95 of the unit still are. They are not
    finite for what is not; sums of 2**20 of them are. Beside the largest value of its own row no such value counts.
    """
    scaled = value * inverse
    rounded = scaled.to(out.dtype.element_ty).to(tl.float32)  # Inf saturates
    if shared:
        scaled *= 4294967296.0
        rounded *= 4294967296.0
    error = scaled - rounded
    return scaled * scaled, error * error


@triton.jit
def _add_pairs(square, error, more_square, more_error):
    return square + more_square, error + more_error


@triton.jit
def sums_of(square, error, axis: tl.constexpr):
    """Return the sums of squares and of errors over one axis, in one pass of their reduction."""
    return tl.reduce((square, error), axis, _add_pairs)


@triton.jit
def errors_of(
    x,
    out,
    scale,
    inverse,
    line,
    lines,
    line_stride,
    first,
    last,
    stride,
    length,
    tile_rows: tl.constexpr,
    height: tl.constexpr,
    piece: tl.constexpr,
    count: tl.constexpr,
    shared: tl.constexpr,
):
    """Return the sums of squares and of errors of a tile of lines of x, from the value `first` to `last` of each.

    line: (tile_rows,). lines, length: how many there are, and how long; a stride for each axis. inverse: one for the
    tile or for each line; or None: of what is summed, `height` lines together. Lines are rows of the output. They are
    read again, from L1, `piece` values at a time: to keep them takes registers, and every program of the launch then
    has as many. count: pieces that are asked for at once; without inverse only those of the maxima. last - first: of
    whole count * piece, or all there is. shared: as in `squares_of`.
    """
    source, there = x + line[:, None] * line_stride, (line < lines)[:, None]
    last = tl.minimum(last, length)
    by = inverse
    if inverse is None:
        largest = tl.zeros((tile_rows, piece), tl.float32)
        for start in range(first, last, count * piece):
            for i in tl.static_range(count):
                value = _piece(source, there, start + i * piece, length, stride, piece)
                largest = tl.maximum(largest, magnitude(value))
        amax = tl.max(largest, 1)
        if height > 1:
            amax = tl.max(amax.reshape(tile_rows // height, height), 1)[:, None]
            amax = tl.broadcast_to(amax, (tile_rows // height, height)).reshape(tile_rows)
        _, by = scales_of(amax, out, scale)
    square = tl.zeros((tile_rows, piece), tl.float32)
    error = tl.zeros((tile_rows, piece), tl.float32)
    at_once: tl.constexpr = 1 if inverse is None else count
    for start in range(first, last, at_once * piece):
        for i in tl.static_range(at_once):
            value = _piece(source, there, start + i * piece, length, stride, piece)
            more_square, more_error = squares_of(value, by[:, None], out, shared)
            square += more_square
            error += more_error
    return sums_of(square, error, 1)


@triton.jit
def _piece(source, there, first, length, stride, size: tl.constexpr):
    place = (first + tl.arange(0, size))[None, :]
    inside = there & (place < length)
    return tl.load(source + place.to(tl.int64) * stride, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def add_to(sums, tile, square, error, out_rows, tile_rows: tl.constexpr):
    """Add to the sums of squares and of errors of a tile's rows, which other programs share.

    Nothing is waited for: the next launch judges them (`judge_sums`).
    """
    rows = tl.cdiv(out_rows, SUMS_TILE) * SUMS_TILE
    own = sums + SUMS_HEAD + tile.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    tl.atomic_add(own, square, sem="relaxed")
    tl.atomic_add(own + rows, error, sem="relaxed")


@triton.jit
def judge_sums(sums, trip, number, tile, out_rows, tile_rows: tl.constexpr):
    """Judge the sums of a tile's rows that the launch before made, if it looked at them, and make them zeros again."""
    if looks(number, tile, tl.cdiv(out_rows, tile_rows), 1):
        rows = tl.cdiv(out_rows, SUMS_TILE) * SUMS_TILE
        own = sums + SUMS_HEAD + tile.to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
        square, error = tl.load(own), tl.load(own + rows)
        tl.debug_barrier()
        tl.store(own, tl.zeros((tile_rows,), tl.float32))
        tl.store(own + rows, tl.zeros((tile_rows,), tl.float32))
        judge(sums, trip, number, square, error)


@triton.jit
def judge(sums, trip, number, square, error):
    """Judge the sums of squares and of errors of rows, each of one row.

    number: of the launch. sums: float32 (`sums_size`), first of all the limit of error / square, the factor of the
    band, what errors rounding alone can make, the largest and the least ratio seen (0 and Inf at first); last in
    SUMS_HEAD how many launches there were (int32); then two sums for each row. trip: float32 (2), written where a ratio
    is not in the band: the ratio, and +1 above it or -1 below.

    All of it lies on the device, so that a replayed graph moves on too. Launches by the same sums come one after
    another; were two to run at once, a ratio could be of parts of both.
    """
    limit, band, rounding = tl.load(sums), tl.load(sums + 1), tl.load(sums + 2)
    most_seen, least_seen = tl.load(sums + 3), tl.load(sums + 4)  # nothing changes once they are known
    finite = (square < float("inf")) & (error < float("inf"))  # false for NaN
    ratio = tl.where(square > 0.0, error / tl.where(square > 0.0, square, 1.0), 0.0)
    high = tl.max(tl.where(finite, ratio, float("inf")), 0)
    low = tl.min(tl.where(finite & (ratio > 0.0), ratio, float("inf")), 0)
    known = number >= LEARNT
    if not known:  # bits of floats that are not negative are in the floats' order
        bits = sums.to(tl.pointer_type(tl.int32), bitcast=True)
        tl.atomic_max(bits + 3, high.to(tl.int32, bitcast=True), sem="relaxed")
        tl.atomic_min(bits + 4, low.to(tl.int32, bitcast=True), sem="relaxed")
    limit = tl.where(known, tl.minimum(limit, tl.maximum(band * most_seen, rounding)), limit)
    even = (most_seen <= SPREAD * least_seen) & (least_seen < float("inf"))
    floor = tl.where(known & even, least_seen / band, 0.0)
    if high > limit:
        tl.store(trip + 1, high)
        tl.store(trip, 1.0)
    elif low < floor:
        tl.store(trip + 1, low)
        tl.store(trip, -1.0)
