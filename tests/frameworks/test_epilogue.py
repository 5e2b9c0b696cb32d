"""Bias, activation and out_dtype against float64, by the framework's own product, a plan and cpu_blas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest

import dispatch
from dispatch import ACTIVATIONS

FRAMEWORKS = ("numpy", "torch", "jax")
EPSILON = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


class Route(NamedTuple):
    """What serves the products of one framework."""

    framework: str
    way: str

    @property
    def dtypes(self) -> tuple[str, ...]:
        """What it takes."""
        if self.way != "cpu_blas":
            return ("float32", "float16", "bfloat16", "float64")
        return ("float16",) if self.framework == "numpy" else ("float16", "bfloat16")

    def gives(self, out_dtype: str | None) -> bool:
        """Return whether it has that out_dtype."""
        narrow = ("float16", "float32", *(("bfloat16",) if self.framework == "torch" else ()))
        return self.way != "cpu_blas" or out_dtype in (None, *narrow)

    def matmul(self, *operands: Any, **arguments: Any) -> Any:
        """Return dispatch.matmul's result by this route."""
        if self.way == "cpu_blas":
            arguments["backend"] = "cpu_blas"
        return dispatch.matmul(*operands, **arguments)


SHAPES = [
    ((8,), (8, 5)),
    ((4, 8), (8,)),
    ((8,), (8,)),
    ((4, 8), (8, 5)),
    ((2, 3, 8), (8, 5)),
    ((2, 1, 4, 8), (3, 8, 5)),
]


def array(framework: str, values: Any, dtype: str) -> Any:
    """Return values rounded to `dtype` as an array of the framework."""
    host = np.asarray(values).astype(getattr(ml_dtypes, dtype, dtype))
    if framework == "numpy":
        return host
    room = dispatch.framework(framework)
    return room.asarray(host, room.normal((1,), "float32", 0))


def host(framework: str, x: Any) -> Any:
    return np.asarray(dispatch.framework(framework).to_numpy(x)).astype(np.float64)


def activated(x: Any, activation: str | None) -> Any:
    """Return the definition of each activation, in float64."""
    if activation is None:
        return x
    one = {
        "relu": lambda v: max(v, 0.0),
        "gelu": lambda v: 0.5 * v * (1 + math.erf(v / math.sqrt(2))),
        "gelu_tanh": lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))),
        "silu": lambda v: v / (1 + math.exp(-v)) if v > -700 else 0.0,
    }[activation]
    return np.vectorize(one, otypes=[np.float64])(x)


@contextmanager
def x64(framework: str, *dtypes: str) -> Iterator[None]:
    """Let JAX have float64 where a case needs it."""
    if framework == "jax" and "float64" in dtypes:
        import jax

        with jax.enable_x64(True):
            yield
    else:
        yield


ROUTES = [(framework, way) for framework in FRAMEWORKS for way in ("native", "winner")]
ROUTES += [("numpy", "cpu_blas"), ("torch", "cpu_blas")]  # it leaves JAX alone, which multiplies in float32 already


@pytest.fixture(params=ROUTES, ids="-".join)
def route(request: pytest.FixtureRequest, ways: dict[str, Any]) -> Iterator[Route]:
    """A framework and what has to serve its products."""
    framework, way = request.param
    pytest.importorskip(framework)
    with ways.get(way, ways["native"]):
        yield Route(framework, way)


def drawn(framework: str, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Return multiples of 1/4 up to 1: exact in every dtype, and so are sums of a few products of them."""
    return array(framework, np.random.default_rng(seed).integers(-4, 5, shape) / 4, dtype)


def out_shape(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
    return np.matmul(np.zeros(a), np.zeros(b)).shape


def bias_shapes(out: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Return every shape that broadcasts to `out`."""
    found: list[tuple[int, ...]] = []
    for rank in range(len(out) + 1):
        tail = out[len(out) - rank :]
        found += itertools.product(*((size, 1) for size in tail))
    return list(dict.fromkeys(found))


def combinations(route: Route) -> list[tuple[str, str | None, str | None, str | None]]:
    """Return dtype, dtype of the bias, activation, out_dtype: all; a sample where each has to be measured first."""
    dtypes = ("float32", "float16", "bfloat16", "float64")
    found = [
        *itertools.product(dtypes, (None, "same", "float32"), (None, *ACTIVATIONS), (None,)),
        *itertools.product(dtypes, (None, "same"), (None, "gelu"), dtypes),
    ]
    able = [x for x in found if x[0] in route.dtypes and route.gives(x[3])]
    return able if route.way != "winner" else able[:: 7 if route.framework == "jax" else 3]


def test_epilogue_is_float32_rounded_once(route: Route) -> None:
    """A result is off by one rounding of its dtype, beyond what float32 itself loses on the way.

    torch's own activation is of what its linear layer rounded, in the same dtype; none is steeper than 1.13.
    """
    framework = route.framework
    for dtype, bias_dtype, activation, out_dtype in combinations(route):
        bias_dtype, result = dtype if bias_dtype == "same" else bias_dtype, out_dtype or dtype
        with x64(framework, dtype, result):
            a, b = drawn(framework, (3, 8), dtype, 1), drawn(framework, (8, 5), dtype, 2)
            values = np.random.default_rng(3).standard_normal(5)  # as fine as the bias's dtype has them
            bias = None if bias_dtype is None else array(framework, values, bias_dtype)
            found = route.matmul(a, b, bias=bias, activation=activation, out_dtype=out_dtype)
            exact = host(framework, a) @ host(framework, b)
            exact = exact if bias is None else exact + host(framework, bias)
            rounded = framework == "torch" and activation is not None and dtype == bias_dtype == result
            before = 1.13 * EPSILON[dtype] / 2 * np.abs(exact) if rounded else 0.0
            exact = activated(exact, activation)
            assert dispatch.framework(framework).dtype_name(found) == result
            step = EPSILON[result] / 2 + 8 * EPSILON["float64" if dtype == "float64" else "float32"]
            case = f"{dtype} {bias_dtype} {activation} {out_dtype}"
            off = np.abs(host(framework, found) - exact)
            assert np.all(off <= step * np.abs(exact) + 2e-6 + before), (case, off.max())


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_every_bias_that_broadcasts_to_the_result(shapes: Any, route: Route) -> None:
    framework, dtype = route.framework, route.dtypes[0]
    a, b = (drawn(framework, shape, dtype, seed) for seed, shape in enumerate(shapes))
    for shape in bias_shapes(out_shape(*shapes)):
        bias = drawn(framework, shape, dtype, 5)
        found = route.matmul(a, b, bias=bias)
        wanted = host(framework, a) @ host(framework, b) + host(framework, bias)
        assert tuple(found.shape) == wanted.shape
        np.testing.assert_array_equal(host(framework, found), wanted, err_msg=str(shape))


def test_a_bias_that_does_not_broadcast_raises_and_condemns_nobody(route: Route) -> None:
    framework, dtype = route.framework, route.dtypes[0]
    a, b = drawn(framework, (3, 4), dtype, 0), drawn(framework, (4, 5), dtype, 1)
    for shape in ((4,), (2, 5), (1, 3, 5), (2, 3, 5)):
        with pytest.raises(ValueError, match=r"bias has shape .* broadcast to the result's, \(3, 5\)"):
            route.matmul(a, b, bias=drawn(framework, shape, dtype, 2))
    route.matmul(a, b, bias=drawn(framework, (5,), dtype, 2))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_nan_and_inf_pass_through(activation: str | None, route: Route) -> None:
    framework, dtype = route.framework, route.dtypes[0]
    a = array(framework, [[math.nan, 1.0], [math.inf, 1.0], [-math.inf, 1.0], [1.0, 2.0]], dtype)
    b = array(framework, [[1.0], [1.0]], dtype)
    found = host(framework, route.matmul(a, b, activation=activation))[:, 0]
    np.testing.assert_array_equal(found[:2], [math.nan, math.inf])
    if activation in (None, "relu"):
        assert found[2] == (-math.inf if activation is None else 0.0)
    else:  # a limit of 0, but -Inf * 0 on the way
        assert math.isnan(found[2]) or found[2] == 0.0
    assert math.isfinite(found[3])


def test_an_unknown_activation_or_out_dtype_says_what_is_allowed(route: Route) -> None:
    a = drawn(route.framework, (2, 2), "float16", 0)
    with pytest.raises(ValueError, match=r"'tanh'.*relu, gelu, gelu_tanh, silu"):
        route.matmul(a, a, activation="tanh")
    for wrong in ("float23", object(), 7):
        with pytest.raises(TypeError, match="out_dtype"):
            route.matmul(a, a, out_dtype=wrong)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_zero_sizes_give_zeros_and_the_epilogue(framework: str, serving: Any) -> None:
    pytest.importorskip(framework)
    before = dispatch.stats()["measured"]
    bias = array(framework, [-1.0, 2.0], "float32")

    def zeros(*shape: int) -> Any:
        return drawn(framework, shape, "float32", 0)

    with serving():
        np.testing.assert_array_equal(host(framework, dispatch.matmul(zeros(3, 0), zeros(0, 2))), np.zeros((3, 2)))
        found = dispatch.matmul(zeros(3, 0), zeros(0, 2), bias=bias, activation="relu", out_dtype="bfloat16")
        assert dispatch.framework(framework).dtype_name(found) == "bfloat16"
        np.testing.assert_array_equal(host(framework, found), [[0.0, 2.0]] * 3)
        assert tuple(dispatch.matmul(zeros(0, 4), zeros(4, 0)).shape) == (0, 0)
        assert tuple(dispatch.matmul(zeros(0, 3, 4), zeros(4, 2), bias=bias).shape) == (0, 3, 2)
    assert dispatch.stats()["measured"] == before


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_a_complex_bias_belongs_to_a_complex_product(framework: str) -> None:
    pytest.importorskip(framework)
    room = dispatch.framework(framework)
    like = room.normal((1,), "float32", 0)
    a, b = (room.asarray(np.ones(shape, np.float32), like) for shape in ((3, 4), (4, 2)))
    bias = room.asarray(np.full(2, 1 + 2j, np.complex64), like)
    with pytest.raises(TypeError, match="bias is complex64 and the product of float32 and float32: it has to be real"):
        dispatch.matmul(a, b, bias=bias)
    found = dispatch.matmul(room.cast(a, "complex64"), room.cast(b, "complex64"), bias=bias)
    np.testing.assert_allclose(room.to_numpy(found), np.full((3, 2), 5 + 2j))
