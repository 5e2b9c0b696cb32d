"""What the FP8 backends tell the guard in a JAX program, beside float64; by emulated kernels in test_triton_jax.py."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dispatch.plugins import cublas, pallas_fp8, triton_tma_fp8

import dispatch
from dispatch import Operand, Problem, RecipePair, Watch
from dispatch.measuring.watch import SAMPLE, watching

jax = pytest.importorskip("jax")
jnp = jax.numpy
from dispatch.frameworks import _jax_guard  # noqa: E402

ROW, TENSOR, BLOCKS = "e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128"
M, N, K = 96, 80, 256
BACKENDS = {
    "cublas": cublas.CublasBackend(),
    "pallas_fp8": pallas_fp8.PallasBackend(),
    "triton_tma_fp8": triton_tma_fp8.TritonBackend(),
}


def normal(seed: int, *shape: int) -> Any:
    values = jax.random.normal(jax.random.key(seed), shape, "float32")
    return (values * jnp.exp(jax.random.normal(jax.random.key(seed + 50), (shape[0], 1)))).astype("bfloat16")


class Told:
    """Plans of one arch and device, and what they tell."""

    arch, device = "sm89", "cpu"

    @pytest.fixture
    def heard(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        found: list[Any] = []
        own = _jax_guard._heard
        monkeypatch.setattr(_jax_guard, "_heard", lambda hears, x: found.append(np.asarray(x)) or own(hears, x))
        return found

    def plan(self, name: str, recipe: str, watch: Watch | None, m: int = M, n: int = N, k: int = K) -> Any:
        pair = RecipePair.parse(recipe)
        facts = {"arch": self.arch, "device": self.device, "out_dtype": "bfloat16", "framework": "jax"}
        mode = "promoted" if recipe == BLOCKS else "fast"
        problem = Problem(m, n, k, Operand("bfloat16"), Operand("bfloat16"), recipe=pair, accumulation=mode, **facts)
        backend = BACKENDS[name]
        if name == "pallas_fp8" and jax.__version_info__ < pallas_fp8.LEAST_JAX:
            pytest.skip(f"JAX {jax.__version__} is older than 0.10.2, the first that pallas_fp8 was tried with")
        assert not backend.rejections(problem), backend.rejections(problem)
        configs = getattr(backend, "configs", lambda problem: [None])(problem)
        with watching(watch):
            return backend.plan(problem, configs[0])

    def check(self, found: Any, arrays: tuple[Any, Any], recipe: str, runs: tuple[int, int]) -> None:
        """Compare with float64, of both operands at one place of the sample."""
        pair, wanted = RecipePair.parse(recipe), []
        for x, own, axis, run in zip(arrays, (pair.a, pair.b), (-1, -2), runs, strict=True):
            decoded = dispatch.quantize(x, own, axis=axis).dequantize("float32")
            wide, exact = (np.asarray(y if axis == -1 else y.T, np.float64) for y in (x, decoded))
            rows = np.square(wide - exact).sum(1) / np.square(wide).sum(1)
            rows[rows < 1e-12] = 0.0  # exact
            samples = [rows[np.asarray(_jax_guard._sample(len(rows), run, jnp.uint32(i)))] for i in range(SAMPLE)]
            wanted.append([(x.max(), x[x > 0].min(initial=np.inf)) for x in samples])
        places = list(zip(*wanted, strict=True))
        found = np.where(found < _jax_guard._ENDLESS, found, np.inf)
        assert any(np.allclose(found, place, rtol=0.02, atol=0) for place in places), (found, places)

    def run(self, name: str, recipe: str, heard: list[Any], *, turned: bool = False, size: Any = (M, N, K)) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n)
        plan, silent = self.plan(name, recipe, Watch(1.0), *size), self.plan(name, recipe, None, *size)
        way = (lambda x, y: plan(x.T, y.T)) if turned else plan
        given = (a.T.copy(), b.T.copy()) if turned else (a, b)
        out = jax.block_until_ready(jax.jit(way)(*given))
        jax.effects_barrier()
        assert len(heard) == 1
        runs = (16, 1) if turned and self.moves(name) else (1, 16)
        self.check(heard[0], (a, b), recipe, runs)
        self.same(out, jax.jit(silent)(a, b))
        assert len(heard) == 1

    def same(self, found: Any, wanted: Any) -> None:
        np.testing.assert_array_equal(np.asarray(found), np.asarray(wanted))

    def moves(self, name: str) -> bool:
        """Return whether a backend quantizes what a program transposes from where it lies."""
        return name != "cublas"


class TestOnTheCpu(Told):
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    @pytest.mark.parametrize("turned", [False, True])
    def test_cublas(self, recipe: str, turned: bool, heard: list[Any]) -> None:
        self.run("cublas", recipe, heard, turned=turned)

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    @pytest.mark.parametrize("turned", [False, True])
    def test_pallas_fp8(self, recipe: str, turned: bool, heard: list[Any]) -> None:
        self.run("pallas_fp8", recipe, heard, turned=turned)

    @pytest.mark.parametrize("size", [(1, 17, 16), (33, 130, 300)])
    def test_odd_sizes(self, size: Any, heard: list[Any]) -> None:
        self.run("pallas_fp8", ROW, heard, size=size)

    def test_mx_scales_are_of_thirty_two(self, heard: list[Any]) -> None:
        """Quantized alone: only Blackwell multiplies them."""
        from dispatch.plugins import _cublas_jax
        from dispatch.plugins._guard_jax import Ears

        pair = RecipePair.parse("e4m3:1x32:e8m0")
        plain = Operand("bfloat16")
        facts = {"arch": "sm100", "out_dtype": "bfloat16", "framework": "jax"}
        with watching(Watch(1.0)):
            ears = Ears(Problem(M, N, K, plain, plain, recipe=pair, **facts))

        @jax.jit
        def program(a: Any, b: Any) -> Any:
            left, right = (_cublas_jax.encoder(pair.a, axis, "sm100")(x) for x, axis in ((a, -1), (b, -2)))
            ears.tell(a=(a, -1, *left), b=(b, -2, *right))
            return a

        a, b = normal(0, M, K), normal(1, K, N)
        jax.block_until_ready(program(a, b))
        jax.effects_barrier()
        self.check(heard[0], (a, b), str(pair), (1, 16))

    def test_what_is_quantized_already_is_not_told(self, heard: list[Any]) -> None:
        a, b = normal(0, M, K), normal(1, K, N)
        backend, pair = BACKENDS["cublas"], RecipePair.parse(ROW)
        facts = {"arch": self.arch, "out_dtype": "bfloat16", "framework": "jax", "accumulation": "fast"}
        weight = Operand("bfloat16", prepared=True)
        with watching(Watch(1.0)) as _:
            plan = backend.plan(Problem(M, N, K, Operand("bfloat16"), weight, recipe=pair, **facts))
        jax.block_until_ready(jax.jit(plan)(a, backend.prepare(b, pair.b, axis=-2)))
        jax.effects_barrier()
        assert [x.shape for x in heard] == [(1, 2)]


@pytest.mark.gpu
class TestOnAGpu(Told):
    device = "cuda:0"

    @pytest.fixture(autouse=True)
    def on_a_gpu(self) -> None:
        assert jax.default_backend() == "gpu", "run gpu tests on a machine with a GPU"
        self.arch = str(dispatch.framework("jax").arch(jnp.zeros(1)))

    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("size", [(96, 80, 256), (1040, 528, 1024)])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    @pytest.mark.parametrize("name", BACKENDS)
    def test_values(self, name: str, recipe: str, size: Any, turned: bool, heard: list[Any]) -> None:
        if name == "cublas" and recipe == BLOCKS:
            pytest.skip("cublas has no block scales in JAX")
        self.run(name, recipe, heard, turned=turned, size=size)

    def moves(self, name: str) -> bool:
        return True

    def same(self, found: Any, wanted: Any) -> None:
        """XLA may choose another algorithm in another program."""
        x, y = (np.asarray(v, np.float64) for v in (found, wanted))
        assert np.linalg.norm(x - y) < 0.01 * np.linalg.norm(y)

    def test_normal_data_pass_and_an_outlier_is_found(self, caplog: pytest.LogCaptureFixture) -> None:
        multiply = jax.jit(lambda x, y: dispatch.matmul(x, y, scope="guard of JAX on a GPU"))
        a, b = normal(0, 4096, 4096), normal(1, 4096, 4096)
        quantized = {"gate": {"min_speedup": 0.0, "min_speedup_lossless": 1e9}, "recipes": {"allow": [TENSOR]}}
        tripped = dispatch.stats()["guard"]["tripped"]
        with dispatch.use_policy(guard={"traced": "callback"}, **quantized):
            for seed in range(50):
                multiply(normal(seed, 4096, 4096), b)
            jax.effects_barrier()
            assert dispatch.stats()["guard"]["tripped"] == tripped
            for seed in range(20):
                multiply(normal(seed, 4096, 4096).at[0, 0].set(1e6), b)
            jax.effects_barrier()
            assert dispatch.stats()["guard"]["tripped"] == tripped + 1
            self.same(multiply(a, b), jax.jit(jnp.matmul)(a, b))
        assert f"do without {TENSOR}" in caplog.text
