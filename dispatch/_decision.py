"""What was chosen and why, with every other candidate's measurement or rejections; and the choosing itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dispatch._backend import Rejection
from dispatch._measurement import BASELINE, Candidate, Error, Measurement
from dispatch._problem import Problem
from dispatch.remembering.codec import to_plain

if TYPE_CHECKING:
    from dispatch.policies.policy import Policy

LOSSLESS_RATIO = 1.25  # of the baseline's own error: at most that much is no loss


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of one candidate, and why: its measurement, or the rejections that kept it from one.

    outcome: `chosen`, `passed` (both gates, but not the fastest), `too slow`, `too wrong`, `baseline` (it is the
    framework's own product), `rejected` or `not measured`.
    """

    candidate: Candidate
    outcome: str
    reason: str
    measurement: Measurement | None = None
    rejections: tuple[Rejection, ...] = ()


@dataclass(frozen=True, slots=True)
class Decision:
    """The choice for one problem under one policy.

    candidate: what serves. reason: one line with figures. candidates: a Verdict each, the chosen one first.
    baseline: the framework's own matmul's measurement, None where nothing had to be measured. policy: its name.
    source: `measured` now, from the `store` or the `job`, or `unmeasured`. settled: False where noise left a gate open,
    so that the decision serves but is not stored.
    """

    problem: Problem
    candidate: Candidate
    reason: str
    candidates: tuple[Verdict, ...]
    baseline: Measurement | None
    policy: str
    source: str = "unmeasured"
    settled: bool = True

    @property
    def backend(self) -> str:
        """The name of the backend that serves; `baseline` where no plugin could."""
        return self.candidate.backend

    @property
    def measurement(self) -> Measurement | None:
        """The chosen candidate's measurement, if it was measured."""
        return next((v.measurement for v in self.candidates if v.candidate == self.candidate), None)

    @property
    def speedup(self) -> float | None:
        """Baseline latency / chosen latency on the device; None where nothing was measured."""
        return None if self.measurement is None else self.measurement.speedup

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {**to_plain(self), "backend": self.backend, "speedup": self.speedup}

    def __str__(self) -> str:
        from dispatch._explain import as_text  # noqa: PLC0415 - text is wanted rarely

        return as_text(self)


def decide(
    problem: Problem,
    measurements: Mapping[Candidate, Measurement | None],
    rejections: Mapping[Candidate, Sequence[Rejection]],
    policy: Policy,
) -> Decision:
    """Return the choice: the fastest candidate that passes both gates of `policy`, else its fallback.

    measurements: of BASELINE and of every able candidate, None for one that was not measured. rejections: of
    the others. Pure: no clock, no environment, no GPU; the order of the mappings does not matter.
    """
    judge = _Judge(problem, measurements, policy)
    verdicts = [judge.verdict(candidate) for candidate in measurements if candidate != BASELINE]
    verdicts += [
        Verdict(candidate, "rejected", "; ".join(map(str, reasons)), None, tuple(reasons))
        for candidate, reasons in rejections.items()
    ]
    verdicts.sort(key=lambda v: judge.rank(v.candidate))
    chosen, reason = judge.choose(verdicts)
    verdicts = [
        replace(v, outcome="chosen", measurement=judge.of(v.candidate)) if v.candidate == chosen else v
        for v in verdicts
    ]
    verdicts.sort(key=lambda v: (v.candidate != chosen, v.outcome == "rejected"))
    return Decision(
        problem=problem,
        candidate=chosen,
        reason=reason,
        candidates=tuple(verdicts),
        baseline=measurements.get(BASELINE),
        policy=policy.name,
        source="unmeasured" if measurements.get(BASELINE) is None else "measured",
        settled=judge.settled(chosen),
    )


class _Judge:
    """The gates of one policy over one table of measurements."""

    def __init__(self, problem: Problem, measurements: Mapping[Candidate, Measurement | None], policy: Policy) -> None:
        self.problem = problem
        self.measurements = measurements
        self.policy = policy
        self.baseline = measurements.get(BASELINE)

    def rank(self, candidate: Candidate) -> tuple[Any, ...]:
        """Return the stable order: the policy's recipes as listed, unscaled first, then names."""
        allow = self.policy.recipes.allow
        place = -1 if candidate.recipe is None else allow.index(candidate.recipe) if candidate.recipe in allow else 999
        return (place, str(candidate))

    def of(self, candidate: Candidate) -> Measurement | None:
        """Return the measurement of `candidate`; of one that is the framework's own product it is the baseline's."""
        return self.measurements.get(candidate)

    def accurate(self, candidate: Candidate) -> bool:
        """Return whether the error passes: within the tolerance, or at most 1.25x the baseline's own."""
        found = self.of(candidate)
        if found is None or found.error is None:
            return False
        return found.error.value(self.policy.error.metric) <= self.policy.error.tolerance or self._as_good(candidate)

    def settled(self, chosen: Candidate) -> bool:
        """Return whether none that noise left undecided, or that scatters by more than it takes, could be faster."""
        best = self.of(chosen) or self.baseline
        found = [m for m in self.measurements.values() if m is not None]
        undecided = [m for m in found if not m.settled or m.spread_us > m.latency_us]
        if best is None or not undecided:
            return not undecided
        return all(min(m.latency_us, m.median_us) > best.median_us and not _tied(m, best) for m in undecided)

    def lossless(self, candidate: Candidate) -> bool:
        """Return whether it is declared no narrower than the inputs and measured no worse than the baseline."""
        return not narrower(self.problem, candidate) and self._as_good(candidate)

    def gate(self, candidate: Candidate) -> float:
        """Return the speedup that `candidate` must reach."""
        gates = self.policy.gate
        return gates.min_speedup_lossless if self.lossless(candidate) else gates.min_speedup

    def _as_good(self, candidate: Candidate) -> bool:
        found, own = self.of(candidate), self.baseline
        if found is None or found.error is None or own is None or own.error is None:
            return False
        return as_good(found.error, own.error, own.rounding, self.policy.error.metric)

    def fast(self, candidate: Candidate) -> bool:
        """Return whether its speedup passes the gate, and its gain is more than noise; any passes a gate of 0."""
        found, gate = self.of(candidate), self.gate(candidate)
        if found is None or self.baseline is None or gate <= 0.0:
            return found is not None and self.baseline is not None
        return found.settled and found.speedup >= gate and not _tied(found, self.baseline)

    def verdict(self, candidate: Candidate) -> Verdict:
        """Return what became of an able candidate."""
        found = self.of(candidate)
        if found is None:
            return Verdict(candidate, "not measured", "not measured")
        if found is self.baseline:
            return Verdict(candidate, "baseline", "the framework's own product", found)
        accurate, fast = self.accurate(candidate), self.fast(candidate)
        figures = f"{found.speedup:.2f}x, {self._error(candidate)}"
        if accurate and fast:
            return Verdict(candidate, "passed", figures, found)
        if accurate:
            gate = self.gate(candidate)
            noise = " (too noisy to tell)" if found.speedup >= gate or not found.settled else ""
            return Verdict(candidate, "too slow", f"{gate:g}x not reached{noise}: {figures}", found)
        return Verdict(candidate, "too wrong", f"error above tolerance: {figures}", found)

    def choose(self, verdicts: Sequence[Verdict]) -> tuple[Candidate, str]:
        """Return the winner and the reason."""
        passed = [v.candidate for v in verdicts if v.outcome == "passed"]
        if passed:
            winner = self._fastest(passed)
            found = self.of(winner)
            assert found is not None
            assert self.baseline is not None
            times = f"{_us(found.latency_us)} against {_us(self.baseline.latency_us)}"
            return winner, f"{found.speedup:.2f}x the framework's own product ({times}), {self._error(winner)}"
        fallback = self._fallback(verdicts)
        why = self._why([v for v in verdicts if v.candidate.backend != "bf16_fallback"])
        if self.problem.encoded and (better := self._faster_than_decoding(verdicts, fallback)):
            return better, f"{why}; but it is faster than decoding the operands and multiplying those"
        return fallback, why

    def _fastest(self, candidates: Sequence[Candidate]) -> Candidate:
        table = {c: found for c in candidates if (found := self.of(c)) is not None}
        best = min(table.values(), key=lambda found: found.latency_us)
        return min((c for c, found in table.items() if found is best or _tied(found, best)), key=self.rank)

    def _fallback(self, verdicts: Sequence[Verdict]) -> Candidate:
        lossy = [v for v in verdicts if v.measurement and narrower(self.problem, v.candidate)]
        wrong = any(v.outcome == "too wrong" and self.fast(v.candidate) for v in verdicts)
        wrong = wrong or (bool(lossy) and all(v.outcome == "too wrong" for v in lossy))
        chain = self.policy.fallback.too_wrong if wrong else self.policy.fallback.too_slow
        able = [v.candidate for v in verdicts if v.outcome != "rejected"]
        for name in (*chain, "bf16_fallback"):
            for candidate in able:
                if candidate.backend == name and self._serves(candidate):
                    return candidate
        return BASELINE

    def _serves(self, candidate: Candidate) -> bool:
        if candidate.backend == "bf16_fallback":
            return True
        found = self.of(candidate)
        if found is None or self.baseline is None or not self.lossless(candidate):  # what loses has its own gate
            return False
        return found.latency_us <= self.baseline.latency_us or _tied(found, self.baseline)

    def _faster_than_decoding(self, verdicts: Sequence[Verdict], fallback: Candidate) -> Candidate | None:
        own = self.of(fallback)
        if own is None:
            return None
        rest = [v.candidate for v in verdicts if v.measurement and self.accurate(v.candidate)]
        rest = [c for c in rest if (m := self.of(c)) and m.latency_us < own.latency_us and not _tied(m, own)]
        return self._fastest(rest) if rest else None

    def _why(self, verdicts: Sequence[Verdict]) -> str:
        """Return why nothing passed, by the candidate that came closest."""
        wrong = [v for v in verdicts if v.outcome == "too wrong" and self.fast(v.candidate)]
        slow = [v for v in verdicts if v.outcome == "too slow"] or [v for v in verdicts if v.outcome == "too wrong"]
        for group in (wrong, slow):
            if group:
                best = max(group, key=lambda v: (v.measurement.speedup if v.measurement else 0.0, str(v.candidate)))
                return f"{best.reason} ({best.candidate})"
        waiting = [v.candidate for v in verdicts if v.outcome == "not measured"]
        if waiting:
            return f"not measured: {', '.join(map(str, waiting))}"
        rejected = [v for v in verdicts if v.outcome == "rejected"]
        first = {v.candidate.backend: v.reason for v in reversed(rejected)}  # one reason a backend: the table has all
        detail = "; ".join(f"{name}: {reason}" for name, reason in sorted(first.items())) or "none is registered"
        return f"no other backend can run it: {detail}"

    def _error(self, candidate: Candidate) -> str:
        found = self.of(candidate)
        if found is None or found.error is None:
            return "error not measured"
        metric = self.policy.error.metric
        value = found.error.value(metric)
        if self.lossless(candidate):
            return f"{metric} {value:.2g}, no worse than the framework's own"
        if value > self.policy.error.tolerance and self.accurate(candidate):
            return f"{metric} {value:.2g}, at most {LOSSLESS_RATIO:g}x the framework's own"
        return f"{metric} {value:.2g}, tolerance {self.policy.error.tolerance:g}"


def narrower(problem: Problem, candidate: Candidate) -> bool:
    """Return whether a candidate is declared to keep less than the inputs hold."""
    return candidate.scaled and not (problem.a.encoded and problem.b.encoded)


def as_good(error: Error, baseline: Error, rounding: Error | None, metric: str) -> bool:
    """Return whether an error is at most LOSSLESS_RATIO times the baseline's own, or than rounding to out_dtype costs.

    A baseline may hit every rounding of a sample, with an error of zero; a value on the other side of a tie is no loss.
    """
    allowed = max(e.value(metric) for e in (baseline, rounding) if e is not None)
    return error.value(metric) <= LOSSLESS_RATIO * allowed


def named(decision: Decision, candidate: Candidate) -> Decision:
    """Return `decision` changed to what the caller asked for by name, unmeasured."""
    verdicts = tuple(replace(v, outcome="chosen") if v.candidate == candidate else v for v in decision.candidates)
    return replace(decision, candidate=candidate, reason="asked for by name", candidates=verdicts)


def _tied(one: Measurement, other: Measurement) -> bool:
    """Return whether two latencies differ by no more than their spread."""
    return abs(one.latency_us - other.latency_us) <= max(one.spread_us, other.spread_us)


def _us(latency_us: float) -> str:
    """Return a latency with a unit that a person would choose."""
    for limit, unit in ((1e3, "us"), (1e6, "ms")):
        if latency_us < limit:
            return f"{latency_us / limit * 1e3:.3g} {unit}"
    return f"{latency_us / 1e6:.3g} s"
