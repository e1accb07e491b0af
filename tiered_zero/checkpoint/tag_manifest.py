"""The manifest of a checkpoint: which bytes of which records are which elements of which tensor.

`manifest.json` of a tag, and the metadata of an in-place commit, have this body; store/checked_json.py has the form.
A full save holds its records in data files of its own, one for each rank: `stores`. A commit leaves them where the run
uses them, in its swap directories, whose manifests say where they rest. Elements are counted in memory order: row-major
in the shape that `order` permutes, which is null for a row-major tensor. The forms of a tensor:

    plain       one source: the elements themselves
    joined      masters that rest as remainders: sources are remainder (int16), parameter (bfloat16), and the second
                moment (fp32) whose sign is the mark
    magnitude   one source: that second moment, without its sign
    rounded     one source: fp32 masters of a parameter that no param group holds, which is what they round to

What is decoded may be hostile: types, ranges and sums are checked here, the files by `directory.read_manifest`, and
nothing is allocated from a declared size before both.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple, final

import numpy

from tiered_zero.errors import StoreError
from tiered_zero.sizes import format_nbytes
from tiered_zero.store.checked_json import (
    MOST_INTEGER,
    check_fields,
    check_integers,
    check_kind,
    decode_checked,
    encode_checked,
    kinds_of,
)
from tiered_zero.store.manifest import Contents

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "tiered_zero.checkpoint"
VERSION: Final = 2
MOST_NBYTES: Final = 1 << 28
"""Of a manifest. A checksum takes some 45 bytes, so that this is enough for several TiB of state."""

KINDS: Final = ("full", "in_place")

SOURCE_ITEMSIZES: Final = {"plain": (0,), "joined": (2, 2, 4), "magnitude": (0,), "rounded": (4,)}
"""Form -> bytes of an element in each source; 0: those of the tensor's own dtype."""

ITEMSIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a checkpoint can hold, by PyTorch's names, and the bytes of an element."""

Limits = numpy.ndarray[Any, numpy.dtype[numpy.int64]]

_MOST_DIMENSIONS = 64
_MOST_TEXT = 4096
_MOST_NUMEL = 2**48


class Source(NamedTuple):
    """Byte `offset` of the record number `record`."""

    record: int
    offset: int


class Part(NamedTuple):
    """Elements [start, stop) of a tensor, in memory order, one source for each that the form has."""

    start: int
    stop: int
    sources: tuple[Source, ...]


class RecordName(NamedTuple):
    """A record `name` of the store number `store`: of the stores of all ranks, one rank behind the other; of a commit
    each has that of the state first, and then that of parameters where it is another."""

    store: int
    name: str


@final
@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor. `order`: its dimensions from the slowest to the fastest in memory; None: row-major.

    `parts`: in order, disjoint, and covering the tensor.
    """

    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...] | None = None
    form: str = "plain"
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

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        parts = [[part.start, part.stop, *itertools.chain(*part.sources)] for part in self.parts]
        return vars(self) | {"parts": parts}

    @classmethod
    def from_body(cls, body: Any) -> TensorEntry:
        """Build from JSON values that `body` gave, unchecked: another rank's."""
        order = body["order"]
        given = {"shape": tuple(body["shape"]), "order": None if order is None else tuple(order)}
        return cls(**{**body, **given, "parts": tuple(map(_part, body["parts"]))})


def _part(row: Sequence[int]) -> Part:
    return Part(row[0], row[1], tuple(map(Source, row[2::2], row[3::2])))


@final
@dataclass(frozen=True, kw_only=True)
class WrittenBy:
    """The writer of a tag: versions, kernel level, update rule, state format, number of ranks, threads of a forward on
    the CPU (0: it runs on another device), seconds since the epoch."""

    tiered_zero: str
    torch: str
    kernel: str
    rule: str
    state_format: str
    world_size: int
    num_threads: int
    created_s: float


@final
@dataclass(frozen=True, kw_only=True)
class TagManifest:
    """All that a checkpoint says of itself. `scalars`, `driver`: as values.py gives them; checked where they are
    decoded. `stores`: of a full save, in the order of its files. `aliases`: a further name of a parameter or buffer in
    the model's state_dict -> the name under which it is here.

    `swap`: of a tag that points to an in-place commit, its id, and the run's id and directories.
    """

    kind: str
    tag: str
    step: int
    written_by: WrittenBy
    tensors: dict[str, TensorEntry] = field(default_factory=dict)
    records: tuple[RecordName, ...] = ()
    stores: tuple[Contents, ...] = ()
    scalars: dict[str, Any] = field(default_factory=dict)
    driver: dict[str, Any] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    swap: dict[str, Any] | None = None

    @property
    def files(self) -> dict[str, int]:
        """The data files of a full save, and their bytes."""
        return {
            file_name(rank): store.capacity_nbytes for rank, store in enumerate(self.stores) if store.capacity_nbytes
        }

    @property
    def data_nbytes(self) -> int:
        """Bytes of all data files."""
        return sum(self.files.values())

    def body(self) -> dict[str, Any]:
        """As JSON values."""
        return vars(self) | {
            "written_by": vars(self.written_by),
            "tensors": {key: entry.body() for key, entry in self.tensors.items()},
            "stores": [store.body() for store in self.stores],
        }

    def encode(self) -> bytes:
        """Raises StoreError for what could not be read back."""
        body = self.body()
        try:
            data = encode_checked(FORMAT, VERSION, body)
        except (TypeError, ValueError, RecursionError) as error:
            raise StoreError(f"The manifest of {self.tag} must be JSON: {error}.") from error
        if len(data) > MOST_NBYTES:
            raise StoreError(
                f"The manifest of {self.tag} takes {format_nbytes(len(data))}; at most {format_nbytes(MOST_NBYTES)} "
                "can be read back. Keep large values out of client_state, or raise zero_optimization.sub_group_size."
            )
        try:
            _check_facts(body)
            _check_texts("a name", (*self.tensors, *self.scalars, *self.aliases, self.tag))
        except ValueError as error:
            raise StoreError(f"The manifest of {self.tag} could not be read back ({error}).") from error
        return data

    @classmethod
    def decode(cls, data: bytes, path: Path) -> TagManifest:
        """Raises StoreError: no manifest, of another version, damaged, or one that no checkpoint has."""
        try:
            return cls.from_body(decode_checked(data, path, FORMAT, VERSION))
        except ValueError as error:
            raise StoreError(f"{path} is not the manifest of a checkpoint ({error}).") from error

    @classmethod
    def from_body(cls, body: Any) -> TagManifest:
        """Build from JSON values that may be hostile. Raises ValueError."""
        fields = _check_facts(body)
        in_place = fields["kind"] == "in_place"
        stores = tuple(Contents.from_body(item) for item in fields["stores"])
        if any(len(store.weights) != 1 for store in stores) or (in_place and stores):
            raise ValueError("stores: expected one file of each, and none of an in-place commit")
        records = tuple(_record_name(item) for item in fields["records"])
        known = {
            RecordName(rank, record.name): record.extent_nbytes
            for rank, store in enumerate(stores)
            for record in store.records
        }
        if not in_place and (unknown := [record.name for record in records if record not in known]):
            raise ValueError(f"records: there is none of the name {unknown[0][:80]!a}")
        extents = [known.get(record, MOST_INTEGER) for record in records]
        limits = numpy.array(extents, numpy.int64)
        _check_texts("a tensor's key", fields["tensors"])
        _check_texts("a parameter's name", fields["scalars"])
        for alias, name in fields["aliases"].items():
            check_kind("aliases", name, str)
            _check_texts("a parameter's name", [alias, name])
        _check_texts("tag", [fields["tag"]])
        tensors = {key: _entry(key, item, limits) for key, item in fields["tensors"].items()}
        written = check_fields(fields["written_by"], _WRITTEN_BY_KINDS)
        return cls(
            kind=fields["kind"],
            tag=fields["tag"],
            step=fields["step"],
            written_by=WrittenBy(**{**written, "created_s": float(written["created_s"])}),
            tensors=tensors,
            records=records,
            stores=stores,
            scalars=fields["scalars"],
            driver=fields["driver"],
            aliases=fields["aliases"],
            swap=None if fields["swap"] is None else check_store_location(fields["swap"], "commit_id"),
        )


def file_name(rank: int) -> str:
    """The data file that a rank writes of a full save."""
    return f"data-{rank:05d}.bin"


_MANIFEST_KINDS, _ENTRY_KINDS, _WRITTEN_BY_KINDS = map(kinds_of, (TagManifest, TensorEntry, WrittenBy))


def _check_facts(body: Any) -> dict[str, Any]:
    """The fields of a manifest, each of its type. Raises ValueError."""
    fields = check_fields(body, _MANIFEST_KINDS)
    if fields["kind"] not in KINDS:
        raise ValueError(f"kind: expected one of {', '.join(KINDS)}; found {fields['kind'][:80]!a}")
    if (fields["kind"] == "in_place") == (fields["swap"] is None):
        raise ValueError("swap: expected with kind in_place, and only there")
    if fields["step"] < 0:
        raise ValueError("step: expected 0 or more")
    return fields


def _check_texts(name: str, texts: Iterable[str]) -> None:
    """Raises ValueError for what cannot be printed: JSON can have half of a surrogate pair."""
    for text in texts:
        if not 0 < len(text) <= _MOST_TEXT:
            raise ValueError(f"{name}: expected 1 to {_MOST_TEXT} characters")
        text.encode()  # raises UnicodeEncodeError, a ValueError


def check_store_location(item: Any, *more: str) -> dict[str, Any]:
    """The run's id and the directories of a store, and `more` texts. Raises ValueError."""
    fields = check_fields(item, {"run_id": str, "paths": list, **dict.fromkeys(more, str)})
    for name in more:
        _check_texts(name, [fields[name]])
    for path in fields["paths"]:
        check_kind("paths", path, str)
        _check_texts("paths", [path])
        if not path.startswith("/") or "\0" in path or os.path.normpath(path) != path:
            raise ValueError(f"paths: expected plain absolute paths; found {path[:200]!a}")
    if not fields["paths"]:
        raise ValueError("paths: expected one or more")
    return fields


def _record_name(item: Any) -> RecordName:
    check_kind("records", item, (list, RecordName))
    if len(item) != 2 or type(item[0]) is not int or type(item[1]) is not str or item[0] < 0:
        raise ValueError("records: expected the number of a store and a name")
    return RecordName(item[0], item[1])


def _entry(key: str, item: Any, limits: Limits) -> TensorEntry:
    """`limits`: bytes of each record. Raises ValueError, naming the tensor."""
    try:
        fields = check_fields(item, _ENTRY_KINDS)
        if fields["dtype"] not in ITEMSIZES:
            raise ValueError(f"dtype: expected one of {', '.join(sorted(ITEMSIZES))}; found {fields['dtype'][:80]!a}")
        if fields["form"] not in SOURCE_ITEMSIZES:
            raise ValueError(f"form: expected one of {', '.join(SOURCE_ITEMSIZES)}; found {fields['form'][:80]!a}")
        shape, order = fields["shape"], fields["order"]
        numel = 1
        for size in shape:
            if type(size) is not int or not 0 <= size <= _MOST_NUMEL:
                raise ValueError(f"shape: expected whole numbers from 0 to {_MOST_NUMEL}")
            numel *= max(size, 1)
            if numel > _MOST_NUMEL:
                raise ValueError(f"shape: expected at most {_MOST_NUMEL} elements")
        if len(shape) > _MOST_DIMENSIONS:
            raise ValueError(f"shape: expected at most {_MOST_DIMENSIONS} dimensions; found {len(shape)}")
        if order is not None:
            check_integers("order", order, _MOST_DIMENSIONS)
            if sorted(order) != list(range(len(shape))):
                raise ValueError("order: expected each dimension once")
        if fields["form"] == "joined" and fields["dtype"] != "float32":
            raise ValueError("form: only float32 is joined")
        _check_parts(math.prod(shape), fields["form"], ITEMSIZES[fields["dtype"]], fields["parts"], limits)
        order = None if order is None else tuple(order)
        parts = tuple(map(_part, fields["parts"]))
        return TensorEntry(dtype=fields["dtype"], shape=tuple(shape), order=order, form=fields["form"], parts=parts)
    except ValueError as error:
        raise ValueError(f"tensor {key[:200]!a}: {error}") from error


def _check_parts(numel: int, form: str, itemsize: int, items: Sequence[Any], limits: Limits) -> None:
    """Raises ValueError unless the parts are in order, disjoint and covering; there may be a million."""
    sizes = numpy.array(SOURCE_ITEMSIZES[form], numpy.int64)
    sizes[sizes == 0] = itemsize
    width = 2 + 2 * len(sizes)
    if not {*map(type, items)} <= {list} or not {*map(len, items)} <= {width}:
        raise ValueError(f"parts: expected start, stop and {len(sizes)} sources of each")
    flat = list(itertools.chain.from_iterable(items))
    if not {*map(type, flat)} <= {int} or not 0 <= min(flat, default=0) <= max(flat, default=0) <= MOST_INTEGER:
        raise ValueError(f"parts: expected whole numbers from 0 to {MOST_INTEGER}")
    rows = numpy.array(flat, numpy.int64).reshape(-1, width)
    starts, stops = rows[:, 0], rows[:, 1]
    wrong = (stops <= starts) | (starts != numpy.concatenate([[0], stops])[: len(rows)])
    if wrong.any():
        start, stop = rows[wrong.argmax()][:2]
        raise ValueError(f"parts: elements {start} to {stop} are out of order, overlap or leave a gap")
    if (found := int(stops[-1]) if len(rows) else 0) != numel:
        raise ValueError(f"parts: expected {numel} elements; found {found}")
    records, offsets = rows[:, 2::2], rows[:, 3::2]
    if (records >= len(limits)).any():
        raise ValueError(f"parts: there is no record {records.max()}")
    if (offsets % sizes).any():
        raise ValueError("parts: expected elements at multiples of their size")
    if len(rows) and (offsets > limits[records] - (stops - starts)[:, None] * sizes).any():
        raise ValueError("parts: some lie outside of their record")
