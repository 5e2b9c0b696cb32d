"""The main job, shown: products of a few shapes and dtypes in every framework that is installed, each explained."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import dispatch


@dataclass(frozen=True, slots=True)
class Product:
    """One product to show: m, n, k, the operands' dtype, where, and whether b comes transposed, as in nn.Linear."""

    framework: str
    dtype: str
    m: int
    n: int
    k: int
    device: str | None = None
    transpose_b: bool = False

    def __str__(self) -> str:
        turned = ", b transposed" if self.transpose_b else ""
        where = f" on {self.device}" if self.device else ""
        return f"{self.framework} {self.dtype} {self.m} x {self.n} x {self.k}{turned}{where}"

    def decision(self, **options: object) -> dispatch.Decision:
        """Return the decision for random normal operands; options as dispatch.explain takes them."""
        return dispatch.explain(*self.operands(), **options)  # type: ignore[arg-type]

    def operands(self) -> tuple[Any, Any]:
        """Return random normal operands. Raises ValueError or TypeError for a framework or dtype that is unknown."""
        room = dispatch.framework(self.framework)
        a = room.normal((self.m, self.k), self.dtype, 0, self.device)
        shape = (self.n, self.k) if self.transpose_b else (self.k, self.n)
        b = room.normal(shape, self.dtype, 1, self.device)
        return a, b.T if self.transpose_b else b


def products(frameworks: tuple[str, ...]) -> Iterator[Product]:
    """Yield what the demonstration shows on this machine for the installed `frameworks`."""
    for name in frameworks:
        gpus = [arch for arch in dispatch.framework(name).archs() if arch.family == "cuda"]
        if gpus:
            for size in (8192, 2048, 512):
                yield Product(name, "bfloat16", size, size, size, "cuda:0")
        yield Product(name, "bfloat16", 1024, 1024, 1024, "cpu")
        if name != "jax":
            yield Product(name, "float16", 1024, 1024, 1024, "cpu")
        yield Product(name, "float32", 1024, 1024, 1024, "cpu")
        if name == "torch":
            yield Product(name, "float16", 1, 1024, 1024, "cpu", transpose_b=True)
            yield Product(name, "float16", 32, 32, 32, "cpu")
