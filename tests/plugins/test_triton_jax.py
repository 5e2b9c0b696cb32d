"""The triton_tma_fp8 backend from JAX: what it launches, under every transform, and its values on a GPU."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from dispatch.plugins import triton_tma_fp8

import dispatch
from dispatch import Operand, Problem, RecipePair, Watch
from dispatch.measuring.watch import watching

jax = pytest.importorskip("jax")
if not getattr(pytest.importorskip("triton"), "__version__", "").startswith("3.6."):
    pytest.skip("launches from JAX are made with Triton 3.6", allow_module_level=True)

from dispatch.plugins import _quantize_jax as quantizing  # noqa: E402
from dispatch.plugins import _triton_jax as module  # noqa: E402
from dispatch.plugins import _triton_launches as launches  # noqa: E402
from dispatch.plugins._triton_launches import OF_A, OF_B  # noqa: E402

from dispatch.frameworks import _jax_guard  # noqa: E402

jnp = jax.numpy

BACKEND = triton_tma_fp8.TritonBackend()
ROW, TENSOR, BLOCKS = "e4m3:row", "e4m3:tensor", "e4m3:1x128@e4m3:128x128"
MIXED = ("e4m3:row@e5m2:row", "e5m2:tensor@e4m3:tensor")
ACTIVATIONS = {
    None: lambda x: x,
    "relu": jax.nn.relu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_tanh": jax.nn.gelu,
    "silu": jax.nn.silu,
}


def problem(recipe: str, m: int, n: int, k: int, **facts: Any) -> Problem:
    pair = RecipePair.parse(recipe)
    blocks = pair.a.granularity not in ("row", "tensor")
    values = {
        "a": Operand("bfloat16"),
        "b": Operand("bfloat16"),
        "out_dtype": "bfloat16",
        "framework": "jax",
        "arch": "sm90",
        "device": "cuda:0",
        "accumulation": "promoted" if blocks else "fast",
        **facts,
    }
    return Problem(m, n, k, recipe=pair, **values)


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    return jax.random.normal(jax.random.key(seed), shape, "float32").astype(dtype)


def wide(x: Any) -> Any:
    return np.asarray(x).astype(np.float64)


def decoded(x: Any, recipe: Any, axis: int) -> Any:
    """Return an operand as the recipe leaves it, in float64."""
    x = x if isinstance(x, dispatch.ScaledArray) else dispatch.quantize(np.asarray(x), recipe, axis=axis)
    data, scale = wide(x.data), wide(x.scale)
    down, across = recipe.block(*(data.shape[-2:] if axis == -1 else data.shape[-2:][::-1]))
    down, across = (down, across) if axis == -1 else (across, down)
    scale = scale.repeat(down, -2)[..., : data.shape[-2], :].repeat(across, -1)[..., : data.shape[-1]]
    return data * scale


def exact(recipe: str, a: Any, b: Any) -> Any:
    pair = RecipePair.parse(recipe)
    return decoded(a, pair.a, -1) @ decoded(b, pair.b, -2)


def error(found: Any, wanted: Any) -> float:
    assert tuple(found.shape) == tuple(wanted.shape)
    return float(np.linalg.norm(wide(found) - wanted) / max(np.linalg.norm(wanted), 1e-300))


class Emulated:
    """Stands for a bound launch: its kernel is a function of arrays by slot, run where there is no GPU."""

    def __init__(self, step: Any) -> None:
        self.kernel, self.results = step.kernel, step.writes

    def run(self, arrays: Any, results: Any) -> list[Any]:
        made = self.kernel(arrays)
        for slot, array in zip(self.results, made, strict=True):
            assert (array.shape, array.dtype) == (results[slot].shape, results[slot].dtype), slot
        return made


def _quantizing(source: launches.Source) -> Any:
    form, dtype, slots, transposed, stride, _ = source
    assert stride == (form.rows if transposed else form.k)

    def kernel(arrays: Any) -> list[Any]:
        x = arrays[slots.x]
        assert x.dtype.name == dtype
        assert x.shape == ((form.k, form.rows) if transposed else (form.rows, form.k))
        made = dispatch.quantize(x.T if transposed else x, form.recipe)
        data = jnp.pad(made.data, ((0, form.padded_rows - form.rows), (0, form.padded_k - form.k)))
        scale = made.scale
        if form.recipe.granularity != "tensor":
            scale = jnp.pad(scale, ((0, form.scale[0] - scale.shape[0]), (0, 0)))
        if form.along_rows:
            scale = jnp.pad(scale.T, ((0, 0), (0, form.stored_scale[1] - scale.shape[0])))
        return [data, scale]

    return [launches.Step(kernel, (), (), {}, (slots.data, slots.scale))], 0


def _multiplying(
    problem: Problem, config: Any, operands: Any, out: str, bias: Any, activation: Any, *, programs: int
) -> Any:
    del config, operands, programs
    sides = (problem.a, problem.recipe.a, problem.m), (problem.b, problem.recipe.b, problem.n)
    forms = [launches.form_of(recipe, launches.entries(problem, x) * outer, problem.k) for x, recipe, outer in sides]

    def decoded(arrays: Any, slots: Any, form: Any, outer: int) -> Any:
        data, scale = arrays[slots.data], arrays[slots.scale]
        assert (data.shape, scale.shape) == ((form.rows, form.padded_k), form.stored_scale)
        scale = scale[:, : form.rows].T if form.along_rows else scale
        made = dispatch.ScaledArray(data[:, : form.k], scale, form.recipe, dtype="float32").dequantize()
        return made.reshape(-1, outer, form.k) if form.rows != outer else made

    def kernel(arrays: Any) -> list[Any]:
        a = decoded(arrays, OF_A, forms[0], problem.m)
        b = decoded(arrays, OF_B, forms[1], problem.n)
        sums = jnp.matmul(a, jnp.swapaxes(b, -1, -2), precision="highest")
        sums = sums if bias is None else sums + arrays[launches.BIAS].astype("float32")
        finished = ACTIVATIONS[activation](sums).astype(out)
        return [finished.reshape(*problem.batch, problem.m, problem.n)]

    return launches.Product(launches.Step(kernel, (), (), {}, (launches.OUT,)), 0, 0)


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Let NumPy's rules stand in for the kernels; return the zeroed bytes and archs of what was bound."""
    bound: list[Any] = []
    monkeypatch.setattr(launches, "quantizing", _quantizing)
    monkeypatch.setattr(launches, "quantizing_both", lambda sides: None)
    monkeypatch.setattr(launches, "multiplying", _multiplying)
    for place in (module, quantizing):
        monkeypatch.setattr(place, "bind", lambda step, arch, zeroed=None: bound.append((step, arch)) or Emulated(step))
    return bound


class TestEmulated:
    """The plan around the kernels: layouts, batches, what is quantized when, and JAX's transforms."""

    pytestmark = pytest.mark.usefixtures("emulated")

    def plan(self, recipe: str, a: Any, b: Any, **facts: Any) -> Any:
        scaled = dispatch.ScaledArray
        operands = {
            name: Operand(x.dtype, tuple(x.shape[:-2]), recipe=x.recipe)
            if isinstance(x, scaled)
            else Operand(x.dtype.name, tuple(x.shape[:-2]))
            for name, x in (("a", a), ("b", b))
        }
        return BACKEND.plan(problem(recipe, a.shape[-2], b.shape[-1], a.shape[-1], **{**operands, **facts}))

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, *MIXED, BLOCKS, "e4m3:64x64"])
    @pytest.mark.parametrize("size", [(1, 1, 1), (17, 33, 65), (40, 272, 384)])
    def test_values(self, recipe: str, size: tuple[int, int, int]) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n)
        assert error(self.plan(recipe, a, b)(a, b), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize(
        "batch", [((3,), (3,)), ((2, 1), (3,)), ((3,), ()), ((), (2,)), ((1,), (2,)), ((1, 1), ())]
    )
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    def test_batches(self, recipe: str, batch: Any) -> None:
        a, b = normal(0, *batch[0], 5, 40), normal(1, *batch[1], 40, 7)
        assert error(self.plan(recipe, a, b)(a, b), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    def test_what_is_quantized_already(self, recipe: str, emulated: list[Any]) -> None:
        a, b = normal(0, 30, 200), normal(1, 200, 33)
        pair = RecipePair.parse(recipe)
        left, right = dispatch.quantize(a, pair.a, axis=-1), dispatch.quantize(b, pair.b, axis=-2)
        wanted = exact(recipe, left, right)
        assert error(self.plan(recipe, left, right)(left, right), wanted) < 6e-3
        assert len(emulated) == 1, "nothing but the product is launched"
        assert error(self.plan(recipe, a, right)(a, right), wanted) < 6e-3
        plan = BACKEND.plan(problem(recipe, 30, 33, 200, b=Operand("bfloat16", prepared=True)))
        made = quantizing.encode(b, pair.b, -2, "sm90")
        emulated.clear()
        assert error(jax.jit(plan)(a, made), wanted) < 6e-3
        assert emulated == [], "what a plan launches is compiled when it is made"

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, "e4m3:64x64"])
    @pytest.mark.parametrize("turned", [False, True])
    @pytest.mark.parametrize("batch", [(), (3,)])
    def test_the_guard_is_told_what_float64_says(
        self, batch: tuple[int, ...], turned: bool, recipe: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        told: list[Any] = []
        monkeypatch.setattr(_jax_guard, "_heard", lambda hears, ratios: told.append(np.asarray(ratios)))
        monkeypatch.setattr(_jax_guard, "_sample", lambda rows, run, start: jnp.arange(rows))
        a, b = normal(0, *batch, 30, 200), normal(1, 200, 33)
        with watching(Watch(1.0)):
            plan = self.plan(recipe, a, b)
        swap = (lambda x: x.swapaxes(-1, -2)) if turned else (lambda x: x)
        out = jax.block_until_ready(jax.jit(lambda x, y: plan(swap(x), swap(y)))(swap(a), swap(b)))
        jax.effects_barrier()
        rows = a.reshape(-1, 200)
        assert error(out.reshape(-1, 33), exact(recipe, rows, b)) < 6e-3
        pair, found = RecipePair.parse(recipe), []
        for x, own, axis in ((rows, pair.a, -1), (b, pair.b, -2)):
            ratios = np.square(wide(x) - decoded(x, own, axis)).sum(axis) / np.square(wide(x)).sum(axis)
            found.append((ratios.max(), ratios.min()))
        assert len(told) == 1
        np.testing.assert_allclose(told[0], found, rtol=0.02)

    def test_raw_fp8_has_scales_of_one(self) -> None:
        a, b = normal(0, 30, 40, dtype="float8_e4m3fn"), normal(1, 40, 33, dtype="float8_e4m3fn")
        assert error(self.plan(TENSOR, a, b)(a, b), wide(a) @ wide(b)) < 6e-3

    @pytest.mark.parametrize("shape", [(33,), (1,), (30, 33), (30, 1), ()])
    @pytest.mark.parametrize("activation", ACTIVATIONS)
    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_epilogues(self, dtype: str, activation: str | None, shape: tuple[int, ...]) -> None:
        a, b, bias = normal(0, 30, 40), normal(1, 40, 33) * 0.2, normal(2, *shape, dtype=dtype)
        plan = self.plan(ROW, a, b, bias=dtype, activation=activation)
        wanted = wide(ACTIVATIONS[activation](jnp.asarray(exact(ROW, a, b) + wide(bias), "float32")))
        assert error(plan(a, b, bias), wanted) < 6e-3

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0), (1, 2)])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    @pytest.mark.parametrize("bias", [None, "shared", "mapped"])
    def test_vmap_is_each_entry_alone(self, bias: str | None, recipe: str, axes: tuple[Any, Any]) -> None:
        a, b = normal(0, 3, 5, 40), normal(1, 3, 40, 7)
        given = [x[0] if axis is None else jnp.moveaxis(x, 0, axis) for x, axis in zip((a, b), axes, strict=True)]
        more = {None: [], "shared": [normal(2, 7)], "mapped": [normal(2, 3, 7)]}[bias]
        bias_axes = {None: [], "shared": [None], "mapped": [0]}[bias]
        plan = self.plan(recipe, a[0], b[0], bias=None if bias is None else "bfloat16")
        found = jax.jit(jax.vmap(plan, (*axes, *bias_axes)))(*given, *more)
        for i in range(3):
            wanted = exact(recipe, a[0] if axes[0] is None else a[i], b[0] if axes[1] is None else b[i])
            wanted = wanted if bias is None else wanted + wide(more[0][i] if bias == "mapped" else more[0])
            assert error(found[i], wanted) < 8e-3

    def test_rows_that_vmap_maps_are_folded_and_entries_of_b_become_a_batch(self, emulated: list[Any]) -> None:
        a, b = normal(0, 3, 5, 40), normal(1, 3, 40, 7)
        plan = self.plan(ROW, a[0], b[0])
        for axes, given in (((0, None), (a, b[0])), ((None, 0), (a[0], b)), ((0, 0), (a, b))):
            assert "scan" not in str(jax.make_jaxpr(jax.vmap(plan, axes))(*given)), axes
        looped = self.plan(TENSOR, a[0], b[0])
        assert "scan" in str(jax.make_jaxpr(jax.vmap(looped))(a, b)), "scales of a tensor belong to one entry"

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS, "e4m3:64x64"])
    def test_what_the_program_transposes_is_quantized_from_where_it_lies(self, recipe: str) -> None:
        a, b, bias = normal(0, 30, 200), normal(1, 200, 33), normal(2, 33)
        plan, wanted = self.plan(recipe, a, b, bias="bfloat16"), exact(recipe, a, b) + wide(bias)

        def product(x: Any, y: Any, bias: Any) -> Any:
            return plan(x.T, y.T, bias)

        traced = jax.jit(product).trace(a.T, b.T, bias)
        assert error(jax.jit(product)(a.T, b.T, bias), wanted) < 6e-3
        inner = next(x for x in traced.jaxpr.eqns if x.primitive.name in ("jit", "pjit"))
        assert list(inner.invars[:2]) == list(traced.jaxpr.jaxpr.invars[:2]), "neither is transposed before"
        many = jax.vmap(jax.jit(product), (0, None, None))(jnp.stack([a.T, -a.T]), b.T, bias)
        assert error(many[0], wanted) < 6e-3
        assert error(many[1], 2 * wide(bias) - wanted) < 6e-3

    def test_nested_vmap_and_scan(self) -> None:
        a, b = normal(0, 2, 3, 5, 40), normal(1, 2, 3, 40, 7)
        plan = self.plan(ROW, a[0, 0], b[0, 0])
        found = jax.vmap(jax.vmap(plan))(a, b)
        _, scanned = jax.lax.scan(lambda carry, x: (carry, jax.vmap(plan)(*x)), None, (a, b))
        for i, j in itertools.product(range(2), range(3)):
            assert error(found[i, j], exact(ROW, a[i, j], b[i, j])) < 6e-3
            assert error(scanned[i, j], exact(ROW, a[i, j], b[i, j])) < 6e-3

    def test_gradients_are_the_native_products(self) -> None:
        a, b = normal(0, 5, 40), normal(1, 40, 7)
        asked = problem(ROW, 5, 7, 40)
        room = dispatch.framework("jax")
        served = room.adapt(BACKEND.plan(asked), None, asked, dispatch.native(asked), jnp.matmul)
        out, pull = jax.vjp(served, a, b)
        wanted = jax.vjp(jnp.matmul, a, b)[1](out)
        for found, own in zip(pull(out), wanted, strict=True):
            assert error(found, wide(own)) < 1e-6
        many = jax.vmap(jax.grad(lambda x, y: served(x, y).astype("float32").sum()), (0, None))
        assert error(many(jnp.stack([a, a]), b)[1], wide(b).sum(1)[None].repeat(5, 0)) < 6e-3
        tangent = jax.jvp(served, (a, b), (a, b))[1]
        assert error(tangent, wide(jax.jvp(jnp.matmul, (a, b), (a, b))[1])) < 1e-6

    def test_a_second_eager_call_traces_nothing(self, monkeypatch: pytest.MonkeyPatch) -> None:
        traced: list[Any] = []
        own = module.ScaledProduct.__call__
        monkeypatch.setattr(module.ScaledProduct, "__call__", lambda self, *x: traced.append(x) or own(self, *x))
        a, b = normal(0, 5, 40), normal(1, 40, 7)
        asked = problem(ROW, 5, 7, 40)
        served = dispatch.framework("jax").adapt(BACKEND.plan(asked), None, asked, dispatch.native(asked), jnp.matmul)
        first = served(a, b)
        assert len(traced) == 1
        assert np.asarray(served(a, b)).tobytes() == np.asarray(first).tobytes()
        served(a + 1, b)
        assert len(traced) == 1

    def test_prepare_is_jitted_once_a_recipe(self, emulated: list[Any]) -> None:
        b, recipe = normal(1, 40, 7), RecipePair.parse(ROW).b
        quantizing._encoding.cache_clear()
        one, other = (quantizing.prepare(b, recipe, -2, "sm90") for _ in range(2))
        assert len(emulated) == 1
        assert isinstance(one, quantizing.Encoded)
        assert np.asarray(one.matrix).tobytes() == np.asarray(other.matrix).tobytes()
        assert {x.shape for x in jax.tree.leaves(one)} == {(7, 48), (7, 1)}


class TestEveryLaunchCompiles:
    """What plans of every arch launch, compiled by Triton without a GPU."""

    @pytest.mark.parametrize("arch", ["sm89", "sm90", "sm100", "sm120"])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    def test_as_a_plan_is_made(self, recipe: str, arch: str, monkeypatch: pytest.MonkeyPatch) -> None:
        bound: list[Any] = []

        def compiled(kernel: Any, grid: Any, arguments: Any, options: Any, *, capability: int, **_: Any) -> Any:
            made, _types = quantizing.launching_jax._compile(kernel, arguments, options, capability)
            bound.append(made)
            return SimpleNamespace(results=())

        monkeypatch.setattr(quantizing.launching_jax, "bind", compiled)
        BACKEND.plan(problem(recipe, 264, 520, 1040, arch=arch))
        assert all(f"sm_{arch[2:]}" in made.asm["ptx"] for made in bound)
        assert {"sm89": "mma.sync", "sm90": "wgmma", "sm100": "tcgen05.mma", "sm120": "mma.sync"}[arch] in "".join(
            made.asm["ptx"] for made in bound
        )


SHAPES = [(1, 1, 1), (1, 4096, 4096), (16, 1024, 8192), (17, 33, 65), (64, 64, 64), (100, 300, 1000)]
SHAPES += [(300, 1040, 528), (520, 528, 4112), (1100, 2050, 2064)]
gpu = pytest.mark.gpu


@gpu
class TestOnAGPU:
    @pytest.fixture(autouse=True)
    def on_a_gpu(self) -> None:
        assert jax.default_backend() == "gpu", "run gpu tests on a machine with a GPU"

    def run(self, recipe: str, a: Any, b: Any, bias: Any = None, **facts: Any) -> Any:
        """Return the product by the first config, after checking that all agree, jitted and from run to run."""
        operands = [
            Operand(x.dtype, tuple(x.shape[:-2]), recipe=x.recipe)
            if isinstance(x, dispatch.ScaledArray)
            else Operand(x.dtype.name, tuple(x.shape[:-2]))
            for x in (a, b)
        ]
        asked = problem(recipe, a.shape[-2], b.shape[-1], a.shape[-1], a=operands[0], b=operands[1], **facts)
        asked = replace(asked, bias=None if bias is None else bias.dtype.name)
        assert BACKEND.rejections(asked) == []
        found = []
        for config in BACKEND.configs(asked):
            plan = BACKEND.plan(asked, config)
            given = (a, b) if bias is None else (a, b, bias)
            out, again = plan(*given), jax.jit(plan)(*given)
            assert np.asarray(out).tobytes() == np.asarray(again).tobytes(), config
            assert out.dtype.name == asked.out_dtype
            found.append(out)
        for other in found[1:]:
            finite = np.isfinite(wide(found[0]))
            assert error(wide(other)[finite], wide(found[0])[finite]) < 8e-3
        return found[0]

    @pytest.mark.parametrize("size", SHAPES)
    @pytest.mark.parametrize("mode", ["fast", "promoted"])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    def test_row_and_tensor_scales(self, recipe: str, mode: str, size: tuple[int, int, int]) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n)
        assert error(self.run(recipe, a, b, accumulation=mode), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("recipe", MIXED)
    def test_mixed_formats(self, recipe: str) -> None:
        a, b = normal(0, 300, 528), normal(1, 528, 1040)
        assert error(self.run(recipe, a, b), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("size", [(17, 33, 65), (300, 1040, 528), (1100, 2050, 2064)])
    @pytest.mark.parametrize("recipe", [BLOCKS, "e4m3:128x128", "e4m3:64x64"])
    def test_block_scales(self, recipe: str, size: tuple[int, int, int]) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n)
        assert error(self.run(recipe, a, b), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("dtype", ["float16", "float32"])
    @pytest.mark.parametrize("out", ["float16", "float32"])
    def test_dtypes(self, dtype: str, out: str) -> None:
        a, b = normal(0, 300, 528, dtype=dtype), normal(1, 528, 264, dtype=dtype)
        assert error(self.run(ROW, a, b, out_dtype=out), exact(ROW, a, b)) < 6e-3

    @pytest.mark.parametrize("size", [(16, 1024, 4096), (520, 528, 512)])
    @pytest.mark.parametrize(
        ("shape", "activation"), [*itertools.product(("n",), ACTIVATIONS), ("1", "silu"), ("mn", "gelu")]
    )
    def test_epilogues(self, shape: str, activation: str | None, size: tuple[int, int, int]) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n) * k**-0.5
        bias = normal(2, *{"n": (n,), "1": (1,), "mn": (m, n)}[shape], dtype="float32")
        with jax.enable_x64(True):
            wanted = np.asarray(ACTIVATIONS[activation](jnp.asarray(exact(ROW, a, b) + wide(bias))))
        assert error(self.run(ROW, a, b, bias, activation=activation), wanted) < 6e-3

    @pytest.mark.parametrize("batch", [((3,), (3,)), ((2, 1), (3,)), ((3,), ()), ((), (2,))])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    def test_batches(self, recipe: str, batch: Any) -> None:
        a, b = normal(0, *batch[0], 70, 200), normal(1, *batch[1], 200, 131)
        assert error(self.run(recipe, a, b), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    def test_what_is_quantized_already(self, recipe: str) -> None:
        a, b = normal(0, 130, 640), normal(1, 640, 273)
        pair = RecipePair.parse(recipe)
        left, right = dispatch.quantize(a, pair.a, axis=-1), dispatch.quantize(b, pair.b, axis=-2)
        assert error(self.run(recipe, left, right), exact(recipe, left, right)) < 6e-3
        assert error(self.run(recipe, a, right), exact(recipe, a, right)) < 6e-3
        asked = problem(recipe, 130, 273, 640, b=Operand("bfloat16", prepared=True))
        made = BACKEND.prepare(b, pair.b, axis=-2)
        assert error(BACKEND.plan(asked)(a, made), exact(recipe, a, b)) < 6e-3

    @pytest.mark.parametrize("recipe", [ROW, TENSOR, BLOCKS])
    @pytest.mark.parametrize("size", [(33, 65, 144), (2048, 1024, 4096)])
    def test_what_the_program_transposes_is_quantized_from_where_it_lies(
        self, size: tuple[int, int, int], recipe: str
    ) -> None:
        m, n, k = size
        a, b = normal(0, m, k), normal(1, k, n)
        plan = BACKEND.plan(problem(recipe, m, n, k))
        turned = jax.jit(lambda x, y: plan(x.T, y.T))(a.T.copy(), b.T.copy())
        assert error(turned, wide(plan(a, b))) < 1e-3

    def test_gradients_of_a_jitted_loss(self) -> None:
        a, b = normal(0, 512, 1024), normal(1, 1024, 2048)

        def loss(product: Any) -> Any:
            return lambda x, y: (product(x, y).astype("float32") ** 2).sum()

        with dispatch.use_policy(gate={"min_speedup": 0.0}, tuning={"budget_ms": 50}):
            ours = jax.jit(jax.grad(loss(lambda x, y: dispatch.matmul(x, y, backend=BACKEND.name)), (0, 1)))(a, b)
        own = jax.jit(jax.grad(loss(jnp.matmul), (0, 1)))(a, b)
        for found, wanted in zip(ours, own, strict=True):
            assert 1e-3 < error(found, wide(wanted)) < 0.08

    def test_raw_fp8_has_scales_of_one(self) -> None:
        a, b = normal(0, 130, 200, dtype="float8_e4m3fn"), normal(1, 200, 77, dtype="float8_e4m3fn")
        assert error(self.run(TENSOR, a, b), wide(a) @ wide(b)) < 6e-3

    def test_nan_and_inf_stay_where_they_belong(self) -> None:
        a, b = normal(0, 300, 640), normal(1, 640, 272)
        out = wide(self.run(ROW, a.at[3, 5].set(jnp.nan).at[7, 9].set(jnp.inf), b))
        assert np.isnan(out[3]).all()
        assert not np.isfinite(out[7]).any()
        assert np.isfinite(np.delete(out, (3, 7), 0)).all()

    @pytest.mark.parametrize("axes", [(0, None), (None, 0), (0, 0)])
    @pytest.mark.parametrize("recipe", [ROW, TENSOR])
    def test_vmap_is_each_entry_alone(self, recipe: str, axes: tuple[Any, Any]) -> None:
        a, b = normal(0, 3, 70, 200), normal(1, 3, 200, 136)
        given = [x if axis == 0 else x[0] for x, axis in zip((a, b), axes, strict=True)]
        plan = BACKEND.plan(problem(recipe, 70, 136, 200))
        found = jax.jit(jax.vmap(plan, axes))(*given)
        for i in range(3):
            own = [x[i] if axis == 0 else x for x, axis in zip(given, axes, strict=True)]
            assert error(found[i], exact(recipe, *own)) < 6e-3

    def test_scan_and_grad_through_the_public_function(self) -> None:
        a, b = normal(0, 256, 512), normal(1, 512, 512) * 0.05
        ours = {"allow": ["triton_tma_fp8", "bf16_fallback"]}
        with dispatch.use_policy(backends=ours, gate={"min_speedup": 0.0}):
            decision = dispatch.explain(a, b)
            assert decision.backend == "triton_tma_fp8", decision

            def scanned(product: Any, x: Any) -> Any:
                return jax.lax.scan(lambda carry, _: (product(carry, b), carry.sum()), x, None, length=3)[0]

            def loss(product: Any, x: Any, y: Any) -> Any:
                return jnp.square(product(x, y).astype("float32")).sum()

            out = jax.jit(lambda x: scanned(dispatch.matmul, x))(a)
            grads = jax.jit(jax.grad(lambda x, y: loss(dispatch.matmul, x, y), (0, 1)))(a, b)
            mapped = jax.jit(jax.vmap(dispatch.matmul, (0, None)))(jnp.stack([a, a + 1]), b)
        assert error(out, wide(scanned(jnp.matmul, a))) < 0.1
        for found, wanted in zip(grads, jax.grad(lambda x, y: loss(jnp.matmul, x, y), (0, 1))(a, b), strict=True):
            assert error(found, wide(wanted)) < 0.06
        assert error(mapped[1], wide(a + 1) @ wide(b)) < 0.06

    def test_an_eager_call_is_traced_once_and_a_prepared_weight_quantized_once(self, monkeypatch: Any) -> None:
        traced: list[Any] = []
        own = module.ScaledProduct.__call__
        monkeypatch.setattr(module.ScaledProduct, "__call__", lambda self, *x: traced.append(x) or own(self, *x))
        a, b = normal(0, 512, 1024), normal(1, 1024, 512)
        ours = {"allow": ["triton_tma_fp8", "bf16_fallback"]}
        with dispatch.use_policy(backends=ours, gate={"min_speedup": 0.0}):
            weight = dispatch.prepare(b)
            first = dispatch.matmul(a, weight)
            once = len(traced)
            assert once > 0
            assert np.asarray(dispatch.matmul(a, weight)).tobytes() == np.asarray(first).tobytes()
            dispatch.matmul(a + 1, weight)
        assert len(traced) == once
        assert error(first, exact(ROW, a, b)) < 6e-3
