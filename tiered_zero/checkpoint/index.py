"""Define the index of a checkpoint: the record and the bytes in which the elements of each tensor lie. List the tensors
that a run saves.

[Note: Portable form] A tensor has a key, and its elements are numbered in memory order. Key and numbers do not depend
on how a run cuts and places the tensor. A key is `<kind>/<parameter name>`:

    master   the fp32 master, even if it is stored in three parts (the form "joined" below)
    <field>  a state array of the rule under its own name, such as exp_avg; only for parameters that were stepped
    param    a parameter without a master: frozen, or in no param group
    buffer   a persistent buffer

A parameter with a master has no key of its own: it equals its rounded master. An elementwise state array has the
parameter's shape. The scales of 8-bit moments have one element per block of the parameter. Any other state array keeps
its own shape. Bytes are saved as they are stored. A tensor's form says how to compute its elements from these bytes:

    plain       one source: the elements themselves
    joined      masters stored as remainders: sources are remainder (int16), parameter (bfloat16), and the second
                moment (fp32), whose sign is one more bit of the master
    magnitude   one source: that second moment, without its sign
    rounded     one source: the fp32 masters of a parameter that no param group holds; its elements are these, rounded

The `manifest.json` of a tag is a `TagManifest`. The metadata of an in-place commit contains one. A full save has its
own data files, one per rank. A commit leaves its records in the run's swap directories. A manifest may be hostile:
types, sizes and places are checked before memory is allocated."""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, final

import torch
from pydantic import Field, model_validator
from torch import nn

from tiered_zero.errors import InternalError, StoreError
from tiered_zero.hardware.memory.host_memory import StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment
from tiered_zero.plan.placement import BUFFERS
from tiered_zero.record.directory import PlainPath
from tiered_zero.record.files import Count, JsonFile, StrictModel, next_path
from tiered_zero.record.manifest import Contents
from tiered_zero.rules.rule import StateField
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.sizes import align_up
from tiered_zero.tiers.tier import Home
from tiered_zero.unit.pager import WholeWeights
from tiered_zero.update.pipeline import UpdatePipeline
from tiered_zero.update.state_view import Scalars, StateView
from tiered_zero.update.subgroup_io import SubGroupIO, SubGroupWork

MANIFEST_NAME: Final = "manifest.json"
LATEST_NAME: Final = "latest"
DATA_FILE: Final = re.compile(r"data-\d{5}(?:-([0-9a-f]{12}))?\.bin")
"""Matches the names of data files. The group is the id of the save that wrote the file; None for a file of format
version 4 or before, whose name has no id. A new save of the tag removes such files."""

TAG: Final = re.compile(r"[^./\x00-\x1f\x7f\ud800-\udfff][^/\x00-\x1f\x7f\ud800-\udfff]*")
_TAKEN: Final = (LATEST_NAME, next_path(Path(LATEST_NAME)).name)
_MOST_TAG_NBYTES: Final = 200

Form = Literal["plain", "joined", "magnitude", "rounded"]

SOURCE_ITEMSIZES: Final[Mapping[Form, tuple[int, ...]]] = {
    "plain": (0,),
    "joined": (2, 2, 4),
    "magnitude": (0,),
    "rounded": (4,),
}
"""Form of a tensor -> bytes of an element in each source of a `Part`. 0 stands for the element size of the tensor's
dtype."""

ITEMSIZES: Final[Mapping[str, int]] = {
    **dict.fromkeys(("bool", "int8", "uint8", "float8_e4m3fn", "float8_e5m2"), 1),
    **dict.fromkeys(("float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"), 1),
    **dict.fromkeys(("float16", "bfloat16", "int16", "uint16"), 2),
    **dict.fromkeys(("float32", "int32", "uint32"), 4),
    **dict.fromkeys(("float64", "int64", "uint64", "complex64"), 8),
    "complex128": 16,
}
"""The dtypes that a checkpoint can hold: PyTorch's name -> bytes of an element."""

_MOST_DIMENSIONS = 64
_MOST_NUMEL = 2**48

Text = Annotated[str, Field(min_length=1, max_length=4096)]
"""A key, a name or a path. pydantic refuses text that is not Unicode."""


class StoreLocation(StrictModel):
    """The location of a store (a set of swap files). `run_id`: the run that owns it. `paths`: its directories."""

    run_id: str
    paths: Annotated[list[Annotated[PlainPath, Field(max_length=4096)]], Field(min_length=1)]

    @property
    def first(self) -> Path:
        """The directory that holds the store's manifest."""
        return Path(self.paths[0])


class Source(NamedTuple):
    """The place where a part's bytes begin: byte `offset` of the record `record` in store number `store` (a store: one
    set of data files). A manifest numbers the stores of all ranks in rank order. In one rank's share, 0 is the first
    store of that rank."""

    store: Count
    record: str
    offset: Count

    def at(self, nbytes: int) -> Source:
        """Return the place that lies `nbytes` after this one."""
        return self._replace(offset=self.offset + nbytes)


class Part(NamedTuple):
    """Elements [start, stop) of a tensor, in memory order. `sources`: the places where the bytes of these elements
    begin: three for the form "joined", else one (see [Note: Portable form])."""

    start: Count
    stop: Count
    sources: tuple[Source, ...]


@final
class TensorEntry(StrictModel):
    """One saved tensor. `order`: the dimensions from the slowest to the fastest in memory; None: row-major. `parts`:
    the places of its elements, in order and without overlap; one rank's share has only that rank's parts."""

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
        """The size of an element in bytes."""
        return ITEMSIZES[self.dtype]

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @property
    def memory_shape(self) -> tuple[int, ...]:
        """The sizes of the dimensions, from the slowest to the fastest in memory."""
        return self.shape if self.order is None else tuple(self.shape[dimension] for dimension in self.order)

    def with_parts(self, parts: Sequence[Part]) -> TensorEntry:
        return self.model_copy(update={"parts": tuple(parts)})


def _check_tensors(tensors: Mapping[str, TensorEntry]) -> None:
    """Check that dtypes and sizes are possible, and that parts cover each tensor exactly once. Raises ValueError."""
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


def check_places(tensors: Mapping[str, TensorEntry], extents: Mapping[tuple[int, str], int]) -> None:
    """Check that all parts lie inside their records. `extents`: (store, record) -> size in bytes. Raises ValueError."""
    for key, entry in tensors.items():
        itemsizes, own_itemsize = SOURCE_ITEMSIZES[entry.form], ITEMSIZES[entry.dtype]
        for start, stop, sources in entry.parts:
            for (store, record, offset), itemsize in zip(sources, itemsizes, strict=True):
                nbytes = itemsize or own_itemsize
                if offset % nbytes or offset + (stop - start) * nbytes > extents.get((store, record), 0):
                    raise ValueError(f"tensor {key[:200]!a} lies outside of its records")


@final
class WrittenBy(StrictModel):
    """The program and the run that wrote a tag. `kernel`: the level of the update kernel, such as "avx2".
    `num_threads`: the number of CPU threads that compute a forward; 0 if another device computes. `created_s`: seconds
    since the epoch."""

    tiered_zero: str
    torch: str
    kernel: str
    rule: str
    state_format: str
    world_size: int
    num_threads: int
    created_s: Annotated[float, Field(allow_inf_nan=False)]


@final
class TagManifest(JsonFile):
    """The manifest of a checkpoint. `save_id`: the id of the save, in the names of a full save's data files; also the
    id of an in-place commit. `stores`: a full save's data files, one for each rank. `scalars` (by parameter name) and
    `driver`: values encoded by `to_json` of driver.py. `aliases`: other name of a tensor in the model's state_dict ->
    the name under which it is saved. `swap`: the store whose manifest decides for all ranks whether an in-place commit
    is complete; None for a full save."""

    format_name = "tiered_zero.checkpoint"

    tag: Text
    save_id: Annotated[str, Field(pattern=r"^[0-9a-f]{12}$")]
    step: Count
    written_by: WrittenBy
    tensors: dict[Text, TensorEntry] = Field(default_factory=dict)
    stores: tuple[Contents, ...] = ()
    scalars: dict[Text, Any] = Field(default_factory=dict)
    driver: dict[str, Any] = Field(default_factory=dict)
    aliases: dict[Text, Text] = Field(default_factory=dict)
    swap: StoreLocation | None = None

    @property
    def files(self) -> dict[str, int]:
        """The data files of a full save: name -> size in bytes."""
        return {
            file_name(rank, self.save_id): store.capacity_nbytes
            for rank, store in enumerate(self.stores)
            if store.capacity_nbytes
        }

    @model_validator(mode="after")
    def _check(self) -> TagManifest:
        if any(len(store.weights) != 1 for store in self.stores) or (self.swap is not None and self.stores):
            raise ValueError("stores: expected one file of each, and none of an in-place commit")
        extents: dict[tuple[int, str], int] = {}
        for rank, store in enumerate(self.stores):
            for record in store.records:
                extents[rank, record.name] = record.extent_nbytes
                if sum(end - start for start, end, *_ in store.ranges[record.name]) != record.extent_nbytes:
                    raise ValueError(f"stores: expected checksums of all bytes of record {record.name[:80]!a}")
        _check_tensors(self.tensors)
        if self.swap is None:
            check_places(self.tensors, extents)
        return self


def check_tag(tag: object) -> str:
    """Check that `tag` can be the name of a checkpoint's directory, and return it. Raises StoreError."""
    if isinstance(tag, str) and TAG.fullmatch(tag) and tag not in _TAKEN and len(tag.encode()) <= _MOST_TAG_NBYTES:
        return tag
    raise StoreError(
        f"A checkpoint's tag must be a plain directory name of at most {_MOST_TAG_NBYTES} bytes: no slash, no leading "
        f"dot, not {LATEST_NAME!r}; found {ascii(tag)[:200]}."
    )


def file_name(rank: int, save_id: str) -> str:
    """Return the name of the data file that a rank writes in the full save `save_id`."""
    return f"data-{rank:05d}-{save_id}.bin"


# -- shares of ranks ---------------------------------------------------------------------------------------------------


@final
class RankPart(StrictModel):
    """One rank's part of an in-place commit. `stores`: the locations of the rank's stores, first the store of the
    optimizer state. `layout`: the hash of `in_place.run_fingerprint`; a run that adopts the commit must have the same
    hash. `initialized`: indices of the rank's sub-groups that have state."""

    stores: Annotated[list[StoreLocation], Field(min_length=1, max_length=2)]
    layout: str
    initialized: list[Count]


@final
class Share(StrictModel):
    """One rank's part of a save.

    `tensors`: key -> entry with only this rank's parts. `scalars`: parameter name -> the scalars of its state.
    `driver`: the parts of the driver state that differ between ranks. `stores`: the table of the rank's data file;
    empty for an in-place commit. `rank`: the rank's part of an in-place commit; None for a full save."""

    tensors: dict[str, TensorEntry]
    scalars: dict[str, Any]
    driver: Mapping[str, Any]
    stores: list[Contents] = Field(default_factory=list)
    rank: RankPart | None = None


def join_shares(shares: Sequence[Share]) -> dict[str, Any]:
    """Join the shares of all ranks. Return the fields `tensors` and `scalars` of TagManifest. Raises StoreError if
    ranks disagree about a tensor, or if an element is missing or saved twice. Raises InternalError if ranks have
    different scalars for a parameter."""
    entries: dict[str, TensorEntry] = {}
    facts: dict[str, tuple[Any, ...]] = {}
    parts: dict[str, list[Part]] = {}
    scalars: dict[str, Any] = {}
    first = 0
    for rank, share in enumerate(shares):
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
        first += len(share.stores if share.rank is None else share.rank.stores)
    tensors = {key: entry.with_parts(sorted(parts[key])) for key, entry in entries.items()}
    try:
        _check_tensors(tensors)
    except ValueError as error:
        raise StoreError(f"The ranks do not have each element once: {error}.") from error
    return {"tensors": tensors, "scalars": scalars}


def _moved(parts: Sequence[Part], first: int) -> list[Part]:
    """Return the parts, with `first` added to each store number."""
    return [part._replace(sources=tuple(at._replace(store=first + at.store) for at in part.sources)) for part in parts]


# -- what a run saves --------------------------------------------------------------------------------------------------

MASTER, PARAM, BUFFER = "master", "param", "buffer"
VALUE_KINDS = (MASTER, PARAM, BUFFER)
"""The kinds of keys that hold a model's values; all others hold optimizer state."""

_READ_AHEAD = 4
_MOST_WRITTEN = 32
"""The largest number of sub-groups with writes in flight."""


@dataclass(frozen=True, kw_only=True)
class RunState:
    """The parts of a run that are needed to save and load it. `pipeline`: its `io` moves sub-groups. `weights`: has the
    units that live on the device. `param_staging`: buffers for parameters on nvme."""

    module: nn.Module
    specs: Sequence[ParamSpec]
    units: Sequence[Unit]
    pipeline: UpdatePipeline
    weights: WholeWeights
    param_staging: StagingPool | None

    @cached_property
    def view(self) -> StateView:
        return self.pipeline.view

    @cached_property
    def runtime(self) -> Runtime:
        return self.pipeline.runtime

    def device_flat(self, unit: Unit) -> torch.Tensor:
        """Return the flat (1-D tensor) of a unit that lives on the device."""
        return self.weights.pager.storage(unit).flat

    @cached_property
    def updated_units(self) -> frozenset[int]:
        """The indices of the units that updates write. Each has a parameter with a master on at least one rank."""
        return frozenset(
            unit.index
            for unit in self.units
            if any(entry.param.name in self.view.shards.trained for entry in unit.entries)
        )

    @cached_property
    def own_layouts(self) -> Sequence[StateLayout]:
        """The layouts of the sub-groups that this rank saves."""
        layouts = self.view.layouts  # state that is not sharded is on every rank: each sub-group is saved by one rank
        return layouts if self.view.shards.is_sharded else [own for own in layouts if self._is_own(own.subgroup.index)]

    def is_part(self, unit: Unit) -> bool:
        """Return whether this rank has only its own shard of the unit's parameters."""
        home = self.view.inventory.find(unit, "param")
        return home is not None and home.slot.nbytes < unit.nbytes

    def saved_units(self, with_frozen: bool = True) -> list[Unit]:
        """Return the units that this rank saves and that no update writes. `with_frozen`: False leaves out frozen
        units."""
        return [
            unit
            for unit in self.units
            if (self._is_own(unit.index) or self.is_part(unit))  # a unit that is whole on all ranks is saved by one
            and unit.index not in self.updated_units
            and (with_frozen or unit.trainable)
        ]

    def _is_own(self, index: int) -> bool:
        ranks = self.runtime.collectives
        return index % ranks.world_size == ranks.rank

    def buffers(self) -> dict[str, torch.Tensor]:
        """Return name -> persistent buffer. A buffer with several names is returned under the first only."""
        found: dict[torch.Tensor, str] = {}
        for path, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    found.setdefault(buffer, f"{path}.{name}".lstrip("."))
        return {name: buffer for buffer, name in found.items()}

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Other name of a tensor in `state_dict()` -> the name under which the tensor is saved."""
        saved = {spec.name for spec in self.specs} | self.buffers().keys()
        names: dict[int, list[str]] = {}
        for name, tensor in state_tensors(self.module):
            names.setdefault(id(tensor), []).append(name)
        found = {}
        for own in names.values():
            first = next((name for name in own if name in saved), None)
            found.update({name: first for name in own if first is not None and name not in saved})
        return found


def state_tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and persistent buffers of `model.state_dict()`, with their names. A tied tensor is yielded
    once for each name."""
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = path and f"{path}."
        for name, param in module._parameters.items():
            if param is not None:
                yield prefix + name, param
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield prefix + name, buffer


def run_ahead(
    io: SubGroupIO,
    layouts: Sequence[StateLayout],
    begin: Callable[[StateLayout], tuple[SubGroupWork, Callable[[], None]] | None],
    retire: Callable[[SubGroupWork], None] = lambda written: None,
) -> None:
    """Save or load sub-groups in order, and read several ahead. `begin`: starts to read a sub-group. It returns a
    `SubGroupWork` and a function that waits for the reads and starts the writes, or None while no buffer is free.
    `retire`: called with each `SubGroupWork` when its writes are done. After an error, wait until no transfer uses a
    buffer, then raise."""
    waiting, begun, written = deque(layouts), deque[tuple[SubGroupWork, Callable[[], None]]](), deque[SubGroupWork]()

    def finish() -> None:
        io.finish(written[0])
        retire(written.popleft())

    try:
        while waiting or begun:
            while waiting and len(begun) < _READ_AHEAD and (opened := begin(waiting[0])) is not None:
                begun.append(opened)
                waiting.popleft()
            if begun:
                begun[0][1]()
                written.append(begun.popleft()[0])
            elif written:
                finish()
            else:
                raise InternalError("A staging buffer was expected to be free for a checkpoint; all are in use.")
            while written and (len(written) > _MOST_WRITTEN or written[0].is_written()):
                finish()
        while written:
            finish()
    except BaseException:
        io.cancel([*written, *(work for work, _ in begun)])
        raise


# -- keys --------------------------------------------------------------------------------------------------------------


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in manifests, such as "float32". Raises StoreError if a checkpoint cannot hold it."""
    name = str(dtype).removeprefix("torch.")
    if name not in ITEMSIZES:
        raise StoreError(f"A checkpoint cannot hold a tensor of {dtype}; it can hold {', '.join(sorted(ITEMSIZES))}.")
    return name


@cache
def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that a manifest names. Raises StoreError if this PyTorch does not have it."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise StoreError(f"PyTorch {torch.__version__} has no dtype {name}, which this checkpoint needs.")
    return dtype


@cache
def describe(
    dtype: torch.dtype, shape: tuple[int, ...], order: tuple[int, ...] | None = None, form: Form = "plain"
) -> TensorEntry:
    """Return a `TensorEntry` without parts (the places of its bytes). `order`: the dimensions in the order in which
    they lie in memory; None if contiguous. `form`: see [Note: Portable form]. Raises StoreError for a dtype that a
    checkpoint cannot hold."""
    return TensorEntry(dtype=dtype_name(dtype), shape=tuple(shape), order=order, form=form)


def describe_field(param: ParamSpec, field: StateField, elementwise: bool, form: Form = "plain") -> TensorEntry:
    """Return a `TensorEntry` without parts for the state array `field` of a whole parameter."""
    if elementwise and field.block_numel > 1:
        return describe(field.dtype, (-(-param.numel // field.block_numel),), None, form)
    shape = param.shape if elementwise else field.shape
    return describe(field.dtype, shape, param.order if shape == param.shape else None, form)


def _field_range(piece: ParamPiece, field: StateField, elementwise: bool) -> tuple[int, int]:
    """Return (start, stop): the elements of a parameter's state array `field` that belong to `piece`."""
    if not elementwise:
        return 0, prod(field.shape)
    return piece.param_start // field.block_numel, -(-(piece.param_start + piece.numel) // field.block_numel)


# -- places ------------------------------------------------------------------------------------------------------------


class RecordPlaces(NamedTuple):
    """The places to which a save writes this rank's values. `state`: sub-group -> where its slot begins. `params`:
    sub-group and segment -> where the segment's parameters begin; only with state_format bf16_remainder. `unit`: a unit
    that no update writes -> where its parameters begin. `buffers`: where the buffers begin; None if this rank saves
    none."""

    state: Callable[[StateLayout], Source]
    params: Callable[[StateLayout, Segment], Source]
    unit: Callable[[Unit], Source]
    buffers: Source | None


def copied_places(scalars: Scalars) -> RecordPlaces:
    """Return the places in this rank's data file to which a full save writes. The record of a sub-group holds the bytes
    of its slot, then its parameters if state_format is bf16_remainder. `scalars`: the scalars of each sub-group's
    state; a sub-group without scalars has only masters."""

    def state(layout: StateLayout) -> Source:
        return Source(0, f"state/{layout.subgroup.index}", 0)

    def params(layout: StateLayout, segment: Segment) -> Source:
        before = sum(own.nbytes for own in layout.subgroup.segments if own.start < segment.start)
        return state(layout).at(state_nbytes(layout, scalars) + before)

    return RecordPlaces(state, params, lambda unit: Source(0, f"param/{unit.index}", 0), Source(0, "buffers", 0))


def committed_places(state: RunState, tiers: Sequence[object], copies: Mapping[int, Home]) -> RecordPlaces:
    """Return the places of a commit's values in the swap files. `tiers`: this rank's nvme tiers that take part in
    commits, by store number. `copies`: unit index, or BUFFERS for the buffers -> home of the durable copy."""
    buffers = copies.get(BUFFERS)

    def start(home: Home) -> Source:
        return Source(tiers.index(home.tier), home.slot.name, 0)

    def home_of(unit: Unit) -> Home:
        return copies.get(unit.index) or state.view.inventory.home(unit, "param")

    def params(_: StateLayout, segment: Segment) -> Source:
        home = home_of(segment.unit)
        return start(home).at(home.offset_of(segment))

    return RecordPlaces(
        lambda layout: start(state.view.inventory.home(layout.subgroup, "state")),
        params,
        lambda unit: start(home_of(unit)),
        None if buffers is None else start(buffers),
    )


def state_nbytes(layout: StateLayout, scalars: Scalars) -> int:
    """Return the number of used bytes in a sub-group's slot: its masters, and its state if it has state."""
    return layout.nbytes if scalars.has_state(layout) else layout.master_nbytes


def pack(buffers: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor, int]]:
    """Lay out all buffers in one record. For each buffer that is not empty, yield (name, buffer, byte offset in the
    record)."""
    position = 0
    for name, buffer in buffers.items():
        if not buffer.numel():
            continue
        yield name, buffer, position
        position = align_up(position + buffer.numel() * buffer.dtype.itemsize, PACKED_ALIGNMENT_NBYTES)


_Row = tuple[str, TensorEntry, int, int, Sequence[Source]]
"""A part of the tensor `key`: (key, the tensor's entry, and the fields of a `Part`: start, stop, sources)."""


def list_tensors(
    state: RunState,
    places: RecordPlaces,
    scalars: Scalars,
    buffers: Mapping[str, torch.Tensor],
    *,
    with_frozen: bool = True,
) -> dict[str, TensorEntry]:
    """Return key -> entry of each tensor that this rank saves, with this rank's parts only. `buffers`: the model's
    buffers by name; empty if another rank saves them. Any thread may call this."""
    found: dict[str, tuple[TensorEntry, list[Part]]] = {}
    rows = chain(
        chain.from_iterable(_list_subgroup(state, places, scalars, layout) for layout in state.own_layouts),
        _list_units(state, places, with_frozen),
        _list_buffers(places, buffers),
    )
    for key, entry, start, stop, sources in rows:
        parts = found.setdefault(key, (entry, []))[1]
        if start < stop:
            parts.append(Part(start, stop, tuple(sources)))
    return {key: entry.with_parts(sorted(parts)) for key, (entry, parts) in found.items()}


def _list_subgroup(state: RunState, places: RecordPlaces, scalars: Scalars, layout: StateLayout) -> Iterator[_Row]:
    record, joined = places.state(layout), layout.masters.needs_params
    for segment in layout.subgroup.segments:
        for entry, low, high in segment.entries():
            start, stop, spec = low - entry.start, high - entry.start, entry.param
            before = low - segment.unit_start
            masters = [record.at(first + before * dtype.itemsize) for first, _, dtype in layout.master_spans(segment)]
            if joined:
                masters.insert(1, places.params(layout, segment).at(before * segment.unit.itemsize))
            if spec.name in state.view.shards.trained:
                described = describe(torch.float32, spec.shape, spec.order, "joined" if joined else "plain")
                yield f"{MASTER}/{spec.name}", described, start, stop, masters
            else:
                described = describe(segment.unit.dtype, spec.shape, spec.order, "plain" if joined else "rounded")
                yield f"{PARAM}/{spec.name}", described, start, stop, [masters[1 if joined else 0]]
    rule = state.view.rule
    for piece in scalars.stepped(layout):
        for array in layout.arrays_for(piece):
            field = array.field
            form: Form = "magnitude" if joined and field.name == rule.unsigned_field else "plain"
            start, stop = _field_range(piece, field, rule.elementwise)
            first = piece.start // field.block_numel if array.piece is None else 0
            place = record.at(array.offset + first * field.dtype.itemsize)
            described = describe_field(piece.param, field, rule.elementwise, form)
            yield f"{field.name}/{piece.param.name}", described, start, stop, [place]


def _list_units(state: RunState, places: RecordPlaces, with_frozen: bool) -> Iterator[_Row]:
    """Yield the parameters in units that no update writes. Rank 0 also yields parameters without elements, which are in
    no unit."""
    for unit in state.saved_units(with_frozen):
        home, record = state.view.inventory.find(unit, "param"), places.unit(unit)
        here = slice(0, unit.numel) if home is None else home.elements(unit)
        for entry in unit.entries:
            low, high, spec = max(entry.start, here.start), min(entry.stop, here.stop), entry.param
            if low < high:
                place = record.at((low - here.start) * unit.itemsize)
                described = describe(unit.dtype, spec.shape, spec.order)
                yield f"{PARAM}/{spec.name}", described, low - entry.start, high - entry.start, [place]
    for spec in state.specs if state.runtime.collectives.rank == 0 else ():
        if not spec.numel and (with_frozen or spec.trainable):
            yield f"{PARAM}/{spec.name}", describe(spec.dtype, spec.shape), 0, 0, ()


def _list_buffers(places: RecordPlaces, buffers: Mapping[str, torch.Tensor]) -> Iterator[_Row]:
    for name, buffer, offset in pack(buffers):
        assert places.buffers is not None, "buffers are planned with a record"
        described = describe(buffer.dtype, tuple(buffer.shape))
        yield f"{BUFFER}/{name}", described, 0, buffer.numel(), [places.buffers.at(offset)]
    for name, buffer in buffers.items():
        if not buffer.numel():
            yield f"{BUFFER}/{name}", describe(buffer.dtype, tuple(buffer.shape)), 0, 0, ()
