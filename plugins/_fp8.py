"""What the FP8 backends say alike of their operands."""

from __future__ import annotations

import importlib.metadata
import re
import sys
from functools import cache
from typing import Any

from dispatch import FORMATS, FP8_DTYPES, Operand, Rejection, ScalingRecipe, framework

JAX_TRITON = (3, 6)
"""The Triton whose compiler is called for JAX, without a driver: other versions have another way in."""


def operand_rejections(name: str, operand: Operand, recipe: ScalingRecipe | None) -> list[Rejection]:
    """Return why an operand cannot stand under a recipe, None for one that is to be multiplied as it is."""
    if recipe is None:
        kind = operand.dtype if operand.recipe is None else str(operand.recipe)
        return [Rejection(name, kind, "not quantized")] if operand.encoded else []
    if operand.recipe is not None:
        wrong = operand.recipe != recipe
        return [Rejection(name, f"quantized as {operand.recipe}", str(recipe))] if wrong else []
    if operand.dtype in FP8_DTYPES and (FORMATS[recipe.dtype], "tensor") != (operand.dtype, recipe.granularity):
        return [Rejection(name, f"{operand.dtype} without scales", f"what {recipe} quantizes, or a ScaledArray")]
    return []


def version_of(package: str) -> tuple[int, ...]:
    """Return the first three numbers of a package's version; () where it is not installed or blocked on purpose."""
    return () if sys.modules.get(package, package) is None else _installed(package)


@cache
def _installed(package: str) -> tuple[int, ...]:
    try:
        found = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ()
    return tuple(int(part) for part in re.findall(r"\d+", found)[:3])


def quantizes_from_jax(arch: str) -> bool:
    """Return whether Triton's quantizers can be launched from JAX on an arch: a GPU with FP8, and the right Triton."""
    jax = sys.modules.get("jax")
    able = arch in ("sm89", "sm90", "sm100", "sm103", "sm120", "sm121") and version_of("triton")[:2] == JAX_TRITON
    return able and jax is not None and jax.default_backend() == "gpu"


def lying(x: Any, axis: int) -> tuple[Any, int]:
    """Return a JAX matrix as it lies in memory, and which of its axes is contracted there."""
    room: Any = framework("jax")
    found: tuple[Any, int] = room.lying(x, axis)
    return found
