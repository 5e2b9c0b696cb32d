"""The guard's sums of operands that Triton quantizes in torch: on the device, and a trip in host memory that it writes.

Nothing is copied or waited for: the kernel that quantizes judges the sums that it makes, and what leaves the
band is stored to pinned memory, which the guard reads as it reads any number. See `kernels.triton_quantize_common`.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Hashable
from threading import Lock
from typing import Any, ClassVar, NamedTuple

import torch
from dispatch.kernels.triton_quantize_common import sums_head, sums_size
from torch import Tensor

from dispatch import ScalingRecipe, Watch, framework, watch

PAGE = 1024
"""Trips that are free at any time, at the least. Twice as many are allocated at once."""
SPAN = 4
"""Float32 values from one trip to the next: 16 bytes, as kernels expect of addresses."""

_capturing = torch.cuda.is_current_stream_capturing
_captured: set[Sums] = set()
"""What captured graphs write to: they may be replayed at any time, so it is never freed."""


class Trips:
    """Trips in pinned memory, from pages that are never freed: a launch may be under way when its plan is dropped."""

    _free: ClassVar[deque[Tensor]] = deque()
    _lock: ClassVar[Lock] = Lock()

    @classmethod
    def take(cls) -> Tensor:
        """Return a trip, float32 (2) of zeros, that a GPU can write where there is one."""
        with cls._lock:
            if len(cls._free) <= PAGE:  # launches of dropped plans may still write to those that were given back last
                pinned = torch.cuda.is_available()
                page = torch.zeros(2 * PAGE * SPAN, dtype=torch.float32, device="cpu", pin_memory=pinned)
                cls._free.extendleft(page[i : i + 2] for i in range(0, len(page), SPAN))
            trip = cls._free.popleft()
        return trip.zero_()  # a launch that was under way may have written to it since it was given back

    @classmethod
    def give(cls, trip: Tensor) -> None:
        """Take a trip back that no plan listens to any more.

        Without the lock: the garbage collector may call it while this thread holds that.
        """
        cls._free.append(trip)


class Guarded(NamedTuple):
    """What a quantizer's launch is given for the guard, and both addresses."""

    sums: Tensor
    trip: Tensor
    addresses: tuple[int, int]


class Sums:
    """The guard's sums of one operand of a plan: one for each of its quantizer's layouts and each stream.

    On one stream launches come one after another, as their counts suppose. Graphs share one, made beside the first:
    were two of them replayed at once, a sum could be of parts of both, and trip without cause.
    """

    def __init__(
        self, watch: Watch, side: str, recipe: ScalingRecipe, k: int, shape: tuple[int, int], device: Any
    ) -> None:
        self.watch, self.size, self.device = watch, sums_size(shape[0]), torch.device(device)
        self.head = sums_head(*watch.bounds(side, recipe, k))
        with torch.inference_mode(False):
            self.trip = Trips.take()
        watch.listen(side, memoryview(self.trip.numpy()))
        weakref.finalize(self, Trips.give, self.trip).atexit = False
        self._made: dict[tuple[Hashable, int | None], Guarded] = {}

    def on(self, layout: Hashable, stream: int) -> Guarded | None:
        """Return the sums for a launch on `stream`, by this layout of the operand.

        None during a capture that no call of the same layout came before: nothing is allocated then.
        """
        if stream and _capturing():  # CUDA captures no default stream
            kept = self._made.get((layout, None))
            if kept is not None:
                _captured.add(self)
            return kept
        found = self._made.get((layout, stream))
        if found is None:
            self._made.setdefault((layout, None), self._new())
            found = self._made[layout, stream] = self._new()
        return found

    def _new(self) -> Guarded:
        sums: Tensor = framework("torch").isolated(self._zeros)
        return Guarded(sums, self.trip, (sums.data_ptr(), self.trip.data_ptr()))

    def _zeros(self) -> Tensor:
        sums = torch.zeros(self.size, dtype=torch.float32, device=self.device)
        sums[: len(self.head)] = torch.tensor(self.head, dtype=torch.float32, device=self.device)
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()  # once: another stream may be the first to use it
        return sums


def sums_of(side: str, recipe: ScalingRecipe, k: int, shape: tuple[int, int], device: Any) -> Sums | None:
    """Return the guard's sums of an operand of the plan that is being made, or None where it wants none.

    shape: of the quantizer's output. None too during a capture.
    """
    wanted = watch()
    if wanted is None or (torch.cuda.is_available() and _capturing()):
        return None
    return Sums(wanted, side, recipe, k, shape, device)
