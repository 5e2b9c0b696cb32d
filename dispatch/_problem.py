"""What is to be multiplied: shapes, dtypes, layouts and circumstances, never the values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

from dispatch._recipe import RecipePair, ScalingRecipe

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz")
FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16", *FP8_DTYPES)
MODES = ("traced", "captured", "differentiated")


@dataclass(frozen=True, slots=True)
class Operand:
    """One operand of a problem.

    dtype: the ml_dtypes name (`bfloat16`, `float8_e4m3fn` ...); of a ScaledArray, of what it decodes to.
    batch: its own leading dimensions. layout: `row` (last axis contiguous), `col` (second to last) or `strided`.
    alignment: bytes, up to 16, that divide the address and every other stride. recipe: set for a ScaledArray.
    prepared: it is a PreparedOperand, whose quantization costs nothing now.
    """

    dtype: str
    batch: tuple[int, ...] = ()
    layout: str = "row"
    alignment: int = 16
    recipe: ScalingRecipe | None = None
    prepared: bool = False

    @property
    def encoded(self) -> bool:
        """Whether it has to be decoded before the framework can multiply it."""
        return self.recipe is not None or self.dtype in FP8_DTYPES


@dataclass(frozen=True, slots=True)
class Problem:
    """One product, (*batch, m, k) by (*batch, k, n), with all that a choice may depend on.

    out_dtype, bias and epilogue name dtypes as Operand does. arch: `sm90`, `cpu-avx512` ... modes: the subset of
    `traced`, `captured` and `differentiated` that holds. recipe and accumulation are set in the copy that a backend
    is asked about: the candidate's own.
    """

    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out_dtype: str
    framework: str
    arch: str
    device: str = "cpu"
    bias: str | None = None
    activation: str | None = None
    modes: tuple[str, ...] = ()
    op: str = "matmul"
    recipe: RecipePair | None = None
    accumulation: str | None = None

    @property
    def batch(self) -> tuple[int, ...]:
        """The broadcast leading dimensions of the result."""
        rank = max(len(self.a.batch), len(self.b.batch))
        pad = [(1,) * (rank - len(x.batch)) + x.batch for x in (self.a, self.b)]
        return tuple(y if x == 1 else x for x, y in zip(*pad, strict=True))

    @property
    def empty(self) -> bool:
        """Whether a dimension is zero: nothing is multiplied."""
        return 0 in (self.m, self.n, self.k, *self.batch)

    @property
    def flops(self) -> int:
        """Multiplications and additions, 2 m n k a batch entry."""
        return 2 * self.m * self.n * self.k * math.prod(self.batch)

    @property
    def encoded(self) -> bool:
        """Whether an operand is a ScaledArray, or FP8 beside a float: the baseline multiplies what it decodes to."""
        pairs = (self.a, self.b), (self.b, self.a)
        return any(x.recipe is not None or (x.encoded and other.dtype in FLOAT_DTYPES) for x, other in pairs)

    def proposing(self, recipe: RecipePair | None, accumulation: str | None = None) -> Self:
        """Return the problem as one candidate sees it."""
        return replace(self, recipe=recipe, accumulation=accumulation)

    def __str__(self) -> str:
        dtypes = self.a.dtype if self.a.dtype == self.b.dtype else f"{self.a.dtype} x {self.b.dtype}"
        batch = f"batch={'x'.join(map(str, self.batch))}, " if self.batch else ""
        told = (("a", self.a), ("b", self.b))
        operands = [f"{x} {'prepared' if y.prepared else y.recipe}" for x, y in told if y.prepared or y.recipe]
        more = "".join(f", {x}" for x in (*operands, "bias" if self.bias else None, self.activation) if x)
        modes = "".join(f", {mode}" for mode in self.modes)
        return (
            f"{self.op}({batch}m={self.m}, n={self.n}, k={self.k}, {dtypes} -> {self.out_dtype}, "
            f"{self.a.layout}/{self.b.layout}{more}, {self.framework}, {self.arch}{modes})"
        )
