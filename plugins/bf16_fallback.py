"""The framework's own matmul, and the end of every chain: FP8 operands are decoded and multiplied in bfloat16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch import FP8_DTYPES, Capability, Plan, Problem, Rejection, ScalingRecipe, hookimpl, native

FLOATS = ("float64", "float32", "float16", "bfloat16", *FP8_DTYPES)
COMPLEX = ("complex64", "complex128")
SIGNED = ("int8", "int16", "int32", "int64", "uint8")  # which torch multiplies on a CPU only
UNSIGNED = ("uint16", "uint32", "uint64", "bool")  # which torch does not multiply


def _exact(frameworks: tuple[str, ...], dtype: str, archs: tuple[str, ...] = ("*",)) -> Capability:
    """Return the capability for a dtype whose products stay in it, without an epilogue."""
    return Capability(frameworks, archs, (dtype,), (dtype,), bias=False, activations=())


CAPABILITIES = (
    Capability(("numpy", "torch", "jax"), ("*",), FLOATS, FLOATS),
    *(_exact(("numpy", "torch", "jax"), dtype) for dtype in COMPLEX),
    *(_exact(("numpy", "jax"), dtype) for dtype in (*SIGNED, *UNSIGNED)),
    *(_exact(("torch",), dtype, ("cpu-*",)) for dtype in SIGNED),
)


class Bf16Fallback:
    """Runs everything that the framework runs."""

    name = "bf16_fallback"
    capabilities = CAPABILITIES

    def rejections(self, problem: Problem) -> Sequence[Rejection]:
        """Return (): whatever the framework refuses, it refuses itself."""
        return ()

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return the operand: nothing is quantized."""
        return operand

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the framework's own product, for FP8 operands and ScaledArrays after decoding."""
        return native(problem)


@hookimpl
def dispatch_backends() -> list[Bf16Fallback]:
    """Return the backend."""
    return [Bf16Fallback()]
