"""One run's private sub-directory under each swap path: made, locked, and removed when the run ends."""

from __future__ import annotations

import fcntl
import grp
import logging
import os
import pwd
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.io.preflight import preflight_directory
from tiered_zero.store.descriptors import open_directory, open_file, remove_directory, remove_files, unlink_missing_ok
from tiered_zero.store.durable import sync_directory
from tiered_zero.store.owner import (
    OWNER_NAME,
    PREFIX,
    Owner,
    boot_id,
    lock_failure_text,
    lock_fd,
    read_owner,
    start_ticks,
    write_owner,
)
from tiered_zero.system.resources import CLOSED, Descriptor

logger = logging.getLogger("tiered_zero")


@final
@dataclass(kw_only=True)
class _Hold:
    """One directory of a run. `directory`, `lock`: it and its locked owner file.

    Files are removed through `directory`: whatever stands under `path` by then is not touched.
    """

    path: Path
    directory: Descriptor = CLOSED
    lock: Descriptor = CLOSED

    def unlock(self) -> None:
        """End the lock, also of descriptors that a forked child has inherited. Idempotent."""
        if not self.lock.closed:
            with suppress(OSError):  # of a disk that is gone; it is closed all the same
                fcntl.flock(self.lock, fcntl.LOCK_UN)
            with suppress(OSError):
                self.lock.close()

    def close(self) -> None:
        self.unlock()
        with suppress(OSError):
            self.directory.close()


@final
class SwapDir:
    """The directories of one run, one under each parent, locked by this process until `remove` or `release`.

    They are removed when the run is over: by `remove`, when the object is garbage, and at interpreter exit. A process
    that is killed leaves them to `collect_garbage`. `keep` leaves them (committed state).
    """

    def __init__(self, owner: Owner, holds: list[_Hold]) -> None:
        """`holds`: of each of the owner's paths, both descriptors. Use `create` or `open`."""
        self.run_id = owner.run_id
        self.paths = tuple(Path(path) for path in owner.paths)
        self._holds = holds
        self._pid = os.getpid()
        self._kept = False
        self._finalizer = weakref.finalize(self, _leave, self._pid, holds, True)

    @classmethod
    def create(cls, parents: Sequence[Path], *, model: str = "", owner_note: str = "") -> SwapDir:
        """Make `tiered_zero-<run id>` (mode 0700) under each parent.

        Raises what `check_parent` raises of a parent, and StoreError; nothing is left behind then.
        """
        checked = [check_parent(Path(parent)) for parent in parents]
        if not checked or len(set(checked)) != len(checked):
            raise StoreError(f"Expected one or more different swap paths; found {[str(path) for path in parents]}.")
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(4)}"
        paths = tuple(str(parent / f"{PREFIX}{run_id}") for parent in checked)
        owner = _this_process(run_id, model, owner_note, paths)
        holds: list[_Hold] = []
        try:
            for path in map(Path, paths):
                holds.append(hold := _Hold(path=path))
                path.mkdir(mode=0o700)
                hold.directory = open_directory(path)
                _lock(hold, os.O_CREAT | os.O_EXCL)
                write_owner(hold.lock, owner)
                sync_directory(path.parent)
            return cls(owner, holds)
        except BaseException as error:  # a second Ctrl-C, too: no object owns them yet
            _leave(os.getpid(), holds, True)
            if isinstance(error, OSError):
                text = lock_failure_text(error)
                raise StoreError(f"Cannot make a swap directory under {[*map(str, checked)]}: {text}.") from error
            raise

    @classmethod
    def open(cls, path: Path) -> SwapDir:
        """Take over a run that ended with its directories kept; `path`: any of them. It stays on disk until `remove`.

        Raises StoreError while its owner lives, and if a directory is missing, or belongs to another user.
        """
        owner = read_owner(path)
        holds: list[_Hold] = []
        try:
            for name in owner.paths:
                holds.append(hold := _Hold(path=Path(name)))
                try:
                    hold.directory = _open_own(hold.path)
                    _lock(hold)
                except FileNotFoundError:
                    raise StoreError(
                        f"The run's directory {name} is missing or not whole; all of its paths are needed."
                    ) from None
                check_parent(hold.path)
            taken = _this_process(owner.run_id, owner.model, owner.note, owner.paths)
            for hold in holds:
                write_owner(hold.lock, taken)
            directory = cls(taken, holds)
            directory.keep()
            return directory
        except BaseException as error:  # a second Ctrl-C, too: no object owns them yet
            _leave(os.getpid(), holds, False)
            if isinstance(error, BlockingIOError):
                raise StoreError(
                    f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}); "
                    "stop that run first, or start one with a directory of its own."
                ) from error
            if isinstance(error, OSError):
                raise StoreError(f"The swap directory {path} cannot be opened: {lock_failure_text(error)}.") from error
            raise

    def keep(self, kept: bool = True) -> None:
        """From now on the directories stay when the run ends, until `remove`; or, with False, they no longer do."""
        if self._finalizer.detach():
            self._kept = kept
            self._finalizer = weakref.finalize(self, _leave, self._pid, self._holds, not kept)

    def release(self) -> None:
        """End the ownership: kept directories stay for `open`, others are removed. Idempotent."""
        self._end(removes=not self._kept)

    def remove(self) -> None:
        """Delete the directories, kept or not, and end the ownership. Idempotent."""
        self._end(removes=True)

    def _end(self, removes: bool) -> None:
        _leave(self._pid, self._holds, removes)
        self._finalizer.detach()  # only now: an interrupt leaves the rest to the interpreter's exit


def check_parent(path: Path) -> Path:
    """`path` made absolute, if this user may safely put private files below it.

    Raises ConfigError (missing, no directory, not writable), or StoreError where another user could put other files in
    their place: another user owns a part of the path or may rename in it. A symbolic link is followed only where root
    or this user made it, and never as the last component.
    """
    path = Path(os.path.abspath(path.expanduser()))
    preflight_directory(path)
    for part in (*reversed(path.parents), path):
        status = part.lstat()
        if stat.S_ISLNK(status.st_mode) and (part == path or status.st_uid not in (0, os.getuid())):
            raise StoreError(
                f"The swap path {path} goes through the symbolic link {part}; name {part.resolve()} itself."
            )
    real = path.resolve()
    for part in (*reversed(real.parents), real):
        _check_part(path, part, part.stat())
    return path


def _check_part(path: Path, part: Path, status: os.stat_result) -> None:
    """`part`: the swap path `path` or a directory above it. Raises StoreError if another user may rename in it."""
    if status.st_uid not in (0, os.getuid()):
        raise StoreError(
            f"The swap path {path}: {part} belongs to user id {status.st_uid}, who could replace the files; "
            f"expected {os.getuid()} or root. Use a directory of your own."
        )
    if status.st_mode & stat.S_ISVTX:
        return
    if status.st_mode & stat.S_IWOTH:
        raise StoreError(
            f"The swap path {path}: everybody may rename files in {part}; chmod +t {part} (or chmod o-w), or use "
            "another directory."
        )
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        raise StoreError(
            f"The swap path {path}: group id {status.st_gid} may rename files in {part}; chmod g-w {part} (or chmod "
            "+t), or use another directory."
        )


def _is_private_group(gid: int) -> bool:
    """Whether a group is root's or this user's alone: it has that user's name and no other member (umask 002)."""
    for uid in (0, os.getuid()):
        try:
            group, user = grp.getgrgid(gid), pwd.getpwuid(uid)
        except KeyError:  # a container's user need not be in its databases
            if gid == uid:
                return True
            continue
        if group.gr_name == user.pw_name and gid == user.pw_gid and set(group.gr_mem) <= {user.pw_name}:
            return True
    return False


def _this_process(run_id: str, model: str, note: str, paths: tuple[str, ...]) -> Owner:
    pid = os.getpid()
    return Owner(
        run_id=run_id,
        pid=pid,
        host=socket.gethostname(),
        start_ticks=start_ticks(pid) or 0,
        boot_id=boot_id(),
        created_s=time.time(),
        model=model,
        note=note,
        paths=paths,
    )


def _open_own(path: Path) -> Descriptor:
    """Open a directory that belongs to this user. Raises OSError, StoreError."""
    fd = open_directory(path)
    if (uid := os.fstat(fd).st_uid) != os.geteuid():
        fd.close()
        raise StoreError(f"The run's directory {path} belongs to user id {uid}; expected {os.geteuid()}.")
    return fd


def _lock(hold: _Hold, flags: int = 0) -> None:
    """Open and lock the owner file. Raises OSError, StoreError."""
    uid = os.fstat(hold.directory).st_uid
    hold.lock = open_file(OWNER_NAME, hold.directory, uid=uid, flags=os.O_RDWR | flags)
    lock_fd(hold.lock)
    if not os.fstat(hold.lock).st_nlink:
        raise StoreError(f"The run's directory {hold.path} was removed by another process.")


def _leave(pid: int, holds: list[_Hold], delete: bool) -> None:
    """End an ownership. A forked child shares the objects but owns nothing."""
    if os.getpid() != pid:
        return
    while holds:
        hold = holds[0]
        try:
            if delete:
                _delete(hold)
        except NotADirectoryError:
            logger.error("%s is not the directory that this run made; what is there now is left alone", hold.path)
        except OSError as error:
            logger.error(
                "%s cannot be removed (%s); `tiered-zero swap gc` does it when its disk works again", hold.path, error
            )
        hold.close()
        holds.pop(0)  # only now: after an interrupt the next call tries it again


def _delete(hold: _Hold) -> None:
    """Remove the directory, the owner file last, so that a half-removed one is still known as a run's.

    NFS and FUSE keep an open file in its directory under another name: all of them are closed before. Raises OSError.
    """
    if not hold.directory.closed:
        try:
            remove_files(hold.directory, keep=OWNER_NAME)
        except OSError:  # the table of descriptors may have been full, and has room once the lock is closed
            if not hold.lock.closed:
                hold.unlock()
                remove_files(hold.directory, keep=OWNER_NAME)
            # else it was full when the lock was to be made: nothing is in the directory yet, or rmdir fails
        unlink_missing_ok(OWNER_NAME, hold.directory)
    hold.close()
    with suppress(FileNotFoundError):
        remove_directory(hold.path)
