"""What a room says of its arrays: layout, alignment, key, device, conversions, and work set apart."""

from __future__ import annotations

import math
import os
import warnings
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import dispatch
from dispatch import FP8_DTYPES
from dispatch.frameworks._layout import layout_of

FRAMEWORKS = ("numpy", "torch", "jax")
DTYPES = (
    *("float64", "float32", "float16", "bfloat16", *FP8_DTYPES),
    *("int8", "uint8", "int16", "int32", "int64", "bool", "complex64", "complex128"),
)


@pytest.fixture(params=FRAMEWORKS)
def room(request: pytest.FixtureRequest) -> Any:
    """Each installed framework's room."""
    pytest.importorskip(request.param)
    return dispatch.framework(request.param)


@pytest.fixture
def x64(room: Any) -> Any:
    """64-bit dtypes in JAX."""
    if room.name != "jax":
        yield
        return
    import jax

    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(
    ("shape", "strides", "address", "wanted"),
    [
        ((4, 8), (32, 4), 0, ("row", 16)),
        ((4, 8), (4, 16), 0, ("col", 16)),
        ((4, 8), (64, 8), 0, ("strided", 8)),
        ((4, 8), (32, 4), 4, ("row", 4)),
        ((4, 8), (32, 4), 2, ("row", 2)),
        ((4, 8), (32, -4), 0, ("strided", 4)),
        ((4, 8), (-32, 4), 0, ("row", 16)),
        ((3, 4, 8), (100, 32, 4), 0, ("row", 4)),
        ((3, 4, 8), (0, 32, 4), 0, ("row", 16)),
        ((4, 8), (0, 4), 0, ("row", 16)),
        ((4, 8), (4, 0), 0, ("col", 16)),
        ((1, 8), (7, 4), 0, ("row", 16)),
        ((4, 1), (4, 7), 0, ("row", 4)),
        ((4, 1), (32, 7), 0, ("row", 16)),
        ((1, 8), (7, 32), 0, ("col", 16)),
        ((1, 4, 8), (3, 32, 4), 0, ("row", 16)),
        ((1, 1), (3, 5), 0, ("row", 16)),
    ],
)
def test_layout_of(shape: Any, strides: Any, address: int, wanted: Any) -> None:
    assert layout_of(shape, strides, 4, address) == wanted


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0, 2), (2, 1, 3)], ids=str)
def test_values_come_back_as_they_went(room: Any, x64: Any, dtype: str, shape: Any) -> None:
    values = np.arange(math.prod(shape)).reshape(shape).astype(getattr(ml_dtypes, dtype, dtype))
    there = room.asarray(values, room.normal((1,), "float32", 0))
    assert room.dtype_name(there) == dtype
    assert tuple(there.shape) == shape
    back = room.to_numpy(there)
    assert back.dtype == values.dtype
    assert back.tobytes() == values.tobytes()
    assert room.name_of_dtype(there.dtype) == room.name_of_dtype(dtype) == dtype
    assert room.is_array_type(type(there))


def test_strided_and_read_only_values_convert(room: Any) -> None:
    like = room.normal((1,), "float32", 0)
    for values in (np.arange(12.0, dtype="f4").reshape(3, 4).T, np.arange(6.0, dtype="f4")[::-2]):
        np.testing.assert_array_equal(room.to_numpy(room.asarray(values, like)), values)
    frozen = np.arange(3.0, dtype="f4")
    frozen.flags.writeable = False
    np.testing.assert_array_equal(room.to_numpy(room.asarray(frozen, like)), frozen)


def test_a_tensors_strides_convert() -> None:
    torch = pytest.importorskip("torch")
    room = dispatch.framework("torch")
    for made in (torch.arange(6.0).reshape(2, 3).mT, torch.arange(6.0)[1::2], torch.ones(1, 2).expand(3, 2)):
        for dtype in (torch.float32, torch.bfloat16, torch.float8_e4m3fn):
            given = made.to(dtype)
            np.testing.assert_array_equal(room.to_numpy(given).astype("f4"), given.float().numpy())
    np.testing.assert_array_equal(room.to_numpy(torch.ones(2, requires_grad=True)), [1, 1])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_a_tensor_whose_values_were_read_can_still_be_resized(dtype: str) -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = torch.ones(4, 6).to(getattr(torch, dtype))
    dispatch.framework("torch").to_numpy(values)[...] = 0
    assert (values.float() == 1).all()
    values.untyped_storage().resize_(0)  # as FSDP does


def test_a_tensor_that_is_negated_or_conjugated_when_read_converts() -> None:
    torch = pytest.importorskip("torch", reason="torch is not installed")
    values = torch.tensor([[1 + 2j, 3 - 4j]])
    for x in (values.conj(), values.conj().imag, torch._neg_view(values.real)):
        wanted = np.asarray(x.resolve_conj().resolve_neg().tolist())
        np.testing.assert_array_equal(dispatch.framework("torch").to_numpy(x), wanted)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", *FP8_DTYPES, "int8", "uint8", "int32"])
def test_normal_is_random_and_repeats(room: Any, dtype: str) -> None:
    one, again, other = (room.to_numpy(room.normal((64, 64), dtype, seed)) for seed in (1, 1, 2))
    assert one.dtype.name == dtype
    assert one.tobytes() == again.tobytes() != other.tobytes()
    wide = one.astype(np.float64)
    if "int" in dtype:
        assert set(np.unique(wide)) <= set(range(8))
    else:
        assert abs(wide.mean()) < 0.1
        assert 0.9 < wide.std() < 1.1


def test_random_numbers_of_the_user_are_left_alone() -> None:
    torch = pytest.importorskip("torch")
    before, legacy = torch.random.get_rng_state(), np.random.get_state()[1].copy()
    for name in ("torch", "numpy"):
        dispatch.framework(name).normal((4, 4), "float32", 3)
    assert torch.equal(torch.random.get_rng_state(), before)
    np.testing.assert_array_equal(np.random.get_state()[1], legacy)


def test_a_sample_has_shape_dtype_and_layout_of_its_operands(room: Any) -> None:
    a, b = room.normal((4, 6), "float32", 0), room.normal((6, 5), "bfloat16", 1)
    if room.name != "jax":
        a = room.xp.swapaxes(room.normal((6, 4), "float32", 0), -1, -2)
    found = room.sample(None, a, b, 7)
    for made, given in zip(found, (a, b), strict=True):
        assert tuple(made.shape) == tuple(given.shape)
        assert replace(room.operand(made), alignment=1) == replace(room.operand(given), alignment=1)
        assert room.device(made) == room.device(given)
        assert room.to_numpy(made).tobytes() != room.to_numpy(given).tobytes()


def test_a_sample_of_expanded_and_overlapping_tensors() -> None:
    torch = pytest.importorskip("torch")
    room = dispatch.framework("torch")
    expanded = torch.ones(1, 6).expand(4, 6)
    overlapping = torch.ones(20).as_strided((6, 5), (2, 1))
    for made, given in zip(room.sample(None, expanded, overlapping, 0), (expanded, overlapping), strict=True):
        assert made.shape == given.shape
    assert room.sample(None, expanded, overlapping, 0)[0].stride() == expanded.stride()


def test_devices_have_names(room: Any) -> None:
    x = room.normal((2, 2), "float32", 0, None if room.name == "numpy" else "cpu")
    assert room.device(x) == "cpu"
    assert room.arch(x) in room.archs()
    assert room.clash([x, x]) is None


def test_an_unknown_dtype_is_a_type_error(room: Any) -> None:
    with pytest.raises(TypeError):
        room.dtype("float23")
    with pytest.raises(TypeError):
        room.name_of_dtype("float23")


class TestKey:
    """What a plan depends on."""

    def test_shapes_dtypes_and_extra_count(self, room: Any) -> None:
        a, b, c = (room.normal(shape, "float32", 0) for shape in ((3, 4), (4, 5), (4, 6)))
        half = room.normal((4, 5), "float16", 0)
        keys = {room.key(a, b), room.key(a, c), room.key(a, half), room.key(a, b, "policy")}
        assert len(keys) == 4
        assert None not in keys
        assert room.key(room.normal((3, 4), "float32", 1), b) == room.key(a, b)

    def test_what_is_no_array_of_the_room_has_none(self, room: Any) -> None:
        a = room.normal((2, 2), "float32", 0)
        for other in ([[1.0]], 1.0, None, object()):
            assert room.key(a, other) is None

    def test_numpy_layouts_count(self) -> None:
        room, a = dispatch.framework("numpy"), np.ones((3, 3))
        laid = (a.T, a[::-1], np.ones((3, 6))[:, ::2])
        assert len({room.key(a, a), *(room.key(x, a) for x in laid), *(room.key(a, x) for x in laid)}) == 7
        assert room.key(np.ma.masked_array(a), a) is None

    def test_torch_layouts_gradients_devices_and_autocast_count(self) -> None:
        torch = pytest.importorskip("torch")
        room, a = dispatch.framework("torch"), torch.ones(3, 3)
        wanted = torch.ones(3, 3, requires_grad=True)
        keys = {room.key(a, a), room.key(wanted, a)}
        for x in (a.mT, torch.ones(3, 6)[:, ::2]):
            keys |= {room.key(x, a), room.key(a, x)}
        with torch.autocast("cpu", torch.bfloat16):
            keys.add(room.key(a, a))
        keys.add(room.key(a, a.to("meta")))
        assert len(keys) == 8
        with torch.no_grad():
            assert room.key(wanted, a) == room.key(a, a)
        assert room.key(torch.nn.Parameter(a, requires_grad=False), a) == room.key(a, a)

    def test_torch_strides_of_dimensions_of_one_say_nothing(self) -> None:
        torch = pytest.importorskip("torch")
        room, b = dispatch.framework("torch"), torch.ones(8, 8)
        keys = {room.key(torch.ones(64).as_strided((1, 8), (step, 1)), b) for step in (1, 7, 8)}
        assert len(keys) == 1
        facts = {room.operand(torch.ones(64).as_strided((1, 8), (step, 1))).layout for step in (1, 7, 8)}
        assert facts == {"row"}

    def test_torch_has_none_where_something_else_interprets(self) -> None:
        torch = pytest.importorskip("torch")
        room, a, found = dispatch.framework("torch"), torch.ones(3, 3), []
        torch.func.vmap(lambda x: found.append(room.key(x, a)) or x)(torch.ones(2, 3, 3))
        with torch.autograd.forward_ad.dual_level():
            found.append(room.key(a, a))
        with torch._subclasses.fake_tensor.FakeTensorMode():
            found.append(room.key(torch.ones(3, 3), torch.ones(3, 3)))
        found.append(room.key(a.to_sparse(), a))
        found.append(room.key(a, a.as_subclass(type("Own", (torch.Tensor,), {}))))
        assert found == [None] * 5

    def test_jax_has_one_under_every_trace(self) -> None:
        jax = pytest.importorskip("jax")
        room, found = dispatch.framework("jax"), []
        a = jax.numpy.ones((3, 3))
        jax.jit(lambda x: found.append(room.key(x, a)) or x)(a)
        assert None not in found
        assert found[0] != room.key(a, a)


def test_what_numpy_measures_says_nothing_of_overflow_and_leaves_the_callers_settings() -> None:
    with np.errstate(all="raise"):
        before = np.geterr()
        huge = np.full((2, 2), 6e4, np.float16)
        assert np.isinf(dispatch.framework("numpy").isolated(lambda: huge * huge)).all()
        assert np.geterr() == before


def test_what_torch_multiplies_by_a_rule_of_its_own_takes_nothing_beside() -> None:
    torch = pytest.importorskip("torch")
    parts = [torch.ones(2, 3), torch.ones(4, 3)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's nested tensors are a prototype
        a, b = torch.nested.nested_tensor(parts), torch.nested.nested_tensor([x.mT for x in parts])
        assert torch.equal(dispatch.matmul(a, b)[1], torch.full((4, 4), 3.0))
    with pytest.raises(TypeError, match="torch multiplies these by a rule of its own: there is nothing to choose"):
        dispatch.explain(a, b)
    for extra in ({"activation": "relu"}, {"bias": torch.ones(2)}, {"out_dtype": torch.float16}):
        with pytest.raises(TypeError, match="multiplies these by a rule of its own: no bias, activation or out_dtype"):
            dispatch.matmul(a, b, **extra)


def test_what_changes_a_product_of_numpys_is_among_its_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    room, x = dispatch.framework("numpy"), np.ones((2, 2))
    before = room.versions(x)
    assert before["numpy"] == np.__version__
    assert before["blas"] not in ("", "unknown")
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        with monkeypatch.context() as patched:
            patched.setenv(name, "61")
            assert room.versions(x) != before
    if hasattr(os, "sched_getaffinity"):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(97)))
        assert room.versions(x) != before


def test_flags_that_change_a_product_of_torchs_are_among_its_versions() -> None:
    torch = pytest.importorskip("torch")
    room, x = dispatch.framework("torch"), torch.ones(2, 2)
    before = room.versions(x)
    changes = {
        "deterministic": (torch.use_deterministic_algorithms, True, False),
        "float32_precision": (torch.set_float32_matmul_precision, "high", torch.get_float32_matmul_precision()),
        "threads": (torch.set_num_threads, torch.get_num_threads() + 1, torch.get_num_threads()),
    }
    for name, (change, value, own) in changes.items():
        change(value)
        try:
            after = room.versions(x)
        finally:
            change(own)
        assert {key for key in before if before[key] != after[key]} == {name}
    assert room.versions(x) == before


class TestIsolated:
    """Work that no trace, gradient or thread-local setting of the caller reaches."""

    def test_results_and_errors_come_back(self, room: Any) -> None:
        assert room.isolated(lambda: 5) == 5
        with pytest.raises(KeyError, match="mine"):
            room.isolated(lambda: {}["mine"])

    def test_torch_without_gradients_inference_and_autocast(self) -> None:
        torch = pytest.importorskip("torch")
        room = dispatch.framework("torch")
        a = torch.ones(2, 2, requires_grad=True)
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            out = room.isolated(lambda: a.detach() @ a.detach())
        assert (out.dtype, out.is_inference(), out.requires_grad) == (torch.float32, False, False)
        assert not room.isolated(lambda: a @ a).requires_grad

    def test_jax_outside_of_every_trace_with_the_callers_settings(self) -> None:
        jax = pytest.importorskip("jax")
        room, found = dispatch.framework("jax"), []

        def traced(x: Any) -> Any:
            found.append(room.isolated(lambda: jax.numpy.ones((2,)) + 1))
            return x

        jax.jit(jax.vmap(traced))(jax.numpy.ones((2, 2)))
        np.testing.assert_array_equal(np.asarray(found[0]), [2, 2])
        with jax.enable_x64(True), jax.default_matmul_precision("highest"):
            wide = room.isolated(lambda: (jax.numpy.ones(1).dtype.name, jax.config.jax_default_matmul_precision))
        assert wide == ("float64", "highest")
