"""The Triton MX GEMM: run by Triton's interpreter (which is taught dot_scaled), compiled, and on a GPU compared."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the launchers take torch tensors here")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


cases = _load("_gemm_cases")
gpu = _load("_compile")
Case, E4M3, E5M2 = cases.Case, cases.E4M3, cases.E5M2
NAMES = [name for name, case in cases.interpreted_cases().items() if case.kernel == "mx"]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """What the interpreter's run found; TRITON_INTERPRET has to be set before Triton is imported."""
    done = subprocess.run(
        [sys.executable, HERE / "_gemm_cases.py", *NAMES],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", NAMES)
def test_interpreted_products_match_float64(name: str, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[name] == []


TILE = (("block_m", 128), ("block_n", 128), ("block_k", 128), ("stages", 2), ("warps", 4))
MX = Case("mx", 512, 512, 1024, scales="mx", config=TILE)
SHARED_LIMIT = {90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
EIGHT = (*TILE, ("warps", 8))
COMPILED = [
    (90, replace(MX, config=EIGHT), r"wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16"),
    (100, MX, "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"),
    (100, replace(MX, dtypes=(E5M2, E4M3), bias=torch.float32), "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"),
    (103, MX, "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale"),
    (120, replace(MX, config=EIGHT), "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale"),
]


@pytest.mark.parametrize(("capability", "case", "instruction"), COMPILED)
def test_compiles_to_the_tensor_core_within_the_gpu_s_limits(capability: int, case: Any, instruction: str) -> None:
    with gpu.compiling(capability) as built:
        cases.empty_launch(case).run()
    (kernel,) = built
    ptx = kernel.asm["ptx"]
    assert instruction in ptx
    assert "cp.async.bulk.tensor.3d.shared" in ptx
    assert kernel.metadata.shared <= SHARED_LIMIT[capability]
    assert (kernel.metadata.tmem_size or 0) <= 512
    # ptxas gives TMA on sm120 a frame of 8 bytes, and spills nothing (seen with -v).
    assert gpu.stack_bytes(kernel) <= (8 if capability == 120 else 0)


def test_loads_the_scales_of_a_step_at_once() -> None:
    with gpu.compiling(100) as built:
        cases.empty_launch(MX).run()
    assert "ld.global.b8" not in built[0].asm["ptx"]


def test_refuses_scales_that_are_not_e8m0_bytes() -> None:
    from dispatch.kernels.triton_mx_gemm import mx_gemm_launch

    a, b, c = torch.empty(16, 64).to(E4M3), torch.empty(16, 64).to(E4M3), torch.empty(16, 16)
    bytes_ = torch.zeros(16, 2, dtype=torch.uint8)
    config = {**cases.SMALL, **cases.WALK}
    with pytest.raises(ValueError, match="as uint8"):
        mx_gemm_launch(a, b, c, bytes_, bytes_.float(), **config)
    with pytest.raises(ValueError, match="block scales of shape"):
        mx_gemm_launch(a, b, c, bytes_, bytes_[:, :1], **config)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (E5M2, E5M2)])
def test_gpu_sizes_dtypes_and_batch(dtypes: Any) -> None:
    tile = (*EIGHT, ("programs", 132))
    for m, n, k in ((1, 1, 32), (7, 17, 64), (129, 127, 1056), (1040, 272, 4128), (17, 1040, 96)):
        for batch in ((0, 0), (2, 2), (0, 2)):
            case = Case("mx", m, n, k, dtypes, scales="mx", batch=batch, out=torch.float32, config=tile)
            assert cases.complaints(case, "cuda", runs=2) == [], case
    case = replace(case, n=256, halves=2, out=torch.bfloat16, bias=torch.float32, activation="gelu")
    assert cases.complaints(case, "cuda", runs=2) == [], case
