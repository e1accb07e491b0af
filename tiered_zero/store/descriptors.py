"""Open, read and remove files below a directory's descriptor: no name is resolved twice and no link is followed.

Another user may have put anything under a name that a run uses: a FIFO, a device, a link, a file without an end. What
is opened here never blocks, and is a regular file of the expected user or refused.
"""

from __future__ import annotations

import errno
import os
import stat
import time
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
    """`mode` of a stat result -> "a symbolic link"."""
    return _KINDS.get(stat.S_IFMT(mode), "of an unknown kind")


def open_directory(path: str | Path, dir_fd: int | None = None) -> Descriptor:
    """Open a directory. Raises OSError; a symbolic link as the last component is ENOTDIR or ELOOP."""
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
    """Open the regular file `path`, of the user who owns its directory. Raises OSError, StoreError."""
    with open_directory(path.parent) as directory:
        return open_file(path.name, directory, uid=os.fstat(directory).st_uid)


def read_file(name: str | Path, dir_fd: int | None, *, uid: int, most_nbytes: int) -> bytes:
    """The bytes of the regular file `name` of user `uid`. Raises OSError, or StoreError also if it is too large."""
    with open_file(name, dir_fd, uid=uid) as fd:
        size = os.fstat(fd).st_size
        if size > most_nbytes:
            raise StoreError(
                f"{name} has {format_nbytes(size)} ({size} bytes); expected at most {format_nbytes(most_nbytes)}"
            )
        data = bytearray()
        while len(data) < size and (more := os.read(fd, size - len(data))):
            data += more
        return bytes(data)


def names_in(dir_fd: int) -> list[str]:
    """The names in the directory, which is opened anew: btrfs lists those that were there when it was opened."""
    try:
        with open_directory(".", dir_fd) as fd:
            return os.listdir(fd)
    except OSError as error:
        if error.errno not in (errno.EMFILE, errno.ENFILE):
            raise
    return os.listdir(dir_fd)  # takes one descriptor where the other takes two


def remove_files(dir_fd: int, keep: str) -> None:
    """Unlink everything in the directory but `keep` and directories that are not empty. Raises OSError at the end."""
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
    except OSError as error:  # of a directory: EISDIR on Linux, EPERM after POSIX
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
        with suppress(NotADirectoryError):
            os.rmdir(name, dir_fd=dir_fd)
            return
        raise


def remove_directory(path: str | Path, dir_fd: int | None = None) -> None:
    """Remove an empty directory, never a link. Raises OSError.

    FUSE and NFS hear late that a file was closed, and keep one that was unlinked before under a hidden name: wait for
    such names to go, at most a second.
    """
    for _ in range(100):
        try:
            return os.rmdir(path, dir_fd=dir_fd)
        except OSError as error:
            if error.errno != errno.ENOTEMPTY or not _has_hidden_files_alone(path, dir_fd):
                raise
        time.sleep(0.01)
    os.rmdir(path, dir_fd=dir_fd)


def _has_hidden_files_alone(path: str | Path, dir_fd: int | None) -> bool:
    with open_directory(path, dir_fd) as fd:
        return all(name.startswith((".fuse_hidden", ".nfs")) for name in names_in(fd))


def unlink_missing_ok(name: str, dir_fd: int) -> None:
    with suppress(FileNotFoundError):
        os.unlink(name, dir_fd=dir_fd)


def disk_nbytes(dir_fd: int) -> int:
    """Disk blocks that the entries of the directory take."""
    total = 0
    for name in names_in(dir_fd):
        with suppress(FileNotFoundError):
            total += os.stat(name, dir_fd=dir_fd, follow_symlinks=False).st_blocks * 512
    return total


def error_text(error: Exception) -> str:
    """An OSError as "EIO (Input/output error)", without its path; any other error as it says itself."""
    return errno_text(error.errno) if isinstance(error, OSError) and error.errno else str(error)
