"""The dense Triton GEMM: run by Triton's interpreter, compiled for each arch, and on a GPU compared with float64."""

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
SHARED_LIMIT = {89: 101_376, 90: 232_448, 100: 232_448, 103: 232_448, 120: 101_376}
FP8_INSTRUCTION = {
    89: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3",
    90: r"wgmma.mma_async.sync.aligned.m64n\d+k32.f32.e4m3.e4m3",
    100: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    103: "tcgen05.mma.cta_group::1.kind::f8f6f4",
    120: "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3",
}
NAMES = [name for name, case in cases.interpreted_cases().items() if case.kernel in ("tma", "pointer")]
NAMES.append("pointer far apart")


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


BIG = (("block_m", 128), ("block_n", 256), ("block_k", 128), ("stages", 3), ("warps", 8))
SQUARE = (("block_m", 128), ("block_n", 128), ("block_k", 128), ("stages", 3), ("warps", 8))
SHORT = (("block_m", 128), ("block_n", 128), ("block_k", 64), ("stages", 3), ("warps", 8))
DENSE = Case("tma", 512, 512, 1024, config=SQUARE)
POINTER = replace(DENSE, kernel="pointer", config=SHORT)
BLOCKS = {"scales": "block", "block": (1, 128, 128)}
COMPILED = [
    (90, replace(DENSE, config=BIG, bias=BF16, activation="relu"), FP8_INSTRUCTION[90]),
    (
        90,
        replace(DENSE, config=(*BIG[:3], ("stages", 4), BIG[4]), halves=2, activation="gelu_tanh"),
        FP8_INSTRUCTION[90],
    ),
    (90, replace(DENSE, dtypes=(E5M2, E4M3), promoted=True), r"wgmma\S*.f32.e5m2.e4m3"),
    (90, replace(DENSE, dtypes=(E4M3, E5M2), scales="tensor"), r"wgmma\S*.f32.e4m3.e5m2"),
    (90, replace(DENSE, dtypes=(BF16, BF16), scales="none", config=SHORT), r"wgmma\S*.f32.bf16.bf16"),
    (90, replace(DENSE, dtypes=(F16, F16), scales="none", config=SHORT, out=F32), r"wgmma\S*.f32.f16.f16"),
    (90, replace(DENSE, **BLOCKS, activation="gelu"), FP8_INSTRUCTION[90]),
    (90, replace(DENSE, n=511), FP8_INSTRUCTION[90]),  # stored by pointers
    *((arch, replace(DENSE, config=(*SQUARE[:4], ("warps", 4))), FP8_INSTRUCTION[arch]) for arch in (100, 103)),
    (100, replace(DENSE, **BLOCKS), FP8_INSTRUCTION[100]),
    (120, replace(DENSE, config=SHORT), FP8_INSTRUCTION[120]),
    (120, replace(POINTER, config=(SHORT[0], ("block_n", 64), *SHORT[2:]), **BLOCKS), FP8_INSTRUCTION[120]),
    (89, POINTER, FP8_INSTRUCTION[89]),
    (
        89,
        replace(POINTER, dtypes=(BF16, BF16), scales="none", config=(*SHORT[:2], ("block_k", 32), *SHORT[3:])),
        "bf16",
    ),
]


@pytest.mark.parametrize(("capability", "case", "instruction"), COMPILED)
def test_compiles_to_the_tensor_core_within_the_gpu_s_limits(capability: int, case: Any, instruction: str) -> None:
    with gpu.compiling(capability) as built:
        cases.empty_launch(case).run()
    (kernel,) = built
    ptx = kernel.asm["ptx"]
    assert re.search(rf"\b(wgmma|mma\.sync|tcgen05\.mma)\S*{instruction}|{instruction}", ptx)
    loads_by_tma = "cp.async.bulk.tensor.3d.shared" in ptx
    assert loads_by_tma == (case.kernel == "tma")
    assert ("cp.async.bulk.tensor.3d.global" in ptx) == (loads_by_tma and case.n % 16 == 0)
    assert kernel.metadata.shared <= SHARED_LIMIT[capability]
    assert (kernel.metadata.tmem_size or 0) <= 512
    # ptxas gives TMA on sm120 a frame of 8 bytes, and spills nothing (seen with -v).
    assert gpu.stack_bytes(kernel) <= (8 if capability == 120 and loads_by_tma else 0)


def test_promotion_is_not_folded_into_the_instruction() -> None:
    added = []
    for promoted in (False, True):
        with gpu.compiling(89) as built:
            cases.empty_launch(replace(POINTER, promoted=promoted, scales="none", config=SHORT)).run()
        added.append(len(re.findall(r"add\.(?:rn\.)?f32", built[0].asm["ptx"])))
    assert added[1] >= added[0] + 64  # a thread's part of the tile


def test_on_hopper_each_128_of_k_is_added_by_itself() -> None:
    added = []
    for promoted in (False, True):
        with gpu.compiling(90) as built:
            cases.empty_launch(replace(DENSE, promoted=promoted, scales="none")).run()
        added.append(len(re.findall(r"add\.(?:rn\.)?f32", built[0].asm["ptx"])))
    assert added[1] >= added[0] + 64  # a thread's part of the tile


def test_relu_keeps_nan() -> None:
    with gpu.compiling(90) as built:
        cases.empty_launch(replace(DENSE, activation="relu")).run()
        cases.empty_launch(replace(DENSE, kernel="decode", config=SHORT, activation="relu")).run()
    for kernel in built:  # max.f32 returns the other number (the interpreter's maximum does not)
        assert not re.search(r"max\.(?:ftz\.)?f32", kernel.asm["ptx"])


def test_scales_are_not_waited_for_before_the_tensor_core_starts() -> None:
    with gpu.compiling(90) as built:
        cases.empty_launch(replace(DENSE, **BLOCKS)).run()
    loads = re.findall(r"(@%p\d+ )?ld\.global\.b32", built[0].asm["ptx"])  # ptxas waits for a masked load
    assert loads == ["", "", ""]


def test_refuses_what_it_cannot_multiply() -> None:
    from dispatch.kernels import triton_gemm

    a, b, c = torch.empty(8, 32, dtype=F16), torch.empty(8, 32, dtype=F16), torch.empty(8, 8, dtype=F16)
    config = {**cases.SMALL, **cases.WALK}
    one = torch.ones(())
    for operands, changed, complaint in (
        ((a, b[:, :16], c), {}, "a .* by b"),
        ((a, b, c[:4]), {}, "into c"),
        ((a.t(), b, c), {}, "the last must be 1"),
        ((a[:0], b, c), {}, "empty"),
        ((a[None, None], b, c), {}, "2 or 3 dimensions"),
        ((torch.empty(8, 33, dtype=F16)[:, :32], b, c), {}, "16-byte"),
        ((a, b, c, one), {}, "one operand has a scale"),
        ((a, b, c, torch.ones(7), one), {}, "does not broadcast"),
        ((a, b, c, one, one), {"block": (1, 16, 16)}, "does not divide"),
        ((a, b, c, one, one), {"block": (1, 32, 32)}, "block scales of shape"),
        ((a, b, c), {"activation": "tanh"}, "unknown"),
    ):
        with pytest.raises(ValueError, match=complaint):
            triton_gemm.gemm_launch(*operands, **{**config, **changed})


def test_tma_takes_and_writes_what_is_aligned() -> None:
    from dispatch.kernels._triton_tile import tma_takes, tma_writes

    wide = torch.empty(4, 24, dtype=F16)
    for x, takes, writes in (
        (wide, True, True),
        (wide[:, :16], True, True),
        (wide[:, :17], True, False),  # a store would reach beyond the row
        (wide[:, 1:17], False, False),
        (torch.empty(4, 17, dtype=F16), False, False),
        (wide[:1].expand(4, 24), False, False),
        (torch.empty(1, 17, dtype=F16), True, False),
        (torch.empty(3, 4, 8, dtype=F16)[:, :3], True, True),
        (torch.empty(3 * 36, dtype=F16).as_strided((3, 4, 8), (36, 8, 1)), False, False),
    ):
        assert (tma_takes(x), tma_writes(x)) == (takes, writes), (x.shape, x.stride())


def test_a_broadcast_batch_is_read_once() -> None:
    a = torch.empty(1, 8, 32, dtype=F16).expand(4, 8, 32)
    made = cases.launch(
        Case("tma", 8, 16, 32), a, torch.empty(16, 32, dtype=F16), torch.empty(4, 8, 16), None, None, None
    )
    assert made.args[0].shape == [1, 8, 32]
    assert made.args[10:12] == (0, 0)


SIZES = (1, 7, 17, 127, 129, 1040)
GPU_TILE = (("block_m", 128), ("block_n", 128), ("block_k", 64), ("stages", 4), ("warps", 8), ("programs", 132))
PAIRS = [(E4M3, E4M3), (E5M2, E4M3), (E4M3, E5M2), (BF16, BF16), (F16, F16)]


def _check(case: Any, runs: int = 2) -> None:
    assert cases.complaints(case, "cuda", runs=runs) == [], case


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("k", [16, 32, 48, 1040, 4112])
def test_gpu_sizes(kernel: str, k: int) -> None:
    for m, n in itertools.product(SIZES, SIZES):
        _check(Case(kernel, m, n, k, config=GPU_TILE))
    if kernel == "pointer":
        _check(Case(kernel, 129, 127, k - 1, odd=True, config=GPU_TILE))
        _check(Case(kernel, 1, 1, 1, odd=True, config=GPU_TILE))
    else:
        _check(Case(kernel, 129, 144, k, halves=2, config=GPU_TILE))
        _check(Case(kernel, 1, 1, 1, config=GPU_TILE))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("dtypes", PAIRS)
def test_gpu_dtypes_and_recipes(kernel: str, dtypes: Any) -> None:
    for out, scales in ((BF16, "none"), (F16, "row"), (F32, "tensor")):
        for n, gap in ((272, 0), (129, 0), (130, 14)):
            _check(Case(kernel, 130, n, 1040, dtypes=dtypes, out=out, scales=scales, gap=gap, config=GPU_TILE))
    for block_k in (64, 128):
        tile = (*GPU_TILE, ("block_k", block_k // dtypes[0].itemsize), ("stages", 3))
        _check(Case(kernel, 130, 272, 4112, dtypes=dtypes, promoted=True, out=F32, config=tile))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("block", [(1, 128, 128), (128, 128, 128), (64, 64, 64), (32, 32, 32)])
def test_gpu_block_scales(kernel: str, block: Any) -> None:
    case = Case(kernel, 130, 272, 1040, scales="block", block=block)
    for block_n in (64, 128, 256):
        tile = (*GPU_TILE, ("block_k", min(block[2], 128)), ("block_n", block_n), ("stages", 2))
        for m, n, batch in ((130, 272, (0, 0)), (17, 127, (2, 2)), (257, 400, (2, 0))):
            _check(replace(case, m=m, n=n, batch=batch, config=tile))


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["tma", "pointer"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_gpu_epilogue_and_batch(kernel: str, activation: str | None) -> None:
    for batch, bias in (((0, 0), BF16), ((3, 3), F32), ((3, 0), F16), ((0, 3), BF16)):
        case = Case(kernel, 130, 144, 272, bias=bias, activation=activation, batch=batch, config=GPU_TILE)
        _check(case)
        _check(replace(case, dtypes=(BF16, BF16), scales="none", gap=7))


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(("kernel", "n"), [("tma", 32768), ("tma", 32763), ("pointer", 32768)])
def test_gpu_writes_more_than_2_31_elements(kernel: str, n: int) -> None:
    m, k = 70_000, 64
    a, b = (torch.randn(rows, k, device="cuda").to(E4M3) for rows in (m, n))
    c = torch.full((m, n), float("nan"), dtype=BF16, device="cuda")
    cases.launch(Case(kernel, m, n, k, config=GPU_TILE), a, b, c, None, None, None).run()
    for part in (slice(0, 130), slice(65_500, 65_600), slice(-130, None)):
        exact = a[part].double() @ b.double().mT
        assert torch.allclose(c[part].double(), exact, rtol=2**-7, atol=0.05)
    assert not c.isnan().any()
