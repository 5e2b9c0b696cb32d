"""Values, dtypes, shapes and errors of dispatch.matmul beside the framework's own, on drawn operands."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dispatch
from dispatch import FP8_DTYPES

FLOATS = ("float64", "float32", "float16", "bfloat16")
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
DTYPES = {
    "numpy": (*FLOATS, *FP8_DTYPES, *INTEGERS, "uint16", "uint32", "uint64", "bool", "complex64", "complex128"),
    "torch": (*FLOATS, *FP8_DTYPES, *INTEGERS, "bool", "complex64", "complex128"),
    "jax": ("float32", "float16", "bfloat16", *FP8_DTYPES, "int8", "uint8", "int32", "uint32", "bool", "complex64"),
}
LAYOUTS = {
    "numpy": ("packed", "transposed", "sliced", "offset", "expanded", "permuted", "negative"),
    "torch": ("packed", "transposed", "sliced", "offset", "expanded", "permuted"),
    "jax": ("packed",),
}
FRAMEWORKS = tuple(DTYPES)


@dataclass(frozen=True)
class Drawn:
    """One operand to make: small integers, so that every product of them is exact in every dtype and order."""

    shape: tuple[int, ...]
    dtype: str
    layout: str
    seed: int


@st.composite
def shape_pairs(draw: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shapes that multiply, mostly; else ones with something wrong."""
    sizes = st.sampled_from((0, 1, 2, 3, 4, 5)) if draw(st.integers(0, 4)) == 0 else st.integers(1, 5)
    m, n, k = (draw(sizes) for _ in range(3))
    batch = draw(st.lists(sizes, max_size=2))
    one, other = (
        [size if draw(st.integers(0, 3)) else 1 for size in batch[draw(st.integers(0, len(batch))) :]] for _ in "ab"
    )
    a = (k,) if not one and draw(st.integers(0, 2)) == 0 else (*one, m, k)
    b = (k,) if not other and draw(st.integers(0, 2)) == 0 else (*other, k, n)
    if draw(st.integers(0, 5)) == 0:
        wrong = draw(st.sampled_from(("k", "rank", "batch")))
        if wrong == "k":
            a = (*a[:-1], k + 1)
        elif wrong == "rank":
            a = ()
        else:
            a, b = (2, *a), (3, *b)
    return a, b


@st.composite
def operand_pairs(draw: Any, framework: str) -> tuple[Drawn, Drawn]:
    """Return two operands to make; mostly of one dtype."""
    names, layouts = st.sampled_from(DTYPES[framework]), st.sampled_from(LAYOUTS[framework])
    shape_a, shape_b = draw(shape_pairs())
    first = draw(names)
    second = first if draw(st.integers(0, 2)) else draw(names)
    seeds = st.integers(0, 9)
    return Drawn(shape_a, first, draw(layouts), draw(seeds)), Drawn(shape_b, second, draw(layouts), draw(seeds))


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def values(drawn: Drawn, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    random = np.random.default_rng(drawn.seed)
    signed = not drawn.dtype.startswith(("u", "b")) or drawn.dtype == "bfloat16"
    found = random.integers(-3 if signed else 0, 4, shape)
    if drawn.dtype.startswith("complex"):
        return (found + 1j * random.integers(-3, 4, shape)).astype("complex64")
    return found.astype(np.float32)


def make(framework: str, drawn: Drawn) -> Any:
    """Return the array: its layout made by views of a larger buffer."""

    def array(shape: tuple[int, ...]) -> Any:
        found = values(drawn, shape)
        if framework == "numpy":
            return found.astype(numpy_dtype(drawn.dtype))
        if framework == "torch":
            import torch

            return torch.from_numpy(np.asarray(found)).to(getattr(torch, drawn.dtype))
        import jax.numpy as jnp

        return jnp.asarray(found).astype(drawn.dtype)

    shape, rank = drawn.shape, len(drawn.shape)
    layout = drawn.layout if rank else "packed"
    if layout == "transposed" and rank > 1:
        made = array((*shape[:-2], shape[-1], shape[-2])).swapaxes(-1, -2)
    elif layout == "sliced":
        made = array((*shape[:-1], 2 * shape[-1]))[..., ::2]
    elif layout == "negative":
        made = array(shape)[..., ::-1]
    elif layout == "offset":
        made = array((math.prod(shape) + 1,))[1:].reshape(shape)
    elif layout == "expanded" and shape[0]:
        one = array((1, *shape[1:]))
        made = np.broadcast_to(one, shape) if framework == "numpy" else one.expand(shape)
    elif layout == "permuted":
        made = array(shape[::-1])
        made = made.T if framework == "numpy" else made.permute(*range(rank - 1, -1, -1))
    else:
        made = array(shape)
    assert tuple(made.shape) == shape
    return made


def own_numpy(a: Any, b: Any) -> Any:
    """Return np.matmul's result by our rules for the dtypes that NumPy knows nothing of."""
    names = [x.dtype.name for x in (a, b)]
    small = [name in FP8_DTYPES for name in names]
    wide = [name in FLOATS for name in names]
    if all(small):
        return np.asarray(np.matmul(a.astype("f4"), b.astype("f4"))).astype(ml_dtypes.bfloat16)[()]
    if any(small) and any(wide):
        a, b = (a.astype(b.dtype), b) if small[0] else (a, b.astype(a.dtype))
    out = np.matmul(a, b)
    with suppress(TypeError):  # that ml_dtypes has no common dtype
        if np.result_type(a.dtype, b.dtype) == ml_dtypes.bfloat16:
            out = np.asarray(out).astype(ml_dtypes.bfloat16)
    return out[()]


def own_torch(a: Any, b: Any) -> Any:
    import torch

    small = [str(x.dtype).removeprefix("torch.") in FP8_DTYPES for x in (a, b)]
    wide = [str(x.dtype).removeprefix("torch.") in FLOATS for x in (a, b)]
    if all(small):
        a, b = a.bfloat16(), b.bfloat16()
    elif any(small) and any(wide):
        a, b = (a.to(b.dtype), b) if small[0] else (a, b.to(a.dtype))
    return torch.matmul(a, b)


def own_jax(a: Any, b: Any) -> Any:
    import jax.numpy as jnp

    small = [x.dtype.name in FP8_DTYPES for x in (a, b)]
    wide = [x.dtype.name in FLOATS for x in (a, b)]
    if all(small):
        a, b = a.astype("bfloat16"), b.astype("bfloat16")
    elif any(small) and any(wide):
        a, b = (a.astype(b.dtype), b) if small[0] else (a, b.astype(a.dtype))
    return jnp.matmul(a, b)


OWN: dict[str, Callable[[Any, Any], Any]] = {"numpy": own_numpy, "torch": own_torch, "jax": own_jax}


def outcome(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the result, or the error."""
    try:
        return call(*args, **kwargs)
    except Exception as error:
        return error


def same(framework: str, found: Any, wanted: Any) -> None:
    """Compare two outcomes."""
    if isinstance(wanted, Exception):
        assert isinstance(found, type(wanted)), f"{found!r} instead of {wanted!r}"
        return
    assert not isinstance(found, Exception), f"raised {found!r}" if isinstance(found, Exception) else ""
    room = dispatch.framework(framework)
    assert type(found) is type(wanted)
    assert found.dtype == wanted.dtype
    assert tuple(found.shape) == tuple(wanted.shape)
    np.testing.assert_array_equal(room.to_numpy(found), room.to_numpy(wanted), strict=True)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_matmul_is_the_frameworks_own(framework: str, serving: Any) -> None:
    pytest.importorskip(framework)
    with serving() as winner:
        examples = 100 if framework != "jax" else 15 if winner else 40  # JAX compiles for each

        @settings(max_examples=examples, deadline=None)
        @given(operand_pairs(framework))
        def run(pair: tuple[Drawn, Drawn]) -> None:
            a, b = (make(framework, drawn) for drawn in pair)
            before = [dispatch.framework(framework).to_numpy(x).copy() for x in (a, b)]
            wanted, found = outcome(OWN[framework], a, b), outcome(dispatch.matmul, a, b)
            same(framework, found, wanted)
            again = outcome(dispatch.matmul, a, b)  # known by now
            same(framework, again, wanted)
            for x, kept in zip((a, b), before, strict=True):
                np.testing.assert_array_equal(dispatch.framework(framework).to_numpy(x), kept)
            kinds = {x.dtype for x in pair}
            odd = framework == "torch" and ("bool" in kinds or len(kinds) > 1)  # it takes two dtypes of zero sizes
            if winner and not odd and not isinstance(wanted, Exception):
                own = 0 in (*a.shape, *b.shape) or any(x.dtype.startswith(("bool", "complex")) for x in pair)
                assert dispatch.explain(a, b).backend == ("bf16_fallback" if own else "winner")

        run()


NUMPY_ONLY = ("U1", "datetime64[s]", "i4,f4")


@pytest.mark.parametrize("dtype", NUMPY_ONLY)
def test_numpy_dtypes_without_a_product_raise_numpys_error(dtype: str, serving: Any) -> None:
    a = np.zeros((2, 2), dtype)
    with serving():
        wanted = outcome(np.matmul, a, a)
        assert isinstance(wanted, TypeError)
        assert type(outcome(dispatch.matmul, a, a)) is type(wanted)


def test_numpy_objects_are_numpys_own_business(serving: Any) -> None:
    a = np.array([[1, 2], [3, 4]], object)
    with serving():
        found = dispatch.matmul(a, a)
    assert found.dtype == object
    assert found.tolist() == [[7, 10], [15, 22]]


def test_numpy_subclasses_keep_their_own_product(serving: Any) -> None:
    masked = np.ma.masked_array(np.eye(3), mask=np.eye(3) > 0)
    with serving():
        assert type(dispatch.matmul(masked, masked)) is type(np.matmul(masked, masked))


@pytest.mark.parametrize("shape", [(3,), (3, 3), (2, 3, 3)])
def test_torch_bool_raises_a_type_error_that_names_it(shape: tuple[int, ...], serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a = torch.ones(shape, dtype=torch.bool)
    with serving(), pytest.raises(TypeError, match="bool") as caught:
        dispatch.matmul(a, a)
    assert isinstance(caught.value, RuntimeError)
    with serving(), pytest.raises(TypeError, match="bool"):
        dispatch.matmul(a, a.float())


@pytest.mark.parametrize(("one", "other"), [("numpy", "torch"), ("torch", "jax"), ("jax", "numpy")])
def test_arrays_of_two_frameworks_are_named(one: str, other: str, serving: Any) -> None:
    pytest.importorskip(one)
    pytest.importorskip(other)
    drawn = Drawn((2, 2), "float32", "packed", 0)
    a, b = make(one, drawn), make(other, drawn)
    with serving():
        dispatch.matmul(a, a)  # a known call of the same types and shapes beforehand
        for pair in ((a, b), (b, a)):
            with pytest.raises(dispatch.MixedArraysError, match=rf"(?s)(?=.*{one})(?=.*{other})") as caught:
                dispatch.matmul(*pair)
            assert isinstance(caught.value, TypeError)
        with pytest.raises(dispatch.MixedArraysError, match="bias"):
            dispatch.matmul(a, a, bias=b)


def test_tensors_on_two_devices_are_named(serving: Any) -> None:
    torch = pytest.importorskip("torch")
    a, b = torch.ones(2, 2), torch.ones(2, 2, device="meta")
    with serving():
        for pair in ((a, b), (b, a)):
            with pytest.raises(dispatch.MixedArraysError, match=r"(?s)(?=.*cpu)(?=.*meta)"):
                dispatch.matmul(*pair)


@pytest.mark.parametrize("given", [[[1.0]], 2.0, None, "text"])
def test_what_is_no_array_is_named(given: Any) -> None:
    for pair in ((given, np.eye(1)), (np.eye(1), given)):
        with pytest.raises(TypeError, match=type(given).__name__):
            dispatch.matmul(*pair)


@pytest.mark.parametrize("layout", LAYOUTS["torch"])
def test_torch_results_are_as_contiguous_and_differentiable_as_torchs(layout: str, serving: Any) -> None:
    torch = pytest.importorskip("torch")
    with serving():
        for shape_a, shape_b in (((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5))):
            a, b = (make("torch", Drawn(shape, "float32", layout, 1)) for shape in (shape_a, shape_b))
            for grads in ((False, False), (True, False), (False, True)):
                x, y = (t.detach().requires_grad_(grad) for t, grad in zip((a, b), grads, strict=True))
                found, wanted = dispatch.matmul(x, y), torch.matmul(x, y)
                assert found.requires_grad == wanted.requires_grad
                assert found.stride() == wanted.stride()
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)


@pytest.mark.parametrize("other", ["complex64", "int32", "bool"])
@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_fp8_beside_what_is_no_float_is_the_frameworks_own(framework: str, other: str, serving: Any) -> None:
    pytest.importorskip(framework)
    a, b = (make(framework, Drawn((2, 2), dtype, "packed", 1)) for dtype in ("float8_e4m3fn", other))
    with serving():
        for pair in ((a, b), (b, a)):
            same(framework, outcome(dispatch.matmul, *pair), outcome(OWN[framework], *pair))
