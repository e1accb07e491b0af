"""The newest in-place commit of a run that ended, or of this run, read past its stores: nothing there is changed."""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import xxhash

from tiered_zero.checkpoint.commit import COMMIT_ID, DECIDED_BY, METADATA_KEYS, RANK_KEYS
from tiered_zero.checkpoint.manifest import TagManifest, check_store_location
from tiered_zero.checkpoint.places import SOURCE_ITEMSIZES, Places, RecordName, Source
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.store.checked_json import Kinds, check_fields, check_kind
from tiered_zero.store.descriptors import error_text, open_file, opened_directory
from tiered_zero.store.manifest import MANIFEST_NAME, Manifest, Record, choose
from tiered_zero.store.manifest import load as load_manifests
from tiered_zero.store.owner import OWNER_NAME, Owner, boot_id, read_owner, start_ticks
from tiered_zero.store.stripes import DATA_NAME, Stripes

_NUM_CACHED = 8
"""Verified ranges, of at most 1 MiB, that are kept: neighbours in an array begin in the same one."""


@final
@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What one rank has committed. `stores`: run id and paths of each, that of the state first. `layout`: of
    commit_layout; `initialized`: sub-groups that have state."""

    stores: list[dict[str, Any]]
    layout: str
    initialized: list[int]


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
        try:
            fields = check_fields(metadata, _METADATA_KINDS)
            ranks = [_rank_part(item) for item in fields["ranks"]]
            places = Places.from_body({"records": fields["records"], "places": fields["places"]})
            num_stores = sum(len(rank.stores) for rank in ranks)
            if any(record.store >= num_stores for record in places.records):
                raise ValueError("records: there is no such store")
            manifest = TagManifest.from_body(fields["checkpoint"], path)
            _check_places(manifest, places)
        except ValueError as error:
            raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error
        return cls(path=path, commit_id=fields[COMMIT_ID], manifest=manifest, places=places, ranks=ranks)


@final
class CommittedState:
    """The newest committed state of a run, in the swap directories of all its ranks. Use `open`; `close` ends it, as
    does the end of a `with` block. `commit`: what it says of itself."""

    def __init__(self, commit: Commit, stores: list[_Files], resources: ExitStack) -> None:
        self.commit = commit
        self.manifest, self.places = commit.manifest, commit.places
        self.step = commit.manifest.step
        self._resources = resources
        try:
            self._records = [_find(stores, name) for name in self.places.records]
            self._check()
        except ValueError as error:
            raise StoreError(f"{commit.path} holds no in-place commit of a run ({error}).") from error

    @classmethod
    def open(cls, path: str | os.PathLike[str], own_runs: Container[str] = ()) -> CommittedState:
        """`path`: any directory of the run. `own_runs`: ids of the stores of this run's ranks, which make no commit
        while this is open. Raises StoreError: nothing committed, damaged, not all of it here, or its owner lives
        (unless it is this run)."""
        commit = Commit.read(Path(read_owner(Path(path)).paths[0]))
        with ExitStack() as resources:
            state = cls(commit, open_stores(commit.stores, commit, resources, own_runs), resources)
            state._resources = resources.pop_all()
            return state

    def __enter__(self) -> CommittedState:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files. Idempotent."""
        self._resources.close()

    def read(self, source: Source, nbytes: int) -> bytearray:
        """`nbytes` from a source, verified. Raises CorruptionError, StoreError, TransferError."""
        store, record = self._records[source.record]
        return store.read(record, source.offset, nbytes)

    def _check(self) -> None:
        """Raises ValueError where a tensor does not lie inside of its records."""
        for key, place in self.places.places.items():
            entry, itemsizes = self.manifest.tensors[key], SOURCE_ITEMSIZES[place.form]
            for part in place.parts:
                for source, itemsize in zip(part.sources, itemsizes, strict=True):
                    nbytes = (part.stop - part.start) * (itemsize or entry.itemsize)
                    if source.offset + nbytes > self._records[source.record][1].extent_nbytes:
                        raise ValueError(f"{key[:200]!a} lies outside of its record")


def _find(stores: Sequence[_Files], name: RecordName) -> tuple[_Files, Record]:
    """Raises ValueError."""
    store = stores[name.store]
    if name.name not in store.records:
        raise ValueError(f"there is no record {name.name[:80]!a}")
    return store, store.records[name.name]


def _check_places(manifest: TagManifest, places: Places) -> None:
    """Raises ValueError where a tensor has not its places."""
    if places.places.keys() != manifest.tensors.keys():
        raise ValueError("expected a place of each tensor")
    for key, place in places.places.items():
        if (place.parts[-1].stop if place.parts else 0) != (numel := manifest.tensors[key].numel):
            raise ValueError(f"{key[:200]!a}: expected places of {numel} elements")


_METADATA_KINDS: dict[str, Kinds] = {
    **dict.fromkeys(METADATA_KEYS, dict),
    **{COMMIT_ID: str, "records": list, "ranks": list},
}
_RANK_KINDS: dict[str, Kinds] = {**dict.fromkeys(RANK_KEYS, list), "layout": str}


def _rank_part(item: Any) -> RankPart:
    """Raises ValueError."""
    fields = check_fields(item, _RANK_KINDS)
    for index in fields["initialized"]:
        check_kind("initialized", index, int)
    if not 1 <= len(fields["stores"]) <= 2:
        raise ValueError("stores: expected one or two of each rank")
    return RankPart(**{**fields, "stores": [check_store_location(store) for store in fields["stores"]]})


def read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """What the newest commit of a run says, and the first directory of the store that has decided it. `path`: the first
    of any store of the run. Raises StoreError."""
    committed = _committed(path)
    if DECIDED_BY in committed.metadata:
        try:
            first = check_store_location(committed.metadata[DECIDED_BY])
        except ValueError as error:
            raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error
        path = Path(first["paths"][0])
        committed = _committed(path)
        if committed.run_id != first["run_id"]:
            raise StoreError(f"{path} belongs to another run than the one whose commit is looked for.")
    ranks = committed.metadata.get("ranks")
    if not ranks or type(ranks) is not list:
        raise StoreError(f"{path} holds no in-place commit of a run, or one of another version.")
    first = _rank_part_of(path, ranks[0]).stores[0]
    if (first["run_id"], Path(first["paths"][0])) != (committed.run_id, path):
        raise StoreError(f"{path} belongs to other directories than its commit says; it was copied or moved.")
    return path, dict(committed.metadata)


def _rank_part_of(path: Path, item: Any) -> RankPart:
    try:
        return _rank_part(item)
    except ValueError as error:
        raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error


def _committed(path: Path) -> Manifest:
    """Raises StoreError."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    return committed


def find_missing(committed: Manifest) -> str:
    """Say which part of a commit is not here, of the store that decided it; empty: none. Raises StoreError."""
    ranks, own = committed.metadata.get("ranks"), {COMMIT_ID: committed.metadata.get(COMMIT_ID)}
    for item in ranks if type(ranks) is list else ():
        for store in _rank_part_of(Path(MANIFEST_NAME), item).stores:
            first = Path(store["paths"][0])
            found = [one for one in load_manifests(first) if one is not None and one.run_id == store["run_id"]]
            if not any(one.is_state(committed.step, own) for one in found):
                return f"a part of it rests in {first}, which is not here, or does not hold step {committed.step}"
    return ""


def is_committed(tag: TagManifest, committed: Manifest) -> bool:
    """Whether the store that a tag points to has `committed` what the tag was written for."""
    return tag.swap is not None and committed.is_state(tag.step, {COMMIT_ID: tag.swap[COMMIT_ID]})


def open_stores(
    locations: Sequence[Mapping[str, Any]], commit: Commit, resources: ExitStack, own_runs: Container[str] = ()
) -> list[_Files]:
    """Open the stores that are at `locations`, of `commit`, and keep other processes from adopting them. Raises
    StoreError."""
    found, step = [], commit.manifest.step
    for location in locations:
        paths = [Path(path) for path in location["paths"]]
        owner = _owner_of(paths[0], step)
        if (owner.run_id, owner.paths) != (location["run_id"], tuple(location["paths"])):
            raise StoreError(
                f"{paths[0]} belongs to another run, or other directories, than the commit of step {step}."
            )
        _lock(paths[0], owner, resources, own_runs)
        found.append(_Files(paths, commit, resources))
        if found[-1].manifest.run_id != owner.run_id:
            raise StoreError(f"{paths[0]} belongs to another run than the commit of step {step}.")
    return found


def _owner_of(path: Path, step: int) -> Owner:
    """Raises StoreError."""
    try:
        return read_owner(path)
    except StoreError as error:
        raise StoreError(
            f"A part of the commit of step {step} rests in {path}, which cannot be read here: {error} As many ranks as "
            "have committed it, each on the host that has its part, go on with it (tiered_zero.checkpoint.in_place and "
            "resume); for others save without in_place."
        ) from error


def _lock(path: Path, owner: Owner, resources: ExitStack, own_runs: Container[str]) -> None:
    """Keep other processes from adopting the directory while it is read. Raises StoreError where its owner lives."""
    try:
        with opened_directory(path) as directory:
            fd = open_file(OWNER_NAME, directory, uid=os.fstat(directory).st_uid)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error_text(error)}.") from error
    resources.callback(os.close, fd)
    try:
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
class _Files:
    """The data files of one store, and its manifest of `commit`: confirmed, or prepared where another store decided."""

    def __init__(self, paths: list[Path], commit: Commit, resources: ExitStack) -> None:
        self.paths = paths
        chosen, _ = choose(paths[0], commit.manifest.step, {COMMIT_ID: commit.commit_id})
        self.manifest: Manifest = chosen
        self.records = {record.name: record for record in chosen.records}
        if len(chosen.weights) != len(paths):
            raise StoreError(f"{paths[0]}: the state is striped over {len(chosen.weights)} paths; found {len(paths)}.")
        self._stripes = Stripes(chosen.weights)
        for record in chosen.records:
            if any(offset + record.extent_nbytes > chosen.capacity_nbytes for offset in record.offsets):
                raise StoreError(f"{paths[0]}: record {record.name[:80]!a} lies outside of its store.")
        self._fds = [_open_data(path, resources) for path in paths]
        for path, fd, nbytes in zip(paths, self._fds, self._stripes.file_nbytes(chosen.capacity_nbytes), strict=True):
            if (size := os.fstat(fd).st_size) < nbytes:
                raise StoreError(f"{path / DATA_NAME} has {size} bytes; expected {nbytes}. It was cut off.")
        self._cache: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def read(self, record: Record, offset: int, nbytes: int) -> bytearray:
        found, position, end = bytearray(nbytes), offset, offset + nbytes
        for item in self.manifest.ranges[record.name]:
            if item.end <= position or item.start >= end:
                continue
            if item.start > position:
                break
            data = self._range(record, item.start, item.end, item.slot, item.digest)
            stop = min(end, item.end)
            found[position - offset : stop - offset] = data[position - item.start : stop - item.start]
            position = stop
        if position < end:
            raise StoreError(f"{self.paths[0]}: record {record.name!r} has no bytes from {position} on.")
        return found

    def _range(self, record: Record, start: int, end: int, slot: int, digest: int | None) -> bytes:
        key = record.name, start
        if (data := self._cache.get(key)) is not None:
            self._cache.move_to_end(key)
            return data
        found = bytearray()
        for index, at, length in self._stripes.pieces(record.offsets[slot] + start, end - start):
            found += self._pread(index, at, length)
        data = bytes(found)
        if digest is None or xxhash.xxh3_64_intdigest(data) != digest:
            raise CorruptionError(
                f"Record {record.name!r}: bytes {start} to {end} in {self.paths[0]} are not those committed. Check the "
                "disk, and resume from another checkpoint."
            )
        self._cache[key] = data
        while len(self._cache) > _NUM_CACHED:
            self._cache.popitem(last=False)
        return data

    def _pread(self, index: int, offset: int, nbytes: int) -> bytearray:
        found = bytearray()
        while len(found) < nbytes:
            try:
                data = os.pread(self._fds[index], nbytes - len(found), offset + len(found))
            except OSError as error:
                raise StoreError(f"{self.paths[index] / DATA_NAME} cannot be read: {error_text(error)}.") from error
            if not data:
                raise StoreError(f"{self.paths[index] / DATA_NAME} ends at offset {offset + len(found)}.")
            found += data
        return found


def _open_data(path: Path, resources: ExitStack) -> int:
    try:
        with opened_directory(path) as directory:
            fd = open_file(DATA_NAME, directory, uid=os.fstat(directory).st_uid)
    except OSError as error:
        raise StoreError(f"{path / DATA_NAME} cannot be read: {error_text(error)}.") from error
    resources.callback(os.close, fd)
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    return fd
