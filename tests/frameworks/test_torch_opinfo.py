"""torch's own samples for matmul, mm, bmm, addmm and linear through dispatch: the results or errors are torch's."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import unittest
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest

import dispatch

torch = pytest.importorskip("torch")
if importlib.util.find_spec("expecttest") is None:  # a base class of torch's test cases, of which none runs here
    sys.modules["expecttest"] = ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase
methods = pytest.importorskip("torch.testing._internal.common_methods_invocations")

MOST = 12
"""Samples of one operator and dtype."""


def matmul(a: Any, b: Any) -> Any:
    return dispatch.matmul(a, b)


def addmm(bias: Any, a: Any, b: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if beta == alpha == 1 and not isinstance(beta, bool):
        return dispatch.matmul(a, b, bias=bias)
    scaled = alpha * dispatch.matmul(a, b)
    return scaled.to(bias.dtype) if beta == 0 else beta * bias + scaled


def linear(x: Any, weight: Any, bias: Any = None) -> Any:
    weight = weight.mT if weight.dim() > 1 else weight
    return dispatch.matmul(x, weight, bias=bias)


OURS: dict[str, Callable[..., Any]] = {
    "matmul": matmul,
    "mm": matmul,
    "bmm": matmul,
    "addmm": addmm,
    "nn.functional.linear": linear,
}
OPERATORS = {op.name: op for op in methods.op_db if op.name in OURS and not op.variant_test_name}
CASES = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, op in OPERATORS.items()
    for dtype in sorted(op.dtypes, key=str)
]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def _as_torch_warns() -> Iterator[None]:
    """Let torch warn of what its own samples do."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def samples(name: str, device: str, dtype: Any, grad: bool = False) -> list[Any]:
    """Return a bounded number of samples, spread over all that there are."""
    op = OPERATORS[name]
    found = list(op.sample_inputs(device, dtype, requires_grad=grad))
    return found[:: -(-len(found) // MOST)]


def outcome(call: Callable[..., Any], sample: Any) -> Any:
    """Return the result, or the error that there was."""
    try:
        return call(sample.input, *sample.args, **sample.kwargs)
    except Exception as error:
        return error


def agrees(found: Any, wanted: Any, sample: Any) -> None:
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)), (found, wanted, sample)
    else:
        assert not isinstance(found, Exception), (found, sample)
        rough = wanted.dtype in (torch.float16, torch.bfloat16)
        torch.testing.assert_close(found, wanted, **({"rtol": 2e-2, "atol": 1e-1} if rough else {}))


@devices
@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_forward(name: str, dtype: Any, device: str, serving: Any) -> None:
    op = OPERATORS[name]
    with serving():
        for sample in samples(name, device, dtype):
            agrees(outcome(OURS[name], sample), outcome(op.op, sample), sample)


@devices
@pytest.mark.parametrize(
    "shapes", [((3, 4), (3, 4)), ((2, 3, 4), (3, 4, 5)), ((), (4,)), ((4,), ()), ((3,), (4,))], ids=str
)
@pytest.mark.parametrize("dtypes", [("float32", "float32"), ("float32", "float64"), ("bool", "bool")], ids=str)
@pytest.mark.parametrize("name", ["matmul", "nn.functional.linear"])
def test_what_torch_refuses(name: str, dtypes: Any, shapes: Any, device: str, serving: Any) -> None:
    a, b = (torch.ones(x, device=device).to(getattr(torch, y)) for x, y in zip(shapes, dtypes, strict=True))
    sample = methods.SampleInput(a, args=(b if name == "matmul" or b.dim() < 2 else b.mT,))
    wanted = outcome(OPERATORS[name].op, sample)
    assert isinstance(wanted, Exception)
    with serving():
        agrees(outcome(OURS[name], sample), wanted, sample)


DIFFERENTIABLE = [
    pytest.param(name, dtype, id=f"{name}-{str(dtype).removeprefix('torch.')}")
    for name, op in OPERATORS.items()
    for dtype in sorted(op.supported_backward_dtypes("cpu"), key=str)
]


def inputs(sample: Any) -> list[Any]:
    return [x for x in (sample.input, *sample.args, *sample.kwargs.values()) if isinstance(x, torch.Tensor)]


@devices
@pytest.mark.parametrize(("name", "dtype"), DIFFERENTIABLE)
def test_backward(name: str, dtype: Any, device: str, serving: Any) -> None:
    op = OPERATORS[name]
    with serving():
        for sample in samples(name, device, dtype, grad=True):
            needing = [x for x in inputs(sample) if x.requires_grad]
            pairs = []
            for call in (OURS[name], op.op):
                out = outcome(call, sample)
                assert not isinstance(out, Exception), (out, sample)
                pairs.append(torch.autograd.grad(out, needing, torch.ones_like(out), allow_unused=True))
            for found, wanted in zip(*pairs, strict=True):
                agrees(found, wanted, sample)


@pytest.mark.filterwarnings("ignore")
@devices
@pytest.mark.parametrize(("name", "dtype"), DIFFERENTIABLE)
def test_forward_ad(name: str, dtype: Any, device: str, serving: Any) -> None:
    op, forward_ad = OPERATORS[name], torch.autograd.forward_ad
    with serving():
        for sample in itertools.islice(samples(name, device, dtype), 8):
            with forward_ad.dual_level():
                dual = sample.transform(
                    lambda x: forward_ad.make_dual(x, torch.ones_like(x)) if isinstance(x, torch.Tensor) else x
                )
                found, wanted = (
                    forward_ad.unpack_dual(call(dual.input, *dual.args, **dual.kwargs)) for call in (OURS[name], op.op)
                )
            agrees(found.primal, wanted.primal, sample)
            agrees(found.tangent, wanted.tangent, sample)
