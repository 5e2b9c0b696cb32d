"""Odd, tiny, empty and broadcast shapes, by every route and in every framework."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch

TINY = [(1, 256, 64), (64, 256, 1), (64, 1, 64), (1, 1, 1), (1, 256, 1), (2, 4, 8), (17, 15, 16), (33, 31, 65)]
EMPTY = [
    ((0, 64), (64, 8)),
    ((8, 64), (64, 0)),
    ((8, 0), (0, 4)),
    ((0, 8, 64), (0, 64, 8)),
    ((5, 0, 7), (5, 7, 9)),
    ((0, 3, 4), (4, 2)),
    ((3, 4), (0, 4, 2)),
    ((0,), (0,)),
    ((3, 0), (0,)),
    ((0,), (0, 3)),
]
RANKS = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((3, 5), (5,)),
    ((2, 3, 5), (5,)),
    ((5,), (2, 5, 3)),
    ((2, 3, 5), (5, 4)),
    ((3, 5), (2, 5, 4)),
    ((2, 1, 3, 5), (4, 5, 2)),
    ((1, 1, 3, 5), (5, 1)),
]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(("m", "k", "n"), TINY)
def test_any_size_is_right(kit, route, m, k, n, dtype):
    """B02 (pytorch/ao#3111), B04 (triton-lang/triton#934), B13 (jax-ml/jax#19350): one row, column or k, and tiny."""
    a, b = kit.normal(m, k, dtype=dtype), kit.normal(k, n, dtype=dtype, seed=1)
    for _ in range(2):  # unknown, then known
        out = route.matmul(a, b)
        assert kit.dtype_of(out) == dtype
        kit.close(a, b, out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("k", [31, 130, 511])
def test_nothing_beyond_k_is_read(kit, route, k, dtype):
    """B05 (triton-lang/triton#630), B16's k=511 (triton-lang/triton#10927): a tail beyond the view is large."""
    m, n = 33, 17
    wide_a, wide_b = np.full((m, k + 8), 3e4), np.full((k + 8, n), 3e4)
    wide_a[:, :k] = np.random.default_rng(0).standard_normal((m, k))
    wide_b[:k] = np.random.default_rng(1).standard_normal((k, n))
    a, b = kit.array(wide_a, dtype)[:, :k], kit.array(wide_b, dtype)[:k]
    kit.close(a, b, route.matmul(a, b))


@pytest.mark.parametrize("n", [16, 576, 129])
def test_columns_that_a_kernel_refuses_are_served(kit, route, n):
    """B10 (vllm-project/vllm#48586): n=16, DeepSeek's 576, and one beyond a tile."""
    a, b = kit.normal(32, 128, dtype="bfloat16"), kit.normal(128, n, dtype="bfloat16", seed=1)
    kit.close(a, b, route.matmul(a, b))


@pytest.mark.parametrize(("with_bias", "dtype"), [(False, "bfloat16"), (True, "float16")])
@pytest.mark.parametrize("shapes", EMPTY, ids=str)
def test_nothing_to_multiply_gives_zeros_and_the_bias(kit, route, shapes, dtype, with_bias):
    """B07 (triton-lang/triton#10427, pytorch/pytorch#140967): zero sizes are right, not measured, not stored."""
    a, b = (kit.array(np.zeros(shape), dtype) for shape in shapes)
    want = np.zeros(shapes[0]) @ np.zeros(shapes[1])
    bias = kit.array(np.full(want.shape[-1:], 1.5), "float32") if with_bias else None
    before = dispatch.stats()["measured"]
    for _ in range(2):
        out = route.matmul(a, b, bias=bias)
        assert tuple(out.shape) == want.shape
        assert kit.dtype_of(out) == dtype
        assert (kit.wide(out) == (1.5 if with_bias else 0.0)).all()
    assert dispatch.stats()["measured"] == before
    assert dispatch.stored() == []


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shapes", RANKS, ids=str)
def test_every_rank_is_served_alike(kit, route, shapes, dtype):
    """B58's ranks (NVIDIA/cuEquivariance#223): shape, dtype and type of a result do not depend on who serves."""
    a, b = kit.normal(*shapes[0], dtype=dtype), kit.normal(*shapes[1], dtype=dtype, seed=1)
    own = kit.room.matmul(a, b)
    for _ in range(2):
        out = route.matmul(a, b)
        assert type(out) is type(own) or (dtype == "bfloat16" and kit.name == "numpy")
        assert tuple(out.shape) == tuple(own.shape)
        assert kit.dtype_of(out) == dtype
        kit.close(a, b, out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_two_numpy_vectors_give_a_scalar(numpy_kit, route, dtype):
    """As np.matmul does, whoever serves; and a scalar is refused as an operand as NumPy refuses it."""
    a = numpy_kit.normal(9, dtype=dtype)
    out = route.matmul(a, a)
    assert isinstance(out, np.generic)
    with pytest.raises(ValueError, match="enough dimensions"):
        route.matmul(out, a)
    with pytest.raises(ValueError, match="enough dimensions"):
        route.matmul(np.ones((), dtype=np.float32), a)


@pytest.mark.parametrize("shapes", [((3, 4), (5, 2)), ((2, 3, 4), (3, 4, 2)), ((4,), (5,)), ((), (3,))], ids=str)
def test_shapes_that_do_not_multiply_raise_the_frameworks_error(kit, route, shapes):
    """A call that the framework refuses is refused with the framework's own type, by matmul and explain alike."""
    a, b = (kit.array(np.ones(shape), "float32") for shape in shapes)
    with pytest.raises(Exception) as own:  # noqa: PT011 - whatever the framework says
        kit.room.matmul(a, b)
    for ask in (route.matmul, dispatch.explain):
        with pytest.raises(type(own.value)):
            ask(a, b)


@pytest.mark.parametrize("dtype", ["bfloat16"])
@pytest.mark.parametrize("shape", [(4,), (1,), (), (1, 4), (3, 1), (3, 4), (1, 1)], ids=str)
def test_a_bias_that_broadcasts_is_added(kit, route, shape, dtype):
    """B46 (pytorch/pytorch#190538): (n,), (1, n), a column, a scalar and a full bias, once each."""
    a, b = (kit.array(np.random.default_rng(i).integers(-3, 4, s), dtype) for i, s in ((0, (3, 5)), (1, (5, 4))))
    bias = kit.array(np.arange(np.prod(shape, dtype=int)).reshape(shape) + 0.5, "float32")
    out = route.matmul(a, b, bias=bias)
    assert kit.dtype_of(out) == dtype
    assert np.array_equal(kit.wide(out), kit.product(a, b) + kit.wide(bias))


@pytest.mark.parametrize("operands", [((5,), (5, 4), (4,)), ((3, 5), (5,), (3,)), ((5,), (5,), ()), ((5,), (5,), (1,))])
def test_a_bias_meets_a_vectors_result(kit, route, operands):
    """A bias broadcasts to the caller's result, not to the matrix that a plan sees; larger than it, it is refused."""
    left, right, shape = operands
    a, b = kit.array(np.ones(left), "bfloat16"), kit.array(np.full(right, 2.0), "bfloat16")
    bias = kit.array(np.arange(int(np.prod(shape))).reshape(shape) + 1.0, "float32")
    if len(shape) > max(len(left) + len(right) - 2, 0):
        with pytest.raises(ValueError, match="broadcast to the result"):
            route.matmul(a, b, bias=bias)
        return
    assert np.array_equal(kit.wide(route.matmul(a, b, bias=bias)), kit.product(a, b) + kit.wide(bias))


@pytest.mark.parametrize("shape", [(5,), (2, 1, 1), (2, 3, 4), (4, 3), (1, 3, 4)], ids=str)
def test_a_bias_larger_than_the_result_is_refused(kit, route, shape):
    """One that would change the result's shape is a mistake: the message says both shapes."""
    a, b = kit.normal(3, 5, dtype="bfloat16"), kit.normal(5, 4, dtype="bfloat16")
    with pytest.raises(ValueError, match=r"bias has shape .* result's, \(3, 4\)"):
        route.matmul(a, b, bias=kit.array(np.ones(shape), "float32"))


def test_a_bias_of_another_type_is_not_taken_for_none(numpy_kit):
    """np.matmul(a, b, x) writes into x: a bias that only the framework understands never lands there."""
    a, b = numpy_kit.normal(3, 5), numpy_kit.normal(5, 4)
    assert dispatch.matmul(a, b, scope="x").shape == (3, 4)
    bias = np.ma.masked_array(np.full((3, 4), 2.0), mask=False)
    out = dispatch.matmul(a, b, bias=bias, scope="x")
    assert np.allclose(np.asarray(out), a @ b + 2.0, rtol=1e-6)
    assert (bias.data == 2.0).all()
    assert np.allclose(dispatch.matmul(a, b, bias=np.float32(3.0)), a @ b + 3.0, rtol=1e-6)
