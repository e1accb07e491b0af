"""Anonymous memory of the system, for buffers that malloc would round, clear or fragment."""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import sys
import threading
from collections.abc import Collection
from contextlib import suppress

from tiered_zero.sizes import PAGE_NBYTES, align_up

logger = logging.getLogger("tiered_zero")


def map_memory(nbytes: int, *advice: str, flags: int = 0) -> mmap.mmap:
    """Map private, page-aligned zeros, which take memory as they are touched.

    `advice`: names of madvise(2) constants, such as "MADV_HUGEPAGE"; what the system refuses is left out.
    """
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
    """Give the pages of a mapping memory, on several threads, and keep what is in them.

    Before pages are pinned, which one thread would do: the system clears each when it is touched first, in 0.4 s of a
    core per GiB (0.05 s in huge pages). `cpus`: run the threads on these processors, so that the pages lie on their
    NUMA node. Nothing happens where there is too little for two threads and no processor is named, or the system
    refuses.
    """
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
