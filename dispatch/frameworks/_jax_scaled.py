"""A product by a ScaledArray that stands in a trace: decided when it is lowered, on a mesh for one device's part.

So a weight is quantized once, and passed to a jitted function, or a shard_map, like any other array.
"""

from __future__ import annotations

from collections.abc import Sequence
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
from dispatch.quantization import ScaledArray
from dispatch.quantization._blocks import block_extents

Array = Any


@dataclass(frozen=True, slots=True)
class Kind:
    """What a ScaledArray is beside its data and scales, (k, n) and contracted along its first axis."""

    recipe: ScalingRecipe
    dtype: str

    def of(self, data: Array, scale: Array) -> ScaledArray:
        """Return the ScaledArray."""
        return ScaledArray(data, scale, self.recipe, -2, self.dtype)


scaled = Primitive("dispatch_scaled_matmul")


def matmul(a: Array, b: ScaledArray, bias: Array | None, choice: Choice, epilogue: Epilogue) -> Array:
    """Return the product of a, of one dimension or more, and b (k, n), with its epilogue."""
    kind = Kind(b.recipe, b.dtype)
    operands = (a, b.data, b.scale) if bias is None else (a, b.data, b.scale, bias)
    out: Array = scaled.bind(*operands, choice=choice, epilogue=epilogue, kind=kind)
    return out


def _own(a: Array, data: Array, scale: Array, *bias: Array, epilogue: Epilogue, kind: Kind) -> Array:
    """Return the framework's own product of what b stands for."""
    product = jnp.matmul(a, kind.of(data, scale).dequantize(), preferred_element_type=epilogue.preferred)
    return epilogue.apply(product, bias[0] if bias else None)


@scaled.def_abstract_eval  # type: ignore[untyped-decorator]
def _(*avals: Any, choice: Choice, epilogue: Epilogue, kind: Kind) -> Any:
    return jax.make_jaxpr(partial(_own, epilogue=epilogue, kind=kind))(*avals).out_avals[0]


@scaled.def_impl  # type: ignore[untyped-decorator]
def _(*operands: Array, **params: Any) -> Array:
    if spread.several_devices(*operands):
        return jax.jit(partial(scaled.bind, **params))(*operands)
    return _serve(*operands, **params)


def _serve(a: Array, data: Array, scale: Array, *bias: Array, choice: Choice, epilogue: Epilogue, kind: Kind) -> Array:
    b = kind.of(data, scale)
    return serve(choice, a, b, bias[0] if bias else None, epilogue.activation, epilogue.out_dtype)


def _jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    """Return value and tangent; the tangent is the own product's."""
    moving = [not isinstance(tangent, ad.Zero) for tangent in tangents]
    own = partial(_own, epilogue=params["epilogue"], kind=params["kind"])

    def call(*changing: Array) -> Array:
        left = iter(changing)
        return own(*(next(left) if moves else x for x, moves in zip(primals, moving, strict=True)))

    changing = [x for x, moves in zip(primals, moving, strict=True) if moves]
    given = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
    return scaled.bind(*primals, **params), jax.jvp(call, changing, given)[1]


ad.primitive_jvps[scaled] = _jvp


def _batched(operands: Sequence[Array], dims: Sequence[Any], **params: Any) -> tuple[Array, int]:
    """Return one product where rows of a alone are mapped over; else what the plan for one of them does under vmap."""
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    a, data, scale, *bias = operands
    lone = axes[0] is not None and not any(axis is not None for axis in axes[1:])
    if lone and a.ndim > 1 and all(x.ndim <= a.ndim - 1 for x in bias):
        return scaled.bind(jnp.moveaxis(a, axes[0], 0), data, scale, *bias, **params), 0
    return jax.vmap(here(partial(_serve, **params)), axes)(*operands), 0


batching.primitive_batchers[scaled] = _batched


def _lower(ctx: Any, *values: Any, choice: Choice, epilogue: Epilogue, kind: Kind) -> Any:
    place, (a, data) = spread.place(ctx), ctx.avals_in[:2]
    whole = partial(_own, epilogue=epilogue, kind=kind)
    if place == spread.HERE:
        whole = here(partial(_serve, choice=choice, epilogue=epilogue, kind=kind))
    elif place == spread.SEVERAL:
        out_dtype = epilogue.preferred or jnp.promote_types(a.dtype, kind.dtype).name
        plain = Epilogue(None, out_dtype, epilogue.preferred, lambda product, bias: product)
        part = here(partial(_serve, choice=choice, epilogue=plain, kind=kind))

        def own(a: Array, data: Array, scale: Array) -> Array:
            return _own(a, data, scale, epilogue=plain, kind=kind)

        numbers = (((a.ndim - 1,), (0,)), ((), ()))
        extents = block_extents(2, kind.recipe, -2)
        if spread.explicit((*ctx.avals_in, *ctx.avals_out)):
            result = jax.make_jaxpr(own)(*ctx.avals_in[:3]).out_avals[0]
            product = spread.mapped(part, numbers, ctx.avals_in[:2], result, extents)
        else:
            product = spread.partitioned(own, part, numbers, (a.ndim, data.ndim), extents)

        def whole(*operands: Array) -> Array:
            return epilogue.apply(product(*operands[:3]), operands[3] if len(operands) > 3 else None)

    return mlir.lower_fun(whole, multiple_results=False)(ctx, *values)


mlir.register_lowering(scaled, _lower)
spread.needs_devices(scaled)
