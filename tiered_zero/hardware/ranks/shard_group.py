"""Wrap a user's process group for an optimizer that divides the parameters among the ranks. All calls run on the thread
and stream of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import torch
import torch.distributed as dist
from torch.distributed.algorithms.join import Join, Joinable, JoinHook

from tiered_zero.concurrency.transfer import COMPLETED
from tiered_zero.hardware.ranks.launcher import is_initialized, launched_world_size

__all__ = ["Join", "Joinable", "ShardGroup", "StepHook"]


@final
class StepHook(JoinHook):
    """Calls `step` on a rank that has no more data, so that the rank takes part in the broadcasts of the others."""

    def __init__(self, step: Callable[[], Any]) -> None:
        self._step = step

    def main_hook(self) -> None:
        self._step()


@final
class ShardGroup:
    """Sends tensors and values between the ranks of `process_group`. None: use torch's default group; if there is none,
    this process is the only rank. Raises torch's error if a launcher has started several processes without a group."""

    def __init__(self, process_group: Any = None) -> None:
        self.process_group: Any = process_group
        self.rank = self.global_rank = 0
        self.world_size = 1
        if process_group is None and not is_initialized() and launched_world_size() == 1:
            return
        self.process_group = dist.group.WORLD if process_group is None else process_group
        self.world_size = dist.get_world_size(self.process_group)
        self.rank = dist.get_rank(self.process_group)
        self.global_rank = dist.get_rank()

    def broadcast(self, tensor: torch.Tensor, source: int) -> Any:
        """Start to fill `tensor` with the tensor of the group's rank `source`. Return an object with `wait()`."""
        if self.world_size == 1:
            return COMPLETED
        return dist.broadcast(tensor, self._global(source), group=self.process_group, async_op=True)

    def exchange(self, value: str) -> list[str]:
        """Return every rank's `value`, in rank order. Every rank must call this."""
        found = [value] * self.world_size
        if self.world_size > 1:
            dist.all_gather_object(found, value, group=self.process_group)
        return found

    def send(self, value: Any, to: int) -> None:
        """Send a value whose tensors are on the CPU to rank `to`, which calls `receive`. Both calls block."""
        dist.send_object_list([value], self._global(to), group=self.process_group)

    def receive(self, source: int) -> Any:
        """Return the value that rank `source` sends."""
        found: list[Any] = [None]
        dist.recv_object_list(found, self._global(source), group=self.process_group)
        return found[0]

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)
