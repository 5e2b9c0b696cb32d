"""The reference quantizer: every recipe, written once over the array namespace, the same bits in each framework."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from dispatch._problem import FLOAT_DTYPES, FP8_DTYPES
from dispatch._recipe import ScalingRecipe
from dispatch.frameworks import NAMES, Framework, framework_of
from dispatch.quantization._blocks import Extents, block_amax, block_extents, spread
from dispatch.quantization.scaled_array import SCALE_STORAGE, ScaledArray, check_axis

SMALLEST_SCALE = 2.0**-126
"""The smallest normal float32: its reciprocal is finite, and no processor setting flushes it to zero."""

LARGEST_SCALE = float(np.finfo(np.float32).max)
_NAN_BITS = 0x7F  # a NaN in e4m3 and in e5m2


class _Layout(NamedTuple):
    """The bits of the IEEE format that is computed in."""

    dtype: str
    integer: str
    exponent_mask: int


_FLOAT32 = _Layout("float32", "int32", 0xFF << 23)
_FLOAT64 = _Layout("float64", "int64", 0x7FF << 52)


def _finfo(dtype: str) -> Any:
    import ml_dtypes  # noqa: PLC0415 - products of NumPy's own dtypes do without it

    return ml_dtypes.finfo(dtype)


@np.errstate(all="ignore")
def quantize(x: Any, recipe: str | ScalingRecipe, *, axis: int = -1) -> ScaledArray:
    """Return `x` quantized by `recipe`: FP8 values and the scales that decode them, value = quantized * scale.

    x: a NumPy, torch or JAX array (..., rows, columns) or (k,), of float64, float32, float16, bfloat16 or an FP8
    dtype. axis: the contraction axis, -1 for an operand a (..., m, k) and -2 for an operand b (..., k, n).

    scale = amax / max, clamped to normal float32 numbers; amax is taken over the finite values that share the scale,
    in float32 (float64 for float64). An e8m0 scale is that rounded up to a power of two, so that amax never saturates
    (Mishra et al., Recipes for Pre-training LLMs with MXFP8, arXiv:2506.08027; the OCP MX rule rounds down and clips).
    quantized = x / scale, divided in the same dtype and rounded to nearest even. Finite values saturate, NaN stays NaN,
    and Inf stays Inf in e5m2 and becomes NaN in e4m3, which has no Inf. In torch no gradient flows through it.

    Raises TypeError for anything else than an array of such a dtype, ValueError for an unknown recipe or axis.
    """
    recipe = ScalingRecipe.parse(recipe)
    room = _room(x)
    name = room.dtype_name(x)
    if name not in FLOAT_DTYPES:
        raise TypeError(f"quantize: dtype {name} cannot be quantized; allowed: {', '.join(FLOAT_DTYPES)}")
    check_axis(x.ndim, axis)
    if room.name == "torch":
        x = x.detach()  # else the scales would keep the graph of x alive
    layout = _FLOAT64 if name == "float64" else _FLOAT32
    x = room.cast(x, layout.dtype)
    extents = block_extents(x.ndim, recipe, axis)
    scale = _scale(room, x, recipe, extents)
    values = spread(room.xp, room.cast(scale, layout.dtype), tuple(x.shape), extents)
    dtype = "bfloat16" if name in FP8_DTYPES else name
    return ScaledArray(_encode(room, x, values, recipe, layout), scale, recipe, axis, dtype)


def _room(x: Any) -> Framework:
    room = framework_of(x)
    if room is None:
        hint = "; it is quantized already: decode it first, with dequantize()" if isinstance(x, ScaledArray) else ""
        raise TypeError(f"quantize: {type(x).__name__} is no array; allowed: an array of {', '.join(NAMES)}{hint}")
    return room


def _scale(room: Framework, x: Any, recipe: ScalingRecipe, extents: Extents) -> Any:
    xp = room.xp
    amax = block_amax(xp, xp.where(xp.isfinite(x), xp.abs(x), 0.0), extents)
    # XLA multiplies by the reciprocal of a constant divisor, one bit off: it must not see that this is one.
    largest = amax * 0.0 + float(_finfo(recipe.storage_dtype).max)
    scale = room.cast(xp.clip(amax / largest, SMALLEST_SCALE, LARGEST_SCALE), "float32")
    if recipe.scale_dtype == "e8m0":
        exponent = ((scale.view(xp.int32) + 0x7FFFFF) >> 23).clip(1, 254)
        scale = (exponent << 23).view(xp.float32)
    return room.cast(scale, SCALE_STORAGE[recipe.scale_dtype])


def _encode(room: Framework, x: Any, scale: Any, recipe: ScalingRecipe, layout: _Layout) -> Any:
    """Return x / scale in the storage dtype; `scale` broadcasts to `x`."""
    xp = room.xp
    info = _finfo(recipe.storage_dtype)
    finite = xp.isfinite(x)
    quotient = _divide(room, xp.where(finite, x, 0.0), scale, layout)
    rounded = _round(xp, xp.clip(quotient, -float(info.max), float(info.max)), info, layout)
    nan = ~finite
    if recipe.dtype == "e5m2":
        nan = xp.isnan(x)
        rounded = xp.where(xp.isinf(x), x, rounded)
    encoded = room.cast(rounded, recipe.storage_dtype)
    # Frameworks disagree about the bits of a NaN.
    return xp.where(nan, _NAN_BITS, encoded.view(xp.uint8)).view(room.dtype(recipe.storage_dtype))


def _divide(room: Framework, x: Any, scale: Any, layout: _Layout) -> Any:
    """Return x / scale. XLA takes subnormal float32 numbers for zero, so they are divided in units of 2**-126."""
    if layout is _FLOAT64:  # a subnormal over 2**-126 is zero in every format
        return x / scale
    xp = room.xp
    bits = x.view(xp.int32)
    magnitude = bits & 0x7FFFFFFF
    subnormal = magnitude < 1 << 23
    units = room.cast(magnitude, "float32") * 2.0**-23
    x = xp.where(subnormal, xp.where(bits < 0, -units, units), x)
    return x / xp.where(subnormal, xp.clip(scale, SMALLEST_SCALE, 1.0) * 2.0**126, scale)


def _round(xp: Any, x: Any, info: Any, layout: _Layout) -> Any:
    """Return `x` rounded to nearest even among the numbers of the format `info`, so that the cast to it is exact.

    The frameworks' casts will not do: from float64 some round twice, and they disagree beyond the largest number.
    """
    integer, real = getattr(xp, layout.integer), getattr(xp, layout.dtype)
    power = (x.view(integer) & layout.exponent_mask).view(real)  # 2**floor(log2(abs(x)))
    step = xp.clip(power, 2.0**info.minexp, float(info.max)) * 2.0**-info.nmant
    return xp.round(x / step) * step
