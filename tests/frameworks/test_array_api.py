"""The array API standard's rules for matmul, as cases of our own, in each framework."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dispatch

FRAMEWORKS = ("numpy", "torch", "jax")
SHAPES = [
    # a, b, result: https://data-apis.org/array-api/latest/API_specification/generated/array_api.matmul.html
    ((3,), (3,), ()),
    ((3,), (3, 2), (2,)),
    ((4, 3), (3,), (4,)),
    ((4, 3), (3, 2), (4, 2)),
    ((1, 1), (1, 1), (1, 1)),
    ((5, 4, 3), (3, 2), (5, 4, 2)),
    ((4, 3), (5, 3, 2), (5, 4, 2)),
    ((5, 4, 3), (5, 3, 2), (5, 4, 2)),
    ((1, 4, 3), (5, 3, 2), (5, 4, 2)),
    ((6, 1, 4, 3), (5, 3, 2), (6, 5, 4, 2)),
    ((5, 4, 3), (3,), (5, 4)),
    ((3,), (5, 3, 2), (5, 2)),
    ((0, 3), (3, 2), (0, 2)),
    ((4, 0), (0, 2), (4, 2)),
    ((0,), (0,), ()),
    ((0, 4, 3), (3, 2), (0, 4, 2)),
]
MISMATCHED = [((3,), (4,)), ((4, 3), (4,)), ((3,), (4, 2)), ((4, 3), (4, 3)), ((2, 4, 3), (3, 3, 2)), ((0,), (1,))]
PROMOTED = [("float32", "float64"), ("int8", "int16"), ("int32", "int64"), ("uint8", "int8"), ("int32", "float32")]
ERRORS = (ValueError, TypeError, RuntimeError)


@pytest.fixture(params=FRAMEWORKS)
def xp(request: pytest.FixtureRequest) -> Any:
    """The framework's array namespace."""
    module = pytest.importorskip(request.param)
    return module.numpy if request.param == "jax" else module


def array(xp: Any, shape: tuple[int, ...], dtype: str = "float32", seed: int = 0) -> Any:
    values = np.random.default_rng(seed).integers(0, 4, shape).astype(dtype)
    return xp.asarray(values)


@pytest.mark.parametrize(("a", "b", "out"), SHAPES, ids=str)
def test_shapes_and_values(xp: Any, a: Any, b: Any, out: Any, serving: Any) -> None:
    x, y = array(xp, a, seed=1), array(xp, b, seed=2)
    with serving():
        found = dispatch.matmul(x, y)
    assert tuple(found.shape) == out
    assert found.dtype == x.dtype
    np.testing.assert_array_equal(np.asarray(found), np.matmul(np.asarray(x), np.asarray(y)))


@pytest.mark.parametrize(("a", "b"), MISMATCHED, ids=str)
def test_sizes_that_do_not_match_raise(xp: Any, a: Any, b: Any, serving: Any) -> None:
    with serving(), pytest.raises(ERRORS):
        dispatch.matmul(array(xp, a), array(xp, b))


@pytest.mark.parametrize(("a", "b"), [((), ()), ((), (3,)), ((3, 3), ())], ids=str)
def test_an_array_without_dimensions_raises(xp: Any, a: Any, b: Any, serving: Any) -> None:
    with serving(), pytest.raises(ERRORS):
        dispatch.matmul(array(xp, a), array(xp, b))


@pytest.mark.parametrize(("one", "other"), PROMOTED, ids=str)
def test_dtypes_promote_as_the_framework_promotes_them(xp: Any, one: str, other: str, serving: Any) -> None:
    x, y = array(xp, (2, 3), one), array(xp, (3, 2), other)
    try:
        wanted = xp.matmul(x, y)
    except RuntimeError:  # torch has none
        with serving(), pytest.raises(RuntimeError):
            dispatch.matmul(x, y)
    else:
        with serving():
            found = dispatch.matmul(x, y)
        assert found.dtype == wanted.dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "int32", "int64", "float32", "float64", "complex64"])
def test_numeric_dtypes_stay(xp: Any, dtype: str, serving: Any) -> None:
    x = array(xp, (3, 3), dtype)
    with serving():
        assert dispatch.matmul(x, x).dtype == x.dtype


def test_integers_wrap_as_the_frameworks_own(xp: Any, serving: Any) -> None:
    x = xp.asarray(np.full((2, 40), 100, np.int8))
    with serving():
        found = dispatch.matmul(x, x.T)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(xp.matmul(x, x.T)))
