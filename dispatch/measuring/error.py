"""How wrong: outputs against a product in higher precision, row by row, the worst sampled row counts."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dispatch._measurement import Error
from dispatch._problem import Problem
from dispatch.frameworks import framework
from dispatch.frameworks._epilogue import activate

if TYPE_CHECKING:
    from dispatch.frameworks import Framework

Float64 = NDArray[np.float64]
ROWS = 64  # sampled in all
BATCHES = 4  # entries of a batch that they are taken from, where these have rows enough
VALUES = 1 << 27  # of b, that more entries may have
Rows = tuple[tuple[tuple[int, ...], NDArray[np.int64]], ...]
"""Rows of a result: indices of batch entries, and for each which rows."""


@dataclass(frozen=True, slots=True)
class Truth:
    """The reference for some rows of one problem's result.

    rows: for each sampled batch entry its index and the rows. values: float64 (sum of rows, n), rounded to out_dtype.
    rounding: what that rounding alone costs.
    degenerate: the operands are constant or hold NaN or Inf, so that they say nothing of other data.
    """

    rows: Rows
    values: Float64
    rounding: Error
    degenerate: bool

    def sampled(self, room: Framework, out: Any) -> Float64:
        """Return the same rows of a result (*batch, m, n) in float64 on the host."""
        parts = [room.to_numpy(out[index][room.asarray(rows, out)]) for index, rows in self.rows]
        with np.errstate(all="ignore"):
            return np.concatenate([part.astype(np.float64) for part in parts])


def truth(room: Framework, problem: Problem, a: Any, b: Any, bias: Any = None, asked: Rows | None = None) -> Truth:
    """Return the reference for some rows of a (*batch, m, k) by b (*batch, k, n), both decoded.

    asked: which; else sampled ones, and always among them, for each sampled batch entry, the rows of a with the largest
    and the smallest maximum.
    """
    rows, parts, flat = [], [], True
    extra = _bias_rows(room, problem, bias)
    entries = _batch_entries(problem)
    each = -(-ROWS // len(entries))
    sampled = ((x, _choose_rows(room, a[_own(x, a)], each)) for x in entries)
    for index, chosen in asked or sampled:
        left, right = a[_own(index, a)], b[_own(index, b)]
        a_rows = left[room.asarray(chosen, left)]
        product = room.reference(a_rows, right)
        with np.errstate(all="ignore"):
            parts.append(product if extra is None else product + extra(index, chosen))
        rows.append((index, chosen))
        flat = flat and (_constant(room, a_rows) or _flat(room, right))
    exact = activate(np.concatenate(parts), problem.activation)
    values = _round(exact, problem.out_dtype)
    degenerate = bool(flat) or not np.isfinite(exact).all()
    return Truth(tuple(rows), values, compare(exact, values, exact), degenerate)


def compare(found: Float64, reference: Float64, baseline: Float64 | None = None) -> Error:
    """Return the worst row's error of `found` (r, n) by the three metrics of docs/accuracy.md.

    similarity_loss = |x-y|^2 / (|x|^2 + |y|^2); relative_l2 = |x-y| / |y|; max_abs_over_scale = max|x-y| / max|y|;
    0/0 = 0. An Inf that equals the reference's is no error, nor a NaN where the baseline has one; any other value that
    is not finite where the reference is, or the reverse, makes all three Inf.
    """
    x, y = found.copy(), reference.copy()
    excused = np.isinf(x) & (x == y)
    if baseline is not None:
        excused |= np.isnan(x) & np.isnan(baseline)
    x[excused] = y[excused] = 0.0
    y[np.isnan(y) & np.isnan(x)] = 0.0  # the reference itself has NaN there
    x[np.isnan(x) & np.isnan(reference)] = 0.0
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return Error(np.inf, np.inf, np.inf, len(x))
    size = np.maximum(np.abs(x).max(1, initial=0.0), np.abs(y).max(1, initial=0.0))
    size[size == 0.0] = 1.0
    x, y = x / size[:, None], y / size[:, None]  # squares of 1e-200 would be 0
    difference, own, other = ((x - y) ** 2).sum(1), (y**2).sum(1), (x**2).sum(1)
    return Error(
        similarity_loss=_worst(difference, own + other),
        relative_l2=float(np.sqrt(_worst(difference, own))),
        max_abs_over_scale=_worst(np.abs(x - y).max(1, initial=0.0), np.abs(y).max(1, initial=0.0)),
        rows=len(x),
    )


def finite_fault(found: Float64, baseline: Float64) -> bool:
    """Return whether a result is not finite where the baseline is."""
    return bool((~np.isfinite(found) & np.isfinite(baseline)).any())


def _worst(numerator: Float64, denominator: Float64) -> float:
    with np.errstate(all="ignore"):
        ratio = np.where(numerator == 0.0, 0.0, numerator / denominator)
    return float(ratio.max(initial=0.0))


def _batch_entries(problem: Problem) -> list[tuple[int, ...]]:
    """Return entries of the batch, the first and the last among them: as many as have ROWS rows, if b is not too large.

    Each has to be converted to float64, with all of its b.
    """
    if not problem.batch:
        return [()]
    count = math.prod(problem.batch)
    wanted = max(BATCHES, min(-(-ROWS // max(1, problem.m)), VALUES // max(1, problem.k * problem.n)))
    inner = np.random.default_rng(count).permutation(np.arange(1, count - 1))[: wanted - 2]
    flat = np.unique(np.concatenate([[0, count - 1], inner]))
    return [tuple(int(i) for i in np.unravel_index(at, problem.batch)) for at in flat]


def _own(index: tuple[int, ...], operand: Any) -> tuple[int, ...]:
    """Return the entry of a broadcast operand's own batch that serves `index`."""
    sizes = operand.shape[:-2]
    return tuple(0 if size == 1 else i for i, size in zip(index[len(index) - len(sizes) :], sizes, strict=True))


def _choose_rows(room: Framework, a: Any, count: int) -> NDArray[np.int64]:
    """Return `count` rows at most, those of the largest and smallest maximum among them."""
    m = a.shape[0]
    if m <= count:
        return np.arange(m)
    xp = room.xp
    peaks = room.to_numpy(xp.amax(xp.abs(a if a.dtype.itemsize > 1 else room.cast(a, "float32")), axis=-1))
    peaks = np.nan_to_num(peaks.astype(np.float64), posinf=np.inf)
    rest = np.random.default_rng(m).choice(m, count, replace=False)
    return np.unique(np.concatenate([[peaks.argmax(), peaks.argmin()], rest[: count - 2]])).astype(np.int64)


def _constant(room: Framework, values: Any) -> bool:
    host = room.to_numpy(values)
    return bool((host == host.flat[0]).all()) if host.size > 1 else False


def _flat(room: Framework, b: Any) -> bool:
    """Return whether b is constant in its first rows and columns and wherever else it is looked at."""
    down, across = (max(1, size // 16) for size in b.shape)
    return all(_constant(room, part) for part in (b[:, :2], b[:2], b[::down, ::across]))


def _bias_rows(room: Framework, problem: Problem, bias: Any) -> Any:
    if bias is None:
        return None
    host = room.to_numpy(bias).astype(np.float64)
    full = np.broadcast_to(host, (*problem.batch, problem.m, problem.n))
    return lambda index, rows: full[index][rows]


def _round(values: Float64, dtype: str) -> Float64:
    numpy = framework("numpy")
    if numpy.dtype(dtype).kind in "iu":  # an integer product wraps
        return values.astype(np.int64).astype(dtype).astype(np.float64)
    return np.asarray(numpy.cast(values, dtype)).astype(np.float64)
