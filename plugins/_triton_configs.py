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
DECODE_LIMIT = 256
"""Rows up to which the operands may be swapped."""
_SHORT = {"bfloat16": "bf16", "float16": "f16"}
_NAME = re.compile(
    rf"(sm\d+)_gemm_(\w+?)_({'|'.join(sorted(SCHEDULES, key=len, reverse=True))})_(\d+)x(\d+)x(\d+)_s(\d+)(?:_k(\d+)_w(\d+))?"
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
            raise ValueError(
                f"triton_tma_fp8: {name!r} is no config; one is sm90_gemm_e4m3_{PINGPONG}_128x128x128_s6"
            )
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
    block_k = 128 if problem.recipe is not None else 64

    def made(schedule: str, *tile: int) -> Config:
        block_m, block_n, stages, *rest = tile
        return Config(problem.arch, dtypes_of(problem), schedule, block_m, block_n, block_k, stages, *rest)

    if problem.arch == "sm89":
        return _ada(problem)
    if problem.recipe is not None and problem.recipe.a.granularity == "1x32":
        return [Config(problem.arch, dtypes_of(problem), MX, 128, 128, 128, 2)]
    if problem.arch != "sm90" or problem.batch or _square(problem):
        return _portable(problem)
    if 4 * problem.m <= DECODE_LIMIT and not _blocks(problem):
        return _decode(problem)
    tiles = -(-problem.m // 128) * -(-problem.n // 128)
    waves = tiles / MULTIPROCESSORS["sm90"]
    if _blocks(problem) or problem.accumulation == "promoted":
        few = [made(ONE_CONSUMER, 64, 128, 6)] if waves <= 1 else []
        return [*(few if problem.m <= 64 else []), made(COOPERATIVE, 128, 128, 6), *(few if problem.m > 64 else [])]
    if waves > 2:
        found = [made(PINGPONG, 128, 128, 6), made(PINGPONG, 64, 256, 5)]
    elif waves > 0.5:
        found = [made(PINGPONG, 128, 128, 6), made(ONE_CONSUMER, 128, 128, 6), made(COOPERATIVE, 128, 256, 4)]
    elif waves > 0.2:
        found = [made(ONE_CONSUMER, 64, 128, 6), made(PINGPONG, 128, 128, 6), made(ONE_CONSUMER, 128, 128, 6)]
    else:
        found = [made(ONE_CONSUMER, 64, 64, 6), made(ONE_CONSUMER, 64, 128, 6)]
    if problem.m <= DECODE_LIMIT:
        found = [*found[:2], *_decode(problem)[:2]]
    return found


def _blocks(problem: Problem) -> bool:
    return problem.recipe is not None and problem.recipe.a.granularity == "1x128"


def _square(problem: Problem) -> bool:
    """Return whether both operands have square blocks, which only the portable kernel scales."""
    return problem.recipe is not None and problem.recipe.a.granularity in ("128x128", "64x64", "32x32")


def _ada(problem: Problem) -> list[Config]:
    name, dtypes = problem.arch, dtypes_of(problem)
    if problem.m <= 64:
        return [Config(name, dtypes, DECODE_POINTERS, 16, 64, 128, 3, 1, 4)]
    block_k = 64 if problem.recipe is not None else 32
    return [Config(name, dtypes, POINTERS, 128, 128, block_k, 3)]


def _portable(problem: Problem) -> list[Config]:
    """Return the configs of the persistent kernel of plain Triton."""
    name, dtypes = problem.arch, dtypes_of(problem)
    block_k = 128 if problem.recipe is not None else 64
    if problem.recipe is not None and _square(problem):
        extent = int(problem.recipe.a.granularity.split("x")[0])
        return [Config(name, dtypes, PERSISTENT, 128, 128, min(128, extent), 3)]
    if problem.recipe is not None and _blocks(problem):
        return [Config(name, dtypes, PERSISTENT, 128, 128, 128, 3)]
    if name.startswith("sm12"):  # 99 KiB of shared memory
        return [Config(name, dtypes, PERSISTENT, 128, 128, block_k // 2, 3)]
    if problem.m <= 64:
        return [Config(name, dtypes, PERSISTENT, 64, 128, block_k, 4)]
    return [Config(name, dtypes, PERSISTENT, 128, 256, block_k, 3), Config(name, dtypes, PERSISTENT, 128, 128, block_k, 4)]


def _decode(problem: Problem) -> list[Config]:
    """Return the configs with operands swapped: the weight's tile is the tensor core's m."""
    raise NotImplementedError
