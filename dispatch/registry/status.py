"""Which backends there are, and why one cannot work on this machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dispatch._backend import Backend, Capability
from dispatch._problem import Operand, Problem
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
    fitting = [
        _sample(capability, name, arch)
        for capability in backend.capabilities
        for name in capability.frameworks
        for arch in archs.get(name, ())
        if capability.runs_on(arch)
    ]
    if fitting:
        return _refused(backend, fitting)
    named = dict.fromkeys(arch for capability in backend.capabilities for arch in capability.archs)
    stems = [arch[:-1] for arch in named if arch.endswith("*")]
    needed = [arch for arch in named if arch.endswith("*") or not arch.startswith(tuple(stems))]
    here = dict.fromkeys(arch for found in archs.values() for arch in found)
    return f"needs {', '.join(needed)}; this machine has {', '.join(here)}"


def _refused(backend: Backend, samples: list[Problem]) -> str | None:
    """Return why none of the problems can run, say for want of another version; None where one can."""
    said = []
    for sample in samples:
        try:
            found = list(backend.rejections(sample))
        except Exception:  # a fault is recorded where the backend is asked for a product
            return None
        if not found:
            return None
        said.append("; ".join(map(str, found)))
    return said[0]


def _sample(capability: Capability, framework: str, arch: str) -> Problem:
    """Return a problem of middling size that a capability declares."""
    m, n, k = (-(-1024 // step) * step for step in capability.multiple_of)
    plain = Operand(capability.dtypes[0])
    device = "cuda:0" if arch.startswith("sm") else "cpu"
    recipe = capability.recipes[0] if capability.recipes else None
    mode = capability.accumulations[0] if capability.accumulations and recipe is not None else None
    sizes = (m, n, k, plain, plain, capability.out_dtypes[0], framework, arch, device)
    return Problem(*sizes, recipe=recipe, accumulation=mode)
