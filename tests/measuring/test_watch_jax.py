"""The guard of JAX programs, `[guard] traced = "callback"`: what they tell, what trips, and what comes of it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import use_policy
from dispatch.measuring import watch as watch_module
from dispatch.measuring.guard import ASYNC_PROBE_EVERY
from dispatch.measuring.watch import SAMPLE, Watch
from dispatch.testing import FakeBackend, fake_timings, registered

jax = pytest.importorskip("jax")
jnp = jax.numpy
from dispatch.frameworks import _jax_guard  # noqa: E402

pytestmark = pytest.mark.usefixtures("engine", "soon_learnt")
M, N, K = 64, 96, 128
LEARNT = 256
TENSOR, ROW = "e4m3:tensor", "e4m3:row"
CALLBACK = {"traced": "callback"}


@pytest.fixture
def soon_learnt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the guard learn from fewer calls."""
    monkeypatch.setattr(watch_module, "LEARNT", LEARNT)


class Quantizing(FakeBackend):
    """Multiplies what the reference quantizer makes of both operands, and tells of them where the guard asks."""

    def __init__(self, *recipes: str) -> None:
        super().__init__("fp8", recipes=recipes)

    def plan(self, problem: dispatch.Problem, config: str | None = None) -> dispatch.Plan:
        pair, watch = problem.recipe, dispatch.watch()
        assert pair is not None
        kinds = {"a": (pair.a, -1), "b": (pair.b, -2)}
        hears = {} if watch is None else {x: watch.by_ratios(x, kinds[x][0], problem.k) for x in kinds}

        def product(*operands: Any) -> Any:
            sides, decoded = [], []
            for (side, (recipe, axis)), x in zip(kinds.items(), operands, strict=False):
                decoded.append(dispatch.quantize(x, recipe, axis=axis).dequantize("float32"))
                sides.append((hears.get(side), x, decoded[-1], axis))
            if hears:
                room: Any = dispatch.framework("jax")
                room.tell(sides)
            return (decoded[0] @ decoded[1]).astype(problem.out_dtype)

        return product


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What callbacks were told, in order."""
    found: list[Any] = []
    own = _jax_guard._heard
    monkeypatch.setattr(_jax_guard, "_heard", lambda hears, x: found.append(np.asarray(x)) or own(hears, x))
    return found


@pytest.fixture
def serving() -> Callable[..., Any]:
    """A context in which a quantizing backend is the choice, by the first of its recipes; guard: the policy's."""

    def serve(*recipes: str, **guard: Any) -> Any:
        stack = ExitStack()
        stack.enter_context(registered(Quantizing(*recipes)))
        clocks = {"baseline": 100.0, **{f"fp8/{recipe}": 5.0 * (i + 1) for i, recipe in enumerate(recipes)}}
        stack.enter_context(fake_timings(clocks))
        stack.enter_context(use_policy(guard={**CALLBACK, **guard}, recipes={"allow": list(recipes)}))
        return stack

    return serve


def normal(seed: int, *shape: int) -> Any:
    """Return values drawn by NumPy: JAX's generator would be compiled anew under each policy and after each trip."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape, np.float32).astype(jnp.bfloat16))


def operands(seed: int = 0) -> tuple[Any, Any]:
    return normal(seed, M, K), normal(1000 + seed, K, N)


def outlier(a: Any) -> Any:
    """One element that leaves nothing of the others under a tensor scale."""
    return (a.at[8:].multiply(1e-2)).at[3, 5].set(5e3)


def run(function: Callable[..., Any], *arrays: Any) -> Any:
    """Return the result, when every callback has run."""
    out = jax.block_until_ready(function(*arrays))
    jax.effects_barrier()
    return out


def stats() -> dict[str, int]:
    return dict(dispatch.stats()["guard"])


def product() -> tuple[Callable[..., Any], list[int]]:
    """A jitted product of its own, and a list that grows by one a trace."""
    traces: list[int] = []

    def multiply(a: Any, b: Any) -> Any:
        traces.append(1)
        return dispatch.matmul(a, b)

    return jax.jit(multiply), traces


class TestTrips:
    @pytest.mark.parametrize("recipe", [TENSOR, ROW, "e5m2:tensor", "e4m3:1x128@e4m3:128x128"])
    def test_normal_data_passes(self, recipe: str, serving: Any, heard: list[Any]) -> None:
        multiply, traces = product()
        with serving(recipe):
            for seed in range(LEARNT + 50):
                run(multiply, *operands(seed % 40))
        assert stats() == {"probed": 0, "tripped": 0, "refused": 0}
        assert (len(heard), len(traces)) == (LEARNT + 50, 1)

    def test_data_that_break_the_tolerance_let_the_next_trace_take_another_candidate(
        self, serving: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        multiply, traces = product()
        with serving(TENSOR, ROW):
            for seed in range(20):
                run(multiply, *operands(seed))
            assert (stats()["tripped"], len(traces)) == (0, 1)
            with caplog.at_level(logging.WARNING, "dispatch"):
                for seed in range(20):
                    a, b = operands(seed)
                    out = run(multiply, outlier(a), b)
            assert (stats()["tripped"], len(traces)) == (1, 2)
            recipe = dispatch.RecipePair.parse(ROW)
            decoded = (
                dispatch.quantize(x, recipe.a, axis=i).dequantize("float32") for x, i in ((outlier(a), -1), (b, -2))
            )
            left, right = (np.asarray(x, np.float64) for x in decoded)
            np.testing.assert_allclose(np.asarray(out, np.float64), left @ right, rtol=1e-2, atol=1)
            said: list[Any] = []
            jax.eval_shape(lambda x, y: said.append(dispatch.explain(x, y)) or x, a, b)
            assert said[0].candidate.recipe == recipe
            assert f"fp8/{TENSOR}" in str(said[0])
            assert "the guard saw other data (a row of a is off by" in str(said[0])
            assert f"JAX programs do without {TENSOR}" in dispatch.explain(a, b).reason
        assert [record.name for record in caplog.records] == ["dispatch"]
        assert "of itself, more than usual or allowed" in caplog.text

    @pytest.mark.parametrize("row", [0, 1, 15, 16, 37, M - 1])
    def test_an_outlier_row_is_found(self, row: int, serving: Any) -> None:
        """By a tensor scale nothing is left of it; each call has one chance in 16 to see it."""
        multiply, _ = product()
        with serving(TENSOR):
            calls = 0
            while not stats()["tripped"] and calls < 16 * SAMPLE:
                a, b = operands(calls)
                run(multiply, a.at[row].multiply(1e-5), b)
                calls += 1
            assert stats()["tripped"] == 1
            assert dispatch.explain(a, b).backend == "fp8", "an eager call is decided by its own data"

    @pytest.mark.parametrize("value", [np.inf, np.nan])
    @pytest.mark.parametrize("side", [0, 1])
    def test_what_is_not_finite_lets_nothing_be_quantized(self, value: float, side: int, serving: Any) -> None:
        multiply, traces = product()
        with serving(TENSOR, ROW):
            for seed in range(10):
                given = list(operands(seed))
                given[side] = jnp.full_like(given[side], value)
                run(multiply, *given)
            a, b = operands()
            np.testing.assert_array_equal(run(multiply, a, b), jax.jit(jnp.matmul)(a, b))
        assert (stats()["tripped"], len(traces)) == (1, 2)

    def test_a_gradient_s_product_trips_by_itself(self, serving: Any) -> None:
        with serving(TENSOR, ROW):
            step = jax.jit(lambda a, b, g: jax.vjp(dispatch.matmul, a, b)[1](g))
            for seed in range(20):
                a, b = operands(seed)
                cotangent = normal(seed, M, N).at[::2].multiply(1e-5)
                run(step, a, b, cotangent)
            found: dict[str, str] = {}
            for op in ("matmul", "dgrad", "wgrad"):
                rows = [out for key, out in dispatch._api.engine().guard._out.items() if key[0].op == op]
                found[op] = ", ".join(str(recipe) for out in rows for recipe in out)
        assert found["dgrad"] == TENSOR
        assert found["matmul"] == ""

    def test_every_thread_traces_anew(self, serving: Any) -> None:
        multiply, traces = product()
        with serving(TENSOR) as _, use_policy(guard=CALLBACK) as entered:
            a, b = operands()

            def work() -> None:
                with use_policy(entered):
                    run(multiply, a, b)

            for bad in (False, True):
                if bad:
                    run(multiply, jnp.full_like(a, np.nan), b)
                thread = threading.Thread(target=work)
                thread.start()
                thread.join()
        assert (stats()["tripped"], len(traces)) == (1, 2)

    def test_calibration_lets_it_serve_again(self, serving: Any) -> None:
        multiply, traces = product()
        with serving(ROW):
            a, b = operands()
            run(multiply, jnp.full_like(a, np.nan), b)
            exact = jax.jit(jnp.matmul)(a, b)
            np.testing.assert_array_equal(run(multiply, a, b), exact)
            dispatch.calibrate(dispatch.matmul, (a, b))
            assert (np.asarray(run(multiply, a, b)) != np.asarray(exact)).any()
        assert (stats()["tripped"], len(traces)) == (1, 3)

    def test_another_policy_s_programs_stay(self, serving: Any) -> None:
        multiply, _ = product()
        with serving(ROW):
            a, b = operands()
            run(multiply, jnp.full_like(a, np.nan), b)
            with use_policy(guard={"traced": "off"}):
                said: list[Any] = []
                jax.eval_shape(lambda x, y: said.append(dispatch.explain(x, y)) or x, a, b)
        assert said[0].backend == "fp8"


def _grad(a: Any, b: Any) -> Any:
    return jax.grad(lambda x, y: dispatch.matmul(x, y).astype("float32").sum(), (0, 1))(a, b)


def _remat(a: Any, b: Any) -> Any:
    layer = jax.checkpoint(lambda x, y: jnp.sin(dispatch.matmul(x, y)))
    return jax.grad(lambda x, y: layer(x, y).astype("float32").sum(), (0, 1))(a, b)


def _scan(a: Any, b: Any) -> Any:
    return jax.lax.scan(lambda c, x: (c, dispatch.matmul(x, b)), 0.0, jnp.stack([a] * 5))


def _loop(a: Any, b: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, x: x + dispatch.matmul(x, b)[:, :1], a)


def _cond(a: Any, b: Any) -> Any:
    return jax.lax.cond(a[0, 0] < 1e9, lambda: dispatch.matmul(a, b), lambda: a @ b)


TRANSFORMED = {
    "jit": (dispatch.matmul, 1),
    "grad: the forward product's result is not needed": (_grad, 2),
    "jvp": (lambda a, b: jax.jvp(dispatch.matmul, (a, b), (a, b)), 3),
    "remat": (_remat, 3),
    "scan": (_scan, 5),
    "fori_loop": (_loop, 3),
    "cond": (_cond, 1),
    "vmap over a": (lambda a, b: jax.vmap(dispatch.matmul, (0, None))(jnp.stack([a, a]), b), 1),
    "vmap over both": (lambda a, b: jax.vmap(dispatch.matmul)(jnp.stack([a, a]), jnp.stack([b, b])), 1),
    "vmap of grad": (lambda a, b: jax.vmap(_grad, (0, None))(jnp.stack([a, a]), b), 2),
    "nobody uses it": (lambda a, b: (dispatch.matmul(a, b), a)[1], 0),
    "a transpose": (lambda a, b: dispatch.matmul(b.T, a.T), 1),
}


class TestPrograms:
    @pytest.mark.parametrize("name", TRANSFORMED)
    def test_each_product_is_told_once_under(self, name: str, serving: Any, heard: list[Any]) -> None:
        function, products = TRANSFORMED[name]
        with serving(ROW):
            a, b = operands()
            told = run(jax.jit(function), a, b)
            assert len(heard) == products
            with use_policy(guard={"traced": "off"}):
                silent = run(jax.jit(lambda x, y: function(x, y)), a, b)
            assert len(heard) == products
        jax.tree.map(np.testing.assert_array_equal, told, silent)
        assert not dispatch.stats()["quarantined"]

    def test_off_leaves_the_program_as_it_was(self, serving: Any) -> None:
        texts = {}
        a, b = operands()
        for traced in ("off", "callback"):
            with serving(ROW, traced=traced):
                texts[traced] = jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(a, b).as_text()
        assert "callback" in texts["callback"]
        assert "callback" not in texts["off"]
        with serving(ROW, mode="async", traced="off"):
            assert jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(a, b).as_text() == texts["off"]

    def test_debugging_blames_nobody_for_what_the_guard_computes(self, serving: Any, heard: Any) -> None:
        a, b = (x.astype("bfloat16") for x in operands())
        with serving(ROW, mode="async"):
            wanted = jax.jit(lambda x, y: dispatch.matmul(x, y))(a, b)
            with jax.numpy_dtype_promotion("strict"), jax.debug_infs(True):
                found = jax.jit(lambda x, y: dispatch.matmul(x, y) + 0)(a, b)
                with jax.disable_jit():
                    dispatch.matmul(a, b)
        np.testing.assert_array_equal(np.asarray(found, "float32"), np.asarray(wanted, "float32"))
        assert not dispatch.stats()["quarantined"]

    def test_off_is_the_default(self) -> None:
        assert dispatch.load_policy("default").guard.traced == "off"

    def test_an_exported_program_calls_nobody(self, serving: Any) -> None:
        with serving(ROW):
            exported = jax.export.export(jax.jit(dispatch.matmul))(*operands())
        assert "callback" not in exported.mlir_module()

    def test_a_compiled_program_calls_and_cannot_be_serialized(self, serving: Any, heard: list[Any]) -> None:
        """JAX refuses: what it calls is of this process. With `traced = "off"` it can be."""
        from jax.experimental.serialize_executable import serialize

        a, b = operands()
        with serving(ROW):
            compiled = jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(a, b).compile()
            run(compiled, a, b)
            assert len(heard) == 1
            with pytest.raises(Exception, match="emit_python_callback"):
                serialize(compiled)
            with use_policy(guard={"traced": "off"}):
                assert serialize(jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(a, b).compile())

    def test_processes_of_one_job_compile_one_program(self, serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """What trips in one of them alone would let that one compile another, and the job hang in a collective."""
        with serving(ROW):
            dispatch.explain(*operands())
            monkeypatch.setattr(jax, "process_count", lambda: 2)
            assert "callback" not in jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(*operands()).as_text()

    def test_a_donated_operand_is_told_of(self, serving: Any, heard: list[Any]) -> None:
        a, b = normal(0, M, K), normal(1, K, K)
        with serving(ROW):
            wanted = run(jax.jit(dispatch.matmul), a, b)
            np.testing.assert_array_equal(run(jax.jit(dispatch.matmul, donate_argnums=0), a.copy(), b), wanted)
        assert len(heard) == 2
        np.testing.assert_array_equal(heard[0], heard[1])

    def test_a_prepared_operand_leaves_the_product_untold(self, serving: Any, heard: list[Any]) -> None:
        """It is decided while it is traced, when nobody knows yet whether it will be exported."""
        a, b = operands()
        with serving(ROW):
            weight = dispatch.prepare(b)
            run(jax.jit(lambda x: dispatch.matmul(x, weight)), a)
        assert heard == []

    def test_without_a_cpu_device_nothing_is_told(
        self, serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """JAX would fail as the program runs."""

        def none(*, backend: str) -> Any:
            raise RuntimeError(f"Unknown backend {backend}")

        _jax_guard._reachable.cache_clear()
        with serving(ROW), caplog.at_level(logging.WARNING, "dispatch"):
            dispatch.explain(*operands())
            with monkeypatch.context() as patched:
                patched.setattr(jax, "local_devices", none)
                assert not _jax_guard._reachable()
            assert "callback" not in jax.jit(lambda x, y: dispatch.matmul(x, y)).lower(*operands()).as_text()
        _jax_guard._reachable.cache_clear()
        assert "callbacks need a CPU device" in caplog.text

    def test_an_error_of_the_guard_s_is_not_the_program_s(
        self, serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def fail(*_: Any) -> None:
            raise RuntimeError("no verdict")

        monkeypatch.setattr(Watch, "tripped", fail)
        a, b = operands()
        with serving(ROW), caplog.at_level(logging.ERROR, "dispatch"):
            out = run(jax.jit(dispatch.matmul), a, b)
        assert out.shape == (M, N)
        assert "the guard could not judge what a program told it" in caplog.text
        assert "no verdict" in caplog.text

    def test_eager_calls_tell_under_async_in_place_of_being_probed(self, serving: Any, heard: list[Any]) -> None:
        a, b = operands()
        with serving(ROW, mode="async"):
            for _ in range(ASYNC_PROBE_EVERY):
                run(dispatch.matmul, a, b)
        assert (stats()["probed"], len(heard)) == (0, ASYNC_PROBE_EVERY)
        dispatch.forget()
        with serving(ROW, mode="async", traced="off"):
            for _ in range(ASYNC_PROBE_EVERY):
                run(dispatch.matmul, a, b)
        assert (stats()["probed"], len(heard)) == (1, ASYNC_PROBE_EVERY)

    def test_an_eager_call_after_a_trip_takes_the_own_product(self, serving: Any) -> None:
        a, b = operands()
        with serving(ROW, mode="async"):
            run(dispatch.matmul, a, b)
            run(dispatch.matmul, jnp.full_like(a, np.nan), b)
            np.testing.assert_array_equal(run(dispatch.matmul, a, b), jnp.matmul(a, b))
        assert stats()["tripped"] == 1


class TestSample:
    """The numbers themselves."""

    @pytest.fixture
    def ratios(self) -> Callable[..., list[tuple[float, float]]]:
        """Return what a program tells of operands: (x, what it decodes to, axis[, scale, block]) each."""

        def told(*sides: Any) -> list[tuple[float, float]]:
            found: list[tuple[float, float]] = []
            room: Any = dispatch.framework("jax")
            arrays, facts = [(x, y, *rest[1:2]) for x, y, *rest in sides], [(x[2], x[4:]) for x in sides]

            def program(*given: Any) -> None:
                hear = lambda *pair: found.append(pair)  # noqa: E731
                room.tell(
                    [
                        (hear, x, y, axis, *scale, *block)
                        for (x, y, *scale), (axis, block) in zip(given, facts, strict=True)
                    ]
                )

            jax.jit(program)(*arrays)
            jax.effects_barrier()
            return found

        return told

    def check(self, told: tuple[float, float], x: Any, decoded: Any, run: int) -> None:
        """Compare with float64 over the rows of each sample there is."""
        wide, found = (np.asarray(y, np.float64).reshape(-1, y.shape[-1]) for y in (x, decoded))
        rows = np.square(wide - found).sum(1) / np.square(wide).sum(1)
        samples = [rows[np.asarray(_jax_guard._sample(len(rows), run, jnp.uint32(i)))] for i in range(SAMPLE)]
        assert any(np.allclose(told, (x.max(), x.min()), rtol=1e-4, atol=0) for x in samples)

    @pytest.mark.parametrize("axis", [-1, -2])
    @pytest.mark.parametrize("shape", [(1, 7), (3, 100), (16, 64), (20, 100), (33, 300), (700, 40), (2, 3, 20, 50)])
    def test_they_are_float64_s(self, shape: tuple[int, ...], axis: int, ratios: Any) -> None:
        rng = np.random.default_rng(0)
        x = rng.standard_normal(shape).astype(np.float32)
        decoded = x * (1 + 0.01 * rng.standard_normal(shape).astype(np.float32))
        given = (x, decoded) if axis == -1 else (x.swapaxes(-1, -2), decoded.swapaxes(-1, -2))
        (told,) = ratios((*map(jnp.asarray, given), axis))
        self.check(told, x, decoded, 1)

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, "e4m3:1x128", "e4m3:128x128", "e5m2:row", "e4m3:1x32:e8m0"])
    @pytest.mark.parametrize("axis", [-1, -2])
    def test_codes_and_scales_are_decoded_as_dequantize_does(self, recipe: str, axis: int, ratios: Any) -> None:
        made = dispatch.quantize(normal(0, 300, 256), recipe)
        x, decoded = normal(0, 300, 256), made.dequantize("float32")
        block = made.recipe.block(300, 256)
        laid = x if axis == -1 else x.T
        codes = jnp.pad(made.data, ((0, 4), (0, 16)))
        (told,) = ratios((laid, codes, axis, made.scale, block))
        self.check(told, x, decoded, 1 if axis == -1 else 16)

    def test_extremes(self, ratios: Any) -> None:
        ones = jnp.ones((SAMPLE, 4), "float32")
        assert ratios((ones * 0, ones * 0, -1)) == [(0.0, np.inf)]
        assert ratios((ones, ones, -1)) == [(0.0, np.inf)]
        assert ratios((ones, ones * (1 + 1e-7), -1)) == [(0.0, np.inf)]
        assert ratios((ones, ones * 0, -1)) == [(1.0, 1.0)]
        assert ratios((ones * 0, ones, -1))[0][0] == np.inf
        for value in (np.inf, np.nan):
            assert ratios((ones.at[:, 1].set(value), ones, -1))[0][0] == np.inf
            assert ratios((ones, ones.at[:, 1].set(value), -1))[0][0] == np.inf
        for factor in (1e-30, 1e30, 3e37, 1e38, 3.4e38):
            ((most, least),) = ratios((ones * factor, ones * (factor * 0.5), -1))
            assert (most, least) == pytest.approx((0.25, 0.25), rel=1e-5)

    @pytest.mark.parametrize("axis", [-1, -2])
    @pytest.mark.parametrize("rows", [1, 5, 16, 33, 100, 1000])
    def test_every_row_is_in_some_sample_and_a_sixteenth_in_each(self, rows: int, axis: int) -> None:
        run = 16 if axis == -2 else 1
        samples = [np.asarray(_jax_guard._sample(rows, run, jnp.uint32(start))) for start in range(SAMPLE)]
        assert set(np.concatenate(samples)) == set(range(rows))
        assert all(len(x) <= rows / SAMPLE + run for x in samples)

    def test_the_sample_moves_with_the_data(self) -> None:
        """About as often to each of sixteen places, also where one value in a thousand is all that changes."""
        start = jax.jit(lambda *x: _jax_guard._hash(x) % SAMPLE)
        a, b = operands()
        places = [int(start(*operands(seed))) for seed in range(320)]
        assert np.bincount(places, minlength=SAMPLE).min() >= 5
        assert int(start(a, b)) == int(start(a, b))
        changed = {int(start(a.at[0, i].set(3.25), b)) for i in range(64)}
        assert len(changed) > SAMPLE // 2

    def test_both_operands_move_it(self) -> None:
        start = jax.jit(lambda *x: _jax_guard._hash(x) % SAMPLE)
        weight = normal(7, K, N)
        assert len({int(start(operands(seed)[0], weight)) for seed in range(64)}) > SAMPLE // 2

    def test_a_backend_that_tells_by_rows(self, heard: list[Any]) -> None:
        """The same call serves in every framework: in a program it leaves a callback."""
        watch = Watch(1.0)
        look = watch.by_rows("a", dispatch.RecipePair.parse(ROW).a, K)
        a = normal(0, M, K)
        run(jax.jit(lambda x: (look(x, x * 0), x)[1]), a)
        assert len(heard) == 1
        assert not watch.tripped()
        strict = Watch(0.5)
        look = strict.by_rows("a", dispatch.RecipePair.parse(ROW).a, K)
        run(jax.jit(lambda x: (look(x, x * 0), x + 1)[1]), a)
        assert strict.tripped()


def test_on_eight_simulated_devices() -> None:
    """A process has as many devices as XLA is told before it starts."""
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    options = ["-q", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), "--rootdir", str(root)]
    command = [sys.executable, "-m", "pytest", *options, str(here / "watch_sharded.py")]
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parent, env=environment)
    assert finished.returncode == 0, finished.stdout
    assert "5 passed" in finished.stdout
