"""Checksums of data files that are being written, each in the order of its file.

[Note: Checksums beside training]  A checksum reads memory that is in no cache: 0.1 s of a processor for 1.6 GB, and
0.3 s beside training, which waits for its slowest thread. At a low priority it takes what training leaves of the
processors: a step under a save then took 4 to 8% longer, and 9 to 12% at the usual one (3% without checksums). Where
nothing is left, as beside other programs, it could take long: the usual priority takes over as soon as something waits
for the save.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import final

import xxhash

from tiered_zero.checkpoint.tag_manifest import CHUNK_NBYTES
from tiered_zero.store.checksums import digest
from tiered_zero.store.transfers import Worker
from tiered_zero.transfer import Completion, Transfer

_LOWEST_PRIORITY = 19


@final
@dataclass(eq=False, kw_only=True)
class FileHash:
    """The checksums of one file, a MiB each. They belong to the hashing threads until these are idle."""

    digests: list[int] = field(default_factory=list)
    _hashing: xxhash.xxh3_64 = field(default_factory=xxhash.xxh3_64)
    _nbytes: int = 0

    def add(self, memory: memoryview) -> None:
        """Take in the next bytes of the file."""
        start = 0
        while start < len(memory):
            stop = min(len(memory), start + CHUNK_NBYTES - self._nbytes % CHUNK_NBYTES)
            if stop - start == CHUNK_NBYTES:
                self.digests.append(digest(memory[start:stop]))
            else:
                self._hashing.update(memory[start:stop])
                if (self._nbytes + stop - start) % CHUNK_NBYTES == 0:
                    self._end_chunk()
            self._nbytes += stop - start
            start = stop

    def end(self) -> None:
        """Enter the checksum of a chunk that is not full."""
        if self._nbytes % CHUNK_NBYTES:
            self._end_chunk()

    def _end_chunk(self) -> None:
        self.digests.append(self._hashing.intdigest())
        self._hashing.reset()


@final
class Hasher:
    """Computes checksums on a thread of the usual priority or, until `hurry`, on one that yields to training. See
    [Note: Checksums beside training]."""

    def __init__(self, *, is_patient: bool) -> None:
        """`is_patient`: yield to training. Raises StoreError where a thread cannot be started."""
        self._jobs: deque[Callable[[], None]] = deque()
        self._order = threading.Lock()
        self._usual = Worker("tiered-zero-checkpoint-hash")
        self._patient: Worker | None = None
        if is_patient:
            self._patient = Worker("tiered-zero-checkpoint-hash-beside")
            self._patient.submit(_lower_priority)
        self._is_hurried = not is_patient

    def submit(self, file: FileHash, memory: memoryview) -> Transfer:
        """Add `memory` to the file's checksums, behind what was submitted before. One thread."""
        hashed = Completion()
        self._jobs.append(_job(file, memory, hashed))
        if self._is_hurried or self._patient is None:
            self._usual.submit(self._run_next)
        else:
            self._patient.submit(self._run_patiently)
        return hashed

    def hurry(self) -> None:
        """Go on at the usual priority: something waits. Any thread, any number of times."""
        self._is_hurried = True  # before the rest: what is submitted after that goes to the usual thread
        self._usual.submit(self._run_all)

    def close(self) -> None:
        """Finish what was submitted, and stop. Idempotent."""
        self.hurry()
        if self._patient is not None:
            self._patient.close()  # which may pass jobs on
        self._usual.close()

    def _run_patiently(self) -> None:
        if self._is_hurried:
            self._usual.submit(self._run_next)
        else:
            self._run_next()

    def _run_all(self) -> None:
        while self._jobs:
            self._run_next()

    def _run_next(self) -> None:
        with self._order:
            if self._jobs:
                self._jobs.popleft()()


def _job(file: FileHash, memory: memoryview, hashed: Completion) -> Callable[[], None]:
    def run() -> None:
        try:
            file.add(memory)
        except BaseException as error:  # the thread goes on; the transfer has the error
            hashed.fail(error)
        else:
            hashed.complete()

    return run


def _lower_priority() -> None:
    """Of the calling thread alone, which Linux can."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _LOWEST_PRIORITY)
