"""Wrap a user's process group for an optimizer that divides the parameters among the ranks: broadcasts, and messages
between two ranks. All calls run on the thread and stream of the training loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Sends tensors and bytes between the ranks of `process_group`. Without `process_group` these are the ranks of the
    default group, or this process alone if there is no group. Raises torch's error if a launcher has started several
    processes, and there is no group."""

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
        """Start to fill `tensor` with the tensor of rank `source` of the group. Return a work: its `wait()` blocks
        until `tensor` is filled."""
        if self.world_size == 1:
            return COMPLETED
        return dist.broadcast(tensor, self._global(source), group=self.process_group, async_op=True)

    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, of any length, in rank order. Collective."""
        if self.world_size == 1:
            return [data]
        found: list[bytes] = []
        for source in range(self.world_size):
            length = torch.tensor([len(data)], device=self._device)
            self.broadcast(length, source).wait()
            if not int(length):
                found.append(b"")
                continue
            message = torch.zeros(int(length), dtype=torch.uint8)
            if source == self.rank:
                message.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
            message = message.to(self._device)
            self.broadcast(message, source).wait()
            found.append(bytes(message.cpu().numpy()))
        return found

    def send(self, data: bytes, to: int) -> None:
        """Send any number of bytes to rank `to`, which calls `receive`. Both calls block."""
        self.send_tensor(torch.tensor([len(data)]), to)
        self.send_tensor(torch.frombuffer(bytearray(data), dtype=torch.uint8), to)

    def receive(self, source: int) -> bytes:
        length = torch.empty(1, dtype=torch.int64)
        self.receive_tensor(length, source)
        data = torch.empty(int(length), dtype=torch.uint8)
        self.receive_tensor(data, source)
        return bytes(data.numpy())

    def send_tensor(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor, on any device, to rank `to`. It is first copied to the device from which the group sends
        messages."""
        if tensor.numel():
            dist.send(tensor.to(self._device).contiguous(), self._global(to), group=self.process_group)

    def receive_tensor(self, tensor: torch.Tensor, source: int) -> None:
        """Fill `tensor`, a contiguous CPU tensor, with the tensor that rank `source` sends."""
        if not tensor.numel():
            return
        room = tensor if self._device.type == "cpu" else torch.empty_like(tensor, device=self._device)
        dist.recv(room, self._global(source), group=self.process_group)
        if room is not tensor:
            tensor.copy_(room)

    @property
    def _device(self) -> torch.device:
        """The device of messages: the CPU if the group's backend takes CPU tensors, else a device that it takes."""
        types: Sequence[str] = [device.type for device in self.process_group._device_types]
        return torch.device("cpu" if "cpu" in types else types[0])

    def _global(self, rank: int) -> int:
        return dist.get_global_rank(self.process_group, rank)
