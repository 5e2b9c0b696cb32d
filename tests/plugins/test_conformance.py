"""Every registered backend, on problems drawn from what it declares; a new backend is found here by itself."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

import pytest

import dispatch
from dispatch import Backend, Problem
from dispatch._api import engine
from dispatch.testing import check, problems

EACH = 4  # problems of one backend, framework, device, dtype and recipe at most, spread over what there are


def cases() -> Iterator[Any]:
    """Yield every backend with a sample of its problems; those on a GPU are marked."""
    for name, registered in engine().registry.backends.items():
        found = sorted(problems(registered.backend), key=group)
        for _, members in groupby(found, key=group):
            own = list(members)
            for problem in own[:: max(1, -(-len(own) // EACH))]:
                marks = [pytest.mark.gpu] if problem.device.startswith("cuda") else []
                yield pytest.param(registered.backend, problem, id=f"{name}-{problem}", marks=marks)


def group(problem: Problem) -> tuple[str, ...]:
    return problem.framework, problem.device, problem.a.dtype, str(problem.recipe)


@pytest.mark.parametrize(("backend", "problem"), list(cases()))
def test_a_backend_does_what_it_declares(backend: Backend, problem: Problem) -> None:
    wide = {"float64", "int64", "uint64", "complex128"} & {problem.a.dtype, problem.b.dtype, problem.out_dtype}
    if problem.framework == "jax" and wide:
        import jax

        with jax.enable_x64(True):
            check(backend, problem)
    else:
        check(backend, problem)


def test_every_backend_of_this_house_is_covered_somewhere() -> None:
    registry = engine().registry
    assert {"bf16_fallback", "cpu_blas", "cublas"} <= set(registry.backends)
    frameworks = {problem.framework for problem in problems(registry.backends["bf16_fallback"].backend)}
    assert frameworks == set(dispatch.installed())
