"""Decisions by key: those of this process, and under them the store's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._measurement import Candidate
from dispatch._problem import Problem
from dispatch.measuring.buckets import bucket
from dispatch.remembering.codec import from_plain, to_plain
from dispatch.remembering.store import DecisionStore, key_of

if TYPE_CHECKING:
    from dispatch._decision import Decision

FORMAT = 2  # of a stored record


def keys_of(problem: Problem, able: Sequence[Candidate], circumstances: Mapping[str, Any]) -> list[str]:
    """Return the keys of everything that a choice depends on: where to look it up, and last where to keep it.

    circumstances: what there is beside the problem, as plain values. Problems of one bucket of m share a key where
    they have the same candidates. Under tracing what was decided on real operands is looked for first; what is measured
    then, on random ones, is kept apart, and for every scope alike: a scope says something of data alone. Capturing and
    differentiating change no product.
    """
    facts: dict[str, Any] = {"format": FORMAT, **circumstances}
    first, last = bucket(problem)
    if first < last:
        facts["able"] = [str(candidate) for candidate in able]
    modes: list[tuple[str, ...]] = [(), ("traced",)] if "traced" in problem.modes else [()]
    of = {(): facts, ("traced",): {**facts, "scope": None}}
    return [key_of({**of[x], "problem": to_plain(replace(problem, m=last, modes=x))}) for x in modes]


class Decisions:
    """What was decided, kept in memory and in the store. A record that this version cannot read is a miss."""

    def __init__(self, store: DecisionStore) -> None:
        self.store = store
        self._memory: dict[str, Decision] = {}

    def find(self, key: str) -> Decision | None:
        """Return the decision under a key, if there is one."""
        found = self._memory.get(key)
        if found is None and (record := self.store.get(key)) is not None:
            found = _read(record)
            if found is not None:
                found = self._memory[key] = replace(found, source="store")
        return found

    def keep(self, key: str, decision: Decision) -> None:
        """Keep a decision under a key."""
        self._memory[key] = decision
        self.store.put(key, {"format": FORMAT, "decision": decision.to_dict()})

    def stored(self) -> list[Decision]:
        """Return every decision in the store, the oldest first."""
        return [found for _, record in self.store.entries() if (found := _read(record)) is not None]

    def clear(self) -> int:
        """Forget everything; return how many decisions the store held."""
        self._memory.clear()
        return self.store.clear()


def _read(record: dict[str, object]) -> Decision | None:
    from dispatch._decision import Decision  # noqa: PLC0415 - it imports the codec from here

    try:
        return from_plain(Decision, record["decision"]) if record.get("format") == FORMAT else None
    except (KeyError, TypeError, ValueError):
        return None
