"""Quantize in Triton and compare with float64: shared by the interpreter's run and the GPU's.

As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object: a list of complaints for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from random import Random
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
            route, normal(rows, cols), launches=range(4)
        )
    long = (2, triton_quantize.ROW_LIMIT + 16)
    cases["rows-guard_sums-long"] = lambda: wrong_sums("rows", normal(*long), launches=(0, 1))
    for route, (rows, cols) in (("rows", (20, 100)), ("tensor", (40, 100)), ("many_transposed", (100, 20))):
        cases[f"{route}-guard_trips"] = lambda route=route, rows=rows, cols=cols: wrong_trips(route, normal(rows, cols))
    cases["rows-guard_looks_at_all_rows_twice_in_29"] = lambda: wrong_sums("rows", normal(272, 40), launches=range(45))
    for route, (rows, cols) in SHARED.items():
        cases[f"{route}-guard_any_order"] = lambda route=route, rows=rows, cols=cols: any_order(route, rows, cols)
    cases["rows-guard_bands"] = bands
    for route in ("tensor", "tensor_transposed"):
        cases[f"{route}-guard_lost_row"] = lambda route=route: lost_row(route)
    for route in ROUTES:
        cases[f"{route}-far_apart"] = lambda route=route: far_apart(route)
        cases[f"{route}-zeros_nan_inf_tiny"] = lambda route=route: hostile_scales(route)
    return cases


@contextmanager
def rows_far_apart(values: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield values of nine rows with each row 2**28 elements from the next, in memory that is not touched else."""
    from triton.runtime.interpreter import GridExecutor

    (rows, cols), step = values.shape, 2**28 + 16
    x = torch.empty((rows - 1) * step + cols, dtype=values.dtype).as_strided((rows, cols), (step, 1)).copy_(values)
    restore, GridExecutor._restore_args_dev = GridExecutor._restore_args_dev, lambda *rest: None  # it copies all
    try:
        yield x
    finally:
        GridExecutor._restore_args_dev = restore


def far_apart(route: str) -> list[str]:
    """Return what is wrong with the quantization of rows more than 2**31 elements apart."""
    fmt = torch.float8_e4m3fn
    with rows_far_apart(exact_values(9, 48, torch.bfloat16, fmt, route, seed=3)) as x:
        return complaints(x, fmt, route, identical)


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
SHARED = {"rows": (300, 40), "columns_two_launches": (1300, 64), "tensor_transposed": (270, 70)}
"""Sizes for which programs keep whole rows, or several share each: eleven parts are summed up in two steps."""
LIMITS = (0.5, 4.0, 2.0**-8)
"""Of the guard in these cases: the limit of a row's ratio, the band, what rounding alone can make."""


def normal(rows: int, cols: int) -> torch.Tensor:
    """Return bfloat16 values, the same in each call."""
    return torch.randn(rows, cols, generator=torch.Generator().manual_seed(rows)).bfloat16()


def guard_state(shape: tuple[int, int], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the guard's sums of an output of `shape`, and its trip, before the first launch."""
    sums = torch.zeros(triton_quantize_common.sums_size(shape[0]), device=device)
    head = triton_quantize_common.sums_head(*LIMITS)
    sums[: len(head)] = torch.tensor(head, device=device)
    return sums, torch.zeros(2, device=device)


def turned(route: str) -> bool:
    """Return whether the output is as the source transposed."""
    return route in TRANSPOSED or route == "tensor_transposed"


def later(route: str) -> int:
    """Return how many launches after the one that looks its ratios are judged: programs that share rows only add up."""
    return int(route == "columns_two_launches" or route.startswith("tensor"))


def lines_of(route: str, x: torch.Tensor) -> int:
    """Return how many rows of the output a program has."""
    shape, stride, out_shape = (x.shape[0], x.shape[1]), x.stride(0), oriented(route, x)
    with _cut_for(route):
        if route == "rows":
            options = triton_quantize.rows_launch(shape, stride, out_shape).options
        elif route.startswith("tensor"):
            options = triton_quantize.tensor_launches(shape, stride, out_shape, transposed=turned(route))[1].options
        elif route.startswith("many"):
            one = triton_quantize_many.Source(shape, stride, out_shape, turned(route))
            options = dict(zip(("block_rows", "block_cols"), triton_quantize_many.tile_of(one) or (), strict=True))
        else:
            options = triton_quantize_columns.columns_launches(shape, stride, out_shape)[-1].options
    return int(options["block_cols" if turned(route) else "block_rows"]) if "block_rows" in options else 1


SLICES = (*range(14), None, *range(14))
"""The slice of the rows that the guard looks at in each launch of 29."""


def looked_at(launch: int, rows: int, lines: int) -> slice:
    """Return the rows that the guard looks at in a launch, given how many there are and how many a program has."""
    place, tiles = SLICES[launch % len(SLICES)], -(-rows // lines)
    each = -(-tiles // 14) * lines
    return slice(0, 0) if place is None else slice(place * each, place * each + each)


def oriented(route: str, x: torch.Tensor) -> tuple[int, int]:
    """Return the shape of the output for a source."""
    rows, cols = x.shape
    return (cols, rows) if turned(route) else (rows, cols)


def extremes(scaled: torch.Tensor, found: torch.Tensor) -> tuple[float, float]:
    """Return the largest ratio of a row, and the least that is not 0, by float64; 0 and Inf of no rows.

    scaled: values in units of their scales, (rows, k); found: what they were rounded to.
    """
    wanted, rounded = scaled.double(), found.double()
    ratios = (wanted - rounded).square().sum(1) / wanted.square().sum(1)
    if not len(ratios):
        return 0.0, float("inf")
    return float(ratios.max()), float(torch.where(ratios > 0, ratios, float("inf")).min())


def seen(sums: torch.Tensor) -> list[float]:
    """Return the largest and the least ratio that the guard saw while it learnt, and forget them."""
    found = sums[3:5].tolist()
    sums[3:5] = torch.tensor([0.0, float("inf")], device=sums.device)
    return found


def number(sums: torch.Tensor) -> torch.Tensor:
    """Return how many launches there were, int32 (1,), as it stands in the guard's sums."""
    return sums[7:8].view(torch.int32)


def close(found: Sequence[float], wanted: Sequence[float]) -> bool:
    """Return whether ratios are the same but for rounding in float32, also of what is exact in FP8."""
    return all(x == y or abs(x - y) <= 2e-3 * y + 1e-12 for x, y in zip(found, wanted, strict=True))


def wrong_sums(route: str, x: torch.Tensor, *, launches: Sequence[int]) -> list[str]:
    """Return what is wrong with the ratios that each launch from the first of `launches` on sees, in e4m3.

    What is written is compared with a launch without the guard, bit by bit.
    """
    sums, trip = guard_state(oriented(route, x), x.device)
    plain, plain_scale = quantize(x, torch.float8_e4m3fn, route)
    wrong = []
    for launch in range(max(launches) + 1):
        out, scale = quantize(x, torch.float8_e4m3fn, route, guard=(sums, trip))
        found = seen(sums)
        if launch not in launches:
            continue
        if not torch.equal(out.view(torch.uint8), plain.view(torch.uint8)) or not torch.equal(scale, plain_scale):
            wrong.append(f"launch {launch} wrote something else than without the guard")
        scaled = (x.t() if turned(route) else x).double() / scale.double().reshape(-1, 1)
        looked = looked_at(launch - later(route), len(scaled), lines_of(route, x))
        wanted = extremes(scaled[looked], out[looked]) if launch >= later(route) else (0.0, float("inf"))
        if not close(found, wanted):
            wrong.append(f"launch {launch}: ratios {found} should be {wanted}")
    if number(sums).item() != max(launches) + 1:
        wrong.append(f"counted {number(sums).item()} in {max(launches) + 1} launches")
    if trip.any():
        wrong.append(f"tripped by {trip.tolist()}")
    return wrong


def wrong_trips(route: str, x: torch.Tensor) -> list[str]:
    """Return what is wrong with when a row of Inf trips the guard: within 16 launches."""
    sums, trip = guard_state(oriented(route, x), x.device)
    x = x.clone()
    x[(len(x) // 2, -1) if turned(route) else (-1, x.shape[1] // 2)] = float("inf")
    for _ in range(16):
        quantize(x, torch.float8_e4m3fn, route, guard=(sums, trip))
    return [] if trip.tolist() == [1.0, float("inf")] else [f"trip is {trip.tolist()}"]


def lost_row(route: str) -> list[str]:
    """Return what is wrong with the ratio of a row so small that all of it becomes 0: 1. A row of zeros has none."""
    x = normal(20, 100)
    x[3] = 0.0
    quiet, wrong = guard_state((20, 100), x.device), guard_state((20, 100), x.device)
    small = x.clone()
    small[7] *= 2.0**-86  # squares of it in units of the scale are below what float32 has
    for values, (sums, trip) in ((x, quiet), (small, wrong)):
        source = values.t().contiguous() if turned(route) else values
        for _ in range(16):
            quantize(source, torch.float8_e4m3fn, route, guard=(sums, trip))
    found = quiet[1].tolist(), wrong[1].tolist()
    return [] if found == ([0.0, 0.0], [1.0, 1.0]) else [f"trips are {found}"]


@contextmanager
def _order(shuffle: Callable[[list[tuple[int, int, int]]], None]) -> Iterator[None]:
    """Let the interpreter run the programs of each launch in another order, the last one last."""
    from triton.runtime.interpreter import interpreter_builder as itself

    set_grid_dim, set_grid_idx = itself.set_grid_dim, itself.set_grid_idx
    order: dict[tuple[int, int, int], tuple[int, int, int]] = {}

    def begin(x: int, y: int, z: int) -> None:
        set_grid_dim(x, y, z)
        places = [(i, j, k) for i in range(x) for j in range(y) for k in range(z)]
        shuffled = places[:-1]
        shuffle(shuffled)
        order.update(zip(places, [*shuffled, places[-1]], strict=True))

    itself.set_grid_dim, itself.set_grid_idx = begin, lambda x, y, z: set_grid_idx(*order[x, y, z])
    try:
        yield
    finally:
        itself.set_grid_dim, itself.set_grid_idx = set_grid_dim, set_grid_idx


def any_order(route: str, rows: int, cols: int) -> list[str]:
    """Return what is wrong with the guard's ratios where programs, parts of rows too, run in any order but the last."""
    random = Random(rows)
    with _order(random.shuffle):
        return wrong_sums(route, normal(rows, cols), launches=range(20))


def bands() -> list[str]:
    """Return what is wrong with what trips a guard that has learnt: above the limit, above the band, below it."""
    wrong, learnt = [], int(triton_quantize_common.LEARNT.value)
    x = normal(16, 64)
    out, scale = quantize(x, torch.float8_e4m3fn, "rows")
    most, least = extremes(x.double() / scale.double()[:, None], out)
    cases = {
        "as usual": (0.5, most, least, 0.0),
        "above the limit": (most / 2, most, least, 1.0),
        "above the band": (0.5, most / 10, least, 1.0),
        "below the band": (0.5, most, least * 10, -1.0),
        "below what is too spread for a band": (0.5, least * 200, least * 10, 0.0),
    }
    for name, (limit, high, low, wanted) in cases.items():
        for launch in (learnt - 29, learnt, 29 << 25):
            sums, trip = guard_state((16, 64), torch.device("cpu"))
            number(sums).fill_(launch)
            sums[0], sums[2], sums[3], sums[4] = limit, 0.0, high, low
            quantize(x, torch.float8_e4m3fn, "rows", guard=(sums, trip))
            expected = wanted if launch >= learnt or name == "above the limit" else 0.0
            ratio = most if expected > 0 else least
            if not torch.allclose(trip, torch.tensor([expected, ratio if expected else 0.0]), rtol=2e-3):
                wrong.append(f"{name}, launch {launch}: trip is {trip.tolist()}, should be {expected} by {ratio}")
            if number(sums).item() != (launch if launch < 29 << 25 else 29 << 24) + 1:
                wrong.append(f"{name}: counted {number(sums).item()} after {launch}")
    return wrong


def thousand_launches(route: str, rows: int, cols: int) -> list[str]:
    """Return what trips 1,000 launches of normal data after those from which it is learnt, eight batches in turn."""
    batches = [normal(rows, cols).roll(shift, 1).cuda() for shift in range(8)]
    sums, trip = guard_state(oriented(route, batches[0]), batches[0].device)
    count = int(triton_quantize_common.LEARNT.value) + 1000
    for launch in range(count):
        quantize(batches[launch % 8], torch.float8_e4m3fn, route, guard=(sums, trip))
    wrong = [f"tripped by {trip.tolist()}"] if trip.any() else []
    return wrong + ([f"counted {number(sums).item()}"] if number(sums).item() != count else [])


if __name__ == "__main__":
    json.dump({name: run() for name, run in interpreted_cases().items()}, sys.stdout)
