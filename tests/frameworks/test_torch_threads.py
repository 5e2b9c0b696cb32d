"""Threads and processes with torch: one cold store, right values and gradients in each."""

from __future__ import annotations

import contextvars
import os
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

import dispatch

torch = pytest.importorskip("torch")


def test_eight_threads_train_on_a_cold_and_on_a_warm_store(winner: Any) -> None:
    dispatch.clear_store()
    wanted = [[torch.matmul, None, None] for _ in range(8)]
    errors: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(index: int) -> None:
        try:
            random = torch.Generator().manual_seed(index % 2)
            a = torch.randn(5, 7, generator=random, dtype=torch.float64).requires_grad_()
            b = torch.randn(7, 3, generator=random, dtype=torch.float64).requires_grad_()
            barrier.wait(60)
            for _ in range(5):
                a.grad = b.grad = None
                out = dispatch.matmul(a, b, activation="silu")
                out.sum().backward()
                own = [x.detach().clone().requires_grad_() for x in (a, b)]
                torch.nn.functional.silu(own[0] @ own[1]).sum().backward()
                torch.testing.assert_close((a.grad, b.grad), (own[0].grad, own[1].grad))
        except BaseException as error:
            errors.append(error)

    for warm in (False, True):
        if warm:
            dispatch.forget()
        threads = [threading.Thread(target=work, args=(index,)) for index in range(len(wanted))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []


def test_threads_call_one_compiled_function(winner: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, y: dispatch.matmul(x, y), fullgraph=True, backend="aot_eager", dynamic=True)
    compiled(torch.ones(2, 4), torch.ones(4, 5))
    errors: list[BaseException] = []

    def work(index: int) -> None:
        try:
            a, b = torch.randn(index + 2, 4), torch.randn(4, 5)
            for _ in range(5):
                torch.testing.assert_close(compiled(a, b), a @ b)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    torch._dynamo.reset()
    assert errors == []


SCRIPT = """
import os, sys, warnings
import multiprocessing
import torch, dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

torch.set_num_threads(1)

def right(seed):
    random = torch.Generator().manual_seed(seed)
    a, b = (torch.randn(6, 6, generator=random, dtype=torch.float64).requires_grad_() for _ in range(2))
    with registered(FakeBackend("fast")), fake_timings({"baseline": 100.0, "fast": 10.0}):
        out = dispatch.matmul(a, b)
        out.sum().backward()
    ones = torch.ones(6, 6, dtype=torch.float64)
    pairs = (out, a @ b), (a.grad, ones @ b.mT), (b.grad, a.mT @ ones)
    return all(torch.allclose(x, y) for x, y in pairs)

def child(seed):
    sys.exit(0 if right(seed) else 1)

if __name__ == "__main__":
    if sys.argv[1] == "fork":
        assert right(0)  # the parent has used everything before
        warnings.simplefilter("ignore")  # Python 3.12 warns of the parent's threads
    context = multiprocessing.get_context(sys.argv[1])
    children = [context.Process(target=child, args=(seed,)) for seed in range(3)]
    for process in children:
        process.start()
    for process in children:
        process.join(100)
    print([process.exitcode for process in children])
"""


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_processes_on_a_cold_store(tmp_path: Path, how: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    done = subprocess.run(
        [sys.executable, str(script), how],
        capture_output=True,
        text=True,
        env=os.environ | {"DISPATCH_CACHE_DIR": str(tmp_path / "cache")},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[-2] == "[0, 0, 0]", done.stderr


def test_policies_that_are_left_in_any_order_leave_nothing_for_autograds_threads() -> None:
    """As two tasks of one thread do."""
    from dispatch.frameworks.compiled import POLICY

    contexts = contextvars.copy_context(), contextvars.copy_context()
    first, second = dispatch.use_policy("native"), dispatch.use_policy("strict")
    contexts[0].run(first.__enter__)
    contexts[1].run(second.__enter__)
    assert [policy.name for policy in torch._C._get_obj_in_tls(POLICY)] == ["native", "strict"]
    contexts[0].run(first.__exit__, None, None, None)
    assert [policy.name for policy in torch._C._get_obj_in_tls(POLICY)] == ["strict"]
    contexts[1].run(second.__exit__, None, None, None)
    assert torch._C._get_obj_in_tls(POLICY) == []
