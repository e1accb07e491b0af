"""Open descriptors that are closed once, and map anonymous memory for buffers that malloc would round or fragment."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Final, final

from tiered_zero.sizes import PAGE_NBYTES, align_up

logger = logging.getLogger("tiered_zero")


@final
class Descriptor(int):
    """An open file descriptor of this process, made by `opened`.

    It is closed by `close`, at the end of a `with` block, or when the object is collected. It is an int, for the calls
    that take one; the object must live as long as they use it."""

    closed = False

    def close(self) -> None:
        """Close the descriptor. Idempotent. Raises OSError."""
        if not self.closed and self >= 0:
            self.closed = True  # first: a number that is free again may be another file's
            os.close(self)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, suppress: type[suppress] = suppress) -> None:  # which is gone as the interpreter ends
        with suppress(Exception):  # a finalizer cannot raise it
            self.close()


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Descriptor:
    """Open a file as os.open does, and return its descriptor. Raises OSError."""
    return Descriptor(os.open(path, flags, mode, dir_fd=dir_fd))


CLOSED: Final = Descriptor(-1)
"""A descriptor that is not open."""

CLOSED.closed = True


def map_memory(nbytes: int, *advice: str, flags: int = 0) -> mmap.mmap:
    """Map private, page-aligned memory of zeros. A page takes memory when it is first touched.

    `advice`: names of madvise(2) constants, such as "MADV_HUGEPAGE"; those that the system refuses are skipped."""
    mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | flags)
    for name in advice:
        if hasattr(mmap, name):
            try:
                mapping.madvise(getattr(mmap, name))
            except OSError as error:
                logger.debug("%s is refused: %s", name, error)
    return mapping


_POPULATE_WRITE = 23
"""MADV_POPULATE_WRITE of madvise(2), since Linux 5.14; Python has no name for it."""

_LEAST_STRETCH_NBYTES = 16 << 20


def touch_pages(address: int, nbytes: int, num_threads: int, cpus: Collection[int] = ()) -> None:
    """Allocate the pages of a mapping on several threads; their content stays.

    Called before pages are pinned, which would allocate them on one thread: the system clears each page at its first
    use, in 0.4 s of a core per GiB (0.05 s in huge pages). `cpus`: the threads run on these processors, and so the
    pages lie on the NUMA node of these. Does nothing if the mapping is too small for two threads and no processor is
    named, or if the system refuses."""
    stretch_nbytes = align_up(max(_LEAST_STRETCH_NBYTES, -(-nbytes // num_threads)), PAGE_NBYTES)
    if sys.platform != "linux" or (nbytes <= stretch_nbytes and not cpus):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def touch(start: int) -> None:
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)  # of this thread, which ends here
        advise(address + start, min(stretch_nbytes, nbytes - start), _POPULATE_WRITE)

    threads = [threading.Thread(target=touch, args=(start,)) for start in range(0, nbytes, stretch_nbytes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
