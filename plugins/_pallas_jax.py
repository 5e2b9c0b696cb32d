"""The Pallas products in JAX: quantize what is not, multiply, epilogue, all in one jitted function."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.custom_batching
import jax.numpy as jnp
from dispatch.kernels import pallas_blackwell_gemm, pallas_fp8_gemm
from dispatch.kernels.pallas_common import padded, up
from dispatch.plugins import _pallas_configs as names
from dispatch.plugins._fp8 import lying, quantizes_from_jax
from dispatch.plugins._guard_jax import Ears, quantized_in_call

from dispatch import Plan, Problem, ScaledArray, ScalingRecipe, framework
from dispatch import quantize as quantize_by_xla

Array = Any
MULTIPLES = {-1: (8, 128), -2: (64, 128)}
"""What rows and k of an operand are padded to, by its contraction axis: Mosaic's tilings must divide them."""
SPARE = 512
"""Scales by row have room for whole tiles of the largest cluster, or a kernel of its own would put them there."""
AS_GIVEN = (-1, -2)
"""The contracted axes of a and b."""
_CLUSTERS = {"": "", "2x1": "m", "1x2": "n"}


class Encoded(NamedTuple):
    """One operand as the kernels take it: values (rows, k), K-major and padded, and scales as `gemm` takes them."""

    matrix: Array
    scale: Array


def encode(x: Any, recipe: ScalingRecipe, axis: int, arch: str) -> Encoded:
    """Return one matrix, an array, raw FP8 (its scale is one) or a ScaledArray, as the kernels take it."""
    if isinstance(x, ScaledArray):
        return _encode_scaled(x, recipe, MULTIPLES[axis])
    if x.dtype.itemsize == 1:
        return Encoded(_fitted(x if axis == -1 else x.T, MULTIPLES[axis]), jnp.ones(1, jnp.float32))
    return encode_arrays([(x, recipe, axis, axis)], arch)[0]


def encode_arrays(operands: Sequence[tuple[Array, ScalingRecipe, int, int]], arch: str) -> list[Encoded]:
    """Return one or two matrices quantized, for an arch.

    operands: of each the array, its recipe, and the contracted axis, in the product (-1 for a, -2 for b) and in the
    array, which is another where that is a transposed operand.

    By Triton where it can be launched from JAX, small ones in one launch; else by Pallas's own Triton lowering, and by
    XLA where JAX has that no more. On a CPU Pallas's kernels are interpreted.
    """
    multiples = [MULTIPLES[axis] for _, _, axis, _ in operands]
    if not quantizes_from_jax(arch):
        return [_by_pallas(*operand, interpret=arch.startswith("cpu")) for operand in operands]
    from dispatch.plugins import _quantize_jax as by_triton

    made = by_triton.encode_arrays([(x, recipe, lies) for x, recipe, _, lies in operands], arch, multiples, SPARE)
    laid = zip(made, operands, strict=True)
    return [Encoded(matrix, _scales(scale, recipe)) for (matrix, scale), (_, recipe, _, _) in laid]


def _scales(scale: Array, recipe: ScalingRecipe) -> Array:
    """Return the scales that Triton's kernels write as `gemm` takes them."""
    if recipe.granularity in ("row", "tensor"):
        return scale.reshape(-1)
    return scale.T if recipe.granularity == "1x128" else scale


def _by_pallas(x: Array, recipe: ScalingRecipe, axis: int, lies: int, *, interpret: bool) -> Encoded:
    try:
        from dispatch.kernels.pallas_quantize import quantize
    except ImportError:
        return _encode_scaled(quantize_by_xla(x, recipe, axis=lies), recipe, MULTIPLES[axis])
    laid: dict[str, Any] = {"transposed": lies == -2, "multiple": MULTIPLES[axis], "interpret": interpret}
    return Encoded(*quantize(x, recipe.storage_dtype, recipe.granularity, **laid))


def _fitted(rows: Array, multiple: tuple[int, int]) -> Array:
    """Return FP8 values (rows, k), padded with zeros."""
    return padded(rows, *(up(size, step) for size, step in zip(rows.shape, multiple, strict=True)))


def _encode_scaled(x: ScaledArray, recipe: ScalingRecipe, multiple: tuple[int, int]) -> Encoded:
    data, scale = (x.data, x.scale) if x.axis == -1 else (x.data.T, x.scale.T)
    matrix = _fitted(data, multiple)
    if recipe.granularity == "tensor":
        return Encoded(matrix, scale.reshape(1))
    if recipe.granularity == "row":
        return Encoded(matrix, padded(scale.reshape(-1), matrix.shape[0]))
    height, width = recipe.block(*matrix.shape)
    return Encoded(matrix, padded(scale, -(-matrix.shape[0] // height), -(-matrix.shape[1] // width)))


def prepared(x: Array, recipe: ScalingRecipe, axis: int) -> Encoded:
    """Return a matrix quantized once."""
    made: Encoded = _encoding(recipe, axis, str(framework("jax").arch(x)))(x)
    return made


@cache
def _encoding(recipe: ScalingRecipe, axis: int, arch: str) -> Any:
    return jax.jit(partial(encode, recipe=recipe, axis=axis, arch=arch))


def _tile(config: names.Config) -> Any:
    """Return the kernel's own form of a config."""
    if config.schedule == names.POINTERS:
        from dispatch.kernels import pallas_triton_gemm

        return pallas_triton_gemm.Config(config.block_m, config.block_n, config.block_k, config.stages)
    if config.schedule == names.TENSOR_MEMORY:
        return pallas_blackwell_gemm.Config(
            *(config.block_n, config.block_k, config.stages),
            collective=bool(config.cluster),
            minor=config.minor,
            group=config.group,
        )
    return pallas_fp8_gemm.Config(
        *(config.block_m, config.block_n, config.block_k, config.stages),
        consumers=1 if config.schedule == names.ONE_CONSUMER else 2,
        cluster=_CLUSTERS[config.cluster],
        minor=config.minor,
        group=config.group,
        chain=config.chain,
    )


def complaint(problem: Problem, config: names.Config) -> str:
    """Return why the kernel cannot run a config, nothing where it can."""
    tile, blocks = _tile(config), names.in_blocks(problem)
    if config.schedule == names.POINTERS:
        return str(tile.complaint(blocks=blocks))
    if config.schedule == names.TENSOR_MEMORY:
        return str(tile.complaint(1))
    size = 1 if problem.recipe is not None else jnp.dtype(problem.a.dtype).itemsize
    return str(tile.complaint(size, jnp.dtype(problem.out_dtype).itemsize, blocks=blocks))


def _kernel(problem: Problem, config: names.Config) -> Callable[..., Array]:
    """Return the GEMM, called with both operands, their scales and the bias, out_dtype= and activation=."""
    options: dict[str, Any] = {"config": _tile(config), "interpret": problem.device.startswith("cpu")}
    if config.schedule == names.POINTERS:
        from dispatch.kernels import pallas_triton_gemm

        return partial(pallas_triton_gemm.gemm, **options, blocks=names.in_blocks(problem))
    programs = getattr(jax.devices()[0], "core_count", None)
    if programs is not None and problem.device.startswith("cuda"):
        options["programs"] = programs
    if config.schedule == names.TENSOR_MEMORY:
        return partial(pallas_blackwell_gemm.gemm, **options)
    options |= {"promoted": problem.accumulation == "promoted", "blocks": names.in_blocks(problem)}
    options["across"] = problem.recipe is None
    return partial(pallas_fp8_gemm.gemm, **options)


def _encoder(problem: Problem) -> Callable[[Any, Any, tuple[int, int]], Sequence[Encoded]]:
    """Return what makes both operands ready for the kernel; those that are arrays are quantized together.

    Without a recipe they are ready as they are, b as (k, n).
    """
    if problem.recipe is None:
        return lambda a, b, lies: (Encoded(a, None), Encoded(b, None))
    arch = "cpu" if problem.device.startswith("cpu") else problem.arch
    recipes = problem.recipe.a, problem.recipe.b
    own = [quantized_in_call(operand) for operand in (problem.a, problem.b)]

    def encoder(a: Any, b: Any, lies: tuple[int, int]) -> Sequence[Encoded]:
        given = (a, recipes[0], -1, lies[0]), (b, recipes[1], -2, lies[1])
        if all(own):
            return encode_arrays(given, arch)
        found = []
        for operand, plain, (x, recipe, axis, lie) in zip((problem.a, problem.b), own, given, strict=True):
            made = encode_arrays([(x, recipe, axis, lie)], arch)[0] if plain else x
            found.append(made if plain or operand.prepared else encode(x, recipe, axis, arch))
        return found

    return encoder


def plan(problem: Problem, config: names.Config) -> Plan:
    """Return a jitted callable. A matrix that the program transposes is quantized from where it lies."""
    matrices = _matrices(problem, config)
    if problem.batch:
        batched: Plan = jax.jit(_batched(problem, partial(matrices, lies=AS_GIVEN)))
        return batched
    ways = {AS_GIVEN: jax.jit(_mapped(problem, matrices, AS_GIVEN))}
    movable = [problem.recipe is not None and quantized_in_call(operand) for operand in (problem.a, problem.b)]

    def product(a: Any, b: Any, bias: Array | None = None) -> Array:
        left = lying(a, -1) if movable[0] else (a, -1)
        right = lying(b, -2) if movable[1] else (b, -2)
        lies = left[1], right[1]
        if lies not in ways:
            ways[lies] = jax.jit(_mapped(problem, matrices, lies))
        out: Array = ways[lies](left[0], right[0], bias)
        return out

    return product


def _mapped(problem: Problem, matrices: Callable[..., Array], lies: tuple[int, int]) -> Callable[..., Array]:
    """Return the product with a rule for vmap: rows of a that is mapped over are rows of one product.

    Where more is mapped over, or a scale is for all rows of one a, products are run one after the other.
    """
    pair = problem.recipe
    alike = pair is not None and (problem.a.prepared or problem.a.encoded or pair.a.granularity == "tensor")
    folds = not alike and lies[0] == -1
    product = jax.custom_batching.custom_vmap(partial(matrices, lies=lies))

    @product.def_vmap  # type: ignore[untyped-decorator]
    def rule(size: int, mapped: Any, a: Any, b: Any, bias: Array | None) -> tuple[Array, bool]:
        flags = jax.tree.leaves(mapped)
        if folds and flags[0] and not any(flags[1:]) and (bias is None or math.prod(bias.shape[:-1]) == 1):
            out = product(a.reshape(-1, a.shape[-1]), b, bias)
            return out.reshape(size, -1, out.shape[-1]), True
        leaves, tree = jax.tree.flatten((a, b, bias))

        def one(parts: list[Array]) -> Array:
            left = iter(parts)
            whole = [next(left) if flag else leaf for flag, leaf in zip(flags, leaves, strict=True)]
            return product(*tree.unflatten(whole))

        return jax.lax.map(one, [leaf for flag, leaf in zip(flags, leaves, strict=True) if flag]), True

    mappable: Callable[..., Array] = product
    return mappable


def _matrices(problem: Problem, config: names.Config) -> Callable[..., Array]:
    """Return the product of a (m, k) and b (k, n), of any m, with a bias that broadcasts to it.

    lies: the contracted axes of the arrays that stand for them.
    """
    room, kernel, n = framework("jax"), _kernel(problem, config), problem.n
    encoder, ears = _encoder(problem), Ears(problem)

    def product(a: Any, b: Any, bias: Array | None = None, *, lies: tuple[int, int]) -> Array:
        left, right = encoder(a, b, lies)
        ears.tell(a=(a, lies[0], *left), b=(b, lies[1], *right))
        m = problem.m if problem.a.prepared and problem.recipe is not None else a.shape[-3 - lies[0]]
        of_column = None if bias is None or math.prod(bias.shape[:-1]) != 1 else _of_column(bias, n)
        fused = bias is None or of_column is not None
        columns = n if problem.recipe is None else right.matrix.shape[0]
        out = kernel(
            *(left.matrix, right.matrix, left.scale, right.scale),
            None if of_column is None else padded(of_column, columns),
            out_dtype=problem.out_dtype if fused else jnp.float32,
            activation=problem.activation if fused else None,
        )
        out = out if out.shape == (m, n) else out[:m, :n]
        return out if fused else room.epilogue(out, problem, bias)

    return product


def _of_column(bias: Array, n: int) -> Array:
    """Return a bias of one value a column as (n,)."""
    return jnp.broadcast_to(bias.reshape(-1), (n,))


def _batched(problem: Problem, matrices: Callable[..., Array]) -> Callable[..., Array]:
    """Return the product for operands with batch dimensions: those of a alone are rows, others taken in turn."""
    batch, (m, n) = problem.batch, (problem.m, problem.n)
    folds = math.prod(problem.b.batch) == 1

    def product(a: Any, b: Any, bias: Array | None = None) -> Array:
        plain = bias is None or math.prod(bias.shape[:-1]) == 1
        if folds and plain:
            rows = a.reshape(-1, a.shape[-1])
            return matrices(rows, b.reshape(b.shape[-2:]), bias).reshape(*batch, m, n)
        spread = [jnp.broadcast_to(x, (*batch, *x.shape[-2:])).reshape(-1, *x.shape[-2:]) for x in (a, b)]
        if bias is not None:
            spread.append(jnp.broadcast_to(bias, (*batch, m, n)).reshape(-1, m, n))
        return jax.lax.map(lambda each: matrices(*each), tuple(spread)).reshape(*batch, m, n)

    return product
