"""Scaling recipes: how one operand is quantized, and the pair that a product uses."""

from __future__ import annotations

import re
from dataclasses import dataclass

FORMATS = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}
GRANULARITIES = ("tensor", "row", "1x128", "128x128", "64x64", "32x32", "1x32")
SCALE_DTYPES = ("float32", "e8m0")


@dataclass(frozen=True, slots=True)
class ScalingRecipe:
    """How one operand is quantized: `dtype:granularity[:scale_dtype]`, say `e4m3:row`.

    dtype: `e4m3` or `e5m2` (the finite OCP formats). granularity: which values share a scale: `tensor`, `row` (all
    of k for one row of a or one column of b) or a block `RxC`, C along k. scale_dtype: `float32`, or `e8m0` (a power
    of two; with `1x32` the OCP microscaling format MX). Raises ValueError for anything else.
    """

    dtype: str
    granularity: str
    scale_dtype: str = "float32"

    def __post_init__(self) -> None:
        for field, allowed in (("dtype", FORMATS), ("granularity", GRANULARITIES), ("scale_dtype", SCALE_DTYPES)):
            value = getattr(self, field)
            if value not in allowed:
                raise ValueError(f"scaling recipe: {field} {value!r} is unknown; allowed: {', '.join(allowed)}")

    @classmethod
    def parse(cls, text: str | ScalingRecipe) -> ScalingRecipe:
        """Return the recipe that `text` names; a recipe is returned as it is."""
        if isinstance(text, ScalingRecipe):
            return text
        if not isinstance(text, str) or not 2 <= len(parts := text.split(":")) <= 3:
            raise ValueError(
                f"{text!r} is not a scaling recipe; write dtype:granularity or dtype:granularity:scale_dtype, "
                "for example 'e4m3:row' or 'e4m3:1x32:e8m0'"
            )
        return cls(*parts)

    @property
    def storage_dtype(self) -> str:
        """The dtype that quantized values are stored in, under its ml_dtypes name."""
        return FORMATS[self.dtype]

    def block(self, rows: int, cols: int) -> tuple[int, int]:
        """Return the extents (rows, columns) of the values that share a scale, for k along the columns."""
        if self.granularity == "tensor":
            return max(rows, 1), max(cols, 1)
        if self.granularity == "row":
            return 1, max(cols, 1)
        height, width = self.granularity.split("x")
        return int(height), int(width)

    def __str__(self) -> str:
        tail = "" if self.scale_dtype == "float32" else f":{self.scale_dtype}"
        return f"{self.dtype}:{self.granularity}{tail}"


@dataclass(frozen=True, slots=True)
class RecipePair:
    """The recipes of a and b in one product: `e4m3:row` for both, or `e4m3:1x128@e4m3:128x128`."""

    a: ScalingRecipe
    b: ScalingRecipe

    @classmethod
    def parse(cls, text: str | RecipePair) -> RecipePair:
        """Return the pair that `text` names; one recipe stands for both operands."""
        if isinstance(text, RecipePair):
            return text
        parts = re.split("@", text) if isinstance(text, str) else [text]
        if len(parts) > 2:
            raise ValueError(f"{text!r} is not a pair of scaling recipes; write one recipe or a@b")
        return cls(ScalingRecipe.parse(parts[0]), ScalingRecipe.parse(parts[-1]))

    def __str__(self) -> str:
        return str(self.a) if self.a == self.b else f"{self.a}@{self.b}"
