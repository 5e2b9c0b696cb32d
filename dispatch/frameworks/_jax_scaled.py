"""Products of ScaledArrays that stand in a trace: decided when they are lowered, on a mesh for one device's part.

So a weight is quantized once, and passed to a jitted function, or a shard_map, like any other array.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dispatch._recipe import ScalingRecipe
from dispatch.frameworks import _jax_sharding as spread
from dispatch.frameworks._jax_product import Choice, Epilogue, here, serve
from dispatch.quantization import PreparedOperand, ScaledArray
from dispatch.quantization._blocks import block_extents

Array = Any


@dataclass(frozen=True, slots=True)
class Kind:
    """What an operand is beside its arrays. recipe: None for an array as it is, of dtype `dtype`."""

    recipe: ScalingRecipe | None
    axis: int
    dtype: str

    @classmethod
    def of(cls, operand: Any, axis: int) -> Kind:
        """Return the kind of an array or a ScaledArray."""
        recipe = operand.recipe if isinstance(operand, ScaledArray) else None
        return cls(recipe, axis, operand.dtype if recipe else operand.dtype.name)


@dataclass(frozen=True, slots=True)
class Kinds:
    """The kinds of a and b. The arrays of a product are a, b, the scales of those that have some, and a bias."""

    a: Kind
    b: Kind

    def operands(self, arrays: Sequence[Array]) -> tuple[Any, Any, Array | None]:
        """Return a, b and the bias of a product's arrays."""
        rest = iter(arrays[2:])
        a, b = (
            x if kind.recipe is None else ScaledArray(x, next(rest), kind.recipe, kind.axis, kind.dtype)
            for x, kind in zip(arrays, (self.a, self.b), strict=False)
        )
        return a, b, next(rest, None)

    @property
    def plain(self) -> int:
        """How many arrays there are but for a bias."""
        return 2 + sum(kind.recipe is not None for kind in (self.a, self.b))

    @property
    def out_dtype(self) -> str:
        """The dtype of the framework's own product."""
        return str(jnp.promote_types(self.a.dtype, self.b.dtype).name)

    def scales(self) -> spread.Scales:
        """Return how many values along each axis share a scale, of both operands."""
        of_a, of_b = (
            None if kind.recipe is None else block_extents(2, kind.recipe, kind.axis) for kind in (self.a, self.b)
        )
        return of_a, of_b


scaled = Primitive("dispatch_scaled_matmul")


def serves(a: Any, b: Any) -> bool:
    """Return whether a product is one of these: a ScaledArray b (k, n), by an array, or by a ScaledArray (m, k)."""
    if not isinstance(b, ScaledArray) or b.ndim != 2 or isinstance(a, PreparedOperand):
        return False
    return not isinstance(a, ScaledArray) or a.ndim == 2


def matmul(a: Any, b: ScaledArray, bias: Array | None, choice: Choice, epilogue: Epilogue) -> Array:
    """Return the product of a and b, for which `serves` holds, with its epilogue."""
    kinds = Kinds(Kind.of(a, -1), Kind.of(b, -2))
    of_a = (a.data, a.scale) if isinstance(a, ScaledArray) else (a,)
    arrays = (of_a[0], b.data, *of_a[1:], b.scale, *([] if bias is None else [bias]))
    out: Array = scaled.bind(*arrays, choice=choice, epilogue=epilogue, kinds=kinds)
    return out


def _own(*arrays: Array, epilogue: Epilogue, kinds: Kinds) -> Array:
    """Return the framework's own product of what the operands stand for."""
    a, b, bias = kinds.operands(arrays)
    decoded = (x.dequantize() if isinstance(x, ScaledArray) else x for x in (a, b))
    return epilogue.apply(jnp.matmul(*decoded, preferred_element_type=epilogue.preferred), bias)


@scaled.def_abstract_eval  # type: ignore[untyped-decorator]
def _(*avals: Any, choice: Choice, epilogue: Epilogue, kinds: Kinds) -> Any:
    return jax.make_jaxpr(partial(_own, epilogue=epilogue, kinds=kinds))(*avals).out_avals[0]


@scaled.def_impl  # type: ignore[untyped-decorator]
def _(*arrays: Array, **params: Any) -> Array:
    if spread.several_devices(*arrays):
        return jax.jit(partial(scaled.bind, **params))(*arrays)
    return _serve(*arrays, **params)


def _serve(*arrays: Array, choice: Choice, epilogue: Epilogue, kinds: Kinds) -> Array:
    a, b, bias = kinds.operands(arrays)
    return serve(choice, a, b, bias, epilogue.activation, epilogue.out_dtype)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    """Return value and tangent; the tangent is the own product's."""
    moving = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    own = partial(_own, epilogue=params["epilogue"], kinds=params["kinds"])

    def call(*changing: Array) -> Array:
        left = iter(changing)
        return own(*(next(left) if moves else x for x, moves in zip(primals, moving, strict=True)))

    changing = [x for x, moves in zip(primals, moving, strict=True) if moves]
    given = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
    return scaled.bind(*primals, **params), jax.jvp(call, changing, given)[1]


ad.primitive_jvps[scaled] = _jvp


def _transposed(cotangent: Array, *arrays: Any, choice: Choice, epilogue: Epilogue, kinds: Kinds) -> list[Any]:
    """Return the cotangents of what the product is linear in, by the own product."""
    moving = [ad.is_undefined_primal(x) for x in arrays]

    def call(*changing: Array) -> Array:
        left = iter(changing)
        given = (next(left) if moves else x for x, moves in zip(arrays, moving, strict=True))
        return _own(*given, epilogue=epilogue, kinds=kinds)

    shapes = [
        jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype) for x, moves in zip(arrays, moving, strict=True) if moves
    ]
    found = iter(jax.linear_transpose(call, *shapes)(cotangent))
    return [next(found) if moves else None for moves in moving]


ad.primitive_transposes[scaled] = _transposed


def _batched(arrays: Sequence[Array], dims: Sequence[Any], **params: Any) -> tuple[Array, int]:
    """Return one product where rows of a alone are mapped over; else what the plan for one of them does under vmap."""
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    (a, *rest), rows, kinds = arrays, axes[0], params["kinds"]
    lone = kinds.a.recipe is None and not any(axis is not None for axis in axes[1:])
    if rows is not None and lone and a.ndim > 1 and all(x.ndim < a.ndim for x in arrays[kinds.plain :]):
        return scaled.bind(jnp.moveaxis(a, rows, 0), *rest, **params), 0
    return jax.vmap(here(partial(_serve, **params)), axes)(*arrays), 0


batching.primitive_batchers[scaled] = _batched


def _lower(ctx: Any, *values: Any, choice: Choice, epilogue: Epilogue, kinds: Kinds) -> Any:
    place = spread.place(ctx)
    if place == spread.HERE:
        whole = here(partial(_serve, choice=choice, epilogue=epilogue, kinds=kinds), tells=True)
    elif place == spread.SEVERAL:
        whole = _followed(_spread(ctx, choice, epilogue, kinds), epilogue, kinds)
    else:
        whole = partial(_own, epilogue=epilogue, kinds=kinds)
    return mlir.lower_fun(whole, multiple_results=False)(ctx, *values)


def _followed(product: Callable[..., Array], epilogue: Epilogue, kinds: Kinds) -> Callable[..., Array]:
    """Return a product without epilogue, called with a bias too, and the epilogue after it."""

    def whole(*arrays: Array) -> Array:
        return epilogue.apply(product(*arrays[: kinds.plain]), kinds.operands(arrays)[2])

    return whole


def _spread(ctx: Any, choice: Choice, epilogue: Epilogue, kinds: Kinds) -> Any:
    """Return the product over a mesh, without bias and activation: those follow the sum of the parts."""
    out_dtype = epilogue.preferred or kinds.out_dtype
    plain = Epilogue(None, out_dtype, epilogue.preferred, lambda product, bias: product)
    explicit = spread.explicit((*ctx.avals_in, *ctx.avals_out))
    part = here(partial(_serve, choice=choice, epilogue=plain, kinds=kinds), tells=explicit)

    def own(*arrays: Array) -> Array:
        return _own(*arrays, epilogue=plain, kinds=kinds)

    a, b = ctx.avals_in[:2]
    numbers, scales = (((a.ndim - 1,), (0,)), ((), ())), kinds.scales()
    if explicit:
        result = jax.make_jaxpr(own)(*ctx.avals_in[: kinds.plain]).out_avals[0]
        return spread.mapped(part, numbers, (a, b), result, scales)
    return spread.partitioned(own, part, numbers, (a.ndim, b.ndim), scales)


mlir.register_lowering(scaled, _lower)
spread.needs_devices(scaled)
