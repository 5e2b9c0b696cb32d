"""What code of Inductor's calls in place of the op: a function, without torch's dispatcher and its boxing.

The op says what a call is; here its constant arguments, and where they are static the sizes and strides, become one
string in the generated code, by which a known call is found at once. Code for C++, packages made ahead of time and
versions of torch whose Inductor this was not read against call the op.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from dispatch import _api
from dispatch._backend import Plan
from dispatch.frameworks import _torch_op
from dispatch.frameworks.calls import Options
from dispatch.frameworks.request import request
from dispatch.policies.policy import _in_force, current_policy
from dispatch.quantization import PreparedOperand

FITTING = (2, 9), (2, 13)
"""The first and the last version of torch whose Inductor this fits: its lowerings are no public interface."""
NAME = "direct_matmul"
"""Under which generated code finds `direct`. Such code lies in caches on disk: another form of a site, another name."""
_OP = _torch_op.OP.default
_TENSORS = ("a", "b", "bias", "scale_a", "scale_b")
_known = _api._table.compiled
_active = _in_force.get
_around_backward = _torch_op.around_backward
_modes = torch._C._len_torch_dispatch_stack
_autocast = torch._C._is_any_autocast_enabled
_deterministic = torch._C._get_deterministic_algorithms


@dataclass(frozen=True, slots=True)
class Site:
    """One product in generated code. given: the tensors that come with each call. stated: the constant arguments.

    layouts: dtype, device, sizes and strides of each tensor where all are static, else empty.
    """

    given: tuple[str, ...]
    stated: dict[str, Any]
    layouts: tuple[Any, ...]

    def __str__(self) -> str:
        return repr((self.given, self.stated, self.layouts))

    def arguments(self, values: tuple[Any, ...]) -> dict[str, Any]:
        """Return the op's arguments of one call."""
        return {**self.stated, **dict(zip(self.given, values, strict=True))}


def direct(site: str, *values: Any) -> Tensor:
    """Return the product of a call in generated code, by the plan that is known for this site under the policy."""
    plan = _known.get((site, _active() or _around_backward(), _deterministic()))
    if plan is not None and not _modes() and not _autocast():
        try:
            out: Tensor = plan(*values).contiguous()
        except KeyboardInterrupt:
            raise
        except BaseException:  # the whole call below meets it again, and says whose fault it is
            pass
        else:
            return out
    return _whole(site, values)


def _whole(site: str, values: tuple[Any, ...]) -> Tensor:
    """Return the product by the op or what the op runs, and remember its plan if later calls may rely on it."""
    found = _parsed(site)
    arguments = found.arguments(values)
    if _modes():
        from dispatch.frameworks import _torch_trace  # noqa: F401 - it says what the op counts for

        return cast(Tensor, _OP(**arguments))
    out = _torch_op._run(**arguments)
    if found.layouts and not _autocast():
        with torch.no_grad():
            _remember(site, found, arguments)
    return out


def _remember(site: str, found: Site, arguments: dict[str, Any]) -> None:
    """Keep the plan of a known call for its site, for operands as generated code gives them."""
    x, y = _operands(arguments)
    named = arguments.get("policy")
    policy = _torch_op._policy(named) or current_policy()
    options = Options(policy, arguments.get("backend"), arguments.get("scope"), named is not None)
    parts = (arguments.get(name) for name in ("bias", "activation", "out_dtype", "op"))
    plan = _api._young.get(_api._key(request(x, y, *parts), options))
    if plan is not None and (bound := _bound(plan, found, x, y)) is not None:
        _api._table.keep_compiled((site, _active() or _around_backward(), _deterministic()), bound)


def _operands(arguments: dict[str, Any]) -> tuple[Any, Any]:
    a, b = ([arguments.get(f"{part}{side}") for part in ("", "scale_", "form_", "prepared_")] for side in ("a", "b"))
    return _torch_op._operand(*a), _torch_op._operand(*b)


def _bound(plan: Plan, site: Site, a: Any, b: Any) -> Plan | None:
    """Return `plan` for the values of a site's calls, or None where a prepared operand lives no more."""
    prepared = [name in site.stated for name in ("prepared_a", "prepared_b")]
    if not any(prepared) and not {"form_a", "form_b"} & site.stated.keys():
        return plan

    def gone(x: Any, y: Any) -> bool:
        return any(one and not isinstance(z, PreparedOperand) for one, z in zip(prepared, (x, y), strict=True))

    if gone(a, b):
        return None
    if prepared == [False, True] and site.given in (("a", "b"), ("a", "b", "bias")):
        return _weighted(plan)

    def product(*values: Any) -> Any:
        arguments = site.arguments(values)
        x, y = _operands(arguments)
        if gone(x, y):
            raise _GoneError
        bias = arguments.get("bias")
        return plan(x, y) if bias is None else plan(x, y, bias)

    return product


def _weighted(plan: Plan) -> Plan:
    """Return `plan` for prepared weights, as quickly as can be: it is what decoding calls."""

    def product(a: Tensor, b: Tensor, *bias: Tensor) -> Any:
        found = _torch_op.prepared_of(b)
        if found is None:
            raise _GoneError
        return plan(a, found, *bias)

    return product


class _GoneError(Exception):
    """A prepared operand is no more."""


@lru_cache(4096)
def _parsed(site: str) -> Site:
    given, stated, layouts = ast.literal_eval(site)
    if (dtype := stated.get("out_dtype")) is not None:
        stated["out_dtype"] = getattr(torch, dtype)
    return Site(given, stated, layouts)


def register() -> None:
    """Let Inductor call `direct` for the op, once it is loaded and if it is one that this fits."""
    global _registered
    if _registered or "torch._inductor.lowering" not in sys.modules:
        return
    _registered = True
    version = tuple(int(x) for x in torch.__version__.split(".")[:2])
    if FITTING[0] <= version <= FITTING[1]:
        _lower()


_registered = False


def _lower() -> None:
    """Register the op's lowering: as any op's without one, but with another call in Python code."""
    from torch._inductor import ir
    from torch._inductor.lowering import (
        add_layout_constraint,
        add_needs_realized_inputs,
        constrain_to_fx_strides,
        fallback_handler,
        register_lowering,
    )
    from torch._inductor.virtualized import V

    class Direct(ir.FallbackKernel):  # type: ignore[misc]
        """A call of `direct`."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.python_kernel_name = f"torch.ops.gemm_dispatch.{NAME}"

        def codegen_args(self) -> list[str]:
            args, kwargs = self.unflatten_args(self.inputs, self.constant_args)
            site, values = _site(args, {**self.kwargs, **kwargs})
            return [repr(str(site)), *map(V.graph.wrapper_code.val_to_arg_str, values)]

        def codegen_kwargs(self, skip_out: bool = False) -> list[str]:
            return []

    by_op: Callable[..., Any] = fallback_handler(_OP)

    def lowering(*args: Any, **kwargs: Any) -> Any:
        if V.graph.cpp_wrapper or V.graph.aot_mode or getattr(V.graph, "fx_wrapper", False):
            return by_op(*args, **kwargs)
        return ir.TensorBox.create(Direct.create(_OP, *args, **kwargs))

    add_needs_realized_inputs(_OP)
    add_layout_constraint(_OP, constrain_to_fx_strides)
    register_lowering(_OP, type_promotion_kind=None)(lowering)


def _site(args: Any, kwargs: dict[str, Any]) -> tuple[Site, list[Any]]:
    """Return what is constant in one call of the op, and what generated code has to pass, in that order."""
    names = [argument.name for argument in _OP._schema.arguments]
    given: dict[str, Any] = {}
    stated: dict[str, Any] = {}
    for name, value in {**dict(zip(names, args, strict=False)), **kwargs}.items():
        if isinstance(value, torch.dtype):
            value = str(value).removeprefix("torch.")
        if name in _TENSORS and value is not None:
            given[name] = value
        elif value not in (None, False) and (name, value) != ("op", "matmul"):
            stated[name] = value
    return Site(tuple(given), stated, _layouts([*given.values()])), [*given.values()]


def _layouts(tensors: list[Any]) -> tuple[Any, ...]:
    """Return dtype, device, sizes and strides of nodes of Inductor's, or nothing where one has a size of its own."""
    found = []
    for x in tensors:
        sizes = [*x.get_size()], [*x.get_stride()]
        if not all(getattr(size, "is_Integer", isinstance(size, int)) for part in sizes for size in part):
            return ()
        found.append((str(x.get_dtype()), str(x.get_device()), *(tuple(map(int, part)) for part in sizes)))
    return tuple(found)


setattr(torch.ops.gemm_dispatch, NAME, direct)
