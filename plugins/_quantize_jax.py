"""Quantizing in JAX by Triton's kernels, for every backend there: one operand, or both in one launch, in a program."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from dispatch.kernels import launching_jax
from dispatch.kernels.launching_jax import Bound
from dispatch.plugins import _triton_launches as launches
from dispatch.plugins._triton_launches import OF_A, OF_B, Form, Slots, Source, Step

from dispatch import Arch, ScaledArray, ScalingRecipe

Array = Any


class Encoded(NamedTuple):
    """One operand as the kernels take it: values (rows, k padded), K-major, and the scales as `Form` lays them."""

    matrix: Array
    scale: Array


def capability_of(arch: str) -> int:
    """Return the compute capability of an arch as one number, 90 for sm90."""
    found = Arch(arch).capability
    assert found is not None
    return 10 * found[0] + found[1]


def bind(step: Step, arch: str, zeroed: dict[int, int] | None = None) -> Bound:
    """Return one launch, compiled for an arch."""
    capability = capability_of(arch)
    return launching_jax.bind(
        step.kernel, step.grid, step.arguments, step.options, capability=capability, results=step.writes, zeroed=zeroed
    )


class Quantizer:
    """The launches that quantize operands, compiled when it is made; two small operands are quantized in one."""

    def __init__(self, sources: Sequence[Source], arch: str) -> None:
        self.sources = sources
        self._made: dict[int, jax.ShapeDtypeStruct] = {}
        for source in sources:
            self._made |= written(source.form, source.slots)
        self._bound = [bind(step, arch) for step in self._steps()]

    def _steps(self) -> list[Step]:
        both = launches.quantizing_both(self.sources) if len(self.sources) == 2 else None
        if both is not None:
            return [both]
        found: list[Step] = []
        for source in self.sources:
            steps, floats = launches.quantizing(source)
            self._made[source.slots.partial] = jax.ShapeDtypeStruct((max(floats, 1),), jnp.float32)
            found += steps
        return found

    def __call__(self, *operands: Array) -> list[Encoded]:
        """Return the operands quantized; each contiguous, (rows, k) or (k, rows), as its source says."""
        arrays = {source.slots.x: x for source, x in zip(self.sources, operands, strict=True)}
        for bound in self._bound:
            arrays.update(zip(bound.results, bound.run(arrays, self._made), strict=True))
        return [Encoded(arrays[source.slots.data], arrays[source.slots.scale]) for source in self.sources]


def written(form: Form, slots: Slots) -> dict[int, jax.ShapeDtypeStruct]:
    """Return what quantizing writes, by slot."""
    values = jax.ShapeDtypeStruct((form.padded_rows, form.padded_k), jnp.dtype(form.recipe.storage_dtype))
    return {slots.data: values, slots.scale: jax.ShapeDtypeStruct(form.stored_scale, jnp.float32)}


def encode(x: Any, recipe: ScalingRecipe, axis: int, arch: str) -> Encoded:
    """Return one operand, an array, raw FP8 (its scale is one) or a ScaledArray, as Triton's kernels take it.

    x: (*batch, m, k) with axis -1, (*batch, k, n) with axis -2. An array is quantized in one or two launches.
    """
    if isinstance(x, ScaledArray):
        rows, scale = rows_of(x.data, axis), rows_of(x.scale, axis)
        form = launches.form_of(recipe, *rows.shape)
        if form.along_rows:
            scale = jnp.pad(scale.T, ((0, 0), (0, form.stored_scale[1] - form.rows)))
        return Encoded(_fitted(rows, form), scale)
    if x.dtype.itemsize == 1:
        rows = rows_of(x, axis)
        form = launches.form_of(recipe, *rows.shape)
        return Encoded(_fitted(rows, form), jnp.ones(form.stored_scale, jnp.float32))
    return encode_arrays([(x, recipe, axis)], arch)[0]


def encode_arrays(
    operands: Sequence[tuple[Array, ScalingRecipe, int]],
    arch: str,
    multiples: Sequence[tuple[int, int]] = (),
    spare: int = 1,
) -> list[Encoded]:
    """Return one or two arrays quantized, each given with its recipe and axis as to `encode`.

    multiples: of each, what rows and k are padded to with zeros: (1, 16) where it is left out. spare: scales by row
    have room for a multiple of so many rows; what is in the room beyond the padded rows is not set.
    """
    sources, given = [], []
    for index, (x, recipe, axis) in enumerate(operands):
        array, transposed = lying(x, axis)
        rows, k = array.shape[::-1] if transposed else array.shape
        form = launches.form_of(recipe, rows, k, *multiples[index : index + 1])
        if recipe.granularity == "row":
            form = form._replace(scale=(-(-form.padded_rows // spare) * spare, 1))
        sources.append(launches.contiguous(form, x.dtype.name, (OF_A, OF_B)[index], transposed=transposed))
        given.append(array)
    return Quantizer(sources, arch)(*given)


def prepare(x: Array, recipe: ScalingRecipe, axis: int, arch: str) -> Encoded:
    """Return `encode` of an array, jitted."""
    made: Encoded = _encoding(recipe, axis, arch)(x)
    return made


@cache
def _encoding(recipe: ScalingRecipe, axis: int, arch: str) -> Any:
    return jax.jit(lambda x: encode(x, recipe, axis, arch))


def rows_of(x: Array, axis: int) -> Array:
    """Return (*batch, m, k), or with axis -2 (*batch, k, n), as (rows, k)."""
    x = x if axis == -1 else jnp.swapaxes(x, -1, -2)
    return x.reshape(-1, x.shape[-1])


def lying(x: Array, axis: int) -> tuple[Array, bool]:
    """Return an operand as a quantizer reads it, and whether that is (k, rows): a matrix b is transposed on the way."""
    if axis == -2 and math.prod(x.shape[:-2]) == 1:
        return x.reshape(x.shape[-2:]), True
    return rows_of(x, axis), False


def _fitted(rows: Array, form: Form) -> Array:
    """Return FP8 values (rows, k) with k padded."""
    return rows if form.padded_k == form.k else jnp.pad(rows, ((0, 0), (0, form.padded_k - form.k)))
