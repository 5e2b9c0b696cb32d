"""ScaledArray: FP8 values with the scales that decode them."""

from __future__ import annotations

import dataclasses
import sys
import threading
from dataclasses import dataclass
from typing import Any

import numpy as np

from dispatch._recipe import ScalingRecipe
from dispatch.frameworks import NAMES, Framework, framework_of
from dispatch.quantization._blocks import block_extents, scale_shape, spread

SCALE_STORAGE = {"float32": "float32", "e8m0": "float8_e8m0fnu"}
DECODED_DTYPES = ("float64", "float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True, eq=False)
class ScaledArray:
    """One quantized operand: value = data * scale, blockwise.

    data: (..., rows, columns) or (k,) in the recipe's storage dtype. scale: the decoding multipliers, float32 or
    e8m0 as the recipe says, on the same device: one for each block of the last two axes, a partial last block
    included, or (1,) * ndim for `tensor`. axis: the contraction axis, -1 for an operand a (..., m, k) and -2 for
    an operand b (..., k, n); the columns of a block run along it. dtype: what it decodes to.

    With JAX it is a pytree of data and scale. A `tensor` scale has no batch: to map over one, quantize inside vmap.
    Raises TypeError for a wrong dtype or framework, ValueError for a wrong shape, axis or device.
    """

    data: Any
    scale: Any
    recipe: ScalingRecipe
    axis: int = -1
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        if not isinstance(self.recipe, ScalingRecipe):
            raise TypeError(f"ScaledArray: recipe {self.recipe!r} is no ScalingRecipe; use ScalingRecipe.parse")
        _check_decoded(self.dtype)
        room = _common_room(self.data, self.scale)
        _check_dtype(room, "data", self.data, self.recipe.storage_dtype, self.recipe)
        _check_dtype(room, "scale", self.scale, SCALE_STORAGE[self.recipe.scale_dtype], self.recipe)
        check_axis(self.ndim, self.axis)
        needed = scale_shape(self.shape, block_extents(self.ndim, self.recipe, self.axis))
        if (found := tuple(self.scale.shape)) != needed:
            raise ValueError(
                f"ScaledArray: scale has shape {found}; data of shape {self.shape} with {self.recipe} along "
                f"axis {self.axis} needs {needed}"
            )
        if room.name == "jax":
            _register_pytree()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the values."""
        return tuple(self.data.shape)

    @property
    def ndim(self) -> int:
        """How many axes the values have."""
        return len(self.shape)

    @property
    def mT(self) -> ScaledArray:
        """The last two axes swapped, of data, scale and the contraction axis alike: no value is quantized again."""
        if self.ndim < 2:
            raise ValueError(f"ScaledArray.mT: shape {self.shape} has no two axes to swap")
        return _unchecked(self.data.mT, self.scale.mT, self.recipe, -3 - self.axis, self.dtype)

    @property
    def T(self) -> ScaledArray:
        """The transpose of a 2-D array; `quantize(w, "e4m3:row").T` of an (n, k) weight is an operand b."""
        if self.ndim != 2:
            raise ValueError(f"ScaledArray.T: shape {self.shape} is not 2-D; mT swaps the last two axes")
        return self.mT

    @np.errstate(all="ignore")
    def dequantize(self, dtype: str | None = None) -> Any:
        """Return the values in `dtype` (default: self.dtype): float64, float32, float16 or bfloat16.

        Multiplied in float32 (in float64 for float64) and cast once; a product that `dtype` cannot hold becomes Inf.
        """
        dtype = self.dtype if dtype is None else dtype
        _check_decoded(dtype)
        room = _common_room(self.data, self.scale)
        wide = "float64" if dtype == "float64" else "float32"
        extents = block_extents(self.ndim, self.recipe, self.axis)
        scale = spread(room.xp, room.cast(self.scale, wide), self.shape, extents)
        return room.cast(room.cast(self.data, wide) * scale, dtype)

    def __repr__(self) -> str:
        scale = tuple(self.scale.shape)
        return f"ScaledArray({self.recipe}, shape={self.shape}, scale={scale}, axis={self.axis}, dtype={self.dtype})"


def check_axis(ndim: int, axis: int) -> None:
    """Raise ValueError unless `axis`, -1 or -2, is an axis of an array of `ndim` of them."""
    if ndim < 1:
        raise ValueError("a 0-D array has no contraction axis; at least one axis is needed")
    allowed = (-1, -2)[:ndim]
    if axis not in allowed:
        raise ValueError(
            f"axis {axis} cannot be the contraction axis of a {ndim}-D array; allowed: "
            f"{', '.join(map(str, allowed))} (-1 for an operand a, -2 for an operand b)"
        )


def _check_decoded(dtype: str) -> None:
    if dtype not in DECODED_DTYPES:
        raise ValueError(f"ScaledArray: cannot decode to {dtype!r}; allowed: {', '.join(DECODED_DTYPES)}")


def _check_dtype(room: Framework, field: str, array: Any, needed: str, recipe: ScalingRecipe) -> None:
    if (found := room.dtype_name(array)) != needed:
        raise TypeError(f"ScaledArray: {field} is {found}; {recipe} needs {needed}")


def _common_room(data: Any, scale: Any) -> Framework:
    rooms = []
    for field, array in (("data", data), ("scale", scale)):
        if (room := framework_of(array)) is None:
            raise TypeError(f"ScaledArray: {field} is a {type(array).__name__}; needs an array of {', '.join(NAMES)}")
        rooms.append(room)
    room = rooms[0]
    if rooms[1] is not room:
        raise TypeError(f"ScaledArray: data is of {room.name} and scale of {rooms[1].name}; both must be of one")
    if "traced" in room.modes(data, scale):  # a tracer is on no device yet
        return room
    if (x := room.device(data)) != (y := room.device(scale)):
        raise ValueError(f"ScaledArray: data is on {x} and scale on {y}; move them to one device")
    return room


def _unchecked(*values: Any) -> ScaledArray:
    """Return the ScaledArray of these fields as they are: JAX also rebuilds a pytree with leaves that are no arrays."""
    made = object.__new__(ScaledArray)
    for field, value in zip(dataclasses.fields(ScaledArray), values, strict=True):
        object.__setattr__(made, field.name, value)
    return made


_registering = threading.Lock()
_registered: list[str] = []


def _register_pytree() -> None:
    """Tell JAX, once, what a ScaledArray is made of; called when the first one of JAX arrays is made."""
    if _registered:
        return
    with _registering:
        if _registered:
            return
        tree = sys.modules["jax"].tree_util

        def flatten(x: ScaledArray) -> tuple[Any, Any]:
            return (x.data, x.scale), (x.recipe, x.axis, x.dtype)

        def flatten_with_keys(x: ScaledArray) -> tuple[Any, Any]:
            return ((tree.GetAttrKey("data"), x.data), (tree.GetAttrKey("scale"), x.scale)), flatten(x)[1]

        def unflatten(facts: Any, children: Any) -> Any:
            return _unchecked(*children, *facts)

        tree.register_pytree_with_keys(ScaledArray, flatten_with_keys, unflatten, flatten)
        _registered.append("jax")
