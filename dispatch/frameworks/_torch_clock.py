"""Device time in torch: graph replays between CUDA events, operands rotated past L2."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from dispatch._backend import Plan
from dispatch.frameworks._clock import Call, map_arrays

MOST_SETS = 32  # copies of the operands, at most
LEAST_US = 400.0  # one timing: what events resolve to well under 1%


class CudaClock:
    """A stopwatch of device time.

    Each call is captured into a CUDA graph of one call a set of operands, so that launch gaps do not count; a call
    that cannot be captured is launched eagerly between the events instead.
    """

    device_time = True

    def __init__(self, calls: Sequence[Call], device: torch.device, memory_bytes: int) -> None:
        self._calls = calls
        self._device = device
        self._copies: dict[int, list[torch.Tensor]] = {}
        sizes = [max(1, _bytes(operands)) for _, operands in calls]
        l2 = torch.cuda.get_device_properties(device).L2_cache_size
        self._sets = max(1, min(MOST_SETS, -(-2 * l2 // min(sizes)), memory_bytes // max(sizes)))
        self._rotated = [self._rotate(operands) for _, operands in calls]
        self._pool = torch.cuda.graph_pool_handle()  # one for all: a graph's temporaries serve the next
        self._runs: dict[int, tuple[Callable[[], None], int]] = {}

    def _rotate(self, operands: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        """Return the sets of one call's operands; calls share the copies of the operands that they share."""

        def pick(index: int) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda x: self._copies.setdefault(id(x), [x, *(_copy(x) for _ in range(self._sets - 1))])[index]

        return [map_arrays(operands, pick(index), _is_tensor) for index in range(self._sets)]

    def prepare(self) -> None:
        """Capture every call's graph and warm it up."""
        with torch.cuda.device(self._device):
            self._runs = {index: self._prepare(index) for index in range(len(self._calls))}

    def round(self, order: Sequence[int]) -> list[float]:
        """Run each call of `order` once and return microseconds a call, in that order."""
        with torch.cuda.device(self._device):
            spans = [self._timed(*self._runs[index]) for index in order]
            torch.cuda.synchronize(self._device)
            return [start.elapsed_time(end) * 1e3 / count for start, end, count in spans]

    def _timed(self, run: Callable[[], None], count: int) -> tuple[Any, Any, int]:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        end.record()
        return start, end, count

    def _prepare(self, index: int) -> tuple[Callable[[], None], int]:
        """Return a warmed-up run that fills LEAST_US, and how many calls it makes."""
        call, sets = self._calls[index][0], self._rotated[index]
        for operands in sets[:2]:
            call(*operands)
        torch.cuda.synchronize(self._device)
        once = self._captured(call, sets)
        once()
        start, end, _ = self._timed(once, 1)
        torch.cuda.synchronize(self._device)
        repeats = max(1, int(LEAST_US / max(start.elapsed_time(end) * 1e3, 1.0)))

        def run() -> None:
            for _ in range(repeats):
                once()

        return run, repeats * len(sets)

    def _captured(self, call: Plan, sets: list[tuple[Any, ...]]) -> Callable[[], None]:
        def eager() -> None:
            for operands in sets:
                call(*operands)

        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                eager()
        except RuntimeError:  # it synchronizes, or allocates outside the pool
            torch.cuda.synchronize(self._device)
            return eager
        replay: Callable[[], None] = graph.replay
        return replay


def _is_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _bytes(operands: tuple[Any, ...]) -> int:
    total = 0

    def add(x: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total += x.numel() * x.element_size()
        return x

    map_arrays(operands, add, _is_tensor)
    return total


def _copy(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)
    try:
        return out.copy_(x)
    except RuntimeError:  # overlapping or expanded: a write per element is not allowed
        return x
