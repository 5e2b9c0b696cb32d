"""The flow of a call: faults, names, policies, threads and processes, what is remembered and what is not."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

import dispatch
from dispatch import (
    NoBackendError,
    NotLockedError,
    Rejection,
    _api,
    load_policy,
    use_policy,
)
from dispatch._engine import Engine
from dispatch.measuring import session
from dispatch.registry import Registry
from dispatch.remembering import DecisionStore, known
from dispatch.testing import FakeBackend, fake_timings, registered

FAST = {"baseline": 100.0, "fast": 10.0}


class _Point:
    """An entry point to the backend that every installation has."""

    name, dist = "bf16_fallback", None

    def load(self):
        from dispatch.plugins import bf16_fallback

        return bf16_fallback


def fresh_engine(path):
    return Engine(Registry(lambda: [_Point()]), DecisionStore(path))


@pytest.fixture(autouse=True)
def engine(tmp_path, monkeypatch):
    """A process that knows nothing yet, with the end of every chain as its only backend."""
    made = fresh_engine(tmp_path / "decisions.sqlite")
    monkeypatch.setattr(_api, "_engine", made)
    dispatch.forget()
    yield made
    dispatch.forget()
    made.decisions.store.close()


def arrays(m=8, k=16, n=4, seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return rng.standard_normal((m, k)).astype(dtype), rng.standard_normal((k, n)).astype(dtype)


def is_right(out, a, b, tolerance=1e-5):
    want = a.astype(np.float64) @ b.astype(np.float64)
    assert out.shape == want.shape
    assert np.linalg.norm(out - want) <= tolerance * np.linalg.norm(want)


def good(a, b, bias=None):
    return a @ b


class Failing:
    """A product that works until its nth call, and raises from there on."""

    def __init__(self, error, nth=0):
        self.error, self.nth, self.calls = error, nth, 0

    def __call__(self, a, b, bias=None):
        self.calls += 1
        if self.calls > self.nth:
            raise self.error
        return a @ b


# The choice


def test_a_backend_that_wins_serves_and_is_explained():
    a, b = arrays()
    fast = Failing(None, nth=10**9)
    with registered(FakeBackend("fast", fast)), fake_timings(FAST):
        is_right(dispatch.matmul(a, b), a, b)
        measured = fast.calls
        is_right(dispatch.matmul(a, b), a, b)
        assert fast.calls == measured + 1
        decision = dispatch.explain(a, b)
    assert (decision.backend, decision.speedup) == ("fast", 10.0)
    assert decision.reason.startswith("10.00x the framework's own product (10 us against 100 us), similarity_loss")
    assert decision.measurement.error_data == "caller"


def test_a_backend_that_loses_is_explained_too():
    a, b = arrays()
    slow = Failing(None, nth=10**9)
    with registered(FakeBackend("slow", slow)), fake_timings({"baseline": 100.0, "slow": 99.0}):
        decision = dispatch.explain(a, b)
        tried = slow.calls
        is_right(dispatch.matmul(a, b), a, b)
    assert slow.calls == tried
    assert decision.backend == "bf16_fallback"
    assert "1.05x not reached: 1.01x" in decision.reason
    assert "(slow)" in decision.reason


def test_without_a_rival_nothing_is_measured():
    a, b = arrays()
    decision = dispatch.explain(a, b)
    assert (decision.backend, decision.source) == ("bf16_fallback", "unmeasured")
    assert dispatch.stats()["measured"] == 0
    assert dispatch.stored() == []


def test_explain_of_an_unknown_problem_measures_it_and_of_a_known_one_does_not():
    a, b = arrays()
    with registered(FakeBackend("fast")), fake_timings(FAST):
        first = dispatch.explain(a, b)
        assert first.source == "measured"
        assert dispatch.stats()["measured"] == 1
        assert dispatch.explain(a, b) == first
        dispatch.matmul(a, b)
        assert dispatch.stats()["measured"] == 1
    for text in ("matmul(m=8, n=4, k=16", "-> fast", "framework's own", "baseline", "policy default"):
        assert text in str(first)


# Faults


@pytest.mark.parametrize("nth", [0, 1, 2, 5])
@pytest.mark.parametrize(
    "error", [RuntimeError("broken"), SystemExit(3), ValueError("shape"), type("Own", (BaseException,), {})("x")]
)
def test_a_backend_that_raises_in_its_nth_call_is_quarantined_and_the_answer_is_right(error, nth):
    a, b = arrays()
    failing = Failing(error, nth)
    with registered(FakeBackend("fast", failing), FakeBackend("other", good)), fake_timings({**FAST, "other": 50.0}):
        for _ in range(nth + 3):
            is_right(dispatch.matmul(a, b), a, b)
        calls = failing.calls
        decision = dispatch.explain(a, b)
        is_right(dispatch.matmul(a, b), a, b)
        assert failing.calls == calls  # never again
        assert decision.backend == "other"  # the next one serves
        rejected = {v.candidate.backend: v.reason for v in decision.candidates}["fast"]
        assert type(error).__name__ in rejected
        assert str(error) in dispatch.stats()["quarantined"]["fast"]
        info = next(x for x in dispatch.backends() if x.name == "fast")
        assert str(error) in info.unavailable


@pytest.mark.parametrize("error", [RuntimeError("broken"), SystemExit(3)])
def test_what_fails_only_while_it_is_timed_is_quarantined(error):
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(error, 3))):  # the first is for the error
        is_right(dispatch.matmul(a, b), a, b)
        assert str(error) in dispatch.stats()["quarantined"]["fast"]


def test_of_several_that_are_timed_the_one_that_failed_is_to_blame():
    a, b = arrays()
    with registered(FakeBackend("first", good), FakeBackend("later", Failing(RuntimeError("broken"), 3))):
        is_right(dispatch.matmul(a, b), a, b)
        assert list(dispatch.stats()["quarantined"]) == ["later"]


def test_one_reason_for_all_recipes_only_where_all_have_it():
    class Picky(FakeBackend):
        def rejections(self, problem):
            return [Rejection("arch", problem.arch, "another")] if str(problem.recipe) == "e4m3:row" else []

    a, b = arrays(dtype=np.float16)
    picky = Picky("picky", lambda a, b: a @ b, recipes=("e4m3:row", "e4m3:tensor"))
    with registered(picky), fake_timings({"baseline": 100.0, "picky": 10.0}):
        outcomes = {str(v.candidate): v.outcome for v in dispatch.explain(a, b).candidates if v.candidate.scaled}
    assert outcomes == {"picky/e4m3:tensor": "chosen", "picky/e4m3:row": "rejected"}


def test_what_takes_no_batch_or_bias_is_not_asked_to():
    a, b = arrays()
    plain = FakeBackend("plain", good)
    plain.capabilities = (dataclasses.replace(plain.capabilities[0], batched=False, bias=False, activations=()),)
    plain.rejections = lambda problem: dispatch.closest(plain.capabilities, problem)
    with registered(plain), fake_timings({"baseline": 100.0, "plain": 10.0}):
        assert dispatch.explain(a, b).backend == "plain"
        stack = np.stack([a, a]), np.stack([b, b])
        for call, asked, reason in (
            (stack, {}, "batch is (2,); needs a 2-D product"),
            ((a, b), {"bias": b[0]}, "bias is float32; needs no bias"),
            ((a, b), {"activation": "relu"}, "activation is relu; needs "),
        ):
            decision = dispatch.explain(*call, **asked)
            assert reason in {v.candidate.backend: v.reason for v in decision.candidates}["plain"]


@pytest.mark.parametrize("error", [RuntimeError("no plan"), SystemExit(3)])
def test_a_plan_that_cannot_be_made(error):
    def on_plan(problem):
        raise error

    a, b = arrays()
    with registered(FakeBackend("fast", on_plan=on_plan)), fake_timings(FAST):
        is_right(dispatch.matmul(a, b), a, b)
        assert str(error) in dispatch.stats()["quarantined"]["fast"]


def test_what_fails_once_is_not_called_again_for_any_other_problem():
    one, other = arrays(), arrays(m=9)
    failing = Failing(RuntimeError("broken"), 10**9)
    with registered(FakeBackend("fast", failing)), fake_timings(FAST):
        for call in (one, other):
            dispatch.matmul(*call)
        failing.nth = 0
        is_right(dispatch.matmul(*one), *one)
        calls = failing.calls
        is_right(dispatch.matmul(*other), *other)
        assert failing.calls == calls


def test_what_refuses_every_problem_is_listed_with_its_reasons():
    old = FakeBackend("old", rejects=[Rejection("triton", "3.5", "3.6"), Rejection("driver", "470", "525")])
    with registered(old):
        (info,) = [info for info in dispatch.backends() if info.name == "old"]
    assert not info.available
    assert info.unavailable == "triton is 3.5; needs 3.6; driver is 470; needs 525"


def test_what_is_quarantined_is_listed_with_the_reason():
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(RuntimeError("broken")))), fake_timings(FAST):
        (before,) = [info for info in dispatch.backends() if info.name == "fast"]
        assert before.available
        dispatch.matmul(a, b)
        (after,) = [info for info in dispatch.backends() if info.name == "fast"]
        assert not after.available
        assert after.unavailable.startswith("RuntimeError: broken")


def test_the_first_reason_of_a_quarantine_stays(engine):
    for text in ("first", "second"):
        engine.condemn("fast", RuntimeError(text))
    assert dispatch.stats()["quarantined"] == {"fast": "RuntimeError: first"}


class MuteError(Exception):
    """An error whose text cannot be had."""

    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("nth", [0, 1, 3])
def test_an_error_without_a_text_is_an_error_like_any_other(nth):
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(MuteError(), nth))), fake_timings(FAST):
        for _ in range(5):
            is_right(dispatch.matmul(a, b), a, b)
        assert dispatch.stats()["quarantined"]["fast"].startswith("MuteError: ")
        assert "MuteError: " in str(dispatch.explain(a, b))


def test_what_is_registered_may_raise_an_error_without_a_text():
    class Silent(FakeBackend):
        capabilities = property(lambda self: (_ for _ in ()).throw(MuteError()), lambda self, value: None)

    with pytest.warns(dispatch.PluginWarning, match="MuteError: "):
        dispatch.register(Silent("silent"))


class Odd(FakeBackend):
    """A backend whose methods do what a test says."""

    def __init__(self, name, **methods):
        super().__init__(name)
        for method, does in methods.items():
            setattr(self, method, does)


def raising(*arguments, **named):
    raise RuntimeError("broken")


@pytest.mark.parametrize(
    "methods",
    [
        {"rejections": raising},
        {"rejections": lambda problem: None},
        {"rejections": lambda problem: ["k is odd"]},
        {"rejections": lambda problem: 3},
        {"configs": raising},
        {"configs": lambda problem: 3},
        {"plan": lambda problem, config=None: None},
        {"plan": lambda problem: good},
    ],
)
def test_whatever_a_backend_does_the_answer_is_right(methods):
    a, b = arrays()
    with registered(Odd("odd", **methods)), fake_timings({"baseline": 100.0, "odd": 10.0}):
        is_right(dispatch.matmul(a, b), a, b)
        assert dispatch.explain(a, b).backend == "bf16_fallback"
        assert "odd" in dispatch.stats()["quarantined"]


@pytest.mark.parametrize(
    ("product", "said"),
    [
        (lambda a, b: (a @ b)[:-1], "returned shape (7, 4), not (8, 4)"),
        (lambda a, b: (a @ b).T, "returned shape"),
        (lambda a, b: (a @ b).astype(np.float64), "returned dtype float64, not float32"),
        (lambda a, b: (a @ b) * np.nan, "not finite"),
        (lambda a, b: np.full((8, 4), np.inf, np.float32), "not finite"),
        (lambda a, b: None, "returned NoneType"),
        (lambda a, b: [[1.0]], "returned list"),
    ],
)
def test_a_wrong_result_is_a_fault(product, said):
    a, b = arrays()
    with registered(FakeBackend("fast", product)), fake_timings(FAST):
        is_right(dispatch.matmul(a, b), a, b)
        assert said in dispatch.stats()["quarantined"]["fast"]
        assert said in {v.candidate.backend: v.reason for v in dispatch.explain(a, b).candidates}["fast"]


def writing(side, then=None):
    """Return a product that writes to one of its operands, and raises `then`."""

    def product(*operands):
        out = operands[0] @ operands[1]
        out = out if len(operands) == 2 else out + operands[2]
        operands[side][...] = 0.0
        if then is not None:
            raise then
        return out

    return product


@pytest.mark.parametrize("side", [0, 1, 2], ids=["a", "b", "bias"])
@pytest.mark.parametrize("layout", ["packed", "columns", "strided", "prepared"])
def test_what_writes_to_its_operands_is_a_fault_and_the_callers_arrays_stay(side, layout):
    a, b = arrays()
    bias = np.ones(4, np.float32)
    if layout == "columns":
        b = np.asfortranarray(b)
    elif layout == "strided":
        a = np.repeat(np.repeat(a, 2, 0), 2, 1)[::2, ::2]
    before = [x.copy() for x in (a, b, bias)]
    weight = dispatch.prepare(b) if layout == "prepared" else b
    with registered(FakeBackend("fast", writing(side))), fake_timings(FAST):
        for _ in range(2):
            is_right(dispatch.matmul(a, weight, bias=bias) - 1.0, *before[:2])
        assert dispatch.stats()["quarantined"]["fast"].startswith("wrote to its operands")
    for now, then in zip((a, b, bias), before, strict=True):
        np.testing.assert_array_equal(now, then)


def test_what_writes_to_its_operands_and_raises_leaves_the_callers_arrays_alone():
    a, b = arrays()
    before = a.copy(), b.copy()
    with registered(FakeBackend("fast", writing(0, RuntimeError("broken")))), fake_timings(FAST):
        is_right(dispatch.matmul(a, b), *before)
    np.testing.assert_array_equal(a, before[0])


def test_what_writes_to_a_tensor_is_a_fault_too():
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(x).bfloat16() for x in arrays())
    before = a.clone(), b.clone()
    with registered(FakeBackend("fast", writing(1))), fake_timings(FAST):
        out = dispatch.matmul(a, b)
        assert dispatch.stats()["quarantined"]["fast"].startswith("wrote to its operands")
    assert torch.equal(out, before[0] @ before[1])
    assert torch.equal(b, before[1])


def test_no_copies_are_made_beyond_the_policys_memory():
    a, b = arrays(m=512, k=512, n=512)  # of each operand a MiB
    seen = []
    with registered(FakeBackend("fast", lambda x, y: (seen.append(x), x @ y)[1])), fake_timings(FAST):
        for memory_mb in (6, 5):
            seen.clear()
            dispatch.explain(a, b, policy=load_policy("default").override(tuning={"memory_mb": memory_mb}))
            dispatch.clear_store()
            assert (seen[0] is a) == (memory_mb == 5)


def test_a_result_on_another_device_is_a_fault():
    torch = pytest.importorskip("torch")
    a, b = (torch.from_numpy(x) for x in arrays())
    with registered(FakeBackend("fast", lambda a, b: (a @ b).to("meta"))), fake_timings(FAST):
        assert torch.equal(dispatch.matmul(a, b), a @ b)
        assert dispatch.stats()["quarantined"]["fast"].startswith("returned device meta, not cpu")


def test_wrong_values_are_too_wrong_and_no_fault():
    a, b = arrays()
    with registered(FakeBackend("fast", lambda a, b: a @ b * 2)), fake_timings(FAST):
        decision = dispatch.explain(a, b)
        is_right(dispatch.matmul(a, b), a, b)
        assert dispatch.stats()["quarantined"] == {}
    assert decision.backend == "bf16_fallback"
    assert decision.reason.startswith("error above tolerance: 10.00x, similarity_loss 0.2, tolerance 0.005")


@pytest.mark.parametrize("error", [MemoryError("huge"), RuntimeError("RESOURCE_EXHAUSTED: out of memory")])
def test_out_of_memory_while_measuring_is_a_rejection_and_not_stored(error):
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(error))), fake_timings(FAST):
        decision = dispatch.explain(a, b)
        is_right(dispatch.matmul(a, b), a, b)
        assert dispatch.stats()["quarantined"] == {}
    reason = {v.candidate.backend: v.reason for v in decision.candidates}["fast"]
    assert "memory is exhausted while measuring" in reason
    assert dispatch.stored() == []


def test_out_of_memory_later_is_served_by_the_frameworks_own():
    a, b = arrays()
    failing = Failing(MemoryError("huge"), 1)
    with registered(FakeBackend("fast", failing)), fake_timings(FAST):
        for _ in range(3):
            is_right(dispatch.matmul(a, b), a, b)
        assert failing.calls > 2
        assert dispatch.stats()["quarantined"] == {}


def test_out_of_memory_while_a_plan_is_made_is_served_by_the_frameworks_own():
    def on_plan(problem):
        raise MemoryError("no room for a plan")

    a, b = arrays()
    with registered(FakeBackend("fast", on_plan=on_plan)), use_policy(tuning={"mode": "off"}):
        is_right(dispatch.matmul(a, b, backend="fast"), a, b)
        assert dispatch.stats()["quarantined"] == {}


def test_a_keyboard_interrupt_passes_through():
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(KeyboardInterrupt()))), fake_timings(FAST):
        with pytest.raises(KeyboardInterrupt):
            dispatch.matmul(a, b)
        assert dispatch.stats()["quarantined"] == {}
        with pytest.raises(KeyboardInterrupt):  # and what it left behind is in nobody's way
            dispatch.matmul(a, b)
    is_right(dispatch.matmul(a, b), a, b)


def test_a_keyboard_interrupt_in_a_known_call_passes_through():
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(KeyboardInterrupt(), 2))), fake_timings(FAST):
        dispatch.matmul(a, b)
        with pytest.raises(KeyboardInterrupt):
            dispatch.matmul(a, b)
        assert dispatch.stats()["quarantined"] == {}


@pytest.mark.parametrize("nth", [0, 1])
def test_a_device_that_a_backend_left_unusable_is_said(nth, monkeypatch):
    a, b = arrays()
    broken = {}

    def product(a, b):
        broken["calls"] = broken.get("calls", 0) + 1
        if broken["calls"] > nth + 1:  # the first is for the error
            broken["error"] = True
            raise RuntimeError("illegal address")
        return a @ b

    def synchronize(array):
        if "error" in broken:
            raise RuntimeError("sticky error")

    monkeypatch.setattr(dispatch.framework("numpy"), "synchronize", synchronize, raising=False)
    with registered(FakeBackend("fast", product)), fake_timings(FAST):
        for _ in range(nth):
            dispatch.matmul(a, b)
        with pytest.raises(RuntimeError, match=r"'fast' failed \(illegal address\).*unusable \(sticky error\)"):
            dispatch.matmul(a, b)


def test_the_frameworks_own_errors_are_left_alone():
    with pytest.raises(ValueError, match="mismatch"):
        dispatch.matmul(np.ones((2, 3)), np.ones((2, 3)))
    assert dispatch.stats()["quarantined"] == {}


# By name


def test_a_backend_by_name_serves_however_slow():
    a, b = arrays()
    slow = Failing(None, 10**9)
    with registered(FakeBackend("slow", slow)), fake_timings({"baseline": 1.0, "slow": 100.0}):
        is_right(dispatch.matmul(a, b, backend="slow"), a, b)
        assert slow.calls == 1
        assert dispatch.explain(a, b, backend="slow").reason == "asked for by name"
        assert dispatch.explain(a, b).backend == "bf16_fallback"
        is_right(dispatch.matmul(a, b, backend="bf16_fallback"), a, b)
        assert slow.calls == 2  # measured by explain


def test_an_unknown_name_lists_the_registered():
    a, b = arrays()
    with registered(FakeBackend("mine")), pytest.raises(NoBackendError, match="'none' is not registered") as error:
        dispatch.matmul(a, b, backend="none")
    assert "bf16_fallback, mine" in str(error.value)


def test_a_rejecting_backend_says_all_its_reasons():
    a, b = arrays()
    rejects = [Rejection("k", "16", "a multiple of 32"), Rejection("n", "4", "at least 8")]
    with registered(FakeBackend("picky", rejects=rejects)):
        with pytest.raises(NoBackendError) as error:
            dispatch.matmul(a, b, backend="picky")
        is_right(dispatch.matmul(a, b), a, b)
        verdict = {v.candidate.backend: v for v in dispatch.explain(a, b).candidates}["picky"]
    text = str(error.value)
    assert "matmul(m=8, n=4, k=16" in text
    assert "picky: k is 16; needs a multiple of 32; n is 4; needs at least 8" in text
    assert verdict.outcome == "rejected"
    assert verdict.rejections == tuple(rejects)


def test_a_backend_by_name_that_fails_is_an_error_and_not_another_backend():
    a, b = arrays()
    with registered(FakeBackend("fast", Failing(RuntimeError("broken")))):
        with pytest.raises(NoBackendError, match="RuntimeError: broken"):
            dispatch.matmul(a, b, backend="fast")
        is_right(dispatch.matmul(a, b), a, b)


@pytest.mark.parametrize("recipes", [("e4m3:row",), ("e4m3:row", "e4m3:tensor")])
def test_a_lossy_backend_by_name_keeps_the_tolerance(recipes):
    a, b = arrays(dtype=np.float16)
    bad = FakeBackend("bad", lambda a, b: (a @ b * 2).astype(np.float16), recipes=recipes)
    with registered(bad), fake_timings({"baseline": 100.0, "bad": 10.0}):
        with pytest.raises(NoBackendError, match="error above tolerance"):
            dispatch.matmul(a, b, backend="bad")
        loose = load_policy("default").override(error={"tolerance": 1.0})
        assert dispatch.matmul(a, b, backend="bad", policy=loose).shape == (8, 4)


def test_raw_fp8_values_stand_under_a_scale_of_one_alone():
    e4m3 = dispatch.framework("numpy").dtype("float8_e4m3fn")
    a, b = (x.astype(e4m3) for x in arrays())

    def product(a, b):
        return (a.astype(np.float32) @ b.astype(np.float32)).astype(dispatch.framework("numpy").dtype("bfloat16"))

    lossy = FakeBackend("lossy", product, recipes=("e4m3:row", "e4m3:tensor", "e5m2:tensor"))
    policy = load_policy("default").override(recipes={"allow": ["e4m3:row", "e4m3:tensor", "e5m2:tensor"]})
    with registered(lossy), fake_timings({"baseline": 100.0, "lossy": 10.0}):
        decision = dispatch.explain(a, b, policy=policy)
    outcomes = {str(v.candidate): (v.outcome, v.reason) for v in decision.candidates}
    assert outcomes["lossy/e4m3:tensor"][0] == "chosen"
    assert outcomes["lossy/e4m3:row"] == (
        "rejected",
        "a is float8_e4m3fn without scales; needs float8_e4m3fn or a wider dtype; "
        "b is float8_e4m3fn without scales; needs float8_e4m3fn or a wider dtype",
    )
    assert outcomes["lossy/e5m2:tensor"][1].startswith(
        "a is float8_e4m3fn without scales; needs float8_e5m2 or a wider"
    )


@pytest.mark.parametrize(("of_a", "of_b", "side"), [(np.float16, np.float32, "b"), (np.float32, np.float16, "a")])
def test_neither_operand_is_quantized_from_a_dtype_that_the_policy_does_not_list(of_a, of_b, side):
    a, b = arrays()
    with registered(FakeBackend("lossy", good, recipes=("e4m3:row",))), fake_timings({"baseline": 100.0, "lossy": 1.0}):
        decision = dispatch.explain(a.astype(of_a), b.astype(of_b))
    (lossy,) = [v for v in decision.candidates if v.candidate.backend == "lossy"]
    assert lossy.reason.startswith(f"dtype of {side} is float32; needs [recipes] inputs of the policy")


@pytest.mark.parametrize(
    ("own", "listed", "candidates"),
    [
        (("fast",), ["promoted"], {"fast": "rejected"}),
        (("fast",), ["fast"], {"fast": "chosen"}),
        (("promoted",), ["fast"], {"promoted": "chosen"}),
        (("fast", "promoted"), ["fast"], {"fast": "chosen"}),
        (("fast", "promoted"), ["promoted"], {"promoted": "chosen"}),
        ((), ["promoted"], {None: "chosen"}),
    ],
)
def test_sums_are_no_worse_than_the_policy_lists(own, listed, candidates):
    a, b = arrays(dtype=np.float16)
    lossy = FakeBackend("lossy", good, recipes=("e4m3:row",))
    lossy.capabilities = (dataclasses.replace(lossy.capabilities[0], accumulations=own),)
    with (
        registered(lossy),
        fake_timings({"baseline": 100.0, "lossy": 10.0}),
        use_policy(recipes={"accumulation": listed}),
    ):
        found = [v for v in dispatch.explain(a, b).candidates if v.candidate.backend == "lossy"]
    assert {v.candidate.accumulation: v.outcome for v in found} == candidates
    reason = "accumulation is fast; needs [recipes] accumulation of the policy: promoted"
    assert all(v.reason == reason for v in found if v.outcome == "rejected")


# Policies


def test_a_policy_for_one_call():
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        assert dispatch.explain(a, b, policy="native").backend == "bf16_fallback"
        assert "needs one whose [backends] allow fast" in str(dispatch.explain(a, b, policy="native"))
        assert dispatch.explain(a, b).backend == "fast"
        demanding = load_policy("default").override(gate={"min_speedup_lossless": 20.0})
        assert "20x not reached: 10.00x" in dispatch.explain(a, b, policy=demanding).reason
        is_right(dispatch.matmul(a, b, policy=demanding), a, b)
    with pytest.raises(dispatch.PolicyError, match="no policy is named 'none'"):
        dispatch.matmul(a, b, policy="none")


def test_a_policy_in_force_does_not_serve_another_ones_plan():
    a, b = arrays()
    fast = Failing(None, 10**9)
    with registered(FakeBackend("fast", fast)), fake_timings(FAST):
        dispatch.matmul(a, b)
        calls = fast.calls
        with use_policy("native"):
            is_right(dispatch.matmul(a, b), a, b)
            is_right(dispatch.matmul(a, b), a, b)
            assert fast.calls == calls
        dispatch.matmul(a, b)
        assert fast.calls == calls + 1


def test_a_policy_that_comes_with_a_call_does_not_serve_another_ones_plan():
    a, b = arrays()
    fast = Failing(None, 10**9)
    with registered(FakeBackend("fast", fast)), fake_timings(FAST):
        dispatch.matmul(a, b, policy="strict")
        calls = fast.calls
        is_right(dispatch.matmul(a, b, policy="native"), a, b)
        assert fast.calls == calls
        is_right(dispatch.matmul(a, b, policy="strict"), a, b)
        assert fast.calls == calls + 1


def test_rules_of_a_file_match_scopes(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text('[[rules]]\nmatch = { scope = "layers.*.up" }\nbackends.deny = ["fast"]\n')
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST), use_policy(file):
        assert dispatch.explain(a, b, scope="layers.3.up").backend == "bf16_fallback"
        assert dispatch.explain(a, b, scope="layers.3.down").backend == "fast"
        assert dispatch.explain(a, b).backend == "fast"
        is_right(dispatch.matmul(a, b, scope="layers.3.up"), a, b)


def test_tuning_off_measures_nothing_and_serves_what_is_remembered():
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        with use_policy(tuning={"mode": "off"}):
            decision = dispatch.explain(a, b)
            is_right(dispatch.matmul(a, b), a, b)
            assert (decision.backend, decision.source) == ("bf16_fallback", "unmeasured")
            assert decision.reason == "not measured: fast ([tuning] mode is off)"
        assert dispatch.stats()["measured"] == 0
        dispatch.matmul(a, b)
        with use_policy(tuning={"mode": "off"}):
            assert dispatch.explain(a, b).backend == "fast"
        assert dispatch.stats()["measured"] == 1


def test_locked_fails_on_what_is_missing_and_serves_what_is_stored():
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        with use_policy(tuning={"mode": "locked"}), pytest.raises(NotLockedError, match="matmul"):
            dispatch.matmul(a, b)
        dispatch.matmul(a, b)
        with use_policy(tuning={"mode": "locked"}):
            is_right(dispatch.matmul(a, b), a, b)
            assert dispatch.explain(a, b).backend == "fast"
            with pytest.raises(NotLockedError):
                dispatch.matmul(*arrays(m=9))
    assert dispatch.stats()["measured"] == 1


# Threads


def in_threads(count, work):
    gate, failures = threading.Barrier(count), []

    def run(index):
        gate.wait()
        try:
            work(index)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == []


def test_eight_threads_on_one_cold_problem_measure_once_and_are_right():
    for seed in range(5):
        a, b = arrays(m=8 + seed)
        with registered(FakeBackend("fast", good)), fake_timings(FAST):
            before = dispatch.stats()["measured"]
            in_threads(8, lambda _: is_right(dispatch.matmul(a, b), a, b))  # noqa: B023 - it ends in here
            assert dispatch.stats()["measured"] == before + 1
            assert dispatch.explain(a, b).backend == "fast"


def test_a_thread_that_asked_the_store_before_it_was_measured_does_not_measure_again(engine, monkeypatch):
    a, b = arrays()
    asked, go_on = threading.Event(), threading.Event()
    get = engine.decisions.store.get

    def slow_get(key):
        found = get(key)
        if threading.current_thread().name == "late":
            asked.set()
            assert go_on.wait(30)
        return found

    monkeypatch.setattr(engine.decisions.store, "get", slow_get)
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        late = threading.Thread(target=lambda: dispatch.matmul(a, b), name="late")
        late.start()
        assert asked.wait(30)
        dispatch.matmul(a, b)
        go_on.set()
        late.join(30)
    assert dispatch.stats()["measured"] == 1


def test_threads_while_one_measures_get_the_baseline():
    a, b = arrays()
    measuring, go_on, calls = threading.Event(), threading.Event(), []

    def product(a, b):
        calls.append(a)
        measuring.set()
        assert go_on.wait(30)
        return a @ b

    with registered(FakeBackend("fast", product)), fake_timings(FAST):
        first = threading.Thread(target=lambda: dispatch.matmul(a, b))
        first.start()
        assert measuring.wait(30)
        is_right(dispatch.matmul(a, b), a, b)
        is_right(dispatch.matmul(a[None], b)[0], a, b)  # the same problem by another call
        decision = dispatch.explain(a, b)
        assert decision.backend == "bf16_fallback"
        assert decision.reason == "not measured: fast (another call is measuring it)"
        go_on.set()
        first.join(30)
        assert dispatch.explain(a, b).backend == "fast"  # what they got was not kept
        calls.clear()
        is_right(dispatch.matmul(a[None], b)[0], a, b)
        assert calls
    assert dispatch.stats()["measured"] == 1


def test_what_cannot_be_measured_now_says_why(monkeypatch):
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST), monkeypatch.context() as patched:
        patched.setattr(type(dispatch.framework("numpy")), "measurable", lambda self, a: "a graph is captured")
        decision = dispatch.explain(a, b)
        assert decision.reason == "not measured: fast (a graph is captured)"
        is_right(dispatch.matmul(a, b), a, b)


def test_no_memory_for_the_reference_is_said(monkeypatch):
    def reference(self, a, b):
        raise MemoryError("huge")

    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST), monkeypatch.context() as patched:
        patched.setattr(type(dispatch.framework("numpy")), "reference", reference)
        assert dispatch.explain(a, b).reason == "not measured: fast (MemoryError: huge)"
        is_right(dispatch.matmul(a, b), a, b)


def test_measuring_is_told_the_policys_limits_and_each_gate(monkeypatch):
    told = {}
    measure_latency = session.measure_latency

    def spy(stopwatch, gates, budget_ms):
        told.update(gates=gates, budget_ms=budget_ms)
        return measure_latency(stopwatch, gates, budget_ms)

    monkeypatch.setattr(session, "measure_latency", spy)
    a, b = arrays(dtype=np.float16)
    lossy = FakeBackend("lossy", lambda a, b: (a @ b) * np.float16(1.01), recipes=("e4m3:row",))
    policy = load_policy("default").override(
        tuning={"budget_ms": 123.0, "memory_mb": 77}, gate={"min_speedup": 3.0, "min_speedup_lossless": 2.0}
    )
    room = dispatch.framework("numpy")
    with registered(lossy, FakeBackend("fast", good)), fake_timings(FAST), monkeypatch.context() as patched:
        stopwatch = room.stopwatch
        patched.setattr(room, "stopwatch", lambda calls, memory: told.update(memory=memory) or stopwatch(calls, memory))
        dispatch.explain(a, b, policy=policy)
    assert told == {"gates": [1.0, 3.0, 2.0], "budget_ms": 123.0, "memory": 77 << 20}


def test_who_waits_for_compiling_is_measured_by_a_later_call():
    a, b = arrays()
    backends = FakeBackend("fast", good), FakeBackend("later", good)
    with registered(*backends), fake_timings({**FAST, "later": 1.0}):
        with use_policy(tuning={"compile_ms": 0}):
            decision = dispatch.explain(a, b)
            is_right(dispatch.matmul(a, b), a, b)
            assert {v.candidate.backend: v.outcome for v in decision.candidates}["later"] == "not measured"
            assert decision.backend == "fast"
            assert dispatch.stored() == []
            assert dispatch.stats()["plans"] == 0
        assert dispatch.explain(a, b).backend == "later"
        assert [x.backend for x in dispatch.stored()] == ["later"]


def test_one_thread_may_enter_though_two_look_at_once(engine):
    class Slow(set):
        def __contains__(self, key):
            found = super().__contains__(key)
            looked.wait(0.2)  # for the other to look too, if it can
            return found

    looked, entered = threading.Event(), []
    engine._measuring = Slow()
    threads = [threading.Thread(target=lambda: entered.append(engine._enter("key"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(entered) == [False, True]


# Remembered


def test_what_is_stored_can_be_listed_and_cleared():
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        decision = dispatch.explain(a, b)
        assert dispatch.stored() == [decision]
        assert dispatch.clear_store() == 1
        assert dispatch.stored() == []
        dispatch.matmul(a, b)
        assert dispatch.stats()["measured"] == 2


@pytest.mark.parametrize(
    ("name", "values"),
    [("scope", ("one", "other")), ("activation", ("relu", "silu")), ("out_dtype", (np.float32, np.float64))],
)
def test_a_known_call_serves_none_with_another_argument(name, values):
    a, b = arrays()
    with registered(FakeBackend("fast")), fake_timings(FAST):
        for count, value in enumerate(values, 1):
            dispatch.matmul(a, b, **{name: value})
            assert dispatch.stats()["plans"] == count


def test_what_a_subclass_multiplies_is_its_own_and_explain_says_so():
    class Own(np.ndarray):
        pass

    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        decision = dispatch.explain(a.view(Own), b)
        assert decision.backend == "baseline"
        assert "a subclass" in decision.reason
        assert dispatch.stats()["measured"] == 0


def test_forget_keeps_the_store():
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        dispatch.matmul(a, b)
        assert dispatch.stats()["plans"] == 1
        dispatch.forget()
        assert dispatch.stats()["plans"] == 0
        dispatch.matmul(a, b)
        stats = dispatch.stats()
    assert (stats["measured"], stats["remembered"], stats["plans"]) == (1, 1, 1)


def test_a_new_process_asks_the_store(engine, tmp_path, monkeypatch):
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        decision = dispatch.explain(a, b)
    monkeypatch.setattr(_api, "_engine", fresh_engine(engine.decisions.store.path))
    dispatch.forget()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        again = dispatch.explain(a, b)
        assert dispatch.stats()["measured"] == 0
    assert again.source == "store"
    assert (again.candidate, again.reason, again.candidates) == (
        decision.candidate,
        decision.reason,
        decision.candidates,
    )


def test_where_an_array_lies_does_not_make_it_another_problem():
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        room = np.zeros(4096, np.float32)
        start = -room.ctypes.data % 128 // 4
        for offset in (0, 4, 8, 16):  # 128, 16, 32 and 64 bytes off what 128 divides
            a = room[start + offset : start + offset + 128].reshape(8, 16)
            a[...] = arrays()[0]
            dispatch.forget()
            dispatch.matmul(a, arrays()[1])
        assert dispatch.stats()["measured"] == 1


@pytest.mark.parametrize("change", ["backend", "version", "policy", "scope", "threads", "shape", "dtype"])
def test_what_a_choice_depends_on_is_in_its_key(change, monkeypatch):
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        dispatch.matmul(a, b)
        if change == "backend":
            with registered(FakeBackend("new", good)):
                dispatch.matmul(a, b)
        elif change == "version":
            _api.engine().registry.add(FakeBackend("fast", good), "fast", "tests", "2.0")
            dispatch.forget()
            dispatch.matmul(a, b)
        elif change == "policy":
            dispatch.matmul(a, b, policy=load_policy("default").override(error={"tolerance": 0.1}))
        elif change == "scope":
            dispatch.matmul(a, b, scope="head")
        elif change == "threads":
            monkeypatch.setenv("OMP_NUM_THREADS", "77")
            dispatch.forget()
            dispatch.matmul(a, b)
        else:
            dispatch.matmul(*arrays(m=9) if change == "shape" else arrays(dtype=np.float64))
        assert dispatch.stats()["measured"] == 2


def test_a_record_of_another_format_is_a_miss(engine):
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        dispatch.matmul(a, b)
        ((key, record),) = engine.decisions.store.entries()
        engine.decisions.store.put(key, {**record, "format": record["format"] - 1})
        engine.decisions._memory.clear()
        dispatch.forget()
        assert dispatch.stored() == []
        dispatch.matmul(a, b)
        assert dispatch.stats()["measured"] == 2


@pytest.mark.parametrize("damage", [{"decision": 3}, {}, {"decision": {"candidate": 1}}])
def test_a_record_that_cannot_be_read_is_a_miss(engine, damage):
    a, b = arrays()
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        dispatch.matmul(a, b)
        ((key, _),) = engine.decisions.store.entries()
        engine.decisions.store.put(key, damage)
        engine.decisions._memory.clear()
        dispatch.forget()
        assert dispatch.stored() == []
        is_right(dispatch.matmul(a, b), a, b)
        assert dispatch.stats()["measured"] == 2
        assert len(dispatch.stored()) == 1


@pytest.mark.parametrize("others", [[], [FakeBackend("other", good)]], ids=["alone", "beside another"])
def test_a_stored_choice_that_is_rejected_now_is_a_miss(others):
    a, b = arrays()
    fast = FakeBackend("fast", good)
    with registered(fast, *others), fake_timings(FAST):
        dispatch.matmul(a, b)
        fast.rejects = (Rejection("k", "16", "32"),)
        dispatch.forget()
        assert dispatch.explain(a, b).backend == "bf16_fallback"


def test_known_calls_are_bounded(monkeypatch):
    monkeypatch.setattr(known, "MOST_PLANS", 10)
    often = arrays(m=1)
    with registered(FakeBackend("fast", good)), fake_timings(FAST):
        for m in range(2, 45):
            for call in (often, arrays(m=m)):
                is_right(dispatch.matmul(*call), *call)
        remembered = dispatch.stats()["remembered"]
        assert dispatch.stats()["plans"] <= 20
        is_right(dispatch.matmul(*often), *often)
        assert dispatch.stats()["remembered"] == remembered  # what is used stays
        assert len(_api._served) <= 20


# Data


@pytest.mark.parametrize("fill", [0.0, 1.0, np.inf, np.nan])
def test_degenerate_data_is_served_right_and_not_stored_as_the_callers(fill):
    a, b = arrays()
    a[...] = fill
    with registered(FakeBackend("fast", good)), fake_timings(FAST), np.errstate(invalid="ignore"):
        out = dispatch.matmul(a, b)
        np.testing.assert_array_equal(out, a @ b)
        (decision,) = dispatch.stored()
    assert decision.measurement.error_data == "random"
    assert decision.baseline.error_data == "random"


def test_what_is_right_only_for_zeros_does_not_serve():
    a, b = arrays()
    zeros = np.zeros_like(a)
    with registered(FakeBackend("fast", lambda a, b: a @ b * 2)), fake_timings(FAST):
        assert dispatch.explain(zeros, b).backend == "bf16_fallback"  # though 0 = 2 * 0
        assert (dispatch.matmul(zeros, b) == 0).all()
        is_right(dispatch.matmul(a, b), a, b)
        assert [d.backend for d in dispatch.stored()] == ["bf16_fallback"]


def test_one_inf_does_not_make_a_good_backend_a_faulty_one():
    a, b = arrays()
    a[3, 3] = np.inf
    with registered(FakeBackend("fast", good)), fake_timings(FAST), np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(dispatch.matmul(a, b), a @ b)
        assert dispatch.stats()["quarantined"] == {}
        assert dispatch.explain(a, b).backend == "fast"


def test_an_inf_where_the_exact_result_has_one_is_no_fault(monkeypatch):
    """The framework's own product may stay finite where rounding the exact result overflows."""
    monkeypatch.setattr(session, "native", lambda problem: lambda a, b: np.nan_to_num(a @ b))
    a, b = arrays()
    a[3] = 3e38 * np.sign(b[:, 0])
    with registered(FakeBackend("fast", good)), fake_timings(FAST), np.errstate(all="ignore"):
        dispatch.explain(a, b)
        assert dispatch.stats()["measured"] == 1
        assert dispatch.stats()["quarantined"] == {}


def test_degenerate_data_is_no_proof_for_what_loses_accuracy():
    a, b = arrays(dtype=np.float16)
    lossy = FakeBackend(
        "lossy", lambda a, b: (a.astype(np.float32) @ b * 1.01).astype(np.float16), recipes=("e4m3:row",)
    )
    with registered(lossy), fake_timings({"baseline": 100.0, "lossy": 10.0}):
        dispatch.matmul(np.zeros_like(a), b)
        assert dispatch.stored() == []
        assert dispatch.explain(a, b).backend == "lossy"
        assert [d.measurement.error_data for d in dispatch.stored()] == ["caller"]


def test_latencies_on_data_that_say_nothing_are_true_of_other_data_until_the_store_is_cleared(monkeypatch):
    timed, measure_latency = [], session.measure_latency
    monkeypatch.setattr(session, "measure_latency", lambda *given: timed.append(given) or measure_latency(*given))
    a, b = arrays(dtype=np.float16)
    with (
        registered(FakeBackend("lossy", good, recipes=("e4m3:row",))),
        fake_timings({"baseline": 100.0, "lossy": 10.0}),
    ):
        dispatch.matmul(np.zeros_like(a), b)
        once = len(timed)
        dispatch.matmul(a, b)
        assert len(timed) == once > 0
        assert dispatch.stats()["measured"] == 2
        dispatch.clear_store()
        dispatch.matmul(a, b)
        assert len(timed) > once


def test_data_that_say_nothing_are_not_measured_in_every_call():
    a, b = arrays(dtype=np.float16)
    zeros = np.zeros_like(b)
    lossy = FakeBackend("lossy", lambda a, b: a @ b, recipes=("e4m3:row",))
    with registered(lossy), fake_timings({"baseline": 100.0, "lossy": 10.0}):
        measured = []
        for _ in range(20):
            before = dispatch.stats()["measured"]
            assert (dispatch.matmul(a, zeros) == 0).all()
            measured.append(dispatch.stats()["measured"] - before)
        assert [i for i, times in enumerate(measured) if times] == [0, 1, 3, 7, 15]
        assert "constant or not finite so far" in dispatch.explain(a, zeros).reason
        for _ in range(16):  # other data come, and are measured after a while
            is_right(dispatch.matmul(a, b), a, b, 1e-2)
        assert dispatch.explain(a, b).backend == "lossy"
        assert len(dispatch.stored()) == 1
        measured = dispatch.stats()["measured"]
        dispatch.matmul(a, zeros)
        assert dispatch.stats()["measured"] == measured
        dispatch.clear_store()
        dispatch.matmul(a, zeros)
        assert dispatch.stats()["measured"] == measured + 1


def test_zero_sizes_are_neither_measured_nor_stored():
    with registered(FakeBackend("fast", Failing(RuntimeError("never asked")))), fake_timings(FAST):
        for m, k, n in ((0, 3, 4), (3, 0, 4), (3, 4, 0)):
            out = dispatch.matmul(np.ones((m, k)), np.ones((k, n)))
            assert out.shape == (m, n)
            assert (out == 0).all()
        assert dispatch.stats()["measured"] == 0
        assert dispatch.stats()["quarantined"] == {}
        assert dispatch.stored() == []


# Noise


def noisy(seed, latency):
    draw = random.Random(seed)

    def give(name):
        lucky = 0.4 if draw.random() < 0.02 else 0.0
        return latency.get(name, latency["baseline"]) * (1 + abs(draw.gauss(0, 0.1)) - lucky)

    return give


def bimodal(seed, latency):
    draw = random.Random(seed)
    return lambda name: latency.get(name, latency["baseline"]) * draw.choice((1.0, 1.7))


def picks(timer, latency, seeds, device_time):
    a, b = arrays()
    found = set()
    with registered(*(FakeBackend(name, good) for name in latency if name != "baseline")):
        for seed in range(seeds):
            dispatch.clear_store()
            with fake_timings(timer(seed, latency), device_time):
                found.add(dispatch.explain(a, b).backend)
    return found


@pytest.mark.parametrize(("device_time", "seeds"), [(False, 3), (True, 20)], ids=["cpu", "gpu"])
@pytest.mark.parametrize("timer", [noisy, bimodal])
def test_noise_does_not_choose(timer, device_time, seeds):
    assert picks(timer, {"baseline": 10.0, "near": 9.95, "slow": 12.0}, seeds, device_time) == {"bf16_fallback"}


@pytest.mark.parametrize(("device_time", "seeds"), [(False, 3), (True, 20)], ids=["cpu", "gpu"])
def test_noise_does_not_hide_a_clear_winner(device_time, seeds):
    assert picks(noisy, {"baseline": 10.0, "clear": 1.0, "near": 9.95}, seeds, device_time) == {"clear"}


def test_what_noise_leaves_open_serves_but_is_not_stored():
    a, b = arrays()
    draw = random.Random(0)
    mixed = {"baseline": (10.0, 10.0, 10.0, 6.0), "torn": (8.0,)}  # 1.25x by the median, 0.75x by the least
    with registered(FakeBackend("torn", good)), fake_timings(lambda name: draw.choice(mixed.get(name, (10.0,)))):
        decision = dispatch.explain(a, b)
        is_right(dispatch.matmul(a, b), a, b)
    assert decision.backend == "bf16_fallback"
    assert "too noisy to tell" in decision.reason
    assert not decision.settled
    assert "not settled" in str(decision)
    assert dispatch.stored() == []


# Processes


def process(code, env=None, drop=()):
    """Return what `code` printed last, as JSON, in a process of its own; any warning is an error."""
    kept = {k: v for k, v in os.environ.items() if k not in drop}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=kept | (env or {}), timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.strip().split("\n")[-1])


SECOND = """
import json, sys
sys.modules |= dict.fromkeys(("torch", "jax"))  # quicker
import numpy as np, dispatch
from dispatch.testing import FakeBackend, fake_timings, registered
rng = np.random.default_rng(0)
a, b = rng.standard_normal((8, 16)).astype("f4"), rng.standard_normal((16, 4)).astype("f4")
with registered(FakeBackend("fast", lambda a, b: a @ b)), fake_timings({"baseline": 100.0, "fast": 10.0}):
    decision = dispatch.explain(a, b)
    right = bool(np.allclose(dispatch.matmul(a, b), a @ b, rtol=1e-4, atol=1e-5))
print(json.dumps([decision.backend, decision.source, dispatch.stats()["measured"], right]))
"""


def test_a_second_process_does_not_measure(tmp_path):
    env = {"DISPATCH_CACHE_DIR": str(tmp_path / "shared")}
    assert process(SECOND, env) == ["fast", "measured", 1, True]
    for _ in range(2):
        assert process(SECOND, env) == ["fast", "store", 0, True]


def test_import_is_pure():
    command = [sys.executable, "-X", "importtime", "-c", "import dispatch"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in done.stderr.splitlines()}
    assert "dispatch" in loaded
    assert loaded.isdisjoint({"torch", "jax", "jaxlib", "triton", "rich", "typer", "click", "sqlalchemy"})


def test_import_starts_nothing():
    found = process("""
import json, os, threading
before = len(os.listdir("/proc/self/task"))
import dispatch
print(json.dumps([threading.active_count(), len(os.listdir("/proc/self/task")) - before]))
""")
    assert found[0] == 1


FORK = """
import json, os, warnings, numpy as np, dispatch
from dispatch.testing import FakeBackend
warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # of NumPy's threads, from Python 3.12 on
a = np.ones((4, 4), "f4")
dispatch.register(FakeBackend("mine"))
{use}
pid = os.fork()
if pid == 0:
    right = (dispatch.matmul(a, a) == 4).all() and (dispatch.matmul(a[:3], a) == 4).all()
    os._exit(0 if right and dispatch.stats()["store"]["state"] == "ok" else 1)
code = os.waitpid(pid, 0)[1]
print(json.dumps([code, bool((dispatch.matmul(a[:2], a) == 4).all()), len(dispatch.stored()) >= 0]))
"""


@pytest.mark.parametrize("use", ["", "dispatch.matmul(a, a)"], ids=["cold", "after use"])
def test_forked_children_multiply(use, tmp_path):
    assert process(FORK.format(use=use), {"DISPATCH_CACHE_DIR": str(tmp_path)}) == [0, True, True]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_spawned_children_multiply(method):
    found = process(
        f"""
import json, multiprocessing, numpy as np
import concurrent.futures
def main():
    context = multiprocessing.get_context({method!r})
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        a = np.ones((3, 4), np.float32)
        import dispatch
        print(json.dumps(pool.submit(dispatch.matmul, a, a.T).result().tolist()))
if __name__ == "__main__":
    main()
"""
    )
    assert found == [[4.0] * 3] * 3


MULTIPLY = """
import json, sys, warnings
{first}
said = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *rest: said.append(f"{{category.__name__}}: {{message}}")
import numpy as np, dispatch
from dispatch.testing import FakeBackend
dispatch.register(FakeBackend("mine"))
for n in (2, 3, 4):
    a = np.full((n, n), 2, np.float32)
    assert (dispatch.matmul(a, a) == 4 * n).all()
print(json.dumps({{"said": said, "state": dispatch.stats()["store"]["state"], "stored": len(dispatch.stored())}}))
"""


@pytest.mark.parametrize("home", ["/", "/nonexistent/x", "", "/proc"])
def test_without_a_home_it_multiplies_and_warns_at_most_once(home):
    folders = ("DISPATCH_CACHE_DIR", "XDG_CACHE_HOME")
    found = process(MULTIPLY.format(first=""), {"HOME": home}, drop=folders)
    assert len(found["said"]) == 1
    assert found["said"][0].startswith("StoreWarning")


@pytest.mark.parametrize(
    "missing", [("triton",), ("jax",), ("torch",), ("ml_dtypes",), ("triton", "jax", "torch", "ml_dtypes")]
)
def test_blocked_modules_do_not_keep_numpy_from_multiplying(missing, tmp_path):
    first = "".join(f"sys.modules[{name!r}] = None\n" for name in missing)
    found = process(MULTIPLY.format(first=first), {"DISPATCH_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert (found["said"], found["state"]) == ([], "ok")
