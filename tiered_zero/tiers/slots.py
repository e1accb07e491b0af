"""Plain CPU tensors to and from slots: for birth, state_dict and changes by hand. Not the fast path; it blocks."""

from __future__ import annotations

import torch

from tiered_zero.hardware.staging import StagingPool
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.tiers.inventory import Home
from tiered_zero.tiers.tier import as_bytes


def read_slot(home: Home, offset: int, nbytes: int, staging: StagingPool | None) -> torch.Tensor:
    """[nbytes] uint8 on the CPU: the slot's bytes from `offset`, by staging buffers where they cannot be addressed."""
    view = home.tier.view(home.slot)
    if view is not None:
        return view[offset : offset + nbytes].to("cpu", copy=True)
    assert staging is not None, "a tier without views is planned with staging buffers"
    out = torch.empty(align_up(nbytes, PAGE_NBYTES), dtype=torch.uint8)
    for start in range(0, nbytes, staging.buffer_nbytes):
        part = out[start : start + staging.buffer_nbytes]
        with staging.lease(part.numel(), home.slot.name) as lease:
            home.tier.read(home.slot, lease, offset + start).wait()
            part.copy_(lease.tensor)
    return out[:nbytes]


def write_slot(home: Home, offset: int, data: torch.Tensor, staging: StagingPool | None) -> None:
    """A contiguous tensor of whole pages -> the slot's bytes from `offset`."""
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
