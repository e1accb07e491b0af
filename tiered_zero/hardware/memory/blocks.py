"""Memory for large blocks that are allocated and freed many times in a step."""

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
from tiered_zero.system.resources import map_memory


@final
class BlockPool:
    """Mappings that the next tensor of their size gets when their last one is gone. One thread takes; any thread drops
    tensors.

    The system clears a new mapping as it is touched, 1.6 GB/s of a core where this was measured and 4 GB/s were read.
    `mapped_nbytes`: of all mappings that are kept.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: of all mappings, in use and free; where more are in use none is free."""
        self._nbytes = nbytes
        self.mapped_nbytes = 0
        self._returned: deque[mmap.mmap] = deque()
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> torch.Tensor:
        """Whole pages for `nbytes`, [n] uint8, whose contents are undefined."""
        self._collect()
        size = align_up(nbytes, PAGE_NBYTES)
        found = next((index for index in reversed(range(len(self._free))) if len(self._free[index]) == size), None)
        if found is not None:
            mapping = self._free.pop(found)
        else:
            self._shrink(self._nbytes - size)
            # kept from forked children, as HostArena's memory
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
        """Drop free mappings, the oldest first, until all have at most `nbytes`."""
        while self._free and self.mapped_nbytes > nbytes:
            self.mapped_nbytes -= len(self._free.pop(0))


@final
class HeapTrim:
    """Trims malloc's heap when moved blocks have left too much of it free and resident; glibc only (2.33). One thread.

    Small blocks that live longer come to lie between large ones in the heap, which then fit into none of the holes: 64
    checkpoints of 4 MiB, whose inputs were offloaded, left 250 MiB there. A mapping for each large block
    (M_MMAP_THRESHOLD) leaves no holes, and took a third more of the CPU's time for a step, all of it to clear pages.
    """

    def __init__(self, nbytes: int) -> None:
        """`nbytes`: of holes, which stay for the next blocks; and of blocks that are moved before holes are looked for:
        plain PyTorch leaves holes too."""
        self._nbytes = nbytes
        self._moved_nbytes = 0
        self._info = getattr(ctypes.CDLL(None), "mallinfo2", None)
        if self._info is not None:
            self._info.restype = _Mallinfo2
            self._least_nbytes = self._unused_nbytes()

    def add(self, nbytes: int) -> None:
        """Count a block that is moved; trim where holes have grown beyond the size that is left alone."""
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
        """The resident set less what malloc has given out: holes, and what is no malloc's."""
        info = self._info()  # type: ignore[misc]
        num_pages = int(Path("/proc/self/statm").read_bytes().split()[1])
        return num_pages * mmap.PAGESIZE - int(info.uordblks) - int(info.hblkhd)


class _Mallinfo2(ctypes.Structure):
    """Of mallinfo(3). `uordblks`: bytes given out in heaps; `hblkhd`: in mappings of their own."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]
