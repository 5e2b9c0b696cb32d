"""From the arguments of a call to a Problem, with the errors that a caller's mistakes deserve."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from dispatch._backend import Plan
from dispatch._errors import MixedArraysError, UnsupportedDtypeError
from dispatch._problem import ACTIVATIONS, FP8_DTYPES, Operand, Problem
from dispatch.frameworks import NAMES, Framework, framework_of
from dispatch.frameworks.operands import array_of, decoded_dtype, native, undressed, undressing
from dispatch.frameworks.shapes import Shapes
from dispatch.quantization import PreparedOperand, ScaledArray
from dispatch.registry.faults import text_of


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """One call's arguments, its room and the shapes that a plan will see (None: they do not multiply).

    op: `dgrad` or `wgrad` in a backward pass, None for `matmul`.
    """

    room: Framework
    a: Any
    b: Any
    bias: Any
    activation: str | None
    out_dtype: Any
    shapes: Shapes | None
    op: str | None = None

    @property
    def operands(self) -> tuple[Any, ...]:
        """a and b, and the bias if there is one."""
        return (self.a, self.b) if self.bias is None else (self.a, self.b, self.bias)

    @property
    def plain(self) -> bool:
        """Whether both operands are arrays of the framework."""
        return not any(isinstance(x, ScaledArray | PreparedOperand) for x in (self.a, self.b))

    @property
    def weighted(self) -> bool:
        """Whether a is an array of the framework and b a prepared operand."""
        return isinstance(self.b, PreparedOperand) and not isinstance(self.a, ScaledArray | PreparedOperand)

    @property
    def unmeasurable(self) -> str | None:
        """Why nothing may be measured for these operands now, or None."""
        return self.room.measurable(array_of(self.a)) or self.room.measurable(array_of(self.b))


def request(a: Any, b: Any, bias: Any, activation: str | None, out_dtype: Any, op: str | None = None) -> Request:
    """Return the checked arguments.

    Raises TypeError for what is no array, arrays that do not belong together or a bad out_dtype, and ValueError for an
    unknown activation, a bias that does not broadcast to the result or a ScaledArray quantized for the other side.
    """
    room = _room(a, b, bias)
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is unknown; allowed: {', '.join(ACTIVATIONS)}")
    if out_dtype is not None:
        name_of(room, out_dtype)
    a, b = _facing("a", _with_values(room, a), -1), _facing("b", _with_values(room, b), -2)
    shapes = _shapes(array_of(a), array_of(b), fold=not isinstance(a, ScaledArray | PreparedOperand))
    if bias is not None and shapes is not None and not shapes.takes(tuple(bias.shape)):
        raise ValueError(f"bias has shape {tuple(bias.shape)}; it has to broadcast to the result's, {shapes.out}")
    if bias is not None and room.dtype_name(bias).startswith("complex"):
        kinds = [room.dtype_name(array_of(x)) for x in (a, b)]
        if not any(kind.startswith("complex") for kind in kinds):
            raise TypeError(
                f"bias is {room.dtype_name(bias)} and the product of {' and '.join(kinds)}: it has to be real"
            )
    return Request(room, a, b, bias, activation, out_dtype, shapes, None if op == "matmul" else op)


def describe(call: Request) -> Problem | None:
    """Return the Problem of a call, or None where only the framework itself can say what is wrong with it.

    Raises TypeError for an out_dtype that the framework does not have.
    """
    if call.shapes is None:
        return None
    room = call.room
    a, b = _operand(room, call.a, call.shapes.a), _operand(room, call.b, call.shapes.b)
    first, second = decoded_dtype(a, b), decoded_dtype(b, a)
    own = room.promote(first, second)
    if own is None:
        return None
    out = own if call.out_dtype is None else name_of(room, call.out_dtype)
    reference = array_of(call.a)
    return Problem(
        m=call.shapes.a[-2],
        n=call.shapes.b[-1],
        k=call.shapes.a[-1],
        a=a,
        b=b,
        out_dtype=out,
        framework=room.name,
        arch=str(room.arch(reference)),
        device=room.device(reference),
        bias=None if call.bias is None else _bias_dtype(room, call.bias, own, out),
        activation=call.activation,
        modes=room.modes(
            *(x.scale for x in (call.a, call.b) if isinstance(x, ScaledArray)), *map(array_of, call.operands)
        ),
        op=call.op or "matmul",
    )


def own_product(call: Request) -> Plan:
    """Return the framework's own product for a call's operands as they are."""
    raw = any(call.room.dtype_name(array_of(x)) in FP8_DTYPES for x in (call.a, call.b))
    if call.plain and not raw and call.bias is None and call.activation is None and call.out_dtype is None:
        return call.room.matmul
    problem = describe(call)
    return undressing(native(problem)) if problem is not None else lambda *operands: refused(call)


CALLERS = "of_the_caller"
"""What a room sets on an error that was raised after the plan had multiplied, by the caller's own code."""


def is_callers(call: Request, plan: Plan, error: BaseException) -> bool:
    """Return whether what a plan raised is the caller's own: an interrupt, a framework's control flow, its own product.

    torch's hooks for saved tensors may raise, as checkpointing does to end a recomputation early; JAX raises
    FloatingPointError for what jax_debug_nans and jax_debug_infs find, in any product.
    """
    if isinstance(error, KeyboardInterrupt | FloatingPointError) or getattr(error, CALLERS, False):
        return True
    problem = describe(call)
    return problem is None or plan is native(problem)


def check_alive(call: Request, backend: str, error: BaseException) -> None:
    """Raise RuntimeError if a backend's failure left the device unusable for everything in this process."""
    try:
        call.room.synchronize(array_of(call.a))
    except Exception as lost:
        raise RuntimeError(
            f"backend {backend!r} failed ({text_of(error)}) and left the device unusable ({lost}): nothing in this "
            f"process can use it any more. Restart, with [backends] deny = [{backend!r}] in the policy"
        ) from error


def refused(call: Request) -> Any:
    """Return what the framework makes of arrays that it cannot multiply by the array API's rules: its own error.

    Raises TypeError where it gives a product after all, but something was asked for beside it.
    """
    try:
        product = call.room.matmul(*undressed(call.room, call.a, call.b))
    except TypeError:
        raise
    except Exception as error:
        names = {call.room.dtype_name(array_of(x)) for x in (call.a, call.b)}
        if names & {"bool", "complex32"} and isinstance(error, RuntimeError):
            raise UnsupportedDtypeError(f"{call.room.name} has no matmul for {' and '.join(sorted(names))}") from error
        raise
    if call.bias is not None or call.activation is not None or call.out_dtype is not None:
        raise TypeError(f"{call.room.name} multiplies these by a rule of its own: no bias, activation or out_dtype")
    return product


def _room(a: Any, b: Any, bias: Any) -> Framework:
    named = {"a": array_of(a), "b": array_of(b)} | ({} if bias is None else {"bias": bias})
    rooms = {}
    for name, array in named.items():
        found = framework_of(array)
        if found is None:
            raise TypeError(f"{name} is a {type(array).__qualname__}; it has to be an array of {', '.join(NAMES)}")
        rooms[name] = found
    if len({room.name for room in rooms.values()}) > 1:
        kinds = ", ".join(f"{name} is {_kind(room, named[name])}" for name, room in rooms.items())
        raise MixedArraysError(f"{kinds}; convert them to one framework first")
    room = rooms["a"]
    if (devices := room.clash(list(named.values()))) is not None:
        kinds = ", ".join(f"{name} is on {device}" for name, device in zip(named, devices, strict=True))
        raise MixedArraysError(f"{kinds}; move them to one device first")
    return room


def _kind(room: Framework, array: Any) -> str:
    kind = type(array)
    return f"a {room.name} array ({kind.__module__}.{kind.__qualname__})"


def _with_values(room: Framework, operand: Any) -> Any:
    """Return an operand; a prepared tracer as the tracer: it is quantized in each call, and has to be measured so."""
    traced = isinstance(operand, PreparedOperand) and "traced" in room.modes(operand.array)
    return operand.array if traced else operand


def _shapes(a: Any, b: Any, fold: bool) -> Shapes | None:
    try:
        return Shapes.of(tuple(a.shape), tuple(b.shape), fold=fold)
    except RuntimeError:  # a nested tensor of torch has none
        return None


def _bias_dtype(room: Framework, bias: Any, own: str, out: str) -> str:
    """Return autocast's dtype where all of a linear layer is computed in it, else the bias's own."""
    stated = room.effective(bias)
    return stated if stated == own == out else room.dtype_name(bias)


def _facing(side: str, operand: Any, axis: int) -> Any:
    """Return a ScaledArray whose groups run along this side's contraction axis, or raise ValueError."""
    if not isinstance(operand, ScaledArray) or operand.axis == axis or operand.ndim == 1:
        return operand
    height, width = operand.recipe.block(*operand.shape[-2:])
    if operand.recipe.granularity == "tensor" or (operand.recipe.granularity != "row" and height == width):
        return replace(operand, axis=axis)
    raise ValueError(
        f"{side} is a ScaledArray with {operand.recipe} scales along axis {operand.axis}; as {side} it needs them "
        f"along axis {axis}: quantize with axis={axis}, or pass {side}.dequantize()"
    )


def _operand(room: Framework, operand: Any, shape: tuple[int, ...]) -> Operand:
    array = array_of(operand)
    facts = room.operand(array if array.ndim > 1 else room.xp.reshape(array, shape))
    facts = replace(facts, batch=shape[:-2])
    if isinstance(operand, ScaledArray):
        return replace(facts, dtype=room.effective(array, operand.dtype), recipe=operand.recipe)
    return replace(facts, prepared=isinstance(operand, PreparedOperand))


def name_of(room: Framework, dtype: Any) -> str:
    """Return the name of an out_dtype, or raise TypeError."""
    try:
        hash(dtype)  # NumPy makes a dtype of nearly anything
        return room.name_of_dtype(dtype)
    except (TypeError, ValueError, AttributeError):
        raise TypeError(f"out_dtype {dtype!r} is no dtype of {room.name}") from None
