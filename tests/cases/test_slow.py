"""What takes gigabytes on a CPU."""

from __future__ import annotations

import pytest

import dispatch

pytestmark = pytest.mark.slow


def test_a_result_beyond_2_31_elements():
    """B26 (pytorch/pytorch#191083): 46341 x 46341 bfloat16; about 9 GB."""
    torch = pytest.importorskip("torch")
    n = 46341
    a, b = torch.ones(n, 1, dtype=torch.bfloat16), torch.ones(1, n, dtype=torch.bfloat16)
    out = dispatch.matmul(a, b, policy="native")
    assert out.shape == (n, n)
    assert out[-1, -1] == 1
    assert out[0, 0] == 1
