"""Which backends there are, and why one cannot work on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dispatch._backend import Backend
from dispatch.frameworks import machine
from dispatch.registry.registry import Registry


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One registered backend: where it comes from, and why it cannot work on this machine (None: it can)."""

    name: str
    distribution: str
    version: str
    status: str
    unavailable: str | None

    @property
    def available(self) -> bool:
        """Whether it can run anything here."""
        return self.unavailable is None


def status(registry: Registry, quarantine: Mapping[str, str]) -> list[BackendInfo]:
    """Return every backend in the stable order, and what failed to load."""
    archs = machine()["archs"]
    found = []
    for name, registered in registry.backends.items():
        statuses = sorted({capability.status for capability in registered.backend.capabilities})
        why = quarantine.get(name) or _unavailable(registered.backend, archs)
        found.append(BackendInfo(name, registered.distribution, registered.version, "/".join(statuses), why))
    return found + [BackendInfo(x.name, x.distribution, "", "failed", x.reason) for x in registry.faults]


def _unavailable(backend: Backend, archs: dict[str, list[str]]) -> str | None:
    wanted = dict.fromkeys(name for capability in backend.capabilities for name in capability.frameworks)
    if not wanted:
        return "it declares nothing that it can do"
    if not any(name in archs for name in wanted):
        return f"needs {' or '.join(wanted)}, which is not installed"
    for capability in backend.capabilities:
        for name in capability.frameworks:
            if any(capability.runs_on(arch) for arch in archs.get(name, ())):
                return None
    needed = dict.fromkeys(arch for capability in backend.capabilities for arch in capability.archs)
    here = dict.fromkeys(arch for found in archs.values() for arch in found)
    return f"needs {', '.join(needed)}; this machine has {', '.join(here)}"
