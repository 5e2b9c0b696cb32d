"""What has to keep out of the memory of CUDA graphs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from dispatch.frameworks._thread import in_a_thread

_KEPT = "tree_manager_containers"
"""Where torch keeps a thread's graphs."""


def pooled() -> bool:
    """Return whether torch.compile may be warming a function up for CUDA graphs in this thread.

    What the thread allocates then lies in the graphs' pool, where nothing may be kept but the function's results.
    """
    trees = sys.modules.get("torch._inductor.cudagraph_trees")
    if trees is None or not torch.cuda.is_initialized():
        return False
    if not hasattr(trees.local, _KEPT) and not torch._C._is_key_in_tls(_KEPT):  # a thread that never compiled
        return False
    manager = trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)
    return manager is not None and manager.path_state is trees.ExecutionState.WARMUP


def apart(work: Callable[[], Any]) -> Any:
    """Return work() from a thread of its own, whose memory is from the ordinary pool, on this thread's stream."""
    stream = torch.cuda.current_stream()
    return in_a_thread(work, lambda: torch.cuda.stream(stream))
