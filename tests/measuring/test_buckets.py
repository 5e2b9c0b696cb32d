"""One decision for a bucket of m: which m share it, what is measured for it, and what is asked again."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import numpy as np
import pytest

import dispatch
from dispatch import Operand, Problem, Rejection, _api, use_policy
from dispatch._engine import Engine
from dispatch._measurement import BASELINE, Candidate
from dispatch.measuring import buckets
from dispatch.measuring.buckets import bucket
from dispatch.measuring.ends import worse
from dispatch.measuring.latency import Timing
from dispatch.registry import Registry
from dispatch.remembering import DecisionStore
from dispatch.testing import FakeBackend, registered

pytestmark = pytest.mark.usefixtures("engine")
ROOM = dispatch.framework("numpy")


def problem(m: int, arch: str = "sm90", **changes) -> Problem:
    a = changes.pop("a", Operand("bfloat16"))
    return Problem(m, 64, 32, a, Operand("bfloat16"), "bfloat16", "torch", arch, changes.pop("device", "cuda:0"))


def test_one_function_gives_the_bucket_of_every_m_in_it():
    seen = {}
    for m in [*range(1, 300), 1023, 1024, 1025, 2000, 2001, 2048, 2049]:
        first, last = bucket(problem(m))
        assert first <= m <= last
        seen.setdefault((first, last), []).append(m)
    for ends, sizes in seen.items():
        assert {bucket(problem(m)) for m in (*ends, *sizes)} == {ends}
    assert list(seen)[:5] == [(1, 16), (17, 32), (33, 64), (65, 128), (129, 256)]
    assert bucket(problem(257)) == (257, 257)


@pytest.mark.parametrize(
    "other",
    [
        problem(3, arch="cpu-avx512"),
        problem(3, a=Operand("bfloat16", (4,))),
        problem(3, a=Operand("bfloat16", (), "col")),
        problem(3, a=Operand("bfloat16", prepared=True)),
        problem(3, device="cuda:0,cuda:1"),
    ],
)
def test_other_problems_have_their_own_m(other):
    assert bucket(other) == (3, 3)


def timing(latency_us: float, speedup: float, settled: bool = True) -> Timing:
    return Timing(latency_us, latency_us, latency_us / 10, 20, speedup, settled)


def test_of_each_candidate_the_worse_speedup_counts_as_a_latency_at_the_last_m():
    better, worse_there, lone = Candidate("better"), Candidate("worse_there"), Candidate("lone")
    first = {BASELINE: timing(10, 1), better: timing(10, 1.0), worse_there: timing(4, 2.5), lone: timing(5, 2.0)}
    last = {BASELINE: timing(40, 1), better: timing(10, 4.0, settled=False), worse_there: timing(20, 2.0)}
    found = worse(first, last)
    assert found[BASELINE] == last[BASELINE]
    assert found[better].speedup == 1.0
    assert found[better].latency_us == pytest.approx(40)  # as slow as the baseline, whatever it does at the last m
    assert found[better].spread_us == pytest.approx(4)
    assert not found[better].settled
    assert found[worse_there] == last[worse_there]
    assert found[lone].latency_us == pytest.approx(20)


class Watch:
    """Clocks that say what a test says, by a candidate's backend and its m; they note what was timed."""

    def __init__(self, latency_us):
        self.latency_us, self.timed = latency_us, []

    def __call__(self, calls, memory_bytes):
        self.timed.append(int(calls[0][1][0].shape[0]))
        return _Stopwatch([(call.__name__.split("/")[0], int(given[0].shape[0])) for call, given in calls], self)


class _Stopwatch:
    device_time = True

    def __init__(self, names, watch):
        self.names, self.watch = names, watch

    def prepare(self):
        pass

    def round(self, order):
        return [self.watch.latency_us(*self.names[index]) for index in order]


@contextmanager
def watched(latency_us):
    """Let the CPU pass for a GPU, and the clock say what `latency_us(name, m)` does."""
    watch = Watch(latency_us)
    arch = type(ROOM.arch(np.ones(1)))("sm90")
    with patch.object(ROOM, "stopwatch", watch), patch.object(ROOM, "arch", lambda array: arch):
        yield watch


def arrays(m: int, n: int = 4, k: int = 16):
    rng = np.random.default_rng(m)
    return rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)


def check(m: int):
    a, b = arrays(m)
    np.testing.assert_allclose(dispatch.matmul(a, b), a.astype(np.float64) @ b, rtol=1e-4, atol=1e-5)
    return dispatch.explain(a, b)


def fast(name, m):
    return 100.0 if name == "baseline" else 10.0


def test_a_bucket_is_measured_once_and_at_both_ends(engine):
    with registered(FakeBackend("fast", lambda a, b, bias=None: a @ b)), watched(fast) as watch:
        assert [check(m).backend for m in (5, 1, 16, 9)] == ["fast"] * 4
        assert watch.timed == [1, 16]
        assert dispatch.stats()["measured"] == 1
        assert check(17).backend == "fast"
        assert watch.timed == [1, 16, 17, 32]
        assert "m = 17 to 32" in str(check(20))
    with watched(fast) as watch:  # another process: from the store
        engine.decisions._memory.clear()
        dispatch.forget()
        with registered(FakeBackend("fast", lambda a, b, bias=None: a @ b)):
            assert check(12).source == "store"
        assert watch.timed == []


@pytest.mark.parametrize("slow_at", [1, 16])
def test_the_worse_end_decides(slow_at):
    with (
        registered(FakeBackend("fast", lambda a, b, bias=None: a @ b)),
        watched(lambda name, m: 99.0 if (name, m) == ("fast", slow_at) else fast(name, m)),
    ):
        decision = check(7)
        assert decision.backend != "fast"
        assert "1.05x not reached: 1.01x" in decision.reason


def test_errors_are_those_of_the_callers_own_operands():
    def wrong_for_seven_rows(a, b, bias=None):
        return a @ b * (1.5 if a.shape[0] == 7 else 1.0)

    with registered(FakeBackend("fast", wrong_for_seven_rows)), watched(fast):
        assert "error above tolerance" in check(7).reason


def test_what_is_rejected_at_an_m_neither_serves_it_nor_keeps_the_others_from_it():
    class Even(FakeBackend):
        def rejections(self, problem):
            return [Rejection("m", str(problem.m), "an even m")] if problem.m % 2 else []

    with registered(Even("even", lambda a, b, bias=None: a @ b)), watched(fast) as watch:
        for _ in range(2):
            assert check(4).backend == "even"
            assert check(5).backend != "even"
            assert check(6).backend == "even"
            dispatch.forget()
        assert watch.timed == [1, 16]  # the odd end could not be timed with it, and at an odd m there is no choice


@pytest.mark.parametrize("first", [4, 5])
def test_an_m_with_other_candidates_has_a_choice_of_its_own(first):
    class Even(FakeBackend):
        def rejections(self, problem):
            return [Rejection("m", str(problem.m), "an even m")] if problem.m % 2 else []

    product = lambda a, b, bias=None: a @ b  # noqa: E731
    latency = lambda name, m: {"baseline": 100.0, "any": 50.0, "even": 10.0}[name]  # noqa: E731
    with registered(FakeBackend("any", product), Even("even", product)), watched(latency):
        for m in (first, 9 - first):
            assert check(m).backend == ("any" if m % 2 else "even")


def test_what_is_wrong_at_an_end_serves_none_of_the_bucket():
    product = lambda a, b, bias=None: a @ b * (1.5 if a.shape[0] == 16 else 1.0)  # noqa: E731
    with registered(FakeBackend("fast", product)), watched(fast):
        assert "error above tolerance" in check(5).reason
        assert check(16).backend != "fast"


def test_what_runs_at_neither_end_is_timed_apart():
    class Middle(FakeBackend):
        def rejections(self, problem):
            return [Rejection("m", str(problem.m), "2 to 15")] if problem.m in (1, 16) else []

    def latency(name, m):
        return {"baseline": 100.0, "middle": 50.0}.get(name, 200.0 if m in (1, 16) else 10.0)

    product = lambda a, b, bias=None: a @ b  # noqa: E731
    with registered(FakeBackend("slow_ends", product), Middle("middle", product)), watched(latency) as watch:
        decision = check(5)
        assert decision.backend == "middle"
        found = {v.candidate.backend: v.measurement.speedup for v in decision.candidates if v.measurement}
        assert found["slow_ends"] == pytest.approx(0.5)
        assert found["middle"] == pytest.approx(2.0)
        assert watch.timed == [1, 16, 5]


def test_a_plan_that_raises_at_an_end_alone_is_a_fault(engine):
    def fails_at_sixteen(a, b, bias=None):
        if a.shape[0] == 16:
            raise RuntimeError("no sixteen")
        return a @ b

    with registered(FakeBackend("fast", fails_at_sixteen)), watched(fast):
        assert check(5).backend != "fast"
        assert "no sixteen" in engine.quarantine["fast"]


def test_bias_of_every_shape():
    with registered(FakeBackend("fast")), watched(fast) as watch:
        a, b = arrays(6)
        for bias in (np.ones(4, np.float32), np.ones((6, 4), np.float32), np.ones((6, 1), np.float32), np.float32(2)):
            out = dispatch.matmul(a, b, bias=bias)
            np.testing.assert_allclose(out, a @ b + bias, rtol=1e-4, atol=1e-5)
        assert set(watch.timed) == {1, 16}


def test_a_policy_without_measuring_measures_nothing():
    with (
        registered(FakeBackend("fast")),
        watched(fast) as watch,
        use_policy(tuning={"mode": "off"}),
    ):
        check(5)
        assert watch.timed == []


def test_buckets_follow_one_another():
    assert buckets.BUCKETS[0][0] == 1
    assert all(one[1] + 1 == two[0] for one, two in zip(buckets.BUCKETS, buckets.BUCKETS[1:], strict=False))


@pytest.mark.gpu
def test_on_a_gpu_a_batch_that_changes_is_measured_once(tmp_path, monkeypatch):
    torch = pytest.importorskip("torch")
    made = Engine(Registry(), DecisionStore(tmp_path / "gpu.sqlite"))
    monkeypatch.setattr(_api, "_engine", made)
    b = torch.randn(4096, 2048, device="cuda", dtype=torch.bfloat16).t()
    for m in (7, 1, 16, 12):
        a = torch.randn(m, 2048, device="cuda", dtype=torch.bfloat16)
        exact = a.double() @ b.double()
        error = (dispatch.matmul(a, b).double() - exact).norm() / exact.norm()
        assert float(error) < 0.08, m
    assert made.counts["measured"] == 1
    assert made.quarantine == {}
