"""JAX's transforms and settings around a product."""

from __future__ import annotations

import numpy as np
import pytest

jax = pytest.importorskip("jax")
import jax.numpy as jnp  # noqa: E402
from dispatch.plugins.pallas_fp8 import PallasBackend  # noqa: E402

import dispatch  # noqa: E402
from dispatch.testing import FakeBackend, fake_timings, registered  # noqa: E402


@pytest.fixture(params=["native", "plugin"])
def route(request):
    """cpu_blas takes nothing of JAX's."""
    import contextlib

    with contextlib.ExitStack() as stack:
        if request.param == "native":
            stack.enter_context(dispatch.use_policy("native"))
        else:
            stack.enter_context(registered(FakeBackend("tests_plugin")))
            stack.enter_context(fake_timings({"tests_plugin": 1.0, "baseline": 99.0}, device_time=True))
        yield request.param


def normal(*shape, dtype=jnp.float32, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


@pytest.mark.parametrize(("m", "k", "n"), [(2, 4, 8), (1, 1, 1), (3, 5, 2)])
def test_tiny_arrays_under_jit_and_vmap(route, m, k, n):
    """B13 (jax-ml/jax#19350): sizes below any kernel's block, inside jit and vmap."""
    a, b = normal(m, k, dtype=jnp.bfloat16), normal(k, n, dtype=jnp.bfloat16, seed=1)
    want = np.asarray(a @ b, np.float32)
    assert np.allclose(np.asarray(jax.jit(dispatch.matmul)(a, b), np.float32), want, rtol=1e-2)
    stacked = jax.vmap(dispatch.matmul, in_axes=(0, None))(jnp.stack([a, a]), b)
    assert np.allclose(np.asarray(stacked[1], np.float32), want, rtol=1e-2)
    plain = dispatch.Operand("bfloat16")
    facts = {"out_dtype": "bfloat16", "framework": "jax", "arch": "sm90", "device": "cuda:0"}
    for recipe in (None, dispatch.RecipePair.parse("e4m3:row")):
        problem = dispatch.Problem(m, n, k, plain, plain, recipe=recipe, **facts)
        assert {"n", "k"} & {rejection.subject for rejection in PallasBackend().rejections(problem)}


def test_every_derivative(route):
    """B56 (jax-ml/jax#16049): grad, jvp, jacfwd, jacrev, hessian, linearize and linear_transpose."""
    A, x = jnp.arange(6.0).reshape(2, 3) / 3, jnp.ones((3, 1))
    dispatch.matmul(A, x)

    def f(x):
        return (dispatch.matmul(A, x) ** 2).sum()

    want = 2 * A.T @ A
    assert jnp.allclose(jax.hessian(f)(x).reshape(3, 3), want, atol=1e-4)
    assert jnp.allclose(jax.jacfwd(jax.grad(f))(x).reshape(3, 3), want, atol=1e-4)
    assert jnp.allclose(jax.jacrev(jax.grad(f))(x).reshape(3, 3), want, atol=1e-4)
    assert jnp.allclose(jax.jit(jax.grad(f))(x), want @ x, atol=1e-4)
    value, linear = jax.linearize(f, x)
    assert jnp.allclose(linear(x), jax.jvp(f, (x,), (x,))[1])
    assert jnp.allclose(value, f(x))


@pytest.mark.parametrize("epilogue", [False, True])
def test_gradients_with_an_epilogue(route, epilogue):
    """Bias and activation are differentiated as the framework's own."""
    a, b, bias = normal(3, 4), normal(4, 2, seed=1), normal(2, seed=2)

    def ours(a, b, bias):
        options = {"bias": bias, "activation": "gelu"} if epilogue else {}
        return (dispatch.matmul(a, b, **options) ** 2).sum()

    def own(a, b, bias):
        out = a @ b
        return ((jax.nn.gelu(out + bias, approximate=False) if epilogue else out) ** 2).sum()

    for x, y in zip(jax.grad(ours, (0, 1, 2))(a, b, bias), jax.grad(own, (0, 1, 2))(a, b, bias), strict=True):
        assert jnp.allclose(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("prepared", [False, True])
def test_a_prepared_weight_under_transforms(route, prepared):
    """A weight closed over, prepared or not, in eager calls, jit, grad and vmap."""
    w, x = normal(4, 2), normal(3, 4, seed=1)
    held = dispatch.prepare(w) if prepared else w
    want = np.asarray(x @ w)
    assert np.allclose(dispatch.matmul(x, held), want, atol=1e-5)
    assert np.allclose(jax.jit(lambda x: dispatch.matmul(x, held))(x), want, atol=1e-5)
    grad = jax.grad(lambda x: dispatch.matmul(x, held).sum())(x)
    assert np.allclose(grad, np.ones((3, 2)) @ np.asarray(w).T, atol=1e-5)
    assert np.allclose(jax.vmap(lambda r: dispatch.matmul(r[None], held)[0])(x), want, atol=1e-5)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)])
def test_x64_on_off_and_toggled(route, order):
    """B98 (jax-ml/jax#18847, pytorch/helion#3600): the same results, and the user's setting is left alone."""
    before = jax.config.jax_enable_x64
    for x64 in order:
        with jax.enable_x64(x64):
            a = jnp.ones((32, 64), jnp.bfloat16)
            out = jax.jit(dispatch.matmul)(a, a.T)
            assert out.dtype == jnp.bfloat16
            assert (out == 64).all()
            _, ys = jax.lax.scan(
                lambda s, _: (dispatch.matmul(s, jnp.eye(32, dtype=jnp.bfloat16)), 0), a.T, None, length=3
            )
            assert ys.shape == (3,)
            wide = jnp.ones((2, 2), jnp.float64 if x64 else jnp.float32)
            assert dispatch.matmul(wide, wide).dtype == wide.dtype
            assert jax.config.jax_enable_x64 == x64
    assert jax.config.jax_enable_x64 == before
    assert dispatch.matmul(np.ones((2, 2)), np.ones((2, 2))).dtype == np.float64


def test_nothing_of_the_callers_is_donated(route):
    """B100 (flatironinstitute/jaxmg#29): operands live on, and the user's own donation works."""
    a, b = normal(8, 8), normal(8, 8, seed=1)
    for _ in range(2):
        dispatch.matmul(a, b)
    assert not a.is_deleted()
    want = np.asarray(a) @ np.asarray(b)
    out = jax.jit(lambda a, b: dispatch.matmul(a, b), donate_argnums=0)(a, b)
    assert np.allclose(out, want, atol=1e-4)
    assert np.allclose(dispatch.matmul(out, b), want @ np.asarray(b), atol=1e-3)


def test_a_changed_policy_reaches_jitted_functions():
    """B74 (jax-ml/jax#40609): policy is part of the trace, not of the first compile."""
    rough = FakeBackend("rough", lambda a, b, bias=None: jnp.matmul(a, b) * 1.01)
    f = jax.jit(lambda a, b: dispatch.matmul(a, b))
    a, b = normal(16, 16), normal(16, 16, seed=1)
    want = np.asarray(a) @ np.asarray(b)
    with registered(rough), fake_timings({"rough": 1.0, "baseline": 99.0}, device_time=True):
        with dispatch.use_policy(error={"metric": "relative_l2", "tolerance": 0.1}):
            loose = np.asarray(f(a, b))
        with dispatch.use_policy(error={"metric": "relative_l2", "tolerance": 1e-6}):
            tight = np.asarray(f(a, b))
        assert np.allclose(tight, want, rtol=1e-4, atol=1e-5)
        assert np.allclose(loose, want * 1.01, rtol=1e-4, atol=1e-4)


def test_a_backend_registered_later_reaches_jitted_functions_on_request():
    """B74: what is compiled keeps its choice until JAX's caches are cleared, as the docs say."""
    rough = FakeBackend("rough", lambda a, b, bias=None: jnp.matmul(a, b) * 1.01)
    f = jax.jit(lambda a, b: dispatch.matmul(a, b))
    a, b = normal(18, 16), normal(16, 16, seed=1)
    want = np.asarray(a) @ np.asarray(b)
    with dispatch.use_policy(error={"metric": "relative_l2", "tolerance": 0.1}):
        assert np.allclose(f(a, b), want, rtol=1e-4, atol=1e-5)
        with registered(rough), fake_timings({"rough": 1.0, "baseline": 99.0}, device_time=True):
            assert np.allclose(f(a, b), want, rtol=1e-4, atol=1e-5)
            jax.clear_caches()
            assert np.allclose(f(a, b), want * 1.01, rtol=1e-4, atol=1e-4)


def test_weak_types_keep_their_dtype(route):
    """jnp's promotion of a weakly typed operand depends on more than its dtype."""
    weak = jnp.broadcast_to(jnp.asarray(2.0), (4, 2))
    assert weak.weak_type
    for other in (normal(3, 4, dtype=jnp.bfloat16), normal(3, 4), jnp.broadcast_to(jnp.asarray(3.0), (3, 4))):
        for f in (dispatch.matmul, jax.jit(dispatch.matmul)):
            out, own = f(other, weak), jnp.matmul(other, weak)
            assert (out.dtype, out.weak_type) == (own.dtype, own.weak_type)
            assert jnp.allclose(out.astype(jnp.float32), own.astype(jnp.float32), rtol=1e-2)


def test_control_flow_and_checkpointing(route):
    """scan, while, cond, remat and vmap of grad over a product."""
    a, eye = normal(4, 4), jnp.eye(4)
    assert jnp.allclose(jax.lax.fori_loop(0, 3, lambda i, s: dispatch.matmul(s, eye), a), a, atol=1e-6)
    assert jnp.allclose(jax.lax.cond(True, lambda s: dispatch.matmul(s, eye), lambda s: s * 0, a), a, atol=1e-6)
    loss = jax.checkpoint(lambda s: (dispatch.matmul(s, s) ** 2).sum())
    own = jax.grad(lambda s: ((s @ s) ** 2).sum())(a)
    assert jnp.allclose(jax.grad(loss)(a), own, rtol=1e-3, atol=1e-3)


def test_max_of_fp8_arrays_is_finite(route):
    """B34 (jax-ml/jax#19011): products of every FP8 format, jitted too."""
    for dtype in (jnp.float8_e4m3fn, jnp.float8_e5m2, jnp.float8_e4m3fnuz, jnp.float8_e5m2fnuz):
        a = jnp.array([[0.25, -0.75], [0.5, 1.0]], jnp.float32).astype(dtype)
        want = np.asarray(a, np.float32) @ np.asarray(a, np.float32)
        for f in (dispatch.matmul, jax.jit(dispatch.matmul)):
            assert np.allclose(np.asarray(f(a, a), np.float32), want)
