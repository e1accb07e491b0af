"""Lay out a unit's flat: the place of each parameter, and the range that each rank owns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import prod
from typing import Any, TypeVar, cast

from tiered_zero.sizes import PAGE_NBYTES, align_up

PARAM_ALIGNMENT_NBYTES = 512
"""Alignment of each parameter in its flat. torch's device allocators align tensors in the same way, and this matters:
GEMM libraries choose kernels by the alignment of operands, and another kernel may add in another order."""

PACKED_ALIGNMENT_NBYTES = 128
"""Alignment of each buffer among those packed for a checkpoint, where nothing computes."""

CUT_NUMEL = PAGE_NBYTES // 2
"""Shards and sub-groups end at multiples of this many elements: whole pages even in 16 bits, since tiers write whole
pages."""

Memory = TypeVar("Memory")
"""A 1-D, contiguous tensor; this package does not import torch."""


@dataclass(frozen=True, kw_only=True)
class ParamSpec:
    """One parameter, however many names it has.

    `name`: its first fully qualified name. `aliases`: its other names (tied weights). `dtype`: its dtype on the device.
    `index`: its place in `model.parameters()`. `embedding`: whether it is the table of an nn.Embedding, possibly tied
    to an output head. `stride`: the strides of its elements in memory, which are dense; None: row-major. `owner`: the
    class of the module that holds it."""

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
        """Return the elements of `value`, which has the parameter's shape, as [numel] in the parameter's memory order.
        The result is a view if `value` has the parameter's strides."""
        tensor: Any = value
        if self.stride is None:
            return cast("Memory", tensor.contiguous().view(-1))
        if tensor.stride() != self.stride:
            tensor = tensor.new_empty_strided(self.shape, self.stride).copy_(tensor)
        return cast("Memory", tensor.as_strided((self.numel,), (1,), tensor.storage_offset()))


@dataclass(frozen=True)
class FlatEntry:
    """A parameter in a flat. `start`: the parameter's first element there."""

    param: ParamSpec
    start: int

    @cached_property
    def stop(self) -> int:
        return self.start + self.param.numel


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Parameters that move together. All have one dtype; all are trainable or none is; all are persistent or none is.

    `module`: the qualified name of the module whose forward uses the unit ("" is the root). `bounds`: W+1 offsets for W
    ranks; rank r owns the elements from `bounds[r]` to `bounds[r + 1]` of the flat. Zeros lie between entries and after
    the last one; they are never read as values."""

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
    """Return the bounds of a flat whose last parameter ends at element `stop`: equal shards, of whole pages in any
    dtype."""
    shard = align_up(-(-stop // world_size), max(CUT_NUMEL, PAGE_NBYTES // itemsize))
    return tuple(rank * shard for rank in range(world_size + 1))


def place_by_rank(
    params: Sequence[ParamSpec], itemsize: int, world_size: int
) -> tuple[tuple[FlatEntry, ...], tuple[int, ...]]:
    """Place parameters one after another, and cut shards between parameters, for rules that step whole parameters. Each
    rank owns about as many elements; with more ranks than parameters some own none. Returns the entries, and the bounds
    in whole pages of any dtype."""
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
