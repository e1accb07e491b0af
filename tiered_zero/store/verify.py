"""Read a store back from its files, without any engine, and name what is broken."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import final

from tiered_zero.errors import StoreError
from tiered_zero.store import manifest
from tiered_zero.store.manifest import Record
from tiered_zero.store.ranges import Range
from tiered_zero.store.stripes import DATA_NAME, Stripes
from tiered_zero.store.tickets import digest

_ATTEMPTS = 3


@final
@dataclass(frozen=True)
class Broken:
    """`nbytes` of `record`, resting at `offset` of `path`, cannot be trusted. `reason`: what was found."""

    record: str
    path: str
    offset: int
    nbytes: int
    reason: str


@final
@dataclass(frozen=True)
class Verified:
    """The outcome for one run. `nbytes_unverifiable`: read without error, but they have no checksum."""

    step: int
    num_records: int
    nbytes: int
    nbytes_unverifiable: int
    broken: list[Broken]


def verify_run(paths: Sequence[Path]) -> Verified | None:
    """Check the committed state of the run in `paths`; None if it has none. A live run may commit meanwhile.

    Extents that the durable manifest names are not rewritten before the next one is durable, so what was found
    counts if the manifest is still the same at the end. Raises StoreError for a damaged manifest.
    """
    for _ in range(_ATTEMPTS):
        state, _ = manifest.load(paths[0])
        if state is None:
            return None
        records = [(record, state.ranges[record.name]) for record in state.records]
        broken = find_broken(paths, Stripes(state.weights), records)
        if manifest.load(paths[0])[0] == state:
            items = [item for _, ranges in records for item in ranges]
            unverifiable = sum(item.end - item.start for item in items if item.digest is None)
            nbytes = sum(item.end - item.start for item in items)
            return Verified(state.step, len(records), nbytes, unverifiable, broken)
    raise StoreError(f"{paths[0]} commits faster than it can be read; verify it when its run has ended.")


def find_broken(
    paths: Sequence[Path], stripes: Stripes, records: Iterable[tuple[Record, Iterable[Range]]]
) -> list[Broken]:
    """Read every range (past the page cache where the kernel lets go of it) and compare its checksum."""
    broken = []
    with ExitStack() as stack:
        names = [path / DATA_NAME for path in paths]
        fds: list[int | None] = []
        for name in names:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:
                fds.append(None)
                continue
            fds.append(fd)
            stack.callback(os.close, fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        for record, ranges in records:
            for item in ranges:
                address, nbytes = record.offsets[item.slot] + item.start, item.end - item.start
                first = next(stripes.pieces(address, nbytes))
                data = bytearray()
                try:
                    for index, at, length in stripes.pieces(address, nbytes):
                        data += _read(fds[index], at, length)
                    reason = "" if item.digest in (None, digest(data)) else "its checksum does not match"
                except OSError as error:
                    reason = f"it cannot be read: {error}"
                if reason:
                    path = str(names[first.file_index])
                    broken.append(Broken(record.name, path, first.file_offset, nbytes, reason))
    return broken


def _read(fd: int | None, offset: int, nbytes: int) -> bytes:
    if fd is None:
        raise FileNotFoundError("its file is missing")
    data = b""
    while len(data) < nbytes:
        more = os.pread(fd, nbytes - len(data), offset + len(data))
        if not more:
            raise OSError(f"the file ends at offset {offset + len(data)}")
        data += more
    return data
