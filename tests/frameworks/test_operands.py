"""ScaledArrays and prepared operands in a product: values, errors, forms made once and renewed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import Plan, Problem, ScaledArray, ScalingRecipe
from dispatch.testing import FakeBackend, fake_timings, registered

FRAMEWORKS = ("numpy", "torch", "jax")
RECIPES = ("e4m3:tensor", "e5m2:row", "e4m3:128x128", "e4m3:1x32:e8m0")


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> str:
    pytest.importorskip(request.param)
    return str(request.param)


def array(framework: str, shape: tuple[int, ...], dtype: str = "bfloat16", seed: int = 0) -> Any:
    return dispatch.framework(framework).normal(shape, dtype, seed)


def host(framework: str, x: Any) -> Any:
    x = x.dequantize("float32") if isinstance(x, ScaledArray) else x
    return np.asarray(dispatch.framework(framework).to_numpy(x)).astype(np.float64)


def close(framework: str, found: Any, a: Any, b: Any, dtype: str = "bfloat16") -> None:
    """Compare a result with the float64 product of what the operands decode to."""
    wanted = host(framework, a) @ host(framework, b)
    assert dispatch.framework(framework).dtype_name(found) == dtype
    assert tuple(found.shape) == wanted.shape
    np.testing.assert_allclose(host(framework, found), wanted, rtol=0.02, atol=0.02 * np.abs(wanted).max())


class Quantizing(FakeBackend):
    """A backend of one recipe, whose forms are ScaledArrays that it counts."""

    def __init__(self, recipe: str = "e4m3:row") -> None:
        super().__init__("quantizing", recipes=(recipe,))
        self.made: list[tuple[Any, int]] = []
        self.given: list[str] = []

    def prepare(self, operand: Any, recipe: ScalingRecipe, *, axis: int) -> ScaledArray:
        """Return the operand quantized."""
        self.made.append((operand, axis))
        return dispatch.quantize(operand, recipe, axis=axis)

    def plan(self, problem: Problem, config: str | None = None) -> Plan:
        """Return the product of quantized operands."""
        pair = problem.recipe

        def product(a: Any, b: Any) -> Any:
            self.given.append(f"{type(a).__name__} {type(b).__name__}")
            left, right = (
                x if isinstance(x, ScaledArray) else dispatch.quantize(x, recipe, axis=axis)
                for x, recipe, axis in ((a, pair.a, -1), (b, pair.b, -2))
            )
            room = dispatch.framework(problem.framework)
            wide = room.matmul(left.dequantize("float32"), right.dequantize("float32"))
            return room.cast(wide, problem.out_dtype)

        return product


@pytest.fixture
def quantizing() -> Any:
    """It wins wherever it may."""
    backend = Quantizing()
    with registered(backend), fake_timings({"quantizing": 1.0, "baseline": 100.0}):
        yield backend
        assert "quantizing" not in dispatch.stats()["quarantined"], dispatch.stats()["quarantined"]


@pytest.mark.parametrize("recipe", RECIPES)
def test_scaled_arrays_multiply_as_what_they_decode_to(framework: str, recipe: str, serving: Any) -> None:
    a, b = array(framework, (5, 130), seed=1), array(framework, (130, 7), seed=2)
    left, right = dispatch.quantize(a, recipe, axis=-1), dispatch.quantize(b, recipe, axis=-2)
    with serving():
        for pair in ((left, right), (left, b), (a, right)):
            close(framework, dispatch.matmul(*pair), *pair)


def test_scaled_stacks_and_epilogues(framework: str, serving: Any) -> None:
    a, b = array(framework, (2, 3, 32), seed=1), array(framework, (32, 7), seed=2)
    left, right = dispatch.quantize(a, "e4m3:row", axis=-1), dispatch.quantize(b, "e4m3:row", axis=-2)
    stack = dispatch.quantize(array(framework, (2, 32, 7), seed=3), "e4m3:row", axis=-2)
    bias = array(framework, (7,), "float32", 4)
    with serving():
        close(framework, dispatch.matmul(left, right), left, right)
        close(framework, dispatch.matmul(left, stack), left, stack)
        close(framework, dispatch.matmul(left, right, out_dtype="float32"), left, right, "float32")
        fused = dispatch.matmul(left, right, bias=bias, activation="relu")
    wanted = np.maximum(host(framework, left) @ host(framework, right) + host(framework, bias), 0)
    np.testing.assert_allclose(host(framework, fused), wanted, rtol=0.02, atol=0.2)


def test_scaled_vectors(framework: str, serving: Any) -> None:
    a, b = array(framework, (4, 160), seed=1), array(framework, (160, 7), seed=2)
    with serving():
        for recipe in ("e4m3:tensor", "e4m3:1x128"):
            vector = dispatch.quantize(array(framework, (160,), seed=3), recipe)
            close(framework, dispatch.matmul(vector, b), vector, b)
            close(framework, dispatch.matmul(a, vector), a, vector)
            close(framework, dispatch.matmul(vector, vector), vector, vector)


@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:1x128"])
def test_a_scaled_array_for_the_other_side_says_what_to_do(framework: str, recipe: str, serving: Any) -> None:
    a, b = array(framework, (4, 32), seed=1), array(framework, (32, 7), seed=2)
    wrong_a, wrong_b = dispatch.quantize(a, recipe, axis=-2), dispatch.quantize(b, recipe, axis=-1)
    with serving():
        with pytest.raises(ValueError, match=r"a is a ScaledArray.*axis=-1.*a\.dequantize\(\)"):
            dispatch.matmul(wrong_a, b)
        with pytest.raises(ValueError, match=r"b is a ScaledArray.*axis=-2.*b\.dequantize\(\)"):
            dispatch.matmul(a, wrong_b)
        for square in ("e4m3:tensor", "e4m3:32x32"):  # the same along either axis
            free = dispatch.quantize(b, square, axis=-1)
            close(framework, dispatch.matmul(a, free), a, free)


def test_sizes_that_do_not_match_raise_the_frameworks_error(framework: str, serving: Any) -> None:
    a, b = array(framework, (4, 32), seed=1), array(framework, (16, 7), seed=2)
    room = dispatch.framework(framework)
    with pytest.raises(Exception, match=r".") as own:
        room.matmul(a, b)
    with serving():
        for pair in (
            (dispatch.quantize(a, "e4m3:row", axis=-1), b),
            (a, dispatch.quantize(b, "e4m3:row", axis=-2)),
            (a, dispatch.prepare(b)),
        ):
            with pytest.raises(own.type):
                dispatch.matmul(*pair)


@pytest.mark.parametrize(("one", "other"), [("numpy", "torch"), ("torch", "jax"), ("jax", "numpy")])
def test_operands_of_two_frameworks_are_named(one: str, other: str) -> None:
    pytest.importorskip(one)
    pytest.importorskip(other)
    a, b = array(one, (4, 32)), array(other, (32, 7))
    known = array(one, (32, 7))
    dispatch.matmul(a, known)
    for wrapped in (dispatch.quantize(b, "e4m3:row", axis=-2), dispatch.prepare(b)):
        with pytest.raises(dispatch.MixedArraysError, match=rf"(?s)(?=.*{one})(?=.*{other})"):
            dispatch.matmul(a, wrapped)


def test_prepared_operands_multiply_as_their_array(framework: str, serving: Any) -> None:
    a, b, vector = (array(framework, shape, "float32", i) for i, shape in enumerate(((4, 32), (32, 7), (32,))))
    bias = array(framework, (7,), "float32", 4)
    with serving():
        for operands in ((a, b), (vector, b), (a, vector), (array(framework, (2, 4, 32), "float32", 5), b)):
            for given in (
                (operands[0], dispatch.prepare(operands[1])),
                (dispatch.prepare(operands[0]), operands[1]),
                tuple(map(dispatch.prepare, operands)),
            ):
                found = dispatch.matmul(*given)
                assert type(found) is type(dispatch.framework(framework).matmul(*operands))
                np.testing.assert_allclose(
                    host(framework, found), host(framework, operands[0]) @ host(framework, operands[1]), atol=1e-4
                )
        fused = dispatch.matmul(a, dispatch.prepare(b), bias=bias, activation="relu")
    wanted = np.maximum(host(framework, a) @ host(framework, b) + host(framework, bias), 0)
    np.testing.assert_allclose(host(framework, fused), wanted, atol=1e-4)


def test_a_form_is_made_once(framework: str, quantizing: Quantizing) -> None:
    a, weight = array(framework, (4, 32), seed=1), dispatch.prepare(array(framework, (32, 8), seed=2))
    assert dispatch.explain(a, weight).backend == "quantizing"
    first = dispatch.matmul(a, weight)
    for rows in (4, 5, 6):  # another problem, the same weight
        dispatch.matmul(array(framework, (rows, 32), seed=3), weight)
    own = [made for made in quantizing.made if made[0] is weight.array]
    assert [axis for _, axis in own] == [-2]
    np.testing.assert_allclose(host(framework, first), host(framework, a) @ host(framework, weight.array), atol=1.5)
    if framework != "jax":  # where a plan runs once, to be compiled
        assert quantizing.given[-1].endswith("ScaledArray")


def test_a_form_is_made_anew_after_an_update() -> None:
    torch = pytest.importorskip("torch")
    backend = Quantizing()
    with registered(backend), fake_timings({"quantizing": 1.0, "baseline": 100.0}):
        a, w = array("torch", (4, 32), seed=1), array("torch", (32, 8), seed=2)
        weight = dispatch.prepare(w)
        before = dispatch.matmul(a, weight)
        w.mul_(2)
        after = dispatch.matmul(a, weight)
        torch.testing.assert_close(after, 2 * before)
        assert len([made for made in backend.made if made[0] is w]) == 2
        w.data.mul_(2)  # which torch does not count
        torch.testing.assert_close(dispatch.matmul(a, weight), after)
        weight.refresh()
        torch.testing.assert_close(dispatch.matmul(a, weight), 2 * after)


def test_numpy_and_jax_forms_follow_refresh() -> None:
    backend = Quantizing()
    with registered(backend), fake_timings({"quantizing": 1.0, "baseline": 100.0}):
        a, w = array("numpy", (4, 32), seed=1), array("numpy", (32, 8), seed=2)
        weight = dispatch.prepare(w)
        before = dispatch.matmul(a, weight)
        w *= 2
        weight.refresh()
        np.testing.assert_array_equal(dispatch.matmul(a, weight), 2 * before)


def test_a_prepared_parameter_trains(quantizing: Quantizing) -> None:
    torch = pytest.importorskip("torch")
    w = torch.nn.Parameter(array("torch", (32, 8), seed=2))
    weight, a = dispatch.prepare(w), array("torch", (4, 32), seed=1).requires_grad_()
    for _ in range(2):
        a.grad = w.grad = None
        out = dispatch.matmul(a, weight)
        out.sum().backward()
        torch.testing.assert_close(
            w.grad.double(), a.double().T @ torch.ones(4, 8, dtype=torch.float64), rtol=0.1, atol=0.3
        )
        torch.testing.assert_close(
            a.grad.double(), torch.ones(4, 8, dtype=torch.float64) @ w.double().T, rtol=0.1, atol=0.3
        )
        with torch.no_grad():
            w -= 0.01 * w.grad
    own = [made for made in quantizing.made if made[0] is w and made[1] == -2]
    assert len(own) == 2


def test_a_prepared_operand_under_autocast(serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a, w = array("torch", (4, 32), "float32", 1), array("torch", (32, 8), "float32", 2)
    weight = dispatch.prepare(w)
    with serving(), torch.autocast("cpu", torch.bfloat16):
        found = dispatch.matmul(a, weight)
        torch.testing.assert_close(found, torch.matmul(a, w))


def test_a_prepared_operand_under_jit_and_grad(quantizing: Quantizing) -> None:
    jax = pytest.importorskip("jax")
    a, w = array("jax", (4, 32), seed=1), array("jax", (32, 8), seed=2)
    weight = dispatch.prepare(w)
    found = jax.jit(lambda x: dispatch.matmul(x, weight))(a)
    grad = jax.jit(jax.grad(lambda x: dispatch.matmul(x, weight).astype("float32").sum()))(a)
    inside = jax.jit(lambda x, y: dispatch.matmul(x, dispatch.prepare(y)))(a, w)
    np.testing.assert_allclose(host("jax", found), host("jax", a) @ host("jax", w), atol=1.5)
    np.testing.assert_allclose(host("jax", inside), host("jax", found), atol=1.5)
    np.testing.assert_allclose(host("jax", grad), np.broadcast_to(host("jax", w).sum(1), (4, 32)), rtol=0.02, atol=0.05)


def test_scaled_arrays_under_jit_vmap_and_grad(serving: Any) -> None:
    jax = pytest.importorskip("jax")
    a, b = array("jax", (4, 32), seed=1), dispatch.quantize(array("jax", (32, 8), seed=2), "e4m3:row", axis=-2)
    with serving():
        close("jax", jax.jit(dispatch.matmul)(a, b), a, b)
        stacked = jax.vmap(dispatch.matmul, (0, None))(jax.numpy.stack([a, a]), b)
        close("jax", stacked[1], a, b)
        grad = jax.grad(lambda x: dispatch.matmul(x, b).astype("float32").sum())(a)
    np.testing.assert_allclose(host("jax", grad), np.broadcast_to(host("jax", b).sum(1), (4, 32)), rtol=0.02, atol=0.05)


def test_gradients_beside_a_scaled_array(serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a = array("torch", (4, 32), seed=1).requires_grad_()
    b = dispatch.quantize(array("torch", (32, 8), seed=2), "e4m3:row", axis=-2)
    with serving():
        dispatch.matmul(a, b, activation="relu").sum().backward()
    exact = a.detach().double().requires_grad_()
    torch.relu(exact @ b.dequantize("float64")).sum().backward()
    torch.testing.assert_close(a.grad.double(), exact.grad, rtol=0.05, atol=0.1)


def test_a_prepared_weight_is_quantized_once_for_its_backward_pass(quantizing: Quantizing) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    prepared = dispatch.prepare(weight)

    def backward() -> Any:
        x = torch.randn(2, 5, 24, generator=torch.Generator().manual_seed(2)).bfloat16().requires_grad_()
        grad = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(3)).bfloat16()
        dispatch.matmul(x, prepared).backward(grad)
        wanted = grad.double() @ weight.detach().double().mT
        assert ((x.grad.double() - wanted).norm() / wanted.norm()).item() < 0.08
        return [axis for operand, axis in quantizing.made if tuple(operand.shape[-2:]) in ((24, 16), (16, 24))]

    assert backward() == [-2, -2]  # as weight and as its transpose, each once
    quantizing.given.clear()
    assert backward() == [-2, -2]
    assert "Tensor ScaledArray" in quantizing.given
    with torch.no_grad():
        weight.mul_(-3)
    assert backward() == [-2] * 4
    prepared.refresh()
    assert backward() == [-2] * 6
    weight.data = weight.data.clone() * 2
    assert backward() == [-2] * 8


def test_double_backward_through_a_prepared_weight_is_torchs_own(quantizing: Quantizing) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda a, w: dispatch.matmul(a, dispatch.prepare(w)), (x, weight))


def test_hooks_of_saved_tensors_are_heard_beside_a_prepared_weight(quantizing: Quantizing) -> None:
    torch = pytest.importorskip("torch")
    weight = torch.nn.Parameter(torch.randn(24, 16, generator=torch.Generator().manual_seed(1)))
    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2), requires_grad=True)
    wanted = torch.ones(5, 16) @ weight.detach().mT
    with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.clone(), lambda kept: kept):
        out = dispatch.matmul(x, dispatch.prepare(weight))
    with torch.no_grad():
        weight.mul_(2)
    out.backward(torch.ones(5, 16))
    assert ((x.grad - wanted).norm() / wanted.norm()).item() < 0.08
