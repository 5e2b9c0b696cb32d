"""How latencies are taken: rounds, order, gates and ends, by stopwatches that follow a script."""

from __future__ import annotations

import itertools
import statistics
from collections import OrderedDict, defaultdict
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

from dispatch.frameworks import _clock
from dispatch.frameworks._clock import map_arrays
from dispatch.measuring import latency
from dispatch.measuring.latency import measure_latency


class Clock:
    """The time that measure_latency sees: it moves by what the stopwatch says that its calls took."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(latency, "time", made)
    return made


class Script:
    """A stopwatch: `give(index, n)` is what the nth run of a call takes, in microseconds."""

    def __init__(self, clock, give, device_time=False, compile_s=0.0):
        self.clock, self.give, self.device_time, self.compile_s = clock, give, device_time, compile_s
        self.orders, self.runs, self.prepared = [], {}, 0

    def prepare(self):
        assert not self.orders
        self.prepared += 1
        self.clock.now += self.compile_s

    def round(self, order):
        self.orders.append(list(order))
        spent = []
        for index in order:
            n = self.runs[index] = self.runs.get(index, 0) + 1
            spent.append(float(self.give(index, n - 1)))
            self.clock.now += spent[-1] / 1e6
        return spent


def steady(*latencies):
    return lambda index, n: latencies[index]


def test_on_a_cpu_at_least_ten_rounds(clock):
    watch = Script(clock, steady(20_000.0, 10_000.0))
    base, own = measure_latency(watch, [1.0, 1.5], 60_000)
    assert watch.prepared == 1
    assert (base.rounds, own.rounds) == (10, 10)
    assert (own.latency_us, own.median_us, own.spread_us, own.speedup) == (10_000.0, 10_000.0, 0.0, 2.0)
    assert base.settled
    assert own.settled


def test_on_a_cpu_at_least_fifty_milliseconds(clock):
    watch = Script(clock, steady(300.0, 200.0))
    base, own = measure_latency(watch, [1.0, 1.5], 60_000)
    assert base.rounds == own.rounds
    assert 50_000 <= base.rounds * 500 <= 50_500


def test_rounds_alternate_their_order(clock):
    watch = Script(clock, steady(9000.0, 6000.0, 7000.0))
    measure_latency(watch, [1.0, 1.5, 1.5], 60_000)
    assert watch.orders[:4] == [[0, 1, 2], [2, 1, 0], [0, 1, 2], [2, 1, 0]]
    assert len(watch.orders) == 10


def test_on_a_cpu_minima_decide(clock):
    noise = [1.0, 9.0, 9.0, 1.2, 9.0]
    watch = Script(clock, lambda index, n: (3000.0, 1000.0)[index] * noise[(n + index) % 5])
    base, own = measure_latency(watch, [1.0, 1.5], 60_000)
    assert (base.latency_us, own.latency_us, own.speedup) == (3000.0, 1000.0, 3.0)
    assert own.median_us == 9000.0
    runs = [1000.0 * noise[(n + 1) % 5] for n in range(own.rounds)]
    assert own.spread_us == pytest.approx(np.percentile(runs, 25) - 1000.0)


def torn(index, n):
    """1.25x by the medians, 0.75x by the minima."""
    return 8000.0 if index else (10_000.0, 10_000.0, 6000.0)[n % 3]


def test_where_minimum_and_median_disagree_it_goes_on_for_a_second_and_is_not_settled(clock):
    watch = Script(clock, torn)
    start = clock.now
    base, own = measure_latency(watch, [1.0, 1.05], 60_000)
    assert not own.settled
    assert base.settled
    assert 1.0 <= clock.now - start < 1.05
    assert own.speedup == pytest.approx(0.75)


def test_more_rounds_may_settle_it(clock):
    watch = Script(clock, lambda index, n: 8000.0 if index else (10_000.0 if n < 11 and n != 3 else 6000.0))
    start = clock.now
    _, own = measure_latency(watch, [1.0, 1.05], 60_000)
    assert own.settled
    assert own.rounds > 10
    assert clock.now - start < 1.0


def test_disagreement_on_one_side_of_the_gate_is_none(clock):
    watch = Script(clock, torn)
    _, own = measure_latency(watch, [1.0, 1.5], 60_000)  # both say no
    assert own.settled
    assert own.rounds == 10


def test_only_the_torn_call_is_not_settled(clock):
    watch = Script(clock, lambda index, n: 2000.0 if index == 2 else torn(index, n))
    _, unsettled, settled = measure_latency(watch, [1.0, 1.05, 1.5], 60_000)
    assert (unsettled.settled, settled.settled) == (False, True)


def test_one_long_run_of_the_baseline_is_enough_where_all_others_are_far_beyond(clock):
    for base_us, own_us in ((2_000_000.0, 20_000.0), (150_000.0, 800_000.0)):
        watch = Script(clock, steady(base_us, own_us))
        base, own = measure_latency(watch, [1.0, 1.05], 60_000)
        assert (base.rounds, own.rounds) == (1, 5)
        assert own.settled
        assert own.speedup == pytest.approx(base_us / own_us)


@pytest.mark.parametrize(
    ("base_us", "own_us", "gate"),
    [
        (99_000.0, 1_000.0, 1.5),  # not a long run
        (150_000.0, 30_000.0, 1.5),  # 5x, and 7.5x is wanted
        (150_000.0, 400_000.0, 1.5),  # 0.375x, and 0.3x is wanted
    ],
)
def test_else_ten_rounds_they_are(clock, base_us, own_us, gate):
    watch = Script(clock, steady(base_us, own_us))
    base, own = measure_latency(watch, [1.0, gate], 600_000)
    assert base.rounds == 10
    assert own.rounds >= 10


def test_one_that_is_near_keeps_all_running(clock):
    watch = Script(clock, steady(200_000.0, 2000.0, 150_000.0))
    base, far, near = measure_latency(watch, [1.0, 1.5, 1.5], 600_000)
    assert base.rounds == 10
    assert near.rounds >= 10
    assert far.rounds >= 10


@pytest.mark.parametrize("device_time", [False, True])
def test_the_budget_ends_it(clock, device_time):
    watch = Script(clock, steady(50_000.0, 40_000.0), device_time)
    start = clock.now
    base, own = measure_latency(watch, [1.0, 1.05], 300)
    assert base.rounds == own.rounds == 4
    assert clock.now - start < 0.4


@pytest.mark.parametrize("device_time", [False, True])
def test_without_a_budget_there_are_three_rounds(clock, device_time):
    base, own = measure_latency(Script(clock, steady(50.0, 40.0), device_time), [1.0, 1.05], 0)
    assert base.rounds == own.rounds == 3


def test_compiling_is_not_in_the_budget(clock):
    watch = Script(clock, steady(20_000.0, 10_000.0), compile_s=500.0)
    assert measure_latency(watch, [1.0, 1.5], 2000)[0].rounds == 10


def test_the_baseline_alone(clock):
    (base,) = measure_latency(Script(clock, steady(20_000.0)), [1.0], 2000)
    assert (base.speedup, base.settled) == (1.0, True)


def test_on_a_device_medians_of_twenty_rounds_decide(clock):
    noise = itertools.cycle([1.0, 1.01, 1.02, 0.7, 1.01])
    watch = Script(clock, lambda index, n: (90.0, 30.0)[index] * next(noise), device_time=True)
    base, own = measure_latency(watch, [1.0, 1.5], 60_000)
    assert base.rounds == own.rounds == 20
    assert (own.latency_us, own.median_us) == (own.median_us, pytest.approx(30.3))
    assert own.speedup == pytest.approx(base.median_us / own.median_us)
    assert own.spread_us == pytest.approx(0.3, abs=0.02)
    assert own.settled


def test_on_a_device_two_modes_around_the_gate_do_not_settle(clock):
    modes = itertools.cycle([1.0, 1.7, 1.0, 1.7, 1.7, 1.0, 1.0])
    watch = Script(clock, lambda index, n: 10.0 * next(modes), device_time=True)
    _, own = measure_latency(watch, [1.0, 1.05], 60_000)
    assert not own.settled


def test_latencies_are_those_of_the_call_whatever_the_order(clock):
    runs = {}

    def give(index, n):
        runs.setdefault(index, []).append(1000.0 * (index + 1) + n)
        return runs[index][-1]

    timings = measure_latency(Script(clock, give), [1.0, 1.5, 1.5], 60_000)
    for index, timing in enumerate(timings):
        assert timing.latency_us == min(runs[index])
        assert timing.median_us == statistics.median(runs[index])


@pytest.mark.parametrize(("took_us", "runs"), [(2.0, 1 + 3 * 25), (80.0, 1 + 3), (2000.0, 3)])
def test_a_short_call_is_repeated_and_its_time_is_that_of_one(took_us, runs, monkeypatch):
    clock, ran = Clock(), []

    def call(x):
        ran.append(x)
        clock.now += took_us / 1e6

    clock.perf_counter_ns = lambda: round(clock.now * 1e9)
    monkeypatch.setattr(_clock, "time", clock)
    watch = _clock.WallClock([(call, ("a",))])
    for _ in range(3):
        assert watch.round([0]) == [pytest.approx(took_us, rel=0.01)]
    assert ran == ["a"] * runs


def test_operands_are_copied_in_whatever_holds_them() -> None:
    class Pair(NamedTuple):
        first: Any
        second: Any

    @dataclass(frozen=True)
    class Held:
        array: Any
        name: str

    x = np.ones(3)
    held = [Pair(x, {"k": (x, 2)}), Held(x, "y")]
    pair, other = map_arrays(held, lambda array: array + 1, lambda value: isinstance(value, np.ndarray))
    assert isinstance(pair, Pair)
    assert pair.first[0] == pair.second["k"][0][0] == other.array[0] == 2
    assert (pair.second["k"][1], other.name) == (2, "y")
    assert x[0] == 1


def test_containers_of_operands_stay_what_they_are() -> None:
    class Owned(list):
        def __init__(self, owner: str, items: tuple[object, ...] = ()) -> None:
            super().__init__(items)
            self.owner = owner

    class Two(tuple):
        def __new__(cls, first: object, second: object) -> Any:
            return super().__new__(cls, (first, second))

    @dataclass
    class Late:
        array: object
        scale: InitVar[int]
        twice: object = field(init=False)

        def __post_init__(self, scale: int) -> None:
            self.twice = self.array * scale

    x = np.ones(2)
    values = [Owned("me", (x, 1)), Two(x, 2), OrderedDict(a=x), defaultdict(list, a=x), Late(x, 3)]
    found = map_arrays(values, lambda array: array + 1, lambda value: isinstance(value, np.ndarray))
    assert [type(value) for value in found] == [type(value) for value in values]
    assert (found[0].owner, found[0][0][0], found[0][1]) == ("me", 2, 1)
    assert (found[1][0][0], found[1][1], found[2]["a"][0], found[3]["a"][0]) == (2, 2, 2, 2)
    assert (found[4].array[0], found[4].twice[0], values[0][0][0], values[3]["a"][0]) == (2, 4, 1, 1)
