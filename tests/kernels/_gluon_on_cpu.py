"""Run the Hopper kernel's own text on a CPU: its partitions as threads, what Gluon gives it replaced by stand-ins.

Nothing asynchronous is done before it has to be, and nothing is left whole: a copy to shared memory spoils the place
when it is issued and fills it later; a wgmma reads its operands when it is waited for, a store by TMA its buffer. So a
wait, an arrival or a fence that is missing gives NaN, values that are wrong, or an end by `PATIENCE`.
"""

from __future__ import annotations

import operator
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from dispatch.kernels import gluon_gemm
from dispatch.kernels._triton_tile import Launch
from triton.runtime.jit import JITFunction

PATIENCE = 20.0
"""Seconds that a wait may take."""


class Int(int):
    """A scalar of 32 bits, or of 64 once cast; more than 32 bits hold wraps round."""

    wide = False

    def to(self, dtype: torch.dtype) -> Int:
        found = Int(self)
        found.wide = dtype is torch.int64
        return found

    @staticmethod
    def binary(name: str) -> Callable[[Any, Any], Any]:
        own = getattr(int, name)

        def method(self: Int, other: Any) -> Any:
            found = own(self, other)
            if found is NotImplemented:
                return found
            wide = self.wide or getattr(other, "wide", False)
            made = Int(found if wide else (found + 2**31) % 2**32 - 2**31)
            made.wide = wide
            return made

        return method


for _name in ("add", "sub", "mul", "floordiv", "mod"):
    for _side in ("", "r"):
        setattr(Int, f"__{_side}{_name}__", Int.binary(f"__{_side}{_name}__"))


class Value:
    """A tensor in registers."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self.type = SimpleNamespace(shape=list(data.shape), layout=None)

    def to(self, dtype: torch.dtype) -> Value:
        return Value(self.data.to(dtype))

    def reshape(self, *shape: int) -> Value:
        return Value(self.data.reshape(shape))

    def permute(self, *order: int) -> Value:
        return Value(self.data.permute(order))

    def split(self) -> tuple[Value, Value]:
        return Value(self.data[..., 0].clone()), Value(self.data[..., 1].clone())

    def __getitem__(self, index: Any) -> Value:
        return Value(self.data[index])

    def __neg__(self) -> Value:
        return Value(-self.data)


def _bare(x: Any) -> Any:
    return x.data if isinstance(x, Value) else int(x) if isinstance(x, Int) else x


def _pointwise(function: Callable[..., Any]) -> Callable[..., Value]:
    return lambda *given: Value(function(*map(_bare, given)))


for _name in ("add", "sub", "mul", "truediv", "lt", "and_"):
    _own = getattr(operator, _name)
    _plain = _name.rstrip("_")
    setattr(Value, f"__{_plain}__", _pointwise(_own))
    setattr(Value, f"__r{_plain}__", _pointwise(lambda x, y, own=_own: own(y, x)))


class Pointer:
    """An address of an array, and places behind it in elements."""

    def __init__(self, array: torch.Tensor, offset: Any = 0) -> None:
        self.array, self.offset = array, offset
        self.dtype = SimpleNamespace(element_ty=array.dtype)

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.array, self.offset + _bare(more))

    def places(self, mask: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the memory, where in it, and which of that is meant."""
        memory = torch.empty(0, dtype=self.array.dtype).set_(self.array.untyped_storage())
        at = torch.as_tensor(self.offset).long() + self.array.storage_offset()
        meant = torch.ones((), dtype=torch.bool) if mask is None else mask.data
        at, meant = torch.broadcast_tensors(at, meant)
        assert ((at >= 0) & (at < len(memory)))[meant].all(), "outside the array"
        return memory, at, meant


def _load(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Value:
    memory, at, meant = pointer.places(mask)
    return Value(torch.where(meant, memory[torch.where(meant, at, 0)], torch.tensor(other, dtype=memory.dtype)))


def _store(pointer: Pointer, value: Value, mask: Any = None) -> None:
    memory, at, meant = pointer.places(mask)
    memory[at[meant]] = value.data[meant]


class Shared:
    """A buffer in shared memory, or a part of one."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data, self.shape = data, list(data.shape)
        self.dtype = SimpleNamespace(primitive_bitwidth=8 * data.element_size())

    def index(self, at: int) -> Shared:
        assert 0 <= at < len(self.data)
        return Shared(self.data[at])

    def permute(self, order: Sequence[int]) -> Shared:
        return Shared(self.data.permute(*order))

    def _reinterpret(self, dtype: torch.dtype, shape: Sequence[int], layout: Any) -> Shared:
        return Shared(self.data.view(dtype).reshape(shape))

    def load(self, layout: Any) -> Value:
        return Value(self.data.clone())

    def store(self, value: Value) -> None:
        _own.fenced = False
        self.data.copy_(value.data)

    def spoil(self) -> None:
        self.data.view(torch.uint8).fill_(0xFF)


_own = threading.local()
"""What belongs to a thread: wgmmas and stores under way, whether it fenced what it wrote."""


class Barrier:
    """An mbarrier: a phase ends when as many arrived as it counts, and all bytes that were announced."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.left = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        self.count = self.left = count

    def arrive(self, count: int = 1, expected: int = 0, copied: int = 0) -> None:
        with self.changed:
            self.left -= count
            self.bytes += expected - copied
            assert self.left >= 0, "more arrived than the barrier counts"
            if self.left == 0 and self.bytes == 0:
                self.left, self.phase = self.count, self.phase + 1
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE), "nobody arrives"


class Wgmma:
    """A product under way; its operands are read when it ends."""

    def __init__(self, a: Shared, b: Shared, before: Any, use_acc: bool) -> None:
        self.operands, self.before, self.done = (a, b), before if use_acc else None, False
        self.value: Value | None = None
        _own.products.append(self)

    def end(self) -> None:
        a, b = (x.data.float() for x in self.operands)
        before = self.before.value if isinstance(self.before, Wgmma) else self.before
        product = a @ b
        self.value, self.done = Value(product if before is None else before.data + product), True


def _wait(num_outstanding: int, deps: tuple[Any]) -> Any:
    while len(_own.products) > num_outstanding:
        _own.products.pop(0).end()
    (dep,) = deps
    return dep.value if isinstance(dep, Wgmma) and dep.done else dep


class _Copies:
    """The copies of one program that were issued, done one by one in any order by a thread."""

    def __init__(self) -> None:
        self.changed, self.waiting, self.over = threading.Condition(), list[Callable[[], None]](), False
        self.thread = threading.Thread(target=self.work, daemon=True)
        self.thread.start()

    def add(self, copy: Callable[[], None]) -> None:
        with self.changed:
            self.waiting.append(copy)
            self.changed.notify()

    def work(self) -> None:
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.waiting or self.over)
                if not self.waiting:
                    return
                copy = self.waiting.pop(random.randrange(len(self.waiting)))
            copy()

    def end(self) -> None:
        with self.changed:
            self.over = True
            self.changed.notify()
        self.thread.join()


def _box(descriptor: Any, first: Sequence[int]) -> tuple[torch.Tensor, tuple[slice, ...]]:
    """Return the part of the array that a box from `first` on covers, and which part of the box that is."""
    base = descriptor.base
    size = base.element_size()
    assert base.data_ptr() % 16 == 0
    assert all(step * size % 16 == 0 for step in descriptor.strides[:-1])
    whole = base.as_strided(descriptor.shape, descriptor.strides)
    ends = [min(at + box, extent) for at, box, extent in zip(first, descriptor.block_shape, whole.shape, strict=True)]
    part = whole[tuple(slice(at, max(at, end)) for at, end in zip(first, ends, strict=True))]
    return part, tuple(slice(0, extent) for extent in part.shape)


class _Program:
    """One program of the grid: what its partitions share."""

    def __init__(self, index: int, programs: int) -> None:
        self.index, self.programs, self.copies = index, programs, _Copies()
        self.waited = False

    def load(self, descriptor: Any, first: Sequence[int], barrier: Barrier, target: Shared) -> None:
        assert self.waited, "memory is read before the kernel before it has ended"
        assert list(target.data.shape) == list(descriptor.block_shape)
        target.spoil()

        def copy() -> None:
            part, inside = _box(descriptor, first)
            box = torch.zeros(tuple(descriptor.block_shape), dtype=part.dtype)
            box[inside] = part
            target.data.copy_(box)
            barrier.arrive(0, copied=box.numel() * box.element_size())

        self.copies.add(copy)

    def store(self, descriptor: Any, first: Sequence[int], buffer: Shared) -> None:
        assert _own.fenced, "what was written to shared memory is not fenced"

        def copy() -> None:
            part, inside = _box(descriptor, first)
            part.copy_(buffer.data[inside])

        _own.stores.append(copy)

    def specialize(self, partitions: Sequence[tuple[Any, Any]], warps: Any, registers: Any) -> None:
        assert len(partitions) == len(warps) + 1 == len(registers) + 1
        failures: list[BaseException] = []

        def work(function: Any, arguments: Any) -> None:
            _own.products, _own.stores, _own.fenced = [], [], True
            try:
                function(*arguments)
                assert not _own.products, "a product is not waited for"
                assert not _own.stores, "a store is not waited for"
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=partition, daemon=True) for partition in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(2 * PATIENCE)
        if failures:
            raise failures[0]
        assert not any(thread.is_alive() for thread in threads), "a partition does not end"

    def asm(self, text: str, constraints: str, given: Sequence[Value], **options: Any) -> Any:
        if text.startswith("griddepcontrol.wait"):
            self.waited = True
        return given[0] if given else None


def _gluon(program: _Program) -> dict[str, Any]:
    """Return the stand-ins for what the kernel's module imports from Gluon."""

    def allocate(dtype: Any, shape: Sequence[int], layout: Any) -> Any:
        if layout == "mbarrier":
            barriers = [Barrier() for _ in range(shape[0])]
            return SimpleNamespace(index=lambda at: barriers[_within(at, shape[0])])
        buffer = Shared(torch.empty(tuple(shape), dtype=dtype))
        buffer.spoil()
        return buffer

    def fence() -> None:
        _own.fenced = True

    def store_wait(pending: int) -> None:
        assert pending == 0
        while _own.stores:
            _own.stores.pop(0)()

    def where(condition: Value, x: Any, y: Any) -> Value:
        return Value(torch.where(condition.data, _bare(x), _bare(y)))

    def arange(first: int, end: int, layout: Any) -> Value:
        return Value(torch.arange(first, end, dtype=torch.int32))

    def arrive(bar: Barrier, count: int, pred: Any = True) -> None:
        if pred:
            bar.arrive(count)

    gl = SimpleNamespace(
        float32=torch.float32,
        int64=torch.int64,
        int32=torch.int32,
        program_id=lambda axis: Int(program.index),
        num_programs=lambda axis: Int(program.programs),
        cdiv=lambda x, y: Int(-(-int(x) // int(y))),
        minimum=lambda x, y: Int(min(x, y)),
        static_range=range,
        zeros=lambda shape, dtype, layout: Value(torch.zeros(shape, dtype=dtype)),
        arange=arange,
        where=where,
        exp=_pointwise(torch.exp),
        erf=_pointwise(torch.erf),
        load=_load,
        store=_store,
        allocate_shared_memory=allocate,
        warp_specialize=program.specialize,
        inline_asm_elementwise=program.asm,
        SliceLayout=lambda dim, parent: None,
        NVMMADistributedLayout=lambda **options: None,
        SwizzledSharedLayout=lambda *options: None,
    )
    return {
        "gl": gl,
        "mbarrier": SimpleNamespace(
            MBarrierLayout=lambda: "mbarrier",
            init=lambda bar, count: bar.init(count),
            expect=lambda bar, size: bar.arrive(1, expected=size),
            wait=lambda bar, parity: bar.wait(int(parity)),
            arrive=arrive,
        ),
        "tma": SimpleNamespace(
            async_copy_global_to_shared=program.load,
            async_copy_shared_to_global=program.store,
            store_wait=store_wait,
        ),
        "fence_async_shared": fence,
        "warpgroup_mma": lambda a, b, acc, use_acc, is_async: Wgmma(a, b, acc, use_acc),
        "warpgroup_mma_init": lambda acc: acc,
        "warpgroup_mma_wait": _wait,
    }


def _within(at: int, count: int) -> int:
    assert 0 <= at < count
    return at


def _argument(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        return Pointer(x)
    if type(x) is int:
        return Int(x)
    if getattr(x, "block_shape", None) is not None:
        # The kernel makes buffers of the descriptor's dtype, and asks for its bits.
        dtype = x.base.dtype
        return SimpleNamespace(
            base=x.base, shape=x.shape, strides=x.strides, block_shape=x.block_shape, dtype=_DType(dtype), layout=None
        )
    return x


class _DType:
    """A dtype as a descriptor names it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype, self.primitive_bitwidth = dtype, 8 * dtype.itemsize


def run(grid: Sequence[int], arguments: Sequence[Any]) -> None:
    """Run `gemm_kernel[grid](*arguments)`, arrays and what descriptors stand over being torch tensors on the CPU."""
    kept = dict(vars(gluon_gemm))
    for index in range(grid[0]):
        program = _Program(index, grid[0])
        fakes = _gluon(program)
        allocate = fakes["gl"].allocate_shared_memory
        fakes["gl"].allocate_shared_memory = lambda dtype, *rest, own=allocate: own(
            getattr(dtype, "dtype", dtype), *rest
        )
        functions = {name: x.fn for name, x in kept.items() if isinstance(x, JITFunction)}
        vars(gluon_gemm).update(functions | fakes)
        try:
            gluon_gemm.gemm_kernel(*map(_argument, arguments))
        finally:
            vars(gluon_gemm).update(kept)
            program.copies.end()


@contextmanager
def on_the_cpu() -> Iterator[None]:
    """Let launches of the Hopper kernel run here; others as they would."""
    launch_run = Launch.run

    def run_here(self: Launch) -> None:
        if self.kernel is gluon_gemm.gemm_kernel:
            run(self.grid, self.args)
        else:
            launch_run(self)

    Launch.run = run_here  # type: ignore[method-assign]
    try:
        yield
    finally:
        Launch.run = launch_run  # type: ignore[method-assign]
