"""The Triton products in torch: quantize what is not, multiply, all by launches whose arguments are bound once.

A call allocates the output and one workspace, and passes addresses on: nothing else is made anew.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
import triton.language as tl
from dispatch import FP8_DTYPES, Operand, Plan, Problem, ScaledArray, ScalingRecipe, framework
from dispatch.kernels import gluon_gemm, launching, triton_decode, triton_gemm, triton_mx_gemm
from dispatch.kernels import triton_quantize as by_row
from dispatch.kernels import triton_quantize_blocks as by_block
from dispatch.kernels import triton_quantize_columns as by_column
from dispatch.kernels.launching import Array
from dispatch.plugins import _triton_configs as names
from torch import Tensor

TYPES = {
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e5m2": tl.float8e5,
    "bfloat16": tl.bfloat16,
    "float16": tl.float16,
    "float32": tl.float32,
}
FORMATS = {"e4m3": tl.float8e4nv, "e5m2": tl.float8e5}
ALIGNMENT = 256
"""Bytes between the parts of a workspace: what torch's allocator aligns to at least."""

# The addresses of one product: slots of the bound kernels' arguments.
A, B, OUT, SCALE_A, SCALE_B, BIAS, PARTIALS, COUNTERS = range(8)
X, DATA, SCALE, PARTIAL, COUNTER = range(5)
"""The same for one quantization."""

_current_stream = torch._C._cuda_getCurrentRawStream
_capturing = torch.cuda.is_current_stream_capturing


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


class Encoded(NamedTuple):
    """One operand as the kernels take it: values (rows, k padded), K-major, and scales as `Form` lays them."""

    matrix: Tensor
    scale: Tensor


class Form(NamedTuple):
    """How one operand is laid out: extents of its values and its scales; rows are those of a, columns of b.

    k: padded to whole 16 bytes. scale: extents, float32 or e8m0. along_rows: the scales of 1x128 of a lie along its
    rows, (k / 128, rows padded), as TMA loads them; all others are (row blocks, k blocks).
    """

    recipe: ScalingRecipe
    rows: int
    k: int
    padded_k: int
    scale: tuple[int, int]
    along_rows: bool

    @property
    def data_bytes(self) -> int:
        """The bytes of the values."""
        return self.rows * self.padded_k

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales."""
        return math.prod(self.scale) * (1 if self.recipe.scale_dtype == "e8m0" else 4)


def form_of(recipe: ScalingRecipe, rows: int, k: int) -> Form:
    """Return how `rows` by k values quantized by a recipe are laid out."""
    if recipe.granularity == "1x128":
        return Form(recipe, rows, k, _up(k, 16), (_up(k, 128) // 128, _up(rows, 4)), True)
    height, width = recipe.block(rows, k)
    scale = (-(-rows // height), -(-k // width))
    return Form(recipe, rows, k, _up(k, 16), scale, False)


class Quantizer:
    """The launches that quantize an operand, (rows, k) of given strides, into a `Form`.

    partial_bytes, counters: the workspace that it needs beside the output; counters start as zeros and end so.
    """

    def __init__(self, form: Form, dtype: str, strides: tuple[int, int]) -> None:
        self.form = form
        recipe, rows, k = form.recipe, form.rows, form.k
        # What has neither axis contiguous is copied first.
        self.copies = 1 not in strides
        row_step, k_step = (k, 1) if self.copies else strides
        transposed = k_step != 1
        shape, stride = ((k, rows), k_step) if transposed else ((rows, k), row_step)
        x = Array(X, TYPES[dtype], shape, (stride, 1))
        data = Array(DATA, FORMATS[recipe.dtype], (rows, form.padded_k))
        scale = Array(SCALE, tl.uint8 if recipe.scale_dtype == "e8m0" else tl.float32, form.scale)
        partial, counter = Array(PARTIAL, tl.float32, (1,)), Array(COUNTER, tl.int32, (1,))
        out = (rows, form.padded_k)
        self.partial_bytes, self.counters = 0, 0
        launches: list[tuple[Any, tuple[Any, ...]]] = []
        if recipe.granularity == "tensor":
            amax, cast = by_row.tensor_launches(shape, stride, out, transposed=transposed)
            launches = [(amax, (x, partial)), (cast, (x, partial, data, scale))]
            self.partial_bytes = 4 * by_row.TENSOR_PARTIALS
        elif recipe.granularity == "row" and not transposed:
            launches = [(by_row.rows_launch(shape, stride, out), (x, data, scale, None, None))]
        elif recipe.granularity == "row":
            values, self.counters = by_column.columns_workspace(out)
            self.partial_bytes = 4 * values
            joint = (partial, counter) if by_column.column_tiles(out) is not None else ()
            if not values:
                joint = joint and (None, None)
            launches = [(by_column.columns_launch(shape, stride, out), (x, data, scale, *joint))]
        else:
            height, width = recipe.block(rows, k)
            steps = (1, form.scale[1]) if form.along_rows else (form.scale[1], 1)
            launch = by_block.blocks_launch(shape, stride, out, (height, width), steps, transposed=transposed)
            launches = [(launch, (x, data, scale))]
        self._bound = [
            launching.bind(launch.kernel, launch.grid, [*pointers, *launch.sizes], launch.options)
            for launch, pointers in launches
        ]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch, for the addresses of x, data, scale, partial and counters."""
        for launch in self._bound:
            launch(stream, addresses)


def rows_view(x: Tensor, axis: int) -> Tensor:
    """Return an operand, (*batch, m, k) or (*batch, k, n), as (rows, k): a view where its strides allow."""
    x = x if axis == -1 else x.mT
    return x if x.ndim == 2 else x.reshape(-1, x.shape[-1])


def aligned(x: Tensor) -> Tensor:
    """Return x, or a copy where its address is no multiple of 16."""
    return x if x.data_ptr() % 16 == 0 else x.clone(memory_format=torch.contiguous_format)


def encode(x: Any, recipe: ScalingRecipe, axis: int) -> Encoded:
    """Return one operand, an array, raw FP8 (its scale is one) or a ScaledArray, as the kernels take it."""
    if isinstance(x, ScaledArray):
        return _encode_scaled(x, recipe, axis)
    rows = rows_view(x, axis)
    form = form_of(recipe, *rows.shape)
    if x.dtype.itemsize == 1:
        return Encoded(_fitted(rows, form), torch.ones(form.scale, dtype=torch.float32, device=x.device))
    rows = aligned(rows if 1 in rows.stride() else rows.contiguous())
    with torch.cuda.device(x.device):
        quantizer = Quantizer(form, _name(x.dtype), tuple(rows.stride()))
        dtype = torch.float8_e4m3fn if recipe.dtype == "e4m3" else torch.float8_e5m2
        data = torch.empty((form.rows, form.padded_k), dtype=dtype, device=x.device)
        scale = torch.empty(form.scale, dtype=_scale_dtype(recipe), device=x.device)
        partial = torch.empty(max(quantizer.partial_bytes, 1), dtype=torch.uint8, device=x.device)
        counters = torch.zeros(max(quantizer.counters, 1), dtype=torch.int32, device=x.device)
        spaces = (rows, data, scale, partial, counters)
        quantizer(_current_stream(x.device.index), [space.data_ptr() for space in spaces])
    return Encoded(data, scale)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _scale_dtype(recipe: ScalingRecipe) -> torch.dtype:
    return torch.float8_e8m0fnu if recipe.scale_dtype == "e8m0" else torch.float32


def _encode_scaled(x: ScaledArray, recipe: ScalingRecipe, axis: int) -> Encoded:
    rows, scale = rows_view(x.data, axis), x.scale if axis == -1 else x.scale.mT
    form = form_of(recipe, *rows.shape)
    if recipe.granularity == "tensor":
        return Encoded(_fitted(rows, form), scale.reshape(1, 1))
    scale = scale.reshape(-1, scale.shape[-1])
    if form.along_rows:
        laid = scale.new_zeros(form.scale)
        laid[:, : form.rows] = scale.t()
        return Encoded(_fitted(rows, form), laid)
    return Encoded(_fitted(rows, form), scale.contiguous())


def _fitted(rows: Tensor, form: Form) -> Tensor:
    """Return FP8 values K-major with k padded: themselves where they are, else a copy."""
    shape = (form.rows, form.padded_k)
    if tuple(rows.shape) == shape and rows.is_contiguous():
        return aligned(rows)
    out = torch.zeros(shape, dtype=torch.uint8, device=rows.device)
    out[:, : form.k] = rows.view(torch.uint8)
    return out.view(rows.dtype)


class _Side:
    """One operand of a plan: how it gets from what the caller gives to addresses of values and scales."""

    def __init__(self, problem: Problem, operand: Operand, axis: int, outer: int) -> None:
        assert problem.recipe is not None
        self.axis = axis
        self.recipe = problem.recipe.a if axis == -1 else problem.recipe.b
        self.dtype = operand.dtype
        self.prepared = operand.prepared
        self.encodes = operand.recipe is not None or operand.dtype in FP8_DTYPES
        self.form = form_of(self.recipe, math.prod(operand.batch) * outer, problem.k)
        self.quantizes = not self.prepared and not self.encodes
        self.data_at = 0
        self.scale_at = _up(self.form.data_bytes, ALIGNMENT)
        self.partial_at = self.scale_at + _up(self.form.scale_bytes, ALIGNMENT)
        self._by_strides: dict[tuple[int, int], Quantizer] = {}

    def quantizer(self, strides: tuple[int, int]) -> Quantizer:
        """Return the launches for an operand of these strides, bound when they are first met."""
        found = self._by_strides.get(strides)
        if found is None:
            found = self._by_strides[strides] = Quantizer(self.form, self.dtype, strides)
        return found

    def space(self, quantizer: Quantizer) -> int:
        """Return the bytes of workspace that the operand takes."""
        return self.partial_at + _up(quantizer.partial_bytes, ALIGNMENT)


class _Counters:
    """Zeroed int32 counters, kept for each stream: on one stream no two launches run at once.

    Those of a captured graph are its own, and zeroed in it: it may be replayed beside its stream.
    """

    def __init__(self, count: int, device: torch.device) -> None:
        self.count, self.device = count, device
        self._by_stream: dict[int, Tensor] = {}

    def on(self, stream: int) -> Tensor:
        """Return the counters for a launch on `stream`."""
        if _capturing():
            return torch.zeros(self.count, dtype=torch.int32, device=self.device)
        found = self._by_stream.get(stream)
        if found is None:
            found = torch.zeros(self.count, dtype=torch.int32, device=self.device)
            self._by_stream[stream] = found
        return found


class Product:
    """The product of one problem by one config. What it launches was compiled when it was made."""

    def __init__(self, problem: Problem, config: names.Config) -> None:
        self.problem, self.config = problem, config
        self.device = torch.device(problem.device)
        self.index = self.device.index or 0
        self.room = framework("torch")
        self.out_dtype = self.room.dtype(problem.out_dtype)
        self.out_shape = (*problem.batch, problem.m, problem.n)
        self.sides = None
        if problem.recipe is not None:
            self.sides = (
                _Side(problem, problem.a, -1, problem.m),
                _Side(problem, problem.b, -2, problem.n),
            )
        self.fused, self.partials, count = self._bind(problem.out_dtype, problem.bias, problem.activation)
        self.counters = _Counters(count, self.device) if count else None
        self._wide: launching.Bound | None = None
        self._by_strides: dict[Any, tuple[Any, ...]] = {}

    def _bind(self, out: str, bias: str | None, activation: str | None) -> tuple[launching.Bound, int, int]:
        """Return the bound kernel, and the bytes of partial sums and the counters that it needs."""
        problem, config = self.problem, self.config
        m, n = problem.m, problem.n
        if self.sides is None:
            a = self._plain(A, problem.a, m)
            b = self._plain(B, problem.b, n)
            scales: tuple[Any, Any] = (None, None)
        else:
            left, right = self.sides
            a = self._encoded(A, left.form, problem.a, m)
            b = self._encoded(B, right.form, problem.b, n)
            scales = (self._scale(SCALE_A, left.form, a), self._scale(SCALE_B, right.form, b))
        c = Array(OUT, TYPES[out], (*self._batch(), m, n))
        extra = None if bias is None else Array(BIAS, TYPES[bias], (n,))
        operands = (a, b, c, *scales, extra)
        programs = torch.cuda.get_device_properties(self.index).multi_processor_count
        promoted = problem.accumulation == "promoted"
        if config.schedule in names.HOPPER_SCHEDULES:
            launch = gluon_gemm.gemm_launch(
                *operands,
                config=gluon_config(config, out),
                promoted=promoted,
                blocks=left_blocks(problem),
                activation=activation or "none",
                by_tma=n * c.element_size() % 16 == 0,
                programs=programs,
            )
            return launching.bind(*launch), 0, 0
        blocks = block_of(problem)
        tile = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
        shared = {**tile, "stages": config.stages, "promoted": promoted, "activation": activation, "block": blocks}
        if config.schedule in (names.DECODE, names.DECODE_POINTERS):
            batch = math.prod(problem.batch)
            floats, count = triton_decode.decode_workspace(
                m, n, batch, block_m=config.block_m, block_n=config.block_n, splits=config.splits
            )
            space = (Array(PARTIALS, tl.float32, (floats,)), Array(COUNTERS, tl.int32, (count,))) if count else None
            made = triton_decode.decode_launch(
                *operands,
                space,
                **shared,
                splits=config.splits,
                warps=config.warps,
                tma=config.schedule == names.DECODE,
            )
            return launching.bind(*made), 4 * floats, count
        warps = 8 if config.block_m * config.block_n >= 128 * 128 else 4
        if config.schedule == names.MX:
            del shared["promoted"], shared["block"]
            made = triton_mx_gemm.mx_gemm_launch(*operands, **shared, group=8, warps=warps, programs=programs)
        else:
            launch_of = triton_gemm.gemm_launch if config.schedule == names.PERSISTENT else triton_gemm.gemm_pointer_launch
            made = launch_of(*operands, **shared, group=8, warps=warps, programs=programs)
        return launching.bind(*made), 0, 0

    def _batch(self) -> tuple[int, ...]:
        batch = self.problem.batch
        return (math.prod(batch),) if batch else ()

    def _encoded(self, slot: int, form: Form, operand: Operand, outer: int) -> Array:
        count = math.prod(operand.batch)
        shape = (count, outer, form.padded_k) if count > 1 else (outer, form.padded_k)
        return Array(slot, FORMATS[form.recipe.dtype], shape)

    def _plain(self, slot: int, operand: Operand, outer: int) -> Array:
        count = math.prod(operand.batch)
        shape = (count, outer, self.problem.k) if count > 1 else (outer, self.problem.k)
        return Array(slot, TYPES[operand.dtype], shape)

    def _scale(self, slot: int, form: Form, values: Array) -> Array:
        dtype = tl.uint8 if form.recipe.scale_dtype == "e8m0" else tl.float32
        if form.recipe.granularity in ("tensor", "row"):
            per_batch = values.shape[:-2] if form.recipe.granularity == "row" else ()
            rows = values.shape[-2] if form.recipe.granularity == "row" else 1
            return Array(slot, dtype, (*per_batch, rows))
        return Array(slot, dtype, form.scale)
