"""The cases on a GPU: layouts, sizes beyond 2**31, precision, devices, memory."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import dispatch  # noqa: E402
from dispatch.testing import FakeBackend, fake_timings, registered  # noqa: E402

# torch warns in a backward thread that is the first to use cuBLAS there.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")]
LOSSY = 0.06  # relative Frobenius error where FP8 may be chosen


def randn(*shape, dtype=torch.bfloat16, seed=0, device="cuda"):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device)


def rel(found, a, b):
    want = a.detach().double().cpu() @ b.detach().double().cpu()
    return ((found.detach().double().cpu() - want).norm() / want.norm().clamp_min(1e-300)).item()


@pytest.fixture(params=["measured", "cublas"])
def multiply(request):
    """matmul by whatever wins, and by cublas's FP8 wherever that is able."""
    if request.param == "measured":
        yield dispatch.matmul
        return
    with fake_timings({"cublas": 1.0, "baseline": 100.0}, device_time=True):
        yield dispatch.matmul


@pytest.mark.parametrize(
    ("m", "k", "n"), [(1, 256, 64), (64, 256, 1), (64, 1, 64), (1, 1, 1), (1, 1, 128), (13, 64, 48)]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_and_odd_sizes(multiply, m, k, n, dtype):
    """B01 (pytorch/ao#571), B02 (pytorch/ao#3111), B04 (triton-lang/triton#934), forward and backward."""
    a, b = randn(m, k, dtype=dtype).requires_grad_(), randn(k, n, dtype=dtype, seed=1).requires_grad_()
    out = multiply(a, b)
    assert rel(out, a, b) < LOSSY
    grad = randn(m, n, dtype=dtype, seed=2)
    out.backward(grad)
    assert rel(a.grad, grad, b.t()) < LOSSY
    assert rel(b.grad, a.t(), grad) < LOSSY


@pytest.mark.parametrize(
    ("m", "n", "k"), [(1000, 999, 1001), (33, 65, 31), (127, 129, 130), (17, 16, 15), (96, 40, 511)]
)
def test_nothing_beyond_the_view_is_read(multiply, m, n, k):
    """B05 (triton-lang/triton#630): large values follow each row of a and the last row of b."""
    wide_a = torch.full((m, k + 8), 3e4, dtype=torch.bfloat16, device="cuda")
    wide_b = torch.full((k + 8, n), 3e4, dtype=torch.bfloat16, device="cuda")
    wide_a[:, :k], wide_b[:k] = randn(m, k), randn(k, n, seed=1)
    a, b = wide_a[:, :k], wide_b[:k]
    assert rel(multiply(a, b), a, b) < LOSSY


@pytest.mark.parametrize(
    "shapes", [((0, 64), (64, 8)), ((8, 64), (64, 0)), ((0, 8, 64), (0, 64, 8)), ((5, 0, 7), (5, 7, 9))]
)
def test_nothing_to_multiply(multiply, shapes):
    """B07 (triton-lang/triton#10427): the right shape, exact zeros, a gradient, and nothing launched by a plugin."""
    a, b = (torch.zeros(s, dtype=torch.bfloat16, device="cuda", requires_grad=True) for s in shapes)
    out = multiply(a, b)
    assert out.shape == torch.matmul(a, b).shape
    out.sum().backward()
    assert a.grad.shape == a.shape


@pytest.mark.parametrize("n", [16, 576, 129])
def test_columns_that_a_kernel_refuses(multiply, n):
    """B10 (vllm-project/vllm#48586): served by another route."""
    a, b = randn(32, 1024), randn(1024, n, seed=1)
    assert rel(multiply(a, b), a, b) < LOSSY


def test_slices_keep_their_strides(multiply):
    """B14 (vllm-project/vllm#55534): views of a poisoned parent, transposed too."""

    def view(m, n, seed):
        parent = torch.full((2 * m, 2 * n), 1e4, dtype=torch.bfloat16, device="cuda")
        parent[:m, :n] = randn(m, n, seed=seed)
        return parent[:m, :n]

    a, b = view(512, 512, 0), view(512, 512, 1)
    for x, y in ((a, b), (a, b.t()), (a.t(), b), (a.t(), b.t())):
        assert rel(multiply(x, y), x, y) < LOSSY


LAYOUTS = {
    "gap": lambda x: torch.as_strided(x, (64, 64), (65, 1)),
    "odd address": lambda x: x[1 : 1 + 64 * 64].view(64, 64),
    "transposed odd": lambda x: x[: 63 * 64].view(63, 64).t(),
    "one row": lambda x: torch.as_strided(x, (1, 64), (3, 1)),
    "k of 511": lambda x: x[: 9 * 511].view(9, 511),
    "expanded": lambda x: x[:64].view(1, 64).expand(48, 64),
    "overlapping": lambda x: torch.as_strided(x, (48, 64), (3, 1)),
    "every other": lambda x: x[: 40 * 128].view(40, 128)[::2, ::2],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layouts_that_descriptors_refuse(multiply, layout, dtype):
    """B16 (flagos-ai/FlagGems#4471, triton-lang/triton#10927): strides and addresses that 16 bytes do not divide."""
    x = LAYOUTS[layout](randn(80 * 80, dtype=dtype))
    w = randn(x.shape[1], 32, dtype=dtype, seed=1)
    for a, b in ((x, w), (w.t(), x.t())):
        assert rel(multiply(a, b), a, b) < LOSSY


def test_expanded_batches(multiply):
    """B20 (huggingface/candle#3744): stride zero along the batch equals the materialised one."""
    left, right = randn(1, 32, 32).expand(32, 32, 32), randn(32, 32, 32, seed=1)
    assert torch.equal(multiply(left, right), multiply(left.contiguous(), right))
    assert torch.equal(multiply(right, left), multiply(right, left.contiguous()))
    assert rel(multiply(left, right), left, right) < LOSSY


def test_one_buffer_twice(multiply):
    """B22 (pytorch/pytorch#105212)."""
    x = randn(12, 64, 64)
    for a, b in ((x, x), (x[0], x[0].t()), (x[0], x[0])):
        assert rel(multiply(a, b), a, b) < LOSSY


@pytest.mark.slow
def test_operands_beyond_2_31_elements():
    """B25 (pytorch/pytorch#17897, #31708): a large operand, and a column whose stride spans one. About 9 GB."""
    x = torch.ones(35783, 65133, dtype=torch.bfloat16, device="cuda")
    y = torch.ones(65133, 1, dtype=torch.bfloat16, device="cuda")
    out = dispatch.matmul(x, y, out_dtype=torch.float32)
    assert (out == 65133).all()
    del x
    parent = torch.zeros(16909322, 127, dtype=torch.bfloat16, device="cuda")
    parent[:, 5] = 1
    column = parent[:, 5:6]
    found = dispatch.matmul(column.t(), column, out_dtype=torch.float32).item()
    assert abs(found / 16909322 - 1) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:1x128", "e4m3:tensor"])
def test_quantizing_beyond_2_31_elements(recipe):
    """B28 (triton-lang/triton#5022): the last rows, not only no crash. About 60 GB with temporaries."""
    w = torch.full((40960, 65536), 2.0, dtype=torch.bfloat16, device="cuda")
    w[-1] = 3.0
    q = dispatch.quantize(w, recipe)
    del w
    scale = q.scale[-3:] if q.scale.shape[0] > 1 else q.scale
    wide = scale.repeat_interleave(128, 1) if scale.shape[1] > 1 else scale
    last = q.data[-3:].float() * wide
    assert torch.allclose(last[:2], torch.full_like(last[:2], 2.0), rtol=0.05)
    assert torch.allclose(last[2], torch.full_like(last[2], 3.0), rtol=0.05)


@pytest.mark.parametrize("batch", [65535, 65536, 65537, 200000])
def test_batches_beyond_a_grids_limit(batch):
    """B29 (pytorch/pytorch#178617, ml-explore/mlx#3858, flashinfer-ai/flashinfer#3125): every entry is written."""
    poison = torch.full((batch, 4), float("nan"), dtype=torch.bfloat16, device="cuda")
    del poison
    a = torch.ones(batch, 4, 16, dtype=torch.bfloat16, device="cuda")
    b = torch.ones(batch, 16, 1, dtype=torch.bfloat16, device="cuda")
    assert (dispatch.matmul(a, b) == 16).all()


@pytest.mark.parametrize("tiny", [1e-30, 2e-38, 1e-40, 1e-45])
@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:1x128", "e4m3:1x32:e8m0", "e4m3:tensor"])
def test_tiny_blocks_stay_finite(recipe, tiny):
    """B31 (flashinfer-ai/flashinfer#4679): on the GPU's arithmetic too."""
    x = torch.full((4, 128), tiny, dtype=torch.float32, device="cuda")
    x[0] = 1.0
    q = dispatch.quantize(x, recipe)
    scale = q.scale.float()
    assert torch.isfinite(q.data.float()).all()
    assert torch.isfinite(scale).all()
    assert (scale > 0).all()
    assert torch.isfinite(dispatch.matmul(x, torch.ones(128, 16, device="cuda"))).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nan_and_inf_stay_where_they_are(multiply, dtype):
    """B32 (flashinfer-ai/flashinfer#4023): a large problem too, where FP8 would win."""
    for m, k, n in ((4, 128, 16), (2048, 2048, 2048)):
        a = randn(m, k, dtype=dtype)
        a[1, 7], a[2, 3] = float("inf"), float("nan")
        b = (torch.rand(k, n, generator=torch.Generator().manual_seed(1)) + 0.1).to(dtype).cuda()
        out, own = multiply(a, b), a @ b
        assert torch.equal(torch.isinf(out), torch.isinf(own))
        assert torch.equal(torch.isnan(out), torch.isnan(own))
        assert rel(out[3:], a[3:], b) < LOSSY


def test_scales_apply_before_rounding(multiply):
    """B37 (llvm/torch-mlir#4616): 448 * 448 * 128 fits no float16, scaled by 1e-6 it does."""
    data = torch.full((16, 128), 448.0, device="cuda").to(torch.float8_e4m3fn)
    scale = torch.full((1, 1), 1e-3, device="cuda")
    recipe = dispatch.ScalingRecipe.parse("e4m3:tensor")
    x = dispatch.ScaledArray(data, scale, recipe, -1, "float32")
    y = dispatch.ScaledArray(data.t(), scale, recipe, -2, "float32")
    out = multiply(x, y, out_dtype=torch.float16)
    assert torch.allclose(out.float(), torch.full_like(out.float(), 448 * 448 * 128e-6), rtol=1e-3)


def test_outputs_are_write_only(multiply):
    """B38 (flashinfer-ai/flashinfer#4724): NaN in the allocator's free blocks."""
    for _ in range(4):
        poison = [torch.full((256, 256), float("nan"), dtype=torch.bfloat16, device="cuda") for _ in range(8)]
        del poison
        assert torch.isfinite(multiply(randn(256, 128), randn(128, 256, seed=1))).all()


def test_precise_sums_stay_precise():
    """B40 (triton-lang/triton#8056): promoted accumulation, with and without bias, over k = 16384."""
    k = 16384
    values = torch.full((128, k), 2.0**-4, device="cuda")
    values[:, :128] = 16.0
    recipe = dispatch.ScalingRecipe.parse("e4m3:tensor")
    one = torch.ones((1, 1), device="cuda")
    a = dispatch.ScaledArray(values.to(torch.float8_e4m3fn), one, recipe, -1, "float32")
    b = dispatch.ScaledArray(torch.ones(k, 128, device="cuda").to(torch.float8_e4m3fn), one, recipe, -2, "float32")
    exact = (values.double().sum(1)[0]).item()
    with dispatch.use_policy(recipes={"accumulation": ["promoted"], "allow": ["e4m3:tensor"]}):
        plain = dispatch.matmul(a, b, out_dtype=torch.float32)
        biased = dispatch.matmul(a, b, bias=torch.zeros(128, device="cuda"), out_dtype=torch.float32)
    for out in (plain, biased):
        assert (out - exact).abs().max().item() < 3


def test_float32_follows_torchs_setting():
    """B41 (thinking-machines-lab/batch_invariant_ops#24): IEEE unless TF32 is allowed, at each call."""
    before = torch.backends.cuda.matmul.allow_tf32
    try:
        torch.backends.cuda.matmul.allow_tf32 = False
        positions = torch.arange(8192, device="cuda", dtype=torch.float32)[None]
        assert torch.equal(dispatch.matmul(torch.ones(1, 1, device="cuda"), positions), positions)
        square = positions[:, :4096].view(64, 64)
        assert torch.equal(dispatch.matmul(torch.eye(64, device="cuda"), square), square)
        x = randn(512, 512, dtype=torch.float32)
        torch.backends.cuda.matmul.allow_tf32 = True
        dispatch.matmul(x, x)
        torch.backends.cuda.matmul.allow_tf32 = False
        assert rel(dispatch.matmul(x, x), x, x) < 1e-5
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.parametrize("recipe", ["e4m3:row", "e4m3:1x128@e4m3:128x128"])
def test_scaled_products_with_far_apart_scales(multiply, recipe):
    """B43 (pytorch/pytorch#193802): row by row against the decoded values."""
    pair = dispatch.RecipePair.parse(recipe)
    m, n, k = 512, 256, 1024
    a = randn(m, k) * torch.logspace(-3, 3, m, device="cuda")[:, None].bfloat16()
    b = randn(k, n, seed=1) * torch.logspace(-2, 2, n, device="cuda")[None].bfloat16()
    x, y = dispatch.quantize(a, pair.a), dispatch.quantize(b, pair.b, axis=-2)
    out = multiply(x, y, out_dtype=torch.float32).double().cpu()
    want = x.dequantize("float64").cpu() @ y.dequantize("float64").cpu()
    assert ((out - want).norm(dim=1) / want.norm(dim=1)).max() < 2e-2


@pytest.mark.parametrize("bias_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(32,), (1, 32), (64, 1), ()])
def test_any_bias_with_any_result(multiply, bias_dtype, out_dtype, shape):
    """B46 (pytorch/pytorch#190538, pytorch/ao#3525)."""
    x, w = randn(64, 64), randn(64, 32, seed=1)
    out = multiply(x, w, bias=torch.full(shape, 3.0, dtype=bias_dtype, device="cuda"), out_dtype=out_dtype)
    want = x.double() @ w.double() + 3
    assert out.dtype == out_dtype
    assert ((out.double() - want).norm() / want.norm()).item() < LOSSY


@pytest.mark.parametrize(("name", "form"), [("gelu", "none"), ("gelu_tanh", "tanh")])
def test_gelu_is_the_named_one(name, form):
    """B47 (pytorch/pytorch#104061)."""
    x = torch.linspace(-3, 3, 64, device="cuda")[:, None] * torch.ones(1, 16, device="cuda") / 16
    w = torch.ones(16, 8, device="cuda")
    out = dispatch.matmul(x, w, activation=name)
    assert torch.allclose(out, torch.nn.functional.gelu(x @ w, approximate=form), atol=2e-5)


def test_backward_after_autocast():
    """B49 (pytorch/ao#4616): bfloat16 throughout, values above 65504."""
    x = randn(16, 32, dtype=torch.float32).requires_grad_()
    w = (randn(32, 16, dtype=torch.float32, seed=1) * 1e3).requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        y = dispatch.matmul(x, w)
    y.backward(torch.full_like(y, 1e6))
    assert x.grad.dtype == w.grad.dtype == torch.float32
    assert torch.isfinite(x.grad).all()
    assert torch.isfinite(w.grad).all()


def test_inference_mode_no_grad_and_grad_agree(multiply):
    """B55 (meta-pytorch/float8_experimental#238)."""
    for m in (8, 2048):
        x, w = randn(m, 1024), randn(1024, 1024, seed=1)
        multiply(x, w)
        with torch.inference_mode():
            first = multiply(x, w).clone()
        with torch.no_grad():
            second = multiply(x, w)
        assert torch.equal(first, second)
        tracked = x.clone().requires_grad_()
        multiply(tracked, w).sum().backward()
        assert tracked.grad.shape == x.shape


@pytest.mark.parametrize("narrow", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_raw_fp8_meets_wider_operands(multiply, narrow):
    """B50 (pytorch/pytorch#160651): either order, the wider dtype."""
    for wide in (torch.bfloat16, torch.float16, torch.float32):
        a, b = randn(16, 32, dtype=wide), randn(32, 16, dtype=torch.float32, seed=1).to(narrow)
        for x, y in ((a, b), (b.t(), a.t())):
            out = multiply(x, y)
            assert out.dtype == wide
            assert rel(out, x, y) < LOSSY


def test_integers_and_booleans_are_the_frameworks_own():
    """B52 (helmholtz-analytics/heat#657): exact, or torch's own kind of error; a boolean is refused by name."""
    i = torch.tensor([[2**24 + 1, 1]], dtype=torch.int64, device="cuda")
    j = torch.tensor([[1], [0]], device="cuda")
    try:
        own = torch.matmul(i, j)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            dispatch.matmul(i, j)
    else:
        assert torch.equal(dispatch.matmul(i, j), own)
    x = torch.ones(2, 2, dtype=torch.bool, device="cuda")
    with pytest.raises(TypeError, match="bool"):
        dispatch.matmul(x, x)


def test_the_other_gpu_while_this_one_is_current(multiply):
    """B64 (pytorch/pytorch#141010, triton-lang/triton#2441): on cuda:1 with cuda:0 current, and never mixed."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    torch.cuda.set_device(0)
    for m, k, n in ((64, 256, 64), (2048, 2048, 2048)):
        a, b = randn(m, k, device="cuda:1"), randn(k, n, device="cuda:1", seed=1)
        for _ in range(2):
            out = multiply(a, b)
            assert out.device.index == 1
            assert rel(out, a, b) < LOSSY
        assert torch.cuda.current_device() == 0
    with pytest.raises(TypeError, match=r"(?s)(?=.*cuda:0)(?=.*cuda:1)"):
        multiply(a, b.to("cuda:0"))


def test_two_devices_are_refused():
    """B64: a CPU tensor by a GPU's, named; in both orders and after each is known."""
    a, b = randn(4, 4), randn(4, 4, device="cpu")
    dispatch.matmul(a, a)
    dispatch.matmul(b, b)
    for x, y in ((a, b), (b, a)):
        with pytest.raises(TypeError, match=r"(?s)(?=.*cpu)(?=.*cuda:0)"):
            dispatch.matmul(x, y)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("Invalid status")])
def test_a_candidate_that_fails_serves_nobody(error):
    """B10, B82 (flashinfer-ai/flashinfer#2442): the caller gets a right product."""

    def fails(a, b, bias=None):
        raise error

    a = torch.ones(8, 8, device="cuda")
    with registered(FakeBackend("hog", fails)), fake_timings({"hog": 1.0, "baseline": 99.0}, device_time=True):
        assert (dispatch.matmul(a, a) == 8).all()
        assert dispatch.explain(a, a).backend != "hog"


@pytest.mark.slow
def test_measuring_gives_its_memory_back():
    """B82: after the first call what stays allocated is the result and little else."""
    a, b = randn(8192, 8192), randn(8192, 8192, seed=1)
    torch.cuda.synchronize()
    base = torch.cuda.memory_allocated()
    out = dispatch.matmul(a, b)
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() - base <= out.numel() * 2 + (64 << 20)


def test_a_weight_changed_by_any_road_is_seen(multiply):
    """B88 (NVIDIA-NeMo/Automodel#3606), B89 (CrispStrobe/CrispASR#244): changed in place, and at a used address."""
    w = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16, device="cuda"))
    x = torch.ones(8, 64, dtype=torch.bfloat16, device="cuda")

    def value():
        return multiply(x, w).float()[0, 0].item()

    assert value() == 64
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=1.0).step()
    assert value() == 0
    w.data.fill_(3.0)
    assert value() == 192
    w.data = torch.full_like(w, 4.0)
    assert value() == 256
    for i in range(50):
        other = torch.full((64, 64), float(i), dtype=torch.bfloat16, device="cuda")
        assert multiply(x, other)[0, 0].item() == torch.tensor(64.0 * i).bfloat16().item()
        del other


def test_import_and_a_cpu_product_leave_cuda_alone(tmp_path):
    """B76 (NVIDIA/TransformerEngine#872), B101 (lucidrains/jax2torch#2): on a machine that has a GPU."""
    code = """
import sys, torch, dispatch, numpy as np
a = np.random.default_rng(0).standard_normal((16, 16)).astype(np.float16)
dispatch.matmul(a, a)
dispatch.matmul(torch.ones(4, 4, dtype=torch.bfloat16), torch.ones(4, 4, dtype=torch.bfloat16))
assert not torch.cuda.is_initialized()
assert "jax" not in sys.modules
free = torch.cuda.mem_get_info()[0]
x = torch.ones(64, 64, dtype=torch.bfloat16, device="cuda")
dispatch.matmul(x, x)
torch.cuda.synchronize()
assert "jax" not in sys.modules
assert free - torch.cuda.mem_get_info()[0] < 1 << 30
"""
    import os

    env = {**os.environ, "DISPATCH_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.parametrize(
    ("m", "k", "n"), [(16, 4096, 4096), (4096, 16384, 128), (2058, 3420, 1280), (1, 8192, 8192), (8192, 64, 8192)]
)
def test_the_choice_is_never_measured_slower(m, k, n):
    """B86 (pytorch/ao#2262, vllm-project/vllm#41868): by the decision's own figures."""
    decision = dispatch.explain(randn(m, k), randn(k, n, seed=1))
    assert decision.speedup is None or decision.speedup > 0.9
    if decision.backend not in ("bf16_fallback", "baseline", "cublas"):
        assert decision.speedup >= 1.05


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 4, 8), (17, 15, 33), (96, 511, 40), (2048, 2048, 2048)])
@pytest.mark.parametrize("jitted", [False, True])
def test_jax_on_the_gpu(shape, jitted):
    """B13 (jax-ml/jax#19350), B98 (jax-ml/jax#18847): odd and tiny sizes, eager and jitted, x64 on and off."""
    jax = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this jax has no GPU backend")
    import jax.numpy as jnp

    m, k, n = shape
    for x64 in (False, True):
        with jax.enable_x64(x64):
            a = jnp.asarray(np.random.default_rng(0).standard_normal((m, k)), jnp.bfloat16)
            b = jnp.asarray(np.random.default_rng(1).standard_normal((k, n)), jnp.bfloat16)
            out = (jax.jit(dispatch.matmul) if jitted else dispatch.matmul)(a, b)
            want = np.asarray(a, np.float64) @ np.asarray(b, np.float64)
            assert out.dtype == jnp.bfloat16
            assert np.linalg.norm(np.asarray(out, np.float64) - want) < LOSSY * np.linalg.norm(want)
