"""torch's own product with what follows it, in terms that eager torch, its transforms and Dynamo all understand."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from dispatch._problem import FP8_DTYPES

_FP8 = tuple(getattr(torch, name) for name in FP8_DTYPES)
_WIDE = (torch.float32, torch.float64)


def activate(x: Tensor, activation: str | None) -> Tensor:
    """Return activation(x): relu, gelu (by erf), gelu_tanh or silu."""
    if activation is None:
        return x
    if activation in ("relu", "silu"):
        return functional.relu(x) if activation == "relu" else functional.silu(x)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    if x.device.type != "cpu":
        return functional.gelu(x, approximate=approximate)
    infinite = x == math.inf  # oneDNN's gives NaN there, its derivative too
    return torch.where(infinite, x, functional.gelu(x.masked_fill(infinite, 0), approximate=approximate))


def before_activation(out: torch.dtype | None) -> torch.dtype | None:
    """Return what a product is rounded to that its activation is to follow, for a result in `out`; None: its own."""
    return out if out is not None and out.is_floating_point and out.itemsize > 1 else None


def autocasting(x: Tensor) -> bool:
    """Return whether autocast is on for the tensor's device; some, as meta, have none."""
    if not torch._C._is_any_autocast_enabled():
        return False
    kind = x.device.type  # that it is available torch 2.11's Dynamo cannot ask
    return bool((kind in ("cpu", "cuda") or torch.amp.is_autocast_available(kind)) and torch.is_autocast_enabled(kind))


def without_autocast(x: Tensor) -> Any:
    """Return a context without autocast on the tensor's device."""
    return torch.autocast(x.device.type, enabled=False) if autocasting(x) else nullcontext()


def effective(x: Tensor, own: torch.dtype | None = None) -> torch.dtype:
    """Return autocast's dtype where it would cast this tensor, else its own.

    own: the dtype that x is decoded to before, if it is.
    """
    own = x.dtype if own is None else own
    if autocasting(x) and own.is_floating_point and own is not torch.float64 and own.itemsize > 1:
        return torch.get_autocast_dtype(x.device.type)
    return own


def decoded_dtype(own: torch.dtype, other: torch.dtype) -> torch.dtype:
    """Return what torch multiplies an operand of dtype `own` in: see operands.decoded_dtype."""
    if own not in _FP8 or not other.is_floating_point:
        return own
    return torch.bfloat16 if other in _FP8 else other


def decoded(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Return both operands as torch can multiply them."""
    return a.to(decoded_dtype(a.dtype, b.dtype)), b.to(decoded_dtype(b.dtype, a.dtype))


def product(
    a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None, own: torch.dtype, out: torch.dtype
) -> Any:
    """Return activation(a @ b + bias) in `out`; own: the dtype that torch computes the product in.

    Where `out` is wider the product is not rounded to `own` first. A bias of the same dtype is added as torch's own
    linear layers do, and the activation is of what that rounds to.
    """
    if out is own and own.is_floating_point and (bias is None or effective(bias) is own):
        return activate(_linear(a, b, bias, own), activation).to(out)
    whole = not own.is_floating_point and not own.is_complex
    if whole and (out.is_floating_point or out.itemsize > own.itemsize):
        return epilogue(torch.matmul(a.to(out), b.to(out)), bias, activation, out)
    if out not in _WIDE or out is own or not own.is_floating_point:
        return epilogue(torch.matmul(a, b), bias, activation, out)
    if a.is_cuda and a.dim() > 1 and b.dim() == 2 and out is torch.float32 and a.element_size() == 2:
        return epilogue(_mm_to_float32(a, b), bias, activation, out)
    with without_autocast(a):
        return epilogue(torch.matmul(a.to(own).to(out), b.to(own).to(out)), bias, activation, out)


def _linear(a: Tensor, b: Tensor, bias: Tensor | None, own: torch.dtype) -> Tensor:
    """Return a @ b + bias rounded to `own`, in one launch where torch has one."""
    if bias is None:
        return torch.matmul(a, b)
    if a.dim() > 1 and b.dim() == 2 and bias.shape == b.shape[1:] and not b.is_sparse:
        return functional.linear(a, b.mT, bias)
    value = torch.matmul(a, b)
    return value + bias.to(own).expand(value.shape)


def epilogue(value: Tensor, bias: Tensor | None, activation: str | None, out: torch.dtype) -> Tensor:
    """Return activation(value + bias), computed in float32 or wider and rounded once."""
    if bias is None and activation is None:
        return value.to(out)
    with without_autocast(value):
        wide = torch.float32 if activation is not None or value.dtype.is_floating_point else value.dtype
        wide = torch.promote_types(value.dtype, wide)
        wide = wide if bias is None else torch.promote_types(wide, bias.dtype)
        value = value.to(wide)
        value = value if bias is None else value + bias.to(wide).expand(value.shape)
        return activate(value, activation).to(out)


def _mm_to_float32(a: Tensor, b: Tensor) -> Tensor:
    """Return the float32 product of 16-bit matrices, or of a stack by one; torch's op for it has no derivative."""
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad):
        return torch.matmul(a.float(), b.float())
    return torch.mm(a.flatten(0, -2), b, out_dtype=torch.float32).unflatten(0, a.shape[:-1])
