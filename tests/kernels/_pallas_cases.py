"""Multiply by the Pallas kernels and compare with float64: shared by the interpreter's runs and the GPU's.

As a script it interprets the named cases and prints one JSON object: a list of complaints for each. JAX's interpreter
holds a thread of XLA's pool for each warpgroup that waits at a barrier; where the pool is as small as a machine of two
cores has it, all may wait for ever. So it runs in a process of its own, with PJRT_NPROC set.
"""

from __future__ import annotations

import importlib
import json
import math
import sys
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from dispatch.kernels import pallas_blackwell_gemm as blackwell
from dispatch.kernels import pallas_fp8_gemm as hopper

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
    across: bool = False
    programs: int | None = 2  # None: as many as the kernel takes by itself

    @property
    def options(self) -> dict[str, Any]:
        """What the case's gemm is called with, beside its arrays."""
        found: dict[str, Any] = {"config": self.config, "out_dtype": self.out, "activation": self.activation}
        if self.scales == "block":
            found["blocks"] = True
        found |= {name: True for name in ("promoted", "across") if getattr(self, name)}
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
        of_b = (self.k, self.n) if self.across else (self.n, self.k)
        kinds = [((self.m, self.k), self.dtypes[0]), (of_b, self.dtypes[1])]
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
    b = b.T if case.across else b
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


def interpreted(case: Case, *, races: bool = False) -> list[str]:
    """Return what is wrong with the case in JAX's GPU interpreter on a CPU; its races too, if asked for."""
    gemm = blackwell.gemm if isinstance(case.config, blackwell.Config) else hopper.gemm
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


SMALL = hopper.Config(128, 64, stages=3, group=2)
TURNS = hopper.Config(64, 64, stages=4, pingpong=True, minor="n", group=2)
ONE = hopper.Config(64, 64, stages=2, consumers=1)
SIXTEEN = replace(SMALL, block_k=64)
WALK = Case(SMALL, 130, 100, 600)  # several tiles for a program, the ring goes round

INTERPRETED = {
    "row scales, bias": replace(WALK, bias=BF16),
    "tensor scales, float32": Case(ONE, 70, 60, 260, scales="tensor", out=F32, activation="silu", bias=F32),
    "pingpong": Case(TURNS, 100, 180, 300, activation="gelu"),
    "promoted": Case(replace(SMALL, chain=3), 100, 60, 1000, promoted=True, activation="relu"),
    "block scales": Case(replace(SMALL, chain=2), 100, 150, 600, scales="block", bias=F16),
    "bfloat16": Case(SIXTEEN, 100, 60, 200, dtypes=(BF16, BF16), scales="none", out=F32, activation="gelu_tanh"),
    "bfloat16 across": Case(SIXTEEN, 100, 60, 200, dtypes=(BF16, BF16), scales="none", bias=F32, across=True),
    "one by one": Case(ONE, 1, 1, 1),
}
MORE = {
    "wide pieces": Case(hopper.Config(128, 256, stages=2), 100, 300, 200, out=F32, bias=F32),
    "float16": Case(SIXTEEN, 130, 100, 200, dtypes=(F16, F16), scales="none", out=F16, bias=F16),
    "e5m2": replace(WALK, dtypes=(E5M2, E5M2), activation="relu"),
    "no delay": replace(WALK, config=replace(SMALL, delay=0)),
    "delay of two": replace(WALK, config=replace(SMALL, delay=2)),
    "pingpong, promoted": Case(replace(TURNS, stages=6), 100, 180, 700, promoted=True),
    "pingpong, block scales": Case(replace(TURNS, block_m=128), 200, 100, 400, scales="block"),
    "pingpong, one tile": Case(TURNS, 20, 20, 600),
    "one row": Case(ONE, 1, 70, 16, bias=F32),
    "promoted, one step": Case(SMALL, 7, 9, 48, promoted=True),
}
# The interpreter finds a race between reading block scales from shared memory and TMA's next write there, for want of
# a proxy fence before the stage is given back; the barrier orders the two, and CUTLASS too sets no fence there.
NEWER = {
    "block scales, above": Case(
        replace(SMALL, chain=3, cluster="m"), 300, 100, 900, scales="block", dtypes=(E5M2, E4M3)
    ),
    "e5m2 by e4m3": replace(WALK, dtypes=(E5M2, E4M3)),
    "e4m3 by e5m2": replace(WALK, dtypes=(E4M3, E5M2)),
}
RACES = {
    "races: cooperative": WALK,
    "races: above": Case(replace(SMALL, cluster="m"), 300, 100, 600),
    "races: beside": Case(replace(SMALL, cluster="n"), 130, 300, 600, bias=F32),
    "races: pingpong": Case(TURNS, 130, 250, 600, programs=3),
    "races: pingpong beside": Case(replace(TURNS, cluster="n"), 130, 300, 600),
    "races: bfloat16 across": Case(
        replace(SIXTEEN, cluster="m"), 300, 130, 300, dtypes=(F16, F16), scales="none", out=F16, across=True
    ),
    "races: promoted": Case(replace(SMALL, chain=3), 130, 100, 1100, promoted=True),
    "races: tcgen05": Case(
        blackwell.Config(64, stages=2, group=2), 600, 300, 600, bias=BF16, activation="silu", programs=3
    ),
    "races: tcgen05, bfloat16": Case(
        blackwell.Config(128, 64, stages=3), 200, 300, 300, dtypes=(BF16, BF16), scales="none", out=F32
    ),
    "races: tcgen05, mixed": Case(
        blackwell.Config(128, minor="n", stages=3), 300, 300, 200, dtypes=(E5M2, E4M3), scales="tensor"
    ),
}


if __name__ == "__main__":
    everything = {**INTERPRETED, **MORE, **NEWER, **RACES}
    json.dump({name: interpreted(everything[name], races=name in RACES) for name in sys.argv[1:]}, sys.stdout)
