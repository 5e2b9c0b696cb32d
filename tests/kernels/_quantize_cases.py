"""Quantize in Triton and compare with float64: shared by the interpreter's run and the GPU's.

As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object: a list of complaints for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from dispatch.kernels import triton_quantize, triton_quantize_columns, triton_quantize_common, triton_quantize_many

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
    x: torch.Tensor,
    fmt: torch.dtype,
    route: str,
    *,
    multiple: int = 1,
    e8m0: bool = False,
    guard: Sequence[torch.Tensor | None] = (None, None),
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales of x by one launcher, the output padded to `multiple` and filled with NaN bytes first.

    guard: its sums and trip.
    """
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
            triton_quantize.quantize_rows(x, out, scale, *guard)
        elif route.startswith("tensor"):
            partial = torch.full((triton_quantize.TENSOR_PARTIALS,), float("nan"), device=x.device)
            triton_quantize.quantize_tensor(x, out, scale, partial, *guard, transposed=transposed)
        elif route.startswith("many"):
            other = torch.ones((20, 30), dtype=x.dtype, device=x.device)
            operands = [
                triton_quantize_many.Operand(other, out.new_empty((32, 32)), scale.new_empty(32), True),
                triton_quantize_many.Operand(x, out, scale, transposed, *guard),
            ]
            triton_quantize_many.quantize_many(operands)
        else:
            size = triton_quantize_columns.columns_workspace(tuple(x.shape), (height, width))
            partial = torch.full((size,), float("nan"), device=x.device) if size else None
            triton_quantize_columns.quantize_columns(x, out, scale, partial, *guard)
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
    for route, (rows, cols) in SUMMED.items():
        cases[f"{route}-guard_sums"] = lambda route=route, rows=rows, cols=cols: wrong_sums(
            route, normal(rows, cols), launches=(0, 1, 2)
        )
    for route, (rows, cols) in (("rows", (20, 100)), ("tensor", (40, 100)), ("many_transposed", (100, 20))):
        cases[f"{route}-guard_trips"] = lambda route=route, rows=rows, cols=cols: wrong_trips(route, normal(rows, cols))
    cases["rows-guard_walks_all_tiles"] = lambda: wrong_sums("rows", normal(272, 40), launches=range(18))
    for route, (rows, cols) in LATE.items():
        cases[f"{route}-guard_late_programs"] = lambda route=route, rows=rows, cols=cols: late_programs(
            route, rows, cols, launches=72
        )
    cases["rows-guard_half_written"] = half_written
    cases["rows-guard_number_wraps_around"] = wraps_around
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


SUMMED = {
    "rows": (40, 200),
    "columns": (200, 40),
    "columns_two_launches": (256, 130),
    "tensor": (270, 600),
    "tensor_transposed": (130, 200),
    "many": (40, 200),
    "many_transposed": (200, 40),
}
"""Sizes for which each route has more tiles than one, but for few programs."""
LATE = {"rows": (40, 100), "columns_two_launches": (256, 64)}
"""Sizes of three programs that keep whole rows, and of two that share each."""
LIMITS = (0.5, 4.0, 2.0**-8)
"""Of the guard in these cases: the limit of a row's ratio, the band, what rounding alone can make."""


def normal(rows: int, cols: int) -> torch.Tensor:
    """Return bfloat16 values, the same in each call."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16()


def guard_state(rows: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the guard's sums and trip before the first launch."""
    sums = torch.zeros(triton_quantize_common.sums_size(rows), device=device)
    head = triton_quantize_common.sums_head(*LIMITS)
    sums[: len(head)] = torch.tensor(head, device=device)
    return sums, torch.zeros(2, device=device)


def tile_rows(route: str, shape: tuple[int, int], out_shape: tuple[int, int]) -> int:
    """Return of how many rows of the output one program keeps sums."""
    with _cut_for(route):
        if route == "rows":
            return int(triton_quantize.rows_launch(shape, shape[1], out_shape).options.get("block_rows", 1))
        if route.startswith("tensor"):
            return 64 if route == "tensor_transposed" else 16
        if route.startswith("many"):
            made = triton_quantize_many.Source(shape, shape[1], out_shape, route == "many_transposed")
            tile = triton_quantize_many.tile_of(made)
            assert tile is not None
            return tile[route == "many_transposed"]
        return int(triton_quantize_columns.columns_launches(shape, shape[1], out_shape)[-1].options["block_cols"])


def table(sums: torch.Tensor, launch: int, rows: int) -> torch.Tensor:
    """Return the sums of a launch, (2, rows): squares and errors."""
    capacity = rows // 16 + 128
    start = 8 + launch % 4 * 2 * capacity
    return sums[start : start + 2 * capacity].reshape(2, capacity)


def expected_sums(
    scaled: torch.Tensor, found: torch.Tensor, height: int, launch: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return which entries of a table a launch fills, and with what: float64 (2, entries).

    scaled: the values in units of their scales, (rows, k); found: what they were rounded to. height: rows of a tile.
    """
    tiles = torch.arange(-(-scaled.shape[0] // height))
    tiles = tiles[tiles % 16 == launch % 16]
    row = (tiles[:, None] * height + torch.arange(height)).flatten()
    entry = (tiles[:, None] // 16 * height + torch.arange(height)).flatten()
    present = row < scaled.shape[0]
    row, entry = row[present].to(scaled.device), entry[present].to(scaled.device)
    error = scaled[row].double() - found[row].double()
    return entry, torch.stack([scaled[row].double().square().sum(1), error.square().sum(1)])


def wrong_sums(route: str, x: torch.Tensor, *, launches: Sequence[int]) -> list[str]:
    """Return what is wrong with the guard's sums after the launches from the first of `launches` on, in e4m3."""
    turned = route in TRANSPOSED or route == "tensor_transposed"
    shape, out_shape = tuple(x.shape), tuple(reversed(x.shape)) if turned else tuple(x.shape)
    height = tile_rows(route, shape, out_shape)
    sums, trip = guard_state(out_shape[0], x.device)
    wrong = []
    for launch in range(max(launches) + 1):
        out, scale = quantize(x, torch.float8_e4m3fn, route, guard=(sums, trip))
        if launch not in launches:
            continue
        scaled = (x.t() if turned else x).double() / scale.double().reshape(-1, 1)
        entry, wanted = expected_sums(scaled, out, height, launch)
        found = table(sums, launch, out_shape[0]).double()
        rest = found.clone()
        rest[:, entry] = 0.0
        if not torch.allclose(found[:, entry], wanted, rtol=1e-3, atol=1e-6):
            wrong.append(f"launch {launch}: sums {found[:, entry].tolist()} should be {wanted.tolist()}")
        if rest.any():
            wrong.append(f"launch {launch}: sums of rows that are not sampled: {rest.nonzero().tolist()}")
    if trip.any():
        wrong.append(f"tripped by {trip.tolist()}")
    return wrong


def wrong_trips(route: str, x: torch.Tensor) -> list[str]:
    """Return what is wrong with when a row of Inf trips the guard: within 16 launches, and one that judges them."""
    turned = route in TRANSPOSED or route == "tensor_transposed"
    sums, trip = guard_state(x.shape[1] if turned else x.shape[0], x.device)
    x = x.clone()
    x[(3, -1) if turned else (-1, 3)] = float("inf")
    for _ in range(17):
        quantize(x, torch.float8_e4m3fn, route, guard=(sums, trip))
    return [] if trip.tolist() == [1.0, float("inf")] else [f"trip is {trip.tolist()}"]


def number(sums: torch.Tensor) -> torch.Tensor:
    """Return the number of the next launch, int32 (1), as it stands in the guard's sums."""
    return sums[:1].view(torch.int32)


@contextmanager
def _late(sums: torch.Tensor, program: int) -> Iterator[None]:
    """Let the interpreter's `program` see the number of the next launch: as if it read after the last one wrote."""
    from triton.runtime.interpreter import interpreter_builder

    set_grid_idx, ahead = interpreter_builder.set_grid_idx, False

    def step(x: int, y: int, z: int) -> None:
        nonlocal ahead
        if ahead != (x == program):
            number(sums).add_(-1 if ahead else 1)
            ahead = not ahead
        set_grid_idx(x, y, z)

    interpreter_builder.set_grid_idx = step
    try:
        yield
    finally:
        interpreter_builder.set_grid_idx = set_grid_idx
        if ahead:
            number(sums).sub_(1)


def late_programs(route: str, rows: int, cols: int, *, launches: int) -> list[str]:
    """Return what is wrong with the guard's sums of normal data where one program of each launch reads late.

    Half of the launches are of those from which the guard learns.
    """
    batches = [torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed)).bfloat16() for seed in range(3)]
    sums, trip = guard_state(cols if route in TRANSPOSED else rows, torch.device("cpu"))
    first = int(triton_quantize_common.LEARNT.value) - launches // 2
    number(sums).fill_(first)
    for launch in range(launches):
        with _late(sums, launch % 5 % 3):
            quantize(batches[launch % 3], torch.float8_e4m3fn, route, guard=(sums, trip))
    wrong = [f"tripped by {trip.tolist()}"] if trip.any() else []
    seen = sums[5:7].tolist()
    if not 0 < seen[1] <= seen[0] < 0.1:  # the interpreter's cast is wrong at times
        wrong.append(f"ratios seen are {seen}")
    if number(sums).item() != first + launches:
        wrong.append(f"the number is {number(sums).item()}, should be {first + launches}")
    return wrong


def half_written() -> list[str]:
    """Return what is wrong where the table to be judged holds squares alone, errors alone, and too much error."""
    wrong, known = [], int(triton_quantize_common.LEARNT.value) + 4
    for square, error, wanted in ((1.0, 0.0, [0.0, 0.0]), (0.0, 1.0, [0.0, 0.0]), (1.0, 0.4, [1.0, 0.4])):
        sums, trip = guard_state(16, torch.device("cpu"))
        number(sums).fill_(known)
        sums[5:7] = torch.tensor([1e-3, 1e-3])
        judged = table(sums, known - 1, 16)
        judged[0, 3], judged[1, 3] = square, error
        quantize(normal(16, 64), torch.float8_e4m3fn, "rows", guard=(sums, trip))
        if not torch.allclose(trip, torch.tensor(wanted)):
            wrong.append(f"square {square} and error {error}: trip is {trip.tolist()}, should be {wanted}")
    return wrong


def wraps_around() -> list[str]:
    """Return what is wrong with the guard's sums about the 2**31st launch."""
    x = normal(16, 64)
    sums, trip = guard_state(16, x.device)
    sums[5:7] = torch.tensor([1e-3, 1e-5])
    number(sums).fill_(2**31 - 1)
    wrong = []
    for launch in (2**31 - 1, -(2**31)):  # the first is of no tile here, the second of tile 0
        out, scale = quantize(x, torch.float8_e4m3fn, "rows", guard=(sums, trip))
        scaled = x.double() / scale.double()[:, None]
        entry, wanted = expected_sums(scaled, out, 16, launch)
        if not torch.allclose(table(sums, launch, 16)[:, entry].double(), wanted, rtol=1e-3):
            wrong.append(f"launch {launch}: sums are {table(sums, launch, 16).tolist()}")
    if number(sums).item() != -(2**31) + 1 or trip.any():
        wrong.append(f"number {number(sums).item()}, trip {trip.tolist()}")
    return wrong


def thousand_launches(route: str, rows: int, cols: int) -> list[str]:
    """Return what trips 1,000 launches of normal data, eight batches in turn."""
    batches = [normal(rows, cols).roll(shift, 1).cuda() for shift in range(8)]
    sums, trip = guard_state(cols if route in TRANSPOSED or route == "tensor_transposed" else rows, batches[0].device)
    for launch in range(1000):
        quantize(batches[launch % 8], torch.float8_e4m3fn, route, guard=(sums, trip))
    wrong = [f"tripped by {trip.tolist()}"] if trip.any() else []
    return wrong + ([f"counted {number(sums).item()}"] if number(sums).item() != 1000 else [])


if __name__ == "__main__":
    json.dump({name: run() for name, run in interpreted_cases().items()}, sys.stdout)
