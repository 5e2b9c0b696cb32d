"""From the array API's shapes for matmul to (*batch, m, k) by (*batch, k, n) and back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dispatch._backend import Plan

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Shapes:
    """The shapes that a plan sees for two operands, and the shape of the caller's result."""

    a: Shape
    b: Shape
    out: Shape

    @property
    def canonical_out(self) -> Shape:
        """The result's shape as the plan returns it: (*batch, m, n)."""
        return (*(_broadcast(self.a[:-2], self.b[:-2]) or ()), self.a[-2], self.b[-1])

    def canonical(self, operands: tuple[Any, ...], xp: Any) -> tuple[Any, ...]:
        """Return a, b and perhaps a bias in the shapes that a plan takes; operands that are no arrays stay."""
        a, b, *bias = operands
        given = ((a, self.a), (b, self.b))
        made = [x if tuple(x.shape) == shape else xp.reshape(x, shape) for x, shape in given]
        return (*made, *(self.bias(x, tuple(b.shape) == self.b, xp) for x in bias))

    def bias(self, bias: Any, matrix: bool, xp: Any) -> Any:
        """Return a bias that broadcasts to the canonical result; as it is where it is a vector of n or less."""
        if len(bias.shape) < 2 and matrix:
            return bias
        return xp.reshape(xp.broadcast_to(bias, self.out), self.canonical_out)

    def takes(self, bias: Shape) -> bool:
        """Return whether a bias of that shape broadcasts to the result and leaves its shape as it is."""
        return _broadcast(bias, self.out) == self.out

    @classmethod
    def of(cls, a: Shape, b: Shape, fold: bool = True) -> Shapes | None:
        """Return the shapes for operands of shape a and b, or None where they do not multiply.

        A vector becomes one row or one column. Where b is a matrix, the leading dimensions of a are folded into m
        (not with fold=False).
        """
        if not a or not b:
            return None
        rows, cols = (a if len(a) > 1 else (1, *a)), (b if len(b) > 1 else (*b, 1))
        batch = _broadcast(rows[:-2], cols[:-2])
        if rows[-1] != cols[-2] or batch is None:
            return None
        out = (*batch, *(rows[-2:-1] if len(a) > 1 else ()), *(cols[-1:] if len(b) > 1 else ()))
        if fold and len(cols) == 2 and len(rows) > 2:
            m = 1
            for size in rows[:-1]:
                m *= size
            rows = (m, rows[-1])
        return cls(rows, cols, out)


def _broadcast(one: Shape, other: Shape) -> Shape | None:
    rank = max(len(one), len(other))
    pairs = zip((1,) * (rank - len(one)) + one, (1,) * (rank - len(other)) + other, strict=True)
    out = []
    for x, y in pairs:
        if x != y and 1 not in (x, y):
            return None
        out.append(y if x == 1 else x)
    return tuple(out)


def reshaping(plan: Plan, a: Shape, b: Shape, shapes: Shapes, xp: Any) -> Plan:
    """Return `plan`, which takes `shapes`, for operands of the caller's shapes a and b."""
    canonical, out = shapes.canonical_out, shapes.out
    if (a, b, out) == (shapes.a, shapes.b, canonical):
        return plan
    reshape_a, reshape_b, reshape_out = a != shapes.a, b != shapes.b, out != canonical

    def reshaped(a: Any, b: Any, bias: Any = None) -> Any:
        x = xp.reshape(a, shapes.a) if reshape_a else a
        y = xp.reshape(b, shapes.b) if reshape_b else b
        z = plan(x, y) if bias is None else plan(x, y, shapes.bias(bias, not reshape_b, xp))
        z = xp.reshape(z, out) if reshape_out else z
        return z if out else z[()]  # of two vectors: a scalar in NumPy

    return reshaped
