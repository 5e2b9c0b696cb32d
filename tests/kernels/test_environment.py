"""Triton's environment variables work with the house's kernels as with any: each in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the launchers take torch tensors here")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton

SCRIPT = """
import sys
sys.path.insert(0, sys.argv[1])
import _compile, _gemm_cases
config = (("block_m", 16), ("block_n", 64), ("block_k", 128), ("stages", 3), ("warps", 4))
with _compile.compiling(90) as built:
    _gemm_cases.empty_launch(_gemm_cases.Case("decode", 16, 512, 1024, config=config)).run()
print(built[0].asm["ptx"])
"""


def compiled(folder: Path, **environment: str) -> tuple[str, str]:
    """Return a kernel's PTX and what is said while it is compiled, with an empty folder for what is kept."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(Path(__file__).parent)],
        env={**os.environ, "TRITON_CACHE_DIR": str(folder), **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert [file.stem for file in folder.rglob("*.cubin")] == ["decode_tma_kernel"]
    return done.stdout, done.stderr


@pytest.mark.parametrize(
    ("variable", "said"),
    [
        ("MLIR_ENABLE_DUMP", "IR Dump Before"),
        ("MLIR_ENABLE_TIMING", "Execution time report"),
        ("LLVM_ENABLE_TIMING", "Pass execution timing report"),
    ],
)
def test_the_compiler_tells_what_it_is_asked_for(variable: str, said: str, tmp_path: Path) -> None:
    assert said in compiled(tmp_path, **{variable: "1"})[1]


def test_without_llvm_s_optimizations_the_code_is_another(tmp_path: Path) -> None:
    plain, quiet = compiled(tmp_path / "plain")
    assert quiet == ""
    assert len(compiled(tmp_path / "other", DISABLE_LLVM_OPT="1")[0]) > len(plain)
