"""What wins for ten families of data, and what the guard says of each; what it costs, and how soon it trips.

    python benchmarks/guard.py [--device cpu] [--parts families cost trips] [--record NAME]

families: each is measured as a scope of its own, with `min_speedup = 1.0`. `winner`, and its three errors in the worst
row by a full float64 product. Then a quantized product that was chosen on normal data is given the family: `loss` of
its result by a full float64 product, what `async` said within 17 calls after thousands of normal data, and whether
`strict` refused the result.
cost: the products of both operands quantized, captured in CUDA graphs with `mode = "off"` and `"async"`, in turns: the
95% interval of the mean of the relative differences of pairs. Needs a GPU. trips: how many calls after a change.
On a CPU products are emulated by the reference quantizer, and clocks are made up: a trial of this script.
"""

from __future__ import annotations

import argparse
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

os.environ["DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()  # decisions of scopes that are families of data are nobody's

import _rows
import torch
from _families import FAMILIES, Data
from _guards import Emulated, interval

import dispatch
from dispatch import _api
from dispatch.measuring.guard import Guard
from dispatch.measuring.watch import SAMPLE
from dispatch.testing import fake_timings, registered

Row = dict[str, Any]
TOLERANCE = 0.005
SHAPES = {"cuda": [(512, 1024, 2048), (4096, 4096, 4096), (1000, 1512, 2056)], "cpu": [(64, 96, 128)]}
COSTLY = [(4096, 4096, 4096), (8192, 8192, 8192)]
QUANTIZED = ("e4m3:row", "e4m3:tensor")
NORMAL = {"cuda": 3800, "cpu": 1700}
"""Calls after which every backend has learnt what is usual."""
PAIRS, CAPTURES = 240, 8  # a graph's workspace lies where it does: what that costs or saves is no cost of the guard
BACKENDS = ("triton_tma_fp8", "cublas", "emulated")


def data(family: str, size: tuple[int, int, int], device: str, seed: int = 0) -> Data:
    """Return bfloat16 operands of a family; b as torch.matmul(a, b) has it."""
    m, n, k = size
    random = torch.Generator(device).manual_seed(seed)
    a, b = (torch.randn(shape, device=device, generator=random) for shape in ((m, k), (k, n)))
    a, b = FAMILIES[family](a, b)
    return a.bfloat16(), b.bfloat16()


def errors(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Return the three metrics of the worst of all rows against the float64 product rounded to out's dtype."""
    found: dict[str, list[torch.Tensor]] = {"similarity_loss": [], "relative_l2": [], "max_abs_over_scale": []}
    wide = b.double()
    for start in range(0, len(a), 1024):
        y = (a[start : start + 1024].double() @ wide).to(out.dtype).double()
        x = out[start : start + 1024].double()
        same = (x == y) | (x.isnan() & y.isnan())
        x, y = torch.where(same & ~x.isfinite(), 0.0, x), torch.where(same & ~y.isfinite(), 0.0, y)
        size = torch.maximum(x.abs().amax(1, keepdim=True), y.abs().amax(1, keepdim=True))
        size = torch.where(size > 0, size, 1.0)
        x, y = x / size, y / size
        off, own, other = (x - y).square().sum(1), y.square().sum(1), x.square().sum(1)
        ratios = off / (own + other), (off / own).sqrt(), (x - y).abs().amax(1) / y.abs().amax(1)
        for values, ratio in zip(found.values(), ratios, strict=True):
            values.append(torch.where(off == 0, 0.0, torch.where(ratio.isfinite(), ratio, float("inf"))).amax())
    return {name: float(torch.stack(values).amax()) for name, values in found.items()}


@contextmanager
def machine(device: str) -> Iterator[None]:
    """Have backends to choose from: on a CPU one that is emulated, and fast by made-up clocks."""
    with ExitStack() as stack:
        if device == "cpu":
            stack.enter_context(registered(Emulated("emulated", recipes=(*QUANTIZED, "e4m3:1x128@e4m3:128x128"))))
            stack.enter_context(fake_timings({"baseline": 100.0, "emulated": 20.0}))
        tuning = {"budget_ms": 300, "compile_ms": 20000}
        stack.enter_context(dispatch.use_policy(tuning=tuning, backends={"allow": [*BACKENDS, "bf16_fallback"]}))
        yield


def quantized(recipe: str, mode: str) -> dispatch.use_policy:
    """Return the policy under which products by one recipe are chosen however fast they are."""
    return dispatch.use_policy(
        guard={"mode": mode}, recipes={"allow": [recipe]}, gate={"min_speedup": 0.0, "min_speedup_lossless": 1e9}
    )


def fresh() -> None:
    """Forget every trip, as if nothing had been; decisions stay."""
    _api.engine().guard = Guard(_api.forget)
    dispatch.forget()


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        torch.cuda.synchronize()


def guard_of(device: str) -> dict[str, int]:
    """Return the guard's counts once all is done."""
    synchronize(device)
    return dict(dispatch.stats()["guard"])


def said(family: str, size: tuple[int, int, int], recipe: str, device: str) -> Row | None:
    """Return what becomes of a family under a decision that was made on normal data, or None if it is none."""
    normal, other = data("normal", size, device), data(family, size, device, seed=1)
    fresh()
    with quantized(recipe, "off"):
        decision = dispatch.explain(*normal)
        if decision.candidate.recipe is None:
            return None
        loss = errors(dispatch.matmul(*other), *other)["similarity_loss"]
    fresh()
    with quantized(recipe, "async"):
        for _ in range(NORMAL[device]):
            dispatch.matmul(*normal)
        if guard_of(device)["tripped"]:
            raise SystemExit(f"tripped on normal data: {dispatch.explain(*normal)}")
        calls = _calls_until(*other, device, SAMPLE + 1)
    fresh()
    with quantized(recipe, "strict"):
        out = dispatch.matmul(*other)
        strict = "refused" if guard_of(device)["refused"] else "passed"
        returned = errors(out, *other)["similarity_loss"]
    fresh()
    return {
        "candidate": str(decision.candidate),
        "loss": loss,
        "async_tripped_after": calls,
        "strict": strict,
        "strict_loss": returned,
    }


def families(device: str) -> Iterator[Row]:
    """Yield a row for each family and shape."""
    print(f"{'shape':18}{'family':24}{'winner':52}{'speedup':>8}{'loss':>9}", *(f"{x:>34}" for x in QUANTIZED))
    for size in SHAPES[device]:
        _compile(data("normal", size, device))
        for family in FAMILIES:
            a, b = data(family, size, device, seed=1)
            fresh()
            with dispatch.use_policy(gate={"min_speedup": 1.0}):
                decision = dispatch.explain(a, b, scope=family)
                error = errors(dispatch.matmul(a, b, scope=family), a, b)
            own = errors(torch.matmul(a, b), a, b)
            guards = {recipe: said(family, size, recipe, device) for recipe in QUANTIZED}
            cells = (f"{_said(found):>34}" for found in guards.values())
            speed = "-" if decision.speedup is None else f"{decision.speedup:.2f}x"
            shape = "x".join(map(str, size))
            head = f"{shape:18}{family:24}{str(decision.candidate)[:51]:52}{speed:>8}"
            print(f"{head}{error['similarity_loss']:9.1e}", *cells, flush=True)
            yield _rows.row("guard", decision, family=family, error=error, own_error=own, guards=guards)


def _compile(operands: Data) -> None:
    """Measure until no candidate is left out because others took so long to compile."""
    for _ in range(5):
        verdicts = dispatch.explain(*operands, scope="compiling").candidates
        if all(verdict.outcome != "not measured" for verdict in verdicts):
            return


def _said(found: Row | None) -> str:
    if found is None:
        return "no quantized product"
    calls = found["async_tripped_after"]
    return f"{found['loss']:.1e}, async {calls or 'silent'}, strict {found['strict']}"


def _graph(call: Callable[[], Any], repeats: int) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def _times(calls: Sequence[Callable[[], Any]], pairs: int) -> list[list[float]]:
    """Return us of each call, `pairs` times, in turns that change their order, without a wait between them."""
    events = []
    for turn in range(pairs):
        for which in range(len(calls)) if turn % 2 else reversed(range(len(calls))):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            calls[which]()
            end.record()
            events.append((which, begin, end))
    torch.cuda.synchronize()
    times: list[list[float]] = [[] for _ in calls]
    for which, begin, end in events:
        times[which].append(float(begin.elapsed_time(end)) * 1e3)
    return times


def cost(device: str) -> Iterator[Row]:
    """Yield what `async` and `strict` add to products with both operands quantized."""
    if device == "cpu":
        print("cost needs a GPU")
        return
    for size in COSTLY:
        for layout in ("row", "col"):
            a, b = data("normal", size, device)
            b = b if layout == "row" else b.t().contiguous().t()
            repeats = max(2, round(2e11 * 20 / (2 * size[0] * size[1] * size[2])))
            fresh()
            pairs: list[dict[str, torch.cuda.CUDAGraph]] = []
            for turn in range(CAPTURES):
                pairs.append({})
                for mode in ("off", "async") if turn % 2 else ("async", "off"):
                    with quantized("e4m3:row", mode):
                        decision = dispatch.explain(a, b)
                        pairs[-1][mode] = _graph(lambda a=a, b=b: dispatch.matmul(a, b), repeats)
            if decision.candidate.recipe is None:
                raise SystemExit(f"nothing is quantized: {decision}")
            off, on = [], []
            for pair in pairs:
                calls = [pair["off"].replay, pair["async"].replay]
                _times(calls, 10)
                for kept, times in zip((off, on), _times(calls, PAIRS // CAPTURES), strict=True):
                    kept += times
            mean, low, high = interval(off, on)
            strict = _strict_cost(a, b)
            if guard_of(device)["tripped"]:
                raise SystemExit(f"tripped on normal data: {dispatch.explain(a, b)}")
            shape = " x ".join(map(str, size))
            print(
                f"{shape}, b {layout}: {statistics.median(off) / repeats:.1f} us off, async {mean:+.3%} "
                f"({low:+.3%} to {high:+.3%} of {PAIRS} pairs), strict {strict:.2f}x; {decision.candidate}",
                flush=True,
            )
            found = {"async": mean, "async_low": low, "async_high": high, "strict_ratio": strict, "pairs": PAIRS}
            yield _rows.row("guard_cost", decision, layout=layout, off_us=statistics.median(off) / repeats, **found)


def _strict_cost(a: torch.Tensor, b: torch.Tensor) -> float:
    """Return the time of a probed call over that of one that is not, both by the host's clock."""
    times: dict[str, list[float]] = {"off": [], "strict": []}
    for turn in range(24):
        for mode, found in times.items():
            with quantized("e4m3:row", mode):
                torch.cuda.synchronize()
                begun = time.perf_counter()
                dispatch.matmul(a, b)
                torch.cuda.synchronize()
                if turn >= 4:
                    found.append(time.perf_counter() - begun)
    return statistics.median(times["strict"]) / statistics.median(times["off"])


def trips(device: str) -> Iterator[Row]:
    """Yield after how many calls a change of the data is seen."""
    size = SHAPES[device][0]
    normal = [data("normal", size, device, seed=seed) for seed in range(8)]
    b = normal[0][1]
    fresh()
    with quantized("e4m3:tensor", "async"):
        for call in range(1000):
            dispatch.matmul(normal[call % 8][0], b)
        before = guard_of(device)["tripped"]
        bad = normal[0][0].clone()
        bad[0] *= 1e5
        broken = _calls_until(bad, b, device, 10 * SAMPLE)
        after = []
        for row in range(0, size[0], max(1, size[0] // 32)):
            fresh()
            for _ in range(3):
                dispatch.matmul(normal[0][0], b)
            bad = normal[0][0].clone()
            bad[row] *= 1e-5
            after.append(_calls_until(bad, b, device, 10 * SAMPLE))
        decision = dispatch.explain(*normal[0])
    fresh()
    print(
        f"{size}: {before} trips in 1000 normal calls; data that break the tolerance tripped after {broken} calls; an "
        f"outlier row, at {len(after)} places, after {min(after)} to {max(after)} calls"
    )
    found = {"normal_trips": before, "broken_calls": broken, "outlier_calls": [min(after), max(after)]}
    yield _rows.row("guard_trips", decision, places=len(after), **found)


def _calls_until(a: torch.Tensor, b: torch.Tensor, device: str, most: int) -> int:
    """Return after which call the guard has tripped, 0 where it has not after so many."""
    for calls in range(1, most + 1):
        dispatch.matmul(a, b)
        if guard_of(device)["tripped"]:
            return calls
    return 0


PARTS = {"families": families, "cost": cost, "trips": trips}


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[*PARTS])
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    arguments = parser.parse_args()
    logging.getLogger("dispatch").setLevel(logging.ERROR)
    with machine(arguments.device):
        for part in arguments.parts:
            begun = time.perf_counter()
            count = 0
            for count, row in enumerate(PARTS[part](arguments.device), 1):  # noqa: B007 - printed after the last
                if arguments.record:
                    _rows.append([row], arguments.record)
            print(f"{part}: {count} rows in {time.perf_counter() - begun:.0f} s\n", flush=True)


if __name__ == "__main__":
    main()
