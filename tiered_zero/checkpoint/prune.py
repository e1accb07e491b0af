"""Remove tags from a save directory: old whole ones, and pointers to in-place commits whose run has made another since.

A pointer is removed with its tag; the swap directory that it points to never is. The newest pointer to a commit leads
to it: it counts as a whole tag if it is the commit's own, and stays if the run was killed between a commit and its tag.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path

from tiered_zero.checkpoint.directory import TagInfo, list_tags, read_latest
from tiered_zero.checkpoint.save_directory import SaveDirectory
from tiered_zero.errors import StoreError

logger = logging.getLogger("tiered_zero")


def prune(save_dir: str | os.PathLike[str], keep: int, *, dry_run: bool = False) -> list[TagInfo]:
    """Remove whole tags but the newest `keep`, and superseded pointers; never what `latest` names, nor the newest
    pointer to a commit that has no tag of its own. Return those removed, or with `dry_run` those that would be. A tag
    that holds other programs' files stays, with a warning. Raises StoreError."""
    if keep < 1:
        raise StoreError(f"Keep at least one checkpoint; found {keep}.")
    if dry_run:
        found = _prunable(Path(save_dir), keep)
        directory = SaveDirectory.join(save_dir)
        try:
            return _removable(directory, found)
        finally:
            directory.release()
    directory = SaveDirectory.open(save_dir)
    try:
        directory.restore()
        removed = _removable(directory, _prunable(directory.path, keep))
        for info in removed:
            directory.try_remove(directory.hide(info.tag))
        return removed
    except OSError as error:
        raise StoreError(f"{directory.path} cannot be pruned: {error}.") from error
    finally:
        directory.release()


def _removable(directory: SaveDirectory, infos: Sequence[TagInfo]) -> list[TagInfo]:
    found = []
    for info in infos:
        try:
            directory.check_replaceable(info.tag)
            found.append(info)
        except StoreError as error:
            logger.warning("%s", error)
    return found


def _prunable(path: Path, keep: int) -> list[TagInfo]:
    """Oldest first."""
    try:
        latest = read_latest(path)
    except StoreError:
        latest = None
    infos = list_tags(path)
    newest = [info for info in infos if info.complete][-keep:]
    superseded = _superseded(infos)
    kept = {latest, *(info.tag for info in newest)}
    return [info for info in infos if (info.complete or info.tag in superseded) and info.tag not in kept]


def _superseded(infos: Sequence[TagInfo]) -> set[str]:
    """Tags that point to another commit than theirs, but for the newest where no tag is that commit's.

    `infos`: oldest first. A swap directory that cannot be read, perhaps on a disk that is not mounted, supersedes none.
    """
    pointers: dict[str, list[TagInfo]] = {}
    for info in infos:
        if info.kind == "in_place":
            pointers.setdefault(info.run_id, []).append(info)
    found: set[str] = set()
    for own in pointers.values():
        old = [info.tag for info in own if not info.complete]
        if all(info.held_id is not None for info in own):
            found.update(old if len(old) < len(own) else old[:-1])
    return found
