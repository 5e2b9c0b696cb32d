"""The Triton products in torch: quantize what is not, multiply, all by launches whose arguments are bound once.

A call allocates the output and one workspace, makes a list of addresses and passes it to each launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from threading import get_ident
from typing import Any, ClassVar, NamedTuple

import torch
from dispatch.kernels import launching
from dispatch.kernels.launching import Bound
from dispatch.plugins import _triton_configs as names
from dispatch.plugins import _triton_launches as launches
from dispatch.plugins._device_torch import on_device
from dispatch.plugins._guard_torch import Sums, sums_of
from dispatch.plugins._triton_launches import BIAS, COUNTERS, OF_A, OF_B, OUT, PARTIALS, Form, Operands, Step
from torch import Tensor

from dispatch import FP8_DTYPES, Operand, Plan, Problem, ScaledArray, ScalingRecipe, framework

ALIGNMENT = 256
"""Bytes between the parts of a workspace."""
KEPT_BYTES, KEPT = 1 << 20, 64
"""Up to how many bytes a workspace is part of one that is kept, and for how many streams and threads of a device."""
SLOTS = 16
"""Addresses in a call's list."""

_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # torch for CPUs has none
_capturing = torch.cuda.is_current_stream_capturing


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Encoded(NamedTuple):
    """One operand as the kernels take it: values (rows, k padded), K-major, and the scales as `Form` lays them."""

    matrix: Tensor
    scale: Tensor


def _bound(step: Step) -> Bound:
    """Return a launch, compiled for the current device."""
    return launching.bind(step.kernel, step.grid, step.arguments, step.options)


def rows_view(x: Tensor, axis: int) -> Tensor:
    """Return an operand, (*batch, m, k) or (*batch, k, n), as (rows, k): a view where its strides allow."""
    x = x if axis == -1 else x.mT
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def _dense(x: Tensor) -> Tensor:
    """Return (rows, k) with one stride of 1 at an address that is a multiple of 16: itself, or a copy."""
    return x if 1 in x.stride() and x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def encode(x: Any, recipe: ScalingRecipe, axis: int) -> Encoded:
    """Return one operand, an array, raw FP8 (its scale is one) or a ScaledArray, as the kernels take it."""
    if isinstance(x, ScaledArray):
        return _encode_scaled(x, recipe, axis)
    rows = rows_view(x, axis)
    form = launches.form_of(recipe, rows.shape[0], rows.shape[1])
    if x.dtype.itemsize == 1:
        return Encoded(_fitted(rows, form), torch.ones(form.scale, dtype=torch.float32, device=x.device))
    rows = _dense(rows)
    with torch.cuda.device(x.device):
        source = launches.source(form, _name(rows.dtype), OF_A, (rows.stride(0), rows.stride(1)))
        steps, floats = launches.quantizing(source)
        stored: torch.dtype = getattr(torch, recipe.storage_dtype)
        data = torch.empty((form.rows, form.padded_k), dtype=stored, device=x.device)
        scale = torch.empty(form.stored_scale, dtype=_scale_dtype(recipe), device=x.device)
        partial = torch.empty(max(floats, 1), dtype=torch.float32, device=x.device)
        addresses = [space.data_ptr() for space in (data, scale, rows, partial)]
        for step in steps:
            _bound(step)(_current_stream(x.device.index), addresses)
    return Encoded(data, scale)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scale_dtype(recipe: ScalingRecipe) -> torch.dtype:
    return torch.float8_e8m0fnu if recipe.scale_dtype == "e8m0" else torch.float32


def _encode_scaled(x: ScaledArray, recipe: ScalingRecipe, axis: int) -> Encoded:
    rows = rows_view(x.data, axis)
    form = launches.form_of(recipe, rows.shape[0], rows.shape[1])
    scale = rows_view(x.scale, axis)
    if recipe.scale_dtype == "e8m0":
        scale = scale.view(torch.uint8)  # torch copies no e8m0 into strides
    if form.along_rows:
        stored = scale.new_zeros(form.stored_scale)
        stored[:, : form.rows] = scale.t()
        scale = stored
    return Encoded(_fitted(rows, form), _dense(scale.contiguous()))


def _fitted(rows: Tensor, form: Form) -> Tensor:
    """Return FP8 values K-major with k padded: themselves where they are, else a copy."""
    shape = (form.rows, form.padded_k)
    if tuple(rows.shape) == shape and rows.is_contiguous() and rows.data_ptr() % 16 == 0:
        return rows
    out = torch.zeros(shape, dtype=torch.uint8, device=rows.device)
    out[:, : form.k] = rows.view(torch.uint8)
    return out.view(rows.dtype)


class Workspaces:
    """Workspaces of `size` bytes. Small ones are parts of one that is kept for each device, stream and thread.

    An allocation is a third of what a small call costs. Within a thread what is launched on one stream runs in order,
    whichever plan launches it. A captured graph gets its own.
    """

    _kept: ClassVar[dict[torch.device, dict[tuple[int, int], Tensor]]] = {}

    def __init__(self, size: int, device: torch.device) -> None:
        self.size, self.device = size, device
        self._here = self._kept.setdefault(device, {})

    def on(self, stream: int) -> Tensor:
        """Return a workspace for launches on `stream`, by this thread."""
        if self.size > KEPT_BYTES or (stream and _capturing()):  # CUDA captures no default stream
            return torch.empty(self.size, dtype=torch.uint8, device=self.device)
        key = stream, get_ident()
        found = self._here.get(key)
        if found is None:
            if len(self._here) >= KEPT:
                self._here.clear()
            found = self._here[key] = torch.empty(KEPT_BYTES, dtype=torch.uint8, device=self.device)
        return found


class Counters:
    """Zeroed int32 counters, kept for each stream: on one stream no two launches run at once.

    Those of a captured graph are its own, and zeroed in it: it may be replayed beside its stream.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._by_stream: dict[int, Tensor] = {}

    def on(self, stream: int) -> Tensor:
        """Return the counters for a launch on `stream`."""
        found = None if _capturing() else self._by_stream.get(stream)
        if found is None:
            found = torch.zeros(self.count, dtype=torch.int32, device=self.device)
            if not _capturing():
                self._by_stream[stream] = found
        return found


class _Side:
    """One operand of a plan: whether a call quantizes it, and into which form."""

    def __init__(self, problem: Problem, operand: Operand, axis: int, outer: int) -> None:
        assert problem.recipe is not None
        self.axis, self.dtype = axis, operand.dtype
        self.recipe = problem.recipe.a if axis == -1 else problem.recipe.b
        self.prepared = operand.prepared
        self.quantizes = not operand.prepared and operand.recipe is None and operand.dtype not in FP8_DTYPES
        self.count = launches.entries(problem, operand)
        self.form = launches.form_of(self.recipe, self.count * outer, problem.k)
        self.expands = self.count != math.prod(operand.batch)
        self.slots = OF_A if axis == -1 else OF_B
        name = "a" if axis == -1 else "b"
        quantized = self.recipe, problem.k, (self.form.padded_rows, self.form.padded_k), problem.device
        self.sums = sums_of(name, *quantized) if self.quantizes else None

    def encoded(self, x: Any) -> Encoded:
        """Return raw FP8 or a ScaledArray as the kernels take it."""
        return encode(x, self.recipe, self.axis)


class _Steps(NamedTuple):
    """What one call launches before the product, for operands of some strides, and the workspace for it.

    placed: the slots that lie in the workspace, with their offsets in bytes. guards: what keeps the guard's sums, and
    their slots. watched: whether those are all that the guard wants; while a graph is captured they may not be.
    """

    launches: list[Bound]
    placed: list[tuple[int, int]]
    space: Workspaces | None
    guards: list[tuple[Sums, launches.Slots]]
    watched: bool


class Kernel(NamedTuple):
    """The product's own launch, and the workspace that it needs: bytes of partial sums, and counters."""

    launch: Bound
    partial_bytes: int
    counters: Counters | None


class ScaledProduct:
    """One problem with a recipe, by one config: `product(a, b, bias)`."""

    def __init__(self, problem: Problem, config: names.Config) -> None:
        self.problem, self.config = problem, config
        self.room = framework("torch")
        self.device = torch.device(problem.device)
        self.left = _Side(problem, problem.a, -1, problem.m)
        self.right = _Side(problem, problem.b, -2, problem.n)
        self._operands = launches.operands_of(problem, (self.left.form, self.right.form))
        self._wide: Kernel | None = None
        self.fuses = launches.fuses(problem)
        self._kernel = self._bind(problem.out_dtype, problem.bias, problem.activation) if self.fuses else self.wide()
        self._by_strides: dict[Any, _Steps] = {}

    def _bind(self, out: str, bias: str | None, activation: str | None) -> Kernel:
        return bind_kernel(self.problem, self.config, self._operands, out, bias, activation)

    def wide(self) -> Kernel:
        """Return the kernel that leaves float32 and no epilogue, for a bias that the kernel cannot add."""
        if self._wide is None:
            self._wide = self._bind("float32", None, None)
        return self._wide

    def _made(self, strides_a: Any, strides_b: Any) -> _Steps:
        """Return what quantizes operands of these strides, bound now; None for encoded ones."""
        of_b = None if strides_b is None else (strides_b[1], strides_b[0])
        sides = [(side, strides) for side, strides in ((self.left, strides_a), (self.right, of_b)) if strides]
        placed, size = list[tuple[int, int]](), 0
        dependent = self.problem.arch != "sm89"

        def place(slot: int, count: int) -> None:
            nonlocal size
            placed.append((slot, size))
            size += _up(count, ALIGNMENT)

        index, layout = self.device.index or 0, (strides_a, strides_b)
        guards = [
            (side.sums, side.slots)
            for side, _ in sides
            if side.sums is not None and side.sums.on(layout, _current_stream(index)) is not None
        ]
        guarded = {slots for _, slots in guards}
        watched = len(guards) == sum(side.sums is not None for side, _ in sides)
        sources = [
            launches.source(side.form, side.dtype, side.slots, strides, guarded=side.slots in guarded)
            for side, strides in sides
        ]
        for form, _, slots, *_ in sources:
            place(slots.data, form.rows * form.padded_k)
            place(slots.scale, form.scale_bytes)
        joint = launches.quantizing_both(sources, dependent=dependent) if len(sources) == 2 else None
        if joint is not None:
            return _Steps([_bound(joint)], placed, Workspaces(size, self.device), guards, watched)
        bound: list[Bound] = []
        for source in sorted(sources, key=lambda source: not source.transposed):  # 1.2 us less at 4096^3 on an H200
            steps, floats = launches.quantizing(source, dependent=dependent)
            bound += [_bound(step) for step in steps]
            place(source.slots.partial, 4 * floats)
        return _Steps(bound, placed, Workspaces(size, self.device) if size else None, guards, watched)

    def call(self) -> Plan:
        """Return the product as a function."""
        problem, left, right, device = self.problem, self.left, self.right, self.device
        index, quantizes_a, quantizes_b = device.index or 0, left.quantizes, right.quantizes
        left_prepared, right_prepared = left.prepared, right.prepared
        shape = (*problem.batch, problem.m, problem.n)
        known, kernel, batch, fused = self._by_strides, self._kernel, problem.batch, self.fuses
        (a_data, a_scale, a_x, *_), (b_data, b_scale, b_x, *_) = OF_A, OF_B
        out, wide_out = (_like(shape, dtype, device) for dtype in (self.room.dtype(problem.out_dtype), torch.float32))

        def product(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
            if quantizes_a and a.ndim != 2:
                a = rows_view(a.expand(*batch, *a.shape[-2:]) if left.expands else a, -1)
            if quantizes_b and b.ndim != 2:
                b = rows_view(b.expand(*batch, *b.shape[-2:]) if right.expands else b, -2).t()
            return run(a, b, bias)

        def run(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
            """Multiply what is 2-D or encoded."""
            stream = _current_stream(index)
            strides = a.stride() if quantizes_a else None, b.stride() if quantizes_b else None
            steps = known.get(strides)
            if steps is None:
                if any(stride is not None and 1 not in stride for stride in strides):
                    return run(_dense(a) if quantizes_a else a, _dense(b) if quantizes_b else b, bias)
                steps = self._made(*strides)
                if steps.watched:
                    known[strides] = steps
            addresses = [0] * SLOTS
            if steps.space is not None:
                space = steps.space.on(stream)
                base = space.data_ptr()
                for slot, offset in steps.placed:
                    addresses[slot] = base + offset
            if quantizes_a:
                addresses[a_x] = address = a.data_ptr()
                if address & 15:
                    return run(_dense(a), b, bias)
            else:
                left_made = a if left_prepared else left.encoded(a)
                addresses[a_data], addresses[a_scale] = left_made.matrix.data_ptr(), left_made.scale.data_ptr()
            if quantizes_b:
                addresses[b_x] = address = b.data_ptr()
                if address & 15:
                    return run(a, _dense(b), bias)
            else:
                right_made = b if right_prepared else right.encoded(b)
                addresses[b_data], addresses[b_scale] = right_made.matrix.data_ptr(), right_made.scale.data_ptr()
            for sums, slots in steps.guards:
                kept = sums.on(strides, stream)
                assert kept is not None  # or the launch would have been made without
                addresses[slots.sums], addresses[slots.trip] = kept.addresses
            for launch in steps.launches:
                launch(stream, addresses)
            if fused and (bias is None or _fusable(bias, problem.n)):
                return launched(kernel, stream, addresses, torch.empty_like(out), bias)
            wide = launched(self.wide(), stream, addresses, torch.empty_like(wide_out), None)
            return self.room.epilogue(wide, problem, bias).contiguous()

        return product if batch else run


def _like(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor without memory of its own: `empty_like` of it takes less of the host than `empty`."""
    with torch.inference_mode(False):
        return torch.empty([1] * len(shape), dtype=dtype, device=device).expand(*shape)


def launched(kernel: Kernel, stream: int, addresses: list[int], out: Tensor, bias: Tensor | None) -> Tensor:
    """Return `out`, which the kernel writes; addresses: all but those of out, bias and the kernel's workspace."""
    addresses[OUT] = out.data_ptr()
    if bias is not None:
        addresses[BIAS] = bias.data_ptr()
    if kernel.counters is not None:
        partials = torch.empty(kernel.partial_bytes, dtype=torch.uint8, device=out.device)
        zeros = kernel.counters.on(stream)
        addresses[PARTIALS], addresses[COUNTERS] = partials.data_ptr(), zeros.data_ptr()
    kernel.launch(stream, addresses)
    return out


def _fusable(bias: Tensor, n: int) -> bool:
    return bool(bias.shape == (n,) and bias.is_contiguous() and bias.data_ptr() % 16 == 0)


def bind_kernel(
    problem: Problem,
    config: names.Config,
    operands: Operands,
    out: str,
    bias: str | None,
    activation: str | None,
) -> Kernel:
    """Return the product's kernel, compiled for the problem's device, which is current."""
    device = torch.device(problem.device)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    made = launches.multiplying(problem, config, operands, out, bias, activation, programs=programs, dependent=True)
    counters = Counters(made.counters, device) if made.counters else None
    return Kernel(_bound(made.step), 4 * made.floats, counters)


def lossless(problem: Problem, config: names.Config) -> Plan:
    """Return the product of 16-bit operands as they are; what TMA cannot read is copied first."""
    room, device = framework("torch"), torch.device(problem.device)
    index, out_dtype = device.index or 0, room.dtype(problem.out_dtype)
    shape, n = (*problem.batch, problem.m, problem.n), problem.n
    bound: dict[Any, Kernel] = {}

    def kernel_for(a: Tensor, b: Tensor, out: str, bias: str | None, activation: str | None) -> Kernel:
        key = a.shape, a.stride(), b.shape, b.stride(), out, bias, activation
        if (found := bound.get(key)) is None:
            left = launches.stand_in(OF_A.data, problem.a.dtype, a.shape, a.stride())
            right = launches.stand_in(OF_B.data, problem.b.dtype, b.shape, b.stride())
            found = bound[key] = bind_kernel(problem, config, Operands(left, right), out, bias, activation)
        return found

    def product(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
        if a.ndim > 2 and launches.entries(problem, problem.a) != math.prod(a.shape[:-2]):
            a = a.expand(*problem.batch, *a.shape[-2:])
        if b.ndim > 2 and launches.entries(problem, problem.b) != math.prod(b.shape[:-2]):
            b = b.expand(*problem.batch, *b.shape[-2:])
        left, right = _k_major(a), _k_major(b.mT)
        fused = launches.fuses(problem) and (bias is None or _fusable(bias, n))
        if fused:
            kernel = kernel_for(left, right, problem.out_dtype, problem.bias, problem.activation)
        else:
            kernel = kernel_for(left, right, "float32", None, None)
        out = torch.empty(shape, dtype=out_dtype if fused else torch.float32, device=device)
        addresses = [0] * SLOTS
        addresses[OF_A.data], addresses[OF_B.data] = left.data_ptr(), right.data_ptr()
        out = launched(kernel, _current_stream(index), addresses, out, bias if fused else None)
        finished: Tensor = out if fused else room.epilogue(out, problem, bias).contiguous()
        return finished

    return product


def _k_major(x: Tensor) -> Tensor:
    """Return (*batch, rows, k) as ([batch,] rows, k) that TMA can read: rows 16 bytes apart and aligned."""
    if x.ndim > 2:
        x = x.reshape(-1, *x.shape[-2:])
        x = x[0] if x.shape[0] == 1 else x
    step = 16 // x.element_size()
    strides = x.stride()
    if strides[-1] == 1 and all(stride and stride % step == 0 for stride in strides[:-1]) and x.data_ptr() % 16 == 0:
        return x
    k = x.shape[-1]
    padded = x.new_zeros((*x.shape[:-1], _up(k, step))) if k % step else x.new_empty(x.shape)
    padded[..., :k] = x
    return padded[..., :k]


def plan(problem: Problem, config: names.Config) -> Plan:
    """Return a callable that quantizes what is not quantized, multiplies, and adds bias and activation."""
    device = torch.device(problem.device)
    with torch.cuda.device(device):
        product = lossless(problem, config) if problem.recipe is None else ScaledProduct(problem, config).call()
    return on_device(device, product)
