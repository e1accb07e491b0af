"""The newest in-place commit of a run that ended, or of this run, read past its stores: nothing there is changed."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, final

import xxhash

from tiered_zero.checkpoint.commit import COMMIT_ID, DECIDED_BY
from tiered_zero.checkpoint.places import Places
from tiered_zero.checkpoint.shares import RankPart
from tiered_zero.checkpoint.tag_manifest import TagManifest, check_store_location
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.store.checked_json import Kinds, check_fields, check_integers, kinds_of
from tiered_zero.store.descriptors import error_text, open_of_owner
from tiered_zero.store.manifest import MANIFEST_NAME, Manifest, Record, choose
from tiered_zero.store.manifest import load as load_manifests
from tiered_zero.store.owner import OWNER_NAME, Owner, boot_id, read_owner, start_ticks
from tiered_zero.store.ranges import Range
from tiered_zero.store.stripes import DataFiles, Stripes

ON_ITS_HOST: Final = (
    "An in-place commit is gone on with by as many ranks as have made it, each on the host that has its part (torchrun "
    "--node-rank), with tiered_zero.checkpoint.in_place and resume; where a disk is lost, name another checkpoint."
)

_NUM_CACHED = 8
"""Verified ranges, of at most 1 MiB, that are kept: neighbours in an array begin in the same one."""


@final
@dataclass(frozen=True, kw_only=True)
class Commit:
    """What the newest commit of a run says. `path`: the first directory of the store that has decided it. `manifest`:
    of the checkpoint, without parts: `places` has them; `manifest.step` is which step it really is."""

    path: Path
    commit_id: str
    manifest: TagManifest
    places: Places
    ranks: list[RankPart]

    @property
    def stores(self) -> list[dict[str, Any]]:
        """Of all ranks, in the order in which `places` counts them."""
        return [store for rank in self.ranks for store in rank.stores]

    @classmethod
    def read(cls, path: Path) -> Commit:
        """`path`: of any store of the run. Raises StoreError."""
        return cls.decode(*read_metadata(path))

    @classmethod
    def decode(cls, path: Path, metadata: Any) -> Commit:
        """Of what `read_metadata` gave, which may be hostile. Raises StoreError."""
        with refused(path):
            fields = check_fields(metadata, _METADATA_KINDS)
            ranks = [_rank_part(item) for item in fields["ranks"]]
            places = Places.from_body({"records": fields["records"], "places": fields["places"]})
            num_stores = sum(len(rank.stores) for rank in ranks)
            if any(record.store >= num_stores for record in places.records):
                raise ValueError("records: there is no such store")
            manifest = TagManifest.from_body(fields["checkpoint"])
            _check_places(manifest, places)
        return cls(path=path, commit_id=fields[COMMIT_ID], manifest=manifest, places=places, ranks=ranks)


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Raise StoreError where the block finds, by a ValueError, that `path` holds no commit of a run."""
    try:
        yield
    except ValueError as error:
        raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error


def _check_places(manifest: TagManifest, places: Places) -> None:
    """Raises ValueError where a tensor has not its places."""
    if places.places.keys() != manifest.tensors.keys():
        raise ValueError("expected a place of each tensor")
    for key, place in places.places.items():
        if (place.parts[-1].stop if place.parts else 0) != (numel := manifest.tensors[key].numel):
            raise ValueError(f"{key[:200]!a}: expected places of {numel} elements")


_METADATA_KINDS: dict[str, Kinds] = {
    COMMIT_ID: str, "checkpoint": dict, "records": list, "places": dict, "ranks": list,
}  # fmt: skip
_RANK_KINDS = kinds_of(RankPart)


def _rank_part(item: Any) -> RankPart:
    """Raises ValueError."""
    fields = check_fields(item, _RANK_KINDS)
    check_integers("initialized", fields["initialized"])
    if not 1 <= len(fields["stores"]) <= 2:
        raise ValueError("stores: expected one or two of each rank")
    return RankPart(**{**fields, "stores": [check_store_location(store) for store in fields["stores"]]})


def read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """What the newest commit of a run says, and the first directory of the store that has decided it. `path`: the first
    of any store of the run. Raises StoreError."""
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
    """What the run that a tag points to holds by now; None: nothing of it is there. Raises StoreError."""
    assert tag.swap is not None, "a tag of an in-place commit"
    committed, _ = load_manifests(Path(tag.swap["paths"][0]))
    return committed if committed is not None and committed.run_id == tag.swap["run_id"] else None


def is_committed(tag: TagManifest, committed: Manifest) -> bool:
    """Whether the store that a tag points to has `committed` what the tag was written for."""
    return tag.swap is not None and committed.is_state(tag.step, {COMMIT_ID: tag.swap[COMMIT_ID]})


def open_stores(
    locations: Sequence[Mapping[str, Any]], commit: Commit, resources: ExitStack, own_runs: Container[str] = ()
) -> list[CommittedFiles]:
    """Open the stores that are at `locations`, of `commit`, and keep other processes from adopting them. Raises
    StoreError."""
    found, step = [], commit.manifest.step
    for location in locations:
        paths = [Path(path) for path in location["paths"]]
        owner = owner_of(paths[0], f"of step {step} ")
        if (owner.run_id, owner.paths) != (location["run_id"], tuple(location["paths"])):
            raise StoreError(
                f"{paths[0]} belongs to another run, or other directories, than the commit of step {step}."
            )
        _lock(paths[0], owner, resources, own_runs)
        found.append(CommittedFiles(paths, commit, resources))
        if found[-1].manifest.run_id != owner.run_id:
            raise StoreError(f"{paths[0]} belongs to another run than the commit of step {step}.")
    return found


def owner_of(path: Path, which: str = "") -> Owner:
    """The owner of the directory of a store. `which`: of a commit, as "of step 5 ". Raises StoreError where it is not
    here."""
    try:
        return read_owner(path)
    except StoreError as error:
        raise StoreError(
            f"A part of the commit {which}rests in {path}, which cannot be read here: "
            f"{error if os.path.lexists(path) else 'it is gone, or on another host.'} {ON_ITS_HOST} For other ranks "
            "save without in_place."
        ) from error


def _lock(path: Path, owner: Owner, resources: ExitStack, own_runs: Container[str]) -> None:
    """Keep other processes from adopting the directory while it is read. Raises StoreError where its owner lives."""
    try:
        fd = open_of_owner(path / OWNER_NAME)
        resources.callback(fd.close)
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if owner.run_id in own_runs or _is_this_process(owner):
            return
        raise StoreError(
            f"The swap directory {path} belongs to a live run (pid {owner.pid} on {owner.host}), which goes on "
            "changing it; stop that run first."
        ) from None
    except OSError as error:
        raise StoreError(f"{path} cannot be locked: {error_text(error)}.") from error


def _is_this_process(owner: Owner) -> bool:
    """A pid counts only together with its start time, on the same boot."""
    pid = os.getpid()
    return (owner.pid, owner.start_ticks, owner.boot_id) == (pid, start_ticks(pid) or 0, boot_id())


@final
class CommittedFiles:
    """The records of one store in its manifest of `commit`: confirmed, or prepared where another store decided."""

    def __init__(self, paths: list[Path], commit: Commit, resources: ExitStack) -> None:
        self.manifest, _ = choose(paths[0], commit.manifest.step, {COMMIT_ID: commit.commit_id})
        self.records = {record.name: record for record in self.manifest.records}
        self._path = paths[0]
        for record in self.manifest.records:
            if any(offset + record.extent_nbytes > self.manifest.capacity_nbytes for offset in record.offsets):
                raise StoreError(f"{paths[0]}: record {record.name[:80]!a} lies outside of its store.")
        self._files = DataFiles(paths, Stripes(self.manifest.weights), resources)
        self._files.check(self.manifest.capacity_nbytes)
        self._verified = lru_cache(_NUM_CACHED)(self._read)

    def read(self, record: Record, offset: int, nbytes: int) -> bytearray:
        """Bytes of a record, verified. Raises CorruptionError, StoreError."""
        found, position, end = bytearray(nbytes), offset, offset + nbytes
        for item in self.manifest.ranges[record.name]:
            if item.end <= position or item.start >= end:
                continue
            if item.start > position:
                break
            data = self._verified(record, item)
            stop = min(end, item.end)
            found[position - offset : stop - offset] = data[position - item.start : stop - item.start]
            position = stop
        if position < end:
            raise StoreError(f"{self._path}: record {record.name!r} has no bytes from {position} on.")
        return found

    def _read(self, record: Record, item: Range) -> bytes:
        try:
            data = b"".join(self._files.read(record.offsets[item.slot] + item.start, item.end - item.start))
        except OSError as error:
            raise StoreError(f"{self._path}: record {record.name!r} cannot be read: {error_text(error)}.") from error
        if item.digest is None or xxhash.xxh3_64_intdigest(data) != item.digest:
            raise CorruptionError(
                f"Record {record.name!r}: bytes {item.start} to {item.end} in {self._path} are not those committed. "
                "Check the disk, and resume from another checkpoint."
            )
        return data
