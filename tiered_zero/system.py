"""Wrap the operating system: descriptors, anonymous memory, this process and its control groups.

Promise: a descriptor is closed once, at the latest with its object; a forked child, which inherits an object's memory
but neither its threads nor its files, knows that it is one. Control groups may allow less memory and fewer processors
than the machine has. Owner: the caller that opened the descriptor or mapped the memory. Never: imports torch or numpy,
or knows of a run.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import platform
import sys
import threading
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from tiered_zero.errors import ModelError, TieredZeroError
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


@final
class OwnProcess:
    """Remembers the process in which this object is made. Any thread; takes no lock, which might be locked at a fork.

    `what`: the name of the user's object in the text of the error, such as "engine". `error`: the class of that error.
    """

    def __init__(self, what: str = "engine", error: type[TieredZeroError] = ModelError) -> None:
        self._what, self._error = what, error
        self._pid = os.getpid()

    def is_current(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise the error in a forked child."""
        if not self.is_current():
            raise self._error(
                f"This {self._what} belongs to process {self._pid}; found a call in process {os.getpid()}, which was "
                f"forked from it and has none of its threads. Use the {self._what} in the parent alone, or make "
                "another one in the child."
            )


def cgroup_folders(controller: str, proc: Path, mount: Path) -> Iterator[Path]:
    """Yield the mounted folders of this process's control group and of its ancestors: those of `controller` for cgroup
    v1, and those of v2. `proc`, `mount`: usually /proc and /sys/fs/cgroup.

    Inside a container the path in /proc/self/cgroup is often not mounted; the limits of its mounted ancestors apply."""
    for line in read_text(proc / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            roots = [mount, mount / "unified"]
        elif controller in controllers.split(","):
            roots = [mount / controllers, mount / controller]
        else:
            continue
        inside = Path(path.lstrip("/"))
        for root in dict.fromkeys(roots):
            yield from (folder for part in (inside, *inside.parents) if (folder := root / part).is_dir())


def read_text(path: Path) -> str:
    """Return a file's text, stripped of blanks around it; "" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def processor_name() -> str:
    """Return the processor's model as Linux names it; else the name of the machine's architecture."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def boot_id() -> str:
    """Return the boot id of the running kernel; "" if there is no /proc."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


GOOD, POOR, BAD = "ok", "slow", "off"


@dataclass(frozen=True)
class Finding:
    """One line of `tiered-zero doctor`. `name`: what was looked at. `state`: "ok", "slow" (works, but not at full
    speed) or "off". `found`: what was found. `fix`: what the user can do; "" for nothing."""

    name: str
    state: str
    found: str
    fix: str = ""
