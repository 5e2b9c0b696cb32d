"""The main job on this machine: what is chosen for a few products, with every candidate's figures.

    python benchmarks/main_job.py [--record NAME] [--sizes 8192 512]

On a GPU: bfloat16 cubes in torch and JAX, eager and jitted, under the default policy and under relative_l2 at 0.005
(where only BF16 passes). On a CPU: 1024^3 in every dtype that may gain. Each row goes to results/NAME.jsonl.
"""

from __future__ import annotations

import argparse
from typing import Any

import _rows

import dispatch
from dispatch.tools.demo import Product


def decisions(size: int, framework: str, dtype: str, device: str, jitted: bool, options: dict[str, Any]) -> Any:
    """Return the decision for one cube under the policy in force."""
    if not jitted:
        return Product(framework, dtype, size, size, size, device).decision(**options)
    import jax

    seen: list[dispatch.Decision] = []

    def traced(a: Any, b: Any) -> Any:
        seen.append(dispatch.explain(a, b, **options))
        return dispatch.matmul(a, b, **options)

    room = dispatch.framework("jax")
    a, b = (room.normal((size, size), dtype, seed, device) for seed in (0, 1))
    jax.jit(traced)(a, b).block_until_ready()
    return seen[0]


def main() -> None:
    """Measure, print each decision, and record the rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--record", metavar="NAME", help="append the rows to results/NAME.jsonl")
    parser.add_argument("--sizes", type=int, nargs="*", default=None)
    arguments = parser.parse_args()
    archs = dispatch.machine()["archs"]
    rows = []
    on_gpu = [name for name in archs if any(arch.startswith("sm") for arch in archs[name])]
    for framework in on_gpu or archs:
        gpu = framework in on_gpu
        sizes = arguments.sizes or ([8192, 2048, 512] if gpu else [1024])
        for size in sizes:
            for dtype in ["bfloat16"] if gpu else ["bfloat16", "float16", "float32"]:
                for jitted in (False, True) if framework == "jax" else (False,):
                    for strict in (False, True) if gpu else (False,):
                        rows.append(_one(size, framework, dtype, "cuda:0" if gpu else "cpu", jitted, strict))
    if arguments.record:
        _rows.append(rows, arguments.record)


def _one(size: int, framework: str, dtype: str, device: str, jitted: bool, strict: bool) -> dict[str, Any]:
    sections = {"error": {"metric": "relative_l2", "tolerance": 0.005}} if strict else {}
    with dispatch.use_policy(**sections):
        decision = decisions(size, framework, dtype, device, jitted, {})
    print(decision, "\n", flush=True)
    gate = "relative_l2 0.005" if strict else "default"
    name = None if device.startswith("cuda") else _rows.cpu_name()
    more = {} if name is None else {"device": name}
    return _rows.row("main", decision, gate=gate, jitted=jitted, data="normal, seeded", **more)


if __name__ == "__main__":
    main()
