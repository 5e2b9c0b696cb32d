"""One problem measured: each candidate's error on the caller's operands, then all latencies, interleaved."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from dispatch._decision import as_good, narrower
from dispatch._measurement import BASELINE, METRICS, Candidate, Error, Measurement
from dispatch._problem import Problem
from dispatch.frameworks._clock import map_arrays
from dispatch.frameworks.operands import all_stated, array_of, decode, decoded, native
from dispatch.measuring.error import Rows, Truth, compare, finite_fault, truth
from dispatch.measuring.latency import Timing, measure_latency
from dispatch.quantization import PreparedOperand, ScaledArray, prepare, quantize
from dispatch.registry.faults import is_out_of_memory, said

if TYPE_CHECKING:
    from dispatch._backend import Plan
    from dispatch.frameworks import Framework
    from dispatch.policies.policy import Policy

Operands = tuple[Any, ...]
"""a and b, and the bias where the problem has one."""
Timings = dict[Candidate, Timing]


@dataclass(slots=True)
class Table:
    """What was measured of BASELINE and each candidate, and what failed, with the reason.

    timings: latencies; where they are complete beforehand only errors are measured. degenerate: the operands are
    constant or not finite; the errors are then the worse of theirs and of random data's. postponed: candidates that
    were left out, since compiling the others took as long as the policy allows. elsewhere: errors that do
    not pass on other problems that share the decision; the worse counts.
    """

    measurements: dict[Candidate, Measurement] = field(default_factory=dict)
    timings: Timings = field(default_factory=dict)
    degenerate: bool = False
    postponed: list[Candidate] = field(default_factory=list)
    elsewhere: dict[Candidate, Error] = field(default_factory=dict)
    faults: dict[Candidate, str] = field(default_factory=dict)
    out_of_memory: dict[Candidate, str] = field(default_factory=dict)

    def blame(self, candidate: Candidate, error: BaseException) -> None:
        """Record what a candidate raised; a KeyboardInterrupt is nobody's fault and is raised again."""
        if isinstance(error, KeyboardInterrupt):
            raise error
        where = self.out_of_memory if is_out_of_memory(error) else self.faults
        where[candidate] = said(error)[:500]

    def out(self, candidate: Candidate) -> bool:
        """Return whether something went wrong with it, or it has to wait."""
        return candidate in self.faults or candidate in self.out_of_memory or candidate in self.postponed


@dataclass(frozen=True, slots=True)
class Entrant:
    """A candidate, its plan, and a function that gives it operands as that plan takes them."""

    candidate: Candidate
    plan: Plan
    operands: Callable[[Operands], Operands]


def measure(
    room: Framework, problem: Problem, entrants: Sequence[Entrant], operands: Operands, policy: Policy, table: Table
) -> None:
    """Fill `table` with the latency and error of the baseline and `entrants` on `operands`, in canonical shapes.

    operands: the caller's own; under tracing concrete random ones. Never raises for a candidate's fault.
    """
    operands = all_stated(room, operands, problem)
    base = Baseline(room, problem, operands)
    errors, rounding, table.degenerate = _errors(base, entrants, operands, policy, table)
    data = "random" if table.degenerate or "traced" in problem.modes else "caller"
    if table.degenerate:  # says nothing of other data
        other = random_operands(room, problem, operands)
        again, rounding, _ = _errors(Baseline(room, problem, other), entrants, other, policy, table)
        errors = {candidate: worse_error(errors[candidate], error) for candidate, error in again.items()}
    able = [entrant for entrant in entrants if not table.out(entrant.candidate)]
    if not {BASELINE, *(e.candidate for e in able)} <= set(table.timings):
        gates = {e.candidate: _gate(problem, e.candidate, errors, rounding, policy) for e in able}
        table.timings = _timed(base, able, operands, gates, policy, table)
    for candidate, error in table.elsewhere.items():
        errors[candidate] = worse_error(errors.get(candidate, error), error)
    for candidate in (BASELINE, *(e.candidate for e in able)):
        timing = table.timings[candidate]
        table.measurements[candidate] = Measurement(
            latency_us=timing.latency_us,
            median_us=timing.median_us,
            spread_us=timing.spread_us,
            rounds=timing.rounds,
            speedup=timing.speedup,
            error=errors[candidate],
            error_data=data,
            settled=timing.settled,
            rounding=rounding if candidate == BASELINE else None,
        )


def _timed(
    base: Baseline,
    able: list[Entrant],
    operands: Operands,
    gates: dict[Candidate, float],
    policy: Policy,
    table: Table,
) -> Timings:
    """Return the timings; a candidate that fails only now (in a graph, in its tenth run) is blamed and left out."""
    while True:
        calls = [(base.call, base.operands), *((e.plan, e.operands(operands)) for e in able)]
        names = [str(BASELINE), *(str(e.candidate) for e in able)]
        guarded = [(_named(plan, index, names[index]), given) for index, (plan, given) in enumerate(calls)]
        try:
            stopwatch = base.room.stopwatch(guarded, policy.tuning.memory_mb << 20)
            needed = [1.0, *(gates[e.candidate] for e in able)]
            timings = measure_latency(stopwatch, needed, policy.tuning.budget_ms)
        except _CandidateError as error:
            if error.index == 0:
                raise error.cause from None
            table.blame(able.pop(error.index - 1).candidate, error.cause)
        else:
            return dict(zip((BASELINE, *(e.candidate for e in able)), timings, strict=True))


class _CandidateError(Exception):
    def __init__(self, index: int, cause: BaseException) -> None:
        super().__init__(said(cause))
        self.index, self.cause = index, cause


def _named(plan: Plan, index: int, name: str) -> Plan:
    """Return `plan` whose errors say which call of the stopwatch they come from."""

    def call(*operands: Any) -> Any:
        try:
            return plan(*operands)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a plugin's code may raise anything
            raise _CandidateError(index, error) from error

    call.__name__ = name
    return call


def _gate(
    problem: Problem, candidate: Candidate, errors: dict[Candidate, Error], rounding: Error, policy: Policy
) -> float:
    metric = policy.error.metric
    good = as_good(errors[candidate], errors[BASELINE], rounding, metric)
    lossless = good and not narrower(problem, candidate)
    return policy.gate.min_speedup_lossless if lossless else policy.gate.min_speedup


class Baseline:
    """The framework's own product on decoded operands, which are decoded once, outside of any timing."""

    def __init__(self, room: Framework, problem: Problem, operands: Operands) -> None:
        self.room = room
        self.problem = decoded(problem)
        self.call = native(self.problem)
        a, b, *bias = operands
        plain = self.problem
        self.operands: Operands = (decode(room, a, plain.a.dtype), decode(room, b, plain.b.dtype), *bias)
        self._given = (a, b)

    @property
    def exact(self) -> Operands:
        """a and b as exactly as they are known: in float32 what a ScaledArray holds."""
        given = zip(self._given, self.operands, strict=False)
        return tuple(x.dequantize("float32") if isinstance(x, ScaledArray) else own for x, own in given)

    def truth(self, rows: Rows | None = None) -> Truth:
        """Return the reference, for these rows or for a sample."""
        a, b = self.exact
        bias = self.operands[2] if len(self.operands) > 2 else None
        return truth(self.room, self.problem, a, b, bias, rows)


def _errors(
    base: Baseline, entrants: Sequence[Entrant], operands: Operands, policy: Policy, table: Table
) -> tuple[dict[Candidate, Error], Error, bool]:
    """Return every error by candidate, BASELINE's too, that of rounding, and whether the data are degenerate."""
    reference = base.truth()
    own = reference.sampled(base.room, base.call(*base.operands))
    errors = {BASELINE: compare(own, reference.values, own)}
    end = time.monotonic() + policy.tuning.compile_ms / 1e3
    for entrant in entrants:
        if time.monotonic() > end and len(errors) > 1:
            table.postponed.append(entrant.candidate)
        if table.out(entrant.candidate):
            continue
        try:
            out, wrote = _run(base, entrant, operands, policy)
            fault = "wrote to its operands" if wrote else _fault(base.room, base.problem, out)
            found = None if fault else reference.sampled(base.room, out)
        except BaseException as error:  # a plugin's code may raise anything
            table.blame(entrant.candidate, error)
            continue
        if found is not None and finite_fault(found, own) and np.isfinite(reference.values).all():
            fault = "returned values that are not finite where the framework's own product is"
        if fault is not None or found is None:
            table.faults[entrant.candidate] = str(fault)
        else:
            errors[entrant.candidate] = compare(found, reference.values, own)
    return errors, reference.rounding, reference.degenerate


def _run(base: Baseline, entrant: Entrant, operands: Operands, policy: Policy) -> tuple[Any, bool]:
    """Return what a plan makes of the operands, and whether it wrote to them.

    On a CPU it is given copies, if the policy's memory has room for three sets of them; elsewhere it is trusted.
    """
    room, given = base.room, entrant.operands(operands)
    arrays = _arrays(room, given)
    taken = 3 * sum(x.nbytes for x in arrays)  # the copies, and what they are compared by
    if base.problem.device != "cpu" or taken > policy.tuning.memory_mb << 20:
        return entrant.plan(*given), False
    tried = map_arrays(given, room.copied, lambda x: room.is_array_type(type(x)))
    out = entrant.plan(*tried)
    pairs = zip(_arrays(room, tried), arrays, strict=True)
    return out, any(one is not other and _bits(room, one) != _bits(room, other) for one, other in pairs)


def _arrays(room: Framework, operands: Operands) -> list[Any]:
    """Return every array in the operands."""
    found: list[Any] = []

    def add(array: Any) -> Any:
        found.append(array)
        return array

    map_arrays(operands, add, lambda x: room.is_array_type(type(x)))
    return found


def _bits(room: Framework, array: Any) -> bytes:
    """Return the array's memory; of Python objects where each is."""
    return np.ascontiguousarray(room.to_numpy(array)).tobytes()


def _fault(room: Framework, problem: Problem, out: Any) -> str | None:
    """Return how a plan's result differs from what was asked for, or None."""
    if not room.is_array_type(type(out)):
        return f"returned {type(out).__name__}, not an array of {room.name}"
    found = (tuple(out.shape), room.dtype_name(out), room.device(out))
    wanted = ((*problem.batch, problem.m, problem.n), problem.out_dtype, problem.device)
    for name, has, needs in zip(("shape", "dtype", "device"), found, wanted, strict=True):
        if has != needs:
            return f"returned {name} {has}, not {needs}"
    return None


def worse_error(one: Error, other: Error) -> Error:
    """Return the worse of two errors, metric by metric."""
    values = {metric: max(one.value(metric), other.value(metric)) for metric in METRICS}
    return Error(**values, rows=min(one.rows, other.rows))


def random_operands(room: Framework, problem: Problem, operands: Operands) -> Operands:
    """Return concrete normal operands of the same kind, ScaledArrays and prepared ones included; a bias of zeros."""
    a, b, *bias = operands
    arrays = [_stand_in(room, x) for x in (a, b)]
    made: list[Any] = []
    first, second = arrays
    for given, values in zip((a, b), room.sample(problem, first, second, problem.k), strict=True):
        if isinstance(given, ScaledArray):
            made.append(quantize(values, given.recipe, axis=given.axis))
        else:
            made.append(prepare(values) if isinstance(given, PreparedOperand) else values)
    zeros = [
        room.cast(room.asarray(np.zeros(x.shape, np.float32), array_of(made[0])), room.dtype_name(x)) for x in bias
    ]
    return (*made, *zeros)


def _stand_in(room: Framework, operand: Any) -> Any:
    """Return an array with the shape, dtype and device that random values are wanted for."""
    if isinstance(operand, ScaledArray):  # its values may be another thread's tracers
        return room.normal(operand.shape, operand.dtype, 0, room.device(operand.data))
    return array_of(operand)
