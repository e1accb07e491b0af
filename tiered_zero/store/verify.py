"""Read a store back from its files, without any engine, and name what is broken."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

import xxhash

from tiered_zero.errors import StoreError
from tiered_zero.store import manifest
from tiered_zero.store.manifest import Manifest, Record
from tiered_zero.store.ranges import Range
from tiered_zero.store.stripes import DATA_NAME, DataFiles, Stripes

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
    """Read every range and compare its checksum. Raises StoreError where there are more or fewer paths than stripes."""
    broken = []
    with ExitStack() as stack:
        files = DataFiles(paths, stripes, stack)
        for record, ranges in records:
            for item in ranges:
                address, nbytes = record.offsets[item.slot] + item.start, item.end - item.start
                first = next(stripes.pieces(address, nbytes))
                hashing = xxhash.xxh3_64()
                try:
                    for data in files.read(address, nbytes):
                        hashing.update(data)
                    reason = "" if item.digest in (None, hashing.intdigest()) else "its checksum does not match"
                except OSError as error:
                    reason = f"it cannot be read: {error}"
                if reason:
                    path = str(paths[first.file_index] / DATA_NAME)
                    broken.append(
                        Broken(record=record.name, path=path, offset=first.file_offset, nbytes=nbytes, reason=reason)
                    )
    return broken
