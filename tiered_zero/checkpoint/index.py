"""Define the index of a checkpoint: for the elements of each tensor, the records and bytes that hold them.

`manifest.json` of a tag, and the metadata of an in-place commit, are a `TagManifest` in the format of
record/files.py. A full save has its own data files, one per rank: `stores`. A commit leaves its records in the
run's swap directories, whose manifests say where they are. Elements are counted in memory order: row-major in the
shape permuted by `order`, which is null for a row-major tensor. A tensor has one of these forms:

    plain       one source: the elements themselves
    joined      masters stored as remainders: sources are remainder (int16), parameter (bfloat16), and the second
                moment (fp32), whose sign is the mark
    magnitude   one source: that second moment, without its sign
    rounded     one source: the fp32 masters of a parameter that no param group holds; its elements are these, rounded

Each rank makes a `Share`, and `join_shares` joins them. Input may be hostile: types, ranges and sums are checked here,
files by `tag.read_manifest`, places in records when these are opened, all before anything is allocated.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, final

from pydantic import Field, ValidationError, model_validator
from pydantic_core import to_json

from tiered_zero.errors import InternalError, StoreError
from tiered_zero.record.directory import Owner, PlainPath, read_owner
from tiered_zero.record.files import Count, StrictModel, first_problem
from tiered_zero.record.manifest import Contents, Manifest
from tiered_zero.record.manifest import load as load_manifests

MANIFEST_NAME: Final = "manifest.json"
FORMAT: Final = "tiered_zero.checkpoint"

Form = Literal["plain", "joined", "magnitude", "rounded"]

SOURCE_ITEMSIZES: Final[Mapping[Form, tuple[int, ...]]] = {
    "plain": (0,),
    "joined": (2, 2, 4),
    "magnitude": (0,),
    "rounded": (4,),
}
"""Form -> bytes of an element in each source; 0: those of the tensor's own dtype."""

ITEMSIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a checkpoint can hold, by PyTorch's names, with the bytes of an element."""

_MOST_DIMENSIONS = 64
_MOST_NUMEL = 2**48

Text = Annotated[str, Field(min_length=1, max_length=4096)]
"""A key, a name or a path. pydantic refuses half of a surrogate pair."""


class StoreLocation(StrictModel):
    """Where a store (a set of swap files) of a run is: the run's id, and the directories over which it is striped."""

    run_id: str
    paths: Annotated[list[Annotated[PlainPath, Field(max_length=4096)]], Field(min_length=1)]

    @property
    def first(self) -> Path:
        """The directory that holds the store's manifest."""
        return Path(self.paths[0])


@final
class CommitLocation(StoreLocation):
    """Where the store that decides an in-place commit is, and the commit's id."""

    commit_id: Text


class Source(NamedTuple):
    """The place of a part's bytes: byte `offset` of the record with number `record`."""

    record: Count
    offset: Count


class Part(NamedTuple):
    """Elements [start, stop) of a tensor in memory order, with as many sources as its form has."""

    start: Count
    stop: Count
    sources: tuple[Source, ...]


class RecordName(NamedTuple):
    """The record `name` in store number `store` (a store: one set of data files). Stores are counted over all ranks in
    order; in a commit each rank has the state's store, then the parameters' store if it is another one."""

    store: Count
    name: str


@final
class TensorEntry(StrictModel):
    """One tensor. `order`: its dimensions from the slowest to the fastest in memory; None: row-major. `parts`: in a
    manifest all parts, in order, disjoint, and covering the tensor; in a share those of one rank."""

    dtype: str
    shape: Annotated[tuple[Annotated[int, Field(ge=0, le=_MOST_NUMEL)], ...], Field(max_length=_MOST_DIMENSIONS)]
    order: tuple[int, ...] | None = None
    form: Form = "plain"
    parts: tuple[Part, ...] = ()

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        """The bytes of an element."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The shape in which the parts are row-major."""
        return self.shape if self.order is None else tuple(self.shape[dimension] for dimension in self.order)

    def with_parts(self, parts: Sequence[Part]) -> TensorEntry:
        return self.model_copy(update={"parts": tuple(parts)})


def _check_tensors(tensors: Mapping[str, TensorEntry]) -> None:
    """Raise ValueError if a tensor's sizes are impossible, or if its parts are out of order, overlap or leave a gap."""
    for key, entry in tensors.items():
        dtype, shape, order, form = entry.dtype, entry.shape, entry.order, entry.form
        numel, stop, found = math.prod(shape), 0, ""
        if dtype not in ITEMSIZES or (form == "joined" and dtype != "float32"):
            found = f"a {form} one of dtype {dtype[:80]!a}"
        elif math.prod(filter(None, shape)) > _MOST_NUMEL:
            found = f"more than {_MOST_NUMEL} elements"
        elif order is not None and sorted(order) != list(range(len(shape))):
            found = f"not each dimension once in its order {order}"
        for start, end, sources in entry.parts:
            if start != stop or end <= start or len(sources) != len(SOURCE_ITEMSIZES[form]):
                found = f"elements {start} to {end} with {len(sources)} sources behind element {stop}"
                break
            stop = end
        else:
            found = found or ("" if stop == numel else f"{stop} elements, of {numel}")
        if found:
            raise ValueError(f"tensor {key[:200]!a}: expected a whole one; found {found}")


def check_places(tensors: Mapping[str, TensorEntry], extents: Sequence[int]) -> None:
    """Raise ValueError unless all parts lie inside their records. `extents`: bytes of each record."""
    for key, entry in tensors.items():
        itemsizes, own_itemsize = SOURCE_ITEMSIZES[entry.form], ITEMSIZES[entry.dtype]
        for start, stop, sources in entry.parts:
            for (record, offset), itemsize in zip(sources, itemsizes, strict=True):
                nbytes = itemsize or own_itemsize
                if record >= len(extents) or offset % nbytes or offset + (stop - start) * nbytes > extents[record]:
                    raise ValueError(f"tensor {key[:200]!a} lies outside of its records")


@final
class WrittenBy(StrictModel):
    """The program and run that wrote a tag. `kernel`: level of the update kernel. `rule`: the update rule.
    `num_threads`: threads of a forward on the CPU; 0 if another device computes. `created_s`: seconds since the
    epoch."""

    tiered_zero: str
    torch: str
    kernel: str
    rule: str
    state_format: str
    world_size: int
    num_threads: int
    created_s: Annotated[float, Field(allow_inf_nan=False)]


@final
class TagManifest(StrictModel):
    """Everything that a checkpoint states about itself. `scalars` (by parameter name), `driver`: JSON from
    `driver.to_json`, checked when it is decoded. `stores`: the contents of a full save's data files, one for each rank.
    `aliases`: another name of a parameter or buffer in the model's state_dict -> the name used here. `swap`: set in a
    tag that points to an in-place commit."""

    kind: Literal["full", "in_place"]
    tag: Text
    step: Count
    written_by: WrittenBy
    tensors: dict[Text, TensorEntry] = Field(default_factory=dict)
    records: tuple[RecordName, ...] = ()
    stores: tuple[Contents, ...] = ()
    scalars: dict[Text, Any] = Field(default_factory=dict)
    driver: dict[str, Any] = Field(default_factory=dict)
    aliases: dict[Text, Text] = Field(default_factory=dict)
    swap: CommitLocation | None = None

    @property
    def files(self) -> dict[str, int]:
        """The data files of a full save, with their bytes."""
        return {
            file_name(rank): store.capacity_nbytes for rank, store in enumerate(self.stores) if store.capacity_nbytes
        }

    @model_validator(mode="after")
    def _check(self) -> TagManifest:
        in_place = self.kind == "in_place"
        if in_place == (self.swap is None):
            raise ValueError("swap: expected with kind in_place, and only there")
        if any(len(store.weights) != 1 for store in self.stores) or (in_place and self.stores):
            raise ValueError("stores: expected one file of each, and none of an in-place commit")
        known = set[RecordName]()
        for rank, store in enumerate(self.stores):
            for record in store.records:
                known.add(RecordName(rank, record.name))
                if sum(end - start for start, end, *_ in store.ranges[record.name]) != record.extent_nbytes:
                    raise ValueError(f"stores: expected checksums of all bytes of record {record.name[:80]!a}")
        if not in_place and (unknown := [record.name for record in self.records if record not in known]):
            raise ValueError(f"records: there is none of the name {unknown[0][:80]!a}")
        _check_tensors(self.tensors)
        return self


def file_name(rank: int) -> str:
    """Return the name of the data file that a rank writes in a full save."""
    return f"data-{rank:05d}.bin"


# -- shares of ranks ---------------------------------------------------------------------------------------------------


@final
class RankPart(StrictModel):
    """One rank's entry in a commit. `stores`: where its swap files are, the state's first. `layout`: the result of
    `in_place.run_fingerprint`. `initialized`: indices of its sub-groups that have state."""

    stores: Annotated[list[StoreLocation], Field(min_length=1, max_length=2)]
    layout: str
    initialized: list[Count]


@final
class Share(StrictModel):
    """One rank's part of a save.

    `tensors`: tensors, each with this rank's parts only. `records`: sources refer to these by position. `scalars`:
    scalars of this rank's parameters, as in the manifest. `driver`: the rank's own part of `DriverState.capture`.
    `stores`: what it has written in a full save. `rank`, `commit_id`: set in an in-place commit; rank 0's id counts."""

    tensors: dict[str, TensorEntry]
    records: list[RecordName]
    scalars: dict[str, Any]
    driver: Mapping[str, Any]
    stores: list[Contents] = Field(default_factory=list)
    rank: RankPart | None = None
    commit_id: str = ""

    def encode(self) -> str:
        """Return the share as JSON text."""
        return self.model_dump_json()

    @classmethod
    def decode(cls, text: str) -> Share:
        """Invert `encode`, on another rank."""
        return cls.model_validate_json(text)


def join_shares(shares: Sequence[Share]) -> dict[str, Any]:
    """Join the shares of all ranks, and return these fields of TagManifest: tensors, records, scalars. Raises
    StoreError if ranks disagree about a tensor, or do not hold each of its elements exactly once."""
    entries: dict[str, TensorEntry] = {}
    facts: dict[str, tuple[Any, ...]] = {}
    parts: dict[str, list[Part]] = {}
    records: list[RecordName] = []
    scalars: dict[str, Any] = {}
    first_store = 0
    for rank, share in enumerate(shares):
        first = len(records)
        records += [RecordName(first_store + record.store, record.name) for record in share.records]
        first_store += len(share.stores if share.rank is None else share.rank.stores)
        for key, entry in share.tensors.items():
            own_facts = entry.dtype, entry.shape, entry.order, entry.form
            if facts.setdefault(key, own_facts) != own_facts:
                raise StoreError(f"{key} is saved as two different tensors: {facts[key]} and {own_facts}.")
            entries[key] = entry
            parts.setdefault(key, []).extend(_moved(entry.parts, first) if first else entry.parts)
        for name, own in share.scalars.items():
            if scalars.setdefault(name, own) != own:
                raise InternalError(
                    f"Every rank was expected to have made the same steps of parameter {name}; rank {rank} has {own}, "
                    f"another {scalars[name]}. This state cannot be saved; go on from an earlier checkpoint."
                )
    tensors = {key: entry.with_parts(sorted(parts[key])) for key, entry in entries.items()}
    try:
        _check_tensors(tensors)
    except ValueError as error:
        raise StoreError(f"The ranks do not have each element once: {error}.") from error
    return {"tensors": tensors, "records": tuple(records), "scalars": scalars}


def _moved(parts: Sequence[Part], first: int) -> list[Part]:
    """Return the parts with record numbers shifted by `first`."""
    return [part._replace(sources=tuple(Source(first + at.record, at.offset) for at in part.sources)) for part in parts]


# -- commits ---------------------------------------------------------------------------------------------------------


COMMIT_ID: Final = "commit_id"
"""The key of a commit's id, in the metadata of all stores and in the tag. Rank 0 draws the id, because two commits may
have the same step."""

DECIDED_BY: Final = "decided_by"
"""The key, in the metadata of the other stores, of the `StoreLocation` of the store that decides."""

ON_ITS_HOST: Final = (
    "Resume an in-place commit with the same number of ranks, each on the host that has its part (torchrun "
    "--node-rank), and with tiered_zero.checkpoint.in_place and resume; where a disk is lost, name another checkpoint."
)


@final
class Commit(StrictModel):
    """A run's newest commit: the metadata of the store (set of swap files) that decides it. `checkpoint`: the manifest
    of all ranks; its records lie in `stores`, and its step is the one that these hold. `ranks`: each rank's part."""

    commit_id: str
    checkpoint: TagManifest
    ranks: Annotated[list[RankPart], Field(min_length=1)]

    @property
    def stores(self) -> list[StoreLocation]:
        """The stores of all ranks, in the order of the manifest."""
        return [store for rank in self.ranks for store in rank.stores]

    @classmethod
    def read(cls, path: Path) -> Commit:
        """Read the newest commit of the run that has a store in `path`. Raises StoreError."""
        return cls.decode(*read_metadata(path))

    @classmethod
    def decode(cls, path: Path, metadata: Any) -> Commit:
        """Build a commit from what `read_metadata` has returned, possibly on another rank. Raises StoreError."""
        with refused(path):
            return cls.model_validate_json(to_json(metadata))


@contextmanager
def refused(path: Path) -> Iterator[None]:
    """Turn a ValueError in the block into a StoreError, which says that `path` holds no commit of a run."""
    try:
        yield
    except ValueError as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error
        raise StoreError(f"{path} holds no in-place commit of a run ({why}).") from error


def read_metadata(path: Path) -> tuple[Path, dict[str, Any]]:
    """Return the first directory of the store that decided a run's newest commit, and the commit's metadata. `path`:
    the first directory of any store of the run. Raises StoreError."""
    committed = _committed(path)
    if DECIDED_BY in committed.metadata:
        with refused(path):
            decides = StoreLocation.model_validate(committed.metadata[DECIDED_BY])
        path, committed = decides.first, _committed(decides.first)
        if committed.run_id != decides.run_id:
            raise StoreError(f"{path} belongs to another run than the one whose commit is looked for.")
    parts = _parts(committed, path)
    if not parts:
        raise StoreError(f"{path} holds no in-place commit of a run, or one of another version.")
    first = parts[0].stores[0]
    if (first.run_id, first.first) != (committed.run_id, path):
        raise StoreError(f"{path} belongs to other directories than its commit says; it was copied or moved.")
    return path, dict(committed.metadata)


def find_missing(committed: Manifest) -> str:
    """Return a text that names the part of a commit that is missing on this host; "" if none is. `committed`: the
    manifest of the store that decided the commit. Raises StoreError."""
    own = {COMMIT_ID: committed.metadata.get(COMMIT_ID)}
    for store in (store for part in _parts(committed, Path(MANIFEST_NAME)) for store in part.stores):
        found = [one for one in load_manifests(store.first) if one is not None and one.run_id == store.run_id]
        if not any(one.is_state(committed.step, own) for one in found):
            return f"a part of it rests in {store.first}, which is not here, or does not hold step {committed.step}"
    return ""


def owner_of(path: Path, which: str = "") -> Owner:
    """Return the owner of a swap directory. `which`: names the commit in the message, such as "of step 5 ". Raises
    StoreError if the directory cannot be read on this host."""
    try:
        return read_owner(path)
    except StoreError as error:
        raise StoreError(
            f"A part of the commit {which}rests in {path}, which cannot be read here: "
            f"{error if os.path.lexists(path) else 'it is gone, or on another host.'} {ON_ITS_HOST} For other ranks "
            "save without in_place."
        ) from error


def _committed(path: Path) -> Manifest:
    """Return the committed state in `path`. Raises StoreError if there is none."""
    committed, _ = load_manifests(path)
    if committed is None:
        raise StoreError(f"{path} holds no committed state: its run ended before its first commit, or has none.")
    return committed


def _parts(committed: Manifest, path: Path) -> list[RankPart]:
    """Return the parts of all ranks from a manifest's metadata; none if its store does not decide commits. Raises
    StoreError."""
    ranks = committed.metadata.get("ranks")
    with refused(path):
        return [RankPart.model_validate(part) for part in (ranks if isinstance(ranks, list) else ())]
