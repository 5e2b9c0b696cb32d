"""What the guard lets through and what it refuses: probes against float64, faults, cool-down, what is said of it."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading

import numpy as np
import pytest

import dispatch
from dispatch import Operand, Problem, framework, use_policy
from dispatch.measuring.error import compare
from dispatch.measuring.probe import LOOKED_AT, VECTORS, beyond, estimates
from dispatch.measuring.session import Baseline
from dispatch.testing import FakeBackend, fake_timings, registered

pytestmark = pytest.mark.usefixtures("engine")
ROOM = framework("numpy")
STRICT = {"mode": "strict"}


def normal(*shape, seed=0, dtype=np.float16):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def quantized_product(a, b, bias=None):
    """Return the product in e4m3 with row scales, as a kernel gives it."""
    left, right = dispatch.quantize(a, "e4m3:row"), dispatch.quantize(b, "e4m3:row", axis=-2)
    sums = left.dequantize("float32") @ right.dequantize("float32")
    return (sums if bias is None else sums + bias).astype(a.dtype)


class Faulty:
    """A kernel that is right until a fault is planted."""

    def __init__(self, fault=None):
        self.fault = fault

    def __call__(self, a, b, bias=None):
        if self.fault == "dropped k-block":
            k = a.shape[-1] // 2
            return quantized_product(a[..., :k], b[..., :k, :], bias)
        out = quantized_product(a, b, bias)
        if self.fault == "wrong tile":
            out[..., :16, :16] = 7
        elif self.fault == "wrong row":
            out[..., 3, :] *= -1
        elif self.fault == "not finite":
            out[..., 2, 5] = np.nan
        return out


FAULTS = ["dropped k-block", "wrong tile", "wrong row", "not finite"]


def fp8(product):
    return FakeBackend("fp8", product, recipes=("e4m3:row",))


def is_right(out, a, b, tolerance=0.005):
    exact = a.astype(np.float64) @ b.astype(np.float64)
    found = np.asarray(out).astype(np.float64)
    error = compare(found.reshape(-1, found.shape[-1]), exact.reshape(-1, exact.shape[-1]))
    assert error.similarity_loss <= tolerance


class TestEstimates:
    @pytest.mark.parametrize("metric", ["similarity_loss", "relative_l2"])
    @pytest.mark.parametrize("shape", [(40, 200, 300), (1, 64, 64), (7, 33, 1)])
    def test_are_about_the_errors_of_the_rows(self, metric, shape):
        m, n, k = shape
        a, b = normal(m, k), normal(k, n, seed=1)
        out = quantized_product(a, b)
        problem = Problem(m, n, k, Operand("float16"), Operand("float16"), "float16", "numpy", "cpu")
        base = Baseline(ROOM, problem, (a, b))
        mean = np.mean([estimates(base, out, seed, metric) for seed in range(60)], 0)
        x, y = out.astype(np.float64), a.astype(np.float64) @ b.astype(np.float64)
        difference, own = ((x - y) ** 2).sum(1), (y**2).sum(1)
        exact = difference / (own + (x**2).sum(1) if metric == "similarity_loss" else own)
        # A mean of quotients: a little above the quotient of the means.
        assert mean.sum() == pytest.approx(exact.sum(), rel=0.25, abs=1e-9)
        assert np.abs(mean - exact).max() <= 0.6 * exact.max() + 1e-9

    def test_of_an_exact_product_are_nothing(self):
        a, b = normal(30, 50, dtype=np.float64), normal(50, 20, seed=1, dtype=np.float64)
        problem = Problem(30, 20, 50, Operand("float64"), Operand("float64"), "float64", "numpy", "cpu")
        assert estimates(Baseline(ROOM, problem, (a, b)), a @ b, 1, "similarity_loss").max() < 1e-28

    @pytest.mark.parametrize("shape", [(), (1,), (20,), (30, 1), (30, 20)])
    def test_know_of_the_bias(self, shape):
        a, b = normal(30, 50, dtype=np.float64), normal(50, 20, seed=1, dtype=np.float64)
        bias = np.asarray(100.0 * normal(*shape, seed=2, dtype=np.float64))
        problem = Problem(30, 20, 50, Operand("float64"), Operand("float64"), "float64", "numpy", "cpu", bias="float64")
        base = Baseline(ROOM, problem, (a, b, bias))
        assert estimates(base, a @ b + bias, 1, "similarity_loss").max() < 1e-25
        assert estimates(base, a @ b, 1, "similarity_loss").min() > 0.1

    @pytest.mark.parametrize("scale", [1e-30, 1e30, 1.0])
    def test_do_not_depend_on_magnitude(self, scale):
        a = (normal(20, 64, dtype=np.float32) * np.float32(scale)).astype(np.float32)
        b = normal(64, 30, seed=1, dtype=np.float32)
        problem = Problem(20, 30, 64, Operand("float32"), Operand("float32"), "float32", "numpy", "cpu")
        out = a @ b
        assert beyond(ROOM, problem, out, (a, b), "similarity_loss", 0.005, 3) is None
        out[4] *= 1.5
        assert beyond(ROOM, problem, out, (a, b), "similarity_loss", 0.005, 3) == pytest.approx(0.25 / 3.25, rel=1e-3)

    def test_no_result_is_refused_by_an_estimate_alone(self):
        a, b = normal(400, 64), normal(64, 300, seed=1)
        out = quantized_product(a, b)
        exact = a.astype(np.float64) @ b.astype(np.float64)
        worst = compare(out.astype(np.float64), exact).similarity_loss
        problem = Problem(400, 300, 64, Operand("float16"), Operand("float16"), "float16", "numpy", "cpu")
        for seed in range(20):
            assert beyond(ROOM, problem, out, (a, b), "similarity_loss", 1.01 * worst, seed) is None

    @pytest.mark.parametrize("batch", [(), (3,), (2, 2)])
    @pytest.mark.parametrize("bias", [None, (30,), (1,), (), (20, 30)])
    def test_batches_and_biases(self, batch, bias):
        a, b = normal(*batch, 20, 64, dtype=np.float32), normal(64, 30, seed=1, dtype=np.float32)
        added = [] if bias is None else [np.asarray(normal(*bias, seed=2, dtype=np.float32))]
        operand = Operand("float32", batch)
        of_bias = None if bias is None else "float32"
        problem = Problem(20, 30, 64, operand, Operand("float32"), "float32", "numpy", "cpu", bias=of_bias)
        out = a @ b + (added[0] if added else 0)
        assert beyond(ROOM, problem, out, (a, b, *added), "relative_l2", 1e-3, 1) is None
        out[..., 7, :] += 1
        assert beyond(ROOM, problem, out, (a, b, *added), "relative_l2", 1e-3, 1) > 0.05

    def test_more_bad_rows_than_are_looked_at(self):
        m = 4 * LOOKED_AT
        a, b = normal(m, 64, dtype=np.float32), normal(64, 30, seed=1, dtype=np.float32)
        problem = Problem(m, 30, 64, Operand("float32"), Operand("float32"), "float32", "numpy", "cpu")
        assert beyond(ROOM, problem, -(a @ b), (a, b), "similarity_loss", 0.005, 1) == pytest.approx(2.0)

    def test_rows_that_are_all_near_the_limit_are_all_looked_at(self):
        m, n, k = 5 * LOOKED_AT, 200, 8
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        wrong = rng.standard_normal((m, n)).astype(np.float32)
        share = 0.095 * np.linalg.norm(a @ b, axis=1) / np.linalg.norm(wrong, axis=1)
        share[77] *= 1.1
        problem = Problem(m, n, k, Operand("float32"), Operand("float32"), "float32", "numpy", "cpu")
        out = a @ b + wrong * share[:, None]
        for seed in range(10):
            assert beyond(ROOM, problem, out, (a, b), "relative_l2", 0.1, seed) == pytest.approx(0.1045, rel=1e-3)
            assert beyond(ROOM, problem, out, (a, b), "relative_l2", 0.105, seed) is None

    def test_what_is_right_is_hardly_multiplied_again(self, monkeypatch):
        """FP8 of normal data: one row in twenty is a suspect after the first probes, none after the second."""
        looked = []
        monkeypatch.setattr(Baseline, "truth", lambda self, rows: looked.append(rows))
        m, n, k = 4000, 256, 64
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        exact = a @ b
        wrong = rng.standard_normal((m, n)).astype(np.float32)
        wrong *= np.linalg.norm(exact, axis=1, keepdims=True) / np.linalg.norm(wrong, axis=1, keepdims=True)
        out = exact + 0.0374 * wrong  # a similarity_loss of 7e-4
        problem = Problem(m, n, k, Operand("float32"), Operand("float32"), "float32", "numpy", "cpu")
        first = estimates(Baseline(ROOM, problem, (a, b)), out, 2, "similarity_loss")
        assert 0.02 < (first > 0.25 * 0.005).mean() < 0.1
        assert beyond(ROOM, problem, out, (a, b), "similarity_loss", 0.005, 1) is None
        assert not looked

    @pytest.mark.parametrize("below", [1 / 3, 1 / 2, 2])
    def test_estimates_are_distributed_as_the_docs_say(self, below):
        """Of rows of the same error the share whose estimate is below a fraction of it: F with 32 and 32 degrees."""
        assert VECTORS == 32
        m, n, k = 4000, 256, 2
        rng = np.random.default_rng(0)
        a, b = rng.standard_normal((m, k)).astype(np.float32), rng.standard_normal((k, n)).astype(np.float32)
        wrong = rng.standard_normal((m, n)).astype(np.float32)
        exact = a @ b
        share = 0.1 * np.linalg.norm(exact, axis=1) / np.linalg.norm(wrong, axis=1)
        problem = Problem(m, n, k, Operand("float32"), Operand("float32"), "float32", "numpy", "cpu")
        out = exact + wrong * share[:, None]
        base = Baseline(ROOM, problem, (a, b))
        found = np.mean([(estimates(base, out, seed, "relative_l2") < 0.01 * below).mean() for seed in range(8)])
        x, tail = below / (1 + below), 0.0
        for i in range(16, 32):
            tail += math.comb(31, i) * x**i * (1 - x) ** (31 - i)
        assert found == pytest.approx(tail, rel=0.35, abs=2e-3)


class TestStrict:
    def test_what_is_right_is_returned_and_counted(self, engine):
        with registered(fp8(Faulty())), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            for seed in range(10):
                a, b = normal(64, 96, seed=seed), normal(96, 80, seed=100)
                is_right(dispatch.matmul(a, b), a, b)
            assert dispatch.explain(a, b).backend == "fp8"
        assert dispatch.stats()["guard"] == {"probed": 10, "tripped": 0, "refused": 0}

    @pytest.mark.parametrize("fault", FAULTS)
    @pytest.mark.parametrize("framework_name", ["numpy", "torch", "jax"])
    def test_what_is_wrong_is_not_returned(self, fault, framework_name, engine, caplog):
        room = pytest.importorskip(framework_name) and framework(framework_name)
        kernel = Faulty()
        product = lambda a, b, bias=None: room.asarray(kernel(room.to_numpy(a), room.to_numpy(b)), a)  # noqa: E731
        if framework_name == "jax":
            import jax

            def product(a, b, bias=None):
                made = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
                return jax.pure_callback(lambda x, y: kernel(np.asarray(x), np.asarray(y)), made, a, b)

        a, b = (room.asarray(x, room.normal((1,), "float16", 0)) for x in (normal(64, 96), normal(96, 80, seed=1)))
        with registered(fp8(product)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            assert dispatch.explain(a, b).backend == "fp8"
            kernel.fault = fault
            with caplog.at_level(logging.WARNING, "dispatch"):
                for _ in range(5):
                    is_right(room.to_numpy(dispatch.matmul(a, b)), room.to_numpy(a), room.to_numpy(b))
            said = dispatch.explain(a, b)
        assert dispatch.stats()["guard"]["tripped"] == 1
        assert len([x for x in caplog.records if x.name == "dispatch"]) == 1
        assert "the guard refused a result (similarity_loss" in said.reason
        assert "serves for 60 s more" in said.reason

    def test_calls_that_are_wrong_at_once_trip_once(self, engine, caplog):
        kernel, together, found = Faulty(), threading.Barrier(8, timeout=30), []

        def product(a, b, bias=None):
            out = kernel(a, b)
            if kernel.fault:
                together.wait()  # every call has begun before the first of them is refused
            return out

        a, b = normal(64, 96), normal(96, 80, seed=1)
        policy = use_policy(guard=STRICT)

        def call():
            with use_policy(guard=STRICT):
                found.append(dispatch.matmul(a, b))

        with registered(fp8(product)), fake_timings({"baseline": 100.0, "fp8": 10.0}), policy:
            dispatch.matmul(a, b)
            kernel.fault = "wrong row"
            threads = [threading.Thread(target=call) for _ in range(8)]
            with caplog.at_level(logging.WARNING, "dispatch"):
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        assert len(found) == 8
        for out in found:
            is_right(out, a, b)
        assert dispatch.stats()["guard"] == {"probed": 9, "tripped": 1, "refused": 8}
        assert len([x for x in caplog.records if x.name == "dispatch"]) == 1

    def test_it_is_measured_again_after_the_cool_down(self, engine):
        kernel = Faulty()
        a, b = normal(64, 96), normal(96, 80, seed=1)
        policy = {"mode": "strict", "cool_down_s": 5}
        with registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=policy):
            dispatch.matmul(a, b)
            kernel.fault = "wrong row"
            dispatch.matmul(a, b)
            measured = engine.counts["measured"]
            engine.guard._clock.now = 4.9
            dispatch.matmul(a, b)
            assert engine.counts["measured"] == measured
            engine.guard._clock.now = 5.1
            is_right(dispatch.matmul(a, b), a, b)  # still the framework's own, but it ends the cool-down
            is_right(dispatch.matmul(a, b), a, b)
            assert engine.counts["measured"] == measured + 1
            assert "error above tolerance" in dispatch.explain(a, b).reason
            kernel.fault = None
            is_right(dispatch.matmul(a, b), a, b)
            assert engine.counts["measured"] == measured + 1  # the decision stands

    def test_data_that_changes_is_seen(self):
        """Tensor scales are right for normal data, and lose the small rows once there is an outlier."""

        def by_tensor(a, b, bias=None):
            left, right = dispatch.quantize(a, "e4m3:tensor"), dispatch.quantize(b, "e4m3:tensor", axis=-2)
            return (left.dequantize("float32") @ right.dequantize("float32")).astype(a.dtype)

        backend = FakeBackend("fp8", by_tensor, recipes=("e4m3:tensor",))
        a, b = normal(64, 96, dtype=np.float32), normal(96, 80, seed=1, dtype=np.float32)
        rules = {"recipes": {"inputs": ["float32"]}, "guard": STRICT}
        with registered(backend), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(**rules):
            is_right(dispatch.matmul(a, b), a, b)
            a[5, 7] = 1e6
            is_right(dispatch.matmul(a, b), a, b)
            assert dispatch.stats()["guard"]["tripped"] == 1

    def test_a_stale_weight_is_seen(self):
        """A NumPy array counts no writes: without refresh() its forms are of what it was."""

        class Kept(FakeBackend):
            def prepare(self, operand, recipe, *, axis):
                return operand.copy()

        a, b = normal(64, 96), normal(96, 80, seed=1)
        weight = dispatch.prepare(b)
        backend = Kept("fp8", quantized_product, recipes=("e4m3:row",))
        with registered(backend), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            is_right(dispatch.matmul(a, weight), a, b)
            assert dispatch.explain(a, weight).backend == "fp8"
            b[:] = normal(96, 80, seed=2)
            is_right(dispatch.matmul(a, weight), a, b)
            assert dispatch.stats()["guard"]["tripped"] == 1

    def test_gradients_flow_through_either_result(self):
        torch = pytest.importorskip("torch")
        kernel = Faulty()
        room = framework("torch")
        product = lambda a, b, bias=None: room.asarray(kernel(room.to_numpy(a), room.to_numpy(b)), a)  # noqa: E731
        a = torch.randn(32, 48, dtype=torch.float16, requires_grad=True)
        b = torch.randn(48, 24, dtype=torch.float16)
        with registered(fp8(product)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            for fault in (None, "wrong row"):
                kernel.fault = fault
                (grad,) = torch.autograd.grad(dispatch.matmul(a, b).sum(), a)
                torch.testing.assert_close(grad, b.sum(1).expand(32, 48), rtol=0.1, atol=0.5)
            assert dispatch.stats()["guard"]["refused"] >= 1

    def test_what_trips_with_gradients_serves_neither_with_nor_without(self):
        torch = pytest.importorskip("torch")
        kernel, room = Faulty(), framework("torch")
        product = lambda a, b, bias=None: room.asarray(kernel(room.to_numpy(a), room.to_numpy(b)), a)  # noqa: E731
        a = torch.from_numpy(normal(64, 96)).requires_grad_()
        b = torch.from_numpy(normal(96, 80, seed=1))
        with registered(fp8(product)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            dispatch.matmul(a, b)
            kernel.fault = "wrong row"
            dispatch.matmul(a, b)
            for x in (a, a.detach()):
                assert "the guard refused a result" in dispatch.explain(x, b).reason

    def test_what_cannot_be_watched_is_left_to_the_frameworks_own_product_and_says_so(self):
        a, b = normal(64, 96), normal(96, 80, seed=1)
        with registered(fp8(Faulty())), fake_timings({"baseline": 100.0, "fp8": 10.0}):
            with use_policy(guard=STRICT):
                decision = dispatch.explain(a, b, activation="relu")
            assert decision.backend != "fp8"
            assert "activation is relu; needs none: probes see through no activation" in str(decision)
            with use_policy(guard=STRICT, error={"metric": "max_abs_over_scale", "tolerance": 1.0}):
                assert "metric is max_abs_over_scale" in str(dispatch.explain(a, b))
            assert "probes see through" not in str(dispatch.explain(a, b, activation="relu"))

    def test_the_frameworks_own_product_is_not_probed(self):
        a, b = normal(64, 96), normal(96, 80, seed=1)
        with use_policy(guard=STRICT):
            dispatch.matmul(a, b)
            dispatch.matmul(a, dispatch.prepare(b))
        assert dispatch.stats()["guard"]["probed"] == 0


class TestWhatHidesAFault:
    """Rows that round to nothing, other dtypes, calls that were traced before: none switches the guard off."""

    def served(self, kernel):
        return registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0})

    def test_rows_that_underflow(self):
        kernel = Faulty()
        a, b = normal(256, 96), normal(96, 80, seed=1) * np.float16(0.01)
        small = a.copy()
        small[10:80] *= np.float16(6e-8)
        backend, clock = self.served(kernel)
        with backend, clock, use_policy(guard=STRICT):
            dispatch.matmul(small, b)  # their rounding is all that is wrong with them, and all that there is of them
            kernel.fault = "wrong row"
            for data in (small, a):
                is_right(dispatch.matmul(data, b)[:4], data[:4], b)
            assert dispatch.stats()["guard"]["refused"] == 1

    def test_integers_that_wrap(self):
        def wrong(a, b, bias=None):
            out = a @ b
            out[30] = 0
            return out

        rng = np.random.default_rng(0)
        a, b = (rng.integers(-99, 99, shape, dtype=np.int8) for shape in ((64, 96), (96, 80)))
        product = [np.matmul]
        backend = FakeBackend("fast", lambda a, b, bias=None: product[0](a, b))
        backend.capabilities = (dispatch.Capability(("numpy",), ("*",), ("int8",), ("int8",)),)
        with registered(backend), fake_timings({"baseline": 100.0, "fast": 10.0}), use_policy(guard=STRICT):
            dispatch.matmul(a, b)
            assert dispatch.stats()["guard"] == {"probed": 1, "tripped": 0, "refused": 0}
            product[0] = wrong
            np.testing.assert_array_equal(dispatch.matmul(a, b), a @ b)

    @pytest.mark.parametrize("scale", [1e-25, 1.0, 1e45])
    def test_float64_of_jax(self, scale):
        jax = pytest.importorskip("jax")
        if not hasattr(jax, "enable_x64"):
            pytest.skip("this JAX switches x64 for the whole process")
        kept = [1.0]

        def product(a, b, bias=None):
            made = jax.ShapeDtypeStruct((a.shape[0], b.shape[1]), a.dtype)
            return jax.pure_callback(lambda x, y: np.asarray(x) @ np.asarray(y) * kept[0], made, a, b)

        with (
            jax.enable_x64(True),
            registered(FakeBackend("fast", product)),
            fake_timings({"baseline": 100.0, "fast": 10.0}),
            use_policy(guard=STRICT),
        ):
            a, b = (jax.numpy.asarray(normal(*x, dtype=np.float64) * scale) for x in ((40, 64), (64, 30)))
            dispatch.matmul(a, b)
            assert dispatch.stats()["guard"] == {"probed": 1, "tripped": 0, "refused": 0}
            kept[0] = 0.0
            np.testing.assert_allclose(dispatch.matmul(a, b), np.asarray(a) @ np.asarray(b), rtol=1e-9)

    def test_a_product_that_was_traced_before(self):
        jax = pytest.importorskip("jax")
        kept = [1.0]

        def host(x, y, s, t):
            return ((x.astype(np.float32) * s) @ (y.astype(np.float32) * t) * kept[0]).astype(np.float16)

        def product(a, b, bias=None):
            made = jax.ShapeDtypeStruct((64, 80), np.float16)
            given = (a.data, b.data, a.scale, b.scale)
            return jax.pure_callback(lambda *x: host(*map(np.asarray, x)), made, *given)

        like = framework("jax").normal((1,), "float16", 0)
        a, b = (framework("jax").asarray(x, like) for x in (normal(64, 96), normal(96, 80, seed=1)))
        left, right = dispatch.quantize(a, "e4m3:row"), dispatch.quantize(b, "e4m3:row", axis=-2)
        with registered(fp8(product)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
            jax.jit(lambda scale: dispatch.matmul(dataclasses.replace(left, scale=scale), right))(left.scale)
            kept[0] = 0.0
            is_right(np.asarray(dispatch.matmul(left, right)), np.asarray(a), np.asarray(b))
            jax.jit(lambda scale: dispatch.matmul(dataclasses.replace(left, scale=scale), right))(left.scale)
        assert dispatch.stats()["quarantined"] == {}

    def test_large_values_are_no_fault(self):
        torch = pytest.importorskip("torch")
        a, b = (torch.from_numpy(normal(*x, dtype=np.float32)) for x in ((16, 32), (32, 2048)))
        a, b = a.bfloat16() * 1e18, b.bfloat16() * 1e18
        backend = FakeBackend("fast", lambda a, b, bias=None: torch.matmul(a.double(), b.double()).to(a.dtype))
        with registered(backend), fake_timings({"baseline": 100.0, "fast": 10.0}), use_policy(guard=STRICT):
            assert torch.isfinite(dispatch.matmul(a, b)).all()
            assert dispatch.stats()["guard"] == {"probed": 1, "tripped": 0, "refused": 0}

    def test_autocast_is_no_fault(self):
        torch = pytest.importorskip("torch")
        a, b = torch.randn(64, 96) + 100, torch.randn(96, 80)
        b = b - b.mean(0)
        backend = FakeBackend("fast", lambda a, b, bias=None: (a.double() @ b.double()).to(a.dtype))
        with registered(backend), fake_timings({"baseline": 100.0, "fast": 10.0}), use_policy(guard=STRICT):
            with torch.autocast("cpu", torch.bfloat16):
                dispatch.matmul(a, b)
            assert dispatch.stats()["guard"] == {"probed": 1, "tripped": 0, "refused": 0}


def test_what_trips_in_one_scope_serves_in_another():
    kernel, a, b = Faulty(), normal(64, 96), normal(96, 80, seed=1)
    with registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0}), use_policy(guard=STRICT):
        for scope in ("one", "other"):
            dispatch.matmul(a, b, scope=scope)
        kernel.fault = "wrong row"
        dispatch.matmul(a, b, scope="one")
        kernel.fault = None
        for scope in ("one", "other"):
            dispatch.matmul(a, b, scope=scope)
        said = {scope: dispatch.explain(a, b, scope=scope).reason for scope in ("one", "other")}
    assert dispatch.stats()["guard"] == {"probed": 4, "tripped": 1, "refused": 1}
    assert ["the guard refused" in said[scope] for scope in ("one", "other")] == [True, False]


class TestAfterACoolDown:
    def tripped(self, engine, policy, kernel, a, b, **options):
        with policy:
            kernel.fault = None
            dispatch.matmul(a, b, **options)
            kernel.fault = "wrong row"
            dispatch.matmul(a, b, **options)
            engine.guard._clock.now += 61
            dispatch.matmul(a, b, **options)

    def test_a_locked_policy_serves_what_is_stored(self, engine):
        kernel, a, b = Faulty(), normal(64, 96), normal(96, 80, seed=1)
        with registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0}):
            with use_policy(guard=STRICT):
                dispatch.matmul(a, b)
            policy = use_policy(guard=STRICT, tuning={"mode": "locked"})
            self.tripped(engine, policy, kernel, a, b)
            with policy:
                for _ in range(3):
                    is_right(dispatch.matmul(a, b), a, b)

    def test_calls_that_replace_no_decision_do_not_count_as_measuring(self, engine):
        kernel, a, b = Faulty(), normal(64, 96), normal(96, 80, seed=1)
        with registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0}):
            self.tripped(engine, use_policy(guard=STRICT), kernel, a, b)
            with use_policy(guard=STRICT):
                dispatch.matmul(np.ones_like(a), b)
                is_right(dispatch.matmul(a, b), a, b)
                assert "error above tolerance" in dispatch.explain(a, b).reason

    def test_a_backend_asked_for_by_name_is_measured_again_too(self, engine):
        kernel, a, b = Faulty(), normal(64, 96), normal(96, 80, seed=1)
        with registered(fp8(kernel)), fake_timings({"baseline": 100.0, "fp8": 10.0}):
            self.tripped(engine, use_policy(guard=STRICT), kernel, a, b, backend="fp8")
            with use_policy(guard=STRICT), pytest.raises(dispatch.NoBackendError, match="error above tolerance"):
                dispatch.matmul(a, b, backend="fp8")


def test_probe_every_probes_every_so_many():
    a, b = normal(64, 96), normal(96, 80, seed=1)
    policy = use_policy(guard={"probe_every": 4})
    with registered(fp8(Faulty())), fake_timings({"baseline": 100.0, "fp8": 10.0}), policy:
        for _ in range(12):
            dispatch.matmul(a, b)
    assert dispatch.stats()["guard"]["probed"] == 3


def test_off_probes_nothing():
    a, b = normal(64, 96), normal(96, 80, seed=1)
    with registered(fp8(Faulty())), fake_timings({"baseline": 100.0, "fp8": 10.0}):
        dispatch.matmul(a, b)
    assert dispatch.stats()["guard"] == {"probed": 0, "tripped": 0, "refused": 0}
