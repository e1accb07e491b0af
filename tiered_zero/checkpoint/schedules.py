"""Param groups and learning rate schedules in a checkpoint: what is saved of them, and whether what was saved fits."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from numbers import Real
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from tiered_zero.errors import ModelError
from tiered_zero.rules.lr import Schedule
from tiered_zero.store.checked_json import MOST_INTEGER
from tiered_zero.update.handle import TieredOptimizer

State = dict[str, Any]

_SCHEDULED = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Values of a param group that torch's schedulers compute the next learning rate from."""


def options_to_load(optimizer: TieredOptimizer, groups: Any, *, with_all: bool) -> Any:
    """Return the values of param groups that a load restores: all of them, or the schedule's over this run's own."""
    if with_all or type(groups) is not list or {*map(type, groups)} != {dict}:
        return groups
    own = optimizer.group_options()
    if len(groups) != len(own):
        return groups
    scheduled = ({name: group[name] for name in _SCHEDULED if name in group} for group in groups)
    return [{**group, **new} for group, new in zip(own, scheduled, strict=True)]


def checked_options(optimizer: TieredOptimizer, options: Any) -> list[State]:
    """Return `options` as the optimizer loads them. Raises ModelError if they are no values for its param groups."""
    completed = optimizer.checked_group_options(options)
    for index, (group, new) in enumerate(zip(optimizer.group_options(), options, strict=True)):
        for name in group.keys() & new.keys():
            if not _alike(group[name], new[name]):
                raise ModelError(
                    f"The checkpoint's value of {name!r} in param group {index} was expected to be like "
                    f"{group[name]!r:.80}; found {new[name]!r:.80}. Load the state of an optimizer of this class."
                )
    return completed


@contextmanager
def kept_groups(optimizer: TieredOptimizer) -> Iterator[None]:
    """Set the param groups back after the block, which may set learning rates."""
    before = deepcopy(optimizer.group_options())
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


def scheduler_state(scheduler: Any) -> State | None:
    """Return the scheduler's class and state, without functions. Raises ModelError for one without state_dict()."""
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
    """Leave functions out of the state of torch's schedulers, which keep their own; a Counter (MultiStepLR) becomes a
    dict."""
    if type(state) in (dict, Counter):
        return {name: _without_code(value) for name, value in state.items() if not isinstance(value, _CODE)}
    if type(state) is list:
        return [_without_code(value) for value in state]
    return state


def loadable(scheduler: Any, state: Any) -> Any:
    """Copy what was saved of a scheduler, with a Counter where it has one."""
    found = deepcopy(state)
    _restore_counters(scheduler, found)
    return found


def _restore_counters(scheduler: Any, state: Any) -> None:
    if type(state) is not dict or not isinstance(scheduler, LRScheduler):
        return
    for name, value in state.items():
        if isinstance(getattr(scheduler, name, None), Counter):
            state[name] = Counter(value)
    for inner, own in zip(getattr(scheduler, "_schedulers", ()), state.get("_schedulers") or (), strict=False):
        _restore_counters(inner, own)


def check_scheduler(scheduler: Any, saved: Any) -> None:
    """Load `saved` into the scheduler, and its own state again. Raises ModelError if it does not fit."""
    kind = type(scheduler).__name__
    otherwise = "Build the scheduler of the saved run, or load with load_lr_scheduler_states=False to begin a new one."
    if saved is None:
        raise ModelError(f"The checkpoint has no lr_scheduler, and this run has a {kind}. {otherwise}")
    if saved["type"] != kind:
        raise ModelError(f"The checkpoint's lr_scheduler is a {saved['type']:.80}; this run's is a {kind}. {otherwise}")
    current = scheduler_state(scheduler)
    assert current is not None
    own = loadable(scheduler, current["state"])
    fits = _alike(current["state"], saved["state"], takes_none=not _is_known(scheduler))
    if not fits or _hides_attributes(scheduler, saved["state"]):
        raise ModelError(
            f"The checkpoint's lr_scheduler was expected to have the state of this run's {kind}, {own!r:.200}; found "
            f"{saved['state']!r:.200}. {otherwise}"
        )
    attributes = [(one, set(vars(one))) for one in _schedulers(scheduler)]
    try:
        scheduler.load_state_dict(loadable(scheduler, saved["state"]))
        _try_step(scheduler)
    except Exception as error:
        raise ModelError(
            f"This run's {kind} does not go on from the state that was saved: {type(error).__name__}: {error}. "
            f"{otherwise}"
        ) from error
    finally:
        scheduler.load_state_dict(own)
        for one, names in attributes:
            for name in vars(one).keys() - names:
                delattr(one, name)


def _try_step(scheduler: Any) -> None:
    """Step a scheduler whose state_dict() can undo that."""
    if not _is_known(scheduler):
        return
    has_ended = isinstance(scheduler, OneCycleLR) and 0 < scheduler.total_steps <= scheduler.last_epoch + 1
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of steps before the optimizer's
        with suppress(*([ValueError] if has_ended else [])):
            scheduler.step()


def _is_known(scheduler: Any) -> bool:
    """Whether it is torch's or ours, and those inside it: one of a program may do more in a step, and keep anything."""
    kinds = [type(one) for one in _schedulers(scheduler)]
    return all(issubclass(kind, Schedule) or kind.__module__.startswith("torch.optim.") for kind in kinds)


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


def _alike(own: Any, saved: Any, *, takes_none: bool = True) -> bool:
    """Whether `saved` has the types of `own` in the same places. `takes_none`: a saved None fits anything, as anything
    fits None."""
    if own is None or saved is None:
        return own is None or takes_none
    if type(own) is type(saved) and isinstance(own, bool | float | str):
        return True
    if _is_number(own) or _is_number(saved):
        return _is_number(own) and _is_number(saved) and not (type(saved) is int and abs(saved) > MOST_INTEGER)
    if type(own) is not type(saved):
        return False
    if isinstance(own, Mapping):
        return all(_alike(own[name], saved[name], takes_none=takes_none) for name in own.keys() & saved.keys())
    if isinstance(own, list | tuple):
        pairs = zip(own, saved, strict=False)
        return len(own) == len(saved) and all(_alike(*pair, takes_none=takes_none) for pair in pairs)
    return True


def _is_number(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1
    return isinstance(value, Real) and not isinstance(value, bool)  # numpy's are numbers too
