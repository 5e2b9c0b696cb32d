"""GEMM for data-center Blackwell (sm100) in Pallas Mosaic GPU: TMA loads, tcgen05, tensor memory, persistent programs.

It lowers, and gives right results in JAX's interpreter, but has not run on a GPU of its own: there was none.

C (m, n) = A (m, k) times B (n, k), both K-major, of FP8 (each e4m3 or e5m2), bfloat16 or float16. Of the first
warpgroup one warp loads tiles into a ring of stages and one issues the products, whose float32 sums stand in tensor
memory; the second warpgroup finishes and stores them. Sums have two places: one is stored while the other is filled.
Two programs of a cluster may work as a pair (`collective`): each holds half of the rows of A and half of those of B of
a tile twice as high and twice as wide, and the first issues the products of both.
"""

# JAX is not seen by mypy: its decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from dispatch.kernels.pallas_common import (
    OLD_INTERPRETER,
    activated,
    check,
    columns,
    interpreter,
    itemsize,
    load,
    narrow,
    padded,
    traced,
    transposed,
    up,
    vector,
)
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_LIMIT = 232_448 - 2_048
"""Bytes of shared memory that a program may take on sm100, less what barriers and alignment may add."""
DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
SWIZZLE = 128  # bytes, of operands and of what is stored
HEIGHT = 128  # rows of a program's tile: the lanes of tensor memory
LOAD_WARP, MULTIPLY_WARP = 0, 1
TCGEN05 = plgpu.Layout.TCGEN05


@dataclass(frozen=True)
class Config:
    """How the kernel runs: sizes in elements, `group` in tiles of a cluster.

    block_n: columns of B that a program holds, at most 256, or 128 in a pair. minor, group: as for Hopper.
    """

    block_n: int = 256
    block_k: int = 128
    stages: int = 4
    collective: bool = False
    minor: str = "m"
    group: int = 8

    @property
    def programs(self) -> int:
        """The programs of a cluster."""
        return 2 if self.collective else 1

    def shared_bytes(self, itemsize: int) -> int:
        """Return how much shared memory a program takes, in bytes, less its barriers."""
        return self.stages * (HEIGHT + self.block_n) * self.block_k * itemsize + 2 * HEIGHT * SWIZZLE

    def complaint(self, itemsize: int) -> str:
        """Return what is wrong with the config for such operands, nothing where it will do."""
        widest = 256 // self.programs
        if self.block_n % 64 or not 64 <= self.block_n <= widest or self.block_n & (self.block_n - 1):
            return f"block_n={self.block_n} is no power of two from 64 to {widest}"
        if self.block_k * itemsize % SWIZZLE or self.stages < 2 or self.minor not in ("m", "n"):
            return f"block_k={self.block_k} is no multiple of {SWIZZLE} bytes, or stages={self.stages} are under 2"
        if (size := self.shared_bytes(itemsize)) > SHARED_LIMIT:
            return f"{size} bytes of shared memory are more than {SHARED_LIMIT}: fewer stages or a smaller tile"
        return ""


@dataclass(frozen=True)
class _Refs:
    """The references that a kernel works on: in global memory, then in shared and tensor memory."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    bias: Any
    out: Any
    a_smem: Any
    b_smem: Any
    out_smem: Any
    sums: Any
    full: Any
    empty: Any
    summed: Any
    stored: Any


@dataclass(frozen=True)
class _Where:
    """Which cluster of how many this is, and which of its programs."""

    cluster: Any
    clusters: Any
    member: Any


@dataclass(frozen=True)
class _Kernel:
    """The kernel for products of one size: what every thread of it knows when it is traced."""

    config: Config
    activation: str | None
    tiles_m: int
    tiles_n: int
    steps: int

    @property
    def width(self) -> int:
        """The columns of a tile."""
        return self.config.block_n * self.config.programs

    @property
    def _together(self) -> dict[str, Any]:
        return {"collective_axis": "cluster"} if self.config.collective else {}

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """Run one warpgroup."""
        held = _Refs(*refs, **scratch)
        me, clusters = lax.axis_index("warpgroup"), lax.axis_size("grid")
        # Single warps know no axes but their own: what they need of these is found here.
        where = _Where(lax.axis_index("grid"), clusters, lax.axis_index("cluster"))

        def warps() -> None:
            plgpu.warp_map(functools.partial(self._warp, held, where))

        pl.when(me == 0)(warps)
        pl.when(me == 1)(lambda: self._store(held, where))

    def _warp(self, refs: _Refs, where: _Where, warp: Any) -> None:
        pl.when(warp == LOAD_WARP)(lambda: self._load(refs, where))
        pl.when(warp == MULTIPLY_WARP)(lambda: self._multiply(refs, where))

    def _count(self, where: _Where) -> Any:
        """Return how many tiles this cluster works on."""
        return lax.div(self.tiles_m * self.tiles_n - where.cluster + where.clusters - 1, where.clusters)

    def _tile(self, where: _Where, number: Any) -> tuple[Any, Any]:
        """Return the first row and column of the cluster's tile of a number.

        Tiles are walked in bands of `group` along `minor`, to and fro: what runs at once shares L2. Only operations
        that single warps have in each version of JAX, so not `plgpu.planar_snake`.
        """
        by_row = self.config.minor == "m"
        minor, major = (self.tiles_m, self.tiles_n) if by_row else (self.tiles_n, self.tiles_m)
        index, size = where.cluster + number * where.clusters, self.config.group * major
        band, inside = lax.div(index, jnp.int32(size)), lax.rem(index, jnp.int32(size))
        first = band * self.config.group
        wide = lax.select(minor - first < self.config.group, minor - first, jnp.int32(self.config.group))
        across, along = first + lax.rem(inside, wide), lax.div(inside, wide)
        along = lax.select(lax.rem(band, jnp.int32(2)) == 0, along, major - 1 - along)
        tile_m, tile_n = (across, along) if by_row else (along, across)
        return tile_m * HEIGHT * self.config.programs, tile_n * self.width

    def _load(self, refs: _Refs, where: _Where) -> None:
        """Load the tiles of A and B of every step of k, each program of a pair its half."""
        config = self.config
        half = {"collective_axes": "cluster", "leader_tracked": plgpu.CopyPartition.PARTITIONED(0)}
        halved = half if config.collective else {}

        def tile(number: Any, _: Any) -> None:
            row, col = self._tile(where, number)
            rows, cols = pl.ds(row, HEIGHT * config.programs), pl.ds(col, self.width)

            def step(index: Any, _: Any) -> None:
                at = number * self.steps + index
                slot = lax.rem(at, config.stages)
                full, depth = refs.full.at[slot], pl.ds(index * config.block_k, config.block_k)
                pl.when(at >= config.stages)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
                plgpu.copy_gmem_to_smem(refs.a.at[rows, depth], refs.a_smem.at[slot], full, **halved)
                plgpu.copy_gmem_to_smem(refs.b.at[cols, depth], refs.b_smem.at[slot], full, **halved)

            lax.fori_loop(0, self.steps, step, None)

        count = self._count(where)
        lax.fori_loop(0, count, tile, None)
        done = count * self.steps
        self._await(refs.empty, jnp.maximum(done - config.stages, 0), done, config.stages)

    def _await(self, barriers: Any, start: Any, stop: Any, of: int) -> None:
        """Wait for what else is to arrive: nobody leaves before the others of the cluster are done with it."""

        def wait(at: Any, _: Any) -> None:
            plgpu.barrier_wait(barriers.at[lax.rem(at, of)])

        lax.fori_loop(start, stop, wait, None)

    def _multiply(self, refs: _Refs, where: _Where) -> None:
        """Issue the products of every tile, where this program is the first of its cluster."""
        config = self.config

        def tile(number: Any, _: Any) -> None:
            place = lax.rem(number, 2)
            pl.when(number > 1)(lambda: plgpu.barrier_wait(refs.stored.at[place]))
            acc = refs.sums.at[:, pl.ds(place * self.width, self.width)]

            def step(index: Any, _: Any) -> None:
                slot = lax.rem(number * self.steps + index, config.stages)
                plgpu.barrier_wait(refs.full.at[slot])
                b = transposed(refs.b_smem.at[slot])
                plgpu.tcgen05_mma(
                    acc, refs.a_smem.at[slot], b, refs.empty.at[slot], accumulate=index > 0, **self._together
                )

            def products() -> None:
                lax.fori_loop(0, self.steps, step, None)
                plgpu.tcgen05_commit_arrive(refs.summed.at[place], **self._together)

            pl.when(where.member == 0)(products)

        count = self._count(where)
        lax.fori_loop(0, count, tile, None)
        self._await(refs.stored, jnp.maximum(count - 2, 0), count, 2)

    def _spread(self, ref: Any, first: Any, shape: tuple[int, int], dim: int) -> Any:
        """Return values of rows (dim 0) or columns (dim 1) over a tile, or the one that stands for all of them."""
        if ref.shape == (1,):
            return ref[0]
        values = load(ref.at[pl.ds(first, shape[dim])], TCGEN05.reduce(1 - dim))
        return plgpu.layout_cast(lax.broadcast_in_dim(values, shape, [dim]), TCGEN05)

    def _store(self, refs: _Refs, where: _Where) -> None:
        """Finish and store the sums of this program's rows of every tile."""
        width = SWIZZLE // itemsize(refs.out.dtype)

        def tile(tile_number: Any, _: Any) -> None:
            row, col = self._tile(where, tile_number)
            row = row + where.member * HEIGHT
            place = lax.rem(tile_number, 2)
            plgpu.barrier_wait(refs.summed.at[place])
            for number, j in enumerate(range(0, self.width, width)):
                piece = plgpu.async_load_tmem(refs.sums.at[:, pl.ds(place * self.width + j, width)], layout=TCGEN05)
                if refs.scale_a is not None:
                    piece = piece * self._spread(refs.scale_a, row, piece.shape, 0)
                    piece = piece * self._spread(refs.scale_b, col + j, piece.shape, 1)
                if refs.bias is not None:
                    piece = piece + self._spread(refs.bias, col + j, piece.shape, 1)
                piece = activated(piece, self.activation).astype(refs.out.dtype)
                slot = number % 2
                plgpu.wait_smem_to_gmem(1, wait_read_only=True)
                refs.out_smem[slot] = piece
                plgpu.commit_smem()
                target = refs.out.at[pl.ds(row, HEIGHT), pl.ds(col + j, width)]
                plgpu.copy_smem_to_gmem(refs.out_smem.at[slot], target)
            plgpu.wait_load_tmem()
            plgpu.barrier_arrive(refs.stored.at[place])

        lax.fori_loop(0, self._count(where), tile, None)
        plgpu.wait_smem_to_gmem(0)


def _scratch(config: Config, out_dtype: Any, a: Any, b: Any) -> dict[str, Any]:
    """Return the shared and tensor memory of a program: the ring, sums, pieces of C, barriers."""
    size, out_size, stages = itemsize(a.dtype), itemsize(out_dtype), config.stages

    def swizzled(values: int) -> tuple[Any, ...]:
        return plgpu.TilingTransform((8, values)), plgpu.SwizzleTransform(SWIZZLE)

    make_stored: Any = plgpu.Barrier
    if config.collective:
        make_stored = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",))
    width = config.block_n * config.programs
    return {
        "a_smem": plgpu.SMEM((stages, HEIGHT, config.block_k), a.dtype, transforms=swizzled(SWIZZLE // size)),
        "b_smem": plgpu.SMEM((stages, config.block_n, config.block_k), b.dtype, transforms=swizzled(SWIZZLE // size)),
        "out_smem": plgpu.SMEM((2, HEIGHT, SWIZZLE // out_size), out_dtype, transforms=swizzled(SWIZZLE // out_size)),
        "sums": plgpu.TMEM((HEIGHT, 2 * width), jnp.float32, collective=config.collective),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
        "empty": plgpu.Barrier(num_arrivals=1, num_barriers=stages, orders_tensor_core=True),
        "summed": plgpu.Barrier(num_arrivals=1, num_barriers=2, orders_tensor_core=True),
        "stored": make_stored(num_arrivals=1, num_barriers=2, orders_tensor_core=True),
    }


@functools.partial(jax.jit, static_argnames=("config", "out_dtype", "activation", "programs", "interpret"))
def _gemm(
    a: Any,
    b: Any,
    scale_a: Any,
    scale_b: Any,
    bias: Any,
    *,
    config: Config,
    out_dtype: Any,
    activation: str | None,
    programs: int,
    interpret: Any,
) -> Any:
    """Pad, multiply, and cut; see `gemm`."""
    (m, k), n = a.shape, b.shape[0]
    high, wide = HEIGHT * config.programs, config.block_n * config.programs
    if interpret is not None:  # the interpreter stops at the edge of an array
        whole_m, whole_n, whole_k = up(m, high), up(n, wide), up(k, config.block_k)
    else:
        deep = SWIZZLE // itemsize(a.dtype)
        whole_m, whole_n, whole_k = up(m, 8), columns(n, out_dtype), up(k, deep)
    kernel = _Kernel(
        config=config,
        activation=activation,
        tiles_m=-(-whole_m // high),
        tiles_n=-(-whole_n // wide),
        steps=-(-whole_k // config.block_k),
    )
    rows, cols = kernel.tiles_m * high, kernel.tiles_n * wide
    if bias is not None:
        bias = padded(bias, cols)
    a, b = padded(a, whole_m, whole_k), padded(b, whole_n, whole_k)
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((whole_m, whole_n), out_dtype),
        grid=(max(1, min(programs // config.programs, kernel.tiles_m * kernel.tiles_n)),),
        grid_names=("grid",),
        cluster=(config.programs,),
        cluster_names=("cluster",),
        num_threads=2,
        thread_name="warpgroup",
        scratch_types=_scratch(config, out_dtype, a, b),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )(a, b, vector(scale_a, rows), vector(scale_b, cols), bias)
    return out if out.shape == (m, n) else out[:m, :n]


def gemm(
    a: Any,
    b: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    *,
    config: Config,
    out_dtype: Any = jnp.bfloat16,
    activation: str | None = None,
    programs: int = 148,
    interpret: Any = False,
) -> Any:
    """Return activation(A times B^T times the scales, plus bias) of shape (m, n), rounded once to out_dtype.

    a: (m, k), b: (n, k), K-major, of FP8 (e4m3 or e5m2), bfloat16 or float16. scale_a, scale_b: float32, decoding, (m,)
    and (n,), or (1,) for all. bias: (n,) of any float dtype. out_dtype: bfloat16, float16 or float32. activation: relu,
    gelu (by erf), gelu_tanh or silu. programs: at most so many run, one a multiprocessor. interpret: as for Hopper,
    from JAX 0.11: interpreters before it have no tensor memory, which raises NotImplementedError.

    Any m, n and k, as for Hopper. Traceable, with everything after bias static. Raises ValueError as for Hopper.
    """
    m, n, _ = check(a, b, scale_a, scale_b, bias, blocks=False, activation=activation, dtypes=DTYPES)
    if complaint := config.complaint(itemsize(a.dtype)):
        raise ValueError(f"{config}: {complaint}")
    out_dtype, chosen = jnp.dtype(out_dtype), interpreter(interpret)
    if m == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    if chosen is not None and OLD_INTERPRETER:
        raise NotImplementedError(f"JAX {jax.__version__} cannot interpret tensor memory; JAX 0.11 can")
    static = {"config": config, "out_dtype": out_dtype, "activation": activation, "programs": programs}
    return traced(_gemm, a, b, narrow(scale_a), narrow(scale_b), narrow(bias), **static, interpret=chosen)
