"""Which CUDA device is current while a product runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch import Plan


def on_device(device: torch.device, product: Callable[..., Tensor]) -> Plan:
    """Return `product` run with `device` current, itself where there is no other GPU.

    Triton compiles for and launches on the current device, whatever it is given.
    """
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return product

    def guarded(a: Any, b: Any, bias: Tensor | None = None) -> Tensor:
        with torch.cuda.device(device):
            return product(a, b, bias)

    return guarded
