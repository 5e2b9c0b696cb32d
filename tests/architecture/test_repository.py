"""What the repository holds."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def test_nothing_large_is_committed() -> None:
    """A wheel or a model that was added by mistake stays in everybody's clone for good."""
    if shutil.which("git") is None or not (REPO / ".git").exists():
        pytest.skip("no clone of the repository")
    git = ["git", "-c", f"safe.directory={REPO}", "-C", str(REPO), "ls-files", "-z"]
    names = subprocess.run(git, capture_output=True, check=True, text=True).stdout.split("\0")
    large = {name: (REPO / name).stat().st_size for name in names if name and (REPO / name).is_file()}
    assert {name: size for name, size in large.items() if size > 2_000_000} == {}
    assert len(large) > 100


def test_the_source_folder_alone_says_what_to_do() -> None:
    """There the package lacks `policies`, `plugins` and `kernels`, which an install puts into it."""
    code = "import sys; sys.path.insert(0, ''); import dispatch"  # as without PYTHONSAFEPATH
    run = subprocess.run([sys.executable, "-S", "-c", code], cwd=REPO, capture_output=True, text=True)
    assert run.returncode == 1
    assert "is the source folder alone: run Python elsewhere, or `pip install -e .` there" in run.stderr
