"""Copy plain CPU tensors to and from slots, for initial values, state_dict and user changes. Slow: it blocks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.tiers.inventory import Home
from tiered_zero.tiers.tier import BufferView, as_bytes


def read_slot(home: Home, offset: int, nbytes: int, staging: StagingPool | None) -> torch.Tensor:
    """Return the slot's bytes from `offset`, [nbytes] uint8 on the CPU; through staging buffers if it cannot be
    addressed."""
    view = home.tier.view(home.slot)
    if view is not None:
        return view[offset : offset + nbytes].to("cpu", copy=True)
    assert staging is not None, "a tier without views is planned with staging buffers"
    out, at, end = torch.empty(nbytes, dtype=torch.uint8), offset, offset + nbytes
    while at < end:
        exact = range(at, min(at + staging.buffer_nbytes, align_up(end, PAGE_NBYTES)))
        window = _verified_window(home, exact, staging.buffer_nbytes)
        try:
            found = _read(home, window, staging)[at - window.start :]
        except CorruptionError:
            raise
        except StoreError:  # bytes around the wanted ones were never written
            found = _read(home, exact, staging)
        part = out[at - offset :][: found.numel()]
        part.copy_(found[: part.numel()])
        at += part.numel()
    return out


def _verified_window(home: Home, wanted: range, buffer_nbytes: int) -> range:
    """Extend the range to whole checksum chunks, if the buffer can hold them: a part of a chunk cannot be verified."""
    start = wanted.start // MIB * MIB
    stop = min(align_up(wanted.stop, MIB), home.slot.nbytes)
    if stop - start > buffer_nbytes:
        stop = (start + buffer_nbytes) // MIB * MIB
    return range(start, stop) if stop > wanted.start else wanted


def _read(home: Home, window: range, staging: StagingPool) -> torch.Tensor:
    with staging.lease(len(window), home.slot.name) as lease:
        home.tier.read(home.slot, lease, window.start).wait()
        return lease.tensor.clone()


def write_slot(home: Home, offset: int, data: torch.Tensor, staging: StagingPool | None) -> None:
    """Write a contiguous tensor of whole pages to the slot's bytes from `offset`."""
    raw = as_bytes(data)
    view = home.tier.view(home.slot)
    if view is not None:
        view[offset : offset + raw.numel()].copy_(raw)
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    for start in range(0, raw.numel(), staging.buffer_nbytes):
        part = raw[start : start + staging.buffer_nbytes]
        with staging.lease(part.numel(), home.slot.name) as lease:
            lease.tensor.copy_(part)
            home.tier.write(home.slot, lease, offset + start).wait()


@contextmanager
def leased_slot(
    home: Home, staging: StagingPool | None, read: slice, write: slice | None = None
) -> Iterator[torch.Tensor]:
    """Lend a slot's bytes, [nbytes] uint8, inside the block: in place, possibly on the device, or in a staging buffer.
    `read`, `write`: the bytes (from, to, whole pages) that are read into a staging buffer before the block and written
    back after it; ignored if the slot is lent in place."""
    view = home.tier.view(home.slot)
    if view is not None:
        yield view
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    with staging.lease(home.slot.nbytes, home.slot.name) as lease:
        if read.start < read.stop:
            home.tier.read(home.slot, BufferView(lease.tensor[read], lease.memory[read]), read.start).wait()
        yield lease.tensor
        if write is not None and write.start < write.stop:
            home.tier.write(home.slot, BufferView(lease.tensor[write], lease.memory[write]), write.start).wait()
