"""One room a framework: what an array is, its native matmul, how it traces, times and agrees.

A room is imported when the first of its arrays arrives; nothing here imports a framework.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Any, Final

from dispatch.frameworks._base import Framework
from dispatch.frameworks._driver import nvidia_driver

NAMES: Final = ("numpy", "torch", "jax")
_ROOTS: Final = {"numpy": "numpy", "torch": "torch", "jax": "jax", "jaxlib": "jax"}
_rooms: dict[str, Framework] = {}
_by_type: dict[type, Framework | None] = {}


def framework(name: str) -> Framework:
    """Return the room of the framework `name`. Raises ValueError for another name, ImportError if it is missing."""
    if name not in NAMES:
        raise ValueError(f"framework {name!r} is unknown; allowed: {', '.join(NAMES)}")
    if name not in _rooms:
        _rooms[name] = importlib.import_module(f"dispatch.frameworks.{name}").ROOM
    return _rooms[name]


def installed() -> tuple[str, ...]:
    """Return the names of the frameworks that can be imported here; imports none."""
    return tuple(name for name in NAMES if sys.modules.get(name) or _spec(name))


def machine() -> dict[str, Any]:
    """Return this machine: `archs` by installed framework, imported for it, and the NVIDIA `driver` or None.

    `broken`: what an installed framework raised instead, by its name.
    """
    archs: dict[str, list[str]] = {}
    broken: dict[str, str] = {}
    for name in installed():
        try:
            archs[name] = [str(arch) for arch in framework(name).archs()]
        except Exception as error:  # an import may raise anything
            broken[name] = f"{type(error).__name__}: {error}"
    return {"archs": archs, "broken": broken, "driver": nvidia_driver()}


def framework_of(array: Any) -> Framework | None:
    """Return the room that `array` belongs to, or None if it is no framework's array."""
    kind = type(array)
    if kind not in _by_type:
        _by_type[kind] = _find(kind)
    return _by_type[kind]


def _spec(name: str) -> bool:
    if name in sys.modules:  # None there: blocked on purpose
        return False
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _find(kind: type) -> Framework | None:
    roots = dict.fromkeys(_ROOTS.get(base.__module__.partition(".")[0]) for base in kind.__mro__)
    for name in roots:
        if name is not None and framework(name).is_array_type(kind):
            return framework(name)
    return None


__all__ = ["NAMES", "Framework", "framework", "framework_of", "installed", "machine"]
