"""The guard's sums in torch's plans: on a CPU what launches are given, on a GPU that trips come, without a wait."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import dispatch
from dispatch import Operand, Problem, RecipePair, Watch, _api, use_policy
from dispatch.measuring.watch import SAMPLE, watching
from dispatch.testing import fake_timings

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="Triton is not installed")
module = pytest.importorskip("dispatch.plugins._guard_torch")
pytestmark = pytest.mark.triton
ROW = RecipePair.parse("e4m3:row").a
CPU = torch.device("cpu")


def sums(watch: Watch | None = None) -> Any:
    return module.Sums(watch or Watch(0.5), "a", ROW, 512, (100, 512), CPU)


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without CUDA torch cannot say that nothing is captured."""
    monkeypatch.setattr(module, "_capturing", lambda: False)


@pytest.mark.usefixtures("eager")
class TestSums:
    def test_each_stream_and_layout_has_its_own_and_all_share_the_trip(self) -> None:
        made = sums()
        found = [made.on(layout, stream) for layout in ("row", "col") for stream in (0, 7)]
        assert len({x.addresses for x in found}) == 4
        assert len({x.trip.data_ptr() for x in found}) == 1
        assert made.on("row", 7) is found[1]
        assert all(address % 16 == 0 for x in found for address in x.addresses)

    def test_a_graph_gets_what_was_made_before_it_and_nothing_new(self, monkeypatch: pytest.MonkeyPatch) -> None:
        made = sums()
        before = made.on("row", 7)
        monkeypatch.setattr(module, "_capturing", lambda: True)
        captured = made.on("row", 7)
        assert captured is made.on("row", 9)
        assert captured is not before
        assert made.on("col", 7) is None
        assert made in module._captured
        module._captured.discard(made)

    def test_a_trip_is_read_by_the_watch(self) -> None:
        watch = Watch(0.5)
        made, said = sums(watch), []
        watch.report = said.append
        assert not watch.tripped()
        made.on("row", 0).trip.copy_(torch.tensor([1.0, 0.25]))
        assert watch.tripped()
        assert said == ["a row of a is off by 0.5 of itself, more than usual or allowed"]

    def test_trips_are_used_again_as_zeros_but_not_soon(self) -> None:
        """A launch of a plan that was dropped may still write to its trip."""
        trip = module.Trips.take()
        address = trip.data_ptr()
        trip.fill_(1.0)
        module.Trips.give(trip)
        taken = []
        while address not in taken and len(taken) < 10 * module.PAGE:
            again = module.Trips.take()
            assert again.tolist() == [0.0, 0.0]
            taken.append(again.data_ptr())
            module.Trips.give(again)
        assert len(taken) > module.PAGE
        assert taken[-1] == address

    def test_a_trip_comes_back_while_one_is_taken(self) -> None:
        """A page of trips makes the garbage collector run, which may find a plan that was dropped."""
        trip = module.Trips.take()
        back = threading.Thread(target=module.Trips.give, args=(trip,), daemon=True)
        with module.Trips._lock:
            back.start()
            back.join(10)
        assert not back.is_alive()

    def test_what_was_written_after_a_trip_came_back_is_not_found_in_it(self) -> None:
        trips = [module.Trips.take() for _ in range(3)]
        for trip in trips:
            module.Trips.give(trip)
            trip.fill_(1.0)
        assert not any(module.Trips.take().any() for _ in range(len(module.Trips._free)))

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    @pytest.mark.parametrize("device", ["cpu", "meta"])
    def test_defaults_of_torch_change_nothing(self, dtype: torch.dtype, device: str) -> None:
        torch.set_default_dtype(dtype)
        try:
            with torch.device(device):
                module.Trips._free.clear()
                made = sums(Watch(0.5, 4.0))
                kept = made.on("row", 0)
        finally:
            torch.set_default_dtype(torch.float32)
        assert kept is not None
        assert (kept.sums.dtype, kept.sums.device.type) == (torch.float32, "cpu")
        assert (kept.trip.dtype, kept.trip.device.type) == (torch.float32, "cpu")
        assert kept.sums[:2].tolist() == [0.5, 4.0]
        one, other = (module.Trips.take().data_ptr() for _ in range(2))
        assert abs(other - one) % 16 == 0

    def test_the_head_says_what_may_be(self) -> None:
        watch = Watch(0.5, 4.0)
        limit, band, rounding = watch.bounds("a", ROW, 512)
        head = sums(watch).on("row", 0).sums[:8]
        assert head[5:].eq(0).all()
        assert head[:5].tolist() == pytest.approx([limit, band, rounding, 0.0, float("inf")])


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("granularity", ["row", "tensor"])
@pytest.mark.parametrize("guarded", [False, True])
def test_launches_are_given_the_sums_of_what_they_quantize(
    guarded: bool, granularity: str, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dispatch.plugins import _triton_configs as names
    from dispatch.plugins import _triton_torch
    from dispatch.plugins._triton_launches import OF_A, OF_B

    steps, given = [], []
    kernel = _triton_torch.Kernel(lambda stream, addresses: None, 0, None)
    monkeypatch.setattr(_triton_torch, "bind_kernel", lambda *arguments: kernel)
    monkeypatch.setattr(_triton_torch, "_current_stream", lambda index: 0)
    monkeypatch.setattr(
        _triton_torch, "_bound", lambda step: steps.append(step) or (lambda _, x: given.append(list(x)))
    )
    operands = [Operand("bfloat16"), Operand("bfloat16", prepared=prepared)]
    pair = RecipePair.parse(f"e4m3:{granularity}")
    asked = Problem(64, 48, 80, *operands, "bfloat16", "torch", "sm90", device="cpu", recipe=pair, accumulation="fast")
    watch = Watch(0.5) if guarded else None
    with watching(watch):
        made = _triton_torch.ScaledProduct(asked, names.configs(asked)[0])
    a, b = torch.randn(64, 80).bfloat16(), torch.randn(80, 48).bfloat16()
    encoded = _triton_torch.Encoded(torch.zeros(48, 80, dtype=torch.float8_e4m3fn), torch.ones(48))
    made.call()(a, encoded if prepared else b)
    kept = [slots for slots in (OF_A, OF_B)[: 1 if prepared else 2] if guarded]
    slots = {getattr(x, "slot", None) for step in steps for x in step.arguments}
    for side in (OF_A, OF_B):
        assert (side.sums in slots, side.trip in slots) == (side in kept, side in kept)
    for side in kept:
        assert given[-1][side.sums] and given[-1][side.trip]  # noqa: PT018 - one question
    assert [side for side, _ in (watch.trips if watch else [])] == ["a", "b"][: len(kept)]


def test_what_was_first_met_during_a_capture_is_watched_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from dispatch.plugins import _triton_configs as names
    from dispatch.plugins import _triton_torch
    from dispatch.plugins._triton_launches import OF_A, OF_B

    given: list[list[int]] = []
    kernel = _triton_torch.Kernel(lambda stream, addresses: None, 0, None)
    monkeypatch.setattr(_triton_torch, "bind_kernel", lambda *arguments: kernel)
    monkeypatch.setattr(_triton_torch, "_current_stream", lambda index: 1)
    monkeypatch.setattr(_triton_torch, "_bound", lambda step: lambda _, x: given.append(list(x)))
    pair = RecipePair.parse("e4m3:row")
    operands = [Operand("bfloat16"), Operand("bfloat16")]
    asked = Problem(64, 48, 80, *operands, "bfloat16", "torch", "sm90", device="cpu", recipe=pair, accumulation="fast")
    with watching(Watch(0.5)):
        call = _triton_torch.ScaledProduct(asked, names.configs(asked)[0]).call()
    a, b = torch.randn(64, 80).bfloat16(), torch.randn(80, 48).bfloat16()
    for capturing in (True, False, True):
        for one in (module, _triton_torch):
            monkeypatch.setattr(one, "_capturing", lambda capturing=capturing: capturing)
        call(a, b)
        watched = [bool(given[-1][side.sums]) for side in (OF_A, OF_B)]
        assert watched == ([False, False] if len(given) == 1 else [True, True])


gpu = pytest.mark.gpu
M, N, K = 512, 384, 640


@pytest.fixture
def watched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let one backend and recipe win under `mode = "async"`, by fake clocks."""
    backend, recipe = request.param
    dispatch.clear_store()
    _api.engine().guard.counts.update(probed=0, tripped=0, refused=0)
    guard = type(_api.engine().guard)(_api.forget)
    kept, _api.engine().guard = _api.engine().guard, guard
    policy = use_policy(
        guard={"mode": "async"},
        recipes={"allow": [recipe], "accumulation": ["promoted" if "128" in recipe else "fast"]},
        backends={"allow": [backend, "bf16_fallback"]},
    )
    with fake_timings({backend: 1.0, "baseline": 100.0}, device_time=True), policy:
        yield
    _api.engine().guard = kept
    dispatch.clear_store()


BACKENDS = ("triton_tma_fp8", "cublas")
BY_TENSOR = [(name, "e4m3:tensor") for name in BACKENDS]
ALL = [*BY_TENSOR, *((name, recipe) for name in BACKENDS for recipe in ("e4m3:row", "e4m3:1x128@e4m3:128x128"))]


def normal(*shape: int, seed: int = 0) -> Any:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


def weight(layout: str) -> Any:
    return normal(K, N, seed=1) if layout == "row" else normal(N, K, seed=1).t()


def stats() -> dict[str, int]:
    torch.cuda.synchronize()
    return dispatch.stats()["guard"]


def served_by(a: Any, b: Any) -> str:
    return dispatch.explain(a, b).backend


def launches_to_learn() -> int:
    from dispatch.kernels.triton_quantize_common import LEARNT

    return int(LEARNT.value)


@gpu
class TestOnTheDevice:
    @pytest.mark.filterwarnings("ignore:Synchronization debug mode:UserWarning")
    @pytest.mark.parametrize("watched", ALL, indirect=True)
    @pytest.mark.parametrize("layout", ["row", "col"])
    def test_normal_data_passes_without_a_wait(self, layout: str, watched: None) -> None:
        a, b = normal(M, K), weight(layout)
        out = dispatch.matmul(a, b)
        assert served_by(a, b) in BACKENDS
        dispatch.matmul(a, b)
        torch.cuda.synchronize()
        try:
            torch.cuda.set_sync_debug_mode("error")  # it warns of itself, after it is set
            for _ in range(launches_to_learn() + 500):
                out = dispatch.matmul(a, b)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert stats() == {"probed": 0, "tripped": 0, "refused": 0}
        assert ((out.double() - a.double() @ b.double()).norm() / (a.double() @ b.double()).norm()) < 0.06

    @pytest.mark.parametrize("watched", ALL, indirect=True)
    @pytest.mark.parametrize("layout", ["row", "col"])
    @pytest.mark.parametrize("side", ["a", "b"])
    def test_what_is_not_finite_trips_wherever_it_is(self, side: str, layout: str, watched: None) -> None:
        a, b = normal(M, K), weight(layout)
        dispatch.matmul(a, b)
        (a if side == "a" else b)[7, 9] = float("inf")
        for _ in range(SAMPLE + 1):
            dispatch.matmul(a, b)
        assert stats()["tripped"] == 1

    @pytest.mark.parametrize("watched", BY_TENSOR, indirect=True)
    @pytest.mark.parametrize("row", [0, 17, 100, 255, 256, M - 1])
    def test_an_outlier_row_that_stays_is_seen_within_sixteen_calls(self, row: int, watched: None) -> None:
        a, b = normal(M, K), weight("col")
        for _ in range(5):
            dispatch.matmul(a, b)
        a[row] *= 1e-5
        calls = 0
        while not stats()["tripped"]:
            dispatch.matmul(a, b)
            calls += 1
            assert calls <= SAMPLE  # a row is looked at 15 launches apart; where programs share it, judged in the next
        assert "the guard saw other data (a row of a is off by" in dispatch.explain(a, b).reason

    @pytest.mark.parametrize("watched", BY_TENSOR, indirect=True)
    def test_a_thousand_normal_calls_and_then_other_data(self, watched: None) -> None:
        batches, b = [normal(M, K, seed=seed) for seed in range(8)], weight("row")
        for call in range(1000):
            dispatch.matmul(batches[call % 8], b)
        assert stats()["tripped"] == 0
        bad = batches[0].clone()
        bad[3, 5] = 3e6
        for _ in range(SAMPLE + 1):
            dispatch.matmul(bad, b)
        assert stats() == {"probed": 0, "tripped": 1, "refused": 0}
        torch.testing.assert_close(dispatch.matmul(bad, b), torch.matmul(bad, b), rtol=0, atol=0)

    @pytest.mark.parametrize("watched", BY_TENSOR, indirect=True)
    def test_a_replayed_graph_trips_and_stats_say_so(self, watched: None) -> None:
        a, b = normal(M, K), weight("col")
        for _ in range(3):
            dispatch.matmul(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.matmul(a, b)
        for seed in range(launches_to_learn() + 500):
            if seed % 32 == 0:
                a.copy_(normal(M, K, seed=seed))
            graph.replay()
        assert stats()["tripped"] == 0
        a[M - 1] *= 1e-5
        for _ in range(SAMPLE + 1):
            graph.replay()
        assert stats()["tripped"] == 1
        assert torch.isfinite(out).all()
        graph.replay()
        assert "the guard saw other data" in dispatch.explain(a, b).reason

    @pytest.mark.parametrize("watched", BY_TENSOR, indirect=True)
    def test_a_graph_outlives_its_plan(self, watched: None) -> None:
        a, b = normal(M, K), weight("col")
        for _ in range(3):
            dispatch.matmul(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dispatch.matmul(a, b)
        dispatch.forget()
        gc.collect()
        junk = [torch.full((4000,), 7.0, device="cuda") for _ in range(100)]
        for _ in range(100):
            graph.replay()
        torch.cuda.synchronize()
        assert all((x == 7.0).all() for x in junk)
        assert stats()["tripped"] == 0

    @pytest.mark.parametrize("watched", ALL, indirect=True)
    def test_streams_at_once_do_not_trip_each_other(self, watched: None) -> None:
        a, b = normal(M, K), weight("row")
        dispatch.matmul(a, b)
        torch.cuda.synchronize()
        streams = [torch.cuda.Stream() for _ in range(3)]
        for _ in range(launches_to_learn() + 50):
            for stream in streams:
                with torch.cuda.stream(stream):
                    dispatch.matmul(a, b)
        assert stats()["tripped"] == 0

    @pytest.mark.parametrize("watched", BY_TENSOR, indirect=True)
    def test_prepared_weights(self, watched: None) -> None:
        a, b = normal(M, K), dispatch.prepare(weight("col"))
        for _ in range(20):
            dispatch.matmul(a, b)
        assert stats()["tripped"] == 0
        a[5, 5] = 3e6
        for _ in range(SAMPLE + 1):
            dispatch.matmul(a, b)
        assert stats()["tripped"] == 1
