"""Reuse memory for large blocks that are allocated and freed many times in a step."""

from __future__ import annotations

import ctypes
import mmap
import weakref
from collections import deque
from pathlib import Path
from typing import final

import torch

from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.system import map_memory


@final
class BlockPool:
    """Keeps memory mappings whose tensor was dropped, and reuses each for the next tensor of its size. One thread calls
    `take`; any thread may drop tensors.

    The system clears a new mapping when it is touched: 1.6 GB/s per core where this was measured, while the disk read 4
    GB/s. `mapped_nbytes`: bytes of all mappings, used and free.
    """

    def __init__(self, nbytes: int) -> None:
        """Make an empty pool. `nbytes`: limit of all mappings, used and free; beyond it free mappings are dropped."""
        self._nbytes = nbytes
        self.mapped_nbytes = 0
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Return a tensor of whole pages for `nbytes`: [n] uint8, of undefined content."""
        self._collect()
        size = align_up(nbytes, PAGE_NBYTES)
        found = next((index for index in reversed(range(len(self._free))) if len(self._free[index]) == size), None)
        if found is not None:
            mapping = self._free.pop(found)
        else:
            self._shrink(self._nbytes - size)
            # not inherited by forked children, like HostArena's memory
            mapping = map_memory(size, "MADV_HUGEPAGE", "MADV_DONTFORK")
            self.mapped_nbytes += size
        memory = memoryview(mapping)  # lives as long as the tensor's storage
        weakref.finalize(memory, self._returned.append, mapping).atexit = False
        return torch.frombuffer(memory, dtype=torch.uint8)

    def trim(self) -> None:
        """Return the memory of free mappings to the system."""
        self._collect()
        self._shrink(0)

    def _collect(self) -> None:
        while self._returned:
            self._free.append(self._returned.popleft())

    def _shrink(self, nbytes: int) -> None:
        """Drop free mappings, oldest first, until all together have at most `nbytes`."""
        while self._free and self.mapped_nbytes > nbytes:
            self.mapped_nbytes -= len(self._free.pop(0))


@final
class HeapTrim:
    """Trims malloc's heap when blocks that were moved away have left too much of the heap free but resident. Does
    nothing without mallinfo2 of glibc 2.33. One thread.

    Small long-lived blocks end up between large ones in the heap, whose holes then fit no large block: 64 checkpoints
    of 4 MiB, whose inputs were offloaded, left 250 MiB there. A mapping per large block (M_MMAP_THRESHOLD) leaves no
    holes, but a step took a third more CPU time, all of it to clear pages.
    """

    def __init__(self, nbytes: int) -> None:
        """Measure the holes that exist now. `nbytes`: the bytes of further holes that are left alone for the next
        blocks, and the bytes that are moved before holes are looked for. Plain PyTorch leaves holes, too."""
        self._nbytes = nbytes
        self._moved_nbytes = 0
        self._info = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2
            self._least_nbytes = self._unused_nbytes()

    def add(self, nbytes: int) -> None:
        """Count a moved block, and trim if holes have grown beyond the size that is left alone."""
        self._moved_nbytes += nbytes
        if self._info is None or self._moved_nbytes < self._nbytes:
            return
        self._moved_nbytes = 0
        found = self._unused_nbytes()
        if found - self._least_nbytes > self._nbytes:
            trim_malloc()
            found = self._least_nbytes = self._unused_nbytes()
        self._least_nbytes = min(found, self._least_nbytes)

    def _unused_nbytes(self) -> int:
        """Return the bytes of the resident set minus malloc's blocks in use: holes, and memory that is not malloc's."""
        info = self._info()  # type: ignore[misc]
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return num_pages * mmap.PAGESIZE - int(info.uordblks) - int(info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """The result of mallinfo2(3). `uordblks`: bytes given out in heaps. `hblkhd`: bytes in separate mappings."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]
