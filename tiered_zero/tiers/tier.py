"""Define the interface of a tier, and what its users hold: slots and host buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.tiers.unit_update import UnitUpdate


class HostBuffer(Protocol):
    """Page-aligned host memory: an arena slot or a staging lease. `tensor`, [nbytes] uint8, and `memory` share the
    bytes.
    """

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def memory(self) -> memoryview: ...


@dataclass(frozen=True)
class BufferView:
    """A part of a lease, as a host buffer."""

    tensor: torch.Tensor
    memory: memoryview


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A named region of a tier, of fixed size. `nbytes`: whole pages. `kind`: the ledger's category."""

    name: str
    nbytes: int
    kind: str


class Tier(ABC):
    """A place where bytes rest. Offsets and lengths are bytes, in whole pages. Transfers raise TransferError or
    CorruptionError. The driver or the update thread calls it.
    """

    name: str

    @abstractmethod
    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        """Return a new slot, whose bytes are undefined until written. Raises BudgetError or StoreError if the tier is
        full. `num_durable`: how many places on disk the slot has, as part of its store's commits: 1 if it is written
        once, else 2; 0 means no part of commits. Tiers in memory ignore it."""

    @abstractmethod
    def view(self, slot: Slot) -> torch.Tensor | None:
        """Return the slot's own bytes, [nbytes] uint8, for use in place; None if they cannot be addressed (nvme)."""

    @abstractmethod
    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Transfer:
        """Start to read slot bytes from `offset` into all of `out`. The caller leaves `out` alone until the transfer is
        done."""

    @abstractmethod
    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        """Start to write all of `data` to slot bytes from `offset`. The caller leaves `data` alone until the transfer
        is done. `after`: a mark of what compute has launched, which may still read a slot on the device. Required on a
        lane; None: everything that compute has launched."""

    @abstractmethod
    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """Copy the whole slot to `out`, a contiguous device tensor of at most as many bytes, on the fetch lane. Starts
        after what compute has launched, since compute may just have released the memory of `out`. `after`: an update
        that still writes the slot; wait for it, or copy its new bytes to `out`."""

    @abstractmethod
    def close(self) -> None: ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a [n] uint8 view."""
    return tensor.view(-1).view(torch.uint8)
