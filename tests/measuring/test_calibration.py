"""Calibration: the worst error of every batch counts, for the problem and scope it was measured in."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch
from dispatch import _api, framework, use_policy
from dispatch.testing import FakeBackend, fake_timings, registered

pytestmark = pytest.mark.usefixtures("engine")
FAST = {"baseline": 100.0, "fp8": 10.0}


def by_tensor(a, b, bias=None):
    """Multiply in e4m3 with one scale for each operand."""
    left, right = dispatch.quantize(a, "e4m3:tensor"), dispatch.quantize(b, "e4m3:tensor", axis=-2)
    return (left.dequantize("float32") @ right.dequantize("float32")).astype(a.dtype)


def fp8():
    return FakeBackend("fp8", by_tensor, recipes=("e4m3:tensor",))


def normal(*shape, seed=0):
    return (0.1 * np.random.default_rng(seed).standard_normal(shape)).astype(np.float16)


def outlier(*shape, seed=0):
    found = normal(*shape, seed=seed)
    found[3, 5] = 6e4
    return found


WEIGHT = normal(96, 80, seed=9)


def layer(a, scope=None):
    return dispatch.matmul(a, WEIGHT, scope=scope)


def test_the_worst_error_of_all_batches_decides_and_is_kept(engine, tmp_path, monkeypatch, fresh):
    a = normal(64, 96)
    with registered(fp8()), fake_timings(FAST):
        layer(a)
        assert dispatch.explain(a, WEIGHT).backend == "fp8"
        batches = [normal(64, 96, seed=1), outlier(64, 96, seed=2), normal(64, 96, seed=3)]
        (decision,) = dispatch.calibrate(layer, *batches)
        assert decision.backend != "fp8"
        assert "error above tolerance" in decision.reason
        figures = next(v.measurement for v in decision.candidates if v.candidate.backend == "fp8")
        assert figures.error_data == "calibration"
        assert figures.error.similarity_loss > 0.3
        assert figures.latency_us == pytest.approx(10.0)
        assert dispatch.explain(a, WEIGHT).backend != "fp8"
    monkeypatch.setattr(_api, "_engine", fresh(tmp_path / "decisions.sqlite"))  # another process
    with registered(fp8()), fake_timings(FAST):
        found = dispatch.explain(a, WEIGHT)
        assert found.source == "store"
        assert found.backend != "fp8"
        assert found.baseline.error_data == "calibration"


def test_it_takes_the_place_of_what_a_first_call_measured():
    with registered(fp8()), fake_timings(FAST):
        assert dispatch.explain(outlier(64, 96), WEIGHT).backend != "fp8"
        dispatch.calibrate(layer, *(normal(64, 96, seed=seed) for seed in range(3)))
        assert dispatch.explain(normal(64, 96), WEIGHT).backend == "fp8"


def test_a_function_may_have_a_policy_of_its_own():
    def model(a):
        with use_policy(gate={"min_speedup": 1.2}):
            return layer(a)

    with registered(fp8()), fake_timings(FAST):
        model(normal(64, 96))
        model(normal(64, 96))
        (decision,) = dispatch.calibrate(model, normal(64, 96), outlier(64, 96))
        assert decision.backend != "fp8"
        assert decision.policy == "default (overridden)"
        (decision,) = dispatch.calibrate(layer, normal(64, 96))
        assert decision.policy == "default"


def test_what_was_calibrated_holds_under_the_guard_too():
    a = normal(64, 96)
    with registered(fp8()), fake_timings(FAST):
        dispatch.calibrate(layer, a, outlier(64, 96))
        with use_policy(guard={"mode": "strict"}):
            decision = dispatch.explain(a, WEIGHT)
        assert decision.backend != "fp8"
        assert "errors on calibration data" in str(decision)


def test_errors_belong_to_a_scope():
    def model(a, b):
        return layer(a, "plain"), layer(b, "wild")

    with registered(fp8()), fake_timings(FAST):
        decisions = dispatch.calibrate(model, (normal(64, 96), outlier(64, 96)), (normal(64, 96), normal(64, 96)))
        assert sorted(decision.backend == "fp8" for decision in decisions) == [False, True]
        assert dispatch.explain(normal(64, 96), WEIGHT, scope="plain").backend == "fp8"
        assert dispatch.explain(normal(64, 96), WEIGHT, scope="wild").backend != "fp8"


def test_data_that_say_nothing_are_left_out():
    with registered(fp8()), fake_timings(FAST):
        zeros, infinite = np.zeros((64, 96), np.float16), normal(64, 96)
        infinite[0, 0] = np.inf
        assert dispatch.calibrate(layer, zeros, infinite) == []
        (decision,) = dispatch.calibrate(layer, zeros, normal(64, 96), infinite)
        assert decision.backend == "fp8"


def test_known_calls_are_measured_too_and_served_again_afterwards(engine):
    a = normal(64, 96)
    with registered(fp8()), fake_timings(FAST):
        layer(a)
        layer(a)
        assert len(dispatch.calibrate(layer, a)) == 1
        assert dispatch.stats()["plans"] == 0  # what is known is looked up anew
        layer(a)
        assert dispatch.stats()["plans"] == 1
        assert engine.counts["measured"] == 1  # latencies were known


def test_results_are_right_meanwhile_and_errors_pass_through():
    def failing(a):
        np.testing.assert_allclose(layer(a), a.astype(np.float64) @ WEIGHT, rtol=0.5, atol=2)
        raise KeyError("mine")

    with registered(fp8()), fake_timings(FAST):
        with pytest.raises(KeyError, match="mine"):
            dispatch.calibrate(failing, normal(64, 96))
        layer(normal(64, 96))
        assert dispatch.stats()["plans"] == 1


def test_without_batches_and_without_candidates(caplog):
    assert dispatch.calibrate(layer) == []
    assert dispatch.calibrate(layer, normal(64, 96)) == []
    said = [record.getMessage() for record in caplog.records]
    assert [next(x for x in ("0 batches", "1 batches") if x in y) for y in said] == ["0 batches", "1 batches"]


def test_a_backend_that_fails_in_a_batch_is_quarantined(engine):
    calls = []

    def failing(a, b, bias=None):
        calls.append(a)
        if len(calls) > 2:
            raise RuntimeError("the third")
        return by_tensor(a, b)

    with registered(FakeBackend("fp8", failing, recipes=("e4m3:tensor",))), fake_timings(FAST):
        dispatch.calibrate(layer, *(normal(64, 96, seed=seed) for seed in range(4)))
        assert "the third" in engine.quarantine["fp8"]


@pytest.mark.parametrize("jitted", [False, True])
def test_under_jit_calibrated_errors_count(jitted):
    jax = pytest.importorskip("jax")
    room = framework("jax")

    def product(a, b, bias=None):
        left, right = dispatch.quantize(a, "e4m3:tensor"), dispatch.quantize(b, "e4m3:tensor", axis=-2)
        return (left.dequantize("float32") @ right.dequantize("float32")).astype(a.dtype)

    a, b = (room.asarray(x, room.normal((1,), "float16", 0)) for x in (normal(64, 96), WEIGHT))

    def model(x):
        return dispatch.matmul(x, b)

    fn = jax.jit(model) if jitted else model
    backend = FakeBackend("fp8", product, recipes=("e4m3:tensor",))
    with registered(backend), fake_timings(FAST), use_policy(error={"traced": "calibrated"}):
        seen = []
        jax.jit(lambda x: seen.append(dispatch.explain(x, b).backend) or x)(a)
        (decision,) = dispatch.calibrate(fn, a)
        assert decision.backend == "fp8"
        jax.jit(lambda x: seen.append(dispatch.explain(x, b).backend) or x)(a)
        assert seen[0] != "fp8"
        assert seen[1] == "fp8"
