"""torch's autograd, autocast and transforms around a product, natively and with a plan that won."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

import dispatch
from dispatch import ACTIVATIONS
from dispatch.testing import FakeBackend, fake_timings, registered

torch = pytest.importorskip("torch")
functional = torch.nn.functional

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
]
ACTIVATE = {
    None: lambda x: x,
    "relu": functional.relu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
}


def tensor(shape: tuple[int, ...], seed: int, dtype: Any = torch.float64, grad: bool = True) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_(grad)


def gradients(call: Any, operands: list[Any]) -> tuple[Any, list[Any]]:
    """Return the result and the gradient of each operand, for a random cotangent."""
    given = [x.detach().requires_grad_(x.requires_grad) for x in operands]
    out = call(*given)
    if out.requires_grad:
        out.backward(tensor(tuple(out.shape), 9, out.dtype, False))
    return out.detach(), [x.grad for x in given]


def same(found: Any, wanted: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(found, wanted, **tolerance)


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_gradients_are_torchs(shapes: Any, activation: str | None, serving: Any) -> None:
    a, b = (tensor(shape, seed) for seed, shape in enumerate(shapes))
    with serving() as winner:
        found = gradients(lambda x, y: dispatch.matmul(x, y, activation=activation), [a, b])
        assert winner is None or any("differentiated" in problem.modes for problem in winner.problems)
    same(found, gradients(lambda x, y: ACTIVATE[activation](torch.matmul(x, y)), [a, b]))


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("shape", [(5,), (1,), (), (3, 1), (1, 5), (2, 3, 5), (2, 1, 1)], ids=str)
def test_gradients_through_bias_and_activation_are_torchs(activation: str | None, shape: Any, serving: Any) -> None:
    operands = [tensor((2, 3, 4), 0), tensor((4, 5), 1), tensor(shape, 2)]
    with serving():
        found = gradients(lambda a, b, c: dispatch.matmul(a, b, bias=c, activation=activation), operands)
    same(found, gradients(lambda a, b, c: ACTIVATE[activation](torch.matmul(a, b) + c), operands))


@pytest.mark.parametrize("needs", list(itertools.product((False, True), repeat=3)), ids=str)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_only_what_needs_a_gradient_gets_one(needs: tuple[bool, ...], activation: str | None, serving: Any) -> None:
    shapes = ((3, 4), (4, 5), (5,))
    operands = [tensor(shape, 1, grad=need) for shape, need in zip(shapes, needs, strict=True)]
    with serving():
        found = gradients(lambda a, b, c: dispatch.matmul(a, b, bias=c, activation=activation), operands)
    assert [x is not None for x in found[1]] == list(needs)
    same(found, gradients(lambda a, b, c: ACTIVATE[activation](a @ b + c), operands))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias_dtype", [None, torch.float32])
def test_gradients_have_the_dtype_of_their_operand(dtype: Any, bias_dtype: Any, serving: Any) -> None:
    operands = [tensor((3, 8), 0, dtype), tensor((8, 5), 1, dtype), tensor((5,), 2, bias_dtype or dtype)]
    with serving():
        for arguments in ({}, {"activation": "relu"}, {"out_dtype": torch.float32}, {"out_dtype": torch.bfloat16}):
            out, grads = gradients(lambda a, b, c, given=arguments: dispatch.matmul(a, b, bias=c, **given), operands)
            assert out.dtype == arguments.get("out_dtype", dtype)
            assert [x.dtype for x in grads] == [x.dtype for x in operands]
            wide = [x.detach().double().requires_grad_() for x in operands]
            act = ACTIVATE[arguments.get("activation")]
            _, wanted = gradients(lambda a, b, c, act=act: act(a @ b + c), wide)
            for grad, exact in zip(grads, wanted, strict=True):
                same(grad.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.parametrize("activation", [None, "gelu", "silu"])
def test_first_and_second_derivatives_are_right(activation: str | None, serving: Any) -> None:
    operands = (tensor((2, 3), 0), tensor((3, 2), 1), tensor((2,), 2))

    def product(a: Any, b: Any, c: Any) -> Any:
        return dispatch.matmul(a, b, bias=c, activation=activation)

    with serving():
        assert torch.autograd.gradcheck(product, operands)
        assert torch.autograd.gradgradcheck(product, operands)
        assert torch.autograd.gradcheck(dispatch.matmul, (tensor((3,), 0), tensor((2, 3, 2), 1)))
        assert torch.autograd.gradgradcheck(dispatch.matmul, (tensor((2, 2, 3), 0), tensor((3, 2), 1)))


def test_the_backward_pass_is_dispatched_too(winner: Any) -> None:
    a, b = tensor((3, 4), 0, torch.float32), tensor((4, 5), 1, torch.float32)
    dispatch.matmul(a, b).sum().backward()
    found = {(p.op, p.m, p.n, p.k) for p in winner.problems}
    assert found == {("matmul", 3, 5, 4), ("dgrad", 3, 4, 5), ("wgrad", 4, 5, 3)}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_product_is_not_made_anew_for_its_activations_derivative(
    activation: str, compiled: bool, winner: Any
) -> None:
    """The activation follows the product, which its derivative needs: three products a step, as torch makes."""
    a, b, bias = (tensor(shape, 0, torch.bfloat16) for shape in ((3, 4), (4, 5), (5,)))

    def layer(a: Any, b: Any, c: Any) -> Any:
        return dispatch.matmul(a, b, bias=c, activation=activation)

    torch._dynamo.reset()
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for grads in ((True, True, True), (False, False, True)):
        operands = [x.detach().requires_grad_(grad) for x, grad in zip((a, b, bias), grads, strict=True)]
        gradients(run, operands)  # measures
        winner.problems.clear()
        found = gradients(run, operands)
        made = ["matmul"] + (["dgrad", "wgrad"] if grads[0] else [])
        assert [p.op for p in winner.problems] == made
        assert winner.problems[0].activation is None
        wanted = gradients(lambda a, b, c: ACTIVATE[activation](a @ b + c), operands)
        same(found, wanted, rtol=0.05, atol=0.05)
    with torch.no_grad():
        run(a, b, bias)
    assert winner.problems[-1].activation == activation


def test_explain_tells_of_the_product_that_an_activation_follows(winner: Any) -> None:
    a, b = tensor((3, 4), 0, torch.bfloat16), tensor((4, 5), 1, torch.bfloat16)
    assert dispatch.explain(a, b, activation="gelu").problem.activation is None
    assert dispatch.explain(a.detach(), b.detach(), activation="gelu").problem.activation == "gelu"
    for out_dtype in ("float8_e4m3fn", torch.float8_e4m3fn, torch.float16, "float32", None):
        out = dispatch.matmul(a, b, activation="gelu", out_dtype=out_dtype)
        wanted = functional.gelu((a.float() @ b.float()).to(torch.bfloat16 if out_dtype is None else torch.float32))
        same(out.float(), wanted.to(out.dtype).float(), rtol=0.07, atol=0.01)
        narrow = out.dtype.itemsize == 1
        decision = dispatch.explain(a, b, activation="gelu", out_dtype=out_dtype)
        assert decision.problem.out_dtype == ("bfloat16" if narrow else str(out.dtype).removeprefix("torch."))
    with pytest.raises(TypeError, match="out_dtype 'float23' is no dtype of torch"):
        dispatch.matmul(a, b, activation="gelu", out_dtype="float23")


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu", "silu"])
def test_the_derivative_at_inf_is_one(activation: str, serving: Any) -> None:
    a, b = torch.tensor([[torch.inf], [2.0]], requires_grad=True), torch.ones(1, 1)
    with serving():
        dispatch.matmul(a, b, activation=activation).sum().backward()
    if activation != "silu":  # torch's own has Inf times 0
        assert a.grad[0] == 1.0
    assert 0.9 < a.grad[1] < 1.2


class Ops(torch.utils._python_dispatch.TorchDispatchMode):
    """Keeps the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op: Any, types: Any, given: Any = (), named: Any = None) -> Any:
        self.names.append(op.overloadpacket.__name__)
        return op(*given, **(named or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_the_own_product_with_a_bias_is_torchs_linear_layer(dtype: Any, activation: str | None) -> None:
    """The baseline is what a user of torch would run: no copies in float32 around a bias."""
    a, b, bias = (tensor(shape, 1, dtype, False) for shape in ((4, 8), (8, 6), (6,)))
    native = dispatch.native(dispatch.explain(a, b, bias=bias, activation=activation).problem)
    with Ops() as ops:
        found = native(a, b, bias)
    views = {"t", "transpose", "permute", "view", "mT"}
    assert [name for name in ops.names if name not in views] == ["addmm", *([activation] if activation else [])]
    same(found, ACTIVATE[activation](functional.linear(a, b.mT, bias)), rtol=0, atol=0)
    stack = tensor((3, 4, 8), 2, dtype, False)
    same(native(stack, b, bias), ACTIVATE[activation](functional.linear(stack, b.mT, bias)), rtol=0, atol=0)


@pytest.mark.parametrize("shape", [(6,), (1,), (3, 1), (4, 1, 6), ()], ids=str)
def test_the_gradient_of_a_bias_is_summed_in_float32_in_one_pass(shape: Any, winner: Any) -> None:
    rows, columns = tensor((4, 3, 8), 0, torch.bfloat16, False), tensor((8, 6), 1, torch.bfloat16, False)
    bias, cotangent = tensor(shape, 2, torch.bfloat16), tensor((4, 3, 6), 3, torch.bfloat16, False)
    out = dispatch.matmul(rows, columns, bias=bias)
    with Ops() as ops:
        (found,) = torch.autograd.grad(out, [bias], cotangent)
    assert "sum" in ops.names
    assert "_to_copy" not in ops.names[: ops.names.index("sum")]
    same(found.double(), cotangent.double().sum_to_size(shape), rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_float32_gradient_of_narrower_operands_stays_wide(dtype: Any, compiled: bool, serving: Any) -> None:
    """In float16 it may be Inf; in bfloat16 what is left where the other operand cancels it may be its rounding."""
    b = tensor((64, 48), 1, torch.float64, False)
    a, b = tensor((16, 64), 0, dtype), (b - b.mean(1, keepdim=True)).to(dtype)
    cotangent = 1e5 * (1 + 1e-3 * tensor((16, 48), 2, torch.float64, False)).float()
    torch._dynamo.reset()
    call = lambda a, b: dispatch.matmul(a, b, out_dtype=torch.float32)  # noqa: E731
    run = torch.compile(call, backend="aot_eager") if compiled else call
    with serving():
        for _ in range(3):
            (found,) = torch.autograd.grad(run(a, b), [a], cotangent)
    exact = cotangent.double() @ b.double().mT
    assert ((found.double() - exact).norm() / exact.norm()) < 0.01


def test_a_wider_result_of_the_own_product_keeps_its_backward_pass() -> None:
    """torch's own derivative would need a forward pass in float32, an order of magnitude slower on a GPU."""
    a, b = tensor((3, 8), 0, torch.bfloat16), tensor((8, 5), 1, torch.bfloat16)
    with dispatch.use_policy(tuning={"mode": "off"}):
        dispatch.forget()
        for _ in range(3):
            out = dispatch.matmul(a, b, out_dtype=torch.float32)
            assert out.grad_fn.name() == "_ProductBackward"
            grads = torch.autograd.grad(out, [a, b], torch.ones(3, 5))
            assert [x.dtype for x in grads] == [torch.bfloat16] * 2


def test_a_bias_under_autocast_is_of_its_dtype_as_a_linear_layers_is(winner: Any) -> None:
    a, b, bias = (tensor(shape, 1, torch.float32) for shape in ((4, 8), (8, 6), (6,)))
    with torch.autocast("cpu", torch.bfloat16):
        assert dispatch.explain(a, b, bias=bias).problem.bias == "bfloat16"
        found, grads = gradients(lambda *x: dispatch.matmul(x[0], x[1], bias=x[2]), [a, b, bias])
        wanted, wanted_grads = gradients(lambda *x: functional.linear(x[0], x[1].mT, x[2]), [a, b, bias])
    assert found.dtype == wanted.dtype
    same(found, wanted, rtol=0.01, atol=0.01)
    assert [x.dtype for x in grads] == [torch.float32] * 3
    same(grads, wanted_grads, rtol=0.02, atol=0.05)
    assert dispatch.explain(a, b, bias=bias).problem.bias == "float32"


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [
        (torch.float64, None),
        (torch.float64, torch.float32),
        (torch.float32, torch.float32),
        (torch.int64, torch.float32),
    ],
    ids=str,
)
def test_a_bias_keeps_its_dtype_where_autocast_is_not_all(
    dtype: Any, out_dtype: Any, trained: bool, serving: Any
) -> None:
    """float64 and integers are not cast, and a result in float32 is asked for to keep what there is."""
    a, b = ((4 * tensor(shape, 1, torch.float64, False)).round().to(dtype) for shape in ((4, 8), (8, 6)))
    if trained and dtype.is_floating_point:
        a.requires_grad_()
    bias = (100 * tensor((6,), 2, torch.float32, False)).requires_grad_(trained)
    with serving(), torch.autocast("cpu", torch.bfloat16):
        for _ in range(3):
            out = dispatch.matmul(a, b, bias=bias, out_dtype=out_dtype)
    exact = a.double() @ b.double() + bias.double()
    same(out.double(), exact, rtol=1e-6, atol=1e-5)


def test_a_compiled_layer_under_autocast_is_the_eager_one(winner: Any) -> None:
    a, b, bias = (tensor(shape, 1, torch.float32, False) for shape in ((4, 8), (8, 6), (6,)))
    torch._dynamo.reset()
    run = torch.compile(lambda *x: dispatch.matmul(x[0], x[1], bias=x[2]), backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(a, b, 100 * bias), dispatch.matmul(a, b, bias=100 * bias))
    assert {p.bias for p in winner.problems} == {"bfloat16"}


def test_a_sparse_matrix_with_a_bias() -> None:
    a, b, bias = tensor((3, 4), 0, grad=False), tensor((4, 5), 1, grad=False), tensor((5,), 2, grad=False)
    same(dispatch.matmul(a, b.to_sparse(), bias=bias), a @ b + bias)


def test_forward_and_both_gradients_have_decisions_of_their_own() -> None:
    """One shape three times: what is chosen for one of them says nothing of the others."""
    a, b = tensor((8, 8), 0, torch.bfloat16), tensor((8, 8), 1, torch.bfloat16)
    rules = [
        {"match": {"op": "dgrad"}, "backends": {"allow": ["one", "bf16_fallback"]}},
        {"match": {"op": "wgrad"}, "backends": {"allow": ["two", "bf16_fallback"]}},
        {"match": {"op": "matmul"}, "backends": {"allow": ["bf16_fallback"]}},
    ]
    backends = [FakeBackend(name) for name in ("one", "two")]
    with registered(*backends), fake_timings({"one": 1.0, "two": 1.0, "baseline": 100.0}):
        dispatch.clear_store()
        with dispatch.use_policy(rules=rules):
            dispatch.matmul(a, b).sum().backward()
        found = {(x.problem.op, x.backend) for x in dispatch.stored()}
    assert found == {("dgrad", "one"), ("wgrad", "two")}  # nothing rivals the own product in the forward pass


@pytest.mark.parametrize("error", [RuntimeError("the kernel failed"), SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_what_fails_in_a_known_backward_pass_is_left_out(error: BaseException, failing: Any) -> None:
    a, b, cotangent = tensor((3, 4), 0), tensor((4, 5), 1), tensor((3, 5), 2, grad=False)
    for _ in range(2):
        wanted = torch.autograd.grad(dispatch.matmul(a, b), [a, b], cotangent)
    out = dispatch.matmul(a, b)
    failing.errors = {"dgrad": error, "wgrad": error}
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            torch.autograd.grad(out, [a, b], cotangent)
        assert "failing" not in dispatch.stats()["quarantined"]
    else:
        same(torch.autograd.grad(out, [a, b], cotangent), wanted)
        assert "failing" in dispatch.stats()["quarantined"]


def test_whole_numbers_have_no_derivative(serving: Any) -> None:
    a, b = torch.ones(3, 4, dtype=torch.int64), torch.ones(4, 5, dtype=torch.int64)
    bias = torch.full((5,), 0.5, requires_grad=True)
    with serving():
        out = dispatch.matmul(a, b, bias=bias, activation="silu")
        assert (out.dtype, out.requires_grad) == (torch.int64, False)
        same(out, torch.full((3, 5), 4))


@pytest.mark.parametrize("shapes", [((2, 3, 4), (4, 5)), ((3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5))], ids=str)
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_many_cotangents_at_once(shapes: Any, serving: Any) -> None:
    operands = [tensor(shape, seed) for seed, shape in enumerate(shapes)] + [tensor((5,), 2)]

    def own(a: Any, b: Any, c: Any) -> Any:
        return torch.matmul(a, b) + c

    with serving():
        found, wanted = dispatch.matmul(operands[0], operands[1], bias=operands[2]), own(*operands)
        cotangents = tensor((7, *wanted.shape), 5, grad=False)
        grads = [torch.autograd.grad(x, operands, cotangents, is_grads_batched=True) for x in (found, wanted)]
    same(*grads)


def test_the_own_product_is_alone_again_once_it_is_known_to_serve_the_backward_pass_too() -> None:
    a, b = tensor((8, 4), 0, torch.float32), tensor((4, 8), 1, torch.float32)
    bias = tensor((8,), 2, torch.float32)
    with dispatch.use_policy(tuning={"mode": "off"}):
        dispatch.forget()
        names = [dispatch.matmul(a, b, bias=bias, activation="relu").grad_fn.name() for _ in range(2)]
        assert "MmBackward0" not in _upstream(dispatch.matmul(a, b).grad_fn)
        dispatch.matmul(a, b).sum().backward()
        assert "MmBackward0" in _upstream(dispatch.matmul(a, b).grad_fn)
        frozen = dispatch.matmul(a.detach(), b)
        assert "MmBackward0" in _upstream(frozen.grad_fn)
    assert names == ["ReluBackward0"] * 2


def _upstream(node: Any) -> set[str]:
    found, waiting = set(), [node]
    while waiting:
        node = waiting.pop()
        if node is not None:
            found.add(node.name())
            waiting += [parent for parent, _ in node.next_functions]
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_the_policy_says_what_gradients_are_quantized_to(compiled: bool) -> None:
    """e5m2 for the gradient, on whichever side of a product it stands, and e4m3 for the rest."""
    asked: list[tuple[str, str]] = []

    def note(problem: dispatch.Problem) -> None:
        asked.append((problem.op, str(problem.recipe)))

    pairs = ("e4m3:row", "e5m2:row@e4m3:row", "e4m3:row@e5m2:row")
    rules = [
        {"match": {"op": "dgrad"}, "recipes": {"allow": ["e5m2:row@e4m3:row"]}},
        {"match": {"op": "wgrad"}, "recipes": {"allow": ["e4m3:row@e5m2:row"]}},
    ]
    operands = [tensor((16, 16), 0, torch.bfloat16), tensor((16, 16), 1, torch.bfloat16)]
    backend = FakeBackend("scaling", recipes=pairs, on_plan=note)
    call = torch.compile(dispatch_matmul, fullgraph=True, backend="aot_eager") if compiled else dispatch.matmul
    with registered(backend), fake_timings({"scaling": 1.0, "baseline": 100.0}), dispatch.use_policy(rules=rules):
        gradients(call, operands)
    torch._dynamo.reset()
    wanted = {("matmul", "e4m3:row"), ("dgrad", "e5m2:row@e4m3:row"), ("wgrad", "e4m3:row@e5m2:row")}
    assert set(asked) == wanted


def dispatch_matmul(a: Any, b: Any) -> Any:
    return dispatch.matmul(a, b)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool, serving: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    operands = [tensor((3, 4), 0), tensor((4, 5), 1), tensor((5,), 2)]

    def product(a: Any, b: Any, c: Any) -> Any:
        def run(*given: Any) -> Any:
            return dispatch.matmul(given[0], given[1], bias=given[2], activation="gelu")

        return checkpoint(run, a, b, c, use_reentrant=reentrant)

    with serving():
        found = gradients(product, operands)
    same(found, gradients(lambda a, b, c: functional.gelu(a @ b + c), operands))


@pytest.mark.parametrize("fused", [{}, {"bias": (5,)}, {"bias": (5,), "activation": "gelu"}], ids=str)
@pytest.mark.parametrize("shape", [(3, 5), (2, 3, 5), (5,)], ids=str)
def test_layers_of_one_shape_in_checkpoints_of_their_own(shape: Any, fused: dict[str, Any], serving: Any) -> None:
    """What a recomputation saves is compared with what was saved before: here the same, whatever is known by then."""
    from torch.utils.checkpoint import checkpoint

    more = {name: tensor(x, 3) if name == "bias" else x for name, x in fused.items()}
    weights = [tensor((5, 5), seed) for seed in (1, 2, 3)]

    def run(x: Any) -> Any:
        for weight in weights:
            x = checkpoint(lambda y, w=weight: dispatch.matmul(y, w, **more), x, use_reentrant=False)
        return x

    def own(x: Any) -> Any:
        for weight in weights:
            x = x @ weight + more.get("bias", 0)
            x = ACTIVATE[more.get("activation")](x)
        return x

    with serving():
        dispatch.forget()
        for _ in range(3):
            same(gradients(run, [tensor(shape, 0)]), gradients(own, [tensor(shape, 0)]))


@pytest.mark.parametrize("out_dtype", [None, torch.float64])
def test_a_gradient_of_a_gradient_in_a_checkpoint(out_dtype: Any, serving: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    def penalty(x: Any, w: Any) -> Any:
        y = dispatch.matmul(x, w, out_dtype=out_dtype)
        (slope,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        return slope.square().sum()

    x, w = tensor((4, 8), 0, torch.float32), tensor((8, 8), 1, torch.float32)
    with serving():
        dispatch.forget()
        wanted = [torch.autograd.grad(penalty(x, w), [x, w]) for _ in range(3)][-1]
        found = torch.autograd.grad(checkpoint(penalty, x, w, use_reentrant=False), [x, w])
    same(found, wanted)


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_what_a_hook_for_saved_tensors_raises_is_the_callers(activation: str | None, known: bool, winner: Any) -> None:
    class OffloadError(Exception):
        pass

    def pack(x: Any) -> Any:
        raise OffloadError

    a, b = tensor((3, 4), 0), tensor((4, 5), 1)
    if known:
        dispatch.matmul(a, b, activation=activation)
    with pytest.raises(OffloadError), torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        dispatch.matmul(a, b, activation=activation)
    before = winner.calls
    dispatch.matmul(a, b, activation=activation).sum().backward()
    assert winner.calls > before


@pytest.mark.parametrize("activation", [None, "silu"])
def test_raw_fp8_beside_an_operand_that_is_trained(activation: str | None, serving: Any) -> None:
    a, b = tensor((4, 16), 0, torch.float32, False).to(torch.float8_e4m3fn), tensor((16, 4), 1, torch.bfloat16)
    wide = a.bfloat16()
    with serving():
        for x, y in ((a, b), (b.mT, a.mT)):
            found = gradients(lambda x, y: dispatch.matmul(x, y, activation=activation), [x, y])
            rows, columns = (wide, b) if x is a else (b.mT, wide.mT)
            wanted = gradients(lambda x, y: ACTIVATE[activation](x @ y), [rows, columns])
            same(found, wanted, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_a_backward_pass_takes_policy_and_scope_of_its_forward_pass(activation: str | None, winner: Any) -> None:
    a, b = tensor((3, 4), 0), tensor((4, 5), 1)
    rule = {"match": {"scope": "head"}, "backends": {"deny": ["winner"]}}

    def served(scope: str | None, forward: str, backward: str) -> bool:
        with dispatch.use_policy(forward, rules=[rule]):
            out = dispatch.matmul(a, b, activation=activation, scope=scope)
        before = winner.calls
        with dispatch.use_policy(backward):
            out.backward(tensor((3, 5), 2, grad=False))
        return bool(winner.calls > before)

    for _ in range(2):
        assert served(None, "default", "native")
        assert not served(None, "native", "default")
        assert not served("head", "default", "default")


def test_hooks(serving: Any) -> None:
    """On tensors, on what is saved for the backward pass, and on a parameter's accumulated gradient."""
    a, b = tensor((3, 4), 0), tensor((4, 5), 1)
    seen: list[str] = []
    packed: list[Any] = []

    def pack(x: Any) -> Any:
        packed.append(x.detach().clone())
        return len(packed) - 1

    a.register_hook(lambda grad: seen.append("a") or grad * 2)
    b.register_post_accumulate_grad_hook(lambda x: seen.append("b"))
    with serving(), torch.autograd.graph.saved_tensors_hooks(pack, lambda index: packed[index]):
        out = dispatch.matmul(a, b)
        out.register_hook(lambda grad: seen.append("out") or grad * 3)
        out.sum().backward()
    assert sorted(seen) == ["a", "b", "out"]
    same(a.grad, 6 * torch.ones(3, 5, dtype=a.dtype) @ b.detach().mT)
    same(b.grad, 3 * a.detach().mT @ torch.ones(3, 5, dtype=a.dtype))
    assert len(packed) >= 2


def test_an_operand_written_to_before_the_backward_pass_is_an_error(serving: Any) -> None:
    a, b = tensor((3, 4), 0), tensor((4, 5), 1)
    with serving():
        out = dispatch.matmul(a, b)
        with torch.no_grad():
            b.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("tokens", [13, 1, 0])
@pytest.mark.parametrize("outputs", [1, 7])
def test_gradients_of_ragged_sizes_against_float64(tokens: int, outputs: int, serving: Any) -> None:
    operands = [tensor((2, tokens, 5), 0, torch.bfloat16), tensor((5, outputs), 1, torch.bfloat16)]
    operands.append(tensor((outputs,), 2, torch.bfloat16))
    with serving():
        out, grads = gradients(lambda a, b, c: dispatch.matmul(a, b, bias=c), operands)
    wide = [x.detach().double().requires_grad_() for x in operands]
    wanted, exact = gradients(lambda a, b, c: a @ b + c, wide)
    for found, right in zip((out, *grads), (wanted, *exact), strict=True):
        same(found.double(), right, rtol=0.02, atol=0.05)


def test_a_torch_function_mode_sees_the_own_product(serving: Any) -> None:
    from torch.overrides import TorchFunctionMode

    class Counting(TorchFunctionMode):
        names: list[str] = []  # noqa: RUF012

        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.append(func.__name__)
            return func(*args, **(kwargs or {}))

    a = tensor((3, 3), 0, grad=False)
    with serving():
        dispatch.matmul(a, a)
        with Counting():
            same(dispatch.matmul(a, a), a @ a)
        assert "matmul" in Counting.names


def test_training_after_no_grad_and_inference_mode(serving: Any) -> None:
    a, b = tensor((3, 4), 0, torch.float32), tensor((4, 5), 1, torch.float32)
    with serving():
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                quiet = dispatch.matmul(a, b)
            assert not quiet.requires_grad
            assert quiet.is_inference() == (mode is torch.inference_mode)
            same(gradients(dispatch.matmul, [a, b]), gradients(torch.matmul, [a, b]))
        with torch.inference_mode():
            frozen = torch.ones(3, 4)
            same(dispatch.matmul(frozen, b.detach()), torch.matmul(frozen, b.detach()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_autocast_gives_its_dtype_and_gradients_the_operands(dtype: Any, serving: Any) -> None:
    operands = [tensor((3, 8), 0, dtype), tensor((8, 5), 1, dtype)]
    bias = tensor((5,), 2, torch.float32)

    def autocasting(call: Any) -> Any:
        def run(*given: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16):
                return call(*given)

        return run

    with serving():
        found, grads = gradients(autocasting(dispatch.matmul), operands)
        with torch.autocast("cpu", torch.bfloat16):
            fused = dispatch.matmul(*operands, bias=bias, activation="relu")
            mixed = dispatch.matmul(operands[0], operands[1].float())
            wide = dispatch.matmul(*operands, out_dtype=torch.float32)
            double = dispatch.matmul(operands[0].double(), operands[1].double())
        plain = dispatch.matmul(*operands)
    wanted, wanted_grads = gradients(autocasting(torch.matmul), operands)
    same(found, wanted)
    assert found.dtype == fused.dtype == mixed.dtype == torch.bfloat16
    assert (wide.dtype, double.dtype, plain.dtype) == (torch.float32, torch.float64, dtype)
    assert [x.dtype for x in grads] == [dtype, dtype]
    same(grads, wanted_grads, rtol=0.02, atol=0.05)
    same(fused.double(), functional.relu(operands[0].double() @ operands[1].double() + bias), rtol=0.02, atol=0.05)


@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("prepared", ["a", "b"])
def test_prepared_weights_under_autocast(activation: str | None, prepared: str, serving: Any) -> None:
    def call(a: Any, b: Any, bias: Any) -> Any:
        x, y = (dispatch.prepare(v) if name == prepared else v for name, v in (("a", a), ("b", b)))
        with torch.autocast("cpu", torch.bfloat16):
            return dispatch.matmul(x, y, bias=bias, activation=activation)

    def own(a: Any, b: Any, bias: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return ACTIVATE[activation]((a @ b).float() + bias).bfloat16()

    operands = [tensor((3, 8), 0, torch.float32), tensor((8, 5), 1, torch.float32), tensor((5,), 2, torch.float32)]
    with serving():
        found, grads = gradients(call, operands)
    assert found.dtype == torch.bfloat16
    wanted, wanted_grads = gradients(own, operands)
    same(found, wanted, rtol=0.02, atol=0.02)
    same(grads, wanted_grads, rtol=0.02, atol=0.05)


class Preparing(FakeBackend):
    """Keeps a record of what it served, and counts the forms that it made."""

    def __init__(self) -> None:
        super().__init__("preparing", recipes=("e4m3:row",))
        self.problems: list[Any] = []
        self.prepared = 0

    def prepare(self, operand: Any, recipe: Any, *, axis: int) -> Any:
        self.prepared += 1
        return operand.clone()

    def plan(self, problem: Any, config: str | None = None) -> Any:
        def product(a: Any, b: Any) -> Any:
            self.problems.append(problem)
            return (a.float() @ b.float()).bfloat16()

        return product


def test_a_prepared_weight_is_quantized_once_for_steps_under_autocast() -> None:
    """The backward pass too multiplies in autocast's dtype, by the forms that it made before."""
    backend, weight = Preparing(), torch.nn.Parameter(tensor((16, 32), 1, torch.float32).detach())
    prepared = dispatch.prepare(weight.mT)
    times = fake_timings({"baseline": 100.0, "preparing": 1.0})
    after_measuring = 0
    with registered(backend), times, dispatch.use_policy(recipes={"allow": ["e4m3:row"]}):
        for seed in range(3):
            x = tensor((8, 32), seed, torch.float32)
            with torch.autocast("cpu", torch.bfloat16):
                out = dispatch.matmul(x, prepared)
            out.backward(tensor((8, 16), 9 + seed, torch.bfloat16, False))
            assert x.grad.dtype == weight.grad.dtype == torch.float32
            after_measuring = backend.prepared if seed == 0 else after_measuring
    assert {p.op for p in backend.problems} == {"matmul", "dgrad", "wgrad"}
    assert {p.a.dtype for p in backend.problems} == {"bfloat16"}
    assert backend.prepared == after_measuring


@pytest.mark.parametrize("change", ["in place", "other memory", "fused optimizer"])
def test_the_form_for_dgrad_follows_a_weight_that_changes(change: str) -> None:
    weight = torch.nn.Parameter(tensor((16, 32), 1, torch.bfloat16).detach())
    prepared, grad = dispatch.prepare(weight.mT if change == "in place" else weight), tensor((8, 32), 3, torch.bfloat16)
    times = fake_timings({"baseline": 100.0, "preparing": 1.0})
    with registered(Preparing()), times, dispatch.use_policy(recipes={"allow": ["e4m3:row"]}):
        for _ in range(3):
            x = tensor((8, prepared.shape[0]), 2, torch.bfloat16)
            dispatch.matmul(x, prepared).backward(grad[:, : prepared.shape[1]].detach())
            wanted = grad[:, : prepared.shape[1]].float() @ prepared.array.mT.float()
            same(x.grad, wanted.bfloat16(), rtol=0.02, atol=0.05)
            if change == "in place":
                weight.detach().mul_(2)
            elif change == "other memory":
                weight.data = weight.data * 2
            else:
                torch.optim.SGD([weight], lr=0.1, fused=True).step()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("activation", [None, "gelu"])
def test_scaled_arrays_under_autocast(activation: str | None, compiled: bool, serving: Any) -> None:
    """A ScaledArray is cast as what it decodes to would be, whichever dtype is autocast's."""
    weight = dispatch.quantize(tensor((32, 16), 1, torch.float32, grad=False), "e4m3:row", axis=-2)
    rows = dispatch.quantize(tensor((4, 32), 2, torch.float32, grad=False), "e4m3:row")
    x = tensor((4, 32), 2, torch.float32)

    def call(a: Any) -> Any:
        return dispatch.matmul(a, weight, activation=activation)

    torch._dynamo.reset()
    run = torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call
    with serving():
        for dtype in (torch.bfloat16, torch.float16):
            with torch.autocast("cpu", dtype):
                found, (grad,) = gradients(run, [x])
                assert run(rows).dtype == found.dtype == dtype
                product = ACTIVATE[activation](x @ weight.dequantize())
            wanted = torch.autograd.grad(product, x, tensor((4, 16), 9, product.dtype, False))
            same(found.float(), product.detach().float(), rtol=0.02, atol=0.05)
            same(grad, *wanted, rtol=0.02, atol=0.1)
        assert run(rows).dtype == torch.float32


def test_no_autocast_reaches_into_a_plan(winner: Any) -> None:
    a = tensor((3, 3), 0, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", enabled=False):
        assert dispatch.matmul(a, a).dtype == torch.float32


class TestTransforms:
    """Everything that interprets a call gets the framework's own product."""

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on its way to functorch
    def test_functorch(self, serving: Any) -> None:
        a, b = tensor((3, 4), 0, grad=False), tensor((4, 5), 1, grad=False)
        stack = tensor((6, 3, 4), 2, grad=False)
        with serving():
            dispatch.matmul(a, b)
            func = torch.func
            same(func.grad(lambda x: dispatch.matmul(x, b).sum())(a), func.grad(lambda x: (x @ b).sum())(a))
            same(func.vmap(dispatch.matmul, (0, None))(stack, b), stack @ b)
            same(func.vmap(lambda x: dispatch.matmul(x, b, activation="relu"))(stack), functional.relu(stack @ b))
            found = func.jvp(lambda x: dispatch.matmul(x, b), (a,), (a,))
            same(found, (a @ b, a @ b))
            same(func.hessian(lambda x: dispatch.matmul(x, b).square().sum())(a), _hessian(a, b))

    @pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # torch's own, on its way to functorch
    def test_forward_ad(self, serving: Any) -> None:
        a, b = tensor((3, 4), 0, grad=False), tensor((4, 5), 1, grad=False)
        with serving():
            dispatch.matmul(a, b)
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
                for arguments in ({}, {"bias": torch.zeros(5, dtype=a.dtype)}):
                    out = torch.autograd.forward_ad.unpack_dual(dispatch.matmul(dual, b, **arguments))
                    same(out.tangent, torch.ones_like(a) @ b)

    @pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")  # torch.func.jvp itself
    def test_no_plan_severs_a_derivative(self) -> None:
        """A kernel reads memory: what torch keeps beside the values is lost on the way through it."""
        a, b = tensor((3, 4), 0, grad=False), tensor((4, 5), 1, grad=False)
        severing = FakeBackend("severing", lambda x, y: (x.detach() @ y.detach()).clone())
        with registered(severing), fake_timings({"severing": 1.0, "baseline": 100.0}):
            assert dispatch.explain(a, b).backend == "severing"
            dispatch.matmul(a, b)
            with torch.autograd.forward_ad.dual_level():
                dual = torch.autograd.forward_ad.make_dual(a, torch.ones_like(a))
                tangent = torch.autograd.forward_ad.unpack_dual(dispatch.matmul(dual, b)).tangent
            same(tangent, torch.ones_like(a) @ b)
            same(torch.func.grad(lambda x: dispatch.matmul(x, b).sum())(a), b.sum(1).expand(3, 4))
            same(torch.func.jacfwd(lambda x: dispatch.matmul(x, b))(a), torch.func.jacfwd(lambda x: x @ b)(a))
            x = a.clone().requires_grad_()
            dispatch.matmul(x, b).sum().backward()
            same(x.grad, b.sum(1).expand(3, 4))

    def test_fake_tensors(self, serving: Any) -> None:
        from torch._subclasses.fake_tensor import FakeTensorMode

        with serving(), FakeTensorMode():
            a, b = torch.ones(3, 4), torch.ones(4, 5)
            for arguments in ({}, {"activation": "gelu"}, {"out_dtype": torch.float64}):
                assert dispatch.matmul(a, b, **arguments).shape == (3, 5)

    def test_meta_tensors(self, serving: Any) -> None:
        a, b = torch.ones(2, 3, 4, device="meta"), torch.ones(4, 5, device="meta")
        with serving():
            for arguments in ({}, {"activation": "gelu"}, {"bias": torch.ones(5, device="meta")}):
                out = dispatch.matmul(a, b, **arguments)
                assert (out.shape, out.device.type) == ((2, 3, 5), "meta")
            assert dispatch.explain(a, b).backend == "bf16_fallback"

    def test_subclasses_keep_their_type(self, serving: Any) -> None:
        class Named(torch.Tensor):
            pass

        a, b = torch.ones(3, 4).as_subclass(Named), torch.ones(4, 5)
        with serving():
            assert type(dispatch.matmul(a, b)) is Named
            assert type(dispatch.matmul(b.mT, a.mT, activation="relu")) is Named

    def test_a_bias_of_a_subclass_is_not_forgotten(self, serving: Any) -> None:
        class Named(torch.Tensor):
            pass

        a, b, bias = torch.ones(3, 4), torch.ones(4, 5), torch.ones(5)
        with serving():
            same(dispatch.matmul(a, b, activation="relu"), torch.full((3, 5), 4.0))
            found = dispatch.matmul(a, b, bias=bias.as_subclass(Named), activation="relu")
        same(found.as_subclass(torch.Tensor), torch.full((3, 5), 5.0))

    @pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
    def test_nested_tensors(self, serving: Any) -> None:
        parts, weight = [tensor((3, 8), 0), tensor((5, 8), 1)], tensor((8, 4), 2)
        with serving():
            dispatch.matmul(parts[0], weight)  # so that tensors are looked up at once
            for layout in (torch.strided, torch.jagged):
                x = torch.nested.nested_tensor(parts, layout=layout)
                y = torch.nested.nested_tensor([weight, weight]) if layout is torch.strided else weight
                for found, part in zip(dispatch.matmul(x, y).unbind(), parts, strict=True):
                    same(found, part @ weight)

    @pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
    def test_sparse_tensors(self, serving: Any) -> None:
        dense = torch.eye(3)
        with serving():
            dispatch.matmul(dense, dense)
            for sparse in (dense.to_sparse(), dense.to_sparse_csr()):
                for pair in ((sparse, dense), (dense, sparse)):
                    try:
                        wanted = torch.matmul(*pair)
                    except RuntimeError:
                        with pytest.raises(RuntimeError):
                            dispatch.matmul(*pair)
                    else:
                        same(dispatch.matmul(*pair), wanted)


def _hessian(a: Any, b: Any) -> Any:
    return torch.func.hessian(lambda x: (x @ b).square().sum())(a)


def test_batched_gradients_are_as_torchs_own():
    """is_grads_batched and vectorized Jacobians map by a vmap of their own, whose tensors look plain."""
    x = torch.randn(5, 8).bfloat16().requires_grad_()
    b, many = torch.randn(8, 3).bfloat16(), torch.randn(4, 5, 3).bfloat16()
    for product in (torch.matmul, dispatch.matmul):
        (grad,) = torch.autograd.grad(product(x, b), x, many, is_grads_batched=True)
        torch.testing.assert_close(grad, many @ b.mT)
        found = torch.autograd.functional.jacobian(lambda y, f=product: f(y, b), x.detach(), vectorize=True)
        assert found.shape == (5, 3, 5, 8)
