"""What several processes of one training share: who writes, and tensors spread over them."""

from __future__ import annotations

import torch
from torch import Tensor, distributed, nn


def on_cpu_only() -> bool:
    """Returns whether there is no accelerator.

    Accelerate must be told: else each of several processes on CPUs would take itself for the only.
    """
    return not torch.accelerator.is_available()


def first_process() -> bool:
    """Returns whether this process is the one that writes: the only one, or the first of many."""
    several = distributed.is_available() and distributed.is_initialized()
    return not several or distributed.get_rank() == 0


def whole_tensor(tensor: Tensor) -> Tensor:
    """Returns a tensor that FSDP has spread over processes as a whole one; all must call it."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def spread_like(whole: Tensor, pattern: Tensor) -> Tensor:
    """Returns a whole tensor in the dtype and on the device of `pattern`, spread as that one is."""
    whole = whole.to(device=pattern.device, dtype=pattern.dtype)
    if not hasattr(pattern, "full_tensor"):
        return whole
    from torch.distributed.tensor import DTensor, distribute_tensor

    assert isinstance(pattern, DTensor)
    return distribute_tensor(whole, pattern.device_mesh, pattern.placements)


def spread_again(module: nn.Module) -> None:
    """Spreads weights that FSDP has left whole: after a forward no backward has followed."""
    for part in module.modules():
        reshard = getattr(part, "reshard", None)
        if reshard is not None:
            reshard()


def summed(number: float, device: torch.device) -> float:
    """Returns a number summed over all processes, the same on each."""
    if not (distributed.is_available() and distributed.is_initialized()):
        return number
    total = torch.tensor(number, dtype=torch.float64, device=device)
    distributed.all_reduce(total)
    return total.item()
