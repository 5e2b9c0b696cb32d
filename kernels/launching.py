"""Launch a compiled Triton kernel without the JIT's binding of arguments: only addresses change from call to call.

That binding takes the host several times as long as the launch itself. What is here leans on the launcher that Triton
3.6 builds for each signature; where that is not found, the JIT is called. Kernels may be of Triton or Gluon. Nothing
here imports a framework.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import triton

KNOWN = "3.6."
"""Versions of Triton whose launcher is called directly."""
MAPS_KEPT = 64
"""Encoded tensor maps that one argument keeps, by address: an allocator's addresses recur."""

Bound = Callable[[int, Sequence[int]], None]
"""launch(stream, addresses): the stream's handle, and the address for each slot."""


class Array:
    """An array known up to its address: which of a call's addresses, Triton's dtype, shape, strides in elements.

    It stands in for the array where a launch is put together.
    """

    def __init__(
        self, slot: int, dtype: Any, shape: Sequence[int], strides: Sequence[int] | None = None, address: int = 0
    ) -> None:
        self.slot, self.dtype, self.shape, self.address = slot, dtype, tuple(shape), address
        self.strides = _contiguous(self.shape) if strides is None else tuple(strides)

    def stride(self, axis: int | None = None) -> Any:
        """Return all strides or one."""
        return self.strides if axis is None else self.strides[axis]

    @property
    def ndim(self) -> int:
        """How many axes it has."""
        return len(self.shape)

    def element_size(self) -> int:
        """Return the bytes of an element."""
        return int(self.dtype.primitive_bitwidth) // 8

    def data_ptr(self) -> int:
        """Return the address; 0, the best aligned, where it is not known."""
        return self.address

    def at(self, address: int) -> Array:
        """Return it with its address."""
        return Array(self.slot, self.dtype, self.shape, self.strides, address)


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides[: len(shape)]))


def bind(kernel: Any, grid: Sequence[int], arguments: Sequence[Any], options: Mapping[str, Any]) -> Bound:
    """Compile `kernel` for the current device and return what launches it there.

    arguments: in the kernel's order, with an Array, or a tensor descriptor over one, for everything in memory.
    Addresses must be multiples of 16. What is launched reads memory when it runs: keep it alive in stream order.
    """
    if not triton.__version__.startswith(KNOWN):
        return _through_jit(kernel, grid, arguments, options)
    compiled = kernel.warmup(*arguments, grid=tuple(grid), **options)
    compiled._init_handles()
    # The launcher wants every argument by position, constants too.
    named = list(kernel.signature.parameters.values())[len(arguments) :]
    arguments = [*arguments, *(options.get(x.name, x.default) for x in named)]
    options = {key: value for key, value in options.items() if key not in {x.name for x in named}}
    found = _raw_launcher(compiled)
    if found is None:
        return _through_jit(kernel, grid, arguments, options)
    return _raw(kernel, grid, arguments, options, compiled, *found)


def _placed(argument: Any, addresses: Sequence[int]) -> Any:
    if isinstance(argument, Array):
        return argument.at(addresses[argument.slot])
    if isinstance(getattr(argument, "base", None), Array):
        return dataclasses.replace(argument, base=argument.base.at(addresses[argument.base.slot]))
    return argument


def _through_jit(kernel: Any, grid: Sequence[int], arguments: Sequence[Any], options: Mapping[str, Any]) -> Bound:
    def call(stream: int, addresses: Sequence[int]) -> None:
        del stream  # Triton asks its driver, and that the framework
        kernel[tuple(grid)](*[_placed(argument, addresses) for argument in arguments], **options)

    return call


def _raw(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    compiled: Any,
    launch: Any,
    facts: Sequence[Any],
) -> Bound:
    run = compiled.run
    template: list[Any] = [*(*grid, 1, 1)[:3], 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl]
    template += [None, None, compiled.packed_metadata, None, None, None]
    pointers: list[tuple[int, int]] = []
    maps: list[tuple[int, int, dict[int, Any], Callable[[int], Any]]] = []
    for argument in arguments:
        base = getattr(argument, "base", None)
        if isinstance(base, Array):
            maps.append((len(template), base.slot, {}, _encoder(argument, facts[len(maps)])))
            template += [None, *argument.shape, *argument.strides]
        elif isinstance(argument, Array):
            pointers.append((len(template), argument.slot))
            template.append(0)
        else:
            template.append(argument)
    entering, leaving = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
    hooked = _through_jit(kernel, grid, arguments, options)

    def call(stream: int, addresses: Sequence[int]) -> None:
        if entering.calls or leaving.calls:  # a profiler is looking on
            hooked(stream, addresses)
            return
        values = template.copy()
        values[3] = stream
        for index, slot in pointers:
            values[index] = addresses[slot]
        for index, slot, kept, encode in maps:
            address = addresses[slot]
            encoded = kept.get(address)
            if encoded is None:
                if len(kept) >= MAPS_KEPT:
                    kept.clear()
                encoded = kept[address] = encode(address)
            values[index] = encoded
        launch(*values)

    return call


def _encoder(argument: Any, facts: Any) -> Callable[[int], Any]:
    from triton.backends.nvidia import driver  # noqa: PLC0415 - this module loads where there is no GPU

    def encode(address: int) -> Any:
        placed = dataclasses.replace(argument, base=argument.base.at(address))
        return driver.make_tensordesc_arg(placed, facts)[0]

    return encode


def _raw_launcher(compiled: Any) -> tuple[Any, list[Any]] | None:
    """Return the C launcher of a compiled kernel and the facts of its tensor maps, or None if Triton has others."""
    try:
        run = compiled.run
        if run.global_scratch_size or run.profile_scratch_size:
            return None
        if not inspect.isfunction(run.launch):
            return run.launch, []
        inner = inspect.getclosurevars(run.launch).nonlocals
        facts = list(inner["tensordesc_meta"])
        return None if None in facts else (inner["launcher"], facts)
    except (AttributeError, KeyError, TypeError):
        return None
