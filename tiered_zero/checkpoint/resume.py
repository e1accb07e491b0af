"""Find the checkpoint that a path names, for a load and for `tiered_zero.checkpoint.resume`."""

from __future__ import annotations

import os
from collections.abc import Container
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from tiered_zero.checkpoint.committed import held_commit, is_committed
from tiered_zero.checkpoint.directory import find_tag, list_tags, read_declared, read_latest, tag_path
from tiered_zero.checkpoint.open import open_commit, open_tag
from tiered_zero.checkpoint.reader import TensorReader
from tiered_zero.checkpoint.tag_manifest import MANIFEST_NAME, TagManifest
from tiered_zero.errors import StoreError
from tiered_zero.store.directory import OWNER_NAME


@final
@dataclass(frozen=True, kw_only=True)
class FoundCheckpoint:
    """A checkpoint. `path`: of the tag, or the swap directory. `swap`: the first directory of an in-place commit's
    store. `lines`: for the log. `manifest`: of a tag that was just read."""

    path: Path
    swap: Path | None = None
    lines: tuple[str, ...] = ()
    manifest: TagManifest | None = field(default=None, repr=False)


def find_checkpoint(directory: str | os.PathLike[str], tag: str | None = None) -> FoundCheckpoint:
    """Find what `directory` names: a run's swap directory, one tag, or tags, of which `tag` or the newest is taken.

    An in-place commit holds one step. A pointer that was not renewed after the last commit, because the run was killed
    between the two, leads to that commit, and says so; a tag that is asked for by name does not. Raises StoreError.
    """
    path = Path(os.path.abspath(directory))
    if tag is None and (path / OWNER_NAME).exists():
        return FoundCheckpoint(path=path, swap=path)
    if tag is None and (path / MANIFEST_NAME).exists():
        return _follow(path)
    if tag is None and (latest := _latest_pointer(path)) is not None:
        return latest
    try:
        info, skipped = find_tag(path, tag)
    except StoreError:
        if tag is None and (other := _any_pointer(path)) is not None:
            return other
        raise
    if info.kind == "full":
        return FoundCheckpoint(path=info.path, lines=tuple(skipped), manifest=info.manifest)
    found = _follow(info.path)
    return FoundCheckpoint(path=found.path, swap=found.swap, lines=(*skipped, *found.lines))


def open_reader(found: FoundCheckpoint, own_runs: Container[str] = ()) -> TensorReader:
    """Open a tag, or the swap directories that it points to. `own_runs`: see `open_commit`. Raises StoreError."""
    if found.swap is not None:
        return open_commit(found.swap, own_runs)
    return open_tag(found.path, manifest=found.manifest)


def _latest_pointer(path: Path) -> FoundCheckpoint | None:
    """Return the in-place commit that `latest` names, where it is still there, at any step."""
    with suppress(StoreError):  # the search for a complete tag says what is wrong
        if (named := read_latest(path)) is not None and (found := _follow(tag_path(path, named))).swap is not None:
            return found
    return None


def _any_pointer(path: Path) -> FoundCheckpoint | None:
    """What the newest tag points to of which the state is still there, at any step: `latest` names one that is not."""
    for info in reversed(list_tags(path)):
        if info.kind == "in_place":
            with suppress(StoreError):
                return _follow(info.path)
    return None


def _follow(path: Path) -> FoundCheckpoint:
    """A tag, or the swap directory that it points to. Raises StoreError."""
    manifest = read_declared(path)
    if manifest.swap is None:
        return FoundCheckpoint(path=path)
    first = Path(manifest.swap["paths"][0])
    committed = held_commit(manifest)
    if committed is None:
        raise StoreError(f"{path} cannot be loaded: its state rested in {first}, which is gone, or on another host.")
    lines: tuple[str, ...] = ()
    if not is_committed(manifest, committed):
        again = " again" if committed.step == manifest.step else ""
        lines = (
            f"{path} was written at step {manifest.step}; its run has committed step {committed.step}{again} in place "
            f"since: that is loaded, from {first}",
        )
    return FoundCheckpoint(path=path, swap=first, lines=lines)
