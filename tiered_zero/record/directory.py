"""Make, lock and remove one run's private sub-directory under each swap path.

The file `owner.json` in each names the process that owns the run, which holds a flock on that file. The lock alone
tells whether the run is alive."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, final

from pydantic import AfterValidator, Field

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.io.engine import errno_text
from tiered_zero.io.select import preflight_directory
from tiered_zero.record.files import (
    Count,
    StrictModel,
    decode_file,
    encode_file,
    error_text,
    lock_fd,
    open_directory,
    open_file,
    read_file,
    remove_files,
    sync_directory,
    unlock,
    write_and_sync,
)
from tiered_zero.system import CLOSED, Descriptor

logger = logging.getLogger("tiered_zero")

PREFIX = "tiered_zero-"
OWNER_NAME = "owner.json"
_FORMAT = "tiered_zero.owner"
_MOST_NBYTES = 1 << 20
"""The largest `owner.json` that is read. The file takes some hundred bytes, and its paths a few thousand at most."""

_ROOT = Path("/")


# -- owner -------------------------------------------------------------------------------------------------------------


def check_path(path: str) -> str:
    """Return `path`. Raises ValueError unless it is absolute and normalized."""
    if not os.path.isabs(path) or "\0" in path or os.path.normpath(path) != path:
        raise ValueError("expected a plain absolute path")
    return path


PlainPath = Annotated[str, AfterValidator(check_path)]


@final
class Owner(StrictModel):
    """The owner of a run's directories, as `owner.json` in each of them states it. `created_s`: when this process made
    or took over the directories, in seconds since the epoch. `note`: the caller's text, such as the name of the launch.
    `paths`: all directories of the run."""

    run_id: str
    pid: Count
    host: str
    created_s: Annotated[float, Field(allow_inf_nan=False)]
    model: str
    note: str
    paths: Annotated[tuple[PlainPath, ...], Field(min_length=1)]

    def encode(self) -> bytes:
        return encode_file(_FORMAT, self)

    @property
    def is_this_process(self) -> bool:
        """Whether this process is the owner. Valid only while the lock is held, since then no other live process has
        this pid."""
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())


def read_owner_at(dir_fd: int, uid: int) -> Owner:
    """Read the owner from the run directory open at `dir_fd`; the file must belong to user `uid`. Raises OSError,
    StoreError."""
    data = read_file(OWNER_NAME, dir_fd, uid=uid, most_nbytes=_MOST_NBYTES)
    return decode_file(data, Path(OWNER_NAME), _FORMAT, Owner)


def read_owner(path: Path) -> Owner:
    """Read the owner from the run directory `path`. Raises StoreError if it has none."""
    try:
        with open_directory(path) as fd:
            return read_owner_at(fd, os.fstat(fd).st_uid)
    except (OSError, ValueError, StoreError) as error:  # ValueError: a NUL in the path
        raise StoreError(f"{path} is not a swap directory: its {OWNER_NAME} cannot be read ({error}).") from error


# -- one run's directories ---------------------------------------------------------------------------------------------


@final
@dataclass(kw_only=True)
class _Hold:
    """One directory of a run, and its lock. `directory`, `lock`: descriptors of the directory and of the locked
    `owner.json` in it. Files are removed through `directory`, so whatever is at `path` by then is not touched."""

    path: Path
    directory: Descriptor = CLOSED
    lock: Descriptor = CLOSED

    def take(self, flags: int = 0) -> None:
        """Open the directory, and open and lock `owner.json` in it. Raises OSError, StoreError."""
        self.directory = open_directory(self.path)
        if (uid := os.fstat(self.directory).st_uid) != os.geteuid():
            raise StoreError(f"The run's directory {self.path} belongs to user id {uid}; expected {os.geteuid()}.")
        self.lock = open_file(OWNER_NAME, self.directory, uid=uid, flags=os.O_RDWR | flags)
        lock_fd(self.lock)
        if not os.fstat(self.lock).st_nlink:
            raise StoreError(f"The run's directory {self.path} was removed by another process.")

    def write(self, owner: Owner) -> None:
        """Write `owner.json`. Raises OSError."""
        os.ftruncate(self.lock, 0)
        os.lseek(self.lock, 0, os.SEEK_SET)
        write_and_sync(self.lock, [owner.encode()])

    def remove(self) -> None:
        """Remove the directory. `owner.json` goes last: a half-removed directory is still known as a run's. Raises
        OSError."""
        if not self.directory.closed:
            try:
                remove_files(self.directory, keep=OWNER_NAME)
            except OSError:  # the table of descriptors may be full; closing the lock makes room
                if not self.lock.closed:
                    unlock(self.lock)
                    remove_files(self.directory, keep=OWNER_NAME)
                # else it was full before the lock was made: the directory is empty, or rmdir fails
            with suppress(FileNotFoundError):
                os.unlink(OWNER_NAME, dir_fd=self.directory)
        self.close()  # before rmdir: NFS keeps an open file in its directory under another name
        with suppress(FileNotFoundError):
            os.rmdir(self.path)

    def close(self) -> None:
        unlock(self.lock)
        with suppress(OSError):
            self.directory.close()


@final
class SwapDir:
    """The directories of one run, one under each parent. This process locks them until `remove` or `release`.

    They are removed by `remove`, when the object is garbage collected, and at interpreter exit. If the process is
    killed, `collect_garbage` removes them. After `keep` they stay, with their committed state.
    """

    def __init__(self, owner: Owner, holds: list[_Hold]) -> None:
        """`holds`: the held directory of each of the owner's paths. Use `create` or `open` instead."""
        self.run_id = owner.run_id
        self.paths = tuple(Path(path) for path in owner.paths)
        self._holds = holds
        self._pid = os.getpid()
        self._kept = False
        self._finalizer = weakref.finalize(self, _leave, self._pid, holds, True)

    @classmethod
    def create(cls, parents: Sequence[Path], *, model: str = "", owner_note: str = "") -> SwapDir:
        """Make `tiered_zero-<run id>` (mode 0700) under each parent. Raises ConfigError if a parent is missing, no
        directory or not writable, and StoreError; nothing is left behind."""
        checked = [Path(os.path.abspath(Path(parent).expanduser())) for parent in parents]
        for parent in checked:
            preflight_directory(parent)
        if not checked or len(set(checked)) != len(checked):
            raise StoreError(f"Expected one or more different swap paths; found {[str(path) for path in parents]}.")
        run_id = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{secrets.token_hex(4)}"
        owner = _this_process(run_id, model, owner_note, [str(parent / f"{PREFIX}{run_id}") for parent in checked])
        holds: list[_Hold] = []
        try:
            for path in map(Path, owner.paths):
                holds.append(hold := _Hold(path=path))
                path.mkdir(mode=0o700)
                hold.take(os.O_CREAT | os.O_EXCL)
                hold.write(owner)
                sync_directory(path.parent)
            return cls(owner, holds)
        except BaseException as error:  # a second Ctrl-C, too: no object owns the directories yet
            _leave(os.getpid(), holds, True)
            if isinstance(error, OSError):
                text = _lock_failure(error)
                raise StoreError(f"Cannot make a swap directory under {[*map(str, checked)]}: {text}.") from error
            raise

    @classmethod
    def open(cls, path: Path) -> SwapDir:
        """Take over the directories of an ended run, which were kept. `path`: any of them. They stay on disk until
        `remove`. Raises StoreError while the owner lives, and if a directory is missing or belongs to another user."""
        owner = read_owner(path)
        holds: list[_Hold] = []
        try:
            for name in owner.paths:
                holds.append(hold := _Hold(path=Path(name)))
                try:
                    hold.take()
                except FileNotFoundError:
                    raise StoreError(
                        f"The run's directory {name} is missing or not whole; all of its paths are needed."
                    ) from None
            taken = _this_process(owner.run_id, owner.model, owner.note, owner.paths)
            for hold in holds:
                hold.write(taken)
            directory = cls(taken, holds)
            directory.keep()
            return directory
        except BaseException as error:  # a second Ctrl-C, too: no object owns the directories yet
            _leave(os.getpid(), holds, False)
            if isinstance(error, BlockingIOError):
                raise StoreError(
                    f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}); "
                    "stop that run first, or start one with a directory of its own."
                ) from error
            if isinstance(error, OSError):
                raise StoreError(f"The swap directory {path} cannot be opened: {_lock_failure(error)}.") from error
            raise

    def keep(self, kept: bool = True) -> None:
        """Keep the directories when the run ends, until `remove`; with `kept` False, stop keeping them."""
        if self._finalizer.detach():
            self._kept = kept
            self._finalizer = weakref.finalize(self, _leave, self._pid, self._holds, not kept)

    def release(self) -> None:
        """End the ownership. Kept directories stay for `open`; others are removed. Idempotent."""
        self._end(removes=not self._kept)

    def remove(self) -> None:
        """Remove the directories, kept or not, and end the ownership. Idempotent."""
        self._end(removes=True)

    def _end(self, removes: bool) -> None:
        _leave(self._pid, self._holds, removes)
        self._finalizer.detach()  # last: after an interrupt the interpreter's exit does the rest


def _this_process(run_id: str, model: str, note: str, paths: Sequence[str]) -> Owner:
    return Owner(
        run_id=run_id,
        pid=os.getpid(),
        host=socket.gethostname(),
        created_s=time.time(),
        model=model,
        note=note,
        paths=tuple(paths),
    )


def _lock_failure(error: OSError) -> str:
    """Return why a directory's lock could not be taken, and what to do."""
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return f"its file system has no locks ({error_text(error)}); name a directory on a local disk"
    return error_text(error)


def _leave(pid: int, holds: list[_Hold], delete: bool) -> None:
    """End an ownership, and remove the directories if `delete`. Does nothing in a forked child, which owns none of
    them."""
    if os.getpid() != pid:
        return
    while holds:
        hold = holds[0]
        try:
            if delete:
                hold.remove()
        except NotADirectoryError:
            logger.error("%s is not the directory that this run made; what is there now is left alone", hold.path)
        except OSError as error:
            logger.error(
                "%s cannot be removed (%s); `tiered-zero swap gc` does it when its disk works again", hold.path, error
            )
        hold.close()
        holds.pop(0)  # last: after an interrupt the next call tries it again


# -- swap paths that do not exist yet ----------------------------------------------------------------------------------


def make_missing(groups: Mapping[tuple[str, ...], str]) -> None:
    """Make the missing directories, with their parents (mode 0700). `groups`: directories that are striped together ->
    the config's key that names them. If some directories of a group exist, the missing ones are not made, because their
    disk may not be mounted; a later check refuses them. Raises ConfigError."""
    for group, key in groups.items():
        paths = [Path(path) for path in group]
        if not any(path.exists() for path in paths):
            for path in paths:
                _make(path, key)


def _make(path: Path, key: str) -> None:
    missing = [place for place in (path, *path.parents) if not place.exists()][::-1]
    try:
        for place in missing:
            place.mkdir(mode=0o700, exist_ok=True)  # another rank may have made it meanwhile
    except OSError as error:
        raise ConfigError(
            f"{key} {path} is missing and cannot be made: {errno_text(error.errno or 0)}. Name a directory on the "
            "disk that is to be swapped to."
        ) from error
    if not missing:
        return
    first, doubt = missing[0], ""
    is_placeholder = path.is_absolute() and (first != path or first.parent == _ROOT)
    if is_placeholder and first.stat().st_dev == _ROOT.stat().st_dev:
        doubt = (
            f" It lies on the root file system, for {first} did not exist. If a disk was to be mounted there, stop "
            "this run and mount it, or name another nvme_path."
        )
    logger.log(logging.WARNING if doubt else logging.INFO, "Made the swap directory %s.%s", path.resolve(), doubt)
