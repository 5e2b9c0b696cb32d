"""The Pallas quantizers: the bits of `dispatch.quantize`, interpreted on a CPU and on a GPU; lowered without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dispatch

jax = pytest.importorskip("jax", reason="JAX is not installed")
pytest.importorskip("absl", reason="Pallas Mosaic GPU needs absl-py, which JAX does not install")
if jax.__version_info__ < (0, 10, 2):
    pytest.skip(f"JAX {jax.__version__} is older than 0.10.2, the first that was tried", allow_module_level=True)
pytest.importorskip("jax.experimental.pallas.mosaic_gpu", reason="this JAX has no Mosaic GPU", exc_type=ImportError)

import jax.numpy as jnp  # noqa: E402
from dispatch.kernels import pallas_quantize as kernels  # noqa: E402

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}
SPECIAL = (np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-39, -3e-39, 6e-8, 65504.0)


def values(rows: int, k: int, dtype: str) -> Any:
    """Return values of many magnitudes, with special ones among them, and rows of each of those alone."""
    random = np.random.default_rng(rows * 1009 + k)
    x = random.normal(size=(rows, k)) * np.exp2(random.integers(-9, 10, (rows, 1)) + random.normal(size=(rows, k)))
    if dtype != "float16":
        x *= np.exp2(random.integers(-100, 100, (rows, 1)).astype(float))
    if x.size > 100:
        x.reshape(-1)[5 : 5 + 3 * len(SPECIAL) : 3] = SPECIAL
    for row, special in enumerate(SPECIAL[: rows // 4]):
        x[4 * row + 2] = special
    with np.errstate(all="ignore"):
        return x.astype(DTYPES[dtype])


def complaints(
    shape: tuple[int, int],
    recipe: str,
    dtype: str,
    transposed: bool,
    multiple: tuple[int, int] = (1, 1),
    interpret: bool = False,
) -> list[str]:
    """Return what is wrong with values and scales beside the reference's, nothing if they are the same bits."""
    (rows, k), (form, granularity) = shape, recipe.split(":")
    x = values(rows, k, dtype)
    want = dispatch.quantize(x, recipe)
    given = jnp.asarray(np.ascontiguousarray(x.T) if transposed else x)
    made = kernels.quantize(
        given, FORMATS[form], granularity, transposed=transposed, multiple=multiple, interpret=interpret
    )
    data, scale = (np.asarray(part) for part in made)
    wrong = []
    padded = tuple(-(-size // step) * step for size, step in zip(shape, multiple, strict=True))
    if data.shape != padded or str(data.dtype) != FORMATS[form]:
        return [f"{data.dtype} of {data.shape}, not of {padded}"]
    bits = data.view(np.uint8)
    if bits[rows:].any() or bits[:, k:].any():
        wrong.append("padding is not zero")
    if differ := int((bits[:rows, :k] != want.data.view(np.uint8)).sum()):
        wrong.append(f"{differ} of {rows * k} values differ")
    scale = scale.reshape(-1, 1) if scale.ndim == 1 else scale
    if not np.array_equal(scale[: want.scale.shape[0], : want.scale.shape[1]], want.scale):
        wrong.append("scales differ")
    return wrong


SMALL = [(1, 1), (7, 33), (130, 300), (65, 2052)]


@pytest.mark.interpreted
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("granularity", kernels.GRANULARITIES)
@pytest.mark.parametrize("shape", SMALL)
def test_interpreted_bits_are_the_references(shape: tuple[int, int], granularity: str, transposed: bool) -> None:
    form = "e4m3" if shape[0] % 2 else "e5m2"
    dtype = ("bfloat16", "float32", "float16")[shape[1] % 3]
    assert complaints(shape, f"{form}:{granularity}", dtype, transposed, (8, 128), True) == []


@pytest.mark.interpreted
def test_rows_too_long_for_registers_are_read_twice() -> None:
    assert complaints((2, kernels.WHOLE_ROW + 200), "e4m3:row", "bfloat16", False, (1, 16), True) == []


LARGE = [(1, 1), (7, 33), (129, 1040), (1040, 129), (257, 4112), (64, 8192), (3, 40_000), (2048, 512)]


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("granularity", kernels.GRANULARITIES)
@pytest.mark.parametrize("shape", LARGE)
def test_bits_are_the_references(shape: tuple[int, int], granularity: str, transposed: bool) -> None:
    assert jax.default_backend() == "gpu", "run gpu tests on a machine with a GPU"
    number = LARGE.index(shape) + transposed
    form, dtype = ("e4m3", "e5m2")[number % 2], ("bfloat16", "float32", "float16")[number % 3]
    assert complaints(shape, f"{form}:{granularity}", dtype, transposed, (64, 128)) == []
    assert complaints(shape, f"e4m3:{granularity}", "bfloat16", transposed) == []


@pytest.fixture
def described_gpu() -> Iterator[None]:
    """What lowering by Triton asks of the GPU, where there is none (JAX before 0.11 does not ask)."""
    context: Any = nullcontext()
    if jax.__version_info__ >= (0, 11) and jax.default_backend() != "gpu":
        device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="cuda")
        context = jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))
    with context:
        yield


@pytest.mark.usefixtures("described_gpu")
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("granularity", kernels.GRANULARITIES)
@pytest.mark.parametrize("shape", [(8192, 8192), (129, 1041), (64, 40_000)])
def test_lowers_without_a_gpu(shape: tuple[int, int], granularity: str, transposed: bool) -> None:
    source = jax.ShapeDtypeStruct(shape[::-1] if transposed else shape, jnp.bfloat16)
    for dtype in kernels.FORMATS:
        traced = jax.jit(
            lambda x, dtype=dtype: kernels.quantize(x, dtype, granularity, transposed=transposed, multiple=(64, 128))
        ).trace(source)
        assert "triton" in traced.lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize(
    ("x", "dtype", "granularity", "said"),
    [
        (jnp.zeros((4, 4), jnp.int8), "float8_e4m3fn", "row", "cannot quantize int8"),
        (jnp.zeros((4,)), "float8_e4m3fn", "row", "a matrix of bfloat16"),
        (jnp.zeros((0, 4)), "float8_e4m3fn", "row", "of shape \\(0, 4\\)"),
        (jnp.zeros((4, 4)), "float8_e4m3fnuz", "row", "to float8_e4m3fnuz"),
        (jnp.zeros((4, 4)), "float8_e4m3fn", "64x64", "by '64x64'"),
    ],
)
def test_refuses_what_it_cannot_quantize_and_says_why(x: Any, dtype: str, granularity: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        kernels.quantize(x, dtype, granularity)
