"""The control groups of this process, which bound its memory and processors below what the machine has."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def cgroup_folders(controller: str, proc: Path, mount: Path) -> Iterator[Path]:
    """Yield this process's group and its ancestors, of v1's `controller` and of v2, as far as they are mounted here.

    Inside a container the path of /proc/self/cgroup often lies outside the mount; its mounted ancestors still bind.
    """
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
    """The file's text without blanks around it; "" if it cannot be read."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
