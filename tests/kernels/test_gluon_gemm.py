"""The warp-specialized Hopper kernel: compiled, and its text run on a CPU; on a GPU compared with float64."""

from __future__ import annotations

import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the launchers take torch tensors here")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton

from dispatch.kernels.gluon_gemm import SHARED_LIMIT, Config  # noqa: E402

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
emulated = _load("_gluon_on_cpu")
Case, E4M3, E5M2 = cases.Case, cases.E4M3, cases.E5M2
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32

PINGPONG = Config(128, 128, stages=6, pingpong=True, slices=4)
WIDE = Config(64, 256, stages=5, pingpong=True, slices=4, group=16)
COOPERATIVE = Config(128, 256, stages=4, slices=4)
PROMOTED = Config(128, 128, stages=6, slices=4)
ALONE = Config(128, 128, stages=5, consumers=1, slices=2)
SMALL = Config(64, 64, stages=6, consumers=1, slices=1)
FLAT = Config(64, 128, stages=6, consumers=1, slices=1)
FAST = {"pingpong": PINGPONG, "wide": WIDE, "cooperative": COOPERATIVE, "alone": ALONE, "small": SMALL}
BLOCKS = {"scales": "block", "block": (1, 128, 128)}
DENSE = Case("hopper", 512, 512, 1024)


def _sixteen_bit(config: Config) -> Config:
    return replace(config, block_k=64)


FORMS = {
    "fp8": replace(DENSE),
    "fp8, float32 out": replace(DENSE, dtypes=(E5M2, E4M3), out=F32, bias=BF16, activation="gelu"),
    "fp8, pointers": replace(DENSE, dtypes=(E4M3, E5M2), n=511, out=F16, scales="tensor", activation="relu"),
    "bf16": replace(DENSE, dtypes=(BF16, BF16), scales="none", bias=F32, activation="gelu_tanh"),
    "f16": replace(DENSE, dtypes=(F16, F16), scales="none", out=F16, activation="silu"),
}
INSTRUCTIONS = {"fp8": "e4m3.e4m3", "fp8, float32 out": "e5m2.e4m3", "fp8, pointers": "e4m3.e5m2", "bf16": "bf16.bf16"}
INSTRUCTIONS["f16"] = "f16.f16"
COMPILED = [
    *((form, name, case, config) for form, case in FORMS.items() for name, config in FAST.items()),
    *(
        (f"fp8, {kind}", name, replace(DENSE, **scales, promoted=True, out=out), config)
        for kind, scales in (("promoted", {}), ("blocks", BLOCKS))
        for name, config in {"cooperative": PROMOTED, "flat": FLAT}.items()
        for out in (BF16, F32)
    ),
]


@pytest.mark.parametrize(("form", "name", "case", "config"), COMPILED)
def test_compiles_to_wgmma_without_spills(form: str, name: str, case: Any, config: Config) -> None:
    sixteen = case.dtypes[0].itemsize == 2
    config = _sixteen_bit(config) if sixteen else config
    if case.out is F32:
        config = replace(config, stages=config.stages - 1)
    with gpu.compiling(90) as built:
        cases.empty_launch(replace(case, hopper=config)).run()
    (kernel,) = built
    ptx = kernel.asm["ptx"]
    pair = INSTRUCTIONS.get(form, "e4m3.e4m3")
    assert re.search(rf"wgmma.mma_async.sync.aligned.m64n\d+k{16 if sixteen else 32}.f32.{pair}", ptx)
    assert "cp.async.bulk.tensor.2d.shared" in ptx
    assert ("cp.async.bulk.tensor.2d.global" in ptx) == (case.n % 16 == 0)
    assert "setmaxnreg" in ptx
    assert "griddepcontrol.wait" in ptx
    assert (
        kernel.metadata.shared
        <= config.shared_bytes(2 if sixteen else 1, case.out.itemsize) + 2048
        <= SHARED_LIMIT + 2048
    )
    # Written by pointers, the cooperative tile of 256 columns spills in the epilogue, not in the loop.
    assert gpu.stack_bytes(kernel) <= (72 if config is COOPERATIVE and case.n % 16 else 0)


SIZES = [(1, 16, 16), (7, 17, 32), (17, 1, 48), (127, 129, 1040), (129, 127, 4112), (1040, 264, 272), (300, 1040, 144)]
FEW = [SIZES[1], SIZES[3], (300, 400, 1040)]


@pytest.mark.parametrize("size", FEW)
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("form", FORMS)
def test_its_text_multiplies_as_float64_does(form: str, name: str, size: tuple[int, int, int]) -> None:
    case = replace(FORMS[form], **dict(zip("mnk", size, strict=True)), hopper=FAST[name])
    if case.dtypes[0].itemsize == 2:
        case = replace(case, hopper=_sixteen_bit(case.hopper))
    with emulated.on_the_cpu():
        assert cases.complaints(case) == []


@pytest.mark.parametrize("size", [*FEW, (200, 264, 1152), (70, 130, 128), (70, 130, 256)])
@pytest.mark.parametrize("config", [PROMOTED, FLAT], ids=["cooperative", "flat"])
@pytest.mark.parametrize("scales", [{}, BLOCKS], ids=["rows", "blocks"])
def test_its_text_promotes_as_float64_does(scales: dict[str, Any], config: Config, size: tuple[int, int, int]) -> None:
    case = Case("hopper", *size, promoted=True, hopper=config, out=F32, bias=BF16, activation="silu", **scales)
    with emulated.on_the_cpu():
        assert cases.complaints(case) == []


def test_its_text_stores_nan_where_it_belongs() -> None:
    a, b = torch.ones(16, 64).to(E4M3), torch.ones(32, 64).to(E4M3)
    a[3, 5] = float("nan")
    c = torch.zeros(16, 32, dtype=BF16)
    config = replace(SMALL, stages=2)
    with emulated.on_the_cpu():
        cases.launch(Case("hopper", 16, 32, 64, activation="relu", hopper=config), a, b, c, None, None, None).run()
    assert c[3].isnan().all()
    assert (c[torch.arange(16) != 3] == 64).all()


def test_its_text_reaches_rows_beyond_two_to_the_thirty_one() -> None:
    m, n, k, stride = 9, 17, 64, 2**28 + 16
    a, b = torch.randn(m, k).to(E4M3), torch.randn(n, k).to(E4M3)
    # 4.8 GB are asked for, nine rows of them are touched. A row of 17 is written by pointers.
    c = torch.empty((m - 1) * stride + n, dtype=BF16).as_strided((m, n), (stride, 1))
    with emulated.on_the_cpu():
        cases.launch(Case("hopper", m, n, k, hopper=SMALL), a, b, c, None, None, None).run()
    exact = a.double() @ b.double().mT
    assert ((c.double() - exact).abs() <= 2**-8 * exact.abs() + 1e-4).all()


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("form", FORMS)
def test_products_match_float64(form: str, name: str, size: tuple[int, int, int]) -> None:
    case = replace(FORMS[form], **dict(zip("mnk", size, strict=True)), hopper=FAST[name])
    if case.dtypes[0].itemsize == 2:
        case = replace(case, hopper=_sixteen_bit(case.hopper))
    if case.out is F32:
        case = replace(case, hopper=replace(case.hopper, stages=case.hopper.stages - 1))
    assert cases.complaints(case, "cuda", runs=2) == []


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("config", [PROMOTED, FLAT], ids=["cooperative", "flat"])
@pytest.mark.parametrize("scales", [{}, BLOCKS], ids=["rows", "blocks"])
def test_promoted_products_match_float64(scales: dict[str, Any], config: Config, size: tuple[int, int, int]) -> None:
    case = Case("hopper", *size, promoted=True, hopper=config, bias=BF16, **scales)
    assert cases.complaints(case, "cuda", runs=2) == []


@pytest.mark.gpu
def test_writes_outputs_beyond_two_to_the_thirty_one() -> None:
    m, n, k = 70_000, 32_784, 64
    a, b = torch.randn(m, k, device="cuda").to(E4M3), torch.randn(n, k, device="cuda").to(E4M3)
    c = torch.full((m, n), float("nan"), device="cuda", dtype=BF16)
    from dispatch.kernels.gluon_gemm import gemm_launch

    gemm_launch(a, b, c, config=PINGPONG, programs=132).run()
    for rows in (slice(0, 3), slice(m - 3, m)):
        exact = a[rows].double() @ b.double().mT
        assert (c[rows].double() - exact).norm() / exact.norm() < 3e-3
    assert not c[::997].isnan().any()
