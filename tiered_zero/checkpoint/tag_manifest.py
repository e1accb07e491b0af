"""The manifest of a tag: which files there are, which ranges of them are which elements of which tensor.

`manifest.json` has the form of store/checked_json.py. Elements are counted in memory order: row-major in the shape that
`order` permutes, which is null for a row-major tensor. What is decoded may be hostile: types, ranges and sums are
checked here, the files by `directory.read_manifest`, and nothing is allocated from a declared size before both.
"""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy

from tiered_zero.errors import StoreError
from tiered_zero.sizes import MIB, PAGE_NBYTES, format_nbytes
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

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "tiered_zero.checkpoint"
VERSION: Final = 1
MOST_NBYTES: Final = 1 << 28
"""Of a manifest. A part takes some 40 bytes and a checksum 20, so that this is enough for several TiB of state."""

CHUNK_NBYTES: Final = MIB
"""Of a data file: what one checksum covers."""

KINDS: Final = ("full", "in_place")

ITEMSIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a checkpoint can hold, by PyTorch's names, and the bytes of an element."""

_MOST_DIMENSIONS = 64
_MOST_NUMEL = 2**48
_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@final
@dataclass(frozen=True, kw_only=True)
class DataFile:
    """One data file, in whole pages. `digests`: xxh3-64 of each MiB, and of what is left at the end."""

    name: str
    nbytes: int
    digests: tuple[int, ...]


class Part(NamedTuple):
    """Elements `[start, stop)` of a tensor, in memory order, at byte `offset` of the file number `file`."""

    start: int
    stop: int
    file: int
    offset: int


@final
@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor. `order`: its dimensions from the slowest to the fastest in memory; None: row-major.

    `parts`: in order, disjoint, and covering the tensor; none at all in an in-place commit.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape in which the parts are row-major."""
        return self.shape if self.order is None else tuple(self.shape[dimension] for dimension in self.order)


@final
@dataclass(frozen=True, kw_only=True)
class WrittenBy:
    """What wrote a tag: versions, kernel level, update rule, state format, number of ranks, seconds since the epoch."""

    tiered_zero: str
    torch: str
    kernel: str
    rule: str
    state_format: str
    world_size: int
    created_s: float


@final
@dataclass(frozen=True, kw_only=True)
class TagManifest:
    """All that a tag says of itself. `scalars`, `driver`: as encode.py gives them; checked where they are decoded.

    `swap`: of an in-place commit, its id, and the run's id and directories; the state is in the store that is there.
    """

    kind: str
    tag: str
    step: int
    written_by: WrittenBy
    files: tuple[DataFile, ...] = ()
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    scalars: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    swap: dict[str, Any] | None = None

    @property
    def data_nbytes(self) -> int:
        """Of all data files."""
        return sum(file.nbytes for file in self.files)

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        return vars(self) | {
            "written_by": vars(self.written_by),
            "files": [vars(file) for file in self.files],
            "tensors": {key: vars(entry) for key, entry in self.tensors.items()},
        }

    def encode(self) -> bytes:
        """Raises StoreError for what could not be read back."""
        try:
            data = encode_checked(FORMAT, VERSION, self.body())
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"The manifest of {self.tag} must be JSON: {error}.") from error
        if len(data) > MOST_NBYTES:
            raise StoreError(
                f"The manifest of {self.tag} takes {format_nbytes(len(data))}; at most {format_nbytes(MOST_NBYTES)} "
                "can be read back. Keep large values out of client_state, or raise zero_optimization.sub_group_size."
            )
        self._check()
        return data

    def _check(self) -> None:
        """Raises StoreError for what `decode` would refuse."""
        try:
            _manifest(self.body())
        except ValueError as error:
            raise StoreError(f"The manifest of {self.tag} could not be read back ({error}).") from error

    @classmethod
    def decode(cls, data: bytes, path: Path) -> TagManifest:
        """Raises StoreError: no manifest, of another version, damaged, or one that no checkpoint has."""
        try:
            return _manifest(decode_checked(data, path, FORMAT, VERSION))
        except ValueError as error:
            raise StoreError(f"{path} is not the manifest of a checkpoint ({error}).") from error

    @classmethod
    def from_body(cls, body: Any) -> TagManifest:
        """Of JSON values that may be hostile. Raises ValueError."""
        return _manifest(body)


_MANIFEST_KINDS, _FILE_KINDS, _ENTRY_KINDS, _WRITTEN_BY_KINDS = map(
    kinds_of, (TagManifest, DataFile, TensorEntry, WrittenBy)
)


def _manifest(body: Any) -> TagManifest:
    """Raises ValueError."""
    fields = check_fields(body, _MANIFEST_KINDS)
    if fields["kind"] not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}; found {fields['kind'][:80]!a}")
    in_place = fields["kind"] == "in_place"
    if in_place == (fields["swap"] is None):
        raise ValueError("swap: expected with kind in_place, and only there")
    if fields["step"] < 0:
        raise ValueError("step: expected 0 or more")
    files = tuple(_file(item) for item in fields["files"])
    if len({file.name for file in files}) != len(files) or (in_place and files):
        raise ValueError("files: expected different names, and none of an in-place commit")
    tensors = {_text("a tensor's key", key): _entry(key, item, files) for key, item in fields["tensors"].items()}
    _check_tensors(fields["kind"], tensors)
    written = check_fields(fields["written_by"], _WRITTEN_BY_KINDS)
    return TagManifest(
        kind=fields["kind"],
        tag=_text("tag", fields["tag"]),
        step=fields["step"],
        written_by=WrittenBy(**{**written, "created_s": float(written["created_s"])}),
        files=files,
        tensors=tensors,
        scalars={_text("a parameter's name", name): value for name, value in fields["scalars"].items()},
        driver=fields["driver"],
        swap=None if fields["swap"] is None else check_store_location(fields["swap"], "commit_id"),
    )


def _text(name: str, text: str) -> str:
    """Raises ValueError for what cannot be printed: JSON can have half of a surrogate pair."""
    if not text or len(text) > 4096:
        raise ValueError(f"{name}: expected 1 to 4096 characters")
    text.encode()  # raises UnicodeEncodeError, a ValueError
    return text


def check_store_location(item: Any, *more: str) -> dict[str, Any]:
    """The run's id and the directories of a store, and `more` texts. Raises ValueError."""
    fields = check_fields(item, {"run_id": str, "paths": list, **dict.fromkeys(more, str)})
    for name in more:
        _text(name, fields[name])
    for path in fields["paths"]:
        check_kind("paths", path, str)
        if not path.startswith("/") or "\0" in _text("paths", path) or os.path.normpath(path) != path:
            raise ValueError(f"paths: expected plain absolute paths; found {path[:200]!a}")
    if not fields["paths"]:
        raise ValueError("paths: expected one or more")
    return fields


def _file(item: Any) -> DataFile:
    fields = check_fields(item, _FILE_KINDS)
    name, nbytes, digests = fields["name"], fields["nbytes"], fields["digests"]
    if not _FILE_NAME.fullmatch(name) or name == MANIFEST_NAME:
        raise ValueError(f"files: expected a plain file name; found {name[:200]!a}")
    if nbytes <= 0 or nbytes % PAGE_NBYTES or len(digests) != -(-nbytes // CHUNK_NBYTES):
        raise ValueError(f"files: {name}: expected whole pages, and a checksum for each MiB")
    check_integers(f"files: {name}: checksums", digests, MOST_DIGEST)
    return DataFile(name=name, nbytes=nbytes, digests=tuple(digests))


def _entry(key: str, item: Any, files: tuple[DataFile, ...]) -> TensorEntry:
    """Raises ValueError, naming the tensor."""
    try:
        fields = check_fields(item, _ENTRY_KINDS)
        if fields["dtype"] not in ITEMSIZES:
            raise ValueError(f"dtype: expected one of {', '.join(sorted(ITEMSIZES))}; found {fields['dtype'][:80]!a}")
        shape, order = fields["shape"], fields["order"]
        check_integers("shape", shape, _MOST_NUMEL)
        numel = 1
        for size in shape:
            numel *= max(size, 1)
            if numel > _MOST_NUMEL:
                raise ValueError(f"shape: expected at most {_MOST_NUMEL} elements")
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"shape: expected at most {_MOST_DIMENSIONS} dimensions; found {len(shape)}")
        if order is not None:
            check_integers("order", order, _MOST_DIMENSIONS)
            if sorted(order) != list(range(len(shape))):
                raise ValueError("order: expected each dimension once")
        entry = TensorEntry(dtype=fields["dtype"], shape=tuple(shape), order=None if order is None else tuple(order))
        _check_parts(entry, _part_rows(fields["parts"]), files)
        return replace(entry, parts=tuple(Part(*part) for part in fields["parts"]))
    except ValueError as error:
        raise ValueError(f"tensor {key[:200]!a}: {error}") from error


def _part_rows(items: Sequence[Any]) -> numpy.ndarray[Any, numpy.dtype[numpy.int64]]:
    """[parts, 4] of what JSON has for parts; there may be a million. Raises ValueError."""
    if not {*map(type, items)} <= {list, Part} or not {*map(len, items)} <= {4}:
        raise ValueError("parts: expected start, stop, file and offset of each")
    flat = list(itertools.chain.from_iterable(items))
    if not {*map(type, flat)} <= {int} or not 0 <= min(flat, default=0) <= max(flat, default=0) <= MOST_INTEGER:
        raise ValueError(f"parts: expected whole numbers from 0 to {MOST_INTEGER}")
    return numpy.array(flat, numpy.int64).reshape(-1, 4)


def _check_parts(
    entry: TensorEntry, rows: numpy.ndarray[Any, numpy.dtype[numpy.int64]], files: Sequence[DataFile]
) -> None:
    """Raises ValueError unless the parts are in order, disjoint, covering, and inside of their files."""
    if not len(rows):
        return
    starts, stops, indices, offsets = rows.T
    wrong = (stops <= starts) | (starts != numpy.concatenate([[0], stops[:-1]]))
    if wrong.any():
        start, stop = rows[wrong.argmax()][:2]
        raise ValueError(f"parts: elements {start} to {stop} are out of order, overlap or leave a gap")
    if stops[-1] != entry.numel:
        raise ValueError(f"parts: expected {entry.numel} elements; found {stops[-1]}")
    if indices.max() >= len(files):
        raise ValueError(f"parts: there is no file {indices.max()}")
    sizes = numpy.array([file.nbytes for file in files], numpy.int64)[indices]
    outside = (
        (offsets > sizes) | (offsets % entry.itemsize != 0) | ((stops - starts) * entry.itemsize > sizes - offsets)
    )
    if outside.any():
        start, stop, index, offset = rows[outside.argmax()]
        raise ValueError(f"parts: {start} to {stop} at offset {offset} lie outside of {files[index].name}")


def _check_tensors(kind: str, tensors: Mapping[str, TensorEntry]) -> None:
    """Raises ValueError where a tensor has no parts, and where two parts, of one tensor or of two, share bytes."""
    for key, entry in tensors.items():
        if kind == "full" and entry.numel and not entry.parts:
            raise ValueError(f"tensor {key[:200]!a}: parts: expected some")
    found = [(numpy.array(entry.parts, numpy.int64), entry.itemsize) for entry in tensors.values() if entry.parts]
    if not found:
        return
    files = numpy.concatenate([rows[:, 2] for rows, _ in found])
    offsets = numpy.concatenate([rows[:, 3] for rows, _ in found])
    ends = offsets + numpy.concatenate([(rows[:, 1] - rows[:, 0]) * itemsize for rows, itemsize in found])
    order = numpy.lexsort((offsets, files))
    files, offsets, ends = files[order], offsets[order], ends[order]
    shared = (files[1:] == files[:-1]) & (offsets[1:] < ends[:-1])
    if shared.any():
        place = shared.argmax() + 1
        raise ValueError(f"parts: two of them share bytes at offset {offsets[place]} of file {files[place]}")
