"""Run plans of pallas_fp8 for Hopper and Blackwell in JAX's GPU interpreter and print their relative errors as JSON.

A process of its own, with PJRT_NPROC set: see tests/kernels/_pallas_cases.py.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import jax
import numpy as np
from dispatch.plugins.pallas_fp8 import PallasBackend

from dispatch import Operand, Problem, RecipePair

ROW, BLOCKS = "e4m3:row", "e4m3:1x128@e4m3:128x128"
CASES: dict[str, dict[str, Any]] = {
    "few rows": {"m": 20, "n": 70, "k": 300, "out_dtype": "float32"},
    "bias": {"m": 100, "n": 70, "k": 300, "bias": "float32", "activation": "relu"},
    "promoted": {"m": 70, "n": 60, "k": 260, "accumulation": "promoted"},
    "block scales": {"m": 130, "n": 140, "k": 300, "recipe": BLOCKS, "accumulation": "promoted"},
    "lossless": {
        "m": 70,
        "n": 60,
        "k": 150,
        "bias": "float32",
        "activation": "relu",
        "recipe": None,
        "accumulation": None,
    },
    "Blackwell": {"m": 100, "n": 70, "k": 260, "arch": "sm100"},
}


def error(facts: dict[str, Any]) -> float:
    """Return the relative error of one product of bfloat16 operands against float64, of its first config."""
    values = {"recipe": ROW, "accumulation": "fast", "arch": "sm90", "out_dtype": "bfloat16", **facts}
    text = values.pop("recipe")
    pair = None if text is None else RecipePair.parse(text)
    plain = Operand("bfloat16")
    asked = Problem(a=plain, b=plain, framework="jax", device="cpu", recipe=pair, **values)
    backend = PallasBackend()
    assert not backend.rejections(asked), backend.rejections(asked)
    a = jax.random.normal(jax.random.key(0), (asked.m, asked.k), "bfloat16")
    b = jax.random.normal(jax.random.key(1), (asked.k, asked.n), "bfloat16")
    bias = jax.random.normal(jax.random.key(2), (asked.n,)) if asked.bias else None
    out = backend.plan(asked)(a, b, *(() if bias is None else (bias,)))
    assert (out.shape, str(out.dtype)) == ((asked.m, asked.n), asked.out_dtype)
    wanted = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
    if bias is not None:
        wanted = np.maximum(wanted + np.asarray(bias, np.float64), 0)
    return float(np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted))


if __name__ == "__main__":
    with jax.default_device(jax.devices("cpu")[0]):
        json.dump({name: error(facts) for name, facts in CASES.items()}, sys.stdout)
