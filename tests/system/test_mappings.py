"""Pages are given memory where they are asked for."""

from __future__ import annotations

import ctypes
import os
import sys
import threading

import pytest

from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.system.mappings import map_memory, touch_pages


@pytest.mark.skipif(sys.platform != "linux", reason="other systems choose a page's node by themselves")
def test_pages_are_touched_on_the_processors_that_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[tuple[int, set[int], bool]] = []

    def bind(process: int, cpus: set[int]) -> None:
        bound.append((process, cpus, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr(os, "sched_setaffinity", bind)
    mapping = map_memory(4 * PAGE_NBYTES)
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    touch_pages(address, len(mapping), 2)
    assert not bound, "too little for two threads"
    touch_pages(address, len(mapping), 2, {1})
    assert bound == [(0, {1}, False)], "a thread that ends with the call"
