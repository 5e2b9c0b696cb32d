"""Warp-specialized GEMM for Hopper (sm90) in Pallas Mosaic GPU: TMA loads, wgmma, TMA stores, persistent programs.

C (m, n) = A (m, k) times B (n, k), both K-major, of FP8 (each e4m3 or e5m2), bfloat16 or float16; float32 accumulators;
the epilogue, in registers: times the scales of the rows and columns, plus a bias of one value a column, activation, one
rounding to bfloat16, float16 or float32.

One warpgroup loads tiles into a ring of stages, one or two others multiply them, each its half of the rows of every
tile. The ring runs on across output tiles: while a tile is finished and stored, the loads for the next are under way.
(JAX's own `emit_pipeline_warp_specialized` drains at each tile, and gave wrong sums with `delay_release` in a persistent
loop.) In a cluster two programs work on tiles side by side, and what both need is loaded once, by TMA multicast.

Accumulation is fast (the tensor core adds, and keeps about 14 bits of sums of FP8 products) or promoted: each block_k
of k is added in float32 by the CUDA cores, with the scales of 1x128 blocks of A and 128x128 blocks of B where there are
such. Then two steps of k are in flight in each consumer, one multiplied while the other is added.

TMA fills with zeros what it reads beyond the edge and drops what it writes there, so tiles need not divide a matrix;
but Mosaic's tilings of shared memory must divide the dimensions (m by 8, n by 64, k by 128 bytes). What does not fit
is padded, by copies that belong to the time of the product.
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
    BLOCK,
    OLD_INTERPRETER,
    activated,
    check,
    interpreter,
    itemsize,
    load,
    padded,
    transposed,
    up,
    vector,
)
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_LIMIT = 232_448 - 2_048
"""Bytes of shared memory that a program may take on sm90, less what barriers and alignment may add."""
DTYPES = ("float8_e4m3fn", "float8_e5m2", "bfloat16", "float16")
SWIZZLE = 128  # bytes, of operands and of what is stored
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
WGMMA = plgpu.Layout.WGMMA


@dataclass(frozen=True)
class Config:
    """How the kernel runs: sizes in elements, `group` in tiles.

    block_m: rows of a program's tile, shared equally by its consumers; 64 or a multiple for each.
    cluster: `m` for two programs one above the other, which share B; `n` for two side by side, which share A.
    minor, group: tiles are walked along dimension `minor` first, in bands of `group` tiles of the other one's.
    delay: wgmmas in flight while fast; a stage is given back so many steps after it was multiplied.
    chain: steps of k that one round of the promoted loop holds; between rounds the tensor core runs dry.
    """

    block_m: int = 128
    block_n: int = 256
    block_k: int = 128
    stages: int = 4
    consumers: int = 2
    cluster: str = ""
    minor: str = "m"
    group: int = 8
    delay: int = 1
    chain: int = 4

    @property
    def height(self) -> int:
        """The rows of one consumer's share of a tile."""
        return self.block_m // self.consumers

    @property
    def programs(self) -> int:
        """The programs of a cluster."""
        return 2 if self.cluster else 1

    def cluster_tile(self) -> tuple[int, int]:
        """Return the rows and columns that a cluster works on at once."""
        return self.block_m * (1 + (self.cluster == "m")), self.block_n * (1 + (self.cluster == "n"))

    def slots(self, out_itemsize: int) -> int:
        """Return how many pieces a consumer may have on their way to memory."""
        return min(2, self.height // 64 * (self.block_n * out_itemsize // SWIZZLE))

    def shared_bytes(self, itemsize: int, out_itemsize: int, *, blocks: bool = False) -> int:
        """Return how much shared memory a program takes, in bytes, less its barriers."""
        stage = (self.block_m + self.block_n) * self.block_k * itemsize + (4 * self.block_m if blocks else 0)
        return self.stages * stage + self.consumers * self.slots(out_itemsize) * 64 * SWIZZLE

    def complaint(self, itemsize: int, out_itemsize: int, *, blocks: bool = False) -> str:
        """Return what is wrong with the config for such operands, nothing where it will do."""
        if self.consumers not in (1, 2) or self.block_m % (64 * self.consumers):
            return f"block_m={self.block_m} is not 64 rows or a multiple for each of {self.consumers} consumers (1 or 2)"
        if self.block_n % 64 or not 64 <= self.block_n <= 256:
            return f"block_n={self.block_n} is none of 64, 128, 192 and 256"
        if self.block_k * itemsize % SWIZZLE or (blocks and self.block_k != BLOCK):
            return f"block_k={self.block_k} is no multiple of {SWIZZLE} bytes, or not {BLOCK} with block scales"
        if blocks and BLOCK % self.block_n:
            return f"block_n={self.block_n} does not divide the {BLOCK} rows of B that a block scale is for"
        if self.cluster not in ("", "m", "n") or self.minor not in ("m", "n"):
            return f"cluster={self.cluster!r} or minor={self.minor!r} is no dimension"
        if not 0 <= self.delay < self.stages or self.stages < 2 or self.chain < 1:
            return f"stages={self.stages}, delay={self.delay}, chain={self.chain}: 0 <= delay < stages >= 2, chain >= 1"
        if (size := self.shared_bytes(itemsize, out_itemsize, blocks=blocks)) > SHARED_LIMIT:
            return f"{size} bytes of shared memory are more than {SHARED_LIMIT}: fewer stages or a smaller tile"
        return ""


@dataclass(frozen=True)
class Form:
    """What the product looks like: constants of one compiled kernel. See `gemm`.

    plain: for an interpreter that knows no layouts; then B is (k, n).
    """

    out_dtype: Any
    promoted: bool = False
    blocks: bool = False
    activation: str | None = None
    plain: bool = False


@dataclass(frozen=True)
class _Refs:
    """The references that a kernel works on: in global memory, then in shared memory."""

    a: Any
    b: Any
    scale_a: Any
    scale_b: Any
    bias: Any
    out: Any
    a_smem: Any
    b_smem: Any
    out_smem: Any
    full: Any
    empty: Any
    scale_smem: Any = None


@dataclass(frozen=True)
class _Kernel:
    """The kernel for products of one size: what every thread of it knows when it is traced."""

    config: Config
    form: Form
    tiles_m: int
    tiles_n: int
    steps: int

    def __call__(self, *refs: Any, **scratch: Any) -> None:
        """Run one warpgroup."""
        held = _Refs(*refs, **scratch)
        me = lax.axis_index("warpgroup")
        pl.when(me == self.config.consumers)(lambda: self._produce(held))
        pl.when(me != self.config.consumers)(lambda: self._consume(held, me))

    def _tile(self, info: Any) -> tuple[Any, Any, Any]:
        """Return the first row and column of this program's tile, and the number of its first step."""
        config = self.config
        shape, minor = (self.tiles_m, self.tiles_n), int(config.minor == "n")
        tile_m, tile_n = plgpu.planar_snake(info.index[0], shape, minor, config.group)
        if config.cluster == "m":
            tile_m = tile_m * 2 + lax.axis_index("cluster")
        if config.cluster == "n":
            tile_n = tile_n * 2 + lax.axis_index("cluster")
        return tile_m * config.block_m, tile_n * config.block_n, info.local_index * self.steps

    def _registers(self, count: int, action: str) -> None:
        if self.config.consumers == 2:  # of two warpgroups each has 255 from the start
            plgpu.set_max_registers(count, action=action)

    def _produce(self, refs: _Refs) -> None:
        """Load the tiles of A and B of every step of k, in the order they are consumed."""
        config = self.config
        self._registers(PRODUCER_REGISTERS, "decrease")
        shared_a = {"collective_axes": "cluster"} if config.cluster == "n" else {}
        shared_b = {"collective_axes": "cluster"} if config.cluster == "m" else {}

        @plgpu.nd_loop((self.tiles_m * self.tiles_n,), collective_axes="grid", init_carry=jnp.int32(0))
        def done(info: Any, carry: Any) -> Any:
            row, col, base = self._tile(info)
            rows, cols = pl.ds(row, config.block_m), pl.ds(col, config.block_n)

            def step(index: Any, _: Any) -> None:
                at = base + index
                slot = lax.rem(at, config.stages)
                full, depth = refs.full.at[slot], pl.ds(index * config.block_k, config.block_k)
                pl.when(at >= config.stages)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
                plgpu.copy_gmem_to_smem(refs.a.at[rows, depth], refs.a_smem.at[slot], full, **shared_a)
                source = refs.b.at[depth, cols] if self.form.plain else refs.b.at[cols, depth]
                plgpu.copy_gmem_to_smem(source, refs.b_smem.at[slot], full, **shared_b)
                if self.form.blocks:
                    plgpu.copy_gmem_to_smem(refs.scale_a.at[index, rows], refs.scale_smem.at[slot], full)

            lax.fori_loop(0, self.steps, step, None)
            return base + self.steps

        # Nobody leaves while another program of the cluster may still write here or signal here.
        def drain(at: Any, _: Any) -> None:
            plgpu.barrier_wait(refs.empty.at[lax.rem(at, config.stages)])

        lax.fori_loop(jnp.maximum(done - config.stages, 0), done, drain, None)

    def _consume(self, refs: _Refs, me: Any) -> None:
        """Multiply and store this consumer's rows of every tile."""
        self._registers(CONSUMER_REGISTERS, "increase")

        @plgpu.nd_loop((self.tiles_m * self.tiles_n,), collective_axes="grid")
        def _(info: Any) -> None:
            row, col, base = self._tile(info)
            acc = self._promoted(refs, me, col, base) if self.form.promoted else self._fast(refs, me, base)
            self._store(refs, me, acc, row + me * self.config.height, col)

        plgpu.wait_smem_to_gmem(0)

    def _multiply(self, refs: _Refs, me: Any, acc: Any, slot: Any) -> None:
        plgpu.barrier_wait(refs.full.at[slot])
        b = refs.b_smem.at[slot]
        rows = pl.ds(me * self.config.height, self.config.height)
        plgpu.wgmma(acc, refs.a_smem.at[slot, rows], b if self.form.plain else transposed(b))

    def _fast(self, refs: _Refs, me: Any, base: Any) -> Any:
        """Return the product of this consumer's rows, summed by the tensor core."""
        config, delay = self.config, min(self.config.delay, self.steps)

        def give_back(at: Any) -> None:
            plgpu.barrier_arrive(refs.empty.at[lax.rem(at, config.stages)])

        def sums(acc: Any) -> Any:
            def step(index: Any, _: Any) -> None:
                at = base + index
                self._multiply(refs, me, acc, lax.rem(at, config.stages))
                plgpu.wgmma_wait(delay)
                if delay:
                    pl.when(index >= delay)(lambda: give_back(at - delay))
                else:
                    give_back(at)

            lax.fori_loop(0, self.steps, step, None)
            values = acc[...]
            for late in range(delay):
                give_back(base + self.steps - delay + late)
            return values

        return pl.run_scoped(sums, plgpu.ACC((config.height, config.block_n), jnp.float32))

    def _promoted(self, refs: _Refs, me: Any, col: Any, base: Any) -> Any:
        """Return the product of this consumer's rows, each step of k added to float32 sums by the CUDA cores."""
        config = self.config
        chain = min(config.chain, self.steps)
        total = jnp.zeros((config.height, config.block_n), jnp.float32)
        if not self.form.plain:
            total = plgpu.layout_cast(total, WGMMA)

        def round_(index: Any, total: Any) -> Any:
            return self._chain(refs, me, col, base, index * chain, chain, total)

        total = lax.fori_loop(0, self.steps // chain, round_, total)
        if rest := self.steps % chain:
            total = self._chain(refs, me, col, base, jnp.int32(self.steps - rest), rest, total)
        return total

    def _chain(self, refs: _Refs, me: Any, col: Any, base: Any, first: Any, count: int, total: Any) -> Any:
        """Return the total with `count` steps of k added, each while the next one is multiplied."""
        config = self.config
        shape = (config.height, config.block_n)

        def begin(index: int, acc: Any) -> tuple[Any, Any]:
            slot = lax.rem(base + first + index, config.stages)
            of_block = refs.scale_b[col // BLOCK, first + index] if self.form.blocks else None
            self._multiply(refs, me, acc, slot)
            if not self.form.blocks:
                return slot, None
            # Not multiplied yet: that would wait for the loads before the next wgmma is issued.
            rows = refs.scale_smem.at[slot, pl.ds(me * config.height, config.height)]
            return slot, (self._vector(rows, 1), of_block)

        def end(acc: Any, begun: tuple[Any, Any], total: Any, flying: int) -> Any:
            slot, scales = begun
            # Behind the barrier nothing can be computed from sums that the wgmma has yet to write.
            part = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=flying))
            plgpu.barrier_arrive(refs.empty.at[slot])
            if scales is not None:
                part = part * lax.broadcast_in_dim(scales[0] * scales[1], shape, [0])
            return lax.optimization_barrier(total + part)  # by here, or two partial sums would be alive

        def link(index: int, before: Any, total: Any) -> Any:
            if index == count:
                return end(*before, total, 0)

            def inside(acc: Any) -> Any:
                begun = begin(index, acc)
                summed = total if before is None else end(*before, total, 1)
                return link(index + 1, (acc, begun), summed)

            return pl.run_scoped(inside, plgpu.ACC(shape, jnp.float32))

        return link(0, None, total)

    def _vector(self, ref: Any, over: int) -> Any:
        """Return a vector as it is spread along a tile's dimension 1 - over."""
        return ref[...] if self.form.plain else load(ref, WGMMA.reduce(over))

    def _spread(self, ref: Any, first: Any, shape: tuple[int, int], dim: int) -> Any:
        """Return values of rows (dim 0) or columns (dim 1) over a tile, or the one that stands for all of them."""
        if ref.shape == (1,):
            return ref[0]
        return lax.broadcast_in_dim(self._vector(ref.at[pl.ds(first, shape[dim])], 1 - dim), shape, [dim])

    def _store(self, refs: _Refs, me: Any, acc: Any, row: Any, col: Any) -> None:
        """Finish and write one consumer's sums, whose first element is (row, col) of C."""
        config, form = self.config, self.form
        if refs.scale_a is not None and not form.blocks:
            acc = acc * self._spread(refs.scale_a, row, acc.shape, 0)
            acc = acc * self._spread(refs.scale_b, col, acc.shape, 1)
        size = itemsize(form.out_dtype)
        width, slots = SWIZZLE // size, config.slots(size)
        pieces = [(i, j) for i in range(0, config.height, 64) for j in range(0, config.block_n, width)]
        for number, (i, j) in enumerate(pieces):
            piece = acc[i : i + 64, j : j + width]
            if refs.bias is not None:
                piece = piece + self._spread(refs.bias, col + j, piece.shape, 1)
            piece = activated(piece, form.activation).astype(form.out_dtype)
            slot = number % slots
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            refs.out_smem[me, slot] = piece
            plgpu.commit_smem()
            target = refs.out.at[pl.ds(row + i, 64), pl.ds(col + j, width)]
            plgpu.copy_smem_to_gmem(refs.out_smem.at[me, slot], target)


def _scratch(config: Config, form: Form, a: Any, b: Any) -> dict[str, Any]:
    """Return the shared memory of a program: the ring, pieces of C, barriers."""
    size, out_size, stages = itemsize(a.dtype), itemsize(form.out_dtype), config.stages

    def swizzled(values: int) -> tuple[Any, ...]:
        return () if form.plain else (plgpu.TilingTransform((8, values)), plgpu.SwizzleTransform(SWIZZLE))

    b_shape = (config.block_k, config.block_n) if form.plain else (config.block_n, config.block_k)
    make_empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("cluster",)) if config.cluster else plgpu.Barrier
    pieces = (config.consumers, config.slots(out_size), 64, SWIZZLE // out_size)
    scratch = {
        "a_smem": plgpu.SMEM((stages, config.block_m, config.block_k), a.dtype, transforms=swizzled(SWIZZLE // size)),
        "b_smem": plgpu.SMEM((stages, *b_shape), b.dtype, transforms=swizzled(SWIZZLE // size)),
        "out_smem": plgpu.SMEM(pieces, form.out_dtype, transforms=swizzled(SWIZZLE // out_size)),
        "full": plgpu.Barrier(num_arrivals=2 + form.blocks, num_barriers=stages),
        "empty": make_empty(num_arrivals=config.consumers, num_barriers=stages),
    }
    if form.blocks:
        scratch["scale_smem"] = plgpu.SMEM((stages, config.block_m), jnp.float32)
    return scratch


@functools.partial(jax.jit, static_argnames=("config", "form", "programs", "interpret"))
def _gemm(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *, config: Config, form: Form, programs: int, interpret: Any
) -> Any:
    """Pad, multiply, and cut; see `gemm`."""
    (m, k), n = a.shape, b.shape[0]
    high, wide = config.cluster_tile()
    deep = SWIZZLE // itemsize(a.dtype)
    if form.plain or interpret is not None:  # interpreters stop at the edge of an array
        whole_m, whole_n, whole_k = up(m, high), up(n, wide), up(k, config.block_k)
    else:
        whole_m, whole_n, whole_k = up(m, 8), up(n, 64), up(k, deep)
    kernel = _Kernel(
        config=config,
        form=form,
        tiles_m=-(-whole_m // high),
        tiles_n=-(-whole_n // wide),
        steps=-(-whole_k // config.block_k),
    )
    rows, cols = kernel.tiles_m * high, kernel.tiles_n * wide
    if form.blocks:
        scale_a = padded(scale_a.astype(jnp.float32).T, kernel.steps, rows)
        scale_b = padded(scale_b.astype(jnp.float32), up(cols, BLOCK) // BLOCK, kernel.steps)
    else:
        scale_a, scale_b = vector(scale_a, rows), vector(scale_b, cols)
    if bias is not None:
        bias = padded(bias.astype(jnp.float32), cols)
    a, b = padded(a, whole_m, whole_k), padded(b, whole_n, whole_k)
    tiles = kernel.tiles_m * kernel.tiles_n
    options = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((whole_m, whole_n), form.out_dtype),
        grid=(max(1, min(programs // config.programs, tiles)),),
        grid_names=("grid",),
        cluster=(config.programs,),
        cluster_names=("cluster",),
        num_threads=config.consumers + 1,
        thread_name="warpgroup",
        scratch_types=_scratch(config, form, a, b),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        **options,
    )(a, b.T if form.plain else b, scale_a, scale_b, bias)
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
    promoted: bool = False,
    blocks: bool = False,
    activation: str | None = None,
    programs: int = 132,
    interpret: Any = False,
) -> Any:
    """Return activation(A times B^T times the scales, plus bias) of shape (m, n), rounded once to out_dtype.

    a: (m, k), b: (n, k), K-major (b is what a row-major product would call its transpose), of FP8 (e4m3 or e5m2, the
    two mixed from JAX 0.11), bfloat16 or float16. scale_a, scale_b: float32, decoding, (m,) and (n,), or (1,) for all;
    with `blocks` (m, ceil(k / 128)) and (ceil(n / 128), ceil(k / 128)). bias: (n,) of any float dtype. out_dtype:
    bfloat16, float16 or float32. promoted: block_k of k at a time are added in float32 outside the tensor core, as
    with `blocks` always. activation: relu, gelu (by erf), gelu_tanh or silu. programs: at most so many run, one a
    multiprocessor. interpret: True, or parameters of JAX's GPU interpreter, to run on a CPU.

    Any m, n and k; padded inside where they do not fit Mosaic's tilings. Traceable, with everything after bias static.
    Raises ValueError for shapes that do not match and for a config that the kernel cannot run.
    """
    dtypes = {"blocks": blocks, "activation": activation, "dtypes": DTYPES}
    m, n, _ = check(a, b, scale_a, scale_b, bias, **dtypes)
    size, out_dtype = itemsize(a.dtype), jnp.dtype(out_dtype)
    if complaint := config.complaint(size, itemsize(out_dtype), blocks=blocks):
        raise ValueError(f"{config}: {complaint}")
    if m == 0 or n == 0:
        return jnp.zeros((m, n), out_dtype)
    chosen = interpreter(interpret)
    form = Form(out_dtype, promoted or blocks, blocks, activation, plain=chosen is not None and OLD_INTERPRETER)
    return _gemm(a, b, scale_a, scale_b, bias, config=config, form=form, programs=programs, interpret=chosen)
