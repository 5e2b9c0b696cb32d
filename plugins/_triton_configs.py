"""Kernel configs of triton_tma_fp8: their names, and which few are worth measuring for a problem.

Names follow CUTLASS: `sm90_gemm_e4m3_tma_warpspecialized_pingpong_128x128x128_s6` is arch, operation, dtypes, how tiles
are loaded and multiplied, tile (m x n x k), stages; a decode config adds how often k is split and its warps.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from dispatch import Problem

PINGPONG = "tma_warpspecialized_pingpong"
COOPERATIVE = "tma_warpspecialized_cooperative"
ONE_CONSUMER = "tma_warpspecialized"
PERSISTENT = "tma"
POINTERS = "cpasync"
DECODE = "tma_swapped"
DECODE_POINTERS = "cpasync_swapped"
MX = "tma_blockscaled"
SCHEDULES = (PINGPONG, COOPERATIVE, ONE_CONSUMER, PERSISTENT, POINTERS, DECODE, DECODE_POINTERS, MX)
HOPPER_SCHEDULES = (PINGPONG, COOPERATIVE, ONE_CONSUMER)

MULTIPROCESSORS = {"sm89": 128, "sm90": 132, "sm100": 148, "sm103": 148, "sm120": 188, "sm121": 48}
"""Of the largest GPU of each arch: which configs are worth measuring depends on them, what is launched does not."""
DECODE_LIMIT = 128
"""Rows up to which the operands are swapped: at 256 that was slower on an H200."""
_SHORT = {"bfloat16": "bf16", "float16": "f16"}
_NAME = re.compile(
    rf"(sm\d+)_gemm_(\w+?)_({'|'.join(sorted(SCHEDULES, key=len, reverse=True))})"
    r"_(\d+)x(\d+)x(\d+)_s(\d+)(?:_k(\d+)_w(\d+))?"
)


class Config(NamedTuple):
    """One kernel config. block_k in elements; splits of k and warps only where the schedule leaves a choice."""

    arch: str
    dtypes: str
    schedule: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    splits: int = 0
    warps: int = 0

    def __str__(self) -> str:
        tail = f"_k{self.splits}_w{self.warps}" if self.splits else ""
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        return f"{self.arch}_gemm_{self.dtypes}_{self.schedule}_{tile}_s{self.stages}{tail}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the config of that name. Raises ValueError for any other text."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ValueError(f"triton_tma_fp8: {name!r} is no config; one is sm90_gemm_e4m3_{PINGPONG}_128x128x128_s6")
        arch, dtypes, schedule, *numbers = found.groups()
        return cls(arch, dtypes, schedule, *(int(number or 0) for number in numbers))


def dtypes_of(problem: Problem) -> str:
    """Return what the tensor core multiplies: e4m3, e4m3_e5m2 ... or bf16, f16."""
    if problem.recipe is None:
        return _SHORT[problem.a.dtype]
    pair = dict.fromkeys((problem.recipe.a.dtype, problem.recipe.b.dtype))
    return "_".join(pair)


def configs(problem: Problem) -> list[Config]:
    """Return the configs worth measuring, the likeliest first: what serves where nothing was measured."""
    if problem.arch == "sm89":
        return _ada(problem)
    if problem.recipe is None:
        return _sixteen_bit(problem)
    if _granularity(problem) == "1x32":
        side = 64 if problem.arch == "sm121" else 128  # larger ones spill there
        return [_config(problem, MX, side, side, 128, 2)]
    square = _granularity(problem) in ("128x128", "64x64", "32x32")
    if problem.arch != "sm90" or problem.batch or square:
        return _portable(problem)
    if _granularity(problem) == "1x128" or problem.accumulation == "promoted":
        small = _config(problem, ONE_CONSUMER, 64, 128, 128, 6)
        large = _config(problem, COOPERATIVE, 128, 128, 128, 6)
        if problem.m <= 64:
            return [small, *(_decode(problem)[:1] if _granularity(problem) != "1x128" else [])]
        return [large, small] if _waves(problem) <= 1 else [large]
    return _hopper(problem)


def _config(problem: Problem, schedule: str, *numbers: int) -> Config:
    return Config(problem.arch, dtypes_of(problem), schedule, *numbers)


def _granularity(problem: Problem) -> str:
    return "" if problem.recipe is None else problem.recipe.a.granularity


def _waves(problem: Problem) -> float:
    """Return how often tiles of 128x128 fill the multiprocessors."""
    return -(-problem.m // 128) * -(-problem.n // 128) / MULTIPROCESSORS.get(problem.arch, 132)


def _hopper(problem: Problem) -> list[Config]:
    """Return the configs for scales of rows or tensors on sm90, all of k in the tensor core's accumulator.

    Chosen from what benchmarks/gemm.py measures on an H200: within each range the first is the one that won most often.
    """

    def hopper(schedule: str, block_m: int, block_n: int, stages: int) -> Config:
        if problem.out_dtype == "float32" and schedule != ONE_CONSUMER:
            stages -= 1  # the output takes the shared memory of one
        return _config(problem, schedule, block_m, block_n, 128, stages)

    large, wide = hopper(PINGPONG, 128, 128, 6), hopper(PINGPONG, 64, 256, 5)
    alone = hopper(ONE_CONSUMER, 128, 128, 6)
    if problem.m <= DECODE_LIMIT:
        return [*_decode(problem), alone]
    waves = _waves(problem)
    if waves > 2:
        return [large, wide]
    if waves > 0.5:
        return [large, alone, *([hopper(COOPERATIVE, 128, 256, 4)] if waves > 1 else [])]
    if waves > 0.2:
        return [hopper(ONE_CONSUMER, 64, 128, 6), alone]
    return [hopper(ONE_CONSUMER, 64, 64, 6), hopper(ONE_CONSUMER, 64, 128, 6)]


def _decode(problem: Problem) -> list[Config]:
    """Return the configs with operands swapped: the weight's tile is the tensor core's m. None above DECODE_LIMIT.

    k is split until the tiles about fill the multiprocessors.
    """
    if problem.m > DECODE_LIMIT or problem.batch:
        return []
    block_m = max(16, 1 << (problem.m - 1).bit_length())
    tiles = -(-problem.n // 64)
    splits = 1
    while splits < 8 and tiles * splits * 2 <= MULTIPROCESSORS.get(problem.arch, 132):
        splits *= 2
    while splits > 1 and splits * 512 > problem.k:
        splits //= 2
    if block_m >= 128:
        first = _config(problem, DECODE, 128, 64, 256, 4, splits, 4)
        return [first, *([_config(problem, DECODE, 128, 128, 128, 3, 1, 8)] if tiles >= 256 else [])]
    deep, wide = _config(problem, DECODE, block_m, 64, 256, 5, splits, 4), (block_m, 64, 512, 4, splits, 4)
    if block_m == 64:
        return [deep]
    return [_config(problem, DECODE, *wide), deep] if splits == 1 else [deep]


def _sixteen_bit(problem: Problem) -> list[Config]:
    """Return the configs of bfloat16 and float16."""
    if problem.arch.startswith("sm12"):
        return [_config(problem, PERSISTENT, 128, 128, 32, 3)]
    if problem.arch != "sm90":
        return [_config(problem, PERSISTENT, 128, 128, 64, 4)]
    if _waves(problem) < 0.5:
        return [_config(problem, PERSISTENT, 64, 128, 64, 5), _config(problem, PERSISTENT, 64, 64, 64, 4)]
    return [_config(problem, PERSISTENT, 128, 256, 64, 3)]


def _ada(problem: Problem) -> list[Config]:
    """Return the configs without TMA."""
    extent = _EXTENTS.get(_granularity(problem), 128)
    if problem.m <= 64 and not problem.batch:
        block_m = max(16, 1 << (problem.m - 1).bit_length())
        return [_config(problem, DECODE_POINTERS, block_m, 64, extent, 3, 1, 4)]
    return [_config(problem, POINTERS, 128, 128, min(64, extent) if problem.recipe is not None else 32, 3)]


_EXTENTS = {"64x64": 64, "32x32": 32}


def _portable(problem: Problem) -> list[Config]:
    """Return the configs of the persistent kernel of plain Triton."""
    block_k = min(128, _EXTENTS.get(_granularity(problem), 128))
    name = problem.arch
    if name.startswith("sm12"):  # 99 KiB of shared memory
        return [_config(problem, PERSISTENT, 128, 128, min(64, block_k), 3)]
    if _granularity(problem) not in ("tensor", "row"):
        spills = not name.startswith("sm9") and block_k < 128  # scales of rows and columns each few values of k
        return [_config(problem, PERSISTENT, 64 if spills else 128, 64 if spills else 128, block_k, 3)]
    if problem.m <= 64:
        return [_config(problem, PERSISTENT, 64, 128, block_k, 4)]
    few = [_config(problem, PERSISTENT, 128, 128, block_k, 4)]
    return few if problem.accumulation == "promoted" else [_config(problem, PERSISTENT, 128, 256, block_k, 3), *few]
