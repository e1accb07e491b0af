"""Reader of a run's newest in-place commit, of a run that ended or of this one: nothing there is changed."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

from tiered_zero.checkpoint.commit import COMMIT_ID, DECIDED_BY
from tiered_zero.checkpoint.shares import RankPart
from tiered_zero.checkpoint.tag_manifest import TagManifest, check_store_location
from tiered_zero.errors import StoreError
from tiered_zero.store.checked_json import Kinds, check_fields, check_integers, kinds_of
from tiered_zero.store.directory import Owner, read_owner
from tiered_zero.store.manifest import MANIFEST_NAME, Manifest
from tiered_zero.store.manifest import load as load_manifests

ON_ITS_HOST: Final = (
    "Resume an in-place commit with the same number of ranks, each on the host that has its part (torchrun "
    "--node-rank), and with tiered_zero.checkpoint.in_place and resume; where a disk is lost, name another checkpoint."
)


@final
@dataclass(frozen=True, kw_only=True)
class Commit:
    """The newest commit of a run. `path`: the first directory of the store that has decided it. `manifest`:
    of the checkpoint, whose records are in `stores`; `manifest.step` is which step it really is."""

    path: Path
    commit_id: str
    manifest: TagManifest
    ranks: list[RankPart]

    @property
    def stores(self) -> list[dict[str, Any]]:
        """The stores of all ranks, in the order of the manifest."""
        return [store for rank in self.ranks for store in rank.stores]

    @classmethod
    def read(cls, path: Path) -> Commit:
        """`path`: of any store of the run. Raises StoreError."""
        return cls.decode(*read_metadata(path))

    @classmethod
    def decode(cls, path: Path, metadata: Any) -> Commit:
        """Build from what `read_metadata` gave, which may be hostile. Raises StoreError."""
        with refused(path):
            fields = check_fields(metadata, _METADATA_KINDS)
            ranks = [_rank_part(item) for item in fields["ranks"]]
            manifest = TagManifest.from_body(fields["checkpoint"])
        return cls(path=path, commit_id=fields[COMMIT_ID], manifest=manifest, ranks=ranks)


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raise StoreError if the block finds, by a ValueError, that `path` holds no commit of a run."""
    try:
        yield
    except ValueError as error:
        raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error


_METADATA_KINDS: dict[str, Kinds] = {COMMIT_ID: str, "checkpoint": dict, "ranks": list}
_RANK_KINDS = kinds_of(RankPart)


def _rank_part(item: Any) -> RankPart:
    """Raises ValueError."""
    fields = check_fields(item, _RANK_KINDS)
    check_integers("initialized", fields["initialized"])
    if not 1 <= len(fields["stores"]) <= 2:
        raise ValueError("stores: expected one or two of each rank")
    return RankPart(**{**fields, "stores": [check_store_location(store) for store in fields["stores"]]})


def read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the metadata of a run's newest commit, and the first directory of the store that decided it. `path`: the
    first of any store of the run. Raises StoreError."""
    committed = _committed(path)
    if DECIDED_BY in committed.metadata:
        with refused(path):
            first = check_store_location(committed.metadata[DECIDED_BY])
        path = Path(first["paths"][0])
        committed = _committed(path)
        if committed.run_id != first["run_id"]:
            raise StoreError(f"{path} belongs to another run than the one whose commit is looked for.")
    ranks = committed.metadata.get("ranks")
    if not ranks or type(ranks) is not list:
        raise StoreError(f"{path} holds no in-place commit of a run, or one of another version.")
    with refused(path):
        first = _rank_part(ranks[0]).stores[0]
    if (first["run_id"], Path(first["paths"][0])) != (committed.run_id, path):
        raise StoreError(f"{path} belongs to other directories than its commit says; it was copied or moved.")
    return path, dict(committed.metadata)


def _committed(path: Path) -> Manifest:
    """Raises StoreError."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    return committed


def find_missing(committed: Manifest) -> str:
    """Say which part of a commit is not here, of the store that decided it; empty: none. Raises StoreError."""
    ranks, own = committed.metadata.get("ranks"), {COMMIT_ID: committed.metadata.get(COMMIT_ID)}
    with refused(Path(MANIFEST_NAME)):
        parts = [_rank_part(item) for item in (ranks if type(ranks) is list else ())]
    for part in parts:
        for store in part.stores:
            first = Path(store["paths"][0])
            found = [one for one in load_manifests(first) if one is not None and one.run_id == store["run_id"]]
            if not any(one.is_state(committed.step, own) for one in found):
                return f"a part of it rests in {first}, which is not here, or does not hold step {committed.step}"
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
