"""JAX's dot_general with a choice attached: decided when it is lowered, where the shapes that a device sees are known.

`product` and `fused` stand in a trace where the framework's own product would. Their derivatives, and what vmap makes
of them, are those of jax.lax.dot_general, traced and with each dot_general in them replaced by `product` again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from dispatch.frameworks import _jax_sharding as spread
from dispatch.frameworks.calls import Options
from dispatch.frameworks.request import request
from dispatch.measuring.watch import telling
from dispatch.policies.policy import Policy

Array = Any
RESULT_NAME = "dispatch_matmul"
"""What jax.checkpoint policies know a product's result by."""
lowering: ContextVar[bool] = ContextVar("dispatch_jax_lowering", default=False)
_standing: ContextVar[tuple[Array, Array, Callable[[], Array]] | None] = ContextVar("dispatch_standing", default=None)


@dataclass(frozen=True, slots=True)
class Choice:
    """What a product's choice depends on beside its operands. op: matmul, dgrad or wgrad."""

    policy: Policy
    backend: str | None
    scope: str | None
    op: str = "matmul"

    def __repr__(self) -> str:
        named = f", scope={self.scope!r}" if self.scope else ""
        return f"{self.op}(policy={self.policy.name!r}{named})"


@dataclass(frozen=True, slots=True)
class Epilogue:
    """What follows a fused product. apply(product, bias) does it by the framework's own operations."""

    activation: str | None
    out_dtype: str
    preferred: str | None
    apply: Callable[[Array, Array | None], Array]

    def __repr__(self) -> str:
        return f"{self.activation} -> {self.out_dtype}"


def serve(choice: Choice, a: Array, b: Array, bias: Array | None, activation: str | None, out_dtype: Any) -> Array:
    """Return a product that is dispatched now: (*batch, m, k) by (*batch, k, n), as dispatch.matmul takes them."""
    from dispatch._api import _call

    call = request(a, b, bias, activation, out_dtype, choice.op)
    return _call(call, Options(choice.policy, choice.backend, choice.scope))


def as_it_stands(a: Array, b: Array, preferred_element_type: Any = None) -> Array:
    """Return jnp.matmul(a, b); for operands that were made for a product in a trace, by the dot_general that JAX has.

    XLA may take several times as long for the same product with its dimensions in another order.
    """
    standing = _standing.get()
    if standing is not None and a is standing[0] and b is standing[1]:
        return standing[2]().reshape(*a.shape[:-1], b.shape[-1])
    return jnp.matmul(a, b, preferred_element_type=preferred_element_type)


def matmul(a: Array, b: Array, bias: Array | None, choice: Choice, epilogue: Epilogue) -> Array:
    """Return the product of a trace, of any shapes that jnp.matmul takes, with its epilogue."""
    plain = bias is None and epilogue.activation is None
    if plain or a.ndim < 2 or b.ndim != 2:
        return _unfused(a, b, bias, choice=choice, epilogue=epilogue)
    operands = (a, b) if bias is None else (a, b, bias)
    out: Array = fused.bind(*operands, choice=choice, epilogue=epilogue)
    return out


def lying(x: Array, axis: int) -> tuple[Array, int]:
    """Return a matrix as it lies in memory, and which of its axes is contracted there.

    What the traced program transposes for the product alone, as derivatives do, need not be copied for it: it can be
    read as it was before. `parent`, the equation that made a tracer, is JAX's own affair; 0.10 and 0.11 have it.
    """
    made = getattr(x, "parent", None)
    if made is None or getattr(getattr(made, "primitive", None), "name", "") != "transpose":
        return x, axis
    turned = x.ndim == 2 and tuple(made.params["permutation"]) == (1, 0)
    return (made.in_tracers[0], -3 - axis) if turned else (x, axis)


def dot_general(lhs: Array, rhs: Array, dimension_numbers: Any, choice: Choice, **params: Any) -> Array:
    """Return jax.lax.dot_general's product, dispatched."""
    own = partial(jax.lax.dot_general, dimension_numbers=dimension_numbers, **params)
    return replacing(own, partial(product.bind, choice=choice))(lhs, rhs)


def replacing(own: Callable[..., Array], bind: Callable[..., Array]) -> Callable[..., Array]:
    """Return `own`, whose every dot_general is made by `bind(a, b, **parameters)` instead."""

    def replaced(*operands: Array) -> Array:
        closed = jax.make_jaxpr(own)(*operands)
        return _evaluate(closed.jaxpr, closed.consts, operands, bind)[0]

    return replaced


def _evaluate(jaxpr: Any, consts: Sequence[Any], operands: Sequence[Array], bind: Callable[..., Array]) -> list[Array]:
    values = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *operands), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if hasattr(atom, "val") else values[atom]

    for eqn in jaxpr.eqns:
        given = [read(atom) for atom in eqn.invars]
        if eqn.primitive is jax.lax.dot_general_p:
            made: Any = bind(*given, **eqn.params)
        elif eqn.primitive.name in ("jit", "pjit"):
            inner = eqn.params["jaxpr"]
            made = _evaluate(inner.jaxpr, inner.consts, given, bind)
        else:
            made = eqn.primitive.bind(*given, **eqn.params)
        made = made if isinstance(made, list | tuple) else [made]
        values.update(zip(eqn.outvars, made, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _out_aval(own: Callable[..., Array], *avals: Any) -> Any:
    return jax.make_jaxpr(own)(*avals).out_avals[0]


# A product by dot_general's dimension numbers

product = Primitive("dispatch_dot_general")


def _own(params: dict[str, Any]) -> Callable[[Array, Array], Array]:
    """Return the framework's own dot_general with the same parameters."""

    def own(a: Array, b: Array) -> Array:
        out: Array = jax.lax.dot_general_p.bind(a, b, **params)
        return out

    return own


@product.def_abstract_eval  # type: ignore[untyped-decorator]
def _(a: Any, b: Any, *, choice: Choice, **params: Any) -> Any:
    return _out_aval(_own(params), a, b)


@product.def_impl  # type: ignore[untyped-decorator]
def _(a: Array, b: Array, *, choice: Choice, **params: Any) -> Array:
    if spread.several_devices(a, b):
        return jax.jit(partial(product.bind, choice=choice, **params))(a, b)
    return _multiply(a, b, choice=choice, **params)


def _dgrad(cotangent: Array, a: Any, b: Array, *, choice: Choice, **params: Any) -> Array:
    """Return the cotangent of a: one product of op `dgrad`, the cotangent's by b."""
    aval, bind = a.aval, partial(product.bind, choice=replace(choice, op="dgrad"))

    def own(g: Array, y: Array) -> Array:
        return jax.linear_transpose(lambda x: _own(params)(x, y), aval)(g)[0]

    return replacing(own, bind)(cotangent, b)


def _wgrad(cotangent: Array, a: Array, b: Any, *, choice: Choice, **params: Any) -> Array:
    """Return the cotangent of b: one product of op `wgrad`, of a by the cotangent."""
    aval, bind = b.aval, partial(_swapped, choice=replace(choice, op="wgrad"))

    def own(g: Array, x: Array) -> Array:
        return jax.linear_transpose(lambda y: _own(params)(x, y), aval)(g)[0]

    return replacing(own, bind)(cotangent, a)


def _swapped(a: Array, b: Array, **params: Any) -> Array:
    """Return the product of b and a: JAX multiplies a cotangent by a, but a by it comes out as b is laid out."""
    return _turned(product.bind, a, b, **params)


def _turned(multiply: Callable[..., Array], a: Array, b: Array, **params: Any) -> Array:
    """Return multiply(b, a), with its free dimensions in the order that a and b have."""
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    batch, rows = len(batch_a), a.ndim - len(batch_a) - len(contract_a)
    columns = b.ndim - batch - len(contract_b)
    order = [*range(batch), *range(batch + columns, batch + columns + rows), *range(batch, batch + columns)]
    out_sharding = params.get("out_sharding")
    if out_sharding is not None:
        spec = [*out_sharding.spec, *[None] * (len(order) - len(out_sharding.spec))]
        inverse = sorted(range(len(order)), key=order.__getitem__)
        params["out_sharding"] = out_sharding.update(spec=jax.sharding.PartitionSpec(*(spec[i] for i in inverse)))
    params["dimension_numbers"] = (contract_b, contract_a), (batch_b, batch_a)
    if isinstance(params["precision"], tuple):
        params["precision"] = params["precision"][::-1]
    return jax.lax.transpose(multiply(b, a, **params), order)


def _jaxs(op: str, params: dict[str, Any]) -> Callable[[Array, Array], Array]:
    """Return the product as JAX would have it for an op: a wgrad's operands stand the other way round there."""
    if op != "wgrad":
        return _own(params)
    return partial(_turned, jax.lax.dot_general_p.bind, **params)


ad.defbilinear(product, _dgrad, _wgrad)
_bilinear_jvp = ad.primitive_jvps[product]


def _named_jvp(primals: Sequence[Array], tangents: Sequence[Any], **params: Any) -> tuple[Array, Any]:
    """Return value and tangent, the value under the name that policies of jax.checkpoint know it by.

    Here and not in `matmul`: a name cannot be transposed, and only what is differentiated is ever kept.
    """
    out, tangent = _bilinear_jvp(primals, tangents, **params)
    return checkpoint_name(out, RESULT_NAME), tangent


ad.primitive_jvps[product] = _named_jvp


def _batched(operands: Sequence[Array], dims: Sequence[Any], *, choice: Choice, **params: Any) -> tuple[Array, int]:
    """Return one product for all that is mapped over: a further batch dimension, or further rows or columns."""
    own = jax.vmap(_own(params), [dim if isinstance(dim, int) else None for dim in dims])
    return replacing(own, partial(product.bind, choice=choice))(*operands), 0


batching.primitive_batchers[product] = _batched


def _multiply(a: Array, b: Array, *, choice: Choice, **params: Any) -> Array:
    """Return the product by the chosen plan, of (*batch, m, k) by (*batch, k, n) made of both operands."""
    precision, preferred = params["precision"], params["preferred_element_type"]
    named = _precision_name(precision)
    if named is NotImplemented:
        return _own(params)(a, b)
    (contract_a, contract_b), (batch_a, batch_b) = params["dimension_numbers"]
    rows = [dim for dim in range(a.ndim) if dim not in (*contract_a, *batch_a)]
    columns = [dim for dim in range(b.ndim) if dim not in (*contract_b, *batch_b)]
    batch = tuple(a.shape[dim] for dim in batch_a) if _count(a, batch_a) != 1 else ()
    k = _count(a, contract_a)
    left = _arranged(a, (*batch_a, *rows, *contract_a), (*batch, _count(a, rows), k))
    right = _arranged(b, (*batch_b, *contract_b, *columns), (*batch, k, _count(b, columns)))
    own = jnp.promote_types(a.dtype, b.dtype)
    out_dtype = None if preferred is None or preferred == own else preferred
    jaxs = partial(_jaxs(choice.op, {**params, "out_sharding": None}), a, b)
    token = _standing.set((left, right, jaxs))
    try:
        with jax.default_matmul_precision(named):
            out = serve(choice, left, right, None, None, out_dtype)
    finally:
        _standing.reset(token)
    shape = (*(a.shape[dim] for dim in batch_a), *(a.shape[dim] for dim in rows), *(b.shape[dim] for dim in columns))
    return out if out.shape == shape else out.reshape(shape)


def _count(x: Array, dims: Sequence[int]) -> int:
    count = 1
    for dim in dims:
        count *= x.shape[dim]
    return count


def _arranged(x: Array, order: tuple[int, ...], shape: tuple[int, ...]) -> Array:
    x = x if order == tuple(range(x.ndim)) else x.transpose(order)
    return x if x.shape == shape else x.reshape(shape)


def _precision_name(precision: Any) -> Any:
    """Return what jax.default_matmul_precision calls it, or NotImplemented where it has no word for it."""
    if precision is None:
        return jax.config.jax_default_matmul_precision
    pair = precision if isinstance(precision, tuple) else (precision, precision)
    if pair[0] != pair[1] or not hasattr(pair[0], "name"):
        return NotImplemented
    preset = isinstance(pair[0], jax.lax.DotAlgorithmPreset)
    return pair[0].name if preset else pair[0].name.lower()


# A product with bias and activation, (*rows, k) by (k, n)

fused = Primitive("dispatch_fused_matmul")


def _unfused(a: Array, b: Array, bias: Array | None = None, *, choice: Choice, epilogue: Epilogue) -> Array:
    own: Callable[..., Array] = jnp.matmul
    rows, axis = lying(b, -2)
    if axis == -1 and a.ndim > 1 and a.dtype == b.dtype:  # contracted as it lies: it need not be transposed
        own, b = partial(jax.lax.dot_general, dimension_numbers=(((a.ndim - 1,), (1,)), ((), ()))), rows
    own = partial(own, preferred_element_type=epilogue.preferred)
    return epilogue.apply(replacing(own, partial(product.bind, choice=choice))(a, b), bias)


@fused.def_abstract_eval  # type: ignore[untyped-decorator]
def _(*avals: Any, choice: Choice, epilogue: Epilogue) -> Any:
    return _out_aval(partial(_unfused, choice=choice, epilogue=epilogue), *avals)


@fused.def_impl  # type: ignore[untyped-decorator]
def _(*operands: Array, choice: Choice, epilogue: Epilogue) -> Array:
    if spread.several_devices(*operands):
        return jax.jit(partial(fused.bind, choice=choice, epilogue=epilogue))(*operands)
    return _multiply_fused(*operands, choice=choice, epilogue=epilogue)


def _multiply_fused(a: Array, b: Array, bias: Array | None = None, *, choice: Choice, epilogue: Epilogue) -> Array:
    return serve(choice, a, b, bias, epilogue.activation, epilogue.out_dtype)


def _differentiated(
    primals: Sequence[Array], tangents: Sequence[Any], *, choice: Choice, epilogue: Epilogue
) -> tuple[Array, Array]:
    """Return value and tangent of the product and what follows it: the derivative needs the product itself."""
    moving = [not isinstance(tangent, ad.Zero) for tangent in tangents]

    def call(*changing: Array) -> Array:
        left = iter(changing)
        operands = (next(left) if moves else x for x, moves in zip(primals, moving, strict=True))
        return _unfused(*operands, choice=choice, epilogue=epilogue)

    changing = [x for x, moves in zip(primals, moving, strict=True) if moves]
    given = [tangent for tangent, moves in zip(tangents, moving, strict=True) if moves]
    out: tuple[Array, Array] = jax.jvp(call, changing, given)
    return out


ad.primitive_jvps[fused] = _differentiated


def _fused_batched(
    operands: Sequence[Array], dims: Sequence[Any], *, choice: Choice, epilogue: Epilogue
) -> tuple[Array, int]:
    """Return one fused product where rows of a alone are mapped over, else a batched one and what follows it."""
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    a, b, *bias = operands
    rows, lone = axes[0], not any(axis is not None for axis in axes[1:])
    if rows is not None and lone and all(x.ndim <= a.ndim - 1 for x in bias):
        return fused.bind(jnp.moveaxis(a, rows, 0), b, *bias, choice=choice, epilogue=epilogue), 0
    return jax.vmap(partial(_unfused, choice=choice, epilogue=epilogue), axes)(*operands), 0


batching.primitive_batchers[fused] = _fused_batched


# Lowering


@contextmanager
def _deciding(tells: bool) -> Iterator[None]:
    """Let dispatched products be multiplied at once, instead of standing in the trace once more."""
    tokens = lowering.set(True), telling.set(tells and jax.process_count() == 1)
    try:
        yield
    finally:
        lowering.reset(tokens[0])
        telling.reset(tokens[1])


def here(multiply: Callable[..., Array], *, tells: bool = False) -> Callable[..., Array]:
    """Return `multiply`, whose dispatched products are decided and multiplied at once.

    tells: a callback may stand in what it traces. Not in what XLA's partitioner asks for: JAX would lose it. Nor where
    other processes run the program: each has its own trips, and all have to compile the same.
    """

    def multiplied(*operands: Array) -> Array:
        with _deciding(tells):
            return multiply(*operands)

    return multiplied


def _lower_product(ctx: Any, *values: Any, choice: Choice, **params: Any) -> Any:
    place, own = spread.place(ctx), _own(params)
    explicit = place == spread.SEVERAL and spread.explicit((*ctx.avals_in, *ctx.avals_out))
    multiply = here(partial(_multiply, choice=choice, **params), tells=place == spread.HERE or explicit)
    if explicit:
        multiply = spread.mapped(multiply, params["dimension_numbers"], ctx.avals_in, ctx.avals_out[0])
    elif place == spread.SEVERAL:
        multiply = spread.partitioned(own, multiply, params["dimension_numbers"], [x.ndim for x in ctx.avals_in])
    elif place == spread.ELSEWHERE:
        multiply = _jaxs(choice.op, params)
    return mlir.lower_fun(multiply, multiple_results=False)(ctx, *values)


def _lower_fused(ctx: Any, *values: Any, choice: Choice, epilogue: Epilogue) -> Any:
    place = spread.place(ctx)
    multiply = here(partial(_multiply_fused, choice=choice, epilogue=epilogue), tells=True)
    if place != spread.HERE:
        multiply = partial(_unfused, choice=choice, epilogue=epilogue)  # products of it are lowered in their turn
    return mlir.lower_fun(multiply, multiple_results=False)(ctx, *values)


mlir.register_lowering(product, _lower_product)
mlir.register_lowering(fused, _lower_fused)
spread.needs_devices(product, fused)
