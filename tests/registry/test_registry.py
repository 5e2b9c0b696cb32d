"""The registry: each entry point loads alone, what fails is recorded, and names are never ambiguous."""

from __future__ import annotations

import itertools
import threading
import types
import warnings
from dataclasses import replace

import numpy as np
import pytest

import dispatch
from dispatch import Capability, Operand, Problem, _api, hookimpl
from dispatch._engine import Engine
from dispatch.registry import PluginWarning, Registry, status
from dispatch.remembering import DecisionStore
from dispatch.testing import FakeBackend


class Distribution:
    def __init__(self, name, version="1.0"):
        self.name, self.version = name, version


class Point:
    """An entry point: `what` is raised if it is an exception, else loaded."""

    def __init__(self, name, dist, what=None):
        self.name, self.dist = name, Distribution(dist)
        self.what = FakeBackend(name) if what is None else what
        self.loads = 0

    def load(self):
        self.loads += 1
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


class Plugin:
    """An object with the hook, which returns or raises `what`."""

    def __init__(self, what):
        self.what = what

    @hookimpl
    def dispatch_backends(self):
        if isinstance(self.what, BaseException):
            raise self.what
        return self.what


def load(*points):
    """Return the registry, loaded, and the warnings' text."""
    registry = Registry(lambda: points)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert registry.backends is not None
    assert all(w.category is PluginWarning for w in said)
    return registry, [str(w.message) for w in said]


@pytest.fixture
def with_points(tmp_path, monkeypatch):
    """Return a function that lets the public functions see these entry points alone."""

    def use(*points):
        registry = Registry(lambda: points)
        monkeypatch.setattr(_api, "_engine", Engine(registry, DecisionStore(tmp_path / "store.sqlite")))
        dispatch.forget()
        return registry

    yield use
    dispatch.forget()


IMPORT_ERRORS = [
    ImportError("no libcuda.so.1"),
    ModuleNotFoundError("No module named 'x'"),
    SyntaxError("bad"),
    SystemExit(1),
    RuntimeError("driver"),
    AttributeError("nope"),
    type("Own", (BaseException,), {})("base"),
]


@pytest.mark.parametrize("error", IMPORT_ERRORS, ids=lambda x: type(x).__name__)
def test_what_raises_at_import_is_one_warning_and_stops_nobody(error):
    registry, said = load(Point("bad", "broken-dist", error), Point("good", "fine-dist"))
    assert list(registry.backends) == ["good"]
    assert len(said) == 1
    for text in ("bad", "broken-dist", type(error).__name__, str(error)):
        assert text in said[0]
    assert [(f.name, f.distribution) for f in registry.faults] == [("bad", "broken-dist")]
    failed = status(registry, {})[-1]
    assert (failed.name, failed.distribution, failed.status) == ("bad", "broken-dist", "failed")
    assert not failed.available
    assert str(error) in failed.unavailable


def test_a_keyboard_interrupt_at_import_passes_and_loading_goes_on_later():
    interrupted = Point("later", "p", KeyboardInterrupt())
    registry = Registry(lambda: [Point("a", "o"), interrupted])
    with pytest.raises(KeyboardInterrupt):
        assert registry.backends
    interrupted.what = FakeBackend("later")
    assert list(registry.backends) == ["a", "later"]
    assert registry.faults == ()


@pytest.mark.parametrize("error", IMPORT_ERRORS, ids=lambda x: type(x).__name__)
def test_a_hook_that_raises_is_recorded(error):
    registry, said = load(Point("bad", "p", Plugin(error)), Point("good", "q"))
    assert list(registry.backends) == ["good"]
    assert len(said) == 1
    assert str(error) in said[0]


def halfway():
    yield FakeBackend("half")
    raise RuntimeError("midway")


def unnamed():
    return type("Unnamed", (FakeBackend,), {"name": property(lambda self: 1 / 0, lambda self, value: None)})("x")


def with_capabilities(capabilities):
    backend = FakeBackend("odd")
    backend.capabilities = capabilities
    return backend


@pytest.mark.parametrize(
    ("returned", "named"),
    [
        (halfway(), "midway"),
        ([FakeBackend("half"), object()], "no instance of dispatch.Backend"),
        ([FakeBackend("half"), FakeBackend], "no instance of dispatch.Backend"),
        ([FakeBackend("half"), FakeBackend(7)], "a name is text"),
        ([FakeBackend("half"), FakeBackend("")], "a name is text"),
        ([FakeBackend("half"), FakeBackend("baseline")], "not 'baseline'"),
        ([FakeBackend("half"), with_capabilities(["anything"])], "dispatch.Capability"),
        ([FakeBackend("half"), with_capabilities(None)], "TypeError"),
        ([FakeBackend("half"), unnamed()], "ZeroDivisionError"),
        (None, "TypeError"),
        (5, "TypeError"),
    ],
)
def test_a_plugin_is_registered_whole_or_not_at_all(returned, named):
    registry, said = load(Point("bad", "p", Plugin(returned)), Point("half", "q"))
    assert {name: x.distribution for name, x in registry.backends.items()} == {"half": "q"}
    assert len(said) == 1
    assert named in said[0]
    assert len(registry.faults) == 1


@pytest.mark.parametrize("plugin", [types.ModuleType("empty"), object(), 7, FakeBackend])
def test_what_has_neither_hook_nor_backend_is_no_plugin(plugin):
    registry, said = load(Point("nothing", "p", plugin))
    assert registry.backends == {}
    assert len(said) == 1
    assert "nothing of p" in said[0]


def test_a_wrong_signature_is_recorded():
    class Wrong:
        @hookimpl
        def dispatch_decided(self, choice):
            pass

    registry, said = load(Point("wrong", "p", Wrong()), Point("good", "q"))
    assert list(registry.backends) == ["good"]
    assert len(said) == 1
    assert "choice" in said[0]


def test_a_hook_that_nobody_calls_is_recorded():
    class Slip(Plugin):
        @hookimpl
        def dispatch_decide(self, decision):
            pass

    registry, said = load(Point("slip", "p", Slip([FakeBackend("slip")])), Point("good", "q"))
    assert list(registry.backends) == ["good"]
    assert len(said) == 1
    assert "dispatch_decide" in said[0]


def test_a_backend_itself_may_be_the_entry_point():
    registry, said = load(Point("x", "p"))
    assert (list(registry.backends), said) == (["x"], [])


def test_entry_points_that_cannot_be_read_are_recorded():
    def unreadable():
        raise TypeError("malformed entry_points.txt")

    registry = Registry(unreadable)
    with pytest.warns(PluginWarning, match="malformed"):
        assert registry.backends == {}
    assert len(registry.faults) == 1


def test_loading_happens_once_and_only_when_needed():
    point = Point("x", "p")
    registry = Registry(lambda: [point])
    assert point.loads == 0
    gate = threading.Barrier(8)

    def use():
        gate.wait()
        assert list(registry.backends) == ["x"]

    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert point.loads == 1


def test_a_plugin_may_ask_for_the_registry_while_it_loads():
    registry = Registry(lambda: [point])

    class Curious(Point):
        def load(self):
            registry.add(FakeBackend("mine"), "mine", "inside")
            return super().load()

    point = Curious("x", "p")
    assert set(registry.backends) == {"x", "mine"}


# Names


def test_of_two_with_one_name_the_first_by_distribution_is_kept_and_both_are_named():
    for points in itertools.permutations([Point("x", "p2"), Point("x", "p1"), Point("y", "p3")]):
        registry, said = load(*points)
        assert {name: v.distribution for name, v in registry.backends.items()} == {"x": "p1", "y": "p3"}
        assert len(said) == 1
        assert "p1's is kept, not p2's" in said[0]
        listed = [x for x in status(registry, {}) if x.name == "x"]
        assert [(x.distribution, x.status == "failed") for x in listed] == [("p1", False), ("p2", True)]
        assert "p1" in listed[1].unavailable
        assert "p2" in listed[1].unavailable


def test_a_built_in_is_never_shadowed():
    built_in = Point("cublas", "gemm-dispatch")
    for points in ([Point("cublas", "aaa"), built_in], [built_in, Point("cublas", "aaa")]):
        registry, said = load(*points)
        assert registry.backends["cublas"].distribution == "gemm-dispatch"
        assert len(said) == 1
        assert "gemm-dispatch" in said[0]
        assert "aaa" in said[0]


def test_what_is_registered_by_hand_does_not_shadow_entry_points_either():
    registry = Registry(lambda: [Point("x", "zzz")])
    with pytest.warns(PluginWarning, match="zzz's is kept, not caller's"):
        registry.add(FakeBackend("x"), "x", "caller")
    assert registry.backends["x"].distribution == "zzz"


def test_the_same_distribution_seen_twice_is_no_conflict():
    registry, said = load(Point("x", "p1"), Point("x", "p1"))
    assert (list(registry.backends), said, registry.faults) == (["x"], [], ())


def test_two_plugins_of_one_distribution_may_not_share_a_name():
    registry, said = load(Point("a", "p", FakeBackend("x")), Point("b", "p", FakeBackend("x")))
    assert list(registry.backends) == ["x"]
    assert len(said) == 1


def test_one_object_under_two_names_is_recorded():
    plugin = Plugin([FakeBackend("x")])
    registry, said = load(Point("a", "p", plugin), Point("b", "q", plugin))
    assert list(registry.backends) == ["x"]
    assert len(said) == 1


def test_the_order_is_built_in_first_then_by_distribution_and_name():
    points = [
        Point("b", "z"),
        Point("a", "z"),
        Point("c", "k"),
        Point("z", "gemm-dispatch"),
        Point("y", "gemm-dispatch"),
    ]
    for shuffled in itertools.permutations(points):
        registry, said = load(*shuffled)
        assert (list(registry.backends), said) == (["y", "z", "c", "a", "b"], [])


def test_a_repeated_fault_warns_once():
    registry, _ = load(Point("bad", "p", Plugin([FakeBackend("x")])))
    broken = Plugin(RuntimeError("again"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        registry.add(broken, "again", "caller")
        registry.add(broken, "again", "caller")
    assert len(said) == 1
    assert len(registry.faults) == 1


# By hand


def test_one_plugin_is_taken_out_and_the_others_of_its_distribution_stay(with_points):
    with_points()
    dispatch.register(FakeBackend("a"))
    dispatch.register(FakeBackend("b"))
    dispatch.unregister("a")
    assert [x.name for x in dispatch.backends()] == ["b"]
    dispatch.unregister("b")
    assert dispatch.backends() == []
    with pytest.raises(ValueError, match="nothing under the name 'b'"):
        dispatch.unregister("b")


def test_registered_again_it_is_the_new_one_without_its_quarantine(with_points):
    with_points()

    def broken(a, b):
        raise RuntimeError("broken")

    a = np.ones((4, 4), np.float32)
    dispatch.register(FakeBackend("mine", broken))
    assert (dispatch.matmul(a, a) == 4).all()
    assert "mine" in dispatch.stats()["quarantined"]
    dispatch.register(FakeBackend("mine", lambda a, b: a @ b))
    assert dispatch.stats()["quarantined"] == {}
    assert (dispatch.matmul(a, a, backend="mine") == 4).all()


def test_taken_out_it_leaves_no_quarantine(with_points):
    with_points()
    dispatch.register(FakeBackend("mine", lambda a, b: None))
    dispatch.matmul(np.eye(4), np.eye(4))
    assert "mine" in dispatch.stats()["quarantined"]
    dispatch.unregister("mine")
    assert dispatch.stats()["quarantined"] == {}


def test_backends_names_what_failed(with_points):
    with_points(Point("bad", "p1", ImportError("no libcuda.so.1")), Point("x", "p2"), Point("x", "p3"))
    with pytest.warns(PluginWarning):
        found = {(x.name, x.distribution): x for x in dispatch.backends()}
    assert found["x", "p2"].available
    assert found["x", "p2"].version == "1.0"
    assert "no libcuda.so.1" in found["bad", "p1"].unavailable
    assert "p2's is kept" in found["x", "p3"].unavailable
    assert len(dispatch.stats()["faults"]) == 2


def test_backends_says_why_one_cannot_work_here(with_points):
    elsewhere = FakeBackend("elsewhere")
    elsewhere.capabilities = (Capability(("numpy",), ("sm90",), ("float32",), ("float32",)),)
    anywhere = FakeBackend("anywhere")
    archs = ("sm90", "hip*"), ("sm*", "sm9*"), ("sm100", "xpu")
    anywhere.capabilities = tuple(Capability(("numpy",), x, ("float32",), ("float32",)) for x in archs)
    with_points(
        Point("elsewhere", "p", elsewhere),
        Point("none", "p", with_capabilities(())),
        Point("anywhere", "p", anywhere),
    )
    found = {x.name: x for x in dispatch.backends()}
    assert found["elsewhere"].unavailable.startswith("needs sm90; this machine has cpu-")
    assert found["anywhere"].unavailable.startswith("needs hip*, sm*, sm9*, xpu; this machine has cpu-")
    assert found["odd"].unavailable == "it declares nothing that it can do"


# Observers


class Observer:
    def __init__(self, error=None):
        self.seen, self.error = [], error

    @hookimpl
    def dispatch_decided(self, decision):
        self.seen.append(decision)
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("error", [RuntimeError("observer"), SystemExit(3)])
def test_an_observer_that_raises_is_recorded_and_stops_nobody(with_points, error):
    observers = [Observer(), Observer(error), Observer()]
    registry = with_points(
        *(Point(f"o{i}", "watchers", observer) for i, observer in enumerate(observers)),
        Point("x", "p", FakeBackend("x")),
    )
    a = np.ones((4, 5), np.float32)
    with pytest.warns(PluginWarning, match="plugin o1 of watchers: dispatch_decided raised"):
        assert (dispatch.matmul(a, a.T) == 5).all()
    assert (dispatch.matmul(a, a.T) == 5).all()
    assert [len(observer.seen) for observer in observers] == [1, 1, 1]  # once a problem
    assert observers[0].seen[0].problem.k == 5
    assert len(registry.faults) == 1


def test_an_observer_may_leave_its_argument_out(with_points):
    calls = []

    class Counter:
        @hookimpl
        def dispatch_decided(self):
            calls.append(1)

    with_points(Point("counter", "p", Counter()), Point("x", "p"))
    a = np.ones((4, 4), np.float32)
    assert (dispatch.matmul(a, a) == 4).all()
    assert calls == [1]


def test_an_interrupt_in_an_observer_passes(with_points):
    with_points(Point("o", "p", Observer(KeyboardInterrupt())), Point("x", "p"))
    a = np.ones((4, 4), np.float32)
    with pytest.raises(KeyboardInterrupt):
        dispatch.matmul(a, a)


@pytest.mark.parametrize("odd", [{"archs": "sm90"}, {"recipes": ("e4m3:row",)}, {"frameworks": "torch"}])
def test_a_capability_of_bare_strings_is_refused(odd):
    stated = {"frameworks": ("torch",), "archs": ("sm90",), "dtypes": ("bfloat16",), "out_dtypes": ("bfloat16",)}
    with pytest.raises(TypeError, match="tuples"):
        Capability(**{**stated, **odd})


def test_of_capabilities_the_one_that_came_closest_says_why():
    stated = {"frameworks": ("torch",), "archs": ("sm90",), "dtypes": ("bfloat16",), "out_dtypes": ("bfloat16",)}
    near, far = (
        Capability(**{**stated, "archs": ("sm100",)}),
        Capability(**{**stated, "frameworks": ("jax",)}, batched=False),
    )
    operand = Operand("bfloat16", (3,))
    problem = Problem(8, 8, 8, operand, operand, "bfloat16", "torch", "sm90", "cuda:0")
    for capabilities in ([near, far], [far, near]):
        assert [str(reason) for reason in dispatch.closest(capabilities, problem)] == ["arch is sm90; needs sm100"]
    assert dispatch.closest([far, Capability(**stated)], problem) == []


def test_a_backend_is_asked_about_sizes_that_it_declares(with_points):
    class Threes(FakeBackend):
        def rejections(self, problem):
            return dispatch.closest(self.capabilities, problem)

    backend = Threes("threes")
    backend.capabilities = (replace(backend.capabilities[0], multiple_of=(3, 5, 7)),)
    with_points()
    dispatch.register(backend)
    assert [info.unavailable for info in dispatch.backends() if info.name == "threes"] == [None]
