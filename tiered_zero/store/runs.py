"""The runs under a swap path: who they belong to, whether that process lives, and the removal of dead ones."""

from __future__ import annotations

import os
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.io.preflight import filesystem_type
from tiered_zero.store import manifest
from tiered_zero.store.swap_dir import (
    OWNER_NAME,
    PREFIX,
    Owner,
    boot_id,
    delete_directory,
    is_locked,
    lock_fd,
    read_owner,
    start_ticks,
)

_UNOWNED_GRACE_S = 3600.0
"""A directory without a readable owner file is being made right now, or is this old and dead."""

_NETWORK_TYPES = ("nfs", "nfs4", "cifs", "smb3", "lustre", "gpfs", "beegfs", "ceph", "glusterfs", "9p", "afs")


@final
@dataclass(frozen=True)
class RunInfo:
    """One run's directory under one parent.

    `state`: "alive", "dead" or "unknown" (then it is never removed); `reason` says why. `nbytes`: disk blocks taken.
    `age_s`: since it was made or taken over. `step`: of the last commit, None without one. `resumable`: a committed or
    prepared state may be there.
    """

    run_id: str
    path: Path
    state: str
    reason: str
    nbytes: int
    age_s: float
    pid: int
    host: str
    model: str
    note: str
    step: int | None
    resumable: bool
    paths: tuple[str, ...]


@final
@dataclass(frozen=True)
class Collected:
    """What a collection did with one run, and why. With `dry_run` nothing was removed, only decided."""

    run: RunInfo
    removed: bool
    reason: str


def list_runs(parent: Path) -> list[RunInfo]:
    """The runs that have a directory under `parent`, oldest first. Changes nothing."""
    if not parent.is_dir():
        raise StoreError(f"{parent} is not a directory; name one that nvme_path names.")
    runs = []
    for path in parent.glob(f"{PREFIX}*"):
        with suppress(FileNotFoundError):  # it may end while we look
            runs.append(_inspect(path))
    return sorted(runs, key=lambda run: -run.age_s)


def collect_garbage(parent: Path, dry_run: bool = False, committed: bool = False) -> list[Collected]:
    """Remove the directories under `parent` whose owner is dead; a live or doubtful one's never.

    A dead run that left a committed state can be resumed from it, so it is removed only with `committed`.
    """
    return [_collect(run, dry_run, committed) for run in list_runs(parent)]


def _collect(run: RunInfo, dry_run: bool, committed: bool) -> Collected:
    if run.state != "dead":
        return Collected(run, False, run.reason)
    if run.resumable and not committed:
        return Collected(run, False, "may be resumed from its committed state (--committed removes it)")
    if not dry_run:
        try:
            fd = os.open(run.path / OWNER_NAME, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            delete_directory(run.path)
            return Collected(run, True, run.reason)
        try:
            lock_fd(fd)  # held to the end: nobody can take the run over meanwhile
        except BlockingIOError:
            os.close(fd)
            return Collected(run, False, "a process took it over meanwhile")
        delete_directory(run.path, fd)
    return Collected(run, True, run.reason)


def _inspect(path: Path) -> RunInfo:
    status = path.stat()
    run_id = path.name.removeprefix(PREFIX)
    try:
        owner = read_owner(path)
    except StoreError:
        owner = Owner(run_id, 0, "", 0, "", status.st_mtime, "", "", (str(path),))
    try:
        nbytes = sum(entry.stat(follow_symlinks=False).st_blocks * 512 for entry in os.scandir(path))
        state, reason = _liveness(path, owner)
    except PermissionError:
        nbytes, state, reason = 0, "unknown", f"belongs to user id {status.st_uid}"
    step, resumable = _committed_state(Path(owner.paths[0]))
    return RunInfo(
        run_id=run_id,
        path=path,
        state=state,
        reason=reason,
        nbytes=nbytes,
        age_s=max(0.0, time.time() - owner.created_s),
        pid=owner.pid,
        host=owner.host,
        model=owner.model,
        note=owner.note,
        step=step,
        resumable=resumable,
        paths=owner.paths,
    )


def _committed_state(first: Path) -> tuple[int | None, bool]:
    """The last committed step, and whether anything may be resumed; in doubt (damage, an unmounted path) it may."""
    try:
        first.stat()
        committed, prepared = manifest.load(first)
    except (StoreError, OSError):
        return None, True
    return committed.step if committed else None, (committed or prepared) is not None


def _liveness(path: Path, owner: Owner) -> tuple[str, str]:
    """The lock decides on one machine; a pid counts only together with its start time, on the same boot."""
    if is_locked(path):
        return "alive", f"process {owner.pid} on {owner.host} holds its lock"
    if not owner.pid:
        if time.time() - owner.created_s > _UNOWNED_GRACE_S:
            return "dead", "no readable owner file, and not new"
        return "unknown", "no readable owner file yet"
    same_host = owner.host == socket.gethostname()
    if owner.boot_id == boot_id():
        if same_host and start_ticks(owner.pid) == owner.start_ticks:
            return "unknown", f"process {owner.pid} lives but does not hold the lock"
        return "dead", f"process {owner.pid} has ended"
    if not same_host and filesystem_type(path) in _NETWORK_TYPES:
        return "unknown", f"owned on another machine ({owner.host}); its lock may not be seen over a network"
    return "dead", f"process {owner.pid} ended with an earlier boot"
