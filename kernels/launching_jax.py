"""Launch a Triton or Gluon kernel from JAX: compiled here, run by the custom call that JAX's CUDA plugin brings along.

The custom call takes a kernel as PTX, and pointers, numbers and TMA descriptors for its parameters; buffers are handed
to pointers and descriptors in the order of the parameters, results last. Kernels write to a parameter in their midst,
so the parameters of the PTX are put in another order: its body names them. Nothing is launched beside the kernel before
it: `griddepcontrol.wait` then waits for nothing.

The launch is an XLA operation of its own: it can be jitted and scanned. vmap makes a loop of it, and it has no
derivative.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import jax
from dispatch.kernels.launching import Array
from jax._src.lib import gpu_triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.compiler import compile as compile_source
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime.jit import create_function_from_signature

TARGET = "triton_kernel_call_ffi"
HOST_TYPES = {8: 10, 9: 8, 10: 9}
"""What the driver's interface calls a descriptor's element type, where the device's number is another."""
ALIGNMENT = 16
"""Bytes: XLA aligns its buffers to more, and kernels are compiled for addresses that are multiples of this."""
_compiled: dict[Any, Any] = {}


class Bound(NamedTuple):
    """One launch, ready for any addresses: the serialized kernel, and the slots of its operands and results."""

    call: bytes
    operands: tuple[int, ...]
    results: tuple[int, ...]

    def run(self, arrays: Mapping[int, Any], results: Mapping[int, jax.ShapeDtypeStruct]) -> list[Any]:
        """Return what the kernel writes, in the order of `results`; arrays and results: by slot."""
        shapes = [results[slot] for slot in self.results]
        call = jax.ffi.ffi_call(TARGET, shapes, vmap_method="sequential")
        return list(call(*(arrays[slot] for slot in self.operands), opaque=self.call))


def bind(
    kernel: Any,
    grid: Sequence[int],
    arguments: Sequence[Any],
    options: Mapping[str, Any],
    *,
    capability: int,
    results: Collection[int],
    zeroed: Mapping[int, int] | None = None,
) -> Bound:
    """Compile `kernel` and return its launch.

    arguments: in the kernel's order, with an Array, or a tensor descriptor over one, for everything in memory.
    capability: the GPU's, 90 for sm90. results: the slots that the kernel writes to; all others are operands. zeroed:
    the bytes of results that are set to zero before each launch. A result that is described and pointed to is written
    by its descriptor: the pointer is null. Raises what Triton raises for a kernel that it cannot compile.
    """
    compiled, types = _compile(kernel, arguments, options, capability)
    facts = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
    entries: list[_Parameter] = []
    for argument, kind in zip(arguments, types.values(), strict=False):  # what options give after them is constant
        if kind.startswith("tensordesc"):
            entries += _described(argument, next(facts))
        elif isinstance(argument, Array):
            entries.append(_pointed(argument.slot, (zeroed or {}).get(argument.slot, 0)))
        elif kind != "constexpr":
            entries.append(_Parameter(None, gpu_triton.create_scalar_parameter(argument, kind)))
    entries = _once(entries, results)
    order = sorted(range(len(entries)), key=lambda i: (entries[i].slot in results, i))
    metadata = compiled.metadata
    ptx = reordered(compiled.asm["ptx"], order)
    code = gpu_triton.TritonKernel(metadata.name, metadata.num_warps, 1, metadata.shared, ptx, "", capability)
    parameters = [entries[i].value for i in order]
    call = gpu_triton.TritonKernelCall(code, *(*grid, 1, 1)[:3], parameters)
    slots = [slot for i in order if (slot := entries[i].slot) is not None]
    return Bound(
        zlib.compress(call.to_proto(metadata.name, b"")),
        tuple(slot for slot in slots if slot not in results),
        tuple(slot for slot in slots if slot in results),
    )


class _Parameter(NamedTuple):
    """One parameter of the PTX: the slot of its buffer, None for a number."""

    slot: int | None
    value: Any
    pointer: bool = False


def _pointed(slot: int, zeroed: int) -> _Parameter:
    return _Parameter(slot, gpu_triton.create_array_parameter(zeroed, ALIGNMENT), True)


def _described(argument: Any, facts: Mapping[str, Any]) -> list[_Parameter]:
    """Return the parameters of a tensor descriptor: itself, its extents and its strides in elements."""
    shape, strides = [int(x) for x in argument.shape], [int(x) for x in argument.strides]
    kind = facts["elem_type"]
    own = {
        "elem_type": HOST_TYPES.get(kind, kind),
        "swizzle": facts["swizzle"],
        "shape": shape,
        "strides": strides,
        "block_shape": list(facts["block_size"]),
        "oob_fill": int(argument.padding == "nan"),
    }
    if "elem_size_bytes" in (gpu_triton.create_tma_descriptor_parameter.__doc__ or ""):  # jaxlib after 0.11.2
        own["elem_size_bytes"] = facts["elem_size"]
    numbers = [(x, "i32") for x in shape] + [(x, "i64") for x in strides]
    return [
        _Parameter(argument.base.slot, gpu_triton.create_tma_descriptor_parameter(**own)),
        *(_Parameter(None, gpu_triton.create_scalar_parameter(x, kind)) for x, kind in numbers),
    ]


def _once(entries: Sequence[_Parameter], results: Collection[int]) -> list[_Parameter]:
    """Return the parameters with a null pointer for a result that has a descriptor: a buffer is handed over once."""
    described = {x.slot for x in entries if x.slot in results and not x.pointer}
    null = _Parameter(None, gpu_triton.create_scalar_parameter(0, "u64"))
    return [null if x.pointer and x.slot in described else x for x in entries]


def _compile(kernel: Any, arguments: Sequence[Any], options: Mapping[str, Any], capability: int) -> tuple[Any, Any]:
    """Return the compiled kernel and the type of each of its parameters, `constexpr` for constants.

    Triton's own call would ask the driver for a current device, and that torch.
    """
    target, backend = _target(capability)
    binder = create_function_from_signature(kernel.signature, kernel.params, backend)
    given = {"debug": False, "instrumentation_mode": "", **options}
    bound, specialization, _ = binder(*arguments, **given)
    key = kernel, capability, str(specialization), str(options)
    if (found := _compiled.get(key)) is None:
        parsed, signature, constants, attributes = kernel._pack_args(backend, given, bound, specialization, None)
        source_of = GluonASTSource if kernel.is_gluon() else ASTSource
        source = source_of(kernel, signature, constants, attributes)
        found = _compiled[key] = compile_source(source, target=target, options=parsed.__dict__), signature
    return found


@cache
def _target(capability: int) -> tuple[GPUTarget, Any]:
    target = GPUTarget("cuda", capability, 32)
    return target, make_backend(target)


_ENTRY = re.compile(r"(\.entry\s+\S+?\()(.*?)(\n?\))", re.DOTALL)


def reordered(ptx: str, order: Sequence[int]) -> str:
    """Return PTX whose one entry takes its first parameters in another `order`; those after them stay last.

    order: which old parameter stands at each new place. Raises ValueError where PTX has fewer parameters, or no entry.
    """
    found = _ENTRY.search(ptx)
    if found is None:
        raise ValueError("PTX without an entry that has parameters")
    old = [part.strip() for part in found[2].split(",\n")]
    if len(old) < len(order):
        raise ValueError(f"PTX with {len(old)} parameters where {len(order)} are passed: {old}")
    new = [*(old[i] for i in order), *old[len(order) :]]
    return ptx[: found.start(2)] + "\n\t" + ",\n\t".join(new) + ptx[found.end(2) :]
