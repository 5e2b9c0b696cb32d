"""The Triton decode GEMM: run by Triton's interpreter, compiled for each arch, and on a GPU compared with float64."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
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
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SHARED_LIMIT = {89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
NAMES = [name for name, case in cases.interpreted_cases().items() if case.kernel.startswith("decode")]
NAMES += ["decode far apart", "decode_pointer far apart", "decode in any order"]


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


WIDE = (("block_m", 16), ("block_n", 64), ("block_k", 512), ("stages", 4), ("warps", 4))
HALF = (("block_m", 16), ("block_n", 64), ("block_k", 256), ("stages", 4), ("warps", 4))
FULL = (("block_m", 16), ("block_n", 128), ("block_k", 256), ("stages", 4), ("warps", 4))
BLOCK = (("block_m", 16), ("block_n", 64), ("block_k", 128), ("stages", 4), ("warps", 4))
FEW = Case("decode", 16, 512, 4096, config=HALF)
FP8_HOPPER = "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3"
COMPILED = [
    (90, replace(FEW, config=WIDE, bias=BF16, activation="silu"), FP8_HOPPER),
    (90, replace(FEW, splits=4), FP8_HOPPER),
    (90, replace(FEW, splits=2, promoted=True), FP8_HOPPER),
    (90, replace(FEW, dtypes=(BF16, BF16), scales="none"), "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16"),
    (90, replace(FEW, config=BLOCK, scales="block", block=(1, 128, 128)), FP8_HOPPER),
    (100, replace(FEW, config=FULL, splits=2), "tcgen05.mma.cta_group::1.kind::f8f6f4"),
    (120, replace(FEW, splits=2), "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3"),
    (89, replace(FEW, kernel="decode_pointer", splits=2), "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3"),
]


@pytest.mark.parametrize(("capability", "case", "instruction"), COMPILED)
def test_compiles_to_the_tensor_core_within_the_gpu_s_limits(capability: int, case: Any, instruction: str) -> None:
    with gpu.compiling(capability) as built:
        cases.empty_launch(case).run()
    (kernel,) = built
    ptx = kernel.asm["ptx"]
    assert instruction in ptx
    by_tma = "cp.async.bulk.tensor.3d.shared" in ptx
    assert by_tma == (case.kernel == "decode")
    assert bool(re.search(r"atom\.global\.gpu\.acq_rel", ptx)) == (case.splits > 1)
    if case.splits > 1:  # all threads have stored their sums before the program arrives
        before = ptx[: ptx.index("atom.global")]
        assert "bar.sync" in before[before.rindex("st.global") :]
    assert kernel.metadata.shared <= SHARED_LIMIT[capability]
    assert (kernel.metadata.tmem_size or 0) <= 512
    # ptxas gives TMA on sm120 a frame of 8 bytes, and spills nothing (seen with -v).
    assert gpu.stack_bytes(kernel) <= (8 if capability == 120 and by_tma else 0)


def test_workspace_holds_each_split_of_each_tile() -> None:
    from dispatch.kernels.triton_decode import decode_launch, decode_workspace

    assert decode_workspace(17, 130, 2, block_m=16, block_n=64, splits=1) == (0, 0)
    assert decode_workspace(17, 130, 2, block_m=16, block_n=64, splits=3) == (12 * 3 * 16 * 64, 12)
    a, b, c = torch.empty(1, 32, dtype=F16), torch.empty(8, 32, dtype=F16), torch.empty(1, 8, dtype=F16)
    with pytest.raises(ValueError, match="needs a workspace"):
        decode_launch(a, b, c, **cases.SMALL, splits=2)


SIZES = (1, 7, 17, 127, 129, 1040)


def _check(case: Any, runs: int = 3) -> None:
    assert cases.complaints(case, "cuda", runs=runs) == [], case


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["decode", "decode_pointer"])
@pytest.mark.parametrize("k", [16, 32, 48, 1040, 4112])
def test_gpu_sizes(kernel: str, k: int) -> None:
    for m, n in itertools.product(SIZES[:-1], SIZES):
        rows = (("block_m", 16 if m <= 16 else 64),)
        _check(Case(kernel, m, n, k, splits=1, config=HALF + rows))
        _check(Case(kernel, m, n, k, splits=5, config=HALF + rows))
    _check(Case(kernel, 1, 1, 1, splits=2, odd=kernel != "decode", config=HALF))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["decode", "decode_pointer"])
@pytest.mark.parametrize("dtypes", [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (BF16, BF16), (F16, F16)])
def test_gpu_dtypes_and_recipes(kernel: str, dtypes: Any) -> None:
    config = (*HALF, ("block_k", 256 // dtypes[0].itemsize))
    for splits in (1, 4):
        for out, scales in ((BF16, "none"), (F16, "row"), (F32, "tensor")):
            _check(Case(kernel, 17, 272, 4112, dtypes=dtypes, out=out, scales=scales, splits=splits, config=config))
        _check(Case(kernel, 17, 272, 4112, dtypes=dtypes, promoted=True, out=F32, splits=splits, config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("block", [(1, 128, 128), (128, 128, 128), (64, 64, 64), (32, 32, 32)])
def test_gpu_block_scales(block: Any) -> None:
    config = (*BLOCK, ("block_k", block[2]))
    for (kernel, splits), batch in itertools.product((("decode", 1), ("decode_pointer", 3)), ((0, 0), (2, 2))):
        _check(Case(kernel, 17, 272, 1040, scales="block", block=block, batch=batch, splits=splits, config=config))


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_gpu_epilogue_and_batch(activation: str | None) -> None:
    for batch, bias, splits in (((0, 0), BF16, 1), ((3, 3), F32, 2), ((3, 0), F16, 1), ((0, 3), BF16, 3)):
        case = Case("decode", 30, 144, 1040, bias=bias, activation=activation, batch=batch, splits=splits, config=HALF)
        _check(case)
        _check(replace(case, dtypes=(BF16, BF16), scales="none", gap=7, config=BLOCK))


@pytest.mark.gpu
def test_gpu_splits_agree_under_load() -> None:
    _check(Case("decode", 16, 8192, 8192, splits=8, config=HALF), runs=50)
