"""Keep state, gradients and shards of parameters in device memory, as a tier."""

from __future__ import annotations

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.tiers.tier import HostBuffer, Slot, Tier, as_bytes
from tiered_zero.tiers.unit_update import UnitUpdate


class DeviceTier(Tier):
    """A tier whose slots are device tensors, charged to the ledger's tier "device"."""

    name = "device"

    def __init__(self, accelerator: Accelerator, ledger: Ledger) -> None:
        self._accelerator = accelerator
        self._ledger = ledger
        self._slots: dict[str, tuple[Slot, torch.Tensor]] = {}

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        self._ledger.charge(self.name, kind, nbytes)
        slot = Slot(name=name, nbytes=nbytes, kind=kind)
        self._slots[name] = slot, torch.zeros(nbytes, dtype=torch.uint8, device=self._accelerator.device)
        return slot

    def view(self, slot: Slot) -> torch.Tensor:
        return self._slots[slot.name][1]

    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Transfer:
        source = self.view(slot)[offset : offset + out.tensor.numel()]
        return self._copy("write_back", out.tensor, source, self._accelerator.record())

    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        target = self.view(slot)[offset : offset + data.tensor.numel()]
        return self._copy("write_back", target, data.tensor, after or self._accelerator.record_compute())

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        target = as_bytes(out)
        source, written = self.view(slot)[: target.numel()], [after.written] if after else []
        return self._copy("fetch", target, source, self._accelerator.record_compute(), *written)

    def close(self) -> None:
        for slot, _ in self._slots.values():
            self._ledger.discharge(self.name, slot.kind, slot.nbytes)
        self._slots.clear()

    def _copy(self, lane: str, target: torch.Tensor, source: torch.Tensor, *after: Transfer) -> Transfer:
        accelerator = self._accelerator
        return accelerator.lane(lane).submit(
            lambda: accelerator.copy(target, source), after=after, holds=[target, source], waits=False
        )
