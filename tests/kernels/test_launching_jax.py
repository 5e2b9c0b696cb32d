"""Launches of Triton and Gluon kernels from JAX: what the custom call is told, and that its PTX assembles."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

jax = pytest.importorskip("jax")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.triton

import triton.language as tl  # noqa: E402
from dispatch.kernels import gluon_gemm, launching_jax, triton_decode, triton_gemm  # noqa: E402
from dispatch.kernels import triton_quantize as by_row  # noqa: E402
from dispatch.kernels.launching import Array  # noqa: E402

if not triton.__version__.startswith("3.6."):
    pytest.skip("launches from JAX are made with Triton 3.6", allow_module_level=True)

M, N, K = 256, 384, 512
A, B, OUT, SCALE_A, SCALE_B, PARTIALS, COUNTERS = range(7)
PTX = """.visible .entry go(
\t.param .u64 go_0,
\t.param .u32 go_1,
\t.param .u64 go_2
)
{ ld.param.u32 %r1, [go_1]; }"""


class CustomCalls:
    """As much of JAX's CUDA plugin as `bind` asks for: it keeps what it is given."""

    def __init__(self) -> None:
        self.kernel: Any = None
        self.parameters: list[Any] = []
        self.grid: tuple[int, ...] = ()

    def create_array_parameter(self, zeroed: int, alignment: int) -> Any:
        return "array", zeroed, alignment

    def create_scalar_parameter(self, value: Any, kind: str) -> Any:
        return "scalar", value, kind

    def create_tma_descriptor_parameter(self, **facts: Any) -> Any:
        return "descriptor", facts

    def TritonKernel(self, *facts: Any) -> Any:
        self.kernel = facts
        return self

    def TritonKernelCall(self, kernel: Any, *facts: Any) -> Any:
        *self.grid, self.parameters = facts
        return self

    def to_proto(self, name: str, metadata: bytes) -> bytes:
        return name.encode() + metadata


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> CustomCalls:
    made = CustomCalls()
    monkeypatch.setattr(launching_jax, "gpu_triton", made)
    return made


def operands(out: Any = tl.bfloat16, n: int = N) -> tuple[Any, ...]:
    return (
        Array(A, tl.float8e4nv, (M, K)),
        Array(B, tl.float8e4nv, (n, K)),
        Array(OUT, out, (M, n)),
        Array(SCALE_A, tl.float32, (M,)),
        Array(SCALE_B, tl.float32, (n,)),
    )


def hopper(n: int = N) -> Any:
    config = gluon_gemm.Config(128, 128, 128, 4, 2, True, 2, 8)
    return gluon_gemm.gemm_launch(*operands(n=n), config=config, programs=132)


def plain() -> Any:
    tile = {"block_m": 128, "block_n": 128, "block_k": 128, "group": 8, "stages": 3, "warps": 8}
    return triton_gemm.gemm_launch(*operands(), **tile, programs=132)


def decode() -> Any:
    space = Array(PARTIALS, tl.float32, (1 << 16,)), Array(COUNTERS, tl.int32, (96,))
    tile = {"block_m": 16, "block_n": 64, "block_k": 256, "splits": 2, "stages": 3, "warps": 4}
    return triton_decode.decode_launch(*operands(), None, space, **tile)


def quantize() -> Any:
    launch = by_row.rows_launch((M, K), K, (M, K))
    pointers = Array(0, tl.bfloat16, (M, K)), Array(1, tl.float8e4nv, (M, K)), Array(2, tl.float32, (M,))
    return launch.kernel, launch.grid, [*pointers, None, None, *launch.sizes], launch.options


LAUNCHES = {
    "Gluon": (hopper, {OUT}),
    "Gluon, written by pointers": (lambda: hopper(389), {OUT}),
    "Triton": (plain, {OUT}),
    "decode": (decode, {OUT, PARTIALS, COUNTERS}),
    "quantize": (quantize, {1, 2}),
}


def bound(name: str, **more: Any) -> launching_jax.Bound:
    launch, results = LAUNCHES[name]
    return launching_jax.bind(*launch(), capability=90, results=results, **more)


@pytest.mark.parametrize("name", LAUNCHES)
def test_buffers_are_handed_over_in_the_order_of_parameters_results_last(name: str, calls: CustomCalls) -> None:
    made = bound(name)
    results = LAUNCHES[name][1]
    buffers = [kind for kind, *_ in calls.parameters if kind != "scalar"]
    assert len(buffers) == len(made.operands) + len(made.results)
    assert set(made.results) == results
    assert len(made.results) == len(results), "each result is one buffer"
    assert not results & set(made.operands)
    last = calls.parameters[-len(made.results) :]
    assert all(kind != "scalar" for kind, *_ in last)


@pytest.mark.parametrize("name", LAUNCHES)
def test_the_ptx_takes_what_is_passed_and_assembles(name: str, calls: CustomCalls, tmp_path: Path) -> None:
    bound(name)
    _, warps, ctas, shared, ptx, _, capability = calls.kernel
    assert (ctas, capability) == (1, 90)
    assert warps % 4 == 0
    assert shared > 0
    listed = launching_jax._ENTRY.search(ptx)
    assert listed is not None
    assert listed[2].count(".param") == len(calls.parameters) + 2  # Triton's two workspaces, which the call leaves null
    kinds = [".b8" if kind == "descriptor" else "" for kind, *_ in calls.parameters]
    for line, kind in zip(listed[2].split(",\n"), kinds, strict=False):
        assert (".b8" in line) == (kind == ".b8"), line
    source, target = tmp_path / "kernel.ptx", tmp_path / "kernel.cubin"
    source.write_text(ptx)
    ptxas = triton.knobs.nvidia.ptxas.path
    done = subprocess.run([ptxas, "-arch=sm_90a", source, "-o", target], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_result_with_a_descriptor_has_a_null_pointer_beside_it(calls: CustomCalls) -> None:
    made = bound("Gluon")
    assert made.results == (OUT,)
    assert calls.parameters[-1][0] == "descriptor"
    assert ("scalar", 0, "u64") in calls.parameters
    made = bound("Gluon, written by pointers")
    assert made.results == (OUT,)
    assert calls.parameters[-1] == ("array", 0, 16)
    assert ("scalar", 0, "u64") not in calls.parameters


def test_descriptors_carry_extents_strides_and_the_box(calls: CustomCalls) -> None:
    bound("Gluon")
    facts = [parameter[1] for parameter in calls.parameters if parameter[0] == "descriptor"]
    assert [(x["shape"], x["strides"], x["block_shape"]) for x in facts] == [
        ([M, K], [K, 1], [128, 128]),
        ([N, K], [K, 1], [128, 128]),
        ([M, N], [N, 1], [128, 64]),
    ]
    assert [x["elem_type"] for x in facts] == [0, 0, 9]  # CU_TENSOR_MAP_DATA_TYPE_UINT8 and BFLOAT16
    assert {x["oob_fill"] for x in facts} == {0}


def test_counters_are_zeroed_before_each_launch(calls: CustomCalls) -> None:
    made = bound("decode", zeroed={COUNTERS: 384})
    arrays = [parameter for parameter in calls.parameters if parameter[0] != "scalar"]
    zeroed = dict(zip((*made.operands, *made.results), arrays, strict=True))
    assert zeroed[COUNTERS] == ("array", 384, 16)
    assert zeroed[PARTIALS] == ("array", 0, 16)


def test_a_kernel_is_compiled_once(calls: CustomCalls, monkeypatch: pytest.MonkeyPatch) -> None:
    bound("quantize")
    monkeypatch.setattr(launching_jax, "compile_source", lambda *_, **__: pytest.fail("compiled anew"))
    assert bound("quantize") == bound("quantize")


def test_what_triton_cannot_compile_raises_before_anything_is_traced(calls: CustomCalls) -> None:
    kernel, grid, arguments, options = quantize()
    with pytest.raises(Exception, match="quantize_row_tile"):
        launching_jax.bind(kernel, grid, arguments, {**options, "block_cols": 48}, capability=90, results={1, 2})


def test_parameters_change_places_and_the_rest_stays_last() -> None:
    made = launching_jax.reordered(PTX, [1, 0])
    assert made.splitlines()[1:4] == ["\t.param .u32 go_1,", "\t.param .u64 go_0,", "\t.param .u64 go_2"]
    assert made.splitlines()[4:] == PTX.splitlines()[4:]
    assert launching_jax.reordered(PTX, [0, 1, 2]) == PTX


@pytest.mark.parametrize(("ptx", "order"), [("// nothing", [0]), (PTX, [0, 1, 2, 3])])
def test_ptx_without_those_parameters_is_refused(ptx: str, order: list[int]) -> None:
    with pytest.raises(ValueError, match="PTX with"):
        launching_jax.reordered(ptx, order)


class TestAsAnOperation:
    made = launching_jax.Bound(b"x\x00y", (0, 3), (7,))

    def launch(self, x: Any, y: Any) -> Any:
        return self.made.run({0: x, 3: y}, {7: jax.ShapeDtypeStruct((4, 8), "bfloat16")})[0]

    def lowered(self, function: Any, *shapes: tuple[int, ...]) -> str:
        arrays = [jax.ShapeDtypeStruct(shape, "float32") for shape in shapes]
        return str(jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text())

    def test_is_one_custom_call(self) -> None:
        text = self.lowered(self.launch, (4, 2), (3,))
        assert text.count("@triton_kernel_call_ffi(") == 1
        assert "(tensor<4x2xf32>, tensor<3xf32>) -> tensor<4x8xbf16>" in text

    def test_vmap_makes_a_loop_of_it(self) -> None:
        text = self.lowered(jax.vmap(self.launch), (5, 4, 2), (5, 3))
        assert "stablehlo.while" in text
        assert "(tensor<4x2xf32>, tensor<3xf32>) -> tensor<4x8xbf16>" in text
        assert "tensor<5x4x8xbf16>" in text

    def test_has_no_derivative(self) -> None:
        with pytest.raises(ValueError, match="differentiated"):
            jax.jvp(
                self.launch, (jax.numpy.ones((4, 2)), jax.numpy.ones(3)), (jax.numpy.ones((4, 2)), jax.numpy.ones(3))
            )
