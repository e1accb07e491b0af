"""The optimizer state of a run in torch's format, read from and written to the tiers sub-group by sub-group, and
brought together where ranks have shards of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn

from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.hardware.memory.staging import StagingPool
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.layout.subgroups import ParamPiece
from tiered_zero.rules.optimizer_copy import changes, same
from tiered_zero.rules.rule import Run, UpdateRule
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import PROBE_STEPS
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.slots import leased_slot
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.stepper import StreamingStepper

logger = logging.getLogger("tiered_zero")

MASTER = "master"
"""The key of a 16-bit parameter's fp32 master, where no checkpoint but the optimizer's state_dict holds it."""

ParamState = dict[str, Any]
"""One parameter's state as `torch.optim.Optimizer.state` holds it: arrays of any shape, 0-d tensors, plain values."""


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
        """Copy the state of every parameter that has any, or of one: on the CPU, fp32 where its format has fewer bits.

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

        described: dict[str, tuple[int, dict[str, Any]]] = {}
        for rank, of_rank in enumerate(agree(ranks, "optimizer state is copied", read)):
            for name, forms in of_rank.items():
                described.setdefault(name, (rank, forms))
        found: dict[nn.Parameter, ParamState] = {}
        for name, param in self._params.items():
            if name in described:
                rank, forms = described[name]
                values, spec = own.get(param, {}), shards.spec(name)
                found[param] = {key: self._joined(spec, values.get(key), form, rank) for key, form in forms.items()}
        return found

    def _joined(self, param: ParamSpec, own: torch.Tensor | None, form: Sequence[Any], rank: int) -> Any:
        """Return one value of a parameter's state as all readers have it. `own`: what this rank has of an array.
        `form`: from `_described`, on `rank`, which has the whole of an array unless the rule is elementwise."""
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
        if self._rule.elementwise:
            self.shards.gather(param, memory)
        else:
            self.shards.readers.broadcast(memory, rank, param.name)
        return array

    def _export(self, layout: StateLayout, piece: ParamPiece, raw: torch.Tensor, values: ParamState) -> None:
        """Copy a piece's state from `raw`, its sub-group's slot, to its place in `values`."""
        state = layout.state(raw, piece, piece.start, piece.stop)
        exported = self._exported(layout, piece, state)
        if layout.has_own_masters:
            state[MASTER] = exported[MASTER] = layout.master(raw)[piece.start : piece.stop]
            if not self._rule.elementwise:
                exported[MASTER] = piece.param.view(exported[MASTER])
        for name, value in exported.items():
            if not isinstance(value, torch.Tensor) or name not in state:
                values[name] = value
            elif not self._rule.elementwise:
                values[name] = value.to("cpu", copy=True)
            else:
                if name not in values:
                    values[name] = piece.param.view(torch.empty(piece.param.numel, dtype=value.dtype))
                piece.param.flatten(values[name])[piece.param_start : piece.param_start + piece.numel].copy_(value)

    def _exported(self, layout: StateLayout, piece: ParamPiece, state: dict[str, torch.Tensor]) -> ParamState:
        """Return what torch's optimizer holds for the piece: arrays may be memory of `state`."""
        if layout.masters.needs_params:
            for name in state.keys() & {self._rule.unsigned_field}:
                state[name] = state[name].abs()  # its signs belong to the masters
        return self._rule.export_state(state, self._stepper.scalars(layout.subgroup, piece))

    def _needed_nbytes(self, only: nn.Parameter | None) -> int:
        """Bytes of the copies of what this rank has."""
        return sum(
            self._exported_nbytes(layout, piece) for layout in self._layouts for piece in self._stepped(layout, only)
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
        if self._rule.elementwise:
            return 4 * piece.numel * sum(field.block_numel == 1 for field in fields) + masters
        return sum(field.nbytes for field in fields) + masters

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
                        values = {name: value for name, value in values.items() if name != MASTER}
                        self._rule.check_state(values, piece.param.shape, hyper)
                    except ModelError as error:
                        raise ModelError(f"Optimizer state of {piece.param.name}: {error}") from error
        if idle := sum(bool(values) and param not in held for param, values in states.items()):
            logger.warning("optimizer state of %d parameters that are not trained is left out", idle)

    def check_groups(self, groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]) -> None:
        """Raise ModelError where a step fails with the values of `groups`, but not with this run's `own`."""
        changed = [index for index, new in enumerate(groups) if new["params"] and changes(own[index], new)]
        for index in changed:
            if (error := self._try_group(groups[index])) is not None and self._try_group(own[index]) is None:
                raise ModelError(
                    f"{self._rule.name} cannot step with the values of param group {index} that are loaded; it raised "
                    f"{type(error).__name__}: {error}. Load the state of an optimizer of this class."
                ) from error
        for layout in self._layouts:
            for piece in layout.subgroup.pieces:
                if piece.group in changed:
                    self._check_planned(layout, piece, groups[piece.group])

    def _try_group(self, group: Mapping[str, Any]) -> Exception | None:
        """Take some steps of a small parameter, and return what they raise."""
        shape = tuple(min(length, 3) for length in group["params"][0].shape)
        shape = (max(1, math.prod(shape)),) if self._rule.elementwise else shape
        try:
            fields = self._rule.state_fields(shape, group)
            state = {field.name: torch.zeros(field.shape, dtype=field.dtype) for field in fields}
            run = Run(master=torch.ones(shape), grad=torch.ones(shape), state=state, scalars={}, hyper=group)
            self._rule.init_state(run)
            for _ in range(PROBE_STEPS):
                run.grad = torch.ones(shape)
                self._rule.update([run])
        except Exception as error:
            return error
        return None

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
            first = 0 if has_state or not layout.initial_nbytes else layout.state_start
            last = layout.nbytes if has_state else layout.initial_nbytes
            with leased_slot(home, self._staging, slice(first, last), slice(first, layout.nbytes)) as raw:
                if not has_state and layout.masters.follows_params:
                    layout.initialize(raw)
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
        scalars: dict[int, dict[str, Any]] = {}
        last: dict[str, Any] = {}
        num_rounded = 0
        with _marks_kept(layout, raw):
            raw[layout.state_start : layout.nbytes].zero_()
            for piece in layout.subgroup.pieces:
                state, hyper = layout.state(raw, piece, piece.start, piece.stop), groups[piece.group]
                if piece.index not in given:
                    master = layout.master(raw)[piece.start : piece.stop]
                    self._rule.init_state(Run(master=master, grad=master, state=state, scalars={}, hyper=hyper))
                    continue
                values = self._part(given[piece.index], state, piece)
                if (master := values.pop(MASTER, None)) is not None and layout.has_own_masters:
                    layout.master(raw)[piece.start : piece.stop].copy_(
                        piece.param.flatten(master)[piece.param_start : piece.param_start + piece.numel]
                    )
                own = self._rule.import_state(values, state, hyper)
                last = last if same(last, own) else own  # neighbours of one history are stepped together
                scalars[piece.index] = last
                num_rounded += self._num_rounded(state, last, values)
        return scalars, num_rounded

    def check_tensor(self, param: nn.Parameter, name: str, value: torch.Tensor) -> torch.dtype:
        """Return the dtype of the tensor `name` of a parameter's state, which `set_tensor` can replace by `value`.

        Every rank calls it. Raises ModelError where there is none, or one of another shape."""
        spec = next(self.shards.spec(own) for own, held in self._params.items() if held is param)
        described = self.shards.each("optimizer state is set", lambda: (self._forms(param), list(value.shape)))
        forms = next((found for found, _ in described if found), {})
        if not forms:
            raise ModelError(f"{spec.name} has no optimizer state before its first step. Set it after that.")
        tensors = {own: (form[1], tuple(form[2])) for own, form in forms.items() if form[0] == "array"}
        if not spec.shape:  # a rule of whole parameters keeps arrays of their shape as it keeps its counters
            tensors |= {own: (kind, ()) for own, (kind, *_) in forms.items() if kind not in ("array", "value")}
        check_name(name, tensors.keys() - {"step"})
        dtype, expected = tensors[name]
        if other := [shape for _, shape in described if tuple(shape) != expected]:
            raise ModelError(f"Expected shape {expected}, that of {name} of {spec.name}; found {tuple(other[0])}.")
        return cast("torch.dtype", getattr(torch, dtype))

    def _forms(self, param: nn.Parameter) -> dict[str, list[Any]]:
        """Describe the parameter's state as `_described` does; nothing where this rank has no part of it."""
        for layout in self._layouts:
            for piece in self._stepped(layout, param):
                home = self._inventory.home(layout.subgroup, "state")
                with leased_slot(home, self._staging, slice(0, layout.nbytes)) as raw:
                    state = layout.state(raw, piece, piece.start, piece.stop)
                    forms = _described(self._exported(layout, piece, state))
                whole = {
                    name: ["array", forms[name][1], list(piece.param.shape)] for name in forms.keys() & state.keys()
                }
                return {**forms, **whole} if self._rule.elementwise else forms
        return {}

    def set_tensor(
        self, param: nn.Parameter, name: str, value: torch.Tensor, groups: Sequence[Mapping[str, Any]]
    ) -> None:
        """Replace one tensor of a parameter's state, as far as this rank has it.

        `value`: of the whole, as `check_tensor` has passed it."""
        for layout in self._layouts:
            subgroup, whole = layout.subgroup, slice(0, layout.nbytes)
            if not (pieces := self._stepped(layout, param)):
                continue
            scalars = {piece.index: self._stepper.scalars(subgroup, piece) for piece in self._stepped(layout)}
            home = self._inventory.home(subgroup, "state")
            with leased_slot(home, self._staging, whole, whole) as raw, _marks_kept(layout, raw):
                for piece in pieces:
                    state, own = layout.state(raw, piece, piece.start, piece.stop), scalars[piece.index]
                    values = self._rule.export_state(state, own) | self._part({name: value}, state, piece)
                    new = self._rule.import_state(values, state, groups[piece.group])
                    scalars[piece.index] = own if same(own, new) else new
            self._stepper.replace_scalars(subgroup, scalars)

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


@contextmanager
def _marks_kept(layout: StateLayout, raw: torch.Tensor) -> Iterator[None]:
    """Take the marks of masters out of the state's signs for as long as it is changed ([Note: bf16 and remainder])."""
    marks = layout.marks(raw)
    if marks is None:
        yield
        return
    signs = marks.signbit()
    marks.abs_()
    try:
        yield
    finally:
        marks.copy_(torch.where(signs, -marks.abs(), marks.abs()))


def check_name(name: str, known: Collection[str]) -> None:
    """Raise ModelError unless a parameter's state has a tensor `name`."""
    if name not in known:
        expected = " or ".join(map(repr, sorted(known))) or "of no name, as this rule keeps none,"
        raise ModelError(f"Expected optimizer state {expected}; found {name!r}.")


def _described(values: ParamState) -> dict[str, list[Any]]:
    """Each value as JSON: what an array is, or the value itself."""
    found: dict[str, list[Any]] = {}
    for name, value in values.items():
        if not isinstance(value, torch.Tensor):
            found[name] = ["value", value]
        else:
            dtype = str(value.dtype).removeprefix("torch.")
            found[name] = [dtype, value.item()] if value.dim() == 0 else ["array", dtype, list(value.shape)]
    return found
