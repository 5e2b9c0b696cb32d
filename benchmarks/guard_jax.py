"""What `[guard] traced = "callback"` adds to jitted products whose operands are both quantized. Needs an NVIDIA GPU.

    python benchmarks/guard_jax.py [--record NAME] [--small] [--limit-s 540]

calls: one product a program, launched again and again. chain: CHAIN products in one program. Both without and with
callbacks, in turns, everything included, host and device: the 95% interval of the mean of the relative differences of
pairs. host: until a call returns, nothing else being under way. --small: a trial on a CPU, with an emulated backend.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

os.environ["DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()  # chosen however slow it is: nobody else's decision

import _rows
import jax
import jax.numpy as jnp
from _guards import Emulated, interval
from _jax_programs import add_limit, within

import dispatch
from dispatch.testing import fake_timings, registered

Row = dict[str, Any]
SIZES = [(4096, 4096, 4096), (8192, 8192, 8192)]
SMALL = [(64, 96, 128)]
PAIRS, CHAIN = 60, 8
SPAN_US = 5e3
"""About how long one timing is to last."""


@contextmanager
def machine(small: bool) -> Iterator[None]:
    """Have products by row scales chosen, however fast they are."""
    with ExitStack() as stack:
        if small:
            stack.enter_context(registered(Emulated("emulated", recipes=("e4m3:row",))))
            stack.enter_context(fake_timings({"baseline": 100.0, "emulated": 20.0}))
        allow = ["emulated" if small else "triton_tma_fp8", "cublas", "bf16_fallback"]
        stack.enter_context(
            dispatch.use_policy(
                tuning={"budget_ms": 300, "compile_ms": 15000},
                backends={"allow": allow},
                recipes={"allow": ["e4m3:row"]},
                gate={"min_speedup": 0.0, "min_speedup_lossless": 1e9},
            )
        )
        yield


def one(a: Any, b: Any) -> Any:
    """Return a product."""
    return dispatch.matmul(a, b)


def chain(a: Any, b: Any) -> list[Any]:
    """Return products, each begun after the one before."""
    out = [dispatch.matmul(a, b)]
    for _ in range(CHAIN - 1):
        (a, b), out[-1] = jax.lax.optimization_barrier(((a, b), out[-1]))
        out.append(dispatch.matmul(a, b))
    return out


def programs(function: Callable[..., Any], a: Any, b: Any) -> dict[str, Callable[[], Any]]:
    """Return calls of a function compiled without and with callbacks. They take JAX's own way to launch each."""
    found: dict[str, Callable[[], Any]] = {}
    for traced in ("off", "callback"):
        with dispatch.use_policy(guard={"traced": traced}):
            jitted = jax.jit(function)
            told = "python_" in jitted.lower(a, b).as_text()
            jax.block_until_ready(jitted(a, b))
        if told != (traced == "callback"):
            raise SystemExit(f"traced = {traced!r}, but the program {'has' if told else 'has no'} callback")
        found[traced] = partial(jitted, a, b)
    return found


def timed(
    function: Callable[..., Any], a: Any, b: Any, products: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Return us a product of each of PAIRS turns, and us until a call returns, without and with callbacks."""
    calls = programs(function, a, b)
    spent: dict[str, list[float]] = {name: [] for name in calls}
    host: dict[str, list[float]] = {name: [] for name in calls}
    policies = {name: dispatch.use_policy(guard={"traced": name}) for name in calls}
    repeats = dict.fromkeys(calls, 2)
    for turn in range(-4, PAIRS):
        for name in list(calls) if turn % 2 else list(calls)[::-1]:
            with policies[name]:
                begun = time.perf_counter()
                for _ in range(repeats[name]):
                    out = calls[name]()
                jax.block_until_ready(out)
                took_us = (time.perf_counter() - begun) * 1e6 / repeats[name]
                begun = time.perf_counter()
                out = calls[name]()
                returned_us = (time.perf_counter() - begun) * 1e6
                jax.block_until_ready(out)
            if turn >= 0:
                spent[name].append(took_us / products)
                host[name].append(returned_us)
            else:
                repeats[name] = max(2, round(SPAN_US / took_us))
    return spent, {name: statistics.median(times) for name, times in host.items()}


def cost(sizes: Sequence[tuple[int, int, int]]) -> Iterator[Row]:
    """Yield a row for each size."""
    for m, n, k in sizes:
        a = jax.random.normal(jax.random.key(0), (m, k), jnp.bfloat16)
        b = jax.random.normal(jax.random.key(1), (k, n), jnp.bfloat16)
        decision = dispatch.explain(a, b)
        if decision.candidate.recipe is None:
            raise SystemExit(f"nothing is quantized: {decision}")
        found: Row = {"pairs": PAIRS}
        for name, function, products in (("calls", one, 1), ("chain", chain, CHAIN)):
            spent, host = timed(function, a, b, products)
            added, low, high = interval(spent["off"], spent["callback"])
            off_us, callback_us = (statistics.median(spent[x]) for x in ("off", "callback"))
            found[name] = {"off_us": off_us, "callback_us": callback_us, "added": added, "low": low, "high": high}
            found[name] |= {"host_off_us": host["off"], "host_callback_us": host["callback"]}
            print(
                f"{m} x {n} x {k} {name}: {off_us:.1f} us off, {callback_us:.1f} us with callbacks, {added:+.1%} "
                f"({low:+.1%} to {high:+.1%} of {PAIRS} pairs); returns after {host['off']:.0f} and "
                f"{host['callback']:.0f} us; {decision.candidate}",
                flush=True,
            )
        jax.effects_barrier()
        if dispatch.stats()["guard"]["tripped"]:
            raise SystemExit(f"tripped on normal data: {dispatch.explain(a, b)}")
        yield _rows.row("guard_cost_jax", decision, data="normal", **found)


def main() -> None:
    """Measure, print and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--small", action="store_true", help="a trial on a CPU")
    add_limit(parser)
    arguments = parser.parse_args()
    within(arguments.limit_s)
    begun = time.perf_counter()
    with machine(arguments.small):
        for entry in cost(SMALL if arguments.small else SIZES):
            print(f"  at {time.perf_counter() - begun:.0f} s", flush=True)
            if arguments.record:
                _rows.append([entry], arguments.record)


if __name__ == "__main__":
    main()
