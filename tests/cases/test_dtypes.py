"""Integers, booleans, complex numbers, mixed dtypes, out_dtype, and raw FP8."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import dispatch

FP8 = ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz"]
EDGES = [("int8", -128, k) for k in (1, 1023, 1024, 1040, 1041)] + [("uint8", 255, k) for k in (1, 257, 258, 259, 600)]


@pytest.mark.parametrize(("dtype", "value", "k"), EDGES)
def test_small_integers_wrap_as_natively(kit, route, dtype, value, k):
    """B52 (pytorch/pytorch#192904): sums up to, at and beyond 2**24, that float32 holds exactly."""
    a, b = kit.array(np.full((3, k), value), dtype), kit.array(np.full((k, 2), value), dtype)
    out = kit.host(route.matmul(a, b))
    assert out.dtype == dtype
    assert np.array_equal(out, (np.full((3, 2), value * value * k, np.int64)).astype(dtype))
    if route.name == "cpu_blas" and k > 1:
        assert route.serves(a, b) == (value * value * k < 1 << 24)


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("out", ["int32", "int64", "float32"])
def test_an_integer_product_in_a_wider_dtype(kit, route, dtype, out):
    """out_dtype of integers: what the framework's own product converts to, by every route."""
    if kit.name == "jax" and out == "int64":
        out = "int32"  # without x64 JAX has none
    a, b = (kit.array(np.random.default_rng(i).integers(0, 4, s), dtype) for i, s in ((0, (3, 5)), (1, (5, 2))))
    found = route.matmul(a, b, out_dtype=kit.room.dtype(out))
    assert kit.dtype_of(found) == out
    assert np.array_equal(kit.wide(found), kit.product(a, b))


@pytest.mark.parametrize("dtype", ["int64", "int32", "int16"])
def test_large_integers_are_exact(kit, route, dtype):
    """B52 (helmholtz-analytics/heat#657): 2**24 + 1 does not go through float32."""
    if kit.name == "jax" and dtype == "int64":
        dtype = "int32"
    big = (1 << 24) + 1 if dtype != "int16" else 12345
    a, b = kit.array([[big, 1]], dtype), kit.array([[1], [0]], dtype)
    assert int(kit.host(route.matmul(a, b)).item()) == big


def test_unsigned_and_mixed_integers_promote_as_natively(numpy_kit, route):
    """B52: uint8 stays uint8, int8 by uint8 is int16 and holds 255 * 300 terms as NumPy does."""
    for first, second in (
        ("uint8", "uint8"),
        ("int8", "uint8"),
        ("int8", "int32"),
        ("float16", "int8"),
        ("bool", "u1"),
    ):
        a, b = np.full((2, 300), 2 if first != "bool" else 1).astype(first), np.full((300, 2), 200).astype(second)
        own, out = np.matmul(a, b), route.matmul(a, b)
        assert out.dtype == own.dtype
        assert np.array_equal(out, own)


def test_booleans_are_refused_by_name_or_mean_what_numpy_says(kit, route):
    """B52: torch has no bool product, and says so as a TypeError; NumPy's is a logical or of ands."""
    a = kit.array([[True, False], [True, True]])
    if kit.name == "torch":
        with pytest.raises(TypeError, match="bool"):
            route.matmul(a, a)
        return
    out = route.matmul(a, a)
    assert np.array_equal(kit.host(out), kit.host(kit.room.matmul(a, a)))
    assert kit.dtype_of(out) == "bool"


def test_complex_products_keep_their_imaginary_part(kit, route):
    """B52 (pytorch/pytorch#138906): exact, conjugated views too, and mixed with real operands where that is allowed."""
    z = kit.array(np.array([[1 + 2j, 3j], [2, -1j]]), "complex64")
    wanted = np.array([[1 + 2j, 3j], [2, -1j]])
    assert np.array_equal(kit.host(route.matmul(z, z)), wanted @ wanted)
    conjugated = z.conj()
    assert np.array_equal(
        kit.host(route.matmul(conjugated, z).resolve_conj() if kit.name == "torch" else route.matmul(conjugated, z)),
        wanted.conj() @ wanted,
    )
    if kit.name != "torch":
        real = kit.array([[1.0, 2.0], [3.0, 4.0]], "float32")
        for a, b in ((real, z), (z, real)):
            assert np.array_equal(kit.host(route.matmul(a, b)), kit.host(kit.room.matmul(a, b)))


def test_dtypes_that_nobody_multiplies_raise_the_frameworks_error(kit, route):
    """Strings, records, dates, and torch's unequal pairs: the framework's own error, never ours from inside."""
    pairs = {
        "numpy": [np.array([["a"]]), np.zeros((2, 2), [("x", "f4")]), np.array([[1]], "M8[s]")],
        "torch": [kit.normal(2, 2)],
        "jax": [],
    }[kit.name]
    for x in pairs:
        y = kit.normal(2, 2, dtype="bfloat16") if kit.name == "torch" else x
        with pytest.raises(Exception) as own:  # noqa: PT011 - whatever the framework says
            kit.room.matmul(x, y)
        with pytest.raises(type(own.value)):
            route.matmul(x, y)


@pytest.mark.filterwarnings("ignore:.*quantize.*:DeprecationWarning", "ignore:.*quantize.*:UserWarning")
def test_quantized_torch_tensors_raise_torchs_error(route):
    """torch has no product for its quantized dtypes, whatever a plugin believes."""
    torch = pytest.importorskip("torch")
    q = torch.quantize_per_tensor(torch.ones(2, 2), 1.0, 0, torch.qint8)
    with pytest.raises(NotImplementedError):
        route.matmul(q, q)


def test_numpy_objects_and_long_doubles_multiply(route):
    """What np.matmul can do with its rarer dtypes, it does here."""
    for x in (np.array([[1, 2], [3, 4]], object), np.ones((2, 2), np.longdouble), np.ones((2, 2), np.clongdouble)):
        out, own = route.matmul(x, x), np.matmul(x, x)
        assert out.dtype == own.dtype
        assert (out == own).all()


@pytest.mark.parametrize("name", ["int4", "uint4", "float8_e3m4", "float8_e8m0fnu", "float4_e2m1fn"])
def test_rarer_ml_dtypes_are_as_natively(numpy_kit, route, name):
    """Whatever ml_dtypes and NumPy make of them, value and dtype."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    if not hasattr(ml_dtypes, name):
        pytest.skip(f"this ml_dtypes has no {name}")
    a = np.ones((2, 3)).astype(getattr(ml_dtypes, name))
    own, out = np.matmul(a, a.T), route.matmul(a, a.T)
    assert np.array_equal(out.astype(np.float64), own.astype(np.float64))


@pytest.mark.parametrize(("wide", "narrow"), [*zip(["bfloat16", "float16", "float32", "bfloat16"], FP8, strict=True)])
def test_raw_fp8_meets_a_wider_operand(kit, route, narrow, wide):
    """B50 (pytorch/pytorch#160651, jax-ml/jax#21211): either order, the result in the wider dtype."""
    a, b = kit.normal(8, 16, dtype=wide), kit.normal(16, 8, seed=1, dtype=narrow)
    for x, y in ((a, b), (b.T, a.T)):
        out = route.matmul(x, y)
        assert kit.dtype_of(out) == wide
        kit.close(x, y, out)


@pytest.mark.parametrize(("first", "second"), [*zip(FP8, FP8, strict=True), *itertools.pairwise(FP8)])
def test_two_raw_fp8_operands_give_bfloat16(kit, route, first, second):
    """B35 (modelscope/DiffSynth-Studio#1528), B50: fn and fnuz are told apart; every pair multiplies exactly."""
    a, b = kit.normal(8, 16, dtype=first), kit.normal(16, 8, dtype=second, seed=1)
    out = route.matmul(a, b)
    assert kit.dtype_of(out) == "bfloat16"
    kit.close(a, b, out)
    kit.close(a, b, route.matmul(a, b, out_dtype=kit.room.dtype("float32")), 4e-3)


@pytest.mark.parametrize("dtype", FP8)
def test_fp8_values_beyond_448_do_not_become_nan(kit, route, dtype):
    """B34 (jax-ml/jax#19011): a product above the format's own range is a bfloat16, not NaN."""
    a = kit.array(np.full((2, 64), 16.0), dtype)
    out = kit.wide(route.matmul(a, a.T))
    assert (out == 64 * 256).all()


def test_fn_and_fnuz_share_no_decision(kit):
    """B35: the same bytes in two formats are two problems; NumPy, torch and JAX alike."""
    decisions = [
        dispatch.explain(x, x.T, policy="native").problem
        for x in (kit.normal(4, 4, dtype="float8_e4m3fn"), kit.normal(4, 4, dtype="float8_e4m3fnuz"))
    ]
    assert decisions[0] != decisions[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float8_e4m3fn"])
@pytest.mark.parametrize("out", ["float64", "float32", "float16", "bfloat16"])
def test_out_dtype_is_kept_and_wide_ones_round_once(kit, route, dtype, out):
    """B59's keyword (pytorch/pytorch#159023): by name and by the framework's dtype; wider ones lose nothing."""
    if kit.name == "jax" and out == "float64":
        pytest.skip("without x64 JAX has no float64")
    a, b = kit.normal(8, 16, dtype=dtype), kit.normal(16, 8, dtype=dtype, seed=1)
    for spelled in (out, kit.room.dtype(out))[: 2 if dtype == "bfloat16" else 1]:
        found = route.matmul(a, b, out_dtype=spelled)
        assert kit.dtype_of(found) == out
        kit.close(a, b, found, {"float64": 1e-6, "float32": 4e-3}.get(out, 1e-2))


@pytest.mark.parametrize("bad", ["float7", "bloat16", 3, object()])
def test_an_out_dtype_that_does_not_exist_is_refused(kit, bad):
    """One TypeError that names it and the framework."""
    a = kit.normal(2, 2)
    with pytest.raises(TypeError, match="out_dtype"):
        dispatch.matmul(a, a, out_dtype=bad)


@pytest.mark.parametrize("thing", [[[1.0, 2.0]], 3.0, None, "ab", ((1.0,),), range(3)])
def test_what_is_no_array_is_refused_by_name(kit, thing):
    """Lists and scalars of Python are nobody's arrays: one TypeError that says which argument, on both sides."""
    a = kit.normal(2, 2)
    kit_matmul = dispatch.matmul
    kit_matmul(a, a)
    with pytest.raises(TypeError, match=r"^b is a "):
        kit_matmul(a, thing)
    with pytest.raises(TypeError, match=r"^a is a "):
        kit_matmul(thing, a)


@pytest.mark.parametrize("other", ["numpy", "torch", "jax"])
def test_two_frameworks_in_one_call_are_refused(kit, other):
    """One TypeError that names both, also after the same shapes are known in each framework."""
    if other == kit.name:
        pytest.skip("one framework")
    pytest.importorskip(other)
    room = dispatch.framework(other)
    a, b = kit.normal(2, 2), room.normal((2, 2), "float32", 0)
    for x in (a, b):
        dispatch.matmul(x, x)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(TypeError, match=rf"(?s)(?=.*{kit.name})(?=.*{other})"):
            dispatch.matmul(x, y)
    with pytest.raises(TypeError, match="bias"):
        dispatch.matmul(a, a, bias=b)
