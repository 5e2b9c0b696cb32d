"""The guard: products watched after tuning, refused where they are beyond the tolerance, and measured again.

strict and probe_every look at results, by probes; async at the rounding errors of the operands, as plans tell them.
`[guard] traced` is for JAX programs, which tell them as they run: after a trip they are traced anew.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dispatch._backend import Plan, Rejection
from dispatch._decision import Decision, decide
from dispatch._measurement import BASELINE, FRAMEWORKS_OWN, Candidate
from dispatch._problem import Problem
from dispatch.measuring.calibration import in_force
from dispatch.measuring.probe import ESTIMATED, beyond
from dispatch.measuring.watch import Watch, telling, watch_of, watching
from dispatch.remembering.known import retrace

if TYPE_CHECKING:
    from dispatch.frameworks import Framework
    from dispatch.policies.policy import Policy

logger = logging.getLogger("dispatch")

ASYNC_PROBE_EVERY = 128
"""Under async, calls from one probe to the next of a plan that quantizes and says nothing of its operands."""


class Guard:
    """What is watched, for one process: counts, and the trips that are not measured again yet.

    forget: drops every known call, so that the next one asks again. clock: seconds.
    """

    def __init__(self, forget: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._counts: Counter[str] = Counter(probed=0, tripped=0, refused=0)
        self._forget, self._clock = forget, clock
        # By the key of a problem, its scope and its policy:
        self._trips: dict[Hashable, tuple[float, str]] = {}  # when the cool-down ends, and what was seen
        self._before: Counter[Hashable] = Counter()  # how often it has tripped: each time the band is wider
        self._again: set[Hashable] = set()  # whose cool-down has ended: to be measured again
        self._out: dict[Hashable, dict[Any, str]] = {}  # recipes that JAX programs do without (None: all), and why
        self._watches: weakref.WeakSet[Watch] = weakref.WeakSet()
        self._lock = threading.Lock()
        self._seeds = itertools.count(1)

    @property
    def counts(self) -> Counter[str]:
        """The counts, after a look at every plan's watch: a replayed CUDA graph calls nobody."""
        self._look()
        return self._counts

    def _look(self) -> None:
        with self._lock:
            watches = list(self._watches)
        for watch in watches:
            watch.tripped()

    def outlasts(self, problem: Problem, policy: Policy) -> bool:
        """Return whether a plan that is made now may serve later calls: in a capture nothing is made to watch it."""
        return not (policy.guard.mode == "async" and "captured" in problem.modes)

    def planned(
        self, make: Callable[[], tuple[Plan, Any]], decision: Decision, policy: Policy, scope: str | None
    ) -> tuple[Plan, Any, Watch | None]:
        """Return what `make` does, and a watch for the plan, or None where the policy wants none.

        That is under `mode = "async"`, and in JAX programs under `traced = "callback"`. JAX compiles eager plans too:
        without callbacks they cannot tell anything, and are not offered the watch.
        """
        calling = policy.guard.traced == "callback"
        wanted = calling and telling.get() if "traced" in decision.problem.modes else policy.guard.mode == "async"
        watch = None
        if wanted and decision.backend not in FRAMEWORKS_OWN and decision.candidate.recipe is not None:
            watch = watch_of(decision, policy, self._before[_key(decision.problem, scope, policy)])
        with watching(watch if calling or decision.problem.framework != "jax" else None):
            return *make(), watch

    def watching(
        self,
        plan: Plan,
        own: Plan,
        room: Framework,
        decision: Decision,
        policy: Policy,
        scope: str | None,
        watch: Watch | None = None,
    ) -> Plan:
        """Return `plan` as the policy wants it watched: itself where it does not, or where there are no values.

        plan, own: the chosen and the framework's own product, for operands in canonical shapes. What a probe finds
        beyond the tolerance is not returned but multiplied again by `own`, which then serves for the policy's
        cool-down; as it does from the first call after `watch` has heard of a trip. A program is not changed: it is
        traced anew.
        """
        if watch is not None and "traced" in decision.problem.modes:
            key = _key(decision.problem, scope, policy)
            watch.report = lambda said, watch=watch: self._left_out(key, decision, said, alone=watch.finite)
        if (
            decision.backend in FRAMEWORKS_OWN
            or "traced" in decision.problem.modes
            or unguardable(decision.problem, policy)
        ):
            return plan
        every = 1 if policy.guard.mode == "strict" else policy.guard.probe_every
        silent = watch is not None and not watch.trips
        if silent and not every and decision.problem.activation is None:
            every = ASYNC_PROBE_EVERY
        if not every and (watch is None or silent):
            return plan
        problem, key = replace(decision.problem, modes=()), _key(decision.problem, scope, policy)
        metric, limit, calls = policy.error.metric, policy.error.tolerance, itertools.count(1)
        cool_down_s = policy.guard.cool_down_s
        if watch is not None and not silent:
            watch.report = lambda said: self._tripped(key, decision, said, cool_down_s, refused=False)
            with self._lock:
                self._watches.add(watch)

        def watched(*operands: Any) -> Any:
            trip = self._trips.get(key) if self._trips else None  # to hash a problem takes microseconds
            if trip is not None:
                if self._clock() >= trip[0]:
                    self._cooled(key)
                return own(*operands)
            if watch is not None and watch.tripped():
                return own(*operands)
            out = plan(*operands)
            if not every or next(calls) % every or room.measurable(out) is not None:  # no reading under graph capture
                return out
            self._counts["probed"] += 1
            seed = next(self._seeds)
            error = room.isolated(lambda: beyond(room, problem, out, operands, metric, limit, seed))
            if error is None:
                return out
            self._tripped(key, decision, f"{metric} {error:.2g} against {limit:.2g}", cool_down_s)
            return own(*operands)

        return watched

    def _tripped(
        self, key: Hashable, decision: Decision, figures: str, cool_down_s: float, *, refused: bool = True
    ) -> None:
        said = f"refused a result ({figures})" if refused else f"saw other data ({figures})"
        with self._lock:
            self._counts["refused"] += refused
            if key in self._trips:  # another thread's call
                return
            self._counts["tripped"] += 1
            self._before[key] += not refused
            self._trips[key] = self._clock() + cool_down_s, said
        logger.warning(
            "dispatch: the guard %s of %s for %s: the framework's own product serves for %g s",
            said, decision.candidate, decision.problem, cool_down_s,
        )  # fmt: skip

    def _left_out(self, key: Hashable, decision: Decision, figures: str, *, alone: bool) -> None:
        """Leave a recipe out of the problem's programs from now on, or each that quantizes; let them be traced anew.

        There is no cool-down: a compiled program asks nobody, and to trace it again and again would cost more.
        """
        recipe = decision.candidate.recipe if alone else None
        with self._lock:
            out = self._out.setdefault(key, {})
            if recipe in out or None in out:  # a program of before, or another device
                return
            self._counts["tripped"] += 1
            out[recipe] = f"saw other data ({figures})"
        logger.warning(
            "dispatch: the guard saw other data (%s) of %s for %s: programs that JAX traces from now on do without %s",
            figures, decision.candidate, decision.problem, recipe or "quantizing it",
        )  # fmt: skip
        self._retrace()

    def _readmit(self, key: Hashable) -> None:
        """Let every recipe serve a problem's programs again: calibration has decided by real data."""
        with self._lock:
            out = self._out.pop(key, None)
        if out is not None:
            self._retrace()

    def _retrace(self) -> None:
        self._forget()
        retrace()

    def _cooled(self, key: Hashable) -> None:
        with self._lock:
            if self._trips.pop(key, None) is not None:
                self._again.add(key)
        self._forget()

    def distrusts(self, problem: Problem, scope: str | None, policy: Policy) -> bool:
        """Return whether what is remembered for a problem is to be measured again, after a cool-down."""
        if policy.tuning.mode != "measure" or "traced" in problem.modes:
            return False
        return _key(problem, scope, policy) in self._again

    def measured(self, problem: Problem, scope: str | None, policy: Policy) -> None:
        """Take note that a problem was measured, and the decision is remembered."""
        with self._lock:
            self._again.discard(_key(problem, scope, policy))

    def noted(self, decision: Decision, scope: str | None, policy: Policy) -> Decision:
        """Return a decision, with what the guard knows of it in its reason, and without what it leaves out."""
        self._look()
        key = _key(decision.problem, scope, policy)
        if key in self._out and in_force() is not None and "traced" not in decision.problem.modes:
            self._readmit(key)
        if policy.guard.traced == "callback" and (out := self._out.get(key)):
            decision = _without(decision, dict(out), policy)
        trip = self._trips.get(key)
        if trip is None or (policy.guard.mode == "off" and not policy.guard.probe_every):
            return decision
        left = max(0.0, trip[0] - self._clock())
        note = f"the guard {trip[1]}: the framework's own product serves for {left:.0f} s more"
        return replace(decision, reason=f"{decision.reason}; {note}")


def unguardable(problem: Problem, policy: Policy) -> list[Rejection]:
    """Return why a product cannot be watched as the policy wants, or []."""
    mode, every = policy.guard.mode, policy.guard.probe_every
    if mode == "off" and not every:
        return []
    found = []
    if problem.activation is not None and (mode == "strict" or every):
        found.append(Rejection("activation", problem.activation, "none: probes see through no activation ([guard])"))
    if policy.error.metric not in ESTIMATED:
        found.append(Rejection("metric", policy.error.metric, f"one that probes estimate: {', '.join(ESTIMATED)}"))
    return found


def _without(decision: Decision, out: dict[Any, str], policy: Policy) -> Decision:
    """Return the choice among what is left in a program, by the figures there are; else the decision, saying so.

    out: what the guard said, for each recipe that is left out; for None of every one.
    """
    if "traced" not in decision.problem.modes:
        notes = (f"the guard {said}: JAX programs do without {recipe or 'quantizing'}" for recipe, said in out.items())
        return replace(decision, reason="; ".join((decision.reason, *notes)))
    if not decision.candidate.scaled or out.keys().isdisjoint((None, decision.candidate.recipe)):
        return decision
    able = {v.candidate: v.measurement for v in decision.candidates if not v.rejections}
    rejections: dict[Candidate, Sequence[Rejection]] = {
        v.candidate: v.rejections for v in decision.candidates if v.rejections
    }
    for candidate in list(able):
        said = None if candidate.recipe is None else out.get(candidate.recipe, out.get(None))
        if said is not None:
            del able[candidate]
            rejections[candidate] = [Rejection("data", f"such that the guard {said}", "dispatch.calibrate on it")]
    made = decide(decision.problem, {BASELINE: decision.baseline, **able}, rejections, policy)
    return replace(made, source=decision.source, settled=decision.settled)


def _key(problem: Problem, scope: str | None, policy: Policy) -> Hashable:
    return replace(problem, modes=()), scope, policy.choice_fingerprint
