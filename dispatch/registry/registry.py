"""Backends by entry point, through pluggy: each loads alone, and what fails is recorded, never fatal."""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from dispatch._backend import Backend

if TYPE_CHECKING:
    from dispatch._decision import Decision

GROUP = "dispatch.backends"
BUILT_IN = "gemm-dispatch"

hookspec = pluggy.HookspecMarker("dispatch")
hookimpl = pluggy.HookimplMarker("dispatch")


class Hooks:
    """What a plugin may implement."""

    @hookspec
    def dispatch_backends(self) -> Iterable[Backend]:  # type: ignore[empty-body]
        """Return the plugin's backends; called once, when the registry is first needed."""

    @hookspec
    def dispatch_decided(self, decision: Decision) -> None:
        """Observe a new decision; called once a problem, never on the hot path. What it returns is ignored."""


class PluginWarning(RuntimeWarning):
    """A plugin could not be loaded or failed in a hook; dispatch.backends() says the same."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something of a plugin's that failed: where it comes from and what it raised."""

    name: str
    distribution: str
    reason: str


@dataclass(frozen=True, slots=True)
class Registered:
    """A backend and where it comes from: a distribution with its version."""

    backend: Backend
    distribution: str
    version: str


class Registry:
    """All backends in a stable order: built-in ones by name, then others by distribution and name."""

    def __init__(self, entry_points: Callable[[], Iterable[Any]] | None = None) -> None:
        self._entry_points = entry_points or (lambda: importlib.metadata.entry_points(group=GROUP))
        self._manager = pluggy.PluginManager("dispatch")
        self._manager.add_hookspecs(Hooks)
        self._backends: dict[str, Registered] = {}
        self._faults: list[Fault] = []
        self._loaded = False
        self._lock = threading.RLock()

    @property
    def backends(self) -> dict[str, Registered]:
        """The backends by name, in the stable order; loads them at first use."""
        if not self._loaded:
            self._load()
        return self._backends

    @property
    def faults(self) -> Sequence[Fault]:
        """What failed so far."""
        return tuple(self._faults)

    def add(self, plugin: object, name: str, distribution: str, version: str = "") -> None:
        """Register one plugin: a Backend, or a module or object with hook implementations. Failures become faults."""
        with self._lock:
            if self._manager.has_plugin(f"{distribution}:{name}"):
                return  # the same distribution, seen twice on sys.path
            self._manager.register(plugin, f"{distribution}:{name}")
            if isinstance(plugin, Backend):
                self._take(plugin, distribution, version)
            for hook in self._implementations("dispatch_backends", plugin):
                try:
                    for backend in hook():
                        self._take(backend, distribution, version)
                except BaseException as error:  # a plugin's code may raise anything
                    self._record(name, distribution, error)

    def remove(self, name: str, distribution: str) -> None:
        """Take one plugin and its backends out again."""
        with self._lock:
            self._manager.unregister(name=f"{distribution}:{name}")
            self._backends = {k: v for k, v in self._backends.items() if v.distribution != distribution}

    def decided(self, decision: Decision) -> None:
        """Tell the observers; one that raises is a fault and does not stop the others."""
        for plugin in self._manager.get_plugins():
            for hook in self._implementations("dispatch_decided", plugin):
                try:
                    hook(decision)
                except BaseException as error:  # a plugin's code may raise anything
                    self._record("dispatch_decided", self._manager.get_name(plugin) or "unknown", error)

    def _implementations(self, hook: str, plugin: object) -> list[Callable[..., Any]]:
        found = getattr(self._manager.hook, hook).get_hookimpls()
        return [implementation.function for implementation in found if implementation.plugin is plugin]

    def _load(self) -> None:
        with self._lock:
            if self._loaded:
                return
            points = [(_distribution(point), point) for point in self._entry_points()]
            points.sort(key=lambda x: (x[0][0] != BUILT_IN, x[0][0], x[1].name))
            for (distribution, version), point in points:
                try:
                    plugin = point.load()
                except BaseException as error:  # SyntaxError, SystemExit ... at import
                    self._record(point.name, distribution, error)
                else:
                    self.add(plugin, point.name, distribution, version)
            self._loaded = True

    def _take(self, backend: Any, distribution: str, version: str) -> None:
        if not isinstance(backend, Backend):
            raise TypeError(
                f"{backend!r} is no dispatch.Backend: it needs name, capabilities, rejections, prepare, plan"
            )
        kept = self._backends.get(backend.name)
        if kept is None:
            self._backends[backend.name] = Registered(backend, distribution, version)
        elif kept.distribution != distribution:
            reason = f"two backends are named {backend.name!r}: {kept.distribution}'s is kept, not {distribution}'s"
            self._warn(Fault(backend.name, distribution, reason))

    def _record(self, name: str, distribution: str, error: BaseException) -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        self._warn(Fault(name, distribution, f"{type(error).__name__}: {error}"))

    def _warn(self, fault: Fault) -> None:
        if fault not in self._faults:
            self._faults.append(fault)
            warnings.warn(f"plugin {fault.name} of {fault.distribution}: {fault.reason}", PluginWarning, stacklevel=2)


def _distribution(point: Any) -> tuple[str, str]:
    found = getattr(point, "dist", None)
    if found is None:
        return "unknown", ""
    return str(getattr(found, "name", found)), str(getattr(found, "version", ""))
