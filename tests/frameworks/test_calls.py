"""Known calls with arguments beside the operands: found at once, each under a key of its own, and right."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import dispatch
from dispatch import _api
from dispatch.testing import FakeBackend, fake_timings, registered

FRAMEWORKS = ("numpy", "torch", "jax")
GIVEN: dict[str, dict[str, Any]] = {
    "bias": {"bias": (5,)},
    "bias and activation": {"bias": (5,), "activation": "gelu"},
    "activation": {"activation": "relu"},
    "out_dtype": {"out_dtype": "float32"},
    "scope": {"scope": "layers.0.up"},
    "backend": {"backend": "bf16_fallback"},
    "policy by name": {"policy": "strict"},
    "policy": {"policy": dispatch.load_policy("default").override(tuning={"budget_ms": 1})},
}


def array(framework: str, shape: tuple[int, ...], seed: int, dtype: str = "float32") -> Any:
    room = dispatch.framework(framework)
    values = np.random.default_rng(seed).integers(-4, 5, shape).astype(np.float32)
    return room.cast(room.asarray(values, room.normal((1,), "float32", 0)), dtype)


def host(framework: str, x: Any) -> Any:
    return np.asarray(dispatch.framework(framework).to_numpy(x)).astype(np.float64)


@pytest.fixture(params=FRAMEWORKS)
def framework(request: pytest.FixtureRequest) -> Iterator[str]:
    pytest.importorskip(request.param)
    dispatch.forget()
    yield request.param
    dispatch.forget()


def arguments(framework: str, given: dict[str, Any]) -> dict[str, Any]:
    return {name: array(framework, x, 3) if name == "bias" else x for name, x in given.items()}


@pytest.fixture
def only_known(monkeypatch: pytest.MonkeyPatch) -> Any:
    """After this is called, no call may be looked at anew."""

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("a known call was looked at again")

    return lambda: monkeypatch.setattr(_api, "request", refused)


@pytest.mark.parametrize("given", GIVEN)
def test_a_known_call_is_not_looked_at_again(framework: str, given: str, only_known: Any, serving: Any) -> None:
    a, b, more = array(framework, (3, 4), 1), array(framework, (4, 5), 2), arguments(framework, GIVEN[given])
    with serving():
        first = [dispatch.matmul(a, b, **more) for _ in range(2)][-1]
        only_known()
        found = dispatch.matmul(a, b, **more)
    np.testing.assert_array_equal(host(framework, found), host(framework, first))


@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("form", ["prepared", "scaled"])
def test_nor_is_one_of_an_operand_in_another_form(side: str, form: str, only_known: Any, serving: Any) -> None:
    a, b = array("numpy", (4, 4), 1), array("numpy", (4, 4), 2)

    def made(x: Any, axis: int) -> Any:
        return dispatch.prepare(x) if form == "prepared" else dispatch.quantize(x, "e4m3:row", axis=axis)

    given = (made(a, -1), b) if side == "a" else (a, made(b, -2))
    with serving():
        dispatch.matmul(a, b)
        wanted = [dispatch.matmul(*given) for _ in range(2)][-1]
        only_known()
        np.testing.assert_array_equal(dispatch.matmul(*given), wanted)


def test_nor_is_one_of_a_bias_of_another_class(only_known: Any, serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a, b, bias = (array("torch", shape, 1) for shape in ((3, 4), (4, 5), (5,)))
    dispatch.forget()
    with serving(), torch.no_grad():
        for _ in range(2):
            dispatch.matmul(a, b, bias=bias)
        wanted = dispatch.matmul(a, b, bias=torch.nn.Parameter(bias))
        only_known()
        assert torch.equal(dispatch.matmul(a, b, bias=torch.nn.Parameter(bias)), wanted)


@pytest.mark.parametrize("kind", ["prepared", "scaled", "bias and activation trained"])
def test_nor_is_one_of_a_weight_in_another_form_or_of_training(kind: str, only_known: Any, serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a, b, bias = (array("torch", shape, 1) for shape in ((3, 4), (4, 5), (5,)))
    weight = {"prepared": dispatch.prepare, "scaled": lambda x: dispatch.quantize(x, "e4m3:row", axis=-2)}.get(kind)
    operand = torch.nn.Parameter(b) if weight is None else weight(b)
    bias = torch.nn.Parameter(bias)
    with serving():
        wanted = [dispatch.matmul(a, operand, bias=bias, activation="silu") for _ in range(2)][-1]
        only_known()
        found = dispatch.matmul(a, operand, bias=bias, activation="silu")
    assert torch.equal(found, wanted)
    assert found.requires_grad


def test_each_argument_has_a_part_in_the_key(framework: str, serving: Any) -> None:
    """Calls that differ in one argument, all known, in turns: none is served by another's plan."""
    a, b = array(framework, (3, 4), 1), array(framework, (4, 5), 2)
    exact = host(framework, a) @ host(framework, b)
    biases = {shape: array(framework, shape, 3) for shape in ((), (1,), (5,), (3, 1), (1, 5), (3, 5))}
    cases: list[tuple[dict[str, Any], Any]] = [({}, exact)]
    cases += [({"bias": x}, exact + host(framework, x)) for x in biases.values()]
    half = array(framework, (5,), 3, "float16")
    cases += [({"bias": half}, exact + host(framework, half))]
    cases += [({"activation": "relu"}, np.maximum(exact, 0))]
    cases += [({"activation": "relu", "bias": biases[(5,)]}, np.maximum(exact + host(framework, biases[(5,)]), 0))]
    with serving():
        for _ in range(3):
            for given, wanted in cases:
                found = dispatch.matmul(a, b, **given)
                np.testing.assert_array_equal(host(framework, found), wanted, err_msg=str(given.keys()))
            for name in ("float16", "float32"):
                room = dispatch.framework(framework)
                assert room.dtype_name(dispatch.matmul(a, b, out_dtype=name)) == name


def test_scopes_and_policies_keep_their_own_plans(framework: str) -> None:
    backend = FakeBackend("fast")
    a, b = array(framework, (3, 4), 1), array(framework, (4, 5), 2)
    rule = {"match": {"scope": "head"}, "backends": {"deny": ["fast"]}}
    open_, shut = (dispatch.load_policy("default").override(backends={"deny": deny}) for deny in ([], ["fast"]))
    with registered(backend), fake_timings({"fast": 1.0, "baseline": 100.0}), dispatch.use_policy(rules=[rule]):
        for _ in range(3):
            assert [dispatch.explain(a, b, scope=scope).backend == "fast" for scope in ("up", "head")] == [True, False]
            for given, served in (
                ({"scope": "up"}, True),
                ({"scope": "head"}, False),
                ({"policy": open_}, True),
                ({"policy": shut}, False),
            ):
                key = _api._key(_api.request(a, b, None, None, None), _options(**given))
                dispatch.matmul(a, b, **given)
                assert (_api._served.get(key) == "fast") == served, given


def _options(policy: Any = None, scope: str | None = None) -> Any:
    return _api._options(policy, None, scope)


def test_what_a_known_call_is_wrong_about_is_told_as_ever(framework: str) -> None:
    a, b, bias = array(framework, (3, 4), 1), array(framework, (4, 5), 2), array(framework, (5,), 3)
    with dispatch.use_policy(tuning={"mode": "off"}):
        for _ in range(2):
            dispatch.matmul(a, b, bias=bias)
        with pytest.raises(ValueError, match="bias has shape"):
            dispatch.matmul(a, b, bias=array(framework, (4,), 3))
        with pytest.raises(ValueError, match=r"activation \['relu'\] is unknown"):
            dispatch.matmul(a, b, bias=bias, activation=["relu"])  # type: ignore[arg-type]
        with pytest.raises(TypeError, match="bias is a list"):
            dispatch.matmul(a, b, bias=[1.0] * 5)
        with pytest.raises(TypeError, match="out_dtype"):
            dispatch.matmul(a, b, bias=bias, out_dtype={})
        with pytest.raises(dispatch.PolicyError):
            dispatch.matmul(a, b, bias=bias, policy="no such policy")
        with pytest.raises(dispatch.NoBackendError):
            dispatch.matmul(a, b, bias=bias, backend="no such backend")


@pytest.mark.parametrize("framework", ["numpy", "torch"], indirect=True)  # JAX compiles a plan once
def test_a_backend_that_fails_in_a_known_call_with_a_bias_is_replaced(framework: str, failing: Any) -> None:
    a, b, bias = array(framework, (3, 4), 1), array(framework, (4, 5), 2), array(framework, (5,), 3)
    wanted = [dispatch.matmul(a, b, bias=bias, scope="s") for _ in range(2)][-1]
    assert dispatch.explain(a, b, bias=bias, scope="s").backend == "failing"
    failing.errors["matmul"] = RuntimeError("the kernel failed")
    found = dispatch.matmul(a, b, bias=bias, scope="s")
    assert "the kernel failed" in dispatch.stats()["quarantined"]["failing"]
    np.testing.assert_array_equal(host(framework, found), host(framework, wanted))


def test_a_wide_out_dtype_that_jax_has_not_enabled_condemns_nobody(winner: Any) -> None:
    pytest.importorskip("jax")
    a, b = array("jax", (3, 4), 1), array("jax", (4, 5), 2)
    for _ in range(2):
        assert str(dispatch.matmul(a, b, out_dtype="float64").dtype) == "float32"
    assert dispatch.explain(a, b, out_dtype="float64").problem.out_dtype == "float32"
    assert dispatch.stats()["quarantined"] == {}


def test_a_scope_that_is_no_string_is_refused(framework: str) -> None:
    a, b = array(framework, (3, 4), 1), array(framework, (4, 5), 2)
    for call in (dispatch.matmul, dispatch.explain):
        with pytest.raises(TypeError, match=r"scope is 3; it has to be a string"):
            call(a, b, scope=3)
