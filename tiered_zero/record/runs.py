"""List the runs under a swap path, tell whether each is alive, and remove dead ones.

A directory whose content no run would leave, or that belongs to another user, is listed with the reason and does not
stop the listing. Nothing of another user is read or removed."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Container, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.io.select import filesystem_type, is_local
from tiered_zero.record import manifest
from tiered_zero.record.directory import OWNER_NAME, PREFIX, Owner, read_owner_at
from tiered_zero.record.files import (
    disk_nbytes,
    error_text,
    is_locked,
    kind_text,
    lock_fd,
    names_in,
    open_directory,
    open_file,
    remove_files,
)
from tiered_zero.record.manifest import MANIFEST_NAME, NEXT_NAME
from tiered_zero.record.stripes import DATA_NAME
from tiered_zero.sizes import format_nbytes
from tiered_zero.system import CLOSED, Descriptor

_RUN_FILES = (OWNER_NAME, MANIFEST_NAME, NEXT_NAME, DATA_NAME)
_PROBE_PREFIX = ".tiered-zero-probe-"


@final
@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """One run's directory under one parent.

    `state`: "alive", "dead" or "unknown"; `reason` explains it. `nbytes`: the disk blocks that it takes, in bytes.
    `age_s`: seconds since it was made or taken over. `pid`: 0 if no `owner.json` can be read. `step`: step of the last
    commit; None without one. `resumable`: whether it may hold a committed or prepared state. `own`: whether it belongs
    to this user and can be read."""

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
    """What `collect_garbage` did with one run, and why. `removed`: whether the run's directory was removed, or, with
    `dry_run`, would be."""

    run: RunInfo
    removed: bool
    reason: str


def list_runs(parent: Path) -> list[RunInfo]:
    """List the runs that have a directory under `parent`, oldest first, without changes. Raises StoreError."""
    runs = []
    try:
        with open_directory(parent.resolve()) as fd:
            for name in os.listdir(fd):
                if name.startswith(PREFIX):
                    with suppress(FileNotFoundError):  # it may have ended meanwhile
                        runs.append(_inspect(parent / name, name, fd))
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a loop of links; ValueError: a NUL
        raise StoreError(f"{parent} is not a directory that can be read ({error}); name one of nvme_path.") from error
    return sorted(runs, key=lambda run: -run.age_s)


def leftover_notices(parents: Iterable[str], adopted: Container[Path] = ()) -> list[str]:
    """Return one line for each directory that holds files of runs whose process has ended. `adopted`: directories of
    the run that is resumed, which are skipped."""
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
    """Remove the directories that ended processes of one launch have left; a restart of that launch calls this. `note`:
    the launch's name, as `owner.json` in the directories has it. Committed state stays: it may be resumed."""
    for parent in dict.fromkeys(parents):
        with suppress(StoreError):  # the directory cannot be read: using it will raise
            collect_garbage(Path(parent), note=note)


def collect_garbage(
    parent: Path, dry_run: bool = False, committed: bool = False, unknown: bool = False, note: str | None = None
) -> list[Collected]:
    """Remove the directories under `parent` whose owner is dead, never those of a live owner or another user.
    `dry_run`: remove nothing. `committed`: also remove runs that can be resumed from a committed state. `unknown`: also
    remove runs that may be alive. `note`: consider only owners with this note. Return what was done with each run.
    Raises StoreError."""
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
    """Remove one run's directory, or return why it stays. Raises OSError, StoreError."""
    if (refusal := _refusal(run, committed, unknown)) is not None:
        return Collected(run=run, removed=False, reason=refusal)
    parent, name = run.path.parent.resolve(), run.path.name
    with open_directory(parent) as parent_fd, open_directory(name, parent_fd) as fd:
        strange = sorted(each for each in names_in(fd) if each not in _RUN_FILES and not each.startswith(_PROBE_PREFIX))
        if not run.pid and strange:
            reason = f"holds {strange[0]!a}, which no run makes; remove it by hand"
            return Collected(run=run, removed=False, reason=reason)
        if dry_run:
            return Collected(run=run, removed=True, reason=run.reason)
        lock = _take_lock(fd, unknown)
        try:
            again = _inspect(run.path, name, parent_fd, locked=False)
            if (refusal := _refusal(again, committed, unknown)) is not None:
                return Collected(run=run, removed=False, reason=refusal)
            remove_files(fd, keep=OWNER_NAME)
            with suppress(FileNotFoundError):
                os.unlink(OWNER_NAME, dir_fd=fd)
        finally:
            lock.close()  # before rmdir: NFS keeps an open file in its directory under another name
        os.rmdir(name, dir_fd=parent_fd)
    return Collected(run=run, removed=True, reason=run.reason)


def _take_lock(dir_fd: int, unknown: bool) -> Descriptor:
    """Lock `owner.json`, so that no other process takes the run over. Return `CLOSED`, a descriptor of nothing, if
    there is no such file or, with `unknown`, none that can be locked. Raises OSError, StoreError."""
    try:
        fd = open_file(OWNER_NAME, dir_fd, uid=os.geteuid(), flags=os.O_RDWR)
        try:
            lock_fd(fd)
        except BaseException:
            fd.close()
            raise
        return fd
    except FileNotFoundError:
        return CLOSED
    except BlockingIOError:
        raise StoreError("another process took it over") from None
    except (OSError, StoreError):
        if unknown:
            return CLOSED
        raise


def _refusal(run: RunInfo, committed: bool, unknown: bool) -> str | None:
    """Return why a run is kept; None if it may be removed."""
    if not run.own or run.state == "alive" or (run.state == "unknown" and not unknown):
        return run.reason
    if run.resumable and not committed:
        return "may be resumed from its committed state (--committed removes it)"
    return None


def _inspect(path: Path, name: str, parent_fd: int, locked: bool | None = None) -> RunInfo:
    """Describe the run in `path`. `locked`: whether another process holds the lock; None: find out. Raises
    FileNotFoundError if the directory is gone."""
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
            return _inspect_open(replace(run, nbytes=disk_nbytes(fd), own=True), fd, locked)
    except (OSError, StoreError) as error:
        return replace(run, reason=f"cannot be read: {error_text(error)}")


def _inspect_open(run: RunInfo, fd: int, locked: bool | None) -> RunInfo:
    """Read the state of the run directory open at `fd`. Raises OSError, StoreError."""
    owner, unreadable = None, "there is none"
    try:
        owner = read_owner_at(fd, os.geteuid())
    except FileNotFoundError:
        pass
    except (OSError, StoreError) as error:
        unreadable = error_text(error)
    if owner is not None:
        age_s = max(0.0, time.time() - owner.created_s)
        run = replace(run, age_s=age_s, **owner.model_dump(include={"pid", "host", "model", "note", "paths"}))
    state, reason = _liveness(run, fd, owner, locked, unreadable)
    step, resumable = _committed_state(run, fd)
    return replace(run, state=state, reason=reason, step=step, resumable=resumable)


def _committed_state(run: RunInfo, fd: int) -> tuple[int | None, bool]:
    """Return the last committed step, and whether the run may be resumed: True if in doubt (damage, an unmounted
    path)."""
    first = Path(run.paths[0])
    try:
        committed, prepared = manifest.load_at(fd, first, os.geteuid()) if first == run.path else manifest.load(first)
    except (StoreError, OSError):
        return None, True
    has_gone = first != run.path and not os.path.lexists(first)
    return committed.step if committed else None, has_gone or (committed or prepared) is not None


def _liveness(run: RunInfo, fd: int, owner: Owner | None, locked: bool | None, unreadable: str) -> tuple[str, str]:
    """Return the state and the reason for it. On a local file system the lock decides; on others the locks of other
    machines may be invisible. `locked`: see `_inspect`. `unreadable`: why `owner` is None."""
    try:
        if is_locked(OWNER_NAME, fd, os.geteuid()) if locked is None else locked:
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
