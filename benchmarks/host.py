"""Host time of a known call beyond its plan's own, beside the frameworks' own matmuls.

    python benchmarks/host.py [--record NAME] [--compiled]

The hot path is timed with a plan that does nothing, so that what is left is the library's own: building the key, the
look-up, the call. The bar: at most 25% of torch.matmul at 64 x 64 float32. 4 x 4 is printed without a bar, and so are
calls with a bias, beside torch's own linear layer and the others' product and sum.

--compiled: what a call of a function compiled by torch.compile takes of the host, on the GPU where there is one: of
dispatch.matmul, torch.matmul, and the chosen plan as an op of its own, in turns, with one thread. Calls are queued, and
the device waited for outside of the time taken. What it takes beyond torch.matmul is the median difference of
neighbours in time. Spread: between the quartiles.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from operator import sub
from typing import Any

import _rows

import dispatch
from dispatch import _api

BAR = 0.25
CPU = [(16, 16, 16), (64, 64, 64), (16, 256, 256)]
GPU = [(256, 256, 256), (16, 8192, 8192)]
Call = Callable[[], Any]


def least_us(call: Callable[[], Any], seconds: float = 0.3) -> float:
    """Return the least microseconds a call over batches of calls."""
    count = 1
    while (spent := _timed(call, count)) < 2e-3:
        count *= 2
    end, least = time.perf_counter() + seconds, spent / count
    while time.perf_counter() < end:
        least = min(least, _timed(call, count) / count)
    return least * 1e6


def _timed(call: Callable[[], Any], count: int) -> float:
    start = time.perf_counter()
    for _ in range(count):
        call()
    return time.perf_counter() - start


def measure(framework: str, size: int, fused: bool) -> dict[str, Any]:
    """Return the own matmul's host time, the whole call's, and the call's with a plan that does nothing."""
    room = dispatch.framework(framework)
    a = room.normal((size, size), "float32", 0, "cpu" if framework != "numpy" else None)
    more = {"bias": a[0]} if fused else {}
    own = partial(room.native(dispatch.explain(a, a, **more).problem), a, a, *more.values())
    call = partial(dispatch.matmul, a, a, **more)
    known = set(_api._young)
    call()
    (key,) = set(_api._young) - known
    plan = _api._young[key]
    figures = {"own_us": least_us(own), "call_us": least_us(call)}
    nothing = partial(lambda a, b, bias=None: a, a, a, *more.values())
    _api._young[key] = nothing.func
    figures["beyond_us"] = least_us(call) - least_us(nothing)
    _api._young[key] = plan
    return {"framework": framework, "size": size, "bias": fused, **figures}


def in_turns(calls: dict[str, Call], wait: Call, count: int, rounds: int) -> dict[str, list[float]]:
    """Return the host's microseconds a call in each round, of batches of `count` calls that take turns."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds + 2):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            wait()
            spent = _timed(calls[name], count)
            if turn > 1:
                found[name].append(spent / count * 1e6)
    wait()
    return found


def _quartiles(times: Iterable[float]) -> float:
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def compiled() -> Iterator[dict[str, Any]]:
    """Yield the rows of compiled calls: a weight as it is and prepared, and forward and backward of one product."""
    import torch

    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if cuda else ("cpu", torch.float32)
    wait = torch.cuda.synchronize if cuda else lambda: None
    served: list[Callable[..., Any]] = []
    library = torch.library.Library("host_benchmark", "DEF")
    library.define("plan(Tensor a, Tensor b) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
    library.impl("plan", lambda a, b: served[-1](a, b), "CompositeExplicitAutograd")
    torch.library.register_fake("host_benchmark::plan", lambda a, b: a.new_empty(a.shape[0], b.shape[1]), lib=library)
    for m, n, k in GPU if cuda else CPU:
        a, b = (torch.randn(shape, device=device).to(dtype) for shape in ((m, k), (k, n)))
        for way in ("plain", "prepared", "training"):
            torch._dynamo.reset()
            weight = dispatch.prepare(b) if way == "prepared" else b
            ways = {
                "dispatch": partial(torch.compile(lambda x, w: dispatch.matmul(x, w), fullgraph=True), a, weight),
                "torch.matmul": partial(torch.compile(lambda x, w: torch.matmul(x, w), fullgraph=True), a, b),
            }
            if way == "training":
                inputs, grad = (a.clone().requires_grad_(), b.clone().requires_grad_()), a.new_ones(m, n)
                calls = {name: partial(_step, call.func, inputs, grad) for name, call in ways.items()}
                decision = dispatch.explain(*inputs)
            else:
                decision = dispatch.explain(a, weight)
                served.append(_plan(a, b, weight))
                by_op = torch.compile(lambda x, w: torch.ops.host_benchmark.plan(x, w), fullgraph=True)
                calls = {**ways, "plan as an op": partial(by_op, a, b), "plan alone": partial(served[-1], a, b)}
            with torch.set_grad_enabled(way == "training"):
                for call in calls.values():
                    for _ in range(3):
                        call()
                times = in_turns(calls, wait, 50, 41 if cuda else 201)
            yield {
                "table": "host_compiled",
                "problem": {"m": m, "n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")},
                "way": way,
                "candidate": str(decision.candidate),
                "host_us": statistics.median(times["dispatch"]),
                "spread_us": _quartiles(times["dispatch"]),
                "beyond_us": statistics.median(map(sub, times["dispatch"], times["torch.matmul"])),
                "beyond_spread_us": _quartiles(map(sub, times["dispatch"], times["torch.matmul"])),
                "peers": {f"{x}@{torch.__version__}": statistics.median(times[x]) for x in list(times)[1:]},
                **_rows.stamp(None if cuda else _rows.cpu_name()),
            }


def _step(function: Callable[..., Any], inputs: tuple[Any, Any], grad: Any) -> None:
    for operand in inputs:
        operand.grad = None
    function(*inputs).backward(grad)


def _plan(a: Any, b: Any, weight: Any) -> Callable[..., Any]:
    """Return the plan of the known call, for arrays: a prepared weight is put in the place of its array."""
    for _ in range(3):
        dispatch.matmul(a, weight)
    room = dispatch.framework("torch")
    if weight is b:
        return _api._young[room.key(a, b)]
    plan = _api._young[room.key(a, b, (None,))]
    return lambda x, _: plan(x, weight)


def print_compiled(entry: dict[str, Any]) -> None:
    """Print the row of a compiled call."""
    problem, others = entry["problem"], {x.partition("@")[0]: us for x, us in entry["peers"].items()}
    print(
        f"{problem['m']}x{problem['n']}x{problem['k']}".ljust(14) + entry["way"].ljust(10),
        f"{entry['host_us']:8.1f} +- {entry['spread_us'] / 2:.1f} us, beyond torch.matmul's",
        f"{entry['beyond_us']:+.1f} +- {entry['beyond_spread_us'] / 2:.1f};",
        "  ".join(f"{name} {us:.1f}" for name, us in others.items()),
        f" {entry['candidate']}",
        flush=True,
    )


def main() -> None:
    """Print the table; exit with 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--compiled", action="store_true", help="compiled calls in torch instead")
    arguments = parser.parse_args()
    if arguments.compiled:
        for row in compiled():
            print_compiled(row)
            if arguments.record:
                _rows.append([row], arguments.record)
        return
    found = [measure(name, *case) for case in product((64, 4), (False, True)) for name in dispatch.installed()]
    torch_us = next((x["own_us"] for x in found if x["framework"] == "torch" and x["size"] == 64), None)
    print(f"{'':24}{'own matmul':>12}{'dispatch':>12}{'beyond plan':>14}{'of torch 64x64':>16}")
    missed = False
    for entry in found:
        share = entry["beyond_us"] / torch_us if torch_us else float("nan")
        missed |= entry["size"] == 64 and not entry["bias"] and share > BAR
        name = f"{entry['framework']} {entry['size']}x{entry['size']}{', a bias' if entry['bias'] else ''}"
        print(
            f"{name:24}{entry['own_us']:>9.2f} us{entry['call_us']:>9.2f} us"
            f"{entry['beyond_us']:>11.2f} us{share:>15.0%}"
        )
    print(f"bar: {BAR:.0%} of torch.matmul at 64 x 64: {'missed' if missed else 'held'}")
    if arguments.record:
        _rows.append([{"table": "host", **x, **_rows.stamp(_rows.cpu_name())} for x in found], arguments.record)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
