"""The Triton block quantizers: compiled, run by Triton's interpreter, and on a GPU compared with a reference."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the launchers take torch tensors here")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = _load("_quantize_blocks_cases")
gpu = _load("_compile")
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
KINDS = [(dtype, fmt) for dtype in (torch.bfloat16, torch.float16, torch.float32) for fmt in FORMATS]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """What the interpreter's run found; TRITON_INTERPRET has to be set before Triton is imported."""
    done = subprocess.run(
        [sys.executable, HERE / "_quantize_blocks_cases.py"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", cases.interpreted_cases())
def test_interpreted_scales_padding_and_exact_values(name: str, interpreted: dict[str, list[str]]) -> None:
    assert interpreted[name] == []


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_compiles_to_the_hardware_conversion_without_spills(capability: int) -> None:
    with gpu.compiling(capability) as built:
        for dtype, fmt in KINDS[::3]:  # bf16 to e4m3, fp16 to e5m2
            for name in cases.RECIPES if capability == 90 else ("1x128", "32x32", "1x32:e8m0"):
                for transposed in (False, True):
                    x = torch.empty(256, 512, dtype=dtype)
                    recipe = cases.recipe_of(name, fmt)
                    cases.run(x, recipe, transposed=transposed, multiple=(16, 16), scale_along_rows=False)
    for kernel in {id(kernel): kernel for kernel in built}.values():
        ptx, name = kernel.asm["ptx"], kernel.metadata.name
        assert len(set(re.findall(r"cvt\.rn\.satfinite\.(e[45]m[23]x2)\.f(?:32|16x2)", ptx))) == 1, name
        assert gpu.stack_bytes(kernel) == 0, name
        assert not gpu.pairs_of_shifted_bytes(ptx), name


def _spacing(values: Any, fmt: Any) -> Any:
    least, mantissa = (-6, 3) if fmt is torch.float8_e4m3fn else (-14, 2)
    exponent = values.abs().clamp_min(2.0**least).log2().floor()
    return torch.exp2(exponent - mantissa)


def _rounded(found: Any, scaled: Any, fmt: Any) -> list[str]:
    """Compare with float64: within half a quantum, NaN and Inf where they belong."""
    decoded, wrong = found.double(), []
    infinite = scaled.isinf()
    if fmt is torch.float8_e5m2:
        if not torch.equal(decoded[infinite], scaled[infinite]):
            wrong.append("Inf did not stay Inf")
    elif not decoded[infinite].isnan().all():
        wrong.append("Inf became a number")
    if not torch.equal(decoded.isnan(), scaled.isnan() | (infinite & (fmt is torch.float8_e4m3fn))):
        wrong.append("NaN in the wrong places")
    finite = scaled.isfinite()
    off = (decoded - scaled)[finite].abs() / _spacing(scaled[finite], fmt)
    if off.numel() and off.max() > 0.5 + 1e-4:
        wrong.append(f"off by {off.max().item():.3f} quanta")
    return wrong


@pytest.mark.parametrize("block", [(1, 128), (128, 128), (64, 64), (32, 32), (1, 32)])
@pytest.mark.parametrize("transposed", [False, True])
def test_compiles_with_the_guards_sums(block: tuple[int, int], transposed: bool) -> None:
    from dispatch.kernels.triton_quantize_blocks import quantize_blocks

    shape = (512, 256)
    x = torch.empty(shape[::-1] if transposed else shape, dtype=torch.bfloat16)
    out = torch.empty(shape, dtype=torch.float8_e4m3fn)
    scale = torch.empty(-(-shape[0] // block[0]), -(-shape[1] // block[1]))
    with gpu.compiling(90) as built:
        quantize_blocks(x, out, scale, block, torch.empty(1000), torch.empty(2), transposed=transposed)
    (kernel,) = built
    assert gpu.stack_bytes(kernel) <= 8  # ptxas keeps two registers there, and more programs
    assert re.findall(r"\bLDG.*\[(.*?)\]", gpu.sass(kernel))[0].endswith("+0x1c")  # the number of the launch
    assert not gpu.pairs_of_shifted_bytes(kernel.asm["ptx"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.RECIPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "fmt"), [KINDS[0], KINDS[3], KINDS[4]])
def test_gpu_rounds_as_float64_does(name: str, transposed: bool, dtype: Any, fmt: Any) -> None:
    for index, (rows, cols) in enumerate([(1, 1), (17, 127), (129, 129), (1000, 1000), (700, 2049), (4097, 15)]):
        values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols)).to(dtype).cuda()
        for multiple, gap in (((1, 1), 0), ((16, 512), 7)):
            options = {"transposed": transposed, "multiple": multiple, "gap": gap, "scale_along_rows": index % 2 == 0}
            assert cases.complaints(values, cases.recipe_of(name, fmt), _rounded, **options) == [], (rows, cols)


@pytest.mark.gpu
@pytest.mark.parametrize("name", cases.RECIPES)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "fmt"), KINDS)
def test_gpu_keeps_nan_and_inf_and_ignores_them_in_amax(name: str, transposed: bool, dtype: Any, fmt: Any) -> None:
    values = cases.hostile_values(dtype).cuda()
    recipe = cases.recipe_of(name, fmt)
    assert cases.complaints(values, recipe, _rounded, transposed=transposed, multiple=(16, 128)) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["1x128", "128x128", "64x64", "32x32", "1x32"])
@pytest.mark.parametrize("transposed", [False, True])
def test_gpu_sums_squares_and_errors_of_sampled_tiles(name: str, transposed: bool) -> None:
    assert cases.wrong_sums(name, "cuda", transposed=transposed, launches=(0, 1, 2, 5, 16)) == []
