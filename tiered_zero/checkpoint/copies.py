"""Durable copies, in the store of the state, of what rests in memory and is not made of it.

Frozen parameters and buffers are compared at a save, and written if they have changed. Parameters that are half of
their masters change in each update: a commit writes them from where they rest, 2 of the 10 bytes of their state.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Container, Iterable, Mapping
from typing import final

import torch
import xxhash

from tiered_zero.concurrency.transfer import Transfer, wait_all
from tiered_zero.errors import StoreError
from tiered_zero.layout.flat import Unit
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.tiers.inventory import Home
from tiered_zero.tiers.tier import BufferView, as_bytes

_CHUNK_NBYTES = MIB
"""What is compared and written at once: a checksum of the store covers as much."""


@final
class DurableCopies:
    """Copies what rests in memory to `homes`.

    `units`: whose parameters are copied, with where to. `updated`: indices of those that updates write. `flat(unit)`:
    [P], where the unit rests. `buffers`: where to; None for a model without any.
    """

    def __init__(
        self,
        units: Mapping[int, tuple[Unit, Home]],
        updated: Container[int],
        flat: Callable[[Unit], torch.Tensor],
        buffers: Home | None,
    ) -> None:
        self.homes = {index: home for index, (_, home) in units.items()}
        self.buffers = buffers
        self._kept = [(unit, home) for unit, home in units.values() if unit.index not in updated]
        self._updated = [(unit, home) for unit, home in units.values() if unit.index in updated]
        self._flat = flat
        self._digests: dict[tuple[str, int], int] = {}
        """(slot, first byte) -> of what was written there."""

    def write_updated(self) -> None:
        """Write the parameters that updates write. Between two updates. Raises StoreError, TransferError."""
        writes: list[Transfer] = []
        try:
            for unit, home in self._updated:
                raw = as_bytes(self._flat(unit))
                writes.append(home.tier.write(home.slot, BufferView(raw, raw.numpy().data)))
        finally:
            wait_all(writes)

    def write(self, packed: Iterable[tuple[str, torch.Tensor, int]]) -> None:
        """Write what has changed of the rest. Driver thread, while no commit runs; updates may. `packed`: buffers with
        their first bytes. Raises StoreError, TransferError."""
        memory = mmap.mmap(-1, _CHUNK_NBYTES)
        room = torch.frombuffer(memory, dtype=torch.uint8)
        for unit, home in self._kept:
            self._write(home, as_bytes(self._flat(unit)), room, memory)
        self._write_buffers(packed, room, memory)

    def _write_buffers(
        self, packed: Iterable[tuple[str, torch.Tensor, int]], room: torch.Tensor, memory: mmap.mmap
    ) -> None:
        if self.buffers is None:
            return
        raw = torch.zeros(self.buffers.slot.nbytes, dtype=torch.uint8)
        for name, buffer, offset in packed:
            data = as_bytes(buffer.detach().contiguous()).cpu()
            if offset + data.numel() > raw.numel():
                raise StoreError(
                    f"Buffer {name} has grown: commits were planned for {format_nbytes(raw.numel())} of buffers. Start "
                    "again with buffers of their final shapes, or set tiered_zero.checkpoint.in_place to false."
                )
            raw[offset : offset + data.numel()] = data
        self._write(self.buffers, raw, room, memory)

    def _write(self, home: Home, raw: torch.Tensor, room: torch.Tensor, memory: mmap.mmap) -> None:
        """`raw`: the slot's bytes, anywhere."""
        for start in range(0, raw.numel(), _CHUNK_NBYTES):
            part = raw[start : start + _CHUNK_NBYTES]
            window = room[: align_up(part.numel(), PAGE_NBYTES)]
            window.zero_()
            window[: part.numel()].copy_(part)
            view = memoryview(memory)[: window.numel()]
            digest = xxhash.xxh3_64_intdigest(view)
            if self._digests.get((home.slot.name, start)) != digest:
                home.tier.write(home.slot, BufferView(window, view), start).wait()
                self._digests[home.slot.name, start] = digest
