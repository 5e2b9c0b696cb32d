"""The Triton products in JAX: quantize what is not, multiply, each launch an operation of the jitted program.

A product is one jitted function. Under vmap rows are folded into m where only a is mapped, and entries of b become a
batch of one launch; whatever else is mapped goes round a loop.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from dispatch.kernels import launching_jax
from dispatch.kernels.launching_jax import Bound
from dispatch.plugins import _triton_configs as names
from dispatch.plugins import _triton_launches as launches
from dispatch.plugins._triton_launches import OF_A, OF_B, Form, Slots, Step

from dispatch import FP8_DTYPES, Arch, Plan, Problem, ScaledArray, ScalingRecipe, framework

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


def bind(step: Step, arch: str, zeroed: Mapping[int, int] | None = None) -> Bound:
    """Return one launch, compiled for an arch."""
    capability = capability_of(arch)
    return launching_jax.bind(
        step.kernel, step.grid, step.arguments, step.options, capability=capability, results=step.writes, zeroed=zeroed
    )


class Quantizer:
    """The launches that quantize one operand into a `Form`; called with it, contiguous, (rows, k) or (k, rows)."""

    def __init__(self, form: Form, dtype: str, arch: str, slots: Slots, *, transposed: bool) -> None:
        self.form, self.slots = form, slots
        steps, floats = launches.quantizing(launches.contiguous(form, dtype, slots, transposed=transposed))
        self._bound = [bind(step, arch) for step in steps]
        self._made = {**_encoded(form, slots), slots.partial: jax.ShapeDtypeStruct((max(floats, 1),), jnp.float32)}

    def __call__(self, x: Array) -> Encoded:
        """Return the operand quantized."""
        arrays = {self.slots.x: x}
        for bound in self._bound:
            arrays.update(zip(bound.results, bound.run(arrays, self._made), strict=True))
        return Encoded(arrays[self.slots.data], arrays[self.slots.scale])


def _encoded(form: Form, slots: Slots) -> dict[int, jax.ShapeDtypeStruct]:
    """Return what quantizing writes, by slot."""
    values = jax.ShapeDtypeStruct((form.rows, form.padded_k), jnp.dtype(form.recipe.storage_dtype))
    return {slots.data: values, slots.scale: jax.ShapeDtypeStruct(form.stored_scale, jnp.float32)}


def encode(x: Any, recipe: ScalingRecipe, axis: int, arch: str) -> Encoded:
    """Return one operand, an array, raw FP8 (its scale is one) or a ScaledArray, as the kernels take it.

    x: (*batch, m, k) with axis -1, (*batch, k, n) with axis -2. An array is quantized in one or two launches.
    """
    if isinstance(x, ScaledArray):
        rows, scale = rows_of(x.data, axis), rows_of(x.scale, axis)
        form = launches.form_of(recipe, *rows.shape)
        if form.along_rows:
            scale = jnp.pad(scale.T, ((0, 0), (0, form.stored_scale[1] - form.rows)))
        return Encoded(fitted(rows, form), scale)
    if x.dtype.itemsize == 1:
        rows = rows_of(x, axis)
        form = launches.form_of(recipe, *rows.shape)
        return Encoded(fitted(rows, form), jnp.ones(form.stored_scale, jnp.float32))
    source, transposed = lying(x, axis)
    rows_and_k = source.shape[::-1] if transposed else source.shape
    form = launches.form_of(recipe, *rows_and_k)
    return Quantizer(form, x.dtype.name, arch, OF_A, transposed=transposed)(source)


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


def fitted(rows: Array, form: Form) -> Array:
    """Return FP8 values (rows, k) with k padded."""
    return rows if form.padded_k == form.k else jnp.pad(rows, ((0, 0), (0, form.padded_k - form.k)))


class _Side:
    """One operand of a product: whether a call quantizes it, and into which form."""

    def __init__(self, problem: Problem, axis: int) -> None:
        assert problem.recipe is not None
        operand, outer = (problem.a, problem.m) if axis == -1 else (problem.b, problem.n)
        self.operand, self.axis, self.batch, self.arch = operand, axis, problem.batch, problem.arch
        self.recipe = problem.recipe.a if axis == -1 else problem.recipe.b
        self.slots = OF_A if axis == -1 else OF_B
        self.quantizes = not operand.prepared and operand.recipe is None and operand.dtype not in FP8_DTYPES
        self.count = launches.entries(problem, operand)
        self.form = launches.form_of(self.recipe, self.count * outer, problem.k)
        self.transposed = axis == -2 and self.count == 1

    def quantizer(self) -> Quantizer:
        """Return what quantizes it alone."""
        return Quantizer(self.form, self.operand.dtype, self.arch, self.slots, transposed=self.transposed)

    def source(self, x: Array) -> Array:
        """Return an array as its quantizer reads it, once for each entry that the kernel sees."""
        if self.count != math.prod(self.operand.batch):
            x = jnp.broadcast_to(x, (*self.batch, *x.shape[-2:]))
        return lying(x, self.axis)[0]

    def encoded(self, x: Any) -> Encoded:
        """Return what `prepare` made, or make it of raw FP8 or a ScaledArray."""
        made: Encoded = x if self.operand.prepared else encode(x, self.recipe, self.axis, self.arch)
        return made


class ScaledProduct:
    """One problem with a recipe, by one config; everything that it launches is compiled when it is made."""

    def __init__(self, problem: Problem, config: names.Config) -> None:
        self.problem, self.config = problem, config
        self.room = framework("jax")
        self.left, self.right = _Side(problem, -1), _Side(problem, -2)
        self.fuses = launches.fuses(problem)
        self._own = self._bound(problem.out_dtype, problem.bias, problem.activation) if self.fuses else self._wide()
        self._both = self._together()
        alone = [side for side in (self.left, self.right) if side.quantizes and self._both is None]
        self._quantizers = {side.axis: side.quantizer() for side in alone}

    def _together(self) -> Bound | None:
        sides = self.left, self.right
        if not all(side.quantizes for side in sides):
            return None
        step = launches.quantizing_both(
            [launches.contiguous(x.form, x.operand.dtype, x.slots, transposed=x.transposed) for x in sides]
        )
        return None if step is None else bind(step, self.problem.arch)

    def _bound(self, out: str, bias: str | None, activation: str | None) -> tuple[Bound, dict[int, Any]]:
        """Return the product's launch with an epilogue, and what it writes."""
        problem = self.problem
        operands = launches.operands_of(problem, (self.left.form, self.right.form))
        made = launches.multiplying(
            problem, self.config, operands, out, bias, activation, programs=multiprocessors(problem)
        )
        results = {
            launches.OUT: jax.ShapeDtypeStruct((*problem.batch, problem.m, problem.n), jnp.dtype(out)),
            launches.PARTIALS: jax.ShapeDtypeStruct((made.floats,), jnp.float32),
            launches.COUNTERS: jax.ShapeDtypeStruct((made.counters,), jnp.int32),
        }
        return bind(made.step, problem.arch, {launches.COUNTERS: 4 * made.counters}), results

    def _wide(self) -> tuple[Bound, dict[int, Any]]:
        """Return the launch that leaves float32 and no epilogue, for a bias that the kernel cannot add."""
        return self._bound("float32", None, None)

    def __call__(self, a: Any, b: Any, bias: Array | None = None) -> Array:
        """Return the product."""
        arrays = self._operands(a, b)
        if self.fuses and (bias is None or bias.shape == (self.problem.n,)):
            (bound, results), epilogue = self._own, False
            arrays[launches.BIAS] = bias
        else:
            (bound, results), epilogue = self._wide(), True
        out = bound.run(arrays, results)[0]
        return self.room.epilogue(out, self.problem, bias) if epilogue else out

    def _operands(self, a: Any, b: Any) -> dict[int, Any]:
        """Return both operands, quantized, by slot."""
        given = {self.left: a, self.right: b}
        if self._both is not None:
            sources = {side.slots.x: side.source(x) for side, x in given.items()}
            written = _encoded(self.left.form, OF_A) | _encoded(self.right.form, OF_B)
            return dict(zip(self._both.results, self._both.run(sources, written), strict=True))
        arrays: dict[int, Any] = {}
        for side, x in given.items():
            made = self._quantizers[side.axis](side.source(x)) if side.quantizes else side.encoded(x)
            arrays |= {side.slots.data: made.matrix, side.slots.scale: made.scale}
        return arrays


def multiprocessors(problem: Problem) -> int:
    """Return how many multiprocessors the GPU has; of an arch that is not here, as many as its largest."""
    for device in jax.devices():
        if device.platform == "gpu" and (count := getattr(device, "core_count", None)):
            return int(count)
    return names.MULTIPROCESSORS[problem.arch]


def plan(problem: Problem, config: names.Config) -> Plan:
    """Return a jitted callable that quantizes what is not quantized, multiplies, and adds bias and activation."""
    product = jax.custom_batching.custom_vmap(ScaledProduct(problem, config).__call__)

    @product.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, in_batched: list[Any], *operands: Any) -> Any:
        found = _batched(problem, size, in_batched, operands)
        return found if found is not None else (_looped(product, in_batched, operands), True)

    compiled: Plan = jax.jit(product)
    return compiled


def _batched(problem: Problem, size: int, in_batched: list[Any], operands: tuple[Any, ...]) -> Any:
    """Return the product of a mapped axis in front as one product, and True; None where scales would be shared."""
    a, b, bias = operands
    plain = not any(x.prepared or x.encoded or x.batch for x in (problem.a, problem.b))
    if problem.recipe is None or not plain or {problem.recipe.a.granularity, problem.recipe.b.granularity} != {"row"}:
        return None
    mapped_a, mapped_b, mapped_bias = (bool(x) for x in in_batched)
    if not mapped_b and not mapped_bias and (bias is None or bias.ndim < 2 or bias.shape[0] == 1):
        folded = replace(problem, m=size * problem.m)
        out = plan(folded, names.configs(folded)[0])(a.reshape(-1, problem.k), b, bias)
        return out.reshape(size, problem.m, problem.n), True
    if not mapped_a and not mapped_b:
        return None
    if mapped_bias:  # as it broadcasts to (size, m, n)
        bias = bias.reshape(size, *(1,) * (3 - bias.ndim), *bias.shape[1:])
    of_a, of_b = (size,) if mapped_a else (), (size,) if mapped_b else ()
    batched = replace(problem, a=replace(problem.a, batch=of_a), b=replace(problem.b, batch=of_b))
    return plan(batched, names.configs(batched)[0])(a, b, bias), True


def _looped(product: Any, in_batched: list[Any], operands: tuple[Any, ...]) -> Array:
    """Return the product of each entry in turn, on top of one another."""
    leaves, tree = jax.tree.flatten(operands)
    mapped = jax.tree.leaves(in_batched)

    def one(own: list[Any]) -> Array:
        rest = iter(own)
        return product(*jax.tree.unflatten(tree, [next(rest) if m else x for x, m in zip(leaves, mapped, strict=True)]))

    return jax.lax.map(one, [x for x, m in zip(leaves, mapped, strict=True) if m])
