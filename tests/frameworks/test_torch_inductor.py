"""What code of Inductor's calls for dispatch.matmul: a plan, without torch's dispatcher, as long as it is known."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import dispatch
from dispatch import Rejection
from dispatch.testing import FakeBackend, fake_timings, registered

torch = pytest.importorskip("torch")
functional = torch.nn.functional
pytest.importorskip("torch._dynamo.testing")

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore:::torch"),
]


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    import torch._inductor.config

    torch._dynamo.reset()
    with torch._inductor.config.patch(force_disable_caches=True):
        yield
    torch._dynamo.reset()


def tensor(shape: tuple[int, ...], seed: int = 0, dtype: Any = torch.float32, grad: bool = False) -> Any:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.float64).to(dtype).requires_grad_(grad)


def same(found: Any, wanted: Any, **tolerance: Any) -> None:
    torch.testing.assert_close(found, wanted, **tolerance)


def compiled(function: Callable[..., Any], **options: Any) -> Any:
    return torch.compile(function, fullgraph=True, **options)


def called(call: Callable[[], Any]) -> Counter[str]:
    """Return how often each Python function was called, by the name of its code, in this thread."""
    found: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: Any) -> None:
        if event == "call":
            found[frame.f_code.co_name] += 1

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


class TestHostCost:
    """By what is called: times are for benchmarks/."""

    MOST = 3
    """Python functions that a product may add to one of torch.matmul's: a guard, the look-up, and whose policy."""

    def test_of_a_known_product(self) -> None:
        ours, own = compiled(lambda x, y: dispatch.matmul(x, y)), compiled(lambda x, y: torch.matmul(x, y))
        a, b = tensor((8, 8)), tensor((8, 8), 1)
        with torch.no_grad():
            for _ in range(3):
                ours(a, b), own(a, b)
            found, wanted = called(lambda: ours(a, b)), called(lambda: own(a, b))
        assert found["direct"] == 1
        assert "differentiable" not in found
        assert "_run" not in found
        assert found.total() - wanted.total() <= self.MOST, found - wanted

    def test_of_a_prepared_weight(self) -> None:
        dispatch.forget()
        weight = dispatch.prepare(tensor((8, 8), 1))
        ours, own = compiled(lambda x: dispatch.matmul(x, weight)), compiled(lambda x: torch.matmul(x, weight.array))
        a = tensor((8, 8))
        with torch.no_grad():
            for _ in range(3):
                ours(a), own(a)
            found, wanted = called(lambda: ours(a)), called(lambda: own(a))
            (plan,) = dispatch._api._young.values()
            alone = called(lambda: plan(a, weight))
        assert found["direct"] == 1
        more = found.total() - wanted.total() - alone.total()
        assert more <= self.MOST + 2, found - wanted  # two more: which prepared operand the weight is

    def test_of_a_backward_pass(self) -> None:
        ours, own = compiled(lambda x, y: dispatch.matmul(x, y)), compiled(lambda x, y: torch.matmul(x, y))
        a, b, grad = tensor((8, 8), 0, grad=True), tensor((8, 8), 1, grad=True), tensor((8, 8), 2)
        for _ in range(3):
            ours(a, b).backward(grad), own(a, b).backward(grad)
        found, wanted = called(lambda: ours(a, b).backward(grad)), called(lambda: own(a, b).backward(grad))
        assert found["direct"] == 3
        assert found.total() - wanted.total() <= 3 * self.MOST, found - wanted

    def test_a_backends_plan_is_called_directly(self, winner: Any) -> None:
        a, b = tensor((8, 8)), tensor((8, 8), 1)
        ours = compiled(lambda x, y: dispatch.matmul(x, y))
        with torch.no_grad():
            for _ in range(3):
                ours(a, b)
            before, found = winner.calls, called(lambda: ours(a, b))
        assert winner.calls == before + 1
        assert "_run" not in found


class Counting(FakeBackend):
    """The own product, counted."""

    def __init__(self) -> None:
        super().__init__("counting")
        self.calls = 0

    def plan(self, problem: Any, config: str | None = None) -> Any:
        def product(a: Any, b: Any) -> Any:
            self.calls += 1
            return torch.matmul(a, b)

        return product


class TestChoice:
    def test_follows_the_policy_in_force_and_what_is_forgotten(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        ours = compiled(lambda x, y: dispatch.matmul(x, y))

        def served() -> int:
            before = winner.calls
            same(ours(a, b), a @ b)
            return int(winner.calls - before)

        with torch.no_grad():
            for _ in range(3):
                served()
            for _ in range(3):
                with dispatch.use_policy("native"):
                    assert served() == 0
                    assert served() == 0
                assert served() == 1
            with registered(FakeBackend("better", torch.matmul)), fake_timings({"better": 1.0, "winner": 50.0}):
                dispatch.clear_store()
                served()
                assert served() == 0
            dispatch.clear_store()

    @pytest.mark.parametrize("way", ["eager", "compiled", "a backward pass"])
    def test_deterministic_mode_is_a_problem_of_its_own(self, way: str) -> None:
        """A backend that is not deterministic serves no known call once the mode is on."""

        class Scattering(Counting):
            def rejections(self, problem: Any) -> list[Rejection]:
                on = torch.are_deterministic_algorithms_enabled()
                return [Rejection("mode", "deterministic", "any order of sums")] if on else []

        a, b, backend = tensor((3, 4)), tensor((4, 5), 1), Scattering()
        ours = compiled(lambda x, y: dispatch.matmul(x, y)) if way == "compiled" else dispatch.matmul

        def served() -> bool:
            before = backend.calls
            for _ in range(3):
                out = ours(a, b)
                if way == "a backward pass":
                    out.backward(tensor((3, 5), 2))
            return bool(backend.calls > before)

        with registered(backend), fake_timings({"counting": 1.0, "baseline": 100.0}):
            for on in (False, True, False, True):
                torch.use_deterministic_algorithms(on)
                try:
                    with torch.set_grad_enabled(way == "a backward pass"):
                        a.requires_grad_(way == "a backward pass")
                        assert served() is not on
                finally:
                    torch.use_deterministic_algorithms(False)

    def test_takes_policy_scope_and_backend_of_the_product(self, winner: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        rule = {"match": {"scope": "head.*"}, "backends": {"deny": ["winner"]}}
        calls = {
            "native": (lambda x, y: dispatch.matmul(x, y, policy="native"), 0),
            "scope": (lambda x, y: dispatch.matmul(x, y, scope="head.up"), 0),
            "other scope": (lambda x, y: dispatch.matmul(x, y, scope="tail.up"), 1),
            "backend": (lambda x, y: dispatch.matmul(x, y, backend="winner", scope="head"), 1),
        }
        with torch.no_grad(), dispatch.use_policy(rules=[rule]):
            for name, (call, wanted) in calls.items():
                ours = compiled(call)
                for _ in range(3):
                    ours(a, b)
                before = winner.calls
                same(ours(a, b), a @ b)
                assert winner.calls - before == wanted, name

    def test_a_plan_that_raises_later_is_quarantined(self) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        broken: list[bool] = []

        def product(x: Any, y: Any) -> Any:
            if broken:
                raise SystemError("broken")
            return torch.matmul(x, y)

        ours = compiled(lambda x, y: dispatch.matmul(x, y))
        with torch.no_grad(), registered(FakeBackend("fake", product)), fake_timings({"fake": 1.0, "baseline": 100.0}):
            for _ in range(3):
                same(ours(a, b), a @ b)
            assert "fake" not in dispatch.stats()["quarantined"]
            broken.append(True)
            for _ in range(3):
                same(ours(a, b), a @ b)
            assert "broken" in dispatch.stats()["quarantined"]["fake"]

    def test_an_interrupt_is_the_callers(self) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        pressed: list[bool] = []

        def product(x: Any, y: Any) -> Any:
            if pressed:
                raise KeyboardInterrupt
            return torch.matmul(x, y)

        ours = compiled(lambda x, y: dispatch.matmul(x, y))
        with torch.no_grad(), registered(FakeBackend("fake", product)), fake_timings({"fake": 1.0, "baseline": 100.0}):
            for _ in range(3):
                ours(a, b)
            pressed.append(True)
            with pytest.raises(KeyboardInterrupt):
                ours(a, b)
            pressed.clear()
            same(ours(a, b), a @ b)
            assert "fake" not in dispatch.stats()["quarantined"]

    def test_on_a_thread_of_autograds_the_policy_is_the_one_around_backward(self, winner: Any) -> None:
        import contextvars

        a, b = tensor((3, 4)), tensor((4, 5), 1)
        ours = compiled(lambda x, y: dispatch.matmul(x, y))
        with torch.no_grad():
            for _ in range(3):
                ours(a, b)
        with dispatch.use_policy("native"):
            context = contextvars.copy_context()
        (site, *_), *_ = (key for key in dispatch._api._table.compiled)
        before: list[int] = []

        def run() -> None:
            torch._C._stash_obj_in_tls("context", context)  # as torch does for its device threads
            before.append(winner.calls)
            for _ in range(2):
                torch.ops.gemm_dispatch.direct_matmul(site, a, b)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert winner.calls == before[0]

    def test_flops_are_counted_though_a_plan_is_known(self, serving: Any) -> None:
        from torch.utils.flop_counter import FlopCounterMode

        a, b = tensor((3, 4)), tensor((4, 5), 1)
        (site, arguments) = "(('a', 'b'), {}, (('torch.float32', 'cpu', (3, 4), (4, 1)),))", (a, b)
        with serving(), torch.no_grad():
            for _ in range(3):
                torch.ops.gemm_dispatch.direct_matmul(site, *arguments)
            with FlopCounterMode(display=False) as counter:
                torch.ops.gemm_dispatch.direct_matmul(site, *arguments)
        assert counter.get_total_flops() == 2 * 3 * 4 * 5


class TestValues:
    @pytest.mark.parametrize("dynamic", [False, True])
    def test_shapes_strides_and_epilogues(self, serving: Any, dynamic: bool) -> None:
        bias = tensor((5,), 2, torch.float64)
        calls: list[Callable[[Any, Any], Any]] = [
            lambda x, y: dispatch.matmul(x, y),
            lambda x, y: dispatch.matmul(x, y, bias=bias, activation="silu", out_dtype=torch.float64),
        ]
        wanted: list[Callable[[Any, Any], Any]] = [
            torch.matmul,
            lambda x, y: functional.silu(x.double() @ y.double() + bias),
        ]
        shapes = [((3, 4), (4, 5)), ((2, 3, 4), (4, 5)), ((2, 3, 4), (2, 4, 5)), ((4,), (4, 5)), ((7, 4), (4, 5))]
        with serving(), torch.no_grad():
            for call, right in zip(calls, wanted, strict=True):
                ours = compiled(call, dynamic=dynamic)
                for shape_a, shape_b in shapes:
                    torch._dynamo.reset()
                    plain = tensor(shape_a), tensor(shape_b, 1)
                    turned = tuple(x.mT.contiguous().mT if x.dim() > 1 else x for x in plain)
                    for operands in (plain, turned):
                        for _ in range(3):
                            out = ours(*operands)
                            same(out.double(), right(*operands).double(), rtol=1e-5, atol=1e-5)
                            assert out.is_contiguous()

    @pytest.mark.slow
    def test_between_kernels_of_inductors(self, serving: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        ours = compiled(lambda x, y: dispatch.matmul((x.mT + 1).relu().mT, y) * 2)
        with serving(), torch.no_grad():
            for _ in range(3):
                same(ours(a, b), torch.matmul((a + 1).relu(), b) * 2)

    @pytest.mark.slow
    def test_gradients(self, serving: Any) -> None:
        ours = compiled(lambda x, y, z: dispatch.matmul(x, y, bias=z, activation="silu"))
        with serving():
            for step in range(3):
                operands = [
                    tensor((2, 3, 4), step, grad=True),
                    tensor((4, 5), 1, grad=True),
                    tensor((5,), 2, grad=True),
                ]
                grad = tensor((2, 3, 5), 9)
                found = torch.autograd.grad(ours(*operands), operands, grad)
                a, b, c = operands
                same(found, torch.autograd.grad(functional.silu(a @ b + c), operands, grad), rtol=1e-4, atol=1e-5)

    def test_nan_stays(self, serving: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        ours = compiled(lambda x, y: dispatch.matmul(x, y))
        with serving(), torch.no_grad():
            for _ in range(3):
                ours(a, b)
            a[1, 2] = torch.nan
            same(ours(a, b), a @ b, equal_nan=True)

    def test_scaled_arrays(self, serving: Any) -> None:
        weight = dispatch.quantize(tensor((32, 16), 1), "e4m3:row", axis=-2)
        a = tensor((8, 32))
        ours = compiled(lambda x: dispatch.matmul(x, weight))
        with serving(), torch.no_grad():
            for _ in range(3):
                same(ours(a), dispatch.matmul(a, weight))

    def test_prepared_weights_that_change_and_that_are_others(self, serving: Any) -> None:
        a = tensor((3, 4))
        ours = compiled(lambda x, w: dispatch.matmul(x, w))
        with serving(), torch.no_grad():
            for seed in range(4):
                weight = dispatch.prepare(tensor((4, 5), seed))
                for _ in range(3):
                    same(ours(a, weight), a @ weight.array)
                    weight.array.mul_(-2)

    def test_blocks_of_their_own_weights_share_their_graphs(self, serving: Any) -> None:
        class Block(torch.nn.Module):
            def __init__(self, seed: int) -> None:
                super().__init__()
                self.weight = dispatch.prepare(tensor((8, 8), seed))

            def forward(self, x: Any) -> Any:
                return dispatch.matmul(x, self.weight).relu()

        blocks = [Block(seed) for seed in range(12)]  # Dynamo compiles a function 8 times at most
        x = tensor((3, 8), 20)
        with serving(), torch.no_grad(), torch._dynamo.config.patch(error_on_recompile=True):
            run = [compiled(block) for block in blocks]
            for _ in range(3):
                for block, own in zip(run, blocks, strict=True):
                    same(block(x), own(x))
            blocks[0].weight = dispatch.prepare(tensor((8, 8), 30))
            same(run[0](x), blocks[0](x))

    def test_a_prepared_weight_that_is_no_more(self, serving: Any) -> None:
        a, b, other = tensor((3, 4)), tensor((4, 5), 1), tensor((4, 5), 2)
        weight = dispatch.prepare(b)
        layouts = "(('torch.float32', 'cpu', (3, 4), (4, 1)), ('torch.float32', 'cpu', (4, 5), (5, 1)))"
        site = f"(('a', 'b'), {{'prepared_b': True}}, {layouts})"
        with serving(), torch.no_grad():
            for x in (b, b, b, other, b):
                same(torch.ops.gemm_dispatch.direct_matmul(site, a, x), a @ x)
            del weight
            for x in (b, other):
                same(torch.ops.gemm_dispatch.direct_matmul(site, a, x), a @ x)

    @pytest.mark.slow
    @pytest.mark.parametrize("inside", [False, True])
    def test_autocast(self, serving: Any, inside: bool) -> None:
        a, b = tensor((3, 8)), tensor((8, 5), 1)

        def product(x: Any, y: Any) -> Any:
            with torch.autocast("cpu", torch.bfloat16, enabled=inside):
                return dispatch.matmul(x, y)

        ours = compiled(product if inside else lambda x, y: dispatch.matmul(x, y))
        with serving(), torch.no_grad():
            for _ in range(3):
                with torch.autocast("cpu", torch.bfloat16):
                    found, wanted = ours(a, b), torch.matmul(a, b)
                assert found.dtype == torch.bfloat16
                same(found, wanted)
            if not inside:
                same(ours(a, b), a @ b)


class TestCode:
    @pytest.mark.slow
    def test_is_found_in_a_cache_by_another_process(self, tmp_path: Path) -> None:
        script = """
import torch, dispatch
from torch._dynamo.utils import counters
a, b = torch.ones(3, 4), torch.ones(4, 5)
ours = torch.compile(lambda x, y: dispatch.matmul(x, y) + 1, fullgraph=True)
with torch.no_grad():
    for _ in range(3):
        assert (ours(a, b) == 5).all()
print(counters["inductor"]["fxgraph_cache_hit"], len(dispatch._api._table.compiled))
"""
        folders = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "code"), "DISPATCH_CACHE_DIR": str(tmp_path / "store")}
        for wanted in ("0 1", "1 1"):
            done = subprocess.run(
                [sys.executable, "-c", script],
                check=True,
                capture_output=True,
                text=True,
                timeout=300,
                env=os.environ | folders,
            )
            assert done.stdout.strip() == wanted

    @pytest.mark.slow
    def test_in_cpp_calls_the_op(self, serving: Any) -> None:
        a, b = tensor((3, 4)), tensor((4, 5), 1)
        ours = compiled(lambda x, y: dispatch.matmul(x, y), options={"cpp_wrapper": True})
        with serving(), torch.no_grad():
            for _ in range(2):
                same(ours(a, b), a @ b)

    def test_calls_the_op_under_a_version_of_torch_that_is_not_known(self, monkeypatch: pytest.MonkeyPatch) -> None:
        import torch._inductor.lowering

        from dispatch.frameworks import _torch_inductor

        lowered: list[bool] = []
        monkeypatch.setattr(_torch_inductor, "_lower", lambda: lowered.append(True))
        for version, wanted in (("1.13.1", 0), ("99.0.0a0+git12", 0), (torch.__version__, 1)):
            monkeypatch.setattr(_torch_inductor, "_registered", False)
            monkeypatch.setattr(torch, "__version__", version)
            _torch_inductor.register()
            assert len(lowered) == wanted, version
