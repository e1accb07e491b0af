"""Compare the committed state of one store with its checksums; the store may be open in this process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tiered_zero.record import manifest
from tiered_zero.record.data_files import DATA_NAME, RecordFiles, RecordReader, Stripes, check_data_files


def store_damage(paths: Sequence[str | Path]) -> list[str]:
    """`paths`: the store's directories. Raises StoreError if a data file or the committed state is missing."""
    state, _ = manifest.choose(Path(paths[0]), None)
    directories = [Path(path) for path in paths]
    check_data_files(directories, Stripes(state.weights), state.capacity_nbytes)
    reader = RecordReader([RecordFiles(paths=[path / DATA_NAME for path in directories], contents=state)])
    try:
        return reader.damage()
    finally:
        reader.close()
