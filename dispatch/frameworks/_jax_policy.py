"""What JAX's trace context holds of ours: a function is traced again under another policy, and when choices change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from dispatch.policies import policy as policies
from dispatch.remembering.known import retracing


def join() -> None:
    """Let every use_policy enter JAX's trace context; without jax.make_user_context, traces keep their first policy."""
    make = getattr(jax, "make_user_context", None)
    if make is not None:
        policies._policy_contexts.append(_context(make(default_value=None)))
    retracing.append(_epochs(make))


def _epochs(make: Callable[..., Any] | None) -> Callable[[], None]:
    """Return what moves an epoch, in every thread; before JAX 0.10 it drops what is compiled instead."""
    epoch = None if make is None else make(default_value=None)
    move: Callable[[int], None] | None = getattr(epoch, "set_global", None)
    if move is None:
        clear: Callable[[], None] = jax.clear_caches
        return clear
    numbers = itertools.count(1)
    return lambda: move(next(numbers))


def _context(enter: Callable[[Any], AbstractContextManager[Any]]) -> Callable[[Any], AbstractContextManager[Any]]:
    def context(policy: policies.Policy) -> AbstractContextManager[Any]:
        return enter(None if policy == _of_process() else policy.fingerprint)

    return context


def _of_process() -> policies.Policy | None:
    """Return the policy outside of every use_policy; a wrong name in DISPATCH_POLICY is reported by its first use."""
    try:
        return policies._of_process()
    except policies.PolicyError:
        return None
