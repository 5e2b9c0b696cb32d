"""Families of operands whose data a choice, or a guard, may not survive; of normal a (m, k) and b (k, n)."""

from __future__ import annotations

from collections.abc import Callable

import torch

Data = tuple[torch.Tensor, torch.Tensor]


def _outlier_columns(a: torch.Tensor, b: torch.Tensor) -> Data:
    a[:, :: max(1, a.shape[1] // 4)] *= 1e3
    return a, b


def _outlier_rows(a: torch.Tensor, b: torch.Tensor) -> Data:
    a[0] *= 1e4
    return a, b


def _mixed_rows(a: torch.Tensor, b: torch.Tensor) -> Data:
    return a * torch.logspace(-4, 4, a.shape[0], device=a.device)[:, None], b


def _one_inf(a: torch.Tensor, b: torch.Tensor) -> Data:
    a[-1, 0] = float("inf")
    return a, b


def _zero_sum(a: torch.Tensor, b: torch.Tensor) -> Data:
    return 1 + 1e-2 * a, b - b.mean(0)


def _low_rank(a: torch.Tensor, b: torch.Tensor) -> Data:
    return a[:, :1] * torch.ones_like(a) + 1e-2 * a, b - b.mean(0)


FAMILIES: dict[str, Callable[[torch.Tensor, torch.Tensor], Data]] = {
    "normal": lambda a, b: (a, b),
    "uniform": lambda a, b: (torch.rand_like(a), torch.rand_like(b)),
    "heavy-tailed": lambda a, b: (a / torch.rand_like(a).clamp(1e-4), b),
    "outlier columns": _outlier_columns,
    "outlier rows": _outlier_rows,
    "at 1e-30": lambda a, b: (a * 1e-30, b),
    "mixed rows": _mixed_rows,
    "one Inf": _one_inf,
    "rows against zero sums": _zero_sum,
    "low rank": _low_rank,
}
