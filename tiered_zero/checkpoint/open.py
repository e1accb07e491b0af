"""Open a checkpoint to read it: a tag with its data files, or the swap directories of an in-place commit."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tiered_zero.checkpoint.commit import COMMIT_ID
from tiered_zero.checkpoint.committed import Commit, owner_of, refused
from tiered_zero.checkpoint.directory import read_manifest
from tiered_zero.checkpoint.reader import TensorReader
from tiered_zero.checkpoint.tag_manifest import TagManifest, file_name
from tiered_zero.errors import StoreError
from tiered_zero.io.engine import IOEngine
from tiered_zero.store.directory import OWNER_NAME, Owner
from tiered_zero.store.files import error_text, open_of_owner
from tiered_zero.store.manifest import choose
from tiered_zero.store.record_reader import RecordFiles, RecordReader
from tiered_zero.store.stripes import DATA_NAME, Stripes, check_data_files


def open_tag(
    tag_dir: str | os.PathLike[str], engine: IOEngine | None = None, manifest: TagManifest | None = None
) -> TensorReader:
    """Open a tag of a full save. `engine`: None: chosen by reading the files. `manifest`: if it was just read. Raises
    StoreError."""
    path = Path(tag_dir)
    manifest = manifest or read_manifest(path)
    files = [RecordFiles(paths=[path / file_name(n)], contents=store) for n, store in enumerate(manifest.stores)]
    try:
        return TensorReader(manifest, RecordReader(files, engine))
    except ValueError as error:
        raise StoreError(f"{path} is not a whole checkpoint: {error}.") from error


def open_commit(
    path: str | os.PathLike[str], own_runs: Container[str] = (), engine: IOEngine | None = None
) -> TensorReader:
    """Open the newest commit of a run, in the swap directories of all its ranks.

    `path`: any directory of the run. `own_runs`: ids of this run's stores, which make no commit while this is open.
    Raises StoreError: nothing committed, damaged, not all of it here, or its owner lives (unless it is this run).
    """
    commit = Commit.read(Path(owner_of(Path(path)).paths[0]))
    with ExitStack() as resources:
        stores = open_stores(commit.stores, commit, resources, own_runs)
        held = ExitStack()
        with refused(commit.path):
            reader = TensorReader(commit.manifest, RecordReader(stores, engine), held)
        held.enter_context(resources.pop_all())
        return reader


def find_damage(tag_dir: str | os.PathLike[str]) -> list[str]:
    """Read every byte of a tag and say what is wrong with it; empty: nothing."""
    try:
        with open_tag(tag_dir) as reader:
            return [*map(str, reader.damage())]
    except (StoreError, OSError) as error:
        return [str(error)]


def open_stores(
    locations: Sequence[Mapping[str, Any]], commit: Commit, resources: ExitStack, own_runs: Container[str] = ()
) -> list[RecordFiles]:
    """Open the stores of `commit` at `locations`, and keep other processes from adopting them. Raises StoreError."""
    found, step = [], commit.manifest.step
    for location in locations:
        paths = [Path(path) for path in location["paths"]]
        owner = owner_of(paths[0], f"of step {step} ")
        if (owner.run_id, owner.paths) != (location["run_id"], tuple(location["paths"])):
            raise StoreError(
                f"{paths[0]} belongs to another run, or other directories, than the commit of step {step}."
            )
        _lock(paths[0], owner, resources, own_runs)
        manifest, _ = choose(paths[0], step, {COMMIT_ID: commit.commit_id})
        if manifest.run_id != owner.run_id:
            raise StoreError(f"{paths[0]} belongs to another run than the commit of step {step}.")
        check_data_files(paths, Stripes(manifest.weights), manifest.capacity_nbytes)
        found.append(RecordFiles(paths=[path / DATA_NAME for path in paths], contents=manifest.contents))
    return found


def _lock(path: Path, owner: Owner, resources: ExitStack, own_runs: Container[str]) -> None:
    """Keep other processes from adopting the directory while it is read. Raises StoreError if its owner lives."""
    try:
        fd = open_of_owner(path / OWNER_NAME)
        resources.callback(fd.close)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if owner.run_id in own_runs or owner.is_this_process:
            return
        raise StoreError(
            f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}), which goes on "
            "changing it; stop that run first."
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error_text(error)}.") from error
