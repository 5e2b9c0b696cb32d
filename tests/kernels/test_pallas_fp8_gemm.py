"""The Pallas kernels: interpreted on a CPU, lowered for CUDA without a GPU, on a Hopper GPU compared with float64."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("absl", reason="Pallas Mosaic GPU needs absl-py, which JAX does not install")
if jax.__version_info__ < (0, 10, 2):
    pytest.skip(f"JAX {jax.__version__} is older than 0.10.2, the first that was tried", allow_module_level=True)
pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this JAX has no Mosaic GPU", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
from dispatch.kernels import pallas_blackwell_gemm as blackwell  # noqa: E402
from dispatch.kernels import pallas_fp8_gemm as hopper  # noqa: E402
from dispatch.kernels import pallas_triton_gemm as portable  # noqa: E402
from dispatch.kernels.pallas_common import columns  # noqa: E402

HERE = Path(__file__).parent


def _load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


cases = _load("_pallas_cases")
Case, E4M3, E5M2, BF16, F16, F32 = cases.Case, cases.E4M3, cases.E5M2, cases.BF16, cases.F16, cases.F32
NEW = cases.MIXES
new = pytest.mark.skipif(
    not NEW, reason=f"the interpreter of JAX {jax.__version__} has no clusters, tensor memory, races"
)
mixed = pytest.mark.skipif(not NEW, reason=f"JAX {jax.__version__} takes FP8 operands of one dtype only")

COOPERATIVE = hopper.Config()
CLUSTER_M, CLUSTER_N = hopper.Config(cluster="m"), hopper.Config(cluster="n", minor="n")
PINGPONG = hopper.Config(128, 128, stages=6, pingpong=True)
PROMOTED = hopper.Config(128, 128, stages=6)
BLOCKS = hopper.Config(128, 128, stages=5)
FLAT = hopper.Config(64, 64, 256, stages=6, consumers=1)
FAST = {
    "cooperative": COOPERATIVE,
    "above": CLUSTER_M,
    "beside": CLUSTER_N,
    "pingpong": PINGPONG,
    "pingpong above": replace(PINGPONG, cluster="m"),
    "alone": FLAT,
}

SMALL, ONE = cases.SMALL, cases.ONE


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest) -> dict[str, list[str]]:
    """What is wrong with each case that is asked for, from one process that interprets them all."""
    mine = [item for item in request.session.items if item.path == request.path]
    asked = {item.callspec.params["name"] for item in mine if "found" in getattr(item, "fixturenames", ())}
    names = [name for name in (*cases.INTERPRETED, *cases.MORE, *cases.NEWER, *cases.RACES) if name in asked]
    names = names if NEW else [name for name in names if name not in (*cases.NEWER, *cases.RACES)]
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PJRT_NPROC": "16"}
    command = [sys.executable, str(HERE / "_pallas_cases.py"), *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert run.returncode == 0, run.stderr[-4000:]
    result: dict[str, list[str]] = json.loads(run.stdout[run.stdout.rindex("{") :])
    return result


@pytest.mark.interpreted
@pytest.mark.parametrize("name", cases.INTERPRETED)
def test_interpreted_products_match_float64(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


@pytest.mark.interpreted
@pytest.mark.slow
@pytest.mark.parametrize("name", cases.MORE)
def test_more_interpreted_products_match_float64(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


@pytest.mark.interpreted
@new
@pytest.mark.parametrize("name", [*cases.NEWER, *cases.RACES])
def test_interpreted_products_match_float64_without_races(name: str, found: dict[str, list[str]]) -> None:
    assert found[name] == []


PORTABLE = {
    "row scales": Case(portable.Config(64, 64, group=2), 150, 130, 300, bias=BF16, activation="gelu", programs=None),
    "block scales": Case(portable.Config(64, 64), 150, 130, 300, scales="block", out=F32, programs=None),
    "mixed": Case(portable.Config(64, 64), 70, 130, 300, dtypes=(E5M2, E4M3), scales="tensor", programs=None),
    "bfloat16": Case(
        portable.Config(32, 32, 64), 33, 20, 77, dtypes=(BF16, BF16), scales="none", activation="silu", programs=None
    ),
    "one by one": Case(portable.Config(16, 16, 16), 1, 1, 1, out=F32, activation="relu", programs=None),
}


@pytest.mark.interpreted
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_products_match_float64(name: str) -> None:
    with jax.default_device(jax.devices("cpu")[0]):
        assert cases.complaints(portable.gemm, PORTABLE[name], interpret=True) == []


def test_portable_gelu_keeps_the_tail() -> None:
    import numpy as np

    x = np.linspace(-6, 6, 2001)
    found = np.asarray(portable._gelu(jnp.asarray(x, jnp.float32)), np.float64)
    assert np.abs(found - cases.ACTIVATIONS["gelu"](x)).max() < 1e-6


BIG = Case(COOPERATIVE, 8192, 28_672, 8192, programs=132)
DECODED = replace(BIG, config=FLAT, m=16)
HOPPER = {
    **{name: replace(BIG, config=config) for name, config in FAST.items()},
    "tensor scales": replace(BIG, scales="tensor", activation="gelu_tanh"),
    "float32": replace(BIG, out=F32, bias=F32, activation="gelu"),
    "bfloat16": replace(
        BIG, config=replace(COOPERATIVE, block_k=64), dtypes=(BF16, BF16), scales="none", activation="silu"
    ),
    "bfloat16 across": replace(
        BIG, config=replace(COOPERATIVE, block_k=64, cluster="m"), dtypes=(BF16, BF16), scales="none", across=True
    ),
    "bfloat16 across, odd": replace(
        BIG, config=replace(FLAT, block_k=64), m=70, n=1041, k=333, dtypes=(BF16, BF16), scales="none", across=True
    ),
    "float16": replace(BIG, config=replace(PINGPONG, block_k=64), dtypes=(F16, F16), scales="none", out=F16),
    "promoted": replace(BIG, config=PROMOTED, promoted=True, bias=BF16, activation="relu"),
    "block scales": replace(BIG, config=BLOCKS, scales="block"),
    "odd": replace(BIG, m=129, n=1040, k=1040, bias=BF16),
    "one row": replace(BIG, m=1, n=7, k=48),
    "odd block scales": replace(BIG, config=replace(BLOCKS, cluster="n"), m=129, n=1040, k=1040, scales="block"),
}


@pytest.mark.parametrize("name", HOPPER)
def test_lowers_for_hopper_without_a_gpu(name: str) -> None:
    assert "mosaic_gpu" in cases.lowered(hopper.gemm, HOPPER[name])


@mixed
def test_lowers_mixed_dtypes_for_hopper() -> None:
    assert "mosaic_gpu" in cases.lowered(hopper.gemm, replace(BIG, dtypes=(E5M2, E4M3)))


TCGEN05 = {
    "alone": Case(blackwell.Config(), 8192, 28_672, 8192, programs=148),
    "pair": Case(blackwell.Config(128, stages=6, collective=True), 8192, 8192, 8192, bias=BF16, activation="gelu"),
    "bfloat16": Case(blackwell.Config(block_k=64), 4096, 4096, 4096, dtypes=(BF16, BF16), scales="none"),
    "odd": Case(blackwell.Config(128, stages=6), 129, 1040, 1040, scales="tensor", out=F32, activation="silu"),
}


@pytest.mark.parametrize("name", TCGEN05)
def test_lowers_for_blackwell_without_a_gpu(name: str) -> None:
    assert "mosaic_gpu" in cases.lowered(blackwell.gemm, TCGEN05[name])


@pytest.fixture
def described_gpu() -> Iterator[None]:
    """What lowering by Triton asks of the GPU, where there is none (JAX before 0.11 does not ask)."""
    context: Any = nullcontext()
    if NEW and jax.default_backend() != "gpu":
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with context:
        yield


@pytest.mark.usefixtures("described_gpu")
@pytest.mark.parametrize("name", PORTABLE)
def test_lowers_by_triton_without_a_gpu(name: str) -> None:
    case = replace(PORTABLE[name], config=portable.Config(block_k=64 if name == "bfloat16" else 128), m=1040, k=1040)
    assert "triton" in cases.lowered(portable.gemm, case)


@pytest.mark.usefixtures("described_gpu")
@pytest.mark.parametrize("kernel", ["hopper", "blackwell", "portable"])
def test_is_traced_with_64_bits_enabled(kernel: str) -> None:
    case = replace(BIG, config=portable.Config(), programs=None)
    gemm = portable.gemm
    if kernel != "portable":
        case = HOPPER["pingpong"] if kernel == "hopper" else TCGEN05["alone"]
        gemm = hopper.gemm if kernel == "hopper" else blackwell.gemm
    with jax.enable_x64(True):
        assert cases.lowered(gemm, replace(case, bias="float64"))


@pytest.mark.parametrize(("m", "n"), [(0, 8), (8, 0)])
def test_empty_products_are_empty(m: int, n: int) -> None:
    a, b = jnp.zeros((m, 16)).astype(E4M3), jnp.zeros((n, 16)).astype(E4M3)
    for module, config in ((hopper, SMALL), (blackwell, blackwell.Config()), (portable, portable.Config())):
        out = module.gemm(a, b, config=config, out_dtype=F32)
        assert (out.shape, out.dtype) == ((m, n), F32)


def test_without_k_only_the_epilogue_is_left() -> None:
    bias = jnp.arange(8, dtype=jnp.float32)
    a, b = jnp.zeros((3, 0)).astype(E4M3), jnp.zeros((8, 0)).astype(E4M3)
    out = portable.gemm(a, b, bias=bias, config=portable.Config(16, 16, 16), out_dtype=F32, interpret=True)
    assert (out == bias).all()


@pytest.mark.parametrize(("out", "least"), [(BF16, 128), (F16, 128), (F32, 64)])
def test_results_are_never_one_tile_of_what_is_stored(out: str, least: int) -> None:
    # Mosaic drops such a dimension and its index: stores beyond it went into it, found on a GPU with n = 7.
    assert [columns(n, out) for n in (1, 64, 65, 128, 1000)] == [least, least, 128, 128, 1024]


WRONG_CONFIGS = {
    "block_m": hopper.Config(block_m=96),
    "block_n": hopper.Config(block_n=96),
    "block_k": hopper.Config(block_k=64),
    "shared memory": hopper.Config(stages=5),
    "pingpong": hopper.Config(128, 128, stages=5, pingpong=True),
    "rings": hopper.Config(delay=4),
    "cluster": hopper.Config(cluster="k"),
}


@pytest.mark.parametrize("word", WRONG_CONFIGS)
def test_refuses_a_config_that_cannot_run_and_says_why(word: str) -> None:
    a = jnp.zeros((8, 128)).astype(E4M3)
    with pytest.raises(ValueError, match=word):
        hopper.gemm(a, a, config=WRONG_CONFIGS[word])


def test_refuses_what_is_no_product() -> None:
    a, b, ones = jnp.zeros((8, 128)).astype(E4M3), jnp.zeros((16, 128)).astype(E4M3), jnp.ones
    with pytest.raises(ValueError, match="K-major"):
        hopper.gemm(a, b.T, config=COOPERATIVE)
    with pytest.raises(ValueError, match="cannot multiply float32"):
        hopper.gemm(a.astype(F32), b.astype(F32), config=COOPERATIVE)
    with pytest.raises(ValueError, match="cannot multiply float8_e4m3fn"):
        hopper.gemm(a, b.T, config=COOPERATIVE, across=True)
    with pytest.raises(ValueError, match="come together"):
        hopper.gemm(a, b, ones(8), config=COOPERATIVE)
    with pytest.raises(ValueError, match="are needed"):
        hopper.gemm(a, b, ones(7), ones(16), config=COOPERATIVE)
    with pytest.raises(ValueError, match="bias"):
        hopper.gemm(a, b, bias=ones(8), config=COOPERATIVE)
    with pytest.raises(ValueError, match="does not divide"):
        hopper.gemm(a, b, ones((8, 1)), ones((1, 1)), config=COOPERATIVE, blocks=True)
    with pytest.raises(ValueError, match="none of relu"):
        hopper.gemm(a, b, config=COOPERATIVE, activation="tanh")


@pytest.fixture(scope="module")
def hopper_gpu() -> None:
    """Skip what needs a Hopper GPU in JAX."""
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    capability = jax.devices()[0].compute_capability
    if capability != "9.0":
        pytest.skip(f"wgmma is for compute capability 9.0, not {capability}")


MEASURED = replace(BIG, programs=None)
SIZES = [(1, 7, 16), (7, 1, 48), (127, 129, 1040), (129, 127, 4112), (1040, 1040, 1040), (1040, 7, 4112), (1, 1040, 48)]
FORMS = {
    "e4m3": replace(MEASURED),
    "e5m2 by e4m3": replace(MEASURED, dtypes=(E5M2, E4M3), bias=BF16, activation="gelu"),
    "e4m3 by e5m2": replace(MEASURED, dtypes=(E4M3, E5M2), scales="tensor", out=F32, activation="silu"),
    "e5m2": replace(MEASURED, dtypes=(E5M2, E5M2), scales="none", out=F16, activation="relu"),
    "bfloat16": replace(MEASURED, dtypes=(BF16, BF16), scales="none", bias=F32, activation="gelu_tanh"),
}


PAIRS = [(form, config) for form in FORMS for config in FAST if form == "e4m3" or config in ("cooperative", "pingpong")]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("form", "config"), PAIRS)
def test_products_match_float64(form: str, config: str, size: tuple[int, int, int]) -> None:
    if "by" in form and not NEW:
        pytest.skip(f"JAX {jax.__version__} takes FP8 operands of one dtype only")
    chosen = FAST[config]
    if form == "bfloat16":
        chosen = replace(chosen, block_k=chosen.block_k // 2)
    m, n, k = size
    assert cases.complaints(hopper.gemm, replace(FORMS[form], config=chosen, m=m, n=n, k=k), runs=2) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("config", [BLOCKS, replace(BLOCKS, cluster="m"), replace(PINGPONG, block_m=64), ONE])
@pytest.mark.parametrize("scales", ["row", "block"])
def test_promoted_products_match_float64(scales: str, config: Any, size: tuple[int, int, int]) -> None:
    m, n, k = size
    case = replace(MEASURED, config=config, m=m, n=n, k=k, scales=scales, promoted=True, bias=BF16)
    assert cases.complaints(hopper.gemm, case, runs=2) == []


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper_gpu")
@pytest.mark.parametrize("config", FAST)
def test_many_tiles_stay_right(config: str) -> None:
    # The pipeline goes on across hundreds of tiles: JAX's own was wrong only here.
    case = replace(MEASURED, config=FAST[config], m=4096 + 8, n=8192 - 64, k=2048)
    assert cases.complaints(hopper.gemm, case, runs=3) == []


@pytest.mark.gpu
@pytest.mark.parametrize("name", PORTABLE)
def test_portable_products_match_float64_on_a_gpu(name: str) -> None:
    if jax.default_backend() != "gpu":
        pytest.skip("JAX has no GPU here")
    case = replace(PORTABLE[name], config=portable.Config(64, 64, 128), m=129, n=1040, k=1040)
    assert cases.complaints(portable.gemm, case, runs=2) == []
