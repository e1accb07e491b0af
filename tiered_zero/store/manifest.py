"""The durable table of a committed store: which record rests where, with what checksums.

Two files in the run's first directory: `manifest`, the committed state, and `manifest.next`, one that is prepared.
Each is a header line (format, version, bytes and xxh3 of the body) and a JSON body; a torn one is known by its header.
`prepare` makes the next one durable beside the current one, `confirm` renames it over: several processes that prepare,
meet at a barrier and then confirm always have one step in common.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

import xxhash

from tiered_zero.errors import StoreError
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.store.ranges import Range

MANIFEST_NAME = "manifest"
NEXT_NAME = "manifest.next"
_FORMAT = "tiered_zero.store"
_VERSION = 1


@final
@dataclass(frozen=True)
class Record:
    """A named home for bytes in a store.

    `nbytes`: what was asked for; `extent_nbytes`: that in whole pages, the limit of reads and writes.
    `offsets`: where each slot starts in the store: one for scratch, two for committed.
    `dtype`, `shape`: kept for the caller, never interpreted.
    """

    name: str
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    committed: bool
    offsets: tuple[int, ...]

    @property
    def extent_nbytes(self) -> int:
        return align_up(self.nbytes, PAGE_NBYTES)


@final
@dataclass(frozen=True)
class Manifest:
    """One committed state. `metadata`: the caller's, JSON only. `ranges`: by record name."""

    run_id: str
    step: int
    capacity_nbytes: int
    weights: tuple[float, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    ranges: dict[str, list[Range]] = field(default_factory=dict)

    def encode(self) -> bytes:
        """Raises StoreError where `metadata` is more than JSON."""
        fields = vars(self) | {"records": [vars(record) for record in self.records]}
        try:
            body = json.dumps(fields, separators=(",", ":")).encode()
        except (TypeError, ValueError) as error:
            raise StoreError(
                f"The metadata of a commit must be JSON (dicts, lists, text, numbers): {error}."
            ) from error
        header = {"format": _FORMAT, "version": _VERSION, "nbytes": len(body), "xxh3": xxhash.xxh3_64_hexdigest(body)}
        return json.dumps(header).encode() + b"\n" + body + b"\n"

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Raises StoreError: not a manifest, of another version, or damaged."""
        line, _, rest = data.partition(b"\n")
        try:
            header = json.loads(line)
            named, version = header["format"], header["version"]
            if named != _FORMAT or version != _VERSION:
                raise StoreError(f"{path}: expected {_FORMAT} version {_VERSION}, found {named} version {version}.")
            body = rest[: header["nbytes"]]
            if len(body) != header["nbytes"] or xxhash.xxh3_64_hexdigest(body) != header["xxh3"]:
                raise StoreError(f"{path} is damaged: its checksum does not match. This state cannot be recovered.")
            fields = json.loads(body)
            fields["weights"] = tuple(fields["weights"])
            fields["records"] = tuple(
                Record(**{**item, "shape": tuple(item["shape"]), "offsets": tuple(item["offsets"])})
                for item in fields["records"]
            )
            fields["ranges"] = {name: [Range(*item) for item in items] for name, items in fields["ranges"].items()}
            return cls(**fields)
        except (ValueError, KeyError, TypeError) as error:
            raise StoreError(f"{path} is not a manifest of a swap store ({error}).") from error


def prepare(directory: Path, data: bytes) -> None:
    """Write the next (encoded) manifest durably beside the current one. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(directory / NEXT_NAME, flags, 0o600)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    sync_directory(directory)


def confirm(directory: Path) -> None:
    """The prepared manifest becomes the committed one, durably. Raises OSError."""
    os.rename(directory / NEXT_NAME, directory / MANIFEST_NAME)
    sync_directory(directory)


def discard(directory: Path) -> None:
    """Drop a prepared manifest, durably."""
    with suppress(FileNotFoundError):
        os.unlink(directory / NEXT_NAME)
        sync_directory(directory)


def load(directory: Path) -> tuple[Manifest | None, Manifest | None]:
    """The committed and the prepared manifest. A torn prepared one counts as absent; a damaged committed one raises."""
    committed, prepared = directory / MANIFEST_NAME, directory / NEXT_NAME
    current = Manifest.decode(committed.read_bytes(), committed) if committed.exists() else None
    try:
        return current, Manifest.decode(prepared.read_bytes(), prepared)
    except (FileNotFoundError, StoreError):
        return current, None


def sync_directory(directory: Path) -> None:
    """Make created, renamed and removed names durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
