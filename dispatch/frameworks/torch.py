"""The room of torch, on the CPU and on CUDA."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.autograd import forward_ad

from dispatch._backend import Plan
from dispatch._problem import Operand, Problem
from dispatch.frameworks import _torch_autograd as autograd
from dispatch.frameworks import (
    _torch_inductor,  # noqa: F401 - it defines the op, for programs that are loaded
    _torch_optimizers,  # noqa: F401 - it listens to every optimizer's steps
)
from dispatch.frameworks import _torch_product as own_product
from dispatch.frameworks._base import Again, Forms
from dispatch.frameworks._clock import Call, WallClock
from dispatch.frameworks._cpu import cpu_arch
from dispatch.frameworks._driver import nvidia_driver
from dispatch.frameworks._layout import layout_of
from dispatch.frameworks._torch_clock import CudaClock
from dispatch.frameworks._torch_graphs import apart, pooled
from dispatch.frameworks._torch_streams import waiting
from dispatch.frameworks.arch import Arch
from dispatch.frameworks.operands import array_of, formed
from dispatch.frameworks.request import CALLERS, Request, name_of
from dispatch.quantization import ScaledArray

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_strided = torch.strided
_grad_enabled = torch.is_grad_enabled
_any_autocast = torch._C._is_any_autocast_enabled
_functorch = torch._C._functorch.peek_interpreter_stack
_tracing = torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack
_deterministic = torch._C._get_deterministic_algorithms
_batched = torch._C._functorch.is_legacy_batchedtensor  # what is_grads_batched maps over


class TorchRoom:
    """torch tensors."""

    name = "torch"
    xp = torch

    def is_array_type(self, kind: type) -> bool:
        """Return whether it is Tensor or a subclass."""
        return issubclass(kind, Tensor)

    def key(self, a: Tensor, b: Tensor, extra: Hashable = None, bias: Tensor | None = None) -> Hashable | None:
        """Return dtypes, shapes, strides, devices and the modes that matter, and `extra`.

        None, and so the native product, where something else interprets the call: functorch transforms, forward-mode
        AD, a dispatch mode (fake tensors, make_fx, export), torch.jit.trace, a subclass, a sparse or a nested tensor.
        Dynamo never comes here: it traces what frameworks/compiled.py has.
        """
        if _modes() or _functorch() is not None or forward_ad._current_level >= 0 or _tracing() is not None:
            return None
        if type(a) not in _PLAIN or type(b) not in _PLAIN or a.layout is not _strided or b.layout is not _strided:
            return None
        if _batched(a) or _batched(b):
            return None
        try:
            layouts = a.shape, a.is_contiguous() or a.stride(), b.shape, b.is_contiguous() or b.stride()
        except RuntimeError:  # a nested tensor has no shape
            return None
        if bias is not None:
            if type(bias) not in _PLAIN or bias.layout is not _strided or _batched(bias):
                return None
            stated = self.effective(bias) if _any_autocast() else bias.dtype
            where = bias.is_contiguous() or bias.stride(), bias.device
            extra = bias.dtype, bias.shape, *where, bias.requires_grad and _grad_enabled(), stated, extra
        grad = (a.requires_grad or b.requires_grad) and _grad_enabled()
        cast = (self.effective(a), self.effective(b)) if _any_autocast() else None
        return a.dtype, b.dtype, layouts, a.device, b.device, grad, cast, _deterministic(), extra

    def dtype_name(self, array: Tensor) -> str:
        """Return the dtype's name."""
        return _dtype_name(array.dtype)

    def dtype(self, name: str) -> torch.dtype:
        """Return torch's dtype of that name."""
        found = getattr(torch, name, None)
        if not isinstance(found, torch.dtype):
            raise TypeError(f"torch has no dtype {name!r}")
        return found

    def name_of_dtype(self, dtype: Any) -> str:
        """Return the name of a torch dtype or the name itself."""
        return _dtype_name(self.dtype(dtype) if isinstance(dtype, str) else dtype)

    def cast(self, array: Tensor, dtype: str) -> Tensor:
        """Return array.to(dtype)."""
        return array.to(self.dtype(dtype))

    def copied(self, array: Tensor) -> Tensor:
        """Return a clone, in the same strides where no two elements share a place."""
        return array.clone()

    def device(self, array: Tensor) -> str:
        """Return torch's name of the device."""
        return str(array.device)

    def arch(self, array: Tensor) -> Arch:
        """Return the compute capability's arch, or the processor's."""
        if array.device.type == "cuda":
            return _cuda_arch(array.device.index or 0)
        return cpu_arch() if array.device.type == "cpu" else Arch(array.device.type)

    def archs(self) -> list[Arch]:
        """Return the processor's arch and every GPU's."""
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [cpu_arch(), *dict.fromkeys(_cuda_arch(index) for index in range(count))]

    def clash(self, arrays: Sequence[Tensor]) -> list[str] | None:
        """Return the devices if there is more than one."""
        devices = [str(array.device) for array in arrays]
        return devices if len(set(devices)) > 1 else None

    def operand(self, array: Tensor) -> Operand:
        """Return the operand's facts; the layout and alignment of what has no memory of its own are not known."""
        if array.layout is not torch.strided or _virtual(array):
            return Operand(self.effective(array), tuple(array.shape[:-2]), "strided", 1)
        size = array.element_size()
        try:
            strides = [stride * size for stride in array.stride()]
            address = array.data_ptr() if type(array) in _PLAIN else 1  # a fake tensor warns of the question
            layout, alignment = layout_of(array.shape, strides, size, address)
        except RuntimeError:  # sparse, or wrapped by a transform: no strides or no address
            layout, alignment = "strided", 1
        return Operand(self.effective(array), tuple(array.shape[:-2]), layout, alignment)

    def promote(self, a: str, b: str) -> str | None:
        """Return the dtype if both are the same: torch multiplies nothing else, and no bool."""
        return a if a == b != "bool" else None

    def modes(self, *arrays: Any) -> tuple[str, ...]:
        """Return `captured` under CUDA graph capture and `differentiated` where a gradient is wanted."""
        grad = _grad_enabled() and any(getattr(x, "requires_grad", False) for x in arrays)
        return (("captured",) if _captured(arrays[0]) else ()) + (("differentiated",) if grad else ())

    def effective(self, array: Tensor, dtype: str | None = None) -> str:
        """Return autocast's dtype where it would cast this tensor, or what it is decoded to; else the own one."""
        own = array.dtype if dtype is None else self.dtype(dtype)
        return _dtype_name(own_product.effective(array, own) if _any_autocast() else own)

    def asarray(self, values: NDArray[Any], like: Tensor) -> Tensor:
        """Return the values on the device of `like`; ml_dtypes' dtypes become torch's."""
        packed = np.asarray(values, order="C")  # not ascontiguousarray, which has no 0-D
        packed = packed if packed.flags.writeable else packed.copy()
        try:
            return torch.from_numpy(packed).to(like.device)
        except TypeError:  # one of ml_dtypes'
            bits = torch.from_numpy(packed.view(f"u{packed.dtype.itemsize}").copy())
            return bits.view(self.dtype(packed.dtype.name)).to(like.device)

    def to_numpy(self, array: Tensor) -> NDArray[Any]:
        """Return a copy of the values on the host; bfloat16 and FP8 as ml_dtypes'.

        An alias would keep torch from ever resizing the tensor's storage, as FSDP does.
        """
        plain = array.detach().resolve_conj().resolve_neg()
        host = plain.to("cpu", copy=True, memory_format=torch.contiguous_format)
        try:
            return np.asarray(host.numpy())
        except TypeError:
            from dispatch.frameworks import framework

            bits = host.view(torch.uint8 if host.element_size() == 1 else torch.int16).numpy()
            return np.asarray(bits.view(framework("numpy").dtype(self.dtype_name(array))))

    def state(self, array: Tensor) -> Hashable:
        """Return the in-place version, and of what has memory of its own the address, shape, strides and dtype."""
        version: int | None
        try:
            version = array._version
        except RuntimeError:  # an inference tensor's
            version = None
        if _virtual(array):
            return version
        return version, array.data_ptr(), array.shape, array.stride(), array.dtype

    def before_use(self, made: Any, array: Tensor) -> Callable[[], None] | None:
        """Return what makes another stream than this one wait for `made`, and its memory wait for that stream."""
        return waiting(made, array.device) if array.is_cuda else None

    def matmul(self, a: Tensor, b: Tensor) -> Tensor:
        """Return torch.matmul(a, b)."""
        return torch.matmul(a, b)

    def native(self, problem: Problem) -> Plan:
        """Return torch.matmul itself, or with what has to follow it."""
        plain = problem.bias is None and problem.activation is None
        return torch.matmul if plain and problem.out_dtype == problem.a.dtype else _native(self, problem)

    def epilogue(self, product: Tensor, problem: Problem, bias: Tensor | None) -> Tensor:
        """Return activation(product + bias), computed in float32 or wider."""
        return own_product.epilogue(product, bias, problem.activation, self.dtype(problem.out_dtype))

    def adapt(self, plan: Plan, forms: Forms | None, problem: Problem, native: Plan, again: Again) -> Plan:
        """Return `plan` under autograd and autocast.

        The own product too has a dispatched backward pass, until no plugin turns out to serve that either.
        """
        own, seen = plan is native, dict[str, str | None]()
        plan = formed(plan, forms)
        device = problem.device.partition(":")[0]
        if "differentiated" in problem.modes:
            plan = autograd.differentiable(plan, problem, again, seen)
        if _any_autocast() and torch.is_autocast_enabled(device):  # outermost: the backward pass too is in its dtype
            facts = problem.a.dtype, problem.b.dtype, problem.bias or problem.a.dtype
            plan = _without_autocast(plan, device, *map(self.dtype, facts))
        wider = problem.out_dtype != problem.a.dtype  # whose own derivative multiplies in float32
        return autograd.until_native(plan, native, seen) if own and not wider else plan

    def chosen(self, call: Request) -> Request:
        """Return the call without its activation where a gradient is wanted: it needs what the activation is of."""
        scales = (x.scale for x in (call.a, call.b) if isinstance(x, ScaledArray))
        if call.activation is None or "differentiated" not in self.modes(*map(array_of, call.operands), *scales):
            return call
        if not (array_of(call.a).is_floating_point() or array_of(call.a).is_complex()):
            return call  # whole numbers have no derivative
        out = None if call.out_dtype is None else self.dtype(name_of(self, call.out_dtype))
        return replace(call, activation=None, out_dtype=own_product.before_activation(out))

    def whole(self, plan: Plan, call: Request) -> Plan:
        """Return `plan`, with the activation after it if it was chosen without."""
        if self.chosen(call) is call:
            return plan
        activation = call.activation
        out = None if call.out_dtype is None else self.dtype(name_of(self, call.out_dtype))

        def activated(*operands: Any) -> Tensor:
            value = plan(*operands)
            try:
                return own_product.activate(value, activation).to(out or value.dtype)
            except BaseException as error:  # a hook for what is saved raised it
                setattr(error, CALLERS, True)
                raise

        return activated

    def deferred(self, call: Any, options: Any) -> None:
        """Return None: nothing waits."""

    def measurable(self, a: Any) -> str | None:
        """Return a reason during graph capture, and for a tensor without values, a complex or a quantized one."""
        if _captured(a):
            return "a CUDA graph is being captured"
        if isinstance(a, Tensor) and (a.is_complex() or a.is_quantized):
            return f"{self.dtype_name(a)} products are not measured"
        return "a meta tensor has no values" if getattr(a, "is_meta", False) else None

    def normal(self, shape: tuple[int, ...], dtype: str, seed: int, device: str | None = None) -> Tensor:
        """Return random values from a generator of its own."""
        random, kind = torch.Generator(device or "cpu").manual_seed(seed), self.dtype(dtype)
        if kind.is_floating_point or kind.is_complex:
            return torch.randn(shape, generator=random, dtype=torch.float32, device=random.device).to(kind)
        return torch.randint(0, 8, shape, generator=random, device=random.device).to(kind)

    def sample(self, problem: Problem, a: Tensor, b: Tensor, seed: int) -> tuple[Tensor, Tensor]:
        """Return normal random operands with the strides of a and b."""
        return self._like(a, seed), self._like(b, seed + 1)

    def _like(self, like: Tensor, seed: int) -> Tensor:
        stride = like.stride()
        shape = tuple(1 if step == 0 else size for size, step in zip(like.shape, stride, strict=True))
        values = self.normal(shape, self.dtype_name(like), seed, str(like.device))
        out = torch.empty_strided(shape, stride, dtype=like.dtype, device=like.device)
        try:
            out.copy_(values)
        except RuntimeError:  # overlapping strides cannot be written
            out = values
        return out.expand(like.shape)

    def stopwatch(self, calls: Sequence[Call], memory_bytes: int) -> WallClock | CudaClock:
        """Return CUDA events around graph replays, or a wall clock on the CPU."""
        device = next((x.device for x in calls[0][1] if isinstance(x, Tensor)), None)
        return CudaClock(calls, device, memory_bytes) if device and device.type == "cuda" else WallClock(calls)

    def reference(self, a_rows: Tensor, b: Tensor) -> NDArray[Any]:
        """Return the float64 product, computed where the tensors are, a slice of columns at a time."""
        step = max(1, (1 << 23) // max(1, b.shape[0]))
        a64 = a_rows.double()
        parts = [a64 @ b[:, i : i + step].double() for i in range(0, b.shape[1], step)]
        return np.asarray(torch.cat(parts, 1).cpu().numpy())

    def isolated(self, work: Callable[[], Any]) -> Any:
        """Return work() without gradients, inference mode or autocast, and outside of any CUDA graph's memory."""

        def quiet() -> Any:
            cpu, cuda = (torch.autocast(device, enabled=False) for device in ("cpu", "cuda"))
            with torch.inference_mode(False), torch.no_grad(), cpu, cuda:
                return work()

        return apart(quiet) if pooled() else quiet()

    def versions(self, array: Tensor) -> dict[str, str]:
        """Return versions, device, driver and the flags that change a product."""
        cuda = torch.backends.cuda.matmul
        flags = (
            cuda.allow_tf32,
            cuda.allow_bf16_reduced_precision_reduction,
            cuda.allow_fp16_reduced_precision_reduction,
        )
        facts = {
            "torch": torch.__version__,
            "deterministic": str(torch.are_deterministic_algorithms_enabled()),
            "float32_precision": torch.get_float32_matmul_precision(),
        }
        if array.device.type != "cuda":
            return {**facts, "threads": str(torch.get_num_threads()), "mkldnn": str(torch.backends.mkldnn.enabled)}
        return {
            **facts,
            "cuda": str(torch.version.cuda),
            "driver": str(nvidia_driver()),
            "device": torch.cuda.get_device_name(array.device),
            "flags": ",".join(map(str, flags)),
        }

    def synchronize(self, array: Tensor) -> None:
        """Wait for the device."""
        if array.is_cuda:
            torch.cuda.synchronize(array.device)


@cache
def _dtype_name(dtype: torch.dtype) -> str:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{dtype!r} is not a torch dtype")
    return str(dtype).removeprefix("torch.")


@cache
def _cuda_arch(index: int) -> Arch:
    return Arch.cuda(*torch.cuda.get_device_capability(index))


@cache
def _native(room: TorchRoom, problem: Problem) -> Plan:
    own, out, activation = room.dtype(problem.a.dtype), room.dtype(problem.out_dtype), problem.activation

    def native(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        return own_product.product(a, b, bias, activation, own, out)

    return native


def _captured(x: Any) -> bool:
    return getattr(x, "is_cuda", False) and torch.cuda.is_current_stream_capturing()


def _virtual(x: Tensor) -> bool:
    """Return whether a tensor has no memory that could be asked for its address."""
    return type(x) not in _PLAIN or x.is_meta or bool(_modes()) or _functorch() is not None


def _without_autocast(plan: Plan, device: str, *dtypes: torch.dtype) -> Plan:
    def casting(a: Any, b: Any, bias: Any = None) -> Any:
        with torch.autocast(device, enabled=False):
            x = a.to(dtypes[0]) if isinstance(a, Tensor) else a
            y = b.to(dtypes[1]) if isinstance(b, Tensor) else b
            return plan(x, y) if bias is None else plan(x, y, bias.to(dtypes[2]))

    return casting


ROOM = TorchRoom()
