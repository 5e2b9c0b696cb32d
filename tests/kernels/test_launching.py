"""Launches whose arguments are bound once: what Triton's C launcher is handed, call by call, without a GPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="Triton is not installed")
launching = pytest.importorskip("dispatch.kernels.launching")
pytestmark = pytest.mark.triton

import triton.language as tl  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

X, Y, Z = 0, 3, 5
ADDRESSES = [64, 80, 96, 112, 128, 144]
FIRST = 13
"""Where the kernel's own arguments begin in a call of the launcher."""


class Kernel:
    """A kernel that keeps how the JIT was called."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.signature = SimpleNamespace(parameters={})

    def __getitem__(self, grid: Any) -> Any:
        return lambda *arguments, **options: self.calls.append((grid, arguments, options))

    def warmup(self, *arguments: Any, **options: Any) -> Any:
        raise AssertionError("compiled for the launcher")


def array(slot: int, *shape: int) -> Any:
    return launching.Array(slot, tl.bfloat16, shape)


def described(slot: int) -> Any:
    x = array(slot, 32, 64)
    return TensorDescriptor(x, list(x.shape), list(x.strides), [16, 32])


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The tensor maps that were encoded: slot, facts and address."""
    made: list[Any] = []

    def encoder(argument: Any, facts: Any) -> Any:
        return lambda address: made.append((argument.base.slot, facts, address)) or made[-1]

    monkeypatch.setattr(launching, "_encoder", encoder)
    return made


def bound(*arguments: Any, facts: Any = ()) -> tuple[Any, list[Any], Kernel]:
    """Return a launch over arguments, the calls that its launcher is given, and its kernel."""
    calls: list[Any] = []
    run = SimpleNamespace(launch_cooperative_grid=False, launch_pdl=True)
    compiled = SimpleNamespace(run=run, function="function", packed_metadata="metadata")
    kernel = Kernel()
    call = launching._raw(
        kernel, (7,), arguments, {"num_warps": 4}, compiled, lambda *x: calls.append(list(x)), list(facts)
    )
    return call, calls, kernel


def test_the_launcher_is_given_grid_stream_and_the_address_of_each_slot() -> None:
    call, calls, kernel = bound(array(Y, 4, 8), 17, array(X, 4), None)
    call(99, ADDRESSES)
    call(98, [x + 16 for x in ADDRESSES])
    assert calls[0][:FIRST] == [7, 1, 1, 99, "function", False, True, None, None, "metadata", None, None, None]
    assert calls[0][FIRST:] == [ADDRESSES[Y], 17, ADDRESSES[X], None]
    assert calls[1][3] == 98
    assert calls[1][FIRST:] == [ADDRESSES[Y] + 16, 17, ADDRESSES[X] + 16, None]
    assert kernel.calls == []


def test_a_tensor_map_is_encoded_anew_for_an_address_and_kept(encoded: list[Any]) -> None:
    call, calls, _ = bound(described(X), array(Z, 4), described(Y), facts=("of x", "of y"))
    for shift in (0, 16, 0):
        call(0, [x + shift for x in ADDRESSES])
    of_x, of_y = [(X, "of x", ADDRESSES[X] + s) for s in (0, 16)], [(Y, "of y", ADDRESSES[Y] + s) for s in (0, 16)]
    assert encoded == [of_x[0], of_y[0], of_x[1], of_y[1]]
    for seen, index in zip(calls, (0, 1, 0), strict=True):
        assert seen[FIRST:] == [
            of_x[index],
            32,
            64,
            64,
            1,
            calls[0][FIRST + 5] + 16 * index,
            of_y[index],
            32,
            64,
            64,
            1,
        ]


def test_no_more_maps_are_kept_than_there_is_room_for(encoded: list[Any]) -> None:
    call, calls, _ = bound(described(X), facts=("of x",))
    for address in range(16, 16 * (launching.MAPS_KEPT + 3), 16):
        call(0, [address] * 6)
        assert calls[-1][FIRST] == (X, "of x", address)
    call(0, [16] * 6)
    assert encoded[-1] == (X, "of x", 16), "it was forgotten"


def test_a_profiler_s_hooks_see_the_call_of_the_jit() -> None:
    call, calls, kernel = bound(array(Y, 4), 17)
    hook = triton.knobs.runtime.launch_exit_hook
    hook.add(print)
    try:
        call(99, ADDRESSES)
    finally:
        hook.remove(print)
    assert calls == []
    ((grid, (placed, number), options),) = kernel.calls
    assert (grid, placed.data_ptr(), number, options) == ((7,), ADDRESSES[Y], 17, {"num_warps": 4})


def test_another_triton_is_called_by_its_jit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton, "__version__", "3.7.1")
    kernel = Kernel()
    launching.bind(kernel, (7, 1), [described(X), 5], {"num_warps": 4})(99, ADDRESSES)
    ((grid, (descriptor, number), options),) = kernel.calls
    assert (grid, descriptor.base.data_ptr(), number, options) == ((7, 1), ADDRESSES[X], 5, {"num_warps": 4})
    assert (descriptor.shape, descriptor.block_shape) == ([32, 64], [16, 32])


def _wrapped(launcher: Any, tensordesc_meta: Any) -> Any:
    def launch(*arguments: Any) -> Any:
        return launcher(*arguments), tensordesc_meta

    return launch


@pytest.mark.parametrize(
    ("run", "found"),
    [
        ({"launch": min}, (min, [])),
        ({"launch": _wrapped(min, [{"swizzle": 3}])}, (min, [{"swizzle": 3}])),
        ({"launch": _wrapped(min, [None])}, None),
        ({"launch": lambda: None}, None),
        ({"launch": min, "global_scratch_size": 16}, None),
        ({"launch": min, "profile_scratch_size": 16}, None),
        ({}, None),
    ],
)
def test_a_launcher_that_is_not_the_known_one_is_not_used(run: dict[str, Any], found: Any) -> None:
    facts = {"global_scratch_size": 0, "profile_scratch_size": 0, **run}
    assert launching._raw_launcher(SimpleNamespace(run=SimpleNamespace(**facts))) == found
