"""The flow of a call that is not known yet: problem, candidates, store or measurement, decision, plan."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from dispatch._backend import Backend, Plan, Rejection
from dispatch._candidates import disallowed, no_backend, proposals, summarized, unlisted, unquantizable
from dispatch._decision import Decision, decide, named, narrower
from dispatch._errors import NoBackendError, NotLockedError
from dispatch._measurement import BASELINE, FRAMEWORKS_OWN, Candidate, Measurement
from dispatch._problem import Problem
from dispatch.frameworks.backward import again
from dispatch.frameworks.calls import Options
from dispatch.frameworks.operands import array_of, forming, native, undressing
from dispatch.frameworks.request import Request, describe, own_product
from dispatch.frameworks.shapes import reshaping
from dispatch.measuring.calibration import Calibration, in_force, timings_of
from dispatch.measuring.ends import at_ends
from dispatch.measuring.guard import Guard, unguardable
from dispatch.measuring.patience import Patience
from dispatch.measuring.session import Entrant, Operands, Table, Timings, measure, random_operands
from dispatch.policies.policy import Policy
from dispatch.registry.faults import broken, checked, is_out_of_memory, said
from dispatch.registry.registry import Registry
from dispatch.remembering import Decisions, DecisionStore, keys_of

Rejections = dict[Candidate, list[Rejection]]
Field = tuple[list[Entrant], list[Candidate]]


@dataclass(frozen=True, slots=True, eq=False)
class Resolved:
    """A decision, and the callable that serves it for arrays of the caller's shapes. keep: for later calls too."""

    decision: Decision
    plan: Plan
    keep: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Case:
    """One problem on its way to a decision: what may be chosen, and why the rest may not."""

    call: Request
    problem: Problem
    policy: Policy
    options: Options
    able: list[Candidate]
    rejections: Rejections

    def decide(
        self, measured: dict[Candidate, Measurement | None], failed: Rejections | None = None, unmeasured: str = ""
    ) -> Decision:
        """Return the decision; unmeasured: why nothing was."""
        rejections: dict[Candidate, Sequence[Rejection]] = {**self.rejections, **(failed or {})}
        able = {c: measured.get(c) for c in (*self.able, *measured) if c not in rejections}
        made = decide(self.problem, able, rejections, self.policy)
        return replace(made, reason=f"{made.reason} ({unmeasured})") if unmeasured else made

    def unscaled(self) -> _Case:
        """Return the case without what may lose accuracy: nothing is known of the data under tracing."""
        why = [Rejection("error", "unknown under tracing", "a decision on real operands, made before")]
        scaled = [candidate for candidate in self.able if candidate.scaled]
        able = [candidate for candidate in self.able if not candidate.scaled]
        return replace(self, able=able, rejections={**self.rejections, **dict.fromkeys(scaled, why)})


def _twin(problem: Problem, plan: Plan) -> bool:
    """Return whether a plan is the framework's own product itself, and so the baseline."""
    return not problem.encoded and plan is native(problem)


class Engine:
    """The registry, the store and what went wrong so far; everything but the table of known calls."""

    def __init__(self, registry: Registry, store: DecisionStore, forget: Callable[[], None] = lambda: None) -> None:
        self.registry = registry
        self.decisions = Decisions(store)
        self.counts: Counter[str] = Counter()
        self.quarantine: dict[str, str] = {}
        self.guard = Guard(forget)
        self._timings: dict[str, Timings] = {}
        self._patience = Patience()
        self._measuring: set[tuple[int, str]] = set()  # by process: a forked child measures for itself
        self._lock = threading.Lock()

    def resolve(self, call: Request, options: Options) -> Resolved | None:
        """Return the decision and the plan for a call, or None where the framework itself has to raise."""
        problem = describe(call.room.chosen(call))
        while problem is not None:
            decision, keep = self.decision(call, problem, options)
            try:
                plan = call.room.whole(self._serving(call, decision, options), call)
                lasting = self.guard.outlasts(problem, self._policy(problem, options))
                return Resolved(decision, plan, keep and lasting)
            except BaseException as error:  # a plugin's code may raise anything
                self.condemn(decision.backend, error)
                if is_out_of_memory(error):
                    return Resolved(replace(decision, candidate=BASELINE), own_product(call), False)
        return None

    def decision(self, call: Request, problem: Problem, options: Options) -> tuple[Decision, bool]:
        """Return the decision for a problem, and whether later calls may rely on it."""
        policy = self._policy(problem, options)
        case = _Case(call, problem, policy, options, *self._candidates(problem, policy))
        if options.backend is not None and not case.able:
            raise NoBackendError(no_backend(options.backend, problem, case.rejections))
        decision, keep = self._decided(case)
        if options.backend is not None and decision.baseline is None:
            return named(decision, decision.candidate if decision.candidate in case.able else case.able[0]), keep
        if options.backend in (None, decision.backend):
            return self.guard.noted(decision, options.scope, policy), keep
        raise NoBackendError(f"backend {options.backend!r} was asked for, but for {problem}: {decision.reason}")

    def _decided(self, case: _Case) -> tuple[Decision, bool]:
        lone = case.options.backend is not None and len(case.able) == 1 and not case.able[0].scaled
        if case.problem.empty or lone or not any(self._rival(case, x) for x in case.able):
            return case.decide({}), True
        keys = self._keys(case)
        if (calibration := in_force()) is not None and not ("traced" in case.problem.modes or case.call.unmeasurable):
            return self._calibrated(case, keys[-1], calibration), False
        distrusted = self.guard.distrusts(case.problem, case.options.scope, case.policy)
        for key in keys:
            if not distrusted and (known := self._known(key, case)) is not None:
                return known, True
        if "traced" in case.problem.modes and case.policy.error.traced == "calibrated":
            case = case.unscaled()
        if case.policy.tuning.mode == "locked":
            raise NotLockedError(
                f"policy {case.policy.name!r} is locked and the store holds no decision for {case.problem}; "
                "measure it first with [tuning] mode = 'measure' on a machine like this one"
            )
        off = case.policy.tuning.mode == "off"
        why = "[tuning] mode is off" if off else case.call.unmeasurable
        if not why and self._patience.passes(keys[-1]):
            why = "its operands were constant or not finite so far: in some calls it is tried again"
        if why or not self._enter(keys[-1]):
            return case.decide({}, unmeasured=why or "another call is measuring it"), off
        try:
            known = None if distrusted else self._known(keys[-1], case)  # another thread may have measured it meanwhile
            return self._measured(case, keys[-1], alone=distrusted) if known is None else (known, True)
        finally:
            self._measuring.discard((os.getpid(), keys[-1]))

    def _calibrated(self, case: _Case, key: str, calibration: Calibration) -> Decision:
        """Return the decision by the worst error of all batches of a calibration."""
        known = self._known(key, case)
        if known is None or known.baseline is None:
            known = self._measured(case, key)[0]
        table = case.call.room.isolated(lambda: self._table(case, timings_of(known)))
        for candidate, reason in table.faults.items():
            self._quarantine(candidate.backend, f"{reason} ({candidate}, {case.problem})")
        if table.degenerate:
            return known
        decision = case.decide(calibration.worst(key, table.measurements))
        self.decisions.keep(key, replace(decision, problem=replace(case.problem, modes=())))
        calibration.decisions[key] = decision
        return decision

    def _measured(self, case: _Case, key: str, alone: bool = False) -> tuple[Decision, bool]:
        self.counts["measured"] += 1
        try:
            table = case.call.room.isolated(lambda: self._table(case, self._timings.get(key, {})))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return case.decide({}, unmeasured=said(error)), False  # none left for the reference or the clock
        failed: Rejections = {}
        for candidate, reason in table.faults.items():
            self._quarantine(candidate.backend, f"{reason} ({candidate}, {case.problem})")
            failed[candidate] = broken(reason)
        for candidate, reason in table.out_of_memory.items():
            failed[candidate] = [Rejection("memory", f"exhausted while measuring ({reason})", "enough for it")]
        decision = case.decide(dict(table.measurements), failed)
        self.registry.decided(decision)
        if table.degenerate and any(narrower(case.problem, candidate) for candidate in case.able):
            self._timings[key] = table.timings  # the latencies are true of other data, the errors are not
            self._patience.in_vain(key)
            return decision, False
        complete = decision.settled and not table.out_of_memory and not table.postponed
        decision = self.decisions.agree(key, decision, case.able, lasting=complete, alone=alone)
        if complete:
            self.guard.measured(case.problem, case.options.scope, case.policy)
        return decision, complete or not table.postponed

    def _table(self, case: _Case, timings: Timings) -> Table:
        table, call, room = Table(timings=dict(timings)), case.call, case.call.room
        assert call.shapes is not None
        traced = "traced" in case.problem.modes
        given = random_operands(room, case.problem, call.operands) if traced else call.operands
        operands = call.shapes.canonical(given, room.xp)
        if not timings:
            at_ends(room, case.problem, operands, lambda *x: self._entrants(case, table, *x)[0], case.policy, table)
        entrants, twins = self._entrants(case, table, case.problem)
        measure(room, case.problem, entrants, operands, case.policy, table)
        table.measurements.update(dict.fromkeys(twins, table.measurements[BASELINE]))
        return table

    def _entrants(self, case: _Case, table: Table, problem: Problem, timed: Collection[Candidate] = ()) -> Field:
        """Return who is measured for `problem`, which may have another m of the bucket, and who is the baseline."""
        entrants, twins, elsewhere = [], [], problem.m != case.problem.m
        for candidate in case.able:
            backend = self.registry.backends[candidate.backend].backend
            if candidate in timed or table.out(candidate):
                continue
            if elsewhere and self._ask(backend, candidate, problem, case.policy):
                continue
            try:
                plan, forms = self._plan(problem, candidate)
            except BaseException as error:  # a plugin's code may raise anything
                table.blame(candidate, error)
                continue
            if _twin(problem, plan):
                twins.append(candidate)
            else:
                entrants.append(Entrant(candidate, plan, forms))
        return entrants, twins

    def _rival(self, case: _Case, candidate: Candidate) -> bool:
        """Return whether a candidate has to be measured: all but those that are the framework's own product."""
        try:
            return candidate.scaled or not _twin(case.problem, self._plan(case.problem, candidate)[0])
        except KeyboardInterrupt:
            raise
        except BaseException:  # found again, and recorded, when it is measured
            return True

    def _plan(self, problem: Problem, candidate: Candidate) -> tuple[Plan, Callable[[Operands], Operands]]:
        """Return a candidate's plan, and what gives it its operands."""
        backend = self.registry.backends[candidate.backend].backend
        proposed = problem.proposing(candidate.recipe, candidate.accumulation)
        return backend.plan(proposed, candidate.config), forming(backend, proposed)

    def _serving(self, call: Request, decision: Decision, options: Options) -> Plan:
        """Return the callable for arrays like the caller's."""
        problem, candidate = decision.problem, decision.candidate
        own = native(problem)
        if candidate == BASELINE or problem.empty:
            return own if call.plain else undressing(own)
        policy, scope = self._policy(problem, options), options.scope
        plan, forms, watch = self.guard.planned(lambda: self._plan(problem, candidate), decision, policy, scope)
        alone = call.plain and plan is own
        if alone and "differentiated" not in problem.modes:
            return own  # the framework's own function, with nothing around it
        product = partial(again, policy=options.policy, scope=options.scope)
        dressed = own if call.plain else undressing(own)
        serving = call.room.adapt(plan, None if call.plain else forms, problem, dressed, product)
        if alone:  # any shape will do
            return serving
        serving = self.guard.watching(serving, dressed, call.room, decision, policy, scope, watch)
        assert call.shapes is not None
        shape_a, shape_b = (tuple(array_of(x).shape) for x in (call.a, call.b))
        return reshaping(serving, shape_a, shape_b, call.shapes, call.room.xp)

    def clear(self) -> int:
        """Forget every decision; return how many the store held."""
        self._timings.clear()
        self._patience.clear()
        return self.decisions.clear()

    def condemn(self, backend: str, error: BaseException) -> None:
        """Quarantine `backend` for what it raised; raise it again if no plugin is to blame."""
        if isinstance(error, KeyboardInterrupt) or backend in FRAMEWORKS_OWN:
            raise error
        if not is_out_of_memory(error):
            self._quarantine(backend, said(error))

    def _quarantine(self, backend: str, reason: str) -> None:
        with self._lock:
            self.counts["quarantined"] += backend not in self.quarantine
            self.quarantine.setdefault(backend, reason)

    def _candidates(self, problem: Problem, policy: Policy) -> tuple[list[Candidate], Rejections]:
        """Return the able candidates in the stable order, and the rejections of the others."""
        able: list[Candidate] = []
        rejections: Rejections = {}
        for name, registered in self.registry.backends.items():
            backend, whole = registered.backend, self._whole(name, problem, policy)
            proposed: list[Candidate] = []
            try:
                proposed += [] if whole else proposals(backend, problem, policy)
            except BaseException as error:  # a plugin's code may raise anything
                self.condemn(name, error)
                whole, proposed = broken(said(error)), []
            if not proposed:
                rejections[Candidate(name)] = whole or unlisted(backend)
            asked = {candidate: self._ask(backend, candidate, problem, policy) for candidate in proposed}
            able += [candidate for candidate, reasons in asked.items() if not reasons]
            rejections.update(summarized(name, asked))
        return able, rejections

    def _whole(self, name: str, problem: Problem, policy: Policy) -> list[Rejection]:
        """Return why a backend has no candidate at all, or []."""
        if name in self.quarantine:
            return broken(self.quarantine[name])
        if problem.empty and name != "bf16_fallback":
            return [Rejection("size", "zero", "something to multiply")]
        return disallowed(name, policy) or (unguardable(problem, policy) if name != "bf16_fallback" else [])

    def _ask(self, backend: Backend, candidate: Candidate, problem: Problem, policy: Policy) -> list[Rejection]:
        reasons = unquantizable(candidate, problem, policy) if candidate.scaled else []
        try:
            reasons += checked(backend.rejections(problem.proposing(candidate.recipe, candidate.accumulation)))
        except BaseException as error:  # a plugin's code may raise anything
            self.condemn(backend.name, error)
            return broken(said(error))
        return list(dict.fromkeys(reasons))

    def _policy(self, problem: Problem, options: Options) -> Policy:
        """Return the policy for a problem; where a backend is named, with that alone, at any speed."""
        policy = options.policy.for_problem(problem, options.scope)
        if options.backend is None:
            return policy
        if options.backend not in self.registry.backends:
            names = ", ".join(self.registry.backends) or "none"
            raise NoBackendError(f"backend {options.backend!r} is not registered; registered: {names}")
        only = {"allow": [options.backend], "deny": []}
        return policy.override(backends=only, gate={"min_speedup": 0.0, "min_speedup_lossless": 0.0})

    def _keys(self, case: _Case) -> list[str]:
        circumstances = {
            "policy": case.policy.choice_fingerprint,
            "scope": case.options.scope,
            "backends": {name: f"{x.distribution} {x.version}" for name, x in self.registry.backends.items()},
            "versions": case.call.room.versions(array_of(case.call.a)),
        }
        return keys_of(case.problem, case.able, circumstances)

    def _known(self, key: str, case: _Case) -> Decision | None:
        """Return the remembered decision, if its candidate is able still."""
        decision = self.decisions.find(key)
        if decision is None or decision.candidate not in (*case.able, BASELINE):
            return None
        self.counts["remembered"] += 1
        return replace(decision, problem=case.problem)

    def _enter(self, key: str) -> bool:
        """Return whether the caller may measure: one thread a problem does, the others get the baseline."""
        with self._lock:
            if (os.getpid(), key) in self._measuring:
                return False
            self._measuring.add((os.getpid(), key))
            return True
