"""Convert a run's optimizer state between the tiers and torch's format, sub-group by sub-group and across ranks."""

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
    """Reads and writes the optimizer state in torch's format. Driver thread, while no update runs; blocks.

    It leaves out fp32 masters, which follow the parameters. Moving state to a plain torch optimizer and back, any
    number of times, keeps its bits if the state format is lossless. `_params`: by name. `shards`: the ranks' parts of
    the state; if it is sharded, all ranks must call `read` together.
    """

    _params: Mapping[str, nn.Parameter]
    _view: StateView
    shards: ParamShards

    @property
    def _rule(self) -> UpdateRule:
        return self._view.rule

    def stepped(self) -> list[nn.Parameter]:
        """Return the parameters that have state."""
        found = {self._params[piece.param.name]: None for x in self._view.layouts for piece in self._stepped(x)}
        return list(found)

    def _stepped(self, layout: StateLayout, only: nn.Parameter | None = None) -> list[ParamPiece]:
        """Return the pieces that have state, of all parameters or of `only`."""
        stepped = self._view.scalars.stepped(layout)
        return stepped if only is None else [piece for piece in stepped if self._params[piece.param.name] is only]

    def names_of(self, params: Collection[nn.Parameter]) -> frozenset[str]:
        """Return the names of `params`."""
        return frozenset(name for name, param in self._params.items() if param in params)

    def is_stepped(self, param: nn.Parameter) -> bool:
        """Return whether a parameter has state on any rank. Every rank calls it."""
        return any(self.shards.each("optimizer state is set", lambda: any(own is param for own in self.stepped())))

    # -- out -----------------------------------------------------------------------------------------------------------

    def read(
        self, groups: Sequence[Mapping[str, Any]], only: nn.Parameter | None = None
    ) -> dict[nn.Parameter, ParamState]:
        """Copy the state of all parameters that have any, or of `only`, to the CPU; formats below fp32 become fp32.
        `groups`: the live param groups. Raises BudgetError if the copies do not fit into free host memory."""
        if self.shards.is_sharded:
            found = self._read_sharded(groups, only)
        else:
            self._check_room(self._needed_nbytes(only))
            found = self._read_own(groups, only)
        return {
            param: found[param]
            for group in groups
            for param in group["params"]
            if found.get(param)  # some optimizer classes keep no state for a parameter
        }

    def _read_own(
        self, groups: Sequence[Mapping[str, Any]], only: nn.Parameter | None
    ) -> dict[nn.Parameter, ParamState]:
        """Copy this rank's state. In an array that is split over ranks the other ranks' elements are undefined."""
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
        """Return the state joined from all ranks, on every rank."""
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
        """Return one value of a parameter's state, joined from all ranks. `own`: this rank's part if the value is an
        array. `form`: the value's description by `_described` on `rank`, which holds the whole array if the rule is not
        elementwise."""
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
        """Return the bytes that copies of this rank's state take."""
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
        """Raise ModelError if `write` cannot go on from `states` with the values of `groups`."""
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
        """Raise ModelError if a step fails with the values of `groups` but not with this run's `own`."""
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
        """Take a few steps on a small parameter; return the exception that they raise, or None."""
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
        """Replace the state of all parameters, or of `only`, by `states`, which `check` has accepted. Parameters that
        `states` lacks start without state."""
        num_rounded, view = 0, self._view
        for layout in view.layouts:
            pieces = layout.subgroup.pieces if only is None else self._stepped(layout, only)
            found = {piece.index: states.get(self._params[piece.param.name]) for piece in pieces}
            given = {index: values for index, values in found.items() if values}
            has_state = view.scalars.has_state(layout)
            if not given and (only is not None or not has_state):
                continue
            # bytes that were written together are read and written together, so that checksums verify them
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
    """Raise ModelError unless a parameter's state has a tensor called `name`."""
    if name not in known:
        expected = " or ".join(map(repr, sorted(known))) or "of no name (this rule keeps none)"
        raise ModelError(f"Expected optimizer state {expected}; found {name!r}.")


def _described(values: ParamState) -> dict[str, list[Any]]:
    """Describe each value as JSON: dtype and shape of an array, or the value itself."""
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
    """Return whether this is the step by which torch.distributed.checkpoint creates state: lr is 0 in every group and
    all `grads` are 0. The caller has checked that the optimizer has no state."""
    return bool(grads) and all(group.get("lr") == 0 for group in groups) and not any(grad.any() for grad in grads)


def refuse_state(*_: object) -> NoReturn:
    raise ModelError(
        "optimizer.state is not at hand: the state of each parameter rests on its tier. Read it with "
        "optimizer.state_dict() or read_state(param), change it with load_state_dict(), and drop all of it with "
        "optimizer.state = {}."
    )


@final
class OffloadedState:
    """The value of `optimizer.state[param]`: lists the names of the state tensors and refuses every other use."""

    def __init__(self, access: StateAccess, param: nn.Parameter) -> None:
        self._access, self._param = access, param

    def __iter__(self) -> Iterator[str]:
        return iter(self._access.read_one(self._param))

    __getitem__ = __setitem__ = __delitem__ = __len__ = __bool__ = __contains__ = refuse_state
    get = items = keys = values = pop = setdefault = update = clear = copy = refuse_state


@final
class StateAccess(Mapping[nn.Parameter, ParamState]):
    """The `state` mapping of an optimizer whose state rests on the tiers: iterates over the parameters that have state.
    Its items refuse to be used, because a change to them would be lost. Driver thread.
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
        """Accept an item that this mapping returned: code that moves state to a device assigns it back."""
        if not isinstance(value, OffloadedState):
            refuse_state()

    __delitem__ = pop = popitem = setdefault = update = clear = refuse_state

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ModelError(NO_COPY)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Make items readable inside the block: they are copies of the state at its start."""
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
        """Raise ModelError if a step fails with these values of the param groups."""
        self._flushed().check_groups(groups, self._groups)

    def replace(self, states: Mapping[nn.Parameter, ParamState], groups: list[dict[str, Any]]) -> None:
        """Replace the whole state. `groups`: the values that the param groups get next. Raises ModelError."""
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
            self._policy.failures.set(error)  # state is partly old and partly new
            raise

    def create(self, params: Collection[nn.Parameter]) -> None:
        """Create the state of `params` by an update with zero gradients, which does not count as a step."""
        names = self._open().names_of(params)
        self._policy.update_now(ZeroGradients(names))

    @property
    def is_open(self) -> bool:
        return self._state is not None

    def close(self) -> None:
        """Refuse every access from now on: the run ends and its tiers are closed."""
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
    """A `GradientSource` of zeros for the parameters in `names`."""

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
        """Return at once: no transfer is under way."""

    release = release_all = wait_transfers


# -- calls on state --------------------------------------------------------------------------------------------------


class TierStateOptimizer(Optimizer):
    """An optimizer whose `state` is a `StateAccess`. `_source`: a plain torch optimizer of the same class."""

    _source: Optimizer
    _access: StateAccess

    @property  # type: ignore[override]
    def state(self) -> StateAccess:
        """The parameters that have state. Assign an empty mapping to reset the state of all parameters."""
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
        """Create the state that a step with zero gradients would leave. The engine calls this; it does not count as a
        step."""
        self._access.create(params)

    @hold_interrupts()
    def state_dict(self) -> dict[str, Any]:
        """Copy the state in torch's own format: fp32 CPU tensors in the parameters' shapes, from any tier and state
        format.

        Waits for the updates under way. It leaves out the fp32 masters: they follow `module.state_dict()`, so the
        masters of a 16-bit model lose the bits that 16 bits do not hold. Raises BudgetError if the tensors do not fit
        into free host memory. If state is sharded (many ranks, stage 1 and up) every rank calls this and gets the whole
        state.
        """
        with self.state.reading():
            return super().state_dict()

    @hold_interrupts()
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of `state_dict()`, from this class or a plain torch optimizer of the same class.

        Param groups change in place, so that schedulers and the engine share one list. Arrays are rounded if
        tiered_zero.state_format has fewer bits, with a warning. Raises ModelError, with nothing changed, if groups,
        shapes or keys do not fit. With many ranks every rank calls this with the whole state.
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
        """Return one parameter's state as in `state_dict()`, on every rank; empty before its first step."""
        return self.state.read_one(param)

    def __getstate__(self) -> NoReturn:
        raise ModelError(NO_COPY)

    def _matched(self, given: Mapping[str, Any]) -> tuple[dict[nn.Parameter, ParamState], list[dict[str, Any]]]:
        """Match the state to this optimizer's parameters and complete the loaded groups. Raises ModelError."""
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
        twin = bare_copy(self._source)  # its __setstate__() converts what older versions of torch have saved
        found = {params[key]: dict(values) for key, values in states.items()}
        try:
            twin.__setstate__({"state": defaultdict(dict, found), "param_groups": saved})
        except Exception as error:
            raise ModelError(
                f"The state_dict was expected to be one of {type(self._source).__name__}, which raised "
                f"{type(error).__name__} over it: {error}. Load the state of an optimizer of this class."
            ) from error
        for group, new in zip(self.param_groups, saved, strict=True):
            # torch's __setstate__() fills in options; a class may lack some of them
            if missing := sorted((self._source.defaults.keys() & group.keys()) - new.keys()):
                raise ModelError(
                    f"The state_dict was expected to have every option of {type(self._source).__name__} in its param "
                    f"groups; missing: {', '.join(missing)}. Load the state of an optimizer of this class, or, from a "
                    "checkpoint, none (load_optimizer_states=False)."
                )
        return {param: twin.state[param] for param in found}, saved


def replace_values(groups: list[dict[str, Any]], values: list[dict[str, Any]]) -> None:
    """Replace the values of each group in place."""
    for group, new in zip(groups, values, strict=True):
        group.clear()
        group.update(new)
