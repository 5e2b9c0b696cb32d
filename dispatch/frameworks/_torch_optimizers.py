"""Prepared weights after an optimizer's step: fused optimizers write to parameters without moving their version."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from dispatch.quantization.prepared import living

_PLAIN = (torch.Tensor, torch.nn.Parameter)


def stepped(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    """Refresh every prepared operand whose memory is that of a parameter which the optimizer may have written to."""
    prepared = [(one, place) for one in living() if (place := _memory(one.array)) is not None]
    if not prepared:
        return
    written = {_memory(x) for group in optimizer.param_groups for x in group["params"] if x.requires_grad}
    for one, place in prepared:
        if place in written:
            one.refresh()


def _memory(x: Any) -> int | None:
    """Return where the memory begins that a tensor shares with all of its views, or None without any."""
    if not isinstance(x, Tensor) or type(x) not in _PLAIN or x.layout is not torch.strided or x.is_meta:
        return None
    return x.untyped_storage().data_ptr() or None


register_optimizer_step_post_hook(torch._disable_dynamo(stepped))  # torch.compiler.disable would import Dynamo now
