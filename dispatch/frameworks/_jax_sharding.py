"""Products that XLA's partitioner spreads over devices: each device's part is a problem of its own, decided for it.

The partitioner asks while XLA compiles. For GPUs XLA compiles one program at a time, so nothing can be measured then:
what is not known takes the own product, and waits for `measure_parts`.
"""

from __future__ import annotations

import logging
import math
import string
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec, use_abstract_mesh

Array = Any
logger = logging.getLogger("dispatch")
_asked: ContextVar[list[str] | None] = ContextVar("dispatch_asked", default=None)
_unmeasured: list[Callable[[], Any]] = []
MOST_TURNS = 4
NO_MESH = AbstractMesh((), ())
"""What one device's part is traced under: types of the mesh that is set would constrain it to what it is no part of."""
HERE, SEVERAL, ELSEWHERE = "here", "several", "elsewhere"
Spec = tuple[Any, ...]
Scales = tuple[Sequence[int | None] | None, Sequence[int | None] | None]
"""For each operand with scales, how many values along each of its axes share one (None: all of them)."""
for _dtype in (np.float32, np.float64):
    jax.numpy.finfo(_dtype)  # XLA's threads flush subnormals, and NumPy warns of that where it first looks at a dtype


def several_devices(*arrays: Array) -> bool:
    """Return whether an array is spread over several devices."""
    return any(len(array.sharding.device_set) > 1 for array in arrays)


def needs_devices(*primitives: Any) -> None:
    """Let JAX lower programs with these primitives only once it knows the devices."""
    try:
        from jax._src.dispatch import prim_requires_devices_during_lowering
    except ImportError:  # then `place` finds no devices, and says ELSEWHERE
        return
    prim_requires_devices_during_lowering.update(primitives)


def default_device() -> Any:
    """Return the device that JAX puts things on; the setting may also name a platform."""
    given = jax.config.jax_default_device
    return jax.local_devices(backend=given)[0] if given is None or isinstance(given, str) else given


def place(ctx: Any) -> str:
    """Return where a program being lowered will run.

    HERE: on one device like the default one, or each device by itself in a shard_map. SEVERAL: on a mesh, by the
    partitioner. ELSEWHERE: exported, for another platform, or in a way that leaves nothing to choose.
    """
    module = ctx.module_context
    default = default_device()
    platform = "cuda" if default.platform == "gpu" else default.platform
    if tuple(ctx.platforms or module.platforms) != (platform,) or module.lowering_parameters.for_export:
        return ELSEWHERE
    axes = module.axis_context
    if hasattr(axes, "manual_axes"):
        return HERE if set(axes.manual_axes) == set(axes.mesh.axis_names) else ELSEWHERE
    count = getattr(axes, "num_devices", None)
    if count == 1:
        return HERE
    known = getattr(axes, "device_assignment", None) and getattr(axes, "abstract_mesh", None)
    return SEVERAL if known and jax.config.jax_use_shardy_partitioner else ELSEWHERE


def partitioned(
    own: Callable[..., Array],
    multiply: Callable[..., Array],
    dimension_numbers: Any,
    ranks: Sequence[int],
    scales: Scales = (None, None),
) -> Callable[..., Array]:
    """Return the product of two arrays spread over a mesh, as jax.lax.dot_general spreads it.

    own: the framework's product, for the result's shape. multiply: the product of one device's parts. Where the
    contracted dimensions are spread, the parts' products are summed over those axes of the mesh. scales: of a and of b;
    the scales themselves are the operands that follow.
    """
    of_a, of_b, of_out, contracted = _factors(dimension_numbers, ranks)
    x64 = bool(jax.config.jax_enable_x64)

    def partition(mesh: Any, operands: Any, result: Any) -> Any:
        specs = (of_a, operands[0].sharding.spec), (of_b, operands[1].sharding.spec)
        axes, summed = _spread_out(mesh, specs, contracted, [x.shape for x in operands], scales)

        def part(*parts: Array) -> Array:
            with use_abstract_mesh(NO_MESH), jax.enable_x64(x64), _noting(multiply, parts, x64):
                out = multiply(*parts)
                return jax.lax.psum(out, summed) if summed else out

        spec_a, spec_b, spec_out = (_spec(factors, axes) for factors in (of_a, of_b, of_out))
        given = (spec_a, spec_b, *_of_scales((spec_a, spec_b), scales))
        shardings = [NamedSharding(mesh, spec) for spec in (*given, spec_out)]
        return mesh, part, shardings[-1], tuple(shardings[:-1])

    made = custom_partitioning(own)
    # Scales are spread as `part` needs them, whatever they were spread like.
    of_scales = [[f"{side}{i}" for i in range(len(x))] for side, x in zip("st", scales, strict=True) if x is not None]
    given = [of_a, of_b, *of_scales]
    rule = f"{', '.join(' '.join(factors) for factors in given)} -> {' '.join(of_out)}"
    made.def_partition(partition=partition, sharding_rule=rule, reduction_factors=tuple(contracted))
    called: Callable[..., Array] = made
    return called


@contextmanager
def _noting(multiply: Callable[..., Array], parts: Sequence[Array], x64: bool) -> Iterator[None]:
    """Let nothing be measured, where XLA compiles for GPUs, but keep note of what would have been."""
    if not one_at_a_time():
        yield
        return
    token = _asked.set([])
    try:
        yield
        asked = _asked.get()
    finally:
        _asked.reset(token)
    if asked:
        if not _unmeasured:
            logger.warning(
                "dispatch: products of a mesh of GPUs are not known yet and take JAX's own product: nothing can be "
                "measured while XLA compiles. dispatch.integrations.jax.measure_parts() measures them, and lets JAX "
                "compile anew"
            )
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in parts]
        _unmeasured.append(partial(_decide, multiply, shapes, x64))


def one_at_a_time() -> bool:
    """Return whether XLA compiles no program while it compiles another: as for GPUs."""
    return bool(jax.default_backend() == "gpu")


def compiling() -> str | None:
    """Return why nothing can be measured now, or None; what asks is noted."""
    asked = _asked.get()
    if asked is None:
        return None
    asked.append("a part")
    return "XLA is compiling the program"


def _decide(multiply: Callable[..., Array], shapes: Sequence[Any], x64: bool) -> None:
    with jax.enable_x64(x64):
        jax.eval_shape(lambda *parts: multiply(*parts), *shapes)  # a function of its own: JAX knows `multiply` already


def measure_parts() -> int:
    """Decide what was asked while XLA compiled, and let JAX compile anew. Return for how many products.

    What takes longer to compile than the policy's compile_ms is measured in later calls. Nothing is kept before that,
    and XLA's next question would find nothing: so the later calls are made here, MOST_TURNS at most.
    """
    from dispatch import stats

    waiting = _unmeasured[:]
    del _unmeasured[: len(waiting)]
    for decide in waiting:
        for _ in range(MOST_TURNS):
            before = stats()["measured"]
            decide()
            if stats()["measured"] == before:  # known
                break
    if waiting:
        jax.clear_caches()
    return len(waiting)


def explicit(avals: Sequence[Any]) -> bool:
    """Return whether the types of the operands say how they are spread."""
    meshes = [aval.sharding.mesh for aval in avals]
    return all(not mesh.empty and set(mesh.axis_types) == {AxisType.Explicit} for mesh in meshes)


def mapped(
    multiply: Callable[..., Array],
    dimension_numbers: Any,
    avals: Sequence[Any],
    out: Any,
    scales: Scales = (None, None),
) -> Callable[..., Array]:
    """Return the product of two arrays whose types say how they are spread, as a shard_map of `multiply`.

    avals: the operands' types; out: the result's. An axis of the mesh that both ask for differently is the first's.
    scales: as in `partitioned`.
    """
    of_a, of_b, of_out, contracted = _factors(dimension_numbers, [aval.ndim for aval in avals[:2]])
    specs = (of_a, avals[0].sharding.spec), (of_b, avals[1].sharding.spec)
    axes, summed = _spread_out(out.sharding.mesh, specs, contracted, [x.shape for x in avals], scales)
    spec_a, spec_b, spec_out = (_spec(factors, axes) for factors in (of_a, of_b, of_out))
    given = (spec_a, spec_b, *_of_scales((spec_a, spec_b), scales))

    def part(*parts: Array) -> Array:
        product = multiply(*parts)
        return jax.lax.psum(product, summed) if summed else product

    spread = jax.shard_map(part, mesh=out.sharding.mesh, in_specs=given, out_specs=spec_out, check_vma=False)

    def whole(*operands: Array) -> Array:
        product = spread(*map(jax.sharding.reshard, operands, given))
        return jax.sharding.reshard(product, out.sharding.spec)

    return whole


def _spread_out(
    mesh: Any,
    specs: Sequence[tuple[list[str], Any]],
    contracted: list[str],
    shapes: Sequence[tuple[int, ...]],
    scales: Scales,
) -> tuple[dict[str, Spec], Spec]:
    """Return the axes of the mesh for each factor, and those that the parts' products are summed over.

    A factor along which both operands are spread differently is not spread, nor one whose parts would divide the values
    of one scale.
    """
    whole = {factor for factor in contracted if not _alike(factor, *specs)}
    axes = _axes_of_factors(specs, whole)
    for (factors, _), shape, extents in zip(specs, shapes, scales, strict=False):
        for factor, size, extent in zip(factors, shape, extents or (), strict=False):
            count = math.prod(mesh.shape[name] for name in axes.get(factor, ()))
            if extent is not None and size % (count * extent) and count > 1:
                whole.add(factor)
    axes = _axes_of_factors(specs, whole)
    return axes, tuple(name for factor in contracted for name in axes.get(factor, ()))


def _of_scales(specs: Sequence[Any], scales: Scales) -> list[PartitionSpec]:
    """Return how the scales of operands are spread, which are spread by `specs`; none for one without scales."""
    return [
        PartitionSpec(*(None if extent is None else axes for axes, extent in zip(spec, extents, strict=True)))
        for spec, extents in zip(specs, scales, strict=True)
        if extents is not None
    ]


def _factors(dimension_numbers: Any, ranks: Sequence[int]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Return a name for each dimension of a, b and the result; the same where they are the same, and the contracted."""
    (contract_a, contract_b), (batch_a, batch_b) = dimension_numbers
    names = iter(string.ascii_lowercase)
    of_a, of_b = [next(names) for _ in range(ranks[0])], [""] * ranks[1]
    for one, other in (*zip(contract_a, contract_b, strict=True), *zip(batch_a, batch_b, strict=True)):
        of_b[other] = of_a[one]
    of_b = [name or next(names) for name in of_b]
    rows = [of_a[dim] for dim in range(ranks[0]) if dim not in (*contract_a, *batch_a)]
    columns = [of_b[dim] for dim in range(ranks[1]) if dim not in (*contract_b, *batch_b)]
    return of_a, of_b, [*(of_a[dim] for dim in batch_a), *rows, *columns], [of_a[dim] for dim in contract_a]


def _alike(factor: str, *operands: tuple[list[str], Any]) -> bool:
    """Return whether every operand is spread alike along a factor."""
    return len({_entry(factors, spec, factor) for factors, spec in operands}) == 1


def _entry(factors: list[str], spec: Any, factor: str) -> Spec:
    entry = dict(zip(factors, spec, strict=False)).get(factor)
    return entry if isinstance(entry, tuple) else () if entry is None else (entry,)


def _axes_of_factors(operands: Sequence[tuple[list[str], Any]], whole: set[str]) -> dict[str, Spec]:
    """Return the axes of the mesh for each factor but those in `whole`; an axis that two ask for is the first one's."""
    axes: dict[str, Spec] = {}
    taken: set[Any] = set()
    for factors, spec in operands:
        for factor in factors:
            free = tuple(name for name in _entry(factors, spec, factor) if name not in taken)
            if free and factor not in axes and factor not in whole:
                axes[factor] = free
                taken.update(free)
    return axes


def _spec(factors: list[str], axes: dict[str, Spec]) -> PartitionSpec:
    return PartitionSpec(*(axes.get(factor) for factor in factors))
