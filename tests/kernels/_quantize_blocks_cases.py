"""Quantize by blocks in Triton and compare with the reference quantizer: for the interpreter's run and the GPU's.

As a script (in an environment with TRITON_INTERPRET=1) it prints one JSON object: a list of complaints for each case.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))

from _quantize_cases import close, extremes, guard_state, looked_at, rows_far_apart, seen
from dispatch.kernels import triton_quantize_blocks

from dispatch import ScalingRecipe, quantize

POISON = 3e4  # in the source's parent, beside the view that is quantized
RECIPES = ("1x128", "1x128:e8m0", "128x128", "128x128:e8m0", "64x64", "32x32", "1x32", "1x32:e8m0")
Compare = Callable[[torch.Tensor, torch.Tensor, torch.dtype], list[str]]


def recipe_of(name: str, fmt: torch.dtype) -> ScalingRecipe:
    """Return the recipe of a name in RECIPES."""
    return ScalingRecipe.parse(f"{'e4m3' if fmt is torch.float8_e4m3fn else 'e5m2'}:{name}")


def source(values: torch.Tensor, *, transposed: bool, gap: int = 0) -> torch.Tensor:
    """Return `values`, or their transpose, as a view with inner stride 1 in a wider parent of poison."""
    values = values.t() if transposed else values
    parent = torch.full((values.shape[0] + 1, values.shape[1] + gap), POISON, dtype=values.dtype, device=values.device)
    parent[: values.shape[0], : values.shape[1]] = values
    return parent[: values.shape[0], : values.shape[1]]


def exact_values(rows: int, cols: int, dtype: torch.dtype, recipe: ScalingRecipe, seed: int) -> torch.Tensor:
    """Return values that are exact in the recipe's format once scaled by a power of two, the largest in each block."""
    fmt = getattr(torch, recipe.storage_dtype)
    generator = torch.Generator().manual_seed(seed)
    normal = torch.arange(0x08, 0x7F if recipe.dtype == "e4m3" else 0x7C, dtype=torch.uint8).view(fmt).float()
    x = normal[torch.randint(len(normal), (rows, cols), generator=generator)]
    x *= torch.randint(2, (rows, cols), generator=generator) * 2 - 1
    height, width = recipe.block(rows, cols)
    for top in range(0, rows, height):
        for left in range(0, cols, width):
            block = x[top : top + height, left : left + width]
            block[-1, block.shape[1] // 2] = normal[-1]
            block *= 2.0 ** ((top // height + left // width) % 5 - 6)
    return x.to(dtype)


def run(
    x: torch.Tensor, recipe: ScalingRecipe, *, transposed: bool, multiple: tuple[int, int], scale_along_rows: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return data and scales of x, the output padded and filled with NaN bytes first."""
    shape = tuple(reversed(x.shape)) if transposed else tuple(x.shape)
    height, width = (-(-size // pad) * pad for size, pad in zip(shape, multiple, strict=True))
    block = recipe.block(height, width)
    out = torch.full((height, width), 0x7F, dtype=torch.uint8, device=x.device)
    out = out.view(getattr(torch, recipe.storage_dtype))
    blocks = (-(-height // block[0]), -(-width // block[1]))
    blocks = blocks[::-1] if scale_along_rows else blocks
    if recipe.scale_dtype == "e8m0":
        scale = torch.full(blocks, 0xFF, dtype=torch.uint8, device=x.device)
    else:
        scale = torch.full(blocks, float("nan"), device=x.device)
    scale = scale.t() if scale_along_rows else scale
    triton_quantize_blocks.quantize_blocks(x, out, scale, block, transposed=transposed)
    if recipe.scale_dtype == "e8m0":
        scale = (scale.to(torch.int32) << 23).view(torch.float32)
    return out, scale


def complaints(
    values: torch.Tensor,
    recipe: ScalingRecipe,
    compare: Compare,
    *,
    transposed: bool,
    multiple: tuple[int, int] = (1, 1),
    gap: int = 0,
    scale_along_rows: bool = False,
) -> list[str]:
    """Return what is wrong with the quantization of `values`, which lie transposed if asked."""
    x = source(values, transposed=transposed, gap=gap)
    out, scale = run(x, recipe, transposed=transposed, multiple=multiple, scale_along_rows=scale_along_rows)
    wanted = quantize(values.cpu(), recipe).scale.float().to(x.device)
    found = []
    if not torch.equal(scale[: wanted.shape[0], : wanted.shape[1]], wanted):
        found.append(f"scales {scale.flatten().tolist()[:4]} should be {wanted.flatten().tolist()[:4]}")
    if not (scale.isfinite() & (scale > 0)).all():
        found.append("a scale is zero or not finite")
    rows, cols = values.shape
    outside = out.view(torch.uint8).clone()
    outside[:rows, :cols] = 0
    if outside.any():
        found.append(f"{int(outside.count_nonzero())} bytes of the padding are not zero")
    height, width = recipe.block(rows, cols)
    spread = wanted.double().repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :cols]
    return found + compare(out[:rows, :cols], values.double() / spread, out.dtype)


def identical(found: torch.Tensor, scaled: torch.Tensor, fmt: torch.dtype) -> list[str]:
    """Compare data that are exact once scaled."""
    del fmt
    wrong = found.double() != scaled
    return [f"{int(wrong.sum())} of {wrong.numel()} values differ"] if wrong.any() else []


def hostile_values(dtype: torch.dtype) -> torch.Tensor:
    """Return 5 x 5 pieces of 128 x 128, of which some hold zeros, NaN, Inf, values near the ends of the dtype."""
    x = torch.randn(400, 400, generator=torch.Generator().manual_seed(7)).to(dtype)
    x[:128, :128] = 0
    x[5, 129] = float("nan")
    x[6, 200] = float("inf")
    x[7, 210] = -float("inf")
    x[128:256, :128] = torch.finfo(dtype).tiny * x[128:256, :128].sign()
    x[128:256, 128:256] = torch.finfo(dtype).max * x[128:256, 128:256].sign()
    x[256:384, :128] = float("nan")
    x[256:384, 128:256] = float("inf")
    return x


def wrong_sums(name: str, device: str, *, transposed: bool, launches: Sequence[int]) -> list[str]:
    """Return what is wrong with the ratios that some launches of one quantizer see in normal values.

    What is written is compared with a launch without the guard, bit by bit.
    """
    recipe, rows, k = recipe_of(name, torch.float8_e4m3fn), 300, 200
    values = torch.randn(rows, k, generator=torch.Generator().manual_seed(1)).bfloat16().to(device)
    x = values.t().contiguous() if transposed else values
    block = recipe.block(rows, k)
    sums, trip = guard_state((rows, k), values.device)
    out, plain = (torch.zeros(rows, k, dtype=torch.float8_e4m3fn, device=device) for _ in range(2))
    scale, plain_scale = (torch.empty(-(-rows // block[0]), -(-k // block[1]), device=device) for _ in range(2))
    triton_quantize_blocks.quantize_blocks(x, plain, plain_scale, block, transposed=transposed)
    tile = triton_quantize_blocks.TRANSPOSED_TILE[1] if transposed else triton_quantize_blocks.TILES[block][0]
    lines = max(tile, block[0])
    spread = plain_scale.double().repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:rows, :k]
    wrong = []
    for launch in range(max(launches) + 1):
        triton_quantize_blocks.quantize_blocks(x, out.zero_(), scale, block, sums, trip, transposed=transposed)
        found = seen(sums)
        if launch not in launches:
            continue
        if not torch.equal(out.view(torch.uint8), plain.view(torch.uint8)) or not torch.equal(scale, plain_scale):
            wrong.append(f"launch {launch} wrote something else than without the guard")
        looked = looked_at(launch - 1, rows, lines)
        scaled = values.double() / spread
        wanted = extremes(scaled[looked], out[looked]) if launch else (0.0, float("inf"))
        if not close(found, wanted):
            wrong.append(f"launch {launch}: ratios {found} should be {wanted}")
    return wrong + ([f"tripped by {trip.tolist()}"] if trip.any() else [])


def interpreted_cases() -> dict[str, Callable[[], list[str]]]:
    """Return small cases that the interpreter's FP8 cast is right for, by name."""
    cases: dict[str, Callable[[], list[str]]] = {}
    kinds = [(torch.bfloat16, torch.float8_e4m3fn), (torch.float16, torch.float8_e4m3fn)]
    kinds += [(torch.float32, torch.float8_e4m3fn), (torch.bfloat16, torch.float8_e5m2)]
    sizes = ((1, 1), (17, 129), (131, 260))

    def add(name: str, transposed: bool, index: int) -> None:
        dtype, fmt = kinds[(index + len(cases)) % len(kinds)]
        recipe = recipe_of(name, fmt)
        multiple, gap = ((1, 1), 0) if index == 0 else ((16, 512), 5)

        def run_case() -> list[str]:
            values = exact_values(*sizes[index], dtype, recipe, seed=index)
            options = {"multiple": multiple, "gap": gap, "scale_along_rows": name.startswith("1x128")}
            return complaints(values, recipe, identical, transposed=transposed, **options)

        shape = "x".join(str(size) for size in sizes[index])
        cases[f"{recipe}-{str(dtype)[6:]}-{shape}-{'transposed' if transposed else 'k_major'}"] = run_case

    for name in RECIPES:
        for transposed in (False, True):
            for index in range(len(sizes)):
                add(name, transposed, index)
    for name in ("1x128", "32x32", "1x32:e8m0"):
        recipe = recipe_of(name, torch.float8_e4m3fn)

        def hostile(recipe: ScalingRecipe = recipe) -> list[str]:  # only scales and padding: the cast is wrong there
            values = hostile_values(torch.bfloat16)
            return complaints(values, recipe, lambda *_: [], transposed=True, multiple=(16, 128))

        cases[f"{recipe}-zeros_nan_inf_tiny"] = hostile
    for name in ("1x128", "128x128", "64x64", "32x32"):
        for transposed in (False, True):
            launches = (0, 1, 2) if "128" in name else (0,)
            case = partial(wrong_sums, name, "cpu", transposed=transposed, launches=launches)
            cases[f"{name}-guard_sums-{'transposed' if transposed else 'k_major'}"] = case
    for transposed in (False, True):
        cases[f"far_apart-{'transposed' if transposed else 'k_major'}"] = partial(far_apart, transposed=transposed)
    return cases


def far_apart(*, transposed: bool) -> list[str]:
    """Return what is wrong with the quantization of rows more than 2**31 elements apart."""
    recipe = recipe_of("1x128", torch.float8_e4m3fn)
    values = exact_values(*((48, 9) if transposed else (9, 48)), torch.bfloat16, recipe, seed=3)
    with rows_far_apart(values.t() if transposed else values) as x:
        out, scale = run(x, recipe, transposed=transposed, multiple=(1, 1), scale_along_rows=False)
    return identical(out, values.double() / scale.double(), out.dtype)


if __name__ == "__main__":
    json.dump({name: case() for name, case in interpreted_cases().items()}, sys.stdout)
