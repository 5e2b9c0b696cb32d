"""FP8 products in JAX beside XLA's own, on the same data, interleaved, all inside jitted programs. Needs an NVIDIA GPU.

    python benchmarks/jax_gemm.py [--record NAME] [--tables end_to_end dense quantize decode]

dense: e4m3 with row scales, quantized beforehand, against XLA's FP8 dot with the same scales and without any. decode:
few rows by wide weights that are cold in L2. end_to_end: bfloat16 in and out, quantizing included, against jnp.matmul.
quantize: bfloat16 to e4m3 with a scale a row, a (rows, k) as it lies and a (k, rows) transposed, against XLA's own.

Each program is a chain of products on operands that go round past L2. Of our configs the fastest is named, as tuning
keeps it.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import _rows
import jax
import jax.numpy as jnp
import numpy as np

import dispatch
from dispatch import Operand, Problem, RecipePair, ScalingRecipe
from dispatch._api import engine

ROW = "e4m3:row"
ROUNDS, REPEATS, CHAIN = 7, 2, 8
L2_BYTES = 128 << 20
Call = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function, and the sets of arrays that it is called with in turn."""


def backend(name: str = "triton_tma_fp8") -> Any:
    """Return a backend that is measured."""
    return engine().registry.backends[name].backend


def problem(m: int, n: int, k: int, prepared: Sequence[bool]) -> Problem:
    """Return the problem of one product of bfloat16 operands on this GPU."""
    a, b = (Operand("bfloat16", prepared=x) for x in prepared)
    arch = dispatch.machine()["archs"]["jax"][0]
    pair = RecipePair.parse(ROW)
    return Problem(m, n, k, a, b, "bfloat16", "jax", arch, "cuda:0", recipe=pair, accumulation="fast")


def plans(asked: Problem) -> dict[str, Any]:
    """Return the plan of each config worth measuring; say why there is none."""
    ours = backend()
    if reasons := ours.rejections(asked):
        sys.exit("; ".join(map(str, reasons)))
    return {name: ours.plan(asked, name) for name in ours.configs(asked)}


def timed(calls: dict[str, Call]) -> dict[str, tuple[float, float]]:
    """Return median and spread in us a product of each call, run in turns, with the device busy throughout."""
    with ThreadPoolExecutor(len(calls)) as pool:  # compiling takes longer than measuring
        ready = dict(zip(calls, pool.map(lambda call: compiled(*call), calls.values()), strict=True))
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(_span(ready[name]) / CHAIN)
    return {name: (statistics.median(times), max(times) - min(times)) for name, times in found.items()}


def compiled(function: Callable[..., Any], arrays: tuple[Any, ...]) -> Callable[[], Any]:
    """Return a call of CHAIN products in one program, each begun after the one before on the next set of operands.

    arrays: the sets. Every result is returned, so that none is dead code.
    """

    def chain(sets: Sequence[Any]) -> list[Any]:
        out: list[Any] = []
        for i in range(CHAIN):
            operands = sets[i % len(sets)]
            if out:
                operands, out[-1] = jax.lax.optimization_barrier((operands, out[-1]))
            out.append(function(*operands))
        return out

    ready = jax.jit(chain).lower(arrays).compile()
    return lambda: ready(arrays)


def _span(call: Callable[[], Any]) -> float:
    """Return the us a call, of REPEATS calls that wait for one another on the device alone."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    last = None
    for _ in range(REPEATS):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / REPEATS * 1e6


def random(seed: int, *shape: int) -> Any:
    """Return normal bfloat16 values."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16)


def xla_bare(a: Any, b: Any) -> Any:
    """Return XLA's product of FP8 operands, both K-major, without scales."""
    return jax.lax.dot_general(a.matrix, b.matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


def xla_scaled(a: Any, b: Any) -> Any:
    """Return XLA's product of the same times the scales of rows, in bfloat16."""
    sums = jax.lax.dot_general(a.matrix, b.matrix, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (sums * a.scale * b.scale.T).astype(jnp.bfloat16)


def error(out: Any, a: Any, b: Any) -> dict[str, float]:
    """Return the worst row's errors over 64 sampled rows, against float64 of the unquantized operands a and b."""
    rows = np.linspace(0, out.shape[0] - 1, min(64, out.shape[0])).astype(int)
    x, y = np.asarray(out[rows], np.float64), dispatch.framework("jax").reference(a[rows], b)
    difference, size = np.square(x - y).sum(1), np.square(y).sum(1)
    return {
        "similarity_loss": float((difference / (np.square(x).sum(1) + size)).max()),
        "relative_l2": float(np.sqrt(difference / size).max()),
        "max_abs_over_scale": float((np.abs(x - y).max(1) / np.abs(y).max(1)).max()),
    }


def row(table: str, size: Sequence[int], calls: dict[str, Call], peers: Sequence[str], **more: Any) -> dict[str, Any]:
    """Measure, print and return one row: our fastest, and the peers."""
    times = timed(calls)
    ours = min((name for name in times if name not in (*peers, "cublas")), key=lambda name: times[name][0])
    best, (latency, spread) = min(times[name][0] for name in peers), times[ours]
    m, n, k = (*size, 1)[:3]
    print(
        f"{table:11}{'x'.join(map(str, size)):17}{latency:9.1f} us {2e-6 * m * n * k / latency:6.0f} TFLOP/s "
        f"{best / latency:6.3f}x of the best peer  "
        + "  ".join(f"{name} {times[name][0]:.1f}" for name in times if name != ours)
        + f"  {ours}",
        flush=True,
    )
    return {
        "table": f"jax_{table}",
        "problem": {"m": m, "n": n, "k": k, "dtype": "bfloat16"},
        "candidate": f"triton_tma_fp8/{ROW}/{ours}",
        "latency_us": latency,
        "spread_us": spread,
        "rounds": ROUNDS,
        "tflops": 2e-6 * m * n * k / latency,
        "speedup": best / latency,
        "peers": {f"{name}@{jax.__version__}": times[name][0] for name in peers},
        "candidates": {name: {"latency_us": x[0], "spread_us": x[1]} for name, x in times.items() if name not in peers},
        "data": "normal",
        **_rows.stamp(),
        **more,
    }


def rotated(make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return sets of operands, made from seeds, which together are larger than L2, or as many as a chain has."""
    first = make(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    return [first, *(make(2 * seed) for seed in range(1, max(2, min(CHAIN, -(-2 * L2_BYTES // size)))))]


def beside_xla(table: str, size: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the row of a product of operands that are quantized already."""
    m, n, k = size
    recipe = ScalingRecipe.parse(ROW)

    def make(seed: int) -> tuple[Any, Any]:
        a, b = random(seed, m, k), random(seed + 1, k, n)
        return backend().prepare(a, recipe, axis=-1), backend().prepare(b, recipe, axis=-2)

    sets = rotated(make)
    found = plans(problem(m, n, k, (True, True)))
    calls: dict[str, Call] = {name: (plan, sets) for name, plan in found.items()}
    peers: dict[str, Call] = {"XLA row scales": (xla_scaled, sets), "XLA no scales": (xla_bare, sets)}
    out = next(iter(found.values()))(*sets[0])
    yield row(table, size, calls | peers, [*peers], error=error(out, random(0, m, k), random(1, k, n)))


def end_to_end(table: str, size: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of a bfloat16 product, quantizing included, and with the weight prepared."""
    m, n, k = size
    sets = rotated(lambda seed: (random(seed, m, k), random(seed + 1, k, n)))
    for prepared in (False, True):
        given, others = _weights("triton_tma_fp8", sets, prepared), _weights("cublas", sets, prepared)
        found = plans(asked := problem(m, n, k, (False, prepared)))
        calls: dict[str, Call] = {name: (plan, given) for name, plan in found.items()}
        peers: dict[str, Call] = {"jnp.matmul": (jnp.matmul, sets)}
        calls["cublas"] = (backend("cublas").plan(asked), others)
        out, other = next(iter(found.values()))(*given[0]), calls["cublas"][0](*others[0])
        more = {"weight_prepared": prepared, "error": error(out, *sets[0]), "cublas": error(other, *sets[0])}
        yield row(table, size, calls | peers, [*peers], **more)


def _weights(name: str, sets: list[tuple[Any, ...]], prepared: bool) -> list[tuple[Any, ...]]:
    recipe = ScalingRecipe.parse(ROW)
    return [(a, backend(name).prepare(b, recipe, axis=-2) if prepared else b) for a, b in sets]


def quantize(table: str, size: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the rows of quantizing beside XLA's own, and print the bytes moved a second."""
    recipe, ours = ScalingRecipe.parse(ROW), backend()
    rows, k = size
    for axis, shape, layout in ((-1, (rows, k), "row"), (-2, (k, rows), "col")):
        sets = rotated(lambda seed, shape=shape: (random(seed, *shape),))
        calls: dict[str, Call] = {
            "ours": (lambda given, axis=axis: tuple(ours.prepare(given, recipe, axis=axis)), sets),
            "XLA": (lambda given, axis=axis: by_xla(given if axis == -1 else given.T), sets),
        }
        entry = row(table, size, calls, ["XLA"], layout=layout)
        print(f"{'':11}{layout}: {3e-6 * rows * k / entry['latency_us']:.2f} TB/s")
        yield {**entry, "tflops": None}


def by_xla(x: Any) -> tuple[Any, Any]:
    """Return rows as e4m3 with a scale each, as XLA compiles it."""
    values = x.astype(jnp.float32)
    scale = jnp.abs(values).max(1, keepdims=True) / 448
    return (values * (1 / scale)).astype(jnp.float8_e4m3fn), scale


TABLES: dict[str, tuple[Callable[..., Iterator[dict[str, Any]]], Sequence[Sequence[int]]]] = {
    "end_to_end": (end_to_end, [(8192,) * 3, (4096,) * 3]),
    "dense": (beside_xla, [(8192,) * 3, (4096,) * 3]),
    "quantize": (quantize, [(8192, 8192)]),
    "decode": (beside_xla, [(16, 8192, 8192), (64, 8192, 8192)]),
}


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"JAX {jax.__version__} has no GPU here, only {jax.default_backend()}")
    ratios: dict[str, list[float]] = {name: [] for name in arguments.tables}
    for turn, name in itertools.product(range(2), arguments.tables):  # the largest of each table first
        function, sizes = TABLES[name]
        for entry in function(name, sizes[turn]) if turn < len(sizes) else ():
            ratios[name].append(entry["speedup"])
            if arguments.record:
                _rows.append([entry], arguments.record)
    for name, found in ratios.items():
        print(f"{name}: geometric mean {statistics.geometric_mean(found):.3f}, least {min(found):.3f}")


if __name__ == "__main__":
    main()
