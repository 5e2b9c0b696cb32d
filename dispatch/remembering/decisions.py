"""Decisions by key: those of this process, and under them the store's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._measurement import BASELINE, Candidate
from dispatch._problem import Problem
from dispatch.measuring.buckets import bucket
from dispatch.remembering.codec import from_plain, to_plain
from dispatch.remembering.job import Agreement
from dispatch.remembering.store import DecisionStore, key_of

if TYPE_CHECKING:
    from dispatch._decision import Decision

FORMAT = 2  # of a stored record


def keys_of(problem: Problem, able: Sequence[Candidate], circumstances: Mapping[str, Any]) -> list[str]:
    """Return the keys of everything that a choice depends on: where to look it up, and last where to keep it.

    circumstances: what there is beside the problem, as plain values. Problems of one bucket of m share a key where
    they have the same candidates. Under tracing what was decided on real operands is looked for first; what is measured
    then, on random ones, is kept apart, and for every scope alike: a scope says something of data alone. Capturing and
    differentiating change no product, nor does it matter which of several devices of a name has the operands.
    """
    facts: dict[str, Any] = {"format": FORMAT, **circumstances}
    first, last = bucket(problem)
    if first < last:
        facts["able"] = [str(candidate) for candidate in able]
    modes: list[tuple[str, ...]] = [(), ("traced",)] if "traced" in problem.modes else [()]
    of = {(): facts, ("traced",): {**facts, "scope": None}}
    device = re.sub(r":\d+", "", problem.device)
    return [key_of({**of[x], "problem": to_plain(replace(problem, m=last, modes=x, device=device))}) for x in modes]


class Decisions:
    """What was decided, kept in memory and in the store. A record that this version cannot read is a miss.

    In a job of several processes the first of them to decide does so for all: see `job`.
    """

    def __init__(self, store: DecisionStore, agreement: Agreement | None = None) -> None:
        self.store = store
        self.agreement = agreement or Agreement()
        self._memory: dict[str, Decision] = {}
        self._job: Any = None

    def find(self, key: str) -> Decision | None:
        """Return the decision under a key, if there is one; in a job what its store says of those made before it."""
        if (job := self.agreement.of()) is not self._job:
            self._memory, self._job = {}, job
        found = self._memory.get(key)
        if found is None:
            found = self._agreed(key)
            if found is not None:
                self._memory[key] = found
        return found

    def _agreed(self, key: str) -> Decision | None:
        """Return the job's decision, which is the store's if this process is the first to have one there."""
        if (text := self.agreement.get(key)) is not None:
            return _from_text(text, "job")
        record = self.store.get(key)
        found = None if record is None else _read(record)
        if found is None:
            return None
        own = json.dumps(record)
        text = self.agreement.first(key, own)
        if text is None:
            return apart(found, self.agreement)
        return replace(found, source="store") if text == own else _from_text(text, "job")

    def keep(self, key: str, decision: Decision) -> None:
        """Keep a decision under a key."""
        self._memory[key] = decision
        self.store.put(key, _record(decision))

    def agree(
        self, key: str, decision: Decision, able: Sequence[Candidate], *, lasting: bool, alone: bool = False
    ) -> Decision:
        """Return what the job decides for a problem that was just measured: this, unless another was first.

        The baseline where the others could not be asked in time, and where what they chose is not among `able` here.
        lasting: whether it is kept in the store too. alone: whatever the others decided.
        """
        modes = tuple(mode for mode in decision.problem.modes if mode == "traced")  # the others are the call's
        kept = replace(decision, problem=replace(decision.problem, modes=modes))
        own = json.dumps(_record(kept))
        text = own if alone else self.agreement.first(key, own)
        if text == own:
            if lasting:
                self.keep(key, kept)
            return decision
        found = None if text is None else _from_text(text, "job")
        if found is None or found.candidate not in (*able, BASELINE):
            return apart(decision, self.agreement)
        self._memory[key] = found
        return replace(found, problem=decision.problem)

    def stored(self) -> list[Decision]:
        """Return every decision in the store, the oldest first."""
        return [found for _, record in self.store.entries() if (found := _read(record)) is not None]

    def clear(self) -> int:
        """Forget everything; return how many decisions the store held."""
        self._memory.clear()
        return self.store.clear()


def apart(decision: Decision, agreement: Agreement) -> Decision:
    """Return the decision for the baseline of a process that cannot do as the job's others do."""
    why = agreement.lost or "what another process chose cannot run in this one"
    return replace(decision, candidate=BASELINE, source="job", reason=f"the job's processes do not agree: {why}")


def _record(decision: Decision) -> dict[str, Any]:
    return {"format": FORMAT, "decision": decision.to_dict()}


def _from_text(text: str, source: str) -> Decision | None:
    try:
        found = _read(json.loads(text))
    except ValueError:
        return None
    return None if found is None else replace(found, source=source)


def _read(record: dict[str, object]) -> Decision | None:
    from dispatch._decision import Decision  # noqa: PLC0415 - it imports the codec from here

    try:
        return from_plain(Decision, record["decision"]) if record.get("format") == FORMAT else None
    except (KeyError, TypeError, ValueError):
        return None
