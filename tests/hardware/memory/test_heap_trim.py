"""Holes that moved blocks leave in the heap are trimmed."""

from __future__ import annotations

import pytest

from tiered_zero.hardware.memory import host_memory
from tiered_zero.hardware.memory.host_memory import HeapTrim

MIB = 1 << 20


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
