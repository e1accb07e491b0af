"""The interface of a tier, and what its users hold: slots and host buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol

import torch

from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.tiers.unit_update import UnitUpdate


class HostBuffer(Protocol):
    """Page-aligned host memory: an arena slot or a staging lease. `tensor` [nbytes] uint8 and `memory` are the same
    bytes.
    """

    @property
    def tensor(self) -> torch.Tensor: ...
    @property
    def memory(self) -> memoryview: ...


@dataclass(frozen=True)
class BufferView:
    """A part of a lease as a host buffer of its own."""

    tensor: torch.Tensor
    memory: memoryview


@dataclass(frozen=True, kw_only=True)
class Slot:
    """A named region of a tier, of fixed size. `nbytes`: whole pages. `kind`: what the ledger counts it as."""

    name: str
    nbytes: int
    kind: str


class Tier(ABC):
    """A place where bytes rest. Offsets and lengths are bytes, whole pages. Calls come from the driver or the update
    thread.

    A transfer's error is a TransferError or CorruptionError.
    """

    name: str

    @abstractmethod
    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        """A new slot; its bytes are undefined until written. Raises BudgetError or StoreError when the tier is full.

        `num_durable`: on nvme, if not 0, the slot takes part in the commits of its store, in so many places on disk; a
        number, because what is written once needs 1, and everything else 2. In memory nothing can be durable: other
        tiers ignore it.
        """

    @abstractmethod
    def view(self, slot: Slot) -> torch.Tensor | None:
        """The slot's own bytes, [nbytes] uint8, to be used in place; None where they cannot be addressed (nvme)."""

    @abstractmethod
    def read(self, slot: Slot, out: HostBuffer, offset: int = 0) -> Transfer:
        """Slot bytes from `offset` on -> all of `out`. `out` is the tier's until the transfer is done."""

    @abstractmethod
    def write(self, slot: Slot, data: HostBuffer, offset: int = 0, after: Transfer | None = None) -> Transfer:
        """All of `data` -> slot bytes from `offset` on. `data` is the tier's until the transfer is done.

        `after`: compute's mark: what may still read the slot where that is on the device. Required on a lane; None: all
        that compute has launched."""

    @abstractmethod
    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """The whole slot -> `out`, a contiguous device tensor of at most as many bytes, on the fetch lane.

        Starts after what compute has launched so far, since `out` may be memory that compute has just released, and
        after `after`: the update that is still writing the slot, or that forwards its new bytes to `out`.
        """

    @abstractmethod
    def close(self) -> None: ...


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[n] uint8 view of a contiguous tensor."""
    return tensor.view(-1).view(torch.uint8)
