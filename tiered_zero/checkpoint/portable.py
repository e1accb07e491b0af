"""State of a run in the portable form: keys, shapes, and which part of them this rank saves.

[Note: Portable form] Everything is keyed by parameter name and by elements of the parameter in the order of its memory,
so that no cut, tier or unit is part of it. A key is `<kind>/<parameter name>`:

    master   the fp32 master, also where it rests as bf16 parameter, remainder and mark
    <field>  a state array of the rule under its own name, such as exp_avg; only of parameters that were stepped
    param    a parameter without a master: frozen, or in no param group
    buffer   a persistent buffer

An elementwise state array has the parameter's shape; the scales of 8-bit moments are 1-D, one for each block of the
parameter; an array of any other rule keeps its own shape. Parameters with a master are not saved besides: they are
their masters, rounded. Bytes are saved as they rest: a key's form (index.py) says how it is made of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import nn

from tiered_zero.checkpoint.index import TensorEntry
from tiered_zero.checkpoint.tensors import describe
from tiered_zero.checkpoint.weights import state_tensors
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece
from tiered_zero.rules.rule import StateField
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.update.state_view import StateView
from tiered_zero.update.stepper import StreamingStepper

MASTER, PARAM, BUFFER = "master", "param", "buffer"
VALUE_KINDS = (MASTER, PARAM, BUFFER)
"""The kinds of keys that hold a model's values; all others are optimizer state."""


def param_key(spec: ParamSpec) -> str:
    return f"{PARAM}/{spec.name}"


def master_key(spec: ParamSpec) -> str:
    return f"{MASTER}/{spec.name}"


def buffer_key(name: str) -> str:
    return f"{BUFFER}/{name}"


def field_spec(param: ParamSpec, field: StateField, elementwise: bool) -> TensorEntry:
    """Describe a whole parameter's state array."""
    if elementwise and field.block_numel > 1:
        return describe(field.dtype, (-(-param.numel // field.block_numel),))
    shape = param.shape if elementwise else field.shape
    return describe(field.dtype, shape, param.order if shape == param.shape else None)


def field_range(piece: ParamPiece, field: StateField, elementwise: bool) -> tuple[int, int]:
    """Locate a piece's part of its parameter's state array: elements [start, stop)."""
    if not elementwise:
        return 0, prod(field.shape)
    return piece.param_start // field.block_numel, -(-(piece.param_start + piece.numel) // field.block_numel)


@dataclass(frozen=True, kw_only=True)
class RunState:
    """Everything of a run that a checkpoint reads and writes, with what moves it. `trained`: names of the parameters
    that have a master, on whatever rank. `view`: of this rank's state; where not `is_sharded` every rank has all.
    `param_flat(unit)`: the flat of a unit that lives on the device."""

    module: nn.Module
    specs: Sequence[ParamSpec]
    units: Sequence[Unit]
    view: StateView
    trained: frozenset[str]
    is_sharded: bool
    stepper: StreamingStepper
    inventory: Inventory
    runtime: Runtime
    param_staging: StagingPool | None
    param_flat: Callable[[Unit], torch.Tensor]

    @cached_property
    def updated_units(self) -> frozenset[int]:
        """Indices of the units with elements in a sub-group of any rank, whose parameters an update writes."""
        return frozenset(
            unit.index for unit in self.units if any(entry.param.name in self.trained for entry in unit.entries)
        )

    @cached_property
    def own_layouts(self) -> Sequence[StateLayout]:
        """The sub-groups that this rank saves: its own, or its part of what every rank has."""
        layouts = self.view.layouts
        return layouts if self.is_sharded else [own for own in layouts if self._is_own(own.subgroup.index)]

    @cached_property
    def own_units(self) -> Sequence[Unit]:
        """The units whose parameters without a master this rank saves: its shards, or its part of whole ones."""
        return [unit for unit in self.units if self._is_own(unit.index) or self.is_part(unit)]

    def is_part(self, unit: Unit) -> bool:
        """Whether only this rank's shard of the unit's parameters is here."""
        home = self.inventory.find(unit, "param")
        return home is not None and home.slot.nbytes < unit.nbytes

    def saved_units(self, with_frozen: bool = True) -> list[Unit]:
        """List the units that this rank saves as they are: no update writes their parameters."""
        return [
            unit for unit in self.own_units if unit.index not in self.updated_units and (with_frozen or unit.trainable)
        ]

    def _is_own(self, index: int) -> bool:
        ranks = self.runtime.collectives
        return index % ranks.world_size == ranks.rank

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the persistent buffers, each once, under its first name."""
        for path, module in self.module.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                if name not in module._non_persistent_buffers_set:
                    yield f"{path}.{name}".lstrip("."), buffer

    @cached_property
    def aliases(self) -> dict[str, str]:
        """Every further name of a parameter or buffer in `state_dict()` -> the one under which it is saved."""
        saved = {spec.name for spec in self.specs} | {name for name, _ in self.named_buffers()}
        names: dict[int, list[str]] = {}
        for name, tensor in state_tensors(self.module):
            names.setdefault(id(tensor), []).append(name)
        found = {}
        for own in names.values():
            first = next((name for name in own if name in saved), None)
            found.update({name: first for name in own if first is not None and name not in saved})
        return found
