"""Multiply by the Pallas kernels and compare with float64: shared by the interpreters' runs and the GPU's."""

from __future__ import annotations

import importlib
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

BF16, F16, F32 = "bfloat16", "float16", "float32"
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
ROUNDING = {BF16: 2.0**-8, F16: 2.0**-11, F32: 2.0**-22}
MIXES = jax.__version_info__ >= (0, 11)
_ERF = np.vectorize(math.erf, otypes=[float])
ACTIVATIONS = {
    None: lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: 0.5 * x * (1 + _ERF(x / math.sqrt(2))),
    "gelu_tanh": lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    "silu": lambda x: x / (1 + np.exp(-x)),
}


@dataclass(frozen=True)
class Case:
    """One product and the config that it is for. scales: none, tensor, row or block."""

    config: Any
    m: int
    n: int
    k: int
    dtypes: tuple[str, str] = (E4M3, E4M3)
    out: str = BF16
    scales: str = "row"
    bias: str | None = None
    activation: str | None = None
    promoted: bool = False
    programs: int | None = 2  # None: as many as the kernel takes by itself

    @property
    def options(self) -> dict[str, Any]:
        """What the case's gemm is called with, beside its arrays."""
        found: dict[str, Any] = {"config": self.config, "out_dtype": self.out, "activation": self.activation}
        if self.scales == "block":
            found["blocks"] = True
        if self.promoted:
            found["promoted"] = True
        return found if self.programs is None else {**found, "programs": self.programs}

    def shapes(self) -> list[jax.ShapeDtypeStruct | None]:
        """Return the shapes and dtypes of a, b, scale_a, scale_b and bias."""
        steps = -(-self.k // 128)
        scales: list[Any] = {
            "none": [None, None],
            "tensor": [(1,), (1,)],
            "row": [(self.m,), (self.n,)],
            "block": [(self.m, steps), (-(-self.n // 128), steps)],
        }[self.scales]
        kinds = [((self.m, self.k), self.dtypes[0]), ((self.n, self.k), self.dtypes[1])]
        kinds += [(shape, F32) for shape in scales] + [((self.n,) if self.bias else None, self.bias)]
        return [None if shape is None else jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in kinds]


def operands(case: Case) -> tuple[list[Any], np.ndarray, np.ndarray]:
    """Return a, b, scale_a, scale_b and bias; c in float64; the sum of magnitudes."""
    random = np.random.default_rng(case.m * 1_000_003 + case.n * 1009 + case.k)
    arrays: list[Any] = []
    for place, kind in enumerate(case.shapes()):
        if kind is None:
            arrays.append(None)
            continue
        values = random.uniform(0.5, 1.5, kind.shape) if place in (2, 3) else random.normal(size=kind.shape)
        arrays.append(jnp.asarray(values, jnp.float32).astype(kind.dtype))
    a, b, scale_a, scale_b, bias = (None if x is None else np.asarray(x).astype(np.float64) for x in arrays)
    assert a is not None
    assert b is not None
    if scale_a is not None and scale_b is not None:
        if case.scales == "block":
            scale_a = np.repeat(scale_a, 128, 1)[:, : case.k]
            scale_b = np.repeat(np.repeat(scale_b, 128, 0)[: case.n], 128, 1)[:, : case.k]
        a, b = a * scale_a.reshape(len(scale_a), -1), b * scale_b.reshape(len(scale_b), -1)
    exact, magnitude = a @ b.T, np.abs(a) @ np.abs(b).T
    if bias is not None:
        exact, magnitude = exact + bias, magnitude + np.abs(bias)
    return arrays, ACTIVATIONS[case.activation](exact), magnitude


def complaints(gemm: Any, case: Case, runs: int = 1, **options: Any) -> list[str]:
    """Return what is wrong with the case's output, nothing if all is right, in each of `runs` runs."""
    arrays, exact, magnitude = operands(case)
    found = [np.asarray(gemm(*arrays, **case.options, **options)) for _ in range(runs)]
    wrong = []
    if found[0].shape != exact.shape or found[0].dtype != jnp.dtype(case.out):
        return [f"{found[0].dtype} of {found[0].shape}"]
    if any(other.tobytes() != found[0].tobytes() for other in found[1:]):
        wrong.append("runs differ")
    fast = case.dtypes[0] in (E4M3, E5M2) and not options.get("interpret")
    summing = (2.0**-12 if case.promoted or case.scales == "block" else 2.0**-10) if fast else 2.0**-15
    allowed = 1.2 * summing * magnitude + ROUNDING[case.out] * np.abs(exact) + 1e-6
    excess = float((np.abs(found[0].astype(np.float64) - exact) / allowed).max())
    if not excess <= 1:
        wrong.append(f"off by {excess:.3g} of what is allowed")
    return wrong


def interpreted(gemm: Any, case: Case, *, races: bool = False) -> list[str]:
    """Return what is wrong with the case in JAX's GPU interpreter on a CPU; its races too, where it can find them."""
    state = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call")
    interpret: Any = True
    if races:
        from jax.experimental.pallas import mosaic_gpu

        interpret = mosaic_gpu.InterpretGPUParams(detect_races=True)
    try:
        with jax.default_device(jax.devices("cpu")[0]):
            wrong = complaints(gemm, case, interpret=interpret)
    except Exception:
        state.reset_gpu_interpret_mode_state()  # or every run after it fails too
        raise
    if races and state.get_races().races_found:
        wrong.append("races")
    return wrong


def lowered(gemm: Any, case: Case) -> str:
    """Return what the case's product lowers to for CUDA, on any machine."""
    traced = jax.jit(lambda *arrays: gemm(*arrays, **case.options)).trace(*case.shapes())
    return str(traced.lower(lowering_platforms=("cuda",)).as_text())
