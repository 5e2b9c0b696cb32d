"""The error of a result: the three metrics in the worst sampled row, and the rows that are sampled."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatch import Operand, Problem, framework
from dispatch.measuring import error
from dispatch.measuring.error import BATCHES, ROWS, compare, finite_fault, truth

NUMPY = framework("numpy")


def problem(m=8, n=4, k=16, dtype="float32", batch_a=(), batch_b=(), **changes):
    return Problem(
        m,
        n,
        k,
        Operand(dtype, batch_a),
        Operand(dtype, batch_b),
        changes.pop("out_dtype", dtype),
        "numpy",
        "cpu-x",
        **changes,
    )


def normal(*shape, seed=0, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def naive(found, reference):
    """Return the three metrics of the worst row, by their formulas in exact enough arithmetic."""

    def ratio(numerator, denominator):
        return 0.0 if numerator == 0 else math.inf if denominator == 0 else numerator / denominator

    worst = [0.0, 0.0, 0.0]
    for x, y in zip(found.astype(np.longdouble), reference.astype(np.longdouble), strict=True):
        d = ((x - y) ** 2).sum()
        row = [
            ratio(d, (x**2).sum() + (y**2).sum()),
            ratio(np.sqrt(d), np.sqrt((y**2).sum())),
            ratio(np.abs(x - y).max(initial=0), np.abs(y).max(initial=0)),
        ]
        worst = [max(a, float(b)) for a, b in zip(worst, row, strict=True)]
    return worst


def values(error):
    return [error.similarity_loss, error.relative_l2, error.max_abs_over_scale]


elements = st.sampled_from([0.0, 1.0, -1.0, 3.5, 1e-4, 1e4, -2.25, 1e-12])


@settings(max_examples=100, deadline=None)
@given(st.data(), st.integers(1, 5), st.integers(1, 5))
def test_the_metrics_are_their_formulas(data, rows, columns):
    size = rows * columns
    x, y = (
        np.array(data.draw(st.lists(elements, min_size=size, max_size=size))).reshape(rows, columns) for _ in range(2)
    )
    error = compare(x, y)
    assert values(error) == pytest.approx(naive(x, y), rel=1e-9)
    assert error.rows == rows


def test_the_worst_row_counts():
    y = normal(6, 8, dtype=np.float64)
    x = y.copy()
    x[4] *= 1.5
    assert values(compare(x, y)) == pytest.approx([0.25 / 3.25, 0.5, 0.5])
    x[4], x[2] = y[4], 0.0
    assert values(compare(x, y)) == pytest.approx([1.0, 1.0, 1.0])


def test_a_ruined_row_is_not_hidden_by_large_ones():
    y = normal(64, 32, dtype=np.float64) * np.logspace(-4, 4, 64)[:, None]
    x = y.copy()
    x[:8] = 0.0  # what one scale for all makes of the smallest
    whole = ((x - y) ** 2).sum() / ((x**2).sum() + (y**2).sum())
    assert whole < 1e-9
    assert compare(x, y).similarity_loss == 1.0


@pytest.mark.parametrize("scale", [1e-200, 1e-300, 1e200, 1.0])
def test_errors_do_not_depend_on_the_scale(scale):
    y = normal(4, 8, dtype=np.float64)
    assert values(compare(y * 1.01 * scale, y * scale)) == pytest.approx(values(compare(y * 1.01, y)), rel=1e-6)


def test_zero_against_zero_is_right_and_anything_else_is_not():
    zeros = np.zeros((2, 3))
    assert values(compare(zeros, zeros)) == [0.0, 0.0, 0.0]
    assert values(compare(zeros, zeros + 1e-30)) == pytest.approx([1.0, 1.0, 1.0])
    assert values(compare(zeros + 1e-30, zeros)) == [1.0, math.inf, math.inf]
    assert values(compare(np.zeros((0, 3)), np.zeros((0, 3)))) == [0.0, 0.0, 0.0]
    assert values(compare(np.zeros((3, 0)), np.zeros((3, 0)))) == [0.0, 0.0, 0.0]


INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    ("found", "reference", "baseline", "right"),
    [
        (INF, INF, INF, True),
        (-INF, -INF, None, True),
        (INF, -INF, INF, False),
        (INF, 1.0, INF, False),
        (1.0, INF, INF, False),
        (NAN, 1.0, 1.0, False),
        (NAN, 1.0, NAN, True),
        (NAN, INF, NAN, True),
        (NAN, INF, INF, False),
        (NAN, NAN, NAN, True),
        (1.0, NAN, NAN, False),
    ],
)
def test_what_is_not_finite(found, reference, baseline, right):
    x, y, b = (None if v is None else np.array([[1.0, v], [2.0, 3.0]]) for v in (found, reference, baseline))
    before = x.copy(), y.copy()
    assert values(compare(x, y, b)) == ([0.0] * 3 if right else [math.inf] * 3)
    np.testing.assert_array_equal((x, y), before)  # what was given is not written to


def test_beside_an_inf_the_rest_of_the_row_counts():
    error = compare(np.array([[INF, 1.1]]), np.array([[INF, 1.0]]))
    assert error.relative_l2 == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("found", "baseline", "fault"), [(1.0, 1.0, False), (INF, 1.0, True), (NAN, 1.0, True), (NAN, INF, False)]
)
def test_a_result_that_is_not_finite_where_the_baseline_is_is_a_fault(found, baseline, fault):
    assert finite_fault(np.array([[0.0, found]]), np.array([[0.0, baseline]])) is fault


# The reference


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_the_reference_is_the_product_in_float64_rounded_once(dtype):
    a, b = normal(8, 16, dtype=dtype), normal(16, 4, seed=1, dtype=dtype)
    found = truth(NUMPY, problem(dtype=dtype), a, b)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    np.testing.assert_array_equal(found.values, exact.astype(dtype).astype(np.float64))
    assert not found.degenerate
    rounding = {"float64": 0.0, "float32": 1e-7, "float16": 1e-3}[dtype]
    assert found.rounding.relative_l2 <= rounding
    assert (found.rounding.relative_l2 > 0) is (dtype != "float64")
    (index, rows), *rest = found.rows
    assert (index, rows.tolist(), rest) == ((), list(range(8)), [])


def test_bias_and_activation_are_in_it():
    a, b, bias = normal(8, 16), normal(16, 4, seed=1), normal(4, seed=2)
    found = truth(NUMPY, problem(bias="float32", activation="relu", out_dtype="float64"), a, b, bias)
    np.testing.assert_allclose(found.values, np.maximum(a.astype(np.float64) @ b + bias, 0), rtol=1e-5, atol=1e-6)


def test_integers_wrap_as_the_product_does():
    a, b = (np.random.default_rng(i).integers(-128, 128, (9, 9), np.int8) for i in range(2))
    found = truth(NUMPY, problem(9, 9, 9, dtype="int8"), a, b)
    np.testing.assert_array_equal(found.values, np.matmul(a, b).astype(np.float64))
    assert values(compare(found.sampled(NUMPY, np.matmul(a, b)), found.values)) == [0.0, 0.0, 0.0]


def test_an_overflow_of_the_out_dtype_is_inf_in_the_reference():
    a, b = np.full((4, 8), 200.0, np.float16) + normal(4, 8, dtype=np.float16), np.full((8, 4), 200.0, np.float16)
    found = truth(NUMPY, problem(4, 4, 8, dtype="float16"), a, b + normal(8, 4, dtype=np.float16))
    assert np.isposinf(found.values).all()


def test_the_rows_of_largest_and_smallest_maximum_are_always_sampled():
    for seed in range(5):
        a, b = normal(1000, 16, seed=seed), normal(16, 4)
        largest, smallest = seed * 7 + 3, 995 - seed * 11
        a[largest], a[smallest] = 1e4, 1e-4
        ((_, rows),) = truth(NUMPY, problem(1000), a, b).rows
        assert {largest, smallest} <= set(rows.tolist())
        assert len(rows) <= ROWS
        assert len(rows) > ROWS - 4
        assert len(set(rows.tolist())) == len(rows)


def test_the_same_rows_of_the_result_are_compared():
    a, b = normal(1000, 16), normal(16, 4)
    found = truth(NUMPY, problem(1000), a, b)
    out = a @ b
    np.testing.assert_array_equal(found.sampled(NUMPY, out), out[found.rows[0][1]].astype(np.float64))
    assert compare(found.sampled(NUMPY, out), found.values).relative_l2 < 1e-6
    ruined = out.copy()
    ruined[found.rows[0][1][5]] = 0
    assert compare(found.sampled(NUMPY, ruined), found.values).similarity_loss == 1.0


@pytest.mark.parametrize(
    ("batch_a", "batch_b"), [((7,), (7,)), ((7,), ()), ((), (7,)), ((3, 1), (1, 5)), ((3, 5), (5,))]
)
def test_entries_of_a_batch_are_sampled_the_first_and_the_last_among_them(batch_a, batch_b):
    spec = problem(50, 4, 16, batch_a=batch_a, batch_b=batch_b)
    a, b = normal(*batch_a, 50, 16), normal(*batch_b, 16, 4, seed=1)
    found = truth(NUMPY, spec, a, b)
    entries = [index for index, _ in found.rows]
    assert len(entries) == BATCHES
    assert entries[0] == (0,) * len(spec.batch)
    assert entries[-1] == tuple(size - 1 for size in spec.batch)
    assert sum(len(rows) for _, rows in found.rows) <= ROWS
    assert compare(found.sampled(NUMPY, a @ b), found.values).relative_l2 < 1e-6
    ruined = (a @ b).copy()
    ruined[entries[-1]] = 0
    assert compare(found.sampled(NUMPY, ruined), found.values).similarity_loss == 1.0


@pytest.mark.parametrize("m", [1, 3, 16])
def test_where_entries_of_a_batch_have_few_rows_more_of_them_are_sampled(m):
    batch = (10, 100)
    a, b = normal(*batch, m, 16), normal(100, 16, 4, seed=1)
    found = truth(NUMPY, problem(m, 4, 16, batch_a=batch, batch_b=(100,)), a, b)
    assert sum(len(rows) for _, rows in found.rows) >= ROWS
    assert len({index for index, _ in found.rows}) == len(found.rows) == -(-ROWS // m)
    assert compare(found.sampled(NUMPY, a @ b), found.values).relative_l2 < 1e-6


def test_not_where_they_have_large_right_operands(monkeypatch):
    monkeypatch.setattr(error, "VALUES", 16 * 4 * 10)
    a, b = normal(100, 1, 16), normal(100, 16, 4, seed=1)
    assert len(truth(NUMPY, problem(1, 4, 16, batch_a=(100,), batch_b=(100,)), a, b).rows) == 10


# What says nothing of other data


def changed(array, one):
    out = array.copy()
    out.flat[5] = one
    return out


A, B = normal(8, 16), normal(16, 4, seed=1)
DEGENERATE = {
    "zeros in a": (np.zeros_like(A), B),
    "zeros in b": (A, np.zeros_like(B)),
    "constant a": (np.full_like(A, 3.0), B),
    "constant b": (A, np.full_like(B, -2.0)),
    "an Inf": (changed(A, np.inf), B),
    "a NaN": (A, changed(B, np.nan)),
    "too large for the sum": (A * np.float32(1e38), B * np.float32(1e38)),
}


@pytest.mark.parametrize("name", DEGENERATE)
def test_constants_and_what_is_not_finite_are_degenerate(name):
    a, b = DEGENERATE[name]
    found = truth(NUMPY, problem(), a, b)
    assert found.degenerate is (name != "too large for the sum")  # of float64 it is not


def test_normal_data_is_not_degenerate():
    assert not truth(NUMPY, problem(), A, B).degenerate
    assert not truth(NUMPY, problem(1, 1, 1), A[:1, :1], B[:1, :1]).degenerate
    eye = np.eye(16, 4, dtype=np.float32)
    assert not truth(NUMPY, problem(), A, eye).degenerate


def test_a_tiny_row_beside_a_large_one_has_its_own_error():
    reference = np.array([[1.0, 2.0, 3.0], [1e-200, 2e-200, 3e-200]])
    found = reference * [[1.0], [2.0]]
    assert compare(found, reference).relative_l2 == pytest.approx(1.0)
    assert compare(found, reference).similarity_loss == pytest.approx(0.2)


def test_random_operands_are_not_one_another():
    room, spec = framework("numpy"), problem(16, 16, 16)
    a, b = room.sample(spec, np.ones((16, 16), np.float32), np.ones((16, 16), np.float32), 3)
    assert (a != b).mean() > 0.9


@pytest.mark.parametrize(("k", "n"), [(16, 4), (300, 200), (64, 3)])
def test_a_matrix_with_edges_of_zeros_is_not_degenerate(k, n):
    a, b = normal(8, k), normal(k, n, seed=1)
    for edge in (np.s_[:, :2], np.s_[:2], np.s_[:2, :2]):
        b[edge] = 0.0
        assert not truth(NUMPY, problem(8, n, k), a, b).degenerate
    b[:, :2] = b[:2] = 0.0
    assert not truth(NUMPY, problem(8, n, k), a, b).degenerate
    assert truth(NUMPY, problem(8, n, k), a, b * 0.0).degenerate


@pytest.mark.parametrize("place", [(1, 77), (77, 1), (18 * 3, 12 * 3)], ids=["a first row", "a first column", "within"])
def test_one_other_value_where_a_matrix_is_looked_at_is_enough(place):
    a, b = normal(8, 300), np.ones((300, 200), np.float32)
    b[place] = 2.0
    assert not truth(NUMPY, problem(8, 200, 300), a, b).degenerate


def test_one_entry_of_a_batch_that_is_constant_is_not_all():
    a, b = normal(2, 8, 16), normal(16, 4, seed=1)
    a[0] = 0.0
    spec = replace(problem(batch_a=(2,)))
    assert not truth(NUMPY, spec, a, b).degenerate
    assert truth(NUMPY, spec, a * 0, b).degenerate


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_errors_are_right_in_every_framework(name):
    module = pytest.importorskip("torch" if name == "torch" else "jax.numpy")
    room = framework(name)
    a, b = room.normal((200, 32), "float32", 0), room.normal((32, 16), "float32", 1)
    found = truth(room, replace(problem(200, 16, 32), framework=name), a, b)
    assert compare(found.sampled(room, module.matmul(a, b)), found.values).relative_l2 < 1e-6
    exact = room.to_numpy(a).astype(np.float64) @ room.to_numpy(b).astype(np.float64)
    np.testing.assert_allclose(found.values, exact[found.rows[0][1]], rtol=1e-6, atol=1e-6)
