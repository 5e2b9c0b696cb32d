"""A tensor-parallel MLP on a mesh, by dispatch and by jnp.matmul: time, values and collectives. Needs several devices.

    python benchmarks/jax_mesh.py [--record NAME] [--devices 2] [--tokens 8192] [--width 8192] [--hidden 28672]
        [--deny cublas] [--limit-s 540]

x (tokens, width) is on every device; the first weight is spread by columns, the second by rows, with silu between them
and one sum after them. Forward as it is and with weights quantized once, and forward with gradients of x and of both
weights. Programs run in turns. Decisions are made anew, into a store of their own. After --limit-s it
ends where it is: of the two parts what is done is recorded. Without GPUs, at small sizes:
XLA_FLAGS=--xla_force_host_platform_device_count=2 python benchmarks/jax_mesh.py --tokens 64 --width 128 --hidden 512
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
from _jax_programs import add_limit, collectives, distance, in_turns, line, watching, within

import dispatch
from dispatch.integrations.jax import measure_parts

P = jax.sharding.PartitionSpec
OWN = "jnp.matmul"
Array = Any


def normal(seed: int, shape: tuple[int, ...], factor: float, sharding: Any) -> Array:
    """Return normal bfloat16 values times `factor`, made where they belong."""

    @partial(jax.jit, out_shardings=sharding)
    def made() -> Array:
        return (jax.random.normal(jax.random.key(seed), shape, jnp.float32) * factor).astype(jnp.bfloat16)

    return made()


def mlp(product: Callable[[Array, Any], Array]) -> Callable[..., Array]:
    """Return the MLP with its products made by `product`."""

    def run(x: Array, up: Any, down: Any) -> Array:
        return product(jax.nn.silu(product(x, up)), down)

    return run


def trained(run: Callable[..., Array]) -> Callable[..., Any]:
    """Return the output and the gradients of every operand for a given cotangent."""

    def step(x: Array, up: Array, down: Array, cotangent: Array) -> Any:
        out, back = jax.vjp(run, x, up, down)
        return out, *back(cotangent)

    return step


def main() -> None:
    """Print the tables and record the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=8192)
    parser.add_argument("--hidden", type=int, default=28672)
    parser.add_argument("--recipe", default="e4m3:row", help="of the weights that are quantized once")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--repeats", type=int, default=4)
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
    """Run and print everything; record the rows."""
    if len(jax.devices()) < given.devices:
        raise SystemExit(f"JAX has {len(jax.devices())} devices; {given.devices} were asked for")
    axis_types = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((given.devices,), ("x",), axis_types=axis_types, devices=jax.devices()[: given.devices])
    tokens, width, hidden = given.tokens, given.width, given.hidden
    whole, columns, rows = (jax.sharding.NamedSharding(mesh, P(*spec)) for spec in ((), (None, "x"), ("x", None)))
    x, cotangent = normal(0, (tokens, width), 1, whole), normal(3, (tokens, width), 1, whole)
    up, down = normal(1, (width, hidden), width**-0.5, columns), normal(2, (hidden, width), hidden**-0.5, rows)
    once = jax.jit(lambda w: dispatch.quantize(w.mT, given.recipe))
    quantized = once(up), once(down)

    own, ours = mlp(jnp.matmul), mlp(dispatch.matmul)
    tables = {
        "forward": {
            OWN: (own, (x, up, down)),
            "dispatch": (ours, (x, up, down)),
            "dispatch, weights quantized once": (mlp(lambda a, b: dispatch.matmul(a, b.mT)), (x, *quantized)),
        },
        "forward and backward": {
            OWN: (trained(own), (x, up, down, cotangent)),
            "dispatch": (trained(ours), (x, up, down, cotangent)),
        },
    }
    flops = {"forward": 4 * tokens * width * hidden, "forward and backward": 12 * tokens * width * hidden}
    shape = {"m": tokens, "n": hidden, "k": width, "dtype": "bfloat16", "framework": "jax"}
    for part, programs in tables.items():
        found = run(part, programs, given)
        entries = []
        for name, entry in found.items():
            print_one(name, entry)
            problem = {**shape, "pass": part, "devices": given.devices}
            tflops = flops[part] / entry["latency_us"] * 1e-6
            row = {"table": "mesh", "problem": problem, "candidate": name, "tflops": tflops, "data": "normal, seeded"}
            entries.append({**row, **entry, **_rows.stamp()})
        if given.record:
            _rows.append(entries, given.record)


def run(part: str, programs: dict[str, Any], given: Any) -> dict[str, dict[str, Any]]:
    """Return figures of each program of one part: times, collectives, distance from the own one's results."""
    print(f"\n{part}: {given.tokens} tokens, {given.width} -> {given.hidden} -> {given.width}, {given.devices} devices")
    compiled: dict[str, Any] = {}
    for name, (function, operands) in programs.items():
        start = time.perf_counter()
        with watching() as decisions:
            compiled[name] = jax.jit(function).lower(*operands).compile()
            if measure_parts():
                compiled[name] = jax.jit(function).lower(*operands).compile()
            left = measure_parts()
        unknown = f"; {left} products were not decided, and are JAX's own" if left else ""
        print(f"  {name}: compiled and decided in {time.perf_counter() - start:.1f} s{unknown}", flush=True)
        for decision in decisions:
            print(f"    {line(decision)}", flush=True)
    calls = {name: partial(compiled[name], *operands) for name, (_, operands) in programs.items()}
    errors = distances(calls)
    times = in_turns(calls, given.rounds, given.repeats)
    base, wanted = times[OWN][0], collectives(compiled[OWN])
    found = {}
    for name, (latency, spread, rounds) in times.items():
        kinds = collectives(compiled[name])
        found[name] = {
            "latency_us": latency,
            "spread_us": spread,
            "rounds": rounds,
            "speedup": base / latency,
            "baseline_us": base,
            "error": errors.get(name),
            "collectives": kinds,
            "same_collectives": kinds == wanted,
        }
    return found


def distances(calls: dict[str, Callable[[], Any]]) -> dict[str, dict[str, float]]:
    """Return by how much the results of each program differ from the own one's, the worst of all results."""
    wanted = jax.tree.leaves(calls[OWN]())
    found = {}
    for name in set(calls) - {OWN}:
        pairs = zip(jax.tree.leaves(calls[name]()), wanted, strict=True)
        each = [{key: float(value) for key, value in distance(*pair).items()} for pair in pairs]
        found[name] = {key: max(one[key] for one in each) for key in each[0]}
    return found


def print_one(name: str, entry: dict[str, Any]) -> None:
    """Print a program's line."""
    error = entry["error"]
    off = "" if error is None else f"relative L2 {error['relative_l2']:.1e}, worst row {error['similarity_loss']:.1e}"
    kinds = ", ".join(f"{count} {kind}" for kind, count in entry["collectives"].items()) or "no collectives"
    same = "same" if entry["same_collectives"] else "OTHER"
    times = f"{entry['latency_us']:10.1f} us (+-{entry['spread_us']:.1f}) {entry['speedup']:5.2f}x"
    print(f"  {name:34}{times}  {kinds} ({same})  {off}", flush=True)


if __name__ == "__main__":
    main()
