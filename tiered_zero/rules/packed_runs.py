"""Alike runs that are stepped as one: on a device a launch costs more than the elements of a small run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL
from tiered_zero.rules.rule import Run
from tiered_zero.sizes import align_up

_CPU_CHUNK_NUMEL = 1 << 17
DEVICE_CHUNK_NUMEL = 1 << 22
"""Elements of which temporaries are made at once."""


def batches(
    runs: Sequence[Run], cut: Callable[[Run, int, int], Run] = Run.part, cpu_numel: int = _CPU_CHUNK_NUMEL
) -> Iterator[list[Run]]:
    """Yield alike runs, `cut` into [start, stop) between blocks, in batches: on a device as many as have room in
    DEVICE_CHUNK_NUMEL; on the CPU, whose cache they are to stay in, one of at most `cpu_numel`."""
    on_cpu = runs[0].master.is_cpu
    most_numel = cpu_numel if on_cpu else DEVICE_CHUNK_NUMEL
    batch: list[Run] = []
    room_numel = most_numel
    for run in runs:
        numel, start = run.master.numel(), 0
        while start < numel:
            stop = min(start + room_numel, numel)
            batch.append(cut(run, start, stop) if stop - start < numel else run)
            room_numel -= align_up(stop - start, QUANTIZED_BLOCK_NUMEL)
            start = stop
            if on_cpu or not room_numel:
                yield batch
                batch, room_numel = [], most_numel
    if batch:
        yield batch


@contextmanager
def packed(runs: Sequence[Run], block_numel: int = 1, per_block: Collection[str] = ()) -> Iterator[Run]:
    """Lay alike runs end to end in temporaries, and copy back what the block has made of them; one run is itself.

    Each begins at a multiple of `block_numel`, behind zeros. `per_block`: state arrays with an element for each of
    those blocks. The copies are launches for all of one array.
    """
    first = runs[0]
    if len(runs) == 1:
        yield first
        return
    masters = _join([run.master for run in runs], block_numel)
    grads = _join([run.grad for run in runs], block_numel)
    outs = None if first.out is None else _join([run.out for run in runs if run.out is not None], block_numel)
    state = {
        name: _join([run.state[name] for run in runs], 1 if name in per_block else block_numel) for name in first.state
    }
    own = {name: joined for name, (joined, _) in state.items()}
    yield replace(first, master=masters[0], grad=grads[0], state=own, out=None if outs is None else outs[0])
    torch._foreach_copy_([run.master for run in runs], masters[1])
    for name, (_, parts) in state.items():
        torch._foreach_copy_([run.state[name] for run in runs], parts)
    if outs is not None:
        torch._foreach_copy_([run.out for run in runs if run.out is not None], outs[1])


def _join(arrays: Sequence[torch.Tensor], block_numel: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Copy arrays into one; return it, and the part of each."""
    numels = [array.numel() for array in arrays]
    spans = [align_up(numel, block_numel) for numel in numels]
    make = torch.empty if spans == numels else torch.zeros
    joined = make(sum(spans), dtype=arrays[0].dtype, device=arrays[0].device)
    pairs = zip(joined.split_with_sizes(spans), numels, strict=True)
    parts = [part if part.numel() == numel else part[:numel] for part, numel in pairs]
    torch._foreach_copy_(parts, list(arrays))
    return joined, parts
