"""The device code of the Pallas kernel for Hopper: its configs, its producer and its consumers. See pallas_fp8_gemm."""

# JAX is not seen by mypy: its decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas as pl
import jax.numpy as jnp
from dispatch.kernels.pallas_common import BLOCK, activated, itemsize, load, transposed
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

SHARED_LIMIT = 232_448 - 2_048
"""Bytes of shared memory that a program may take on sm90, less what barriers and alignment may add."""
SWIZZLE = 128  # bytes, of operands and of what is stored
PRODUCER_REGISTERS, CONSUMER_REGISTERS = 40, 232
WGMMA = plgpu.Layout.WGMMA
EARLY = 128
"""Columns of a tile up to which scales are loaded before its sums, and so are there after them: registers suffice."""


@dataclass(frozen=True)
class Config:
    """How the kernel runs: sizes in elements, `group` in tiles.

    block_m: rows of a program's tile, shared equally by its consumers unless pingpong; 64 or a multiple for each.
    stages: of the ring, or of two rings of half as many each if pingpong.
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
    pingpong: bool = False
    cluster: str = ""
    minor: str = "m"
    group: int = 8
    delay: int = 1
    chain: int = 2

    @property
    def height(self) -> int:
        """The rows of one consumer's share of a tile."""
        return self.block_m // (1 if self.pingpong else self.consumers)

    @property
    def depth(self) -> int:
        """The stages of one ring."""
        return self.stages // (2 if self.pingpong else 1)

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
        if self.consumers not in (1, 2) or self.height % 64 or self.height == 0:
            return (
                f"block_m={self.block_m} is not 64 rows or a multiple for each of {self.consumers} consumers (1 or 2)"
            )
        if self.pingpong and (self.consumers != 2 or self.stages % 2):
            return f"pingpong takes two consumers and an even number of stages, not {self.consumers} and {self.stages}"
        if self.block_n % 64 or not 64 <= self.block_n <= 256:
            return f"block_n={self.block_n} is none of 64, 128, 192 and 256"
        if self.block_k * itemsize % SWIZZLE or (blocks and self.block_k != BLOCK):
            return f"block_k={self.block_k} is no multiple of {SWIZZLE} bytes, or not {BLOCK} with block scales"
        if blocks and BLOCK % self.block_n:
            return f"block_n={self.block_n} does not divide the {BLOCK} rows of B that a block scale is for"
        if self.cluster not in ("", "m", "n") or self.minor not in ("m", "n"):
            return f"cluster={self.cluster!r} or minor={self.minor!r} is no dimension"
        if not 0 <= self.delay < self.depth or self.depth < 2 or self.chain < 1:
            return (
                f"rings of {self.depth} stages, delay={self.delay}, chain={self.chain}: at least 2, fewer, 1 are needed"
            )
        if (size := self.shared_bytes(itemsize, out_itemsize, blocks=blocks)) > SHARED_LIMIT:
            return f"{size} bytes of shared memory are more than {SHARED_LIMIT}: fewer stages or a smaller tile"
        return ""


@dataclass(frozen=True)
class Form:
    """What the product looks like: constants of one compiled kernel. See `gemm`.

    across: B is (k, n). plain: for an interpreter that knows no layouts; then B is (k, n) too.
    """

    out_dtype: Any
    promoted: bool = False
    blocks: bool = False
    activation: str | None = None
    across: bool = False
    plain: bool = False

    @property
    def k_by_n(self) -> bool:
        """Whether tiles of B are (k, n) in shared memory."""
        return self.across or self.plain


def _spread(values: Any, shape: tuple[int, ...], dim: int) -> Any:
    """Return a vector along `dim` of a tile, or one number, as it multiplies the tile."""
    return lax.broadcast_in_dim(values, shape, [dim]) if values.ndim else values


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
    turn: Any = None
    scale_smem: Any = None


@dataclass(frozen=True)
class _Ring:
    """The ring of stages that a tile goes through: its first stage, and how many steps went through before."""

    first: Any
    before: Any
    depth: int

    def slot(self, step: Any) -> Any:
        """Return the stage of a step of the tile."""
        return self.first + lax.rem(self.before + step, self.depth)


@dataclass(frozen=True)
class Kernel:
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

    @property
    def tiles(self) -> int:
        """How many tiles all clusters have to do."""
        return self.tiles_m * self.tiles_n

    def _tile(self, info: Any) -> tuple[Any, Any]:
        """Return the first row and column of this program's tile."""
        config = self.config
        shape, minor = (self.tiles_m, self.tiles_n), int(config.minor == "n")
        tile_m, tile_n = plgpu.planar_snake(info.index[0], shape, minor, config.group)
        if config.cluster == "m":
            tile_m = tile_m * 2 + lax.axis_index("cluster")
        if config.cluster == "n":
            tile_n = tile_n * 2 + lax.axis_index("cluster")
        return tile_m * config.block_m, tile_n * config.block_n

    def _ring(self, info: Any) -> _Ring:
        """Return where the steps of a tile stand in the ring that it goes through."""
        if not self.config.pingpong:
            return _Ring(jnp.int32(0), info.local_index * self.steps, self.config.depth)
        ring, turn = lax.rem(info.local_index, jnp.int32(2)), lax.div(info.local_index, jnp.int32(2))
        return _Ring(ring * self.config.depth, turn * self.steps, self.config.depth)

    def _registers(self, count: int, action: str) -> None:
        if self.config.consumers == 2:  # of two warpgroups each has 255 from the start
            plgpu.set_max_registers(count, action=action)

    def _produce(self, refs: _Refs) -> None:
        """Load the tiles of A and B of every step of k, in the order they are consumed."""
        config = self.config
        self._registers(PRODUCER_REGISTERS, "decrease")
        shared_a = {"collective_axes": "cluster"} if config.cluster == "n" else {}
        shared_b = {"collective_axes": "cluster"} if config.cluster == "m" else {}

        @plgpu.nd_loop((self.tiles,), collective_axes="grid", init_carry=jnp.int32(0))
        def count(info: Any, carry: Any) -> Any:
            (row, col), ring = self._tile(info), self._ring(info)
            rows, cols = pl.ds(row, config.block_m), pl.ds(col, config.block_n)

            def step(index: Any, _: Any) -> None:
                slot = ring.slot(index)
                full, depth = refs.full.at[slot], pl.ds(index * config.block_k, config.block_k)
                pl.when(ring.before + index >= config.depth)(lambda: plgpu.barrier_wait(refs.empty.at[slot]))
                plgpu.copy_gmem_to_smem(refs.a.at[rows, depth], refs.a_smem.at[slot], full, **shared_a)
                source = refs.b.at[depth, cols] if self.form.k_by_n else refs.b.at[cols, depth]
                plgpu.copy_gmem_to_smem(source, refs.b_smem.at[slot], full, **shared_b)
                if self.form.blocks:
                    plgpu.copy_gmem_to_smem(refs.scale_a.at[index, rows], refs.scale_smem.at[slot], full)

            lax.fori_loop(0, self.steps, step, None)
            return carry + 1

        # Nobody leaves while another program of the cluster may still write here or signal here.
        if config.pingpong:
            half = lax.div(count, jnp.int32(2))
            self._drain(refs, _Ring(jnp.int32(0), (count - half) * self.steps, config.depth))
            self._drain(refs, _Ring(jnp.int32(config.depth), half * self.steps, config.depth))
        else:
            self._drain(refs, _Ring(jnp.int32(0), count * self.steps, config.depth))

    def _drain(self, refs: _Refs, ring: _Ring) -> None:
        """Wait until the last stages of a ring have been given back."""

        def wait(step: Any, _: Any) -> None:
            plgpu.barrier_wait(refs.empty.at[ring.slot(step)])

        lax.fori_loop(-jnp.minimum(ring.before, ring.depth), 0, wait, None)

    def _consume(self, refs: _Refs, me: Any) -> None:
        """Multiply and store this consumer's rows of every tile, or every other tile."""
        config = self.config
        self._registers(CONSUMER_REGISTERS, "increase")

        @plgpu.nd_loop((self.tiles,), collective_axes="grid")
        def _(info: Any) -> None:
            if config.pingpong:
                mine = lax.rem(info.local_index, jnp.int32(2)) == me
                pl.when(mine)(lambda: self._finish(refs, me, info))
            else:
                self._finish(refs, me, info)

        plgpu.wait_smem_to_gmem(0)

    def _finish(self, refs: _Refs, me: Any, info: Any) -> None:
        """Multiply and store this consumer's part of one tile."""
        config = self.config
        (row, col), ring = self._tile(info), self._ring(info)
        part = jnp.int32(0) if config.pingpong else me
        row = row + part * config.height
        scales = self._scales(refs, row, col) if config.block_n <= EARLY else None
        if config.pingpong:
            pl.when(info.local_index > 0)(lambda: plgpu.barrier_wait(refs.turn.at[me]))
        acc = self._promoted(refs, part, col, ring) if self.form.promoted else self._fast(refs, part, ring)
        if config.pingpong:
            another = info.index[0] + lax.axis_size("grid") < self.tiles
            pl.when(another)(lambda: plgpu.barrier_arrive(refs.turn.at[1 - me]))
        self._store(refs, me, acc, row, col, self._scales(refs, row, col) if scales is None else scales)

    def _multiply(self, refs: _Refs, part: Any, acc: Any, slot: Any) -> None:
        plgpu.barrier_wait(refs.full.at[slot])
        b = refs.b_smem.at[slot]
        rows = pl.ds(part * self.config.height, self.config.height)
        plgpu.wgmma(acc, refs.a_smem.at[slot, rows], b if self.form.k_by_n else transposed(b))

    def _fast(self, refs: _Refs, part: Any, ring: _Ring) -> Any:
        """Return the product of this consumer's rows, summed by the tensor core."""
        config, delay = self.config, min(self.config.delay, self.steps)

        def give_back(step: Any) -> None:
            plgpu.barrier_arrive(refs.empty.at[ring.slot(step)])

        def sums(acc: Any) -> Any:
            def step(index: Any, _: Any) -> None:
                self._multiply(refs, part, acc, ring.slot(index))
                plgpu.wgmma_wait(delay)
                if delay:
                    pl.when(index >= delay)(lambda: give_back(index - delay))
                else:
                    give_back(index)

            lax.fori_loop(0, self.steps, step, None)
            values = acc[...]
            for late in range(delay):
                give_back(jnp.int32(self.steps - delay + late))
            return values

        return pl.run_scoped(sums, plgpu.ACC((config.height, config.block_n), jnp.float32))

    def _promoted(self, refs: _Refs, part: Any, col: Any, ring: _Ring) -> Any:
        """Return the product of this consumer's rows, each step of k added to float32 sums by the CUDA cores."""
        config = self.config
        chain = min(config.chain, self.steps)
        total = jnp.zeros((config.height, config.block_n), jnp.float32)
        if not self.form.plain:
            total = plgpu.layout_cast(total, WGMMA)

        def of_blocks(first: Any) -> Any:
            """Return the scales of B for the steps of a round; loaded a round ahead, nothing waits for them."""
            if not self.form.blocks:
                return ()
            steps = [jnp.minimum(first + step, self.steps - 1) for step in range(chain)]
            return tuple(refs.scale_b[lax.div(col, BLOCK), step] for step in steps)

        def round_(index: Any, carry: Any) -> Any:
            total, held = carry
            following = of_blocks((index + 1) * chain)
            return self._chain(refs, part, ring, index * chain, chain, total, held), following

        total, held = lax.fori_loop(0, self.steps // chain, round_, (total, of_blocks(jnp.int32(0))))
        if rest := self.steps % chain:
            total = self._chain(refs, part, ring, jnp.int32(self.steps - rest), rest, total, held)
        return total

    def _chain(self, refs: _Refs, part: Any, ring: _Ring, first: Any, count: int, total: Any, held: Any) -> Any:
        """Return the total with `count` steps of k added, each while the next one is multiplied.

        held: the scales of B of each step, where it has any.
        """
        config = self.config
        shape = (config.height, config.block_n)

        def begin(index: int, acc: Any) -> tuple[Any, Any, Any]:
            slot = ring.slot(first + index)
            self._multiply(refs, part, acc, slot)
            if not self.form.blocks:
                return acc, slot, None
            # Not multiplied yet: that would wait for the loads before the next wgmma is issued.
            rows = refs.scale_smem.at[slot, pl.ds(part * config.height, config.height)]
            return acc, slot, (self._vector(rows, 1), held[index])

        def end(begun: tuple[Any, Any, Any], total: Any, flying: int) -> Any:
            acc, slot, scales = begun
            # Behind the barrier nothing can be computed from sums that the wgmma has yet to write.
            sums = lax.optimization_barrier(plgpu.wgmma_accumulator_load(acc, wait_n=flying))
            plgpu.barrier_arrive(refs.empty.at[slot])
            if scales is not None:
                sums = sums * lax.broadcast_in_dim(scales[0] * scales[1], shape, [0])
            return lax.optimization_barrier(total + sums)  # by here, or two partial sums would be alive

        def link(index: int, before: Any, total: Any) -> Any:
            if index == count:
                return end(before, total, 0)

            def inside(acc: Any) -> Any:
                begun = begin(index, acc)
                summed = total if before is None else end(before, total, 1)
                return link(index + 1, begun, summed)

            return pl.run_scoped(inside, plgpu.ACC(shape, jnp.float32))

        return link(0, None, total)

    def _vector(self, ref: Any, over: int) -> Any:
        """Return a vector as it is spread along a tile's dimension 1 - over."""
        return ref[...] if self.form.plain else load(ref, WGMMA.reduce(over))

    def _part(self, ref: Any, first: Any, count: int, dim: int) -> Any:
        """Return values of rows (dim 0) or columns (dim 1) of a tile, or the one that stands for all of them."""
        return ref[0] if ref.shape == (1,) else self._vector(ref.at[pl.ds(first, count)], 1 - dim)

    def _scales(self, refs: _Refs, row: Any, col: Any) -> Any:
        """Return the scales of one consumer's rows and of the tile's columns, None where the sums need none."""
        if refs.scale_a is None or self.form.blocks:
            return None
        parts = (refs.scale_a, row, self.config.height, 0), (refs.scale_b, col, self.config.block_n, 1)
        return [self._part(*part) for part in parts]

    def _store(self, refs: _Refs, me: Any, acc: Any, row: Any, col: Any, scales: Any) -> None:
        """Finish and write one consumer's sums, whose first element is (row, col) of C."""
        config, form = self.config, self.form
        for dim, scale in enumerate(scales or ()):
            acc = acc * _spread(scale, acc.shape, dim)
        size = itemsize(form.out_dtype)
        width, slots = SWIZZLE // size, config.slots(size)
        pieces = [(i, j) for i in range(0, config.height, 64) for j in range(0, config.block_n, width)]
        for number, (i, j) in enumerate(pieces):
            piece = acc[i : i + 64, j : j + width]
            if refs.bias is not None:
                piece = piece + _spread(self._part(refs.bias, col + j, width, 1), piece.shape, 1)
            piece = activated(piece, form.activation).astype(form.out_dtype)
            slot = number % slots
            plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)
            refs.out_smem[me, slot] = piece
            plgpu.commit_smem()
            target = refs.out.at[pl.ds(row + i, 64), pl.ds(col + j, width)]
            plgpu.copy_smem_to_gmem(refs.out_smem.at[me, slot], target)
