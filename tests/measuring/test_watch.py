"""The guard under `mode = "async"`: what plans say of their operands, what trips, and what comes of it."""

from __future__ import annotations

import gc
import logging
import threading
import weakref

import numpy as np
import pytest

import dispatch
from dispatch import FORMATS, RecipePair, use_policy
from dispatch.measuring import watch as watch_module
from dispatch.measuring.guard import ASYNC_PROBE_EVERY
from dispatch.measuring.watch import BAND, NEVER, SAMPLE, Watch, watching
from dispatch.testing import FakeBackend, fake_timings, registered

pytestmark = pytest.mark.usefixtures("engine", "soon_learnt")
ASYNC = {"mode": "async"}
M, N, K = 64, 96, 128
LEARNT = 256


@pytest.fixture
def soon_learnt(monkeypatch):
    """Let the guard learn from fewer calls."""
    monkeypatch.setattr(watch_module, "LEARNT", LEARNT)


class Reference(FakeBackend):
    """Multiplies what the reference quantizer makes of the operands, and says what it makes of them."""

    def __init__(self, recipe):
        super().__init__("fp8", recipes=(recipe,))
        self.calls, self.planned = 0, 0

    def prepare(self, operand, recipe, *, axis):
        return dispatch.quantize(operand, recipe, axis=axis).dequantize("float32")

    def plan(self, problem, config=None):
        self.planned += 1
        recipe, watch = problem.recipe, dispatch.watch()
        look = {"a": None, "b": None}
        if watch is not None:
            quantized = [side for side in look if not getattr(problem, side).prepared]
            look |= {side: watch.by_rows(side, getattr(recipe, side), problem.k) for side in quantized}

        def product(a, b, bias=None):
            self.calls += 1
            decoded = []
            for side, x, axis in (("a", a, -1), ("b", b, -2)):
                if getattr(problem, side).prepared:
                    decoded.append(x)
                    continue
                decoded.append(dispatch.quantize(x, getattr(recipe, side), axis=axis).dequantize("float32"))
                if look[side] is not None:
                    look[side](x, decoded[-1])
            out = decoded[0] @ decoded[1]
            return (np.maximum(out, 0) if problem.activation == "relu" else out).astype("float16")

        return product


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16)


def operands(seed=0):
    return normal(M, K, seed=seed), normal(K, N, seed=1000 + seed)


def outlier(a):
    """One element that leaves nothing of the others under a tensor scale."""
    a = a.copy()
    a[3, 5] = 5e3
    a[8:] *= np.float16(1e-2)
    return a


@pytest.fixture
def served():
    """Make a backend of a recipe the choice, under the guard; yields it by calling."""

    def serve(recipe="e4m3:tensor", **guard):
        backend = Reference(recipe)
        policy = use_policy(guard={**ASYNC, **guard}, recipes={"allow": [recipe]})
        return backend, registered(backend), fake_timings({"baseline": 100.0, "fp8": 10.0}), policy

    return serve


def stats():
    return dispatch.stats()["guard"]


class TestTrips:
    @pytest.mark.parametrize("recipe", ["e4m3:tensor", "e4m3:row", "e5m2:tensor", "e4m3:1x128@e4m3:128x128"])
    def test_normal_data_passes(self, recipe, served):
        backend, entry, clock, policy = served(recipe)
        with entry, clock, policy:
            for seed in range(2 * LEARNT):
                dispatch.matmul(*operands(seed % 40))
            assert dispatch.explain(*operands()).backend == "fp8"
        assert stats() == {"probed": 0, "tripped": 0, "refused": 0}
        assert backend.calls >= 2 * LEARNT

    def test_a_plan_made_in_a_capture_serves_no_call_after_it(self, served, monkeypatch):
        """Nothing may be made to watch it then, and what comes after is to be watched."""
        backend, entry, clock, policy = served()
        room = dispatch.framework("numpy")
        a, b = operands()
        with entry, clock:
            for guard, kept in ((policy, False), (use_policy(recipes={"allow": ["e4m3:tensor"]}), True)):
                with guard:
                    dispatch.matmul(a, b)
                    dispatch.forget()
                    with monkeypatch.context() as capture:
                        capture.setattr(type(room), "modes", lambda self, *arrays: ("captured",))
                        made = [dispatch.matmul(a, b) is not None and backend.planned for _ in range(3)]
                    assert (len(set(made)) == 1) == kept
                    dispatch.matmul(a, b)
                    assert (backend.planned == made[-1]) == kept

    def test_a_thousand_normal_calls_and_then_data_that_break_the_tolerance(self, served, caplog):
        backend, entry, clock, policy = served()
        with entry, clock, policy:
            for seed in range(1000):
                dispatch.matmul(*operands(seed % 40))
            assert stats()["tripped"] == 0
            a, b = operands()
            with caplog.at_level(logging.WARNING, "dispatch"):
                calls = backend.calls
                for _ in range(SAMPLE + 4):
                    out = dispatch.matmul(outlier(a), b)
            np.testing.assert_array_equal(out, outlier(a) @ b)  # the framework's own
            assert backend.calls - calls <= SAMPLE
            said = dispatch.explain(a, b).reason
        assert stats() == {"probed": 0, "tripped": 1, "refused": 0}
        assert [record.name for record in caplog.records] == ["dispatch"]
        assert "the guard saw other data (a row of a is off by" in caplog.text
        assert "the guard saw other data (a row of a is off by" in said
        assert "serves for 60 s more" in said

    @pytest.mark.parametrize("row", [0, 1, 15, 16, 37, M - 1])
    def test_an_outlier_row_that_stays_is_seen_within_sixteen_calls(self, row, served):
        """By a tensor scale nothing is left of a row that is small beside the others."""
        backend, entry, clock, policy = served()
        a, b = operands()
        with entry, clock, policy:
            for _ in range(7):
                dispatch.matmul(a, b)
            a = a.copy()
            a[row] *= np.float16(1e-5)
            calls = backend.calls
            for _ in range(SAMPLE + 1):
                dispatch.matmul(a, b)
            assert stats()["tripped"] == 1
            assert backend.calls - calls <= SAMPLE

    def test_scales_hidden_along_k_are_unusual(self, served):
        """Within the tolerance by rounding errors, which fall: one element of each row has all there is of it."""
        _, entry, clock, policy = served("e4m3:row")
        a, b = operands()
        hidden = a.copy()
        hidden[:, 3] *= np.float16(1e4)
        with entry, clock, policy:
            for _ in range(LEARNT + 1):
                dispatch.matmul(a, b)
            for _ in range(2):
                dispatch.matmul(hidden, b)
            assert "less than usual" in dispatch.explain(a, b).reason

    @pytest.mark.parametrize("value", [np.inf, np.nan])
    @pytest.mark.parametrize("side", [0, 1])
    def test_what_is_not_finite(self, value, side, served):
        _, entry, clock, policy = served("e4m3:row")
        with entry, clock, policy:
            dispatch.matmul(*operands())
            given = [x.copy() for x in operands()]
            given[side][2, 2] = value
            for _ in range(SAMPLE + 1):
                dispatch.matmul(*given)
        assert stats()["tripped"] == 1

    def test_zeros_in_a_warm_up_are_no_measure_of_what_is_usual(self, served):
        _, entry, clock, policy = served()
        a, b = operands()
        with entry, clock, policy:
            dispatch.matmul(a, b)
            for _ in range(LEARNT):
                dispatch.matmul(np.zeros_like(a), b)
            for _ in range(SAMPLE):
                dispatch.matmul(a, b)
        assert stats()["tripped"] == 0

    def test_a_column_of_b_may_be_lost_if_it_always_was(self, served):
        """By rows of the output it counts for nothing; the gate says the same."""
        _, entry, clock, policy = served()
        a, b = operands()
        b[:, 5] *= np.float16(1e-5)
        with entry, clock, policy:
            for _ in range(LEARNT + SAMPLE):
                dispatch.matmul(a, b)
        assert stats()["tripped"] == 0


class TestAfterATrip:
    def test_the_problem_is_measured_again_after_the_cool_down(self, engine, served):
        _, entry, clock, policy = served(cool_down_s=5)
        a, b = operands()
        with entry, clock, policy:
            dispatch.matmul(a, b)
            bad = outlier(a)
            for _ in range(SAMPLE + 1):
                dispatch.matmul(bad, b)
            measured = engine.counts["measured"]
            engine.guard._clock.now = 4.9
            dispatch.matmul(bad, b)
            assert engine.counts["measured"] == measured
            engine.guard._clock.now = 5.1
            dispatch.matmul(bad, b)  # still the framework's own, but it ends the cool-down
            dispatch.matmul(bad, b)
            assert engine.counts["measured"] == measured + 1
            assert "error above tolerance" in dispatch.explain(bad, b).reason
        assert stats()["tripped"] == 1

    def test_a_band_that_was_too_narrow_is_wider_next_time(self, engine, served):
        backend, entry, clock, policy = served("e4m3:row", cool_down_s=5)
        bands = []
        plan = backend.plan

        def noting(problem, config=None):
            watch = dispatch.watch()
            if watch is not None:
                bands.append(watch.band)
            return plan(problem, config)

        backend.plan = noting
        a, b = operands()
        with entry, clock, policy:
            for trip in range(2):
                dispatch.matmul(a, b)
                bad = a.copy()
                bad[:, 1] = np.inf
                for _ in range(SAMPLE + 1):
                    dispatch.matmul(bad, b)
                assert stats()["tripped"] == trip + 1
                engine.guard._clock.now += 6
                dispatch.matmul(a, b)
            dispatch.matmul(a, b)
        assert bands == [BAND, BAND**2, BAND**3]

    def test_threads_trip_once(self, served):
        _, entry, clock, policy = served()
        a, b = operands()
        bad = outlier(a)
        with entry, clock, policy as entered:
            dispatch.matmul(a, b)
            failures = []

            def work():
                try:
                    for _ in range(3 * SAMPLE):
                        dispatch.matmul(bad, b, policy=entered)
                except Exception as error:
                    failures.append(error)

            dispatch.matmul(a, b, policy=entered)
            threads = [threading.Thread(target=work) for _ in range(8)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        assert failures == []
        assert stats()["tripped"] == 1

    def test_stats_see_a_trip_that_no_call_has_met(self, served):
        """As when a CUDA graph is replayed: nobody calls."""
        backend, entry, clock, policy = served()
        kept = []
        plan = backend.plan

        def listening(problem, config=None):
            watch = dispatch.watch()
            if watch is not None:
                kept.append([0.0, 0.0])
                watch.listen("a", kept[-1])
            return plan(problem, config)

        backend.plan = listening
        with entry, clock, policy:
            dispatch.matmul(*operands())
            kept[-1][:] = 1.0, 0.25
            assert stats()["tripped"] == 1
            assert stats()["tripped"] == 1
            assert (
                "a row of a is off by 0.5 of itself, more than usual or allowed" in dispatch.explain(*operands()).reason
            )


class TestWhatIsWatched:
    def test_prepared_weights_leave_the_other_operand_watched(self, served):
        _, entry, clock, policy = served()
        a, b = operands()
        weight = dispatch.prepare(b)
        with entry, clock, policy:
            dispatch.matmul(a, weight)
            assert dispatch.explain(a, weight).backend == "fp8"
            for _ in range(SAMPLE + 1):
                dispatch.matmul(outlier(a), weight)
        assert stats() == {"probed": 0, "tripped": 1, "refused": 0}

    @pytest.mark.parametrize("weight_prepared", [False, True])
    def test_a_backend_that_says_nothing_is_probed_now_and_then(self, weight_prepared, served):
        def product(a, b, bias=None):
            left, right = dispatch.quantize(a, "e4m3:row"), dispatch.quantize(b, "e4m3:row", axis=-2)
            return (left.dequantize("float32") @ right.dequantize("float32")).astype("float16")

        a, b = operands()
        b = dispatch.prepare(b) if weight_prepared else b
        with (
            registered(FakeBackend("fp8", product, recipes=("e4m3:row",))),
            fake_timings({"baseline": 100.0, "fp8": 10.0}),
            use_policy(guard=ASYNC),
        ):
            for _ in range(2 * ASYNC_PROBE_EVERY):
                dispatch.matmul(a, b)
        assert stats() == {"probed": 2, "tripped": 0, "refused": 0}

    def test_probe_every_probes_beside_it(self, served):
        _, entry, clock, policy = served(probe_every=5)
        with entry, clock, policy:
            for _ in range(20):
                dispatch.matmul(*operands())
        assert stats() == {"probed": 4, "tripped": 0, "refused": 0}

    def test_an_activation_is_no_hindrance_but_for_probes(self, served):
        _, entry, clock, policy = served()
        a, b = operands()
        with entry, clock, policy:
            assert dispatch.explain(a, b, activation="relu").backend == "fp8"
            with use_policy(guard={"probe_every": 2}):
                assert dispatch.explain(a, b, activation="relu").backend != "fp8"

    def test_a_metric_of_single_elements_is_refused(self, served):
        _, entry, clock, policy = served()
        with entry, clock, policy, use_policy(error={"metric": "max_abs_over_scale", "tolerance": 1.0}):
            assert "metric is max_abs_over_scale" in str(dispatch.explain(*operands()))

    def test_what_loses_nothing_is_neither_watched_nor_probed(self):
        asked = []
        backend = FakeBackend("fast", on_plan=lambda problem: asked.append(dispatch.watch()))
        with registered(backend), fake_timings({"baseline": 100.0, "fast": 10.0}), use_policy(guard=ASYNC):
            for _ in range(ASYNC_PROBE_EVERY):
                dispatch.matmul(*operands())
            assert dispatch.explain(*operands()).backend == "fast"
        assert set(asked) == {None}
        assert stats()["probed"] == 0

    def test_nobody_is_asked_for_sums_in_other_modes(self, served):
        backend, entry, clock, _ = served()
        asked, plan = [], backend.plan
        backend.plan = lambda problem, config=None: asked.append(dispatch.watch()) or plan(problem, config)
        for guard in ({"mode": "strict"}, {"probe_every": 2}, {}):
            with entry, clock, use_policy(guard=guard, recipes={"allow": ["e4m3:tensor"]}):
                dispatch.matmul(*operands())
            dispatch.forget()
            _, entry, clock, _ = served()
            entry = registered(backend)
        assert set(asked) == {None}

    def test_a_plan_that_is_forgotten_takes_its_watch_along(self, engine, served):
        _, entry, clock, policy = served()
        with entry, clock, policy:
            dispatch.matmul(*operands())
            assert len(engine.guard._watches) == 1
            dispatch.forget()
        gc.collect()
        assert len(engine.guard._watches) == 0


class TestBounds:
    def test_the_tolerance_is_the_limit_of_a_row_of_a_beside_what_b_adds(self, served):
        watches, backend, entry, clock, policy = [], *served()
        plan = backend.plan
        backend.plan = lambda problem, config=None: watches.append(dispatch.watch()) or plan(problem, config)
        with entry, clock, policy:
            dispatch.matmul(*operands())
            error = dispatch.explain(*operands()).measurement.error
        watch = next(x for x in watches if x is not None)
        assert watch.limit == pytest.approx(2 * 0.005 - error.relative_l2**2 / 2)

    @pytest.mark.parametrize("name", ["e4m3", "e5m2"])
    def test_rounding_alone_reaches_no_more_than_it_says(self, name):
        import ml_dtypes

        recipe = RecipePair.parse(f"{name}:row").a
        kind = np.dtype(getattr(ml_dtypes, FORMATS[name]))
        values = np.linspace(1.0, 2.0, 10_001)
        ratio = np.max(((values.astype(kind).astype(float) - values) / values) ** 2)
        _, _, rounding = Watch(1.0).bounds("a", recipe, 4096)
        assert ratio <= rounding <= 1.5 * ratio

    def test_short_rows_have_no_band_and_b_no_limit(self):
        recipe = RecipePair.parse("e4m3:row").a
        assert Watch(0.5).bounds("a", recipe, 8) == (0.5, NEVER, NEVER)
        assert Watch(0.5).bounds("b", recipe, 4096)[:2] == (NEVER, BAND)

    def test_a_watch_is_there_only_inside(self):
        made = Watch(1.0)
        with watching(made):
            assert dispatch.watch() is made
        assert dispatch.watch() is None
        alive = weakref.ref(made)
        del made
        gc.collect()
        assert alive() is None


@pytest.mark.parametrize("framework_name", ["numpy", "torch", "jax"])
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("batch", [(), (2, 3)])
def test_rows_are_compared_as_float64_does(framework_name, side, batch):
    room = pytest.importorskip(framework_name) and dispatch.framework(framework_name)
    rng = np.random.default_rng(0)
    values = rng.standard_normal((*batch, 20, 100) if side == "a" else (*batch, 100, 20)).astype(np.float32)
    found = values * (1 + 0.01 * rng.standard_normal(values.shape).astype(np.float32))
    axis = -1 if side == "a" else -2
    ratios = np.square(values - found, dtype=np.float64).sum(axis) / np.square(values, dtype=np.float64).sum(axis)
    like = room.normal((1,), "float32", 0)
    recipe = RecipePair.parse("e4m3:row").a
    for limit, trips in ((1.001, False), (0.999, True)):
        watch = Watch(float(ratios.max()) * limit)
        look = watch.by_rows(side, recipe, 100)
        for _ in range(SAMPLE):
            look(room.asarray(values, like), room.asarray(found, like))
        assert watch.tripped() == (trips and side == "a")


@pytest.mark.parametrize("data", ["a causal softmax", "one value in a hundred", "normal"])
def test_rows_that_few_values_rule_have_no_lower_end(data):
    rng = np.random.default_rng(0)
    recipe = RecipePair.parse("e4m3:row").a
    watch = Watch(0.02)
    look = watch.by_rows("a", recipe, 128)
    for _ in range(1500):
        x = rng.standard_normal((64, 128)).astype(np.float32)
        if data == "a causal softmax":
            x = np.exp(2 * x) * np.tri(64, 128)
            x /= x.sum(1, keepdims=True)
        elif data == "one value in a hundred":
            x *= rng.random(x.shape) < 0.01
        look(x, np.asarray(dispatch.quantize(x, recipe, axis=-1).dequantize("float32")))
    assert not watch.tripped()
    x[:] = 1e-4
    x[:, 0] = 1.0  # exact but for what is nothing beside it
    for _ in range(SAMPLE):
        look(x, np.where(x == 1.0, x, 1.01 * x))
    assert watch.tripped() == (data == "normal")


@pytest.mark.parametrize("layers", [2, 4, 8, 12, 16, 32, 80])
def test_rows_of_operands_that_take_turns_are_all_seen(layers) -> None:
    watch = Watch(0.5)
    look = watch.by_rows("a", RecipePair.parse("e4m3:row").a, 8)
    x = np.ones((26, 8), np.float32)
    bad = x.copy()
    bad[5] = np.nan
    for call in range(13 * layers):
        look(bad if call % layers == layers - 1 else x, x)
    assert watch.tripped()


def test_a_trip_is_reported_once() -> None:
    watch, said = Watch(0.5), []
    watch.report = said.append
    trip = [0.0, 0.0]
    watch.listen("a", trip)
    assert not watch.tripped()
    trip[:] = [1.0, 0.25]
    assert [watch.tripped() for _ in range(3)] == [True] * 3
    assert said == ["a row of a is off by 0.5 of itself, more than usual or allowed"]
