"""The Triton kernels beside torch's own and DeepGEMM's, on the same data, interleaved. Needs an NVIDIA GPU.

    python benchmarks/gemm.py [--record NAME] [--tables dense mid ...]

dense: row scales, kernel alone, against the better of torch's row and tensor scales. mid, decode: the same in CUDA
graphs; decode on weights that are cold in L2, against tensor scales. block: 1x128 by 128x128 against torch's and
DeepGEMM's. promoted: sums in float32 every 128 of k. sixteen_bit: bfloat16 of odd sizes as they are. end_to_end:
bfloat16 in and out, quantizing included, against torch.matmul. quantize: bytes moved a second against a copy's. host:
what a known call takes of the CPU. Of our configs the fastest is named, as tuning keeps it.

DeepGEMM is taken from SGLang's wheel (sgl-deep-gemm 0.1.0) where it is installed; else its column is null.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import _rows
import torch

import dispatch
from dispatch import Operand, Problem, RecipePair
from dispatch._api import engine

BACKEND = "triton_tma_fp8"
ROW, BLOCKS = "e4m3:row", "e4m3:1x128@e4m3:128x128"
DENSE = [(4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 8192), (8192, 8192, 28672), (4096, 7168, 16384)]
DENSE += [(4096, 7168, 2048), (4096, 24576, 1536), (16384, 8192, 8192)]
MID = [(512,) * 3, (1024,) * 3, (2048,) * 3, *((m, 8192, 8192) for m in (256, 512, 1024, 2048))]
DECODE = [(m, 8192, 8192) for m in (1, 8, 16, 32, 64, 128)] + [(16, 8192, 28672), (64, 8192, 28672)]
DECODE += [(128, 28672, 8192), (16, 4096, 14336), (16, 1024, 8192)]
ODD = [(4096, 4095, 4096), (4096, 4096, 4095), (8192, 8191, 8191), (512, 1001, 777)]
END_TO_END = [(2048,) * 3, (4096,) * 3, (8192,) * 3]
QUANTIZE = [(8192, 8192), (8192, 16384), (8192, 28672), (16384, 4096), (65536, 1024)]
L2_BYTES = 128 << 20
Call = Callable[[], Any]


def problem(
    recipe: str | None,
    m: int,
    n: int,
    k: int,
    *,
    prepared: Sequence[bool] = (True, True),
    layout: str = "col",
    mode: str | None = "fast",
) -> Problem:
    """Return the problem of one product of bfloat16 operands on this GPU."""
    pair = None if recipe is None else RecipePair.parse(recipe)
    mode = "promoted" if recipe == BLOCKS else mode
    a, b = Operand("bfloat16", prepared=prepared[0]), Operand("bfloat16", (), layout, prepared=prepared[1])
    arch = dispatch.machine()["archs"]["torch"][-1]
    return Problem(m, n, k, a, b, "bfloat16", "torch", arch, "cuda:0", recipe=pair, accumulation=mode)


def backend() -> Any:
    """Return the backend that is measured."""
    return engine().registry.backends[BACKEND].backend


def configs(asked: Problem, a: Any, b: Any) -> dict[str, Call]:
    """Return a call of each config worth measuring."""
    ours = backend()
    return {name: _bound(ours.plan(asked, name), a, b) for name in ours.configs(asked)}


def _bound(plan: Any, a: Any, b: Any) -> Call:
    return lambda: plan(a, b)


def looped(
    calls: dict[str, Call], rounds: int = 9, ms: float = 6.0, per_call: int = 1
) -> dict[str, tuple[float, float]]:
    """Return median and spread in us of each call, run in turns of about `ms` each. per_call: products in one call."""
    counts = {name: max(1, int(ms * 1e3 / max(_span(call, 2), 1.0))) for name, call in calls.items()}
    found: dict[str, list[float]] = {name: [] for name in calls}
    names = list(calls)
    for turn in range(rounds):
        for name in names[turn % len(names) :] + names[: turn % len(names)]:
            found[name].append(_span(calls[name], counts[name]) / per_call)
    return {name: (statistics.median(times), max(times) - min(times)) for name, times in found.items()}


def _span(call: Call, count: int) -> float:
    """Return the device's us a call, over `count` of them."""
    call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) * 1e3 / count


def graphed(calls: dict[str, list[Call]], repeats: int = 20) -> dict[str, tuple[float, float]]:
    """Return the same of products captured in CUDA graphs of `repeats` launches, which go round the operands."""
    graphs = {}
    for name, versions in calls.items():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for call in versions:
                call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for turn in range(repeats):
                versions[turn % len(versions)]()
        graphs[name] = graph.replay
    return looped(graphs, ms=4.0, per_call=repeats)


def random(*shape: int) -> torch.Tensor:
    """Return normal bfloat16 values."""
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def error(out: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """Return the worst row's errors over 64 sampled rows, against float64 of the unquantized operands a and b."""
    rows = torch.randint(out.shape[0], (64,), device=out.device)
    x, y = out[rows].double(), a[rows].double() @ b.double()
    difference, size = (x - y).square().sum(1), y.square().sum(1)
    return {
        "similarity_loss": float((difference / (x.square().sum(1) + size)).max()),
        "relative_l2": float((difference / size).sqrt().max()),
        "max_abs_over_scale": float(((x - y).abs().amax(1) / y.abs().amax(1)).max()),
    }


def row(
    table: str,
    size: Sequence[int],
    times: dict[str, tuple[float, float]],
    peers: Sequence[str],
    rounds: int = 9,
    **more: Any,
) -> dict[str, Any]:
    """Return one row: our fastest config, and the peers; print it."""
    ours = min((name for name in times if name not in peers), key=lambda name: times[name][0])
    best = min((times[name][0] for name in peers if name in times), default=None)
    latency, spread = times[ours]
    m, n, k = (*size, 1)[:3]
    print(
        f"{table:11}{'x'.join(map(str, size)):18}{latency:10.1f} us  "
        + (f"{best / latency:6.3f}x of the best peer  " if best else "")
        + "  ".join(f"{name} {times[name][0]:.1f}" for name in peers if name in times)
        + f"  {ours}",
        flush=True,
    )
    return {
        "table": table,
        "problem": {"m": m, "n": n, "k": k, "dtype": "bfloat16"},
        "candidate": f"{BACKEND}/{more.pop('recipe', ROW)}/{ours}",
        "latency_us": latency,
        "spread_us": spread,
        "rounds": rounds,
        "tflops": 2 * m * n * k / latency * 1e-6,
        "speedup": None if best is None else best / latency,
        "peers": {f"{name}@{_version(name)}": times[name][0] if name in times else None for name in peers},
        "data": "normal",
        **_rows.stamp(),
        **more,
    }


def _version(peer: str) -> str:
    package = "sgl-deep-gemm" if peer.startswith("deep") else "torch"
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _peers(a: Any, b: Any, *, fast: bool = True) -> dict[str, Call]:
    """Return torch's scaled matmul with row and with tensor scales on the same quantized values."""
    left, right = a.matrix, b.matrix.t()
    rows, cols = a.scale.reshape(-1, 1), b.scale.reshape(1, -1)
    one, options = torch.full((), 0.01, device="cuda"), {"out_dtype": torch.bfloat16, "use_fast_accum": fast}
    return {
        "torch row scales": lambda: torch._scaled_mm(left, right, rows, cols, **options),
        "torch tensor scales": lambda: torch._scaled_mm(left, right, one, one, **options),
    }


def dense() -> Iterator[dict[str, Any]]:
    """Yield the rows of large products."""
    for m, n, k in DENSE:
        a, b = random(m, k), random(n, k).t()
        asked = problem(ROW, m, n, k)
        left, right = (backend().prepare(x, asked.recipe.a, axis=axis) for x, axis in ((a, -1), (b, -2)))
        calls = {**_peers(left, right), **configs(asked, left, right)}
        out = calls[backend().configs(asked)[0]]()
        yield row("dense", (m, n, k), looped(calls), [*_peers(left, right)], error=error(out, a, b))


def mid() -> Iterator[dict[str, Any]]:
    """Yield the rows of middling products, in graphs."""
    for m, n, k in MID:
        a, b = random(m, k), random(n, k).t()
        asked = problem(ROW, m, n, k)
        left, right = (backend().prepare(x, asked.recipe.a, axis=axis) for x, axis in ((a, -1), (b, -2)))
        calls = {
            **_peers(left, right),
            "torch.matmul": lambda a=a, b=b: torch.matmul(a, b),
            **configs(asked, left, right),
        }
        times = graphed({name: [call] for name, call in calls.items()})
        yield row("mid", (m, n, k), times, ["torch row scales", "torch tensor scales", "torch.matmul"])


def decode() -> Iterator[dict[str, Any]]:
    """Yield the rows of few rows by wide weights, which come from memory each time."""
    for m, n, k in DECODE:
        copies = max(2, -(-L2_BYTES // (n * k)))
        a = random(m, k)
        asked = problem(ROW, m, n, k)
        left = backend().prepare(a, asked.recipe.a, axis=-1)
        calls: dict[str, list[Call]] = {}
        for _ in range(copies):
            b = random(n, k).t()
            right = backend().prepare(b, asked.recipe.b, axis=-2)
            for name, call in {**_peers(left, right), **configs(asked, left, right)}.items():
                calls.setdefault(name, []).append(call)
        yield row("decode", (m, n, k), graphed(calls), ["torch tensor scales", "torch row scales"])


def _block_peers(a: Any, b: Any, m: int, deep_gemm: Any) -> dict[str, Call]:
    left, right, turned = a.matrix, b.matrix, b.matrix.t()
    scale_a, scale_b = a.scale[:, :m].t(), b.scale
    scale_t = scale_b.t()
    calls: dict[str, Call] = {
        "torch block scales": lambda: torch._scaled_mm(left, turned, scale_a, scale_t, out_dtype=torch.bfloat16)
    }
    if deep_gemm is not None:
        out = torch.empty(m, right.shape[0], device="cuda", dtype=torch.bfloat16)
        calls["deep_gemm"] = lambda: deep_gemm.fp8_gemm_nt((left, scale_a), (right, scale_b), out)
    return calls


def block() -> Iterator[dict[str, Any]]:
    """Yield the rows of block scales."""
    try:
        import deep_gemm
    except ImportError:
        deep_gemm = None
    for m, n, k in DENSE:
        a, b = random(m, k), random(n, k).t()
        asked = problem(BLOCKS, m, n, k)
        left = backend().prepare(a, asked.recipe.a, axis=-1)
        right = backend().prepare(b, asked.recipe.b, axis=-2)
        calls = {**_block_peers(left, right, m, deep_gemm), **configs(asked, left, right)}
        peers = ["torch block scales", "deep_gemm"]
        result = calls[backend().configs(asked)[0]]()
        yield row("block", (m, n, k), looped(calls), peers, recipe=BLOCKS, error=error(result, a, b))


def promoted() -> Iterator[dict[str, Any]]:
    """Yield the rows of sums promoted to float32 every 128 of k, against torch's without `use_fast_accum`."""
    for m, n, k in DENSE[:2]:
        a, b = random(m, k), random(n, k).t()
        asked = problem(ROW, m, n, k, mode="promoted")
        left, right = (backend().prepare(x, asked.recipe.a, axis=axis) for x, axis in ((a, -1), (b, -2)))
        calls = {**_peers(left, right, fast=False), **configs(asked, left, right)}
        out = calls[backend().configs(asked)[0]]()
        yield row("promoted", (m, n, k), looped(calls), [*_peers(left, right)], error=error(out, a, b))


def sixteen_bit() -> Iterator[dict[str, Any]]:
    """Yield the rows of bfloat16 products of odd sizes, as they are, against torch.matmul."""
    for m, n, k in ODD:
        a, b = random(m, k), random(k, n)
        asked = problem(None, m, n, k, prepared=(False, False), layout="row", mode=None)
        calls = {"torch.matmul": partial(torch.matmul, a, b), **configs(asked, a, b)}
        out = calls[backend().configs(asked)[0]]()
        yield row("sixteen_bit", (m, n, k), looped(calls), ["torch.matmul"], recipe="bfloat16", error=error(out, a, b))


def end_to_end() -> Iterator[dict[str, Any]]:
    """Yield the rows of bfloat16 products, quantizing included; b as torch.matmul(a, b) and as nn.Linear have it."""
    for (m, n, k), layout, prepared in ((x, y, z) for x in END_TO_END for y in ("row", "col") for z in (False, True)):
        pairs = [(random(m, k), random(k, n) if layout == "row" else random(n, k).t()) for _ in range(3)]
        asked = problem(ROW, m, n, k, prepared=(False, prepared), layout=layout)
        ours = backend()
        rights = [ours.prepare(b, asked.recipe.b, axis=-2) if prepared else b for _, b in pairs]
        calls: dict[str, list[Call]] = {"torch.matmul": [lambda a=a, b=b: torch.matmul(a, b) for a, b in pairs]}
        for name in ours.configs(asked):
            plan = ours.plan(asked, name)
            calls[name] = [_bound(plan, a, right) for (a, _), right in zip(pairs, rights, strict=True)]
        times = graphed(calls, repeats=12)
        out = calls[ours.configs(asked)[0]][0]()
        more = {"layout": layout, "weight_prepared": prepared, "error": error(out, *pairs[0])}
        yield row("end_to_end", (m, n, k), times, ["torch.matmul"], **more)


def quantize() -> Iterator[dict[str, Any]]:
    """Yield the rows of quantizing, as the share of a copy's bytes a second: bfloat16 to e4m3 with a scale a row."""
    from dispatch.kernels.triton_quantize import quantize_rows

    for rows, cols in QUANTIZE:
        sources = [random(rows, cols) for _ in range(max(2, L2_BYTES // (2 * rows * cols)))]
        copy, data = torch.empty_like(sources[0]), torch.empty(rows, cols, device="cuda", dtype=torch.float8_e4m3fn)
        scale = torch.empty(rows, device="cuda")
        calls: dict[str, list[Call]] = {
            "copy": [partial(copy.copy_, x) for x in sources],
            "quantize_rows": [partial(quantize_rows, x, data, scale) for x in sources],
        }
        times = graphed(calls)
        share = 3 / times["quantize_rows"][0] / (4 / times["copy"][0])
        entry = row("quantize", (rows, cols), times, ["copy"], share_of_copy=share)
        print(f"{'':11}share of copy {share:.3f}, {3e-6 * rows * cols / times['quantize_rows'][0]:.2f} TB/s")
        yield entry


def host() -> Iterator[dict[str, Any]]:
    """Yield what a known call takes of the host, in us, beside torch.matmul: 256^3, the GPU is never waited for."""
    a, b = random(256, 256), random(256, 256)
    weight = dispatch.prepare(b)
    calls: dict[str, Call] = {
        "torch.matmul": lambda: torch.matmul(a, b),
        "both quantized": lambda: dispatch.matmul(a, b),
        "weight prepared": lambda: dispatch.matmul(a, weight),
    }
    with dispatch.use_policy(backends={"allow": [BACKEND]}, gate={"min_speedup": 0.0}):
        chosen = dispatch.explain(a, b), dispatch.explain(a, weight)
        if any(decision.backend != BACKEND for decision in chosen):
            raise SystemExit(f"not {BACKEND}: {[decision.reason for decision in chosen]}")
        yield from _host(calls)


def _host(calls: dict[str, Call]) -> Iterator[dict[str, Any]]:
    least = {name: float("inf") for name in calls}
    for _ in range(7):
        for name, call in calls.items():
            call()
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                call()
            least[name] = min(least[name], (time.perf_counter() - start) / 200 * 1e6)
            torch.cuda.synchronize()
    for name in list(calls)[1:]:
        ratio = least[name] / least["torch.matmul"]
        print(
            f"{'host':11}{name:18}{least[name]:10.1f} us  {ratio:6.2f} of torch.matmul's {least['torch.matmul']:.1f} us"
        )
        yield {
            "table": "host_call",
            "problem": {"m": 256, "n": 256, "k": 256, "dtype": "bfloat16"},
            "candidate": f"{BACKEND}, {name}",
            "host_us": least[name],
            "ratio": ratio,
            "peers": {f"torch.matmul@{torch.__version__}": least["torch.matmul"]},
            **_rows.stamp(),
        }


TABLES: dict[str, Callable[[], Iterator[dict[str, Any]]]] = {
    "dense": dense, "mid": mid, "decode": decode, "block": block, "end_to_end": end_to_end, "quantize": quantize,
    "host": host, "promoted": promoted, "sixteen_bit": sixteen_bit,
}  # fmt: skip


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    arguments = parser.parse_args()
    for name in arguments.tables:
        found = list(TABLES[name]())
        ratios = [entry["speedup"] for entry in found if entry.get("speedup")]
        if ratios:
            print(
                f"{name}: geometric mean {statistics.geometric_mean(ratios):.3f}, least {min(ratios):.3f}\n", flush=True
            )
        if arguments.record:
            _rows.append(found, arguments.record)


if __name__ == "__main__":
    main()
