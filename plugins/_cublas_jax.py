"""FP8 products in JAX: quantize what is not, an FP8 `dot_general`, scales, epilogue, all in one jitted function.

XLA gives the dot to cuBLASLt (`__cublas$lt$matmul$f8`), float32 out, and multiplies by the scales in one fusion after
it. The other way to write it, operands decoded before the dot, would leave tensor scales to cuBLASLt too, but XLA of
jax 0.11 does that only without its Triton GEMMs (`--xla_gpu_enable_triton_gemm=false`), and else decodes and multiplies
in bfloat16 (read in the HLO for sm90). MX scales go to `jax.nn.scaled_matmul`, which cuDNN runs on Blackwell.

Operands are K-major, as FP8 wants them: XLA would transpose another b in each call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

from dispatch.plugins._fp8 import lying, quantizes_from_jax
from dispatch.plugins._guard_jax import Ears, quantized_in_call

from dispatch import FP8_DTYPES, Operand, Plan, Problem, ScalingRecipe, framework, quantize

Array = Any


class Encoded(NamedTuple):
    """One quantized operand, a (m, k) or b (n, k), and its scales, which broadcast to it (MX: one for each 32 of k)."""

    matrix: Array
    scale: Array


Encoder = Callable[[Any], Encoded]


def prepare(operand: Array, recipe: ScalingRecipe, axis: int) -> Encoded:
    """Return an operand quantized, jitted."""
    arch = str(framework("jax").arch(operand))
    made: Encoded = _prepared(recipe, axis, arch, operand.dtype.itemsize == 1)(operand)
    return made


@cache
def _prepared(recipe: ScalingRecipe, axis: int, arch: str, raw: bool) -> Any:
    import jax

    return jax.jit(encoder(recipe, axis, arch, raw=raw))


def encoder(recipe: ScalingRecipe, axis: int, arch: str, *, raw: bool = False, scaled: bool = False) -> Encoder:
    """Return what makes an Encoded of one operand: an array, a raw FP8 array (scale one) or a ScaledArray."""
    if scaled:
        return partial(_encode_scaled, axis)
    if raw:
        return partial(_encode_raw, axis)
    if recipe.granularity == "1x32":
        return lambda x: _encode_scaled(axis, quantize(x, recipe, axis=axis))
    return partial(_encode_array, recipe, axis, arch)


def _encode_scaled(axis: int, x: Any) -> Encoded:
    return Encoded(x.data, x.scale) if axis == -1 else Encoded(x.data.mT, x.scale.mT)


def _encode_raw(axis: int, x: Array) -> Encoded:
    import jax.numpy as jnp

    return Encoded(x if axis == -1 else x.mT, jnp.ones((1, 1), jnp.float32))


def _encode_array(recipe: ScalingRecipe, axis: int, arch: str, x: Array) -> Encoded:
    """Return x quantized as `dispatch.quantize` does, but times 1/scale: by Triton's kernels, or by XLA in two passes.

    Triton's make one pass of a (m, k), and transpose b (k, n) on the way.
    """
    if quantizes_from_jax(arch):
        from dispatch.plugins._quantize_jax import encode

        return Encoded(*encode(x, recipe, axis, arch))
    matrix, scale = _encode_by_xla(recipe, x if axis == -1 else x.mT)
    return Encoded(matrix, scale)


def _encode_both(problem: Problem, arrays: tuple[Array, Array], lies: tuple[int, int]) -> list[Encoded]:
    """Return both operands quantized by Triton's kernels, small ones in one launch; lies: their contracted axes."""
    from dispatch.plugins._quantize_jax import encode_arrays

    assert problem.recipe is not None
    recipes = (problem.recipe.a, problem.recipe.b)
    made = encode_arrays(list(zip(arrays, recipes, lies, strict=True)), problem.arch)
    return [Encoded(*x) for x in made]


def _encode_by_xla(recipe: ScalingRecipe, rows: Array) -> tuple[Array, Array]:
    import jax.numpy as jnp

    largest = float(jnp.finfo(recipe.storage_dtype).max)
    wide = rows.astype(jnp.float32)
    magnitude = jnp.where(jnp.isfinite(wide), jnp.abs(wide), 0)
    amax = magnitude.max(axis=-1 if recipe.granularity == "row" else None, keepdims=True)
    scale = jnp.clip(amax / largest, 2.0**-126, float(jnp.finfo(jnp.float32).max))
    values = jnp.clip(wide * (1 / scale), -largest, largest)
    infinite = jnp.nan if recipe.dtype == "e4m3" else wide  # e4m3 has no Inf
    return jnp.where(jnp.isinf(wide), infinite, values).astype(recipe.storage_dtype), scale


def _operand_encoder(operand: Operand, recipe: ScalingRecipe, axis: int, arch: str) -> Encoder:
    if operand.prepared:
        return lambda x: x
    return encoder(recipe, axis, arch, raw=operand.dtype in FP8_DTYPES, scaled=operand.recipe is not None)


def plan(problem: Problem) -> Plan:
    """Return a jitted callable. XLA lets the tensor core accumulate its own way at the default precision alone."""
    import jax
    import jax.numpy as jnp

    assert problem.recipe is not None
    room = framework("jax")
    encode_a = _operand_encoder(problem.a, problem.recipe.a, -1, problem.arch)
    encode_b = _operand_encoder(problem.b, problem.recipe.b, -2, problem.arch)
    precision = jax.lax.Precision.DEFAULT if problem.accumulation == "fast" else jax.lax.Precision.HIGHEST
    contract = (((1,), (1,)), ((), ()))

    def dot(left: Encoded, right: Encoded) -> Array:
        sums = jax.lax.dot_general(
            left.matrix, right.matrix, contract, precision=precision, preferred_element_type=jnp.float32
        )
        return sums * left.scale * right.scale.mT

    def mx_dot(left: Encoded, right: Encoded) -> Array:
        operands = (left.matrix, right.matrix, left.scale, right.scale)
        return jax.nn.scaled_matmul(*(x[None] for x in operands), preferred_element_type=jnp.float32)[0]

    multiply = mx_dot if problem.recipe.a.granularity == "1x32" else dot

    plain, ears = all(map(quantized_in_call, (problem.a, problem.b))), Ears(problem)
    together = plain and problem.recipe.a.granularity != "1x32" and quantizes_from_jax(problem.arch)

    def product(a: Any, b: Any, bias: Array | None = None, *, lies: tuple[int, int]) -> Array:
        left, right = _encode_both(problem, (a, b), lies) if together else (encode_a(a), encode_b(b))
        ears.tell(a=(a, lies[0], *left), b=(b, lies[1], *right))
        return room.epilogue(multiply(left, right), problem, bias)

    compiled: Plan = jax.jit(product, static_argnames="lies")

    def served(a: Any, b: Any, bias: Array | None = None) -> Array:
        (left, of_a), (right, of_b) = (lying(a, -1), lying(b, -2)) if together else ((a, -1), (b, -2))
        return compiled(left, right, bias, lies=(of_a, of_b))

    return served
