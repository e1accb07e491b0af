"""One run's private sub-directory under each swap path: made, locked, and removed when the run ends."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import secrets
import shutil
import signal
import socket
import stat
import threading
import time
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.io.preflight import preflight_directory
from tiered_zero.store.manifest import sync_directory

logger = logging.getLogger("tiered_zero")

PREFIX = "tiered_zero-"
OWNER_NAME = "owner.json"


@final
@dataclass(frozen=True)
class Owner:
    """Who holds a run's directories; the text of each directory's owner file, which its process holds by flock.

    `start_ticks`: the process's start time in clock ticks since boot (proc(5), stat field 22), which tells a process
    from a later one with the same pid. `created_s`: seconds since the epoch. `paths`: all directories of the run.
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

    @classmethod
    def decode(cls, text: str) -> Owner:
        """Raises ValueError, KeyError or TypeError on anything that is no owner file."""
        fields = json.loads(text)
        return cls(**{**fields, "paths": tuple(fields["paths"])})


@final
class SwapDir:
    """The directories of one run, one under each parent, locked by this process until `remove` or `release`.

    They are removed when the run is over: by `remove`, when the object is garbage, at interpreter exit, and on SIGTERM
    or SIGHUP where the program has no handler of its own for them. `keep` leaves them (committed state).
    """

    def __init__(self, owner: Owner, locks: Sequence[int]) -> None:
        """`locks`: file descriptors of the owner files, flocked. Use `create` or `open`."""
        self.run_id = owner.run_id
        self.paths = tuple(Path(path) for path in owner.paths)
        self._locks = list(locks)
        self._finalizer = weakref.finalize(self, _leave, os.getpid(), self.paths, self._locks, True)
        _live.add(self)
        _install_signal_handler()

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
        made: list[Path] = []
        locks: list[int] = []
        try:
            for path in map(Path, paths):
                path.mkdir(mode=0o700)
                made.append(path)
                locks.append(_lock(path, create=True))
                _write_owner(locks[-1], owner)
                sync_directory(path.parent)
        except BaseException as error:
            _leave(os.getpid(), made, locks, True)
            if isinstance(error, OSError):
                raise StoreError(f"Cannot make a swap directory under {[*map(str, checked)]}: {error}.") from error
            raise
        return cls(owner, locks)

    @classmethod
    def open(cls, path: Path) -> SwapDir:
        """Take over a run that ended with its directories kept; `path`: any of them.

        It stays on disk until `remove`. Raises StoreError while its owner lives or when a directory is missing.
        """
        owner = read_owner(path)
        locks: list[int] = []
        try:
            for name in owner.paths:
                locks.append(_lock(Path(name), create=False))
                check_parent(Path(name))
            taken = _this_process(owner.run_id, owner.model, owner.note, owner.paths)
            for lock in locks:
                _write_owner(lock, taken)
        except BaseException as error:
            _leave(os.getpid(), (), locks, False)
            if isinstance(error, BlockingIOError):
                raise StoreError(
                    f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}); "
                    "stop that run first, or start one with a directory of its own."
                ) from error
            raise
        directory = cls(taken, locks)
        directory.keep()
        return directory

    def keep(self, kept: bool = True) -> None:
        """From now on the directories stay when the run ends, until `remove`; or, with False, they no longer do."""
        if self._finalizer.detach():
            self._finalizer = weakref.finalize(self, _leave, os.getpid(), self.paths, self._locks, not kept)

    def release(self) -> None:
        """End the ownership: kept directories stay for `open`, others are removed. Idempotent."""
        self._finalizer()

    def remove(self) -> None:
        """Delete the directories, kept or not, and end the ownership. Idempotent."""
        if self._finalizer.detach():
            _leave(os.getpid(), self.paths, self._locks, True)


def check_parent(path: Path) -> Path:
    """`path` made absolute, if this user may safely put private files below it.

    Raises ConfigError (missing, no directory, not writable), or StoreError where somebody else could put other files in
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
        if status.st_uid not in (0, os.getuid()):
            raise StoreError(
                f"The swap path {path}: {part} belongs to user id {status.st_uid}, who could replace the files; "
                f"expected {os.getuid()} or root. Use a directory of your own."
            )
    if path.stat().st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
        raise StoreError(f"Everybody may rename files in the swap path {path}; chmod +t {path}, or use another one.")
    return path


def read_owner(path: Path) -> Owner:
    """The owner of the run directory `path`; StoreError when it has none."""
    try:
        return Owner.decode((path / OWNER_NAME).read_text())
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StoreError(f"{path} is not a swap directory: its {OWNER_NAME} cannot be read ({error}).") from error


def start_ticks(pid: int) -> int | None:
    """When the process started, in clock ticks since boot; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return int(text.rpartition(")")[2].split()[19])


def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def lock_fd(fd: int) -> None:
    """Take the flock; BlockingIOError if another open file keeps it longer than a look from `is_locked` takes."""
    for _ in range(20):
        with suppress(BlockingIOError):
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        time.sleep(0.01)
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)


def is_locked(path: Path) -> bool:
    """Whether a process holds the run directory `path`."""
    try:
        fd = os.open(path / OWNER_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two that look do not see each other
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def delete_directory(path: Path, lock: int | None = None) -> None:
    """Delete a run's directory, the owner file last, so that a half-deleted one is still known as a run's.

    `lock`: that file's descriptor, closed here in any case; NFS and FUSE keep an open file in its directory under
    another name.
    """
    try:
        with suppress(FileNotFoundError):
            for entry in list(os.scandir(path)):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                elif entry.name != OWNER_NAME:
                    os.unlink(entry.path)
            (path / OWNER_NAME).unlink(missing_ok=True)
    finally:
        if lock is not None:
            with suppress(OSError):  # of a disk that is gone; it is closed all the same
                os.close(lock)
    with suppress(FileNotFoundError):
        path.rmdir()


def _this_process(run_id: str, model: str, note: str, paths: tuple[str, ...]) -> Owner:
    pid = os.getpid()
    return Owner(run_id, pid, socket.gethostname(), start_ticks(pid) or 0, boot_id(), time.time(), model, note, paths)


def _lock(path: Path, *, create: bool) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | (os.O_CREAT | os.O_EXCL if create else 0)
    try:
        fd = os.open(path / OWNER_NAME, flags, 0o600)
    except FileNotFoundError:
        raise StoreError(f"The run's directory {path} is missing or not whole; all of its paths are needed.") from None
    try:
        lock_fd(fd)
        if not os.fstat(fd).st_nlink:
            raise StoreError(f"The run's directory {path} was removed meanwhile.")
    except BaseException:
        os.close(fd)
        raise
    return fd


def _write_owner(fd: int, owner: Owner) -> None:
    text = json.dumps(asdict(owner), indent=1).encode()
    os.ftruncate(fd, 0)
    os.pwrite(fd, text, 0)
    os.fsync(fd)


def _leave(pid: int, paths: Sequence[Path], locks: list[int], delete: bool) -> None:
    """End an ownership. A forked child shares the objects but owns nothing."""
    if os.getpid() != pid:
        return
    for path in paths if delete else ():
        lock = locks.pop(0) if locks else None
        try:
            try:
                delete_directory(path, lock)
            except OSError:  # the table of descriptors may have been full, and has room now that the lock is closed
                delete_directory(path)
        except OSError as error:
            logger.error(
                "%s cannot be removed (%s); `tiered-zero swap gc` does it when its disk works again", path, error
            )
    while locks:
        os.close(locks.pop())


_live: weakref.WeakSet[SwapDir] = weakref.WeakSet()


def _install_signal_handler() -> None:
    """Only the main thread may, and only where the program left the default: its own handler is never replaced."""
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _release_and_die)


def _release_and_die(number: int, frame: FrameType | None) -> None:
    """The default action, after the directories are gone: the parent still sees a death by this signal."""
    for directory in list(_live):
        directory.release()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
