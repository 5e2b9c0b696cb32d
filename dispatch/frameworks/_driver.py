"""The NVIDIA driver, as the kernel module tells it: no library is loaded for it."""

from __future__ import annotations

from functools import cache
from pathlib import Path


@cache
def nvidia_driver() -> str | None:
    """Return the driver's version, `unknown` where it does not say, or None where there is none."""
    try:
        words = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return None
    return next((word for word in words if word[0].isdigit() and word.count(".") == 2), "unknown")
