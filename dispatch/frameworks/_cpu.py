"""What the processor has."""

from __future__ import annotations

import functools
import platform
import re
from pathlib import Path

from dispatch.frameworks.arch import Arch


@functools.cache
def cpu_arch() -> Arch:
    """Return this processor's arch: the widest matrix or vector extension that it reports.

    Names, widest first: cpu-amx, cpu-avx512bf16, cpu-avx512, cpu-avx2, cpu-sve, cpu-neon, and cpu-<machine>
    where none is known. Read from /proc/cpuinfo; elsewhere only the machine is known.
    """
    flags = _cpu_flags()
    order = (
        ("amx_bf16", "amx"),
        ("avx512_bf16", "avx512bf16"),
        ("avx512f", "avx512"),
        ("avx2", "avx2"),
        ("sve", "sve"),
        ("asimd", "neon"),
    )
    for flag, name in order:
        if flag in flags:
            return Arch(f"cpu-{name}")
    return Arch(f"cpu-{platform.machine().lower() or 'unknown'}")


def _cpu_flags() -> frozenset[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()
