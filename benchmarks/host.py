"""Host time of a known call beyond its plan's own, beside the frameworks' own matmuls.

    python benchmarks/host.py [--record NAME]

The hot path is timed with a plan that does nothing, so that what is left is the library's own: building the key, the
look-up, the call. The bar: at most 25% of torch.matmul at 64 x 64 float32. 4 x 4 is printed without a bar.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import _rows

import dispatch
from dispatch import _api

BAR = 0.25


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


def measure(framework: str, size: int) -> dict[str, Any]:
    """Return the own matmul's host time, the whole call's, and the call's with a plan that does nothing."""
    room = dispatch.framework(framework)
    a = room.normal((size, size), "float32", 0, "cpu" if framework != "numpy" else None)
    own = room.native(dispatch.explain(a, a).problem)
    dispatch.matmul(a, a)
    key = _api._keys[type(a)](a, a, None)
    plan = _api._young[key]
    figures = {"own_us": least_us(lambda: own(a, a)), "call_us": least_us(lambda: dispatch.matmul(a, a))}
    _api._young[key] = lambda a, b: a
    figures["beyond_us"] = least_us(lambda: dispatch.matmul(a, a)) - least_us(lambda: (lambda a, b: a)(a, a))
    _api._young[key] = plan
    return {"framework": framework, "size": size, **figures}


def main() -> None:
    """Print the table; exit with 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    arguments = parser.parse_args()
    found = [measure(name, size) for size in (64, 4) for name in dispatch.installed()]
    torch_us = next((x["own_us"] for x in found if x["framework"] == "torch" and x["size"] == 64), None)
    print(f"{'':14}{'own matmul':>12}{'dispatch':>12}{'beyond plan':>14}{'of torch 64x64':>16}")
    missed = False
    for entry in found:
        share = entry["beyond_us"] / torch_us if torch_us else float("nan")
        missed |= entry["size"] == 64 and share > BAR
        name = f"{entry['framework']} {entry['size']}x{entry['size']}"
        print(
            f"{name:14}{entry['own_us']:>9.2f} us{entry['call_us']:>9.2f} us"
            f"{entry['beyond_us']:>11.2f} us{share:>15.0%}"
        )
    print(f"bar: {BAR:.0%} of torch.matmul at 64 x 64: {'missed' if missed else 'held'}")
    if arguments.record:
        _rows.append([{"table": "host", **x, **_rows.stamp(_rows.cpu_name())} for x in found], arguments.record)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
