"""The optimizer state of a run in torch's format, read from and written to the tiers sub-group by sub-group, and
brought together where ranks have shards of it."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from typing import Any, NoReturn, final

import torch
from torch import nn
from torch.optim import Optimizer

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.launcher import local_world_size
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import ParamPiece, Segment
from tiered_zero.rules.optimizer_copy import bare_copy, changes, flattened, nested
from tiered_zero.rules.rule import Run, UpdateRule
from tiered_zero.rules.state_layout import StateLayout
from tiered_zero.rules.torch_rule import PROBE_STEPS
from tiered_zero.sizes import format_nbytes
from tiered_zero.tiers.tier import BufferView
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.policy import UpdatePolicy
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


# -- access by parameter ---------------------------------------------------------------------------------------------


NO_COPY = "An optimizer whose state rests on tiers cannot be copied or pickled. Save optimizer.state_dict() instead."


def creates_state(groups: Sequence[Mapping[str, Any]], grads: Collection[torch.Tensor]) -> bool:
    """Return whether a step of an optimizer without state is that by which torch.distributed.checkpoint wants state
    created: every group has an lr, which is 0, and all `grads` are 0."""
    return bool(grads) and all(group.get("lr") == 0 for group in groups) and not any(grad.any() for grad in grads)


def refuse_state(*_: object) -> NoReturn:
    raise ModelError(
        "optimizer.state is not at hand: the state of each parameter rests on its tier. Read it with "
        "optimizer.state_dict() or read_state(param), change it with load_state_dict(), and drop all of it with "
        "optimizer.state = {}."
    )


@final
class OffloadedState:
    """The `optimizer.state[param]` while the state rests on a tier: lists its names, and refuses every other use as a
    dict."""

    def __init__(self, access: StateAccess, param: nn.Parameter) -> None:
        self._access, self._param = access, param

    def __iter__(self) -> Iterator[str]:
        return iter(self._access.read_one(self._param))

    __getitem__ = __setitem__ = __delitem__ = __len__ = __bool__ = __contains__ = refuse_state
    get = items = keys = values = pop = setdefault = update = clear = copy = refuse_state


@final
class StateAccess(Mapping[nn.Parameter, ParamState]):
    """The `state` of an optimizer whose state rests on the tiers: lists the parameters that have state. What it returns
    of one refuses to be used, for a change to it would be lost. Driver thread.
    """

    def __init__(self, state: OptimizerState, policy: UpdatePolicy, groups: list[dict[str, Any]]) -> None:
        """`groups`: the live param groups."""
        self._state: OptimizerState | None = state
        self._policy = policy
        self._groups = groups
        self._copies: dict[nn.Parameter, ParamState] | None = None

    def __len__(self) -> int:
        return len(self._open().stepped())

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(self._copies if self._copies is not None else self._open().stepped())

    def __contains__(self, param: object) -> bool:
        return any(param is stepped for stepped in self._open().stepped())

    def __getitem__(self, param: nn.Parameter) -> ParamState:
        return OffloadedState(self, param) if self._copies is None else self._copies[param]  # type: ignore[return-value]

    def __setitem__(self, param: nn.Parameter, value: object) -> None:
        """Accept what was returned, as code does that moves state to a device."""
        if not isinstance(value, OffloadedState):
            refuse_state()

    __delitem__ = pop = popitem = setdefault = update = clear = refuse_state

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ModelError(NO_COPY)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Return items inside: copies of the whole state as it is now."""
        if self._copies is not None:
            yield
            return
        self._copies = self._flushed().read(self._groups)
        try:
            yield
        finally:
            self._copies = None

    def read_one(self, param: nn.Parameter) -> ParamState:
        return self._flushed().read(self._groups, only=param).get(param, {})

    def check_groups(self, groups: list[dict[str, Any]]) -> None:
        """Raise ModelError where a step fails with these values of the param groups."""
        self._flushed().check_groups(groups, self._groups)

    def replace(self, states: Mapping[nn.Parameter, ParamState], groups: list[dict[str, Any]]) -> None:
        """`groups`: the values that the param groups are about to have."""
        state = self._open()

        def check() -> None:
            self._policy.check_untouched("Optimizer state is loaded")
            self._policy.finish(before_write=True)
            state.check_groups(groups, self._groups)
            state.check(states, groups)

        state.shards.change("optimizer state is checked", check)
        try:
            state.shards.change("optimizer state is loaded", lambda: state.write(states, groups))
        except Exception as error:
            self._policy.failures.set(error)  # partly the old state, partly the new
            raise

    def create(self, params: Collection[nn.Parameter]) -> None:
        """Create the state of `params` by one update with gradients of zero, which counts as no step."""
        names = self._open().names_of(params)
        self._policy.update_now(ZeroGradients(names))

    @property
    def is_open(self) -> bool:
        return self._state is not None

    def close(self) -> None:
        """Refuse every access from now on: the engine ends, and its tiers with it."""
        self._state = None

    def _flushed(self) -> OptimizerState:
        state = self._open()
        self._policy.check_untouched("Optimizer state is read")
        self._policy.finish()
        return state

    def _open(self) -> OptimizerState:
        if self._state is None:
            raise ModelError("The run is closed, and the optimizer state is gone. Read it before close().")
        return self._state


@final
class ZeroGradients:
    """A `GradientSource` of zeros, for the parameters in `names`."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names

    def has(self, _unit: Unit, param: ParamSpec) -> bool:
        return param.name in self._names

    def has_arrived(self, _unit: Unit) -> bool:
        return True

    def on_device(self, _unit: Unit) -> bool:
        return False

    def part(self, segment: Segment) -> torch.Tensor:
        return torch.zeros(segment.numel)

    def read_part(self, _segment: Segment, out: BufferView) -> None:
        out.tensor.zero_()

    def wait_transfers(self, *_: Unit) -> None:
        """Nothing is under way."""

    release = release_all = wait_transfers


# -- calls on state --------------------------------------------------------------------------------------------------


class TierStateOptimizer(Optimizer):
    """Reads and loads `state`, a `StateAccess`. `_source`: a plain optimizer of the class that is stepped."""

    _source: Optimizer
    _access: StateAccess

    @property  # type: ignore[override]
    def state(self) -> StateAccess:
        """The parameters that have state. Set it to an empty mapping to start the state of all of them anew."""
        return self._access

    @state.setter
    def state(self, value: Any) -> None:
        if isinstance(value, StateAccess) or not hasattr(self, "_access"):  # torch's constructor sets a dict
            self._access = value
        elif len(value):
            refuse_state()
        else:
            self._reset()

    @hold_interrupts()
    def _reset(self) -> None:
        self._access.replace({}, self.param_groups)

    def create_state(self, params: Collection[nn.Parameter]) -> None:
        """Give `params` the state that a step with gradients of zero leaves. The engine's call; it counts as no
        step."""
        self._access.create(params)

    @hold_interrupts()
    def state_dict(self) -> dict[str, Any]:
        """Copy the state in torch's own format: fp32 CPU tensors in the parameters' shapes, from any tier and format.

        Waits for the updates under way. fp32 masters are no part of it: they follow `module.state_dict()`, in whose
        16 bits those of a 16-bit model lose their last ones. Raises BudgetError where the tensors do not fit into free
        host memory. Where state is sharded (many ranks, stage 1 and up) every rank calls this, and gets the whole.
        """
        with self.state.reading():
            return super().state_dict()

    @hold_interrupts()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict()` or a plain torch optimizer of the same class gave, as torch does.

        Values of the param groups change in place, so that schedulers and the engine see one list. Arrays are rounded
        where tiered_zero.state_format has fewer bits; a warning says so. Raises ModelError, with nothing changed, where
        groups, shapes or keys do not fit. With many ranks every rank calls this with the whole state.
        """
        given = dict(state_dict)
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            given = pre_hook(self, given) or given
        states, groups = self._matched(given)
        self.state.replace(states, groups)
        replace_values(self.param_groups, groups)
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    @hold_interrupts()
    def read_state(self, param: nn.Parameter) -> ParamState:
        """Read one parameter's state, as `state_dict()` gives it, on every rank; empty before its first step."""
        return self.state.read_one(param)

    def __getstate__(self) -> NoReturn:
        raise ModelError(NO_COPY)

    def _matched(self, given: Mapping[str, Any]) -> tuple[dict[nn.Parameter, ParamState], list[dict[str, Any]]]:
        """Match state to parameters, and complete the groups' new values, with "params", as the class itself does."""
        try:
            states, saved = given["state"], deepcopy(given["param_groups"])
            sizes = [len(group["params"]) for group in saved]
        except (KeyError, TypeError) as error:
            raise ModelError(
                'An optimizer state_dict was expected: {"state": ..., "param_groups": [{"params": ...}, ...]}; reading '
                f"it raised {type(error).__name__}: {error}."
            ) from error
        own = [len(group["params"]) for group in self.param_groups]
        if sizes != own:
            raise ModelError(
                f"The state_dict was expected to have param groups of {own} parameters, as this optimizer has; found "
                f"{sizes}. Load the state of an optimizer over the same parameters in the same groups."
            )
        ids = chain.from_iterable(group["params"] for group in saved)
        params = dict(zip(ids, chain.from_iterable(group["params"] for group in self.param_groups), strict=True))
        if unknown := [key for key in states if key not in params]:
            raise ModelError(
                "The state_dict was expected to hold state of the parameters in its param groups alone; found state "
                f"of {unknown[:3]}. Load the state of an optimizer of this class."
            )
        for group, new in zip(self.param_groups, saved, strict=True):
            new["params"] = group["params"]
            if "param_names" in group:
                new.setdefault("param_names", group["param_names"])
        twin = bare_copy(self._source)  # torch's classes convert what older versions of them have saved
        found = {params[key]: dict(values) for key, values in states.items()}
        try:
            twin.__setstate__({"state": defaultdict(dict, found), "param_groups": saved})
        except Exception as error:
            raise ModelError(
                f"The state_dict was expected to be one of {type(self._source).__name__}, which raised "
                f"{type(error).__name__} over it: {error}. Load the state of an optimizer of this class."
            ) from error
        for group, new in zip(self.param_groups, saved, strict=True):
            # torch's __setstate__() adds to the defaults what a class may not have as an option
            if missing := sorted((self._source.defaults.keys() & group.keys()) - new.keys()):
                raise ModelError(
                    f"The state_dict was expected to have every option of {type(self._source).__name__} in its param "
                    f"groups; missing: {', '.join(missing)}. Load the state of an optimizer of this class, or, from a "
                    "checkpoint, none (load_optimizer_states=False)."
                )
        return {param: twin.state[param] for param in found}, saved


def replace_values(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    """Give each group these values and no others, in place."""
    for group, new in zip(groups, values, strict=True):
        group.clear()
        group.update(new)
