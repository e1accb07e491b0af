"""Read the committed state of a store back from its files, without any engine, and name what is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from tiered_zero.errors import StoreError
from tiered_zero.store import manifest
from tiered_zero.store.manifest import Manifest
from tiered_zero.store.record_reader import Broken, RecordFiles, RecordReader
from tiered_zero.store.stripes import DATA_NAME, Stripes, check_data_files

_ATTEMPTS = 3


@final
@dataclass(frozen=True, kw_only=True)
class Verified:
    """The outcome for one run."""

    step: int
    num_records: int
    nbytes: int
    broken: list[Broken]


def verify_run(
    paths: Sequence[Path], step: int | None = None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> Verified | None:
    """Check the committed state of the run in `paths`; None if it has none. A live run may commit at the same time.

    `step`, `metadata`: see `SwapStore.recover`; the state may be one that is only prepared, and that another store has
    decided. What was found counts if the manifest is the same at the end, for extents that it names are not rewritten
    before. Raises StoreError for a damaged manifest, and for a data file that is missing or cut off.
    """
    for _ in range(_ATTEMPTS):
        state = _find_state(paths[0], step, metadata)
        if state is None:
            return None
        check_data_files(paths, Stripes(state.weights), state.capacity_nbytes)
        reader = RecordReader([RecordFiles(paths=[path / DATA_NAME for path in paths], contents=state.contents)])
        try:
            broken = reader.damage()
        finally:
            reader.close()
        if _find_state(paths[0], step, metadata) == state:
            nbytes = sum(item.end - item.start for ranges in state.ranges.values() for item in ranges)
            return Verified(step=state.step, num_records=len(state.records), nbytes=nbytes, broken=broken)
    raise StoreError(f"{paths[0]} commits faster than it can be read; verify it when its run has ended.")


def _find_state(path: Path, step: int | None, metadata: Mapping[str, Any]) -> Manifest | None:
    committed, prepared = manifest.load(path)
    if step is None:
        return committed
    states = (state for state in (committed, prepared) if state is not None)
    return next((state for state in states if state.is_state(step, metadata)), None)
