"""Many processes on one cache folder, and folders that cannot be used: right results all the same."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dispatch.remembering import DecisionStore

MULTIPLY = """
import json, sys, warnings
sys.modules |= dict.fromkeys(("torch", "jax"))  # quicker
said = []
warnings.simplefilter("always")
warnings.showwarning = lambda message, category, *rest: said.append(f"{category.__name__}: {message}")
import numpy as np, dispatch
from dispatch.testing import FakeBackend, fake_timings, registered

def right(m):
    a = np.random.default_rng(m).standard_normal((m, 16)).astype("f4")
    want = a.astype("f8") @ a.T
    return bool(np.abs(dispatch.matmul(a, a.T) - want).max() <= 1e-5 * np.abs(want).max())

def several(first, last):
    with registered(FakeBackend("fast")), fake_timings({"baseline": 100.0, "fast": 10.0}):
        return all([right(m) for m in range(first, last)])
"""
REPORT = """
ok = several(2, 8)
state, stored = dispatch.stats()["store"]["state"], len(dispatch.stored())
print(json.dumps({"right": ok, "said": said, "state": state, "stored": stored}))
"""


def process(script, folder):
    """Return what `script` printed last, as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", MULTIPLY + script],
        capture_output=True,
        text=True,
        env=os.environ | {"DISPATCH_CACHE_DIR": str(folder)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("\n")[-2])


def test_32_processes_on_an_empty_folder(tmp_path):
    codes = process(
        """
import os
children = []
reader, writer = os.pipe()
for child in range(32):
    if pid := os.fork():
        children.append(pid)
        continue
    os.close(writer)
    os.read(reader, 1)  # all start when the parent closes its end
    said.clear()  # Python 3.12 warns the parent of its threads
    ok = several(2, 5) and several(child + 10, child + 12)
    os._exit(0 if ok and said == [] and dispatch.stats()["store"]["state"] == "ok" else 1)
os.close(writer)
print(json.dumps([os.waitpid(pid, 0)[1] for pid in children]))
""",
        tmp_path / "cache",
    )
    assert codes == [0] * 32
    found = process(REPORT, tmp_path / "cache")
    assert found["right"]
    assert (found["said"], found["state"]) == ([], "ok")
    assert found["stored"] == 3 + 33 + 3  # what all did, what two neighbours each did, and the rest of the report's


def test_one_killed_in_mid_write_leaves_a_readable_store(tmp_path):
    folder = tmp_path / "cache"
    script = MULTIPLY + "for m in range(2, 100_000):\n    several(m, m + 1)\n    print(m, flush=True)\n"
    for _ in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"DISPATCH_CACHE_DIR": str(folder)},
        ) as writer:
            for _ in range(12):
                assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
        assert writer.returncode == -signal.SIGKILL
        store = DecisionStore(folder / "decisions.sqlite")
        assert len(store.entries()) >= 12
        assert store.state == "ok"
        store.close()
        found = process(REPORT, folder)
        assert found["right"]
        assert (found["said"], found["state"]) == ([], "ok")


def serves_with_one_warning(found, *texts):
    assert found["right"]
    assert len(found["said"]) == 1, found["said"]
    assert found["said"][0].startswith("StoreWarning: ")
    assert found["state"] != "ok"
    for text in texts:
        assert text in found["said"][0]


@pytest.mark.parametrize("content", [b"garbage" * 100, b"SQLite format 3\\0" + bytes(200)])
def test_a_garbage_file(tmp_path, content):
    (tmp_path / "decisions.sqlite").write_bytes(content)
    serves_with_one_warning(process(REPORT, tmp_path), "decisions.sqlite", "DISPATCH_CACHE_DIR")
    assert (tmp_path / "decisions.sqlite").read_bytes() == content


def test_a_file_in_the_folders_place(tmp_path):
    (tmp_path / "cache").write_text("not a folder")
    serves_with_one_warning(process(REPORT, tmp_path / "cache"))


def _store_tests():
    """Return the store's own tests, for their mounts."""
    spec = importlib.util.spec_from_file_location("_store_tests", Path(__file__).with_name("test_store.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("mounts", "said"),
    [
        ("mount -t tmpfs -o size=64k none {folder}\nmount -o remount,ro {folder}", ""),
        ("mount -t tmpfs -o size=16k none {folder}\nhead -c 16384 /dev/zero > {folder}/full || true", "disk is full"),
    ],
    ids=["read-only", "full"],
)
def test_a_folder_that_takes_nothing(tmp_path, monkeypatch, mounts, said):
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("DISPATCH_CACHE_DIR", str(folder))
    tests = _store_tests()
    monkeypatch.setattr(tests, "PRELUDE", MULTIPLY)
    serves_with_one_warning(tests.in_mounts(mounts.format(folder=folder), REPORT), said)
