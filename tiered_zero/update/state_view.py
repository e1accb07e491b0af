"""Read and write a rank's optimizer state between updates: masters and arrays in the slots of sub-groups, scalars in
memory.

A sub-group is what the optimizer steps at once; the code refers to it by its `StateLayout`. A segment is a unit's part
in one sub-group. A piece is a parameter's part in one sub-group."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, TypeVar, final

import torch
from torch import nn

from tiered_zero.errors import BudgetError, InternalError, ModelError
from tiered_zero.hardware.memory.host_memory import StagingPool
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import Parts, StateLayout
from tiered_zero.rules.torch_rule import changes, flattened, nested, on_cpu, same
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.tier import Inventory, leased_slot, read_slot, write_slot

logger = logging.getLogger("tiered_zero")
Result = TypeVar("Result")

MASTER = "master"
"""The key of a 16-bit parameter's fp32 master in the state_dict of an optimizer without an engine."""

ParamState = dict[str, Any]
"""One parameter's state as `torch.optim.Optimizer.state` holds it: arrays of any shape, 0-d tensors, plain values."""

PieceScalars = Mapping[int, Mapping[str, Any]]
"""Index of a piece -> the scalars of its state, such as step counts."""


@final
class Scalars:
    """Holds the scalars, such as step counts, of every piece (part of a parameter in a sub-group) that has state. A
    sub-group without an entry has masters and no other state. One update steps neighbouring pieces together if they
    share one object of scalars."""

    def __init__(self, layouts: Sequence[StateLayout], of_subgroups: Mapping[int, PieceScalars] | None = None) -> None:
        self._layouts = layouts
        self._of = dict(of_subgroups or {})

    def has_state(self, layout: StateLayout) -> bool:
        """Return whether the sub-group's slot holds state in addition to masters. True after the first update."""
        return layout.subgroup.index in self._of

    @property
    def subgroups(self) -> list[int]:
        """The indices of the sub-groups that have state."""
        return sorted(self._of)

    def of(self, layout: StateLayout) -> PieceScalars:
        return self._of.get(layout.subgroup.index, {})

    def stepped(self, layout: StateLayout) -> list[ParamPiece]:
        """Return the pieces of a sub-group that have state."""
        own = self.of(layout)
        return [piece for piece in layout.subgroup.pieces if own.get(piece.index)]

    def replace(self, layout: StateLayout, scalars: PieceScalars) -> None:
        """Replace the sub-group's scalars. From now on `has_state` is true for it."""
        self._of[layout.subgroup.index] = scalars

    def drop(self, layout: StateLayout) -> None:
        """Drop the sub-group's state: the next update initializes it anew."""
        self._of.pop(layout.subgroup.index, None)

    def copy(self) -> Scalars:
        """Return a copy that later updates do not change. It may be shallow, because an update replaces a sub-group's
        scalars and never modifies them."""
        return Scalars(self._layouts, self._of)

    def by_name(self) -> dict[str, Mapping[str, Any]]:
        """Return parameter name -> scalars, for all parameters with state. Raises InternalError if the pieces of one
        parameter have different scalars."""
        found: dict[str, Mapping[str, Any]] = {}
        for layout in self._layouts:
            scalars = self.of(layout)
            for piece in layout.subgroup.pieces:
                own, name = scalars.get(piece.index, {}), piece.param.name
                if not same(dict(found.setdefault(name, own)), dict(own)):
                    raise InternalError(
                        f"The parts of parameter {name} were expected to have made the same steps; found {own} and "
                        f"{found[name]}. This state cannot be saved; go on from an earlier checkpoint."
                    )
        return {name: own for name, own in found.items() if own}


@final
class ParamShards:
    """Lets all ranks read and change masters and state together. `trained`: names of the parameters that at least one
    rank trains. `is_sharded`: whether each rank holds only its shards. Used on the driver thread.

    All ranks make each change together. If state is sharded, they also read together; otherwise a rank may read
    alone."""

    def __init__(
        self, ranks: Collectives, units: Sequence[Unit], trained: Collection[str], *, is_sharded: bool
    ) -> None:
        self.trained = trained
        self.is_sharded = is_sharded
        self.ranks = ranks
        self._places = {entry.param.name: (unit, entry) for unit in units for entry in unit.entries}

    @property
    def readers(self) -> Collectives:
        """The ranks that read together: all ranks if state is sharded, else only this rank."""
        return self.ranks if self.is_sharded else Collectives()

    def read(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on this rank, and return its result. If state is sharded, all ranks make this call together, and if
        `act` raises on one of them, all raise. `call`: what the ranks do, for error messages."""
        return _run(self.readers, call, act)

    def change(self, call: str, act: Callable[[], Result]) -> Result:
        """Run `act` on this rank, and return its result. All ranks call this together. If `act` raises on one, all
        raise. `call`: what the ranks do, for error messages."""
        return _run(self.ranks, call, act)

    def spec(self, name: str) -> ParamSpec:
        """Return the description of the parameter called `name`."""
        return self._places[name][1].param

    def gather(self, param: ParamSpec, flat: torch.Tensor) -> torch.Tensor:
        """Fill `flat` with the other ranks' parts of the parameter, and return it. `flat`: [numel] on the CPU, with
        this rank's part."""
        if not self.is_sharded:
            return flat
        unit, entry = self._places[param.name]
        for rank in range(self.ranks.world_size):
            shard = unit.shard(rank)
            start, stop = max(entry.start, shard.start), min(entry.stop, shard.stop)
            if start < stop:
                self.ranks.broadcast(flat[start - entry.start : stop - entry.start], rank, param.name)
        return flat

    def same(self, value: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a copy of rank 0's `value`, as `dtype` on the CPU. The shape must be equal on all ranks."""
        whole = value.detach().to("cpu", dtype, copy=True)
        self.ranks.broadcast(whole, 0, "a value that is set")
        return whole


def _run(ranks: Collectives, call: str, act: Callable[[], Result]) -> Result:
    own: list[Result] = []
    agree(ranks, call, lambda: own.append(act()), encode=lambda _: None)
    return own[0]


@final
class StateView:
    """Reads and writes the masters, state arrays and scalars of this rank's sub-groups, on any tier. A parameter's
    value is always its master, rounded to the parameter's dtype. Used on the driver thread between steps, and within a
    step on the thread that updates. Access to a slot blocks.

    State in torch's format has the fp32 masters, under the key MASTER, only if the optimizer has no engine."""

    def __init__(
        self,
        layouts: Sequence[StateLayout],
        rule: UpdateRule,
        inventory: Inventory,
        staging: StagingPool | None,
        groups: list[dict[str, Any]],
        params: Mapping[str, nn.Parameter],
        shards: ParamShards,
    ) -> None:
        """`staging`: the buffers for slots on NVMe. `groups`: the live param groups. `params`: parameters by name."""
        self.layouts = layouts
        self.rule = rule
        self.inventory = inventory
        self.staging = staging
        self.groups = groups
        self.shards = shards
        self._params = params
        self.scalars = Scalars(layouts)
        self._segments_of: dict[int, list[tuple[StateLayout, Segment]]] = {}
        """Unit index -> each of the unit's segments with its sub-group, in order."""
        for layout in layouts:
            for segment in layout.subgroup.segments:
                self._segments_of.setdefault(segment.unit.index, []).append((layout, segment))

    # -- masters, unit by unit -----------------------------------------------------------------------------------------

    @property
    def need_params(self) -> bool:
        """Whether slots store only the remainders of masters: the bits that are not in the 16-bit parameters."""
        return any(layout.masters.needs_params for layout in self.layouts)

    def cuts(self, unit: Unit) -> list[int]:
        """Return, for each of the unit's segments, the index of its first element in the unit's flat."""
        return [segment.unit_start for _, segment in self._segments(unit)]

    def store_masters(self, unit: Unit, flat: torch.Tensor) -> None:
        """Store the unit's initial masters. `flat`: their values, [P] fp32 on the CPU."""
        for layout, segment in self._segments(unit):
            parts = [torch.zeros(segment.numel, dtype=dtype) for dtype in layout.masters.dtypes]
            layout.masters.replace(parts, segment.part_of(flat))
            self._write(layout, segment, parts)

    def replace_masters(self, unit: Unit, flat: torch.Tensor) -> None:
        """Replace the unit's masters by `flat`, [P] fp32 on the CPU. The caller has set the parameters to these values,
        rounded."""
        for layout, segment in self._segments(unit):
            parts = self._read(layout, segment)
            layout.masters.replace(parts, segment.part_of(flat))
            self._write(layout, segment, parts)

    def follow(self, unit: Unit, flat: torch.Tensor, old: torch.Tensor | None = None) -> None:
        """Update the masters after user code has changed parameters: the master of each changed element becomes equal
        to the element. `flat`: the new parameters, [P] of the unit's dtype on the CPU. `old`: the parameters before the
        change, [P]; needed if slots store only the remainders of masters (`need_params`)."""
        for layout, segment in self._segments(unit):
            before = None if old is None else segment.part_of(old)
            if parts := layout.masters.follow(self._read(layout, segment), segment.part_of(flat), before):
                self._write(layout, segment, parts)

    def read_masters(self, unit: Unit, params: torch.Tensor | None = None) -> torch.Tensor:
        """Return the unit's masters, [P] fp32 on the CPU. Elements in no sub-group of this rank are 0. `params`: the
        unit's parameters, [P]; needed if slots store only the remainders of masters (`need_params`)."""
        flat = torch.zeros(unit.numel)
        for layout, segment in self._segments(unit):
            own = None if params is None else segment.part_of(params)
            segment.part_of(flat).copy_(layout.masters.join(self._read(layout, segment), own))
        return flat

    def _read(self, layout: StateLayout, segment: Segment) -> list[torch.Tensor]:
        home = self.inventory.home(layout.subgroup, "state")
        spans = layout.master_spans(segment)
        return [read_slot(home, start, nbytes, self.staging).view(dtype) for start, nbytes, dtype in spans]

    def _write(self, layout: StateLayout, segment: Segment, parts: Parts) -> None:
        home = self.inventory.home(layout.subgroup, "state")
        for part, (start, _, _) in zip(parts, layout.master_spans(segment), strict=True):
            write_slot(home, start, part, self.staging)

    def _segments(self, unit: Unit) -> Sequence[tuple[StateLayout, Segment]]:
        return self._segments_of.get(unit.index, ())

    # -- arrays and scalars, sub-group by sub-group --------------------------------------------------------------------

    def _leased(
        self, layout: StateLayout, read: slice, write: slice | None = None
    ) -> AbstractContextManager[torch.Tensor]:
        """Return a context manager that lends the bytes of a sub-group's slot. If the slot is on NVMe, it reads the
        range of bytes `read` before the block, and writes the range `write` after it."""
        return leased_slot(self.inventory.home(layout.subgroup, "state"), self.staging, read, write)

    def initialize(
        self,
        layout: StateLayout,
        raw: torch.Tensor,
        pieces: Sequence[ParamPiece],
        groups: Sequence[Mapping[str, Any]],
    ) -> None:
        """Set the state of `pieces` to its initial values. `raw`: the slot's bytes; their state must be zero before the
        call."""
        views = layout.views(raw)
        for piece in pieces:
            self.rule.init_state(layout.state(raw, piece, views=views), groups[piece.group])

    def _export(self, layout: StateLayout, raw: torch.Tensor, piece: ParamPiece, into: ParamState) -> None:
        """Copy the state of `piece`, a part of a parameter, to `into`, the state of the whole parameter in torch's
        format. `raw`: the bytes of the sub-group's slot."""
        state = layout.state(raw, piece)
        if layout.masters.needs_params:
            for name in state.keys() & {self.rule.unsigned_field}:
                state[name] = state[name].abs()  # the sign bits belong to the masters
        values = self.rule.export_state(state, self.scalars.of(layout)[piece.index])
        if layout.has_own_masters:
            master = layout.master(raw)[piece.start : piece.stop]
            state[MASTER] = values[MASTER] = master if self.rule.elementwise else piece.param.view(master)
        for name, value in values.items():
            if isinstance(value, (list, tuple, dict)):
                into[name] = on_cpu(value)
            elif name not in state or not isinstance(value, torch.Tensor):
                into[name] = value
            elif not self.rule.elementwise:
                into[name] = value.to("cpu", copy=True)
            else:
                if name not in into:
                    into[name] = piece.param.view(torch.empty(piece.param.numel, dtype=value.dtype))
                _cut(piece, into[name]).copy_(value)

    def fill(
        self,
        layout: StateLayout,
        raw: torch.Tensor,
        given: Mapping[int, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        *,
        anew: bool,
    ) -> None:
        """Write the state of some pieces to `raw`, a slot's bytes. `given`: index of a piece -> the whole parameter's
        state, in torch's format. `anew`: whether to initialize the state of all other pieces; False keeps it."""
        marks = layout.marks(raw)
        signs = None if marks is None else marks.clone()
        before: PieceScalars = {} if anew else self.scalars.of(layout)
        if anew:
            raw[layout.state_start : layout.nbytes].zero_()
            others = [piece for piece in layout.subgroup.pieces if piece.index not in given]
            self.initialize(layout, raw, others, groups)
        last: Mapping[str, Any] = {}
        scalars = dict(before)
        for piece in layout.subgroup.pieces:
            if piece.index not in given:
                continue
            state, values = layout.state(raw, piece), dict(given[piece.index])
            master = values.pop(MASTER, None)
            if master is not None and layout.has_own_masters:
                layout.master(raw)[piece.start : piece.stop].copy_(_cut(piece, master))
            for name in state.keys() & values.keys() if self.rule.elementwise else ():
                if isinstance(values[name], torch.Tensor):
                    values[name] = _cut(piece, values[name])
            new = self.rule.import_state(values, state, groups[piece.group])
            known = last, before.get(piece.index, {})
            last = next((own for own in known if same(own, new)), new)  # neighbours share one object, see `Scalars`
            scalars[piece.index] = last
        if marks is not None and signs is not None:
            marks.abs_().copysign_(signs)  # the sign bits belong to the masters
        self.scalars.replace(layout, scalars)

    # -- in torch's format, across ranks -------------------------------------------------------------------------------

    def stepped(self) -> list[nn.Parameter]:
        """Return the parameters that have state."""
        found = {self._params[piece.param.name]: None for x in self.layouts for piece in self._stepped(x)}
        return list(found)

    def _stepped(self, layout: StateLayout, only: nn.Parameter | None = None) -> list[ParamPiece]:
        """Return the sub-group's pieces that have state. `only`: the parameter whose pieces are returned; None: all
        parameters."""
        stepped = self.scalars.stepped(layout)
        return stepped if only is None else [piece for piece in stepped if self._params[piece.param.name] is only]

    def names_of(self, params: Collection[nn.Parameter]) -> frozenset[str]:
        """Return the names of `params`."""
        return frozenset(name for name, param in self._params.items() if param in params)

    def is_stepped(self, param: nn.Parameter) -> bool:
        """Return whether the parameter has state on any rank. Every rank calls this."""
        is_own = agree(self.shards.ranks, "optimizer state is set", lambda: any(own is param for own in self.stepped()))
        return any(is_own)

    def read(self, only: nn.Parameter | None = None) -> dict[nn.Parameter, ParamState]:
        """Return copies of the state of `only` (None: of all parameters that have state), on the CPU in torch's format.
        Arrays stored in fewer bits become fp32. If state is sharded, every rank calls this. Raises BudgetError if the
        copies do not fit into free host memory."""
        if self.shards.is_sharded:
            found = self._read_sharded(only)
        else:
            self._check_room(self._needed_nbytes(only))
            found = self._read_own(only)
        return {
            param: found[param]
            for group in self.groups
            for param in group["params"]
            if found.get(param)  # some optimizer classes keep no state for a parameter
        }

    def _read_own(self, only: nn.Parameter | None) -> dict[nn.Parameter, ParamState]:
        """Return copies of this rank's state. Array elements that other ranks hold are undefined."""
        found: dict[nn.Parameter, ParamState] = {}
        for layout in self.layouts:
            stepped, scalars = self._stepped(layout, only), self.scalars.of(layout)
            for piece in layout.subgroup.pieces:
                param = self._params[piece.param.name]
                if scalars.get(piece.index) or (only is not None and only is not param):
                    continue
                if first := self.rule.first_state(piece.param.shape, self.groups[piece.group]):
                    found[param] = first
            if stepped:
                with self._leased(layout, slice(0, layout.nbytes)) as raw:
                    for piece in stepped:
                        self._export(layout, raw, piece, found.setdefault(self._params[piece.param.name], {}))
        return found

    def _read_sharded(self, only: nn.Parameter | None) -> dict[nn.Parameter, ParamState]:
        """Return the state of `only` (None: of all parameters), joined from all ranks. Every rank calls this."""
        shards, ranks, own = self.shards, self.shards.readers, dict[nn.Parameter, ParamState]()
        sizes = agree(ranks, "optimizer state is read", lambda: self._needed_nbytes(only))
        names = {param: name for name, param in self._params.items()}

        def read() -> dict[str, Any]:
            self._check_room(sum(sizes) * local_world_size())
            own.update({param: flattened(values) for param, values in self._read_own(only).items()})
            return {names[param]: _described(values) for param, values in own.items()}

        described: dict[str, tuple[int, dict[str, Any]]] = {}
        for rank, of_rank in enumerate(agree(ranks, "optimizer state is copied", read)):
            for name, forms in of_rank.items():
                described.setdefault(name, (rank, forms))
        found: dict[nn.Parameter, ParamState] = {}
        for name, param in self._params.items():
            if name in described:
                rank, forms = described[name]
                values, spec = own.get(param, {}), shards.spec(name)
                joined = {key: self._joined(spec, values.get(key), form, rank) for key, form in forms.items()}
                found[param] = nested(joined)
        return found

    def _joined(self, param: ParamSpec, own: torch.Tensor | None, form: Sequence[Any], rank: int) -> Any:
        """Return one value of a parameter's state, joined from all ranks. `own`: the value on this rank, or None. If it
        is an array, only this rank's elements are set. `form`: the value's description, from `_described`. `rank`: the
        rank that has made `form`."""
        kind, value, *rest = form
        if kind != "array":
            return value if kind == "value" else torch.tensor(value, dtype=getattr(torch, kind))
        dtype, shape = getattr(torch, value), tuple(rest[0])
        in_param_order = shape == param.shape
        array = own
        if array is None:
            array = torch.empty(math.prod(shape), dtype=dtype)
            array = param.view(array) if in_param_order else array.view(shape)
        memory = param.flatten(array) if in_param_order else array.view(-1)
        if self.rule.elementwise:
            self.shards.gather(param, memory)
        else:  # one rank holds the whole array
            self.shards.readers.broadcast(memory, rank, param.name)
        return array

    def _needed_nbytes(self, only: nn.Parameter | None) -> int:
        """Return the size in bytes of copies of this rank's state. `only`: the parameter whose state is counted; None:
        all parameters."""
        return sum(
            self._exported_nbytes(layout, piece) for layout in self.layouts for piece in self._stepped(layout, only)
        )

    def _check_room(self, needed: int) -> None:
        if needed > (free := available_host_nbytes()):
            raise BudgetError(
                f"The optimizer state was expected to fit into free host memory as fp32 tensors; it takes "
                f"{format_nbytes(needed)} and {format_nbytes(free)} are free. Read it parameter by parameter with "
                "optimizer.read_state(param), or stream it to files: engine.save_checkpoint(directory), or, without an "
                "engine, optimizer.save_state(directory)."
            )

    def _exported_nbytes(self, layout: StateLayout, piece: ParamPiece) -> int:
        fields, masters = layout.fields(piece), 4 * piece.numel * layout.has_own_masters
        if self.rule.elementwise:
            return 4 * piece.numel * sum(field.block_numel == 1 for field in fields) + masters
        return sum(field.nbytes for field in fields) + masters

    def check(self, states: Mapping[Any, Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ModelError if training cannot continue from `states`, in torch's format, with the param group values
        `groups`."""
        for layout in self.layouts:
            for piece in layout.subgroup.pieces:
                param, hyper = self._params[piece.param.name], groups[piece.group]
                self._check_planned(layout, piece, hyper)
                if piece.param_start == 0 and (values := states.get(param)):
                    try:
                        values = {name: value for name, value in values.items() if name != MASTER}
                        self.rule.check_state(values, piece.param.shape, hyper)
                    except ModelError as error:
                        raise ModelError(f"Optimizer state of {piece.param.name}: {error}") from error
        trained = {param for name, param in self._params.items() if name in self.shards.trained}
        if idle := sum(bool(values) and param not in trained for param, values in states.items()):
            logger.warning("optimizer state of %d parameters that are not trained is left out", idle)

    def check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Raise ModelError if `groups`, new values of the param groups, need state arrays that were not planned."""
        is_changed = [bool(changes(own, new)) for own, new in zip(self.groups, groups, strict=True)]
        for layout in self.layouts:
            for piece in layout.subgroup.pieces:
                if is_changed[piece.group]:
                    self._check_planned(layout, piece, groups[piece.group])

    def _check_planned(self, layout: StateLayout, piece: ParamPiece, hyper: Mapping[str, Any]) -> None:
        try:
            needed = {field.name for field in self.rule.state_fields(piece.param.shape, hyper)}
        except (TypeError, ValueError, KeyError, RuntimeError) as error:
            raise ModelError(
                f"{self.rule.name} cannot step with the values of the param group that is loaded; it raised "
                f"{type(error).__name__}: {error}. Load the state of an optimizer of this class."
            ) from error
        self.rule.refuse_unplanned(needed, {field.name for field in layout.fields(piece)})

    def write(
        self,
        states: Mapping[Any, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]] | None = None,
        only: nn.Parameter | None = None,
    ) -> None:
        """Replace the state of all parameters, or of `only`, by `states`, which `check` has accepted. A parameter that
        is missing in `states` has no state afterwards. `groups`: new values of the param groups; None: the present
        values."""
        for layout in self.layouts:
            pieces = layout.subgroup.pieces if only is None else self._stepped(layout, only)
            found = {piece.index: states.get(self._params[piece.param.name]) for piece in pieces}
            given = {index: values for index, values in found.items() if values}
            has_state = self.scalars.has_state(layout)
            if not given and (only is not None or not has_state):
                continue
            # bytes that were written together are read and written together, so that checksums verify them
            first = 0 if has_state or not layout.initial_nbytes else layout.state_start
            last = layout.nbytes if has_state else layout.initial_nbytes
            with self._leased(layout, slice(first, last), slice(first, layout.nbytes)) as raw:
                if not has_state and layout.masters.follows_params:
                    layout.initialize(raw)
                self.fill(layout, raw, given, groups or self.groups, anew=only is None)


def _cut(piece: ParamPiece, value: torch.Tensor) -> torch.Tensor:
    """Return the piece's elements, [numel], from `value`, an array in the shape of the whole parameter."""
    return piece.param.flatten(value.detach())[piece.param_start : piece.param_start + piece.numel]


def check_name(name: str, known: Collection[str]) -> None:
    """Raise ModelError if `name` is not in `known`, the names of a parameter's state tensors."""
    if name not in known:
        expected = " or ".join(map(repr, sorted(known))) or "of no name (this rule keeps none)"
        raise ModelError(f"Expected optimizer state {expected}; found {name!r}.")


def _described(values: ParamState) -> dict[str, list[Any]]:
    """Describe each value of a parameter's state for JSON: an array by its dtype and shape, others by their value."""
    found: dict[str, list[Any]] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = ["value", value]
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = [dtype, value.item()] if value.dim() == 0 else ["array", dtype, list(value.shape)]
    return found
