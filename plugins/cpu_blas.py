"""16-bit, FP8 and small integer products on a CPU through float32 BLAS, casts included.

A CPU without bfloat16 or float16 arithmetic runs such products in slow loops; its float32 BLAS is fast, and holds every
value of these types and every product of two exactly. Where the CPU has the arithmetic, or for one row, native wins,
and the measurement says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from dispatch import FP8_DTYPES, Capability, Plan, Problem, Rejection, ScalingRecipe, closest, framework, hookimpl

FLOATS = ("bfloat16", "float16", *FP8_DTYPES)
BYTES = ("int8", "uint8")
EXACT = 1 << 24  # float32 holds every integer up to here
OUT = ("bfloat16", "float16", "float32")


class CpuBlas:
    """Casts the operands to float32, multiplies, and rounds once."""

    name = "cpu_blas"
    capabilities = (
        Capability(frameworks=("torch",), archs=("cpu-*",), dtypes=FLOATS, out_dtypes=OUT),
        Capability(frameworks=("numpy",), archs=("cpu-*",), dtypes=("float16",), out_dtypes=("float16", "float32")),
        Capability(
            frameworks=("torch", "numpy"), archs=("cpu-*",), dtypes=("int8",), out_dtypes=("int8",), activations=()
        ),
        Capability(
            frameworks=("torch", "numpy"), archs=("cpu-*",), dtypes=("uint8",), out_dtypes=("uint8",), activations=()
        ),
    )

    def rejections(self, problem: Problem) -> Sequence[Rejection]:
        """Return why not: above all where the framework computes in float32 already."""
        already = problem.framework == "jax" or (
            problem.framework == "numpy" and problem.a.dtype in FLOATS[:1] + FLOATS[2:]
        )
        if already and problem.arch.startswith("cpu"):
            return [Rejection(f"{problem.framework}'s {problem.a.dtype} product", "already float32", "a narrower one")]
        found = closest(self.capabilities, problem)
        if problem.a.dtype in BYTES and problem.b.dtype in BYTES:
            largest = problem.k * _largest(problem.a.dtype) * _largest(problem.b.dtype)
            if largest >= EXACT:
                found.append(Rejection("k", str(problem.k), "sums below 2**24, that float32 holds exactly"))
            if problem.bias:
                found.append(Rejection("bias", problem.bias, "none beside integers"))
        return found

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return the operand: nothing is quantized."""
        return operand

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product by way of float32."""
        room = framework(problem.framework)
        multiply = room.matmul
        encoded = problem.a.recipe is not None, problem.b.recipe is not None
        whole = problem.out_dtype in BYTES

        def wide(operand: Any, scaled: bool) -> Any:
            return operand.dequantize("float32") if scaled else room.cast(operand, "float32")

        def product(a: Any, b: Any, bias: Any = None) -> Any:
            out = multiply(wide(a, encoded[0]), wide(b, encoded[1]))
            return room.cast(room.cast(out, "int32"), problem.out_dtype) if whole else room.epilogue(out, problem, bias)

        return product


def _largest(dtype: str) -> int:
    return 128 if dtype == "int8" else 255


@hookimpl
def dispatch_backends() -> list[CpuBlas]:
    """Return the backend."""
    return [CpuBlas()]
