"""Make and lock one run's private sub-directory under each swap path, list runs, and remove ended runs. The file
`owner.json` in each sub-directory names the process that owns the run. The owner holds a flock on the file until the
process ends."""

from __future__ import annotations

import errno
import logging
import os
import secrets
import socket
import stat
import time
import weakref
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, final

from pydantic import AfterValidator, Field

from tiered_zero.errors import ConfigError, StoreError
from tiered_zero.io.engine import errno_text
from tiered_zero.io.select import PROBE_PREFIX, filesystem_type, is_local, preflight_directory
from tiered_zero.record import manifest
from tiered_zero.record.data_files import DATA_NAME
from tiered_zero.record.files import (
    Count,
    JsonFile,
    disk_nbytes,
    error_text,
    is_locked,
    kind_text,
    lock_file,
    names_in,
    open_directory,
    read_file,
    remove_files,
    sync_directory,
    unlock,
    write_and_sync,
)
from tiered_zero.record.manifest import MANIFEST_NAME, NEXT_NAME
from tiered_zero.sizes import format_nbytes
from tiered_zero.system import CLOSED, Descriptor

logger = logging.getLogger("tiered_zero")

PREFIX = "tiered_zero-"
OWNER_NAME = "owner.json"
_MOST_NBYTES = 1 << 20
"""The largest accepted size of `owner.json` in bytes. A valid file has a few thousand bytes at most."""

_ROOT = Path("/")


# -- owner -------------------------------------------------------------------------------------------------------------


def check_path(path: str) -> str:
    """Check that `path` is absolute and normalized, and return it. Raises ValueError."""
    if not os.path.isabs(path) or "\0" in path or os.path.normpath(path) != path:
        raise ValueError("expected a plain absolute path")
    return path


PlainPath = Annotated[str, AfterValidator(check_path)]


@final
class Owner(JsonFile):
    """The content of `owner.json`: the process that owns a run. `created_s`: when this process made or took over the
    directories, in seconds since the epoch. `note`: the caller's text. `paths`: all directories of the run."""

    format_name = "tiered_zero.owner"

    run_id: str
    pid: Count
    host: str
    created_s: Annotated[float, Field(allow_inf_nan=False)]
    model: str
    note: str
    paths: Annotated[tuple[PlainPath, ...], Field(min_length=1)]

    @property
    def is_this_process(self) -> bool:
        """Whether this process is the owner. The answer is valid only while the owner's lock is held, because the
        system reuses pids."""
        return (self.pid, self.host) == (os.getpid(), socket.gethostname())


def read_owner_at(dir_fd: int) -> Owner:
    """Read the owner from the run directory that is open as `dir_fd`. Raises OSError, StoreError."""
    data = read_file(OWNER_NAME, dir_fd, most_nbytes=_MOST_NBYTES)
    return Owner.decode(data, Path(OWNER_NAME))


def read_owner(path: Path) -> Owner:
    """Read the owner from the run directory `path`. Raises StoreError if its `owner.json` cannot be read."""
    try:
        with open_directory(path) as fd:
            return read_owner_at(fd)
    except (OSError, ValueError, StoreError) as error:  # ValueError: a NUL in the path
        raise StoreError(f"{path} is not a swap directory: its {OWNER_NAME} cannot be read ({error}).") from error


# -- one run's directories ---------------------------------------------------------------------------------------------


@final
@dataclass(kw_only=True)
class _Hold:
    """One directory of a run, and its lock (the open and locked `owner.json`)."""

    path: Path
    directory: Descriptor = CLOSED  # files are removed through it: another directory may have got the name since
    lock: Descriptor = CLOSED

    def take(self, flags: int = 0) -> None:
        """Open the directory, then open and lock its `owner.json`. `flags`: more flags to open the file. Raises
        OSError, StoreError."""
        self.directory = open_directory(self.path)
        if (uid := os.fstat(self.directory).st_uid) != os.geteuid():
            raise StoreError(f"The run's directory {self.path} belongs to user id {uid}; expected {os.geteuid()}.")
        self.lock = lock_file(OWNER_NAME, self.directory, flags)
        if not os.fstat(self.lock).st_nlink:
            raise StoreError(f"The run's directory {self.path} was removed by another process.")

    def write(self, owner: Owner) -> None:
        """Replace the content of `owner.json`, durably. Raises OSError."""
        os.ftruncate(self.lock, 0)
        os.lseek(self.lock, 0, os.SEEK_SET)
        write_and_sync(self.lock, [owner.encode()])

    def remove(self) -> None:
        """Remove the directory and its files. Raises OSError."""
        if not self.directory.closed:
            try:
                remove_files(self.directory, last=OWNER_NAME)  # last: it marks a half-removed directory as a run's
            except OSError:  # the table of descriptors may be full; closing the lock makes room
                if not self.lock.closed:
                    unlock(self.lock)
                    remove_files(self.directory, last=OWNER_NAME)
                # else it was full before the lock was made: the directory is empty, or rmdir fails
        self.close()  # before rmdir: NFS keeps an open file in its directory under another name
        with suppress(FileNotFoundError):
            os.rmdir(self.path)

    def close(self) -> None:
        unlock(self.lock)
        with suppress(OSError):
            self.directory.close()


@final
class SwapDir:
    """The directories of one run, one under each swap path. This process holds their locks until `release` or `remove`.
    Unless `keep` was called, `release`, garbage collection and the interpreter's exit remove the directories."""

    def __init__(self, owner: Owner, holds: list[_Hold]) -> None:
        """Do not call this: use `create` or `open`. `holds`: one locked directory for each of the owner's paths."""
        self.run_id = owner.run_id
        self.paths = tuple(Path(path) for path in owner.paths)
        self._holds = holds
        self._pid = os.getpid()
        self._kept = False
        self._finalizer = weakref.finalize(self, _leave, self._pid, holds, True)

    @classmethod
    def create(cls, parents: Sequence[Path], *, model: str = "", owner_note: str = "") -> SwapDir:
        """Make and lock `tiered_zero-<run id>` (mode 0700) under each parent. Raises ConfigError if a parent cannot be
        used, and StoreError for other failures. After a failure no directory is left."""
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
        """Take over and keep the directories of a run that has ended. `path`: any one of them. Raises StoreError if the
        run is alive, or if one of its directories cannot be opened."""
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
        """Leave the directories on disk until `remove`. With `kept` False, `release` removes them."""
        if self._finalizer.detach():
            self._kept = kept
            self._finalizer = weakref.finalize(self, _leave, self._pid, self._holds, not kept)

    def release(self) -> None:
        """Release the locks. Kept directories stay for a later `open`; others are removed. Idempotent."""
        self._end(removes=not self._kept)

    def remove(self) -> None:
        """Remove the directories, kept or not, and release the locks. Idempotent."""
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
    """Return the reason why a directory could not be made or locked, with advice if its file system has no locks."""
    if error.errno in (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS):
        return f"its file system has no locks ({error_text(error)}); name a directory on a local disk"
    return error_text(error)


def _leave(pid: int, holds: list[_Hold], delete: bool) -> None:
    """Release the locks in `holds`. `delete`: whether to remove the directories first. Do nothing in a process other
    than `pid`."""
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
    """Make the swap directories (mode 0700, with parents) of each store that has no directory yet. `groups`: maps the
    directories of each store to the config key that names them. Raises ConfigError."""
    for group, key in groups.items():
        paths = [Path(path) for path in group]
        if not any(path.exists() for path in paths):
            for path in paths:
                _make(path, key)
        # else a disk may not be mounted: a later check refuses the missing directories


def _make(path: Path, key: str) -> None:
    missing = [place for place in (path, *path.parents) if not place.exists()][::-1]
    try:
        for place in missing:
            place.mkdir(mode=0o700, exist_ok=True)  # another rank may have made it since
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


# -- list and remove runs ----------------------------------------------------------------------------------------------

_RUN_FILES = (OWNER_NAME, MANIFEST_NAME, NEXT_NAME, DATA_NAME)


@final
@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One run's directory under one swap path.

    `state`: "alive", "dead" or "unknown". `nbytes`: the disk space that the directory takes. `age_s`: the seconds since
    a process made or took over the directory. `pid`: the process that the owner file names; 0 if unknown. `step`: the
    step of the last commit; None without a commit. `resumable`: whether the directory may hold a state to resume.
    `own`: whether this user owns the directory and can read it."""

    run_id: str
    path: Path
    state: str
    reason: str
    nbytes: int = 0
    age_s: float
    pid: int = 0
    host: str = ""
    model: str = ""
    note: str = ""
    step: int | None = None
    resumable: bool = False
    paths: tuple[str, ...]
    own: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class Collected:
    """The result of `collect_garbage` for one run. `removed`: whether the run was removed, or with `dry_run` would be.
    `reason`: why it was removed or kept."""

    run: RunInfo
    removed: bool
    reason: str


def list_runs(parent: Path) -> list[RunInfo]:
    """Return the runs that have a directory under `parent`, oldest first. Changes nothing. Raises StoreError."""
    runs = []
    try:
        with open_directory(parent.resolve()) as fd:
            for name in os.listdir(fd):
                if name.startswith(PREFIX):
                    with suppress(FileNotFoundError):  # the run may end, and remove its directory
                        runs.append(_inspect(parent / name, name, fd))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        raise StoreError(f"{parent} is not a directory that can be read ({error}); name one of nvme_path.") from error
    return sorted(runs, key=lambda run: -run.age_s)


def leftover_notices(parents: Iterable[str], adopted: Container[Path] = ()) -> list[str]:
    """Return a message for each of the directories `parents` that holds files of ended runs. `adopted`: directories
    that this run has taken over; they are skipped."""
    lines = []
    for parent in dict.fromkeys(parents):
        runs: list[RunInfo] = []
        with suppress(StoreError):  # the directory cannot be read: using it will raise
            runs = [
                run
                for run in list_runs(Path(parent))
                if run.state == "dead" and run.own and run.path.resolve() not in adopted
            ]
        if runs:
            nbytes, num_resumable = sum(run.nbytes for run in runs), sum(run.resumable for run in runs)
            kept = f", the {num_resumable} that can be resumed only with --committed" if num_resumable else ""
            which = "a run whose process has" if len(runs) == 1 else f"{len(runs)} runs whose processes have"
            lines.append(
                f"{parent} holds {format_nbytes(nbytes)} of {which} ended; `tiered-zero swap gc {parent}` removes "
                f"them{kept}"
            )
    return lines


def clear_restarted(parents: Iterable[str], note: str) -> None:
    """Remove the directories that ended processes of this launch (such as a torchrun job) have left. Keep directories
    with a committed state. Called when the launch is restarted. `note`: the launch's name, as in `owner.json`."""
    for parent in dict.fromkeys(parents):
        with suppress(StoreError):  # the directory cannot be read: using it will raise
            collect_garbage(Path(parent), note=note)


def collect_garbage(
    parent: Path, dry_run: bool = False, committed: bool = False, unknown: bool = False, note: str | None = None
) -> list[Collected]:
    """Remove the directories of this user's ended runs under `parent`. Return the result for each run. `dry_run`:
    remove nothing. `committed`: also remove runs that can be resumed. `unknown`: also remove runs that may be alive.
    `note`: consider only runs whose `owner.json` has this note; None: all runs. Raises StoreError."""
    found = []
    for run in list_runs(parent):
        if note is not None and run.note != note:
            continue
        try:
            found.append(_collect(run, dry_run, committed, unknown))
        except FileNotFoundError:
            found.append(Collected(run=run, removed=False, reason="it was removed by another process"))
        except (OSError, StoreError) as error:
            found.append(Collected(run=run, removed=False, reason=f"cannot be removed: {error_text(error)}"))
    return found


def _collect(run: RunInfo, dry_run: bool, committed: bool, unknown: bool) -> Collected:
    """Remove one run's directory, unless it must be kept. Return what was done, and why. A run that can be resumed is
    removed only if `committed` is True. Raises OSError, StoreError."""
    if not run.own or run.state == "alive" or (run.state == "unknown" and not unknown):
        return Collected(run=run, removed=False, reason=run.reason)
    if run.resumable and not committed:
        reason = "may be resumed from its committed state (--committed removes it)"
        return Collected(run=run, removed=False, reason=reason)
    why = run.reason if run.step is None else f"{run.reason}; its commit of step {run.step} is removed with it"
    parent, name = run.path.parent.resolve(), run.path.name
    with open_directory(parent) as parent_fd, open_directory(name, parent_fd) as fd:
        strange = sorted(each for each in names_in(fd) if each not in _RUN_FILES and not each.startswith(PROBE_PREFIX))
        if not run.pid and strange:
            reason = f"holds {strange[0]!a}, which no run makes; remove it by hand"
            return Collected(run=run, removed=False, reason=reason)
        if dry_run:
            return Collected(run=run, removed=True, reason=why)
        lock = CLOSED
        try:
            lock = lock_file(OWNER_NAME, fd)  # so that no other process takes the run over
        except FileNotFoundError:
            pass
        except BlockingIOError:
            return Collected(run=run, removed=False, reason="another process took it over")
        except (OSError, StoreError):
            if not unknown:
                raise
        try:
            remove_files(fd, last=OWNER_NAME)
        finally:
            lock.close()  # before rmdir: NFS keeps an open file in its directory under another name
        os.rmdir(name, dir_fd=parent_fd)
    return Collected(run=run, removed=True, reason=why)


def _inspect(path: Path, name: str, parent_fd: int) -> RunInfo:
    """Return the RunInfo of the run directory `name` in the open directory `parent_fd`. Raises FileNotFoundError if
    `name` is gone."""
    status = os.stat(name, dir_fd=parent_fd, follow_symlinks=False)
    run = RunInfo(
        run_id=name.removeprefix(PREFIX),
        path=path,
        state="unknown",
        reason=f"belongs to user id {status.st_uid}",
        age_s=max(0.0, time.time() - status.st_mtime),
        paths=(str(path),),
    )
    if not stat.S_ISDIR(status.st_mode):
        return replace(run, reason=f"is {kind_text(status.st_mode)}, not a run's directory")
    if status.st_uid != os.geteuid():
        return run
    try:
        with open_directory(name, parent_fd) as fd:
            return _inspect_open(replace(run, nbytes=disk_nbytes(fd), own=True), fd)
    except (OSError, StoreError) as error:
        return replace(run, reason=f"cannot be read: {error_text(error)}")


def _inspect_open(run: RunInfo, fd: int) -> RunInfo:
    """Return a copy of `run`, with owner, state and last commit as found in its open directory `fd`. Raises OSError,
    StoreError."""
    owner, unreadable = None, "there is none"
    try:
        owner = read_owner_at(fd)
    except FileNotFoundError:
        pass
    except (OSError, StoreError) as error:
        unreadable = error_text(error)
    if owner is not None:
        age_s = max(0.0, time.time() - owner.created_s)
        run = replace(run, age_s=age_s, **owner.model_dump(include={"pid", "host", "model", "note", "paths"}))
    state, reason = _liveness(run, fd, owner, unreadable)
    step, resumable = _committed_state(run, fd)
    return replace(run, state=state, reason=reason, step=step, resumable=resumable)


def _committed_state(run: RunInfo, fd: int) -> tuple[int | None, bool]:
    """Return `RunInfo.step` and `RunInfo.resumable` of a run; (None, True) if its commit cannot be read."""
    first = Path(run.paths[0])
    try:
        committed, prepared = manifest.load_at(fd, first) if first == run.path else manifest.load(first)
    except (StoreError, OSError):
        return None, True
    has_gone = first != run.path and not os.path.lexists(first)
    return committed.step if committed else None, has_gone or (committed or prepared) is not None


def _liveness(run: RunInfo, fd: int, owner: Owner | None, unreadable: str) -> tuple[str, str]:
    """Return `RunInfo.state` and `RunInfo.reason` of a run. `owner`: the content of the owner file; None if it is
    missing or unreadable. `unreadable`: the reason for None."""
    try:
        if is_locked(OWNER_NAME, fd):
            return "alive", f"process {owner.pid} on {owner.host} holds its lock" if owner else "its lock is held"
    except (OSError, StoreError) as error:
        return "unknown", f"its lock cannot be looked at: {error_text(error)}"
    if owner is None:
        return "unknown", f"no readable owner file ({unreadable}); perhaps it is being made (--unknown removes it)"
    if not is_local(fstype := filesystem_type(run.path)):
        return "unknown", (
            f"owned by process {owner.pid} on {owner.host}; lies on {fstype or 'an unknown file system'}, where a lock "
            "of another machine may not be seen (--unknown removes it)"
        )
    return "dead", f"process {owner.pid} holds its lock no longer"
