"""Count calls, files and returns to a room on the calling thread: a reader of the code walks as far."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import tiered_zero

PACKAGE = str(Path(tiered_zero.__file__).parent)

SERVICES = frozenset("concurrency config errors.py hardware io native sizes.py system.py telemetry version.py".split())
"""What every room calls, and no reader of a walk opens: locks, devices, files, spans."""


def host_config() -> dict[str, Any]:
    """Everything is in host memory, and each unit is paged onto a device that is the CPU too."""
    host = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW"},
        "zero_optimization": {
            "stage": 3,
            "offload_param": host,
            "offload_optimizer": host,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"device": "cpu", "device_memory_limit": "1GiB"},
    }


@dataclass(frozen=True)
class Walk:
    """The calls of package functions on one thread, in order: (path inside the package, function without its class).

    Comprehensions, and each turn of a generator, are calls too.
    """

    calls: list[tuple[str, str]]

    @property
    def files(self) -> list[str]:
        """Each file once, in the order of its first call."""
        return list(dict.fromkeys(file for file, _ in self.calls))

    @property
    def size(self) -> tuple[int, int]:
        """(calls, files)"""
        return len(self.calls), len(self.files)

    def since(self, function: str) -> Walk:
        """Take the calls from the first one of `function` on."""
        return Walk(self.calls[[name for _, name in self.calls].index(function) :])

    @property
    def returns(self) -> list[str]:
        """List the files that make the reader return to a room: each is new, in a room that the walk had left.

        A room is a top folder of the package that is not in SERVICES. A file that was read before counts nothing: the
        reader knows it.
        """
        rooms: list[str] = []
        found = []
        for file in self.files:
            room = file.split("/")[0]
            if room in SERVICES or rooms[-1:] == [room]:
                continue
            if room in rooms:
                found.append(file)
            rooms.append(room)
        return found


def record(act: Callable[[], Any], inside: str | None = None) -> Walk:
    """Make the call, and list what it calls on this thread. `inside`: list only calls of the function of this name, and
    what it calls until it returns."""
    calls: list[tuple[str, str]] = []
    num_open = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal num_open
        if event not in ("call", "return") or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        name = frame.f_code.co_name
        if event == "return":
            num_open -= name == inside
            return
        num_open += name == inside
        if inside is None or num_open:
            calls.append((frame.f_code.co_filename[len(PACKAGE) + 1 :], name))

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        act()
    finally:
        sys.setprofile(before)
    return Walk(calls)


def over(walks: dict[str, Walk], most: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """(calls, files) of each walk that has more of either than `most` allows."""
    return {
        name: walk.size
        for name, walk in walks.items()
        if any(counted > bound for counted, bound in zip(walk.size, most[name], strict=True))
    }
