"""FP8 products in JAX beside XLA's own, on the same data, interleaved, all inside jitted programs. Needs an NVIDIA GPU.

    python benchmarks/jax_gemm.py [--record NAME] [--tables dense end_to_end decode mid block quantize chosen]
        [--sizes 8192x28672x8192] [--limit-s 540]

dense: kernels of pallas_fp8 and of triton_tma_fp8, e4m3 with row scales, quantized beforehand, against XLA's FP8 dot
with the same scales, and torch's scaled matmul where torch is. mid, decode: smaller products, and few rows by weights
that are cold in L2. block: 1x128 by 128x128 scales, against XLA's FP8 dot without scales, a bound. end_to_end: bfloat16
in and out, quantizing included, of each backend against jnp.matmul; layout is b's, `row` as in `a @ b`, `col` as in
`a @ w.T`. quantize: bfloat16 to e4m3 with a scale a row, against XLA's own. chosen: what dispatch.matmul takes by the
default gates, jitted; it measures every candidate first, which takes longest.

Each program is a chain of products on operands that go round past L2. Of a backend's configs the fastest counts, as
tuning keeps it. What of ours fails to compile or to run is reported and left out; a peer that cannot run is null.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import _rows
import jax
import jax.numpy as jnp
import numpy as np
from _jax_programs import add_limit, within

import dispatch
from dispatch import Operand, Problem, RecipePair
from dispatch._api import engine

ROW, BLOCKS = "e4m3:row", "e4m3:1x128@e4m3:128x128"
PALLAS, TRITON, CUBLAS, NATIVE = "pallas_fp8", "triton_tma_fp8", "cublas", "jnp.matmul"
XLA, BARE, TORCH = "XLA row scales", "XLA no scales", "torch row scales"
SQUARE = [(8192,) * 3, (4096,) * 3, (2048,) * 3]
DENSE = [(4096,) * 3, (8192,) * 3, (8192, 28672, 8192), (8192, 8192, 28672)]
MID = [(1024,) * 3, (2048,) * 3, (512, 8192, 8192)]
DECODE = [(16, 8192, 8192), (64, 8192, 8192), (128, 8192, 8192)]
ROUNDS, REPEATS, CHAIN = 7, 2, 8
L2_BYTES = 128 << 20
Call = tuple[Callable[..., Any], list[tuple[Any, ...]]]
"""A function, and the sets of arrays that it is called with in turn."""
Ready = Callable[[], Any]
Row = dict[str, Any]


def backend(name: str) -> Any:
    """Return a backend that is measured."""
    return engine().registry.backends[name].backend


def problem(size: Sequence[int], prepared: Sequence[bool], recipe: str = ROW) -> Problem:
    """Return the problem of one product of bfloat16 operands on this GPU."""
    a, b = (Operand("bfloat16", prepared=x) for x in prepared)
    arch = dispatch.machine()["archs"]["jax"][0]
    mode = "fast" if recipe == ROW else "promoted"
    pair = RecipePair.parse(recipe)
    return Problem(*size, a, b, "bfloat16", "jax", arch, "cuda:0", recipe=pair, accumulation=mode)


def configs(name: str, asked: Problem) -> list[str]:
    """Return the configs of a backend for a problem; none, with the reason printed, where it cannot run."""
    if reasons := backend(name).rejections(asked):
        print(f"  {name}: {'; '.join(map(str, reasons))}", file=sys.stderr, flush=True)
        return []
    return list(backend(name).configs(asked))


def timed(calls: dict[str, Call], ready: dict[str, Ready] | None = None) -> dict[str, tuple[float, float]]:
    """Return median and spread in us a product of each call that runs, in turns, with the device busy throughout.

    ready: calls of CHAIN products that need no compiling.
    """
    programs = dict(ready or {})
    with ThreadPoolExecutor(max(1, len(calls))) as pool:  # compiling takes longer than measuring
        for name, program in {name: pool.submit(compiled, *call) for name, call in calls.items()}.items():
            try:
                programs[name] = program.result()
            except Exception as fault:
                print(f"  {name}: {type(fault).__name__}: {str(fault)[:300]}", file=sys.stderr, flush=True)
    for name, program in list(programs.items()):
        try:
            _wait(program())
        except Exception as fault:
            print(f"  {name}: {type(fault).__name__}: {str(fault)[:300]}", file=sys.stderr, flush=True)
            del programs[name]
    found: dict[str, list[float]] = {name: [] for name in programs}
    names = list(programs)
    for turn in range(ROUNDS):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(_span(programs[name]) / CHAIN)
    return {name: (statistics.median(times), max(times) - min(times)) for name, times in found.items()}


def compiled(function: Callable[..., Any], sets: list[tuple[Any, ...]]) -> Ready:
    """Return a call of CHAIN products in one program, each begun after the one before on the next set of operands.

    Every result is returned, so that none is dead code.
    """

    def chain(sets: Sequence[Any]) -> list[Any]:
        out: list[Any] = []
        for i in range(CHAIN):
            operands = sets[i % len(sets)]
            if out:
                operands, out[-1] = jax.lax.optimization_barrier((operands, out[-1]))
            out.append(function(*operands))
        return out

    ready = jax.jit(chain).lower(sets).compile()
    return lambda: ready(sets)


def _span(call: Ready) -> float:
    """Return the us a call, of REPEATS calls that wait for one another on the device alone."""
    _wait(call())
    start = time.perf_counter()
    last = None
    for _ in range(REPEATS):
        last = call()
    _wait(last)
    return (time.perf_counter() - start) / REPEATS * 1e6


def _wait(result: Any) -> None:
    """Wait for JAX's arrays, or call what waits for others."""
    if callable(result):
        result()
    else:
        jax.block_until_ready(result)


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


def by_torch(sets: list[tuple[Any, ...]]) -> Ready:
    """Return a call of CHAIN products by torch's scaled matmul, on the memory of JAX's arrays."""
    import torch

    def seen(x: Any) -> Any:
        if x.dtype == jnp.float32:
            return torch.from_dlpack(x)
        return torch.from_dlpack(jax.lax.bitcast_convert_type(x, jnp.uint8)).view(torch.float8_e4m3fn)

    given = [(seen(a.matrix), seen(b.matrix).t(), seen(a.scale), seen(b.scale).t()) for a, b in sets]
    options = {"out_dtype": torch.bfloat16, "use_fast_accum": True}

    def call() -> Callable[[], None]:
        for i in range(CHAIN):
            a, b, scale_a, scale_b = given[i % len(given)]
            torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, **options)
        return torch.cuda.synchronize

    return call


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


def rotated(make: Callable[[int], tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Return sets of operands, made from seeds, which together are larger than L2, or as many as a chain has."""
    first = make(0)
    size = sum(x.nbytes for x in jax.tree.leaves(first))
    return [first, *(make(2 * seed) for seed in range(1, max(2, min(CHAIN, -(-2 * L2_BYTES // size)))))]


def encoded(name: str, size: Sequence[int], recipe: str = ROW) -> list[tuple[Any, Any]]:
    """Return sets of operands as a backend's kernels take them, quantized by it; the same values for each backend."""
    m, n, k = size
    pair, ours = RecipePair.parse(recipe), backend(name)

    def make(seed: int) -> tuple[Any, Any]:
        a, b = random(seed, m, k), random(seed + 1, k, n)
        return ours.prepare(a, pair.a, axis=-1), ours.prepare(b, pair.b, axis=-2)

    return rotated(make)


def row(
    table: str, size: Sequence[int], times: dict[str, tuple[float, float]], ours: str, against: str, **more: Any
) -> Row:
    """Print and return one row: `ours`, a backend with its config, and the rest as peers; speedup: over `against`."""
    m, n, k = (*size, 1)[:3]
    latency, spread = times[ours]
    flops = None if len(size) < 3 else 2e-6 * m * n * k
    bar = times[against][0] / latency if against in times else None
    facts = " ".join(str(more[name]) for name in ("layout", "prepared") if name in more)
    others = "  ".join(f"{name} {times[name][0]:.1f}" for name in times if name != ours)
    print(
        f"{table:11}{'x'.join(map(str, size)):16}{facts:14}{latency:9.1f} us "
        + (f"{flops / latency:6.0f} TFLOP/s " if flops else "")
        + (f"{bar:6.3f}x of {against}" if bar else f"no {against}")
        + f"  {ours}  |  {others}",
        flush=True,
    )
    peers = more.pop("peers", [name for name in times if name != ours])
    return {
        "table": f"jax_{table}",
        "problem": {"m": m, "n": n, "k": k, "dtype": "bfloat16"},
        "candidate": ours,
        "latency_us": latency,
        "spread_us": spread,
        "rounds": ROUNDS,
        "tflops": None if flops is None else flops / latency,
        "speedup": bar,
        "against": against,
        "peers": {f"{name}@{_version(name)}": times[name][0] if name in times else None for name in peers},
        "candidates": {name: {"latency_us": x[0], "spread_us": x[1]} for name, x in times.items()},
        "data": "normal",
        **_rows.stamp(),
        **more,
    }


def _version(peer: str) -> str:
    if peer.startswith("torch"):
        import importlib.metadata

        return importlib.metadata.version("torch") if "torch" in dispatch.installed() else "none"
    return jax.__version__


# What each table measures

BEST: dict[tuple[str, tuple[int, ...]], str] = {}
"""The fastest config of a backend at a size, where its kernels were timed."""


def kernels(table: str, size: Sequence[int], recipe: str = ROW, others: Sequence[str] = (XLA, TORCH)) -> Iterator[Row]:
    """Yield the row of the kernels alone: the fastest of pallas_fp8, beside that of triton_tma_fp8 and `others`."""
    m, n, k = size
    asked = problem(size, (True, True), recipe)
    calls: dict[str, Call] = {}
    sets = {name: encoded(name, size, recipe) for name in (PALLAS, TRITON)}
    for name, given in sets.items():
        for config in configs(name, asked):
            calls[f"{name}/{recipe}/{config}"] = (backend(name).plan(asked, config), given)
    ready: dict[str, Ready] = {}
    notes = []
    for peer in others:
        if peer != TORCH:
            calls[peer] = ({XLA: xla_scaled, BARE: xla_bare}[peer], sets[TRITON])
            continue
        try:
            ready[peer] = by_torch(sets[TRITON])
        except Exception as fault:  # no torch, or none for this GPU
            notes.append(f"{peer}: {type(fault).__name__}: {str(fault)[:200]}")
    times = timed(calls, ready)
    found = {}
    for name in (PALLAS, TRITON):
        mine = [x for x in times if x.startswith(f"{name}/")]
        if mine:
            found[name] = min(mine, key=lambda x: times[x][0])
            if recipe == ROW:
                BEST[name, tuple(size)] = found[name].rpartition("/")[2]
    if PALLAS not in found:
        print(f"{table:11}{'x'.join(map(str, size)):16}no config of {PALLAS} ran", flush=True)
        return
    kept = {**{found[x]: times[found[x]] for x in found}, **{x: times[x] for x in others if x in times}}
    if TRITON in found:
        kept[TRITON] = kept.pop(found[TRITON])
    plan = backend(PALLAS).plan(asked, found[PALLAS].rpartition("/")[2])
    wrong = error(plan(*sets[PALLAS][0]), random(0, m, k), random(1, k, n))
    made = row(table, size, kept, found[PALLAS], others[0], peers=[TRITON, *others], error=wrong, notes=notes)
    tried = {name: {"latency_us": x[0], "spread_us": x[1]} for name, x in times.items() if "/" in name}
    for name in sorted(tried, key=lambda x: tried[x]["latency_us"]):
        print(f"{'':27}{tried[name]['latency_us']:9.1f} us  {name}", flush=True)
    yield {**made, "candidates": tried}


def fastest(name: str, size: Sequence[int]) -> str | None:
    """Return the fastest config of a backend's kernels at a size, measured unless it was; None where it has none."""
    key = (name, tuple(size))
    if key not in BEST:
        asked = problem(size, (True, True))
        given = encoded(name, size)
        times = timed({x: (backend(name).plan(asked, x), given) for x in configs(name, asked)})
        if not times:
            return None
        BEST[key] = min(times, key=lambda x: times[x][0])
    return BEST[key]


def end_to_end(table: str, size: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of a bfloat16 product, quantizing included: both operands, as they lie, or the weight prepared."""
    m, n, k = size
    chosen = {name: config for name in (TRITON, PALLAS) if (config := fastest(name, size)) is not None}
    lying: dict[str, list[tuple[Any, ...]]] = {
        "row": rotated(lambda seed: (random(seed, m, k), random(seed + 1, k, n))),
        "col": rotated(lambda seed: (random(seed, m, k), random(seed + 1, n, k))),
    }
    pair = RecipePair.parse(ROW)
    for layout, prepared in (("row", False), ("row", True), ("col", False)):
        sets, asked = lying[layout], problem(size, (False, prepared))
        calls: dict[str, Call] = {NATIVE: (_laid(jnp.matmul, layout), sets)}
        for name in (*chosen, CUBLAS):
            ours = backend(name)
            given = [(a, ours.prepare(b, pair.b, axis=-2)) for a, b in sets] if prepared else sets
            config = chosen.get(name)
            called = f"{name}/{ROW}/{config}" if config else f"{name}/{ROW}"
            calls[called] = (_laid(ours.plan(asked, config), layout), given)
        times = timed(calls)
        mine = [x for x in times if x != NATIVE]
        if not mine or NATIVE not in times:
            print(f"{table:11}{'x'.join(map(str, size)):16}nothing ran", flush=True)
            continue
        best = min(mine, key=lambda x: times[x][0])
        kept = {best: times[best], NATIVE: times[NATIVE]}
        kept |= {x.partition("/")[0]: times[x] for x in mine}
        function, given = calls[best]
        a, b = sets[0] if layout == "row" else (sets[0][0], sets[0][1].T)
        wrong = error(jax.jit(function)(*given[0]), a, b)
        speedups = {x.partition("/")[0]: times[NATIVE][0] / times[x][0] for x in mine}
        more = {"layout": layout, "weight_prepared": prepared, "error": wrong, "speedups": speedups}
        yield row(table, size, kept, best, NATIVE, prepared="prepared" if prepared else "both", **more)


def _laid(plan: Callable[..., Any], layout: str) -> Callable[..., Any]:
    return plan if layout == "row" else lambda a, w: plan(a, w.T)


def chosen(table: str, size: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of dispatch.matmul in a jitted program, by what it chooses among all that there is."""
    m, n, k = size
    sets = rotated(lambda seed: (random(seed, m, k), random(seed + 1, k, n)))
    left = [a for a, _ in sets]
    for prepared in (False, True):
        weights = [dispatch.prepare(b) if prepared else b for _, b in sets]
        with dispatch.use_policy(recipes={"allow": [ROW]}):
            start = time.perf_counter()
            decision = dispatch.explain(left[0], weights[0])
            took = time.perf_counter() - start
            called = str(decision.candidate)
            times = timed({NATIVE: (jnp.matmul, sets)}, {called: dispatched(left, weights)})
        print(decision, flush=True)
        if called in times and NATIVE in times:
            more = {"weight_prepared": prepared, "reason": decision.reason, "deciding_s": took}
            yield row(table, size, times, called, NATIVE, prepared="prepared" if prepared else "both", **more)


def dispatched(left: list[Any], weights: list[Any]) -> Ready:
    """Return a call of CHAIN products by dispatch.matmul in one program. What is prepared is a constant of it."""

    def chain(left: list[Any], arrays: list[Any]) -> list[Any]:
        out: list[Any] = []
        for i in range(CHAIN):
            a, b = left[i % len(left)], arrays[i % len(left)]
            if out:
                (a, b), out[-1] = jax.lax.optimization_barrier(((a, b), out[-1]))
            out.append(dispatch.matmul(a, weights[i % len(left)] if b is None else b))
        return out

    arrays = [None if isinstance(b, dispatch.PreparedOperand) else b for b in weights]
    ready = jax.jit(chain).lower(left, arrays).compile()
    return lambda: ready(left, arrays)


def quantize(table: str, size: Sequence[int]) -> Iterator[Row]:
    """Yield the rows of quantizing, of rows as they lie and of a transposed matrix, and print bytes moved a second."""
    pair, ours = RecipePair.parse(ROW), backend(TRITON)
    rows, k = size
    for axis, shape, layout in ((-1, (rows, k), "row"), (-2, (k, rows), "col")):
        sets = rotated(lambda seed, shape=shape: (random(seed, *shape),))
        name = f"{TRITON}/{ROW}"
        calls: dict[str, Call] = {
            name: (lambda given, axis=axis: tuple(ours.prepare(given, pair.a, axis=axis)), sets),
            "XLA": (lambda given, axis=axis: by_xla(given if axis == -1 else given.T), sets),
            "copy": (lambda given: given + 1, sets),
        }
        times = timed(calls)
        entry = row(table, size, times, name, "XLA", layout=layout)
        print(f"{'':27}{3e-6 * rows * k / entry['latency_us']:.2f} TB/s")
        yield entry


def by_xla(x: Any) -> tuple[Any, Any]:
    """Return rows as e4m3 with a scale each, as XLA compiles it."""
    values = x.astype(jnp.float32)
    scale = jnp.abs(values).max(1, keepdims=True) / 448
    return (values * (1 / scale)).astype(jnp.float8_e4m3fn), scale


TABLES: dict[str, tuple[Callable[..., Iterator[Row]], Sequence[Sequence[int]]]] = {
    "dense": (kernels, DENSE),
    "end_to_end": (end_to_end, SQUARE),
    "decode": (kernels, DECODE),
    "mid": (kernels, MID),
    "block": (partial(kernels, recipe=BLOCKS, others=(BARE,)), DENSE[:2]),
    "quantize": (quantize, [(8192, 8192), (4096, 4096)]),
    "chosen": (chosen, SQUARE[:2]),
}


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=["dense", "end_to_end"])
    parser.add_argument("--sizes", nargs="*", metavar="MxNxK", help="of the tables' sizes only these")
    add_limit(parser)
    arguments = parser.parse_args()
    within(arguments.limit_s)
    if jax.default_backend() != "gpu":
        sys.exit(f"JAX {jax.__version__} has no GPU here, only {jax.default_backend()}")
    begun = time.perf_counter()
    for name in arguments.tables:
        function, sizes = TABLES[name]
        ratios = []
        for size in sizes:
            if arguments.sizes and "x".join(map(str, size)) not in arguments.sizes:
                continue
            for entry in function(name, size):
                if entry["speedup"]:
                    ratios.append(entry["speedup"])
                if arguments.record:
                    _rows.append([entry], arguments.record)
        if ratios:
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            print(f"{name}: geometric mean {mean:.3f}, least {least:.3f}; at {time.perf_counter() - begun:.0f} s\n")


if __name__ == "__main__":
    main()
