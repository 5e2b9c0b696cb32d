"""What one process knows: the plan of every call that it has seen."""

from __future__ import annotations

from collections.abc import Callable, Hashable

from dispatch._backend import Plan

MOST_PLANS = 4096  # known calls that are kept, twice at most
retracing: list[Callable[[], None]] = []
"""What lets every program be traced anew: a framework that traces registers it here."""


def retrace() -> None:
    """Let every jitted function be traced again at its next call."""
    for move in retracing:
        move()


class KnownCalls:
    """Known calls by key, least recently used forgotten first, without a lock and without cost on a hit.

    Two generations: what is used lives in `young`; when that is full it becomes `old`, and what is not used again
    from there goes with it. `served` has the backend of every known call that a plugin serves. `compiled` has the
    plans of products in compiled code, by product, policy and whether algorithms have to be deterministic.
    """

    def __init__(self) -> None:
        self.young: dict[Hashable, Plan] = {}
        self.old: dict[Hashable, Plan] = {}
        self.served: dict[Hashable, str] = {}
        self.compiled: dict[Hashable, Plan] = {}

    def find(self, key: Hashable) -> Plan | None:
        """Return an old plan, young again, or None."""
        plan = self.old.get(key)
        if plan is not None:
            self.keep(key, plan)
        return plan

    def keep(self, key: Hashable, plan: Plan, backend: str | None = None) -> None:
        """Remember a plan, and the backend that serves by it if it is a plugin's."""
        if len(self.young) >= MOST_PLANS:
            for gone in self.old.keys() - self.young.keys():
                self.served.pop(gone, None)
            self.old = dict(self.young)
            self.young.clear()
        if backend is not None:
            self.served[key] = backend
        self.young[key] = plan

    def keep_compiled(self, key: Hashable, plan: Plan) -> None:
        """Remember a plan of compiled code."""
        if len(self.compiled) >= MOST_PLANS:
            self.compiled.clear()
        self.compiled[key] = plan

    def __len__(self) -> int:
        return len(self.young.keys() | self.old.keys())

    def clear(self) -> None:
        """Forget everything."""
        self.old = {}
        self.young.clear()
        self.served.clear()
        self.compiled.clear()
