"""Which candidates there are for a problem, and why the others are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from dispatch._backend import Backend, Rejection
from dispatch._measurement import Candidate
from dispatch._problem import FP8_DTYPES, Operand, Problem
from dispatch._recipe import FORMATS, RecipePair, ScalingRecipe

if TYPE_CHECKING:
    from dispatch.policies.policy import Policy


def proposals(backend: Backend, problem: Problem, policy: Policy) -> Iterator[Candidate]:
    """Yield every candidate of a backend that the policy lists: one for each recipe, accumulation and config.

    Backends may have `configs(problem) -> Iterable[str]`, the kernel configs worth measuring for a candidate.
    """
    recipes = dict.fromkeys(recipe for capability in backend.capabilities for recipe in capability.recipes)
    configs = getattr(backend, "configs", None)
    for recipe in recipes:
        if recipe is not None and recipe not in policy.recipes.allow:
            continue
        for accumulation in _accumulations(backend, recipe, problem, policy) or [None]:
            proposed = problem.proposing(recipe, accumulation)
            for config in (configs(proposed) if configs else None) or [None]:
                yield Candidate(backend.name, recipe, accumulation, config)


def _accumulations(backend: Backend, recipe: RecipePair | None, problem: Problem, policy: Policy) -> list[str | None]:
    """Return the modes that the policy lists, or where it lists none of them all that there are."""
    here = [x for x in backend.capabilities if recipe and recipe in x.recipes and problem.framework in x.frameworks]
    modes = dict.fromkeys(mode for capability in here for mode in capability.accumulations)
    return [mode for mode in modes if mode in policy.recipes.accumulation] or [*modes]


def disallowed(name: str, policy: Policy) -> list[Rejection]:
    """Return the rejection of a backend that the policy keeps out, or []."""
    if policy.backends.permits(name):
        return []
    return [Rejection("policy", policy.name, f"one whose [backends] allow {name}")]


def unlisted(backend: Backend) -> list[Rejection]:
    """Return the rejection of a backend none of whose recipes the policy lists."""
    own = ", ".join(str(recipe) for capability in backend.capabilities for recipe in capability.recipes)
    return [Rejection("policy", "without its recipes", f"[recipes] allow with one of {own}")]


def unquantizable(candidate: Candidate, problem: Problem, policy: Policy) -> list[Rejection]:
    """Return why a scaled candidate may not take these operands: the policy, or another quantization."""
    assert candidate.recipe is not None
    found = []
    modes = policy.recipes.accumulation
    if candidate.accumulation == "fast" and "fast" not in modes:  # who lists fast takes better ones too
        found.append(Rejection("accumulation", "fast", f"[recipes] accumulation of the policy: {', '.join(modes)}"))
    for side, operand, recipe in (("a", problem.a, candidate.recipe.a), ("b", problem.b, candidate.recipe.b)):
        if operand.recipe is not None and operand.recipe != recipe:
            found.append(Rejection(side, f"quantized as {operand.recipe}", str(recipe)))
        elif operand.recipe is None and not _takes(operand, recipe):
            found.append(Rejection(side, f"{operand.dtype} without scales", f"{recipe.storage_dtype} or a wider dtype"))
        if operand.recipe is None and operand.dtype not in policy.recipes.inputs:
            allowed = ", ".join(policy.recipes.inputs) or "none"
            found.append(Rejection(f"dtype of {side}", operand.dtype, f"[recipes] inputs of the policy: {allowed}"))
    return found


def _takes(operand: Operand, recipe: ScalingRecipe) -> bool:
    """Return whether raw values can stand under `recipe`: FP8 ones only as they are, with a scale of one."""
    if operand.dtype not in FP8_DTYPES:
        return True
    return operand.dtype == FORMATS[recipe.dtype] and recipe.granularity == "tensor"


def summarized(name: str, asked: dict[Candidate, list[Rejection]]) -> dict[Candidate, list[Rejection]]:
    """Return the rejections of a backend's candidates; one for all of them where the machine or framework is wrong."""
    for subject in ("framework", "arch"):
        shared = [reason for reasons in asked.values() for reason in reasons if reason.subject == subject]
        if shared and all(any(reason.subject == subject for reason in reasons) for reasons in asked.values()):
            return {Candidate(name): shared[:1]}
    return {candidate: reasons for candidate, reasons in asked.items() if reasons}


def no_backend(name: str, problem: Problem, rejections: dict[Candidate, list[Rejection]]) -> str:
    """Return the text of a NoBackendError: the backend that was asked for, the problem, and each reason."""
    why = [f"  {x}: {'; '.join(map(str, reasons))}" for x, reasons in rejections.items() if x.backend == name]
    return "\n".join([f"No backend can run {problem}: asked was {name}", *why, "Leave out backend=, or change that."])
