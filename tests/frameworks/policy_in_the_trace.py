"""The policy in JAX's traces, run by test_jax_transforms.py in a process whose trace caches nothing else has used."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dispatch

jax = pytest.importorskip("jax")


def array(shape: tuple[int, ...], seed: int) -> Any:
    return jax.numpy.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4, "float32")


class TestPolicyInTheTrace:
    """A function compiled under one policy is traced again under another, once."""

    def test_use_policy_retraces(self, winner: Any) -> None:
        a, b = array((3, 9), 0), array((9, 2), 1)
        backends = []

        @jax.jit
        def product(x: Any, y: Any) -> Any:
            backends.append(dispatch.explain(x, y).backend)
            return dispatch.matmul(x, y)

        product(a, b)
        for _ in range(2):
            with dispatch.use_policy("native"):
                product(a, b)
            product(a, b)
            with dispatch.use_policy(gate={"min_speedup_lossless": 1000.0}):
                product(a, b)
        assert backends == ["winner", "bf16_fallback", "bf16_fallback"]

    def test_equal_policies_share_a_trace(self) -> None:
        a, traces = array((3, 3), 0), []

        @jax.jit
        def product(x: Any) -> Any:
            traces.append(1)
            return dispatch.matmul(x, x)

        for _ in range(3):
            with dispatch.use_policy(tuning={"mode": "off"}, error={"tolerance": 0.25}):
                product(a)
        with dispatch.use_policy(error={"tolerance": 0.25}), dispatch.use_policy(tuning={"mode": "off"}):
            product(a)
        assert len(traces) == 1

    def test_the_policy_of_the_process_by_name_shares_its_trace(self) -> None:
        a, traces = array((3, 3), 0), []

        @jax.jit
        def product(x: Any) -> Any:
            traces.append(1)
            return x + 1

        product(a)
        with dispatch.use_policy("strict"), dispatch.use_policy("default"):
            product(a)
        assert len(traces) == 1
