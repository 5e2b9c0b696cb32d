"""What the scripts about whole JAX programs share: timing in turns, collectives, distances, what was decided."""

from __future__ import annotations

import argparse
import faulthandler
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp

import dispatch

COLLECTIVES = r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
LIMIT_S = 540
Timing = tuple[float, float, int]
"""Median and spread (from the lower to the upper quartile) in us, and rounds."""


def add_limit(parser: argparse.ArgumentParser) -> None:
    """Give a script the option --limit-s."""
    parser.add_argument("--limit-s", type=float, default=LIMIT_S, help="then say where it stands, and end")


def within(limit_s: float) -> None:
    """End the process after that time with every thread's stack, also where it waits in XLA for what never comes."""
    faulthandler.dump_traceback_later(limit_s, exit=True)


def in_turns(calls: dict[str, Callable[[], Any]], rounds: int, repeats: int) -> dict[str, Timing]:
    """Return the time of each call, run `repeats` times in each of the rounds, in another order each round."""
    spent: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for name in names:
        jax.block_until_ready(calls[name]())
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            start = time.perf_counter()
            for _ in range(repeats):
                out = calls[name]()
            jax.block_until_ready(out)
            spent[name].append((time.perf_counter() - start) * 1e6 / repeats)
    return {name: (statistics.median(times), _quartiles(times), rounds) for name, times in spent.items()}


def _quartiles(times: list[float]) -> float:
    if len(times) < 2:
        return 0.0
    low, _, high = statistics.quantiles(times, n=4)
    return high - low


def collectives(program: Any) -> dict[str, int]:
    """Return how many collectives of each kind a compiled program has."""
    return dict(Counter(re.findall(COLLECTIVES, program.as_text())))


@jax.jit
def distance(found: Any, wanted: Any) -> dict[str, Any]:
    """Return relative L2 of the whole, and the similarity loss of the worst row, in float32."""
    x, y = (v.astype(jnp.float32).reshape(-1, v.shape[-1]) for v in (found, wanted))
    gap, size = jnp.square(x - y).sum(1), jnp.square(x).sum(1) + jnp.square(y).sum(1)
    return {
        "relative_l2": jnp.sqrt(gap.sum() / jnp.square(y).sum()),
        "similarity_loss": jnp.where(size > 0, gap / size, 0).max(),
    }


class Watching:
    """Keeps every decision that is made while it is registered."""

    name = "watching"

    def __init__(self) -> None:
        self.decisions: list[dispatch.Decision] = []

    @dispatch.hookimpl
    def dispatch_decided(self, decision: dispatch.Decision) -> None:
        """Keep it."""
        self.decisions.append(decision)


@contextmanager
def watching() -> Iterator[list[dispatch.Decision]]:
    """Give the list of decisions made within the block."""
    plugin = Watching()
    dispatch.register(plugin, distribution="benchmarks")
    try:
        yield plugin.decisions
    finally:
        dispatch.unregister(plugin.name, distribution="benchmarks")


def line(decision: dispatch.Decision) -> str:
    """Return one decision: its problem, what was chosen, and both times."""
    problem = decision.problem
    sizes = "x".join(map(str, (*problem.batch, problem.m, problem.n, problem.k)))
    recipes = "" if problem.b.recipe is None else f" by {problem.b.recipe}"
    own = decision.baseline.latency_us if decision.baseline else float("nan")
    best = decision.measurement.latency_us if decision.measurement else float("nan")
    ratio = f"{decision.speedup:5.2f}x" if decision.speedup else "     -"
    return f"{problem.op:6} {sizes + recipes:32} own {own:9.1f} us  chosen {best:9.1f} us {ratio}  {decision.candidate}"
