"""The durable table of a committed store: which record rests where, with what checksums.

Two files in the run's first directory: `manifest`, the committed state, and `manifest.next`, one that is prepared.
Each is a header line (format, version, bytes and xxh3 of the body) and a JSON body; a torn one is known by its header.
`prepare` makes the next one durable next to the current one, `confirm` renames it over: several processes that prepare,
meet at a barrier and then confirm always have one step in common.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

from tiered_zero.errors import StoreError
from tiered_zero.sizes import PAGE_NBYTES, align_up, format_nbytes
from tiered_zero.store.checked_json import (
    MOST_DIGEST,
    MOST_INTEGER,
    check_fields,
    check_integers,
    check_kind,
    decode_checked,
    encode_checked,
    kinds_of,
)
from tiered_zero.store.files import error_text, open_directory, read_file, sync_directory, write_and_sync
from tiered_zero.store.ranges import Range
from tiered_zero.system.descriptor import opened

MANIFEST_NAME = "manifest"
NEXT_NAME = "manifest.next"
_FORMAT = "tiered_zero.store"
_VERSION = 1

_MOST_NBYTES = 1 << 28
"""Of a manifest; a range of 1 MiB takes some 45 bytes, so that this is enough for 5 TiB of committed records."""


@final
@dataclass(frozen=True, kw_only=True)
class Record:
    """A named region of a store.

    `nbytes`: what was asked for; `extent_nbytes`: that in whole pages, the limit of reads and writes.
    `offsets`: where each slot starts in the store: one for scratch, two for committed, of which one may be missing
    while nothing was written twice.
    """

    name: str
    nbytes: int
    committed: bool
    offsets: tuple[int, ...]

    @property
    def extent_nbytes(self) -> int:
        """Bytes of one slot: `nbytes` in whole pages."""
        return align_up(self.nbytes, PAGE_NBYTES)


@final
@dataclass(frozen=True, kw_only=True)
class Contents:
    """The records of a store, in data files of `capacity_nbytes`, striped by `weights`. `ranges`: by record name."""

    capacity_nbytes: int
    weights: tuple[float, ...]
    records: tuple[Record, ...] = ()
    ranges: dict[str, list[Range]] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        return vars(self) | {"records": [vars(record) for record in self.records]}

    @classmethod
    def from_body(cls, body: Any) -> Contents:
        """Build from JSON values that may be hostile. Raises ValueError."""
        fields = check_fields(body, _CONTENTS_KINDS)
        if fields["capacity_nbytes"] < 0:
            raise ValueError("expected a capacity of 0 or more")
        records = tuple(_record(item) for item in fields["records"])
        by_name = {record.name: record for record in records}
        if len(by_name) != len(records) or fields["ranges"].keys() != by_name.keys():
            raise ValueError("expected records of different names, and the ranges of each")
        for record in records:
            if any(offset + record.extent_nbytes > fields["capacity_nbytes"] for offset in record.offsets):
                raise ValueError(f"record {record.name[:80]!a} lies outside of its store")
        return cls(
            capacity_nbytes=fields["capacity_nbytes"],
            weights=_weights(fields["weights"]),
            records=records,
            ranges={name: _ranges(by_name[name], items) for name, items in fields["ranges"].items()},
        )


_CONTENTS_KINDS = kinds_of(Contents)


@final
@dataclass(frozen=True, kw_only=True)
class Manifest:
    """One committed state. `metadata`: the caller's, JSON only. `ranges`: by record name."""

    run_id: str
    step: int
    capacity_nbytes: int
    weights: tuple[float, ...]
    metadata: dict[str, Any] = field(default_factory=dict)
    records: tuple[Record, ...] = ()
    ranges: dict[str, list[Range]] = field(default_factory=dict)

    @property
    def contents(self) -> Contents:
        """The records, and where they rest."""
        return Contents(**{name: getattr(self, name) for name in _CONTENTS_KINDS})

    def is_state(self, step: int | None, metadata: Mapping[str, Any] = MappingProxyType({})) -> bool:
        """Whether it is that of `step`, None for any, with these items in its metadata."""
        return step in (None, self.step) and all(self.metadata.get(key) == item for key, item in metadata.items())

    def encode(self) -> bytes:
        """Raises StoreError for a state that could not be read back."""
        if type(self.step) is not int or abs(self.step) > MOST_INTEGER:
            raise StoreError(f"A commit's step must be a 64-bit integer; found {self.step!r}.")
        fields = vars(self) | {"records": [vars(record) for record in self.records]}
        try:
            data = encode_checked(_FORMAT, _VERSION, fields)
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(
                f"The metadata of a commit must be JSON (dicts, lists, text, numbers): {error}."
            ) from error
        if len(data) > _MOST_NBYTES:
            raise StoreError(
                f"The manifest of a commit takes {format_nbytes(len(data))}; at most {format_nbytes(_MOST_NBYTES)} can "
                "be read back. Commit less metadata, or fewer and larger records."
            )
        return data

    @classmethod
    def decode(cls, data: bytes, path: Path) -> Manifest:
        """Raises StoreError: not a manifest, of another version, or damaged."""
        try:
            return cls._decode(data, path)
        except ValueError as error:
            raise StoreError(f"{path} is not a manifest of a swap store ({error}).") from error

    @classmethod
    def _decode(cls, data: bytes, path: Path) -> Manifest:
        """Raises StoreError, and ValueError for what no store writes."""
        fields = check_fields(decode_checked(data, path, _FORMAT, _VERSION), _MANIFEST_KINDS)
        contents = Contents.from_body({name: fields[name] for name in _CONTENTS_KINDS})
        return cls(**{**fields, **vars(contents)})


def _weights(items: list[Any]) -> tuple[float, ...]:
    for item in items:
        check_kind("weights", item, (float, int))
    if not items or min(items) <= 0:
        raise ValueError("weights: expected one number > 0 for each path")
    return tuple(float(item) for item in items)


_MANIFEST_KINDS, _RECORD_KINDS = map(kinds_of, (Manifest, Record))

_UNREAD = {"dtype", "shape"}
"""Fields of a record that an earlier version has written, and that nothing reads."""


def _record(item: Any) -> Record:
    if type(item) is dict:
        item = {name: value for name, value in item.items() if name not in _UNREAD}
    fields = check_fields(item, _RECORD_KINDS)
    check_integers("offsets", fields["offsets"])
    offsets = tuple(fields["offsets"])
    if fields["nbytes"] <= 0 or len(offsets) not in (1, 1 + fields["committed"]):
        raise ValueError(f"record {fields['name'][:80]!a}: expected bytes, and one offset for each of its slots")
    if any(at % PAGE_NBYTES for at in offsets):
        raise ValueError(f"record {fields['name'][:80]!a}: expected offsets in whole pages")
    return Record(**{**fields, "offsets": offsets})


def _ranges(record: Record, items: Any) -> list[Range]:
    """In order, disjoint, in whole pages, and inside of the record."""
    check_kind("ranges", items, list)
    ranges, last = [], 0
    for item in items:
        check_kind("ranges", item, (list, Range))
        if len(item) != 4:
            raise ValueError("ranges: expected start, end, slot and checksum of each")
        start, end, slot, checksum = item
        check_integers("ranges", (start, end, slot))
        check_integers("ranges: checksum", () if checksum is None else (checksum,), MOST_DIGEST)
        if not last <= start < end <= record.extent_nbytes or start % PAGE_NBYTES or end % PAGE_NBYTES:
            raise ValueError(f"ranges of {record.name[:80]!a}: {start} to {end} is out of order or outside of it")
        if slot >= len(record.offsets):
            raise ValueError(f"ranges of {record.name[:80]!a}: there is no slot {slot}")
        ranges.append(Range(start, end, slot, checksum))
        last = end
    return ranges


def prepare(directory: Path, data: bytes) -> None:
    """Write the next (encoded) manifest durably, next to the current one. Raises OSError."""
    write_next(directory, data)
    sync_directory(directory)


def write_next(directory: Path, data: bytes) -> None:
    """Write the next manifest, and make its bytes durable, but not its name: `confirm` renames it. Raises OSError."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with opened(directory / NEXT_NAME, flags, 0o600) as fd:
        write_and_sync(fd, [data])


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
    """The committed and the prepared manifest. A torn prepared one counts as absent; a damaged committed one raises
    StoreError, as does a directory that cannot be read."""
    try:
        with open_directory(directory) as fd:
            return load_at(fd, directory, os.fstat(fd).st_uid)
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise StoreError(f"{directory} cannot be read: {error}.") from error


def choose(
    directory: Path, step: int | None, metadata: Mapping[str, Any] = MappingProxyType({})
) -> tuple[Manifest, bool]:
    """The committed state, or that of `step` with these items in its metadata, and whether it is the committed one
    rather than prepared. Raises StoreError if it is not there."""
    committed, prepared = load(directory)
    if committed is not None and committed.is_state(step, metadata):
        return committed, True
    if prepared is not None and step is not None and prepared.is_state(step, metadata):
        return prepared, False
    wanted = "a committed state" if step is None else f"the state of step {step}"
    steps = sorted({state.step for state in (committed, prepared) if state is not None})
    others = ", of other commits" if step in steps else ""
    advice = (
        " All parts of a commit are of one step: put the directory that is behind back as the commit left it, or go on "
        "from another checkpoint."
    )
    raise StoreError(f"{directory} does not hold {wanted}; it has the steps {steps}{others}.{advice if steps else ''}")


def load_at(dir_fd: int, directory: Path, uid: int) -> tuple[Manifest | None, Manifest | None]:
    """`load` of the directory that is open at `dir_fd`; the files must be user `uid`'s. Raises OSError, StoreError."""
    current = None
    with suppress(FileNotFoundError):
        current = _read(dir_fd, directory / MANIFEST_NAME, uid)
    try:
        return current, _read(dir_fd, directory / NEXT_NAME, uid)
    except (OSError, StoreError):
        return current, None


def _read(dir_fd: int, path: Path, uid: int) -> Manifest:
    """Raises FileNotFoundError, StoreError."""
    try:
        data = read_file(path.name, dir_fd, uid=uid, most_nbytes=_MOST_NBYTES)
    except FileNotFoundError:
        raise
    except (OSError, StoreError) as error:
        raise StoreError(f"{path} cannot be read: {error_text(error)}.") from error
    return Manifest.decode(data, path)
