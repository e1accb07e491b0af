"""Keep slots in the host arena, as a tier."""

from __future__ import annotations

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.hardware.memory.host_memory import HostArena, HostSlot
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.tiers.tier import HostBuffer, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate


class HostTier(Tier):
    """A tier whose slots lie in `arena` (pinned if the machine allows it) and are used in place. An empty slot takes no
    memory."""

    name = "host"

    def __init__(self, arena: HostArena, runtime: Runtime) -> None:
        self._arena = arena
        self._accelerator = runtime.accelerator
        self._span = runtime.accelerator.timer(runtime.recorder)
        self._slots: dict[str, HostSlot] = {}

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        if nbytes:
            self._slots[name] = self._arena.take(nbytes, kind)
        return Slot(name=name, nbytes=nbytes, kind=kind)

    def view(self, slot: Slot) -> torch.Tensor:
        return self._slots[slot.name].tensor if slot.nbytes else torch.empty(0, dtype=torch.uint8)

    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Transfer:
        out.tensor.copy_(self.view(slot)[offset : offset + out.tensor.numel()])
        return COMPLETED

    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        self.view(slot)[offset : offset + data.tensor.numel()].copy_(data.tensor)
        return COMPLETED

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        target = as_bytes(out)
        source = self.view(slot)[: target.numel()]
        before = [self._accelerator.record_compute(), *([after.computed] if after else [])]  # it is written in place

        def job() -> None:
            with self._span("fetch", "fetch", slot.name, target.numel()):
                self._accelerator.copy(target, source)

        return self._accelerator.lane("fetch").submit(job, after=before, holds=[target], waits=False)

    def close(self) -> None:
        self._slots.clear()
