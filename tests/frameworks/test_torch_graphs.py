"""dispatch.matmul on a GPU under torch's compiler, autograd and CUDA graphs."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

torch = pytest.importorskip("torch")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"),  # in a thread that is the first to use it there
]
LOSSY = 0.06  # relative Frobenius error of an FP8 product


def randn(*shape: int, seed: int = 0, grad: bool = False, dtype: Any = torch.bfloat16) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random).to(dtype).cuda().requires_grad_(grad)


def rel(found: Any, wanted: Any) -> float:
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


@pytest.fixture
def fp8() -> Iterator[None]:
    """Let cublas's FP8 win wherever it is able, by fake clocks."""
    dispatch.clear_store()
    with fake_timings({"cublas": 1.0, "baseline": 100.0}, device_time=True):
        yield
    dispatch.clear_store()


@pytest.fixture
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


class TestCapture:
    def test_a_known_product_replays_on_new_data(self, fp8: None) -> None:
        a, b = randn(64, 128), randn(128, 96, seed=1)
        for _ in range(3):
            dispatch.matmul(a, b)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.matmul(a, b)
        held = torch.cuda.memory_allocated()
        for seed in (5, 6, 7):
            a.copy_(randn(64, 128, seed=seed))
            graph.replay()
            torch.cuda.synchronize()
            assert rel(out, a.double() @ b.double()) < LOSSY
        assert torch.cuda.memory_allocated() <= held

    def test_a_first_call_takes_the_baseline_and_measures_nothing(self, fp8: None) -> None:
        a, b = randn(48, 128), randn(128, 80, seed=1)
        torch.matmul(a, b)
        before = dispatch.stats()["measured"]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.matmul(a, b)
        assert dispatch.stats()["measured"] == before
        graph.replay()
        assert rel(out, a.double() @ b.double()) < 0.01
        dispatch.matmul(a, b)  # and the next call outside measures
        assert dispatch.stats()["measured"] == before + 1

    def test_a_first_call_takes_a_stored_decision(self, fp8: None) -> None:
        a, b = randn(64, 128), randn(128, 112, seed=1)
        dispatch.matmul(a, b)
        assert dispatch.explain(a, b).backend == "cublas"
        dispatch.forget()
        before = dispatch.stats()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = dispatch.matmul(a, b)
        after = dispatch.stats()
        assert (after["measured"], after["remembered"] > before["remembered"]) == (before["measured"], True)
        graph.replay()
        assert 0.005 < rel(out, a.double() @ b.double()) < LOSSY

    @pytest.mark.parametrize("name", ["cublas", "triton_tma_fp8"])
    @pytest.mark.parametrize("prepared", [False, True])
    def test_later_and_larger_products_leave_a_captured_ones_memory_alone(self, name: str, prepared: bool) -> None:
        """B61 (flashinfer-ai/flashinfer#4398, vllm-project/vllm#52553): what a graph reads and writes never moves."""
        x, b = randn(64, 256), randn(256, 256, seed=1)
        w = dispatch.prepare(b) if prepared else b
        only = dispatch.use_policy(recipes={"allow": ["e4m3:row"]}, backends={"allow": [name, "bf16_fallback"]})
        dispatch.clear_store()
        with only, fake_timings({name: 1.0, "baseline": 100.0}, device_time=True):
            for _ in range(3):
                dispatch.matmul(x, w)
            assert dispatch.explain(x, w).backend == name
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = dispatch.matmul(x, w)
            for n in (1024, 4096, 8192):
                dispatch.matmul(randn(n, 1024), randn(1024, n, seed=2))
                dispatch.matmul(randn(16, n), randn(n, 512, seed=2))  # few rows, and k in parts
        dispatch.clear_store()
        torch.cuda.empty_cache()
        filled = [torch.full((1 << 24,), 5.0, device="cuda") for _ in range(6)]
        x.copy_(randn(64, 256, seed=3))
        for _ in range(50):
            graph.replay()
        torch.cuda.synchronize()
        assert rel(out, x.double() @ b.double()) < LOSSY
        assert all((values == 5.0).all() for values in filled)

    def test_forward_and_backward_in_one_graph(self, fp8: None) -> None:
        x, w = randn(64, 128, grad=True), randn(128, 96, seed=1, grad=True)
        grad = randn(64, 96, seed=2)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                dispatch.matmul(x, w).backward(grad)
                x.grad = w.grad = None
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            dispatch.matmul(x, w).backward(grad)
        with torch.no_grad():
            x.copy_(randn(64, 128, seed=8))
        graph.replay()
        assert rel(x.grad, grad.double() @ w.double().mT) < LOSSY
        assert rel(w.grad, x.double().mT @ grad.double()) < LOSSY


class TestCompile:
    @pytest.mark.parametrize("mode", [None, "reduce-overhead", "max-autotune-no-cudagraphs"])
    def test_forward_and_backward(self, fp8: None, fresh: None, mode: str | None) -> None:
        compiled = torch.compile(lambda x, w: dispatch.matmul(x, w, activation="silu"), fullgraph=True, mode=mode)
        for seed in range(5):
            x, w = randn(64, 128, seed=seed, grad=True), randn(128, 96, seed=seed + 10, grad=True)
            grad = randn(64, 96, seed=seed + 20)
            out = compiled(x, w)
            out.backward(grad)
            xd, wd = (t.detach().double().requires_grad_() for t in (x, w))
            wanted = torch.nn.functional.silu(xd @ wd)
            wanted.backward(grad.double())
            for found, right in ((out, wanted), (x.grad, xd.grad), (w.grad, wd.grad)):
                assert rel(found, right) < 2 * LOSSY

    def test_reduce_overhead_measures_the_first_time(self, fp8: None, fresh: None) -> None:
        before = dispatch.stats()["measured"]
        compiled = torch.compile(lambda x, w: dispatch.matmul(x, w) + 1, fullgraph=True, mode="reduce-overhead")
        x, w = randn(64, 128), randn(128, 144, seed=1)
        with torch.no_grad():
            for _ in range(4):
                out = compiled(x, w).clone()
        assert dispatch.stats()["measured"] == before + 1
        assert 0.005 < rel(out - 1, x.double() @ w.double()) < LOSSY

    @pytest.mark.parametrize("prepared", [False, True])
    def test_a_known_product_is_called_without_the_op(self, fp8: None, fresh: None, prepared: bool) -> None:
        x, w = randn(64, 128), randn(128, 176, seed=1)
        weight = dispatch.prepare(w) if prepared else w
        compiled = torch.compile(lambda x, w: dispatch.matmul(x, w), fullgraph=True)
        names: set[str] = set()
        with torch.no_grad():
            for _ in range(3):
                compiled(x, weight)
            sys.setprofile(lambda frame, event, _: names.add(frame.f_code.co_name) if event == "call" else None)
            try:
                out = compiled(x, weight)
            finally:
                sys.setprofile(None)
        assert "direct" in names
        assert not {"_run", "_whole", "differentiable"} & names
        assert 0.005 < rel(out, x.double() @ w.double()) < LOSSY

    def test_a_prepared_weight_in_reduce_overhead(self, fp8: None, fresh: None) -> None:
        weight = dispatch.prepare(randn(128, 96, seed=1))
        compiled = torch.compile(lambda x: dispatch.matmul(x, weight), fullgraph=True, mode="reduce-overhead")
        with torch.no_grad():
            for seed in range(4):
                x = randn(32, 128, seed=seed)
                assert rel(compiled(x), x.double() @ weight.array.double()) < LOSSY

    def test_the_backward_pass_takes_the_policy_around_it(self, fresh: None) -> None:
        calls: list[str] = []

        def product(a: Any, b: Any, *bias: Any) -> Any:
            calls.append(threading.current_thread().name)
            return torch.matmul(a, b)

        compiled = torch.compile(lambda x, w: dispatch.matmul(x, w), fullgraph=True, backend="aot_eager")
        with registered(FakeBackend("fake", product)), fake_timings({"fake": 1.0, "baseline": 100.0}):
            x, w = randn(16, 16, grad=True), randn(16, 16, seed=1, grad=True)
            with dispatch.use_policy("native"):
                compiled(x, w).sum().backward()
            assert calls == []
            compiled(x, w).sum().backward()
            assert len(calls) >= 3


class TestGradients:
    @pytest.mark.parametrize("tokens", [13, 1, 0, 64])
    @pytest.mark.parametrize("outputs", [1, 96])
    @pytest.mark.parametrize("gradient", ["e4m3", "e5m2"])
    def test_are_within_fp8s_error(self, fp8: None, tokens: int, outputs: int, gradient: str) -> None:
        rules = [
            {"match": {"op": "dgrad"}, "recipes": {"allow": [f"{gradient}:tensor@e4m3:tensor"]}},
            {"match": {"op": "wgrad"}, "recipes": {"allow": [f"e4m3:tensor@{gradient}:tensor"]}},
        ]
        x, w = randn(2, tokens, 128, grad=True), randn(128, outputs, seed=1, grad=True)
        bias = randn(outputs, seed=3, grad=True)
        grad = randn(2, tokens, outputs, seed=2)
        with dispatch.use_policy(rules=rules):
            out = dispatch.matmul(x, w, bias=bias)
            out.backward(grad)
        xd, wd, gd = x.detach().double(), w.detach().double(), grad.double()
        assert rel(out, xd @ wd + bias.double()) < LOSSY
        assert rel(x.grad, gd @ wd.mT) < 2 * LOSSY  # e5m2 has two bits of mantissa
        assert rel(w.grad, xd.flatten(0, 1).mT @ gd.flatten(0, 1)) < 2 * LOSSY
        assert rel(bias.grad, gd.sum((0, 1))) < 0.01

    def test_a_prepared_weight_is_followed(self, fp8: None) -> None:
        w = randn(128, 96, seed=1, grad=True)
        weight, grad = dispatch.prepare(w), randn(2, 40, 96, seed=2)
        for step in range(4):
            x = randn(2, 40, 128, seed=step, grad=True)
            w.grad = None
            dispatch.matmul(x, weight).backward(grad)
            assert rel(x.grad, grad.double() @ w.detach().double().mT) < LOSSY
            assert rel(w.grad, x.detach().flatten(0, 1).double().mT @ grad.flatten(0, 1).double()) < LOSSY
            if step % 2:
                with torch.no_grad():
                    w.mul_(-2)


def test_eight_threads_on_streams_of_their_own(fp8: None) -> None:
    a, b = randn(64, 128), randn(128, 96, seed=1)
    wanted = a.double() @ b.double()
    torch.cuda.synchronize()
    errors: list[Any] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    assert rel(dispatch.matmul(a, b), wanted) < LOSSY
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        raise error
