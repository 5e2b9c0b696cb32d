"""FP8 GEMM kernels of our own in Pallas, for JAX: TMA and warp specialization on Hopper, quantizing included.

On sm90 products and quantizers were measured on an H200; sm100 and sm103 have a kernel for tensor memory, the others
one without TMA by Pallas's Triton lowering: those are lowered and interpreted in the tests, and have not run.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Sequence
from functools import cache
from typing import Any

from dispatch.plugins import _pallas_configs as names
from dispatch.plugins._fp8 import operand_rejections, version_of

from dispatch import Capability, Plan, Problem, RecipePair, Rejection, ScalingRecipe, closest, hookimpl

_HOPPER = ("sm90",)
_BLACKWELL = ("sm100", "sm103")
_OTHERS = ("sm89", "sm120", "sm121")
_FLOATS = ("bfloat16", "float16", "float32")
_SIXTEEN_BIT = ("bfloat16", "float16")
_FORMATS = (("e4m3", "e4m3"), ("e4m3", "e5m2"), ("e5m2", "e4m3"))
_WHOLE = tuple(RecipePair.parse(f"{a}:{x}@{b}:{x}") for x in ("row", "tensor") for a, b in _FORMATS)
_BLOCKS = (RecipePair.parse("e4m3:1x128@e4m3:128x128"),)
LEAST_JAX, LEAST_JAX_MIXED = (0, 10, 2), (0, 11)
LEAST = 16
"""The least n and k of a product that is worth compiling a kernel."""
"""The JAX that the kernels need, and that takes e4m3 by e5m2 in one product."""


def _fp8(archs: Sequence[str], recipes: Sequence[RecipePair], *accumulations: str, batched: bool = True) -> Capability:
    return Capability(
        frameworks=("jax",),
        archs=tuple(archs),
        dtypes=(*_FLOATS, "float8_e4m3fn", "float8_e5m2"),
        out_dtypes=_FLOATS,
        recipes=tuple(recipes),
        accumulations=accumulations,
        batched=batched,
        status="measured" if tuple(archs) == _HOPPER else "compiled",
    )


CAPABILITIES = (
    _fp8(_HOPPER, _WHOLE, "fast", "promoted"),
    _fp8(_HOPPER, _BLOCKS, "promoted", batched=False),
    Capability(("jax",), _HOPPER, _SIXTEEN_BIT, _FLOATS, batched=False, status="compiled"),
    _fp8((*_BLACKWELL, *_OTHERS), _WHOLE, "fast"),
    _fp8((*_BLACKWELL, *_OTHERS), _BLOCKS, "promoted", batched=False),
)


class PallasBackend:
    """FP8 by row, tensor and block scales in JAX; on Hopper 16-bit products without loss."""

    name = "pallas_fp8"
    capabilities: Sequence[Capability] = CAPABILITIES

    def rejections(self, problem: Problem) -> list[Rejection]:
        """Return every reason why it cannot run the problem with its recipe."""
        if problem.framework != "jax":
            return [Rejection("framework", problem.framework, "jax")]
        if not any(x.runs_on(problem.arch) for x in CAPABILITIES):
            needed = "sm89, sm90, sm100, sm103, sm120 or sm121: a GPU with FP8 tensor cores"
            return [Rejection("arch", problem.arch, needed)]
        able = [x for x in CAPABILITIES if problem.recipe in x.recipes]
        if not able:
            known = dict.fromkeys(str(recipe or "none") for x in CAPABILITIES for recipe in x.recipes)
            return [Rejection("recipe", str(problem.recipe), ", ".join(known))]
        fitting = [x for x in able if x.runs_on(problem.arch)]
        if not fitting:
            return [Rejection("arch", problem.arch, f"{', '.join(_HOPPER)} for products without quantizing")]
        found = closest(fitting, problem) + _jax_rejections(problem)
        if problem.empty:
            found.append(Rejection("size", f"m={problem.m}, n={problem.n}, k={problem.k}", "at least one of each"))
        least = f"{LEAST} or more: smaller ones would be nearly all padding"
        found += [
            Rejection(x, str(size), least) for x, size in (("n", problem.n), ("k", problem.k)) if 0 < size < LEAST
        ]
        if (pair := problem.recipe) is None:
            return found + _plain_rejections(problem)
        for side, operand, recipe in (("a", problem.a, pair.a), ("b", problem.b, pair.b)):
            found += operand_rejections(side, operand, recipe)
            if (operand.prepared or operand.encoded) and math.prod(operand.batch) != 1:
                found.append(Rejection(f"batch of {side}", str(operand.batch), "none where it is quantized already"))
        modes = dict.fromkeys(mode for x in fitting for mode in x.accumulations)
        if problem.accumulation is not None and problem.accumulation not in modes:
            found.append(Rejection("accumulation", problem.accumulation, ", ".join(modes)))
        return found

    def configs(self, problem: Problem) -> list[str]:
        """Return the names of the configs worth measuring, the likeliest first; none where it cannot run at all."""
        return [] if self.rejections(problem) else [str(config) for config in names.configs(problem)]

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return a matrix quantized, K-major, as the kernels take it: an `Encoded`."""
        if operand.ndim != 2:
            raise ValueError(f"{self.name}: cannot prepare shape {tuple(operand.shape)}; it takes matrices")
        from dispatch.plugins._pallas_jax import prepared

        return prepared(operand, recipe, axis)

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product's callable. Raises ValueError for a config that is none, or none of the problem's."""
        able = names.configs(problem)
        chosen = able[0] if config is None else names.Config.parse(config)
        if chosen not in able:
            known = ", ".join(map(str, able))
            raise ValueError(f"{self.name}: config {config} is not for {problem}; its configs are {known}")
        from dispatch.plugins._pallas_jax import plan

        return plan(problem, chosen)


def _plain_rejections(problem: Problem) -> list[Rejection]:
    found = operand_rejections("a", problem.a, None) + operand_rejections("b", problem.b, None)
    if problem.a.dtype != problem.b.dtype:
        found.append(Rejection("dtypes", f"{problem.a.dtype} and {problem.b.dtype}", "one dtype"))
    return found


def _jax_rejections(problem: Problem) -> list[Rejection]:
    version = version_of("jax")
    if not version:
        return [Rejection("jax", "not installed", "jax >= 0.10.2: pip install gemm-dispatch[jax]")]
    text = ".".join(map(str, version))
    if version < LEAST_JAX:
        return [Rejection("jax", text, "jax >= 0.10.2")]
    found = []
    pair = problem.recipe
    if pair is not None and pair.a.dtype != pair.b.dtype and version < LEAST_JAX_MIXED:
        found.append(Rejection("jax", text, "jax >= 0.11 to multiply e4m3 by e5m2"))
    if not _has_absl():
        found.append(Rejection("absl-py", "not installed", "absl-py, which Pallas imports: pip install absl-py"))
    return found


@cache
def _has_absl() -> bool:
    if "absl" in sys.modules:  # None there: blocked on purpose
        return sys.modules["absl"] is not None
    return importlib.util.find_spec("absl") is not None


@hookimpl
def dispatch_backends() -> list[PallasBackend]:
    """Return the backend."""
    return [PallasBackend()]
