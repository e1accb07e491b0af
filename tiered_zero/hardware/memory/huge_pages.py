"""Give huge pages to paged units, and store the pages between uses, if the CPU is the device.

A unit has fixed addresses. A fetch maps huge pages at these addresses, taken from a store of unused pages. An evict
returns the pages to the store. Both use mremap(2), which moves entries of the page table, not bytes. malloc would
return a large block to the system, which clears it page by page at the next use. This took several times as long as
reading the unit.

The addresses of an evicted unit show NaN (all bits set, -1 as integers). Code that reads a tensor without any guard,
such as `torch.jit.save`, gets NaN instead of zeros that look like weights.
"""

from __future__ import annotations

import ctypes
import mmap
from contextlib import suppress
from typing import Any, final

import torch

from tiered_zero.sizes import HUGE_PAGE_NBYTES, PAGE_NBYTES, align_up
from tiered_zero.system import map_memory

_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4
_MAP_FIXED, _MAP_NORESERVE = 0x10, 0x4000
_FAILED = ctypes.c_void_p(-1).value
_MAX_STORED = 4096
"""The most pages in the store. Each page takes one entry in the process's table of memory mappings."""


@final
class HugePagePool:
    """Maps huge pages at units' addresses, and stores the pages that no unit uses. Used on the driver thread. `nbytes`:
    stored pages are freed if the mapped and stored pages together exceed this. Raises OSError if the system cannot move
    pages (not Linux, or Linux before 5.7)."""

    def __init__(self, nbytes: int) -> None:
        self._libc = _bind()
        num_pages = min(nbytes // HUGE_PAGE_NBYTES, _MAX_STORED)
        self._store = map_memory(
            (num_pages + 2) * HUGE_PAGE_NBYTES, flags=_MAP_NORESERVE
        )  # two more pages: one is lost if the mapping begins inside a page
        start = align_up(_address(self._store), HUGE_PAGE_NBYTES)
        self._vacant = [start + index * HUGE_PAGE_NBYTES for index in range(num_pages)]
        self._stored: list[int] = []
        self._nbytes = nbytes
        self._used_nbytes = 0
        self._nans = mmap.mmap(-1, HUGE_PAGE_NBYTES, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS)
        self._nans.write(b"\xff" * HUGE_PAGE_NBYTES)
        self._nans_address = _address(self._nans)
        if self._vacant:  # try it, onto the spare page at the end: a move onto itself is refused
            self._move(start, start + num_pages * HUGE_PAGE_NBYTES)

    def close(self) -> None:
        """Free the stored pages. Pages that are unmapped after this are freed, too. Idempotent."""
        self._vacant.clear()
        self._stored.clear()
        self._store.close()

    def map(self, address: int, nbytes: int) -> None:
        """Map `nbytes` of memory (whole pages) at `address`. Use the store's huge pages first, then new pages of the
        system. Then free stored pages that exceed the pool's limit."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED | _MAP_NORESERVE
        if self._libc.mmap(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0) == _FAILED:
            raise OSError(ctypes.get_errno(), "mmap of memory for units")
        for advice in (mmap.MADV_HUGEPAGE, mmap.MADV_DONTFORK):  # the latter as for HostArena's memory
            self._libc.madvise(address, nbytes, advice)
        with suppress(OSError):  # out of mappings: the system provides the rest
            for index in range(min(nbytes // HUGE_PAGE_NBYTES, len(self._stored))):
                self._move(self._stored[-1], address + index * HUGE_PAGE_NBYTES)
                self._vacant.append(self._stored.pop())
        self._used_nbytes += nbytes
        while self._stored and len(self._stored) * HUGE_PAGE_NBYTES + self._used_nbytes > self._nbytes:
            self._libc.madvise(self._stored[-1], HUGE_PAGE_NBYTES, mmap.MADV_DONTNEED)
            self._vacant.append(self._stored.pop())

    def unmap(self, address: int, nbytes: int, keep: bool) -> None:
        """Unmap the memory at `address`. `keep`: whether huge pages go into the store, as far as it has room. All other
        pages are freed."""
        with suppress(OSError):  # the rest is freed
            for index in range(min(nbytes // HUGE_PAGE_NBYTES, len(self._vacant)) if keep else 0):
                self._move(address + index * HUGE_PAGE_NBYTES, self._vacant[-1])
                self._stored.append(self._vacant.pop())
        self._used_nbytes -= nbytes
        self.show_nans(address, nbytes)

    def show_nans(self, address: int, nbytes: int) -> None:
        """Map the shared page of NaNs over the whole range of `nbytes` at `address`. Free the memory that was mapped
        there."""
        for start in range(0, nbytes, HUGE_PAGE_NBYTES):
            size = min(HUGE_PAGE_NBYTES, nbytes - start)
            # for a shared mapping, an old size of 0 makes a second mapping of the same memory
            if self._libc.mremap(self._nans_address, 0, size, _MAYMOVE | _FIXED, address + start) == _FAILED:
                raise OSError(ctypes.get_errno(), "mremap of memory for units")

    def _move(self, page: int, to: int) -> None:
        """Move a huge page. Its old address stays reserved, without memory."""
        size = HUGE_PAGE_NBYTES
        if self._libc.mremap(page, size, size, _MAYMOVE | _FIXED | _DONTUNMAP, to) == _FAILED:
            raise OSError(ctypes.get_errno(), "mremap of memory for units")


@final
class PageRange:
    """The fixed addresses of a unit. Reads see NaN before `fill` and after `empty`. `fill` leaves the content
    undefined. The addresses are freed with their last view."""

    def __init__(self, pool: HugePagePool, nbytes: int) -> None:
        self._pool = pool
        self._nbytes = align_up(max(nbytes, 1), PAGE_NBYTES)
        mapping = map_memory(align_up(self._nbytes, HUGE_PAGE_NBYTES) + HUGE_PAGE_NBYTES, flags=_MAP_NORESERVE)
        start = -_address(mapping) % HUGE_PAGE_NBYTES
        self._address_of_first = _address(mapping) + start
        self.tensor, self.alias, self.pages = (  # [nbytes], [nbytes], whole pages; each with a storage of its own
            torch.frombuffer(mapping, dtype=torch.uint8, offset=start, count=count)
            for count in (nbytes, nbytes, self._nbytes)
        )
        pool.show_nans(self._address_of_first, self._nbytes)

    def fill(self) -> None:
        self._pool.map(self._address_of_first, self._nbytes)

    def empty(self, keep: bool = True) -> None:
        """Unmap the memory. `keep`: whether the pool may keep the huge pages for later units. If False, all pages are
        freed. Pass False if a transfer may still write to the pages."""
        self._pool.unmap(self._address_of_first, self._nbytes, keep)


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _bind() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    try:
        libc.mremap.restype, libc.mremap.argtypes = pointer, [pointer, size, size, integer, pointer]
        libc.mmap.restype, libc.mmap.argtypes = pointer, [pointer, size, integer, integer, integer, ctypes.c_ssize_t]
        libc.madvise.argtypes = [pointer, size, integer]
    except AttributeError as error:
        raise OSError("this system has no mremap") from error
    return libc
