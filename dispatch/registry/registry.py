"""Backends by entry point, through pluggy: each loads alone, and what fails is recorded, never fatal."""

from __future__ import annotations

import importlib.metadata
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pluggy

from dispatch._backend import Backend, Capability
from dispatch._measurement import BASELINE
from dispatch.registry.faults import said

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
    """A backend and where it comes from: a plugin of a distribution with its version."""

    backend: Backend
    distribution: str
    version: str
    plugin: str


class Registry:
    """All backends in a stable order: built-in ones by name, then others by distribution and name."""

    def __init__(self, entry_points: Callable[[], Iterable[Any]] | None = None) -> None:
        self._entry_points = entry_points or (lambda: importlib.metadata.entry_points(group=GROUP))
        self._manager = pluggy.PluginManager("dispatch")
        self._manager.add_hookspecs(Hooks)
        self._backends: dict[str, Registered] = {}
        self._faults: list[Fault] = []
        self._loaded = self._loading = False
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
        """Register one plugin: a Backend, or a module or object with hook implementations. Failures become faults.

        What the distribution has registered under that name before makes room.
        """
        self._load()  # entry points come first: nobody shadows theirs
        with self._lock:
            self.remove(name, distribution)
            self._add(plugin, name, distribution, version)

    def remove(self, name: str, distribution: str) -> bool:
        """Take one plugin and its backends out again; return whether it was there."""
        plugin = f"{distribution}:{name}"
        with self._lock:
            if not self._manager.has_plugin(plugin):
                return False
            self._manager.unregister(name=plugin)
            self._backends = {k: v for k, v in self._backends.items() if v.plugin != plugin}
            return True

    def decided(self, decision: Decision) -> None:
        """Tell the observers; one that raises is a fault and does not stop the others."""
        for key, plugin in self._manager.list_name_plugin():
            try:
                self._call("dispatch_decided", plugin, decision=decision)
            except BaseException as error:  # a plugin's code may raise anything
                distribution, _, name = key.partition(":")
                self._record(name, distribution, error, "dispatch_decided raised ")

    def _add(self, plugin: object, name: str, distribution: str, version: str) -> None:
        """Register a plugin with all of its backends, or with none if it raises."""
        key = f"{distribution}:{name}"
        if self._manager.has_plugin(key):
            return  # the same distribution, seen twice on sys.path
        try:
            self._manager.register(plugin, key)
            self._manager.check_pending()  # raises for a hook that nobody calls: a name with a slip in it
            found: list[Any] = [plugin] if isinstance(plugin, Backend) else []
            for backends in self._call("dispatch_backends", plugin):
                found += backends
            checked = [_checked(backend) for backend in found]
            if not checked and not self._manager.get_hookcallers(plugin):
                raise TypeError(f"{plugin!r} is no Backend and has no dispatch_backends marked with dispatch.hookimpl")
        except BaseException as error:  # a plugin's code may raise anything
            if self._manager.has_plugin(key):
                self._manager.unregister(name=key)
            self._record(name, distribution, error)
            return
        for backend in checked:
            self._take(Registered(backend, distribution, version, key))

    def _call(self, hook: str, plugin: object, **values: Any) -> list[Any]:
        """Return what a plugin's implementations of a hook return; as in pluggy, they may leave arguments out."""
        found = getattr(self._manager.hook, hook).get_hookimpls()
        own = [implementation for implementation in found if implementation.plugin is plugin]
        return [x.function(*(values[name] for name in x.argnames)) for x in own]

    def _load(self) -> None:
        with self._lock:
            if self._loaded or self._loading:  # a plugin may ask for the registry while it is imported
                return
            self._loading = True
            try:
                for (distribution, version), point in self._found():
                    try:
                        plugin = point.load()
                    except BaseException as error:  # SyntaxError, SystemExit ... at import
                        self._record(point.name, distribution, error)
                    else:
                        self._add(plugin, point.name, distribution, version)
                self._loaded = True
            finally:
                self._loading = False

    def _found(self) -> list[tuple[tuple[str, str], Any]]:
        """Return the entry points with their distributions, in the stable order."""
        try:
            points = [(_distribution(point), point) for point in self._entry_points()]
        except Exception as error:  # one malformed entry_points.txt hides all
            self._record("entry points", "this environment", error)
            return []
        return sorted(points, key=lambda x: (x[0][0] != BUILT_IN, x[0][0], x[1].name))

    def _take(self, new: Registered) -> None:
        name = new.backend.name
        kept = self._backends.setdefault(name, new)
        if kept is not new:
            reason = f"two backends are named {name!r}: {kept.distribution}'s is kept, not {new.distribution}'s"
            self._warn(Fault(name, new.distribution, reason))

    def _record(self, name: str, distribution: str, error: BaseException, where: str = "") -> None:
        if isinstance(error, KeyboardInterrupt):
            raise error
        self._warn(Fault(name, distribution, f"{where}{said(error)}"))

    def _warn(self, fault: Fault) -> None:
        if fault not in self._faults:
            self._faults.append(fault)
            warnings.warn(f"plugin {fault.name} of {fault.distribution}: {fault.reason}", PluginWarning, stacklevel=2)


def _checked(backend: Any) -> Backend:
    """Return `backend` if it is one and its name can be told from others. Raises TypeError or ValueError."""
    if isinstance(backend, type) or not isinstance(backend, Backend):
        raise TypeError(
            f"{backend!r} is no instance of dispatch.Backend: it needs name, capabilities, rejections, prepare, plan"
        )
    if not isinstance(backend.name, str) or backend.name in ("", BASELINE.backend):
        raise ValueError(f"{backend!r} is named {backend.name!r}; a name is text, not empty, not {BASELINE.backend!r}")
    if not all(isinstance(capability, Capability) for capability in backend.capabilities):
        raise TypeError(f"{backend!r} has capabilities {backend.capabilities!r}; each has to be a dispatch.Capability")
    return backend


def _distribution(point: Any) -> tuple[str, str]:
    found = getattr(point, "dist", None)
    if found is None:
        return "unknown", ""
    return str(getattr(found, "name", found)), str(getattr(found, "version", ""))
