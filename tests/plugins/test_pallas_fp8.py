"""The pallas_fp8 backend: what it rejects and why, its configs, products interpreted on a CPU, and all on a GPU."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dispatch.plugins import _pallas_configs as names
from dispatch.plugins import pallas_fp8

import dispatch
from dispatch._backend import Backend
from dispatch._problem import ACTIVATIONS, Operand, Problem
from dispatch._recipe import RecipePair, ScalingRecipe
from dispatch.frameworks import framework
from dispatch.quantization import ScaledArray, quantize

BACKEND = pallas_fp8.PallasBackend()
TENSOR, ROW, BLOCKS = "e4m3:tensor", "e4m3:row", "e4m3:1x128@e4m3:128x128"
MIXED = "e5m2:row@e4m3:row"
ARCHS = {"sm80": False, "sm86": False, "sm89": True, "sm90": True, "sm100": True, "sm103": True, "sm120": True}
ARCHS |= {"sm121": True, "sm990": False, "cpu-avx512": False}


@pytest.fixture(autouse=True)
def current_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rejections speak of the problem: environments without JAX run these tests too."""
    monkeypatch.setattr(pallas_fp8, "version_of", lambda package: (0, 11, 2))
    monkeypatch.setattr(pallas_fp8, "_has_absl", lambda: True)


def usable_jax() -> Any:
    """Return JAX, or skip where the backend's own modules need a later one or Pallas's other parts."""
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    pytest.importorskip("absl", reason="Pallas needs absl-py, which JAX does not install")
    if jax.__version_info__ < pallas_fp8.LEAST_JAX:
        pytest.skip(f"JAX {jax.__version__} is older than 0.10.2, the first that was tried")
    pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this JAX has no Mosaic GPU", exc_type=ImportError)
    return jax


def problem(recipe: str | None = ROW, *, m: int = 512, n: int = 512, k: int = 512, **facts: Any) -> Problem:
    values = {
        "a": Operand("bfloat16"),
        "b": Operand("bfloat16"),
        "out_dtype": "bfloat16",
        "framework": "jax",
        "arch": "sm90",
        "device": "cuda:0",
        "accumulation": "promoted" if recipe == BLOCKS else "fast",
        **facts,
    }
    return Problem(m, n, k, recipe=None if recipe is None else RecipePair.parse(recipe), **values)


def reasons(asked: Problem) -> str:
    return "; ".join(map(str, BACKEND.rejections(asked)))


class TestRejections:
    def test_it_is_a_backend(self) -> None:
        assert isinstance(BACKEND, Backend)
        assert BACKEND.name == "pallas_fp8"

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, MIXED, BLOCKS])
    @pytest.mark.parametrize(("arch", "able"), ARCHS.items())
    def test_it_runs_where_there_are_fp8_tensor_cores(self, arch: str, able: bool, recipe: str) -> None:
        found = reasons(problem(recipe, arch=arch))
        assert (found == "") == able, found
        if not able:
            assert found.startswith(f"arch is {arch}; needs sm89, sm90")

    @pytest.mark.parametrize(
        ("recipe", "facts", "said"),
        [
            (ROW, {"framework": "torch"}, "framework is torch; needs jax"),
            (ROW, {"framework": "numpy"}, "framework is numpy; needs jax"),
            (
                None,
                {"accumulation": None, "arch": "sm100"},
                "arch is sm100; needs sm90 for products without quantizing",
            ),
            (None, {"accumulation": None, "a": Operand("float16")}, "dtypes is float16 and bfloat16; needs one dtype"),
            (None, {"accumulation": None, "a": Operand("bfloat16", (2,))}, "batch is (2,)"),
            (None, {"accumulation": None, "a": Operand("float32")}, "dtype is float32"),
            ("e4m3:64x64", {}, "recipe is e4m3:64x64"),
            ("e5m2:row", {}, "recipe is e5m2:row"),
            (ROW, {"a": Operand("float64")}, "dtype is float64"),
            (ROW, {"a": Operand("int8")}, "dtype is int8"),
            (ROW, {"out_dtype": "float64"}, "out_dtype is float64"),
            (ROW, {"m": 0}, "size is m=0"),
            (ROW, {"n": 15}, "n is 15; needs 16 or more"),
            (None, {"k": 8, "accumulation": None}, "k is 8; needs 16 or more"),
            (BLOCKS, {"accumulation": "fast"}, "accumulation is fast; needs promoted"),
            (ROW, {"arch": "sm100", "accumulation": "promoted"}, "accumulation is promoted; needs fast"),
            (BLOCKS, {"b": Operand("bfloat16", (3,))}, "batch is (3,)"),
            (ROW, {"a": Operand("bfloat16", (3,), prepared=True)}, "batch of a is (3,)"),
            (ROW, {"a": Operand("float8_e4m3fn")}, "a is float8_e4m3fn without scales"),
            (TENSOR, {"b": Operand("float8_e5m2")}, "b is float8_e5m2 without scales"),
            (TENSOR, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}, "b is quantized as e4m3:row"),
        ],
    )
    def test_the_reason_names_what_was_found(self, recipe: str | None, facts: dict[str, Any], said: str) -> None:
        assert said in reasons(problem(recipe, **facts))

    def test_these_run(self) -> None:
        raw, scaled = Operand("float8_e4m3fn"), Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))
        assert reasons(problem(TENSOR, a=raw, b=raw)) == ""
        assert reasons(problem(ROW, a=scaled, b=scaled)) == ""
        assert reasons(problem(ROW, m=1, n=16, k=16, bias="float32", activation="gelu", out_dtype="float32")) == ""
        assert reasons(problem(ROW, a=Operand("bfloat16", (2, 1)), b=Operand("bfloat16", (3,)))) == ""
        assert reasons(problem(None, m=1, n=17, k=33, accumulation=None)) == ""

    @pytest.mark.parametrize(
        ("version", "recipe", "said"),
        [
            ((), ROW, "jax is not installed"),
            ((0, 9, 2), ROW, "jax is 0.9.2; needs jax >= 0.10.2"),
            ((0, 10, 1), ROW, "jax is 0.10.1; needs jax >= 0.10.2"),
            ((0, 10, 2), MIXED, "jax is 0.10.2; needs jax >= 0.11 to multiply e4m3 by e5m2"),
            ((0, 10, 2), ROW, ""),
            ((0, 11, 0), MIXED, ""),
        ],
    )
    def test_of_jax_it_needs_a_version(
        self, version: tuple[int, ...], recipe: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(pallas_fp8, "version_of", lambda package: version)
        assert reasons(problem(recipe)).startswith(said)
        assert (reasons(problem(recipe)) == "") == (said == "")

    def test_without_absl_it_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(pallas_fp8, "_has_absl", lambda: False)
        assert "absl-py is not installed" in reasons(problem())

    def test_modules_that_are_blocked_count_as_missing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.undo()
        for name in ("jax", "absl"):
            monkeypatch.setitem(sys.modules, name, None)
        pallas_fp8._has_absl.cache_clear()
        try:
            assert "jax is not installed" in reasons(problem())
            assert not pallas_fp8._has_absl()
        finally:
            pallas_fp8._has_absl.cache_clear()

    def test_the_registry_lists_it(self) -> None:
        (info,) = [x for x in dispatch.backends() if x.name == "pallas_fp8"]
        assert "measured" in info.status


SIZES = [(m, n, k) for m in (1, 16, 64, 65, 128, 129, 2048, 8192) for n, k in ((64, 64), (1000, 4096), (8192, 8192))]


class TestConfigs:
    @pytest.mark.parametrize("arch", [arch for arch, able in ARCHS.items() if able])
    @pytest.mark.parametrize("recipe", [TENSOR, ROW, MIXED, BLOCKS])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
    def test_every_config_is_one_that_its_kernel_can_run(self, arch: str, recipe: str, out_dtype: str) -> None:
        usable_jax()
        from dispatch.plugins import _pallas_jax as jax_plans

        accumulations = ("promoted",) if recipe == BLOCKS else ("fast", "promoted") if arch == "sm90" else ("fast",)
        for accumulation in accumulations:
            for m, n, k in SIZES:
                asked = problem(recipe, m=m, n=n, k=k, arch=arch, out_dtype=out_dtype, accumulation=accumulation)
                found = BACKEND.configs(asked)
                assert 1 <= len(found) <= 4
                for name in found:
                    config = names.Config.parse(name)
                    assert str(config) == name
                    assert name.startswith(f"{arch}_gemm_")
                    assert jax_plans.complaint(asked, config) == "", name

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
    def test_without_quantizing_there_is_one(self, dtype: str, out_dtype: str) -> None:
        usable_jax()
        from dispatch.plugins import _pallas_jax as jax_plans

        plain = Operand(dtype)
        for m, n, k in SIZES:
            asked = problem(None, m=m, n=n, k=k, a=plain, b=plain, out_dtype=out_dtype, accumulation=None)
            (name,) = BACKEND.configs(asked)
            assert name.startswith("sm90_gemm_bf16_" if dtype == "bfloat16" else "sm90_gemm_f16_")
            assert jax_plans.complaint(asked, names.Config.parse(name)) == "", name

    def test_what_it_rejects_has_none(self) -> None:
        assert BACKEND.configs(problem(arch="sm80")) == []

    @pytest.mark.parametrize("name", ["", "sm90_gemm_e4m3", "sm90_gemm_e4m3_tma_warpspecialized_128x128x128_s6"])
    def test_other_names_are_none(self, name: str) -> None:
        with pytest.raises(ValueError, match="is no config; one is sm90_gemm_e4m3_"):
            BACKEND.plan(problem(), name)

    def test_a_config_of_another_problem_is_refused_with_those_there_are(self) -> None:
        other = BACKEND.configs(problem(arch="sm89"))[0]
        with pytest.raises(ValueError, match="its configs are sm90_gemm_e4m3_"):
            BACKEND.plan(problem(), other)


@pytest.fixture
def described_gpu() -> Iterator[None]:
    """What lowering by Triton asks of the GPU, where there is none (JAX before 0.11 does not ask)."""
    jax = usable_jax()
    context: Any = nullcontext()
    if jax.__version_info__ >= (0, 11) and jax.default_backend() != "gpu":
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with context:
        yield


LOWERED: list[dict[str, Any]] = [
    {"bias": "bfloat16", "activation": "gelu"},
    {"m": 33, "n": 1000, "k": 1040, "out_dtype": "float32", "activation": "silu"},
    {"m": 1, "n": 17, "k": 16, "out_dtype": "float16"},
    {"a": Operand("float16", (3,)), "b": Operand("float16")},
    {"m": 4096, "n": 4096, "a": Operand("float32"), "b": Operand("bfloat16", prepared=True)},
]


@pytest.mark.usefixtures("described_gpu")
@pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100"])
@pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
@pytest.mark.parametrize("facts", LOWERED, ids=range(len(LOWERED)))
def test_plans_lower_without_a_gpu(facts: dict[str, Any], recipe: str, arch: str) -> None:
    import jax
    from dispatch.plugins import _pallas_jax as jax_plans

    asked = problem(recipe, arch=arch, **facts)
    if recipe == BLOCKS and asked.batch:
        pytest.skip("block scales are for 2-D products")
    assert reasons(asked) == ""
    a = jax.ShapeDtypeStruct((*asked.a.batch, asked.m, asked.k), asked.a.dtype)
    b: Any = jax.ShapeDtypeStruct((asked.k, asked.n), asked.b.dtype)
    pair = asked.recipe
    assert pair is not None
    if asked.b.prepared:
        b = jax.eval_shape(lambda x: jax_plans.encode(x, pair.b, -2, asked.arch), b)
    bias = [jax.ShapeDtypeStruct((asked.n,), asked.bias)] if asked.bias else []
    for config in BACKEND.configs(asked):
        lowered = jax.jit(BACKEND.plan(asked, config)).trace(a, b, *bias).lower(lowering_platforms=("cuda",))
        text = lowered.as_text()
        assert "triton" in text  # the quantizer
        assert ("mosaic_gpu" in text) == (arch == "sm90" or (arch == "sm100" and recipe != BLOCKS))
        (out,) = jax.tree.leaves(lowered.out_info)
        assert (out.shape, str(out.dtype)) == ((*asked.batch, asked.m, asked.n), asked.out_dtype)


@pytest.mark.usefixtures("described_gpu")
def test_rows_that_are_mapped_over_become_rows_of_one_product() -> None:
    import jax

    a, b = jax.ShapeDtypeStruct((2, 3, 256, 512), "bfloat16"), jax.ShapeDtypeStruct((512, 256), "bfloat16")
    for recipe, loops in ((ROW, False), (TENSOR, True)):
        plan = BACKEND.plan(problem(recipe, m=256, n=256, k=512))
        twice = jax.vmap(jax.vmap(plan, (0, None)), (0, None))
        lowered = jax.jit(twice).trace(a, b).lower(lowering_platforms=("cuda",))
        assert ("stablehlo.while" in lowered.as_text()) == loops
        assert jax.tree.leaves(lowered.out_info)[0].shape == (2, 3, 256, 256)


@pytest.mark.parametrize(("m", "n", "k"), [(16, 4096, 4096), (512, 1000, 512), (4096, 4096, 4096), (33, 65, 77)])
def test_a_product_without_quantizing_takes_b_as_it_lies(m: int, n: int, k: int) -> None:
    jax = usable_jax()
    asked = problem(None, m=m, n=n, k=k, accumulation=None, bias="bfloat16", activation="relu")
    given = [jax.ShapeDtypeStruct(shape, "bfloat16") for shape in ((m, k), (k, n), (n,))]
    lowered = jax.jit(BACKEND.plan(asked)).trace(*given).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text
    assert "stablehlo.transpose" not in text
    assert jax.tree.leaves(lowered.out_info)[0].shape == (m, n)


def _relative(found: Any, wanted: Any) -> float:
    return float(np.linalg.norm(found - wanted) / max(float(np.linalg.norm(wanted)), 1e-300))


def _as_multiplied(x: Any, recipe: ScalingRecipe, axis: int) -> Any:
    """Return what an operand stands for, in float64, by the codes that the backend makes of it.

    Triton's quantizers multiply by 1/scale where the reference divides: values in the middle between two codes may take
    the other one, and of bfloat16 values some lie there.
    """
    if isinstance(x, ScaledArray):
        return np.asarray(x.dequantize("float32"), np.float64)
    if x.dtype.itemsize == 1:
        return np.asarray(x, np.float64)
    reference = np.asarray(quantize(np.asarray(x), recipe, axis=axis).dequantize("float32"), np.float64)
    if x.ndim > 2:
        return reference
    made = BACKEND.prepare(x, recipe, axis=axis)
    rows, k = x.shape if axis == -1 else x.shape[::-1]
    scale = np.asarray(made.scale, np.float64)
    if recipe.granularity == "row":
        scale = scale[:rows, None]
    elif scale.ndim == 2:
        down, across = recipe.block(rows, k)
        scale = scale.repeat(down, 0)[:rows].repeat(across, 1)[:, :k]
    found = np.asarray(made.matrix, np.float64)[:rows, :k] * scale
    found = found if axis == -1 else found.T
    assert _relative(found, reference) < 0.02
    return found


class Products:
    """Products with float64 beside them; on a CPU by the portable kernel, interpreted."""

    arch, device = "sm89", "cpu"

    def normal(self, *shape: int, dtype: str = "bfloat16", seed: int = 0) -> Any:
        jnp = usable_jax().numpy
        return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.dtype(dtype)))

    def check(self, a: Any, b: Any, recipe: str, *, bias: Any = None, prepare: str = "", **facts: Any) -> Any:
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
            m=a.shape[-2],
            n=b.shape[-1],
            k=a.shape[-1],
            a=operands[0],
            b=operands[1],
            bias=None if bias is None else str(bias.dtype),
            arch=self.arch,
            device=self.device,
            **facts,
        )
        assert reasons(asked) == ""
        wanted = np.matmul(*decoded)
        wanted = wanted if bias is None else wanted + np.asarray(bias, np.float64)
        wanted = np.asarray(framework("numpy").epilogue(wanted, dataclasses.replace(asked, out_dtype="float64"), None))
        for config in BACKEND.configs(asked):
            out = BACKEND.plan(asked, config)(*given, *(() if bias is None else (bias,)))
            assert (str(out.dtype), out.shape) == (out_dtype, wanted.shape)
            rounding = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 0.0}[out_dtype]
            assert _relative(np.asarray(out.astype("float32"), np.float64), wanted) < rounding + 6e-3, config
        return out

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 16), (33, 130, 300), (150, 70, 129)])
    def test_shapes(self, m: int, n: int, k: int, recipe: str) -> None:
        self.check(self.normal(m, k), self.normal(k, n, seed=1), recipe)

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float16", "float32"])
    def test_every_dtype(self, dtype: str, out_dtype: str) -> None:
        a, b = self.normal(32, 144, dtype=dtype), self.normal(144, 48, dtype=dtype, seed=1)
        self.check(a, b, ROW, out_dtype=out_dtype)

    @pytest.mark.parametrize(
        ("shape", "activation"), [((32, 1), "silu"), ((), None), ((1, 48), None), *(((48,), x) for x in ACTIVATIONS)]
    )
    def test_bias_and_activation(self, shape: tuple[int, ...], activation: str | None) -> None:
        bias = self.normal(*shape, seed=2)
        self.check(self.normal(32, 144), self.normal(144, 48, seed=1), ROW, bias=bias, activation=activation)

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    @pytest.mark.parametrize("prepare", ["b", "ab"])
    def test_prepared_operands(self, prepare: str, recipe: str) -> None:
        self.check(self.normal(33, 144), self.normal(144, 49, seed=1), recipe, prepare=prepare)

    def test_an_operand_is_prepared_under_a_trace_too(self) -> None:
        import jax

        recipe = ScalingRecipe.parse(ROW)
        b = self.normal(144, 49)
        found, wanted = jax.jit(lambda x: BACKEND.prepare(x, recipe, axis=-2))(b), BACKEND.prepare(b, recipe, axis=-2)
        assert (np.asarray(found.matrix).view(np.uint8) == np.asarray(wanted.matrix).view(np.uint8)).all()
        scales = [np.asarray(x.scale).ravel()[:49] for x in (found, wanted)]  # what is behind them is not set
        assert (scales[0] == scales[1]).all()

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS])
    def test_scaled_arrays(self, recipe: str) -> None:
        pair = RecipePair.parse(recipe)
        a, b = self.normal(33, 300), self.normal(300, 140, seed=1)
        left, right = quantize(a, pair.a), quantize(b, pair.b, axis=-2)
        self.check(left, right, recipe, out_dtype="float32")
        self.check(a, right, recipe)

    @pytest.mark.parametrize("formats", [("e4m3fn", "e4m3fn"), ("e4m3fn", "e5m2"), ("e5m2", "e4m3fn")])
    def test_raw_fp8_has_scale_one(self, formats: tuple[str, str]) -> None:
        a = self.normal(32, 144).astype(f"float8_{formats[0]}")
        b = self.normal(144, 48, seed=1).astype(f"float8_{formats[1]}")
        pair = "@".join(f"{x[:4]}:tensor" for x in formats)
        self.check(a, b, pair, out_dtype="float32")

    @pytest.mark.parametrize("batches", [((2, 3), ()), ((3,), (3,)), ((2, 1), (3,)), ((), (2,))])
    @pytest.mark.parametrize("bias", [None, (40,), (7, 1)])
    def test_batches(self, batches: tuple[tuple[int, ...], ...], bias: tuple[int, ...] | None) -> None:
        a, b = self.normal(*batches[0], 7, 130), self.normal(*batches[1], 130, 40, seed=1)
        self.check(a, b, ROW, bias=None if bias is None else self.normal(*bias, seed=2), activation="relu")

    @pytest.mark.parametrize("recipe", [TENSOR, ROW, "e5m2:tensor@e4m3:tensor"])
    def test_nan_and_inf_reach_the_rows_that_hold_them(self, recipe: str) -> None:
        a = self.normal(16, 128).at[3, 5].set(float("nan")).at[7, 9].set(float("inf")).at[8].set(0)
        asked = problem(recipe, m=16, n=32, k=128, arch=self.arch, device=self.device)
        out = BACKEND.plan(asked)(a, abs(self.normal(128, 32, seed=1)))
        finite = np.isfinite(np.asarray(out, np.float32))
        assert np.flatnonzero(~finite.all(1)).tolist() == [3, 7]
        assert not finite[[3, 7]].any()
        assert not np.asarray(out[8], np.float32).any()

    @pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (0, 0, 0), (0, None, 0), (1, None, None)])
    def test_it_is_mapped_and_jitted(self, axes: tuple[int | None, ...]) -> None:
        import jax

        whole = [self.normal(*shape, seed=i) for i, shape in enumerate([(3, 20, 144), (3, 144, 48), (3, 48)])]
        given = [x[0] if axis is None else x.swapaxes(0, axis) for x, axis in zip(whole, axes, strict=True)]
        plan = BACKEND.plan(problem(m=20, n=48, k=144, bias="bfloat16", arch=self.arch, device=self.device))
        found = jax.jit(jax.vmap(plan, axes))(*given)
        assert found.shape == (3, 20, 48)
        for i, part in enumerate(found):
            alone = plan(*(x[0] if axis is None else x[i] for x, axis in zip(whole, axes, strict=True)))
            assert _relative(np.asarray(part, np.float64), np.asarray(alone, np.float64)) < 1e-3

    def test_its_derivatives_are_the_native_products(self) -> None:
        import jax
        import jax.numpy as jnp

        a, b = self.normal(3, 20, 144, dtype="float32"), self.normal(144, 48, seed=1, dtype="float32")
        plain = Operand("float32")
        asked = problem(m=20, n=48, k=144, a=plain, b=plain, out_dtype="float32", arch=self.arch, device=self.device)
        product = framework("jax").adapt(BACKEND.plan(asked), None, asked, jnp.matmul, jnp.matmul)
        transforms = (
            lambda f: jax.grad(lambda x, y: f(x, y).sum(), (0, 1))(a[0], b),
            lambda f: jax.vmap(jax.grad(lambda x: f(x, b).sum()))(a),
            lambda f: jax.jit(jax.grad(lambda y: jax.vmap(f, (0, None))(a, y).sum()))(b),
            lambda f: jax.jvp(f, (a[0], b), (a[1], b))[1],
        )
        for transform in transforms:
            for found, native in zip(
                jax.tree.leaves(transform(product)), jax.tree.leaves(transform(jnp.matmul)), strict=True
            ):
                assert _relative(np.asarray(found, np.float64), np.asarray(native, np.float64)) < 5e-3


class Quantizers:
    """Stands for Triton's quantizers, by the reference's rules; what room is left for scales holds NaN."""

    made: list[Any]

    def __init__(self, sources: Any, arch: str) -> None:
        self.sources = sources
        self.made.append(self)

    def __call__(self, *operands: Any) -> list[Any]:
        import jax.numpy as jnp
        from dispatch.plugins import _quantize_jax as quantizing

        found = []
        for source, x in zip(self.sources, operands, strict=True):
            form = source.form
            assert (x.shape, x.dtype.name) == (source.shape, source.dtype)
            made = quantize(x.T if source.transposed else x, form.recipe)
            gaps = (form.padded_rows - form.rows, form.padded_k - form.k)
            data = jnp.pad(made.data, [(0, gap) for gap in gaps])
            scale, tall = made.scale, form.scale[0]
            if form.recipe.granularity != "tensor":
                scale = jnp.pad(scale, ((0, tall - scale.shape[0]), (0, 0)), constant_values=float("nan"))
                padding = jnp.arange(tall)[:, None] >= form.rows
                scale = jnp.where(padding & (jnp.arange(tall)[:, None] < form.padded_rows), 1.0, scale)
            scale = scale.T if form.along_rows else scale
            assert scale.shape == form.stored_scale
            found.append(quantizing.Encoded(data, scale))
        return found


class TestByTritonsQuantizers(Products):
    """Where Triton can be launched from JAX its kernels quantize, both operands in one launch."""

    @pytest.fixture(autouse=True)
    def launched_by_triton(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        usable_jax()
        pytest.importorskip("triton", reason="Triton is not installed")
        from dispatch.plugins import _pallas_jax, _quantize_jax

        Quantizers.made = []
        monkeypatch.setattr(_pallas_jax, "quantizes_from_jax", lambda arch: True)
        monkeypatch.setattr(_quantize_jax, "Quantizer", Quantizers)
        _pallas_jax._encoding.cache_clear()
        yield
        _pallas_jax._encoding.cache_clear()

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    def test_what_the_program_transposes_is_quantized_from_where_it_lies(self, recipe: str) -> None:
        import jax

        a, b = self.normal(32, 144), self.normal(144, 48, seed=1)
        plan = BACKEND.plan(problem(recipe, m=32, n=48, k=144, arch=self.arch, device=self.device))
        turned = jax.jit(lambda x, y: plan(x.T, y.T))
        assert (turned(a.T, b.T) == plan(a, b)).all()
        assert [[x.transposed for x in made.sources] for made in Quantizers.made] == [[True, False], [False, True]]
        many = jax.vmap(turned, (0, None))(jax.numpy.stack([a.T, -a.T]), b.T)
        assert (many[0] == plan(a, b)).all()
        assert (many[1] == -plan(a, b)).all()

    def test_both_operands_are_quantized_together_and_a_prepared_one_not_again(self) -> None:
        a, b = self.normal(32, 144), self.normal(144, 48, seed=1)
        facts: dict[str, Any] = {"m": 32, "n": 48, "k": 144, "arch": self.arch, "device": self.device}
        BACKEND.plan(problem(ROW, **facts))(a, b)
        assert [len(x.sources) for x in Quantizers.made] == [2]
        made = BACKEND.prepare(b, ScalingRecipe.parse(ROW), axis=-2)
        BACKEND.plan(problem(ROW, **facts, b=Operand("bfloat16", prepared=True)))(a, made)
        assert [len(x.sources) for x in Quantizers.made] == [2, 1, 1]


@pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
@pytest.mark.parametrize("size", [(16, 512, 1040), (4096, 4096, 4096), (8192, 8192, 8192)])
def test_the_quantizers_compile_with_the_padding_that_mosaic_wants(
    size: tuple[int, int, int], recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    jax = usable_jax()
    if not getattr(pytest.importorskip("triton"), "__version__", "").startswith("3.6."):
        pytest.skip("launches from JAX are made with Triton 3.6")
    from types import SimpleNamespace

    from dispatch.plugins import _pallas_jax, _quantize_jax

    compiled: list[Any] = []

    def bind(kernel: Any, grid: Any, arguments: Any, options: Any, *, results: Any, **_: Any) -> Any:
        compiled.append(_quantize_jax.launching_jax._compile(kernel, arguments, options, 90)[0])
        return SimpleNamespace(
            results=results,
            run=lambda arrays, shapes: [jax.numpy.zeros(shapes[x].shape, shapes[x].dtype) for x in results],
        )

    monkeypatch.setattr(_pallas_jax, "quantizes_from_jax", lambda arch: True)
    monkeypatch.setattr(_quantize_jax.launching_jax, "bind", bind)
    m, n, k = size
    pair = RecipePair.parse(recipe)

    def both(a: Any, b: Any) -> Any:
        return _pallas_jax.encode_arrays([(a, pair.a, -1, -1), (b, pair.b, -2, -2)], "sm90")

    left, right = jax.eval_shape(both, *(jax.ShapeDtypeStruct(x, "bfloat16") for x in ((m, k), (k, n))))
    assert left.matrix.shape == (m, -(-k // 128) * 128)
    assert right.matrix.shape == (n, left.matrix.shape[1])
    assert len(compiled) == (1 if recipe == ROW and k <= 2048 else {ROW: 3, TENSOR: 4, BLOCKS: 2}[recipe])
    assert all("sm_90" in made.asm["ptx"] for made in compiled)


@pytest.mark.usefixtures("described_gpu")
def test_where_jax_has_no_triton_lowering_xla_quantizes(monkeypatch: pytest.MonkeyPatch) -> None:
    import jax

    monkeypatch.setitem(sys.modules, "dispatch.kernels.pallas_quantize", None)
    a, b = jax.ShapeDtypeStruct((200, 520), "bfloat16"), jax.ShapeDtypeStruct((520, 300), "bfloat16")
    for recipe in (ROW, TENSOR, BLOCKS):
        plan = BACKEND.plan(problem(recipe, m=200, n=300, k=520))
        text = jax.jit(plan).trace(a, b).lower(lowering_platforms=("cuda",)).as_text()
        assert "mosaic_gpu" in text
        assert "triton" not in text


@pytest.mark.interpreted
class TestInterpreted(Products):
    @pytest.fixture(autouse=True)
    def jax_that_fits(self) -> None:
        usable_jax()


@pytest.mark.interpreted
def test_plans_for_hopper_and_blackwell_interpreted() -> None:
    jax = usable_jax()
    if jax.__version_info__ < (0, 11):
        pytest.skip(f"the interpreter of JAX {jax.__version__} has no clusters and no tensor memory")
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    command = [sys.executable, str(Path(__file__).with_name("_pallas_plans.py"))]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    errors: dict[str, float] = json.loads(run.stdout[run.stdout.rindex("{") :])
    assert len(errors) == 6
    assert errors.pop("lossless") < 3e-3
    assert {name: found for name, found in errors.items() if not 0.02 < found < 0.045} == {}


@pytest.mark.gpu
class TestGpu(Products):
    device = "cuda:0"

    @pytest.fixture(autouse=True)
    def on_a_gpu(self) -> None:
        jax = pytest.importorskip("jax", reason="JAX is not installed")
        assert jax.default_backend() == "gpu", "run gpu tests on a machine with a GPU"
        self.arch = str(framework("jax").archs()[0])

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, "e4m3:row@e5m2:row", MIXED, BLOCKS])
    @pytest.mark.parametrize("accumulation", ["fast", "promoted"])
    @pytest.mark.parametrize(
        ("m", "n", "k"), [(16, 512, 1040), (128, 1000, 4112), (1040, 1048, 4112), (4104, 2000, 512)]
    )
    def test_every_config(self, m: int, n: int, k: int, accumulation: str, recipe: str) -> None:
        if (recipe, accumulation) != (BLOCKS, "fast"):
            self.check(self.normal(m, k), self.normal(k, n, seed=1), recipe, accumulation=accumulation)

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    @pytest.mark.parametrize(("m", "n", "k"), [(33, 65, 144), (2048, 1024, 4096), (4096, 4096, 2048)])
    def test_what_the_program_transposes_is_quantized_from_where_it_lies(
        self, m: int, n: int, k: int, recipe: str
    ) -> None:
        import jax

        a, b = self.normal(m, k), self.normal(k, n, seed=1)
        plan = BACKEND.plan(problem(recipe, m=m, n=n, k=k, arch=self.arch, device=self.device))
        turned = jax.jit(lambda x, y: plan(x.T, y.T))(a.T.copy(), b.T.copy())
        assert _relative(np.asarray(turned, np.float64), np.asarray(plan(a, b), np.float64)) < 1e-3

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
    @pytest.mark.parametrize("out_dtype", ["bfloat16", "float32"])
    @pytest.mark.parametrize(("m", "n", "k"), [(1, 17, 16), (33, 65, 77), (130, 1000, 1041), (2048, 4096, 1024)])
    def test_without_quantizing(self, m: int, n: int, k: int, out_dtype: str, dtype: str) -> None:
        a, b, bias = self.normal(m, k, dtype=dtype), self.normal(k, n, dtype=dtype, seed=1), self.normal(n, seed=2)
        plain = Operand(dtype)
        asked = problem(None, m=m, n=n, k=k, a=plain, b=plain, out_dtype=out_dtype, accumulation=None, bias="bfloat16")
        assert reasons(asked) == ""
        exact = np.matmul(*(np.asarray(x, np.float64) for x in (a, b))) + np.asarray(bias, np.float64)
        for config in BACKEND.configs(asked):
            out = BACKEND.plan(asked, config)(a, b, bias)
            assert (str(out.dtype), out.shape) == (out_dtype, exact.shape)
            rounding = {"bfloat16": 4e-3, "float32": 2e-5}[out_dtype]
            assert _relative(np.asarray(out.astype("float32"), np.float64), exact) < rounding

    def test_a_dispatched_product_is_jitted_differentiated_and_mapped(self) -> None:
        import jax
        import jax.numpy as jnp

        a, b = self.normal(3, 1024, 1024), self.normal(1024, 1024, seed=1)
        loose = dispatch.use_policy(gate={"min_speedup": 0.0}, tuning={"budget_ms": 50, "compile_ms": 120000})

        def product(x: Any, y: Any) -> Any:
            return dispatch.matmul(x, y, backend="pallas_fp8")

        with loose:
            decision = dispatch.explain(a[0], b, backend="pallas_fp8")
            assert decision.backend == "pallas_fp8", decision
            once = jax.jit(product)(a[0], b)
            assert 1e-3 < _relative(np.asarray(once, np.float64), np.asarray(a[0] @ b, np.float64)) < 0.045
            assert (once == product(a[0], b)).all()
            mapped = jax.jit(jax.vmap(product, (0, None)))(a, b)
            assert (mapped[0] == once).all()
            slopes = jax.jit(jax.grad(lambda x, y: product(x, y).astype(jnp.float32).sum(), (0, 1)))(a[0], b)
            wanted = jax.grad(lambda x, y: (x @ y).astype(jnp.float32).sum(), (0, 1))(a[0], b)
            for found, native in zip(slopes, wanted, strict=True):
                assert _relative(np.asarray(found, np.float64), np.asarray(native, np.float64)) < 5e-3
