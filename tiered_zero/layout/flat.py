"""Where each parameter lies in its unit's flat array."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch

from tiered_zero.layout.swap_bytes import flat_numel, param_starts


@dataclass(frozen=True)
class ParamSpec:
    """One parameter by identity. `name`: its first fully qualified name; `aliases`: the others (tied weights).

    `dtype`: on the device. `index`: its place in `model.parameters()`. `embedding`: the table of an nn.Embedding, maybe
    tied to an output head. `stride`: of its elements in memory, which it has densely; None: row-major.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool
    index: int
    aliases: tuple[str, ...] = ()
    embedding: bool = False
    stride: tuple[int, ...] | None = None

    @property
    def numel(self) -> int:
        return prod(self.shape)

    def view(self, memory: torch.Tensor) -> torch.Tensor:
        """`memory`, [numel] and contiguous, in the parameter's shape and strides."""
        if self.stride is None:
            return memory.view(self.shape)
        return memory.as_strided(self.shape, self.stride, memory.storage_offset())

    def flatten(self, tensor: torch.Tensor) -> torch.Tensor:
        """[numel]: the elements of `tensor`, of the parameter's shape, in the order in which the parameter has them in
        memory. A view where `tensor` has the parameter's strides."""
        if self.stride is None:
            return tensor.contiguous().view(-1)
        if tensor.stride() != self.stride:
            own = torch.empty_strided(self.shape, self.stride, dtype=tensor.dtype, device=tensor.device)
            tensor = own.copy_(tensor)
        return tensor.as_strided((self.numel,), (1,), tensor.storage_offset())


@dataclass(frozen=True)
class FlatEntry:
    """`start`: first element in the flat."""

    param: ParamSpec
    start: int

    @property
    def stop(self) -> int:
        return self.start + self.param.numel


@dataclass(frozen=True)
class Unit:
    """Parameters that move together: one dtype, trainable or not, persistent or not. A flat [P], `P = W * S`.

    `module`: qualified name of the module whose forward uses it ("" is the root). Between entries and after the last
    lie zeros that are never read as values.
    """

    index: int
    name: str
    module: str
    dtype: torch.dtype
    trainable: bool
    persistent: bool
    entries: tuple[FlatEntry, ...]
    world_size: int = 1

    @cached_property
    def numel(self) -> int:
        """P: padded so that each rank's shard is whole pages."""
        return flat_numel(self.entries[-1].stop, self.dtype.itemsize, self.world_size)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.world_size

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize


def place_params(params: list[ParamSpec]) -> tuple[FlatEntry, ...]:
    """Lay parameters of one dtype one after another, each at an aligned start."""
    starts = param_starts([param.numel for param in params], params[0].dtype.itemsize)
    return tuple(map(FlatEntry, params, starts))
