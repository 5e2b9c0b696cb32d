"""A plan under torch's autograd: the backward pass is two dispatched products of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dispatch._backend import Plan
from dispatch._problem import Problem
from dispatch.frameworks._torch_product import activate


def differentiable(plan: Plan, problem: Problem, again: Plan) -> Plan:
    """Return `plan` with gradients: dgrad and wgrad are products by `again`, each with its own decision."""

    def product(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
        out: Tensor = _Product.apply(_array(a), _array(b), bias, (a, b, plan, problem.activation, again))
        return out

    return product


def _array(operand: Any) -> Any:
    """Return the tensor that a gradient goes to: a prepared operand's own array."""
    return operand if isinstance(operand, Tensor) else getattr(operand, "array", None)


class _Product(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(a: Tensor | None, b: Tensor | None, bias: Tensor | None, rest: tuple[Any, ...]) -> Tensor:
        given_a, given_b, plan, _, _ = rest
        out: Tensor = plan(given_a, given_b) if bias is None else plan(given_a, given_b, bias)
        return out

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        a, b, bias, (given_a, given_b, _, activation, again) = inputs
        need_a, need_b = ctx.needs_input_grad[:2]
        every = activation is not None  # the product is made anew
        ctx.save_for_backward(a if need_b or every else None, b if need_a or every else None, bias if every else None)
        ctx.like = tuple(None if x is None else (x.shape, x.dtype) for x in (a, b, bias))
        ctx.scaled = (None if a is not None else given_a, None if b is not None else given_b)
        ctx.activation, ctx.again = activation, again

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, bias = ctx.saved_tensors
        need_a, need_b, need_bias, _ = ctx.needs_input_grad
        a = ctx.scaled[0].dequantize() if ctx.scaled[0] is not None else a
        b = ctx.scaled[1].dequantize() if ctx.scaled[1] is not None else b
        if ctx.activation is not None:
            grad = _through_activation(ctx, grad, a, b, bias)
        like_a, like_b, like_bias = ctx.like
        grad_a = _unbroadcast(_product(ctx, grad, b.mT), like_a) if need_a else None
        grad_b = _unbroadcast(_product(ctx, a.mT, grad), like_b) if need_b else None
        grad_bias = _unbroadcast(grad.to(_wide(grad)), like_bias) if need_bias else None
        return grad_a, grad_b, grad_bias, None


def _product(ctx: Any, a: Tensor, b: Tensor) -> Any:
    """Return a dispatched product in the wider of two dtypes: a gradient in float32 may not fit into float16."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return ctx.again(a.to(dtype), b.to(dtype))


def _through_activation(ctx: Any, grad: Tensor, a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    """Return the gradient before the activation, from the product made anew in float32 or wider."""
    create = torch.is_grad_enabled()
    with torch.enable_grad():
        before = ctx.again(a, b).to(_wide(a))
        before = before if bias is None else before + bias.to(before.dtype)
        before = before if before.requires_grad else before.requires_grad_()
        after = activate(before, ctx.activation)
        (out,) = torch.autograd.grad(after, before, grad.to(after.dtype), create_graph=create)
    return out


def _wide(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _unbroadcast(grad: Tensor, like: tuple[torch.Size, torch.dtype]) -> Tensor:
    """Return `grad` summed over the dimensions that an operand of this shape was broadcast along, in its dtype."""
    shape, dtype = like
    extra = grad.dim() - len(shape)
    dims = [i for i in range(grad.dim()) if i < extra or (shape[i - extra] == 1 and grad.shape[i] != 1)]
    if dims:
        grad = grad.to(_wide(grad)).sum(dims, keepdim=True)
    return grad.reshape(shape).to(dtype)
