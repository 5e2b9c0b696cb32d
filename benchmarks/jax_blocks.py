"""A transformer block trained with dispatched and with plain products, in Flax (linen, nnx) and Equinox.

    python benchmarks/jax_blocks.py [--record NAME] [--libraries linen nnx equinox] [--batch 32] [--sequence 512]
        [--deny cublas] [--limit-s 540]

For each library, from the same data: `--steps` steps of Adam with dispatch, with the own products, and with the own
ones from another seed. Printed: the three losses on data that was not trained on, whether dispatch's is no further from
the own one's than that of the other seed is, and the time of a step, both in turns. Parameters are float32, products
bfloat16. Then each product that was not met before: jnp.matmul against what was chosen for it. Decisions are made anew,
into a store of their own. After --limit-s it ends where it is; what is done is recorded. On a CPU: --batch 2
--sequence 16 --width 64 --hidden 128 --heads 2.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from typing import Any

os.environ["DISPATCH_CACHE_DIR"] = tempfile.mkdtemp()

import _rows
import jax
import jax.numpy as jnp
import optax
from _jax_programs import add_limit, in_turns, line, watching, within

import dispatch

Array = Any
OWN, OURS, OTHER = "own", "dispatch", "own, another seed"


def models(library: str, *sizes: int, dispatched: bool) -> tuple[Any, Any]:
    """Return init(seed, x) and apply(parameters, x) of a library's block."""
    if library == "equinox":
        from _blocks_equinox import model

        return model(*sizes, dispatched=dispatched)
    import _blocks_flax

    make = {"linen": _blocks_flax.linen_model, "nnx": _blocks_flax.nnx_model}[library]
    return make(*sizes, dispatched=dispatched)


class Task:
    """What the block learns: a fixed random mixing of each row of x with the one before it."""

    def __init__(self, batch: int, sequence: int, width: int) -> None:
        self.shape = (batch, sequence, width)
        key = jax.random.key(1000)
        self.mixing = (jax.random.normal(key, (width, width)) * width**-0.5).astype(jnp.bfloat16)

    def data(self, step: Any) -> tuple[Array, Array]:
        """Return x and what is wanted for it, in step `step`."""
        x = jax.random.normal(jax.random.fold_in(jax.random.key(7), step), self.shape, jnp.bfloat16)
        return x, jnp.tanh((x + jnp.roll(x, 1, 1)) @ self.mixing)


def training(apply: Callable[..., Array], task: Task, rate: float) -> tuple[Any, Any, Any]:
    """Return the optimizer, a jitted step(parameters, state, number) and a jitted loss(parameters, number)."""
    optimizer = optax.adam(rate)

    def loss(parameters: Any, number: Any) -> Array:
        x, wanted = task.data(number)
        return jnp.square(apply(parameters, x).astype(jnp.float32) - wanted.astype(jnp.float32)).mean()

    @jax.jit
    def step(parameters: Any, state: Any, number: Any) -> tuple[Any, Any, Array]:
        value, gradients = jax.value_and_grad(loss)(parameters, number)
        updates, state = optimizer.update(gradients, state, parameters)
        return optax.apply_updates(parameters, updates), state, value

    return optimizer, step, jax.jit(loss)


def main() -> None:
    """Train, time, print and record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--libraries", nargs="*", default=["linen", "nnx", "equinox"])
    for name, default in (("batch", 32), ("sequence", 512), ("width", 4096), ("hidden", 16384), ("heads", 32)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--compile-ms", type=float, default=20000, help="for compiling candidates, a product")
    parser.add_argument(
        "--deny", nargs="*", default=["cublas"], help="backends left out; XLA tunes an FP8 dot for long"
    )
    add_limit(parser)
    given = parser.parse_args()
    within(given.limit_s)
    tuning = {"compile_ms": given.compile_ms}
    with dispatch.use_policy(backends={"deny": given.deny}, tuning=tuning):
        measure(given)


def measure(given: Any) -> None:
    """Run and print everything; record the rows of each library as it ends."""
    task, decided = Task(given.batch, given.sequence, given.width), set()
    for library in given.libraries:
        start = time.perf_counter()
        with watching() as decisions:
            entry = compare(library, task, given)
        found = {_problem(x): x for x in decisions if _problem(x) not in decided}
        decided |= set(found)
        rows = [entry]
        print("  products that were new here, jnp.matmul against the chosen one" if found else "  no new products")
        for _, decision in sorted(found.items()):
            print(f"    {line(decision)}")
            rows.append(_rows.row("jax_training_products", decision, op=decision.problem.op, data="normal, seeded"))
        print(f"  {library} took {time.perf_counter() - start:.1f} s in all", flush=True)
        if given.record:
            _rows.append(rows, given.record)


def _problem(decision: dispatch.Decision) -> tuple[Any, ...]:
    problem = decision.problem
    return problem.op, problem.batch, problem.m, problem.n, problem.k


def compare(library: str, task: Task, given: Any) -> dict[str, Any]:
    """Train one library's block in three ways and return its row."""
    sizes = given.width, given.hidden, given.heads
    print(f"\n{library}: batch {given.batch}, sequence {given.sequence}, width {given.width}, hidden {given.hidden}")
    losses: dict[str, float] = {}
    calls: dict[str, Callable[[], Any]] = {}
    for dispatched in (False, True):
        start = time.perf_counter()
        init, apply = models(library, *sizes, dispatched=dispatched)
        optimizer, step, loss = training(apply, task, given.rate)
        for name, seed in {OURS: 0}.items() if dispatched else {OTHER: 1, OWN: 0}.items():
            parameters = init(seed, task.data(0)[0][:1])
            state = optimizer.init(parameters)
            first = float(loss(parameters, given.steps))
            for number in range(given.steps):
                parameters, state, value = step(parameters, state, number)
            losses[name] = float(loss(parameters, given.steps))
            print(f"  {name:18} loss {first:.5f} -> {losses[name]:.5f}, in training {float(value):.5f}", flush=True)
        calls[name] = partial(step, parameters, state, 0)
        print(f"    {time.perf_counter() - start:.1f} s, compiling and deciding included", flush=True)
    gap, seeds = abs(losses[OURS] - losses[OWN]), abs(losses[OTHER] - losses[OWN])
    within = gap <= seeds
    print(f"  |dispatch - own| {gap:.2e}, |another seed - own| {seeds:.2e}: {'no further' if within else 'FURTHER'}")
    times = in_turns(calls, given.rounds, 2)
    (own, _, _), (ours, spread, rounds) = times[OWN], times[OURS]
    print(f"  a step: own {own / 1e3:.2f} ms, dispatch {ours / 1e3:.2f} ms (+-{spread / 1e3:.2f}), {own / ours:.2f}x")
    tokens = given.batch * given.sequence
    problem = {"m": tokens, "n": given.hidden, "k": given.width, "dtype": "bfloat16", "framework": "jax"}
    return {
        "table": "jax_training",
        "problem": {**problem, "library": library, "batch": given.batch, "sequence": given.sequence},
        "candidate": OURS,
        "latency_us": ours,
        "spread_us": spread,
        "rounds": rounds,
        "baseline_us": own,
        "speedup": own / ours,
        "losses": losses,
        "steps": given.steps,
        "no_further_than_a_seed": within,
        "data": "normal, seeded",
        "versions_of_libraries": {name: _rows._version(name) for name in ("flax", "equinox", "optax")},
        **_rows.stamp(),
    }


if __name__ == "__main__":
    main()
