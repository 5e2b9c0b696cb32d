"""Facts as plain values for JSON, and back: dataclasses by their fields, recipes by their text."""

from __future__ import annotations

import math
import types
import typing
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any, TypeVar

from dispatch._recipe import RecipePair, ScalingRecipe

T = TypeVar("T")
_TEXTS = (RecipePair, ScalingRecipe)


def to_plain(value: Any) -> Any:
    """Return `value` as dicts, lists, strings and numbers; Inf and NaN, which JSON lacks, as strings."""
    if isinstance(value, _TEXTS):
        return str(value)
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def from_plain(kind: type[T], data: Any) -> T:
    """Return the `kind`, a dataclass of facts, that `to_plain` wrote. Raises KeyError, TypeError or ValueError."""
    built: T = _built(kind, data)
    return built


def _built(kind: Any, data: Any) -> Any:
    if kind in _TEXTS:
        return kind.parse(data)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{field.name: _built(hints[field.name], data[field.name]) for field in fields(kind)})
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # always X | None here
        return None if data is None else _built(next(x for x in arguments if x is not type(None)), data)
    if origin is tuple:
        if not isinstance(data, list):
            raise TypeError(f"{data!r} is no list")
        return tuple(_built(arguments[0], item) for item in data)
    if not isinstance(data, (int, float, str) if kind is float else kind):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    try:
        return float(data) if kind is float else data
    except OverflowError:
        raise ValueError(f"{data} is beyond every float") from None


@cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)
