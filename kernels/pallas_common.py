"""What the Pallas kernels share: activations, padding, and what differs between JAX's versions."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "silu")
BLOCK = 128
"""Values of k, and rows of B, that one block scale is for."""
STORED = 128
"""Bytes of a row of C that are stored at once."""

_LOAD_TAKES_INDEX = inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
OLD_INTERPRETER = not hasattr(plgpu, "InterpretGPUParams")
"""Whether it knows neither layouts, transposed references, clusters nor tensor memory, as before JAX 0.11."""


def activated(x: Any, activation: str | None) -> Any:
    """Return the activation of float32 values; gelu is the one by erf."""
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "gelu":
        return 0.5 * x * (1.0 + lax.erf(x * 0.7071067811865476))
    if activation == "gelu_tanh":
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + jnp.exp(-2.0 * inner))
    if activation == "silu":
        return x / (1.0 + jnp.exp(-x))
    return x


def check(
    a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, *, blocks: bool, activation: str | None, dtypes: Any
) -> tuple[int, int, int]:
    """Return m, n and k of A (m, k) by B (n, k). Raise ValueError for what is no product, or not of these dtypes."""
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1]:
        raise ValueError(f"a {a.shape} and b {b.shape} are not (m, k) and (n, k); b is given K-major")
    if str(a.dtype) not in dtypes or str(b.dtype) not in dtypes or a.dtype.itemsize != b.dtype.itemsize:
        raise ValueError(f"cannot multiply {a.dtype} by {b.dtype}: both need to be of {dtypes}, of one size")
    (m, k), n = a.shape, b.shape[0]
    if (scale_a is None) != (scale_b is None) or (blocks and scale_a is None):
        raise ValueError("scale_a and scale_b come together, and block scales are always given")
    if scale_a is not None:
        steps = -(-k // BLOCK)
        if blocks:
            allowed = f"{(m, steps)} and {(-(-n // BLOCK), steps)}"
            fits = (scale_a.shape, scale_b.shape) == ((m, steps), (-(-n // BLOCK), steps))
        else:
            allowed = f"({m},) or longer, and ({n},) or longer, or (1,),"
            fits = all(x.ndim == 1 and (x.size == 1 or x.size >= rows) for x, rows in ((scale_a, m), (scale_b, n)))
        if not fits:
            raise ValueError(f"scales {scale_a.shape} and {scale_b.shape}: {allowed} are needed")
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias {bias.shape} is not ({n},)")
    if activation is not None and activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} is none of {', '.join(ACTIVATIONS)}")
    return m, n, k


def up(size: int, multiple: int) -> int:
    """Return the least positive multiple that is no less than size."""
    return max(1, -(-size // multiple)) * multiple


def columns(n: int, out_dtype: Any) -> int:
    """Return how many columns of C there are in memory: whole tiles of 64, and more than one of what is stored at once.

    Mosaic drops a dimension of a single tile with its index: what lies beyond that tile would be written to it.
    """
    return max(up(n, 64), 2 * STORED // itemsize(out_dtype))


def padded(x: Any, *shape: int) -> Any:
    """Return x with zeros appended up to the shape; x itself where nothing is to be appended."""
    gaps = [(0, new - old) for new, old in zip(shape, x.shape, strict=True)]
    return jnp.pad(x, gaps) if any(gap for _, gap in gaps) else x


def vector(x: Any, length: int) -> Any:
    """Return float32 values, one each for `length` rows or columns at least, or the one that is for all of them."""
    if x is None or x.shape == (1,) or x.shape[0] >= length:
        return x
    return padded(x, length)


def narrow(x: Any | None) -> Any:
    """Return scales or a bias in float32."""
    return None if x is None else x.astype(jnp.float32)


def traced(function: Any, *arrays: Any, **static: Any) -> Any:
    """Return a kernel's result, traced with indices of 32 bits: with jax_enable_x64 Pallas would mix them with 64."""
    with jax.enable_x64(False):
        return function(*arrays, **static)


def load(ref: Any, layout: Any) -> Any:
    """Return the values of a reference to few values, in registers of the layout."""
    index = {"idx": ()} if _LOAD_TAKES_INDEX else {}
    return plgpu.load(ref, layout=layout, optimized=False, **index)


def transposed(ref: Any) -> Any:
    """Return a view of a two-dimensional reference with its dimensions swapped."""
    return ref.transpose((1, 0))


def interpreter(interpret: Any) -> Any:
    """Return what `interpret=` of a Mosaic GPU kernel takes: True becomes the default parameters, False None."""
    if interpret is True:
        home = plgpu
        if OLD_INTERPRETER:
            home = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
        return home.InterpretGPUParams()
    return interpret or None


def itemsize(dtype: Any) -> int:
    """Return the bytes of one value."""
    return int(jax.numpy.dtype(dtype).itemsize)
