"""What every test run starts from: an empty cache folder, no policy of the user's, a choice of marked tests."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

# tests/dispatch is no package, but from this folder `python -m pytest` would find it before an editable install.
sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
os.environ["PYTHONSAFEPATH"] = "1"  # the same for processes that tests start

if os.environ.get("CI") and importlib.util.find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True)  # the same examples each time; others are for whoever writes
    settings.load_profile("ci")

_cache = tempfile.TemporaryDirectory(prefix="dispatch-tests-")
os.environ["DISPATCH_CACHE_DIR"] = _cache.name  # before anything imports dispatch
os.environ.pop("DISPATCH_POLICY", None)

# Under each policy JAX compiles anew, small programs that most tests share. XLA's part of that is done once a session
# (workers and processes that tests start inherit the folder) or, where tox names the folder, once a run. On a GPU XLA
# would keep there what it tuned, too.
if not Path("/dev/nvidiactl").exists():
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        _compiled = tempfile.TemporaryDirectory(prefix="dispatch-tests-jax-")
        os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

_COUNT_GPUS = """
import ctypes
cuda, count = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(0)
failed = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
print(0 if failed else count.value)
"""


@pytest.fixture(scope="session", autouse=True)
def cache_folder() -> Iterator[str]:
    """The session's cache folder; removed at the end."""
    yield _cache.name
    _cache.cleanup()


@pytest.fixture(autouse=True)
def policy_of_the_process() -> Iterator[None]:
    """Forget, before and after each test, which policy DISPATCH_POLICY named for the process."""
    _forget_policy()
    yield
    _forget_policy()


def _forget_policy() -> None:
    policies = sys.modules.get("dispatch.policies.policy")
    if policies is not None:
        policies._of_process.cache_clear()


@pytest.fixture(autouse=True)
def no_backend_fails_on_a_gpu(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a gpu test after which a built-in backend is quarantined: the tests after it would see it no more."""
    yield
    api = sys.modules.get("dispatch._api")
    if request.node.get_closest_marker("gpu") and api is not None:
        gone = {name: why for name, why in api.engine().quarantine.items() if name in ("cublas", "cpu_blas")}
        for name in gone:
            del api.engine().quarantine[name]
        api.forget()
        assert not gone, gone


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out `slow` unless -m names it, and `gpu` without a GPU; fail if -m asks for a GPU that is not there."""
    expression = config.option.markexpr
    if re.search(r"(?<!not )\bgpu\b", expression) and not _has_gpu():
        raise pytest.UsageError(f"-m {expression!r} asks for gpu tests, but the CUDA driver finds no device here")
    left_out = set()
    if not re.search(r"\bslow\b", expression):
        left_out |= {item for item in items if item.get_closest_marker("slow")}
    gpu = {item for item in items if item.get_closest_marker("gpu")}
    if gpu and not _has_gpu():
        left_out |= gpu
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what compiles or interprets Triton kernels where there is another Triton than the one they are made for."""
    without_gpu = item.get_closest_marker("triton") and not item.get_closest_marker("gpu")
    if without_gpu and not (found := _triton_version()).startswith("3.6."):
        pytest.skip(f"with Triton 3.6 alone, which the environment `triton` has; here is {found or 'none'}")


@functools.cache
def _triton_version() -> str:
    try:
        return importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        return ""


@functools.cache
def _has_gpu() -> bool:
    # In a process of its own: once cuInit has run, forked children cannot use CUDA.
    found = subprocess.run([sys.executable, "-c", _COUNT_GPUS], capture_output=True, text=True, check=False)
    return found.returncode == 0 and int(found.stdout) > 0
