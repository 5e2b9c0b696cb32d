"""Weights that change in place, and memory that is used again: no product is ever of old values."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import dispatch


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_a_torch_weight_changed_by_any_road_is_seen(torch_kit, route, dtype):
    """B88 (NVIDIA-NeMo/Automodel#3606, NVIDIA/Megatron-LM#5642): optimizer, copy_, .data, set_, load_state_dict."""
    torch = pytest.importorskip("torch")
    kind = getattr(torch, dtype)
    layer = torch.nn.Linear(16, 16, bias=False, dtype=kind)
    w = layer.weight
    x = torch.ones(4, 16, dtype=kind)
    with torch.no_grad():
        w.fill_(1.0)

    def value():
        return route.matmul(x, w.t()).float()[0, 0].item()

    assert value() == 16
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()
    assert value() == 0
    with torch.no_grad():
        w.copy_(torch.full_like(w, 2.0))
    assert value() == 32
    w.data.fill_(3.0)
    assert value() == 48
    w.data = torch.full_like(w, 4.0)
    assert value() == 64
    layer.load_state_dict({"weight": torch.full((16, 16), 5.0)})
    assert value() == 80
    with torch.no_grad():
        w.set_(torch.full_like(w, 6.0))
    assert value() == 96


def test_a_numpy_alias_of_a_tensor_is_seen(torch_kit, route):
    """B88: foreign writes move no version."""
    torch = pytest.importorskip("torch")
    n = np.ones((8, 8), np.float16)
    t, x = torch.from_numpy(n), torch.ones(2, 8, dtype=torch.float16)
    for value in (1, 5, 7):
        n[:] = value
        assert route.matmul(x, t)[0, 0].item() == 8 * value


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_a_numpy_array_written_in_place_is_seen(numpy_kit, route, dtype):
    """B88's kind in NumPy: the array itself, and a view of it."""
    w = numpy_kit.array(np.ones((8, 8)), dtype)
    x = numpy_kit.array(np.ones((2, 8)), dtype)
    for value in (1, 5, 7):
        w[:] = value
        assert (numpy_kit.wide(route.matmul(x, w)) == 8 * value).all()
        assert (numpy_kit.wide(route.matmul(x, w.T)) == 8 * value).all()


def test_memory_used_again_brings_no_old_weight(kit, route):
    """B89 (CrispStrobe/CrispASR#244): a freed array's address is given to another weight."""
    x = kit.array(np.ones((4, 64)), "bfloat16")
    for i in range(20):
        w = kit.array(np.full((64, 64), float(i % 4)), "bfloat16")
        assert (kit.wide(route.matmul(x, w)) == 64 * (i % 4)).all(), i
        del w
        gc.collect(0)


def test_prepared_weights_follow_versions_and_addresses(torch_kit, route):
    """B88, B89: a prepared weight changed in place, and new weights at old addresses."""
    torch = pytest.importorskip("torch")
    x = torch.ones(4, 32, dtype=torch.bfloat16)
    w = torch.nn.Parameter(torch.ones(32, 32, dtype=torch.bfloat16))
    prepared = dispatch.prepare(w)
    with torch.no_grad():
        for value in (1, 2, 3):
            w.fill_(value)
            assert (route.matmul(x, prepared) == 32 * value).all()
    for i in range(1, 8):
        other = dispatch.prepare(torch.full((32, 32), float(i), dtype=torch.bfloat16))
        assert (route.matmul(x, other) == 32 * i).all()
        del other


def test_a_prepared_operand_is_taken_on_both_sides(kit, route):
    """Prepared or not, the same product, also right after a plain call of the same shapes."""
    a, b = kit.normal(6, 8, dtype="bfloat16"), kit.normal(8, 4, dtype="bfloat16", seed=1)
    kit.close(a, b, route.matmul(a, b))
    for x, y in ((a, dispatch.prepare(b)), (dispatch.prepare(a), b), (dispatch.prepare(a), dispatch.prepare(b))):
        for _ in range(2):
            kit.close(a, b, route.matmul(x, y))


@pytest.mark.parametrize("shape", [(8,), (3, 2, 8)], ids=str)
def test_prepared_operands_of_other_ranks(kit, route, shape):
    """A prepared vector and a prepared stack multiply as their arrays do."""
    a, b = kit.normal(*shape, dtype="bfloat16"), kit.normal(8, 4, dtype="bfloat16", seed=1)
    for x, y in ((dispatch.prepare(a), b), (dispatch.prepare(a), dispatch.prepare(b))):
        kit.close(a, b, route.matmul(x, y))
