"""Quantize in Triton and compare with float64: shared by the interpreter's run and the GPU's.

As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object: a list of complaints for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from dispatch.kernels import triton_quantize, triton_quantize_columns, triton_quantize_many

FORMATS = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
POISON = 3e4  # in the source's parent, beside the view that is quantized
ROUTES = ("rows", "columns", "columns_two_launches", "tensor", "tensor_transposed", "many", "many_transposed")
TRANSPOSED = ("columns", "columns_two_launches", "many_transposed")
MANY_LIMITS = {"many": triton_quantize_many.ROW_LIMIT, "many_transposed": triton_quantize_columns.WHOLE_COLUMN}
"""The longest row of an output that these routes take."""


def source(rows: int, cols: int, values: torch.Tensor, *, gap: int = 0) -> torch.Tensor:
    """Return `values` (rows, cols) as a view with inner stride 1 in a wider parent of poison."""
    parent = torch.full((rows + 1, cols + gap), POISON, dtype=values.dtype, device=values.device)
    parent[:rows, :cols] = values
    return parent[:rows, :cols]


def exact_values(rows: int, cols: int, dtype: torch.dtype, fmt: torch.dtype, route: str, seed: int) -> torch.Tensor:
    """Return values that are exact in `fmt` once scaled by a power of two of their group, the largest among them."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.arange(0x08, 0x7F if fmt is torch.float8_e4m3fn else 0x7C, dtype=torch.uint8).view(fmt).float()
    picked = normal[torch.randint(len(normal), (rows, cols), generator=generator)]
    picked *= torch.randint(2, (rows, cols), generator=generator) * 2 - 1
    if route.startswith("tensor"):
        picked[rows // 2, cols // 2] = FORMATS[fmt]
        exponent = torch.tensor(-3)
    elif route in TRANSPOSED:
        picked[rows // 2] = -FORMATS[fmt]
        exponent = torch.arange(cols)[None, :] % 5 - 6
    else:
        picked[:, cols // 2] = FORMATS[fmt]
        exponent = torch.arange(rows)[:, None] % 5 - 6
    return (picked * torch.exp2(exponent.float())).to(dtype)


@contextmanager
def _cut_for(route: str) -> Iterator[None]:
    """Make columns take two launches, however short, where the route says so."""
    whole_column = triton_quantize_columns.WHOLE_COLUMN
    if route == "columns_two_launches":
        triton_quantize_columns.WHOLE_COLUMN = 0
    try:
        yield
    finally:
        triton_quantize_columns.WHOLE_COLUMN = whole_column


def quantize(
    x: torch.Tensor, fmt: torch.dtype, route: str, *, multiple: int = 1, e8m0: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales of x by one launcher, the output padded to `multiple` and filled with NaN bytes first."""
    transposed = route in TRANSPOSED or route == "tensor_transposed"
    height, width = reversed(x.shape) if transposed else x.shape
    height, width = (-(-size // multiple) * multiple for size in (height, width))
    out = torch.full((height, width), 0x7F, dtype=torch.uint8, device=x.device).view(fmt)
    count = 1 if route.startswith("tensor") else height
    scale = torch.full((count,), float("nan"), device=x.device)
    if e8m0:
        scale = torch.full((count,), 0xFF, dtype=torch.uint8, device=x.device)
    with _cut_for(route):
        if route == "rows":
            triton_quantize.quantize_rows(x, out, scale)
        elif route.startswith("tensor"):
            partial = torch.full((triton_quantize.TENSOR_PARTIALS,), float("nan"), device=x.device)
            triton_quantize.quantize_tensor(x, out, scale, partial, transposed=transposed)
        elif route.startswith("many"):
            other = torch.ones((20, 30), dtype=x.dtype, device=x.device)
            operands = [
                triton_quantize_many.Operand(other, out.new_empty((32, 32)), scale.new_empty(32), True),
                triton_quantize_many.Operand(x, out, scale, transposed),
            ]
            triton_quantize_many.quantize_many(operands)
        else:
            size = triton_quantize_columns.columns_workspace(tuple(x.shape), (height, width))
            partial = torch.full((size,), float("nan"), device=x.device) if size else None
            triton_quantize_columns.quantize_columns(x, out, scale, partial)
    return out, scale if not e8m0 else (scale.to(torch.int32) << 23).view(torch.float32)


def expected_scale(x: torch.Tensor, fmt: torch.dtype, route: str) -> torch.Tensor:
    """Return clamp(finite amax / format max, 2**-126, float32 max) as the launcher should store it for the source."""
    magnitude = torch.where(x.isfinite(), x.float().abs(), 0.0)
    amax = (
        magnitude.amax().reshape(1) if route.startswith("tensor") else magnitude.amax(0 if route in TRANSPOSED else 1)
    )
    # By a tensor: on a GPU torch divides by a number through its reciprocal, which rounds twice.
    largest = torch.full_like(amax, FORMATS[fmt])
    return (amax / largest).clamp(2.0**-126, torch.finfo(torch.float32).max)


def complaints(
    x: torch.Tensor,
    fmt: torch.dtype,
    route: str,
    compare: Callable[[torch.Tensor, torch.Tensor, torch.dtype], list[str]],
    *,
    multiple: int = 1,
) -> list[str]:
    """Return what is wrong with the quantization of x by `route`; `compare` judges the values."""
    out, scale = quantize(x, fmt, route, multiple=multiple)
    wanted = expected_scale(x, fmt, route)
    found = []
    if not torch.equal(scale[: len(wanted)], wanted):
        found.append(f"scale {scale[: len(wanted)].tolist()[:4]} should be {wanted.tolist()[:4]}")
    if not (scale.isfinite() & (scale > 0)).all():
        found.append("a scale is zero or not finite")
    oriented = x.t() if route in TRANSPOSED or route == "tensor_transposed" else x
    height, width = oriented.shape
    outside = out.view(torch.uint8).clone()
    outside[:height, :width] = 0
    if outside.any():
        found.append(f"{int(outside.count_nonzero())} bytes of the padding are not zero")
    per_row = wanted if len(wanted) == 1 else wanted[:, None]
    return found + compare(out[:height, :width], oriented.double() / per_row.double(), fmt)


def identical(found: torch.Tensor, scaled: torch.Tensor, fmt: torch.dtype) -> list[str]:
    """Compare data that are exact once scaled."""
    del fmt
    wrong = found.double() != scaled
    return [f"{int(wrong.sum())} of {wrong.numel()} values differ"] if wrong.any() else []


def interpreted_cases() -> dict[str, Callable[[], list[str]]]:
    """Return small cases that the interpreter's FP8 cast is right for, by name."""
    cases: dict[str, Callable[[], list[str]]] = {}

    def add(name: str, route: str, rows: int, cols: int, multiple: int, gap: int, **dtypes: Any) -> None:
        def run() -> list[str]:
            dtype, fmt = dtypes["dtype"], dtypes["fmt"]
            values = exact_values(rows, cols, dtype, fmt, route, seed=rows + cols)
            return complaints(source(rows, cols, values, gap=gap), fmt, route, identical, multiple=multiple)

        cases[name] = run

    shapes = {
        "rows": ((1, 1), (3, 17), (5, 1000), (2, triton_quantize.ROW_LIMIT + 16)),
        "columns": ((1, 1), (17, 3), (300, 40)),
        "columns_two_launches": ((1, 1), (17, 3), (600, 70), (256, 64)),
        "tensor": ((1, 1), (17, 600)),
        "tensor_transposed": ((1, 1), (130, 70)),
        "many": ((1, 1), (17, 600)),
        "many_transposed": ((1, 1), (300, 40)),
    }
    kinds = [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn)]
    kinds += [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2)]
    for route, sizes in shapes.items():
        for index, (rows, cols) in enumerate(sizes):
            dtype, fmt = kinds[(index + len(route)) % len(kinds)]
            for multiple, gap in ((1, 0), (16, 5)):
                name = f"{route}-{rows}x{cols}-{str(dtype)[6:]}-{str(fmt)[6:]}-padded_to_{multiple}-gap_{gap}"
                add(name, route, rows, cols, multiple, gap, dtype=dtype, fmt=fmt)
    cases["rows-guard_sums"] = lambda: wrong_sums(
        source(21, 200, exact_values(21, 200, torch.bfloat16, next(iter(FORMATS)), "rows", 3)), offset=37
    )
    for route in ROUTES:
        cases[f"{route}-zeros_nan_inf_tiny"] = lambda route=route: hostile_scales(route)
    return cases


def hostile_rows(dtype: torch.dtype) -> torch.Tensor:
    """Return rows of zeros, NaN, Inf, -Inf, values near the least and the largest of the dtype."""
    x = torch.randn(8, 48, generator=torch.Generator().manual_seed(7)).to(dtype)
    x[0] = 0
    x[1, 5] = float("nan")
    x[2, 6] = float("inf")
    x[3, 7] = -float("inf")
    x[4] = torch.finfo(dtype).tiny * x[4].sign()
    x[5] = torch.finfo(dtype).max * x[5].sign()
    x[6] = float("nan")
    x[7] = float("inf")
    return x


def hostile_scales(route: str) -> list[str]:
    """Compare only scales and padding: the interpreter's cast of such values is wrong."""
    x = hostile_rows(torch.bfloat16)
    x = x.t().contiguous() if route in TRANSPOSED else x
    return complaints(x, torch.float8_e4m3fn, route, lambda *_: [], multiple=16)


def wrong_sums(x: torch.Tensor, *, offset: int) -> list[str]:
    """Return what is wrong with the guard's sums of the rows of x, 1 of 16 from `offset` on, in e4m3."""
    rows, cols = x.shape
    groups = triton_quantize.sampled_groups(rows)
    out = torch.empty((rows, cols), dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty(rows, device=x.device)
    sums = torch.full((2, groups), float("nan"), device=x.device)
    moving = torch.tensor([offset], dtype=torch.int32, device=x.device)
    triton_quantize.quantize_rows(x, out, scale, sums, moving)
    sampled = (torch.arange(groups) * 16 + offset % 16).clamp_max(rows - 1).to(x.device)
    scaled = x[sampled].double() / scale[sampled, None].double()
    finite = scaled.isfinite()
    error = torch.where(finite, scaled - out[sampled].double(), 0.0)
    wanted = torch.stack([torch.where(finite, scaled, 0.0).square().sum(1), error.square().sum(1)])
    if torch.allclose(sums.double(), wanted, rtol=1e-3, atol=1e-6):
        return []
    return [f"sums {sums.tolist()} should be {wanted.tolist()}"]


if __name__ == "__main__":
    json.dump({name: run() for name, run in interpreted_cases().items()}, sys.stdout)
