"""torch's modes: autograd, autocast, inference mode, compile, fake tensors, functorch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

import dispatch  # noqa: E402
from dispatch.testing import FakeBackend, fake_timings, registered  # noqa: E402


def randn(*shape, dtype=torch.bfloat16, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rel(found, wanted):
    found, wanted = found.detach().double(), wanted.detach().double()
    return ((found - wanted).norm() / wanted.norm().clamp_min(1e-300)).item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [13, 1, 16, 0])
def test_gradients_for_any_token_count(route, tokens, dtype):
    """B01 (pytorch/ao#571, #4106): in the weight's gradient the tokens are k; each product chooses for itself."""
    x, w = randn(tokens, 64, dtype=dtype).requires_grad_(), randn(64, 48, dtype=dtype, seed=1).requires_grad_()
    grad = randn(tokens, 48, dtype=dtype, seed=2)
    route.matmul(x, w).backward(grad)
    assert rel(x.grad, grad.double() @ w.double().t()) < 1e-2 or tokens == 0
    assert rel(w.grad, x.double().t() @ grad.double()) < 1e-2 or (w.grad == 0).all()
    assert (x.grad.dtype, w.grad.dtype) == (dtype, dtype)


@pytest.mark.parametrize(("m", "k", "n"), [(1, 256, 64), (64, 256, 1), (64, 1, 64), (1, 1, 1)])
def test_gradients_of_one_row_column_or_k(route, m, k, n):
    """B02 (pytorch/ao#3111): shapes are exact and values right."""
    a, b = randn(m, k).requires_grad_(), randn(k, n, seed=1).requires_grad_()
    out = route.matmul(a, b)
    out.float().sum().backward()
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)
    assert rel(a.grad, torch.ones(m, n).double() @ b.double().t()) < 1e-2
    assert rel(out, a.double() @ b.double()) < 1e-2


SHAPES = [
    ((5,), (5,)),
    ((5,), (5, 3)),
    ((4, 5), (5,)),
    ((2, 4, 5), (5, 3)),
    ((4, 5), (2, 5, 3)),
    ((2, 1, 4, 5), (3, 5, 2)),
]


@pytest.mark.parametrize("epilogue", [False, True])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gradients_of_every_rank_and_epilogue(route, shapes, epilogue):
    """B58's ranks with gradients, a bias's and an activation's among them, against torch's own."""
    right = shapes[1]
    a, b = (
        randn(*s, dtype=torch.float64 if route.name == "native" else torch.float32, seed=i)
        for i, s in enumerate(shapes)
    )
    bias = randn(right[-1] if len(right) > 1 else 1, dtype=a.dtype, seed=2)
    if not epilogue or len(right) == 1:
        bias = None
    ours = [x.clone().requires_grad_() for x in (a, b) + ((bias,) if bias is not None else ())]
    own = [x.clone().requires_grad_() for x in (a, b) + ((bias,) if bias is not None else ())]
    out = route.matmul(*ours[:2], bias=ours[2] if bias is not None else None, activation="silu" if epilogue else None)
    want = torch.matmul(*own[:2])
    want = want + own[2] if bias is not None else want
    want = torch.nn.functional.silu(want) if epilogue else want
    assert torch.allclose(out, want, rtol=1e-4, atol=1e-5)
    out.square().sum().backward()
    want.square().sum().backward()
    for x, y in zip(ours, own, strict=True):
        assert torch.allclose(x.grad, y.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("shapes", [((0, 64), (64, 8)), ((8, 64), (64, 0)), ((5, 0, 7), (5, 7, 9)), ((3, 0), (0, 2))])
def test_empty_products_keep_the_autograd_link(route, shapes):
    """B07 (pytorch/pytorch#140967): zero gradients of the right shape, not None."""
    a, b = (torch.zeros(s, dtype=torch.bfloat16).requires_grad_() for s in shapes)
    out = route.matmul(a, b)
    assert out.requires_grad
    out.sum().backward()
    assert (a.grad.shape, b.grad.shape) == (a.shape, b.shape)


@pytest.mark.parametrize("ambient", [torch.bfloat16, torch.float16])
def test_backward_after_autocast(route, ambient):
    """B49 (pytorch/ao#4616, pytorch/pytorch#87979): outside of the context, in the inputs' dtypes, never float16."""
    x, w = (
        randn(16, 32, dtype=torch.float32).requires_grad_(),
        randn(32, 16, dtype=torch.float32, seed=1).requires_grad_(),
    )
    with torch.autocast("cpu", dtype=ambient):
        own = torch.matmul(x, w)
        y = route.matmul(x, w)
        z = route.matmul(x, w)
    assert y.dtype == own.dtype == z.dtype
    assert rel(y, x.double() @ w.double()) < 1e-2
    scale = 1e6 if ambient is torch.bfloat16 else 1.0
    y.backward(torch.full_like(y, scale))
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert torch.isfinite(x.grad).all()
    assert rel(x.grad, torch.full((16, 16), scale).double() @ w.double().t()) < 2e-2


def test_autocast_and_plain_calls_share_no_plan(route):
    """B49's kind: the same tensors inside, outside, and in a nested context that switches it off."""
    x, w = randn(4, 8, dtype=torch.float32), randn(8, 4, dtype=torch.float32, seed=1)
    for _ in range(2):
        assert route.matmul(x, w).dtype == torch.float32
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert route.matmul(x, w).dtype == torch.bfloat16
            assert route.matmul(x.double(), w.double()).dtype == torch.matmul(x.double(), w.double()).dtype
            with torch.autocast("cpu", enabled=False):
                assert route.matmul(x, w).dtype == torch.float32


def test_inference_mode_no_grad_and_grad_agree(route):
    """B55 (meta-pytorch/float8_experimental#238): the same bits, and training afterwards works."""
    x, w = randn(8, 64), randn(64, 32, seed=1)
    with torch.inference_mode():
        first = route.matmul(x, w).clone()
    with torch.no_grad():
        second = route.matmul(x, w)
    tracked = x.clone().requires_grad_()
    third = route.matmul(tracked, w)
    third.sum().backward()
    assert torch.equal(first, second)
    assert torch.equal(second, third.detach())
    assert not second.requires_grad
    assert tracked.grad.shape == x.shape


def test_a_weight_prepared_in_inference_mode_serves_training(route):
    """B55: inference tensors cannot be saved for backward; forms of a weight are none."""
    x, w = randn(8, 16).requires_grad_(), torch.nn.Parameter(randn(16, 4, seed=1))
    prepared = dispatch.prepare(w)
    with torch.inference_mode():
        route.matmul(x, prepared)
    route.matmul(x, prepared).sum().backward()
    assert rel(x.grad, torch.ones(8, 4).double() @ w.double().t()) < 1e-2
    assert rel(w.grad, x.double().t() @ torch.ones(8, 4).double()) < 1e-2


@pytest.mark.parametrize(
    "shapes", [((8, 64), (64, 32)), ((2, 3, 64), (64, 32)), ((64,), (64, 32)), ((3, 4), (4,))], ids=str
)
def test_fake_and_meta_tensors_have_the_real_shapes(route, shapes):
    """B58 (NVIDIA/cuEquivariance#223, vllm-project/vllm#13918): shape, strides and dtype, with nothing measured."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w = randn(*shapes[0]), randn(*shapes[1])
    y = route.matmul(x, w)
    before = dispatch.stats()["measured"]
    with FakeTensorMode() as mode:
        z = route.matmul(mode.from_tensor(x), mode.from_tensor(w))
    meta = route.matmul(x.to("meta"), w.to("meta"))
    assert (z.shape, z.stride(), z.dtype) == (y.shape, y.stride(), y.dtype)
    assert (meta.shape, meta.dtype) == (y.shape, y.dtype)
    assert dispatch.stats()["measured"] == before


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func.jvp itself
def test_functorch_transforms_and_forward_mode_go_to_torch(route):
    """vmap, grad and dual tensors inside a known call's shapes are torch's own."""
    x, w = randn(4, 3, 5, dtype=torch.float32), randn(5, 2, dtype=torch.float32, seed=1)
    route.matmul(x[0], w)
    assert torch.allclose(torch.func.vmap(route.matmul, in_dims=(0, None))(x, w), x @ w, atol=1e-5)
    grad = torch.func.grad(lambda a: route.matmul(a, w).square().sum())(x[0])
    assert torch.allclose(grad, 2 * (x[0] @ w) @ w.t(), atol=1e-4)
    _, tangent = torch.func.jvp(lambda a: route.matmul(a, w), (x[0],), (torch.ones_like(x[0]),))
    assert torch.allclose(tangent, torch.ones(3, 5) @ w, atol=1e-5)


CALLS = {
    "bias": lambda x, w, f8: dispatch.matmul(x, w, bias=w[0]),
    "activation": lambda x, w, f8: dispatch.matmul(x, w, activation="gelu"),
    "out_dtype": lambda x, w, f8: dispatch.matmul(x, w, out_dtype=torch.bfloat16),
    "raw FP8": lambda x, w, f8: dispatch.matmul(x.to(torch.float8_e4m3fn), f8),
    "prepared": lambda x, w, f8: dispatch.matmul(x, dispatch.prepare(w)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("around", ["vmap", "grad", "fake", "meta"])
def test_whatever_is_around_a_call_its_arguments_are_honoured(route, around, call):
    """B58 (NVIDIA/cuEquivariance#223): epilogue, out_dtype and raw FP8 where torch's own product has to serve."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    x, w, f8 = (
        randn(3, 8, dtype=torch.float32),
        randn(8, 8, dtype=torch.float32, seed=1),
        randn(8, 8).to(torch.float8_e4m3fn),
    )
    f = CALLS[call]
    want = f(x, w, f8)
    if around == "vmap":
        found = torch.func.vmap(lambda r: f(r, w, f8))(torch.stack([x, x]))[1]
    elif around == "grad":
        if call == "raw FP8":
            pytest.skip("FP8 operands have no gradient")
        found = torch.func.grad_and_value(lambda r: (out := f(r, w, f8)).float().sum() + 0 * out.float().sum())(x)[1]
        want = want.float().sum()
    elif around == "meta":
        found = f(*(t.to("meta") for t in (x, w, f8)))
    else:
        with FakeTensorMode() as mode:
            found = f(*(mode.from_tensor(t) for t in (x, w, f8)))
    assert (found.dtype, found.shape) == (want.dtype, want.shape)
    if around not in ("fake", "meta"):
        assert torch.allclose(found.float(), want.float(), rtol=1e-2, atol=1e-2)


def test_double_backward(route):
    """A gradient of a gradient, by the route and by torch."""
    grads = []
    for multiply in (route.matmul, torch.matmul):
        x = randn(3, 4, dtype=torch.float32).requires_grad_()
        w = randn(4, 2, dtype=torch.float32, seed=1).requires_grad_()
        (first,) = torch.autograd.grad(multiply(x, w).pow(3).sum(), x, create_graph=True)
        first.square().sum().backward()
        grads.append((x.grad, w.grad))
    for ours, own in zip(*grads, strict=True):
        assert torch.allclose(ours, own, rtol=1e-3, atol=1e-3)


def test_deepcopied_and_tied_parameters(route):
    """B88's kind: one parameter used twice collects both gradients."""
    w = torch.nn.Parameter(randn(6, 6, dtype=torch.float32))
    x = randn(3, 6, dtype=torch.float32, seed=1)
    route.matmul(route.matmul(x, w), w).sum().backward()
    own = torch.nn.Parameter(w.detach().clone())
    (x @ own @ own).sum().backward()
    assert torch.allclose(w.grad, own.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), MemoryError()])
def test_memory_that_runs_out_while_measuring_quarantines_nobody(error):
    """B82 (flashinfer-ai/flashinfer#2442, pytorch/helion#2130): rejected here, asked again elsewhere."""
    fail = [True]

    def hog(a, b, bias=None):
        if fail[0]:
            raise error
        return torch.matmul(a, b)

    with registered(FakeBackend("hog", hog)), fake_timings({"hog": 1.0, "baseline": 99.0}, device_time=True):
        a = randn(4, 4, dtype=torch.float32)
        assert torch.equal(dispatch.matmul(a, a), a @ a)
        assert "hog" not in dispatch.stats()["quarantined"]
        fail[0] = False
        b = randn(6, 6, dtype=torch.float32)
        dispatch.matmul(b, b)
        assert dispatch.explain(b, b).backend == "hog"
