"""The reference quantizer against a naive one, across frameworks, and on the values that quantizers trip over."""

import itertools
import math
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch._recipe import GRANULARITIES, ScalingRecipe
from dispatch.frameworks import NAMES, framework, framework_of
from dispatch.quantization import quantize

jax = pytest.importorskip("jax", reason="compares all three frameworks")
torch = pytest.importorskip("torch", reason="compares all three frameworks")
jnp = jax.numpy

LIKE = {"numpy": np.zeros(1), "torch": torch.zeros(1), "jax": jnp.zeros(1)}
RECIPES = [ScalingRecipe(*parts) for parts in itertools.product(("e4m3", "e5m2"), GRANULARITIES, ("float32", "e8m0"))]
BLOCKWISE = ("e4m3:1x128", "e4m3:1x128:e8m0", "e5m2:1x128", "e5m2:1x128:e8m0")
E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def array_of(name, values):
    return framework(name).asarray(values, LIKE[name])


def host(array):
    return framework_of(array).to_numpy(array)


def bits(array):
    values = np.ascontiguousarray(host(array))
    return values.view(f"u{values.dtype.itemsize}")


def values_of(shape, seed, dtype="float32"):
    """Return values of many magnitudes: whole rows and single values down to subnormals, and exact zeros."""
    random = np.random.default_rng(seed)
    values = random.standard_normal(shape) * 10.0 ** random.integers(-4, 4, shape)
    if values.size:
        values *= 10.0 ** random.choice([0, 0, 3, -20, -36, -42], (*shape[:-1], 1))
        values[random.random(shape) < 0.05] = 0.0
        values[random.random(shape) < 0.05] *= 1e-30
    with np.errstate(over="ignore"):
        return values.astype(framework("numpy").dtype(dtype))


def naive(x, recipe, axis):
    """Return (codes, scales) of a quantizer written block by block, rounding by a table of all FP8 numbers."""
    x = x.astype(np.float64 if x.dtype == np.float64 else np.float32)
    swapped = axis == -2
    if swapped:
        x = x.swapaxes(-1, -2)
    shape = (1,) * (x.ndim == 1) + x.shape
    rows, cols = shape[-2:]
    count = math.prod(shape[:-2])
    flat = x.reshape(count, rows, cols)
    codes = np.zeros(flat.shape, np.uint8)
    if recipe.granularity == "tensor":
        scales = np.zeros((1, 1, 1), np.float32)
        boxes = {(0, 0, 0): np.s_[:, :, :]}
    else:
        height, width = (1, cols) if recipe.granularity == "row" else map(int, recipe.granularity.split("x"))
        across = 1 if recipe.granularity == "row" else len(range(0, cols, width))
        down = len(range(0, rows, height))
        scales = np.zeros((count, down, across), np.float32)
        boxes = {
            (e, i, j): np.s_[e, i * height : (i + 1) * height, j * width : (j + 1) * width]
            for e in range(count)
            for i in range(down)
            for j in range(across)
        }
    for where, box in boxes.items():
        scales[where] = naive_scale(flat[box], recipe)
        codes[box] = naive_codes(flat[box], scales[where], recipe)
    codes = codes.reshape(x.shape)
    if recipe.granularity == "tensor":
        return (codes.swapaxes(-1, -2) if swapped else codes), scales.reshape((1,) * x.ndim)
    scales = scales.reshape(*shape[:-2], *scales.shape[1:])
    if x.ndim == 1:
        scales = scales[0]
    return (codes.swapaxes(-1, -2), scales.swapaxes(-1, -2)) if swapped else (codes, scales)


def naive_scale(block, recipe):
    finite = np.abs(block[np.isfinite(block)]).astype(np.float64)
    ratio = (finite.max() if finite.size else 0.0) / {"e4m3": 448.0, "e5m2": 57344.0}[recipe.dtype]
    ratio = float(np.float32(min(max(ratio, 2.0**-126), float(np.finfo(np.float32).max))))
    if recipe.scale_dtype == "e8m0":
        return min(x for x in 2.0 ** np.arange(-126, 128) if x >= ratio) if ratio < 2.0**127 else 2.0**127
    return ratio


def naive_codes(block, scale, recipe):
    storage = {"e4m3": E4M3, "e5m2": E5M2}[recipe.dtype]
    table = np.arange(128, dtype=np.uint8).view(storage).astype(np.float64)
    table = table[np.isfinite(table)]
    quotient = np.abs(block / block.dtype.type(scale)).astype(np.float64)
    low = np.clip(np.searchsorted(table, quotient, side="right") - 1, 0, len(table) - 2)
    below, above = quotient - table[low], table[low + 1] - quotient
    code = low + ((above < below) | ((above == below) & (low % 2 == 1)))
    code = code | np.where(np.signbit(block), 0x80, 0)
    infinite = code if recipe.dtype == "e4m3" else np.where(block > 0, 0x7C, 0xFC)
    code = np.where(np.isinf(block), infinite if recipe.dtype == "e5m2" else 0x7F, code)
    return np.where(np.isnan(block), 0x7F, code).astype(np.uint8)


def assert_same(quantized, codes, scales):
    np.testing.assert_array_equal(bits(quantized.data), codes)
    np.testing.assert_array_equal(host(quantized.scale).astype(np.float32), scales)


sizes = st.sampled_from([0, 1, 2, 5, 31, 32, 33, 64, 65, 100, 128, 129, 192])
shapes = st.one_of(
    st.tuples(sizes), st.tuples(sizes, sizes), st.tuples(st.sampled_from([0, 1, 3]), st.sampled_from([0, 1, 33]), sizes)
)


@settings(deadline=None, max_examples=40)
@given(
    shape=shapes,
    recipe=st.sampled_from(RECIPES),
    axis=st.sampled_from([-1, -2]),
    seed=st.integers(0, 999),
    dtype=st.sampled_from(["float64", "float32", "float16", "bfloat16"]),
    specials=st.booleans(),
)
def test_every_framework_gives_the_bits_of_the_naive_quantizer(shape, recipe, axis, seed, dtype, specials):
    axis = -1 if len(shape) == 1 else axis
    x = values_of(shape, seed, dtype)
    if specials:
        where = np.random.default_rng(seed).random(shape)
        for value, threshold in ((np.nan, 0.03), (-np.inf, 0.02), (np.inf, 0.01)):
            x[where < threshold] = value
    codes, scales = naive(x, recipe, axis)
    with jax.enable_x64(dtype == "float64"):
        for name in NAMES:
            run = jax.jit(quantize, static_argnames=("recipe", "axis")) if name == "jax" else quantize
            quantized = run(array_of(name, x), recipe=recipe, axis=axis)
            assert (quantized.recipe, quantized.axis, quantized.dtype) == (recipe, axis, dtype)
            assert_same(quantized, codes, scales)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_jax_gives_the_same_bits_eagerly(recipe):
    x = values_of((33, 65), seed=0)
    x[0, 0], x[1, 1] = np.inf, np.nan
    for axis in (-1, -2):
        assert_same(quantize(jnp.asarray(x), recipe, axis=axis), *naive(x, recipe, axis))


@pytest.mark.parametrize("recipe", ["e4m3:tensor", "e5m2:tensor"])
@pytest.mark.parametrize("name", NAMES)
def test_rounds_every_tie_to_even_once(name, recipe):
    storage = ScalingRecipe.parse(recipe).storage_dtype
    info = ml_dtypes.finfo(storage)
    table = np.arange(128, dtype=np.uint8).view(framework("numpy").dtype(storage)).astype(np.float64)
    table = table[np.isfinite(table)]
    ties = (table[1:] + table[:-1]) / 2
    for dtype, step in (("float32", 2.0**-20), ("float64", 2.0**-50)):
        x = np.concatenate([ties, ties * (1 - step), ties * (1 + step), [float(info.max)]])
        x = np.concatenate([x, -x]).astype(dtype)
        codes, scales = naive(x, ScalingRecipe.parse(recipe), -1)
        with jax.enable_x64(dtype == "float64"):
            quantized = quantize(array_of(name, x), recipe)
            assert host(quantized.scale) == 1
            assert_same(quantized, codes, scales)


@pytest.mark.parametrize("k", [192, 64, 100, 1, 129])
@pytest.mark.parametrize("name", NAMES)
def test_takes_k_that_no_block_divides(name, k):
    x = np.random.default_rng(0).standard_normal((5, k)).astype(np.float32)
    quantized = quantize(array_of(name, x), "e4m3:1x128")
    assert quantized.shape == (5, k)
    assert tuple(quantized.scale.shape) == (5, -(-k // 128))
    decoded = host(quantized.dequantize())
    assert decoded.shape == x.shape
    assert np.linalg.norm(decoded - x) < 0.05 * np.linalg.norm(x)


@pytest.mark.parametrize("recipe", BLOCKWISE)
@pytest.mark.parametrize("tiny", [1e-30, 2e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("name", NAMES)
def test_stays_finite_on_tiny_blocks(name, tiny, recipe):
    x = np.full((4, 128), tiny, np.float32)
    x[0] = 1
    quantized = quantize(array_of(name, x), recipe)
    data, scale = host(quantized.data).astype(np.float64), host(quantized.scale).astype(np.float64)
    assert np.isfinite(data).all()
    assert (np.isfinite(scale) & (scale >= 2.0**-126)).all()
    assert np.isfinite(host(quantized.dequantize())).all()
    if tiny >= 2e-38:
        assert np.abs(data * scale / x.astype(np.float64) - 1).max() < 0.06


def test_quantizes_subnormal_numbers_where_xla_flushes_them():
    x = np.array([[1e-38, -5e-39, 3e-39, 0.0]], np.float32)
    for name in NAMES:
        data = host(quantize(array_of(name, x), "e4m3:row").data).astype(np.float64)
        np.testing.assert_allclose(data[:, :3] * 2.0**-126, x[:, :3].astype(np.float64), rtol=0.06)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_all_zero_blocks_give_zeros(name, recipe):
    x = np.zeros((40, 130), np.float32)
    x[0] = -0.0
    quantized = quantize(array_of(name, x), recipe)
    assert (host(quantized.data).astype(np.float32) == 0).all()
    assert (host(quantized.scale).astype(np.float32) == 2.0**-126).all()
    assert (host(quantized.dequantize()) == 0).all()


@pytest.mark.parametrize("recipe", ["e4m3:row", "e5m2:row", "e4m3:1x32:e8m0", "e5m2:1x32:e8m0", "e5m2:1x128"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", NAMES)
def test_inf_and_nan_neither_become_finite_nor_touch_their_block(name, dtype, recipe):
    clean = np.random.default_rng(1).standard_normal((4, 128)).astype(np.float32)
    clean[1, 7] = clean[1, 8] = clean[2, 3] = 0
    dirty = clean.copy()
    dirty[1, 7], dirty[1, 8], dirty[2, 3] = np.inf, -np.inf, np.nan
    decoded, expected = (
        host(quantize(framework(name).cast(array_of(name, x), dtype), recipe).dequantize("float32"))
        for x in (dirty, clean)
    )
    assert np.isnan(decoded[2, 3])
    if recipe.startswith("e5m2"):
        assert decoded[1, 7] == np.inf
        assert decoded[1, 8] == -np.inf
    else:
        assert np.isnan(decoded[1, 7:9]).all()
    finite = np.isfinite(dirty)
    np.testing.assert_array_equal(decoded[finite], expected[finite])


@pytest.mark.parametrize("name", NAMES)
def test_a_block_without_finite_values_has_the_smallest_scale(name):
    quantized = quantize(array_of(name, np.array([[np.nan, np.inf]], np.float32)), "e5m2:row")
    assert host(quantized.scale) == np.float32(2.0**-126)
    np.testing.assert_array_equal(host(quantized.data).astype(np.float32), [[np.nan, np.inf]])


@pytest.mark.parametrize("recipe", ["e4m3:tensor", "e5m2:row", "e4m3:1x32:e8m0"])
@pytest.mark.parametrize("name", NAMES)
def test_saturates_where_no_float32_scale_reaches(name, recipe):
    with jax.enable_x64(True):
        x = array_of(name, np.array([[1e300, -1e300, 1.0]]))
        quantized = quantize(x, recipe)
        largest = float(ml_dtypes.finfo(quantized.recipe.storage_dtype).max)
        assert host(quantized.data).astype(np.float64).tolist() == [[largest, -largest, 0.0]]
        assert np.isfinite(host(quantized.scale).astype(np.float64)).all()
        assert np.isfinite(host(quantized.dequantize())).all()
        assert host(quantized.dequantize()).dtype == np.float64


@pytest.mark.parametrize("name", NAMES)
def test_the_largest_float32_survives(name):
    largest = np.finfo(np.float32).max
    quantized = quantize(array_of(name, np.array([[largest, -largest]])), "e4m3:row")
    np.testing.assert_allclose(host(quantized.dequantize()), [[largest, -largest]], rtol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_an_e8m0_scale_is_the_least_power_of_two_that_does_not_saturate(name):
    for exponent in (-100, -3, 0, 7, 100):
        fits = np.float32(448 * 2.0**exponent)
        too_large = np.nextafter(fits, np.float32(np.inf))
        half = np.nextafter(fits / 2, np.float32(np.inf))
        for amax, expected in ((half, exponent), (fits, exponent), (too_large, exponent + 1)):
            quantized = quantize(array_of(name, np.array([amax, 0], np.float32)), "e4m3:1x32:e8m0")
            assert host(quantized.scale).astype(np.float64) == 2.0**expected


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
@pytest.mark.parametrize("name", NAMES)
def test_decodes_fp8_input_before_its_maxima_are_taken(name, dtype):
    x = np.array([[0.25, -0.75], [0.5, 1.0]], np.float32)
    quantized = quantize(framework(name).cast(array_of(name, x), dtype), "e4m3:tensor")
    assert host(quantized.scale) == np.float32(1) / np.float32(448)
    assert quantized.dtype == "bfloat16"
    np.testing.assert_allclose(host(quantized.dequantize("float32")), x, rtol=0.06)


@pytest.mark.parametrize("name", NAMES)
def test_knows_fnuz_formats_from_fn_ones(name):
    codes = np.array([[0x80, 0x7F, 0x00, 0x40]], np.uint8)
    fnuz = array_of(name, codes).view(framework(name).dtype("float8_e4m3fnuz"))
    quantized = quantize(fnuz, "e4m3:row")
    assert host(quantized.scale) == np.float32(240) / np.float32(448)
    decoded = host(quantized.dequantize("float32"))[0]
    assert np.isnan(decoded[0])
    np.testing.assert_allclose(decoded[1:], [240, 0, 1], rtol=0.06)


@pytest.mark.parametrize("recipe", ["e4m3:tensor", "e4m3:row", "e4m3:1x128", "e4m3:32x32"])
def test_any_strides_give_the_bits_of_a_packed_array(recipe):
    base = values_of((2 * 70, 3 * 50), seed=3)
    views = [np.s_[::2, ::3], np.s_[5:75, 3:53], np.s_[::-1, ::-2]]
    cases = [base[view] for view in views] + [base.T, np.asfortranarray(base), np.broadcast_to(base[:1], (9, 150))]
    tensor = torch.from_numpy(base)
    cases += [tensor[view] for view in views[:2]] + [tensor.t(), tensor[:1].expand(9, 150), tensor[None].mT[:, 1:]]
    for x in cases:
        packed = np.ascontiguousarray(x) if isinstance(x, np.ndarray) else x.contiguous()
        for axis in (-1, -2):
            one, other = quantize(x, recipe, axis=axis), quantize(packed, recipe, axis=axis)
            np.testing.assert_array_equal(bits(one.data), bits(other.data))
            np.testing.assert_array_equal(bits(one.scale), bits(other.scale))


@pytest.mark.parametrize("dtype", ["int8", "int32", "bool", "complex64"])
@pytest.mark.parametrize("name", NAMES)
def test_refuses_dtypes_that_no_recipe_is_for(name, dtype):
    with pytest.raises(TypeError, match=f"{dtype} cannot be quantized; allowed: float64, float32"):
        quantize(array_of(name, np.zeros((4, 4), dtype)), "e4m3:row")


def test_refuses_what_is_no_array_and_what_is_quantized_already():
    with pytest.raises(TypeError, match="list is no array; allowed: an array of numpy, torch, jax"):
        quantize([[1.0]], "e4m3:row")
    with pytest.raises(TypeError, match="quantized already"):
        quantize(quantize(np.ones((2, 2)), "e4m3:row"), "e4m3:row")


@pytest.mark.parametrize(("shape", "axis"), [((4, 4), 0), ((4, 4), 1), ((4, 4), -3), ((4,), -2), ((), -1)])
def test_refuses_an_axis_that_is_not_contracted(shape, axis):
    with pytest.raises(ValueError, match="axis"):
        quantize(np.zeros(shape), "e4m3:row", axis=axis)


def test_refuses_an_unknown_recipe():
    with pytest.raises(ValueError, match="granularity 'rows' is unknown"):
        quantize(np.zeros((4, 4)), "e4m3:rows")


def test_leaves_its_input_and_the_floating_point_settings_alone():
    x = values_of((8, 130), seed=4)
    x[0, 0], x[1, 1] = np.inf, np.nan
    before = x.copy()
    with np.errstate(all="raise"):
        quantize(x, "e4m3:1x128").dequantize("float16")
        assert np.geterr()["over"] == "raise"
    np.testing.assert_array_equal(x, before)


def test_keeps_no_torch_graph_and_serves_every_grad_mode():
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    expected = quantize(x.detach(), "e4m3:row")
    with torch.no_grad():
        no_grad = quantize(x, "e4m3:row")
    with torch.inference_mode():
        inference = quantize(x, "e4m3:row")
    for quantized in (quantize(x, "e4m3:row"), no_grad, inference):
        assert not quantized.data.requires_grad
        assert not quantized.scale.requires_grad
        np.testing.assert_array_equal(bits(quantized.data), bits(expected.data))


@pytest.mark.parametrize("recipe", ["e4m3:row", "e5m2:1x32:e8m0"])
def test_vmap_quantizes_each_entry_as_if_alone(recipe):
    x = values_of((3, 20, 70), seed=5)
    whole = quantize(x, recipe)
    for mapped in (
        jax.vmap(lambda v: quantize(v, recipe))(jnp.asarray(x)),
        jax.jit(jax.vmap(lambda v: quantize(v, recipe)))(jnp.asarray(x)),
    ):
        np.testing.assert_array_equal(bits(mapped.data), bits(whole.data))
        np.testing.assert_array_equal(bits(mapped.scale), bits(whole.scale))
    decoded = torch.vmap(lambda v: quantize(v, recipe).dequantize())(torch.from_numpy(x))
    np.testing.assert_array_equal(host(decoded), whole.dequantize())


def test_x64_changes_nothing_for_float32():
    x = jnp.asarray(values_of((20, 70), seed=6))
    off = quantize(x, "e4m3:1x32:e8m0")
    with jax.enable_x64(True):
        on = quantize(x, "e4m3:1x32:e8m0")
        jitted = jax.jit(lambda v: quantize(v, "e4m3:1x32:e8m0"))(x)
    for other in (on, jitted):
        np.testing.assert_array_equal(bits(other.data), bits(off.data))
        np.testing.assert_array_equal(bits(other.scale), bits(off.scale))
        assert other.scale.dtype == off.scale.dtype


def test_a_numpy_array_is_quantized_without_torch_or_jax():
    code = (
        "import sys, numpy as np\n"
        "from dispatch.quantization import quantize, prepare\n"
        "prepare(np.ones((4, 4))).form('q', lambda w: quantize(w, 'e4m3:row')).mT.dequantize()\n"
        "print(sorted({'torch', 'jax', 'triton'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
