"""Which marked tests run, by what was asked for and what is there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import os, pytest
def test_plain(): pass
@pytest.mark.slow
def test_slow(): pass
@pytest.mark.gpu
def test_gpu(): pass
def test_starts_clean():
    assert os.listdir(os.environ["DISPATCH_CACHE_DIR"]) == [] and "DISPATCH_POLICY" not in os.environ
"""


@pytest.fixture
def run(tmp_path: Path):
    (tmp_path / "conftest.py").write_text((Path(__file__).parent / "conftest.py").read_text(encoding="utf-8"))
    (tmp_path / "test_marks.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n  gpu:\n  slow:\n")

    def _run(*options: str) -> subprocess.CompletedProcess[str]:
        # No CUDA device is visible to it, wherever this runs.
        environment = os.environ | {"CUDA_VISIBLE_DEVICES": "-1", "DISPATCH_POLICY": "strict"}
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=False)

    return _run


@pytest.mark.parametrize(
    ("options", "outcome"),
    [
        ((), "2 passed, 2 deselected"),
        (("-m", "slow"), "1 passed, 3 deselected"),
        (("-m", "slow or not slow"), "3 passed, 1 deselected"),
        (("-m", "not gpu"), "2 passed, 2 deselected"),
    ],
)
def test_without_a_gpu(run, options: tuple[str, ...], outcome: str) -> None:
    finished = run(*options)
    assert finished.returncode == 0
    assert outcome in finished.stdout


def test_asking_for_a_gpu_that_is_not_there_fails(run) -> None:
    finished = run("-m", "gpu")
    assert finished.returncode == pytest.ExitCode.USAGE_ERROR
    assert "finds no device" in finished.stderr
