"""Read a store back from its files, without any engine, and name what is broken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import xxhash

from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB
from tiered_zero.store import manifest
from tiered_zero.store.descriptors import error_text, open_file, opened_directory
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range
from tiered_zero.store.stripes import DATA_NAME, Stripes

_ATTEMPTS = 3


@final
@dataclass(frozen=True, kw_only=True)
class Broken:
    """`nbytes` of `record`, resting at `offset` of `path`, cannot be trusted. `reason`: what was found."""

    record: str
    path: str
    offset: int
    nbytes: int
    reason: str


@final
@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for one run. `nbytes_unverifiable`: read without error, but they have no checksum."""

    step: int
    num_records: int
    nbytes: int
    nbytes_unverifiable: int
    broken: list[Broken]


def verify_run(
    paths: Sequence[Path], step: int | None = None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> Verified | None:
    """Check the committed state of the run in `paths`; None if it has none. A live run may commit at the same time.

    `step`, `metadata`: of that state, as of `SwapStore.recover`: it may be one that is only prepared, where another
    store has decided it.

    Extents that the durable manifest names are not rewritten before the next one is durable, so what was found
    counts if the manifest is still the same at the end. Raises StoreError for a damaged manifest.
    """
    for _ in range(_ATTEMPTS):
        state = _find_state(paths[0], step, metadata)
        if state is None:
            return None
        records = [(record, state.ranges[record.name]) for record in state.records]
        broken = find_broken(paths, Stripes(state.weights), records)
        if _find_state(paths[0], step, metadata) == state:
            items = [item for _, ranges in records for item in ranges]
            unverifiable = sum(item.end - item.start for item in items if item.digest is None)
            nbytes = sum(item.end - item.start for item in items)
            return Verified(
                step=state.step,
                num_records=len(records),
                nbytes=nbytes,
                nbytes_unverifiable=unverifiable,
                broken=broken,
            )
    raise StoreError(f"{paths[0]} commits faster than it can be read; verify it when its run has ended.")


def _find_state(path: Path, step: int | None, metadata: Mapping[str, Any]) -> Manifest | None:
    committed, prepared = manifest.load(path)
    if step is None:
        return committed
    states = (state for state in (committed, prepared) if state is not None)
    return next((state for state in states if state.is_state(step, metadata)), None)


def find_broken(
    paths: Sequence[Path], stripes: Stripes, records: Iterable[tuple[Record, Iterable[Range]]]
) -> list[Broken]:
    """Read every range (past the page cache where the kernel lets go of it) and compare its checksum. Raises StoreError
    where there are more or fewer paths than stripes."""
    if len(paths) != len(stripes.weights):
        raise StoreError(f"{paths[0]}: the state is striped over {len(stripes.weights)} paths; found {len(paths)}.")
    broken = []
    with ExitStack() as stack:
        files = [_DataFile(path / DATA_NAME, stack) for path in paths]
        for record, ranges in records:
            for item in ranges:
                address, nbytes = record.offsets[item.slot] + item.start, item.end - item.start
                first = next(stripes.pieces(address, nbytes))
                hashing = xxhash.xxh3_64()
                try:
                    for index, at, length in stripes.pieces(address, nbytes):
                        for data in files[index].read(at, length):
                            hashing.update(data)
                    reason = "" if item.digest in (None, hashing.intdigest()) else "its checksum does not match"
                except OSError as error:
                    reason = f"it cannot be read: {error}"
                if reason:
                    path = str(files[first.file_index].path)
                    broken.append(
                        Broken(record=record.name, path=path, offset=first.file_offset, nbytes=nbytes, reason=reason)
                    )
    return broken


@final
class _DataFile:
    """One data file, opened where it is a file of its directory's owner; `stack` closes it."""

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.path = path
        self._fd = -1
        self._missing = "its file is missing"
        try:
            with opened_directory(path.parent) as directory:
                self._fd = open_file(path.name, directory, uid=os.fstat(directory).st_uid)
        except FileNotFoundError:
            return
        except (OSError, StoreError) as error:
            self._missing = error_text(error)
            return
        stack.callback(os.close, self._fd)
        os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def read(self, offset: int, nbytes: int) -> Iterator[bytes]:
        """Pieces of at most 1 MiB. Raises OSError."""
        if self._fd < 0:
            raise OSError(self._missing)
        end = offset + nbytes
        while offset < end:
            data = os.pread(self._fd, min(MIB, end - offset), offset)
            if not data:
                raise OSError(f"the file ends at offset {offset}")
            yield data
            offset += len(data)
