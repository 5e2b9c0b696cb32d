"""The cublas backend: what it rejects and why, torch under an emulated `_scaled_mm`, JAX, and both on a GPU."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from typing import Any

import numpy as np
import pytest
from dispatch.plugins import cublas

from dispatch._backend import Backend
from dispatch._problem import ACTIVATIONS, Operand, Problem
from dispatch._recipe import RecipePair, ScalingRecipe
from dispatch.frameworks import framework
from dispatch.quantization import ScaledArray, quantize

BACKEND = cublas.CublasBackend()


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rejections speak of the problem: the paths that run here have stand-ins for Triton's kernels."""
    monkeypatch.setattr(cublas, "_has_triton", lambda: True)


MX = "e4m3:1x32:e8m0"
TENSOR, ROW, BLOCKS = "e4m3:tensor", "e4m3:row", "e4m3:1x128@e4m3:128x128"
MIXES = ("e4m3:tensor@e5m2:tensor", "e5m2:tensor@e4m3:tensor")
ARCHS = {
    "sm70": False,
    "sm75": False,
    "sm80": False,
    "sm86": False,
    "sm89": True,
    "sm90": True,
    "sm100": True,
    "sm103": True,
    "sm120": True,
    "sm121": True,
    "sm990": False,
}


def problem(recipe: str | None = ROW, *, m: int = 512, n: int = 512, k: int = 512, **facts: Any) -> Problem:
    values = {
        "a": Operand("bfloat16"),
        "b": Operand("bfloat16"),
        "out_dtype": "bfloat16",
        "framework": "torch",
        "arch": "sm90",
        "device": "cuda:0",
        "accumulation": None if recipe is None else "promoted",
        **facts,
    }
    return Problem(m, n, k, recipe=None if recipe is None else RecipePair.parse(recipe), **values)


def reasons(asked: Problem) -> str:
    return "; ".join(map(str, BACKEND.rejections(asked)))


class TestRejections:
    def test_it_is_a_backend(self) -> None:
        assert isinstance(BACKEND, Backend)
        assert BACKEND.name == "cublas"

    @pytest.mark.parametrize("framework_name", ["torch", "jax"])
    @pytest.mark.parametrize("recipe", [TENSOR, ROW, *MIXES])
    @pytest.mark.parametrize(("arch", "able"), ARCHS.items())
    def test_fp8_runs_on_exact_compute_capabilities(
        self, arch: str, able: bool, recipe: str, framework_name: str
    ) -> None:
        found = reasons(problem(recipe, arch=arch, framework=framework_name))
        assert (found == "") == able, found
        if not able:
            assert f"{arch[2:-1]}.{arch[-1]}" in found
            assert "8.9" in found

    @pytest.mark.parametrize("arch", [*ARCHS, "cpu-avx2"])
    def test_block_scales_run_on_hopper_alone(self, arch: str) -> None:
        assert (reasons(problem(BLOCKS, arch=arch)) == "") == (arch == "sm90")

    @pytest.mark.parametrize("arch", ARCHS)
    def test_the_own_product_runs_on_any_gpu(self, arch: str) -> None:
        assert reasons(problem(None, arch=arch, a=Operand("float64"), b=Operand("float64"), out_dtype="float64")) == ""

    @pytest.mark.parametrize("recipe", [None, TENSOR, ROW])
    def test_a_cpu_is_refused_by_name(self, recipe: str | None) -> None:
        for name in ("torch", "jax"):
            found = reasons(problem(recipe, arch="cpu-avx512", framework=name))
            assert found.startswith("arch is cpu-avx512; needs an NVIDIA GPU"), found

    @pytest.mark.parametrize(
        ("recipe", "facts", "said"),
        [
            (ROW, {"framework": "numpy"}, "framework is numpy"),
            ("e4m3:64x64", {}, "recipe is e4m3:64x64"),
            ("e5m2:tensor", {}, "recipe is e5m2:tensor"),
            (BLOCKS, {"framework": "jax"}, "recipe is e4m3:1x128@e4m3:128x128"),
            (ROW, {"a": Operand("float64")}, "dtype is float64"),
            (ROW, {"a": Operand("int8")}, "dtype is int8"),
            (TENSOR, {"a": Operand("float8_e4m3fnuz")}, "dtype is float8_e4m3fnuz"),
            (ROW, {"out_dtype": "float64"}, "out_dtype is float64"),
            (ROW, {"a": Operand("bfloat16", (4,)), "b": Operand("bfloat16", (4,))}, "batch is (4,)"),
            (ROW, {"m": 0}, "size is m=0"),
            (BLOCKS, {"accumulation": "fast"}, "accumulation is fast; needs promoted"),
            (ROW, {"a": Operand("float8_e4m3fn")}, "a is float8_e4m3fn without scales"),
            (TENSOR, {"b": Operand("float8_e5m2")}, "b is float8_e5m2 without scales"),
            (TENSOR, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}, "b is quantized as e4m3:row"),
            (None, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}, "b is e4m3:row; needs not quantized"),
            (None, {"a": Operand("float8_e4m3fn")}, "dtype is float8_e4m3fn"),
            (ROW, {"arch": "sm100", "out_dtype": "float16"}, "out_dtype is float16"),
            (ROW, {"arch": "sm89", "bias": "bfloat16"}, "bias is bfloat16"),
            (ROW, {"arch": "sm120", "activation": "relu"}, "activation is relu"),
        ],
    )
    def test_the_reason_names_what_was_found(self, recipe: str | None, facts: dict[str, Any], said: str) -> None:
        assert said in reasons(problem(recipe, **facts))

    @pytest.mark.parametrize(
        ("recipe", "facts"),
        [
            (TENSOR, {"a": Operand("float8_e4m3fn"), "b": Operand("float8_e4m3fn")}),
            (MIXES[0], {"a": Operand("float8_e4m3fn"), "b": Operand("float8_e5m2")}),
            (ROW, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}),
            (BLOCKS, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse("e4m3:128x128"))}),
            (ROW, {"m": 1, "n": 1, "k": 1, "b": Operand("float16", layout="strided", alignment=2)}),
            (ROW, {"bias": "float32", "activation": "gelu", "out_dtype": "float32"}),
        ],
    )
    def test_these_run(self, recipe: str, facts: dict[str, Any]) -> None:
        assert reasons(problem(recipe, **facts)) == ""

    def test_without_triton_only_what_has_to_be_quantized_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(cublas, "_has_triton", lambda: False)
        scaled = Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))
        assert "triton is not installed" in reasons(problem(ROW))
        assert reasons(problem(ROW, a=scaled, b=scaled)) == ""
        assert reasons(problem(BLOCKS)) == ""
        assert reasons(problem(ROW, framework="jax")) == ""

    def test_an_older_cuda_of_torch_is_refused_for_row_and_block_scales(self, monkeypatch: pytest.MonkeyPatch) -> None:
        version = type("version", (), {"cuda": "12.8"})
        monkeypatch.setitem(sys.modules, "torch", type("torch", (), {"version": version}))
        assert "torch's CUDA is 12.8; needs 12.9" in reasons(problem(ROW))
        assert "torch's CUDA is 12.8; needs 12.9" in reasons(problem(BLOCKS))
        assert reasons(problem(TENSOR)) == ""
        version.cuda = "13.0"
        assert reasons(problem(ROW)) == ""

    def test_a_config_is_refused(self) -> None:
        with pytest.raises(ValueError, match="cublas has no configs; got 'big'"):
            BACKEND.plan(problem(), "big")

    def test_measured_means_hopper(self) -> None:
        scaled = [x for x in BACKEND.capabilities if None not in x.recipes]
        assert {x.status for x in scaled if x.archs == ("sm90",)} == {"measured"}
        assert {x.status for x in scaled if x.archs != ("sm90",)} == {"compiled"}


def _activated(x: Any, activation: str | None) -> Any:
    from dispatch.frameworks._epilogue import activate

    return activate(np.asarray(x, np.float64), activation)


def _relative(found: Any, wanted: Any) -> float:
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-300))


def _rounding(out_dtype: str) -> float:
    return {"float32": 1e-5, "float16": 1e-3, "bfloat16": 6e-3}[out_dtype]


JAX_SHAPES = [(16, 16, 16), (16, 64, 1008), (48, 16, 32), (64, 128, 144), (128, 272, 640)]
SHAPES = [(1, 1, 1), (1, 64, 1000), (17, 15, 33), (64, 129, 127), (130, 272, 640)]
LAYOUTS = ("row", "col", "strided", "expanded")


def _laid_out(torch: Any, values: Any, layout: str) -> Any:
    """Return the values in a layout, inside a wider parent of large numbers; `expanded` repeats the first row."""
    height, width = values.shape
    if layout == "expanded":
        return values[:1].expand(height, width)
    step = 2 if layout == "strided" else 1
    shape = (width, height) if layout == "col" else (height, width)
    parent = torch.full(((shape[0] + 1) * step, (shape[1] + 3) * step), 3e4, dtype=values.dtype, device=values.device)
    view = parent[: shape[0] * step : step, : shape[1] * step : step]
    view = view.t() if layout == "col" else view
    return view.copy_(values)


class _Torch:
    """One product through the backend against float64 of the operands that it decoded to."""

    def __init__(self, torch: Any, device: str) -> None:
        self.torch, self.device = torch, device

    def normal(self, *shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
        torch = self.torch
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(getattr(torch, dtype)).to(self.device)

    def decoded(self, x: Any, recipe: ScalingRecipe, axis: int) -> np.ndarray[Any, Any]:
        """Return, in float64, what x is once quantized; a ScaledArray or raw FP8 is what it says."""
        if isinstance(x, ScaledArray):
            return x.dequantize("float64").cpu().numpy()
        if x.dtype.itemsize == 1:
            return x.double().cpu().numpy()
        return quantize(x, recipe, axis=axis).dequantize("float64").cpu().numpy()

    def check(self, a: Any, b: Any, recipe: str, *, bias: Any = None, prepare: str = "", **facts: Any) -> Any:
        pair = RecipePair.parse(recipe)
        room = framework("torch")
        out_dtype = facts.setdefault("out_dtype", "bfloat16")
        operands, given = [], []
        for name, x, side, axis in (("a", a, pair.a, -1), ("b", b, pair.b, -2)):
            scaled = isinstance(x, ScaledArray)
            fact = Operand(x.dtype, recipe=x.recipe) if scaled else room.operand(x)
            operands.append(dataclasses.replace(fact, prepared=name in prepare))
            given.append(BACKEND.prepare(x, side, axis=axis) if name in prepare else x)
        asked = problem(
            recipe,
            m=a.shape[0],
            n=b.shape[1],
            k=a.shape[1],
            a=operands[0],
            b=operands[1],
            device=self.device,
            bias=None if bias is None else room.dtype_name(bias),
            **facts,
        )
        assert reasons(asked) == ""
        out = BACKEND.plan(asked)(*given, *(() if bias is None else (bias,)))
        assert room.dtype_name(out) == out_dtype
        assert out.is_contiguous()
        wanted = self.decoded(a, pair.a, -1) @ self.decoded(b, pair.b, -2)
        wanted = wanted if bias is None else wanted + bias.double().cpu().numpy()
        wanted = _activated(wanted, facts.get("activation"))
        # Quantizing by the reciprocal moves single values by a quantum; the tensor core's own sums add 5e-3.
        tolerance = _rounding(out_dtype) + (6e-3 if self.device != "cpu" else 2e-3)
        assert _relative(out.double().cpu().numpy(), wanted) < tolerance
        return out


def _cuda_scaled_mm(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any = None, **options: Any) -> Any:
    """Return what `torch._scaled_mm` does on Hopper, in float64, after the checks that CUDA makes."""
    import torch

    (m, k), n = a.shape, b.shape[1]
    assert a.stride(1) == 1
    assert b.stride(0) == 1
    assert k % 16 == n % 16 == 0
    assert a.stride(0) % 16 == b.stride(1) % 16 == 0
    assert a.data_ptr() % 16 == b.data_ptr() % 16 == 0
    assert (a.dtype, b.dtype) != (torch.float8_e5m2, torch.float8_e5m2)
    assert scale_a.dtype == scale_b.dtype == torch.float32
    if scale_a.numel() == scale_b.numel() == 1:
        left, right = scale_a.reshape(1, 1), scale_b.reshape(1, 1)
    elif scale_a.shape == (m, 1) and scale_b.shape == (1, n):
        assert scale_a.is_contiguous()
        assert scale_b.t().is_contiguous()
        left, right = scale_a, scale_b
    else:
        assert k % 512 == m % 4 == 0, "torch's versions differ about unaligned block scales"
        assert scale_a.shape == (m, k // 128)
        assert scale_a.stride() == (1, m)
        assert scale_b.shape == (k // 128, -(-n // 128))
        assert scale_b.stride(0) == 1
        assert scale_b.shape[1] == 1 or scale_b.stride(1) == k // 128
        assert not options["use_fast_accum"]
        left = scale_a.repeat_interleave(128, 1)
        right = scale_b.repeat_interleave(128, 0).repeat_interleave(128, 1)[:, :n]
    out = (a.double() * left.double()) @ (b.double() * right.double())
    if bias is not None:
        assert bias.dtype == options["out_dtype"] != torch.float32
        assert bias.numel() == n
        out = out + bias.double()
    return out.to(options["out_dtype"])


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> _Torch:
    """The torch path on a CPU: CUDA's product and the Triton launchers are replaced by references."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from dispatch.plugins import _cublas_torch

    def launch(source: Any, data: Any, scale: Any, sums: Any, trip: Any, *, by_row: bool, transposed: bool) -> None:
        assert source.stride(1) == 1
        assert sums is trip is None
        rows = source.t() if transposed else source
        fmt = "e4m3" if data.dtype is torch.float8_e4m3fn else "e5m2"
        scaled = quantize(rows, f"{fmt}:{'row' if by_row else 'tensor'}")
        bits = data.view(torch.uint8)
        bits.zero_()
        bits[: rows.shape[0], : rows.shape[1]] = scaled.data.view(torch.uint8)
        scale.fill_(2.0**-126)
        scale[: scaled.scale.shape[0]] = scaled.scale

    monkeypatch.setattr(torch, "_scaled_mm", _cuda_scaled_mm)
    monkeypatch.setattr(_cublas_torch, "launcher", lambda: launch)
    return _Torch(torch, "cpu")


@pytest.fixture
def cuda() -> _Torch:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    assert torch.cuda.is_available(), "run gpu tests on a machine with a GPU"
    return _Torch(torch, "cuda:0")


class TorchProducts:
    """What both machines must get right; `run` is the fixture's."""

    @pytest.fixture
    def run(self, request: pytest.FixtureRequest) -> _Torch:
        return request.getfixturevalue(self.machine)

    machine = ""

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS, *MIXES])
    @pytest.mark.parametrize(("m", "n", "k"), SHAPES)
    def test_odd_shapes(self, run: _Torch, m: int, n: int, k: int, recipe: str) -> None:
        run.check(run.normal(m, k), run.normal(k, n, seed=1), recipe)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize(("left", "right"), list(itertools.product(LAYOUTS, LAYOUTS)))
    def test_every_layout(self, run: _Torch, left: str, right: str, recipe: str) -> None:
        a = _laid_out(run.torch, run.normal(33, 130), left)
        b = _laid_out(run.torch, run.normal(130, 47, seed=1), right)
        run.check(a, b, recipe)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
    def test_every_dtype(self, run: _Torch, dtype: str, out_dtype: str, recipe: str) -> None:
        a, b = run.normal(20, 130, dtype=dtype), run.normal(130, 48, dtype=dtype, seed=1)
        run.check(a, b, recipe, out_dtype=out_dtype)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize("shape", [(48,), (1, 48), (20, 1), (20, 48), (1,), ()])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
    def test_every_bias(self, run: _Torch, shape: tuple[int, ...], out_dtype: str, recipe: str) -> None:
        a, b = run.normal(20, 130), run.normal(130, 48, seed=1)
        for dtype in {"float32", out_dtype}:
            run.check(a, b, recipe, bias=run.normal(*shape, dtype=dtype, seed=2) * 20, out_dtype=out_dtype)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("n", [48, 47])
    def test_every_activation(self, run: _Torch, n: int, activation: str, recipe: str) -> None:
        a, b, bias = run.normal(20, 130), run.normal(130, n, seed=1), run.normal(n, seed=2)
        run.check(a, b, recipe, activation=activation)
        run.check(a, b, recipe, activation=activation, bias=bias, out_dtype="float16")

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize("accumulation", ["fast", "promoted"])
    def test_both_accumulations(self, run: _Torch, accumulation: str, recipe: str) -> None:
        if recipe == BLOCKS and accumulation == "fast":
            assert "accumulation" in reasons(problem(BLOCKS, accumulation="fast"))
            return
        run.check(run.normal(64, 4096), run.normal(4096, 64, seed=1), recipe, accumulation=accumulation)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS, *MIXES])
    @pytest.mark.parametrize("prepare", ["a", "b", "ab"])
    @pytest.mark.parametrize(("m", "n", "k"), SHAPES[1:4])
    def test_prepared_operands_give_the_same_bits(
        self, run: _Torch, m: int, n: int, k: int, prepare: str, recipe: str
    ) -> None:
        a, b = run.normal(m, k), run.normal(k, n, seed=1)
        assert run.torch.equal(run.check(a, b, recipe, prepare=prepare), run.check(a, b, recipe))

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS, *MIXES])
    @pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (256, 256, 512)])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_scaled_arrays_are_multiplied_as_they_are(
        self, run: _Torch, transposed: bool, m: int, n: int, k: int, recipe: str
    ) -> None:
        pair = RecipePair.parse(recipe)
        a, b = run.normal(m, k), run.normal(k, n, seed=1)
        left = quantize(a, pair.a)
        right = quantize(b.t().contiguous(), pair.b).T if transposed else quantize(b, pair.b, axis=-2)
        run.check(left, right, recipe, out_dtype="float32")
        run.check(left, b, recipe)
        run.check(a, right, recipe)

    @pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
    @pytest.mark.parametrize(("m", "n", "k"), [*SHAPES, (64, 64, 128)])
    def test_raw_fp8_has_scale_one(self, run: _Torch, m: int, n: int, k: int, formats: tuple[str, str]) -> None:
        pair = "@".join(f"{x[:4]}:tensor" for x in formats)
        a = run.normal(m, k).to(getattr(run.torch, f"float8_{formats[0]}"))
        b = run.normal(k, n, seed=1).to(getattr(run.torch, f"float8_{formats[1]}"))
        run.check(a, b, pair, out_dtype="float32")
        run.check(a, b, pair, prepare="b")
        if k % 16 == 0:  # an address that is not a multiple of 16
            run.check(a[:, 1:], b.t()[:, 1:].t(), pair)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    def test_nan_and_inf_reach_the_rows_that_hold_them(self, run: _Torch, recipe: str) -> None:
        a, b = run.normal(16, 128), run.normal(128, 32, seed=1).abs()
        a[3, 5], a[7, 9] = float("nan"), float("inf")
        room = framework("torch")
        asked = problem(recipe, m=16, n=32, k=128, a=room.operand(a), b=room.operand(b), device=run.device)
        out = BACKEND.plan(asked)(a, b)
        spoiled = ~out.isfinite().all(1).cpu()
        assert spoiled.nonzero().flatten().tolist() == [3, 7]
        assert not out[[3, 7]].isfinite().any()

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    def test_inputs_are_not_written(self, run: _Torch, recipe: str) -> None:
        a, b = run.normal(16, 128), run.normal(128, 32, seed=1)
        before = a.clone(), b.clone()
        run.check(a, b, recipe)
        assert run.torch.equal(a, before[0])
        assert run.torch.equal(b, before[1])

    def test_zero_rows_are_exact_zeros(self, run: _Torch) -> None:
        a, b = run.normal(16, 128), run.normal(128, 32, seed=1)
        a[2], b[:, 4] = 0, 0
        out = run.check(a, b, ROW)
        assert not out[2].any()
        assert not out[:, 4].any()


class TestTorchEmulated(TorchProducts):
    machine = "cpu"

    def test_the_bias_is_fused_only_where_nothing_follows_it(
        self, cpu: _Torch, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fused: list[bool] = []

        def recorded(*operands: Any, bias: Any = None, **options: Any) -> Any:
            fused.append(bias is not None)
            return _cuda_scaled_mm(*operands, bias=bias, **options)

        monkeypatch.setattr(cpu.torch, "_scaled_mm", recorded)
        a, b = cpu.normal(20, 128), cpu.normal(128, 48, seed=1)
        cpu.check(a, b, ROW, bias=cpu.normal(48, seed=2))
        cpu.check(a, b, ROW, bias=cpu.normal(48, seed=2), activation="relu")
        cpu.check(a, b, ROW, bias=cpu.normal(48, dtype="float32", seed=2))
        cpu.check(a, b, ROW, bias=cpu.normal(20, 1, seed=2))
        cpu.check(a, b[:, :47], ROW, bias=cpu.normal(47, seed=2))
        assert fused == [True, False, False, False, False]

    def test_only_matrices_are_prepared(self, cpu: _Torch) -> None:
        with pytest.raises(ValueError, match=r"cannot prepare an operand of shape \(2, 3, 4\)"):
            BACKEND.prepare(cpu.normal(2, 3, 4), ScalingRecipe.parse(ROW), axis=-1)


@pytest.mark.gpu
class TestTorchGpu(TorchProducts):
    machine = "cuda"

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 8192, 8192), (4096, 4096, 4096), (3000, 1000, 28680)])
    def test_large_products(self, cuda: _Torch, m: int, n: int, k: int, recipe: str) -> None:
        torch = cuda.torch
        a, b = cuda.normal(m, k), cuda.normal(k, n, seed=1)
        for right in (b, b.t().contiguous().t()):
            out = BACKEND.plan(problem(recipe, m=m, n=n, k=k, accumulation="fast"))(a, right)
            wanted = a.float() @ b.float()
            assert ((out.float() - wanted).norm() / wanted.norm()).item() < 0.045
        assert torch.cuda.current_device() == 0

    def test_float16_overflows_to_inf(self, cuda: _Torch) -> None:
        a = cuda.torch.full((16, 256), 100.0, dtype=cuda.torch.float16, device="cuda")
        room = framework("torch")
        for recipe in (TENSOR, ROW, BLOCKS):
            fact = room.operand(a)
            asked = problem(recipe, m=16, n=16, k=256, a=fact, b=fact, out_dtype="float16")
            assert BACKEND.plan(asked)(a, a.t()).isinf().all(), recipe

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    def test_a_captured_graph_reads_new_values(self, cuda: _Torch, recipe: str) -> None:
        torch = cuda.torch
        a, b = cuda.normal(64, 256), cuda.normal(256, 64, seed=1)
        run = BACKEND.plan(problem(recipe, m=64, n=64, k=256))
        run(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = run(a, b)
        a.copy_(cuda.normal(64, 256, seed=5))
        graph.replay()
        assert torch.equal(out, run(a, b))

    def test_the_own_product_is_torchs(self, cuda: _Torch) -> None:
        a, b = cuda.normal(33, 65), cuda.normal(65, 17, seed=1)
        assert cuda.torch.equal(BACKEND.plan(problem(None, m=33, n=17, k=65))(a, b), a @ b)


SUMS = 3e-3
"""Relative: Hopper's tensor core keeps about 14 bits of the sums of FP8 products (2.1e-3 at k = 4096, an H200)."""


def _as_multiplied(x: Any, recipe: ScalingRecipe, axis: int) -> Any:
    """Return what an operand of a JAX product stands for, in float64, by the codes that the backend makes of it.

    It multiplies by 1/scale where the reference divides, so values in the middle between two codes may take the other
    one. Of bfloat16 values some lie there: at (32, 144) by (144, 48) 14 did, and changed the product by 5e-3.
    """
    if isinstance(x, ScaledArray):
        return np.asarray(x.dequantize("float32"), np.float64)
    if x.dtype.itemsize == 1:
        return np.asarray(x, np.float64)
    made = BACKEND.prepare(x, recipe, axis=axis)
    rows = np.asarray(made.matrix, np.float64) * np.asarray(made.scale, np.float64)
    found = rows if axis == -1 else rows.T
    assert _relative(found, np.asarray(quantize(x, recipe, axis=axis).dequantize("float32"), np.float64)) < 0.02
    return found


class JaxProducts:
    """The JAX path: any platform runs it, so the CPU checks its values too."""

    arch = "sm90"

    def check(self, a: Any, b: Any, recipe: str, *, bias: Any = None, prepare: str = "", **facts: Any) -> Any:
        import jax

        pair, room = RecipePair.parse(recipe), framework("jax")
        out_dtype = facts.setdefault("out_dtype", "bfloat16")
        operands, given, decoded = [], [], []
        for name, x, side, axis in (("a", a, pair.a, -1), ("b", b, pair.b, -2)):
            scaled = isinstance(x, ScaledArray)
            fact = Operand(x.dtype, recipe=x.recipe) if scaled else room.operand(x)
            operands.append(dataclasses.replace(fact, prepared=name in prepare))
            given.append(BACKEND.prepare(x, side, axis=axis) if name in prepare else x)
            decoded.append(_as_multiplied(x, side, axis))
        asked = problem(
            recipe,
            m=a.shape[0],
            n=b.shape[1],
            k=a.shape[1],
            a=operands[0],
            b=operands[1],
            framework="jax",
            bias=None if bias is None else str(bias.dtype),
            **facts,
        )
        assert reasons(asked) == ""
        extra = () if bias is None else (bias,)
        plan = BACKEND.plan(asked)
        out = plan(*given, *extra)
        assert str(out.dtype) == out_dtype
        wanted = decoded[0] @ decoded[1]
        wanted = wanted if bias is None else wanted + np.asarray(bias, np.float64)
        found = np.asarray(out.astype("float32"), np.float64)
        assert _relative(found, _activated(wanted, facts.get("activation"))) < _rounding(out_dtype) + SUMS
        traced = np.asarray(jax.jit(plan)(*given, *extra).astype("float32"), np.float64)
        assert _relative(traced, found) < 1e-3
        return out

    def normal(self, *shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, *MIXES])
    @pytest.mark.parametrize(("m", "n", "k"), JAX_SHAPES)
    def test_shapes(self, m: int, n: int, k: int, recipe: str) -> None:
        self.check(self.normal(m, k), self.normal(k, n, seed=1), recipe)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
    def test_every_dtype(self, dtype: str, out_dtype: str, recipe: str) -> None:
        a, b = self.normal(32, 144, dtype=dtype), self.normal(144, 48, dtype=dtype, seed=1)
        for accumulation in ("fast", "promoted"):
            self.check(a, b, recipe, out_dtype=out_dtype, accumulation=accumulation)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    @pytest.mark.parametrize(
        ("shape", "activation"), [((32, 1), None), ((), None), ((48,), None), *(((48,), x) for x in ACTIVATIONS)]
    )
    def test_bias_and_activation(self, shape: tuple[int, ...], activation: str | None, recipe: str) -> None:
        bias = self.normal(*shape, seed=2)
        self.check(self.normal(32, 144), self.normal(144, 48, seed=1), recipe, bias=bias, activation=activation)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, *MIXES])
    @pytest.mark.parametrize("prepare", ["a", "b", "ab"])
    def test_prepared_operands(self, prepare: str, recipe: str) -> None:
        self.check(self.normal(32, 144), self.normal(144, 48, seed=1), recipe, prepare=prepare)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, *MIXES])
    def test_scaled_arrays(self, recipe: str) -> None:
        pair = RecipePair.parse(recipe)
        a, b = self.normal(32, 144), self.normal(144, 48, seed=1)
        left, right = quantize(a, pair.a), quantize(b, pair.b, axis=-2)
        self.check(left, right, recipe, out_dtype="float32")
        self.check(a, right, recipe)
        self.check(left, b, recipe)

    @pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
    def test_raw_fp8_has_scale_one(self, formats: tuple[str, str]) -> None:
        a = self.normal(32, 144).astype(f"float8_{formats[0]}")
        b = self.normal(144, 48, seed=1).astype(f"float8_{formats[1]}")
        pair = "@".join(f"{x[:4]}:tensor" for x in formats)
        self.check(a, b, pair, out_dtype="float32")
        self.check(a, b, pair, prepare="b")

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, *MIXES])
    def test_nan_and_inf_reach_the_rows_that_hold_them(self, recipe: str) -> None:
        a = self.normal(16, 128).at[3, 5].set(float("nan")).at[7, 9].set(float("inf")).at[8].set(0)
        out = BACKEND.plan(problem(recipe, m=16, n=32, k=128, framework="jax"))(a, abs(self.normal(128, 32, seed=1)))
        finite = np.isfinite(np.asarray(out, np.float32))
        assert np.flatnonzero(~finite.all(1)).tolist() == [3, 7]
        assert not finite[[3, 7]].any()
        assert not np.asarray(out[8], np.float32).any()


class TestJax(JaxProducts):
    def test_prepared_weights_are_k_major(self) -> None:
        made = BACKEND.prepare(self.normal(144, 48), ScalingRecipe.parse(ROW), axis=-2)
        assert (made.matrix.shape, made.scale.shape) == ((48, 144), (48, 1))

    @pytest.mark.parametrize("prepare", ["", "b"])
    def test_mx_scales_go_to_jax_s_own_product(self, prepare: str) -> None:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        facts = {"arch": "sm100", "accumulation": "fast", "framework": "jax", "out_dtype": "float32"}
        facts["b"] = Operand("bfloat16", prepared=bool(prepare))
        asked = problem(MX, m=128, n=128, k=256, **facts)
        assert reasons(asked) == ""
        a, b = self.normal(128, 256), self.normal(256, 128, seed=1)
        right = BACKEND.prepare(b, asked.recipe.b, axis=-2) if prepare else b
        plan = BACKEND.plan(asked)
        text = str(jax.jit(plan).trace(a, right).lower(lowering_platforms=("cuda",)).as_text())
        assert "block_scaled_dot" in text or "scaled_matmul" in text
        if tuple(map(int, jax.__version__.split(".")[:2])) < (0, 11):
            pytest.skip("JAX runs scaled_matmul on a CPU from 0.11 on")
        left, other = quantize(a, MX), quantize(b, MX, axis=-2)
        wanted = np.asarray(left.dequantize("float32"), np.float64) @ np.asarray(
            other.dequantize("float32"), np.float64
        )
        assert _relative(np.asarray(plan(a, right), np.float64), wanted) < 1e-6

    @pytest.mark.parametrize("arch", ARCHS)
    def test_mx_scales_are_for_blackwell(self, arch: str) -> None:
        facts = {"accumulation": "fast", "framework": "jax"}
        assert (reasons(problem(MX, arch=arch, **facts)) == "") == (arch in ("sm100", "sm103"))
        assert "k is 96; needs a multiple of 128" in reasons(problem(MX, k=96, arch="sm100", **facts))
        assert {x.status for x in BACKEND.capabilities if x.recipes == (RecipePair.parse(MX),)} == {"compiled"}


@pytest.mark.gpu
class TestJaxGpu(JaxProducts):
    @pytest.fixture(autouse=True)
    def on_a_gpu(self) -> None:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        assert jax.default_backend() == "gpu", "run gpu tests on a machine with a GPU"

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    def test_what_the_program_transposes_is_quantized_from_where_it_lies(self, recipe: str) -> None:
        import jax

        a, b = self.normal(64, 144), self.normal(144, 48, seed=1)
        plan = BACKEND.plan(problem(recipe, m=64, n=48, k=144, framework="jax"))
        turned = jax.jit(lambda x, y: plan(x.T, y.T))(a.T.copy(), b.T.copy())
        assert _relative(turned, plan(a, b)) < 1e-3

    @pytest.mark.parametrize("recipe", [TENSOR, ROW])
    def test_xla_multiplies_in_fp8(self, recipe: str) -> None:
        import jax

        a, b = self.normal(4096, 4096), self.normal(4096, 4096, seed=1)
        asked = problem(recipe, m=4096, n=4096, k=4096, framework="jax", accumulation="fast")
        text = jax.jit(BACKEND.plan(asked)).lower(a, b).compile().as_text()
        assert "__cublas$lt$matmul$f8" in text or "f8e4m3fn" in text
        wanted = np.asarray(a[:64], np.float64) @ np.asarray(b, np.float64)
        assert _relative(np.asarray(BACKEND.plan(asked)(a, b)[:64], np.float64), wanted) < 0.045


@pytest.mark.parametrize(("m", "n", "k"), [(1, 64, 64), (64, 1, 64), (64, 64, 15), (2, 4, 8)])
def test_jax_takes_what_xla_need_not_pad(m: int, n: int, k: int) -> None:
    found = BACKEND.rejections(problem(m=m, n=n, k=k, framework="jax"))
    assert {reason.subject for reason in found} == {name for name, x in (("m", m), ("n", n), ("k", k)) if x % 16}
    assert all(reason.needed == "a multiple of 16" for reason in found)
