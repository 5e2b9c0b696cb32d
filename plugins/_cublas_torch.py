"""FP8 products in torch: quantize what is not, pad, `torch._scaled_mm`, epilogue."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from dispatch import FP8_DTYPES, Operand, Plan, Problem, ScalingRecipe, framework, quantize

Tensor = Any


class Encoded(NamedTuple):
    """One operand as `torch._scaled_mm` takes it: a (m, k) row-major or b (k, n) column-major, padded, and scales."""

    matrix: Tensor
    scale: Tensor


Encoder = Callable[[Any], Encoded]


def padded_size(outer: int, k: int, recipe: ScalingRecipe, axis: int) -> tuple[int, int]:
    """Return the extents that an operand is padded to.

    k and n must be multiples of 16. With block scales k becomes a multiple of 512: cuBLAS wants the rows of
    128x128 scales 16-byte aligned, and torch's versions disagree about how to say so unless they are without a gap.
    """
    if recipe.granularity in ("tensor", "row"):
        return outer if axis == -1 else _up(outer, 16), _up(k, 16)
    return _up(outer, 16 if axis == -1 else 128), _up(k, 512)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


Guard = Callable[[bool], tuple[Tensor, Tensor]]
"""From whether the operand is transposed on the way to the guard's sums and trip for a launch now, or two of None."""


def _unguarded(transposed: bool) -> tuple[Tensor, Tensor]:
    return None, None


def encoder(
    recipe: ScalingRecipe, axis: int, *, raw_on: Any = None, scaled: bool = False, guard: Guard = _unguarded
) -> Encoder:
    """Return what makes an Encoded of one operand: an array, raw FP8 (scale one) on a device, or a ScaledArray."""
    import torch

    if scaled:
        return partial(_encode_scaled, recipe, axis)
    if raw_on is not None:
        return partial(_encode_raw, recipe, axis, torch.ones((1, 1), dtype=torch.float32, device=raw_on))
    if recipe.granularity in ("tensor", "row"):
        return _array_encoder(recipe, axis, guard)
    return _block_encoder(recipe, axis, guard)


def _array_encoder(recipe: ScalingRecipe, axis: int, guard: Guard) -> Encoder:
    """Return what quantizes an array of any strides; both orders are read as they lie, others are copied first."""
    import torch

    launch, by_row = launcher(), recipe.granularity == "row"
    fmt = torch.float8_e4m3fn if recipe.dtype == "e4m3" else torch.float8_e5m2

    def encode(x: Tensor) -> Encoded:
        source, shape, transposed = _readable(x, axis)
        size = padded_size(*shape, recipe, axis)
        data = torch.empty(size, dtype=fmt, device=x.device)
        scale = torch.empty((size[0] if by_row else 1, 1), dtype=torch.float32, device=x.device)
        launch(source, data, scale, *guard(transposed), by_row=by_row, transposed=transposed)
        return _oriented(data, scale, axis)

    return encode


def _block_encoder(recipe: ScalingRecipe, axis: int, guard: Guard) -> Encoder:
    """Return what quantizes an array of any strides by 1x128 or 128x128, the scales of 1x128 along the rows."""
    import torch

    fmt = torch.float8_e4m3fn if recipe.dtype == "e4m3" else torch.float8_e5m2
    height, width = recipe.block(1, 1)
    kernels = importlib.util.find_spec("triton") is not None

    def encode(x: Tensor) -> Encoded:
        if x.device.type != "cuda" or not kernels:  # right too, and slow
            return _encode_scaled(recipe, axis, quantize(x, recipe, axis=axis))
        from dispatch.kernels.triton_quantize_blocks import quantize_blocks

        source, shape, transposed = _readable(x, axis)
        size = padded_size(*shape, recipe, axis)
        data = torch.empty(size, dtype=fmt, device=x.device)
        down, across = -(-size[0] // height), -(-size[1] // width)
        scale_shape = (across, down) if height == 1 else (down, across)
        scale = torch.empty(scale_shape, dtype=torch.float32, device=x.device)
        scale = scale.t() if height == 1 else scale
        quantize_blocks(source, data, scale, (height, width), *guard(transposed), transposed=transposed)
        return _oriented(data, scale, axis)

    return encode


def _readable(x: Tensor, axis: int) -> tuple[Tensor, tuple[int, int], bool]:
    """Return x with inner stride 1, the shape with k last, and whether the one is the other transposed."""
    rows = x if axis == -1 else x.t()
    shape = (rows.shape[0], rows.shape[1])
    outer, inner = rows.stride()
    if inner != 1 and outer != 1:
        rows, inner = rows.contiguous(), 1
    return (rows, shape, False) if inner == 1 else (rows.t(), shape, True)


def launcher() -> Callable[..., None]:
    """Return launch(source, data, scale, sums, trip, *, by_row, transposed), which quantizes `source` into `data`.

    source: of inner stride 1. sums, trip: the guard's or None.

    by_row: one scale a row of data, else one in all. transposed: data is as `source` transposed.
    """
    import torch
    from dispatch.kernels.triton_quantize import TENSOR_PARTIALS, quantize_rows, quantize_tensor
    from dispatch.kernels.triton_quantize_columns import columns_workspace, quantize_columns

    def launch(
        source: Tensor, data: Tensor, scale: Tensor, sums: Tensor, trip: Tensor, *, by_row: bool, transposed: bool
    ) -> None:
        if not by_row:
            partials = torch.empty(TENSOR_PARTIALS, dtype=torch.float32, device=source.device)
            quantize_tensor(source, data, scale, partials, sums, trip, transposed=transposed)
        elif not transposed:
            quantize_rows(source, data, scale, sums, trip)
        else:
            size = columns_workspace(tuple(source.shape), tuple(data.shape))
            partials = torch.empty(size, dtype=torch.float32, device=source.device) if size else None
            quantize_columns(source, data, scale, partials, sums, trip)

    return launch


def _encode_raw(recipe: ScalingRecipe, axis: int, one: Tensor, x: Tensor) -> Encoded:
    return _oriented(_fitted(x if axis == -1 else x.t(), recipe, axis), one, axis)


def _encode_scaled(recipe: ScalingRecipe, axis: int, x: Any) -> Encoded:
    rows, scale = (x.data, x.scale) if axis == -1 else (x.data.t(), x.scale.t())
    data = _fitted(rows, recipe, axis)
    if recipe.granularity != "tensor":
        along = 1 if recipe.granularity == "row" else data.shape[1] // 128
        across = -(-data.shape[0] // 128) if recipe.granularity == "128x128" else data.shape[0]
        scale = _padded(scale, across, along, 1.0)
    # The scales of 1x128 lie along m.
    scale = scale.t().contiguous().t() if recipe.granularity == "1x128" else scale.contiguous()
    return _oriented(data, scale, axis)


def _fitted(rows: Tensor, recipe: ScalingRecipe, axis: int) -> Tensor:
    """Return FP8 `rows` K-major, padded and aligned: themselves where they are, else a copy."""
    import torch

    height, width = padded_size(rows.shape[0], rows.shape[1], recipe, axis)
    aligned = rows.stride(1) == 1 and rows.stride(0) % 16 == 0 and rows.stride(0) >= width
    if aligned and tuple(rows.shape) == (height, width) and rows.data_ptr() % 16 == 0:
        return rows
    return _padded(rows.view(torch.uint8), height, width, 0).view(rows.dtype)


def _padded(x: Tensor, height: int, width: int, value: float) -> Tensor:
    if tuple(x.shape) == (height, width) and x.is_contiguous():
        return x if x.data_ptr() % 16 == 0 else x.clone()
    out = x.new_full((height, width), value)
    out[: x.shape[0], : x.shape[1]] = x
    return out


def _oriented(data: Tensor, scale: Tensor, axis: int) -> Encoded:
    return Encoded(data, scale) if axis == -1 else Encoded(data.t(), scale.t())


def _operand_encoder(problem: Problem, axis: int) -> Encoder | None:
    assert problem.recipe is not None
    side, outer = ("a", problem.m) if axis == -1 else ("b", problem.n)
    operand: Operand = getattr(problem, side)
    recipe: ScalingRecipe = getattr(problem.recipe, side)
    if operand.prepared:
        return None
    raw_on = problem.device if operand.dtype in FP8_DTYPES else None
    scaled = operand.recipe is not None
    guard = _unguarded if scaled or raw_on is not None else _guard(problem, side, recipe, outer, axis)
    return encoder(recipe, axis, raw_on=raw_on, scaled=scaled, guard=guard)


def _guard(problem: Problem, side: str, recipe: ScalingRecipe, outer: int, axis: int) -> Guard:
    import torch

    if torch.device(problem.device).type != "cuda" or importlib.util.find_spec("triton") is None:
        return _unguarded
    from dispatch.plugins._guard_torch import sums_of

    shape = padded_size(outer, problem.k, recipe, axis)
    sums = sums_of(side, recipe, problem.k, shape, problem.device)
    if sums is None:
        return _unguarded

    def guard(transposed: bool) -> tuple[Tensor, Tensor]:
        found = sums.on(transposed, torch.cuda.current_stream(sums.device).cuda_stream)
        return (None, None) if found is None else (found.sums, found.trip)

    return guard


def plan(problem: Problem) -> Plan:
    """Return a callable that quantizes what is not quantized, multiplies, and adds bias and activation.

    The bias goes into cuBLAS's epilogue where it is one value a column in out_dtype; any other bias, and every
    activation, is applied to a float32 product.
    """
    import torch
    from dispatch.plugins._device_torch import on_device

    assert problem.recipe is not None
    room = framework("torch")
    out_dtype, wide = room.dtype(problem.out_dtype), torch.float32
    encode_a, encode_b = _operand_encoder(problem, -1), _operand_encoder(problem, -2)
    scaled_mm = partial(torch._scaled_mm, use_fast_accum=problem.accumulation == "fast")
    m, n = problem.m, problem.n
    epilogue = problem.bias is not None or problem.activation is not None
    granularity = problem.recipe.a.granularity
    fusable = problem.activation is None and problem.bias == problem.out_dtype != "float32" and n % 16 == 0
    fusable = fusable and granularity in ("tensor", "row")
    cut = padded_size(m, 1, problem.recipe.a, -1)[0] != m or padded_size(n, 1, problem.recipe.b, -2)[0] != n

    def product(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
        left = a if encode_a is None else encode_a(a)
        right = b if encode_b is None else encode_b(b)
        if fusable and bias is not None and bias.shape == (n,) and bias.is_contiguous() and bias.data_ptr() % 16 == 0:
            return scaled_mm(
                left.matrix, right.matrix, scale_a=left.scale, scale_b=right.scale, bias=bias, out_dtype=out_dtype
            )
        out = scaled_mm(
            left.matrix,
            right.matrix,
            scale_a=left.scale,
            scale_b=right.scale,
            out_dtype=wide if epilogue else out_dtype,
        )
        if cut:  # contiguous, as the framework's own product is
            out = out[:m, :n] if epilogue else out[:m, :n].contiguous()
        return room.epilogue(out, problem, bias).contiguous() if epilogue else out

    return on_device(torch.device(problem.device), product)
