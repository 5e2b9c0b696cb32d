"""What a call asks for beside its operands, and what a process knows it by: the key of its plan."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from dispatch.frameworks import Framework
from dispatch.frameworks.operands import array_of
from dispatch.frameworks.request import Request
from dispatch.policies.policy import Policy, _in_force, current_policy, load_policy
from dispatch.quantization import PreparedOperand, ScaledArray


@dataclass(frozen=True, slots=True, eq=False)
class Options:
    """What a choice depends on beside the problem. named: the policy came with the call."""

    policy: Policy
    backend: str | None = None
    scope: str | None = None
    named: bool = False

    def __post_init__(self) -> None:
        """Raise TypeError for a scope that is no string."""
        if not (self.scope is None or isinstance(self.scope, str)):
            raise TypeError(f"scope is {self.scope!r}; it has to be a string, such as 'layers.3.mlp.up'")


Given = Policy | str | os.PathLike[str] | None
"""A policy as a caller gives it: by itself, by name or path, or the one in force."""
KEYS: dict[type, Callable[[Any, Any, Hashable], Hashable | None]] = {}
ROOMS: dict[type, Framework] = {}
"""The room of each type of array that a known call had, and its method that makes keys."""
_active = _in_force.get
_DRESSED = (ScaledArray, PreparedOperand)


def policy_of(given: Given) -> Policy:
    """Return the policy that a caller gives. Raises PolicyError, and TypeError for what names none."""
    if given is None:
        return current_policy()
    return given if isinstance(given, Policy) else load_policy(given)


def recognize(call: Request) -> None:
    """Let later calls with arrays of these types be looked up at once."""
    for kind in {type(array_of(call.a)), type(call.bias)} - {type(None)}:
        KEYS[kind], ROOMS[kind] = call.room.key, call.room


def call_key(
    room: Framework,
    a: Any,
    b: Any,
    bias: Any,
    activation: str | None,
    out_dtype: Any,
    policy: Given,
    backend: str | None,
    scope: str | None,
    op: str | None = None,
) -> Hashable | None:
    """Return the key of a call, or None where something else interprets it.

    Of two arrays, or an array and a prepared operand, and nothing else it is what matmul itself makes.
    """
    policy = policy_of(policy)
    first, second = type(a) in _DRESSED, type(b) in _DRESSED
    own = room.key(array_of(a) if first else a, array_of(b) if second else b, _active(), bias)
    if own is None:
        return None
    if bias is activation is out_dtype is backend is scope is op is None and policy is current_policy() and not first:
        if not second:
            return own
        if type(b) is PreparedOperand:
            return room.key(a, b.array, (_active(),))
    if not (first or second):
        return own, activation, out_dtype, op, backend, scope, policy
    facts = tuple(_facts(room, x) if one else False for x, one in ((a, first), (b, second)))
    return own, facts, activation, out_dtype, op, backend, scope, policy


def _facts(room: Framework, x: Any) -> Hashable:
    if isinstance(x, ScaledArray):
        return x.recipe, x.axis, room.effective(x.data, x.dtype), room.modes(x.scale)
    return True
