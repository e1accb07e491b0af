"""A pool of mappings uses each again, and never while a tensor of it lives."""

from __future__ import annotations

import gc

import torch

from tiered_zero.hardware.memory.blocks import BlockPool

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
