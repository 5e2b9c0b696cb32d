"""What `[guard] mode = "strict"` lets through: random calls of ten families of data, and of kernels with a fault.

    python benchmarks/strict.py [--calls 10000] [--device cpu] [--record NAME]

A backend that multiplies in e4m3 is chosen on normal data; then each call has data of a random family, and half of them
a fault. Every result is compared with a full float64 product, row by row. `outside`: results returned beyond the
tolerance (or beyond 1.25x of what torch.matmul is wrong by on the same data, which the policy allows). `needless`:
results refused that were within it.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
import time
from collections import Counter
from typing import Any

os.environ["DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()  # decisions of a planted backend are nobody's

import _rows
import numpy as np
import torch
from _families import FAMILIES

import dispatch
from dispatch import _api
from dispatch.measuring.error import compare
from dispatch.measuring.guard import Guard
from dispatch.testing import FakeBackend, fake_timings, registered

TOLERANCE = 0.005
SIZES = [(16, 64, 48), (1, 200, 128), (100, 33, 77), (64, 256, 256), (200, 128, 300), (7, 300, 500), (130, 90, 64)]
RECIPES = ("e4m3:row", "e4m3:tensor")
FAULTS = ("wrong column", "wrong tile", "dropped k-block", "stale weight")


class Planted:
    """A product in e4m3 with a fault, if one is set."""

    def __init__(self, recipe: str) -> None:
        self.recipe, self.fault = recipe, ""

    def __call__(self, a: Any, b: Any, bias: Any = None) -> Any:
        """Return the product, or what the fault makes of it."""
        if self.fault == "stale weight":
            b = b + 0.3 * torch.randn_like(b)
        if self.fault == "dropped k-block":
            a, b = a[:, : -(-a.shape[1] // 2)], b[: -(-b.shape[0] // 2)]
        left, right = dispatch.quantize(a, self.recipe), dispatch.quantize(b, self.recipe, axis=-2)
        out = (left.dequantize("float32") @ right.dequantize("float32")).to(a.dtype)
        if self.fault == "wrong column":
            out[:, out.shape[1] // 3] *= -1
        elif self.fault == "wrong tile":
            out[: min(64, out.shape[0]), :64] = 0
        return out


def error(out: torch.Tensor, exact: np.ndarray[Any, Any], own: np.ndarray[Any, Any] | None = None) -> float:
    """Return the similarity_loss of the worst row."""
    return compare(out.double().cpu().numpy(), exact, own).similarity_loss


def one(random: np.random.Generator, kernel: Planted, size: tuple[int, int, int], device: str) -> tuple[str, str, str]:
    """Make one call and check it. Return the family, the fault and what came of it."""
    m, n, k = size
    family = str(random.choice([*FAMILIES]))
    kernel.fault = str(random.choice(FAULTS)) if random.random() < 0.5 else ""
    a, b = FAMILIES[family](torch.randn(m, k, device=device), torch.randn(k, n, device=device))
    a, b = a.bfloat16(), b.bfloat16()
    guard = _api.engine().guard
    out = dispatch.matmul(a, b)
    refused = bool(guard.counts["refused"])
    if not guard.counts["probed"]:
        raise SystemExit(f"nothing was probed: {dispatch.explain(a, b)}")
    own = torch.matmul(a, b)
    exact = (a.double() @ b.double()).bfloat16().double().cpu().numpy()
    found = own.double().cpu().numpy()
    allowed = max(TOLERANCE, 1.25 * error(own, exact, found))
    if error(out, exact, found) > allowed:
        return family, kernel.fault, "outside"
    unguarded = kernel(a, b)
    if refused:
        _api.engine().guard = Guard(_api.forget)  # the next call is served as if nothing had been
        dispatch.forget()
        needless = kernel.fault != "stale weight" and error(unguarded, exact, found) <= TOLERANCE
        return family, kernel.fault, "needless" if needless else "refused"
    _api.engine().guard.counts.clear()
    return family, kernel.fault, "passed"


def main() -> None:
    """Make the calls, print and record what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--record", metavar="NAME", help="append a row to results/NAME.jsonl")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    random = np.random.default_rng(arguments.seed)
    torch.manual_seed(arguments.seed)
    logging.getLogger("dispatch").setLevel(logging.ERROR)
    tally: Counter[tuple[str, str, str]] = Counter()
    kernels = {recipe: Planted(recipe) for recipe in RECIPES}
    begun = time.perf_counter()
    for recipe, kernel in kernels.items():
        policy = {"recipes": {"allow": [recipe]}, "guard": {"mode": "strict"}, "gate": {"min_speedup": 0.0}}
        with (
            registered(FakeBackend("planted", kernel, recipes=(recipe,))),
            fake_timings({"baseline": 100.0, "planted": 1.0}),
            dispatch.use_policy(backends={"allow": ["planted", "bf16_fallback"]}, **policy),
        ):
            for m, n, k in SIZES:
                kernel.fault = ""
                normal = [torch.randn(x, device=arguments.device).bfloat16() for x in ((m, k), (k, n))]
                if dispatch.explain(*normal).backend != "planted":
                    sys.exit(f"not chosen: {dispatch.explain(*normal)}")
            for _ in range(arguments.calls // len(kernels)):
                tally[one(random, kernel, SIZES[random.integers(len(SIZES))], arguments.device)] += 1
    seconds = time.perf_counter() - begun
    outcomes: Counter[str] = Counter()
    for (_, _, outcome), count in tally.items():
        outcomes[outcome] += count
    for family in FAMILIES:
        own = {x: sum(c for (f, _, o), c in tally.items() if (f, o) == (family, x)) for x in outcomes}
        print(f"{family:24}" + "  ".join(f"{name} {own[name]:5}" for name in sorted(outcomes)))
    print(f"{sum(outcomes.values())} calls in {seconds:.0f} s: {dict(outcomes)}; outside the tolerance: ", end="")
    print(outcomes["outside"])
    if arguments.record:
        entry = {
            "table": "strict",
            "calls": sum(outcomes.values()),
            "outcomes": {x: outcomes[x] for x in ("passed", "refused", "needless", "outside")},
            "by_family": {
                family: {x: sum(c for (f, _, o), c in tally.items() if (f, o) == (family, x)) for x in outcomes}
                for family in FAMILIES
            },
            "tolerance": TOLERANCE,
            "seed": arguments.seed,
            **_rows.stamp(),
        }
        _rows.append([entry], arguments.record)


if __name__ == "__main__":
    main()
