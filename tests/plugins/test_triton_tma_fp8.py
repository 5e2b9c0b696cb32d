"""The triton_tma_fp8 backend: what it rejects and why, its configs, compiled for every arch, and run on a GPU."""

from __future__ import annotations

import importlib.util
import itertools
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from dispatch.plugins import _triton_configs as names
from dispatch.plugins import triton_tma_fp8

import dispatch
from dispatch import Backend, Operand, Problem, RecipePair, ScalingRecipe

BACKEND = triton_tma_fp8.TritonBackend()
ROW, TENSOR, BLOCKS, MX = "e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128", "e4m3:1x32:e8m0"
SQUARES = ("e4m3:128x128", "e4m3:64x64", "e4m3:32x32")
MIXED = tuple(f"{a}:{kind}@{b}:{kind}" for kind in ("row", "tensor") for a, b in (("e4m3", "e5m2"), ("e5m2", "e4m3")))
ARCHS = {"sm70": False, "sm80": False, "sm86": False, "sm89": True, "sm90": True, "sm100": True, "sm103": True}
ARCHS |= {"sm120": True, "sm121": True, "sm990": False, "cpu-avx512": False}


@pytest.fixture(autouse=True)
def triton_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let rejections speak of the problem where Triton is not installed."""
    monkeypatch.setattr(triton_tma_fp8, "version_of", lambda package: (3, 6, 0))


def problem(recipe: str | None = ROW, m: int = 512, n: int = 512, k: int = 512, **facts: Any) -> Problem:
    pair = None if recipe is None else RecipePair.parse(recipe)
    blocks = pair is not None and pair.a.granularity not in ("row", "tensor", "1x32")
    values = {
        "a": Operand("bfloat16"),
        "b": Operand("bfloat16"),
        "out_dtype": "bfloat16",
        "framework": "torch",
        "arch": "sm90",
        "device": "cuda:0",
        "accumulation": None if pair is None else "promoted" if blocks else "fast",
        **facts,
    }
    return Problem(m, n, k, recipe=pair, **values)


def reasons(asked: Problem) -> str:
    return "; ".join(map(str, BACKEND.rejections(asked)))


class TestRejections:
    def test_it_is_a_backend(self) -> None:
        assert isinstance(BACKEND, Backend)

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, *SQUARES, *MIXED])
    @pytest.mark.parametrize(("arch", "able"), ARCHS.items())
    def test_runs_where_there_are_fp8_tensor_cores(self, arch: str, able: bool, recipe: str) -> None:
        found = reasons(problem(recipe, arch=arch))
        assert (found == "") == able, found
        assert (
            able
            or found == f"arch is {arch}; needs sm89, sm90, sm100, sm103, sm120 or sm121: a GPU with FP8 tensor cores"
        )

    @pytest.mark.parametrize("arch", [arch for arch, able in ARCHS.items() if able])
    def test_mx_scales_run_from_blackwell_on(self, arch: str) -> None:
        assert (reasons(problem(MX, arch=arch)) == "") == (arch >= "sm1" and arch < "sm8")

    @pytest.mark.parametrize(
        ("recipe", "facts", "said"),
        [
            (ROW, {"framework": "numpy"}, "framework is numpy; needs torch or jax"),
            (MX, {"framework": "jax", "arch": "sm100"}, "recipe is e4m3:1x32:e8m0"),
            (None, {"framework": "jax", "n": 511}, "recipe is None; needs e4m3:row"),
            (ROW, {"a": Operand("float64")}, "dtype is float64"),
            (ROW, {"out_dtype": "float64"}, "out_dtype is float64"),
            (ROW, {"m": 0}, "size is m=0"),
            (BLOCKS, {"accumulation": "fast"}, "accumulation is fast; needs promoted"),
            (BLOCKS, {"a": Operand("bfloat16", (3,)), "b": Operand("bfloat16", (3,))}, "batch is (3,)"),
            (ROW, {"a": Operand("float8_e4m3fn")}, "a is float8_e4m3fn without scales"),
            (TENSOR, {"b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}, "b is quantized as e4m3:row"),
            (None, {}, "size is n=512, k=512, multiples of 8; needs an odd n or k"),
            (None, {"n": 511, "b": Operand("bfloat16", recipe=ScalingRecipe.parse(ROW))}, "b is e4m3:row"),
            ("e5m2:row", {}, "recipe is e5m2:row"),
            ("e5m2:tensor@e4m3:tensor", {"a": Operand("float8_e4m3fn")}, "a is float8_e4m3fn without scales"),
            (
                ROW,
                {"a": Operand("bfloat16", (2, 3)), "b": Operand("bfloat16", (2, 1), prepared=True)},
                "batch of b is (2, 1); needs none, or (2, 3)",
            ),
            (
                ROW,
                {"a": Operand("bfloat16", (1, 3), recipe=ScalingRecipe.parse(ROW)), "b": Operand("bfloat16", (2, 3))},
                "batch of a is (1, 3)",
            ),
        ],
    )
    def test_the_reason_names_what_was_found(self, recipe: str | None, facts: dict[str, Any], said: str) -> None:
        assert said in reasons(problem(recipe, **facts))

    @pytest.mark.parametrize(
        ("recipe", "facts"),
        [
            (TENSOR, {"a": Operand("float8_e4m3fn"), "b": Operand("float8_e4m3fn")}),
            (ROW, {"a": Operand("bfloat16", (3, 1)), "b": Operand("bfloat16", (2,)), "m": 7, "n": 5, "k": 3}),
            (ROW, {"b": Operand("float16", layout="strided", alignment=2), "bias": "float32", "activation": "gelu"}),
            (None, {"n": 511}),
            (None, {"k": 77, "out_dtype": "float32"}),
        ],
    )
    def test_these_run(self, recipe: str | None, facts: dict[str, Any]) -> None:
        assert reasons(problem(recipe, **facts)) == ""

    def test_without_triton_it_says_how_to_get_it(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(triton_tma_fp8, "version_of", lambda package: ())
        assert reasons(problem()) == "triton is not installed; needs triton >= 3.6: pip install gemm-dispatch[triton]"

    @pytest.mark.parametrize(("version", "able"), [((3, 5, 1), False), ((3, 6, 0), True), ((3, 10, 0), True)])
    def test_an_older_triton_is_refused_by_name(
        self, version: tuple[int, ...], able: bool, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(triton_tma_fp8, "version_of", lambda package: version)
        assert reasons(problem()) == ("" if able else "triton is 3.5.1; needs triton >= 3.6")

    @pytest.mark.parametrize("value", ["1", "true", "ON"])
    def test_the_interpreter_is_refused(self, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("TRITON_INTERPRET", value)
        assert reasons(problem()).startswith(f"TRITON_INTERPRET is {value}; needs compiled kernels")

    @pytest.mark.parametrize(
        ("triton", "jaxlib", "arch", "said"),
        [
            ((3, 6, 0), (0, 11, 1), "sm90", ""),
            ((3, 6, 1), (0, 12, 0), "sm100", ""),
            ((3, 6, 0), (0, 9, 0), "sm89", ""),
            (
                (3, 6, 0),
                (0, 11, 0),
                "sm90",
                "jaxlib is 0.11.0; needs jaxlib >= 0.11.1, whose Triton calls take TMA descri",
            ),
            ((3, 6, 0), (), "sm90", "jaxlib is not installed"),
            ((3, 7, 1), (0, 11, 1), "sm90", "triton is 3.7.1; needs triton 3.6 for launches from JAX"),
            ((), (0, 11, 1), "sm90", "triton is not installed"),
            ((3, 6, 0), (0, 11, 1), "sm80", "arch is sm80; needs sm89, sm90"),
        ],
    )
    def test_jax_is_served_by_what_its_custom_call_can_do(
        self, triton: tuple[int, ...], jaxlib: tuple[int, ...], arch: str, said: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = {"triton": triton, "jaxlib": jaxlib}
        monkeypatch.setattr(triton_tma_fp8, "version_of", found.__getitem__)
        for recipe in (ROW, TENSOR, BLOCKS, *SQUARES):
            why = reasons(problem(recipe, framework="jax", arch=arch))
            assert (why == "") == (said == ""), why
            assert said in why

    def test_measured_means_hopper(self) -> None:
        assert {x.status for x in BACKEND.capabilities if x.archs == ("sm90",)} == {"measured"}
        assert {x.status for x in BACKEND.capabilities if x.archs != ("sm90",)} == {"compiled"}


SIZES = [(1, 8192, 8192), (16, 1024, 8192), (64, 8192, 8192), (128, 28672, 8192), (256, 8192, 8192), (512, 512, 512)]
SIZES += [(1024, 1024, 1024), (2048, 2048, 2048), (8192, 8192, 8192), (300, 77, 40)]
RECIPES = (ROW, TENSOR, MIXED[0], BLOCKS, *SQUARES, MX, None)


def _asked() -> Iterator[Problem]:
    """Yield problems of every arch, recipe and size that are not rejected."""
    for arch, recipe, (m, n, k) in itertools.product(ARCHS, RECIPES, SIZES):
        modes = ("fast", "promoted") if recipe in (ROW, TENSOR, MIXED[0]) else (None,)
        for mode in modes:
            facts = {} if mode is None else {"accumulation": mode}
            asked = problem(recipe, m, n - (recipe is None), k, arch=arch, **facts)
            if ARCHS[arch] and (recipe != MX or arch.startswith("sm1")):
                yield asked


class TestConfigs:
    def test_names_are_read_back(self) -> None:
        for asked in _asked():
            found = BACKEND.configs(asked)
            assert found, asked
            assert len(found) <= 4
            assert [str(names.Config.parse(name)) for name in found] == found
            assert all(name.startswith(f"{asked.arch}_gemm_{names.dtypes_of(asked)}_") for name in found)

    def test_names_follow_cutlass(self) -> None:
        assert BACKEND.configs(problem(ROW, 8192, 8192, 8192))[0] == (
            "sm90_gemm_e4m3_tma_warpspecialized_pingpong_128x128x128_s6"
        )
        assert BACKEND.configs(problem(ROW, 16, 1024, 8192))[0] == "sm90_gemm_e4m3_tma_swapped_16x64x256_s5_k8_w4"
        assert BACKEND.configs(problem(MIXED[0], 8192, 8192, 8192))[0].startswith("sm90_gemm_e4m3_e5m2_tma_")

    def test_what_cannot_run_has_none(self) -> None:
        assert BACKEND.configs(problem(ROW, arch="sm80")) == []

    @pytest.mark.parametrize(
        ("recipe", "name"),
        [
            (ROW, "sm100_gemm_e4m3_tma_128x256x128_s3"),
            (ROW, "sm90_gemm_bf16_tma_128x256x64_s3"),
            (BLOCKS, "sm90_gemm_e4m3_tma_warpspecialized_pingpong_128x128x128_s6"),
            (ROW, "sm90_gemm_e4m3_tma_0x0x0_s0"),
        ],
    )
    def test_a_config_of_another_problem_is_refused(self, recipe: str, name: str) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("triton")
        with pytest.raises(ValueError, match=r"is not for matmul.*its configs are sm90_gemm_e4m3"):
            BACKEND.plan(problem(recipe, 8192, 8192, 8192), name)

    def test_names_say_the_stages_that_there_is_room_for(self) -> None:
        pytest.importorskip("torch")
        pytest.importorskip("triton")
        from dispatch.plugins._triton_launches import hopper_config

        for asked in _asked():
            for out, size in (("bfloat16", 2), ("float32", 4)):
                for config in names.configs(replace(asked, out_dtype=out)) if asked.arch == "sm90" else []:
                    if config.schedule in names.HOPPER_SCHEDULES:
                        assert hopper_config(config, 1, size).stages == config.stages, (asked, config)

    @pytest.mark.parametrize("name", ["", "big", "sm90_gemm_e4m3_tma_128x128_s3", "sm90_gemm_e4m3_wmma_1x1x1_s1"])
    def test_other_names_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="is no config; one is sm90_gemm_e4m3_tma_warpspecialized_pingpong"):
            names.Config.parse(name)


def test_what_was_tuned_is_printed_on_request(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from dispatch.plugins.triton_tma_fp8 import dispatch_decided

    from dispatch import Measurement, Verdict

    asked = problem(ROW, 8192, 8192, 8192)
    candidates = [dispatch.Candidate("triton_tma_fp8", asked.recipe, "fast", name) for name in BACKEND.configs(asked)]
    measured = [Measurement(90.0 - index, 90.0, 1.0, 9, 1.5, None, "caller") for index in range(len(candidates))]
    verdicts = [Verdict(c, "passed", "", m) for c, m in zip(candidates, measured, strict=True)]
    decision = SimpleNamespace(problem=asked, candidates=verdicts)
    dispatch_decided(decision)  # type: ignore[arg-type]
    assert capsys.readouterr().out == ""
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    dispatch_decided(decision)  # type: ignore[arg-type]
    said = capsys.readouterr().out
    assert f"e4m3:row/fast: best of {len(candidates)} configs: {candidates[-1].config}, " in said


def _compiler() -> ModuleType:
    name = "_compile"
    if name not in sys.modules:
        path = Path(__file__).parents[1] / "kernels" / f"{name}.py"
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


SHARED_LIMIT = {"sm89": 101_376, "sm90": 232_448, "sm100": 232_448, "sm103": 232_448, "sm120": 101_376}
SHARED_LIMIT["sm121"] = 101_376


def compiled(arch: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return what the arch's configs compile to, each once: the kernels by config, recipe and accumulation."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.kernels import launching
    from dispatch.plugins import _triton_torch

    monkeypatch.setattr(
        launching,
        "bind",
        lambda kernel, grid, arguments, options: kernel.warmup(*arguments, grid=grid, **options),
    )
    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    built: dict[str, Any] = {}
    with _compiler().compiling(int(arch[2:])):
        for asked in _asked():
            for config in names.configs(asked) if asked.arch == arch else []:
                key = f"{config} {asked.recipe} {asked.accumulation}"
                if key not in built:
                    built[key] = _kernel(_triton_torch, asked, config)
    return built


def _kernel(module: Any, asked: Problem, config: names.Config) -> Any:
    if asked.recipe is not None:
        return module.ScaledProduct(asked, config)._kernel.launch
    stand_in, operands = module.launches.stand_in, module.launches.Operands
    both = operands(stand_in(0, asked.a.dtype, (asked.m, asked.k)), stand_in(5, asked.b.dtype, (asked.n, asked.k)))
    return module.bind_kernel(asked, config, both, asked.out_dtype, None, None).launch


@pytest.mark.triton
@pytest.mark.parametrize("arch", SHARED_LIMIT)
def test_every_config_compiles_within_the_gpu_s_limits(arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
    built = compiled(arch, monkeypatch)
    spilled = {key: n for key, kernel in built.items() if (n := _compiler().stack_bytes(kernel)) > 8}
    assert not spilled
    large = {key: kernel.metadata.shared for key, kernel in built.items()}
    assert max(large.values()) <= SHARED_LIMIT[arch], large
    for key, kernel in built.items():
        assert (kernel.metadata.tmem_size or 0) <= 512
        ptx = kernel.asm["ptx"]
        tensor = {"sm89": "mma.sync", "sm90": "wgmma", "sm120": "mma.sync", "sm121": "mma.sync"}.get(
            arch, "tcgen05.mma"
        )
        assert tensor in ptx, key
        assert ("cp.async.bulk.tensor" in ptx) == (arch != "sm89"), key
        if kernel.metadata.launch_pdl:
            touches = min(found.start() for pattern in (READS, WRITES) for found in pattern.finditer(ptx))
            assert ptx.index("griddepcontrol.wait") < touches, key
    assert any(kernel.metadata.launch_pdl for kernel in built.values()) == (arch == "sm90")


def test_each_epilogue_of_one_plan_has_its_own_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_torch as module

    bound: list[tuple[Any, ...]] = []

    def bind(*arguments: Any) -> Any:
        bound.append(arguments[3:])
        return module.Kernel(lambda stream, addresses: None, 0, None)

    monkeypatch.setattr(module, "bind_kernel", bind)
    monkeypatch.setattr(module, "_current_stream", lambda index: 0)
    facts = {"out_dtype": "float32", "bias": "float32", "activation": "silu", "device": "cpu"}
    asked = problem(None, 8, 33, 40, **facts)
    plan = module.lossless(asked, names.configs(asked)[0])
    a, b, wide = torch.ones(8, 40).bfloat16(), torch.ones(40, 33).bfloat16(), torch.ones(67)
    for bias in (wide[1:34], wide[:33], torch.ones(8, 1), wide[:33]):  # an address off by 4 bytes cannot be fused
        plan(a, b, bias)
    assert bound == [("float32", None, None), ("float32", "float32", "silu")]


@pytest.mark.parametrize("dtype", ["float64", "int64", "bool"])
def test_a_bias_that_the_kernel_cannot_add_is_added_afterwards(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_torch as module

    bound: list[tuple[Any, ...]] = []
    monkeypatch.setattr(module, "bind_kernel", lambda *arguments: bound.append(arguments[3:]))
    asked = problem(ROW, bias=dtype, activation="relu")
    module.ScaledProduct(asked, names.configs(asked)[0])
    assert bound == [("float32", None, None)]


@pytest.mark.parametrize("recipe", [TENSOR, ROW, BLOCKS, "e4m3:32x32"])
def test_what_is_quantized_already_is_padded_with_zeros(recipe: str) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_torch as module

    pair = RecipePair.parse(recipe)
    a = torch.randn(5, 33)
    given = [dispatch.quantize(a, pair.a), *([a.to(torch.float8_e4m3fn)] if recipe == TENSOR else [])]
    for x in given:
        encoded = module.encode(x, pair.a, -1)
        data = x.data if isinstance(x, dispatch.ScaledArray) else x
        assert encoded.matrix.shape == (5, 48)
        assert encoded.matrix[:, :33].float().equal(data.float())
        assert not encoded.matrix[:, 33:].float().any()
        assert encoded.matrix.data_ptr() % 16 == 0


@pytest.mark.parametrize("mode", ["fast", "promoted"])
@pytest.mark.parametrize(("arch", "m"), [("sm89", 16), ("sm89", 512), ("sm90", 16), ("sm90", 8192), ("sm100", 512)])
def test_the_kernel_accumulates_as_the_problem_says(arch: str, m: int, mode: str) -> None:
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_launches as launches

    asked = problem(ROW, m, 8192, 8192, arch=arch, accumulation=mode)
    forms = [launches.form_of(ScalingRecipe.parse(ROW), rows, 8192) for rows in (m, 8192)]
    for config in names.configs(asked):
        operands = launches.operands_of(asked, (forms[0], forms[1]))
        step = launches.multiplying(asked, config, operands, "bfloat16", None, None, programs=132).step
        given = dict(zip(step.kernel.arg_names, step.arguments, strict=True))
        found = given["form"].promoted if "form" in given else given["PROMOTED"]
        assert found == (mode == "promoted"), config


def test_each_tile_of_a_split_product_has_a_counter_and_each_split_its_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_torch as module

    facts = SimpleNamespace(multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
    monkeypatch.setattr(module, "_bound", lambda step: None)
    monkeypatch.setattr(module, "_capturing", lambda: False)
    asked = problem(ROW, 16, 1024, 8192, device="cpu")
    config = names.configs(asked)[0]
    assert config.splits == 8
    kernel = module.ScaledProduct(asked, config)._kernel
    assert kernel.partial_bytes == 4 * 16 * 1024 * 8
    zeros = kernel.counters.on(0)
    assert (zeros.dtype, zeros.tolist()) == (torch.int32, [0] * (1024 // 64))


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_plan_runs_with_its_own_device_current(gpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_torch as module

    current: list[int] = [0]

    @contextmanager
    def device(wanted: Any) -> Iterator[None]:
        current.append(wanted.index)
        yield
        current.pop()

    made_on, run_on = [], []

    class Product:
        def __init__(self, asked: Problem, config: Any) -> None:
            made_on.append(current[-1])

        def call(self) -> Any:
            return lambda a, b, bias=None: run_on.append(current[-1])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(module, "ScaledProduct", Product)
    monkeypatch.setattr(module, "lossless", lambda asked, config: Product(asked, config).call())
    for recipe in (ROW, None):
        index = gpus - 1
        asked = problem(recipe, 512, 512 - (recipe is None), 512, device=f"cuda:{index}")
        BACKEND.plan(asked)(None, None)
        assert (made_on.pop(), run_on.pop(), current) == (index, index if gpus > 1 else 0, [0])


READS = re.compile(r"\b(?:ld\.global|cp\.async\.bulk\.tensor|cp\.async\.c[ag])\S*")
WRITES = re.compile(r"\b(?:st\.global|atom\.global|red\.global)\S*")


@pytest.mark.triton
@pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, "e5m2:32x32"])
@pytest.mark.parametrize("strides", [(8192, 1), (1, 300), (1, 8192)])
@pytest.mark.parametrize("guarded", [False, True])
def test_what_runs_beside_its_predecessor_waits_before_it_touches_memory(
    guarded: bool, recipe: str, strides: tuple[int, int]
) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("triton")
    from dispatch.plugins import _triton_launches as launches

    form = launches.form_of(RecipePair.parse(recipe).a, 300, 4096 if 8192 in strides else 300)
    sources = [
        launches.source(form, "bfloat16", slots, strides, guarded=guarded) for slots in (launches.OF_A, launches.OF_B)
    ]
    steps, _ = launches.quantizing(sources[0], dependent=True)
    joint = launches.quantizing_both(sources, dependent=True)
    with _compiler().compiling(90):
        built = [
            step.kernel.warmup(*step.arguments, grid=step.grid, **step.options)
            for step in (*steps, *([] if joint is None else [joint]))
        ]
    assert built
    for kernel in built:
        ptx = kernel.asm["ptx"]
        beside = strides[1] == 1 or (recipe == ROW and 8192 in strides)
        assert kernel.metadata.launch_pdl == beside
        if not beside:  # what else transposes is launched behind its predecessor
            assert "griddepcontrol" not in ptx
            continue
        waits = ptx.index("griddepcontrol.wait")
        assert waits < min(found.start() for pattern in (READS, WRITES) for found in pattern.finditer(ptx))


gpu = pytest.mark.gpu
SHAPES = [(1, 1, 1), (1, 64, 1000), (17, 15, 33), (64, 129, 127), (130, 272, 640), (300, 1040, 400), (520, 264, 1296)]


def _laid_out(x: Any, layout: str) -> Any:
    """Return the values as a view: row, col, strided (neither axis contiguous) or shifted (an odd address)."""
    torch = pytest.importorskip("torch")
    if layout == "row":
        return x.contiguous()
    if layout == "col":
        return x.mT.contiguous().mT
    parent = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), 3e4)
    view = parent[..., ::2][..., : x.shape[-1]] if layout == "strided" else parent[..., 1 : x.shape[-1] + 1]
    assert isinstance(view, torch.Tensor)
    return view.copy_(x)


def _exact(a: Any, b: Any, recipe: str | None) -> Any:
    """Return the product in float64 of what the operands decode to."""
    if recipe is None:
        return a.double() @ b.double()
    pair = RecipePair.parse(recipe)
    return _decoded(a, pair.a, -1) @ _decoded(b, pair.b, -2)


def _decoded(x: Any, recipe: ScalingRecipe, axis: int) -> Any:
    """Return in float64 what the backend makes of an operand; that has to be what the recipe makes of it, about."""
    from dispatch.plugins._triton_launches import form_of
    from dispatch.plugins._triton_torch import rows_view

    if isinstance(x, dispatch.ScaledArray):
        return x.dequantize("float64")
    rows = rows_view(x, axis)
    height, k = rows.shape
    form, encoded = form_of(recipe, height, k), BACKEND.prepare(x, recipe, axis=axis)
    scale = encoded.scale.double()
    scale = scale[:, :height].mT if form.along_rows else scale
    down, across = recipe.block(height, k)
    each = scale.repeat_interleave(down, 0)[:height].repeat_interleave(across, 1)[:, :k]
    value = encoded.matrix[:, :k].double() * each
    finite = rows.isfinite()
    assert _error(value[finite], rows[finite].double()) < (0.04 if recipe.dtype == "e4m3" else 0.08)
    shape = x.shape if axis == -1 else x.mT.shape
    return value.reshape(shape) if axis == -1 else value.reshape(shape).mT


def _error(found: Any, exact: Any) -> float:
    assert tuple(found.shape) == tuple(exact.shape)
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-300))


@gpu
class TestOnAGPU:
    def run(self, recipe: str | None, a: Any, b: Any, bias: Any = None, **facts: Any) -> Any:
        """Return the product by each config, after checking that they agree with each other and from run to run."""
        torch = pytest.importorskip("torch")
        room = dispatch.framework("torch")
        operands = [
            Operand(x.dtype, tuple(x.shape[:-2]), recipe=x.recipe)
            if isinstance(x, dispatch.ScaledArray)
            else room.operand(x)
            for x in (a, b)
        ]
        facts = {"out_dtype": "bfloat16", **facts}
        asked = problem(recipe, a.shape[-2], b.shape[-1], a.shape[-1], a=operands[0], b=operands[1], **facts)
        asked = replace(asked, bias=None if bias is None else room.dtype_name(bias))
        assert reasons(asked) == ""
        found = []
        for config in BACKEND.configs(asked):
            plan = BACKEND.plan(asked, config)
            extra = () if bias is None else (bias,)
            out, again = plan(a, b, *extra), plan(a, b, *extra)
            assert torch.equal(out.view(torch.uint8), again.view(torch.uint8)), config
            assert out.dtype == room.dtype(asked.out_dtype)
            assert out.is_contiguous()
            found.append(out)
        for other in found[1:]:
            finite = found[0].isfinite()
            assert _error(other[finite], found[0][finite].double()) < 8e-3
        return found[0]

    def operands(self, m: int, n: int, k: int, dtype: str = "bfloat16", batch: tuple[Any, Any] = ((), ())) -> Any:
        torch = pytest.importorskip("torch")
        made = [torch.randn(*batch[0], m, k, device="cuda"), torch.randn(*batch[1], k, n, device="cuda")]
        return [x.to(getattr(torch, dtype)) for x in made]

    @pytest.mark.parametrize("size", SHAPES)
    @pytest.mark.parametrize("mode", ["fast", "promoted"])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR, *MIXED])
    def test_row_and_tensor_scales(self, recipe: str, mode: str, size: tuple[int, int, int]) -> None:
        a, b = self.operands(*size)
        assert _error(self.run(recipe, a, b, accumulation=mode), _exact(a, b, recipe)) < 6e-3

    @pytest.mark.parametrize("size", SHAPES)
    @pytest.mark.parametrize("recipe", [BLOCKS, *SQUARES])
    def test_block_scales(self, recipe: str, size: tuple[int, int, int]) -> None:
        a, b = self.operands(*size)
        assert _error(self.run(recipe, a, b), _exact(a, b, recipe)) < 6e-3

    @pytest.mark.parametrize("layouts", [*itertools.product(("row", "col", "strided", "shifted"), repeat=2)])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, None])
    def test_any_strides(self, recipe: str | None, layouts: tuple[str, str]) -> None:
        a, b = self.operands(130, 273, 645)
        exact = _exact(a, b, recipe)
        before = a.clone(), b.clone()
        left, right = _laid_out(a, layouts[0]), _laid_out(b, layouts[1])
        assert _error(self.run(recipe, left, right), exact) < 6e-3
        assert left.equal(before[0])
        assert right.equal(before[1])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
    @pytest.mark.parametrize("out", ["float16", "bfloat16", "float32"])
    def test_dtypes(self, dtype: str, out: str) -> None:
        a, b = self.operands(300, 264, 528, dtype)
        assert _error(self.run(ROW, a, b, out_dtype=out), _exact(a, b, ROW)) < 6e-3

    @pytest.mark.parametrize("size", [(16, 4096, 4096), (16, 1024, 8192), (520, 528, 512)])
    @pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
    @pytest.mark.parametrize("shape", ["n", "1", "mn"])
    def test_epilogues(self, shape: str, activation: str | None, size: tuple[int, int, int]) -> None:
        torch = pytest.importorskip("torch")
        m, n, k = size
        a, b = self.operands(m, n, k)
        b *= k**-0.5
        bias = torch.randn({"n": (n,), "1": (1,), "mn": (m, n)}[shape], device="cuda")
        functions = {None: lambda x: x, "relu": torch.relu, "silu": torch.nn.functional.silu}
        functions |= {"gelu": torch.nn.functional.gelu}
        functions |= {"gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh")}
        exact = functions[activation](_exact(a, b, ROW) + bias.double())
        assert _error(self.run(ROW, a, b, bias, activation=activation), exact) < 6e-3

    @pytest.mark.parametrize("size", [(16, 4096, 4096), (520, 528, 512)])
    def test_an_infinite_bias_is_activated_as_torch_does(self, size: tuple[int, int, int]) -> None:
        torch = pytest.importorskip("torch")
        a, b = self.operands(*size)
        bias = torch.zeros(size[1], device="cuda")
        bias[3], bias[5], bias[7] = -torch.inf, torch.inf, torch.nan
        for activation in ("relu", "gelu", "gelu_tanh", "silu"):
            out = self.run(ROW, a, b, bias, activation=activation)
            assert (out[:, 3] == 0).all() or activation != "relu"
            assert (out[:, 5] == torch.inf).all()
            assert out[:, 7].isnan().all()  # a maximum in hardware would return the other number
            assert out[:, [i for i in range(size[1]) if i not in (3, 5, 7)]].isfinite().all()

    @pytest.mark.parametrize("recipe", [ROW, None])
    def test_expanded_operands(self, recipe: str | None) -> None:
        a, b = self.operands(48, 33, 64)
        a = a[:1].expand(48, 64)
        assert _error(self.run(recipe, a, b), _exact(a, b, recipe)) < 6e-3

    @pytest.mark.parametrize("batch", [((3,), (3,)), ((2, 1), (3,)), ((3,), ()), ((), (2,))])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR, None])
    def test_batches(self, recipe: str | None, batch: Any) -> None:
        a, b = self.operands(70, 131, 200, batch=batch)
        assert _error(self.run(recipe, a, b), _exact(a, b, recipe)) < 6e-3

    @pytest.mark.parametrize("size", [(33, 129, 70), (300, 1041, 1024), (17, 4095, 4096), (513, 515, 517)])
    @pytest.mark.parametrize("out", ["bfloat16", "float32"])
    def test_sixteen_bit_products_lose_nothing(self, size: tuple[int, int, int], out: str) -> None:
        torch = pytest.importorskip("torch")
        a, b = self.operands(*size)
        exact = _exact(a, b, None)
        own = torch.matmul(a, b)
        limit = 1.25 * _error(own, exact) if out == "bfloat16" else 1e-5
        assert _error(self.run(None, a, b, out_dtype=out), exact) <= limit

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, "e4m3:64x64"])
    @pytest.mark.parametrize("size", [(130, 272, 640), (17, 15, 33)])
    def test_what_is_quantized_already(self, recipe: str, size: tuple[int, int, int]) -> None:
        a, b = self.operands(*size)
        pair = RecipePair.parse(recipe)
        left, right = dispatch.quantize(a, pair.a, axis=-1), dispatch.quantize(b, pair.b, axis=-2)
        assert _error(self.run(recipe, left, right), _exact(left, right, recipe)) < 6e-3
        assert _error(self.run(recipe, a, right), _exact(a, right, recipe)) < 6e-3

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    def test_prepared_operands(self, recipe: str) -> None:
        a, b = self.operands(300, 272, 640)
        asked = problem(recipe, 300, 272, 640, b=Operand("bfloat16", prepared=True))
        right = BACKEND.prepare(b, RecipePair.parse(recipe).b, axis=-2)
        out = BACKEND.plan(asked)(a, right)
        assert _error(out, _exact(a, b, recipe)) < 6e-3

    def test_nan_and_inf_stay_where_they_belong(self) -> None:
        a, b = self.operands(300, 272, 640)
        a[3, 5], a[7, 9] = float("nan"), float("inf")
        out = self.run(ROW, a, b)
        assert out[3].isnan().all()
        assert not out[7].isfinite().any()
        rest = [row for row in range(300) if row not in (3, 7)]
        assert out[rest].isfinite().all()

    @pytest.mark.parametrize("size", [(16, 1024, 8192), (512, 512, 512), (2048, 1024, 1024)])
    def test_a_captured_graph_is_replayed_on_new_values(self, size: tuple[int, int, int]) -> None:
        torch = pytest.importorskip("torch")
        a, b = self.operands(*size)
        plan = BACKEND.plan(problem(ROW, *size))
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            plan(a, b)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan(a, b)
        for _ in range(3):
            a.copy_(torch.randn_like(a))
            graph.replay()
            assert torch.equal(out, plan(a, b))

    def test_streams_do_not_share_counters(self) -> None:
        torch = pytest.importorskip("torch")
        size = (16, 1024, 8192)
        pairs = [self.operands(*size) for _ in range(4)]
        plan = BACKEND.plan(problem(ROW, *size))
        wanted = [plan(a, b) for a, b in pairs]
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in pairs]
        for _ in range(20):
            found = []
            for stream, (a, b) in zip(streams, pairs, strict=True):
                with torch.cuda.stream(stream):
                    found.append(plan(a, b))
            torch.cuda.synchronize()
            assert all(torch.equal(x, y) for x, y in zip(found, wanted, strict=True))

    def test_threads_on_one_stream_do_not_share_counters(self) -> None:
        """A split product's programs count those of their own launch alone, whoever launches beside it."""
        import threading

        torch = pytest.importorskip("torch")
        size = (16, 1024, 8192)
        plan = BACKEND.plan(problem(ROW, *size))
        pairs = [self.operands(*size) for _ in range(4)]
        wanted = [plan(a, b) for a, b in pairs]
        found: list[Any] = [[] for _ in pairs]
        ready = threading.Barrier(len(pairs))

        def work(index: int) -> None:
            ready.wait()
            for _ in range(200):
                found[index].append(plan(*pairs[index]))

        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(pairs))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        torch.cuda.synchronize()
        assert [len(outs) for outs in found] == [200] * len(pairs)
        assert all(torch.equal(out, exact) for outs, exact in zip(found, wanted, strict=True) for out in outs)

    def test_a_profiler_s_hook_sees_every_launch(self) -> None:
        triton = pytest.importorskip("triton")
        a, b = self.operands(520, 528, 512)
        plan = BACKEND.plan(problem(ROW, 520, 528, 512))
        wanted, seen = plan(a, b), []
        hook = triton.knobs.runtime.launch_enter_hook
        hook.add(seen.append)
        try:
            found = plan(a, b)
        finally:
            hook.remove(seen.append)
        assert found.equal(wanted)
        assert any("gemm" in launch.get()["name"] for launch in seen)

    def test_another_gpu_than_the_current_one(self) -> None:
        torch = pytest.importorskip("torch")
        if torch.cuda.device_count() < 2:
            pytest.skip("needs two GPUs")
        a, b = (x.to("cuda:1") for x in self.operands(300, 272, 640))
        out = BACKEND.plan(problem(ROW, 300, 272, 640, device="cuda:1"))(a, b)
        assert str(out.device) == "cuda:1"
        assert _error(out, _exact(a, b, ROW)) < 6e-3
