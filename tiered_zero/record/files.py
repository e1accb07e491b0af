"""Open, read, lock, write and remove files below a directory's descriptor, safely and durably.

No name is resolved twice and no link is followed. Another user may have put anything under a name that a run uses: a
FIFO, a device, a link. Opening here never blocks, and refuses all but regular files of the expected user.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from tiered_zero.errors import StoreError
from tiered_zero.io.disk import errno_text
from tiered_zero.sizes import format_nbytes
from tiered_zero.system.resources import Descriptor, opened

_SAFE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY
_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a block device",
}


def kind_text(mode: int) -> str:
    """Name the kind of file that a stat result's `mode` states, such as "a symbolic link"."""
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def error_text(error: Exception) -> str:
    """Format an OSError as "EIO (Input/output error)", without its path; any other error as its own text."""
    return errno_text(error.errno) if isinstance(error, OSError) and error.errno else str(error)


# -- open and read -----------------------------------------------------------------------------------------------------


def open_directory(path: str | Path, dir_fd: int | None = None) -> Descriptor:
    """Open a directory. Raises OSError: ENOTDIR or ELOOP if the last component is a symbolic link."""
    return opened(path, os.O_RDONLY | os.O_DIRECTORY | _SAFE, dir_fd=dir_fd)


def open_file(name: str | Path, dir_fd: int | None, *, uid: int, flags: int = os.O_RDONLY) -> Descriptor:
    """Open the regular file `name` of user `uid`. Raises OSError, or StoreError for anything else."""
    fd = opened(name, flags | _SAFE, 0o600, dir_fd=dir_fd)
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise StoreError(f"{name} is {kind_text(status.st_mode)}; expected a file")
        if status.st_uid != uid:
            raise StoreError(f"{name} belongs to user id {status.st_uid}; expected {uid}")
    except Exception:
        fd.close()
        raise
    return fd


def open_of_owner(path: Path) -> Descriptor:
    """Open the regular file `path`, which must belong to the owner of its directory. Raises OSError, StoreError."""
    with open_directory(path.parent) as directory:
        return open_file(path.name, directory, uid=os.fstat(directory).st_uid)


def read_file(name: str | Path, dir_fd: int | None, *, uid: int, most_nbytes: int) -> bytes:
    """Read the regular file `name` of user `uid`. Raises OSError, or StoreError, also if it is too large."""
    with open_file(name, dir_fd, uid=uid) as fd:
        if (size := os.fstat(fd).st_size) > most_nbytes:
            raise StoreError(
                f"{name} has {format_nbytes(size)} ({size} bytes); expected at most {format_nbytes(most_nbytes)}"
            )
        with os.fdopen(os.dup(fd), "rb") as file:
            return file.read(size)


def names_in(dir_fd: int) -> list[str]:
    """Return the names in the directory. Open it again first: btrfs lists only names that existed when it was
    opened."""
    try:
        with open_directory(".", dir_fd) as fd:
            return os.listdir(fd)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return os.listdir(dir_fd)  # needs one descriptor instead of two


def disk_nbytes(dir_fd: int) -> int:
    """Return the bytes of the disk blocks that the directory's entries take."""
    total = 0
    for name in names_in(dir_fd):
        with suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_blocks * 512
    return total


# -- lock --------------------------------------------------------------------------------------------------------------


def lock_fd(fd: int) -> None:
    """Take the flock. Raises BlockingIOError if another process holds it for longer than `is_locked` does."""
    for _ in range(20):
        with suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(name: str, dir_fd: int, uid: int) -> bool:
    """Return whether a process holds the lock of the regular file `name` of user `uid`. Raises OSError (ENOLCK: the
    file system has no locks), StoreError."""
    try:
        with open_file(name, dir_fd, uid=uid) as fd:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared, so that two calls do not see each other
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def unlock(lock: Descriptor) -> None:
    """Release the lock, also for descriptors that a forked child has inherited, and close it. Idempotent."""
    if not lock.closed:
        with suppress(OSError):  # the disk may be gone; the descriptor is closed all the same
            fcntl.flock(lock, fcntl.LOCK_UN)
        with suppress(OSError):
            lock.close()


# -- write and remove --------------------------------------------------------------------------------------------------


def write_and_sync(fd: int, parts: Iterable[bytes | memoryview]) -> None:
    """Write `parts` one after another to the open file, then fsync it. Raises OSError."""
    for part in parts:
        left = memoryview(part)
        while left:
            left = left[os.write(fd, left) :]
    os.fsync(fd)


def write_new_file(path: str | Path, parts: Iterable[bytes | memoryview], dir_fd: int | None = None) -> None:
    """Write a new file, mode 0600, and fsync it. Its name is durable only after `sync_directory`. Raises OSError,
    including FileExistsError.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with opened(path, flags, 0o600, dir_fd=dir_fd) as fd:
        write_and_sync(fd, parts)


def sync_directory(directory: Path) -> None:
    """Make names durable that were created, renamed or removed in `directory`. Raises OSError."""
    with opened(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC) as fd:
        os.fsync(fd)


def remove_files(dir_fd: int, keep: str = "") -> None:
    """Remove all files except `keep`, and all empty directories, in the directory. Raises the first OSError at the
    end."""
    failure: OSError | None = None
    for name in names_in(dir_fd):
        if name != keep:
            try:
                _remove(name, dir_fd)
            except FileNotFoundError:
                pass
            except OSError as error:
                failure = failure or error
    if failure is not None:
        raise failure


def _remove(name: str, dir_fd: int) -> None:
    try:
        os.unlink(name, dir_fd=dir_fd)
    except OSError as error:  # for a directory: EISDIR on Linux, EPERM in POSIX
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        os.rmdir(name, dir_fd=dir_fd)
