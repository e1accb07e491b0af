"""Find the units of a module tree, by default one per transformer block, and lay out each unit's flat."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, TypeVar, cast

from tiered_zero.sizes import PAGE_NBYTES, align_up

PARAM_ALIGNMENT_NBYTES = 512
"""Alignment of each parameter in its flat. It equals the alignment of torch's device allocators, because GEMM libraries
choose a kernel by the alignment of operands, and another kernel may add in another order."""

PACKED_ALIGNMENT_NBYTES = 128
"""Alignment of each of the model's buffers when they are packed for a checkpoint. It is less than
PARAM_ALIGNMENT_NBYTES, because nothing computes on packed buffers."""

CUT_NUMEL = PAGE_NBYTES // 2
"""Shards and sub-groups end at multiples of this many elements. Tiers write whole pages, and in a dtype of 2 or more
bytes such a multiple fills whole pages."""

Memory = TypeVar("Memory")
"""A torch tensor. It is a type variable, because this package does not import torch."""


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter; tied weights are one parameter.

    `name`: its first fully qualified name. `dtype`: its dtype on the device. `index`: its position in
    `model.parameters()`. `aliases`: its other names. `embedding`: whether it is the table of an nn.Embedding or
    nn.EmbeddingBag. `stride`: its strides, without gaps between elements; None: row-major. `owner`: the class name of
    its module.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Any
    trainable: bool
    index: int
    aliases: tuple[str, ...] = ()
    embedding: bool = False
    stride: tuple[int, ...] | None = None
    owner: str = ""

    @cached_property
    def numel(self) -> int:
        return prod(self.shape)

    @cached_property
    def order(self) -> tuple[int, ...] | None:
        """The parameter's dimensions from the slowest to the fastest in memory; None if the parameter is row-major."""
        stride = self.stride
        if stride is None:
            return None
        order = tuple(sorted(range(len(self.shape)), key=lambda dim: -stride[dim]))
        return None if order == tuple(range(len(order))) else order

    def view(self, memory: Memory) -> Memory:
        """Return `memory`, [numel], as a view with the parameter's shape and strides."""
        tensor: Any = memory
        if self.stride is None:
            return cast("Memory", tensor.view(self.shape))
        return cast("Memory", tensor.as_strided(self.shape, self.stride, tensor.storage_offset()))

    def flatten(self, value: Memory) -> Memory:
        """Return the elements of `value` as [numel], in the parameter's memory order; a view if `value` has the
        parameter's strides."""
        tensor: Any = value
        if self.stride is None:
            return cast("Memory", tensor.contiguous().view(-1))
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return cast("Memory", tensor.as_strided((self.numel,), (1,), tensor.storage_offset()))


@dataclass(frozen=True)
class FlatEntry:
    """A parameter in a flat. `start`: the position of the parameter's first element in the flat."""

    param: ParamSpec
    start: int

    @cached_property
    def stop(self) -> int:
        return self.start + self.param.numel


@dataclass(frozen=True, kw_only=True, eq=False)
class Unit:
    """Parameters that move together, as one 1-D tensor, the flat. They agree in `dtype`, `trainable` and `persistent`
    (whether they never leave the device). A unit equals only itself, so it can be a key.

    `module`: the name of the module whose forward uses the unit; "" is the root. `bounds`: rank r owns elements
    `bounds[r]` to `bounds[r + 1]` of the flat. Padding is zero.
    """

    index: int
    name: str
    module: str
    dtype: Any
    trainable: bool
    persistent: bool
    entries: tuple[FlatEntry, ...]
    bounds: tuple[int, ...]

    @cached_property
    def numel(self) -> int:
        """The number of elements in the flat, including padding."""
        return self.bounds[-1]

    @cached_property
    def itemsize(self) -> int:
        return int(self.dtype.itemsize)

    @cached_property
    def nbytes(self) -> int:
        return self.numel * self.itemsize

    @cached_property
    def params_numel(self) -> int:
        """The number of elements without padding."""
        return sum(entry.param.numel for entry in self.entries)

    @cached_property
    def products_numel(self) -> int:
        """The number of elements that matrix products read: all except embeddings that are only looked up."""
        params = (entry.param for entry in self.entries)
        return sum(param.numel for param in params if param.aliases or not param.embedding)

    @cached_property
    def is_tied(self) -> bool:
        """Whether the unit holds an embedding that is also the weight of a matrix product."""
        return any(entry.param.embedding and entry.param.aliases for entry in self.entries)

    def shard(self, rank: int) -> range:
        """Return the elements of the flat that `rank` owns."""
        return range(self.bounds[rank], self.bounds[rank + 1])

    @cached_property
    def shard_nbytes(self) -> int:
        """The bytes of the largest shard."""
        return max(stop - start for start, stop in pairwise(self.bounds)) * self.itemsize


def place_params(params: Sequence[ParamSpec]) -> tuple[FlatEntry, ...]:
    """Place parameters of one dtype one after another, each at an aligned start."""
    entries, position = [], 0
    for param in params:
        entries.append(FlatEntry(param, position))
        position = align_up(position + param.numel, max(1, PARAM_ALIGNMENT_NBYTES // param.dtype.itemsize))
    return tuple(entries)


def equal_bounds(stop: int, itemsize: int, world_size: int = 1) -> tuple[int, ...]:
    """Cut a flat into equal shards of whole pages, and return their bounds: rank r owns elements `bounds[r]` to
    `bounds[r + 1]`. `stop`: the element at which the last parameter ends."""
    # whole pages in the flat's dtype, and in any dtype of at least 2 bytes
    shard = align_up(-(-stop // world_size), max(CUT_NUMEL, PAGE_NBYTES // itemsize))
    return tuple(rank * shard for rank in range(world_size + 1))


def place_by_rank(
    params: Sequence[ParamSpec], itemsize: int, world_size: int
) -> tuple[tuple[FlatEntry, ...], tuple[int, ...]]:
    """Place parameters one after another in a flat, and cut the flat into one shard of whole pages for each rank. No
    parameter is cut. Ranks get about equal numbers of elements; some ranks may get none. Returns the entries and the
    bounds (see `Unit`)."""
    page = max(CUT_NUMEL, PAGE_NBYTES // itemsize)
    total = max(1, sum(param.numel for param in params))
    entries: list[FlatEntry] = []
    bounds, position, passed = [0], 0, 0
    for param in params:
        owner = min(world_size - 1, (2 * passed + param.numel) * world_size // (2 * total))
        if owner >= len(bounds):
            position = align_up(position, page)
            bounds += [position] * (owner + 1 - len(bounds))
        entries.append(FlatEntry(param, position))
        position = align_up(position + param.numel, max(1, PARAM_ALIGNMENT_NBYTES // itemsize))
        passed += param.numel
    bounds += [align_up(position, page)] * (world_size + 1 - len(bounds))
    return tuple(entries), tuple(bounds)


# -- find the units of a module tree -----------------------------------------------------------------------------------

MAX_UNIT_NUMEL = 1 << 28
"""The most elements of a unit if the config sets no cap: half a GiB in 16 bits, far more than a link needs for its full
rate."""

SMALL_NUMEL = 1 << 20
"""The most elements of a unit that is joined from small parts of a block. In a small model the limit is a 64th of all
elements. Small parts are joined because the calls for each unit take as long as a copy of 2 MiB over PCIe."""


@dataclass(frozen=True, kw_only=True)
class UnitRules:
    """How to cut a model into units.

    `size_cap_numel`: the most elements of a unit; None: `find_units` chooses. `persistence_numel`: parameters of at
    most this many elements never leave the device, up to `max_persistent_numel` elements in total. `whole_params`:
    whether each rank owns whole parameters.
    """

    size_cap_numel: int | None = None
    persistence_numel: int = 0
    max_persistent_numel: int = 1 << 62
    world_size: int = 1
    whole_params: bool = False


@dataclass(frozen=True, kw_only=True)
class ModuleSpec:
    """One module of a tree. `params`: the indices of its own parameters in the list of ParamSpecs. `is_stack`: whether
    it holds blocks or experts that run one by one. `is_list`: whether it is a stack with numbered children. `runs`:
    whether it has a forward. `is_compiled`: whether torch.compile makes one graph of it."""

    name: str = ""
    params: tuple[int, ...] = ()
    children: tuple[ModuleSpec, ...] = ()
    is_stack: bool = False
    is_list: bool = False
    runs: bool = True
    is_compiled: bool = False

    @cached_property
    def all_params(self) -> tuple[int, ...]:
        """The indices of all parameters in the subtree, each once, in the order of `module.parameters()`."""
        found = [*self.params, *(index for child in self.children for index in child.all_params)]
        return tuple(dict.fromkeys(found))

    @cached_property
    def holds_stack(self) -> bool:
        return self.is_stack or any(child.holds_stack for child in self.children)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """The properties that all parameters of a unit share."""

    dtype: Any
    trainable: bool
    persistent: bool


@dataclass(kw_only=True)
class _Part:
    """Parameters that become a unit, alone or joined. `module`: the name of the module whose forward uses them.
    `block`: the name of the block around that module; None: never join the part. Small parts of one block and kind are
    joined."""

    module: str
    block: str | None
    kind: _Kind
    params: list[ParamSpec]

    @property
    def numel(self) -> int:
        return sum(param.numel for param in self.params)


def find_units(root: ModuleSpec, specs: Sequence[ParamSpec], rules: UnitRules) -> list[Unit]:
    """Cut the tree into units by modules, dtype, `requires_grad` and persistence (persistent parameters never leave the
    device). `specs`: all parameters of the model. A tied parameter belongs to the first unit that has it. Units are in
    the order of the tree."""
    total = sum(spec.numel for spec in specs)
    cap = rules.size_cap_numel or min(MAX_UNIT_NUMEL, max(1, total // 4))  # at least four units if possible
    parts = _join_small(_cut_parts(root, specs, cap, rules), min(SMALL_NUMEL, cap, total // 64))
    units: list[Unit] = []
    for part in parts:
        kind = part.kind
        words = [part.module or "<root>", str(kind.dtype).removeprefix("torch.")]
        words += [] if kind.trainable else ["frozen"]
        words += ["persistent"] if kind.persistent else []
        if rules.whole_params:
            entries, bounds = place_by_rank(part.params, kind.dtype.itemsize, rules.world_size)
        else:
            entries = place_params(part.params)
            bounds = equal_bounds(entries[-1].stop, kind.dtype.itemsize, rules.world_size)
        if entries[-1].stop == 0:  # only empty parameters: there is nothing to store or move
            continue
        units.append(
            Unit(
                index=len(units),
                name=":".join(words),
                module=part.module,
                dtype=kind.dtype,
                trainable=kind.trainable,
                persistent=kind.persistent,
                entries=entries,
                bounds=bounds,
            )
        )
    return units


def _cut_parts(root: ModuleSpec, specs: Sequence[ParamSpec], cap: int, rules: UnitRules) -> Iterator[_Part]:
    placed: set[int] = set()
    persistent_numel = 0
    for module, params, block in _walk(root, specs, cap, rules):
        groups: dict[_Kind, list[ParamSpec]] = {}
        for index in params:
            if index in placed:
                continue
            placed.add(index)
            spec = specs[index]
            persistent = (
                0 < spec.numel <= rules.persistence_numel
                and persistent_numel + spec.numel <= rules.max_persistent_numel
            )
            persistent_numel += spec.numel if persistent else 0
            kind = _Kind(dtype=spec.dtype, trainable=spec.trainable, persistent=persistent)
            groups.setdefault(kind, []).append(spec)
        for kind, members in groups.items():
            yield _Part(module=module, block=block, kind=kind, params=members)


def _join_small(parts: Iterable[_Part], most_numel: int) -> list[_Part]:
    """Join small parts that have the same block and kind. A joined part has at most `most_numel` elements, and takes
    the place of its first part."""
    joined: list[_Part] = []
    open_parts: dict[tuple[str, _Kind], _Part] = {}
    for part in parts:
        first = None if part.block is None else open_parts.get((part.block, part.kind))
        # a limit, because a part is fetched whole even if a batch uses only one expert in it
        if first is not None and part.block is not None and first.numel + part.numel <= most_numel:
            first.module = part.block
            first.params += part.params
            continue
        joined.append(part)
        if part.block is not None and part.numel < most_numel and first is None:
            open_parts[part.block, part.kind] = part
    return joined


def _walk(
    module: ModuleSpec, specs: Sequence[ParamSpec], cap: int, rules: UnitRules, above: tuple[ModuleSpec, ...] = ()
) -> Iterator[tuple[str, tuple[int, ...], str | None]]:
    """Cut `module` into parts. Yield (module name, indices of parameters, name of their block or None) for each part.
    `cap`: the most elements of a unit. `above`: the modules around `module`, root first."""
    numel = sum(specs[index].numel for index in module.all_params)
    in_list = any(outer.is_list for outer in above)
    # Ranks may run different experts, and must gather the same units. A stack with a forward runs all its children.
    is_whole = rules.world_size > 1 and in_list and module.holds_stack and not (module.is_stack and module.runs)
    fits = numel <= cap or (module.is_compiled and bool(above) and rules.size_cap_numel is None)
    if not module.children or is_whole or (fits and not module.holds_stack):
        yield module.name, module.all_params, _block(above)
        return
    above = (*above, module)
    if module.params:
        yield module.name, module.params, _block(above)
    for child in module.children:
        yield from _walk(child, specs, cap, rules, above)


def _block(above: Sequence[ModuleSpec]) -> str | None:
    """Return the name of the innermost block among the modules `above` (root first) that contains a stack, such as a
    list of experts. None if no block contains one."""
    blocks = [
        module.name
        for outer, module in pairwise(above)
        if outer.is_list and module.runs and module.holds_stack and not module.is_stack
    ]
    return blocks[-1] if blocks else None
