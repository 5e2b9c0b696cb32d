"""Delayed scaling in JAX: operands quantized by the maxima of earlier steps, kept as state beside the parameters; and
the measuring of products on meshes.

Current scaling, which every other product here has, reads an operand twice: for its maxima, then to quantize it.
Delayed scaling reads it once. Formula and names are those of Transformer Engine's DelayedScaling recipe
(docs.nvidia.com/deeplearning/transformer-engine, Common API): its scaling factor, FP8_MAX / amax / 2**margin with amax
the largest of the history, encodes; a scale here decodes, and is one over that.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import dispatch
from dispatch import RecipePair, ScaledArray, ScalingRecipe

Array = Any
SMALLEST_SCALE, LARGEST_SCALE = 2.0**-126, float(jnp.finfo(jnp.float32).max)
MOST_COUNTED = 2**31 - 1


def measure_parts() -> int:
    """Measure the products on meshes of GPUs that were not known when XLA compiled a program, and return how many.

    XLA asks for each device's part while it compiles, and compiles nothing else for GPUs meanwhile: what is not known
    then takes JAX's own product. Call a function once, then this, and JAX compiles it anew at its next call, with what
    was chosen (`jax.clear_caches()` is called). Decisions are kept: later processes know them at once. On CPUs, in
    `shard_map` over a whole mesh and on meshes with explicit sharding types products are measured as they are met.
    """
    found: int = dispatch.framework("jax").measure_parts()  # type: ignore[attr-defined]
    return found


class Amax(NamedTuple):
    """What is kept of one operand.

    history: (length,) float32, its largest finite magnitude in each of the last steps, the newest first. scale: ()
    float32, by which the next step quantizes. clipped: () int32, how many values were beyond the scale so far.
    """

    history: Array
    scale: Array
    clipped: Array


@dataclass(frozen=True, slots=True)
class DelayedScaling:
    """Delayed scaling with one scale an operand.

    length: how many steps the largest magnitude is taken over. margin: powers of two left above it. recipe: of both
    operands, with tensor scales. policy, backend: as in dispatch.matmul, for the product. Raises ValueError for another
    recipe, and for a length below 1.
    """

    length: int = 1024
    margin: int = 0
    recipe: str = "e4m3:tensor"
    policy: dispatch.Policy | str | None = None
    backend: str | None = None

    def __post_init__(self) -> None:
        pair = RecipePair.parse(self.recipe)
        if {pair.a.granularity, pair.b.granularity} != {"tensor"} or {pair.a.scale_dtype, pair.b.scale_dtype} != {
            "float32"
        }:
            raise ValueError(f"recipe {self.recipe}: delayed scaling has one float32 scale an operand, as e4m3:tensor")
        if self.length < 1:
            raise ValueError(f"length {self.length}: the history holds at least one step")

    def start(self) -> Amax:
        """Return the state before the first step: no history, and a scale of one, beyond which values are clipped."""
        return Amax(jnp.zeros(self.length, jnp.float32), jnp.ones((), jnp.float32), jnp.zeros((), jnp.int32))

    def update(self, x: Array, amax: Amax, recipe: ScalingRecipe) -> Amax:
        """Return the state after a step that `x` was quantized in.

        scale = max(history) * 2**margin / FP8_MAX; while there is nothing but zeros in the history it stays. Inf and
        NaN are no part of it.
        """
        largest = float(jnp.finfo(recipe.storage_dtype).max)
        magnitude = jnp.abs(x.astype(jnp.float32))
        finite = jnp.isfinite(magnitude)
        newest = jnp.where(finite, magnitude, 0.0).max(initial=0.0)
        history = jnp.roll(amax.history, 1).at[0].set(newest)
        most = history.max()
        scale = jnp.clip(most * (2.0**self.margin / largest), SMALLEST_SCALE, LARGEST_SCALE)
        beyond = (finite & (magnitude > amax.scale * largest)).sum(dtype=jnp.int32)
        clipped = jnp.minimum(amax.clipped, MOST_COUNTED - beyond) + beyond
        return Amax(history, jnp.where(most > 0, scale, amax.scale), clipped)

    def dot_general(
        self,
        lhs: Array,
        rhs: Array,
        dimension_numbers: Any,
        of_lhs: Amax,
        of_rhs: Amax,
        *,
        scope: str | None = None,
        out_dtype: Any = None,
    ) -> tuple[Array, Amax, Amax]:
        """Return jax.lax.dot_general's product of both operands quantized, and the states after it.

        lhs, rhs: floats of one or more dimensions, without batch dimensions. Values beyond a scale are clipped to the
        largest that it holds, and counted; Inf and NaN become NaN in e4m3. The derivative is the product's by what the
        operands were quantized to (a straight-through estimate), each product in it dispatched as any other: with
        current scaling, where its policy quantizes. Raises ValueError for batch dimensions.
        """
        (contract_l, contract_r), (batch_l, batch_r) = dimension_numbers
        if batch_l or batch_r:
            raise ValueError(
                "delayed scaling: a product with batch dimensions has no state; leave its dot_general as it is"
            )
        free_l, free_r = (
            [dim for dim in range(x.ndim) if dim not in contract]
            for x, contract in ((lhs, contract_l), (rhs, contract_r))
        )
        a, b = lhs.transpose((*free_l, *contract_l)), rhs.transpose((*contract_r, *free_r))
        shape = (*a.shape[: len(free_l)], *b.shape[len(contract_r) :])
        k = math.prod(lhs.shape[dim] for dim in contract_l)
        options = {"policy": self.policy, "backend": self.backend, "scope": scope, "out_dtype": out_dtype}
        pair = RecipePair.parse(self.recipe)
        product = _product(pair, {name: value for name, value in options.items() if value is not None})
        out = product(a.reshape(-1, k), b.reshape(k, -1), of_lhs.scale, of_rhs.scale)
        state = partial(jax.tree.map, jax.lax.stop_gradient)
        return out.reshape(shape), state(self.update(lhs, of_lhs, pair.a)), state(self.update(rhs, of_rhs, pair.b))


def quantized(x: Array, scale: Array, recipe: ScalingRecipe, axis: int) -> ScaledArray:
    """Return a matrix quantized by a given scale, (): x / scale in float32, clipped, rounded to nearest even."""
    largest = float(jnp.finfo(recipe.storage_dtype).max)
    values = x.astype(jnp.float32) / scale
    infinite = values if recipe.dtype == "e5m2" else jnp.nan  # e4m3 has no Inf
    values = jnp.where(jnp.isinf(x), infinite, jnp.clip(values, -largest, largest))
    return ScaledArray(values.astype(recipe.storage_dtype), scale.reshape(1, 1), recipe, axis, x.dtype.name)


def _product(pair: RecipePair, options: dict[str, Any]) -> Callable[..., Array]:
    """Return the product of a (m, k) and b (k, n) quantized by their scales, with a straight-through derivative."""

    def operands(a: Array, b: Array, scale_a: Array, scale_b: Array) -> tuple[ScaledArray, ScaledArray]:
        return quantized(a, scale_a, pair.a, -1), quantized(b, scale_b, pair.b, -2)

    @jax.custom_jvp  # type: ignore[untyped-decorator]
    def product(*given: Array) -> Array:
        return dispatch.matmul(*operands(*given), **options)

    def rule(primals: tuple[Array, ...], tangents: tuple[Any, ...]) -> tuple[Array, Array]:
        a, b = (x.dequantize() for x in operands(*primals))
        given = ((tangents[0], b), (a, tangents[1]))
        parts = [
            dispatch.matmul(x, y, **options)
            for x, y in given
            if not any(isinstance(z, jax.custom_derivatives.SymbolicZero) for z in (x, y))
        ]
        out = product(*primals)
        return out, sum(parts[1:], parts[0]) if parts else jnp.zeros_like(out)

    product.defjvp(rule, symbolic_zeros=True)
    multiply: Callable[..., Array] = product
    return multiply
