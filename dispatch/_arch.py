"""The words for hardware: `sm90` for an NVIDIA compute capability, `cpu-avx512` ... for a processor."""

from __future__ import annotations

import functools
import platform
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Arch:
    """One hardware architecture, ordered within its family by `version`."""

    name: str

    @classmethod
    def cuda(cls, major: int, minor: int) -> Arch:
        """Return the arch of an NVIDIA compute capability: (9, 0) is sm90."""
        return cls(f"sm{major}{minor}")

    @property
    def family(self) -> str:
        """`cuda` or `cpu`."""
        return "cuda" if self.name.startswith("sm") else "cpu"

    @property
    def capability(self) -> tuple[int, int] | None:
        """NVIDIA's compute capability (major, minor), or None on a CPU."""
        found = re.fullmatch(r"sm(\d+)(\d)", self.name)
        return (int(found[1]), int(found[2])) if found else None

    def __str__(self) -> str:
        return self.name


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
