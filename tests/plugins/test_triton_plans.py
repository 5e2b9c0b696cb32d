"""Whole plans of triton_tma_fp8 in torch, run on a CPU by Triton's interpreter: see `_triton_plans.py`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("triton", reason="Triton is not installed")
pytestmark = pytest.mark.triton

SCRIPT = Path(__file__).parent / "_triton_plans.py"
SHARES = 4
"""Processes that share the cases, each in a test of its own."""


@pytest.mark.parametrize("share", range(SHARES))
def test_interpreted_plans_match_float64(share: int) -> None:
    done = subprocess.run(
        [sys.executable, SCRIPT, f"{share}/{SHARES}"],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert len(found) > 10
    assert {name: why for name, why in found.items() if why} == {}
