"""Detect whether this process is a forked child of the one that made an object, and list its control groups.

A forked child inherits the object's memory, but neither its threads nor its files. Control groups may allow less memory
and fewer processors than the machine has."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import final

from tiered_zero.errors import ModelError, TieredZeroError


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
