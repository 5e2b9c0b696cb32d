"""ScaledArray: its checks, its transposes, what it decodes to, and its life as a JAX pytree."""

import dataclasses
import pickle

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch._recipe import GRANULARITIES, ScalingRecipe
from dispatch.frameworks import NAMES, framework, framework_of
from dispatch.quantization import ScaledArray, quantize

jax = pytest.importorskip("jax", reason="compares all three frameworks")
torch = pytest.importorskip("torch", reason="compares all three frameworks")
jnp = jax.numpy

LIKE = {"numpy": np.zeros(1), "torch": torch.zeros(1), "jax": jnp.zeros(1)}
ROW = ScalingRecipe.parse("e4m3:row")


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def array_of(name, values):
    return framework(name).asarray(values, LIKE[name])


def host(array):
    return framework_of(array).to_numpy(array)


def codes(*shape):
    return np.zeros(shape, ml_dtypes.float8_e4m3fn)


@pytest.mark.parametrize(
    ("recipe", "shape", "axis", "scale"),
    [
        ("e4m3:tensor", (3, 5, 7), -1, (1, 1, 1)),
        ("e4m3:tensor", (7,), -1, (1,)),
        ("e4m3:row", (5, 300), -1, (5, 1)),
        ("e4m3:row", (300, 5), -2, (1, 5)),
        ("e4m3:row", (2, 5, 300), -1, (2, 5, 1)),
        ("e4m3:row", (5, 0), -1, (5, 1)),
        ("e4m3:row", (0, 5), -1, (0, 1)),
        ("e4m3:row", (300,), -1, (1,)),
        ("e4m3:1x128", (5, 300), -1, (5, 3)),
        ("e4m3:1x128", (300, 5), -2, (3, 5)),
        ("e4m3:1x128", (5, 0), -1, (5, 0)),
        ("e4m3:1x128", (300,), -1, (3,)),
        ("e4m3:128x128", (2, 130, 300), -1, (2, 2, 3)),
        ("e4m3:64x64", (130, 300), -2, (3, 5)),
        ("e4m3:32x32", (1, 33), -1, (1, 2)),
        ("e4m3:1x32:e8m0", (5, 65), -1, (5, 3)),
        ("e4m3:1x32:e8m0", (65, 5), -2, (3, 5)),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_has_one_scale_a_block(name, recipe, shape, axis, scale):
    quantized = quantize(array_of(name, np.ones(shape, np.float32)), recipe, axis=axis)
    assert tuple(quantized.scale.shape) == scale
    assert quantized.shape == shape
    assert quantized.ndim == len(shape)
    again = ScaledArray(quantized.data, quantized.scale, quantized.recipe, axis, quantized.dtype)
    assert (host(again.dequantize()) == 1).all()


@settings(deadline=None, max_examples=40)
@given(
    granularity=st.sampled_from(GRANULARITIES),
    scale_dtype=st.sampled_from(["float32", "e8m0"]),
    rows=st.integers(1, 140),
    cols=st.integers(1, 140),
    batch=st.sampled_from([(), (2,)]),
    name=st.sampled_from(["numpy", "torch"]),
)
def test_quantizing_commutes_with_transposing(granularity, scale_dtype, rows, cols, batch, name):
    recipe = f"e4m3:{granularity}:{scale_dtype}"
    w = array_of(name, normal(*batch, rows, cols))
    transposed, direct = quantize(w, recipe).mT, quantize(w.mT, recipe, axis=-2)
    assert transposed.axis == direct.axis == -2
    assert transposed.shape == direct.shape == (*batch, cols, rows)
    for field in ("data", "scale"):
        one, other = (host(getattr(x, field)).astype(np.float32) for x in (transposed, direct))
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(host(transposed.dequantize()), host(quantize(w, recipe).dequantize().mT))
    assert transposed.mT.axis == -1


def test_a_transposed_weight_is_an_operand_b():
    w = normal(6, 300)
    b = quantize(w, "e4m3:row").T
    assert (b.shape, b.axis, b.scale.shape) == ((300, 6), -2, (1, 6))


def test_T_is_for_two_axes_only():
    with pytest.raises(ValueError, match="not 2-D; mT swaps"):
        _ = quantize(normal(2, 3, 4), "e4m3:row").T
    with pytest.raises(ValueError, match="no two axes"):
        _ = quantize(normal(3), "e4m3:row").mT


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", NAMES)
def test_decodes_to_the_dtype_asked_for_rounding_once(name, dtype):
    with jax.enable_x64(True):
        quantized = quantize(array_of(name, normal(5, 300)), "e4m3:1x128")
        decoded = host(quantized.dequantize(dtype))
        wide = np.float64 if dtype == "float64" else np.float32
        scale = np.repeat(host(quantized.scale), 128, axis=1)[:, :300].astype(wide)
        expected = (host(quantized.data).astype(wide) * scale).astype(framework("numpy").dtype(dtype))
    assert decoded.dtype == expected.dtype
    np.testing.assert_array_equal(decoded, expected)


def test_decodes_to_the_dtype_it_came_from():
    assert quantize(torch.ones(2, 2, dtype=torch.float16), "e4m3:row").dequantize().dtype == torch.float16
    assert quantize(torch.ones(2, 2, dtype=torch.bfloat16), "e4m3:row").dequantize().dtype == torch.bfloat16


def test_refuses_to_decode_to_what_is_no_wide_float():
    with pytest.raises(ValueError, match="cannot decode to 'int8'; allowed: float64, float32, float16, bfloat16"):
        quantize(normal(2, 2), "e4m3:row").dequantize("int8")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"scale": np.ones((4,), np.float32)}, ValueError, r"scale has shape \(4,\).*needs \(4, 1\)"),
        ({"scale": np.ones((1, 8), np.float32)}, ValueError, r"scale has shape \(1, 8\).*needs \(4, 1\)"),
        ({"axis": -2}, ValueError, r"needs \(1, 8\)"),
        ({"axis": 1}, ValueError, "axis 1 cannot be"),
        ({"data": np.zeros((4, 8), np.float32)}, TypeError, "data is float32; e4m3:row needs float8_e4m3fn"),
        ({"data": np.zeros((4, 8), ml_dtypes.float8_e4m3fnuz)}, TypeError, "data is float8_e4m3fnuz"),
        ({"scale": np.ones((4, 1))}, TypeError, "scale is float64; e4m3:row needs float32"),
        ({"recipe": ScalingRecipe.parse("e4m3:row:e8m0")}, TypeError, "needs float8_e8m0fnu"),
        ({"recipe": "e4m3:row"}, TypeError, "use ScalingRecipe.parse"),
        ({"scale": torch.ones(4, 1)}, TypeError, "data is of numpy and scale of torch"),
        ({"scale": 1.0}, TypeError, "scale is a float; needs an array of numpy, torch, jax"),
        ({"data": [[1]]}, TypeError, "data is a list"),
        ({"dtype": "float8_e4m3fn"}, ValueError, "cannot decode to 'float8_e4m3fn'"),
        ({"data": codes(), "scale": np.ones((), np.float32)}, ValueError, "0-D"),
    ],
)
def test_refuses_parts_that_do_not_fit(values, error, message):
    fitting = {"data": codes(4, 8), "scale": np.ones((4, 1), np.float32), "recipe": ROW}
    assert ScaledArray(**fitting).dtype == "bfloat16"
    with pytest.raises(error, match=message):
        ScaledArray(**{**fitting, **values})


def test_refuses_two_devices():
    data = torch.zeros(4, 8, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match="data is on cpu and scale on meta; move them to one device"):
        ScaledArray(data, torch.ones(4, 1, device="meta"), ROW)


def test_is_frozen_and_compares_by_identity():
    quantized = quantize(normal(2, 2), "e4m3:row")
    with pytest.raises(dataclasses.FrozenInstanceError):
        quantized.axis = -2
    assert quantized != quantize(normal(2, 2), "e4m3:row")
    assert len({quantized, quantized, quantized.mT}) == 2


def test_repr_tells_the_facts_and_no_values():
    text = repr(quantize(normal(4, 300), "e4m3:1x128"))
    assert text == "ScaledArray(e4m3:1x128, shape=(4, 300), scale=(4, 3), axis=-1, dtype=float32)"


def test_pickles():
    quantized = quantize(normal(4, 300), "e4m3:1x128")
    again = pickle.loads(pickle.dumps(quantized))
    assert again.recipe == quantized.recipe
    np.testing.assert_array_equal(again.dequantize(), quantized.dequantize())


# As a JAX pytree


def test_data_and_scale_are_leaves_and_the_rest_is_static():
    quantized = quantize(jnp.asarray(normal(4, 300)), "e4m3:1x128")
    paths, tree = jax.tree_util.tree_flatten_with_path(quantized)
    assert [jax.tree_util.keystr(path) for path, _ in paths] == [".data", ".scale"]
    assert tree == jax.tree.structure(quantize(jnp.asarray(normal(9, 40)), "e4m3:1x128"))
    assert tree != jax.tree.structure(quantize(jnp.asarray(normal(4, 300)), "e4m3:row"))
    assert tree != jax.tree.structure(quantized.mT)
    assert jax.tree.map(lambda leaf: leaf.shape, quantized).data == (4, 300)


def test_passes_through_jit_and_keeps_its_facts():
    quantized = quantize(jnp.asarray(normal(300, 4)), "e4m3:1x128", axis=-2)
    out = jax.jit(lambda x: x.mT)(quantized)
    assert (out.axis, out.recipe, out.dtype, out.shape) == (-1, quantized.recipe, "float32", (4, 300))
    np.testing.assert_array_equal(out.dequantize(), quantized.mT.dequantize())


def test_may_be_made_of_a_tracer_and_a_constant():
    quantized = quantize(jnp.asarray(normal(4, 8)), "e4m3:row")
    decoded = jax.jit(lambda data: ScaledArray(data, quantized.scale, ROW, dtype="float32").dequantize())
    np.testing.assert_array_equal(decoded(quantized.data), quantized.dequantize())


def test_scan_slices_it():
    stacked = quantize(jnp.asarray(normal(5, 4, 300)), "e4m3:1x128")
    _, decoded = jax.lax.scan(lambda carry, x: (carry, x.dequantize()), None, stacked)
    np.testing.assert_array_equal(decoded, stacked.dequantize())


def test_scan_carries_it():
    start = quantize(jnp.asarray(normal(4, 64)), "e4m3:1x32:e8m0")
    end, _ = jax.lax.scan(lambda x, _: (quantize(x.dequantize(), x.recipe), None), start, None, length=3)
    np.testing.assert_array_equal(end.dequantize(), start.dequantize())


@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:32x32", "e4m3:1x32:e8m0"])
def test_vmap_maps_over_its_batch(recipe):
    stacked = quantize(jnp.asarray(normal(3, 40, 70)), recipe)
    decoded = jax.vmap(lambda x: x.mT.dequantize())(stacked)
    np.testing.assert_array_equal(decoded, stacked.dequantize().mT)


def test_a_tensor_scale_made_inside_vmap_belongs_to_one_entry():
    x = jnp.asarray(normal(3, 40, 70) * np.array([1, 10, 100], np.float32)[:, None, None])
    mapped = jax.vmap(lambda v: quantize(v, "e4m3:tensor"))(x)
    for entry, decoded in zip(x, mapped.dequantize(), strict=True):
        np.testing.assert_array_equal(decoded, quantize(entry, "e4m3:tensor").dequantize())
    np.testing.assert_array_equal(jax.vmap(lambda v: v.mT.dequantize())(mapped), mapped.mT.dequantize())


def test_no_values_are_read():
    with jax.transfer_guard_device_to_host("disallow"):
        quantize(jnp.asarray(normal(4, 64)), "e4m3:row").mT.dequantize("bfloat16")
    shape = jax.eval_shape(lambda x: quantize(x, "e4m3:1x32"), jax.ShapeDtypeStruct((4, 64), jnp.bfloat16))
    assert (shape.data.dtype, shape.scale.shape, shape.dtype) == (jnp.float8_e4m3fn, (4, 2), "bfloat16")
    meta = quantize(torch.zeros(4, 64, device="meta"), "e4m3:1x32")
    assert meta.dequantize().device.type == "meta"
