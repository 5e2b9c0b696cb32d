"""Run whole plans of triton_tma_fp8 in torch on a CPU: for the test of Triton's interpreter.

The launches are made over addresses, as on a GPU; plain Triton kernels are interpreted, the Hopper kernel's text is run
by `tests/kernels/_gluon_on_cpu.py`. Operands are exact once quantized (the interpreter's FP8 cast is right for those),
and differ in their scales from row to row or from block to block, so results are compared with float64 to float32's
rounding. As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object, complaints by case: of all,
or for `0/2` of the first share of two.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "kernels"))

import _gemm_cases
import _gluon_on_cpu
from dispatch.kernels import gluon_gemm, launching, triton_quantize
from dispatch.plugins import _guard_torch as guards
from dispatch.plugins import _triton_configs as names
from dispatch.plugins import _triton_torch as module
from dispatch.plugins import triton_tma_fp8

import dispatch
from dispatch import Operand, Problem, RecipePair, ScaledArray, ScalingRecipe, Watch
from dispatch.measuring.watch import watching

BACKEND = triton_tma_fp8.TritonBackend()
ROOM = dispatch.framework("torch")
ROW, TENSOR, BLOCKS, MX = "e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128", "e4m3:1x32:e8m0"
TORCH = {"fp8e4nv": torch.float8_e4m3fn, "fp8e5": torch.float8_e5m2, "bf16": torch.bfloat16, "fp16": torch.float16}
TORCH |= {"fp32": torch.float32, "int32": torch.int32, "uint8": torch.uint8}


class Machine:
    """The stand-in for a GPU: which stream is current, whether it is captured, what was launched where."""

    def __init__(self) -> None:
        self.stream, self.captures = 0, False
        self.launched: list[tuple[int, str]] = []

    def bind(self, kernel: Any, grid: Any, arguments: Any, options: Any) -> launching.Bound:
        options = {key: value for key, value in options.items() if key not in ("dependent", "launch_pdl")}

        def launch(stream: int, addresses: Any) -> None:
            self.launched.append((stream, kernel.__name__))
            placed = [_tensors(launching._placed(x, addresses)) for x in arguments]
            if kernel is gluon_gemm.gemm_kernel:
                _gluon_on_cpu.run(grid, placed)
            else:
                parameters = list(getattr(kernel, "arg_names", ()))
                placed = [False if name == "DEPENDENT" else x for name, x in zip(parameters, placed, strict=False)]
                kernel[tuple(grid)](*placed, **options)

        return launch


def _tensors(x: Any) -> Any:
    if isinstance(x, launching.Array):
        assert x.address, "no address was given"
        assert x.address % 16 == 0, "an address that is no multiple of 16"
        dtype = TORCH[str(x.dtype)]
        last = sum((size - 1) * step for size, step in zip(x.shape, x.strides, strict=True))
        memory = (ctypes.c_char * ((last + 1) * dtype.itemsize)).from_address(x.address)
        return torch.frombuffer(memory, dtype=torch.uint8).view(dtype).as_strided(x.shape, x.strides)
    if isinstance(getattr(x, "base", None), launching.Array):
        return dataclasses.replace(x, base=_tensors(x.base))
    return x


@contextmanager
def machine() -> Iterator[Machine]:
    """Stand in for a GPU: workspaces and results hold NaN before they are written."""
    here = Machine()
    on, launched = module.Workspaces.on, module.launched

    def spoilt(self: Any, stream: int) -> torch.Tensor:
        return on(self, stream).fill_(0xFF)

    def into_nan(kernel: Any, stream: int, addresses: Any, out: torch.Tensor, bias: Any) -> torch.Tensor:
        return launched(kernel, stream, addresses, out.fill_(float("nan")), bias)

    before = {name: getattr(module, name) for name in ("_current_stream", "_capturing", "launched")}
    kept = launching.bind, torch.cuda.device, torch.cuda.get_device_properties, guards._capturing
    launching.bind, torch.cuda.device = here.bind, lambda device: nullcontext()  # type: ignore[assignment]
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(multi_processor_count=5)  # type: ignore
    module._current_stream = lambda index: here.stream
    module._capturing = guards._capturing = lambda: here.captures
    module.launched, module.Workspaces.on = into_nan, spoilt  # type: ignore[method-assign]
    module.Workspaces._kept.clear()
    partials, triton_quantize.TENSOR_PARTIALS = triton_quantize.TENSOR_PARTIALS, 4  # programs of an amax, one by one
    try:
        yield here
    finally:
        for name, value in before.items():
            setattr(module, name, value)
        launching.bind, torch.cuda.device, torch.cuda.get_device_properties, guards._capturing = kept
        module.Workspaces.on = on  # type: ignore[method-assign]
        triton_quantize.TENSOR_PARTIALS = partials


def exact(outer: int, k: int, recipe: ScalingRecipe, seed: int, batch: tuple[int, ...] = ()) -> torch.Tensor:
    """Return float32 values (*batch, outer, k), exact in the format once scaled, the largest in each 32 of k."""
    generator = torch.Generator().manual_seed(seed)
    fmt = getattr(torch, recipe.storage_dtype)
    codes = torch.arange(0x28, 0x7F if recipe.dtype == "e4m3" else 0x7C, dtype=torch.uint8).view(fmt).float()
    shape = (*batch, outer, k)
    x = codes[torch.randint(len(codes), shape, generator=generator)]
    x[..., ::32] = codes[-1]
    x *= torch.randint(2, shape, generator=generator) * 2 - 1
    row, col = torch.arange(outer)[:, None], torch.arange(k)[None, :]
    height, width = recipe.block(outer, k)
    kind = recipe.granularity
    exponent = 0 * row if kind == "tensor" else row % 5 if kind == "row" else (row // height + 2 * (col // width)) % 5
    entry = torch.arange(math.prod(batch)).reshape(*batch, 1, 1) % 3 if kind == "row" else 0
    return x * torch.exp2((exponent + entry - 8).float())


def laid_out(x: torch.Tensor, layout: str) -> torch.Tensor:
    """Return the values as a view in a larger parent of 3e4: row, col, strided, shifted, gap or expanded."""
    if layout in ("row", "expanded"):
        return x.contiguous()
    if layout == "col":
        return x.mT.contiguous().mT
    *outer, height, width = x.shape
    columns = {"strided": 2 * width, "shifted": width + 1, "gap": width + 24, "gap_col": width}[layout]
    parent = x.new_full((*outer, height + 24 * (layout == "gap_col"), columns), 3e4)
    if layout == "gap_col":
        parent = x.new_full((*outer, width + 1, height + 24), 3e4)
        view = parent[..., :width, :height].mT
    else:
        first, step = int(layout == "shifted"), 2 if layout == "strided" else 1
        view = parent[..., first : first + step * width : step]
    return view.copy_(x)


def fact(x: Any, prepared: bool) -> Operand:
    if isinstance(x, ScaledArray):
        return Operand(x.dtype, tuple(x.shape[:-2]), recipe=x.recipe)
    return dataclasses.replace(ROOM.operand(x), prepared=prepared)


def wrong(found: torch.Tensor, exact_out: torch.Tensor, magnitude: torch.Tensor) -> list[str]:
    """Return what is wrong with a result that may be off by rounding alone."""
    if tuple(found.shape) != tuple(exact_out.shape) or not found.is_contiguous():
        return [f"shape {tuple(found.shape)}, strides {found.stride()}"]
    rounding = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[found.dtype]
    allowed = 2.0**-18 * magnitude + rounding * exact_out.abs() + 1e-30
    excess = ((found.double() - exact_out).abs() / allowed).max().item()
    return [] if excess <= 1 else [f"off by {excess:.3g} of what is allowed"]


class Case:
    """One problem: its operands, the plan of each config, and what they should give."""

    def __init__(self, recipe: str, m: int, n: int, k: int, arch: str, **facts: Any) -> None:
        self.pair, self.size, self.arch = RecipePair.parse(recipe), (m, n, k), arch
        self.batches = facts.pop("batches", ((), ()))
        self.dtype = getattr(torch, facts.pop("dtype", "bfloat16"))
        self.layouts = facts.pop("layouts", ("row", "row"))
        self.given = facts.pop("given", "")  # of a and b: prepared (P), a ScaledArray (S) or as it is
        self.raw = facts.pop("raw", False)
        self.facts = {"out_dtype": "float32", **facts}

    def operands(self, seed: int = 0) -> tuple[Any, Any, torch.Tensor, torch.Tensor]:
        """Return what is multiplied, and both in float64."""
        m, n, k = self.size
        a = exact(m, k, self.pair.a, seed, self.batches[0])
        b = exact(n, k, self.pair.b, seed + 1, self.batches[1]).mT
        dtypes = [getattr(torch, x.storage_dtype) if self.raw else self.dtype for x in (self.pair.a, self.pair.b)]
        if self.raw:
            a, b = (x * 2.0**8 for x in (a, b))
        if "expanded" in self.layouts:
            a = a[..., :1, :].expand(a.shape)
            return a[..., :1, :].to(dtypes[0]).expand(a.shape), b.to(dtypes[1]), a.double(), b.double()
        left, right = (laid_out(x.to(t), layout) for x, t, layout in zip((a, b), dtypes, self.layouts, strict=True))
        return left, right, a.double(), b.double()

    def handed(self, x: Any, how: str, recipe: ScalingRecipe, axis: int) -> Any:
        if how == "P":
            return BACKEND.prepare(x, recipe, axis=axis)
        return dispatch.quantize(x, recipe, axis=axis) if how == "S" else x

    def problem(self, a: Any, b: Any, bias: Any) -> Problem:
        m, n, k = self.size
        how = self.given.ljust(2)
        sides = [fact(x, h == "P") for x, h in zip((a, b), how, strict=True)]
        mode = {"accumulation": "promoted" if self.pair.a.granularity not in ("row", "tensor", "1x32") else "fast"}
        made = {"bias": None if bias is None else ROOM.dtype_name(bias), **mode, **self.facts}
        return Problem(m, n, k, *sides, framework="torch", arch=self.arch, device="cpu", recipe=self.pair, **made)

    def activated(self, x: torch.Tensor) -> torch.Tensor:
        return _gemm_cases.ACTIVATIONS[self.facts.get("activation")](x)

    def complaints(self, bias: Any = None) -> list[str]:
        """Return what is wrong with two calls of each config's plan, on other operands each."""
        found = []
        how = self.given.ljust(2)
        with machine():
            a, b, left, right = self.operands()
            asked = self.problem(
                a if how[0] != "S" else self.handed(a, "S", self.pair.a, -1),
                b if how[1] != "S" else self.handed(b, "S", self.pair.b, -2),
                bias,
            )
            for config in names.configs(asked):
                plan = BACKEND.plan(asked, str(config))
                for seed in (0, 7):
                    a, b, left, right = self.operands(seed)
                    before = [x.clone() for x in (a, b)]
                    given = self.handed(a, how[0], self.pair.a, -1), self.handed(b, how[1], self.pair.b, -2)
                    out = plan(*given, *(() if bias is None else (bias,)))
                    exact_out, magnitude = left @ right, left.abs() @ right.abs()
                    if bias is not None:
                        exact_out, magnitude = exact_out + bias.double(), magnitude + bias.double().abs()
                    found += [f"{config}: {x}" for x in wrong(out, self.activated(exact_out), magnitude)]
                    if out.dtype != ROOM.dtype(asked.out_dtype):
                        found.append(f"{config}: dtype {out.dtype}")
                    if not all(
                        torch.equal(x.view(torch.uint8), y.view(torch.uint8))
                        for x, y in zip((a.contiguous(), b.contiguous()), (x.contiguous() for x in before), strict=True)
                    ):
                        found.append(f"{config}: an operand was written to")
        return found


LAYOUTS = (("row", "col"), ("col", "row"), ("strided", "shifted"), ("shifted", "strided"), ("gap", "gap_col"))
LAYOUTS += (("expanded", "row"), ("shifted", "row"), ("row", "shifted"))


def interpreted_cases() -> dict[str, Callable[[], list[str]]]:
    """Return the cases by name. More than 128 rows go to the Hopper kernel on sm90, which is quick here."""
    cases: dict[str, Callable[[], list[str]]] = {}

    def add(name: str, case: Case, bias: torch.Tensor | None = None) -> None:
        cases[name] = lambda: case.complaints(bias)

    for recipe, arch, *size in (
        (ROW, "sm89", 70, 40, 80),
        (ROW, "sm89", 5, 17, 33),
        (ROW, "sm90", 150, 70, 272),
        (ROW, "sm90", 5, 17, 1040),
        (ROW, "sm100", 70, 40, 80),
        (TENSOR, "sm90", 150, 70, 80),
        (TENSOR, "sm89", 5, 17, 33),
        (BLOCKS, "sm90", 150, 200, 272),
        (BLOCKS, "sm90", 5, 17, 33),
        (BLOCKS, "sm89", 5, 140, 144),
        ("e4m3:128x128", "sm89", 150, 40, 144),
        ("e4m3:64x64", "sm90", 70, 40, 144),
        ("e4m3:32x32", "sm100", 70, 40, 80),
        ("e4m3:row@e5m2:row", "sm90", 150, 70, 144),
        ("e5m2:tensor@e4m3:tensor", "sm90", 150, 70, 144),
        (MX, "sm100", 70, 150, 288),
        ("e5m2:1x32:e8m0@e4m3:1x32:e8m0", "sm120", 5, 17, 40),
    ):
        add(f"{recipe} {arch} {size}", Case(recipe, *size, arch))
    add("bfloat16 from float16", Case(ROW, 150, 33, 72, "sm90", dtype="float16", out_dtype="bfloat16"))
    add("float16 from float32", Case(ROW, 150, 33, 72, "sm90", dtype="float32", out_dtype="float16"))
    for layouts in LAYOUTS:
        add(f"{ROW} {layouts}", Case(ROW, 150, 33, 72, "sm90", layouts=layouts))
    for layouts in (("col", "row"), ("strided", "gap_col")):
        add(f"{BLOCKS} {layouts}", Case(BLOCKS, 150, 33, 136, "sm90", layouts=layouts))
        add(f"{TENSOR} {layouts}", Case(TENSOR, 150, 33, 72, "sm90", layouts=layouts))
    add("long columns", Case(ROW, 150, 64, 2176, "sm90"))
    for batches in (((2, 1), (3,)), ((3,), ()), ((), (2,)), ((1,), (2,))):
        add(f"batches {batches}", Case(ROW, 20, 33, 72, "sm90", batches=batches))
    add("batches, tensor, columns", Case(TENSOR, 20, 33, 72, "sm89", batches=((2,), (2,)), layouts=("col", "col")))
    for recipe in (ROW, TENSOR, BLOCKS):
        for given in ("SS", " S", "PP"):
            add(f"{recipe} {given}", Case(recipe, 150, 15, 272, "sm90", given=given))
    add("64x64 SS", Case("e4m3:64x64", 70, 40, 144, "sm89", given="SS"))
    add("mx SS", Case(MX, 70, 150, 288, "sm100", given="SS"))
    add("raw", Case("e4m3:tensor@e5m2:tensor", 150, 33, 72, "sm90", raw=True))
    add("raw, columns", Case(TENSOR, 150, 48, 64, "sm90", raw=True, layouts=("col", "col")))
    line = torch.linspace(-9, 9, 34)
    for name, bias in {
        "n": line[:33].clone(),
        "bfloat16": line[:33].bfloat16(),
        "one": torch.ones(1) * 3,
        "mn": torch.linspace(-9, 9, 33 * 150).reshape(150, 33),
        "shifted": line[1:],
        "strided": torch.linspace(-9, 9, 66)[::2],
        "float64": line[:33].double(),
    }.items():
        add(f"bias {name}", Case(ROW, 150, 33, 72, "sm90", activation="silu"), bias)
    add("bias, sm89", Case(ROW, 150, 33, 72, "sm89", activation="relu"), line[:33].half())
    add("bias, decode", Case(ROW, 5, 70, 1040, "sm90", activation="gelu"), torch.linspace(-3, 3, 70))
    cases |= {
        "streams have their own": streams,
        "graphs have their own": graphs,
        "a large operand's workspace is its own": large,
        "layouts one after another": changing,
        "lossless": lossless,
        "guards": guarded,
    }
    return cases


def streams() -> list[str]:
    """Return what is wrong with which memory each stream's launches are given."""
    case, seen = Case(ROW, 5, 70, 1040, "sm90"), dict[int, set[int]]()
    with machine() as here:
        a, b, _, _ = case.operands()
        asked = case.problem(a, b, None)
        made = module.ScaledProduct(asked, names.configs(asked)[0])
        product = made.call()
        steps = None
        for stream in (3, 4, 3):
            here.stream = stream
            here.launched.clear()
            product(a, b)
            if {x for x, _ in here.launched} != {stream} or len(here.launched) < 2:
                return [f"launched on {here.launched}, not on {stream}"]
            (steps,) = made._by_strides.values()
            memory = [steps.space.on(stream).data_ptr()]
            assert made._kernel.counters is not None
            memory.append(made._kernel.counters.on(stream).data_ptr())
            seen.setdefault(stream, set()).update(memory)
        others: list[int] = []
        thread = threading.Thread(target=lambda: others.append(steps.space.on(3).data_ptr()))
        thread.start()
        thread.join()
    wrong = [] if len(seen[3]) == len(seen[4]) == 2 and not seen[3] & seen[4] else [f"streams share {seen}"]
    return wrong + (["threads share a workspace"] if set(others) & seen[3] else [])


def graphs() -> list[str]:
    """Return what is wrong with the memory that a capture is given."""
    case = Case(ROW, 5, 70, 1040, "sm90")
    with machine() as here:
        a, b, left, right = case.operands()
        asked = case.problem(a, b, None)
        made = module.ScaledProduct(asked, names.configs(asked)[0])
        here.stream = 3
        made.call()(a, b)
        (steps,), counters = made._by_strides.values(), made._kernel.counters
        before = {steps.space.on(3).data_ptr(), counters.on(3).data_ptr()}
        here.captures = True
        out = made.call()(a, b)
        spaces = [steps.space.on(3), counters.on(3), steps.space.on(3), counters.on(3)]
        here.captures = False
        after = {steps.space.on(3).data_ptr(), counters.on(3).data_ptr()}
    found = wrong(out, left @ right, left.abs() @ right.abs())
    if before & {x.data_ptr() for x in spaces} or len({x.data_ptr() for x in spaces}) != 4:
        found.append("a graph shares its memory")
    return found + ([] if after == before else ["a capture changed what a stream keeps"])


def large() -> list[str]:
    """Return what is wrong with products whose workspace is larger than what is kept."""
    kept, module.KEPT_BYTES = module.KEPT_BYTES, 1 << 12
    try:
        return Case(ROW, 150, 70, 272, "sm90").complaints()
    finally:
        module.KEPT_BYTES = kept


def changing() -> list[str]:
    """Return what is wrong with one plan that is given one layout after another."""
    found = []
    layouts = [("row", "row"), ("row", "col"), ("col", "row"), ("gap", "col"), ("gap", "row"), ("row", "row")]
    made = [Case(ROW, 150, 33, 72, "sm90", layouts=pair) for pair in layouts]
    with machine():
        first = made[0].operands()
        asked = made[0].problem(*first[:2], None)
        plan = BACKEND.plan(asked)
        for seed, case in enumerate(made):
            a, b, left, right = case.operands(seed)
            found += [f"{case.layouts}: {x}" for x in wrong(plan(a, b), left @ right, left.abs() @ right.abs())]
    return found


def lossless() -> list[str]:
    """Return what is wrong with products of 16-bit operands, one plan for all layouts and batches."""
    found = []
    for batches, arch, k in (
        (((), ()), "sm89", 77),
        (((), ()), "sm90", 77),
        (((), ()), "sm90", 80),
        (((2, 1), (3,)), "sm89", 80),
        (((3,), ()), "sm90", 77),
    ):
        layouts = [("row", "row"), ("col", "col"), ("gap", "gap_col"), ("shifted", "strided"), ("row", "row")]
        with machine():
            for index, pair in enumerate(layouts):
                case = Case(ROW, 40, 33, k, arch, batches=batches, layouts=pair, dtype="float16")
                a, b, left, right = case.operands(index)
                bias = torch.linspace(-9, 9, 34)[index % 2 : index % 2 + 33]
                facts = {"framework": "torch", "device": "cpu", "out_dtype": "float32", "bias": "float32"}
                if index == 0:
                    asked = Problem(40, 33, k, ROOM.operand(a), ROOM.operand(b), arch=arch, activation="relu", **facts)
                    plan = BACKEND.plan(asked)
                exact_out, magnitude = left @ right + bias.double(), left.abs() @ right.abs() + bias.double().abs()
                out = plan(a, b, bias)
                found += [f"{arch} {batches} {pair}: {x}" for x in wrong(out, exact_out.relu(), magnitude)]
    return found


def guarded() -> list[str]:
    """Return what is wrong with trips: none of exact operands, one by Inf in either."""
    found = []
    for recipe, sides in ((ROW, ("none", "a", "b")), (TENSOR, ("a",)), (BLOCKS, ("b",))):
        for side in sides:
            case, watch = Case(recipe, 150, 48, 144, "sm90"), Watch(0.5)
            with machine() as here, watching(watch):
                a, b, _, _ = case.operands()
                here.stream = 3
                plan = BACKEND.plan(case.problem(a, b, None))
                if side != "none":
                    (a if side == "a" else b)[7, 9] = float("inf")
                for _ in range(2):  # the first launch samples the tile of the first rows
                    plan(a, b)
                tripped = bool(watch.tripped())
            if tripped != (side != "none"):
                found.append(f"{recipe}: tripped {tripped} with Inf in {side}")
    return found


def main(share: int, shares: int) -> None:
    """Print what each case of one share complains of, as JSON."""
    _gemm_cases._teach_the_interpreter_dot_scaled()
    found = {}
    for name, run in list(interpreted_cases().items())[share::shares]:
        try:
            found[name] = run()
        except Exception as error:
            found[name] = [f"{type(error).__name__}: {error}"]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(*map(int, (sys.argv[1] if sys.argv[1:] else "0/1").split("/")))
