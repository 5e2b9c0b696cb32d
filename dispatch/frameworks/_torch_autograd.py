"""A plan under torch's autograd, and the backward pass: dgrad and wgrad, dispatched products of their own."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from dispatch._backend import Plan
from dispatch._problem import Operand, Problem
from dispatch.frameworks._base import Again
from dispatch.frameworks.operands import decoded_dtype
from dispatch.frameworks.request import CALLERS
from dispatch.quantization.prepared import PreparedOperand

Seen = dict[str, str | None]
"""By op, the plugin's backend that serves a product of the backward pass; None: the own product does."""

_hooked = torch._C._autograd._top_saved_tensors_default_hooks
_Products = Callable[[Tensor, Any, str], Any]


def differentiable(plan: Plan, problem: Problem, again: Again, seen: Seen | None = None) -> Plan:
    """Return `plan` with gradients: dgrad and wgrad are products by `again`, each with its own decision.

    problem: without an activation, whose derivative needs what it is of.
    seen: filled with who serves them, once that is known.
    """
    found: Seen = {} if seen is None else seen
    dtypes = _computed(problem.a, problem.b), _computed(problem.b, problem.a)

    def once_more(a: Tensor, b: Any, op: str) -> Any:
        return again(a, b, op, found)

    def product(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
        multiplied: list[bool] = []
        rest = a, b, plan, once_more, dtypes, multiplied
        try:
            out: Tensor = _Product.apply(_array(a), _array(b), bias, rest)
        except BaseException as error:
            if multiplied:  # a hook for what is saved raised it
                setattr(error, CALLERS, True)
            raise
        return out

    return product


def until_native(plan: Plan, native: Plan, seen: Seen) -> Plan:
    """Return `plan`, which is `native` but for its backward pass, until the own product is known to serve that too.

    Where a hook is told what is saved it stays `plan`: checkpointing compares what a recomputation saves.
    """

    def product(a: Tensor, b: Tensor, *bias: Tensor) -> Any:
        try:
            if seen and _hooked(True) is None and _own(seen, "dgrad", a) and _own(seen, "wgrad", b):
                return native(a, b, *bias)
            return plan(a, b, *bias)
        except BaseException as error:
            setattr(error, CALLERS, True)
            raise

    return product


def _own(seen: Seen, op: str, operand: Tensor) -> bool:
    return not operand.requires_grad or seen.get(op, "") is None


def gradients(
    grad: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    like: tuple[tuple[torch.Size, torch.dtype] | None, ...],
    again: _Products,
    weight: PreparedOperand | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of a, b and bias for a @ b + bias with the gradient `grad`.

    a is needed for b's gradient, b for a's. like: shape and dtype of each operand that has a gradient, else None.
    Shapes are those of torch.matmul.
    weight: the prepared operand that b is of, if it is; what that is quantized to for a's gradient is kept like any
    form of it.
    """
    like_a, like_b, like_bias = like
    grad_a = None if like_a is None or b is None else _dgrad(grad, b, like_a, again, weight)
    grad_b = None if like_b is None or a is None else _wgrad(a, grad, like_b, again)
    return grad_a, grad_b, None if like_bias is None else _as_large(grad, *like_bias)


def wide(x: Tensor) -> torch.dtype:
    """Return the dtype that sums and activations are computed in."""
    return torch.promote_types(x.dtype, torch.float32)


def _dgrad(
    grad: Tensor, b: Tensor, like: tuple[torch.Size, torch.dtype], again: _Products, weight: PreparedOperand | None
) -> Tensor:
    shape, dtype = like
    columns, rows = _matrix(b, 1), len(shape) == 1
    grad = _grad_matrix(grad, rows, b.dim() == 1)
    if weight is not None and grad.dtype == b.dtype and not b.is_complex():
        cast = weight.array.dtype != b.dtype
        with torch.autocast(b.device.type, b.dtype) if cast else nullcontext():
            out = again(_flat(grad), weight.turned(), "dgrad")
        return out.reshape(shape).to(dtype)
    if columns.dim() == 2 and grad.dim() > 2:  # many rows are one product
        grad = _flat(grad)
        return _widest(grad, columns.mH, "dgrad", again).reshape(shape).to(dtype)
    out = _widest(grad, columns.mH, "dgrad", again)
    return _as_large(out, (1, *shape) if rows else shape, dtype).reshape(shape)


def _is(b: Tensor, weight: Tensor) -> bool:
    """Return whether a saved matrix is the weight itself, not what a hook made of it, without a second gradient."""
    same = b.dim() == 2 and b.data_ptr() == weight.data_ptr() and b.shape == weight.shape
    return bool(same and b.stride() == weight.stride() and not torch.is_grad_enabled())


def _wgrad(a: Tensor, grad: Tensor, like: tuple[torch.Size, torch.dtype], again: _Products) -> Tensor:
    shape, dtype = like
    rows, column = _matrix(a, 0), len(shape) == 1
    grad = _grad_matrix(grad, a.dim() == 1, column)
    if len(shape) < 3 and rows.dim() > 2:  # the tokens of every batch entry are k
        rows, grad = _flat(rows), _flat(grad)
    out = _widest(rows.mH, grad, "wgrad", again)
    return _as_large(out, (*shape, 1) if column else shape, dtype).reshape(shape)


def _flat(x: Tensor) -> Tensor:
    """Return a stack of matrices as one; torch's older vmap knows no flatten."""
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _matrix(x: Tensor, side: int) -> Tensor:
    return x.unsqueeze(side) if x.dim() == 1 else x


def _grad_matrix(grad: Tensor, row: bool, column: bool) -> Tensor:
    """Return the gradient of the product of matrices that a and b, vectors maybe, stand for."""
    grad = grad.unsqueeze(-1) if column else grad
    return grad.unsqueeze(-2) if row else grad


def _widest(a: Tensor, b: Tensor, op: str, again: _Products) -> Tensor:
    """Return a dispatched product in the wider of two dtypes: a gradient in float32 may not fit into float16."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return again(a.to(dtype), b.to(dtype), op)


def _as_large(grad: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return `grad` summed over the dimensions that an operand of this shape was broadcast along, in its dtype."""
    if tuple(grad.shape) != tuple(shape):
        lead = grad.dim() - len(shape)
        along = [i for i in range(grad.dim()) if i < lead or shape[i - lead] != grad.shape[i]]
        grad = grad.sum(along, keepdim=True, dtype=wide(grad)).reshape(shape)
    return (grad.real if grad.is_complex() and not dtype.is_complex else grad).to(dtype)


def _computed(operand: Operand, other: Operand) -> torch.dtype:
    """Return the dtype that torch multiplies an operand of a problem in: autocast's, or what raw FP8 is decoded to."""
    dtype: torch.dtype = getattr(torch, decoded_dtype(operand, other))
    return dtype


def _array(operand: Any) -> Any:
    """Return the tensor that a gradient goes to: a prepared operand's own array."""
    return operand if isinstance(operand, Tensor) else getattr(operand, "array", None)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """No setup_context: torch binds its arguments by their signature in each call, which takes longer than all else."""

    @staticmethod
    def forward(ctx: Any, a: Tensor | None, b: Tensor | None, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        given_a, given_b, plan, again, dtypes, multiplied = rest
        out: Tensor = plan(given_a, given_b) if bias is None else plan(given_a, given_b, bias)
        multiplied.append(True)
        need_a, need_b = ctx.needs_input_grad[:2]
        ctx.save_for_backward(a if need_b else None, b if need_a else None)
        ctx.like = likes(ctx, a, b, bias)
        ctx.scaled = (None if a is not None else given_a, None if b is not None else given_b)
        ctx.again, ctx.dtypes = again, dtypes
        ctx.weight = given_b if isinstance(given_b, PreparedOperand) else None
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        a = ctx.scaled[0].dequantize() if ctx.scaled[0] is not None else a
        b = ctx.scaled[1].dequantize() if ctx.scaled[1] is not None else b
        weight = ctx.weight if ctx.weight is not None and b is not None and _is(b, ctx.weight.array) else None
        a, b = (x if x is None else x.to(dtype) for x, dtype in zip((a, b), ctx.dtypes, strict=True))
        return *gradients(grad, a, b, ctx.like, ctx.again, weight), None


def likes(ctx: Any, *operands: Tensor | None) -> tuple[tuple[torch.Size, torch.dtype] | None, ...]:
    """Return shape and dtype of each of the first operands that needs a gradient."""
    needs = zip(operands, ctx.needs_input_grad, strict=False)
    return tuple((x.shape, x.dtype) if x is not None and need else None for x, need in needs)
