"""FP8 products in JAX: quantize what is not, an FP8 `dot_general`, scales, epilogue, all in one jitted function."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dispatch import FP8_DTYPES, Operand, Plan, Problem, ScalingRecipe, framework

Array = Any


class Encoded(NamedTuple):
    """One quantized operand, a (m, k) or b (k, n), and its scales, which broadcast to it."""

    matrix: Array
    scale: Array


Encoder = Callable[[Any], Encoded]


def encoder(recipe: ScalingRecipe, axis: int, *, raw: bool = False, scaled: bool = False) -> Encoder:
    """Return what makes an Encoded of one operand: an array, a raw FP8 array (scale one) or a ScaledArray."""
    if scaled:
        return lambda x: Encoded(x.data, x.scale)
    if raw:
        return _encode_raw
    return partial(_encode_array, recipe, axis)


def _encode_raw(x: Array) -> Encoded:
    import jax.numpy as jnp

    return Encoded(x, jnp.ones((1, 1), jnp.float32))


def _encode_array(recipe: ScalingRecipe, axis: int, x: Array) -> Encoded:
    """Return x quantized as `dispatch.quantize` does, but times 1/scale; XLA fuses it into two passes."""
    import jax.numpy as jnp

    largest = float(jnp.finfo(recipe.storage_dtype).max)
    wide = x.astype(jnp.float32)
    magnitude = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    amax = magnitude.max(axis=axis if recipe.granularity == "row" else None, keepdims=True)
    scale = jnp.clip(amax / largest, 2.0**-126, float(jnp.finfo(jnp.float32).max))
    values = jnp.clip(wide * (1 / scale), -largest, largest)
    infinite = jnp.nan if recipe.dtype == "e4m3" else wide  # e4m3 has no Inf
    return Encoded(jnp.where(jnp.isinf(wide), infinite, values).astype(recipe.storage_dtype), scale)


def _operand_encoder(operand: Operand, recipe: ScalingRecipe, axis: int) -> Encoder:
    if operand.prepared:
        return lambda x: x
    return encoder(recipe, axis, raw=operand.dtype in FP8_DTYPES, scaled=operand.recipe is not None)


def plan(problem: Problem) -> Plan:
    """Return a jitted callable. XLA lets the tensor core accumulate its own way at the default precision alone."""
    import jax
    import jax.numpy as jnp

    assert problem.recipe is not None
    room = framework("jax")
    encode_a = _operand_encoder(problem.a, problem.recipe.a, -1)
    encode_b = _operand_encoder(problem.b, problem.recipe.b, -2)
    precision = jax.lax.Precision.DEFAULT if problem.accumulation == "fast" else jax.lax.Precision.HIGHEST
    contract = (((1,), (0,)), ((), ()))

    def product(a: Any, b: Any, bias: Array | None = None) -> Array:
        left, right = encode_a(a), encode_b(b)
        accumulated = jax.lax.dot_general(
            left.matrix, right.matrix, contract, precision=precision, preferred_element_type=jnp.float32
        )
        return room.epilogue(accumulated * left.scale * right.scale, problem, bias)

    compiled: Plan = jax.jit(product)
    return compiled
