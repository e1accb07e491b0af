"""A pool of mappings uses each again, and never while a tensor of it lives."""

from __future__ import annotations

import gc

import pytest
import torch

from tiered_zero.hardware.memory import host_memory
from tiered_zero.hardware.memory.host_memory import BlockPool, HeapTrim

MIB = 1 << 20


def address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_a_mapping_is_used_again_once_no_view_of_it_is_left() -> None:
    pool = BlockPool(4 * MIB)
    first = pool.take(MIB - 5)
    assert (len(first), address(first) % 4096) == (MIB, 0)
    view, before = first.view(torch.float32).as_strided((3, 2), (2, 1), 7), address(first)
    view.fill_(7.0)
    del first
    second = pool.take(MIB)
    second.zero_()
    assert address(second) != before
    assert view.unique().tolist() == [7.0], "a tensor that lives keeps its bytes"
    del view
    gc.collect()
    assert address(pool.take(MIB)) == before


def test_free_mappings_go_where_all_would_take_more_than_was_asked_for() -> None:
    pool = BlockPool(2 * MIB)
    for nbytes in (MIB, 2 * MIB, MIB, 4096):
        pool.take(nbytes)
        assert pool.mapped_nbytes <= 2 * MIB
    held = [pool.take(MIB) for _ in range(3)]
    assert pool.mapped_nbytes == 3 * MIB, "what is in use stays"
    held.clear()
    pool.trim()
    assert pool.mapped_nbytes == 0


def test_the_heap_is_trimmed_where_moved_blocks_have_left_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not for holes of which nothing has moved: plain PyTorch's blocks come and go."""
    unused, trims = [0], list[int]()
    monkeypatch.setattr(HeapTrim, "_unused_nbytes", lambda self: unused[0])
    monkeypatch.setattr(host_memory, "trim_malloc", lambda: trims.append(unused.pop()) or unused.append(MIB))
    heap = HeapTrim(8 * MIB)
    unused[:] = [20 * MIB]
    heap.add(7 * MIB)
    assert trims == []
    heap.add(MIB)
    assert trims == [20 * MIB]
    unused[:] = [9 * MIB]
    heap.add(8 * MIB)
    assert len(trims) == 1, "8 MiB more than the least stay"
    unused[:] = [9 * MIB + 1]
    heap.add(8 * MIB)
    assert len(trims) == 2
