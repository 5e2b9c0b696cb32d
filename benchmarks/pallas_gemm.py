"""The Pallas Mosaic GPU kernels beside XLA's own products, on the same data, interleaved. Needs a Hopper GPU in JAX.

    python benchmarks/pallas_gemm.py [--record NAME] [--tables dense mid decode ...] [--all]

dense: e4m3 with row scales, fast, against XLA's FP8 dot with the same scales (two kernels). promoted: sums in float32
every 128 of k, against the same. block: with scales of 1x128 by 128x128, against XLA's FP8 dot without scales. mid,
decode: smaller products, and few rows by wide weights that are cold in L2, in one program of many products, or the host
would be timed. bf16: bfloat16 operands against jnp.matmul, b (k, n) as it lies. portable: by Triton. quantize: bytes
moved a second against a copy's, of operands that are K-major and of those that are transposed too. What quantizing
takes beside a product is measured by jax_gemm.py.

Each call is one launch of a function compiled before; `--chain` of them are dispatched before the device is waited for,
so that what the host takes hides behind the device. Padding is in the time. Of our configs the fastest is named, and
with --all every one is printed. A config that fails to compile or to launch is reported and left out.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import _rows
import jax
import jax.numpy as jnp
import numpy as np
from dispatch.kernels import pallas_fp8_gemm as hopper
from dispatch.kernels import pallas_triton_gemm as portable
from dispatch.kernels.pallas_fp8_gemm import Config
from dispatch.kernels.pallas_quantize import quantize

DENSE = [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192), (8192, 8192, 28672)]
COPIES = 12  # of a weight, one after another in one program: with 64 MiB and more each they are cold in L2
DECODE = [(m, n, k) for n, k in ((8192, 8192), (8192, 28672)) for m in (16, 64, 128)]
E4M3 = jnp.float8_e4m3fn
Call = Callable[[], Any]

MID = [(1024,) * 3, (2048,) * 3, (256, 8192, 8192), (512, 8192, 8192), (2048, 8192, 8192)]
QUANTIZE = [(8192, 8192), (4096, 4096)]

FAST = [
    Config(256, 128, stages=4, group=8),
    Config(128, 256, stages=4, minor="n", group=8),
    Config(128, 256, stages=4, cluster="m", group=8),
    Config(256, 128, stages=4, cluster="n", group=8),
]
MIDDLING = [
    Config(128, 128, stages=6),
    Config(128, 256, stages=4),
    Config(64, 128, stages=8, consumers=1),
    Config(64, 64, 256, stages=6, consumers=1),
]
PROMOTED = [
    Config(128, 128, stages=6, group=16),
    Config(128, 128, stages=6, group=16, chain=1),
    Config(128, 128, stages=6, group=16, chain=4),
]
BLOCKS = [replace(config, stages=5) for config in PROMOTED]
FLAT = [
    Config(64, 64, 256, stages=6, consumers=1),
    Config(64, 64, 512, stages=3, consumers=1),
    Config(64, 64, 128, stages=12, consumers=1),
    Config(64, 128, 128, stages=8, consumers=1),
    Config(64, 128, 256, stages=4, consumers=1),
    Config(128, 64, 128, stages=8),
    Config(128, 64, 256, stages=4),
]
PORTABLE = [portable.Config(), portable.Config(128, 256), portable.Config(128, 128, 64, stages=4)]


def looped(calls: dict[str, Call], rounds: int, chain: int, products: int) -> dict[str, tuple[float, float]]:
    """Return median and spread in us a product of each call, taken in turns. products: in one call."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(_span(calls[name], chain) / products)
    return {name: (statistics.median(times), max(times) - min(times)) for name, times in found.items()}


def _span(call: Call, chain: int) -> float:
    """Return the us a call of `chain` calls, with the device busy from the first to the last."""
    jax.block_until_ready(call())
    start = time.perf_counter()
    last = None
    for _ in range(chain):
        last = call()
    jax.block_until_ready(last)
    return (time.perf_counter() - start) / chain * 1e6


def quantized(key: int, rows: int, k: int) -> tuple[Any, Any, Any]:
    """Return normal bfloat16 values, and as e4m3 with their scales by row."""
    values = jax.random.normal(jax.random.key(key), (rows, k), jnp.bfloat16)
    scale = jnp.maximum(jnp.abs(values.astype(jnp.float32)).max(1), 1e-12) / 448
    return values, (values.astype(jnp.float32) / scale[:, None]).astype(E4M3), scale


def in_blocks(values: Any, extent: int) -> tuple[Any, Any]:
    """Return values as e4m3 with a scale for each block of `extent` rows and 128 of k."""
    rows, k = values.shape
    blocks = values.astype(jnp.float32).reshape(rows // extent, extent, k // 128, 128)
    scale = jnp.maximum(jnp.abs(blocks).max((1, 3)), 1e-12) / 448
    return (blocks / scale[:, None, :, None]).reshape(rows, k).astype(E4M3), scale


@jax.jit
def xla_bare(a: Any, b: Any) -> Any:
    """Return XLA's product of FP8 operands without scales, in bfloat16."""
    return jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.bfloat16)


@jax.jit
def xla_scaled(a: Any, b: Any, scale_a: Any, scale_b: Any) -> Any:
    """Return XLA's product of FP8 operands times the scales of rows, in bfloat16."""
    sums = jax.lax.dot_general(a, b, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32)
    return (sums * scale_a[:, None] * scale_b[None, :]).astype(jnp.bfloat16)


def compiled(functions: dict[str, Any], arrays: Sequence[Any], mine: Sequence[str] = ()) -> dict[str, Call]:
    """Return a call of each function on the arrays that traces and looks nothing up; all are compiled at once.

    One of `mine` that fails to compile or to run is reported and left out: it must not end the table.
    """
    lowered = {name: jax.jit(function).lower(*arrays) for name, function in functions.items()}
    with ThreadPoolExecutor(12) as pool:
        ready = {name: pool.submit(program.compile) for name, program in lowered.items()}
    calls: dict[str, Call] = {}
    for name, program in ready.items():
        try:
            call = partial(program.result(), *arrays)
            jax.block_until_ready(call())
        except Exception as fault:
            if name not in mine:
                raise
            print(f"  {name}: {type(fault).__name__}: {str(fault)[:300]}", file=sys.stderr, flush=True)
        else:
            calls[name] = call
    return calls


def each(configs: Sequence[Any], function: Any) -> dict[str, Any]:
    """Return a function of the arrays for each config, by the config's name."""
    return {named(config): partial(function, config=config) for config in configs}


def error(out: Any, a: Any, b: Any) -> dict[str, float]:
    """Return the worst row's errors over 64 sampled rows, against float64 of the unquantized operands."""
    rows = np.linspace(0, out.shape[0] - 1, min(64, out.shape[0])).astype(int)
    x = np.asarray(out[rows], np.float64)
    with jax.enable_x64(True):
        y = np.asarray(jnp.matmul(a[rows].astype(np.float64), b.astype(np.float64).T, precision="highest"))
    difference, size = np.square(x - y).sum(1), np.square(y).sum(1)
    return {
        "similarity_loss": float((difference / (np.square(x).sum(1) + size)).max()),
        "relative_l2": float(np.sqrt(difference / size).max()),
        "max_abs_over_scale": float((np.abs(x - y).max(1) / np.abs(y).max(1)).max()),
    }


def named(config: Any) -> str:
    """Return a config's name, after CUTLASS."""
    if isinstance(config, portable.Config):
        return f"triton_gemm_{config.block_m}x{config.block_n}x{config.block_k}_s{config.stages}_w{config.warps}"
    schedule = "pingpong" if config.pingpong else ("cooperative" if config.consumers == 2 else "alone")
    cluster = f"_c{config.cluster}" if config.cluster else ""
    sizes = f"{config.block_m}x{config.block_n}x{config.block_k}"
    walk = f"{config.minor}{config.group}_d{config.delay}_h{config.chain}"
    return f"sm90_gemm_tma_warpspecialized_{schedule}_{sizes}_s{config.stages}{cluster}_{walk}"


def row(
    table: str,
    size: Sequence[int],
    calls: dict[str, Call],
    peers: Sequence[str],
    arguments: argparse.Namespace,
    products: int = 1,
    **more: Any,
) -> dict[str, Any] | None:
    """Measure, print and return one row: our fastest config, and the peers."""
    mine = [name for name in calls if name not in peers]
    if not mine:
        print(f"{table:9}{'x'.join(map(str, size)):18} no config ran", flush=True)
        return None
    times = looped(calls, arguments.rounds, arguments.chain, products)
    best = min(mine, key=lambda name: times[name][0])
    latency, spread = times[best]
    m, n, k = size
    flops = 2e-6 * m * n * k
    peer = min((times[name][0] for name in peers if name in times), default=None)
    print(
        f"{table:9}{'x'.join(map(str, size)):18}{latency:9.1f} us {flops / latency:7.0f} TFLOP/s  "
        + (f"{peer / latency:6.3f}x of the best peer  " if peer else "")
        + "  ".join(f"{name} {times[name][0]:.1f}" for name in peers if name in times)
        + f"  {best}",
        flush=True,
    )
    if arguments.all:
        for name in sorted(mine, key=lambda name: times[name][0]):
            print(
                f"    {times[name][0]:9.1f} us +-{times[name][1]:7.1f} {flops / times[name][0]:7.0f}  {name}",
                flush=True,
            )
    return {
        "table": f"pallas_{table}",
        "problem": {"m": m, "n": n, "k": k, "dtype": "bfloat16"},
        "candidate": more.pop("candidate", None) or f"pallas_fp8/{more.pop('recipe', 'e4m3:row')}/{best}",
        "latency_us": latency,
        "spread_us": spread,
        "rounds": arguments.rounds,
        "tflops": flops / latency,
        "speedup": None if peer is None else peer / latency,
        "peers": {f"{name}@{jax.__version__}": times[name][0] if name in times else None for name in peers},
        "candidates": {name: {"latency_us": times[name][0], "spread_us": times[name][1]} for name in mine},
        "data": "normal",
        **_rows.stamp(),
        **more,
    }


def _rows_of(
    table: str, sizes: Sequence[tuple[int, int, int]], configs: Sequence[Any], function: Any, arguments: Any
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of e4m3 with row scales, warm operands."""
    for size in sizes:
        m, n, k = size
        (a, left, scale_a), (b, right, scale_b) = quantized(0, m, k), quantized(1, n, k)
        mine = each(configs, function)
        calls = compiled({**mine, "XLA row scales": xla_scaled}, (left, right, scale_a, scale_b), [*mine])
        yield row(table, size, calls, ["XLA row scales"], arguments, error=error(_first(calls), a, b))


def _first(calls: dict[str, Call]) -> Any:
    """Return what the first call gives."""
    return next(iter(calls.values()))()


def dense(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of large products, summed by the tensor core."""
    yield from _rows_of("dense", DENSE, FAST, hopper.gemm, arguments)


def promoted(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of large products, each 128 of k added in float32."""
    yield from _rows_of("promoted", DENSE[:2], PROMOTED, partial(hopper.gemm, promoted=True), arguments)


def by_triton(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of the portable kernel."""
    yield from _rows_of("portable", DENSE[:2], PORTABLE, portable.gemm, arguments)


def block(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of 1x128 by 128x128 scales; XLA's product has none, and is a bound."""
    for size in DENSE[:2]:
        m, n, k = size
        a, b = quantized(0, m, k)[0], quantized(1, n, k)[0]
        (left, scale_a), (right, scale_b) = in_blocks(a, 1), in_blocks(b, 128)
        mine = each(BLOCKS, partial(hopper.gemm, blocks=True))
        peer = {"XLA no scales": lambda left, right, *_: xla_bare(left, right)}
        calls = compiled({**mine, **peer}, (left, right, scale_a.reshape(m, -1), scale_b), [*mine])
        found = error(_first(calls), a, b)
        yield row("block", size, calls, ["XLA no scales"], arguments, recipe="e4m3:1x128@e4m3:128x128", error=found)


def _many(
    table: str, sizes: Sequence[tuple[int, int, int]], configs: Sequence[Any], arguments: argparse.Namespace
) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of products that are short beside a launch: COPIES of them, each with a weight of its own."""
    for size in sizes:
        m, n, k = size
        a, left, scale_a = quantized(0, m, k)
        b = quantized(1, n, k)[0]
        weights = [quantized(1 + number, n, k)[1:] for number in range(COPIES)]

        def many(left: Any, scale_a: Any, weights: Any, config: Any) -> list[Any]:
            return [hopper.gemm(left, right, scale_a, scale_b, config=config) for right, scale_b in weights]

        def xla(left: Any, scale_a: Any, weights: Any) -> list[Any]:
            return [xla_scaled(left, right, scale_a, scale_b) for right, scale_b in weights]

        mine = each(configs, many)
        calls = compiled({**mine, "XLA row scales": xla}, (left, scale_a, weights), [*mine])
        found = error(_first(calls)[0], a, b)
        yield row(table, size, calls, ["XLA row scales"], arguments, products=COPIES, error=found)


def mid(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of middling products."""
    yield from _many("mid", MID, MIDDLING, arguments)


def decode(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of few rows by wide weights, which come from memory each time."""
    yield from _many("decode", DECODE, FLAT, arguments)


def bf16(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of bfloat16 operands, against jnp.matmul."""
    for size in DENSE[:2]:
        m, n, k = size
        a, b = quantized(0, m, k)[0], quantized(1, n, k)[0]
        mine = each([replace(config, block_k=64) for config in FAST], partial(hopper.gemm, across=True))
        calls = compiled({**mine, "jnp.matmul": jnp.matmul}, (a, b.T), [*mine])
        found = error(_first(calls), a, b)
        yield row("bf16", size, calls, ["jnp.matmul"], arguments, recipe="bfloat16", error=found)


def quantizers(arguments: argparse.Namespace) -> Iterator[dict[str, Any] | None]:
    """Yield the rows of quantizing bfloat16 to e4m3 by row, as the share of a copy's bytes a second."""
    for (rows, k), transposed in ((size, x) for size in QUANTIZE for x in (False, True)):
        count = max(3, (512 << 20) // (2 * rows * k))  # of each: what the host takes hides behind them
        shape = (k, rows) if transposed else (rows, k)
        sources = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i in range(count)]

        def ours(sources: Any, transposed: bool = transposed) -> Any:
            return [quantize(x, E4M3, transposed=transposed) for x in sources]

        def copy(sources: Any) -> Any:
            return [x + 1 for x in sources]

        def by_xla(sources: Any, transposed: bool = transposed) -> Any:
            return [xla_quantized(x.T if transposed else x) for x in sources]

        name = "transposed" if transposed else "K-major"
        calls = compiled({name: ours, "copy": copy, "XLA": by_xla}, (sources,))
        times = looped(calls, arguments.rounds, 4, count)
        (latency, spread), copied = times[name], times["copy"][0]
        share = 3 / latency / (4 / copied)
        print(
            f"quantize {rows}x{k} {name:10} {latency:8.1f} us {3e-6 * rows * k / latency:6.2f} TB/s  "
            f"share of copy {share:.2f}  XLA {times['XLA'][0]:.1f}",
            flush=True,
        )
        yield {
            "table": "pallas_quantize",
            "problem": {"m": rows, "n": k, "k": k, "dtype": "bfloat16"},
            "candidate": f"pallas_quantize/e4m3:row/{name}",
            "layout": name,
            "latency_us": latency,
            "spread_us": spread,
            "rounds": arguments.rounds,
            "speedup": times["XLA"][0] / latency,
            "share_of_copy": share,
            "peers": {f"{peer}@{jax.__version__}": times[peer][0] for peer in ("copy", "XLA")},
            "data": "normal",
            **_rows.stamp(),
        }


def xla_quantized(x: Any) -> tuple[Any, Any]:
    """Return x quantized by row, by XLA."""
    wide = x.astype(jnp.float32)
    scale = jnp.maximum(jnp.abs(wide).max(1), 1e-12) / 448
    return (wide / scale[:, None]).astype(E4M3), scale


TABLES: dict[str, Callable[[argparse.Namespace], Iterator[dict[str, Any] | None]]] = {
    "dense": dense, "promoted": promoted, "block": block, "mid": mid, "decode": decode, "bf16": bf16,
    "portable": by_triton, "quantize": quantizers,
}  # fmt: skip


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    parser.add_argument("--all", action="store_true", help="print every config, not only the fastest")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--chain", type=int, default=20, help="calls between two waits for the device")
    arguments = parser.parse_args()
    if jax.default_backend() != "gpu":
        sys.exit(f"JAX {jax.__version__} has no GPU here, only {jax.default_backend()}")
    for name in arguments.tables:
        found = []
        for entry in TABLES[name](arguments):
            if entry is not None:
                found.append(entry)
                if arguments.record:
                    _rows.append([entry], arguments.record)
        ratios = [entry["speedup"] for entry in found if entry["speedup"]]
        if ratios:
            mean, least = statistics.geometric_mean(ratios), min(ratios)
            print(f"{name}: geometric mean {mean:.3f}, least {least:.3f}\n", flush=True)


if __name__ == "__main__":
    main()
