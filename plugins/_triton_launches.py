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
    """Where the addresses of one operand stand: quantized, its scales, as it came, a quantizer's workspace.

    sums, trip: the guard's, where the quantizer's launches are made with them.
    """

    data: int
    scale: int
    x: int
    partial: int
    sums: int
    trip: int


OF_A, OF_B = Slots(0, 1, 2, 3, 4, 5), Slots(6, 7, 8, 9, 10, 11)
OUT, BIAS, PARTIALS, COUNTERS = range(12, 16)


class Step(NamedTuple):
    """One launch, `kernel[grid](*arguments, **options)`, and the slots that it writes to."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: Sequence[Any]
    options: dict[str, Any]
    writes: tuple[int, ...]


class Form(NamedTuple):
    """How one operand is laid out; rows are those of a, columns of b, of all batch entries.

    padded_rows, padded_k: with the zeros after them; k is whole 16 bytes at least. scale: extents (row blocks, k
    blocks), float32 or e8m0; along_rows: stored the other way round, with rows padded to whole 16 bytes, as TMA loads
    those of 1x128.
    """

    recipe: ScalingRecipe
    rows: int
    k: int
    padded_rows: int
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
    def scale_kind(self) -> str:
        """The dtype that kernels see scales in; e8m0 as the bytes it is."""
        return "uint8" if self.recipe.scale_dtype == "e8m0" else "float32"

    @property
    def scale_bytes(self) -> int:
        """The bytes of the scales."""
        return math.prod(self.stored_scale) * (1 if self.recipe.scale_dtype == "e8m0" else 4)


def form_of(recipe: ScalingRecipe, rows: int, k: int, multiple: tuple[int, int] = (1, 16)) -> Form:
    """Return how `rows` by k values quantized by a recipe are laid out, padded to multiples of rows and of k."""
    height, width = recipe.block(rows, k)
    padded_rows, padded_k = _up(rows, multiple[0]), _up(k, multiple[1])
    tall = 1 if recipe.granularity == "tensor" else -(-padded_rows // height)
    return Form(recipe, rows, k, padded_rows, padded_k, (tall, -(-k // width)), recipe.granularity == "1x128")


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
    kinds |= {"float16": tl.float16, "float32": tl.float32, "int32": tl.int32, "uint8": tl.uint8}
    return Array(slot, kinds[dtype], shape, strides)


class Source(NamedTuple):
    """An operand to quantize into `form`: (rows, k), or (k, rows) where it is transposed; `stride` over the outer axis.

    The inner stride is 1. guarded: its quantizer keeps the guard's sums.
    """

    form: Form
    dtype: str
    slots: Slots
    transposed: bool
    stride: int
    guarded: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """The shape that it lies in."""
        return (self.form.k, self.form.rows) if self.transposed else (self.form.rows, self.form.k)

    @property
    def out_shape(self) -> tuple[int, int]:
        """The shape of its quantized values."""
        return self.form.padded_rows, self.form.padded_k

    def pointers(self) -> tuple[Any, Any, Any, Any, Any]:
        """Return the stand-ins for it, its quantized values, their scales, and the guard's two or None."""
        form, slots = self.form, self.slots
        return (
            stand_in(slots.x, self.dtype, self.shape, (self.stride, 1)),
            stand_in(slots.data, form.recipe.storage_dtype, self.out_shape),
            stand_in(slots.scale, form.scale_kind, form.stored_scale),
            stand_in(slots.sums, "float32", (guard_floats(form),)) if self.guarded else None,
            stand_in(slots.trip, "float32", (2,)) if self.guarded else None,
        )


def guard_floats(form: Form) -> int:
    """Return how many float32 values the guard's sums of an operand take."""
    from dispatch.kernels.triton_quantize_common import sums_size

    return sums_size(form.padded_rows)


def source(form: Form, dtype: str, slots: Slots, strides: tuple[int, int], *, guarded: bool = False) -> Source:
    """Return an operand, (rows, k) of these strides. Raises ValueError where neither is 1."""
    if 1 not in strides:
        raise ValueError(f"strides {strides}: one must be 1")
    transposed = strides[1] != 1
    return Source(form, dtype, slots, transposed, strides[1] if transposed else strides[0], guarded)


def contiguous(form: Form, dtype: str, slots: Slots, *, transposed: bool) -> Source:
    """Return an operand that is contiguous, (rows, k) or (k, rows)."""
    return Source(form, dtype, slots, transposed, form.rows if transposed else form.k)


BESIDE = {"dependent": True, "launch_pdl": True}
"""Options of a launch beside the kernel before it, for whose end it waits."""


def quantizing(operand: Source, *, dependent: bool = False) -> tuple[list[Step], int]:
    """Return the launches that quantize an operand, and the float32 values of workspace they need.

    dependent: each that does not transpose, and both that transpose long rows, are launched beside the kernel before
    them (sm90 and later).
    """
    from dispatch.kernels import triton_quantize, triton_quantize_blocks, triton_quantize_columns

    form, slots, transposed, stride = operand.form, operand.slots, operand.transposed, operand.stride
    shape, out, kind = operand.shape, operand.out_shape, form.recipe.granularity
    x, *written_to = operand.pointers()
    launches: Sequence[Any]
    floats = 0
    if kind == "tensor":
        launches = triton_quantize.tensor_launches(shape, stride, out, transposed=transposed)
        floats = triton_quantize.TENSOR_PARTIALS
    elif kind == "row" and transposed:
        launches = triton_quantize_columns.columns_launches(shape, stride, out, wide=operand.dtype == "float32")
        floats = triton_quantize_columns.columns_workspace(shape, out)
    elif kind == "row":
        launches = [triton_quantize.rows_launch(shape, stride, out)]
    else:
        block, steps = form.recipe.block(form.rows, form.k), form.scale_strides
        launches = [triton_quantize_blocks.blocks_launch(shape, stride, out, block, steps, transposed=transposed)]
    partial = stand_in(slots.partial, "float32", (max(floats, 1),))
    given = [(x, *written_to)] if len(launches) == 1 else [(x, partial), (x, partial, *written_to)]
    written = [(slots.data, slots.scale)] if len(launches) == 1 else [(slots.partial,), (slots.data, slots.scale)]
    long = kind == "row" and len(launches) == 2
    beside = BESIDE if dependent and (long or not transposed) else {}  # what else transposes was slower so on an H200
    steps_made = [
        Step(launch.kernel, launch.grid, [*pointers, *launch.sizes], launch.options | beside, writes)
        for launch, pointers, writes in zip(launches, given, written, strict=True)
    ]
    return steps_made, floats


def quantizing_both(operands: Sequence[Source], *, dependent: bool = False) -> Step | None:
    """Return what quantizes both operands in one launch, None where that is no gain; dependent: as in `quantizing`."""
    from dispatch.kernels import triton_quantize_many as together

    found = []
    for operand in operands:
        form = operand.form
        if form.recipe.granularity != "row" or form.rows * form.k > TOGETHER_LIMIT:
            return None
        one = together.Source(operand.shape, operand.stride, operand.out_shape, operand.transposed)
        if together.tile_of(one) is None:
            return None
        found.append((one, operand))
    found.sort(key=lambda pair: not pair[0].transposed)  # those take longest
    launch = together.many_launch([one for one, _ in found])
    pointers: list[Any] = [pointer for _, operand in found for pointer in operand.pointers()]
    pointers += [None] * (5 * (together.MAX_OPERANDS - len(found)))
    writes = tuple(slot for _, operand in found for slot in (operand.slots.data, operand.slots.scale))
    beside = BESIDE if dependent and not any(operand.transposed for _, operand in found) else {}
    return Step(launch.kernel, launch.grid, [*pointers, *launch.sizes], launch.options | beside, writes)


class Operands(NamedTuple):
    """Stand-ins for what a product multiplies: a ([count,] m, k), b ([count,] n, k), and their scales if they have."""

    a: Any
    b: Any
    scale_a: Any = None
    scale_b: Any = None


def operands_of(problem: Problem, forms: tuple[Form, Form]) -> Operands:
    """Return the stand-ins for both operands of a scaled problem, laid out in `forms`."""
    a, scale_a = _matrices(forms[0], OF_A, entries(problem, problem.a), problem.m)
    b, scale_b = _matrices(forms[1], OF_B, entries(problem, problem.b), problem.n)
    return Operands(a, b, scale_a, scale_b)


def _matrices(form: Form, slots: Slots, count: int, outer: int) -> tuple[Any, Any]:
    """Return the stand-ins for the quantized values of an operand, ([count,] outer, k), and for their scales."""
    shape = (count, outer, form.padded_k) if count > 1 else (outer, form.padded_k)
    values = stand_in(slots.data, form.recipe.storage_dtype, shape)
    kind = form.recipe.granularity
    if kind in ("tensor", "row"):
        return values, stand_in(slots.scale, "float32", (1,) if kind == "tensor" else shape[:-1])
    if count == 1:
        return values, stand_in(slots.scale, form.scale_kind, form.scale, form.scale_strides)
    # Blocks of one row: those of a batch entry follow the ones before it.
    row, step = form.scale_strides
    extents = (count, outer, form.scale[1])
    return values, stand_in(slots.scale, form.scale_kind, extents, (outer * row, row, step))


class Product(NamedTuple):
    """The product's own launch, and how many float32 partial sums and zeroed int32 counters it needs."""

    step: Step
    floats: int = 0
    counters: int = 0


def multiplying(
    problem: Problem,
    config: names.Config,
    operands: Operands,
    out: str,
    bias: str | None,
    activation: str | None,
    *,
    programs: int,
    dependent: bool = False,
) -> Product:
    """Return the launch that multiplies, adds a bias (n,) of dtype `bias`, and stores activation of that as `out`.

    programs: the GPU's multiprocessors. dependent: a decode kernel too is launched beside the kernel before it, as the
    Hopper kernel always is.
    """
    from dispatch.kernels import gluon_gemm, triton_decode, triton_gemm, triton_mx_gemm

    a, b, scale_a, scale_b = operands
    m, n, count = problem.m, problem.n, math.prod(problem.batch)
    c = stand_in(OUT, out, (count, m, n) if count > 1 else (m, n))
    given = a, b, c, scale_a, scale_b, None if bias is None else stand_in(BIAS, bias, (n,))
    promoted = problem.accumulation == "promoted"
    blocks = problem.recipe is not None and problem.recipe.a.granularity not in ("tensor", "row")
    if config.schedule in names.HOPPER_SCHEDULES:
        if blocks:
            given = a, b, c, stand_in(scale_a.slot, "float32", scale_a.shape[::-1], scale_a.strides[::-1]), *given[4:]
        made = gluon_gemm.gemm_launch(
            *given,
            config=hopper_config(config, a.element_size(), c.element_size()),
            promoted=promoted,
            blocks=blocks,
            activation=activation,
            programs=programs,
        )
        return Product(Step(*made, (OUT,)))
    shared: dict[str, Any] = {"block_m": config.block_m, "block_n": config.block_n, "block_k": config.block_k}
    shared |= {"stages": config.stages, "activation": activation}
    extents = extents_of(problem) if blocks and config.schedule != names.MX else None
    if config.schedule in (names.DECODE, names.DECODE_POINTERS):
        tile = {"block_m": config.block_m, "block_n": config.block_n, "splits": config.splits}
        floats, counters = triton_decode.decode_workspace(m, n, count, **tile)
        space = (stand_in(PARTIALS, "float32", (floats,)), stand_in(COUNTERS, "int32", (counters,)))
        by_tma = config.schedule == names.DECODE
        made = triton_decode.decode_launch(
            *given,
            space if counters else None,
            **shared,
            promoted=promoted,
            block=extents,
            splits=config.splits,
            warps=config.warps,
            tma=by_tma,
            dependent=by_tma and dependent,
        )
        return Product(Step(*made, (OUT, PARTIALS, COUNTERS) if counters else (OUT,)), floats, counters)
    shared |= {"group": 8, "warps": 8 if config.block_m * config.block_n >= 1 << 14 else 4, "programs": programs}
    if config.schedule == names.MX:
        return Product(Step(*triton_mx_gemm.mx_gemm_launch(*given, **shared), (OUT,)))
    shared |= {"epilogue_halves": 2 if config.block_n == 256 else 1, "promoted": promoted, "block": extents}
    launch_of = triton_gemm.gemm_launch if config.schedule == names.PERSISTENT else triton_gemm.gemm_pointer_launch
    return Product(Step(*launch_of(*given, **shared), (OUT,)))


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
