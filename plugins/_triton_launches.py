"""Which launches a scaled Triton product is made of, and how its operands are laid out: by shape, for any framework.

A launch is put together over stand-ins for arrays, `kernels.launching.Array`, each with the slot of its address.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from dispatch.plugins import _triton_configs as names

from dispatch import Operand, Problem, ScalingRecipe

TOGETHER_LIMIT = 1 << 24
"""Values of an operand up to which both are quantized in one launch: above, two launches cost no more."""


class Slots(NamedTuple):
    """Where the addresses of one operand stand: quantized, its scales, as it came, a quantizer's workspace."""

    data: int
    scale: int
    x: int
    partial: int


OF_A, OF_B = Slots(0, 1, 2, 3), Slots(4, 5, 6, 7)
OUT, BIAS, PARTIALS, COUNTERS = range(8, 12)


class Step(NamedTuple):
    """One launch, `kernel[grid](*arguments, **options)`, and the slots that it writes to."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    options: dict[str, Any]
    writes: tuple[int, ...]


class Form(NamedTuple):
    """How one operand is laid out; rows are those of a, columns of b, of all batch entries.

    padded_k: whole 16 bytes. scale: extents (row blocks, k blocks), float32 or e8m0; along_rows: stored the other way
    round, with rows padded to whole 16 bytes, as TMA loads those of 1x128.
    """

    recipe: ScalingRecipe
    rows: int
    k: int
    padded_k: int
    scale: tuple[int, int]
    along_rows: bool

    @property
    def stored_scale(self) -> tuple[int, int]:
        """The extents of the scales in memory."""
        return (self.scale[1], _up(self.scale[0], 4)) if self.along_rows else self.scale

    @property
    def scale_strides(self) -> tuple[int, int]:
        """The strides of the scales over row blocks and k blocks."""
        return (1, self.stored_scale[1]) if self.along_rows else (self.scale[1], 1)

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales."""
        return math.prod(self.stored_scale) * (1 if self.recipe.scale_dtype == "e8m0" else 4)


def form_of(recipe: ScalingRecipe, rows: int, k: int) -> Form:
    """Return how `rows` by k values quantized by a recipe are laid out."""
    height, width = recipe.block(rows, k)
    return Form(recipe, rows, k, _up(k, 16), (-(-rows // height), -(-k // width)), recipe.granularity == "1x128")


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def entries(problem: Problem, operand: Operand) -> int:
    """Return how many matrices of an operand the kernel sees: one, or one for each batch entry of the product."""
    return 1 if math.prod(operand.batch) == 1 else math.prod(problem.batch)


def fuses(problem: Problem) -> bool:
    """Return whether the kernel can add a bias of the problem's dtype, or has none to add."""
    return problem.bias in (None, "float32", "bfloat16", "float16")


def stand_in(slot: int, dtype: str, shape: Sequence[int], strides: Sequence[int] | None = None) -> Any:
    """Return the stand-in for an array of `shape` and `dtype`, contiguous unless strides (in elements) are given."""
    import triton.language as tl
    from dispatch.kernels.launching import Array

    kinds = {"float8_e4m3fn": tl.float8e4nv, "float8_e5m2": tl.float8e5, "bfloat16": tl.bfloat16}
    kinds |= {"float16": tl.float16, "float32": tl.float32, "int32": tl.int32}
    return Array(slot, kinds[dtype], shape, strides)


def quantizing(form: Form, dtype: str, slots: Slots, *, transposed: bool) -> tuple[list[Step], int]:
    """Return the launches that quantize one operand into `form`, and the float32 values of workspace they need.

    dtype: the operand's. It is contiguous, (rows, k), or (k, rows) where it is transposed.
    """
    from dispatch.kernels import triton_quantize, triton_quantize_blocks, triton_quantize_columns

    shape, stride = _lying(form, transposed)
    x, data, scale = _pointers(form, dtype, shape, slots)
    out = (form.rows, form.padded_k)
    kind = form.recipe.granularity
    launches: Sequence[Any]
    floats = 0
    if kind == "tensor":
        launches = triton_quantize.tensor_launches(shape, stride, out, transposed=transposed)
        floats = triton_quantize.TENSOR_PARTIALS
    elif kind == "row" and transposed:
        launches = triton_quantize_columns.columns_launches(shape, stride, out)
        floats = triton_quantize_columns.columns_workspace(shape, out)
    elif kind == "row":
        launches = [triton_quantize.rows_launch(shape, stride, out)]
    else:
        block, steps = form.recipe.block(form.rows, form.k), form.scale_strides
        launches = [triton_quantize_blocks.blocks_launch(shape, stride, out, block, steps, transposed=transposed)]
    partial = stand_in(slots.partial, "float32", (max(floats, 1),))
    guard = (None, None) if kind == "row" and not transposed else ()
    given = [(x, data, scale, *guard)] if len(launches) == 1 else [(x, partial), (x, partial, data, scale)]
    written = [(slots.data, slots.scale)] if len(launches) == 1 else [(slots.partial,), (slots.data, slots.scale)]
    steps_made = [
        Step(launch.kernel, launch.grid, [*pointers, *launch.sizes], launch.options, writes)
        for launch, pointers, writes in zip(launches, given, written, strict=True)
    ]
    return steps_made, floats


def _lying(form: Form, transposed: bool) -> tuple[tuple[int, int], int]:
    """Return the shape that an operand lies in, and its outer stride."""
    return ((form.k, form.rows), form.rows) if transposed else ((form.rows, form.k), form.k)


def _pointers(form: Form, dtype: str, shape: tuple[int, int], slots: Slots) -> tuple[Any, Any, Any]:
    return (
        stand_in(slots.x, dtype, shape),
        stand_in(slots.data, form.recipe.storage_dtype, (form.rows, form.padded_k)),
        stand_in(slots.scale, "float32", form.stored_scale),
    )


def quantizing_both(sides: Sequence[tuple[Form, str, Slots, bool]]) -> Step | None:
    """Return what quantizes both operands, each (form, dtype, slots, transposed), in one launch; None if no gain."""
    from dispatch.kernels import triton_quantize_many as together

    found = []
    for form, dtype, slots, transposed in sides:
        if form.recipe.granularity != "row" or form.rows * form.k > TOGETHER_LIMIT:
            return None
        shape, stride = _lying(form, transposed)
        source = together.Source(shape, stride, (form.rows, form.padded_k), transposed)
        if together.tile_of(source) is None:
            return None
        found.append((source, _pointers(form, dtype, shape, slots), (slots.data, slots.scale)))
    found.sort(key=lambda one: not one[0].transposed)  # those take longest
    launch = together.many_launch([source for source, _, _ in found])
    pointers: list[Any] = [pointer for _, three, _ in found for pointer in three]
    pointers += [None] * (3 * (together.MAX_OPERANDS - len(found)))
    writes = tuple(slot for _, _, slots in found for slot in slots)
    return Step(launch.kernel, launch.grid, [*pointers, *launch.sizes], launch.options, writes)


class Product(NamedTuple):
    """The product's own launch, and how many float32 partial sums and zeroed int32 counters it needs."""

    step: Step
    floats: int
    counters: int


def multiplying(
    problem: Problem,
    config: names.Config,
    forms: tuple[Form, Form],
    out: str,
    bias: str | None,
    activation: str | None,
    *,
    programs: int,
) -> Product:
    """Return the launch that multiplies operands laid out in `forms`, with bias (n,) and activation, into dtype `out`.

    programs: the GPU's multiprocessors. Nothing is launched beside the kernel before it.
    """
    from dispatch.kernels import gluon_gemm, triton_decode, triton_gemm

    assert problem.recipe is not None
    count = math.prod(problem.batch)
    a, scale_a = _matrices(forms[0], OF_A, entries(problem, problem.a), problem.m)
    b, scale_b = _matrices(forms[1], OF_B, entries(problem, problem.b), problem.n)
    c = stand_in(OUT, out, (count, problem.m, problem.n) if count > 1 else (problem.m, problem.n))
    added = None if bias is None else stand_in(BIAS, bias, (problem.n,))
    promoted = problem.accumulation == "promoted"
    blocks = problem.recipe.a.granularity not in ("tensor", "row")
    if config.schedule in names.HOPPER_SCHEDULES:
        of_a = stand_in(scale_a.slot, "float32", scale_a.shape[::-1], scale_a.strides[::-1]) if blocks else scale_a
        made = gluon_gemm.gemm_launch(
            *(a, b, c, of_a, scale_b, added),
            config=hopper_config(config, 1, c.element_size()),
            promoted=promoted,
            blocks=blocks,
            activation=activation,
            programs=programs,
        )
        return Product(Step(*made, (OUT,)), 0, 0)
    shared: dict[str, Any] = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
    shared |= {"stages": config.stages, "activation": activation, "promoted": promoted}
    shared |= {"block": extents_of(problem) if blocks else None}
    operands = a, b, c, scale_a, scale_b, added
    if config.schedule in (names.DECODE, names.DECODE_POINTERS):
        tile = {"block_m": config.block_m, "block_n": config.block_n, "splits": config.splits}
        floats, counters = triton_decode.decode_workspace(problem.m, problem.n, count, **tile)
        space = (stand_in(PARTIALS, "float32", (floats,)), stand_in(COUNTERS, "int32", (counters,)))
        made = triton_decode.decode_launch(
            *operands,
            space if counters else None,
            **shared,
            splits=config.splits,
            warps=config.warps,
            tma=config.schedule == names.DECODE,
        )
        return Product(Step(*made, (OUT, PARTIALS, COUNTERS) if counters else (OUT,)), floats, counters)
    shared |= {"group": 8, "warps": 8 if config.block_m * config.block_n >= 1 << 14 else 4, "programs": programs}
    shared |= {"epilogue_halves": 2 if config.block_n == 256 else 1}
    launch_of = triton_gemm.gemm_launch if config.schedule == names.PERSISTENT else triton_gemm.gemm_pointer_launch
    return Product(Step(*launch_of(*operands, **shared), (OUT,)), 0, 0)


def _matrices(form: Form, slots: Slots, count: int, outer: int) -> tuple[Any, Any]:
    """Return the stand-ins for the quantized values of an operand, ([count,] outer, k), and for their scales."""
    shape = (count, outer, form.padded_k) if count > 1 else (outer, form.padded_k)
    values = stand_in(slots.data, form.recipe.storage_dtype, shape)
    kind = form.recipe.granularity
    if kind in ("tensor", "row"):
        return values, stand_in(slots.scale, "float32", (1,) if kind == "tensor" else shape[:-1])
    return values, stand_in(slots.scale, "float32", form.scale, form.scale_strides)


def extents_of(problem: Problem) -> tuple[int, int, int]:
    """Return how many rows of a, rows of b and values of k share a block scale."""
    assert problem.recipe is not None
    (rows_a, width), (rows_b, _) = problem.recipe.a.block(1, 1), problem.recipe.b.block(1, 1)
    return rows_a, rows_b, width


def hopper_config(config: names.Config, itemsize: int, out_itemsize: int) -> Any:
    """Return the Hopper kernel's config: as many stages and as few slices of the output as shared memory holds."""
    from dispatch.kernels import gluon_gemm

    pingpong = config.schedule == names.PINGPONG
    consumers = 1 if config.schedule == names.ONE_CONSUMER else 2
    group = max(4, 1024 // config.block_m)
    for stages in range(config.stages, 1, -1):
        for slices in (1, 2, 4) if consumers == 1 else (2, 4):
            found = gluon_gemm.Config(
                config.block_m, config.block_n, config.block_k, stages, consumers, pingpong, slices, group
            )
            if found.shared_bytes(itemsize, out_itemsize) <= gluon_gemm.SHARED_LIMIT:
                return found
    raise ValueError(f"{config} needs more than {gluon_gemm.SHARED_LIMIT} bytes of shared memory")
