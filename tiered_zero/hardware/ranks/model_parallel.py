"""Find the ranks that split modules among themselves, by the program's own object for them."""

from __future__ import annotations

from typing import Any, final

import torch
import torch.distributed as dist

from tiered_zero.hardware.ranks.backends import all_gather_single


@final
class ModelParallelRanks:
    """A process group of several ranks. Its collectives run where they are called, on torch's own thread."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        """Return the parts of all ranks in order, [size * n]. `part`: [n], equally long on each rank."""
        whole = part.new_empty(len(part) * self.size)
        # as bytes: not every backend has every dtype
        all_gather_single(whole.view(torch.uint8), part.view(torch.uint8), group=self._group)
        return whole


def find_model_parallel_ranks(mpu: Any) -> ModelParallelRanks | None:
    """Return the model parallel ranks from DeepSpeed's or Megatron-LM's object; None without one, or for one rank."""
    for name in ("get_tensor_model_parallel_group", "get_model_parallel_group"):
        if hasattr(mpu, name):
            ranks = ModelParallelRanks(getattr(mpu, name)())
            return ranks if ranks.size > 1 else None
    return None
