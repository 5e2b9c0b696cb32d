"""The Triton products in JAX: quantize what is not, multiply, each launch an operation of the jitted program.

A product is one jitted function. Under vmap rows are folded into m where only a is mapped, and entries of b become a
batch of one launch; whatever else is mapped goes round a loop.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import jax
import jax.custom_batching
import jax.numpy as jnp
from dispatch.kernels.launching_jax import Bound
from dispatch.plugins import _quantize_jax as quantizing
from dispatch.plugins import _triton_configs as names
from dispatch.plugins import _triton_launches as launches
from dispatch.plugins._fp8 import lying
from dispatch.plugins._guard_jax import Ears, quantized_in_call
from dispatch.plugins._quantize_jax import Encoded, Quantizer, bind
from dispatch.plugins._triton_launches import OF_A, OF_B, Source

from dispatch import Operand, Plan, Problem, framework

Array = Any
AS_GIVEN = (-1, -2)
"""The contracted axes of a (m, k) and b (k, n)."""


class _Side:
    """One operand of a product: whether a call quantizes it, and into which form.

    axis: the contracted one in the product; lies: in the array that is given, other where that is transposed.
    """

    def __init__(self, problem: Problem, axis: int, lies: int) -> None:
        assert problem.recipe is not None
        operand, outer = (problem.a, problem.m) if axis == -1 else (problem.b, problem.n)
        self.operand, self.axis, self.batch, self.arch = operand, axis, problem.batch, problem.arch
        self.lies = lies
        self.recipe = problem.recipe.a if axis == -1 else problem.recipe.b
        self.slots = OF_A if axis == -1 else OF_B
        self.quantizes = quantized_in_call(operand)
        self.count = launches.entries(problem, operand)
        self.form = launches.form_of(self.recipe, self.count * outer, problem.k)
        self.transposed = lies == -2 and self.count == 1

    def lying(self) -> Source:
        """Return it as a quantizer is to read it."""
        return launches.contiguous(self.form, self.operand.dtype, self.slots, transposed=self.transposed)

    def source(self, x: Array) -> Array:
        """Return an array as its quantizer reads it, once for each entry that the kernel sees."""
        if self.count != math.prod(self.operand.batch):
            x = jnp.broadcast_to(x, (*self.batch, *x.shape[-2:]))
        return quantizing.lying(x, self.lies)[0]

    def told(self, x: Array, made: Encoded) -> tuple[Array, int, Array, Array]:
        """Return what the guard is told: the array as its quantizer read it, its contracted axis, codes and scales."""
        scale = made.scale.T if self.form.along_rows else made.scale
        return x, -2 if self.transposed else -1, made.matrix, scale

    def encoded(self, x: Any) -> Encoded:
        """Return what `prepare` made, or make it of raw FP8 or a ScaledArray."""
        made: Encoded = x if self.operand.prepared else quantizing.encode(x, self.recipe, self.axis, self.arch)
        return made


class ScaledProduct:
    """One problem with a recipe, by one config; everything that it launches is compiled when it is made.

    lies: the contracted axes of the arrays that are given.
    """

    def __init__(
        self, problem: Problem, config: names.Config, lies: tuple[int, int] = AS_GIVEN, ears: Ears | None = None
    ) -> None:
        self.problem, self.config, self.ears = problem, config, ears
        self.room = framework("jax")
        self.left, self.right = _Side(problem, -1, lies[0]), _Side(problem, -2, lies[1])
        self.fuses = launches.fuses(problem)
        self._own = self._bound(problem.out_dtype, problem.bias, problem.activation) if self.fuses else self._wide()
        self._quantized = [side for side in (self.left, self.right) if side.quantizes]
        self._quantizer = Quantizer([side.lying() for side in self._quantized], problem.arch)

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
        sources = [side.source(given[side]) for side in self._quantized]
        made = dict(zip(self._quantized, self._quantizer(*sources), strict=True))
        if self.ears is not None:
            read = zip(made.items(), sources, strict=True)
            self.ears.tell(**{"a" if side is self.left else "b": side.told(x, own) for (side, own), x in read})
        arrays: dict[int, Any] = {}
        for side, x in given.items():
            encoded = made[side] if side.quantizes else side.encoded(x)
            arrays |= {side.slots.data: encoded.matrix, side.slots.scale: encoded.scale}
        return arrays


def multiprocessors(problem: Problem) -> int:
    """Return how many multiprocessors the GPU has; of an arch that is not here, as many as its largest."""
    for device in jax.devices():
        if device.platform == "gpu" and (count := getattr(device, "core_count", None)):
            return int(count)
    return names.MULTIPROCESSORS[problem.arch]


def plan(problem: Problem, config: names.Config) -> Plan:
    """Return a callable that quantizes what is not quantized, multiplies, and adds bias and activation, jitted.

    An operand that the program transposes is quantized from where it lies; for that a further product is made.
    """
    ears = Ears(problem)
    ways = {AS_GIVEN: _product(problem, config, AS_GIVEN, ears)}

    def product(a: Any, b: Any, bias: Array | None = None) -> Array:
        left = lying(a, -1) if _movable(problem.a) else (a, -1)
        right = lying(b, -2) if _movable(problem.b) else (b, -2)
        lies = left[1], right[1]
        if lies not in ways:
            ways[lies] = _product(problem, config, lies, ears)
        out: Array = ways[lies](left[0], right[0], bias)
        return out

    return product


def _movable(operand: Operand) -> bool:
    """Return whether an operand is a matrix that a call quantizes."""
    return not (operand.prepared or operand.encoded or operand.batch)


def _product(problem: Problem, config: names.Config, lies: tuple[int, int], ears: Ears) -> Any:
    product = jax.custom_batching.custom_vmap(ScaledProduct(problem, config, lies, ears).__call__)

    @product.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, in_batched: list[Any], *operands: Any) -> Any:
        found = _batched(problem, size, in_batched, operands) if lies == AS_GIVEN else None
        return found if found is not None else (_looped(product, in_batched, operands), True)

    return jax.jit(product)


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
