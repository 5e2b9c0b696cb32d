"""The vendor's library on CUDA: FP8 products with scales through cuBLAS and CUTLASS, and the framework's own product.

torch: `torch._scaled_mm`. JAX: an FP8 `dot_general`, which XLA gives to cuBLASLt; MX scales on Blackwell. What torch
takes where was read in its sources (aten/src/ATen/native/cuda/ScaledBlas.cpp and RowwiseScaledMM.cu, 2.9 to 2.13) and
measured on sm90.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from dispatch.plugins._fp8 import operand_rejections

from dispatch import (
    FP8_DTYPES,
    Arch,
    Capability,
    Plan,
    Problem,
    RecipePair,
    Rejection,
    ScalingRecipe,
    closest,
    framework_of,
    hookimpl,
    native,
)

_HOPPER = ("sm90",)
_OTHERS = ("sm89", "sm100", "sm103", "sm120", "sm121")
_BLACKWELL = ("sm100", "sm103")
_FLOATS = ("bfloat16", "float16", "float32")
_ACCUMULATIONS = ("fast", "promoted")
_BLOCKS = RecipePair.parse("e4m3:1x128@e4m3:128x128")
_ROWS = RecipePair.parse("e4m3:row")
_TENSORS = tuple(
    RecipePair.parse(f"{a}:tensor@{b}:tensor") for a, b in (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
)
_MX = RecipePair.parse("e4m3:1x32:e8m0")
_NEEDS_CUDA_12_9 = (_ROWS, _BLOCKS)  # cuBLAS scales by row and block from then on


def _fp8(frameworks: Sequence[str], archs: Sequence[str], recipes: Sequence[RecipePair], **limits: Any) -> Capability:
    values = {"out_dtypes": _FLOATS, "accumulations": _ACCUMULATIONS, **limits}
    return Capability(
        frameworks=tuple(frameworks),
        archs=tuple(archs),
        recipes=tuple(recipes),
        batched=False,
        dtypes=(*_FLOATS, "float8_e4m3fn", "float8_e5m2"),
        status="measured" if tuple(archs) == _HOPPER else "compiled",
        **values,
    )


CAPABILITIES = (
    Capability(
        frameworks=("torch", "jax"), archs=("sm*",), dtypes=("float64", *_FLOATS), out_dtypes=("float64", *_FLOATS)
    ),
    _fp8(("torch",), _HOPPER, (*_TENSORS, _ROWS)),
    _fp8(("torch",), _HOPPER, (_BLOCKS,), accumulations=("promoted",)),
    _fp8(("torch",), _OTHERS, _TENSORS),
    # CUTLASS, not cuBLAS: until torch 2.11 it stores bfloat16 alone, which leaves no float32 for an epilogue.
    _fp8(("torch",), _OTHERS, (_ROWS,), out_dtypes=("bfloat16",), bias=False, activations=()),
    # XLA pads other sizes behind our back, and multiplies vectors and tiny matrices in FP8 itself: on an H200 with jax
    # 0.11.2 that was wrong by 2.4% at m = 1 and not finite at tiny odd sizes.
    _fp8(("jax",), _HOPPER, (*_TENSORS, _ROWS), multiple_of=(16, 16, 16)),
    _fp8(("jax",), _OTHERS, (*_TENSORS, _ROWS), multiple_of=(16, 16, 16)),
    # jax.nn.scaled_matmul, by cuDNN. Elsewhere XLA decodes and multiplies in float32.
    _fp8(("jax",), _BLACKWELL, (_MX,), accumulations=("fast",), multiple_of=(128, 128, 128)),
)


class CublasBackend:
    """FP8 by tensor, row and block scales; for unquantized operands the framework's own product."""

    name = "cublas"
    capabilities: Sequence[Capability] = CAPABILITIES

    def rejections(self, problem: Problem) -> list[Rejection]:
        """Return every reason why it cannot run the problem with its recipe."""
        here = [x for x in CAPABILITIES if problem.framework in x.frameworks]
        if not here:
            return [Rejection("framework", problem.framework, "torch or jax")]
        if not problem.arch.startswith("sm"):
            return [Rejection("arch", problem.arch, "an NVIDIA GPU")]
        able = [x for x in here if problem.recipe in x.recipes]
        if not able:
            known = dict.fromkeys(str(recipe or "none") for x in here for recipe in x.recipes)
            return [Rejection("recipe", str(problem.recipe), ", ".join(known))]
        fitting = [x for x in able if all(reason.subject != "arch" for reason in x.rejections(problem))]
        found = [_with_compute_capability(x, able) for x in closest(fitting or able, problem)]
        if problem.empty:
            found.append(Rejection("size", f"m={problem.m}, n={problem.n}, k={problem.k}", "at least one of each"))
        if (pair := problem.recipe) is None:
            return found + operand_rejections("a", problem.a, None) + operand_rejections("b", problem.b, None)
        found += operand_rejections("a", problem.a, pair.a) + operand_rejections("b", problem.b, pair.b)
        modes = dict.fromkeys(mode for x in able for mode in x.accumulations)
        if problem.accumulation is not None and problem.accumulation not in modes:
            found.append(Rejection("accumulation", problem.accumulation, ", ".join(modes) or "none"))
        return found + (_torch_rejections(problem) if problem.framework == "torch" else [])

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return a matrix quantized and laid out as the product wants it: an `Encoded` of its framework."""
        if operand.ndim != 2:
            raise ValueError(f"cublas: cannot prepare an operand of shape {tuple(operand.shape)}; it takes matrices")
        room = framework_of(operand)
        if room is not None and room.name == "jax":
            from dispatch.plugins._cublas_jax import prepare

            return prepare(operand, recipe, axis)
        from dispatch.plugins._cublas_torch import encoder

        return encoder(recipe, axis, raw_on=operand.device if operand.dtype.itemsize == 1 else None)(operand)

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product's callable."""
        if config is not None:
            raise ValueError(f"cublas has no configs; got {config!r}")
        if problem.recipe is None:
            return native(problem)
        if problem.framework == "jax":
            from dispatch.plugins._cublas_jax import plan as jax_plan

            return jax_plan(problem)
        from dispatch.plugins._cublas_torch import plan

        return plan(problem)


def _with_compute_capability(rejection: Rejection, able: Sequence[Capability]) -> Rejection:
    if rejection.subject != "arch":
        return rejection
    found = Arch(rejection.found).capability
    archs = dict.fromkeys(arch for x in able for arch in x.archs)
    known = sorted(x for x in (Arch(arch).capability for arch in archs) if x is not None)
    needed = ", ".join(f"{major}.{minor}" for major, minor in known)
    if found is None:
        return Rejection("arch", rejection.found, f"an NVIDIA GPU{needed and f' of compute capability {needed}'}")
    return Rejection("compute capability", f"{found[0]}.{found[1]} ({rejection.found})", needed)


def _torch_rejections(problem: Problem) -> list[Rejection]:
    found = []
    quantizes = any(x.recipe is None and x.dtype not in FP8_DTYPES for x in (problem.a, problem.b))
    if quantizes and problem.recipe != _BLOCKS and not _has_triton():
        found.append(Rejection("triton", "not installed", "triton >= 3.6, whose kernels quantize"))
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    needy = problem.arch in _HOPPER and problem.recipe in _NEEDS_CUDA_12_9
    if needy and version is not None and tuple(map(int, version.split(".")[:2])) < (12, 9):
        found.append(Rejection("torch's CUDA", version, "12.9 for row and block scales"))
    return found


@cache
def _has_triton() -> bool:
    if "triton" in sys.modules:  # None there: blocked on purpose
        return sys.modules["triton"] is not None
    return importlib.util.find_spec("triton") is not None


@hookimpl
def dispatch_backends() -> list[CublasBackend]:
    """Return the backend."""
    return [CublasBackend()]
