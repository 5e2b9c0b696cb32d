"""The main job: a real product is measured, chosen by its own printed figures, and explained."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dispatch

LOSSY = {"error": {"metric": "relative_l2", "tolerance": 0.005}}


def follows_its_figures(decision: dispatch.Decision, metric: str, tolerance: float) -> None:
    """Check that the choice is what the gates make of the decision's own measurements."""
    assert decision.baseline is not None
    assert decision.source in ("measured", "store")
    for verdict in decision.candidates:
        assert verdict.reason
        found = verdict.measurement
        assert (found is None) == (verdict.outcome in ("rejected", "not measured"))
        if found is None or verdict.candidate.backend == "bf16_fallback":
            continue
        assert found.error is not None
        passes = found.error.value(metric) <= tolerance and found.speedup >= 1.5
        if verdict.candidate.recipe is not None and verdict.outcome in ("chosen", "passed"):
            assert passes
        if verdict.outcome == "too wrong":
            assert "error above tolerance" in verdict.reason
            assert found.error.value(metric) > tolerance
        if verdict.outcome == "too slow":
            assert "x not reached" in verdict.reason
    scaled = [v for v in decision.candidates if v.candidate.recipe is not None and v.outcome in ("chosen", "passed")]
    assert (decision.candidate.recipe is not None) == bool(scaled)
    if scaled:
        fastest = min(v.measurement.latency_us for v in scaled if v.measurement)
        chosen = decision.measurement
        assert chosen is not None
        assert chosen.latency_us - chosen.spread_us <= fastest


def right(room: Any, a: Any, b: Any, decision: dispatch.Decision, limit: float) -> None:
    """Check sampled rows of the product itself against float64."""
    rows = np.arange(0, a.shape[0], max(1, a.shape[0] // 16))
    out = room.to_numpy(dispatch.matmul(a, b)[room.asarray(rows, a)]).astype(np.float64)
    reference = room.isolated(lambda: room.reference(a[room.asarray(rows, a)], b))
    assert np.linalg.norm(out - reference) / np.linalg.norm(reference) < limit, decision


@pytest.mark.parametrize("framework", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_choice_on_a_cpu_follows_its_figures(framework: str, dtype: str) -> None:
    pytest.importorskip(framework)
    room = dispatch.framework(framework)
    a, b = (room.normal((192, 192), dtype, seed, None if framework == "numpy" else "cpu") for seed in (0, 1))
    decision = dispatch.explain(a, b)
    if dtype == "float32" or decision.baseline is None:
        assert decision.backend == "bf16_fallback"
        assert "no other backend can run it" in decision.reason
    else:
        follows_its_figures(decision, "similarity_loss", 0.005)
        own, chosen = decision.baseline, decision.measurement
        assert chosen is not None
        assert chosen.error is not None
        assert own.error is not None
        assert decision.backend == "bf16_fallback" or chosen.latency_us < own.latency_us
        assert chosen.error.relative_l2 <= 1.25 * max(own.error.relative_l2, 4e-3)
    right(room, a, b, decision, {"bfloat16": 1e-2, "float16": 2e-3, "float32": 1e-5}[dtype])


@pytest.mark.gpu
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("size", [512, 4096])
@pytest.mark.parametrize("sections", [{}, LOSSY], ids=["default", "relative_l2"])
def test_choice_on_a_gpu_follows_its_figures(framework: str, size: int, sections: dict[str, Any]) -> None:
    room = dispatch.framework(framework)
    a, b = (room.normal((size, size), "bfloat16", seed, "cuda:0") for seed in (0, 1))
    metric, tolerance = ("relative_l2", 0.005) if sections else ("similarity_loss", 0.005)
    with dispatch.use_policy(**sections):
        decision = dispatch.explain(a, b)
        follows_its_figures(decision, metric, tolerance)
        right(room, a, b, decision, 1e-2 if sections else 0.06)
    if sections:
        assert decision.candidate.recipe is None
        assert "error above tolerance" in decision.reason


@pytest.mark.gpu
def test_large_torch_product_runs_in_fp8() -> None:
    room = dispatch.framework("torch")
    a, b = (room.normal((8192, 8192), "bfloat16", seed, "cuda:0") for seed in (0, 1))
    decision = dispatch.explain(a, b)
    assert decision.backend == "cublas"
    assert decision.candidate.recipe is not None
    assert decision.speedup is not None
    assert decision.speedup >= 1.5
    chosen = decision.measurement
    assert chosen is not None
    assert chosen.error is not None
    assert 0 < chosen.error.similarity_loss < 0.005
    right(room, a, b, decision, 0.06)


@pytest.mark.gpu
def test_jitted_jax_takes_the_decision_of_its_shapes() -> None:
    import jax

    room = dispatch.framework("jax")
    a, b = (room.normal((1024, 1024), "bfloat16", seed, "cuda:0") for seed in (2, 3))
    seen: list[dispatch.Decision] = []

    @jax.jit
    def product(a: Any, b: Any) -> Any:
        seen.append(dispatch.explain(a, b))
        return dispatch.matmul(a, b)

    out = room.to_numpy(product(a, b)).astype(np.float64)
    reference = room.isolated(lambda: room.reference(a, b))
    assert np.linalg.norm(out - reference) / np.linalg.norm(reference) < 0.06
    follows_its_figures(seen[0], "similarity_loss", 0.005)
    assert "traced" in seen[0].problem.modes


@pytest.mark.gpu
def test_a_call_while_capturing_measures_nothing_and_replays() -> None:
    import torch

    a, b = (torch.randn(384, 384, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    before = dispatch.stats()["measured"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatch.matmul(a, b)
    assert dispatch.stats()["measured"] == before
    a.copy_(torch.randn_like(a))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, a @ b)
