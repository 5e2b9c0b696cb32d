"""DTensors and sharded layers: what torch's own product gives, with the same placements."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
def test_products_of_dtensors_and_layers_that_are_sharded() -> None:
    """B95 (pytorch/pytorch#191992, pytorch/torchtitan#864): sharded along k the result is partial, as torch's is."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("sharded_tensors.py")
    command = [sys.executable, str(script), str(port)]
    found = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert found.returncode == 0, found.stderr[-4000:]
    assert found.stdout.endswith("done\n")
