"""Kernel configs of pallas_fp8: their names, and which few are worth measuring for a problem.

Names follow CUTLASS: `sm90_gemm_e4m3_tma_warpspecialized_cooperative_128x256x128_s4_2x1_m8` is arch, operation, dtypes,
how tiles are loaded and multiplied, tile (m x n x k), stages, programs of a cluster (where there are two), and the
order of the tiles: along which dimension first, in bands of how many.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Self

from dispatch import Problem

COOPERATIVE = "tma_warpspecialized_cooperative"
PINGPONG = "tma_warpspecialized_pingpong"
ONE_CONSUMER = "tma_warpspecialized"
TENSOR_MEMORY = "tcgen05_warpspecialized"
POINTERS = "cpasync"
SCHEDULES = (COOPERATIVE, PINGPONG, ONE_CONSUMER, TENSOR_MEMORY, POINTERS)

MULTIPROCESSORS = 132
DECODE_LIMIT = 128
"""Rows up to which a product is bound by reading b."""
_SHORT = {"bfloat16": "bf16", "float16": "f16"}
_NAME = re.compile(
    rf"(sm\d+)_gemm_(\w+?)_({'|'.join(sorted(SCHEDULES, key=len, reverse=True))})"
    r"_(\d+)x(\d+)x(\d+)_s(\d+)(?:_(2x1|1x2))?_([mn])(\d+)"
)


class Config(NamedTuple):
    """One kernel config. cluster: empty, or `2x1` or `1x2` programs; minor, group: the order of the tiles."""

    arch: str
    dtypes: str
    schedule: str
    block_m: int
    block_n: int
    block_k: int
    stages: int
    cluster: str = ""
    minor: str = "m"
    group: int = 8

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        cluster = f"_{self.cluster}" if self.cluster else ""
        kind = f"{self.arch}_gemm_{self.dtypes}_{self.schedule}"
        return f"{kind}_{tile}_s{self.stages}{cluster}_{self.minor}{self.group}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the config of that name. Raises ValueError for any other text."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ValueError(
                f"pallas_fp8: {name!r} is no config; one is sm90_gemm_e4m3_{COOPERATIVE}_128x256x128_s4_m8"
            )
        arch, dtypes, schedule, *sizes, cluster, minor, group = found.groups()
        return cls(arch, dtypes, schedule, *map(int, sizes), cluster or "", minor, int(group))


def dtypes_of(problem: Problem) -> str:
    """Return what the tensor core multiplies: e4m3, e4m3_e5m2 ... or bf16, f16."""
    if problem.recipe is None:
        return _SHORT[problem.a.dtype]
    return "_".join(dict.fromkeys((problem.recipe.a.dtype, problem.recipe.b.dtype)))


def in_blocks(problem: Problem) -> bool:
    """Return whether the problem's scales are of blocks."""
    return problem.recipe is not None and problem.recipe.a.granularity == "1x128"


def configs(problem: Problem) -> list[Config]:
    """Return the configs worth measuring, the likeliest first: what serves where nothing was measured."""
    if problem.arch == "sm90":
        return _hopper(problem)
    if problem.arch in ("sm100", "sm103") and not in_blocks(problem):
        return _blackwell(problem)
    return _portable(problem)


def _config(problem: Problem, schedule: str, *rest: int, **order: object) -> Config:
    return Config(problem.arch, dtypes_of(problem), schedule, *rest)._replace(**order)


def _waves(problem: Problem) -> float:
    """Return how often tiles of 128x128 fill the multiprocessors of an H200."""
    return -(-problem.m // 128) * -(-problem.n // 128) / MULTIPROCESSORS


def _hopper(problem: Problem) -> list[Config]:
    """Return the configs of sm90, chosen from what benchmarks/pallas_gemm.py measures on an H200."""
    deep = 128 if problem.recipe is not None else 64
    wide = problem.out_dtype == "float32"

    def hopper(schedule: str, block_m: int, block_n: int, stages: int, **order: object) -> Config:
        return _config(problem, schedule, block_m, block_n, deep, stages, **order)

    if in_blocks(problem) or problem.accumulation == "promoted":
        stages = 5 if in_blocks(problem) else 6
        if problem.m <= 64:
            return [hopper(ONE_CONSUMER, 64, 64, 8)]
        return [hopper(COOPERATIVE, 128, 128, stages, group=16)]
    if problem.m <= DECODE_LIMIT:
        tall = 64 if problem.m <= 64 else 128
        schedule = ONE_CONSUMER if tall == 64 else COOPERATIVE
        return [hopper(schedule, tall, 64, 8), hopper(schedule, tall, 128, 6)]
    large, beside = hopper(COOPERATIVE, 128, 256, 4), hopper(COOPERATIVE, 128, 256, 4, cluster="2x1")
    square = hopper(PINGPONG, 128, 128, 6, group=16)
    if _waves(problem) > 2:
        return [beside, large, square]
    return [square, hopper(ONE_CONSUMER, 64, 128, 6 if wide else 8)]


def _blackwell(problem: Problem) -> list[Config]:
    """Return the configs of sm100 and sm103, of which none has run."""
    deep = 128 if problem.recipe is not None else 64
    single = _config(problem, TENSOR_MEMORY, 128, 256, deep, 4)
    pair = _config(problem, TENSOR_MEMORY, 128, 128, deep, 6, cluster="2x1")
    return [pair, single] if _waves(problem) > 2 else [single]


def _portable(problem: Problem) -> list[Config]:
    """Return the config of the kernel without TMA."""
    small = problem.m <= 64
    stages = 2 if problem.arch.startswith("sm12") else 3  # 99 KiB of shared memory
    return [_config(problem, POINTERS, 64 if small else 128, 128, 128, stages)]
