"""Anonymous memory of the system, for buffers that malloc would round, clear or fragment."""

from __future__ import annotations

import logging
import mmap

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
