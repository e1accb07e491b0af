"""A save directory while this process writes in it: its lock, and names that change durably or not at all."""

from __future__ import annotations

import ctypes
import errno
import fcntl
import logging
import os
import re
import secrets
import stat
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, final

import psutil

from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes
from tiered_zero.store.files import (
    disk_nbytes,
    error_text,
    names_in,
    open_directory,
    open_file,
    read_file,
    remove_files,
    sync_directory,
    write_new_file,
)
from tiered_zero.system.descriptor import Descriptor

logger = logging.getLogger("tiered_zero")

LOCK_NAME: Final = ".tiered_zero.lock"
LATEST_NAME: Final = "latest"
TEMPORARY: Final = ".tmp-"
OLD: Final = ".old-"
"""Prefixes: of a tag that is being written or removed, and of one that is just being replaced."""

_SUFFIX = re.compile(r"-[0-9a-f]{12}")
_TAG = re.compile(r"[^./\x00-\x1f\x7f][^/\x00-\x1f\x7f]*")
_MOST_TAG_NBYTES = 200
_RENAME_EXCHANGE = 2


def check_tag(tag: object) -> str:
    """`tag` if it can name a directory. Raises StoreError."""
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST_NAME:
        raise StoreError(
            f"A checkpoint's tag must be a plain directory name: no slash, no leading dot, not {LATEST_NAME!r}; found "
            f"{ascii(tag)[:200]}."
        )
    try:
        nbytes = len(tag.encode())
    except UnicodeEncodeError:
        raise StoreError(f"A checkpoint's tag must be text that can be encoded; found {ascii(tag)[:200]}.") from None
    if nbytes > _MOST_TAG_NBYTES:
        raise StoreError(f"A checkpoint's tag must have at most {_MOST_TAG_NBYTES} bytes; found {nbytes}.")
    return tag


def hidden_name(prefix: str, tag: str) -> str:
    """A new name for a tag that must not be found."""
    return f"{prefix}{tag}-{secrets.token_hex(6)}"


def hidden_tag(prefix: str, name: str) -> str | None:
    """The tag of a `hidden_name` with this prefix; None for any other name."""
    match = _SUFFIX.fullmatch(name[-13:])
    return name[len(prefix) : -13] if match and name.startswith(prefix) and len(name) > len(prefix) + 13 else None


@final
class SaveDirectory:
    """A save directory that this process, or rank 0 of its run, holds by flock until `release`. One thread at a time.

    [Note: replacing a tag] rename(2) replaces no directory that has files. If the system can exchange two names (Linux,
    all local file systems), the new directory and the old one exchange theirs: there is no instant without the tag.
    Else the old one is renamed to `.old-TAG-...` first; a reader that finds no TAG takes that one, and the next writer
    renames it back.
    """

    def __init__(self, path: Path, fd: Descriptor, lock: Descriptor | None) -> None:
        """Use `open` or `join`."""
        self.path, self.fd = path, fd
        self._lock = lock

    @classmethod
    def open(cls, save_dir: str | os.PathLike[str]) -> SaveDirectory:
        """Make it with its parents (mode 0700) where it is missing; lock it. Raises StoreError."""
        path, fd = _opened(save_dir, _make_durably, "Name a directory of your own.")
        try:
            return cls(path, fd, _locked(path, fd))
        except BaseException:
            fd.close()
            raise

    @classmethod
    def join(cls, save_dir: str | os.PathLike[str]) -> SaveDirectory:
        """Open one that rank 0 holds. Raises StoreError."""
        return cls(*_opened(save_dir, lambda path: None, "Name a directory that all ranks share."), None)

    def release(self) -> None:
        """Idempotent. The lock ends also where a forked child has inherited it."""
        if self._lock is not None:
            _unlock(self._lock)
        self.fd.close()

    def restore(self) -> None:
        """Finish what a dead writer left: a replaced tag gets its name back, temporary directories are removed."""
        names = sorted(names_in(self.fd))
        for name in names:
            tag = hidden_tag(OLD, name)
            if tag is not None and tag not in names and self._is_own_directory(name):
                os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
                os.fsync(self.fd)
                logger.warning(
                    "%s: checkpoint %s was being replaced when its writer ended; it is back.", self.path, tag
                )
        tags = {name: hidden_tag(TEMPORARY, name) or hidden_tag(OLD, name) for name in sorted(names_in(self.fd))}
        hidden = {name: tag for name, tag in tags.items() if tag}
        if hidden:
            os.fsync(self.fd)  # of a tag that was replaced the new one may not be durable
        for name, tag in hidden.items():
            if hidden_tag(TEMPORARY, name) == LATEST_NAME:
                os.unlink(name, dir_fd=self.fd)
            elif self._is_own_directory(name) and (nbytes := self.try_remove(name)) is not None:
                logger.warning(
                    "%s: removed %s (%s), which a writer of checkpoint %s left when it ended.",
                    *(self.path, name, format_nbytes(nbytes), tag),
                )

    def make_temporary(self, tag: str) -> str:
        """A new empty directory, mode 0700; its name. Raises OSError."""
        name = hidden_name(TEMPORARY, tag)
        os.mkdir(name, 0o700, dir_fd=self.fd)
        return name

    def check_replaceable(self, tag: str) -> None:
        """Raises StoreError if the name `tag` is taken by anything but an own checkpoint's directory, without
        directories in it: those hold files of others, perhaps an export."""
        try:
            status = os.stat(tag, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return
        if not stat.S_ISDIR(status.st_mode):
            raise StoreError(f"{self.path / tag} is no directory and is not replaced. Name another tag.")
        if status.st_uid != os.geteuid():
            raise StoreError(f"{self.path / tag} belongs to user id {status.st_uid}. Name another tag.")
        with os.scandir(self.path / tag) as entries:
            foreign = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
        if foreign:
            raise StoreError(
                f"{self.path / tag} has directories that are no part of a checkpoint, and is neither replaced nor "
                f"removed: {', '.join(map(ascii, foreign))[:200]}. Move them elsewhere, or name another tag."
            )

    def rename(self, name: str, tag: str) -> str | None:
        """Rename the directory `name` to `tag`; return the new name of the tag that it replaced. Durable with `finish`.
        Raises OSError: then nothing has changed."""
        try:
            os.stat(tag, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
            return None
        if exchange(self.fd, name, tag):
            return name
        replaced = hidden_name(OLD, tag)
        os.rename(tag, replaced, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        os.rename(name, tag, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        return replaced

    def finish(self, replaced: str | None, latest: str | None = None) -> None:
        """Make a `rename`, or `latest`, durable, and remove what was replaced. Raises OSError: then that is still
        there.

        `latest`: a file of `prepare_latest`, which becomes `latest` with the same sync. A crash may leave either of the
        two new: for tags that all point to one state, which outlives them.
        """
        if latest is not None:
            os.rename(latest, LATEST_NAME, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        if replaced is not None:
            self.try_remove(replaced)

    def hide(self, tag: str) -> str:
        """Give a tag a temporary name, durably, so that it can be removed file by file. Raises OSError."""
        name = hidden_name(TEMPORARY, tag)
        os.rename(tag, name, src_dir_fd=self.fd, dst_dir_fd=self.fd)
        os.fsync(self.fd)
        return name

    def remove(self, name: str) -> int:
        """Remove a directory of plain files; the disk bytes that it had. Raises OSError."""
        with open_directory(name, self.fd) as fd:
            nbytes = disk_nbytes(fd)
            remove_files(fd, keep="")
        os.rmdir(name, dir_fd=self.fd)
        return nbytes

    def try_remove(self, name: str) -> int | None:
        """`remove` a directory that no one reads; None, with a warning, if it cannot be removed."""
        try:
            return self.remove(name)
        except OSError as error:
            logger.warning("%s cannot be removed: %s. Remove it by hand.", self.path / name, error_text(error))
            return None

    def prepare_latest(self, tag: str) -> str:
        """Write what `latest` is to say to a temporary file, and make that durable; its name. Raises OSError."""
        name = hidden_name(TEMPORARY, LATEST_NAME)
        try:
            write_new_file(name, [tag.encode()], self.fd)
        except OSError:
            with suppress(OSError):
                os.unlink(name, dir_fd=self.fd)
            raise
        return name

    def _is_own_directory(self, name: str) -> bool:
        status = os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def exchange(dir_fd: int, name: str, other: str) -> bool:
    """Exchange two names at once; False where the system cannot. Raises OSError."""
    renameat2: Callable[..., int] | None = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(dir_fd, os.fsencode(name), dir_fd, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), name)


def _opened(save_dir: str | os.PathLike[str], make: Callable[[Path], None], advice: str) -> tuple[Path, Descriptor]:
    """Open the directory, once `make` has made what is missing. Raises StoreError."""
    try:
        path = Path(os.path.realpath(save_dir))
        make(path)
        return path, open_directory(path)
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        text = f"Checkpoints cannot be saved to {os.fspath(save_dir)!r}: {error_text(error)}. {advice}"
        raise StoreError(text) from error


def _make_durably(path: Path) -> None:
    """Raises OSError."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    for place in reversed(missing):
        with suppress(FileExistsError):
            os.mkdir(place, 0o700)
        sync_directory(place.parent)


def _unlock(lock: Descriptor) -> None:
    """Idempotent."""
    if not lock.closed:
        with suppress(OSError):
            os.ftruncate(lock, 0)
            fcntl.flock(lock, fcntl.LOCK_UN)
        lock.close()


def _holder(dir_fd: int) -> str:
    """The pid in a lock file that another process holds. It writes its pid after it has the lock: until then there is
    none, or that of a killed one, which is not seen to be dead from another host."""
    text = ""
    for _ in range(50):
        text = read_file(LOCK_NAME, dir_fd, uid=os.geteuid(), most_nbytes=100).decode("ascii", "replace")
        if text.isdecimal() and psutil.pid_exists(int(text)):
            break
        time.sleep(0.01)
    return text or "(unknown)"


def _locked(path: Path, dir_fd: int) -> Descriptor:
    """The locked lock file. Raises StoreError."""
    try:
        lock = open_file(LOCK_NAME, dir_fd, uid=os.geteuid(), flags=os.O_RDWR | os.O_CREAT)
    except OSError as error:
        raise StoreError(
            f"Checkpoints cannot be saved to {path}: {error_text(error)}. Name a directory of your own."
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(lock, 0)
        os.pwrite(lock, str(os.getpid()).encode(), 0)
    except BlockingIOError as error:
        lock.close()
        raise StoreError(
            f"Process {_holder(dir_fd)} is writing a checkpoint in {path}. Wait for it, or give each run its own "
            "directory."
        ) from error
    except OSError as error:
        lock.close()
        raise StoreError(
            f"{path} cannot be locked: {error_text(error)}. Name a directory on another file system."
        ) from error
    return lock
