"""What the core asks of a framework's room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dispatch._arch import Arch
from dispatch._problem import Operand, Problem

Array = Any
"""An array of the room's framework."""


class Framework(Protocol):
    """One framework: NumPy, torch or JAX."""

    name: str

    @property
    def xp(self) -> Any:
        """The array namespace: abs, amax, where, isfinite, reshape, concatenate ... with axis= and keepdims=."""

    def is_array_type(self, kind: type) -> bool:
        """Return whether `kind` is an array type of this framework, a tracer's included."""

    # What an array is

    def dtype_name(self, array: Array) -> str:
        """Return the ml_dtypes name of the array's dtype: `bfloat16`, `float8_e4m3fn`, `int8` ..."""

    def dtype(self, name: str) -> Any:
        """Return the framework's dtype of that name. Raises TypeError if it has none."""

    def cast(self, array: Array, dtype: str) -> Array:
        """Return the array in the dtype of that name, by the framework's own conversion, on the same device."""

    def device(self, array: Array) -> str:
        """Return where the array lives: `cpu`, `cuda:1` ..., and for a sharded array all of its devices."""

    def arch(self, array: Array) -> Arch:
        """Return the architecture of the array's device."""

    def operand(self, array: Array) -> Operand:
        """Return dtype, batch, layout and alignment of an array of at least two dimensions."""

    def asarray(self, values: NDArray[Any], like: Array) -> Array:
        """Return NumPy values as an array on the device of `like`."""

    def to_numpy(self, array: Array) -> NDArray[Any]:
        """Return the values on the host; a dtype that NumPy lacks comes as its ml_dtypes one."""
