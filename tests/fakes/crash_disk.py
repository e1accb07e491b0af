"""A disk that forgets: replays a log of file operations up to a crash, and says what may then be left.

Only what was fsynced is certain. Of the other writes any may have reached the disk, in any order and torn between
pages; of the other directory entries any prefix (file systems journal these in order).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

PAGE = 4096
Operation = tuple[Any, ...]


@dataclass
class RecordingOS:
    """The `os` module for the code under test; logs what changes files that are opened by their whole path."""

    log: list[Operation]
    _open: dict[int, list[Any]] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def open(self, path: str | os.PathLike[str], flags: int, mode: int = 0o777, dir_fd: int | None = None) -> int:
        fd = os.open(path, flags, mode, dir_fd=dir_fd)
        if dir_fd is not None:
            return fd  # a file of a save directory, which this log is not about
        self._open[fd] = [str(path), 0]
        if flags & os.O_TRUNC:
            self.log.append(("create", str(path)))
        return fd

    def write(self, fd: int, data: memoryview) -> int:
        if fd not in self._open:
            return os.write(fd, data)
        path, position = self._open[fd]
        self.log.append(("write", path, position, bytes(data)))
        self._open[fd][1] += len(data)
        return os.write(fd, data)

    def fsync(self, fd: int) -> None:
        if fd not in self._open:
            return
        path = self._open[fd][0]
        self.log.append(("sync_directory" if os.path.isdir(path) else "sync", path))

    def close(self, fd: int) -> None:
        self._open.pop(fd, None)
        os.close(fd)

    def rename(self, old: os.PathLike[str], new: os.PathLike[str]) -> None:
        self.log.append(("rename", str(old), str(new)))
        os.rename(old, new)

    def unlink(self, path: os.PathLike[str], *, dir_fd: int | None = None) -> None:
        os.unlink(path, dir_fd=dir_fd)
        if dir_fd is None:
            self.log.append(("unlink", str(path)))


@dataclass
class _File:
    """`pending`: writes that are not durable yet, each one page or less."""

    durable: bytearray
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, offset: int, data: bytes) -> None:
        for start in range(0, len(data), PAGE):
            self.pending.append((offset + start, data[start : start + PAGE]))

    def after(self, kept: Sequence[tuple[int, bytes]]) -> bytes:
        content = bytearray(self.durable)
        for offset, data in kept:
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            content[offset : offset + len(data)] = data
        return bytes(content)


Choice = Callable[[list[Any]], list[Any]]


@dataclass
class CrashDisk:
    """`sizes`: of files that are preallocated when they are created, by name."""

    sizes: dict[str, int]
    names: dict[str, _File] = field(default_factory=dict)
    entries: list[tuple[str, str, _File | None]] = field(default_factory=list)

    def apply(self, operation: Operation) -> None:
        kind, path, *rest = operation
        now = self._current()
        if kind == "create":
            self.entries.append((path, "", _File(bytearray(self.sizes.get(Path(path).name, 0)))))
        elif kind == "write":
            now[path].write(*rest)
        elif kind == "sync":
            file = now[path]
            file.durable[:] = file.after(file.pending)
            file.pending.clear()
        elif kind == "rename":
            self.entries.append((rest[0], path, now[path]))
        elif kind == "unlink":
            self.entries.append(("", path, None))
        elif kind == "sync_directory":
            here = [entry for entry in self.entries if path in {str(Path(name).parent) for name in entry[:2] if name}]
            self.names = self._with(here)
            self.entries = [entry for entry in self.entries if entry not in here]

    def crash(self, keep_writes: Choice, keep_entries: Choice) -> dict[str, bytes]:
        """Content by path, had the power failed now."""
        left = self._with(keep_entries(self.entries))
        return {path: file.after(keep_writes(file.pending)) for path, file in left.items()}

    def _current(self) -> dict[str, _File]:
        return self._with(self.entries)

    def _with(self, entries: Sequence[tuple[str, str, _File | None]]) -> dict[str, _File]:
        names = dict(self.names)
        for made, gone, file in entries:
            names.pop(gone, None)
            if made and file is not None:
                names[made] = file
        return names


def fates(seed: int, number: int) -> list[tuple[Choice, Choice]]:
    """All lost, all kept, and `number` random ones in between."""

    def some(random: Random) -> tuple[Choice, Choice]:
        odds = random.random()
        return (
            lambda writes: random.sample(kept := [w for w in writes if random.random() < odds], len(kept)),
            lambda entries: entries[: random.randint(0, len(entries))],
        )

    return [(lambda w: [], lambda e: []), (list, list), (list, lambda e: []), (lambda w: [], list)] + [
        some(Random(f"{seed}/{index}")) for index in range(number)
    ]
