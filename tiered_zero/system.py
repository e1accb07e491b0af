"""Wrap the operating system: file descriptors, anonymous memory, forks, and the control groups of this process.

Promise: a descriptor is closed exactly once, at the latest when its object is collected. A process can find out that
it is a forked child. Owner: the caller that opened the descriptor or mapped the memory. Never: imports torch or numpy,
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
    """An open file descriptor of this process, made by `opened`. Functions of `os` accept it as an int. It is closed
    by `close`, at the end of a `with` block, or when it is garbage collected: keep a reference while it is used."""

    closed = False

    def close(self) -> None:
        """Close the descriptor. Idempotent. Raises OSError."""
        if not self.closed and self >= 0:
            self.closed = True  # first: once closed, the number may belong to another file
            os.close(self)

    def __enter__(self) -> Descriptor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self, suppress: type[suppress] = suppress) -> None:  # the global is gone as Python ends
        with suppress(Exception):  # a finalizer must not raise
            self.close()


def opened(path: str | os.PathLike[str], flags: int, mode: int = 0o600, *, dir_fd: int | None = None) -> Descriptor:
    """Open a file as os.open does, and return its descriptor. Raises OSError."""
    return Descriptor(os.open(path, flags, mode, dir_fd=dir_fd))


CLOSED: Final = Descriptor(-1)
"""A descriptor that is not open."""

CLOSED.closed = True


def map_memory(nbytes: int, *advice: str, flags: int = 0) -> mmap.mmap:
    """Map private, page-aligned memory of zeros. `advice`: names of madvise(2) constants, such as "MADV_HUGEPAGE";
    those that the system refuses are skipped."""
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
    """Allocate the pages of a mapping on several threads. Pinning would allocate them on one thread, in 0.4 s per GiB.
    `cpus`: the processors on which the threads run; the pages come from the NUMA node of these processors. Does nothing
    if the system refuses, or for a small mapping without `cpus`."""
    stretch_nbytes = align_up(max(_LEAST_STRETCH_NBYTES, -(-nbytes // num_threads)), PAGE_NBYTES)
    if sys.platform != "linux" or (nbytes <= stretch_nbytes and not cpus):
        return
    advise = ctypes.CDLL(None).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def touch(start: int) -> None:
        if cpus:
            with suppress(OSError):
                os.sched_setaffinity(0, cpus)  # only for this thread, which ends with this function
        advise(address + start, min(stretch_nbytes, nbytes - start), _POPULATE_WRITE)

    threads = [threading.Thread(target=touch, args=(start,)) for start in range(0, nbytes, stretch_nbytes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@final
class OwnProcess:
    """Remembers the process that made this object, so that a forked child can be refused. Any thread may use it.
    `what`: what the error's message calls the user's object, such as "engine". `error`: the class of that error."""

    def __init__(self, what: str = "engine", error: type[TieredZeroError] = ModelError) -> None:
        self._what, self._error = what, error
        self._pid = os.getpid()  # and no lock: a fork may copy one while it is held

    def is_current(self) -> bool:
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raise `error` if this process is a forked child."""
        if os.getpid() != self._pid:
            raise self._error(
                f"This {self._what} belongs to process {self._pid}; found a call in process {os.getpid()}, which was "
                f"forked from it and has none of its threads. Use the {self._what} in the parent alone, or make "
                "another one in the child."
            )


def cgroup_folders(controller: str, proc: Path, mount: Path) -> Iterator[Path]:
    """Yield the mounted folders of this process's control group and of the groups that contain it. `controller`: the
    controller for cgroup v1, such as "memory"; folders of cgroup v2 are included. `proc`, `mount`: usually /proc and
    /sys/fs/cgroup."""
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
            # inside a container the group's own folder is often not mounted; outer limits apply
            yield from (folder for part in (inside, *inside.parents) if (folder := root / part).is_dir())


def read_text(path: Path) -> str:
    """Return a file's text, stripped of blanks around it; "" if the file cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def processor_name() -> str:
    """Return the processor's model from /proc/cpuinfo; if that has none, the machine's architecture."""
    lines = read_text(Path("/proc/cpuinfo")).splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())


def boot_id() -> str:
    """Return the boot id of the running kernel; "" if there is no /proc."""
    return read_text(Path("/proc/sys/kernel/random/boot_id"))


GOOD, POOR, BAD, UNKNOWN = "ok", "slow", "off", "none"


@dataclass(frozen=True)
class Finding:
    """One line of `tiered-zero doctor`. `name`: what was checked. `state`: "ok", "slow" (works, but not at full speed),
    "off" (does not work), or "none" (not measured yet). `found`: the result. `fix`: what the user can do; "" if
    nothing."""

    name: str
    state: str
    found: str
    fix: str = ""
