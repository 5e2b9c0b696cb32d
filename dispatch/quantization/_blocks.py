"""Which values of an array share a scale: the shape of the scales, their maxima, the way back to the values."""

from __future__ import annotations

from typing import Any

from dispatch._recipe import ScalingRecipe

Extents = tuple[int | None, ...]
"""How many neighbours along each axis share a scale; None where the whole axis does."""


def block_extents(ndim: int, recipe: ScalingRecipe, axis: int) -> Extents:
    """Return the extents of one scale's values in an array of `ndim` axes, contracted along `axis` (-1 or -2)."""
    if recipe.granularity == "tensor":
        return (None,) * ndim
    across, along = (1, None) if recipe.granularity == "row" else recipe.block(1, 1)
    last = (across, along) if axis == -1 else (along, across)
    return ((1,) * ndim + last)[-ndim:]


def scale_shape(shape: tuple[int, ...], extents: Extents) -> tuple[int, ...]:
    """Return the shape of the scales of an array of `shape`; a partial last block has one too."""
    return tuple(1 if extent is None else -(-size // extent) for size, extent in zip(shape, extents, strict=True))


def block_amax(xp: Any, magnitudes: Any, extents: Extents) -> Any:
    """Return the largest of the non-negative `magnitudes` of each scale, in the shape of the scales; 0 of none."""
    for i, extent in enumerate(extents):
        before, size, after = (*magnitudes.shape[:i],), magnitudes.shape[i], (*magnitudes.shape[i + 1 :],)
        if extent is None:
            reduce = xp.amax if size else xp.sum
            magnitudes = reduce(magnitudes, axis=i, keepdims=True)
        elif extent > 1:
            count, rest = divmod(size, extent)
            full, partial = (magnitudes[_along(i, part)] for part in (slice(size - rest), slice(size - rest, None)))
            parts = [xp.amax(xp.reshape(full, (*before, count, extent, *after)), axis=i + 1)]
            if rest:
                parts.append(xp.amax(partial, axis=i, keepdims=True))
            magnitudes = xp.concatenate(parts, axis=i)
    return magnitudes


def spread(xp: Any, scale: Any, shape: tuple[int, ...], extents: Extents) -> Any:
    """Return the scales repeated over the values that share them, in a shape that broadcasts to `shape`."""
    for i, extent in enumerate(extents):
        before, count, after = (*scale.shape[:i],), scale.shape[i], (*scale.shape[i + 1 :],)
        if extent is None or extent == 1 or count == 1:
            continue
        blocks = xp.broadcast_to(xp.reshape(scale, (*before, count, 1, *after)), (*before, count, extent, *after))
        scale = xp.reshape(blocks, (*before, count * extent, *after))[_along(i, slice(shape[i]))]
    return scale


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    return (slice(None),) * axis + (part,)
