"""Who may serve: backends by entry point, what failed and how it is said, and why one cannot work here."""

from dispatch.registry.registry import Fault, PluginWarning, Registry, hookimpl
from dispatch.registry.status import BackendInfo, status

__all__ = ["BackendInfo", "Fault", "PluginWarning", "Registry", "hookimpl", "status"]
