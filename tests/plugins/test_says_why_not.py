"""Where a backend of JAX cannot work it says why, `dispatch.backends()` shows it, and products are served still."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("jax", reason="JAX is not installed")

SCRIPT = """
import importlib.metadata, json, sys
before, archs, versions = json.loads(sys.argv[1])
for name in before:
    sys.modules[name] = None
own = importlib.metadata.version
importlib.metadata.version = lambda name: versions.get(name) or own(name)
import numpy as np
import dispatch
from dispatch import Operand, Problem, RecipePair
from dispatch._api import engine
import dispatch.registry
machine = dispatch.machine()
here = {"jax": archs} if archs else machine["archs"]
sys.modules["dispatch.registry.status"].machine = lambda: {**machine, "archs": here}
arch = archs[0] if archs else "cpu"
plain = Operand("bfloat16")
said = {}
for recipe in ("e4m3:row", "e4m3:tensor"):
    asked = Problem(256, 256, 256, plain, plain, "bfloat16", "jax", arch, "cuda:0", recipe=RecipePair.parse(recipe),
                    accumulation="fast")
    for name in ("cublas", "pallas_fp8", "triton_tma_fp8"):
        said[name] = "; ".join(map(str, engine().registry.backends[name].backend.rejections(asked)))
x = np.ones((4, 4), np.float32)
assert (dispatch.matmul(x, x) == 4).all()
if "jax" not in before:
    import jax.numpy as jnp
    y = jnp.ones((4, 4), jnp.bfloat16)
    assert (dispatch.matmul(y, y) == 4).all()
shown = {x.name: x.unavailable for x in dispatch.backends()}
print(json.dumps([said, shown]))
"""


def asked(tmp_path: Path, *, before: Any = (), archs: Any = (), versions: Any = None) -> Any:
    """Return what each backend says of a product, and what `dispatch.backends()` shows of it."""
    environment = {**os.environ, "DISPATCH_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
    given = json.dumps([list(before), list(archs), versions or {}])
    command = [sys.executable, "-W", "error", "-c", SCRIPT, given]
    run = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(run.stdout.splitlines()[-1])


BACKENDS = ("cublas", "pallas_fp8", "triton_tma_fp8")


def test_on_a_cpu(tmp_path: Path) -> None:
    said, shown = asked(tmp_path)
    for name in BACKENDS:
        assert "arch is cpu" in said[name]
        assert ("needs sm*;" if name == "cublas" else "sm90") in shown[name]
        assert "cpu-" in shown[name]


def test_on_a_gpu_without_fp8(tmp_path: Path) -> None:
    said, shown = asked(tmp_path, archs=["sm80"])
    assert "8.0 (sm80)" in said["cublas"]
    assert shown["cublas"] is None, "the framework's own product runs there"
    for name in ("pallas_fp8", "triton_tma_fp8"):
        assert "arch is sm80; needs sm89" in said[name]
        assert "this machine has sm80" in shown[name]


def test_without_jax(tmp_path: Path) -> None:
    said, shown = asked(tmp_path, before=["jax"], archs=["sm90"])
    assert "jax is not installed" in said["pallas_fp8"]
    assert "jax" in shown["pallas_fp8"]


def test_with_an_older_jax(tmp_path: Path) -> None:
    said, shown = asked(tmp_path, archs=["sm90"], versions={"jax": "0.9.2", "jaxlib": "0.9.2", "triton": "3.6.0"})
    assert said["pallas_fp8"].startswith("jax is 0.9.2; needs jax >= 0.10.2")
    assert shown["pallas_fp8"] == said["pallas_fp8"]
    assert said["triton_tma_fp8"].startswith("jaxlib is 0.9.2; needs jaxlib >= 0.11.1")
    assert shown["triton_tma_fp8"] == said["triton_tma_fp8"]
    assert (said["cublas"], shown["cublas"]) == ("", None), "XLA's FP8 dot asks for no version"


def test_without_triton(tmp_path: Path) -> None:
    said, shown = asked(tmp_path, before=["triton"], archs=["sm90"], versions={"jax": "0.11.2", "jaxlib": "0.11.2"})
    assert said["triton_tma_fp8"].startswith("triton is not installed")
    assert shown["triton_tma_fp8"] == said["triton_tma_fp8"]
    assert (said["cublas"], shown["cublas"]) == ("", None)
    assert "triton" not in said["pallas_fp8"], "it has quantizers of its own"
