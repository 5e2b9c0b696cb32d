"""Wall-clock timing on a CPU, shared by the rooms whose calls return when the work is done."""

from __future__ import annotations

import copy
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

from dispatch._backend import Plan

Call = tuple[Plan, tuple[Any, ...]]
"""A plan and the operands that it is timed on."""

LEAST_US = 50.0  # shorter calls are repeated within one timing, so that the clock's own cost does not count


class WallClock:
    """A stopwatch of wall-clock time; each call is repeated until it fills LEAST_US."""

    device_time = False

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._repeats: dict[int, int] = {}

    def prepare(self) -> None:
        """Do nothing: the first run of a call is its warm-up, and may take seconds."""

    def round(self, order: Sequence[int]) -> list[float]:
        """Run each call of `order` once and return microseconds a call, in that order."""
        return [self._time(index) for index in order]

    def _time(self, index: int) -> float:
        repeats = self._repeats.get(index)
        if repeats is None:  # the first run is both warm-up and gauge
            once = self._run(index, 1)
            repeats = self._repeats[index] = max(1, min(1000, int(LEAST_US / max(once, 0.05))))
            if once > 20 * LEAST_US:
                return once
        return self._run(index, repeats)

    def _run(self, index: int, repeats: int) -> float:
        call, operands = self._calls[index]
        start = time.perf_counter_ns()
        for _ in range(repeats):
            call(*operands)
        return (time.perf_counter_ns() - start) / 1e3 / repeats


def map_arrays(value: Any, copied: Callable[[Any], Any], is_array: Callable[[Any], bool]) -> Any:
    """Return `value` with every array in it, in tuples, lists, dicts and dataclasses, replaced by its copy.

    Containers keep their types, and whatever else they hold; none is made by calling its class.
    """
    if is_array(value):
        return copied(value)
    if isinstance(value, tuple):
        return tuple.__new__(type(value), [map_arrays(item, copied, is_array) for item in value])
    if isinstance(value, list | dict):
        made: Any = copy.copy(value)
        for place, item in value.items() if isinstance(value, dict) else enumerate(value):
            made[place] = map_arrays(item, copied, is_array)
        return made
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, map_arrays(getattr(value, field.name), copied, is_array))
        return made
    return value
