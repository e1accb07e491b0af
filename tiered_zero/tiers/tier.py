"""Define the interface of a tier, its slots and buffers, and the two tiers in memory: device and host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.memory.host_memory import HostArena, HostSlot
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.tiers.unit_update import UnitUpdate


class HostBuffer(Protocol):
    """Page-aligned host memory: a slot of the host arena, or a leased staging buffer. `tensor`, [nbytes] uint8, and
    `memory` are the same bytes."""

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def memory(self) -> memoryview: ...


@dataclass(frozen=True)
class BufferView:
    """A part of a leased buffer, as a host buffer."""

    tensor: torch.Tensor
    memory: memoryview


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A named region of a tier, of fixed size. `nbytes`: whole pages. `kind`: the category under which the ledger, the
    run's account of bytes, counts it."""

    name: str
    nbytes: int
    kind: str


class Tier(ABC):
    """A place where bytes rest. Offsets and lengths are in bytes, and whole pages. Transfers raise TransferError or
    CorruptionError. Called by the driver or the update thread."""

    name: str

    @abstractmethod
    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        """Return a new slot, whose bytes are undefined until they are written. `kind`: see `Slot`. `num_durable`: how
        many places on disk the slot has in the commits of its store: 1 if it is written once, else 2; 0 if it is in no
        commit. Tiers in memory ignore it. Raises BudgetError or StoreError if the tier is full."""

    @abstractmethod
    def view(self, slot: Slot) -> torch.Tensor | None:
        """Return the slot's own bytes, [nbytes] uint8, for use in place; None if memory cannot address them (nvme)."""

    @abstractmethod
    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Transfer:
        """Start to read the slot's bytes from `offset` until `out` is full. The caller leaves `out` alone until the
        transfer is done."""

    @abstractmethod
    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        """Start to write all of `data` to the slot's bytes from `offset`. The caller leaves `data` alone until the
        transfer is done. `after`: a mark of what compute has launched, which may still read a slot on the device; the
        write begins after it. None: all that compute has launched so far. A caller on a lane must give a mark."""

    @abstractmethod
    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """Start to copy the slot to `out`, on the fetch lane. `out`: a contiguous device tensor of at most as many
        bytes. The copy starts after what compute has launched, since compute may just have released the memory of
        `out`. `after`: an update that still writes the slot; the fetch waits for the update, or copies its new bytes to
        `out`."""

    @abstractmethod
    def close(self) -> None: ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a [n] uint8 view."""
    return tensor.view(-1).view(torch.uint8)


class HostTier(Tier):
    """A tier whose slots lie in host memory, `arena` (pinned if the machine allows it), and are used in place. An empty
    slot takes no memory."""

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


class DeviceTier(Tier):
    """A tier whose slots are device tensors, counted in the ledger's tier "device"."""

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
