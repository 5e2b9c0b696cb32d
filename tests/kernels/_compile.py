"""Compile Triton launches for an NVIDIA GPU that is not there: PTX, cubin, registers, no run."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class _AbsentGPU:
    """As much of a Triton driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are cached by device

    def get_current_stream(self, device: int) -> int:
        return device


@contextmanager
def compiling(capability: int) -> Iterator[list[Any]]:
    """Make each `kernel[grid](...)` inside compile for `capability` (90 for sm90); yield the list of what was built."""
    built: list[Any] = []
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        del warmup
        built.append(run(self, *args, grid=grid, warmup=True, **kwargs))
        return built[-1]

    driver.set_active(_AbsentGPU(capability))
    JITFunction.run = compile_only
    try:
        yield built
    finally:
        JITFunction.run = run
        driver._active = active


def _dumped(kernel: Any, option: str) -> str:
    cuobjdump = triton.knobs.nvidia.cuobjdump.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        return subprocess.run([cuobjdump, option, file.name], capture_output=True, text=True, check=True).stdout


def stack_bytes(kernel: Any) -> int:
    """Return the bytes of local memory a thread that ptxas gave the kernel: above 0 it spills."""
    text = _dumped(kernel, "-res-usage")
    return sum(int(part.split(":")[1]) for part in text.split() if part.startswith(("STACK:", "LOCAL:")))


def programs_by_registers(kernel: Any) -> int:
    """Return how many programs of a kernel the 65,536 registers of a multiprocessor hold; they come by 8 a thread."""
    found = re.search(r"REG:(\d+)", _dumped(kernel, "-res-usage"))
    assert found is not None
    return min(64, 65536 // (-(-int(found[1]) // 8) * 8 * 32)) // int(kernel.metadata.num_warps)


def sass(kernel: Any) -> str:
    """Return the machine code of a kernel as text."""
    return _dumped(kernel, "-sass")


def pairs_of_shifted_bytes(ptx: str) -> list[str]:
    """Return the FP8 pairs that PTX widens to a register by a shift and `mov.b32`.

    ptxas (of Triton 3.6, found on an H200) merges that with the conversion, and shifts what the register held before.
    """
    converted = re.findall(r"cvt\.rn\.satfinite\.e[45]m[23]x2\.f(?:32|16x2) (%rs\d+),", ptx)
    shifted = dict(re.findall(r"shr\.u16\s+(%rs\d+), (%rs\d+), 8;", ptx))
    pairs = re.findall(r"mov\.b32\s+%r\d+, \{(%rs\d+), (%rs\d+)\};", ptx)
    return [low for low, high in pairs if low in converted and shifted.get(high) == low]
