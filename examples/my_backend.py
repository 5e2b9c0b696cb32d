"""A whole backend: NumPy's float16 products in float64, registered in this process and explained.

python examples/my_backend.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

import dispatch
from dispatch import Capability, Plan, Problem, Rejection, ScalingRecipe, hookimpl


class Float64Blas:
    """Casts to float64, multiplies, rounds once."""

    name = "float64_blas"
    capabilities = (
        Capability(frameworks=("numpy",), archs=("cpu-*",), dtypes=("float16",), out_dtypes=("float16", "float32")),
    )

    def rejections(self, problem: Problem) -> Sequence[Rejection]:
        """Return why not, by the capability."""
        return dispatch.closest(self.capabilities, problem)

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return the operand: nothing is quantized."""
        return operand

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product; bias and activation as the framework's room computes them."""
        room = dispatch.framework("numpy")

        def product(a: Any, b: Any, bias: Any = None) -> Any:
            return room.epilogue(np.matmul(a.astype(np.float64), b.astype(np.float64)), problem, bias)

        return product


@hookimpl
def dispatch_backends() -> list[Float64Blas]:
    """Return the backend: this is what the entry point's module is asked for."""
    return [Float64Blas()]


if __name__ == "__main__":
    dispatch.register(Float64Blas())
    random = np.random.default_rng(0)
    a, b = (random.standard_normal((256, 256)).astype(np.float16) for _ in range(2))
    print(dispatch.explain(a, b))
