"""Warp-specialized GEMM for Hopper (sm90) in Gluon: TMA loads, wgmma, TMA stores, persistent programs.

C (m, n) = A (m, k) times B (n, k), both K-major, of FP8 (each e4m3 or e5m2), bfloat16 or float16; float32 accumulators;
the epilogue, in registers: times the scales of the rows and columns, plus a bias of one value a column, activation, one
rounding to bfloat16, float16 or float32.

One warp loads tiles into a ring of stages, one or two partitions of consumers multiply them:

one consumer: four warps on up to 64 rows, eight on more. For few tiles, where nothing is to be gained by a second.
cooperative: two consumers of four warps, each with half of the rows of every tile.
pingpong: two consumers of four warps, each on tiles of its own; they take turns at the tensor core, and the epilogue of
one runs while the other multiplies. On an H200 the fastest for large FP8 products: 128x128 in six stages reached
1,290-1,340 TFLOP/s where cooperative 128x256 reached 1,230-1,300.

Accumulation is fast (the tensor core adds, and keeps about 14 bits of sums of FP8 products) or promoted: each 128 of k
is added in float32 by the CUDA cores, with the scales of 1x128 blocks of A and 128x128 blocks of B where there are
such. Then two steps of k are in flight in each consumer, one multiplied while the other is added: without that overlap
it loses 10%.
"""

# Gluon reads the signatures of jitted functions itself: only its own annotations belong there.
# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import triton
import triton.language as tl
from dispatch.kernels._triton_tile import Launch, tma_writes
from triton._utils import canonicalize_dtype
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

SHARED_LIMIT = 232_448 - 2_048
"""Bytes of shared memory that a program may take on sm90, less what alignment and warp specialization may add."""


@dataclass(frozen=True)
class Config:
    """How the kernel runs: sizes in elements, `group` in tiles.

    slices: in how many pieces of columns a tile is stored (1, 2 or 4), each through shared memory of that size.
    """

    block_m: int
    block_n: int
    block_k: int = 128
    stages: int = 4
    consumers: int = 2
    pingpong: bool = False
    slices: int = 2
    group: int = 8

    @property
    def parts(self) -> int:
        """How many pieces of rows the consumers share a tile in."""
        return 1 if self.pingpong else self.consumers

    @property
    def height(self) -> int:
        """The rows of one consumer's share of a tile."""
        return self.block_m // self.parts

    @property
    def warps(self) -> int:
        """The warps of one consumer."""
        return 8 if self.height >= 128 and self.consumers == 1 else 4

    def shared_bytes(self, itemsize: int, out_itemsize: int) -> int:
        """Return how much shared memory a program takes at most, in bytes."""
        stage = (self.block_m + self.block_n) * self.block_k * itemsize + 4 * self.block_m
        return self.stages * (stage + 16) + self.consumers * (
            self.height * self.block_n // self.slices * out_itemsize + 8
        )


@dataclass(frozen=True)
class Form:
    """What the product looks like: constants of one compiled kernel.

    promoted: each 128 of k is added in float32. blocks: with its scales, those of A (k / 128, m), of B any strides.
    scaled, has_bias: what the epilogue applies. activation: `none`, `relu`, `gelu`, `gelu_tanh` or `silu`. by_tma: C is
    stored by TMA, which needs rows of C 16 bytes apart. dependent: waits for the kernel before it in the stream, which
    it was launched beside (programmatic dependent launch).
    """

    promoted: bool = False
    blocks: bool = False
    scaled: bool = True
    has_bias: bool = False
    activation: str = "none"
    by_tma: bool = True
    dependent: bool = False


@gluon.jit
def _tile(index, tiles_m, tiles_n, group: gl.constexpr):
    """Return the (row, column) of a tile: columns of `group` rows of tiles, so that what runs at once shares L2."""
    width = group * tiles_n
    first = (index // width) * group
    height = gl.minimum(tiles_m - first, group)
    inside = index % width
    return first + inside % height, inside // height


@gluon.jit
def _activated(x, form: gl.constexpr):
    if form.activation == "relu":
        x = gl.where(x < 0, 0.0, x)  # NaN stays NaN
    elif form.activation == "silu":
        x = x / (1.0 + gl.exp(-x))
    elif form.activation == "gelu":
        x = 0.5 * x * (1.0 + gl.erf(x * 0.7071067811865476))
    elif form.activation == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        x = x / (1.0 + gl.exp(-2.0 * inner))
    return x


@gluon.jit
def _store(acc, row, col, me: gl.constexpr, target, scales, bias, sizes, form: gl.constexpr):
    """Finish and write the columns of one tile that stand in `acc`, whose first element is (row, col) of C."""
    c_desc, c_smem, c, stride = target
    scale_a, scale_b, step_a, step_b, _step_b_k = scales
    m, n, _k = sizes
    layout: gl.constexpr = acc.type.layout
    rows = row + gl.arange(0, acc.type.shape[0], gl.SliceLayout(1, layout))
    cols = col + gl.arange(0, acc.type.shape[1], gl.SliceLayout(0, layout))
    if form.scaled:
        of_row = gl.load(scale_a + rows * step_a, mask=rows < m, other=0.0)
        of_col = gl.load(scale_b + cols * step_b, mask=cols < n, other=0.0)
        acc = acc * of_row[:, None] * of_col[None, :]
    if form.has_bias:
        acc = acc + gl.load(bias + cols, mask=cols < n, other=0.0).to(gl.float32)[None, :]
    out = _activated(acc, form).to(c.dtype.element_ty)
    if form.by_tma:
        buffer = c_smem.index(me)
        tma.store_wait(0)
        buffer.store(out)
        fence_async_shared()
        tma.async_copy_shared_to_global(c_desc, [row, col], buffer)
    else:
        offset = rows.to(gl.int64)[:, None] * stride + cols[None, :]
        gl.store(c + offset, out, mask=(rows < m)[:, None] & (cols < n)[None, :])


@gluon.jit
def _halves(x):
    """Return the left and the right half of the columns."""
    half: gl.constexpr = x.type.shape[1] // 2
    return x.reshape(x.type.shape[0], 2, half).permute(0, 2, 1).split()


@gluon.jit
def _store_sliced(
    acc, row, col, me: gl.constexpr, target, scales, bias, sizes, slices: gl.constexpr, form: gl.constexpr
):
    if slices == 1:
        _store(acc, row, col, me, target, scales, bias, sizes, form)
    else:
        half: gl.constexpr = acc.type.shape[1] // 2
        rest: gl.constexpr = slices // 2
        left, right = _halves(acc)
        _store_sliced(left, row, col, me, target, scales, bias, sizes, rest, form)
        _store_sliced(right, row, col + half, me, target, scales, bias, sizes, rest, form)


@gluon.jit
def _produce(a_desc, b_desc, s_desc, ring, s_smem, sizes, config: gl.constexpr, form: gl.constexpr):
    """Load the tiles of A (in pieces of rows) and B of every step of k, in the order they are consumed."""
    a_smem, b_smem, full, empty = ring
    m, n, k = sizes
    tiles_m = gl.cdiv(m, config.block_m)
    tiles_n = gl.cdiv(n, config.block_n)
    steps = gl.cdiv(k, config.block_k)
    itemsize: gl.constexpr = a_desc.dtype.primitive_bitwidth // 8
    size: gl.constexpr = (config.block_m + config.block_n) * config.block_k * itemsize + (
        4 * config.block_m if form.blocks else 0
    )
    parts: gl.constexpr = config.parts
    group: gl.constexpr = config.group
    at = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(tile, tiles_m, tiles_n, group)
        for step in range(steps):
            slot = at % config.stages
            mbarrier.wait(empty.index(slot), ((at // config.stages) & 1) ^ 1)
            bar = full.index(slot)
            mbarrier.expect(bar, size)
            for part in gl.static_range(parts):
                row = tile_m * config.block_m + part * config.height
                index = slot * parts + part
                tma.async_copy_global_to_shared(a_desc, [row, step * config.block_k], bar, a_smem.index(index))
                if form.blocks:
                    tma.async_copy_global_to_shared(s_desc, [step, row], bar, s_smem.index(index))
            tma.async_copy_global_to_shared(
                b_desc, [tile_n * config.block_n, step * config.block_k], bar, b_smem.index(slot)
            )
            at += 1


@gluon.jit
def _consume(me: gl.constexpr, ring, turn, target, scales, bias, sizes, config: gl.constexpr, form: gl.constexpr):
    """Multiply and store the part of consumer `me`: its rows of every tile, or every tile of its own."""
    a_smem, b_smem, full, empty = ring
    m, n, k = sizes
    part: gl.constexpr = 0 if config.pingpong else me
    height: gl.constexpr = config.height
    block_n: gl.constexpr = config.block_n
    slices: gl.constexpr = config.slices
    group: gl.constexpr = config.group
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[config.warps, 1],
        instr_shape=[16, config.block_n, 256 // a_smem.dtype.primitive_bitwidth],
    )
    tiles_m = gl.cdiv(m, config.block_m)
    tiles_n = gl.cdiv(n, config.block_n)
    steps = gl.cdiv(k, config.block_k)
    first = gl.program_id(0)
    stride = gl.num_programs(0)
    at = steps * 0
    parity = at
    if config.pingpong:
        first += me * stride
        stride *= 2
        at += me * steps
        parity += 1 - me  # the first to go does not wait
    for index in range(first, tiles_m * tiles_n, stride):
        tile_m, tile_n = _tile(index, tiles_m, tiles_n, group)
        token = warpgroup_mma_init(gl.zeros([height, block_n], gl.float32, layout))
        if config.pingpong:
            mbarrier.wait(turn.index(me), parity)
            parity = parity ^ 1
        for step in range(steps):
            slot = at % config.stages
            mbarrier.wait(full.index(slot), (at // config.stages) & 1)
            piece = a_smem.index(slot * config.parts + part)
            token = warpgroup_mma(piece, b_smem.index(slot).permute((1, 0)), token, use_acc=step > 0, is_async=True)
            token = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=(token,)))
            mbarrier.arrive(empty.index((at + config.stages - 1) % config.stages), count=1, pred=step > 0)
            at += 1
        if config.pingpong:
            mbarrier.arrive(turn.index(1 - me), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(token,))
        mbarrier.arrive(empty.index((at + config.stages - 1) % config.stages), count=1)
        if config.pingpong:
            at += steps
        row = tile_m * config.block_m + part * config.height
        col = tile_n * config.block_n
        _store_sliced(acc, row, col, me, target, scales, bias, sizes, slices, form)
    if form.by_tma:
        tma.store_wait(0)


@gluon.jit
def _row_scales(s_smem, index, layout: gl.constexpr):
    """Return the scales of the rows of one part of A, which came with it."""
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    height: gl.constexpr = s_smem.shape[2]
    return s_smem.index(index)._reinterpret(gl.float32, [height], flat).load(gl.SliceLayout(1, layout))


@gluon.jit
def _settled(x):
    """Return x, computed by here: LLVM would sink the sums below the next wgmma, and keep two partial sums alive."""
    return gl.inline_asm_elementwise("// $0 $1", "=f,0", [x], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _begin(
    part,
    at,
    step,
    me: gl.constexpr,
    ring,
    s_smem,
    blocks_b,
    layout: gl.constexpr,
    config: gl.constexpr,
    form: gl.constexpr,
):
    """Start the product of stage `at`, which is `step` of k, in the registers of `part`.

    Return it, in flight, and its scales: of the rows of A and of the block of B.
    """
    a_smem, b_smem, full, _empty = ring
    of_block, step_b_k = blocks_b
    slot = at % config.stages
    index = slot * config.parts + me
    scale = (0.0, 0.0)
    if form.blocks:
        of_block = gl.load(of_block + step * step_b_k)
    mbarrier.wait(full.index(slot), (at // config.stages) & 1)
    part = warpgroup_mma(a_smem.index(index), b_smem.index(slot).permute((1, 0)), part, use_acc=False, is_async=True)
    if form.blocks:
        scale = (_row_scales(s_smem, index, layout), of_block)
    return part, scale


@gluon.jit
def _added(acc, part, scale, form: gl.constexpr):
    if form.blocks:
        of_row, of_block = scale
        acc = acc + part * (of_row * of_block)[:, None]
    else:
        acc = acc + part
    return _settled(acc)


@gluon.jit
def _consume_promoted(
    me: gl.constexpr, ring, s_smem, target, scales, bias, sizes, config: gl.constexpr, form: gl.constexpr
):
    """Multiply and store the rows of consumer `me`, adding each step of k to float32 sums."""
    a_smem, _b_smem, _full, empty = ring
    _scale_a, scale_b, _step_a, step_b, step_b_k = scales
    m, n, k = sizes
    height: gl.constexpr = config.height
    block_n: gl.constexpr = config.block_n
    slices: gl.constexpr = config.slices
    group: gl.constexpr = config.group
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0],
        warps_per_cta=[config.warps, 1],
        instr_shape=[16, config.block_n, 256 // a_smem.dtype.primitive_bitwidth],
    )
    tiles_m = gl.cdiv(m, config.block_m)
    tiles_n = gl.cdiv(n, config.block_n)
    steps = gl.cdiv(k, config.block_k)
    zero = gl.zeros([height, block_n], gl.float32, layout)
    at = 0
    part = zero
    ahead = zero
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile(tile, tiles_m, tiles_n, group)
        acc = zero
        blocks_b = (scale_b + (tile_n * block_n // 128).to(gl.int64) * step_b, step_b_k)
        # Two steps are in flight: while one is added in the CUDA cores, the other keeps the tensor core busy. Each is
        # multiplied in the registers of the one before it, or ptxas would want more than there are.
        pending, scale = _begin(part, at, 0, me, ring, s_smem, blocks_b, layout, config, form)
        for pair in range((steps - 1) // 2):
            step = 2 * pair + 1
            ahead, scale_ahead = _begin(ahead, at + step, step, me, ring, s_smem, blocks_b, layout, config, form)
            part = warpgroup_mma_wait(num_outstanding=1, deps=(pending,))
            mbarrier.arrive(empty.index((at + step - 1) % config.stages), count=1)
            acc = _added(acc, part, scale, form)
            pending, scale = _begin(part, at + step + 1, step + 1, me, ring, s_smem, blocks_b, layout, config, form)
            ahead = warpgroup_mma_wait(num_outstanding=1, deps=(ahead,))
            mbarrier.arrive(empty.index((at + step) % config.stages), count=1)
            acc = _added(acc, ahead, scale_ahead, form)
        at += steps
        if steps % 2 == 0:
            ahead, scale_ahead = _begin(ahead, at - 1, steps - 1, me, ring, s_smem, blocks_b, layout, config, form)
            part = warpgroup_mma_wait(num_outstanding=1, deps=(pending,))
            mbarrier.arrive(empty.index((at - 2) % config.stages), count=1)
            acc = _added(acc, part, scale, form)
            ahead = warpgroup_mma_wait(num_outstanding=0, deps=(ahead,))
            acc = _added(acc, ahead, scale_ahead, form)
        else:
            part = warpgroup_mma_wait(num_outstanding=0, deps=(pending,))
            acc = _added(acc, part, scale, form)
        mbarrier.arrive(empty.index((at - 1) % config.stages), count=1)
        row = tile_m * config.block_m + me * config.height
        _store_sliced(acc, row, tile_n * config.block_n, me, target, scales, bias, sizes, slices, form)
    if form.by_tma:
        tma.store_wait(0)


@gluon.jit
def _consumer(
    me: gl.constexpr, ring, turn, s_smem, target, scales, bias, sizes, config: gl.constexpr, form: gl.constexpr
):
    if form.promoted:
        _consume_promoted(me, ring, s_smem, target, scales, bias, sizes, config, form)
    else:
        _consume(me, ring, turn, target, scales, bias, sizes, config, form)


@gluon.jit(do_not_specialize=["m", "n", "k"])
def gemm_kernel(
    a_desc,
    b_desc,
    c_desc,
    s_desc,
    c,
    scale_a,
    scale_b,
    bias,
    m,
    n,
    k,
    stride_c,
    step_a,
    step_b,
    step_b_k,
    config: gl.constexpr,
    form: gl.constexpr,
):
    """C = epilogue(A times B^T). See the module's text and `gemm` for the arguments."""
    a_smem = gl.allocate_shared_memory(
        a_desc.dtype, [config.stages * config.parts, config.height, config.block_k], a_desc.layout
    )
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [config.stages, config.block_n, config.block_k], b_desc.layout)
    c_smem = b_smem
    if form.by_tma:
        c_smem = gl.allocate_shared_memory(
            c_desc.dtype, [config.consumers, config.height, config.block_n // config.slices], c_desc.layout
        )
    s_smem = b_smem
    if form.blocks:
        s_smem = gl.allocate_shared_memory(gl.float32, [config.stages * config.parts, 1, config.height], s_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [config.stages, 1], mbarrier.MBarrierLayout())
    turn = gl.allocate_shared_memory(gl.int64, [config.consumers, 1], mbarrier.MBarrierLayout())
    stages: gl.constexpr = config.stages
    for slot in gl.static_range(stages):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=config.parts)
    consumers: gl.constexpr = config.consumers
    for consumer in gl.static_range(consumers):
        mbarrier.init(turn.index(consumer), count=1)
    fence_async_shared()
    if form.dependent:
        gl.inline_asm_elementwise("griddepcontrol.wait; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
        gl.inline_asm_elementwise(
            "griddepcontrol.launch_dependents; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1
        )
    ring = (a_smem, b_smem, full, empty)
    target = (c_desc, c_smem, c, stride_c)
    scales = (scale_a, scale_b, step_a, step_b, step_b_k)
    sizes = (m, n, k)
    if config.consumers == 1:
        gl.warp_specialize(
            [
                (_consumer, (0, ring, turn, s_smem, target, scales, bias, sizes, config, form)),
                (_produce, (a_desc, b_desc, s_desc, ring, s_smem, sizes, config, form)),
            ],
            [1],
            [24],
        )
    else:
        gl.warp_specialize(
            [
                (_consumer, (0, ring, turn, s_smem, target, scales, bias, sizes, config, form)),
                (_consumer, (1, ring, turn, s_smem, target, scales, bias, sizes, config, form)),
                (_produce, (a_desc, b_desc, s_desc, ring, s_smem, sizes, config, form)),
            ],
            [4, 1],
            [232, 24],
        )


def _descriptor(x: Any, box: Sequence[int]) -> TensorDescriptor:
    """Return a TMA descriptor over a 2-D array, in the layout that wgmma reads its boxes in."""
    layout = gl.NVMMASharedLayout.get_default_for(list(box), tl.dtype(canonicalize_dtype(x.dtype)))
    return TensorDescriptor(x, list(x.shape), [x.stride(0), x.stride(1)], list(box), layout)


def gemm_launch(
    a: Any,
    b: Any,
    c: Any,
    scale_a: Any | None = None,
    scale_b: Any | None = None,
    bias: Any | None = None,
    *,
    config: Config,
    programs: int,
    promoted: bool = False,
    blocks: bool = False,
    activation: str | None = None,
) -> Launch:
    """Return the launch of one product on at most `programs` multiprocessors.

    a: (m, k), b: (n, k), rows 16 bytes apart and aligned. c: (m, n), inner stride 1; written by TMA where its rows are
    multiples of 16 bytes and aligned, else by masked stores. scale_a, scale_b: float32, (m,) and (n,), or one value
    each; with `blocks` (k / 128, m) with rows 16 bytes apart, and (n / 128, k / 128) of any strides. bias: (n,) of any
    float dtype. activation: relu, gelu, gelu_tanh or silu.

    It is launched beside the kernel before it in the stream, for whose end it waits (programmatic dependent launch).
    """
    m, k = a.shape
    n = b.shape[0]
    by_tma = tma_writes(c)
    form = Form(
        promoted=promoted or blocks,
        blocks=blocks,
        scaled=scale_a is not None and not blocks,
        has_bias=bias is not None,
        activation=activation or "none",
        by_tma=by_tma,
        dependent=True,
    )
    s_desc, steps = None, (0, 0, 0)
    if blocks:
        assert scale_a is not None
        assert scale_b is not None
        flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
        s_desc = TensorDescriptor(scale_a, list(scale_a.shape), [scale_a.stride(0), 1], [1, config.height], flat)
        steps = (0, scale_b.stride(0), scale_b.stride(1))
    elif scale_a is not None and scale_b is not None:
        steps = (int(math.prod(scale_a.shape) > 1), int(math.prod(scale_b.shape) > 1), 0)
    arguments = (
        _descriptor(a, [config.height, config.block_k]),
        _descriptor(b, [config.block_n, config.block_k]),
        _descriptor(c, [config.height, config.block_n // config.slices]) if by_tma else None,
        s_desc,
        c,
        scale_a if form.scaled else None,
        scale_b,
        bias,
        m,
        n,
        k,
        c.stride(0),
        *steps,
        config,
        form,
    )
    tiles = triton.cdiv(m, config.block_m) * triton.cdiv(n, config.block_n)
    options = {"num_warps": config.warps, "launch_pdl": True}
    return Launch(gemm_kernel, (min(programs, tiles), 1, 1), arguments, options)
