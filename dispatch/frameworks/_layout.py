"""Layout and alignment of an operand, from shape and strides."""

from __future__ import annotations

from collections.abc import Sequence

WIDEST = 16  # bytes: what vector loads and TMA ask for; more would tell allocations apart, not problems


def layout_of(shape: Sequence[int], strides: Sequence[int], itemsize: int, address: int) -> tuple[str, int]:
    """Return (layout, alignment in bytes) of a (..., rows, columns) array with strides in bytes.

    Strides of dimensions of size 1 say nothing and are not looked at. `row`: unit stride along columns; `col`: along
    rows; a matrix that is both is `row`.
    """
    rows, cols = shape[-2:]
    down, across = strides[-2:]
    if cols == 1 or across == itemsize:
        layout, others = "row", [*strides[:-2], down]
    elif rows == 1 or down == itemsize:
        layout, others = "col", [*strides[:-2], across]
    else:
        layout, others = "strided", list(strides)
    sizes = [*shape[:-2], rows if layout == "row" else cols] if layout != "strided" else list(shape)
    whole = [abs(stride) for size, stride in zip(sizes, others, strict=True) if size > 1]
    alignment = WIDEST
    for value in (address, *whole):
        while value % alignment:
            alignment //= 2
    return layout, alignment
