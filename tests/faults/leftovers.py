"""What a run leaves behind that it should not: threads, descriptors, files."""

from __future__ import annotations

import os
import shutil
import threading
from contextlib import suppress
from pathlib import Path

from tests.support.inspection.damage import store_damage
from tests.support.inspection.insides import LOCK_NAME, find_damage, list_runs, list_tags


def held() -> set[str]:
    """Threads of Python and of libraries, and descriptors, of this process."""
    found = {str(thread) for thread in threading.enumerate() if not isinstance(thread, threading._DummyThread)}
    found |= {f"thread {tid}" for tid in os.listdir("/proc/self/task")}
    for fd in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of the list itself
            found.add(f"descriptor {fd} of {os.readlink(f'/proc/self/fd/{fd}')}")
    return found


def left_in_swap(path: Path, keeps_commits: bool) -> list[str]:
    """Names of files that a closed engine has left where it swaps, but for a commit that is whole; removes that."""
    for run in list_runs(path) if keeps_commits else ():
        if run.step is not None and not store_damage([run.path]) and run.state != "alive":
            shutil.rmtree(run.path)
    return sorted(one.name for one in path.iterdir())


def left_in_saves(folder: Path) -> list[str]:
    """What is wrong in a directory of checkpoints after its last save: hidden names, and tags that are not whole."""
    if not folder.exists():
        return []
    names = sorted(one.name for one in folder.iterdir())
    hidden = [name for name in names if name.startswith(".") and name != LOCK_NAME]
    whole = [tag.path for tag in list_tags(folder) if not tag.is_superseded]
    return hidden + [line for path in whole for line in find_damage(path)]
