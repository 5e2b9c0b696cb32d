"""What Dynamo traces for dispatch.matmul, and what an export records: torch's opaque op, or its own product."""

from __future__ import annotations

import math
from types import NoneType
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import register_flop_formula

from dispatch._api import explain, matmul
from dispatch._errors import NoBackendError
from dispatch._problem import ACTIVATIONS
from dispatch.frameworks._torch_op import OP, differentiable, form, own
from dispatch.frameworks._torch_product import effective
from dispatch.frameworks.backward import again
from dispatch.frameworks.request import Request, own_product
from dispatch.policies.policy import Policy, PolicyError, load_policy, use_policy
from dispatch.quantization import PreparedOperand, ScaledArray

_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor)
_autocast = torch._C._is_any_autocast_enabled
_interpreter = torch._C._functorch.peek_interpreter_stack
_strided = torch.strided
_ENTRIES = (matmul, explain, again, differentiable, use_policy.__init__, use_policy.__enter__, use_policy.__exit__)


def skip() -> None:
    """Let Dynamo pass over what runs eagerly behind a graph break: our own code, and all that it calls."""
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    for function in _ENTRIES:
        strategy = FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP)
        torch._C._dynamo.eval_frame.set_code_exec_strategy(function.__code__, strategy)


def broken(why: str) -> None:
    """Break Dynamo's graph; an error where it may not be broken."""
    torch._dynamo.graph_break(msg=why)


def traced(
    a: Any,
    b: Any,
    bias: Any,
    activation: str | None,
    out_dtype: Any,
    policy: Any,
    backend: str | None,
    scope: str | None,
) -> Any:
    """Return the product as Dynamo traces it; it breaks the graph at what it cannot take, or is wrong."""
    if bias is activation is out_dtype is policy is None and not _autocast():  # with few guards, checked in each call
        prepared = isinstance(b, PreparedOperand)
        weight = b._array if prepared else b
        if _opaque(a, weight, None):
            return OP(a, weight, prepared_b=prepared, backend=backend, scope=scope)
    x, y = _tensor(a), _tensor(b)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        broken("dispatch.matmul of what is no torch tensor")
    if activation not in (None, *ACTIVATIONS):
        broken("dispatch.matmul with an unknown activation")
    if policy is not None and not isinstance(policy, str):
        broken("dispatch.matmul with a Policy: give its name or path, or use_policy around it")
    opaque = _opaque(x, y, bias)
    if not opaque and backend is not None:
        broken("dispatch.matmul with backend= where torch's own product has to serve")
    if opaque:
        rest = {"policy": policy, "backend": backend, "scope": scope}
        return _op(a, b, bias, activation, out_dtype, rest)
    return own(_decoded(a), _decoded(b), bias, activation, _dtype(out_dtype))


def _tensor(x: Any) -> Any:
    if isinstance(x, PreparedOperand):
        return x.array
    return x.data if isinstance(x, ScaledArray) else x


def _decoded(x: Any) -> Any:
    return x.dequantize() if isinstance(x, ScaledArray) else _tensor(x)


def _opaque(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    """Return whether the op can stand for a product: plain float tensors, and nothing that interprets the call.

    Transforms, forward-mode AD and subclasses do; they get torch's own product.
    """
    if forward_ad._current_level >= 0 or type(_interpreter()) is not NoneType:
        return False  # Dynamo's None is not `None` there, but its type is
    for x in (a, b) if bias is None else (a, b, bias):
        if type(x) not in _PLAIN or x.layout is not _strided or not x.dtype.is_floating_point:
            return False
    return True


def _op(a: Any, b: Any, bias: Tensor | None, activation: str | None, out_dtype: Any, rest: dict[str, Any]) -> Any:
    """Return the op's product; autocast's casts stand before it, and it is told its dtype."""
    x, scale_a, form_a, prepared_a = _parts(a)
    y, scale_b, form_b, prepared_b = _parts(b)
    dtype = _dtype(out_dtype)
    if bias is not None and effective(bias) is x.dtype is y.dtype and dtype in (None, x.dtype):
        bias = bias.to(x.dtype)  # as a linear layer's
    return OP(
        x,
        y,
        bias,
        scale_a,
        scale_b,
        form_a=form_a,
        form_b=form_b,
        prepared_a=prepared_a,
        prepared_b=prepared_b,
        activation=activation,
        out_dtype=dtype,  # None leaves it to the operands, and the call among the quickly found ones
        **rest,
    )


def _parts(x: Any) -> tuple[Tensor, Tensor | None, str | None, bool]:
    """Return an operand as the op takes it: tensor, scale, form, whether it is prepared."""
    if isinstance(x, ScaledArray):
        return x.data, x.scale, form(x), False
    array = _tensor(x)
    dtype = effective(array)
    if dtype is not array.dtype:  # autocast's
        return array.to(dtype), None, None, False
    return array, None, None, isinstance(x, PreparedOperand)


def _dtype(given: Any) -> Any:
    return getattr(torch, given) if isinstance(given, str) else given


def exported(call: Request, policy: Policy | None, backend: str | None, scope: str | None) -> Any:
    """Return the product of a call while torch.export runs it: the op, where its operands are such as it takes.

    Raises NoBackendError where torch's own product has to serve but a plugin's was asked for, and PolicyError for a
    policy that has no name to be found by later.
    """
    if policy is not None and (" (" in policy.name or load_policy(policy.name) != policy):
        raise PolicyError(f"policy {policy.name!r} cannot be exported: give the name of a shipped one, or a path")
    if _opaque(_tensor(call.a), _tensor(call.b), call.bias):
        rest = {"policy": None if policy is None else policy.name, "backend": backend, "scope": scope}
        a, b = (x.array if isinstance(x, PreparedOperand) else x for x in (call.a, call.b))
        return _op(a, b, call.bias, call.activation, call.out_dtype, rest)
    if backend is not None:
        raise NoBackendError(f"backend {backend!r} was asked for, but torch's own product has to serve here")
    return own_product(call)(*call.operands)


@register_flop_formula(OP)  # type: ignore[untyped-decorator]
def _flops(a_shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
    """Return 2 k for each element of the result."""
    return int(2 * a_shape[-1] * math.prod(out_shape))


skip()
