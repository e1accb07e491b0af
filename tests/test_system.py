"""Descriptors are closed once, and with their object; pages are given memory where they are asked for."""

import ctypes
import gc
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.system import CLOSED, map_memory, opened, touch_pages


def is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def test_the_end_of_a_block_closes(tmp_path: Path) -> None:
    with opened(tmp_path, os.O_RDONLY) as fd:
        assert is_open(fd)
        assert not fd.closed
    assert fd.closed
    assert not is_open(fd)


def test_a_number_that_is_used_again_is_not_closed_again(tmp_path: Path) -> None:
    fd = opened(tmp_path, os.O_RDONLY)
    fd.close()
    other = os.open(tmp_path, os.O_RDONLY)
    assert other == fd
    fd.close()
    del fd
    gc.collect()
    assert is_open(other)
    os.close(other)


def test_it_is_closed_with_the_object(tmp_path: Path) -> None:
    fd = opened(tmp_path, os.O_RDONLY)
    number = int(fd)
    del fd
    gc.collect()
    assert not is_open(number)


def test_none_is_closed() -> None:
    CLOSED.close()
    assert CLOSED.closed


def test_the_end_of_the_interpreter_is_silent() -> None:
    """Modules are emptied before the last objects go."""
    code = "import os; from tiered_zero.system import opened; kept = opened('.', os.O_RDONLY)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


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
