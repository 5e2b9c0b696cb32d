"""Operands as plans see them: decoded for the framework's own product, or in a backend's prepared form."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import lru_cache
from typing import Any, ClassVar
from weakref import WeakValueDictionary

from dispatch._backend import Backend, Plan
from dispatch._problem import FLOAT_DTYPES, FP8_DTYPES, Operand, Problem
from dispatch._recipe import ScalingRecipe
from dispatch.frameworks import Framework, framework
from dispatch.frameworks._base import Forms
from dispatch.quantization import PreparedOperand, ScaledArray, prepare

CONTRACTION = {"a": -1, "b": -2}


def array_of(operand: Any) -> Any:
    """Return the framework's array inside an operand: itself, or a ScaledArray's or PreparedOperand's."""
    if isinstance(operand, ScaledArray):
        return operand.data
    return operand.array if isinstance(operand, PreparedOperand) else operand


def decoded_dtype(own: Operand, other: Operand) -> str:
    """Return the dtype that an operand is multiplied in by the framework.

    Raw FP8 takes the other's where that is a wider float, and bfloat16 beside FP8; beside integers, bool and complex
    it stays: the framework has a rule, or an error, for that pair.
    """
    if own.recipe is not None or own.dtype not in FP8_DTYPES or other.dtype not in FLOAT_DTYPES:
        return own.dtype
    return "bfloat16" if other.dtype in FP8_DTYPES else other.dtype


def decode(room: Framework, operand: Any, dtype: str) -> Any:
    """Return an operand as an array of `dtype`; FP8 fits into every wider dtype exactly."""
    if isinstance(operand, ScaledArray):
        return operand.dequantize(dtype)
    array = array_of(operand)
    return array if room.dtype_name(array) not in FP8_DTYPES else room.cast(array, dtype)


def shaped(operand: Any, shape: tuple[int, ...], axis: int, xp: Any) -> Any:
    """Return an operand in `shape`; of those that are no arrays only vectors change, to one row or column."""
    if tuple(operand.shape) == shape:
        return operand
    if isinstance(operand, PreparedOperand):
        return prepare(xp.reshape(operand.array, shape))
    if not isinstance(operand, ScaledArray):
        return xp.reshape(operand, shape)
    scale = xp.reshape(operand.scale, (1, -1) if axis == -1 else (-1, 1))
    return replace(operand, data=xp.reshape(operand.data, shape), scale=scale, axis=axis)


def formed(plan: Plan, forms: Forms | None) -> Plan:
    """Return `plan` for operands that `forms`, unless None, makes into what it takes."""
    return plan if forms is None else lambda *operands: plan(*forms(operands))


def stated(room: Framework, operand: Any, dtype: str) -> Any:
    """Return an operand in the dtype that its Problem states, which may be autocast's."""
    array = array_of(operand)
    if isinstance(operand, ScaledArray) or room.dtype_name(array) == dtype:
        return operand
    cast = room.cast(array, dtype)
    return prepare(cast) if isinstance(operand, PreparedOperand) else cast


def all_stated(room: Framework, operands: tuple[Any, ...], problem: Problem) -> tuple[Any, ...]:
    """Return a, b and the bias, if there is one, in the dtypes that their Problem states."""
    dtypes = problem.a.dtype, problem.b.dtype, problem.bias or ""
    return tuple(stated(room, x, dtype) for x, dtype in zip(operands, dtypes, strict=False))


def undressed(room: Framework, a: Any, b: Any) -> tuple[Any, Any]:
    """Return both operands as arrays that the framework multiplies by its own rules, or refuses by them."""
    first, second = (
        Operand(x.dtype, recipe=x.recipe) if isinstance(x, ScaledArray) else Operand(room.dtype_name(array_of(x)))
        for x in (a, b)
    )
    return decode(room, a, decoded_dtype(first, second)), decode(room, b, decoded_dtype(second, first))


def decoded(problem: Problem) -> Problem:
    """Return the problem that the framework's own product is given."""
    a, b = (
        replace(own, dtype=decoded_dtype(own, other), recipe=None, prepared=False)
        for own, other in ((problem.a, problem.b), (problem.b, problem.a))
    )
    return replace(problem, a=a, b=b, recipe=None, accumulation=None)


@lru_cache(4096)
def native(problem: Problem) -> Plan:
    """Return the framework's own product for `problem`, epilogue and out_dtype included: a callable (a, b, bias=None).

    FP8 operands and ScaledArrays are decoded first. Takes arrays of any rank; for plain 16-bit or wider operands
    it is the framework's own function itself.
    """
    room, plain = framework(problem.framework), decoded(problem)
    own = room.native(plain)
    if not problem.encoded:
        return own

    def decoding(a: Any, b: Any, bias: Any = None) -> Any:
        x, y = decode(room, a, plain.a.dtype), decode(room, b, plain.b.dtype)
        return own(x, y) if bias is None else own(x, y, bias)

    return decoding


class FormKey:
    """What a form of a prepared operand is made by: this very backend, whatever its class says of equality, a recipe.

    One object for each of them, and so hashed and compared as quickly as can be: every call looks a form up.
    """

    __slots__ = ("__weakref__", "axis", "backend", "recipe")
    _known: ClassVar[WeakValueDictionary[Hashable, FormKey]] = WeakValueDictionary()

    def __init__(self, backend: Backend, recipe: ScalingRecipe, axis: int) -> None:
        self.backend, self.recipe, self.axis = backend, recipe, axis

    @classmethod
    def of(cls, backend: Backend, recipe: ScalingRecipe, axis: int) -> FormKey:
        """Return the key of a backend, which it keeps alive, and a recipe."""
        return cls._known.setdefault((id(backend), recipe, axis), cls(backend, recipe, axis))

    def make(self, array: Any) -> Any:
        """Return the form of an array."""
        return self.backend.prepare(array, self.recipe, axis=self.axis)


def forming(backend: Backend, problem: Problem) -> Forms:
    """Return what makes the operands of a call into what the backend's plan for `problem` takes.

    A prepared operand's form is made once; anything else stays as it is.
    """
    of_a, of_b = _forming(backend, problem, "a"), _forming(backend, problem, "b")
    if of_a is None and of_b is not None:  # a weight: the quickest way for it
        return lambda operands: (operands[0], of_b(operands[1]), *operands[2:])

    def forms(operands: tuple[Any, ...]) -> tuple[Any, ...]:
        a = operands[0] if of_a is None else of_a(operands[0])
        b = operands[1] if of_b is None else of_b(operands[1])
        return (a, b, *operands[2:])

    return forms


def _forming(backend: Backend, problem: Problem, side: str) -> Callable[[PreparedOperand], Any] | None:
    operand = getattr(problem, side)
    if not operand.prepared:
        return None
    if problem.recipe is None:
        room = framework(problem.framework)
        return lambda x: stated(room, x, operand.dtype).array
    key = FormKey.of(backend, getattr(problem.recipe, side), CONTRACTION[side])
    return lambda x: x.form(key, key.make)


def undressing(own: Plan) -> Plan:
    """Return the own product for operands that may be prepared."""

    def undressed(a: Any, b: Any, *bias: Any) -> Any:
        x = a.array if isinstance(a, PreparedOperand) else a
        return own(x, b.array if isinstance(b, PreparedOperand) else b, *bias)

    return undressed
