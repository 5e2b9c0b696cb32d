"""Views, transposes, expanded, overlapping, negative and misaligned operands."""

from __future__ import annotations

import numpy as np
import pytest

import dispatch

DTYPES = ["bfloat16", "float16"]


def poisoned(kit, m, n, seed, dtype):
    """Return an (m, n) view of a buffer whose other values are huge."""
    parent = np.full((2 * m, 2 * n), 1e4)
    parent[:m, :n] = np.random.default_rng(seed).standard_normal((m, n))
    return kit.array(parent, dtype)[:m, :n]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [8, 37])
def test_slices_of_wider_buffers_keep_their_strides(kit, route, size, dtype):
    """B14 (vllm-project/vllm#55534): leading strides that no shape tells."""
    a, b = poisoned(kit, size, size, 0, dtype), poisoned(kit, size, size, 1, dtype)
    for x, y in ((a, b), (a, b.T), (a.T, b), (a.T, b.T)):
        kit.close(x, y, route.matmul(x, y))


TORCH_LAYOUTS = {
    "gap": lambda t, x: t.as_strided(x, (64, 64), (65, 1)),
    "odd offset": lambda t, x: x[1 : 1 + 64 * 64].view(64, 64),
    "transposed odd": lambda t, x: x[: 63 * 64].view(63, 64).t(),
    "one row, free stride": lambda t, x: t.as_strided(x, (1, 64), (3, 1)),
    "huge free stride": lambda t, x: t.as_strided(x, (1, 64), (10**12, 1)),
    "overlapping": lambda t, x: t.as_strided(x, (48, 64), (1, 2)),
    "overlapping rows": lambda t, x: t.as_strided(x, (48, 64), (3, 1)),
    "expanded row": lambda t, x: x[:64].view(1, 64).expand(48, 64),
    "expanded column": lambda t, x: x[:48].view(48, 1).expand(48, 64),
    "expanded scalar": lambda t, x: x[:1].view(1, 1).expand(48, 64),
    "every other": lambda t, x: x[: 40 * 128].view(40, 128)[::2, ::2],
    "narrow": lambda t, x: x[: 40 * 70].view(40, 70)[:, 3:67],
    "permuted batch": lambda t, x: x[: 2 * 3 * 64].view(3, 2, 64).permute(1, 0, 2),
    "permuted inside": lambda t, x: x[: 2 * 3 * 64].view(2, 64, 3).transpose(1, 2),
    "expanded batch": lambda t, x: x[: 3 * 64].view(1, 3, 64).expand(5, 3, 64),
    "negative bit": lambda t, x: t._neg_view(x[: 40 * 64].view(40, 64)),
}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", TORCH_LAYOUTS)
def test_torch_layouts(torch_kit, route, layout, dtype):
    """B16 (flagos-ai/FlagGems#4471), B20 (huggingface/candle#3744): each layout equals its packed copy."""
    torch = pytest.importorskip("torch")
    base = torch_kit.normal(80 * 80, dtype=dtype)
    x = TORCH_LAYOUTS[layout](torch, base)
    k = x.shape[-1]
    w = torch_kit.normal(k, 24, dtype=dtype, seed=1)
    before = base.clone()
    for a, b in ((x, w), (w.t(), x.mT)):
        out = route.matmul(a, b)
        torch_kit.close(a.resolve_neg(), b.resolve_neg(), out)
        assert out.stride() == torch.matmul(a, b).stride()
    assert torch.equal(base, before)


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
@pytest.mark.parametrize("make", ["fortran", "negative", "strided", "overlapping", "expanded", "read-only", "offset"])
def test_numpy_layouts(numpy_kit, route, make, dtype):
    """B53 (jax-ml/ml_dtypes#81): read-only, negative-stride, Fortran and overlapping arrays."""
    x = numpy_kit.normal(20, 24, dtype=dtype)
    lib = np.lib.stride_tricks
    a = {
        "fortran": lambda: np.asfortranarray(x),
        "negative": lambda: x[::-1, ::-1],
        "strided": lambda: x[::2, ::3],
        "overlapping": lambda: lib.as_strided(x, (6, 12), (2 * x.itemsize, x.itemsize)),
        "expanded": lambda: np.broadcast_to(x[:1], (7, 24)),
        "read-only": lambda: lib.as_strided(x, x.shape, x.strides, writeable=False),
        "offset": lambda: np.frombuffer(b"\0" + x.tobytes(), x.dtype, x.size, offset=1).reshape(x.shape),
    }[make]()
    b = numpy_kit.normal(a.shape[-1], 5, dtype=dtype, seed=1)
    before = x.copy()
    for left, right in ((a, b), (b.T, a.T)):
        numpy_kit.close(left, right, route.matmul(left, right))
    assert np.array_equal(x, before)


@pytest.mark.parametrize("order", [">", "<"])
@pytest.mark.parametrize("kind", ["f2", "f4", "f8", "i2", "i4"])
def test_foreign_byte_order(route, kind, order):
    """B53 (pytorch/pytorch#110285): values are right, and the dtype is NumPy's own for the product."""
    x = np.random.default_rng(0).integers(-4, 5, (4, 6)).astype(order + kind)
    for a, b in ((x, x.T), (x, x.T.astype("=" + kind)), (x.astype("=" + kind), x.T)):
        out, own = route.matmul(a, b), np.matmul(a, b)
        assert np.array_equal(out, own)
        assert out.dtype == own.dtype


@pytest.mark.parametrize("dtype", DTYPES)
def test_expanded_batches_equal_materialised_ones(kit, route, dtype):
    """B20 (huggingface/candle#3744): stride zero along the batch, on either side, bit for bit."""
    xp = kit.room.xp
    left, right = kit.normal(1, 8, 8, dtype=dtype), kit.normal(6, 8, 8, dtype=dtype, seed=1)
    wide = xp.broadcast_to(left, (6, 8, 8))
    packed = wide.contiguous() if kit.name == "torch" else kit.array(kit.host(wide).copy())
    for x, y in (((wide, right), (packed, right)), ((right, wide), (right, packed))):
        assert np.array_equal(kit.wide(route.matmul(*x)), kit.wide(route.matmul(*y)))
        kit.close(*y, route.matmul(*x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_buffer_twice(kit, route, dtype):
    """B22 (pytorch/pytorch#105212): x @ x, x @ x.T, and two overlapping views of one buffer."""
    x = kit.normal(4, 16, 16, dtype=dtype)
    s = x[0]
    for a, b in ((x, x), (s, s), (s, s.T), (s.T, s), (s[:8], s[4:12].T), (s, s[:, 1])):
        for _ in range(2):
            kit.close(a, b, route.matmul(a, b))


def test_free_strides_are_one_problem(torch_kit):
    """B23 (jax-ml/jax#24680): strides of dimensions of size one change neither the result nor what is remembered."""
    torch = pytest.importorskip("torch")
    a, w = torch_kit.normal(1, 64, dtype="bfloat16"), torch_kit.normal(64, 32, dtype="bfloat16", seed=1)
    b = torch.as_strided(a, (1, 64), (7, 1))
    problems = {dispatch.explain(x, w, policy="native").problem for x in (a, b)}
    assert torch.equal(dispatch.matmul(a, w), dispatch.matmul(b, w))
    assert len(problems) == 1


def test_output_is_fresh_memory(kit, route):
    """B38 (flashinfer-ai/flashinfer#4724): leftovers of NaN in freed memory never reach a result."""
    a, b = kit.normal(64, 32, dtype="bfloat16"), kit.normal(32, 64, dtype="bfloat16", seed=1)
    for _ in range(4):
        poison = [kit.array(np.full((64, 64), np.nan), "bfloat16") for _ in range(8)]
        del poison
        assert np.isfinite(kit.wide(route.matmul(a, b))).all()
    kit.close(a, b, route.matmul(a, b))


def test_inputs_are_never_written(kit, route):
    """Operands and bias are the same bytes afterwards, known call or not."""
    a, b, bias = (kit.normal(*s, dtype=d) for s, d in (((5, 6), "bfloat16"), ((6, 7), "bfloat16"), ((5, 7), "float32")))
    before = [kit.host(x).tobytes() for x in (a, b, bias)]
    for _ in range(3):
        route.matmul(a, b, bias=bias, activation="relu")
        route.matmul(a, b)
    assert [kit.host(x).tobytes() for x in (a, b, bias)] == before


def test_subclasses_and_other_layouts_are_the_frameworks_business(torch_kit, route):
    """Sparse, mkldnn and meta tensors: what torch gives, torch gives here, with nothing measured."""
    torch = pytest.importorskip("torch")
    dense, w = torch_kit.normal(4, 4), torch_kit.normal(4, 3, seed=1)
    route.matmul(dense, w)  # known
    route.matmul(dense[:1, :1].expand(4, 4), w)  # the strides that a sparse tensor reports
    out = route.matmul(dense.to_sparse(), w)
    assert torch.allclose(out, dense @ w)
    assert torch.allclose(route.matmul(dense.to_sparse(), w, bias=torch.ones(3)), dense @ w + 1)
    before = dispatch.stats()["measured"]
    meta = route.matmul(dense.to("meta"), w.to("meta"))
    assert (meta.device.type, tuple(meta.shape)) == ("meta", (4, 3))
    assert dispatch.stats()["measured"] == before


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_numpy_subclasses_are_numpys_business(route):
    """np.matrix and masked arrays keep NumPy's meaning and type, beside a known plain call of the same shape."""
    a, b = np.arange(4.0).reshape(2, 2).astype(np.float16), np.ones((2, 2), np.float16)
    route.matmul(a, b)
    for x, y in ((np.matrix(a), b), (a, np.matrix(b)), (np.ma.masked_array(a, mask=a > 2), b), (a, np.matrix(b)[:, 0])):
        out, own = route.matmul(x, y), np.matmul(x, y)
        assert type(out) is type(own)
        assert np.array_equal(np.asarray(out), np.asarray(own))
        assert np.array_equal(np.ma.getmaskarray(out), np.ma.getmaskarray(own))
