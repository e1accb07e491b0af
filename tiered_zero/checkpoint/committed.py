"""The newest in-place commit of a run that ended, or of this process, read past its store: nothing there is changed."""

from __future__ import annotations

import fcntl
import os
from collections import OrderedDict
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, final

import xxhash

from tiered_zero.checkpoint.commit import METADATA_KEYS
from tiered_zero.checkpoint.manifest import TagManifest, check_store_location
from tiered_zero.checkpoint.places import SOURCE_ITEMSIZES, Places, RecordName, Source
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.store.checked_json import check_fields, check_kind
from tiered_zero.store.descriptors import error_text, open_file, opened_directory
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.manifest import load as load_manifests
from tiered_zero.store.owner import OWNER_NAME, Owner, boot_id, read_owner, start_ticks
from tiered_zero.store.stripes import DATA_NAME, Stripes

_NUM_CACHED = 8
"""Verified ranges, of at most 1 MiB, that are kept: neighbours in an array begin in the same one."""


@final
class CommittedState:
    """The newest committed state of a swap directory. Use `open`; `close` ends it, as does the end of a `with` block.

    `manifest`: of the checkpoint, without parts: `places` has them. `step`: which it really is. `paths`: of each store.
    """

    def __init__(self, stores: list[_Files], metadata: dict[str, Any], resources: ExitStack, path: Path) -> None:
        self._stores = stores
        self._resources = resources
        self._path = path
        self.paths = [store.paths for store in stores]
        self.manifest = TagManifest.from_body(metadata["checkpoint"], path)
        self.step = self.manifest.step
        self.layout: str = metadata["layout"]
        self.initialized: list[int] = metadata["initialized"]
        try:
            self.places = Places.from_body({"records": metadata["records"], "places": metadata["places"]})
            self._records = [self._find(name) for name in self.places.records]
            self._check()
        except ValueError as error:
            raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> CommittedState:
        """`path`: any directory of the run. Raises StoreError: nothing committed, damaged, or the owner lives (unless
        it is this process)."""
        owner = read_owner(Path(path))
        first = Path(owner.paths[0])
        with ExitStack() as resources:
            _lock(first, resources)
            metadata = read_metadata(first)
            stores = [_Files([Path(one) for one in metadata["stores"][0]["paths"]], metadata["step"], resources)]
            if stores[0].paths != [Path(one) for one in owner.paths]:
                raise StoreError(f"{first} belongs to other directories than its commit says; it was copied or moved.")
            for item in metadata["stores"][1:]:
                other = [Path(one) for one in item["paths"]]
                _lock(other[0], resources)
                stores.append(_Files(other, metadata["step"], resources))
                if stores[-1].manifest.run_id != item["run_id"]:
                    raise StoreError(f"{other[0]} belongs to another run than the commit in {first}.")
            state = cls(stores, metadata, resources, first)
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

    def _find(self, name: RecordName) -> tuple[_Files, Record]:
        """Raises ValueError."""
        if name.store >= len(self._stores) or name.name not in self._stores[name.store].records:
            raise ValueError(f"there is no record {name.name[:80]!a}")
        store = self._stores[name.store]
        return store, store.records[name.name]

    def _check(self) -> None:
        """Raises ValueError where a tensor does not lie inside of its records."""
        if self.places.places.keys() != self.manifest.tensors.keys():
            raise ValueError("expected a place of each tensor")
        for key, place in self.places.places.items():
            entry = self.manifest.tensors[key]
            if (place.parts[-1].stop if place.parts else 0) != entry.numel:
                raise ValueError(f"{key[:200]!a}: expected places of {entry.numel} elements")
            itemsizes = SOURCE_ITEMSIZES[place.form]
            for part in place.parts:
                for source, itemsize in zip(part.sources, itemsizes, strict=True):
                    nbytes = (part.stop - part.start) * (itemsize or entry.itemsize)
                    if source.offset + nbytes > self._records[source.record][1].extent_nbytes:
                        raise ValueError(f"{key[:200]!a} lies outside of its record")


def read_metadata(path: Path) -> dict[str, Any]:
    """What the newest commit in a run's first directory says, and its "step". Raises StoreError."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    try:
        metadata = check_fields(
            dict(committed.metadata),
            {**dict.fromkeys(METADATA_KEYS, dict), "records": list, "initialized": list, "layout": str, "stores": list},
        )
        for index in metadata["initialized"]:
            check_kind("initialized", index, int)
        if not 1 <= len(metadata["stores"]) <= 2:
            raise ValueError("stores: expected one or two")
        for store in metadata["stores"]:
            check_store_location(store)
    except ValueError as error:
        raise StoreError(f"{path} holds no in-place commit of a run ({error}).") from error
    return {**metadata, "step": committed.step}


def _lock(path: Path, resources: ExitStack) -> None:
    """Keep other processes from adopting the directory while it is read. Raises StoreError where its owner lives."""
    owner = read_owner(path)
    try:
        with opened_directory(path) as directory:
            fd = open_file(OWNER_NAME, directory, uid=os.fstat(directory).st_uid)
    except OSError as error:
        raise StoreError(f"{path} cannot be read: {error_text(error)}.") from error
    resources.callback(os.close, fd)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        if _is_this_process(owner):
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
    """The data files of one store, and its manifest of `step`: committed, or prepared where another store decided."""

    def __init__(self, paths: list[Path], step: int, resources: ExitStack) -> None:
        self.paths = paths
        found = [one for one in load_manifests(paths[0]) if one is not None]
        chosen = next((one for one in found if one.step == step), None)
        if chosen is None:
            raise StoreError(f"{paths[0]} does not hold step {step}; it has the steps {[one.step for one in found]}.")
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
