"""Share code between collectives of host and device memory: the ranks' parts, the order of a sum, the order of
gathers."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from itertools import pairwise
from typing import Any

import torch

from tiered_zero.errors import RankError
from tiered_zero.hardware.ranks.backends import all_gather_single

ORDER_NBYTES = 256
"""Bytes that ranks compare of a gather's order: a digest, and as much of the text as fits. Names of calls that differ
have the same room."""


def split_rows(flat: torch.Tensor, bounds: Sequence[int] | None, world_size: int) -> list[torch.Tensor]:
    """Return a view of each rank's part. Sizes must be equal on all ranks: gloo ends the process otherwise."""
    ends = range(0, flat.numel() + 1, flat.numel() // world_size or 1) if bounds is None else bounds
    rows = [flat[start:stop] for start, stop in pairwise(ends)]
    assert len(rows) == world_size and ends[-1] == flat.numel(), "bounds cover the whole"
    return rows


def add_in_order(parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
    """Write the sum of `parts`, added in order, to `out`, which is one of them; the others are overwritten."""
    first, *others = parts
    room = first if first is not out else others[0]
    for number, part in enumerate(others, start=1):
        first = torch.add(first, part, out=out if number == len(others) else room)


def compare_order(order: str, group: Any, world_size: int) -> None:
    """Raise RankError if another rank gathers something else now. On a lane; `group` is over host memory."""
    message = sha256(order.encode()).digest() + order.encode()
    own = torch.frombuffer(bytearray(message[:ORDER_NBYTES].ljust(ORDER_NBYTES)), dtype=torch.uint8)
    out = torch.empty(world_size * ORDER_NBYTES, dtype=torch.uint8, device="cpu")
    all_gather_single(out, own, group=group)
    found = [bytes(message.tolist()) for message in out.view(world_size, -1)]
    if len(set(found)) > 1:
        texts = [message[sha256().digest_size :].decode(errors="replace").strip() for message in found]
        raise RankError(
            "Every rank was expected to use the same modules in the same order, as each has a shard of their "
            f"parameters; now {', '.join(f'rank {rank} gathers {text}' for rank, text in enumerate(texts))}. Let "
            "every rank call every module (a part that some leave out can be multiplied by zero), or set "
            "zero_optimization.stage to 2. Experts that a rank chooses belong inside one block, and "
            "tiered_zero.unit_size_cap left out."
        )
