"""PreparedOperand: an array with the forms made of it, each once, as long as it does not change."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from dispatch.frameworks import NAMES, Framework, framework, framework_of
from dispatch.quantization.scaled_array import ScaledArray

_PASSING = frozenset(("traced", "captured"))
"""Modes in which what is made has no values yet."""


@dataclass(slots=True)
class _Form:
    """One form of the array as it was: made under its own lock, so that other forms do not wait for it."""

    state: Hashable
    lock: threading.Lock = field(default_factory=threading.Lock)
    made: bool = False
    value: Any = None
    before_use: Callable[[], None] | None = None


class PreparedOperand:
    """An array and its forms, say quantized ones: made lazily, kept, and made anew when the array has changed.

    A change is noticed by the array's in-place version, which torch counts, and by where its memory lies (`.data =`,
    Module.to()); torch's optimizers say so themselves, since fused ones move no version. Nothing tells of writes
    through `.data` or a NumPy alias, by torch.distributed's broadcast and all_reduce, FSDP's gathers or an optimizer
    replayed in a CUDA graph, or to an inference tensor; NumPy arrays have no version. Call refresh() after those. JAX
    arrays never change. The array is held, so its memory is not reused. Forms may be used on any CUDA stream; a
    captured graph goes on reading the forms that there were when it was captured.

    With JAX it is a pytree of the array alone: what an optimizer, vmap or a checkpoint does to the leaf leaves no form
    behind that is of another array. So an argument of a jitted function is quantized in each call; one that the
    function closes over is quantized once, and so is a ScaledArray, which is quantized when it is made.
    """

    __slots__ = ("__weakref__", "_array", "_forms", "_lock", "_made_at", "_room", "_turned")

    def __init__(self, array: Any) -> None:
        self._hold(_room(array), array)
        if self._room.name == "jax":
            _register_pytree()

    def _hold(self, room: Framework, array: Any) -> None:
        self._room = room
        self._array = array
        self._lock = threading.Lock()
        self._forms: dict[Hashable, _Form] = {}
        self._made_at = room.state(array) if framework_of(array) is room else None
        self._turned: tuple[Hashable, PreparedOperand] | None = None
        _living.add(self)

    @property
    def array(self) -> Any:
        """The array itself."""
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        """The array's shape."""
        return tuple(self._array.shape)

    @property
    def ndim(self) -> int:
        """How many axes the array has."""
        return len(self.shape)

    @property
    def dtype(self) -> str:
        """The name of the array's dtype."""
        return self._room.dtype_name(self._array)

    @property
    def version(self) -> int | None:
        """The array's in-place version, or None where the framework counts none."""
        try:
            return getattr(self._array, "_version", None)
        except RuntimeError:  # an inference tensor's
            return None

    def turned(self) -> PreparedOperand:
        """Return the transposed array, prepared, for a backward pass: no gradient goes through it.

        It is the same object, with its forms, as long as the array does not change.
        """
        state, turned = self._room.state(self._array), self._turned
        if turned is None or turned[0] != state:
            turned = self._turned = state, PreparedOperand(self._room.isolated(lambda: self._array.mT))
        return turned[1]

    def form(self, key: Hashable, make: Callable[[Any], Any]) -> Any:
        """Return `make(array)`, made once for `key` and array version however many threads ask.

        It is made outside any trace, autocast or inference mode around this call, without gradients, so that it
        serves every later one. Where that cannot be, for a tracer and under CUDA graph capture, nothing is kept; nor is
        it when `make` raises. `make` must not ask for the form of its own key.
        """
        state, form = self._room.state(self._array), self._forms.get(key)
        if form is None or form.state != state:
            with self._lock:
                if state != self._made_at:
                    self._forms, self._made_at = {}, state
                if (form := self._forms.get(key)) is None:
                    form = self._forms[key] = _Form(state)
        if not form.made:
            with form.lock:
                if not form.made:
                    if _PASSING.intersection(self._room.modes(self._array, self._array)):
                        return make(self._array)
                    form.value = self._room.isolated(lambda: make(self._array))
                    form.before_use = self._room.before_use(form.value, self._array)
                    form.made = True
        if form.before_use is not None:
            form.before_use()
        return form.value

    def refresh(self) -> None:
        """Drop all forms: the array was written to behind its version's back."""
        with self._lock:
            self._forms, self._turned = {}, None

    def __reduce__(self) -> tuple[Any, ...]:  # a copy makes its own forms
        return PreparedOperand, (self._array,)

    def __repr__(self) -> str:
        if framework_of(self._array) is None:  # a leaf that JAX put in place of the array
            return f"PreparedOperand({self._array!r})"
        return f"PreparedOperand({self._room.name}, {self.dtype}, shape={self.shape}, forms={len(self._forms)})"


_living: WeakSet[PreparedOperand] = WeakSet()


def living() -> list[PreparedOperand]:
    """Return every prepared operand that there is: compiled code finds one by its array."""
    return list(_living)


def prepare(b: Any) -> PreparedOperand:
    """Return `b`, an array, ready to keep its quantized forms from one product to the next.

    For products that meet the same weight again and again. A transposed weight is prepared as it is multiplied,
    `prepare(w.mT)`: in torch a view shares the version of its base. A PreparedOperand is returned as it is. Raises
    TypeError for anything that is no array, and for a ScaledArray, which is quantized already.
    """
    return b if isinstance(b, PreparedOperand) else PreparedOperand(b)


_registering = threading.Lock()
_registered: list[str] = []


def _register_pytree() -> None:
    """Tell JAX, once, what a PreparedOperand is made of; called when the first one of a JAX array is made."""
    with _registering:
        if _registered:
            return
        tree = sys.modules["jax"].tree_util

        def flatten(x: PreparedOperand) -> tuple[Any, str]:
            return (x.array,), x._room.name

        def flatten_with_keys(x: PreparedOperand) -> tuple[Any, str]:
            return ((tree.GetAttrKey("array"), x.array),), x._room.name

        def unflatten(name: str, children: Any) -> PreparedOperand:
            (array,) = children
            made = object.__new__(PreparedOperand)
            # JAX also rebuilds a pytree with leaves that are no arrays, and with those of another framework.
            made._hold(framework_of(array) or framework(name), array)
            return made

        tree.register_pytree_with_keys(PreparedOperand, flatten_with_keys, unflatten, flatten)
        _registered.append("jax")


def _room(array: Any) -> Framework:
    if isinstance(array, ScaledArray):
        raise TypeError("prepare: a ScaledArray is quantized already; multiply by it as it is")
    room = framework_of(array)
    if room is None:
        raise TypeError(f"prepare: {type(array).__name__} is no array; allowed: an array of {', '.join(NAMES)}")
    return room
