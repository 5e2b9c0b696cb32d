"""The product as one op of torch.library, for graphs: torch.compile, torch.export and packages made of that.

What runs is dispatch.matmul, with the policy in force when it runs. Eager calls never come here: the op would cost them
tens of microseconds.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad

from dispatch._api import matmul
from dispatch._recipe import ScalingRecipe
from dispatch.frameworks import _torch_autograd as autograd
from dispatch.frameworks._torch_product import (
    activate,
    before_activation,
    decoded,
    effective,
    product,
    without_autocast,
)
from dispatch.frameworks.backward import again
from dispatch.frameworks.compiled import POLICY, refuse_plugins
from dispatch.policies.policy import Policy, _in_force, current_policy, load_policy
from dispatch.quantization import ScaledArray
from dispatch.quantization.prepared import PreparedOperand, living

NAME = "gemm_dispatch::matmul"
_SCHEMA = (
    "(Tensor a, Tensor b, Tensor? bias=None, Tensor? scale_a=None, Tensor? scale_b=None, *, str? form_a=None, "
    "str? form_b=None, bool prepared_a=False, bool prepared_b=False, str? activation=None, "
    "ScalarType? out_dtype=None, str? policy=None, str? backend=None, str? scope=None, str op='matmul') -> Tensor"
)
_TENSORS = 5  # the first of its arguments
_library = torch.library.Library("gemm_dispatch", "DEF")
_library.define(f"matmul{_SCHEMA}", tags=(torch.Tag.pt2_compliant_tag,))
OP = torch.ops.gemm_dispatch.matmul
_PLAIN = (Tensor, torch.nn.Parameter)
_modes = torch._C._len_torch_dispatch_stack
_functorch = torch._C._functorch.peek_interpreter_stack


def form(x: ScaledArray) -> str:
    """Return all of a ScaledArray that is no tensor, as the op's form_a and form_b; Dynamo takes no f-string here.

    Its dtype is autocast's, where that would cast what it is decoded to.
    """
    dtype = str(effective(x.data, getattr(torch, x.dtype))).removeprefix("torch.")
    return ",".join((str(x.recipe), str(x.axis), dtype))


def _operand(x: Tensor, scale: Tensor | None, form: str | None, prepared: bool | None) -> Any:
    """Return an operand as dispatch.matmul takes it: of a prepared one, that one and its forms if it still lives."""
    if scale is not None and form is not None:
        recipe, axis, dtype = form.split(",")
        return ScaledArray(x, scale, _recipe(recipe), int(axis), dtype)
    found = prepared_of(x) if prepared else None
    return x if found is None else found


def prepared_of(x: Tensor) -> PreparedOperand | None:
    """Return the prepared operand whose array a tensor is, or None: none was made in this process, or it is no more."""
    place = x.data_ptr(), x.stride()
    reference = _places.get(place)
    found = None if reference is None else reference()
    if found is not None and (found._array is x or _same(found._array, x)):
        return found
    for found in living():
        if isinstance(found.array, Tensor) and _same(found.array, x):
            if len(_places) >= _MOST_PLACES:
                _places.clear()
            _places[place] = weakref.ref(found)
            return found
    return None


_MOST_PLACES = 1 << 16
_places: dict[tuple[int, tuple[int, ...]], weakref.ref[PreparedOperand]] = {}
"""Where prepared arrays were found, by address and strides."""


def _same(x: Tensor, y: Tensor) -> bool:
    """Return whether two tensors are one."""
    if x.data_ptr() != y.data_ptr() or x.dtype != y.dtype or x.device != y.device:
        return False
    return bool(x.stride() == y.stride() and x.shape == y.shape)


def _run(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    form_a: str | None = None,
    form_b: str | None = None,
    prepared_a: bool = False,
    prepared_b: bool = False,
    policy: str | None = None,
    scope: str | None = None,
    op: str = "matmul",
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    backend: str | None = None,
) -> Tensor:
    """Return dispatch.matmul's product, contiguous as the fake one is; gradients and autocast are around the op."""
    x, y = _operand(a, scale_a, form_a, prepared_a), _operand(b, scale_b, form_b, prepared_b)
    with torch.no_grad() if torch.is_grad_enabled() else nullcontext(), without_autocast(a):
        chosen = _policy(policy)
        if op == "matmul":
            return matmul(
                x,
                y,
                bias=bias,
                activation=activation,
                out_dtype=out_dtype,
                policy=chosen,
                backend=backend,
                scope=scope,
            ).contiguous()
        return again(x, y, op, {}, policy=chosen or current_policy(), scope=scope).contiguous()


def _policy(name: str | None) -> Policy | None:
    """Return the policy of that name, or the one around backward() if this is a thread of autograd's, or None."""
    if name is not None:
        return _loaded(name)
    return around_backward() if _in_force.get() is None else None


def around_backward() -> Policy | None:
    """Return the policy that was in force where backward() was called, if this is a thread of autograd's, or None."""
    if torch._C._is_key_in_tls("context"):  # of the thread that calls backward(), from torch 2.13 on
        context = torch._C._get_obj_in_tls("context")
        return None if context is None else context.get(_in_force)
    if torch._C._is_key_in_tls(POLICY) and (entered := torch._C._get_obj_in_tls(POLICY)):
        return cast(Policy, entered[-1])
    return None


_loaded = lru_cache(64)(load_policy)
_recipe = lru_cache(64)(ScalingRecipe.parse)


def _fake(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    *_: Any,
    form_a: str | None = None,
    form_b: str | None = None,
    out_dtype: torch.dtype | None = None,
    **__: Any,
) -> Tensor:
    """Return a tensor without values as _run would; shapes and errors are those of torch's own product."""
    _before_lowering()
    out = torch.matmul(*decoded(_stated(a, form_a), _stated(b, form_b)))
    if bias is not None:
        bias.expand(out.shape)
    return out.new_empty(out.shape, dtype=out_dtype or out.dtype)


def _before_lowering() -> None:
    """Tell Inductor, if it is loaded, what to call in place of the op: it traces an op before it lowers it."""
    from dispatch.frameworks import _torch_inductor

    _torch_inductor.register()


def _stated(x: Tensor, form: str | None) -> Tensor:
    return x if form is None else x.to(getattr(torch, form.rpartition(",")[2]))


def differentiable(
    a: Tensor,
    b: Tensor,
    bias: Tensor | None = None,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    **given: Any,
) -> Tensor:
    """Return the op's product under autograd; where no gradient is asked for, by the quickest way.

    torch.library.register_autograd would do, but Dynamo looks at each of its frames, in each call.
    """
    tensors = (a, b, bias, scale_a, scale_b)
    if _functorch() is not None or forward_ad._current_level >= 0:  # of exported programs: nobody asked Dynamo
        return _native(*tensors, **given)
    if torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in tensors):
        return _trained(tensors, given)
    if _modes() or any(x is not None and (type(x) not in _PLAIN or x.is_meta) for x in tensors):
        return _below(tensors, given)
    return _run(*tensors, **given)


def _trained(tensors: Sequence[Tensor | None], given: dict[str, Any]) -> Tensor:
    activation, out = given.get("activation"), given.get("out_dtype")
    alone = given if activation is None else {**given, "activation": None, "out_dtype": before_activation(out)}
    value = cast(Tensor, _Product.apply(*tensors, alone))
    return value if activation is None else activate(value, activation).to(out or value.dtype)


def _native(a: Tensor, b: Tensor, bias: Any, scale_a: Any, scale_b: Any, **given: Any) -> Tensor:
    """Return torch's own product, which every transform and forward-mode AD knows.

    Raises NoBackendError where a plugin's was asked for.
    """
    refuse_plugins(given.get("backend"))
    x = a if scale_a is None else _operand(a, scale_a, given["form_a"], None).dequantize()
    y = b if scale_b is None else _operand(b, scale_b, given["form_b"], None).dequantize()
    return own(x, y, bias, given.get("activation"), given.get("out_dtype"))


def own(a: Tensor, b: Tensor, bias: Tensor | None, activation: str | None, out_dtype: torch.dtype | None) -> Tensor:
    """Return torch's own product of tensors, raw FP8 among them, with its epilogue."""
    a, b = decoded(a, b)
    dtype = effective(a)
    out = out_dtype or dtype
    if bias is None and activation is None and out is dtype:
        return torch.matmul(a, b)
    return product(a, b, bias, activation, dtype, out)


def _below(tensors: Sequence[Tensor | None], given: dict[str, Any]) -> Tensor:
    with torch._C._AutoDispatchBelowAutograd():
        return cast(Tensor, OP(*tensors, **given))


class _Product(torch.autograd.Function):  # type: ignore[misc]
    """The op with gradients: dgrad and wgrad are the op again."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        *tensors, given = inputs
        a, b, bias, *_ = tensors
        need_a, need_b = ctx.needs_input_grad[:2]
        kept = need_b, need_a, False, need_b, need_a
        ctx.save_for_backward(*(x if keep else None for x, keep in zip(tensors, kept, strict=True)))
        ctx.like = autograd.likes(ctx, a, b, bias)
        ctx.given = given
        return _below(tensors, given)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b, _, *scales = ctx.saved_tensors
        given = ctx.given
        a, b = (
            x if x is None or scale is None else _operand(x, scale, given[form], None).dequantize()
            for x, scale, form in zip((a, b), scales, ("form_a", "form_b"), strict=True)
        )

        def product(x: Tensor, y: Tensor, op: str) -> Any:
            return OP(x, y, policy=given.get("policy"), scope=given.get("scope"), op=op)

        return *autograd.gradients(grad, a, b, ctx.like, product), None, None, None


def _batched(info: Any, in_dims: tuple[int | None, ...], *tensors: Any, **rest: Any) -> tuple[Tensor, int]:
    """Return the products over a new leading dimension of whichever operands have one."""
    given = tensors + (None,) * (_TENSORS - len(tensors))
    dims = in_dims + (None,) * (_TENSORS - len(in_dims))
    (a, b, bias, *scales), (dim_a, dim_b, dim_bias, *_) = given, dims
    if any(scale is not None for scale in scales):
        raise NotImplementedError("vmap of dispatch.matmul over a ScaledArray: map over its dequantize()")
    ranks = a.dim() - (dim_a is not None), b.dim() - (dim_b is not None)
    row, column = ranks[0] == 1, ranks[1] == 1
    if dim_a is None and dim_b is None:  # the bias alone is mapped
        a, dim_a = a.expand(info.batch_size, *a.shape), 0
    rank = max(2, *ranks)
    a = _leading(a, dim_a, (-2,) if row else (), rank)
    b = _leading(b, dim_b, (-1,) if column else (), rank)
    if bias is not None:
        bias = _leading(bias, dim_bias, ((-1,) if column else ()) + ((-2,) if row else ()), rank)
    out = OP(a, b, bias, **{**rest, "prepared_a": False, "prepared_b": False})
    out = out.squeeze(-1) if column else out
    return (out.squeeze(-1 if column else -2) if row else out), 0


def _leading(x: Tensor, dim: int | None, new: tuple[int, ...], rank: int) -> Tensor:
    """Return x with the mapped dimension in front, dimensions of one at `new`, and `rank` others where it is mapped."""
    x = x if dim is None else x.movedim(dim, 0)
    for place in new:
        x = x.unsqueeze(place) if x.dim() > (dim is not None) or place == -1 else x
    return x if dim is None else x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])


_library.impl("matmul", _run, "CompositeExplicitAutograd")
torch.library.register_fake(NAME, _fake, lib=_library)
_library.impl("matmul", differentiable, "Autograd")
torch.library.register_vmap(NAME, _batched, lib=_library)
