"""Tensors that are made on one CUDA stream and used on others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dispatch.frameworks._clock import map_arrays

_captured: dict[int, list[Tensor]] = {}
"""What captured graphs read: they may be replayed at any time, so it is never freed."""


def waiting(made: Any, device: torch.device) -> Callable[[], None]:
    """Return what to call before each use of the tensors in `made`, just launched on the current stream of `device`.

    On another stream it waits for them, once they are done for nothing, and their memory is not used anew before that
    stream is past this use. A capture has waited for the whole device when it began.
    """
    tensors: list[Tensor] = []

    def found(value: Any) -> bool:
        if isinstance(value, Tensor):
            tensors.append(value)
        return isinstance(value, Tensor)

    map_arrays(made, lambda tensor: tensor, found)
    index = torch.cuda.current_device() if device.index is None else device.index
    own = torch.cuda.current_stream(index)
    event = torch.cuda.Event()
    event.record(own)
    handle, current_handle = own.cuda_stream, torch._C._cuda_getCurrentRawStream

    def wait() -> None:
        if current_handle(index) == handle:
            return
        if torch.cuda.is_current_stream_capturing():
            _captured[id(tensors)] = tensors
            return
        current = torch.cuda.current_stream(index)
        current.wait_event(event)
        for tensor in tensors:
            tensor.record_stream(current)

    return wait
