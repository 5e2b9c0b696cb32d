"""The kernels of ours that an arch runs, once each, for tools that look inside. Needs an NVIDIA GPU.

    compute-sanitizer --tool memcheck python benchmarks/each_kernel.py
    compute-sanitizer --tool racecheck python benchmarks/each_kernel.py
    ncu --clock-control none --metrics METRICS python benchmarks/each_kernel.py --size 8192 --only pingpong torch

METRICS that told something: sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed,
sm__cycles_elapsed.avg.per_second, lts__t_sector_hit_rate.pct, dram__throughput.avg.pct_of_peak_sustained_elapsed.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from dispatch import Operand, Problem, RecipePair, machine
from dispatch._api import engine

BACKEND = "triton_tma_fp8"


def product(
    size: tuple[int, int, int],
    recipe: str | None,
    mode: str | None,
    config: str | None,
    layout: str,
) -> None:
    """Multiply operands of random values once, by one config, and compare with torch."""
    m, n, k = size
    pair = None if recipe is None else RecipePair.parse(recipe)
    arch = machine()["archs"]["torch"][-1]
    a, b = Operand("bfloat16"), Operand("bfloat16", (), layout)
    asked = Problem(m, n, k, a, b, "bfloat16", "torch", arch, "cuda:0", recipe=pair, accumulation=mode)
    backend: Any = engine().registry.backends[BACKEND].backend
    left = torch.randn(m, k, device="cuda", dtype=torch.bfloat16)
    shape = (k, n) if layout == "row" else (n, k)
    right = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
    right = right if layout == "row" else right.t()
    names = [name for name in backend.configs(asked) if config is None or config in name]
    if not names:
        raise SystemExit(f"no {config} among the configs of {asked}: {', '.join(backend.configs(asked))}")
    for name in names:
        out = backend.plan(asked, name)(left, right)
        if m * n * k > 1 << 32:  # for ncu
            print(f"{m}x{n}x{k} {recipe} {name}", flush=True)
            continue
        out, wanted = out.cpu(), left.cpu().double() @ right.cpu().double()
        print(
            f"{m}x{n}x{k} {recipe} {mode} {layout} {name}: {float((out - wanted).norm() / wanted.norm()):.4f}",
            flush=True,
        )


def prepared(k: int, n: int) -> None:
    """Quantize a weight (k, n) alone."""
    weight = torch.randn(k, n, device="cuda", dtype=torch.bfloat16)
    recipe = RecipePair.parse("e4m3:row").b
    engine().registry.backends[BACKEND].backend.prepare(weight, recipe, axis=-2)
    print(f"{k}x{n} {recipe} prepared", flush=True)


@gluon.jit
def _write(x, value, barrier):
    mbarrier.wait(barrier, 0)
    gl.store(x + 3 * gl.program_id(0) + value, value)


@gluon.jit
def _arrive(x, value, barrier):
    gl.store(x + 3 * gl.program_id(0) + value, value)
    mbarrier.arrive(barrier, count=1)


@gluon.jit
def apart_kernel(x):
    """Specialize warps that share one mbarrier, and no data in shared memory.

    What racecheck says of it concerns the word by which Triton itself tells warps what to run.
    """
    barrier = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(barrier, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [(_write, (x, 0, barrier)), (_write, (x, 1, barrier)), (_arrive, (x, 2, barrier))], [4, 1], [232, 24]
    )
    mbarrier.invalidate(barrier)


def apart() -> None:
    """Launch warp-specialized programs, as many and as large as a product's, that do nothing else together."""
    programs = 1024
    found = torch.empty(programs, 3, device="cuda", dtype=torch.int32)
    apart_kernel[(programs,)](found, num_warps=4)
    print(f"apart: {found.sum(0).tolist()}", flush=True)


def torch_product(size: int) -> None:
    """Multiply FP8 values with row scales by torch, for comparison."""
    a, b = (torch.randn(size, size, device="cuda").to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones(size, 1, device="cuda")
    torch._scaled_mm(a, b.t(), one, one.t(), out_dtype=torch.bfloat16, use_fast_accum=True)


def cases(size: int | None) -> dict[str, Callable[[], None]]:
    """Return what can be run: small odd sizes, or cubes of one size."""
    cube = None if size is None else (size, size, size)
    blocks = "e4m3:1x128@e4m3:128x128"
    found: dict[str, Callable[[], None]] = {
        "pingpong": lambda: product(cube or (2100, 2100, 400), "e4m3:row", "fast", "pingpong", "col"),
        "few tiles": lambda: product(cube or (300, 520, 272), "e4m3:row", "fast", None, "row"),
        "tensor": lambda: product(cube or (300, 520, 272), "e4m3:tensor", "fast", None, "col"),
        "promoted": lambda: product(cube or (300, 520, 272), "e4m3:row", "promoted", None, "col"),
        "blocks": lambda: product(cube or (300, 520, 400), blocks, "promoted", None, "row"),
        "square blocks": lambda: product(cube or (130, 264, 272), "e4m3:64x64", "promoted", None, "col"),
        "decode": lambda: product((16, 520, 1040), "e4m3:row", "fast", None, "col"),
        "decode, split": lambda: product((16, 256, 4096), "e4m3:row", "fast", "swapped", "col"),
        "whole tiles of long columns": lambda: product((256, 256, 4096), "e4m3:row", "fast", None, "row"),
        "columns alone": lambda: prepared(1040, 264),
        "long rows": lambda: product((300, 264, 16400), "e4m3:row", "fast", None, "col"),
        "long columns": lambda: product((300, 264, 4112), "e4m3:row", "fast", None, "row"),
        "sixteen bit": lambda: product((300, 515, 264), None, None, None, "col"),
        "apart": apart,
        "torch": lambda: torch_product(size or 256),
    }
    return found


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, help="cubes of this size instead of small odd ones")
    parser.add_argument("--only", nargs="*", choices=cases(None), help="these alone")
    arguments = parser.parse_args()
    chosen = cases(arguments.size)
    for name in arguments.only or chosen:
        chosen[name]()
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
