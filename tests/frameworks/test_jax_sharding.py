"""Products of arrays that are spread over several devices."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("jax")


def test_on_eight_simulated_devices() -> None:
    """A process has as many devices as XLA is told before it starts."""
    here, root = Path(__file__).parent, Path(__file__).parents[2]
    options = ["-q", "-p", "no:cacheprovider", "-c", str(root / "pyproject.toml"), "--rootdir", str(root)]
    command = [sys.executable, "-m", "pytest", *options, str(here / "sharded_products.py")]
    flags = "--xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, capture_output=True, text=True, check=False, cwd=here.parent, env=environment)
    assert finished.returncode == 0, finished.stdout
    passed = re.search(r"(\d+) passed", finished.stdout)
    assert passed is not None
    assert "skipped" not in finished.stdout
