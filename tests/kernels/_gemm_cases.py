"""Multiply by the Triton GEMM kernels and compare with float64: shared by the interpreter's run and the GPU's.

As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object: a list of complaints for each case.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from dispatch.kernels import triton_decode, triton_gemm, triton_mx_gemm
from dispatch.kernels._triton_tile import Launch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ACTIVATIONS = {
    None: lambda x: x,
    "relu": torch.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}
ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-22}
SMALL = {"block_m": 32, "block_n": 64, "block_k": 32, "stages": 2, "warps": 4}
WALK = {"group": 2, "programs": 3}


@dataclass(frozen=True)
class Case:
    """One product and the kernel and config that it is for. scales: none, tensor, row, block, or mx."""

    kernel: str  # tma, pointer, decode, decode_pointer, mx or hopper
    m: int
    n: int
    k: int
    dtypes: tuple[torch.dtype, torch.dtype] = (E4M3, E4M3)
    out: torch.dtype = torch.bfloat16
    scales: str = "row"
    block: tuple[int, int, int] | None = None
    bias: torch.dtype | None = None
    activation: str | None = None
    promoted: bool = False
    batch: tuple[int, int] = (0, 0)  # of a and of b; 0 for an operand without batch
    gap: int = 0  # elements between the rows of c
    odd: bool = False  # rows of a and b that are not aligned
    splits: int = 1
    halves: int = 1
    config: tuple[tuple[str, int], ...] = ()
    hopper: Any = None  # the Hopper kernel's Config


def _matrix(batch: int, rows: int, cols: int, dtype: torch.dtype, device: str, odd: bool) -> torch.Tensor:
    """Return random values as a view in a larger parent of NaN, its rows aligned to 16 bytes unless `odd`."""
    values = torch.randn(max(batch, 1), rows, cols, device=device)
    width = cols + 3 if odd else -(-cols // 16) * 16 + 16
    parent = torch.full((max(batch, 1), rows + 1, width), float("nan"), device=device).to(dtype)
    parent[:, :rows, :cols] = values.to(dtype)
    view = parent[:, :rows, :cols]
    return view if batch else view[0]


def _decoded(x: torch.Tensor, scale: torch.Tensor | None, extent: int, extent_k: int) -> torch.Tensor:
    value = x.double()
    if scale is None:
        return value
    rows, cols = value.shape[-2:]
    each = scale.double().repeat_interleave(extent, -2).repeat_interleave(extent_k, -1)
    return value * each[..., :rows, :cols]


def _scale(case: Case, x: torch.Tensor, extent: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the scale as the kernel takes it and as (rows / extent, k / extent_k) blocks to decode by."""
    if case.scales == "none":
        return None, None
    rows, cols = x.shape[-2:]
    batch = x.shape[:-2]
    if case.scales == "tensor":
        scale = torch.rand((), device=x.device) + 0.5
        return scale, scale.expand(1, 1)
    if case.scales == "row":
        scale = torch.rand(*batch, rows, device=x.device) + 0.5
        return scale, scale[..., None]
    if case.scales == "mx":
        exponent = torch.randint(120, 135, (*batch, rows, cols // 32), device=x.device, dtype=torch.uint8)
        return exponent, torch.exp2(exponent.double() - 127)
    assert case.block is not None
    blocks = -(-rows // extent)
    shape = (*batch, -(-cols // case.block[2]), -(-blocks // 4) * 4)
    scale = (torch.rand(shape, device=x.device) + 0.5).mT[..., :blocks, :]  # as it is stored for coalescing, and TMA
    return scale, scale


def empty_launch(case: Case) -> Launch:
    """Return the launch of the case on operands of no values, to be compiled."""
    a, b = torch.empty(case.m, case.k, dtype=case.dtypes[0]), torch.empty(case.n, case.k, dtype=case.dtypes[1])
    c = torch.empty(case.m, case.n, dtype=case.out)
    extents = case.block or (1, 1, 1)
    (scale_a, _), (scale_b, _) = _scale(case, a, extents[0]), _scale(case, b, extents[1])
    return launch(case, a, b, c, scale_a, scale_b, None if case.bias is None else torch.empty(case.n, dtype=case.bias))


def launch(case: Case, a: Any, b: Any, c: Any, scale_a: Any, scale_b: Any, bias: Any) -> Launch:
    """Return the launch that the case asks for."""
    config = {**SMALL, **dict(case.config)}
    options: dict[str, Any] = {"activation": case.activation}
    if case.kernel == "mx":
        options |= {**WALK, "epilogue_halves": case.halves}
        return triton_mx_gemm.mx_gemm_launch(a, b, c, scale_a, scale_b, bias, **{**options, **config})
    if case.kernel == "hopper":
        from dispatch.kernels import gluon_gemm  # the interpreter has no Gluon

        blocks = case.scales == "block"
        options |= {"promoted": case.promoted, "blocks": blocks, "config": case.hopper, "programs": 3}
        return gluon_gemm.gemm_launch(a, b, c, scale_a.mT if blocks else scale_a, scale_b, bias, **options)
    options |= {"promoted": case.promoted, "block": case.block}
    if case.kernel.startswith("decode"):
        batch = c.shape[0] if c.dim() == 3 else 1
        tile = {"block_m": config["block_m"], "block_n": config["block_n"], "splits": case.splits}
        partials, counters = triton_decode.decode_workspace(case.m, case.n, batch, **tile)
        workspace = (
            torch.full((partials,), float("nan"), device=c.device),
            torch.zeros(counters, dtype=torch.int32, device=c.device),
        )
        return triton_decode.decode_launch(
            *(a, b, c, scale_a, scale_b, bias, workspace if case.splits > 1 else None),
            **{**options, **config, "splits": case.splits, "tma": case.kernel == "decode"},
        )
    options |= {**WALK, "epilogue_halves": case.halves}
    make = triton_gemm.gemm_launch if case.kernel == "tma" else triton_gemm.gemm_pointer_launch
    return make(a, b, c, scale_a, scale_b, bias, **{**options, **config})


def operands(case: Case, device: str) -> tuple[tuple[Any, ...], torch.Tensor, torch.Tensor]:
    """Return a, b, c's parent, scale_a, scale_b and bias; c in float64; the sum of magnitudes."""
    a = _matrix(case.batch[0], case.m, case.k, case.dtypes[0], device, case.odd)
    b = _matrix(case.batch[1], case.n, case.k, case.dtypes[1], device, case.odd)
    block = case.block or ((1, 1, 32) if case.scales == "mx" else (1, 1, case.k))
    block = block if case.scales != "tensor" else (case.m, case.n, case.k)
    (scale_a, blocks_a), (scale_b, blocks_b) = _scale(case, a, block[0]), _scale(case, b, block[1])
    bias = None if case.bias is None else torch.randn(case.n, device=device).to(case.bias)
    left, right = _decoded(a, blocks_a, block[0], block[2]), _decoded(b, blocks_b, block[1], block[2])
    exact, magnitude = left @ right.mT, left.abs() @ right.abs().mT
    if bias is not None:
        exact, magnitude = exact + bias.double(), magnitude + bias.double().abs()
    batch = (max(case.batch),) if max(case.batch) else ()
    c = torch.full((*batch, case.m + 1, case.n + case.gap), float("nan"), dtype=case.out, device=device)
    return (a, b, c, scale_a, scale_b, bias), ACTIVATIONS[case.activation](exact), magnitude


def complaints(case: Case, device: str = "cpu", runs: int = 1) -> list[str]:
    """Return what is wrong with the case's output, nothing if all is right, in each of `runs` runs."""
    torch.manual_seed(case.m * 1_000_003 + case.n * 1009 + case.k)
    (a, b, parent, *rest), exact, magnitude = operands(case, device)
    c = parent[..., : case.m, : case.n]
    prepared = launch(case, a, b, c, *rest)
    found: list[torch.Tensor] = []
    for _ in range(runs):
        parent.fill_(float("nan"))
        prepared.run()
        found.append(parent.clone())
    wrong = []
    if any(not torch.equal(other.view(torch.uint8), found[0].view(torch.uint8)) for other in found[1:]):
        wrong.append("runs differ")
    if (inside := found[0][..., : case.m, : case.n]).isnan().any():
        wrong.append(f"{int(inside.isnan().sum())} NaN inside")
    if not (found[0][..., case.m :, :].isnan().all() and found[0][..., case.n :].isnan().all()):
        wrong.append("wrote outside")
    fast = case.dtypes[0].itemsize == 1 and case.scales != "mx" and device != "cpu"
    summing = (2.0**-12 if case.promoted or case.block else 2.0**-10) if fast else 2.0**-15
    rounding = ROUNDING[case.out] * (2 if device == "cpu" else 1)  # the interpreter truncates to bfloat16
    allowed = 1.2 * summing * magnitude + rounding * exact.abs() + 1e-6
    excess = ((inside.double() - exact).abs() / allowed).max().item()
    if not excess <= 1:
        wrong.append(f"off by {excess:.3g} of what is allowed")
    return wrong


def interpreted_cases() -> dict[str, Case]:
    """Return what the interpreter runs: small products, each feature at least once, each size odd somewhere."""
    walk, half = Case("tma", 70, 130, 80), (torch.float16, torch.float16)
    wide = {"bias": torch.float32, "activation": "silu"}
    cases = {
        "fp8 row scales": replace(walk, gap=14),
        "two halves": replace(walk, halves=2, n=144, gap=16),
        "halves by pointers": replace(walk, halves=2),
        "tensor scales": replace(walk, scales="tensor", out=torch.float32),
        "no scales, float16": replace(walk, dtypes=half, scales="none", out=torch.float16),
        "promoted": replace(walk, promoted=True, dtypes=(E5M2, E4M3)),
        "e4m3 by e5m2": replace(walk, dtypes=(E4M3, E5M2)),
        "one by one by one": replace(walk, m=1, n=1, k=1),
        "one row": replace(walk, m=1, n=17, k=16),
        "one column": replace(walk, m=17, n=1, k=48),
        "batch": replace(walk, batch=(2, 2), m=33, n=40, **wide),
        "batch of a": replace(walk, batch=(3, 0), m=33, n=72, scales="tensor"),
        "batch of b": replace(walk, batch=(0, 2), m=33, n=40),
        "pointers": replace(walk, kernel="pointer", k=77, gap=1, odd=True),
        "pointers, one by one by one": Case("pointer", 1, 1, 1),
        "pointers, batch": replace(walk, kernel="pointer", k=33, batch=(2, 0), **wide),
        "decode": Case("decode", 3, 130, 80, gap=3),
        "decode, one by one by one": Case("decode", 1, 1, 1, splits=2),
        "decode, many rows": Case("decode", 70, 65, 48, dtypes=half, scales="none", out=torch.float32),
        "decode, split": Case("decode", 17, 130, 144, splits=3, **wide),
        "decode, empty splits": Case("decode", 5, 70, 80, splits=7),
        "decode, split batch": Case("decode", 5, 70, 96, splits=2, batch=(2, 2), bias=torch.float16),
        "decode by pointers": Case("decode_pointer", 5, 70, 77, splits=2, odd=True),
        "decode, block scales": Case("decode", 40, 150, 272, scales="block", block=(1, 128, 128), splits=2),
    }
    mx = Case("mx", 70, 130, 160, scales="mx", config=(("block_k", 64),))
    cases |= {
        "mx": replace(mx, k=128, halves=2, n=144),
        "mx, k ends inside a step": replace(mx, out=torch.float32, **wide),
        "mx, one by one": replace(mx, m=1, n=1, k=32),
        "mx, batch": replace(mx, dtypes=(E5M2, E4M3), batch=(2, 2), m=33),
        "mx, batch of b": replace(mx, dtypes=(E4M3, E5M2), batch=(0, 3), m=33, n=40),
    }
    for activation in ("relu", "gelu", "gelu_tanh", "silu"):
        cases[activation] = replace(walk, m=20, bias=half[0], activation=activation, scales="none", dtypes=half)
    for block in ((1, 128, 128), (128, 128, 128), (64, 64, 64), (32, 32, 32)):
        cases[f"block scales {block}"] = Case("tma", 70, 150, 208, scales="block", block=block)
    cases["block scales by pointers"] = replace(cases["block scales (1, 128, 128)"], kernel="pointer", batch=(2, 2))
    return cases


FAR = 2**28 + 16
"""Elements from row to row: the ninth row is more than 2**31 away."""


def far_apart(kernel: str) -> list[str]:
    """Return what is wrong with a product whose rows are so far apart that 32 bits do not hold where they begin.

    The memory is asked for and not touched but for those rows.
    """
    from triton.runtime.interpreter import GridExecutor

    m, n, k = 9, 17, 48
    a, b = (
        torch.empty((rows - 1) * step + k, dtype=E4M3).as_strided((rows, k), (step, 1))
        for rows, step in ((m, k if kernel == "decode" else FAR), (n, k))
    )
    for x in (a, b):
        x.copy_(torch.randn(x.shape).to(E4M3))
    c = torch.empty((m - 1) * FAR + n, dtype=torch.float32).as_strided((m, n), (FAR, 1))
    restore, GridExecutor._restore_args_dev = GridExecutor._restore_args_dev, lambda *rest: None  # it copies all
    try:
        launch(Case(kernel, m, n, k, config=(("block_m", 16),)), a, b, c, None, None, None).run()
    finally:
        GridExecutor._restore_args_dev = restore
    exact = a.double() @ b.double().mT
    return [] if torch.allclose(c.double(), exact, rtol=1e-5, atol=1e-4) else ["wrong values"]


def any_order() -> list[str]:
    """Return what is wrong with a split product whose programs run in other orders: the bits have to be the same."""
    from _quantize_cases import _order

    case = Case("decode", 17, 130, 272, splits=3, out=torch.float32)
    torch.manual_seed(1)
    (a, b, parent, *rest), exact, magnitude = operands(case, "cpu")
    c, results = parent[: case.m, : case.n], list[torch.Tensor]()
    prepared = launch(case, a, b, c, *rest)
    for shuffle in (lambda places: None, list.reverse, lambda places: places.sort(key=lambda place: hash(place) % 7)):
        parent.fill_(float("nan"))
        with _order(shuffle):
            prepared.run()
        results.append(c.clone())
    wrong = [] if all(x.equal(results[0]) for x in results[1:]) else ["another order gives other bits"]
    close = ((results[0].double() - exact).abs() <= 2.0**-15 * magnitude + 1e-6).all()
    return wrong + ([] if close else ["wrong values"])


def _teach_the_interpreter_dot_scaled() -> None:
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    def decoded(data: Any, scale: Any, axis: int) -> Any:
        wide = interpreter._convert_float(data.data, data.dtype, tl.float16, None).view(np.float16).astype(np.float32)
        exponent = np.repeat(scale.data.astype(np.int32), 32, axis=1)
        exponent = exponent if axis == 1 else exponent.T
        return np.where(exponent == 255, np.float32("nan"), np.ldexp(wide, exponent - 127))

    def dot_scaled(_: Any, a: Any, scale_a: Any, _a: Any, b: Any, scale_b: Any, _b: Any, acc: Any, *rest: Any) -> Any:
        product = decoded(a.handle, scale_a.handle, 1) @ decoded(b.handle, scale_b.handle, 0) + acc.handle.data
        return tl.core.tensor(interpreter.TensorHandle(product.astype(np.float32), tl.float32), acc.type)

    TritonSemantic.dot_scaled = dot_scaled


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    _teach_the_interpreter_dot_scaled()
    chosen = sys.argv[1:] or list(interpreted_cases())
    known = interpreted_cases()
    found = {name: complaints(known[name], runs=1 + (known[name].splits > 1)) for name in chosen if name in known}
    found |= {name: any_order() for name in chosen if name == "decode in any order"}
    found |= {name: far_apart(name.removesuffix(" far apart")) for name in chosen if name.endswith(" far apart")}
    json.dump(found, sys.stdout)
