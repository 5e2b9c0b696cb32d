"""The policy in JAX's trace context: a function compiled under one policy is traced again under another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax

from dispatch.policies import policy as policies


def join() -> None:
    """Let every use_policy enter JAX's trace context; without jax.make_user_context, traces keep their first policy."""
    make = getattr(jax, "make_user_context", None)
    if make is not None:
        policies._policy_contexts.append(_context(make(default_value=None)))


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
