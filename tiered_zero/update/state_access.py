"""The `optimizer.state` that users see while the state of every parameter rests on its tier."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.tiers.tier import BufferView
from tiered_zero.update.optimizer_state import OptimizerState
from tiered_zero.update.policy import UpdatePolicy
from tiered_zero.update.state_view import ParamState

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
