"""quantize and ScaledArray on the inputs that quantizers of peers tripped over, and products of what they give."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch

GRANULARITIES = ["tensor", "row", "1x128", "128x128", "64x64", "32x32", "1x32:e8m0"]


def scales(kit, x):
    return kit.wide(kit.room.cast(x.scale, "float32"))


@pytest.mark.parametrize("granularity", ["1x128", "128x128", "1x32:e8m0"])
@pytest.mark.parametrize("k", [192, 64, 1, 129])
def test_the_last_block_may_be_partial(kit, k, granularity):
    """B11 (vllm-project/vllm#42384, sgl-project/sglang#3345): any k, with ceil(k / block) scales."""
    x = kit.normal(5, k)
    q = dispatch.quantize(x, f"e4m3:{granularity}")
    width = {"1x128": 128, "128x128": 128, "1x32:e8m0": 32, "row": k}[granularity]
    assert q.shape == (5, k)
    assert q.scale.shape[-1] == -(-k // width)
    assert kit.error(q.dequantize("float32"), kit.wide(x)) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("granularity", GRANULARITIES)
@pytest.mark.parametrize("tiny", [1e-30, 1e-40, 0.0])
def test_tiny_blocks_stay_finite(kit, tiny, granularity, dtype):
    """B31 (flashinfer-ai/flashinfer#4679, #2440): a scale is never 0, NaN or Inf, and no value becomes NaN."""
    values = np.full((4, 128), tiny)
    values[0] = 1.0
    q = dispatch.quantize(kit.array(values, dtype), f"e4m3:{granularity}")
    found = scales(kit, q)
    assert np.isfinite(found).all()
    assert (found > 0).all()
    assert np.isfinite(kit.wide(q.dequantize("float32"))).all()


@pytest.mark.parametrize("tiny", [1e-30, 2e-38])
def test_tiny_rows_are_not_lost_in_a_product(kit, route, tiny):
    """B31: what float32 can hold comes back within FP8's rounding, and is not flushed to zero."""
    x = kit.array(np.full((4, 128), tiny), "float32")
    q, w = (
        dispatch.quantize(x, "e4m3:row"),
        dispatch.quantize(kit.array(np.ones((128, 4), np.float32)), "e4m3:row", axis=-2),
    )
    out = kit.wide(route.matmul(q, w, out_dtype=kit.room.dtype("float32")))
    if not (kit.name == "jax" and tiny < 1e-37):  # the sum is subnormal there no more, but the terms are
        assert np.allclose(out, 128 * tiny, rtol=0.06, atol=0)


@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:tensor", "e4m3:1x128", "e4m3:1x32:e8m0"])
def test_inf_is_never_made_finite(kit, recipe):
    """B32 (flashinfer-ai/flashinfer#4023): Inf and NaN stay not finite, and their block keeps its values."""
    values = np.random.default_rng(0).standard_normal((4, 128)).astype(np.float32)
    values[1, 7], values[2, 3] = np.inf, np.nan
    found = kit.wide(dispatch.quantize(kit.array(values), recipe).dequantize("float32"))
    bad = ~np.isfinite(values)
    assert np.array_equal(~np.isfinite(found), bad)
    assert np.linalg.norm(found[~bad] - values[~bad]) < 0.05 * np.linalg.norm(values[~bad])


@pytest.mark.parametrize("recipe", ["e5m2:row", "e5m2:tensor"])
def test_e5m2_keeps_inf(kit, recipe):
    """B32: the format has an Inf, with its sign."""
    values = np.array([[1.0, np.inf, -np.inf, 2.0]], np.float32)
    found = kit.wide(dispatch.quantize(kit.array(values), recipe).dequantize("float32"))
    assert (found[0, 1], found[0, 2]) == (np.inf, -np.inf)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"])
def test_maxima_of_fp8_inputs_are_finite(kit, dtype):
    """B34 (jax-ml/jax#19011): the amax of an FP8 array is taken in float32."""
    x = kit.array([[0.25, -0.75], [0.5, 1.0]], dtype)
    q = dispatch.quantize(x, "e4m3:tensor")
    assert np.allclose(scales(kit, q), 1 / 448, rtol=1e-6)
    assert np.allclose(kit.wide(q.dequantize("float32")), [[0.25, -0.75], [0.5, 1.0]], rtol=0.07)


def test_largest_finite_value_is_the_formats_own(kit):
    """B35 (causalflow-ai/petit-kernel#3): amax lands on 448 and 57344, and -0.0 is no NaN."""
    for recipe, top in (("e4m3:tensor", 448.0), ("e5m2:tensor", 57344.0)):
        q = dispatch.quantize(kit.array([[3.0, -0.0, -3.0, 1.0]], "float32"), recipe)
        data = kit.wide(q.data)
        assert data[0].tolist()[::2] == [top, -top]
        assert data[0, 1] == 0.0


@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128", "e4m3:128x128"])
def test_products_of_scaled_arrays_decode_exactly(kit, route, recipe):
    """B43 (pytorch/pytorch#193802): distinct, far apart scales on rows and columns, each row right on its own."""
    pair = dispatch.RecipePair.parse(recipe)
    rows = np.logspace(-3, 3, 40)[:, None] if pair.a.granularity in ("row", "1x128") else 1.0
    a = kit.array(np.random.default_rng(0).standard_normal((40, 200)) * rows, "float32")
    b = kit.array(np.random.default_rng(1).standard_normal((200, 24)), "float32")
    qa, qb = dispatch.quantize(a, pair.a), dispatch.quantize(b, pair.b, axis=-2)
    out = kit.wide(route.matmul(qa, qb, out_dtype=kit.room.dtype("float32")))
    want = kit.wide(qa.dequantize("float32")) @ kit.wide(qb.dequantize("float32"))
    assert (np.linalg.norm(out - want, axis=1) <= 2e-2 * np.linalg.norm(want, axis=1)).all()


def test_scales_apply_before_the_result_is_rounded(kit, route):
    """B37 (llvm/torch-mlir#4616): 448 * 448 * 128 fits no float16, scaled by 1e-6 it does."""
    a = kit.array(np.full((16, 128), 448.0), "float8_e4m3fn")
    scale = kit.array(np.full((1, 1), 1e-3), "float32")
    recipe = dispatch.ScalingRecipe.parse("e4m3:tensor")
    x = dispatch.ScaledArray(a, scale, recipe, -1, "float32")
    y = dispatch.ScaledArray(a.T, scale, recipe, -2, "float32")
    bias = kit.array(np.ones(16), "float32")
    out = route.matmul(x, y, out_dtype=kit.room.dtype("float16"))
    assert kit.dtype_of(out) == "float16"
    assert np.allclose(kit.wide(out), 448 * 448 * 128e-6, rtol=1e-3)
    biased = route.matmul(x, y, bias=bias, out_dtype=kit.room.dtype("float32"))
    assert np.allclose(kit.wide(biased), 448 * 448 * 128e-6 + 1, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("granularity", ["row", "128x128"])
def test_a_scaled_weight_meets_a_plain_activation(kit, route, granularity, dtype):
    """B50 (pytorch/pytorch#160651): a 16-bit or wider operand by an FP8 weight with scales, in either order."""
    w = dispatch.quantize(kit.normal(48, 32, dtype=dtype, seed=1), f"e4m3:{granularity}", axis=-2)
    x = kit.normal(8, 48, dtype=dtype)
    decoded = kit.wide(w.dequantize("float32"))
    assert kit.error(route.matmul(x, w), kit.wide(x) @ decoded) < 1e-2
    assert kit.error(route.matmul(w.mT, x.T), decoded.T @ kit.wide(x).T) < 1e-2


@pytest.mark.parametrize("recipe", ["e4m3:1x128", "e4m3:row", "e4m3:1x32:e8m0"])
def test_the_wrong_side_is_refused_and_says_what_to_do(kit, recipe):
    """Scales that lie along the other axis decode to other numbers: an error, not a wrong result."""
    q = dispatch.quantize(kit.normal(8, 128), recipe)
    with pytest.raises(ValueError, match="axis=-2"):
        dispatch.matmul(kit.normal(4, 8), q)


@pytest.mark.parametrize("rank", [(6,), (3, 2, 6)])
def test_scaled_operands_of_other_ranks(kit, route, rank):
    """B11's kind: a vector and a stack, quantized, multiply as their decoded values do."""
    a = dispatch.quantize(kit.normal(*rank), "e4m3:row")
    b = dispatch.quantize(kit.normal(6, 4, seed=1), "e4m3:row", axis=-2)
    out = route.matmul(a, b, out_dtype=kit.room.dtype("float32"))
    want = kit.wide(a.dequantize("float32")) @ kit.wide(b.dequantize("float32"))
    assert np.allclose(kit.wide(out), want, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("shapes", "dtypes"), [(((4, 8), (6, 4)), (None, None)), (((4, 8), (8, 4)), ("16", "32"))])
def test_scaled_operands_that_do_not_multiply_raise_as_their_values_do(kit, shapes, dtypes):
    """Never the product of the bytes: wrong shapes, and in torch two decoded dtypes, are the framework's errors."""
    first, second = (f"float{x}" if x else "float32" for x in dtypes)
    a = dispatch.quantize(kit.normal(*shapes[0], dtype=first), "e4m3:tensor")
    b = dispatch.quantize(kit.normal(*shapes[1], dtype=second, seed=1), "e4m3:tensor", axis=-2)
    x, y = a.dequantize(), b.dequantize()
    try:
        own = kit.room.matmul(x, y)
    except Exception as error:
        with pytest.raises(type(error)):
            dispatch.matmul(a, b)
        with pytest.raises(type(error)):
            dispatch.matmul(a, b, out_dtype=kit.room.dtype("float32"))
    else:
        kit.close(x, y, dispatch.matmul(a, b), 1e-5)
        assert kit.dtype_of(own) == "float32"


@pytest.mark.parametrize("shape", [(0, 64), (4, 0), (0,)], ids=str)
@pytest.mark.parametrize("granularity", ["tensor", "row", "1x128", "64x64"])
def test_nothing_to_quantize_gives_nothing(kit, shape, granularity):
    """B07 (neuralmagic/AutoFP8#9): zero sizes quantize, decode and multiply."""
    q = dispatch.quantize(kit.array(np.zeros(shape), "float32"), f"e4m3:{granularity}")
    assert q.shape == shape
    assert tuple(q.dequantize("float32").shape) == shape
    w = kit.array(np.ones((shape[-1], 3)), "float32")
    assert tuple(dispatch.matmul(q, w).shape) == (*shape[:-1], 3)
    assert (kit.wide(dispatch.matmul(q, w)) == 0).all()
