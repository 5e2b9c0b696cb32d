"""Calls that something else interprets: a compiler or an export gets torch's opaque op, the rest the own product."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from dispatch._errors import NoBackendError
from dispatch._measurement import FRAMEWORKS_OWN
from dispatch.frameworks.backward import again
from dispatch.frameworks.request import Request, own_product
from dispatch.policies.policy import Policy, _policy_contexts, use_policy

NOT_OURS = "a transform, a compiler, a subclass, several devices or a weak type has a say in the call"
POLICY = "gemm_dispatch.policy"
"""Under which torch keeps, for each thread and the threads of its autograd, the policies that it has entered."""
_NO_POLICY = (
    "dispatch.use_policy cannot be entered in a function that is compiled or exported, which reads the policy when it "
    "runs: enter it around the call, or name the policy in the product, dispatch.matmul(a, b, policy='strict')"
)


def traced(
    a: Any,
    b: Any,
    *,
    bias: Any = None,
    activation: str | None = None,
    out_dtype: Any = None,
    policy: Any = None,
    backend: str | None = None,
    scope: str | None = None,
) -> Any:
    """Return the product; Dynamo traces this in place of dispatch.matmul, whose table and policy it cannot."""
    from dispatch.frameworks._torch_trace import traced as product

    return product(a, b, bias, activation, out_dtype, policy, backend, scope)


def interpreted(call: Request, policy: Policy | None, backend: str | None, scope: str | None) -> Any:
    """Return the product of a call without a key: torch's opaque op while it exports, else the framework's own.

    policy: the one that came with the call, if one did.
    Raises NoBackendError where a plugin's was asked for.
    """
    if call.room.name == "torch" and sys.modules["torch"].compiler.is_exporting():
        from dispatch.frameworks import _torch_trace

        return _torch_trace.exported(call, policy, backend, scope)
    refuse_plugins(backend)
    return own_product(call)(*call.operands)


def refuse_plugins(backend: str | None) -> None:
    """Raise NoBackendError if a plugin's backend was asked for where the framework's own product has to serve."""
    if backend not in (None, *FRAMEWORKS_OWN):
        raise NoBackendError(f"backend {backend!r} was asked for, but {NOT_OURS}: only the own product can")


def _backward_in_trace(*_: Any, **__: Any) -> Any:
    """Break Dynamo's graph."""
    from dispatch.frameworks import _torch_trace

    _torch_trace.broken("the backward pass of an eager dispatch.matmul in compiled autograd: compile its forward pass")


def _policy_in_trace(*_: Any, **__: Any) -> Any:
    """Break Dynamo's graph; an error where it may not be broken."""
    from dispatch.frameworks import _torch_trace

    _torch_trace.broken(_NO_POLICY)


def _outside_of_export(policy: Policy) -> AbstractContextManager[None]:
    """Raise RuntimeError while torch exports: what is exported reads the policy when it runs."""
    compiler = getattr(sys.modules.get("torch"), "compiler", None)
    if compiler is not None and compiler.is_exporting():
        raise RuntimeError(_NO_POLICY)
    return nullcontext()


@contextmanager
def _for_autograd(policy: Policy) -> Iterator[None]:
    """Show a policy to torch's autograd, whose threads get what torch keeps for the one that calls backward()."""
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    if not torch._C._is_key_in_tls(POLICY):
        made: list[Policy] = []
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # torch before 2.13 takes a reference that it does not count
        torch._C._stash_obj_in_tls(POLICY, made)
    entered: list[Policy] = torch._C._get_obj_in_tls(POLICY)
    entered.append(policy)
    try:
        yield
    finally:  # tasks of one thread may leave in any order
        last = max(i for i, other in enumerate(entered) if other is policy)
        del entered[last]


again._torchdynamo_inline = _backward_in_trace  # type: ignore[attr-defined]
use_policy.__init__._torchdynamo_inline = _policy_in_trace  # type: ignore[attr-defined]
use_policy.__enter__._torchdynamo_inline = _policy_in_trace  # type: ignore[attr-defined]
_policy_contexts += [_outside_of_export, _for_autograd]
