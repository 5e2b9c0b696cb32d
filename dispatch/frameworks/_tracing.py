"""The policy in force, for a framework that keeps what it has traced."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

from dispatch.policies.policy import Policy


def policy_context(policy: Policy) -> AbstractContextManager[Any]:
    """Return a context in which jax.jit keeps apart what it traces under other policies; empty until jax is imported.

    Without it a function compiled under one policy would keep the choices of that policy under every other.
    """
    if getattr(sys.modules.get("jax"), "make_user_context", None) is None:
        return nullcontext()
    context: AbstractContextManager[Any] = _jax_context()(policy.fingerprint)
    return context


@cache
def _jax_context() -> Any:
    return sys.modules["jax"].make_user_context()
