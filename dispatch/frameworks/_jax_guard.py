"""What a JAX program tells the guard as it runs: rounding errors of a sample of the rows that it quantizes.

The program itself finds the largest and the least ratio of each operand (see `dispatch.measuring.watch`). They go to
the host by one unordered `jax.debug.callback` a product, the host judges, and nothing depends on what it says. XLA runs
a callback on the thread that launches the program; on a GPU that copies the numbers and waits for the stream
(jaxlib/gpu/py_client_gpu.cc), and a program with callbacks is launched by JAX's slower way.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dispatch.measuring.watch import SAMPLE, Hear

Array = Any
logger = logging.getLogger("dispatch")
_RUN = 16
"""Columns of an operand (k, rows) that are looked at together: a GPU reads 32 bytes at least."""
_BITS, _FEW = 64, 1 << 16
"""Of an array of more values than _FEW, the bits of at most _BITS along each axis say where the sample begins."""

_ENDLESS = float(np.finfo(np.float32).max)
"""What stands for Inf in a program: with `jax_debug_infs` one of ours would be the user's error."""


class Side(NamedTuple):
    """One operand of a product that the program quantizes.

    hear: from Watch.by_ratios. x: as it was, (..., rows, k) with axis -1 or (..., k, rows) with axis -2. codes: as it
    is quantized, (rows, k) with zeros after them, or, without `block`, what that decodes to, shaped like x. scale: one
    value for each block of `block` = (rows, k) of the codes, (row blocks, k blocks), decoding.
    """

    hear: Hear
    x: Array
    codes: Array
    axis: int
    scale: Array | None = None
    block: tuple[int, int] = (1, 1)


def tell(sides: Sequence[Side | tuple[Any, ...]]) -> None:
    """Put into the program that is being traced what computes the ratios of `sides`, and the callback.

    The sample is every 16th row (of columns runs of 16), from a row on that a hash of the operands' own bits says: on
    other data each row has one chance in 16 to be in it; on the same data the sample is the same.
    """
    if not _reachable():
        return
    given = [Side(*side) for side in sides]
    with jax.named_scope("dispatch_guard"), jax.numpy_dtype_promotion("standard"):
        start = _hash([y for side in given for y in (side.codes, side.scale) if y is not None])
        ratios = jnp.stack([_ratios(side, start) for side in given])
    jax.debug.callback(partial(_heard, [side.hear for side in given]), ratios)


@cache
def _reachable() -> bool:
    """Return whether JAX has a CPU device: it hands what callbacks are given over there, or fails as a program runs."""
    try:
        return bool(jax.local_devices(backend="cpu"))
    except RuntimeError as error:
        logger.warning("dispatch: JAX programs tell the guard nothing: callbacks need a CPU device (%s)", error)
        return False


def _heard(hears: Sequence[Hear], ratios: Array) -> None:
    """Pass on what a program told. An error here would be the user's program's: it is logged."""
    try:
        found = np.where(np.asarray(ratios) < _ENDLESS, ratios, np.inf)
        for hear, (most, least) in zip(hears, found.tolist(), strict=True):
            hear(most, least)
    except Exception:
        logger.exception("dispatch: the guard could not judge what a program told it")


def _hash(arrays: Sequence[Array]) -> Array:
    """Return a number of 32 bits that other values in `arrays` make another one."""
    total = jnp.uint32(0)
    for x in arrays:
        strides = [max(1, -(-size // _BITS)) if x.size > _FEW else 1 for size in x.shape]
        some = jax.lax.slice(x, (0,) * x.ndim, x.shape, strides).reshape(-1)
        bits = jax.lax.bitcast_convert_type(some, f"uint{8 * some.dtype.itemsize}")
        odd = 2 * jnp.arange(some.size, dtype=jnp.uint32) + 1
        total = _mixed(total + (_mixed(bits.astype(jnp.uint32)) * odd).sum(dtype=jnp.uint32))
    return total


def _mixed(bits: Array) -> Array:
    """Return the finalizer of MurmurHash3 (public domain, Austin Appleby): every bit depends on every other."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> shift)) * jnp.uint32(factor)
    return bits ^ (bits >> 16)


def _sample(rows: int, run: int, start: Array) -> Array:
    """Return the indices of every 16th run of rows, from a run on that `start` says; the last may be there twice."""
    run = run if rows >= 2 * SAMPLE * run else 1
    step = max(1, min(SAMPLE, rows // run))
    first = (start % step).astype(jnp.int32)
    runs = first + step * jnp.arange(-(-rows // (run * step)), dtype=jnp.int32)
    return jnp.minimum(run * runs[:, None] + jnp.arange(run, dtype=jnp.int32), rows - 1).reshape(-1)


def _ratios(side: Side, start: Array) -> Array:
    """Return the largest and the least ratio of the sampled rows, float32 (2), _ENDLESS where there is none."""
    x, codes, axis = side.x, side.codes, side.axis
    if side.scale is None:
        codes = _rows(codes, axis)[0].astype(jnp.promote_types(codes.dtype, jnp.float32))
    x, transposed = _rows(x, axis) if side.scale is None or x.ndim > 2 else (x, axis == -2)
    rows, k = x.shape[::-1] if transposed else x.shape
    chosen = _sample(rows, _RUN if transposed else 1, start)
    taken = x.take(chosen, axis=int(transposed), mode="clip")
    values = (taken.T if transposed else taken).astype(jnp.promote_types(x.dtype, jnp.float32))
    decoded = codes.take(chosen, axis=0, mode="clip")[:, :k].astype(values.dtype)
    if side.scale is not None:
        scale = side.scale.take(chosen // side.block[0], axis=0, mode="clip").astype(values.dtype)
        decoded *= scale if scale.shape[1] == 1 else jnp.repeat(scale, side.block[1], axis=1)[:, :k]
    largest = jnp.abs(values).max(1, keepdims=True)
    zero = (largest < jnp.finfo(values.dtype).tiny)[:, 0]  # below it a device may see zeros
    # squares of all that there is would overflow; a compiler may multiply by a reciprocal, and take a tiny one for 0
    unit = jnp.where(zero[:, None], 1, jnp.minimum(largest, jnp.finfo(values.dtype).max / 8))
    squares, errors = jnp.square(values / unit).sum(1), jnp.square((values - decoded) / unit).sum(1)
    wild = ~jnp.isfinite(squares) | ~jnp.isfinite(errors) | (zero & (errors >= jnp.finfo(values.dtype).tiny))
    ratio = errors / jnp.where(zero, 1, squares)
    ratio = jnp.where(ratio < (4 * jnp.finfo(values.dtype).eps) ** 2, 0, ratio)  # exact but for what decoding rounds
    most = jnp.where(wild, _ENDLESS, jnp.where(zero, 0, ratio)).max()
    least = jnp.where(wild | (ratio == 0), _ENDLESS, ratio).min()
    return jnp.minimum(jnp.stack([most, least]), _ENDLESS).astype(jnp.float32)


def _rows(x: Array, axis: int) -> tuple[Array, bool]:
    """Return (..., rows, k) or (..., k, rows) as (rows, k), and False: it is not transposed."""
    x = x if axis == -1 else x.swapaxes(-1, -2)
    return x.reshape(-1, x.shape[-1]), False
