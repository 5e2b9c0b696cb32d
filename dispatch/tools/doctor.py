"""What this installation has: versions, hardware, the store, the policy in force and what failed to load."""

from __future__ import annotations

import importlib.metadata
import platform
from typing import Any

import dispatch

PACKAGES = ("gemm-dispatch", "numpy", "ml-dtypes", "pluggy", "torch", "triton", "jax", "jaxlib")


def report() -> dict[str, Any]:
    """Return the findings as plain values; `problems` is empty where nothing is wrong."""
    stats = dispatch.stats()
    policy, wrong = _policy()
    listed = dispatch.backends()
    broken = [f"plugin {x.name} of {x.distribution}: {x.unavailable}" for x in listed if x.status == "failed"]
    state = stats["store"]["state"]
    machine = dispatch.machine()
    broken += [f"framework {name}: {reason}" for name, reason in machine["broken"].items()]
    return {
        "python": platform.python_version(),
        "packages": {name: _version(name) for name in PACKAGES},
        **machine,
        "store": stats["store"],
        "policy": policy,
        "backends": {x.name: x.unavailable or "available" for x in listed if x.status != "failed"},
        "problems": broken + wrong + ([] if state == "ok" else [f"decision store: {state}"]),
    }


def _policy() -> tuple[dict[str, str] | None, list[str]]:
    """Return the policy in force, or None and what is wrong with it."""
    try:
        policy = dispatch.current_policy()
    except dispatch.PolicyError as error:
        return None, [f"policy: {error}"]
    return {"name": policy.name, "fingerprint": policy.fingerprint}, []


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
