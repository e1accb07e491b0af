"""Read what runs have committed in place, of a run that ended or of this one: nothing there is changed.

A commit is the metadata of the store that decides it, `CommitMetadata`; the other stores of the run hold its id and
say which store decides. All of it may be hostile: it is checked before it is used.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, final

from pydantic import Field, ValidationError

from tiered_zero.checkpoint.index import RankPart, StoreLocation, TagManifest
from tiered_zero.errors import StoreError
from tiered_zero.store.directory import Owner, read_owner
from tiered_zero.store.json_file import StrictModel, first_problem
from tiered_zero.store.manifest import MANIFEST_NAME, Manifest
from tiered_zero.store.manifest import load as load_manifests

COMMIT_ID: Final = "commit_id"
"""In the metadata of all stores, and in the tag: drawn by rank 0. Two commits may be of one step."""

DECIDED_BY: Final = "decided_by"
"""In the metadata of the other stores: the `StoreLocation` of the one that decides."""

ON_ITS_HOST: Final = (
    "Resume an in-place commit with the same number of ranks, each on the host that has its part (torchrun "
    "--node-rank), and with tiered_zero.checkpoint.in_place and resume; where a disk is lost, name another checkpoint."
)


@final
class CommitMetadata(StrictModel):
    """The metadata of a commit in the store that decides it. `checkpoint`: the body of the manifest of all ranks."""

    commit_id: str
    checkpoint: dict[str, Any]
    ranks: Annotated[list[RankPart], Field(min_length=1)]


@final
@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest commit of a run. `path`: the first directory of the store that has decided it. `manifest`: of the
    checkpoint, whose records are in `stores`; `manifest.step` is which step it really is."""

    path: Path
    commit_id: str
    manifest: TagManifest
    ranks: list[RankPart]

    @property
    def stores(self) -> list[StoreLocation]:
        """The stores of all ranks, in the order of the manifest."""
        return [store for rank in self.ranks for store in rank.stores]

    @classmethod
    def read(cls, path: Path) -> Commit:
        """`path`: of any store of the run. Raises StoreError."""
        return cls.decode(*read_metadata(path))

    @classmethod
    def decode(cls, path: Path, metadata: Any) -> Commit:
        """Build from what `read_metadata` gave, perhaps on another rank. Raises StoreError."""
        with refused(path):
            whole = CommitMetadata.model_validate(metadata)
            manifest = TagManifest.from_body(whole.checkpoint)
        return cls(path=path, commit_id=whole.commit_id, manifest=manifest, ranks=whole.ranks)


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raise StoreError if the block finds, by a ValueError, that `path` holds no commit of a run."""
    try:
        yield
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise StoreError(f"{path} holds no in-place commit of a run ({why}).") from error


def read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the metadata of a run's newest commit, and the first directory of the store that decided it. `path`: the
    first of any store of the run. Raises StoreError."""
    committed = _committed(path)
    if DECIDED_BY in committed.metadata:
        with refused(path):
            decides = StoreLocation.model_validate(committed.metadata[DECIDED_BY])
        path, committed = decides.first, _committed(decides.first)
        if committed.run_id != decides.run_id:
            raise StoreError(f"{path} belongs to another run than the one whose commit is looked for.")
    parts = _parts(committed, path)
    if not parts:
        raise StoreError(f"{path} holds no in-place commit of a run, or one of another version.")
    first = parts[0].stores[0]
    if (first.run_id, first.first) != (committed.run_id, path):
        raise StoreError(f"{path} belongs to other directories than its commit says; it was copied or moved.")
    return path, dict(committed.metadata)


def find_missing(committed: Manifest) -> str:
    """Say which part of a commit is not here, of the store that decided it; empty: none. Raises StoreError."""
    own = {COMMIT_ID: committed.metadata.get(COMMIT_ID)}
    for store in (store for part in _parts(committed, Path(MANIFEST_NAME)) for store in part.stores):
        found = [one for one in load_manifests(store.first) if one is not None and one.run_id == store.run_id]
        if not any(one.is_state(committed.step, own) for one in found):
            return f"a part of it rests in {store.first}, which is not here, or does not hold step {committed.step}"
    return ""


def held_commit(tag: TagManifest) -> Manifest | None:
    """Return the commit that the run of a tag holds by now; None: nothing of it is there. Raises StoreError."""
    assert tag.swap is not None, "a tag of an in-place commit"
    committed, _ = load_manifests(Path(tag.swap["paths"][0]))
    return committed if committed is not None and committed.run_id == tag.swap["run_id"] else None


def is_committed(tag: TagManifest, committed: Manifest) -> bool:
    """Whether the store that a tag points to has `committed` what the tag was written for."""
    return tag.swap is not None and committed.is_state(tag.step, {COMMIT_ID: tag.swap[COMMIT_ID]})


def owner_of(path: Path, which: str = "") -> Owner:
    """Return the owner of a store's directory. `which`: of a commit, as "of step 5 ". Raises StoreError if it is not
    here."""
    try:
        return read_owner(path)
    except StoreError as error:
        raise StoreError(
            f"A part of the commit {which}rests in {path}, which cannot be read here: "
            f"{error if os.path.lexists(path) else 'it is gone, or on another host.'} {ON_ITS_HOST} For other ranks "
            "save without in_place."
        ) from error


def _committed(path: Path) -> Manifest:
    """Raises StoreError."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    return committed


def _parts(committed: Manifest, path: Path) -> list[RankPart]:
    """List the parts of all ranks; none in a store that does not decide. Raises StoreError."""
    ranks = committed.metadata.get("ranks")
    with refused(path):
        return [RankPart.model_validate(part) for part in (ranks if isinstance(ranks, list) else ())]
