"""Buckets of m: while decoding, m is the batch and changes from step to step; one decision serves a whole bucket."""

from __future__ import annotations

from dispatch._problem import Problem

BUCKETS = ((1, 16), (17, 32), (33, 64), (65, 128), (129, 256))
"""First and last m of each: the heights of tiles that decode kernels have."""


def bucket(problem: Problem) -> tuple[int, int]:
    """Return the first and the last m whose products share the decision for `problem`: its own m alone for most.

    On one GPU, for a matrix of up to 256 rows that is neither quantized nor strided. On a CPU one row and sixteen have
    little in common.
    """
    plain = problem.a.layout == "row" and problem.a.recipe is None and not problem.a.prepared
    if problem.arch.startswith("sm") and plain and not problem.batch and "," not in problem.device:
        for first, last in BUCKETS:
            if first <= problem.m <= last:
                return first, last
    return problem.m, problem.m
