"""The words for hardware: `sm90` for an NVIDIA compute capability, `cpu-avx512` ... for a processor."""

from __future__ import annotations

import re
from dataclasses import dataclass


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
