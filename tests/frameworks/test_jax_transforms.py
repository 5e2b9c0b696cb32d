"""JAX's transforms around a product, natively and with a plan that won; measuring under a trace; the policy in it."""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import ACTIVATIONS

jax = pytest.importorskip("jax")
jnp = jax.numpy


def array(shape: tuple[int, ...], seed: int, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape) / 4, dtype)


def close(found: Any, wanted: Any, tolerance: float = 1e-5) -> None:
    """Compare two trees of arrays."""
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=tolerance, atol=tolerance), found, wanted)
    assert jax.tree.map(lambda x: x.dtype, found) == jax.tree.map(lambda x: x.dtype, wanted)


def scanned(product: Any, a: Any, b: Any) -> Any:
    square = b @ b.T
    return jax.lax.scan(lambda carry, _: (product(carry, square) / 8, carry.sum()), a, None, length=3)


def looped(product: Any, a: Any, b: Any) -> Any:
    square = b @ b.T
    return jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, product(s[1], square) / 8), (0, a))[1]


def chosen(product: Any, a: Any, b: Any) -> Any:
    return jax.lax.cond(a.sum() > 0, lambda x: product(x, b), lambda x: -product(x, b), a)


TRANSFORMS = {
    "jit": lambda product, a, b: jax.jit(product)(a, b),
    "grad": lambda product, a, b: jax.grad(lambda x, y: jnp.sin(product(x, y)).sum(), (0, 1))(a, b),
    "value_and_grad": lambda product, a, b: jax.jit(jax.value_and_grad(lambda x: product(x, b).sum()))(a),
    "jvp": lambda product, a, b: jax.jvp(product, (a, b), (a + 1, b - 1)),
    "vjp": lambda product, a, b: jax.vjp(product, a, b)[1](product(a, b)),
    "linearize": lambda product, a, b: jax.linearize(product, a, b)[1](a, b),
    "vmap": lambda product, a, b: jax.vmap(product, (0, None))(jnp.stack([a, a + 1]), b),
    "vmap of grad": lambda product, a, b: jax.vmap(jax.grad(lambda x: product(x, b).sum()))(jnp.stack([a, a + 1])),
    "scan": scanned,
    "grad of scan": lambda product, a, b: jax.grad(lambda x: scanned(product, x, b)[0].sum())(a),
    "while": looped,
    "cond": chosen,
    "remat": lambda product, a, b: jax.grad(lambda x: jax.checkpoint(product)(x, b).sum())(a),
    "hessian": lambda product, a, b: jax.hessian(lambda x: jnp.square(product(x, b)).sum())(a),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=list(TRANSFORMS))
def test_transforms_are_jaxs(transform: Any, serving: Any) -> None:
    a, b = array((3, 4), 0), array((4, 5), 1)
    with serving() as winner:
        found = transform(dispatch.matmul, a, b)
        assert winner is None or winner.calls
    close(found, transform(jnp.matmul, a, b))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
def test_epilogues_under_jit_and_grad(activation: str | None, serving: Any) -> None:
    a, b, bias = array((2, 3, 4), 0), array((4, 5), 1), array((5,), 2)
    act = {
        None: lambda x: x,
        "relu": jax.nn.relu,
        "gelu": partial(jax.nn.gelu, approximate=False),
        "gelu_tanh": jax.nn.gelu,
        "silu": jax.nn.silu,
    }[activation]

    def ours(x: Any, y: Any, z: Any) -> Any:
        return dispatch.matmul(x, y, bias=z, activation=activation)

    def theirs(x: Any, y: Any, z: Any) -> Any:
        return act(jnp.matmul(x, y) + z)

    def summed(call: Any) -> Any:
        return jax.jit(jax.grad(lambda *operands: call(*operands).sum(), (0, 1, 2)))

    with serving():
        found = jax.jit(ours)(a, b, bias), summed(ours)(a, b, bias)
    close(found, (theirs(a, b, bias), summed(theirs)(a, b, bias)))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_under_jit_and_grad(dtype: str, serving: Any) -> None:
    a, b = array((3, 4), 0, dtype), array((4, 5), 1, dtype)
    with serving():
        found = jax.jit(jax.grad(lambda x: dispatch.matmul(x, b).sum()))(a)
        wide = jax.jit(partial(dispatch.matmul, out_dtype="float32"))(a, b)
    close(found, jax.grad(lambda x: jnp.matmul(x, b).sum())(a), 0.05)
    close(wide, jnp.matmul(a.astype("float32"), b.astype("float32")))


def test_x64_toggled(serving: Any) -> None:
    a, b = np.eye(3), np.ones((3, 2))
    with serving():
        narrow = dispatch.matmul(jnp.asarray(a), jnp.asarray(b))
        with jax.enable_x64(True):
            wide = jax.jit(dispatch.matmul)(jnp.asarray(a), jnp.asarray(b))
            eager = dispatch.matmul(jnp.asarray(a), jnp.asarray(b))
            single = dispatch.matmul(jnp.asarray(a, "float32"), jnp.asarray(b, "float32"))
        after = dispatch.matmul(jnp.asarray(a), jnp.asarray(b))
    assert [str(x.dtype) for x in (narrow, wide, eager, single, after)] == [
        "float32",
        "float64",
        "float64",
        "float32",
        "float32",
    ]


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable:UserWarning")
def test_donated_buffers(serving: Any) -> None:
    with serving():
        a, b = array((4, 4), 0), array((4, 4), 1)
        wanted = np.asarray(a) @ np.asarray(b)
        close(jax.jit(dispatch.matmul, donate_argnums=0)(a, b), jnp.asarray(wanted))
        assert a.is_deleted()
        with pytest.raises(RuntimeError, match="deleted"):
            dispatch.matmul(a, b)
        close(dispatch.matmul(array((4, 4), 0), b), jnp.asarray(wanted))  # nobody was condemned for it


def test_a_decision_under_jit_is_one_like_the_eager_one(winner: Any) -> None:
    a, b = array((26, 4), 0, "bfloat16"), array((4, 5), 1, "bfloat16")
    jax.jit(dispatch.matmul)(a, b)
    eager = dispatch.explain(a, b)
    dispatch.matmul(a, b)
    kept = [d for d in dispatch.stored() if (d.problem.m, d.problem.n, d.problem.k) == (26, 5, 4)]
    assert {d.problem.modes for d in kept} == {(), ("traced",)}
    assert {d.backend for d in kept} == {eager.backend} == {"winner"}
    traced = next(d for d in kept if d.problem.modes)
    assert eager.measurement.error_data == "caller"
    assert traced.measurement.error_data == "random"
    assert {p.modes for p in winner.problems} >= {(), ("traced",)}


def test_a_second_eager_call_traces_nothing(winner: Any) -> None:
    a, b = array((6, 9), 0), array((9, 5), 1)
    weight = dispatch.prepare(b)
    for given in (b, weight):
        first = dispatch.matmul(a, given)
        traced = winner.calls
        assert traced
        for other in (a, a + 1, a * 2):
            dispatch.matmul(other, given)
        assert winner.calls == traced
        close(dispatch.matmul(a, given), first)


def test_a_second_jitted_call_asks_for_nothing(winner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = array((6, 9), 0), array((9, 7), 1)
    product = jax.jit(dispatch.matmul)
    first = product(a, b)
    monkeypatch.setattr("dispatch._api._call", lambda *_: pytest.fail("asked after compiling"))
    close(product(a, b), first)


def test_measuring_under_a_trace_leaks_no_tracer(winner: Any) -> None:
    a, b = array((3, 7), 0), array((7, 2), 1)
    with jax.checking_leaks():
        found = jax.jit(lambda x, y: jax.vmap(dispatch.matmul, (0, None))(jnp.stack([x, x]), y))(a, b)
        grads = jax.grad(lambda x: dispatch.matmul(x, b).sum())(a)
    assert winner.calls
    close(found, jnp.stack([a @ b, a @ b]))
    close(grads, jnp.broadcast_to(b.sum(1), a.shape))


def test_measuring_is_allowed_under_a_transfer_guard(winner: Any) -> None:
    a, b = array((3, 8), 0), array((8, 2), 1)
    with jax.transfer_guard("disallow"):
        found = jax.jit(dispatch.matmul)(a, b)
    close(found, a @ b)


class TestPolicyInTheTrace:
    """A function compiled under one policy is traced again under another, once."""

    def test_in_a_process_of_its_own(self) -> None:
        here = Path(__file__).parent
        options = [
            "-q",
            "-p",
            "no:cacheprovider",
            "-c",
            str(here.parents[1] / "pyproject.toml"),
            "--rootdir",
            str(here.parents[1]),
        ]
        command = [sys.executable, "-m", "pytest", *options, str(here / "policy_in_the_trace.py")]
        finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parent)
        assert finished.returncode == 0, finished.stdout
        assert "3 passed" in finished.stdout

    def test_it_is_there_for_the_first_product_of_a_process(self) -> None:
        script = """
import dispatch, jax, jax.numpy as jnp
traces = []

@jax.jit
def product(x):
    traces.append(dispatch.current_policy().name)
    return dispatch.matmul(x, x)

a = jnp.ones((2, 2))
with dispatch.use_policy("native"):
    product(a)
product(a)
print(*traces)
"""
        finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert finished.stdout.split() == ["native", "default"]

    def test_use_policy_imports_no_jax(self) -> None:
        script = "import dispatch, sys; dispatch.use_policy('native').__enter__(); print('jax' in sys.modules)"
        finished = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        assert finished.stdout.strip() == "False"
