"""NaN, Inf, overflow, subnormal numbers, signed zeros, accumulation and epilogues."""

from __future__ import annotations

import math

import numpy as np
import pytest

import dispatch
from dispatch.testing import FakeBackend, fake_timings, registered


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nan_and_inf_stay_where_the_product_has_them(kit, route, dtype):
    """B32 (flashinfer-ai/flashinfer#4023): the same NaN and Inf pattern, other rows untouched."""
    values = np.random.default_rng(0).standard_normal((6, 32))
    values[1, 7], values[2, 3], values[4, 0] = np.inf, np.nan, -np.inf
    a, b = kit.array(values, dtype), kit.array(np.random.default_rng(1).random((32, 16)) + 0.1, dtype)
    with np.errstate(all="ignore"):
        want = kit.product(a, b)
        out = route.matmul(a, b)
        again = route.matmul(a, b)
    for found in (kit.wide(out), kit.wide(again)):
        assert np.array_equal(np.isnan(found), np.isnan(want))
        assert np.array_equal(found[np.isinf(want)], want[np.isinf(want)])
        assert np.allclose(found[[0, 3, 5]], want[[0, 3, 5]], rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize(("dtype", "value", "finite"), [("float16", 200.0, False), ("bfloat16", 200.0, True)])
def test_only_the_last_rounding_overflows(kit, route, dtype, value, finite):
    """B37's kind (llvm/torch-mlir#4616): float16 beyond 65504 is Inf as natively, with no warning, and never NaN."""
    a, b = kit.array(np.full((4, 512), value), dtype), kit.array(np.full((512, 3), value), dtype)
    with np.errstate(all="ignore"):  # NumPy's own product says so
        out = kit.wide(route.matmul(a, b))
    assert np.isfinite(out).all() if finite else (out == np.inf).all()


@pytest.mark.parametrize("tiny", [1e-30, 2e-38, 1e-40])
def test_subnormal_bfloat16_is_not_flushed_by_a_route(kit, route, tiny):
    """B31's kind (flashinfer-ai/flashinfer#4679): values near 1e-38 multiply as natively."""
    a, b = kit.array(np.full((4, 16), tiny), "bfloat16"), kit.array(np.eye(16) * 2.0**20, "bfloat16")
    own, out = kit.wide(kit.room.matmul(a, b)), kit.wide(route.matmul(a, b))
    assert np.isfinite(out).all()
    if kit.name != "jax":  # XLA flushes them itself
        assert np.allclose(out, kit.product(a, b), rtol=1e-2)
    assert np.array_equal(out == 0, own == 0)


def test_signed_zeros_are_the_frameworks_own(kit, route):
    """-0.0 times 1, summed: the sign that the framework's own product gives, in float16 and bfloat16."""
    for dtype in ("float16", "bfloat16", "float32"):
        a, b = kit.array(np.full((3, 1), -0.0), dtype), kit.array(np.ones((1, 2)), dtype)
        assert np.array_equal(kit.wide(route.matmul(a, b)), np.zeros((3, 2)))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_long_sums_are_kept_in_float32(kit, route, dtype):
    """B40's kind (triton-lang/triton#8056): 4096 small terms on a large one, which a 16-bit sum would lose."""
    a = np.full((2, 4097), 2.0**-4)
    a[:, 0] = 256.0
    left, right = kit.array(a, dtype), kit.array(np.ones((4097, 2)), dtype)
    own = kit.wide(kit.room.matmul(left, right))
    found = kit.wide(route.matmul(left, right))
    assert np.abs(found - 512.0625).max() <= max(np.abs(own - 512.0625).max(), 2.0)


@pytest.mark.parametrize(
    ("bias_dtype", "out"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        ("float16", None),
        ("float64", "float16"),
        ("int32", None),
        ("int8", "float32"),
    ],
)
def test_any_bias_dtype_with_any_result(kit, route, bias_dtype, out):
    """B46 (pytorch/pytorch#190538, pytorch/ao#3525): added once, in float32, before the one rounding."""
    if kit.name == "jax" and bias_dtype == "float64":
        bias_dtype = "float32"  # without x64 JAX has none
    a, b = kit.normal(8, 16, dtype="bfloat16"), kit.normal(16, 12, dtype="bfloat16", seed=1)
    bias = kit.array(np.full(12, 3.0), bias_dtype)
    found = route.matmul(a, b, bias=bias, out_dtype=None if out is None else kit.room.dtype(out))
    assert kit.dtype_of(found) == (out or "bfloat16")
    assert kit.error(found, kit.product(a, b) + 3) < 1e-2


@pytest.mark.parametrize(("dtype", "even"), [("bfloat16", 256.0), ("float16", 2048.0)])
def test_bias_is_added_before_the_one_rounding(kit, dtype, even):
    """B37, B46: 257 is no bfloat16, but 257 - 256 is one; through float32 it is not rounded on the way."""
    if kit.name == "jax" or (kit.name == "numpy" and dtype == "bfloat16"):
        pytest.skip("cpu_blas leaves these to the framework")
    a, b = kit.array([[even, 1.0]], dtype), kit.array(np.ones((2, 1)), dtype)
    bias = kit.array([-even], "float32")
    assert kit.wide(dispatch.matmul(a, b, bias=bias, backend="cpu_blas")).item() == 1.0


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_each_activation_is_the_named_one(kit, route, activation, dtype):
    """B47 (pytorch/pytorch#104061): erf and tanh forms are two names, the same by every route; NaN and Inf stay."""
    x = np.concatenate([np.linspace(-6, 6, 30), [np.inf, np.nan]])
    a, b = kit.array(x[:, None], dtype), kit.array(np.ones((1, 2)), dtype)
    with np.errstate(all="ignore"):
        found = kit.wide(route.matmul(a, b, activation=activation))[:, 0]
    given = kit.wide(a)[:30, 0]
    erf = np.array([math.erf(v / math.sqrt(2)) for v in given])
    want = {
        "relu": np.maximum(given, 0),
        "gelu": given * 0.5 * (1 + erf),
        "gelu_tanh": 0.5 * given * (1 + np.tanh(math.sqrt(2 / math.pi) * (given + 0.044715 * given**3))),
        "silu": given / (1 + np.exp(-given)),
    }[activation]
    limit = {"float32": 2e-6, "bfloat16": 2e-2, "float16": 2e-3}[dtype]
    assert np.allclose(found[:30], want, rtol=limit, atol=limit)
    assert found[30] == np.inf
    assert np.isnan(found[31])


@pytest.mark.parametrize("name", ["Relu", "tanh", "", "gelu_erf"])
def test_an_unknown_activation_names_the_known_ones(kit, name):
    """B44's kind (pytorch/pytorch#190449): an epilogue argument is used or refused, never ignored."""
    a = kit.normal(2, 2)
    with pytest.raises(ValueError, match="gelu_tanh"):
        dispatch.matmul(a, a, activation=name)


def test_every_epilogue_argument_changes_the_result(kit, route):
    """B44 (pytorch/pytorch#190449): bias, activation and out_dtype each do something, together too."""
    a, b = kit.normal(4, 8, dtype="bfloat16"), kit.normal(8, 4, dtype="bfloat16", seed=1)
    bias = kit.array(np.full(4, -1.0), "float32")
    plain = kit.wide(route.matmul(a, b))
    biased = kit.wide(route.matmul(a, b, bias=bias))
    both = kit.wide(route.matmul(a, b, bias=bias, activation="relu"))
    wide = route.matmul(a, b, bias=bias, activation="relu", out_dtype=kit.room.dtype("float32"))
    assert np.allclose(biased, plain - 1, rtol=2e-2, atol=3e-2)
    assert np.allclose(both, np.maximum(biased, 0), atol=1e-6)
    assert kit.dtype_of(wide) == "float32"
    assert np.allclose(kit.wide(wide), np.maximum(kit.product(a, b) - 1, 0), atol=1e-5)


def test_a_faster_route_that_hides_inf_is_not_taken(kit):
    """B32: a plugin that makes Inf finite is wrong where the product has Inf, and serves nothing there."""
    room = kit.room

    def hiding(a, b, bias=None):
        return room.xp.clip(room.matmul(a, b), -448.0, 448.0)

    values = np.random.default_rng(0).standard_normal((4, 8)).astype(np.float32)
    values[1, 2] = np.inf
    a, b = kit.array(values), kit.array(np.random.default_rng(1).random((8, 4)).astype(np.float32) + 0.1)
    with registered(FakeBackend("hiding", hiding)), fake_timings({"hiding": 1.0, "baseline": 99.0}, device_time=True):
        for _ in range(2):
            with np.errstate(all="ignore"):
                out = dispatch.matmul(a, b)
            assert np.isinf(kit.wide(out)[1]).all()


@pytest.mark.parametrize("value", [0.0, 1.0, 3.0])
def test_constant_operands_teach_nothing(kit, value):
    """an error measured on constants is not stored for other data."""
    room = kit.room
    rounding = FakeBackend("rounding", lambda a, b, bias=None: room.xp.round(room.matmul(a, b)))
    a, b = kit.array(np.full((4, 8), value), "float32"), kit.array(np.ones((8, 4)), "float32")
    x = kit.normal(4, 8)
    with registered(rounding), fake_timings({"rounding": 1.0, "baseline": 99.0}, device_time=True):
        for given in (a, x, a, x):
            kit.close(given, b, dispatch.matmul(given, b), 1e-5)


def test_accuracy_is_measured_on_the_callers_rows(kit):
    """B43 (pytorch/pytorch#193802): the only able backend is not trusted; one ruined row of many is enough."""
    room = kit.room

    def ruined(a, b, bias=None):
        out = kit.host(room.matmul(a, b)).copy()
        out[kit.host(a).astype(np.float32).max(1).argmax()] *= 1.5
        return kit.array(out)

    values = np.random.default_rng(0).standard_normal((96, 16)).astype(np.float32)
    values[50] *= 100
    a, b = kit.array(values), kit.normal(16, 8, seed=1)
    with registered(FakeBackend("ruined", ruined)), fake_timings({"ruined": 1.0, "baseline": 99.0}, device_time=True):
        kit.close(a, b, dispatch.matmul(a, b))
        assert dispatch.explain(a, b).backend != "ruined"
