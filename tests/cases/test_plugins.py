"""Backends and plugins that fail in every way: the caller gets a right product, and the reason is kept."""

from __future__ import annotations

import random
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import dispatch
from dispatch import hookimpl
from dispatch.registry import PluginWarning, Registry
from dispatch.testing import FakeBackend, fake_timings, registered

FAST = {"bad": 1.0, "baseline": 100.0}


def _raise(error):
    raise error


def faults(room):
    """Return products (a, b, bias=None) that are no good, by name."""
    return {
        "returns None": lambda a, b, bias=None: None,
        "returns a list": lambda a, b, bias=None: [[1.0]],
        "wrong shape": lambda a, b, bias=None: room.matmul(a, b)[:1],
        "too many dimensions": lambda a, b, bias=None: room.matmul(a, b)[None],
        "wrong dtype": lambda a, b, bias=None: room.cast(room.matmul(a, b), "float16"),
        "NaN": lambda a, b, bias=None: room.matmul(a, b) * float("nan"),
        "Inf": lambda a, b, bias=None: room.matmul(a, b) + float("inf"),
        "off by one": lambda a, b, bias=None: room.matmul(a, b) + 1.0,
        "assertion": lambda a, b, bias=None: _raise(AssertionError("layout")),
        "status": lambda a, b, bias=None: _raise(RuntimeError("Invalid status")),
        "exits": lambda a, b, bias=None: _raise(SystemExit(3)),
        "generator exit": lambda a, b, bias=None: _raise(GeneratorExit()),
        "out of memory": lambda a, b, bias=None: _raise(MemoryError("CUDA out of memory")),
    }


@pytest.mark.parametrize("fault", sorted(faults(dispatch.framework("numpy"))))
def test_a_faulty_product_serves_nobody(kit, fault):
    """B83 (triton-lang/triton#6803), B10 (vllm-project/vllm#48586), B82 (flashinfer-ai/flashinfer#2442)."""
    a, b = kit.normal(5, 7), kit.normal(7, 6, seed=1)
    with registered(FakeBackend("bad", faults(kit.room)[fault])), fake_timings(FAST, device_time=True):
        for _ in range(2):
            kit.close(a, b, dispatch.matmul(a, b))
        decision = dispatch.explain(a, b)
        assert decision.backend != "bad"
        verdict = next(v for v in decision.candidates if v.candidate.backend == "bad")
        assert verdict.reason
        assert verdict.outcome in ("rejected", "too wrong")


@pytest.mark.parametrize(
    "error", [RuntimeError("Plan index 10 is invalid"), SystemExit(2), AssertionError(), OSError()]
)
@pytest.mark.parametrize("after", [1, 4])
def test_a_chosen_backend_that_fails_later_is_replaced(kit, error, after):
    """B71 (flashinfer-ai/flashinfer#3566): dropped, recorded, and the call is served all the same."""
    calls = [0]

    def flaky(a, b, bias=None):
        calls[0] += 1
        if calls[0] > after:
            raise error
        return kit.room.matmul(a, b)

    a, b = kit.normal(4, 4), kit.normal(4, 4, seed=1)
    with registered(FakeBackend("bad", flaky)), fake_timings(FAST, device_time=True):
        for _ in range(6):
            kit.close(a, b, dispatch.matmul(a, b))
            kit.close(a, b, dispatch.matmul(a, b, scope="elsewhere"))
        if kit.name != "jax":  # compiled once, it raises no more
            assert "bad" in dispatch.stats()["quarantined"]
            assert dispatch.explain(a, b).backend != "bad"


def test_a_keyboard_interrupt_is_nobodys_fault(kit):
    """The user's interrupt goes up, wherever it strikes, and quarantines nobody."""
    a = kit.normal(3, 3)
    with registered(FakeBackend("bad", lambda a, b, bias=None: _raise(KeyboardInterrupt()))), fake_timings(FAST):
        with pytest.raises(KeyboardInterrupt):
            dispatch.matmul(a, a)
        assert "bad" not in dispatch.stats()["quarantined"]


@pytest.mark.parametrize("where", ["rejections", "plan", "capabilities"])
@pytest.mark.parametrize("error", [RuntimeError("driver"), SystemExit(1), AttributeError("nope")])
def test_a_backend_that_fails_before_it_multiplies(kit, where, error):
    """B103's kind (sgl-project/sglang#38513): raising in rejections() or plan() is a rejection with that reason."""
    backend = FakeBackend("bad", on_plan=(lambda problem: _raise(error)) if where == "plan" else None)
    if where == "rejections":
        backend.rejections = lambda problem: _raise(error)
    if where == "capabilities":
        backend.capabilities = ()
    a, b = kit.normal(3, 4), kit.normal(4, 2, seed=1)
    with registered(backend), fake_timings(FAST, device_time=True):
        for _ in range(2):
            kit.close(a, b, dispatch.matmul(a, b))
        assert dispatch.explain(a, b).backend != "bad"


def test_support_is_asked_for_each_problem(kit):
    """B10: a rejection holds for the shape that it was given for; others are served by the backend."""

    class Picky(FakeBackend):
        def rejections(self, problem):
            return [dispatch.Rejection("n", str(problem.n), "a multiple of 128")] if problem.n % 128 else []

    with registered(Picky("bad")), fake_timings(FAST, device_time=True):
        for n, serves in ((16, False), (128, True), (129, False), (256, True)):
            a, b = kit.normal(2, 4), kit.normal(4, n, seed=1)
            kit.close(a, b, dispatch.matmul(a, b))
            decision = dispatch.explain(a, b)
            assert (decision.backend == "bad") == serves
            if not serves:
                assert f"n is {n}; needs a multiple of 128" in str(decision)


def test_the_default_is_left_only_for_more_than_noise(numpy_kit):
    """B79 (pytorch/helion#2626): lucky samples in noisy timings never make a slower backend the choice."""
    a, b = numpy_kit.normal(8, 8), numpy_kit.normal(8, 8, seed=1)
    level = {"baseline": 10.0, "even": 9.95, "slow": 12.0}
    picks = set()
    for seed in range(20):
        rnd = random.Random(seed)

        def clock(name, rnd=rnd):
            lucky = 0.4 if rnd.random() < 0.02 else 0.0
            return level.get(name, 10.0) * (1 + abs(rnd.gauss(0, 0.1)) - lucky)

        with registered(FakeBackend("even"), FakeBackend("slow")), fake_timings(clock, device_time=True):
            dispatch.clear_store()
            picks.add(dispatch.explain(a, b).backend)
    assert "slow" not in picks
    assert len(picks) == 1


class Point:
    """An entry point of `distribution` whose load gives a plugin with one backend, or raises."""

    def __init__(self, name, distribution, error=None):
        self.name, self.error = name, error
        self.dist = SimpleNamespace(name=distribution, version="1.0")

    def load(self):
        if self.error is not None:
            raise self.error
        backend = FakeBackend(self.name)
        backend.origin = self.dist.name

        class Plugin:
            @hookimpl
            def dispatch_backends(self):
                return [backend]

        return Plugin()


def load(*points):
    """Return a registry's backends as (name, origin), what it warned of, and its faults."""
    registry = Registry(lambda: points)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = [(name, x.backend.origin) for name, x in registry.backends.items()]
    assert all(issubclass(w.category, PluginWarning) for w in caught)
    return found, [str(w.message) for w in caught], registry.faults


ERRORS = [ImportError("no libcuda.so.1"), SyntaxError("x"), SystemExit(1), RuntimeError("driver"), AttributeError("no")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
def test_a_plugin_that_fails_to_load_stops_no_other(error):
    """B106 (simonw/llm#1351, pytest-dev/pytest#1479): one warning with plugin, distribution and cause."""
    found, said, recorded = load(Point("bad", "dist-b", error), Point("good", "dist-c"), Point("also", "dist-a"))
    assert {name for name, _ in found} == {"good", "also"}
    assert len(said) == len(recorded) == 1
    for word in ("bad", "dist-b", type(error).__name__, str(error)):
        assert word in said[0]


def test_a_plugin_whose_hook_fails_halfway_is_recorded():
    """B106: a hook that raises, and one that gives something that is no backend."""

    class Broken:
        @hookimpl
        def dispatch_backends(self):
            yield FakeBackend("first")
            raise RuntimeError("halfway")

    class Nothing:
        @hookimpl
        def dispatch_backends(self):
            return [object()]

    for plugin, word in ((Broken(), "halfway"), (Nothing(), "Backend")):
        point = Point("bad", "dist")
        point.load = lambda plugin=plugin: plugin
        with pytest.warns(PluginWarning, match=word):
            assert "good" in Registry(lambda point=point: [point, Point("good", "other")]).backends


@pytest.mark.parametrize("names", [("p1", "p2"), ("z", "a"), ("gemm-dispatch", "a")])
def test_two_plugins_of_one_name_are_settled_alike_in_any_order(names):
    """B107 (PyCQA/flake8#1090, nose-devs/nose#465): built-in first, else by distribution; a warning names both."""
    one, other = (Point("x", name) for name in names)
    first, second = load(one, other), load(other, one)
    assert first[0] == second[0]
    assert first[0] == [("x", "gemm-dispatch" if "gemm-dispatch" in names else min(names))]
    for _, said, _ in (first, second):
        assert len(said) == 1
        assert all(name in said[0] for name in names)


def test_one_distribution_seen_twice_is_no_conflict():
    """B107: the same entry point found twice on sys.path says nothing."""
    found, said, _ = load(Point("x", "p1"), Point("x", "p1"))
    assert (found, said) == ([("x", "p1")], [])


def test_threads_meeting_an_unknown_problem_all_get_right_products(kit):
    """one thread measures, the others get the baseline; none waits for ever, none is wrong."""
    import threading

    a, b = kit.normal(16, 16), kit.normal(16, 16, seed=1)
    out: list[object] = []
    with registered(FakeBackend("bad")), fake_timings(FAST, device_time=True):
        barrier = threading.Barrier(8)

        def work():
            barrier.wait()
            out.extend(dispatch.matmul(a, b) for _ in range(5))

        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert len(out) == 40
    want = kit.product(a, b)
    assert all(np.allclose(kit.wide(x), want, atol=1e-4) for x in out)
