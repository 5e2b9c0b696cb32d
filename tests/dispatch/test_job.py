"""The processes of a job agree: the first to decide does so for all, and who cannot ask takes the baseline."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import dispatch
from dispatch.remembering import job
from dispatch.remembering.decisions import Decisions, keys_of
from dispatch.remembering.job import PREFIX, Agreement
from dispatch.remembering.store import DecisionStore
from dispatch.testing import FakeBackend, fake_timings, registered


class Shared:
    """A job's store in a dict."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}

    def get(self, key: str) -> str | None:
        """Return what is there."""
        return self.texts.get(key)

    def first(self, key: str, text: str) -> str:
        """Write unless something is there."""
        return self.texts.setdefault(key, text)


class Deaf(Shared):
    """A job's store that does not answer."""

    def first(self, key: str, text: str) -> str:
        """Wait for good."""
        threading.Event().wait()
        raise AssertionError

    def get(self, key: str) -> str | None:
        """Have nothing."""
        return None


@pytest.fixture
def decided(tmp_path: Path) -> tuple[dispatch.Decision, dispatch.Decision]:
    """Two decisions for one problem: `fast` serves, and the baseline does."""
    a = np.random.default_rng(0).standard_normal((5, 7)).astype("f4")
    dispatch.clear_store()
    with registered(FakeBackend("fast")):
        with fake_timings({"fast": 1.0, "baseline": 100.0}):
            fast = dispatch.explain(a, a.T)
        dispatch.clear_store()
        with fake_timings({"fast": 100.0, "baseline": 1.0}):
            own = dispatch.explain(a, a.T)
    assert (fast.backend, own.backend) == ("fast", "bf16_fallback")
    return fast, own


def decisions(path: Path, job: object, wait_s: float = 5.0) -> Decisions:
    return Decisions(DecisionStore(path), Agreement(lambda: job, wait_s))  # type: ignore[arg-type, return-value]


def test_what_does_not_last_is_agreed_on_and_not_stored(decided, tmp_path) -> None:
    fast, own = decided
    the_job = Shared()
    one = decisions(tmp_path / "a.sqlite", the_job)
    assert one.agree("key", fast, [fast.candidate], lasting=False) == fast
    assert one.stored() == []
    other = decisions(tmp_path / "b.sqlite", the_job)
    assert other.agree("key", own, [fast.candidate, own.candidate], lasting=True).candidate == fast.candidate


def test_a_job_that_did_not_answer_is_not_asked_again() -> None:
    asked = []

    class Deaf:
        store = None

        def get(self, key: str) -> str | None:
            asked.append(key)
            raise ConnectionError("gone")

        first = get

    agreement = Agreement(Deaf, 5.0)
    assert agreement.get("key") is None
    assert agreement.lost == "ConnectionError: gone"
    assert agreement.get("other") is None
    assert agreement.first("third", "text") is None
    assert len(asked) == 1


def test_the_first_writer_wins(decided, tmp_path) -> None:
    fast, own = decided
    the_job, able = Shared(), [fast.candidate, own.candidate]
    one, other, late = (decisions(tmp_path / f"{name}.sqlite", the_job) for name in "abc")
    assert one.agree("key", own, able, lasting=True) == own
    found = other.agree("key", fast, able, lasting=True)
    assert (found.candidate, found.source, found.problem) == (own.candidate, "job", own.problem)
    assert other.find("key").candidate == own.candidate
    assert late.find("key").candidate == own.candidate
    assert late.find("other key") is None
    assert list(the_job.texts) == [PREFIX + "key"]


def test_what_a_store_knows_already_is_agreed_on_too(decided, tmp_path) -> None:
    fast, own = decided
    for name, decision in (("a", fast), ("b", own)):
        decisions(tmp_path / f"{name}.sqlite", None).keep("key", decision)
    job = Shared()
    one, other = (decisions(tmp_path / f"{name}.sqlite", job) for name in "ab")
    assert (one.find("key").backend, one.find("key").source) == ("fast", "store")
    assert (other.find("key").backend, other.find("key").source) == ("fast", "job")


def test_what_was_decided_before_a_job_began_is_asked_for_again(decided, tmp_path) -> None:
    fast, own = decided
    shared, begun = Shared(), []
    found = Decisions(DecisionStore(tmp_path / "a.sqlite"), Agreement(lambda: begun[0] if begun else None))
    found.keep("key", fast)
    assert found.find("key").candidate == fast.candidate
    begun.append(shared)
    decisions(tmp_path / "b.sqlite", shared).agree("key", own, [own.candidate], lasting=True)
    assert (found.find("key").candidate, found.find("key").source) == (own.candidate, "job")


def test_a_forked_child_is_no_member_of_its_parents_job(monkeypatch) -> None:
    parents, own = Shared(), Shared()
    for store in (parents, own):
        store.store = store
    members = [parents]
    monkeypatch.setattr(job, "_found", lambda: members[0])
    monkeypatch.setattr(job, "_inherited", [])
    assert job.current() is parents
    job._forked()
    assert job.current() is None
    members[0] = own  # it joins one of its own
    assert job.current() is own


def test_a_time_out_means_the_baseline(decided, tmp_path) -> None:
    fast, _ = decided
    ours = decisions(tmp_path / "a.sqlite", Deaf(), wait_s=0.05)
    found = ours.agree("key", fast, [fast.candidate], lasting=True)
    assert found.candidate == dispatch.BASELINE
    assert "no answer within 0.05 s" in found.reason
    assert ours.stored() == []
    assert ours.agree("another", fast, [fast.candidate], lasting=True).candidate == dispatch.BASELINE


def test_a_store_that_raises_means_the_baseline(decided, tmp_path) -> None:
    class Broken(Deaf):
        def first(self, key: str, text: str) -> str:
            raise ConnectionError("the coordinator is gone")

    fast, _ = decided
    found = decisions(tmp_path / "a.sqlite", Broken()).agree("key", fast, [fast.candidate], lasting=True)
    assert found.candidate == dispatch.BASELINE
    assert "the coordinator is gone" in found.reason


def test_what_another_process_chose_and_cannot_run_here_means_the_baseline(decided, tmp_path) -> None:
    fast, own = decided
    job = Shared()
    decisions(tmp_path / "a.sqlite", job).agree("key", fast, [fast.candidate], lasting=True)
    found = decisions(tmp_path / "b.sqlite", job).agree("key", own, [], lasting=True)
    assert found.candidate == dispatch.BASELINE
    assert "cannot run in this one" in found.reason


def test_a_decision_that_the_guard_asked_for_is_this_process_own(decided, tmp_path) -> None:
    fast, own = decided
    job = Shared()
    decisions(tmp_path / "a.sqlite", job).agree("key", fast, [fast.candidate], lasting=True)
    ours = decisions(tmp_path / "b.sqlite", job)
    assert ours.agree("key", own, [fast.candidate], lasting=True, alone=True) == own


def test_outside_of_a_job_nobody_is_asked(decided, tmp_path) -> None:
    fast, _ = decided
    ours = decisions(tmp_path / "a.sqlite", None)
    assert ours.agree("key", fast, [fast.candidate], lasting=True) == fast
    assert ours.find("key") == fast


def test_devices_of_one_name_share_decisions() -> None:
    """Which GPU holds the operands is no matter; what kind it is stands among the circumstances."""
    operand = dispatch.Operand("bfloat16")
    first = dispatch.Problem(512, 8, 8, operand, operand, "bfloat16", "jax", "sm90", "cuda:0")
    second, both = replace(first, device="cuda:1"), replace(first, device="cuda:0,cuda:1")
    assert keys_of(first, [], {"versions": "A"}) == keys_of(second, [], {"versions": "A"})
    assert keys_of(first, [], {"versions": "A"}) != keys_of(second, [], {"versions": "B"})
    assert keys_of(first, [], {}) != keys_of(both, [], {})


def test_under_tracing_what_real_operands_said_comes_first_and_scopes_share_the_rest() -> None:
    operand = dispatch.Operand("bfloat16")
    eager = dispatch.Problem(512, 8, 8, operand, operand, "bfloat16", "jax", "sm90", "cuda:0")
    traced, differentiated = (replace(eager, modes=modes) for modes in (("traced",), ("captured", "differentiated")))
    (own,) = keys_of(eager, [], {"scope": "one"})
    first, kept = keys_of(traced, [], {"scope": "one"})
    assert first == own != kept
    of_another = keys_of(traced, [], {"scope": "other"})
    assert of_another[0] != own
    assert of_another[1] == kept
    assert keys_of(differentiated, [], {"scope": "one"}) == [own]


class Coordinator:
    """The client of jax.distributed: every question is answered by an error."""

    def __init__(self, text: str) -> None:
        self.text = text

    def key_value_try_get(self, key: str) -> str:
        raise RuntimeError(self.text)

    def key_value_set(self, key: str, text: str) -> None:
        raise RuntimeError(self.text)

    def blocking_key_value_get(self, key: str, wait_ms: int) -> str:
        return "another's"


def test_of_jax_only_an_answer_is_an_answer() -> None:
    none, taken, gone = (
        job.JaxJob(Coordinator(f"{code}: x")) for code in ("NOT_FOUND", "ALREADY_EXISTS", "UNAVAILABLE")
    )
    assert none.get("key") is None
    assert taken.first("key", "mine") == "another's"
    for ask in (lambda: gone.get("key"), lambda: gone.first("key", "mine")):
        with pytest.raises(RuntimeError, match="UNAVAILABLE"):
            ask()


WORK = """
import json, sys
import numpy as np, dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

def work(array, rank, barrier):
    with registered(FakeBackend("fast")):
        slow, quick = {"fast": 100.0, "baseline": 1.0}, {"fast": 1.0, "baseline": 100.0}
        found = []
        for rows, first in ((5, 0), (6, 1)):  # rank `first` decides, and each finds something else the faster
            values = np.random.default_rng(rows).standard_normal((rows, 7)).astype("f4")
            a, b = array(values), array(values.T.copy())
            if rank != first:
                barrier(f"{rows} decided")
            with fake_timings(quick if rank == 0 else slow):
                decision = dispatch.explain(a, b)
                product = dispatch.matmul(a, b)
            off = float(np.abs(np.asarray(product) - values @ values.T).max())
            found.append([decision.backend, decision.source, off])
            if rank == first:
                barrier(f"{rows} decided")
        barrier("end")
        print(json.dumps(found), flush=True)
"""
JAX = """
import jax, jax.numpy as jnp
address, rank = sys.argv[1], int(sys.argv[2])
jax.distributed.initialize(address, 2, rank, local_device_ids=[0])
from jax._src import distributed
client = distributed.global_state.client

work(jnp.asarray, rank, lambda name: client.wait_at_barrier(name.replace(" ", "_"), 60_000))

mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
values = np.random.default_rng(9).standard_normal((8, 7)).astype("f4")
spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
a = jax.make_array_from_callback(values.shape, spread, lambda index: values[index])
rows = values[4 * rank : 4 * rank + 4]
with registered(FakeBackend("fast")), fake_timings({"fast": 1.0 if rank else 100.0, "baseline": 10.0}):
    seen, plan = [], FakeBackend.plan
    FakeBackend.plan = lambda self, problem, config=None: seen.append(problem.m) or plan(self, problem, config)
    product = jax.jit(dispatch.matmul)(a, jnp.asarray(values.T.copy()))
    (mine,) = product.addressable_shards
    assert np.abs(np.asarray(mine.data) - rows @ values.T).max() < 1e-4
    assert set(seen) == {4}
known = dispatch._api.engine().decisions._memory.values()
print(json.dumps(sorted({d.backend for d in known if d.problem.m == 4})), flush=True)
jax.distributed.shutdown()
"""
TORCH = """
import torch, torch.distributed as dist
address, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=2)

work(torch.from_numpy, rank, lambda name: dist.barrier())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("framework", ["jax", "torch"])
def test_two_processes_of_a_job(framework: str, tmp_path: Path) -> None:
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = WORK + {"jax": JAX, "torch": TORCH}[framework]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, address, str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"DISPATCH_CACHE_DIR": str(tmp_path / str(rank)), "JAX_PLATFORMS": "cpu"},
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=120) for process in ranks]
    assert [process.returncode for process in ranks] == [0, 0], said
    zero, one = (json.loads(out.splitlines()[0]) for out, _ in said)
    assert [x[0] for x in zero] == [x[0] for x in one] == ["fast", "bf16_fallback"]
    assert [x[1] for x in zero] == ["measured", "job"]
    assert [x[1] for x in one] == ["job", "measured"]
    assert max(x[2] for x in (*zero, *one)) < 1e-4
    assert said[0][0].splitlines()[1:] == said[1][0].splitlines()[1:]  # a product on a mesh of both
