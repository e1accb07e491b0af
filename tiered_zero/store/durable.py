"""Bytes and names that are on the disk when the call returns: every manifest, tag and weight file goes through here."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from tiered_zero.system.resources import opened


def write_and_sync(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` one after another to the open file, then fsync it. Raises OSError."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]
    os.fsync(fd)


def write_new_file(path: str | Path, parts: Iterable[bytes | memoryview], dir_fd: int | None = None) -> None:
    """Write a file that does not exist yet, mode 0600, and fsync it; its name is durable after a sync of the directory.

    Raises OSError, FileExistsError too.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(path, flags, 0o600, dir_fd=dir_fd) as fd:
        write_and_sync(fd, parts)


def sync_directory(directory: Path) -> None:
    """Make the names durable that were created, renamed or removed in `directory`. Raises OSError."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)
