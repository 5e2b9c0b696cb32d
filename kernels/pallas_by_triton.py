"""Pallas kernels that JAX lowers by Triton, as an operation of its own in the caller's program.

JAX 0.11 warns of that lowering each time: it is to go. The caller of a product can do nothing about it, and where
warnings are errors the program would not compile; so the kernels are lowered with that one warning off.
"""

# JAX is not seen by mypy: its decorators have no types.
# mypy: disable-error-code="untyped-decorator"

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir

_kernels = Primitive("pallas_kernels_by_triton")
_kernels.multiple_results = True
_filters = threading.Lock()
"""The list of warning filters is the process's: two threads must not restore it across one another."""


@contextmanager
def _quietly() -> Iterator[None]:
    with _filters, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
        yield


def by_triton(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return function(*arrays), any pytree of arrays, whose kernels are lowered without the warning.

    It can be jitted and mapped; it has no derivative.
    """
    closed, shapes = jax.make_jaxpr(function, return_shape=True)(*arrays)
    leaves = _kernels.bind(*arrays, jaxpr=closed)
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


@_kernels.def_abstract_eval
def _(*avals: Any, jaxpr: Any) -> Any:
    return jaxpr.out_avals


@_kernels.def_impl
def _(*arrays: Any, jaxpr: Any) -> Any:
    with _quietly():
        return jax.jit(jaxpr_as_fun(jaxpr)).lower(*arrays).compile()(*arrays)


def _lower(ctx: Any, *values: Any, jaxpr: Any) -> Any:
    with _quietly():
        return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *values)


def _mapped(arrays: Sequence[Any], dims: Sequence[Any], *, jaxpr: Any) -> Any:
    axes = [dim if isinstance(dim, int) else None for dim in dims]
    made = by_triton(jax.vmap(jaxpr_as_fun(jaxpr), axes), *arrays)
    return made, [0] * len(made)


mlir.register_lowering(_kernels, _lower)
batching.primitive_batchers[_kernels] = _mapped
