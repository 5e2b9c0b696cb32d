"""GEMM kernels of our own in Triton and Gluon: FP8 with every recipe, and 16-bit products that cuBLAS is slow at.

On sm90 operands and results move by TMA and warps are specialized; sm100, sm103 and sm120 run the kernels of plain
Triton, sm89 those without TMA. Only sm90 was measured; the others are compiled in the tests. JAX launches the FP8
kernels, without MX scales, as operations of the jitted program.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

from dispatch.plugins import _triton_configs as names
from dispatch.plugins._fp8 import JAX_TRITON, operand_rejections, version_of

from dispatch import (
    Capability,
    Decision,
    Plan,
    Problem,
    RecipePair,
    Rejection,
    ScalingRecipe,
    closest,
    framework_of,
    hookimpl,
)

_HOPPER = ("sm90",)
_OTHERS = ("sm89", "sm100", "sm103", "sm120", "sm121")
_BLACKWELL = ("sm100", "sm103", "sm120", "sm121")
_FLOATS = ("bfloat16", "float16", "float32")
_SIXTEEN_BIT = ("bfloat16", "float16")
_FORMATS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
_WHOLE = tuple(RecipePair.parse(f"{a}:{x}@{b}:{x}") for x in ("row", "tensor") for a, b in _FORMATS)
_BLOCKS = tuple(RecipePair.parse(x) for x in ("e4m3:1x128@e4m3:128x128", "e4m3:128x128", "e4m3:64x64", "e4m3:32x32"))
_MX = tuple(RecipePair.parse(f"{a}:1x32:e8m0@{b}:1x32:e8m0") for a, b in _FORMATS)
LEAST_TRITON = (3, 6)
JAX_DESCRIPTORS = (0, 11, 1)
"""The first jaxlib whose custom call encodes TMA descriptors."""
ODD = 8
"""n and k that are all multiples of this are left to cuBLAS where nothing is quantized: it is as fast there."""


def _fp8(
    archs: Sequence[str], recipes: Sequence[RecipePair], frameworks: Sequence[str] = ("torch", "jax"), **limits: Any
) -> Capability:
    values = {"accumulations": ("fast", "promoted"), **limits}
    return Capability(
        frameworks=tuple(frameworks),
        archs=tuple(archs),
        recipes=tuple(recipes),
        dtypes=(*_FLOATS, "float8_e4m3fn", "float8_e5m2"),
        out_dtypes=_FLOATS,
        status="measured" if tuple(archs) == _HOPPER else "compiled",
        **values,
    )


def _sixteen_bit(archs: Sequence[str]) -> Capability:
    status = "measured" if tuple(archs) == _HOPPER else "compiled"
    return Capability(("torch",), tuple(archs), _SIXTEEN_BIT, _FLOATS, status=status)


CAPABILITIES = (
    _fp8(_HOPPER, _WHOLE),
    _fp8(_HOPPER, _BLOCKS, accumulations=("promoted",), batched=False),
    _sixteen_bit(_HOPPER),
    _fp8(_OTHERS, _WHOLE),
    _fp8(_OTHERS, _BLOCKS, accumulations=("promoted",), batched=False),
    _fp8(_BLACKWELL, _MX, ("torch",), accumulations=("fast",), batched=False),
    _sixteen_bit(_OTHERS),
)


class TritonBackend:
    """FP8 by tensor, row, block and MX scales; 16-bit products of odd sizes without loss."""

    name = "triton_tma_fp8"
    capabilities: Sequence[Capability] = CAPABILITIES

    def rejections(self, problem: Problem) -> list[Rejection]:
        """Return every reason why it cannot run the problem with its recipe."""
        here = [x for x in CAPABILITIES if problem.framework in x.frameworks]
        if not here:
            return [Rejection("framework", problem.framework, "torch or jax")]
        if not any(x.runs_on(problem.arch) for x in CAPABILITIES):
            return [
                Rejection("arch", problem.arch, "sm89, sm90, sm100, sm103, sm120 or sm121: a GPU with FP8 tensor cores")
            ]
        able = [x for x in here if problem.recipe in x.recipes]
        if not able:
            known = dict.fromkeys(str(recipe or "none") for x in here for recipe in x.recipes)
            return [Rejection("recipe", str(problem.recipe), ", ".join(known))]
        fitting = [x for x in able if x.runs_on(problem.arch)]
        found = closest(fitting or able, problem)
        if problem.empty:
            found.append(Rejection("size", f"m={problem.m}, n={problem.n}, k={problem.k}", "at least one of each"))
        if (reason := _triton_rejection()) is not None:
            found.append(reason)
        elif problem.framework == "jax":
            found += _jax_rejections(problem)
        if (pair := problem.recipe) is None:
            return found + _plain_rejections(problem)
        for side, operand, recipe in (("a", problem.a, pair.a), ("b", problem.b, pair.b)):
            found += operand_rejections(side, operand, recipe)
            if (operand.prepared or operand.encoded) and math.prod(operand.batch) not in (1, math.prod(problem.batch)):
                found.append(Rejection(f"batch of {side}", str(operand.batch), f"none, or {problem.batch}"))
        modes = dict.fromkeys(mode for x in fitting for mode in x.accumulations)
        if problem.accumulation is not None and modes and problem.accumulation not in modes:
            found.append(Rejection("accumulation", problem.accumulation, ", ".join(modes)))
        return found

    def configs(self, problem: Problem) -> list[str]:
        """Return the names of the configs worth measuring, the likeliest first; none where it cannot run at all."""
        return [] if self.rejections(problem) else [str(config) for config in names.configs(problem)]

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return a matrix quantized, K-major, as the kernels take it: an `Encoded` of its framework."""
        room = framework_of(operand)
        if room is not None and room.name == "jax":
            from dispatch.plugins._quantize_jax import prepare

            return prepare(operand, recipe, axis, str(room.arch(operand)))
        from dispatch.plugins._triton_torch import encode

        return encode(operand, recipe, axis)

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product's callable. Raises ValueError for a config that is none, or none of the problem's."""
        able = names.configs(problem)
        chosen = able[0] if config is None else names.Config.parse(config)
        if chosen not in able:
            known = ", ".join(map(str, able))
            raise ValueError(f"triton_tma_fp8: config {config} is not for {problem}; its configs are {known}")
        if problem.framework == "jax":
            from dispatch.plugins._triton_jax import plan as jax_plan

            return jax_plan(problem, chosen)
        from dispatch.plugins._triton_torch import plan

        return plan(problem, chosen)


def _plain_rejections(problem: Problem) -> list[Rejection]:
    found = operand_rejections("a", problem.a, None) + operand_rejections("b", problem.b, None)
    if problem.n % ODD == 0 and problem.k % ODD == 0:
        sizes = f"n={problem.n}, k={problem.k}, multiples of {ODD}"
        found.append(Rejection("size", sizes, "an odd n or k: without quantizing cuBLAS is as fast at others"))
    return found


def _triton_rejection() -> Rejection | None:
    version = version_of("triton")
    if not version:
        return Rejection("triton", "not installed", "triton >= 3.6: pip install gemm-dispatch[triton]")
    if version[:2] < LEAST_TRITON:
        return Rejection("triton", _text(version), "triton >= 3.6")
    if _on("TRITON_INTERPRET"):
        found = os.environ["TRITON_INTERPRET"]
        return Rejection("TRITON_INTERPRET", found, "compiled kernels; the interpreter is for the kernels' own tests")
    return None


def _jax_rejections(problem: Problem) -> list[Rejection]:
    """Return what is missing for launches from JAX: its own custom call makes them, so no other package is needed."""
    found = []
    triton, jaxlib = version_of("triton"), version_of("jaxlib")
    if triton[:2] != JAX_TRITON:
        found.append(Rejection("triton", _text(triton), "triton 3.6 for launches from JAX"))
    if problem.arch != "sm89" and jaxlib < JAX_DESCRIPTORS:
        found.append(Rejection("jaxlib", _text(jaxlib), "jaxlib >= 0.11.1, whose Triton calls take TMA descriptors"))
    return found


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version)) or "not installed"


def _on(name: str) -> bool:
    """Return whether an environment variable says yes as Triton understands it."""
    return os.environ.get(name, "").lower() in ("1", "true", "yes", "on", "y")


@hookimpl
def dispatch_backends() -> list[TritonBackend]:
    """Return the backend."""
    return [TritonBackend()]


@hookimpl
def dispatch_decided(decision: Decision) -> None:
    """With TRITON_PRINT_AUTOTUNING=1, which Triton has for its own autotuner, print what was tried and what won."""
    if _on("TRITON_PRINT_AUTOTUNING"):
        for line in tuned(decision):
            print(line)


def tuned(decision: Decision) -> list[str]:
    """Return a line for each recipe: how many configs were measured for the problem, and the fastest."""
    found: dict[str, list[tuple[float, str]]] = {}
    for verdict in decision.candidates:
        candidate, measured = verdict.candidate, verdict.measurement
        if candidate.backend == TritonBackend.name and candidate.config and measured is not None:
            kind = f"{candidate.recipe}/{candidate.accumulation}" if candidate.recipe else "lossless"
            found.setdefault(kind, []).append((measured.latency_us, candidate.config))
    return [
        f"Triton autotuning for {decision.problem}, {kind}: best of {len(times)} configs: "
        f"{min(times)[1]}, {min(times)[0]:.1f} us"
        for kind, times in found.items()
    ]
