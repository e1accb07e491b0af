"""What the driver thread keeps besides weights and optimizer state: captured at a save, restored at a load.

Counts, loss scale, learning rate schedule, values of the param groups, random states, the position in the training
data, and the user's client_state. A run that has them back goes on with the same bits.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from numbers import Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Protocol, final

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tiered_zero.checkpoint.extra_state import check_extra_states, extra_states, restore_extra_states
from tiered_zero.checkpoint.values import decode, encode
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.grads.overflow import OverflowCounts, OverflowGuard
from tiered_zero.hardware.collectives import Collectives, SingleRank
from tiered_zero.hardware.random_states import check_random_states, random_states, restore_random_states
from tiered_zero.store.checked_json import MOST_INTEGER
from tiered_zero.update.handle import TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy

logger = logging.getLogger("tiered_zero")

State = dict[str, Any]


class Counts(Protocol):
    """What the run counts of steps."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class Position(Protocol):
    """A loader of training data that knows how many of its batches were taken."""

    def state_dict(self) -> State: ...

    def check_state_dict(self, state: Any, /) -> None: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...

    def resplit(self, state: Mapping[str, Any], num_ranks: int, /) -> State: ...


@dataclass(frozen=True, kw_only=True)
class LoadParts:
    """What a load restores: DeepSpeed's arguments of `load_checkpoint`, with its defaults.

    `module_only`: weights alone. `optimizer_states`: off, the optimizer, its learning rates and the loss scale are
    those of this run. `lr_scheduler_states`: off, the schedule is this run's. Counts, random states and the position in
    the training data are restored unless `module_only`. Source: DeepSpeed 0.19.8, runtime/engine.py, _load_checkpoint.
    """

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class DriverState:
    """The parts of one run whose state a checkpoint holds besides arrays. Driver thread, between two steps.

    `optimizer`: None where the run evaluates. `loader`: of `training_data`; None without.
    """

    counts: Counts
    overflow: OverflowGuard
    policy: UpdatePolicy
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    loader: Position | None = None
    module: nn.Module | None = None

    def capture(self, client_state: Mapping[str, Any]) -> State:
        """Copy the state as it is now, as `values.encode` gives it: JSON.

        Raises ModelError, naming the path, for a value that cannot be saved, and for a scheduler without state_dict().
        """
        overflow_counts, scaler = self.overflow.state()
        state = {
            "counts": self.counts.state_dict(),
            "overflow": asdict(overflow_counts),
            "loss_scaler": dict(scaler) if scaler is not None else None,
            "num_applied": self.policy.num_applied,
            "skipped": self.optimizer.overflow if self.optimizer is not None else False,
            "groups": self.optimizer.group_options() if self.optimizer is not None else None,
            "lr_scheduler": _scheduler_state(self.lr_scheduler),
            "random_states": random_states(),
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "modules": extra_states(self.module) if self.module is not None else {},
            "client_state": _client_state(client_state),
        }
        return {name: encode(value, name) for name, value in state.items()}

    def check(self, saved: Any, parts: LoadParts | None = None, ranks: Collectives | None = None) -> State:
        """Decode what `capture` gave, as it was read from a file: untrusted. Returns what `restore` takes: of what each
        of `ranks` has its own of, this rank's.

        Raises StoreError for what `capture` does not give, and ModelError for a state that does not fit this run, with
        nothing changed.
        """
        parts = parts or LoadParts()
        state = _decoded(saved)
        num_ranks = _select_rank(state, ranks or SingleRank())
        check_extra_states(state["modules"])
        if parts.module_only:
            return state
        _check_counts(state)
        if state["random_states"] is not None:
            try:
                check_random_states(state["random_states"])
            except ValueError as error:
                raise StoreError(f"The checkpoint's random_states are not what was saved: {error}.") from None
        if self.loader is not None and state["loader"] is not None:
            self.loader.check_state_dict(state["loader"])
            state["loader"] = self.loader.resplit(state["loader"], num_ranks)
        if self.optimizer is not None:
            self._check_optimizer(self.optimizer, state, parts)
        return state

    def restore(self, state: State, parts: LoadParts | None = None) -> dict[str, Any]:
        """Restore what `check` has returned; return the client_state. The caller has flushed the policy."""
        parts = parts or LoadParts()
        if self.module is not None:
            restore_extra_states(self.module, state["modules"])
        if parts.module_only:
            return dict(state["client_state"])
        self.counts.load_state_dict(state["counts"])
        self.policy.num_applied = state["num_applied"]
        scaler = state["loss_scaler"] if parts.optimizer_states else None
        self.overflow.restore((OverflowCounts(**state["overflow"]), scaler))
        if self.optimizer is not None:
            self._restore_optimizer(self.optimizer, state, parts)
        if self.loader is not None:
            self._restore_position(self.loader, state["loader"])
        if state["random_states"] is not None:
            for line in restore_random_states(state["random_states"]):
                logger.warning("resumed: %s", line)
        return dict(state["client_state"])

    def _check_optimizer(self, optimizer: TieredOptimizer, state: State, parts: LoadParts) -> None:
        if state["groups"] is None:
            if parts.optimizer_states:
                raise ModelError(
                    "The checkpoint was written by an engine that evaluates: it has no optimizer state. Load it with "
                    "load_module_only=True."
                )
            return
        has_schedule = parts.lr_scheduler_states and self.lr_scheduler is not None
        if parts.optimizer_states or has_schedule:
            _check_options(optimizer, _options(optimizer, state["groups"], parts))
        if has_schedule:
            with _kept_groups(optimizer):
                _try_scheduler(self.lr_scheduler, state["lr_scheduler"])

    def _restore_optimizer(self, optimizer: TieredOptimizer, state: State, parts: LoadParts) -> None:
        groups, has_schedule = state["groups"], parts.lr_scheduler_states and self.lr_scheduler is not None
        if has_schedule and groups is not None:
            self.lr_scheduler.load_state_dict(_copied(state["lr_scheduler"]["state"]))
        elif parts.lr_scheduler_states and state["lr_scheduler"] is not None:
            logger.warning(
                "resumed without an lr_scheduler; the checkpoint has the state of a %s, which is left out",
                state["lr_scheduler"]["type"],
            )
        if parts.optimizer_states:
            optimizer.overflow = state["skipped"]
        if groups is not None and (parts.optimizer_states or has_schedule):
            optimizer.load_group_options(_options(optimizer, groups, parts))

    def _restore_position(self, loader: Position, saved: State | None) -> None:
        if saved is not None:
            loader.load_state_dict(saved)
        else:
            logger.warning("resumed: the checkpoint has no position in training_data, which begins anew")


# -- what every rank has its own of ------------------------------------------------------------------------------------

_OWN = ("random_states", "loader")


def own_state(captured: State) -> State:
    """The part of what `DriverState.capture` gave that each rank has its own of."""
    return {name: captured[name] for name in _OWN}


def join_states(first: State, own: Sequence[Mapping[str, Any]]) -> State:
    """What the manifest has of all ranks: rank 0's state, and `own_state` of each rank where there are others."""
    return {**first, "ranks": list(own)} if len(own) > 1 else first


def _select_rank(state: State, ranks: Collectives) -> int:
    """Put this rank's part of what each has its own of into `state`; return how many ranks have saved theirs.

    A rank that was not there has no random states: it goes on with those that it has, for with rank 0's it would draw
    the numbers that rank 0 draws. Its place in the data is rank 0's.
    """
    of_ranks = state.pop("ranks", None) or [own_state(state)]
    if ranks.rank < len(of_ranks):
        state.update(of_ranks[ranks.rank])
    else:
        state["random_states"] = None
        logger.warning(
            "resumed: rank %d was not there when %d saved: its random numbers go on as they are",
            *(ranks.rank, len(of_ranks)),
        )
    return len(of_ranks)


# -- param groups and schedulers ---------------------------------------------------------------------------------------

_SCHEDULED = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Values of a param group that torch's schedulers compute the next learning rate from."""


def _options(optimizer: TieredOptimizer, groups: Any, parts: LoadParts) -> Any:
    """What a load makes of the saved values of the param groups: with the schedule alone its own, over this run's."""
    own = optimizer.group_options()
    is_list = type(groups) is list and len(groups) == len(own) and all(type(group) is dict for group in groups)
    if parts.optimizer_states or not is_list:
        return groups
    scheduled = ({name: group[name] for name in _SCHEDULED if name in group} for group in groups)
    return [{**group, **new} for group, new in zip(own, scheduled, strict=True)]


def _check_options(optimizer: TieredOptimizer, options: Any) -> None:
    optimizer.check_group_options(options)
    for index, (group, new) in enumerate(zip(optimizer.group_options(), options, strict=True)):
        for name in group.keys() & new.keys():
            if not _alike(group[name], new[name]):
                raise ModelError(
                    f"The checkpoint's value of {name!r} in param group {index} was expected to be like "
                    f"{group[name]!r:.80}; found {new[name]!r:.80}. Load the state of an optimizer of this class."
                )


@contextmanager
def _kept_groups(optimizer: TieredOptimizer) -> Iterator[None]:
    """Set the param groups back after the block, which may set learning rates."""
    before = _copied(optimizer.group_options())
    names = [set(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, own in zip(optimizer.param_groups, names, strict=True):
            for name in group.keys() - own:
                del group[name]
        for group, options in zip(optimizer.param_groups, before, strict=True):
            _set_values(group, options)


def _set_values(group: State, options: Mapping[str, Any]) -> None:
    for name, value in options.items():
        if isinstance(own := group.get(name), torch.Tensor) and isinstance(value, torch.Tensor):
            own.copy_(value)
        elif name != "params":
            group[name] = value


def _scheduler_state(scheduler: Any) -> State | None:
    if scheduler is None:
        return None
    kind = type(scheduler).__name__
    if not callable(getattr(scheduler, "state_dict", None)) or not callable(
        getattr(scheduler, "load_state_dict", None)
    ):
        raise ModelError(
            f"lr_scheduler: {kind} cannot be saved, for it has no state_dict() and load_state_dict(); a resumed run "
            "would begin its schedule anew. Give it the two, or step it in your loop and save it in client_state."
        )
    state = scheduler.state_dict()
    return {"type": kind, "state": _without_code(state) if isinstance(scheduler, LRScheduler) else state}


_CODE = (FunctionType, MethodType, BuiltinFunctionType)


def _without_code(state: Any) -> Any:
    """Leave functions out of the state of torch's schedulers, which load what is there over their own attributes."""
    if type(state) is dict:
        return {name: _without_code(value) for name, value in state.items() if not isinstance(value, _CODE)}
    if type(state) is list:
        return [_without_code(value) for value in state]
    return state


def _try_scheduler(scheduler: Any, saved: Any) -> None:
    """Load `saved` into the scheduler, and its own state again. Raises ModelError where it does not fit."""
    kind = type(scheduler).__name__
    otherwise = "Build the scheduler of the saved run, or load with load_lr_scheduler_states=False to begin a new one."
    if saved is None:
        raise ModelError(f"The checkpoint has no lr_scheduler, and this run has a {kind}. {otherwise}")
    if saved["type"] != kind:
        raise ModelError(f"The checkpoint's lr_scheduler is a {saved['type']:.80}; this run's is a {kind}. {otherwise}")
    current = _scheduler_state(scheduler)
    assert current is not None
    own = _copied(current["state"])
    if not _alike(own, saved["state"]) or _hides_attributes(scheduler, saved["state"]):
        raise ModelError(
            f"The checkpoint's lr_scheduler was expected to have the state of this run's {kind}, {own!r:.200}; found "
            f"{saved['state']!r:.200}. {otherwise}"
        )
    attributes = [(one, set(vars(one))) for one in _schedulers(scheduler)]
    try:
        scheduler.load_state_dict(_copied(saved["state"]))
    except Exception as error:
        raise ModelError(
            f"This run's {kind} does not load the state that was saved: {type(error).__name__}: {error}. {otherwise}"
        ) from error
    finally:
        scheduler.load_state_dict(own)
        for one, names in attributes:
            for name in vars(one).keys() - names:
                delattr(one, name)


def _schedulers(scheduler: Any) -> Iterator[Any]:
    """List the scheduler, and those inside a sequence or chain."""
    if hasattr(scheduler, "__dict__"):
        yield scheduler
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _schedulers(inner)


def _hides_attributes(scheduler: Any, state: Any) -> bool:
    """Whether loading `state` over the attributes of one of torch's schedulers would hide its methods or optimizer."""
    if not isinstance(scheduler, LRScheduler) or type(state) is not dict:
        return False
    hidden = [name for name in state if name == "optimizer" or callable(getattr(type(scheduler), str(name), None))]
    nested = zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers") or (), strict=False)
    return bool(hidden) or any(_hides_attributes(*pair) for pair in nested)


def _alike(own: Any, saved: Any) -> bool:
    """Whether `saved` can stand where `own` stands: the same types in the same places; None for anything."""
    if own is None or saved is None:
        return True
    if _is_number(own) or _is_number(saved):
        return _is_number(own) and _is_number(saved)
    if type(own) is not type(saved):
        return False
    if isinstance(own, Mapping):
        return all(_alike(own[name], saved[name]) for name in own.keys() & saved.keys())
    if isinstance(own, list | tuple):
        return len(own) == len(saved) and all(map(_alike, own, saved))
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)  # numpy's are numbers too


def _copied(state: Any) -> Any:
    """Copy plain values: a scheduler keeps the lists and tensors that it loads."""
    return decode(encode(state, "lr_scheduler"))


def _client_state(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ModelError(f"client_state was expected as a dict; found {type(given).__name__}.")
    return dict(given or {})


# -- what was read -----------------------------------------------------------------------------------------------------

_PARTS = (
    "counts", "overflow", "loss_scaler", "num_applied", "skipped", "groups", "lr_scheduler", "random_states", "loader",
    "modules", "client_state",
)  # fmt: skip


def read_client_state(saved: Any) -> dict[str, Any]:
    """Decode the client_state of what `DriverState.capture` gave, as it was read from a file. Raises StoreError."""
    return dict(_decoded(saved)["client_state"])


def _decoded(saved: Any) -> State:
    if type(saved) is not dict or saved.keys() - {"ranks"} != set(_PARTS):
        found = sorted(saved)[:12] if type(saved) is dict else type(saved).__name__
        raise StoreError(f"The checkpoint's driver state was expected to have {', '.join(_PARTS)}; found {found!a}.")
    state = {}
    for name in _PARTS:
        try:
            state[name] = decode(saved[name])
        except ValueError as error:
            raise StoreError(f"The checkpoint's {name} cannot be read: {error}.") from None
    if "ranks" in saved:
        state["ranks"] = _decoded_ranks(saved["ranks"])
    if type(state["client_state"]) is not dict:
        raise StoreError("The checkpoint's client_state was expected as a dict.")
    return state


def _decoded_ranks(saved: Any) -> list[State]:
    if type(saved) is not list or not saved or any(type(own) is not dict or own.keys() != set(_OWN) for own in saved):
        raise StoreError("The checkpoint's state of each rank is not what was saved.")
    try:
        return [{name: decode(own[name]) for name in _OWN} for own in saved]
    except ValueError as error:
        raise StoreError(f"The checkpoint's state of each rank cannot be read: {error}.") from None


def _check_counts(state: State) -> None:
    overflow, scaler = state["overflow"], state["loss_scaler"]
    count, flag = _is_count, _is_flag
    _check_fields("counts", state["counts"], {
        "micro_steps": count, "global_steps": count, "boundary": lambda v: v is None or flag(v),
        "one_backward_each": flag, "was_applied": flag, "grad_check": lambda v: v is None or type(v) is dict,
    })  # fmt: skip
    check = state["counts"]["grad_check"]
    if check is not None:
        named = {"first_bad": lambda value: value is None or type(value) is str}
        _check_fields("counts", check, {"finite": flag, "norm": _is_float, "grad_scale": _is_float, **named})
    _check_fields("overflow", overflow, dict.fromkeys(asdict(OverflowCounts()), count))
    if scaler is not None:
        scale = {
            "scale": lambda v: _is_float(v) and 0 < v < math.inf,
            "last_overflow": lambda v: count(v) or (type(v) is int and v == -1),
        }
        _check_fields("loss_scaler", scaler, {**scale, "step": count, "credits": count})
    schedule = state["lr_scheduler"]
    if schedule is not None:
        _check_fields("lr_scheduler", schedule, {"type": lambda v: type(v) is str, "state": lambda v: True})
    if not count(state["num_applied"]) or not flag(state["skipped"]):
        raise StoreError("The checkpoint's num_applied and skipped are not what was saved.")


def _check_fields(name: str, found: Any, tests: Mapping[str, Callable[[Any], bool]]) -> None:
    if type(found) is not dict or found.keys() != tests.keys():
        raise StoreError(f"The checkpoint's {name} was expected to have {', '.join(tests)}; found {found!a:.200}.")
    for field, test in tests.items():
        if not test(found[field]):
            raise StoreError(f"The checkpoint's {name} has {found[field]!a:.80} as {field}, which is never saved.")


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MOST_INTEGER


def _is_flag(value: Any) -> bool:
    return type(value) is bool


def _is_float(value: Any) -> bool:
    return type(value) in (int, float)


# -- what wrote it -----------------------------------------------------------------------------------------------------


def differences(written_by: Mapping[str, Any], now: Mapping[str, Any]) -> Sequence[str]:
    """Compare the facts of the run that wrote a checkpoint with those of this run. Returns a line for each difference
    from which bits may differ; `state_format` is the loader's matter."""
    lines = []
    for name, what in _FACTS.items():
        then, here = written_by.get(name), now.get(name)
        if then != here:
            lines.append(f"the checkpoint was written with {what} {then}; this run has {here}: later steps may differ")
    return lines


_FACTS = {
    "tiered_zero": "tiered_zero",
    "torch": "torch",
    "kernel": "the update kernel's level",
    "rule": "the update rule",
    "world_size": "a number of ranks of",
}
