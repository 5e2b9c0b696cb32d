"""Checks that every backend has to pass, on problems drawn from its own capability."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np

import dispatch
from dispatch import FP8_DTYPES, Backend, Capability, Operand, Problem, RecipePair

SIZES = ((1, 1, 1), (16, 16, 16), (17, 33, 65), (128, 64, 256), (5, 300, 1000))
BATCHES: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = (((), ()), ((3,), (3,)), ((2, 1), (3,)))
TF32 = 1e-3  # JAX's default precision for float32 on a GPU
TOLERANCE = {  # relative L2 of one rounding, with room for what is summed; other dtypes are exact
    **{"float64": 1e-12, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2, "complex64": 1e-5, "complex128": 1e-12},
    **{name: 0.06 if "e4m3" in name else 0.12 for name in FP8_DTYPES},
}


def problems(backend: Backend) -> list[Problem]:
    """Return problems that `backend` declares it can do on this machine: sizes, batches, dtypes, epilogues, recipes."""
    return list(dict.fromkeys(found for capability in backend.capabilities for found in _drawn(backend, capability)))


def check(backend: Backend, problem: Problem, seed: int = 0) -> None:
    """Run `problem` through the backend and compare with float64. Raises AssertionError saying what is wrong.

    The plan must return the right shape, dtype and device, be right within what its recipe's rounding costs, give
    the same twice, and leave its inputs as they were.
    """
    room = dispatch.framework(problem.framework)
    a, b, bias = operands(problem, seed)
    before = [room.to_numpy(x).tobytes() for x in (a, b)]
    plan = backend.plan(problem)
    given = (a, b) if bias is None else (a, b, bias)
    out, again = plan(*given), plan(*given)
    assert tuple(out.shape) == (*problem.batch, problem.m, problem.n), f"{problem}: shape {tuple(out.shape)}"
    assert room.dtype_name(out) == problem.out_dtype, f"{problem}: dtype {room.dtype_name(out)}"
    assert room.device(out) == problem.device, f"{problem}: device {room.device(out)}"
    assert [room.to_numpy(x).tobytes() for x in (a, b)] == before, f"{problem}: an input was written to"
    want = _wide(room, problem, a, b, bias)
    found = room.to_numpy(out).astype(want.dtype)
    assert room.to_numpy(again).tobytes() == room.to_numpy(out).tobytes(), f"{problem}: differs from run to run"
    error = float(np.linalg.norm(found - want)) / max(float(np.linalg.norm(want)), 1e-300)
    limit = _limit(problem)
    assert error <= limit, f"{problem}: relative error {error:.3g}, at most {limit:g}"


def operands(problem: Problem, seed: int = 0) -> tuple[Any, Any, Any]:
    """Return normal random a, b and bias (None without one) for a problem of plain arrays in its layouts."""
    room = dispatch.framework(problem.framework)
    a = _operand(room, problem, problem.a, (problem.m, problem.k), seed)
    b = _operand(room, problem, problem.b, (problem.k, problem.n), seed + 1)
    bias = None if problem.bias is None else room.normal((problem.n,), problem.bias, seed + 2, problem.device)
    return a, b, bias


def _operand(room: Any, problem: Problem, operand: Operand, shape: tuple[int, int], seed: int) -> Any:
    if operand.layout == "col":
        return room.xp.swapaxes(
            room.normal((*operand.batch, *shape[::-1]), operand.dtype, seed, problem.device), -1, -2
        )
    return room.normal((*operand.batch, *shape), operand.dtype, seed, problem.device)


def _wide(room: Any, problem: Problem, a: Any, b: Any, bias: Any) -> Any:
    """Return the result in float64 or complex128; of integers as they wrap."""
    exact = dispatch.framework("numpy")
    kind = exact.dtype(problem.out_dtype).kind
    dtype = "complex128" if kind == "c" else "int64" if kind in "biu" else "float64"
    product = np.matmul(*(room.to_numpy(x).astype(dtype) for x in (a, b)))
    if kind in "biu":
        return product.astype(problem.out_dtype).astype(np.float64)
    extra = None if bias is None else room.to_numpy(bias).astype(dtype)
    return exact.epilogue(product, replace(problem, out_dtype=dtype, framework="numpy"), extra)


def _limit(problem: Problem) -> float:
    if problem.recipe is not None:
        return 0.1 if "e5m2" in str(problem.recipe) else 0.06
    tf32 = problem.framework == "jax" and problem.arch.startswith("sm") and problem.a.dtype == "float32"
    own = TF32 if tf32 else TOLERANCE.get(problem.a.dtype, 0.0)
    return max(TOLERANCE.get(problem.out_dtype, 0.0), own)


def _drawn(backend: Backend, capability: Capability) -> Iterator[Problem]:
    machine = dispatch.machine()["archs"]
    for framework in capability.frameworks:
        for arch in machine.get(framework, ()):
            if not capability.runs_on(arch):
                continue
            device = "cpu" if arch.startswith("cpu") else "cuda:0"
            for problem in _shapes(capability, framework, arch, device):
                if not backend.rejections(problem):
                    yield problem


def _shapes(capability: Capability, framework: str, arch: str, device: str) -> Iterator[Problem]:
    recipes: list[RecipePair | None] = list(capability.recipes)
    inputs = [x for x in capability.dtypes if x not in FP8_DTYPES]
    rounds = product(SIZES, BATCHES, inputs, capability.out_dtypes)
    for index, ((m, n, k), (first, second), dtype, out) in enumerate(rounds):
        m, n, k = (size + -size % step for size, step in zip((m, n, k), capability.multiple_of, strict=True))
        layout = ("row", "col")[index % 2] if framework != "jax" else "row"
        activation = (None, *capability.activations)[index % (1 + len(capability.activations))]
        yield Problem(
            m=m,
            n=n,
            k=k,
            a=Operand(dtype, first),
            b=Operand(dtype, second, layout),
            out_dtype=out,
            framework=framework,
            arch=arch,
            device=device,
            bias="float32" if capability.bias and index % 3 == 1 else None,
            activation=activation,
            recipe=recipes[index % len(recipes)],
            accumulation=capability.accumulations[0]
            if capability.accumulations and recipes[index % len(recipes)]
            else None,
        )
