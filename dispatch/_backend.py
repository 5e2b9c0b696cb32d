"""What a backend is: what it can do, why not, how it prepares operands and makes a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from dispatch._problem import ACTIVATIONS, Problem
from dispatch._recipe import RecipePair, ScalingRecipe

Plan = Callable[..., Any]
"""A prepared product, `plan(a, b)` or `plan(a, b, bias)`; it does no choosing. See Backend.plan."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """One reason for no: what it is about, the value found and the value needed."""

    subject: str
    found: str
    needed: str

    def __str__(self) -> str:
        return f"{self.subject} is {self.found}; needs {self.needed}"


@dataclass(frozen=True, slots=True)
class Capability:
    """One set of problems that a backend declares it can do.

    frameworks, dtypes (of each operand), out_dtypes: allowed names. archs: exact names, or a prefix with `*`.
    recipes: the scaling recipe pairs it can run; None among them stands for an unscaled product, which loses nothing.
    accumulations: modes that it can run a scaled product in. multiple_of: what m, n and k must be divisible by.
    batched, bias, activations: what it takes beside one 2-D product. status: `measured` or only `compiled`.
    """

    frameworks: tuple[str, ...]
    archs: tuple[str, ...]
    dtypes: tuple[str, ...]
    out_dtypes: tuple[str, ...]
    recipes: tuple[RecipePair | None, ...] = (None,)
    accumulations: tuple[str, ...] = ()
    multiple_of: tuple[int, int, int] = (1, 1, 1)
    batched: bool = True
    bias: bool = True
    activations: tuple[str, ...] = ACTIVATIONS
    status: str = "measured"

    def __post_init__(self) -> None:
        stated = (self.frameworks, self.archs, self.dtypes, self.out_dtypes, self.recipes, self.accumulations)
        if any(isinstance(x, str) for x in (*stated, self.activations, *self.recipes)):
            raise TypeError(f"{self}: allowed: tuples of names; as recipes a tuple of RecipePair.parse(...) or None")

    def runs_on(self, arch: str) -> bool:
        """Return whether `arch` is among its archs."""
        return any(arch == x or (x.endswith("*") and arch.startswith(x[:-1])) for x in self.archs)

    def rejections(self, problem: Problem) -> list[Rejection]:
        """Return every reason why `problem` is outside this capability."""
        found = [
            *_unless_in("framework", [problem.framework], self.frameworks),
            *([] if self.runs_on(problem.arch) else [Rejection("arch", problem.arch, ", ".join(self.archs))]),
            *_unless_in("dtype", [problem.a.dtype, problem.b.dtype], self.dtypes),
            *_unless_in("out_dtype", [problem.out_dtype], self.out_dtypes),
            *_unless_in("recipe", [problem.recipe], self.recipes),
        ]
        for name, size, step in zip("mnk", (problem.m, problem.n, problem.k), self.multiple_of, strict=True):
            if size % step:
                found.append(Rejection(name, str(size), f"a multiple of {step}"))
        if problem.batch and not self.batched:
            found.append(Rejection("batch", str(problem.batch), "a 2-D product"))
        if problem.bias and not self.bias:
            found.append(Rejection("bias", problem.bias, "no bias"))
        if problem.activation:
            found += _unless_in("activation", [problem.activation], self.activations)
        return found


def _unless_in(subject: str, values: Sequence[object], allowed: Sequence[object]) -> list[Rejection]:
    needed = ", ".join("none" if x is None else str(x) for x in allowed)
    bad = dict.fromkeys(x for x in values if x not in allowed)
    return [Rejection(subject, "none" if x is None else str(x), needed) for x in bad]


def closest(capabilities: Iterable[Capability], problem: Problem) -> list[Rejection]:
    """Return [] if a capability covers `problem`, else the reasons of the one that came closest."""
    reasons = [capability.rejections(problem) for capability in capabilities]
    return min(reasons, key=len, default=[Rejection("capabilities", "none", "at least one")])


@runtime_checkable
class Backend(Protocol):
    """One plugin's route to a product.

    name: also its entry point's. capabilities: what it can do; each recipe pair in them that the policy lists
    becomes a candidate of its own.
    """

    name: str
    capabilities: Sequence[Capability]

    def rejections(self, problem: Problem) -> Sequence[Rejection]:
        """Return every reason why it cannot run `problem` with `problem.recipe`; empty means that it can.

        Called once a problem and candidate, when nothing is known yet; cheap, no framework imported, no values read.
        """

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> Any:
        """Return `operand`, an array (..., rows, columns), quantized once as `plan` wants it.

        axis: the contraction axis, -1 for a and -2 for b. Called for a PreparedOperand; the result is kept.
        """

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return a callable for `problem` (its recipe and accumulation are the candidate's). Heavy imports go here.

        The callable takes a (*batch, m, k) and b (*batch, k, n), each an array of any strides, or a ScaledArray where
        `problem.a.recipe` (b: the same) is set, or what `prepare` returned where `.prepared` is; and bias, an array
        that broadcasts to the result, only where problem.bias is set. It returns (*batch, m, n) in out_dtype on the
        same device, and never writes to its inputs.
        """
