"""Kernel configs of pallas_fp8: their names, and which few are worth measuring for a problem.

Names follow CUTLASS: `sm90_gemm_e4m3_tma_warpspecialized_cooperative_128x256x128_s4_2x1_m8` is arch, operation, dtypes,
how tiles are loaded and multiplied, tile (m x n x k), stages, programs of a cluster (where there are two), and the
order of the tiles: along which dimension first, in bands of how many.
"""

from __future__ import annotations

import re
from functools import partial
from typing import NamedTuple, Self

from dispatch import Problem

COOPERATIVE = "tma_warpspecialized_cooperative"
ONE_CONSUMER = "tma_warpspecialized"
TENSOR_MEMORY = "tcgen05_warpspecialized"
POINTERS = "cpasync"
SCHEDULES = (COOPERATIVE, ONE_CONSUMER, TENSOR_MEMORY, POINTERS)

MULTIPROCESSORS = 132
DECODE_LIMIT = 128
"""Rows up to which a product is bound by reading b."""
_NAME = re.compile(
    rf"(sm\d+)_gemm_(\w+?)_({'|'.join(sorted(SCHEDULES, key=len, reverse=True))})"
    r"_(\d+)x(\d+)x(\d+)_s(\d+)(?:_(2x1|1x2))?_([mn])(\d+)(?:_h(\d+))?"
)


class Config(NamedTuple):
    """One kernel config. cluster: empty, or `2x1` or `1x2` programs; minor, group: the order of the tiles.

    chain: with sums in float32, the steps of k between two points where the tensor core runs dry.
    """

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
    chain: int = 2

    def __str__(self) -> str:
        tile = f"{self.block_m}x{self.block_n}x{self.block_k}"
        cluster = f"_{self.cluster}" if self.cluster else ""
        kind = f"{self.arch}_gemm_{self.dtypes}_{self.schedule}"
        chain = "" if self.chain == 2 else f"_h{self.chain}"
        return f"{kind}_{tile}_s{self.stages}{cluster}_{self.minor}{self.group}{chain}"

    @classmethod
    def parse(cls, name: str) -> Self:
        """Return the config of that name. Raises ValueError for any other text."""
        if (found := _NAME.fullmatch(name)) is None:
            raise ValueError(
                f"pallas_fp8: {name!r} is no config; one is sm90_gemm_e4m3_{COOPERATIVE}_128x256x128_s4_m8"
            )
        arch, dtypes, schedule, *sizes, cluster, minor, group, chain = found.groups()
        block_m, block_n, block_k, stages = map(int, sizes)
        tile = (block_m, block_n, block_k, stages)
        return cls(arch, dtypes, schedule, *tile, cluster or "", minor, int(group), int(chain or 2))


def dtypes_of(problem: Problem) -> str:
    """Return what the tensor core multiplies: e4m3, e4m3_e5m2, bf16 ..."""
    if problem.recipe is None:
        return {"bfloat16": "bf16", "float16": "f16"}[problem.a.dtype]
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


def _config(
    problem: Problem, schedule: str, block_m: int, block_n: int, block_k: int, stages: int, group: int = 8
) -> Config:
    kind = (problem.arch, dtypes_of(problem), schedule)
    return Config(*kind, block_m, block_n, block_k, stages, group=group)


def _waves(problem: Problem) -> float:
    """Return how often tiles of 128x128 fill the multiprocessors of an H200."""
    return -(-problem.m // 128) * -(-problem.n // 128) / MULTIPROCESSORS


def _hopper(problem: Problem) -> list[Config]:
    """Return the configs of sm90, chosen from what benchmarks/pallas_gemm.py measures on an H200."""

    hopper = partial(_config, problem)
    if problem.recipe is None:
        return [_sixteen_bit(problem)]
    small, flat = hopper(ONE_CONSUMER, 64, 64, 256, 6), hopper(ONE_CONSUMER, 64, 128, 128, 8)
    if in_blocks(problem) or problem.accumulation == "promoted":
        stages = 5 if in_blocks(problem) else 6
        flat, square = hopper(ONE_CONSUMER, 64, 128, 128, stages), hopper(COOPERATIVE, 128, 128, 128, stages, group=16)
        return [flat] if problem.m <= 64 else [square, square._replace(chain=4)]
    if problem.m <= 64:
        return [small, hopper(ONE_CONSUMER, 64, 64, 512, 3), flat]
    if problem.m <= DECODE_LIMIT:
        return [flat, hopper(ONE_CONSUMER, 64, 128, 256, 4)]
    waves = _waves(problem)
    if waves <= 0.5:
        return [small, flat]
    wide, tall = hopper(COOPERATIVE, 128, 256, 128, 4), hopper(COOPERATIVE, 256, 128, 128, 4)
    if waves <= 2:
        return [wide, hopper(COOPERATIVE, 128, 128, 128, 6), flat]
    return [wide._replace(cluster="2x1"), tall]


def _sixteen_bit(problem: Problem) -> Config:
    """Return the config of a product that loses nothing; the bytes of a tile are those of FP8 with twice the k."""
    if problem.m <= 64:
        return _config(problem, ONE_CONSUMER, 64, 128, 64, 8)
    if _waves(problem) <= 2:
        return _config(problem, COOPERATIVE, 128, 128, 64, 6)
    return _config(problem, COOPERATIVE, 128, 256, 64, 4)._replace(cluster="2x1")


def _blackwell(problem: Problem) -> list[Config]:
    """Return the configs of sm100 and sm103, of which none has run."""
    single = _config(problem, TENSOR_MEMORY, 128, 256, 128, 4)
    pair = _config(problem, TENSOR_MEMORY, 128, 128, 128, 6)._replace(cluster="2x1")
    return [pair, single] if _waves(problem) > 2 else [single]


def _portable(problem: Problem) -> list[Config]:
    """Return the config of the kernel without TMA."""
    small = problem.m <= 64
    stages = 2 if problem.arch.startswith("sm12") else 3  # 99 KiB of shared memory
    return [_config(problem, POINTERS, 64 if small else 128, 128, 128, stages)]
