"""The owner of a run's directories: the owner file, its lock, and what distinguishes its process from a later one."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.store.checked_json import check_fields, check_kind, decode_json, kinds_of
from tiered_zero.store.descriptors import error_text, open_directory, open_file, read_file
from tiered_zero.store.durable import write_and_sync

PREFIX = "tiered_zero-"
OWNER_NAME = "owner.json"

_MOST_NBYTES = 1 << 20
"""Of an owner file; one takes some hundred bytes, and its paths a few thousand at most."""


@final
@dataclass(frozen=True, kw_only=True)
class Owner:
    """The owner of a run's directories: the text of each directory's owner file, which its process holds by flock.

    `start_ticks`: the process's start time in clock ticks since boot (proc(5), stat field 22), which a later process
    with the same pid does not have. `created_s`: seconds since the epoch. `paths`: all directories of the run.
    """

    run_id: str
    pid: int
    host: str
    start_ticks: int
    boot_id: str
    created_s: float
    model: str
    note: str
    paths: tuple[str, ...]

    def encode(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def decode(cls, data: bytes) -> Owner:
        """Raises ValueError on anything that is no owner file."""
        fields = check_fields(decode_json(data), _KINDS)
        for path in fields["paths"]:
            check_kind("paths", path, str)
            os.fsencode(path)  # raises UnicodeEncodeError, a ValueError
            if "\0" in path or not os.path.isabs(path):
                raise ValueError(f"paths: expected absolute paths; found {path[:200]!a}")
        if not fields["paths"] or fields["pid"] < 0:
            raise ValueError("expected one or more paths and a pid")
        return cls(**{**fields, "created_s": float(fields["created_s"]), "paths": tuple(fields["paths"])})


_KINDS = kinds_of(Owner)


def read_owner_at(dir_fd: int, uid: int) -> Owner:
    """The owner of the run directory that is open at `dir_fd`, in a file of user `uid`. Raises OSError, StoreError."""
    try:
        return Owner.decode(read_file(OWNER_NAME, dir_fd, uid=uid, most_nbytes=_MOST_NBYTES))
    except ValueError as error:
        raise StoreError(f"{OWNER_NAME} is not an owner file: {error}") from error


def read_owner(path: Path) -> Owner:
    """The owner of the run directory `path`; StoreError when it has none."""
    try:
        with open_directory(path) as fd:
            return read_owner_at(fd, os.fstat(fd).st_uid)
    except (OSError, ValueError, StoreError) as error:  # ValueError: a path with a NUL
        raise StoreError(f"{path} is not a swap directory: its {OWNER_NAME} cannot be read ({error}).") from error


def write_owner(fd: int, owner: Owner) -> None:
    """`fd`: of the owner file. Raises OSError."""
    os.ftruncate(fd, 0)
    os.lseek(fd, 0, os.SEEK_SET)
    write_and_sync(fd, [owner.encode()])


def start_ticks(pid: int) -> int | None:
    """Return when the process started, in clock ticks since boot; None if there is no such process, or no /proc."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Return the boot id of the running kernel; empty if there is no /proc."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def lock_fd(fd: int) -> None:
    """Take the flock; BlockingIOError if another open file keeps it longer than a look from `is_locked` takes."""
    for _ in range(20):
        with suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(dir_fd: int, uid: int) -> bool:
    """Whether a process holds the run directory that is open at `dir_fd`. Raises OSError (ENOLCK: the file system has
    no locks), and StoreError where the owner file is not a regular file of user `uid`."""
    try:
        with open_file(OWNER_NAME, dir_fd, uid=uid) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def lock_failure_text(error: OSError) -> str:
    """Describe why a directory's lock could not be taken, and what to do."""
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return f"its file system has no locks ({error_text(error)}); name a directory on a local disk"
    return error_text(error)
