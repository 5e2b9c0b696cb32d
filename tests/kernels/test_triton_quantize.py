"""The Triton quantizers: compiled for each arch, run by Triton's interpreter, and on a GPU compared with float64."""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dispatch.measuring import watch

torch = pytest.importorskip("torch", reason="the launchers take torch tensors here")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton
triton_quantize = pytest.importorskip("dispatch.kernels.triton_quantize")

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


cases = _load("_quantize_cases")
gpu = _load("_compile")
KINDS = [(dtype, fmt) for dtype in (torch.bfloat16, torch.float16, torch.float32) for fmt in cases.FORMATS]


@pytest.fixture(scope="module")
def interpreted() -> dict[str, list[str]]:
    """What the interpreter's run found; TRITON_INTERPRET has to be set before Triton is imported."""
    done = subprocess.run(
        [sys.executable, HERE / "_quantize_cases.py"],
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


def _launch_all(dtype: Any, fmt: Any) -> None:
    for rows, cols in ((64, 1024), (2, 28672), (2, 40000), (33, 16384), (48, 1000)):
        x = torch.empty(rows, cols, dtype=dtype)
        for route in cases.ROUTES if rows == 64 else ("rows",):
            cases.quantize(x, fmt, route, multiple=16)
    for rows, cols in ((1000, 48), (2048, 48), (4096, 48), (4096, 64)):
        x = torch.empty(rows, cols, dtype=dtype)
        for route in ("columns", "many_transposed") if rows <= 2048 else ("columns",):
            cases.quantize(x, fmt, route, multiple=16)


def _launch_guarded(dtype: Any, fmt: Any) -> None:
    guard = (torch.empty(100000), torch.empty(2))
    for rows, cols in ((64, 1000), (64, 28672), (64, 40000)):
        cases.quantize(torch.empty(rows, cols, dtype=dtype), fmt, "rows", guard=guard)
    for route in cases.ROUTES[1:]:
        for rows, cols in ((128, 256), (90, 1000)):
            cases.quantize(torch.empty(rows, cols, dtype=dtype), fmt, route, guard=guard)


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_compiles_to_the_hardware_conversion_without_spills(capability: int) -> None:
    with gpu.compiling(capability) as built:
        for dtype, fmt in KINDS[::3] + KINDS[4:5] * (capability == 90):  # bf16 to e4m3, fp16 to e5m2, fp32
            _launch_all(dtype, fmt)
    assert {kernel.metadata.name for kernel in built} == {
        "quantize_rows_kernel",
        "quantize_long_rows_kernel",
        "quantize_columns_kernel",
        "column_amax_kernel",
        "scale_columns_kernel",
        "quantize_many_kernel",
        "tensor_amax_kernel",
        "scale_tensor_kernel",
    }
    for kernel in {id(kernel): kernel for kernel in built}.values():
        assert gpu.stack_bytes(kernel) == 0, kernel.metadata.name
        _converts_in_hardware(kernel, capability)


@pytest.mark.parametrize("capability", [89, 90, 100, 120])
def test_compiles_with_the_guards_sums(capability: int) -> None:
    with gpu.compiling(capability) as built:
        for dtype, fmt in KINDS[::3] + KINDS[4:5] * (capability == 90):
            _launch_guarded(dtype, fmt)
    for kernel in {id(kernel): kernel for kernel in built}.values():
        assert gpu.stack_bytes(kernel) <= 8, kernel.metadata.name  # ptxas keeps two registers there, and more programs
        _converts_in_hardware(kernel, capability)


@pytest.mark.parametrize(
    ("route", "rows", "cols"),
    [("rows", 64, 4096), ("rows", 64, 8192), ("rows", 64, 28672), ("columns", 4096, 64), ("tensor", 64, 4096)],
)
def test_the_guards_sums_take_no_room_from_other_programs(route: str, rows: int, cols: int) -> None:
    x = torch.empty(rows, cols, dtype=torch.bfloat16)
    guard = cases.guard_state(cases.oriented(route, x), x.device)
    with gpu.compiling(90) as built:
        cases.quantize(x, torch.float8_e4m3fn, route)
        plain = built[-1]
        cases.quantize(x, torch.float8_e4m3fn, route, guard=guard)
    assert built[-1] is not plain
    assert gpu.programs_by_registers(built[-1]) >= gpu.programs_by_registers(plain)


@pytest.mark.parametrize("capability", [90, 100])
def test_the_number_of_a_launch_is_asked_for_before_anything_else(capability: int) -> None:
    """Asked for late it may be that of the next launch: the last program moves it on. All threads have to agree."""
    from dispatch.kernels.triton_quantize_many import Operand, quantize_many

    guard = (torch.empty(100000), torch.empty(2))
    with gpu.compiling(capability) as built:
        for dtype, fmt in KINDS[::3]:
            for rows, cols in ((128, 256), (90, 1000), (64, 40000)):
                x = torch.empty(rows, cols, dtype=dtype)
                for route in [route for route in cases.ROUTES if not route.startswith("many")]:
                    cases.quantize(x, fmt, route, guard=guard)
                out = torch.empty(cols, rows, dtype=fmt)
                quantize_many([Operand(x, out, torch.empty(cols), True, *guard)])
                if cols < 4096:
                    quantize_many([Operand(x, torch.empty_like(x, dtype=fmt), torch.empty(rows), False, *guard)])
    looking = {id(kernel): kernel for kernel in built if "amax" not in kernel.metadata.name}.values()
    assert len({kernel.metadata.name for kernel in looking}) == 6
    for kernel in looking:
        code = gpu.sass(kernel)
        assert re.findall(r"\bLDG.*\[(.*?)\]", code)[0].endswith("+0x1c"), kernel.metadata.name
        assert "BAR.RED.AND" in code, kernel.metadata.name


def _converts_in_hardware(kernel: Any, capability: int) -> None:
    ptx, name = kernel.asm["ptx"], kernel.metadata.name
    conversions = set(re.findall(r"cvt\.rn\.satfinite\.(e[45]m[23]x2)\.f(?:32|16x2)", ptx))
    assert len(conversions) == (0 if "amax" in name else 1), (name, conversions)
    assert not gpu.pairs_of_shifted_bytes(ptx), name
    if capability >= 90 and "amax" not in name:
        assert "e5m2x2.f32" in ptx or "e4m3x2.f32" in ptx, f"{name} rounds twice"


def test_the_guard_looks_at_whatever_takes_turns() -> None:
    from dispatch.kernels.triton_quantize_common import LEARNT, LOOK_CYCLE, LOOK_SLICES

    cycle, learnt = len(cases.SLICES), LEARNT.value
    assert (LOOK_CYCLE.value, LOOK_SLICES.value) == (cycle, max(filter(None, cases.SLICES)) + 1)
    order = [cases.SLICES[launch % cycle] for launch in range(learnt)]
    for place in range(LOOK_SLICES.value):
        looks = [launch for launch, found in enumerate(order) if found == place]
        assert looks[0] < 15
        assert max(later - sooner for sooner, later in itertools.pairwise(looks)) <= 15  # and judged in the next
    for operands in (x for x in range(1, 129) if x % cycle):
        looks = {(launch % operands, place) for launch, place in enumerate(order) if place is not None}
        assert len(looks) == operands * LOOK_SLICES.value


def test_the_benchmark_of_the_guard_asks_for_calls_enough_to_learn_from() -> None:
    from dispatch.kernels.triton_quantize_common import LEARNT

    tree = ast.parse((HERE.parents[1] / "benchmarks" / "guard.py").read_text(encoding="utf-8"))
    (normal,) = (
        ast.literal_eval(x.value)
        for x in tree.body
        if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == "NORMAL"
    )
    assert normal["cuda"] > LEARNT.value
    assert normal["cpu"] > watch.LEARNT


def test_columns_need_a_workspace_only_where_they_are_too_long_to_keep() -> None:
    from dispatch.kernels.triton_quantize_columns import COLUMN_SPLITS, columns_launches, columns_workspace

    for rows, launches in ((1, 1), (2048, 1), (2049, 2), (28672, 2)):
        assert columns_workspace((rows, 64), (64, rows)) == (0 if launches == 1 else COLUMN_SPLITS * 64)
        assert len(columns_launches((rows, 64), 64, (64, rows))) == launches


def test_many_refuses_what_is_too_long_or_too_many() -> None:
    from dispatch.kernels.triton_quantize_many import Source, many_launch, tile_of

    short, long = (Source((16, cols), cols, (16, cols), False) for cols in (64, 1 << 16))
    assert tile_of(long) is None
    with pytest.raises(ValueError, match=r"operand 1, .* is too long"):
        many_launch([short, long])
    with pytest.raises(ValueError, match="5 operands; allowed: 1 to 4"):
        many_launch([short] * 5)


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


SIZES = [
    (1, 1),
    (1, 4097),
    (15, 17),
    (17, 127),
    (129, 129),
    (1000, 1000),
    (3, 28672),
    (4097, 15),
    (700, 2049),
    (20000, 33),
    (4096, 192),
]


@pytest.mark.gpu
@pytest.mark.parametrize("route", cases.ROUTES)
@pytest.mark.parametrize(("rows", "cols"), SIZES)
@pytest.mark.parametrize(("dtype", "fmt"), [KINDS[0], KINDS[3], KINDS[4]])
def test_gpu_rounds_as_float64_does(route: str, rows: int, cols: int, dtype: Any, fmt: Any) -> None:
    values = torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows * cols)).to(dtype).cuda()
    for multiple, gap in ((1, 0), (16, 7)):
        x = cases.source(rows, cols, values, gap=gap)
        if (rows if route in cases.TRANSPOSED else cols) > cases.MANY_LIMITS.get(route, 1 << 30) - multiple:
            pytest.skip("too long for one launch with others")
        assert cases.complaints(x, fmt, route, _rounded, multiple=multiple) == [], (multiple, gap)


@pytest.mark.gpu
@pytest.mark.parametrize("route", cases.ROUTES)
@pytest.mark.parametrize(("dtype", "fmt"), KINDS)
def test_gpu_keeps_nan_and_inf_and_ignores_them_in_amax(route: str, dtype: Any, fmt: Any) -> None:
    x = cases.hostile_rows(dtype).cuda()
    x = x.t().contiguous() if route in cases.TRANSPOSED else x
    assert cases.complaints(x, fmt, route, _rounded, multiple=16) == []


@pytest.mark.gpu
@pytest.mark.parametrize("route", cases.ROUTES)
def test_gpu_rounds_e8m0_scales_up_to_a_power_of_two(route: str) -> None:
    x = torch.randn(300, 1000, generator=torch.Generator().manual_seed(3)).cuda().bfloat16()
    for fmt in cases.FORMATS:
        wanted = cases.expected_scale(x, fmt, route)
        mantissa, exponent = torch.frexp(wanted)
        wanted = torch.ldexp(torch.ones_like(wanted), exponent - (mantissa == 0.5).int())
        out, scale = cases.quantize(x, fmt, route, e8m0=True)
        assert torch.equal(scale, wanted)
        oriented = x.t() if route in cases.TRANSPOSED or route == "tensor_transposed" else x
        per_row = wanted.double() if len(wanted) == 1 else wanted.double()[:, None]
        assert _rounded(out, oriented.double() / per_row, fmt) == []


@pytest.mark.gpu
@pytest.mark.parametrize("route", cases.ROUTES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 100), (33, 1000), (1000, 300), (300, 4096), (70, 28672), (2048, 2048)])
def test_gpu_sums_squares_and_errors_of_sampled_tiles(route: str, rows: int, cols: int) -> None:
    if (rows if route in cases.TRANSPOSED else cols) > cases.MANY_LIMITS.get(route, 1 << 30):
        pytest.skip("too long for one launch with others")
    x = cases.normal(rows, cols).cuda()
    assert cases.wrong_sums(route, x, launches=range(32)) == []
    assert cases.wrong_trips(route, x) == []


@pytest.mark.gpu
@pytest.mark.parametrize("route", cases.ROUTES)
def test_gpu_nothing_normal_trips_a_thousand_launches(route: str) -> None:
    assert cases.thousand_launches(route, 1024, 1000) == []


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("route", [route for route in cases.ROUTES if not route.startswith("many")])
def test_gpu_addresses_more_than_2_31_elements(route: str) -> None:
    rows, cols = (2**18 + 3, 8200) if route in ("rows", "tensor") else (8200, 2**18 + 3)
    x = torch.empty(rows, cols, dtype=torch.bfloat16, device="cuda").normal_()
    out, scale = cases.quantize(x, torch.float8_e4m3fn, route)
    wanted = cases.expected_scale(x[-2:], torch.float8_e4m3fn, "rows") if route == "rows" else scale
    assert torch.equal(scale[-len(wanted) :][-2:], wanted[-2:])
    oriented = x if route in ("rows", "tensor") else x.t()
    for part in (slice(0, 2), slice(-2, None)):
        per_row = scale if len(scale) == 1 else scale[part, None]
        assert _rounded(out[part], oriented[part].double() / per_row.double(), torch.float8_e4m3fn) == []
