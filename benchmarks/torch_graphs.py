"""dispatch.matmul in torch's compiler, CUDA graphs and autograd, beside torch's own. Needs an NVIDIA GPU.

    python benchmarks/torch_graphs.py [--record NAME] [--tables graphs linear]

graphs: a prepared weight, few rows and many: eager, compiled and replayed, each beside torch.matmul in the same way and
torch's scaled matmul by rows, whose quantization of the activations is compiled with it. The time is that of a call in
a row of calls, so where the host is slower than the device it is the host's.
linear: forward and backward of one linear layer, eager and compiled, gradients in e4m3 and in e5m2.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import _rows
import torch
from gemm import error, looped, random

import dispatch

GRAPHS = [(16, 8192, 8192), (64, 8192, 8192), (2048, 8192, 8192), (8192, 8192, 8192)]
LINEAR = [(16384, 4096, 14336)]  # tokens, inputs, outputs
LARGEST = 448.0  # of e4m3
Call = Callable[[], Any]


def graphs() -> Iterator[dict[str, Any]]:
    """Yield a row for each way to call, with torch's own in the same way as its peers."""
    for m, n, k in GRAPHS:
        a, b = random(m, k), random(n, k).t()
        weight = dispatch.prepare(b)
        decision = dispatch.explain(a, weight)
        scaled = _scaled(b)
        calls: dict[str, Call] = {}
        ways = {
            "ours": lambda x, w=weight: dispatch.matmul(x, w),
            "torch.matmul": lambda x, b=b: torch.matmul(x, b),
            "scaled_mm": scaled,
        }
        torch._dynamo.reset()
        for name, function in ways.items():
            compiled = torch.compile(function, fullgraph=True)
            with torch.no_grad():
                compiled(a)
            if name != "scaled_mm":  # uncompiled it is many kernels
                calls[f"{name}, eager"] = partial(function, a)
            calls[f"{name}, compiled"] = partial(compiled, a)
            calls[f"{name}, replayed"] = _captured(compiled if name == "scaled_mm" else function, a)
        with torch.no_grad():
            times = looped(calls)
            wrong = error(dispatch.matmul(a, weight), a, b)
        for way in ("eager", "compiled", "replayed"):
            peers = {f"{name}, {way}": times[f"{name}, {way}"][0] for name in ways if f"{name}, {way}" in times}
            us, spread = times[f"ours, {way}"]
            del peers[f"ours, {way}"]
            own = peers[f"torch.matmul, {way}"]
            print(f"{'graphs':9}{way:9}{m:6}x{n}x{k} {us:8.1f} us {own / us:6.2f}x  {decision.candidate}  {peers}")
            yield {
                "table": "torch_graphs",
                "problem": {"m": m, "n": n, "k": k, "dtype": "bfloat16", "weight_prepared": True},
                "candidate": str(decision.candidate),
                "way": way,
                "latency_us": us,
                "spread_us": spread,
                "speedup": own / us,
                "error": wrong,
                "peers": {f"{name}@{torch.__version__}": latency for name, latency in peers.items()},
                **_rows.stamp(),
            }


def _scaled(b: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return a product with `b` quantized once, by columns, that quantizes its argument by rows."""
    scale_b = b.abs().amax(0, keepdim=True).float().clamp_min(1e-12) / LARGEST
    right = (b.float() / scale_b).t().contiguous().to(torch.float8_e4m3fn).t()

    def scaled(x: torch.Tensor) -> torch.Tensor:
        scale_a = x.abs().amax(1, keepdim=True).float().clamp_min(1e-12) / LARGEST
        left = (x.float() / scale_a).to(torch.float8_e4m3fn)
        return torch._scaled_mm(left, right, scale_a, scale_b, out_dtype=torch.bfloat16, use_fast_accum=True)

    return scaled


def _captured(function: Callable[[torch.Tensor], torch.Tensor], a: torch.Tensor) -> Call:
    """Return the replay of a CUDA graph of one call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(2):
            function(a)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        function(a)
    return graph.replay


def linear() -> Iterator[dict[str, Any]]:
    """Yield the rows of forward and backward, in BF16 by torch and as dispatched."""
    e5m2 = [
        {"match": {"op": "dgrad"}, "recipes": {"allow": ["e5m2:row@e4m3:row", "e5m2:tensor@e4m3:tensor"]}},
        {"match": {"op": "wgrad"}, "recipes": {"allow": ["e4m3:row@e5m2:row", "e4m3:tensor@e5m2:tensor"]}},
    ]
    for tokens, inputs, outputs in LINEAR:
        x, w, grad = random(tokens, inputs), random(outputs, inputs), random(tokens, outputs)
        for operand in (x, w):
            operand.requires_grad_()
        for gradient, rules in (("e4m3", []), ("e5m2", e5m2)):
            torch._dynamo.reset()
            compiled = torch.compile(lambda x, w: dispatch.matmul(x, w.t()), fullgraph=True)
            with dispatch.use_policy(rules=rules):
                calls: dict[str, Call] = {
                    "torch, eager": _step(lambda x, w: torch.matmul(x, w.t()), x, w, grad),
                    "eager": _step(lambda x, w: dispatch.matmul(x, w.t()), x, w, grad),
                    "compiled": _step(compiled, x, w, grad),
                }
                for call in calls.values():
                    call()
                times = looped(calls, ms=30.0)
            chosen = _chosen(tokens, inputs, outputs)
            flops = 3 * 2 * tokens * inputs * outputs
            for way in ("eager", "compiled"):
                us, spread = times[way]
                own = times["torch, eager"][0]
                print(f"{'linear':9}{way:9}{gradient}  {us:8.1f} us {own / us:6.2f}x  {chosen}")
                yield {
                    "table": "linear",
                    "problem": {"tokens": tokens, "inputs": inputs, "outputs": outputs, "dtype": "bfloat16"},
                    "candidate": chosen,
                    "gradient": gradient,
                    "way": way,
                    "latency_us": us,
                    "spread_us": spread,
                    "tflops": flops / us * 1e-6,
                    "speedup": own / us,
                    "peers": {f"torch.matmul@{torch.__version__}": own},
                    **_rows.stamp(),
                }


def _step(function: Callable[..., torch.Tensor], x: torch.Tensor, w: torch.Tensor, grad: torch.Tensor) -> Call:
    def step() -> None:
        x.grad = w.grad = None
        function(x, w).backward(grad)

    return step


def _chosen(tokens: int, inputs: int, outputs: int) -> dict[str, str]:
    """Return what serves each of the three products, by op; of two policies the one decided last."""
    sizes = {
        "matmul": (tokens, outputs, inputs),
        "dgrad": (tokens, inputs, outputs),
        "wgrad": (inputs, outputs, tokens),
    }
    return {
        x.problem.op: str(x.candidate)
        for x in dispatch.stored()
        if (x.problem.m, x.problem.n, x.problem.k) == sizes[x.problem.op] and not x.problem.b.prepared
    }


TABLES = {"graphs": graphs, "linear": linear}


def main() -> None:
    """Measure, print, and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--tables", nargs="*", choices=TABLES, default=list(TABLES))
    arguments = parser.parse_args()
    for name in arguments.tables:
        found = list(TABLES[name]())
        if arguments.record:
            _rows.append(found, arguments.record)


if __name__ == "__main__":
    main()
