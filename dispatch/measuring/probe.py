"""Whether a result is outside the tolerance, at the cost of a few passes over memory: probes, and a second look.

C X against A (B X) for random signs X, a (n, VECTORS) matrix: the square of a row of C X - A (B X), averaged over the
vectors, has as its mean the squared error of that row of C (Freivalds' check with magnitudes). Where estimates are
beyond SUSPICION of the tolerance, more vectors say which of those rows are beyond DOUBT of it; these are multiplied in
float64, so that no result is refused by an estimate alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch._problem import Problem
from dispatch.frameworks.operands import all_stated
from dispatch.measuring.error import Float64, Rows, compare
from dispatch.measuring.session import Baseline, Operands

if TYPE_CHECKING:
    from dispatch.frameworks import Framework

VECTORS, MORE_VECTORS = 32, 128
SUSPICION, DOUBT = 0.25, 0.5
"""Shares of the allowed squared error, as estimated by few and by more vectors, from which a row is looked at again."""
LOOKED_AT = 64
"""Rows that are looked at again at once, the largest estimates first."""
ESTIMATED = ("similarity_loss", "relative_l2")
"""Metrics that the probes estimate: the other is about single elements."""


def beyond(
    room: Framework, problem: Problem, out: Any, operands: Operands, metric: str, limit: float, seed: int
) -> float | None:
    """Return an error beyond `limit` by `metric` that was found, or None if there is none.

    out: (*batch, m, n), the result for operands a (*batch, m, k), b (*batch, k, n) and perhaps a bias, of arrays,
    ScaledArrays or PreparedOperands; no activation. metric: one of ESTIMATED. seed: of the signs, another in each call.
    """
    base = Baseline(room, problem, all_stated(room, operands, problem))
    allowed = limit * limit if metric == "relative_l2" else limit
    squares = estimates(base, out, 2 * seed, metric)
    suspects = np.flatnonzero(squares > SUSPICION * allowed)
    if len(suspects):
        squares = estimates(base, out, 2 * seed + 1, metric, MORE_VECTORS)
        suspects = suspects[squares[suspects] > DOUBT * allowed]
        suspects = suspects[np.argsort(-squares[suspects])]
    for start in range(0, len(suspects), LOOKED_AT):
        reference = base.truth(_rows(suspects[start : start + LOOKED_AT], base.problem))
        error = compare(reference.sampled(room, out), reference.values).value(metric)
        if error > limit:
            return error
    return None


def estimates(base: Baseline, out: Any, seed: int, metric: str, vectors: int = VECTORS) -> Float64:
    """Return the estimated similarity_loss, or the square of relative_l2, of every row of a result, flattened.

    Inf where there is none: the probes are not finite.
    """
    room, problem = base.room, base.problem
    dtypes = {problem.a.dtype, problem.b.dtype}
    dtype = "float64" if "float64" in dtypes or ("float32" in dtypes and room.name != "jax") else "float32"

    def cast(x: Any) -> Any:
        return room.cast(x, dtype)

    matmul, (a, b), bias = room.xp.matmul, base.exact, base.operands[2:]
    signs = cast(room.xp.sign(room.normal((problem.n, vectors), "float32", seed, room.device(out))))
    found, wanted = matmul(cast(out), signs), matmul(cast(a), matmul(cast(b), signs))
    x, y = (room.to_numpy(values).astype(np.float64) for values in (found, wanted))
    for extra in bias:
        y = y + room.to_numpy(_probed(room, cast(extra), signs)).astype(np.float64)
    with np.errstate(all="ignore"):
        size = np.maximum(np.abs(x).max(-1, keepdims=True), np.abs(y).max(-1, keepdims=True))
        size[size == 0.0] = 1.0
        x, y = x / size, y / size  # squares of 1e-200 would be 0
        difference, own = np.square(x - y).sum(-1), np.square(y).sum(-1)
        scale = own if metric == "relative_l2" else own + np.square(x).sum(-1)
        squares = np.asarray(np.where(difference == 0.0, 0.0, difference / scale)).reshape(-1)
        return np.where(np.isnan(squares), np.inf, squares)


def _probed(room: Framework, bias: Any, signs: Any) -> Any:
    """Return a bias, broadcast along n, times the signs."""
    n = signs.shape[0]
    last = tuple(bias.shape[:-1]) if len(bias.shape) else ()
    return room.xp.matmul(room.xp.broadcast_to(bias, (*last, n)), signs)


def _rows(flat: Any, problem: Problem) -> Rows:
    """Return rows of a flattened result as indices of batch entries, and for each which rows."""
    entries, rows = np.divmod(np.sort(flat), problem.m)
    shape = problem.batch or (1,)
    found = []
    for entry in np.unique(entries):
        index = tuple(int(i) for i in np.unravel_index(entry, shape)) if problem.batch else ()
        found.append((index, rows[entries == entry].astype(np.int64)))
    return tuple(found)
