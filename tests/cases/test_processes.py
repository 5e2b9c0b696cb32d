"""Imports, forks, caches and homes, each in a process of its own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ONES = "import numpy as np, dispatch as D; assert (D.matmul(np.ones((2, 2)), np.ones((2, 2))) == 2).all()\n"
HALF = """
import numpy as np, dispatch as D
a = np.random.default_rng(0).standard_normal((24, 24)).astype(np.float16)
out = D.matmul(a, a).astype(np.float64)
want = a.astype(np.float64) @ a.astype(np.float64)
assert np.linalg.norm(out - want) < 1e-2 * np.linalg.norm(want)
"""


def environment(folder: Path, **changed: str | None) -> dict[str, str]:
    base = {k: v for k, v in os.environ.items() if not k.startswith(("DISPATCH_", "XDG_"))}
    base["DISPATCH_CACHE_DIR"] = str(folder)
    base.update({k: v for k, v in changed.items() if v is not None})
    for name in (k for k, v in changed.items() if v is None):
        base.pop(name, None)
    return base


def run(code: str, env: dict[str, str], *options: str) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def needs(*names: str) -> None:
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed")


@pytest.mark.parametrize("home", ["/", "/nonexistent/x", "", "/proc", None])
def test_any_home_will_do(tmp_path, home):
    """B67 (foundation-model-stack/fms-hf-tuning#367, triton-lang/triton#518): one warning at most, right results."""
    done = run(HALF * 2, environment(tmp_path, HOME=home, DISPATCH_CACHE_DIR=None))
    assert done.stderr.count("Warning") <= 1, done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("junk", [b"", b"\xff\xfe\x00" * 40, b"[]", b"null", b'{"version": 999}', b"SQLite format 3\0"])
def test_a_cache_file_of_junk_is_survived(tmp_path, junk):
    """B65 (pytorch/pytorch#119698, NVIDIA/TensorRT-LLM#14441): one warning and right results."""
    (tmp_path / "decisions.sqlite").write_bytes(junk)
    done = run(HALF * 2, environment(tmp_path))
    assert done.stderr.count("StoreWarning") == (0 if junk == b"" else 1), done.stderr


@pytest.mark.parametrize("cut", [0.3, 0.7, 0.99])
def test_a_cache_file_cut_short_is_survived(tmp_path, cut):
    """B65: what a killed writer or a full disk leaves, at any length."""
    run(HALF, environment(tmp_path))
    file = tmp_path / "decisions.sqlite"
    content = file.read_bytes()
    file.write_bytes(content[: int(len(content) * cut)])
    done = run(HALF, environment(tmp_path))
    assert done.stderr.count("StoreWarning") <= 1, done.stderr


COUNT = HALF + "import json; print(json.dumps([D.stats()['measured'], D.stats()['remembered'], len(D.stored())]))"


def test_processes_that_start_at_once_share_what_they_measure(tmp_path):
    """B65 (pytorch/pytorch#153791): nothing is lost or damaged, and a later process measures nothing."""
    command = [sys.executable, "-c", COUNT]
    together = [
        subprocess.Popen(command, env=environment(tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    for process in together:
        _, err = process.communicate(timeout=180)
        assert (process.returncode, err) == (0, "")
    measured, remembered, stored = json.loads(run(COUNT, environment(tmp_path)).stdout)
    if stored:  # noise may have left every one of them undecided
        assert (measured, remembered, stored) == (0, 1, 1)


def test_a_record_of_another_version_is_a_miss(tmp_path):
    """B68 (flashinfer-ai/flashinfer#3970): what was measured with other versions is neither used nor an error."""
    script = """
import sys
sys.modules["torch"] = sys.modules["jax"] = None
import numpy as np, dispatch as D
from dispatch.testing import FakeBackend, fake_timings, registered
room = D.framework("numpy")
own = room.versions
def versions(array): return {**own(array), "numpy": VERSION}
room.versions = versions
a = np.random.default_rng(0).standard_normal((8, 8)).astype(np.float32)
with registered(FakeBackend("fast")), fake_timings({"fast": 1.0, "baseline": 9.0}, device_time=True):
    decision = D.explain(a, a)
print(decision.source)
"""
    sources = [
        run(f"VERSION = {version!r}\n" + script, environment(tmp_path)).stdout.strip()
        for version in ("1.0", "0.0.0", "unknown", "1.0", "unknown")
    ]
    assert sources == ["measured", "measured", "measured", "store", "store"]


@pytest.mark.parametrize("block", ["triton", "jax", "torch"])
def test_works_without_one_of_the_others(tmp_path, block):
    """B77 (triton-lang/triton#6150, deepseek-ai/DeepSeek-R1#493): absent or broken, NumPy's products do not need it."""
    code = f"import sys; sys.modules[{block!r}] = None\n" + HALF + "D.backends()"
    run(code, environment(tmp_path, CUDA_VISIBLE_DEVICES=""))


BROKEN = "raise RuntimeError('0 active drivers')"


@pytest.mark.parametrize("block", ["triton", "jax", "torch"])
def test_works_beside_a_broken_package(tmp_path, block):
    """B77: a package whose import raises something else than ImportError is as good as absent."""
    package = tmp_path / "site" / block
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(BROKEN)
    code = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r})\n"
        + HALF
        + "D.backends(); print(D.machine()['broken'])"
    )
    done = run(code, environment(tmp_path, CUDA_VISIBLE_DEVICES=""))
    assert ("0 active drivers" in done.stdout) == (block != "triton")


@pytest.mark.parametrize("name", ["torch", "jax"])
def test_one_frameworks_product_does_not_import_the_other(tmp_path, name):
    """B101 (lucidrains/jax2torch#2): a torch call starts no JAX client, and the reverse."""
    needs(name)
    other = {"torch": "jax", "jax": "torch"}[name]
    make = {
        "torch": "import torch; a = torch.ones(8, 8, dtype=torch.bfloat16)",
        "jax": "import jax.numpy as jnp; a = jnp.ones((8, 8), jnp.bfloat16)",
    }[name]
    run(
        f"{make}\nimport dispatch, sys\ndispatch.matmul(a, a)\nassert {other!r} not in sys.modules",
        environment(tmp_path),
    )


def test_import_starts_nothing(tmp_path):
    """B76 (NVIDIA/TransformerEngine#872): no CUDA, no JAX backend, no thread, no process, no file."""
    code = """
import os, sys, threading
import dispatch
assert threading.active_count() == 1
assert not {"torch", "jax", "triton"} & set(sys.modules)
try:
    os.waitpid(-1, os.WNOHANG)
except ChildProcessError:
    pass
else:
    raise SystemExit("a child process")
"""
    run(code, environment(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_import_touches_no_device_of_an_imported_framework(tmp_path):
    """B76: with torch and JAX there already, import and a NumPy product initialize neither's backends."""
    needs("torch", "jax")
    code = (
        "import torch, jax, dispatch\n"
        + HALF
        + """
from jax._src import xla_bridge
assert not torch.cuda.is_initialized()
assert not xla_bridge.backends_are_initialized()
"""
    )
    run(code, environment(tmp_path), "-W", "ignore")


@pytest.mark.parametrize("before", ["", "import torch\n"], ids=["plain", "torch"])
def test_a_forked_child_multiplies(tmp_path, before):
    """B76: after import, and after a product in the parent, in a child made by fork."""
    if before:
        needs("torch")
    code = (
        before
        + HALF
        + """
import os
pid = os.fork()
if pid == 0:
    out = D.matmul(a[:8], a).astype(np.float64)
    os._exit(0 if np.linalg.norm(out - want[:8]) < 1e-2 * np.linalg.norm(want[:8]) else 1)
assert os.waitpid(pid, 0)[1] == 0
D.matmul(a[:4], a)
"""
    )
    run(code, environment(tmp_path), "-W", "ignore")


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_worker_processes_multiply(tmp_path, method):
    """B76: in workers of the other start methods."""
    script = tmp_path / "workers.py"
    script.write_text(
        "import multiprocessing, sys\nimport numpy as np, dispatch as D\n"
        "def work(n):\n"
        "    a = np.full((n, n), 0.5, np.float16)\n"
        "    return float(D.matmul(a, a)[0, 0])\n"
        "if __name__ == '__main__':\n"
        f"    with multiprocessing.get_context({method!r}).Pool(2) as pool:\n"
        "        assert pool.map(work, [4, 8, 16]) == [1.0, 2.0, 4.0]\n"
    )
    env = environment(tmp_path / "cache")
    done = subprocess.run(
        [sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_policy_file_in_the_working_directory_is_not_read(tmp_path):
    """a file named default.toml where one happens to stand decides nothing."""
    (tmp_path / "default.toml").write_text("[gate]\nmin_speedup = 'what'\n")
    done = subprocess.run(
        [sys.executable, "-c", ONES],
        env=environment(tmp_path / "c"),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
