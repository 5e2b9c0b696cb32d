"""dispatch.matmul in graphs: torch.compile, torch.export, and the op of torch.library that stands for it there."""

from __future__ import annotations

import shutil
import subprocess
import sys
import threading
from typing import Any

import pytest

import dispatch
from dispatch import ACTIVATIONS
from dispatch.testing import FakeBackend, fake_timings, registered

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytest.importorskip("torch._dynamo.testing")

from torch._dynamo.exc import Unsupported  # noqa: E402
from torch._dynamo.testing import CompileCounterWithBackend  # noqa: E402
from torch.library import opcheck  # noqa: E402

SHAPES = [
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (3, 4, 5)),
    ((4,), (4, 5)),
    ((3, 4), (4,)),
    ((4,), (4,)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 5)),
    ((0, 4), (4, 5)),
]
ACTIVATE = {
    None: lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


@pytest.fixture(autouse=True)
def fresh() -> Any:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(scope="module")
def op() -> Any:
    """The op, defined as the first compiled function would."""
    from dispatch.frameworks import _torch_trace

    return _torch_trace.OP


def tensor(shape: tuple[int, ...], seed: int = 0, dtype: Any = torch.float64, grad: bool = False) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_(grad)


def gradients(call: Any, operands: list[Any]) -> tuple[Any, list[Any]]:
    """Return the result and the gradient of each operand, for a random cotangent."""
    given = [x.detach().requires_grad_() for x in operands]
    out = call(*given)
    out.backward(tensor(tuple(out.shape), 9, out.dtype))
    return out.detach(), [x.grad for x in given]


def same(found: Any, wanted: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(found, wanted, **tolerance)


def product(a: Any, b: Any) -> Any:
    return dispatch.matmul(a, b) + 1


def graph(function: Any, backend: Any = "aot_eager", **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, backend=backend, **options)


class TestDispatch:
    """What is chosen, when and by which policy."""

    def test_a_backend_that_won_serves_the_compiled_function(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        same(graph(product)(a, b), a @ b + 1)
        assert [(p.m, p.n, p.k, p.op) for p in winner.problems[-1:]] == [(3, 5, 4, "matmul")]

    def test_the_policy_is_read_when_the_function_runs(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        counter = CompileCounterWithBackend("aot_eager")
        compiled = graph(product, counter)
        compiled(a, b)
        before = winner.calls
        with dispatch.use_policy("native"):
            same(compiled(a, b), a @ b + 1)
        assert winner.calls == before
        compiled(a, b)
        assert winner.calls > before
        assert counter.frame_count == 1

    def test_policy_backend_and_scope_are_strings_of_the_graph(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        same(graph(lambda x, y: dispatch.matmul(x, y, policy="native", scope="head"))(a, b), a @ b)
        assert winner.calls == 0
        same(graph(lambda x, y: dispatch.matmul(x, y, backend="winner"))(a, b), a @ b)
        assert winner.calls > 0
        with pytest.raises(dispatch.NoBackendError, match="nobody"):
            graph(lambda x, y: dispatch.matmul(x, y, backend="nobody"))(a, b)

    def test_rules_match_the_scope_of_a_compiled_product(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        rule = {"match": {"scope": "head.*"}, "backends": {"deny": ["winner"]}}
        with dispatch.use_policy(rules=[rule]):
            graph(lambda x, y: dispatch.matmul(x, y, scope="head.up"))(a, b)
            assert winner.calls == 0
            graph(lambda x, y: dispatch.matmul(x, y, scope="tail.up"))(a, b)
            assert winner.calls > 0

    def test_a_new_m_does_not_compile_again(self, serving: Any) -> None:
        b = tensor((4, 5), 1)
        with serving():
            for dynamic, frames in ((True, 1), (None, 2)):  # None: what changed once is taken to change
                torch._dynamo.reset()
                counter = CompileCounterWithBackend("aot_eager")
                compiled = graph(product, counter, dynamic=dynamic)
                for m in (3, 7, 5, 2, 11):
                    a = tensor((m, 4), m)
                    same(compiled(a, b), a @ b + 1)
                assert counter.frame_count == frames

    def test_backward_on_a_thread_of_autograds_takes_the_policy_around_it(self, winner: Any, op: Any) -> None:
        import contextvars

        a = tensor((3, 3))
        contexts = []
        with dispatch.use_policy("native"):
            contexts.append(contextvars.copy_context())

        def run() -> None:
            torch._C._stash_obj_in_tls("context", contexts[0])  # as torch does for its device threads
            op(a, a)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert winner.calls == 0
        op(a, a)
        assert winner.calls > 0


class TestGradients:
    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    @pytest.mark.parametrize("activation", [None, "silu"])
    def test_are_torchs(self, shapes: Any, activation: str | None, serving: Any) -> None:
        operands = [tensor(shape, seed) for seed, shape in enumerate(shapes)]
        with serving():
            found = gradients(graph(lambda a, b: dispatch.matmul(a, b, activation=activation)), operands)
        same(found, gradients(lambda a, b: ACTIVATE[activation](torch.matmul(a, b)), operands))

    def test_each_product_is_a_problem_of_its_own(self, winner: Any) -> None:
        gradients(graph(product), [tensor((2, 3, 4)), tensor((4, 5), 1)])
        found = {(p.op, p.m, p.n, p.k) for p in winner.problems}
        assert found == {("matmul", 6, 5, 4), ("dgrad", 6, 4, 5), ("wgrad", 4, 5, 6)}

    @pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
    def test_through_bias_activation_and_out_dtype(self, serving: Any, activation: str | None) -> None:
        operands = [tensor((3, 4), 0, torch.float32), tensor((4, 5), 1, torch.float32), tensor((5,), 2, torch.float32)]

        def fused(a: Any, b: Any, c: Any) -> Any:
            return dispatch.matmul(a, b, bias=c, activation=activation, out_dtype=torch.float64)

        with serving():
            found = gradients(graph(fused), operands)
        wanted = gradients(lambda a, b, c: ACTIVATE[activation](a.double() @ b.double() + c), operands)
        same(found, wanted, rtol=1e-5, atol=1e-5)

    def test_in_dynamic_shapes(self, serving: Any) -> None:
        compiled = graph(lambda a, b, c: dispatch.matmul(a, b, bias=c, activation="gelu"), dynamic=True)
        with serving():
            for m in (3, 6):
                operands = [tensor((2, m, 4), m), tensor((4, 5), 1), tensor((5,), 2)]
                same(gradients(compiled, operands), gradients(lambda a, b, c: functional.gelu(a @ b + c), operands))

    def test_in_a_checkpoint(self, serving: Any) -> None:
        from torch.utils.checkpoint import checkpoint

        operands = [tensor((3, 4)), tensor((4, 5), 1)]

        def checkpointed(a: Any, b: Any) -> Any:
            return checkpoint(lambda x, y: dispatch.matmul(x, y, activation="relu"), a, b, use_reentrant=False)

        with serving():
            found = gradients(graph(checkpointed), operands)
        same(found, gradients(lambda a, b: functional.relu(a @ b), operands))

    @pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's own, of what it saved
    def test_in_compiled_autograd(self, serving: Any) -> None:
        """Where the forward pass ran eagerly its backward pass breaks that graph; else it is part of it."""
        enable = torch._dynamo.compiled_autograd._enable
        operands = [tensor((3, 4)), tensor((4, 5), 1)]
        wanted = gradients(lambda a, b: functional.silu(a @ b), operands)

        def activated(a: Any, b: Any) -> Any:
            return dispatch.matmul(a, b, activation="silu")

        with serving():
            with enable(torch.compile(backend="aot_eager")):
                same(gradients(activated, operands), wanted)
            torch._dynamo.reset()
            with enable(torch.compile(backend="aot_eager", fullgraph=True)):
                same(gradients(graph(activated), operands), wanted)

    def test_of_a_size_that_depends_on_the_data(self, serving: Any) -> None:
        a, b = tensor((9, 4)), tensor((4, 5), 1)
        compiled = graph(lambda x, y: dispatch.matmul(x[x[:, 0] > 0], y))
        with serving(), torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            same(compiled(a, b), a[a[:, 0] > 0] @ b)

    def test_without_gradients_and_then_with_them(self, serving: Any) -> None:
        operands = [tensor((3, 4)), tensor((4, 5), 1)]
        compiled = graph(product)
        with serving():
            for mode in (torch.no_grad, torch.inference_mode):
                with mode():
                    assert not compiled(*operands).requires_grad
            same(gradients(compiled, operands), gradients(lambda a, b: a @ b + 1, operands))


class TestAutocast:
    @pytest.mark.parametrize("inside", [False, True])
    def test_gives_its_dtype(self, serving: Any, inside: bool) -> None:
        operands = [tensor((3, 8), 0, torch.float32), tensor((8, 5), 1, torch.float32)]

        def casting(call: Any) -> Any:
            def run(*given: Any) -> Any:
                with torch.autocast("cpu", torch.bfloat16):
                    return call(*given)

            return run

        with serving():
            compiled = graph(casting(dispatch.matmul) if inside else lambda a, b: dispatch.matmul(a, b))
            found, grads = gradients(compiled if inside else casting(compiled), operands)
        wanted, wanted_grads = gradients(casting(torch.matmul), operands)
        assert found.dtype == torch.bfloat16
        same(found, wanted)
        same(grads, wanted_grads, rtol=0.02, atol=0.05)


class TestOperands:
    @pytest.mark.parametrize("side", ["a", "b", "both"])
    def test_scaled_arrays(self, serving: Any, side: str) -> None:
        a, b = tensor((16, 32), 0, torch.float32), tensor((32, 16), 1, torch.float32)
        x = a if side == "b" else dispatch.quantize(a, "e4m3:row")
        y = b if side == "a" else dispatch.quantize(b, "e4m3:row", axis=-2)
        with serving():
            same(graph(product)(x, y), product(x, y))

    def test_the_gradient_beside_a_scaled_array(self, serving: Any) -> None:
        weight = dispatch.quantize(tensor((32, 16), 1, torch.float32), "e4m3:row", axis=-2)
        operands = [tensor((8, 32), 0, torch.float32)]
        with serving():
            found = gradients(graph(lambda x: dispatch.matmul(x, weight, activation="silu")), operands)
        wanted = gradients(lambda x: functional.silu(x @ weight.dequantize()), operands)
        same(found, wanted, rtol=1e-4, atol=1e-4)

    def test_raw_fp8(self, serving: Any) -> None:
        a, b = tensor((4, 16)).to(torch.float8_e4m3fn), tensor((16, 4), 1, torch.bfloat16)
        with serving():
            for x, y in ((a, b), (a, a.mT), (b.mT, a.mT)):
                same(graph(lambda x, y: dispatch.matmul(x, y))(x, y), dispatch.matmul(x, y))

    def test_prepared_operands_keep_their_forms(self, winner: Any) -> None:
        counter = CompileCounterWithBackend("aot_eager")
        compiled = graph(product, counter)
        for seed in range(5):
            a, weight = tensor((3, 4)), dispatch.prepare(tensor((4, 5), seed))
            same(compiled(a, weight), a @ weight.array + 1)
            assert winner.problems[-1].b.prepared
        assert counter.frame_count == 1

    def test_a_prepared_operand_that_changed(self, serving: Any) -> None:
        a, weight = tensor((3, 4)), tensor((4, 5), 1)
        prepared = dispatch.prepare(weight)
        compiled = graph(lambda x: dispatch.matmul(x, prepared))
        with serving():
            compiled(a)
            weight.mul_(2)
            same(compiled(a), a @ weight)

    def test_the_gradient_of_a_prepared_weight(self, serving: Any) -> None:
        weight = tensor((4, 5), 1).requires_grad_()
        prepared = dispatch.prepare(weight)
        a = tensor((3, 4))
        with serving():
            graph(lambda x: dispatch.matmul(x, prepared))(a).sum().backward()
        same(weight.grad, a.mT @ torch.ones(3, 5, dtype=a.dtype))

    @pytest.mark.parametrize("dtype", [torch.int32, torch.complex64])
    def test_dtypes_of_torchs_own(self, serving: Any, dtype: Any) -> None:
        a = torch.ones(3, 3, dtype=dtype)
        with serving():
            same(graph(lambda x: dispatch.matmul(x, x))(a), a @ a)

    def test_strided_operands_and_their_result(self, serving: Any) -> None:
        a, b = tensor((4, 3)).mT, tensor((8, 5), 1)[::2]
        with serving():
            out = graph(lambda x, y: dispatch.matmul(x, y))(a, b)
        same(out, a @ b)
        assert out.is_contiguous()

    @pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
    def test_a_plan_whose_result_has_other_strides_than_the_fake_one(self, backend: str) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        transposing = FakeBackend("transposing", lambda x, y: (y.mT @ x.mT).mT)
        if backend == "inductor" and shutil.which("g++") is None:
            pytest.skip("Inductor needs a C++ compiler")
        with registered(transposing), fake_timings({"transposing": 1.0, "baseline": 100.0}), torch.no_grad():
            assert not dispatch.matmul(a, b).is_contiguous()
            ours = graph(lambda x, y: dispatch.matmul(x, y).view(-1), backend)
            for _ in range(3):
                same(ours(a, b), (a @ b).view(-1))
            opcheck(torch.ops.gemm_dispatch.matmul.default, (a, b))

    def test_row_major_fp8(self, serving: Any) -> None:
        """B19 (pytorch/pytorch#191140): compiled functions take the layouts that eager calls do."""
        a, b = (tensor(shape).to(torch.float8_e4m3fn) for shape in ((16, 32), (32, 24)))
        with serving():
            for y in (b, b.mT.contiguous().mT):
                for dtype in (None, torch.float32):

                    def call(x: Any, y: Any, dtype: Any = dtype) -> Any:
                        return dispatch.matmul(x, y, out_dtype=dtype)

                    torch._dynamo.reset()
                    assert torch.equal(graph(call)(a, y), call(a, y))

    @pytest.mark.parametrize("shape", [(64, 64), (3, 16, 16)])
    def test_one_array_on_both_sides(self, serving: Any, shape: Any) -> None:
        """B22 (pytorch/pytorch#105212): x @ x and x @ x.mT, also with gradients."""
        for other in (lambda x: x, lambda x: x.mT):
            torch._dynamo.reset()
            with serving():
                found = gradients(graph(lambda x, other=other: dispatch.matmul(x, other(x))), [tensor(shape)])
            same(found, gradients(lambda x, other=other: x @ other(x), [tensor(shape)]))

    def test_every_keyword_in_a_sequential_of_dynamic_shapes(self, serving: Any) -> None:
        """B59 (pytorch/pytorch#159023): no graph break, and no compilation for each m."""

        weight = tensor((8, 8), 1, torch.float32)

        class Layer(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                rest = {"policy": "default", "scope": "s", "activation": "gelu"}
                return dispatch.matmul(x, weight, bias=x[0], out_dtype=torch.float32, **rest)

        counter = CompileCounterWithBackend("aot_eager")
        layers = torch.nn.Sequential(Layer(), Layer())
        compiled = torch.compile(layers, backend=counter, fullgraph=True, dynamic=True)
        with serving():
            for m in (8, 9, 17, 33, 64):
                x = tensor((m, 8), 0, torch.float32).detach()
                found = compiled(x)
                assert found.dtype == torch.float32
                same(found, layers(x), rtol=1e-4, atol=1e-4)
        assert counter.frame_count <= 2

    def test_what_does_not_multiply_raises(self, serving: Any) -> None:
        with serving(), pytest.raises((RuntimeError, Unsupported), match=r"mat1 and mat2|shapes|size"):
            graph(product)(tensor((3, 4)), tensor((3, 4)))


class TestTransforms:
    """Inside of a compiled function too, what interprets a call gets torch's own product."""

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
    def test_functorch_and_forward_ad(self, winner: Any) -> None:
        a, b, stack = tensor((3, 4)), tensor((4, 5), 1), tensor((6, 3, 4), 2)
        func = torch.func
        calls = {
            "grad": (lambda x: func.grad(lambda y: dispatch.matmul(y, b).square().sum())(x), 2 * (a @ b) @ b.mT),
            "jvp": (lambda x: func.jvp(lambda y: dispatch.matmul(y, b), (x,), (x,))[1], a @ b),
        }
        for call, wanted in calls.values():
            same(graph(call)(a), wanted)
        mapped = graph(lambda x: func.vmap(lambda y: dispatch.matmul(y, b, activation="relu"))(x))
        same(mapped(stack), functional.relu(stack @ b))
        assert winner.calls == 0

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_jit_trace(self, winner: Any) -> None:
        a, b = tensor((3, 4), dtype=torch.float16), tensor((4, 5), 1, torch.float16)
        dispatch.matmul(a, b)  # known already
        calls = winner.calls
        traced = torch.jit.trace(lambda x, y: dispatch.matmul(x, y), (a, b), check_trace=False)
        assert "aten::matmul" in str(traced.graph)
        same(traced(2 * a, b), 2 * a @ b)
        assert winner.calls == calls

    def test_dual_tensors(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        compiled = torch.compile(lambda x: dispatch.matmul(x, b), backend="eager")
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
            out = torch.autograd.forward_ad.unpack_dual(compiled(dual))
        same(out.tangent, torch.ones_like(a) @ b)

    def test_subclasses_keep_their_type(self, serving: Any) -> None:
        class Named(torch.Tensor):
            pass

        a, b = torch.ones(3, 4).as_subclass(Named), torch.ones(4, 5)
        with serving():
            out = torch.compile(lambda x, y: dispatch.matmul(x, y), backend="eager")(a, b)
        assert type(out) is Named
        same(out.as_subclass(torch.Tensor), torch.full((3, 5), 4.0))


NATIVE = dispatch.load_policy("native")


def _entering(a: Any, b: Any) -> Any:
    with dispatch.use_policy("native"):
        return dispatch.matmul(a, b)


def _with_a_policy(a: Any, b: Any) -> Any:
    return dispatch.matmul(a, b, policy=NATIVE)


class TestRefusals:
    """What a graph cannot hold: a clear error with fullgraph, the right value without."""

    @pytest.mark.parametrize(
        ("call", "message"),
        [(_entering, "name the policy in the product"), (_with_a_policy, "give its name or path")],
    )
    def test_policies(self, winner: Any, call: Any, message: str) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        with pytest.raises(Unsupported, match=message):
            graph(call)(a, b)
        torch._dynamo.reset()
        same(torch.compile(call, backend="eager")(a, b), a @ b)
        assert winner.calls == 0

    def test_an_unknown_activation(self) -> None:
        a = tensor((3, 3))
        call = lambda x: dispatch.matmul(x, x, activation="tanh")  # noqa: E731
        with pytest.raises(Unsupported, match="unknown activation"):
            graph(call)(a)
        torch._dynamo.reset()
        with pytest.raises(ValueError, match="allowed: relu, gelu"):
            torch.compile(call, backend="eager")(a)


class TestOp:
    """The op itself, by torch's own checks."""

    @pytest.mark.parametrize("shapes", SHAPES, ids=str)
    def test_opcheck(self, serving: Any, op: Any, shapes: Any) -> None:
        with serving():
            for activation, out_dtype in ((None, None), ("gelu", None), (None, torch.float32)):
                operands = [tensor(shape, seed, grad=True) for seed, shape in enumerate(shapes)]
                bias = tensor((), 2, grad=True) if activation else None
                opcheck(op.default, (*operands, bias), {"activation": activation, "out_dtype": out_dtype})

    def test_opcheck_of_low_precision_and_scales(self, serving: Any, op: Any) -> None:
        a = tensor((16, 32), 0, torch.bfloat16)
        q = dispatch.quantize(tensor((32, 16), 1, torch.bfloat16), "e4m3:row", axis=-2)
        with serving():
            opcheck(op.default, (a, a.mT.clone()))
            checks = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")  # FP8 has no mul
            scaled = {"form_b": "e4m3:row,-2,bfloat16"}
            opcheck(op.default, (a, q.data, None, None, q.scale), scaled, test_utils=checks)

    @pytest.mark.parametrize("shapes", [s for s in SHAPES if 0 not in s[0]], ids=str)
    @pytest.mark.parametrize("which", ["a", "b", "bias", "all"])
    def test_vmap(self, serving: Any, op: Any, shapes: Any, which: str) -> None:
        a, b = (tensor((7, *shape), seed) for seed, shape in enumerate(shapes))
        shape = torch.matmul(a[0], b[0]).shape
        bias = tensor((7, *shape), 2)
        mapped = {"a": (0, None, None), "b": (None, 0, None), "bias": (None, None, 0), "all": (0, 0, 0)}[which]
        given = [x if dim == 0 else x[0] for x, dim in zip((a, b, bias), mapped, strict=True)]
        with serving():
            found = torch.vmap(lambda *x: op(*x, activation="relu"), mapped)(*given)
        wanted = torch.vmap(lambda x, y, z: functional.relu(torch.matmul(x, y) + z), mapped)(*given)
        same(found, wanted)

    def test_vmap_over_another_dimension_and_without_a_bias(self, op: Any) -> None:
        a, b = tensor((3, 7, 4)), tensor((4, 5, 7), 1)
        same(torch.vmap(op, (1, 2))(a, b), torch.vmap(torch.matmul, (1, 2))(a, b))

    def test_flops_are_counted(self, serving: Any, op: Any) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        a, b = tensor((2, 3, 4)), tensor((4, 5), 1)
        with serving():
            dispatch.matmul(a, b)
            for call in (op, dispatch.matmul):
                with FlopCounterMode(display=False) as counter:
                    call(a, b)
                assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5

    def test_fake_and_meta_tensors(self, op: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        a, b = torch.ones(3, 2, 4, dtype=torch.bfloat16).transpose(0, 1), torch.ones(4, 5, dtype=torch.bfloat16)
        real = op(a, b, out_dtype=torch.float32)
        with FakeTensorMode() as mode:
            fake = op(mode.from_tensor(a), mode.from_tensor(b), out_dtype=torch.float32)
        meta = op(a.to("meta"), b.to("meta"), out_dtype=torch.float32)
        for found in (fake, meta):
            assert (found.shape, found.stride(), found.dtype) == (real.shape, real.stride(), real.dtype)


class Linear(torch.nn.Module):
    """A linear layer with its activation, under a policy and scope of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(tensor((4, 5), 1))
        self.bias = torch.nn.Parameter(tensor((5,), 2))

    def forward(self, x: Any) -> Any:
        return dispatch.matmul(x, self.weight, bias=self.bias, activation="gelu", policy="strict", scope="up")


class TestExport:
    @pytest.mark.parametrize("strict", [False, True])
    def test_holds_the_op_and_its_arguments(self, winner: Any, strict: bool) -> None:
        module = Linear()
        sizes = {"x": {0: torch.export.Dim("m", min=1, max=64)}}
        program = torch.export.export(module, (tensor((3, 4)),), dynamic_shapes=sizes, strict=strict)
        (node,) = (n for n in program.graph.nodes if "gemm_dispatch" in str(n.target))
        facts = {"policy": "strict", "scope": "up", "activation": "gelu"}
        assert {key: node.kwargs[key] for key in facts} == facts
        before = winner.calls
        for m in (3, 17):
            x = tensor((m, 4), m)
            same(program.module()(x), functional.gelu(x @ module.weight + module.bias))
        assert winner.calls > before

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # of the process's first jvp
    def test_transforms_and_forward_mode_of_an_exported_program(self) -> None:
        module, x, tangent = Linear(), tensor((3, 4)), tensor((3, 4), 7)
        program = torch.export.export(module, (x,)).module()

        def native(y: Any) -> Any:
            return functional.gelu(y @ module.weight + module.bias)

        for transform in (torch.func.jacfwd, torch.func.jacrev, torch.func.hessian):
            same(transform(lambda y: program(y).sum())(x), transform(lambda y: native(y).sum())(x))
        same(torch.func.jvp(program, (x,), (tangent,)), torch.func.jvp(native, (x,), (tangent,)))
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, tangent)
            found, wanted = (torch.autograd.forward_ad.unpack_dual(f(dual)) for f in (program, native))
            same(found.tangent, wanted.tangent)

    def test_a_plugin_asked_for_by_name_is_not_passed_over_under_a_transform(self, op: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        same(torch.func.grad(lambda x: op(x, b, backend="bf16_fallback").sum())(a), torch.ones(3, 5).double() @ b.mT)
        with pytest.raises(dispatch.NoBackendError, match="winner"):
            torch.func.grad(lambda x: op(x, b, backend="winner").sum())(a)

    @pytest.mark.filterwarnings("ignore:The given buffer is not writable")  # torch 2.11's own
    def test_saved_and_loaded(self, tmp_path: Any) -> None:
        module, x = Linear(), tensor((3, 4))
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "linear.pt2")
        same(torch.export.load(tmp_path / "linear.pt2").module()(x), module(x))

    def test_loaded_where_nothing_was_multiplied_yet(self, tmp_path: Any) -> None:
        module, x = Linear(), tensor((3, 4))
        torch.export.save(torch.export.export(module, (x,)), tmp_path / "linear.pt2")
        torch.save((x, module(x).detach()), tmp_path / "values.pt")
        script = """
import sys, torch, dispatch
dispatch.framework("torch")
x, wanted = torch.load(sys.argv[1] + "/values.pt")
assert torch.allclose(torch.export.load(sys.argv[1] + "/linear.pt2").module()(x), wanted)
"""
        subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, timeout=120)

    @pytest.mark.filterwarnings("ignore:.*treespec:FutureWarning")  # torch's own
    def test_decomposed_for_training(self, winner: Any) -> None:
        x = tensor((3, 4))
        program = torch.export.export(Linear(), (x,)).run_decompositions()
        program.module()(x).sum().backward()
        assert {p.op for p in winner.problems} == {"matmul", "wgrad"}

    def test_policies_that_can_and_that_cannot_be_exported(self) -> None:
        a = tensor((3, 3))

        class Entering(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                with dispatch.use_policy("native"):
                    return dispatch.matmul(x, x)

        class Changed(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return dispatch.matmul(x, x, policy=dispatch.load_policy("strict").override(error={"tolerance": 0.1}))

        class Stating(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return dispatch.matmul(x, x, policy="default")  # stated, though it is in force anyway

        (node,) = (n for n in torch.export.export(Stating(), (a,)).graph.nodes if "gemm_dispatch" in str(n.target))
        assert node.kwargs["policy"] == "default"
        with pytest.raises(RuntimeError, match="name the policy in the product"):
            torch.export.export(Entering(), (a,), strict=False)
        with pytest.raises(dispatch.PolicyError, match="cannot be exported"):
            torch.export.export(Changed(), (a,), strict=False)

    def test_a_backend_by_name(self, winner: Any) -> None:
        class Named(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return dispatch.matmul(x, x, backend="winner")

        a = tensor((3, 3))
        program = torch.export.export(Named(), (a,))
        same(program.module()(a), a @ a)
        assert winner.calls > 0
        whole = torch.ones(3, 3, dtype=torch.int32)
        with pytest.raises(dispatch.NoBackendError, match="own product has to serve"):
            torch.export.export(Named(), (whole,), strict=False)

    def test_scaled_arrays_of_a_module(self) -> None:
        class Quantized(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = dispatch.quantize(tensor((32, 16), 1, torch.float32), "e4m3:row", axis=-2)

            def forward(self, x: Any) -> Any:
                return dispatch.matmul(x, self.weight)

        module, x = Quantized(), tensor((8, 32), 0, torch.float32)
        same(torch.export.export(module, (x,), strict=False).module()(x), module(x))


needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Inductor's own
class TestInductor:
    def test_forward_and_backward(self, serving: Any) -> None:
        operands = [tensor((2, 3, 4)), tensor((4, 5), 1), tensor((5,), 2)]
        with serving():
            for dynamic in (False, True):
                compiled = graph(
                    lambda a, b, c: dispatch.matmul(a, b, bias=c, activation="silu") * 2, "inductor", dynamic=dynamic
                )
                found = gradients(compiled, operands)
                same(found, gradients(lambda a, b, c: functional.silu(a @ b + c) * 2, operands))

    def test_a_package_made_ahead_of_time(self, tmp_path: Any) -> None:
        module = Linear()
        sizes = {"x": {0: torch.export.Dim("m", min=1, max=64)}}
        with torch.no_grad():
            program = torch.export.export(module, (tensor((3, 4)),), dynamic_shapes=sizes)
            path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "linear.pt2"))
            loaded = torch._inductor.aoti_load_package(path)
            for m in (3, 9):
                x = tensor((m, 4), m)
                same(loaded(x), module(x))
