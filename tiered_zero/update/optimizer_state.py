"""The optimizer state of a run in torch's format, read from and written to the tiers sub-group by sub-group, and
brought together where ranks have shards of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.layout.subgroups import ParamPiece
from tiered_zero.rules.optimizer_copy import changes, flattened, nested
from tiered_zero.rules.rule import Run, UpdateRule
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import PROBE_STEPS
from tiered_zero.sizes import format_nbytes
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.state_view import MASTER, ParamState, StateView

logger = logging.getLogger("tiered_zero")


@dataclass(eq=False, repr=False)
class OptimizerState:
    """Reads and writes what torch's optimizer keeps in `state`. Driver thread, while no update runs; blocks.

    fp32 masters are no part of it: they follow the parameters' values. A state format without loss, and a plain torch
    optimizer, give the same bits after any number of moves between them. `_params`: by name.
    `shards`: of the state; where each rank has parts of it only every rank calls `read`.
    """

    _params: Mapping[str, nn.Parameter]
    _view: StateView
    shards: ParamShards

    @property
    def _rule(self) -> UpdateRule:
        return self._view.rule

    def stepped(self) -> list[nn.Parameter]:
        """List the parameters that have state."""
        found = {self._params[piece.param.name]: None for x in self._view.layouts for piece in self._stepped(x)}
        return list(found)

    def _stepped(self, layout: StateLayout, only: nn.Parameter | None = None) -> list[ParamPiece]:
        """List the pieces that have state, of every parameter or of one."""
        stepped = self._view.scalars.stepped(layout)
        return stepped if only is None else [piece for piece in stepped if self._params[piece.param.name] is only]

    def names_of(self, params: Collection[nn.Parameter]) -> frozenset[str]:
        """Return the names of `params`."""
        return frozenset(name for name, param in self._params.items() if param in params)

    def is_stepped(self, param: nn.Parameter) -> bool:
        """Whether a parameter has state on any rank. Every rank calls it."""
        return any(self.shards.each("optimizer state is set", lambda: any(own is param for own in self.stepped())))

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
        view = self._view
        for layout in view.layouts:
            stepped, scalars = self._stepped(layout, only), view.scalars.of(layout)
            for piece in layout.subgroup.pieces:
                param = self._params[piece.param.name]
                if scalars.get(piece.index) or (only is not None and only is not param):
                    continue
                if first := self._rule.first_state(piece.param.shape, groups[piece.group]):
                    found[param] = first
            if stepped:
                with view.leased(layout, slice(0, layout.nbytes)) as raw:
                    for piece in stepped:
                        view.export(layout, raw, piece, found.setdefault(self._params[piece.param.name], {}))
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
            own.update({param: flattened(values) for param, values in self._read_own(groups, only).items()})
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

    def _needed_nbytes(self, only: nn.Parameter | None) -> int:
        """Bytes of the copies of what this rank has."""
        return sum(
            self._exported_nbytes(layout, piece)
            for layout in self._view.layouts
            for piece in self._stepped(layout, only)
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
        for layout in self._view.layouts:
            for piece in layout.subgroup.pieces:
                param, hyper = self._params[piece.param.name], groups[piece.group]
                self._check_planned(layout, piece, hyper)
                if piece.param_start == 0 and (values := states.get(param)):
                    try:
                        values = {name: value for name, value in values.items() if name != MASTER}
                        self._rule.check_state(values, piece.param.shape, hyper)
                    except ModelError as error:
                        raise ModelError(f"Optimizer state of {piece.param.name}: {error}") from error
        trained = {param for name, param in self._params.items() if name in self.shards.trained}
        if idle := sum(bool(values) and param not in trained for param, values in states.items()):
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
        for layout in self._view.layouts:
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
            self._rule.init_state(state, group)
            run = Run(master=torch.ones(shape), grad=torch.ones(shape), state=state, scalars={}, hyper=group)
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

    def write(
        self,
        states: Mapping[Any, Mapping[str, Any]],
        groups: Sequence[Mapping[str, Any]],
        only: nn.Parameter | None = None,
    ) -> None:
        """Replace the whole state by `states`, which `check` has passed; parameters without any start anew. `only`:
        replace that of one parameter, which has some, alone."""
        num_rounded, view = 0, self._view
        for layout in view.layouts:
            pieces = layout.subgroup.pieces if only is None else self._stepped(layout, only)
            found = {piece.index: states.get(self._params[piece.param.name]) for piece in pieces}
            given = {index: values for index, values in found.items() if values}
            has_state = view.scalars.has_state(layout)
            if not given and (only is not None or not has_state):
                continue
            # bytes that were written at once are read and written at once, so that they are verified
            first = 0 if has_state or not layout.initial_nbytes else layout.state_start
            last = layout.nbytes if has_state else layout.initial_nbytes
            with view.leased(layout, slice(first, last), slice(first, layout.nbytes)) as raw:
                if not has_state and layout.masters.follows_params:
                    layout.initialize(raw)
                num_rounded += view.fill(layout, raw, given, groups, anew=only is None)
        if num_rounded and only is None:
            logger.warning(
                "optimizer state was rounded to tiered_zero.state_format as it was loaded (%d arrays)", num_rounded
            )


def check_name(name: str, known: Collection[str]) -> None:
    """Raise ModelError unless a parameter's state has a tensor `name`."""
    if name not in known:
        expected = " or ".join(map(repr, sorted(known))) or "of no name (this rule keeps none)"
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
