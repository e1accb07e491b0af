"""The optimizer state of a run in torch's format, read from and written to the tiers sub-group by sub-group, and
brought together where ranks have shards of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, final

import torch
from torch import nn

from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.hardware.agreement import agree
from tiered_zero.hardware.collectives import Collectives, SingleRank
from tiered_zero.hardware.launcher import local_world_size
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.staging import StagingPool
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece
from tiered_zero.optim.optimizer_copy import same
from tiered_zero.optim.rule import Run, UpdateRule
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.slots import leased_slot
from tiered_zero.update.stepper import StreamingStepper

logger = logging.getLogger("tiered_zero")

Result = TypeVar("Result")

ParamState = dict[str, Any]
"""One parameter's state as `torch.optim.Optimizer.state` holds it: arrays in its shape, 0-d tensors, plain values."""


@final
class ParamShards:
    """What the ranks have of the masters and state of the parameters in `units` that are `trained` (by name).

    Where state is sharded every rank makes each call, in the same order, and waits for the others; else a rank may read
    alone, and all of them change values together. Driver thread.
    """

    def __init__(
        self, ranks: Collectives, units: Sequence[Unit], trained: Collection[str], *, is_sharded: bool
    ) -> None:
        self.trained = trained
        self.is_sharded = is_sharded
        self._ranks = ranks
        self._places = {entry.param.name: (unit, entry) for unit in units for entry in unit.entries}

    @property
    def readers(self) -> Collectives:
        """Those that take part in a read."""
        return self._ranks if self.is_sharded else SingleRank()

    def read(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on the readers and return this rank's result; what it raises on one is raised on all."""
        return _run(self.readers, call, act)

    def change(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on every rank and return this rank's result; what it raises on one is raised on all."""
        return _run(self._ranks, call, act)

    def spec(self, name: str) -> ParamSpec:
        """Return the parameter of that name."""
        return self._places[name][1].param

    def gather(self, param: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
        """Fill `flat`, [numel] on the CPU in the order of the parameter's memory, with the readers' parts of it, and
        return it: this rank's part is there."""
        if not self.is_sharded:
            return flat
        unit, entry = self._places[param.name]
        for rank in range(self._ranks.world_size):
            shard = unit.shard(rank)
            start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
            if start < stop:
                self._ranks.broadcast(flat[start - entry.start : stop - entry.start], rank, param.name)
        return flat

    def same(self, value: torch.Tensor) -> torch.Tensor:
        """Return rank 0's `value`, fp32 on the CPU. It has one shape on all ranks."""
        whole = value.detach().to("cpu", torch.float32, copy=True)
        self._ranks.broadcast(whole, 0, "a value that is set")
        return whole


def _run(ranks: Collectives, call: str, act: Callable[[], Result]) -> Result:
    own: list[Result] = []
    agree(ranks, call, lambda: own.append(act()), encode=lambda _: None)
    return own[0]


@dataclass(eq=False, repr=False)
class OptimizerState:
    """Reads and writes what torch's optimizer keeps in `state`. Driver thread, while no update runs; blocks.

    fp32 masters are no part of it: they follow the parameters' values. A state format without loss, and a plain torch
    optimizer, give the same bits after any number of moves between them. `_params`: by name.
    `shards`: of the state; where each rank has parts of it only every rank calls `read`.
    """

    _params: Mapping[str, nn.Parameter]
    _layouts: Sequence[StateLayout]
    _rule: UpdateRule
    _stepper: StreamingStepper
    _inventory: Inventory
    _staging: StagingPool | None
    shards: ParamShards

    def stepped(self) -> list[nn.Parameter]:
        """List the parameters that have state."""
        found = {self._params[piece.param.name]: None for layout in self._layouts for piece in self._stepped(layout)}
        return list(found)

    def _stepped(self, layout: StateLayout, only: nn.Parameter | None = None) -> list[ParamPiece]:
        """List the pieces that have state, of every parameter or of one."""
        return [
            piece
            for piece in layout.subgroup.pieces
            if self._stepper.scalars(layout.subgroup, piece)
            if only is None or self._params[piece.param.name] is only
        ]

    # -- out -----------------------------------------------------------------------------------------------------------

    def read(
        self, groups: Sequence[Mapping[str, Any]], only: nn.Parameter | None = None
    ) -> dict[nn.Parameter, ParamState]:
        """Copy the state of every parameter that has any, or of one: fp32 on the CPU, in the parameters' own shapes.

        `groups`: the live param groups. Raises BudgetError where the copies do not fit into free host memory.
        """
        if self.shards.is_sharded:
            found = self._read_sharded(groups, only)
        else:
            self._check_room(self._needed_nbytes(only))
            found = self._read_own(groups, only)
        return {
            param: found[param]
            for group in groups
            for param in group["params"]
            if found.get(param)  # some classes keep nothing for a parameter that they have stepped
        }

    def _read_own(
        self, groups: Sequence[Mapping[str, Any]], only: nn.Parameter | None
    ) -> dict[nn.Parameter, ParamState]:
        """Copy what this rank has: of an array that it has parts of the other elements are undefined."""
        found: dict[nn.Parameter, ParamState] = {}
        for layout in self._layouts:
            for piece in layout.subgroup.pieces:
                param = self._params[piece.param.name]
                if self._stepper.scalars(layout.subgroup, piece) or (only is not None and only is not param):
                    continue
                if first := self._rule.first_state(piece.param.shape, groups[piece.group]):
                    found[param] = first
            if stepped := self._stepped(layout, only):
                home = self._inventory.home(layout.subgroup, "state")
                with leased_slot(home, self._staging, slice(0, layout.nbytes)) as raw:
                    for piece in stepped:
                        self._export(layout, piece, raw, found.setdefault(self._params[piece.param.name], {}))
        return found

    def _read_sharded(
        self, groups: Sequence[Mapping[str, Any]], only: nn.Parameter | None
    ) -> dict[nn.Parameter, ParamState]:
        """Join the parts of all ranks, on each of them."""
        shards, ranks, own = self.shards, self.shards.readers, dict[nn.Parameter, ParamState]()
        sizes = agree(ranks, "optimizer state is read", lambda: self._needed_nbytes(only))
        names = {param: name for name, param in self._params.items()}

        def read() -> dict[str, Any]:
            self._check_room(sum(sizes) * local_world_size())
            own.update(self._read_own(groups, only))
            return {names[param]: _described(values) for param, values in own.items()}

        described: dict[str, dict[str, Any]] = {}
        for of_rank in agree(ranks, "optimizer state is copied", read):
            described = {**of_rank, **described}
        found: dict[nn.Parameter, ParamState] = {}
        for name in self._params:
            if name not in described:
                continue
            param, spec = self._params[name], shards.spec(name)
            values = found[param] = {}
            for key, (kind, value) in described[name].items():
                if kind != "array":
                    values[key] = value if kind == "value" else torch.tensor(value, dtype=getattr(torch, kind))
                    continue
                array = own.get(param, {}).get(key)
                if array is None:
                    array = spec.view(torch.empty(spec.numel, dtype=getattr(torch, value)))
                shards.gather(spec, spec.flatten(array))
                values[key] = array
        return found

    def _export(self, layout: StateLayout, piece: ParamPiece, raw: torch.Tensor, values: ParamState) -> None:
        state = layout.state(raw, piece, piece.start, piece.stop)
        if layout.masters.needs_params:
            for name in state.keys() & {self._rule.unsigned_field}:
                state[name] = state[name].abs()  # its signs belong to the masters
        exported = self._rule.export_state(state, self._stepper.scalars(layout.subgroup, piece))
        for name, value in exported.items():
            if not isinstance(value, torch.Tensor) or name not in state:
                values[name] = value
            elif not self._rule.elementwise:
                values[name] = value.to("cpu", copy=True)
            else:
                if name not in values:
                    values[name] = piece.param.view(torch.empty(piece.param.numel, dtype=value.dtype))
                piece.param.flatten(values[name])[piece.param_start : piece.param_start + piece.numel].copy_(value)

    def _needed_nbytes(self, only: nn.Parameter | None) -> int:
        """Of the copies of what this rank has."""
        return sum(
            self._exported_nbytes(layout, piece) for layout in self._layouts for piece in self._stepped(layout, only)
        )

    def _check_room(self, needed: int) -> None:
        if needed > (free := available_host_nbytes()):
            raise BudgetError(
                f"The optimizer state was expected to fit into free host memory as fp32 tensors; it takes "
                f"{format_nbytes(needed)} and {format_nbytes(free)} are free. Read it parameter by parameter with "
                "optimizer.read_state(param)."
            )

    def _exported_nbytes(self, layout: StateLayout, piece: ParamPiece) -> int:
        fields = layout.fields(piece)
        if self._rule.elementwise:
            return 4 * piece.numel * sum(field.block_numel == 1 for field in fields)
        return sum(field.nbytes for field in fields)

    # -- in ------------------------------------------------------------------------------------------------------------

    def check(self, states: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ModelError where `write` could not go on from `states` with the values of `groups`."""
        held: set[nn.Parameter] = set()
        for layout in self._layouts:
            for piece in layout.subgroup.pieces:
                param, hyper = self._params[piece.param.name], groups[piece.group]
                held.add(param)
                self._check_planned(layout, piece, hyper)
                if piece.param_start == 0 and (values := states.get(param)):
                    try:
                        self._rule.check_state(values, piece.param.shape, hyper)
                    except ModelError as error:
                        raise ModelError(f"Optimizer state of {piece.param.name}: {error}") from error
        if idle := sum(bool(values) and param not in held for param, values in states.items()):
            logger.warning("optimizer state of %d parameters that are not trained is left out", idle)

    def _check_planned(self, layout: StateLayout, piece: ParamPiece, hyper: Mapping[str, Any]) -> None:
        needed = {field.name for field in self._rule.state_fields(piece.param.shape, hyper)}
        planned = {field.name for field in layout.fields(piece)}
        if missing := sorted(needed - planned):
            raise ModelError(
                f"{self._rule.name} was planned with the state arrays {sorted(planned)}; the param group that is "
                f"loaded needs {missing} besides. Set the option that needs them (momentum, amsgrad ...) in the "
                "optimizer that is passed to tiered_zero.initialize()."
            )

    def write(self, states: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Replace the whole state by `states`, which `check` has passed; parameters without any start anew."""
        num_rounded = 0
        for layout in self._layouts:
            stepper, subgroup = self._stepper, layout.subgroup
            params = {piece.index: self._params[piece.param.name] for piece in subgroup.pieces}
            given = {index: values for index, param in params.items() if (values := states.get(param))}
            has_state = stepper.has_state(layout)
            if not given and not has_state:
                continue
            home = self._inventory.home(subgroup, "state")
            # bytes that were written at once are read and written at once, so that they are verified
            first = 0 if has_state else layout.state_start
            last = layout.nbytes if has_state else layout.master_nbytes
            with leased_slot(home, self._staging, slice(first, last), slice(first, layout.nbytes)) as raw:
                scalars, rounded = self._fill(layout, raw, given, groups)
            num_rounded += rounded
            stepper.replace_scalars(subgroup, scalars)
        if num_rounded:
            logger.warning(
                "optimizer state was rounded to tiered_zero.state_format as it was loaded (%d arrays)", num_rounded
            )

    def _fill(
        self,
        layout: StateLayout,
        raw: torch.Tensor,
        given: Mapping[int, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
    ) -> tuple[dict[int, dict[str, Any]], int]:
        """Fill a sub-group's slot. Returns piece index -> scalars, and how many arrays were rounded."""
        marks = layout.marks(raw)
        signs = None if marks is None else marks.signbit()
        raw[layout.state_start : layout.nbytes].zero_()
        scalars: dict[int, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        num_rounded = 0
        for piece in layout.subgroup.pieces:
            state, hyper = layout.state(raw, piece, piece.start, piece.stop), groups[piece.group]
            if piece.index not in given:
                master = layout.master(raw)[piece.start : piece.stop]
                self._rule.init_state(Run(master=master, grad=master, state=state, scalars={}, hyper=hyper))
                continue
            values = self._part(given[piece.index], state, piece)
            own = self._rule.import_state(values, state, hyper)
            last = last if same(last, own) else own  # neighbours of one history are stepped together
            scalars[piece.index] = last
            num_rounded += self._num_rounded(state, last, values)
        if marks is not None and signs is not None:
            marks.copy_(torch.where(signs, -marks.abs(), marks.abs()))
        return scalars, num_rounded

    def _num_rounded(
        self, state: Mapping[str, torch.Tensor], scalars: Mapping[str, Any], values: Mapping[str, Any]
    ) -> int:
        """Count the arrays in `values` that have other values in `state`, whose dtype has fewer bits."""
        narrow = [
            name
            for name in values.keys() & state.keys()
            if isinstance(values[name], torch.Tensor) and state[name].dtype.itemsize < values[name].dtype.itemsize
        ]
        kept = self._rule.export_state(state, scalars) if narrow else {}
        return sum(not torch.equal(kept[name].cpu(), values[name].detach().cpu()) for name in narrow)

    def _part(self, values: Mapping[str, Any], state: Mapping[str, torch.Tensor], piece: ParamPiece) -> dict[str, Any]:
        """Cut the piece's part out of a parameter's state."""
        part = dict(values)
        for name, value in values.items():
            if self._rule.elementwise and name in state and isinstance(value, torch.Tensor):
                part[name] = piece.param.flatten(value.detach())[piece.param_start : piece.param_start + piece.numel]
        return part


def _described(values: ParamState) -> dict[str, list[Any]]:
    """Each value as JSON: what an array is, or the value itself."""
    found: dict[str, list[Any]] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = ["value", value]
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = [dtype, value.item()] if value.dim() == 0 else ["array", dtype]
    return found
