"""Save and restore a run's driver state: everything but weights and optimizer state. It consists of counts, loss scale,
learning rate schedule, param groups, random states, position in the training data, and client_state."""

from __future__ import annotations

import base64
import logging
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Annotated, Any, Final, final

import numpy
import torch
from pydantic import Field, ValidationError
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tiered_zero.checkpoint.index import dtype_name, torch_dtype
from tiered_zero.data import TrainingLoader
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.grads.check import OverflowCounts, OverflowGuard
from tiered_zero.hardware.random_states import check_random_states, random_states, restore_random_states
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.record.files import Count, StrictModel, first_problem
from tiered_zero.update.handle import TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy

logger = logging.getLogger("tiered_zero")

State = dict[str, Any]

OWN_PARTS: Final = ("random_states", "loader")
"""The parts of the driver state that differ between ranks."""

_SCHEDULED = ("params", "lr", "initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Names of the param group options that torch's schedulers use. In a checkpoint, "params" is the number of
parameters."""

_CODE = (FunctionType, MethodType, BuiltinFunctionType)


# -- what a file has ---------------------------------------------------------------------------------------------------


class _SavedCheck(StrictModel):
    finite: bool
    norm: float
    grad_scale: float
    first_bad: str | None


class _SavedCounts(StrictModel):
    micro_steps: Count
    global_steps: Count
    boundary: bool | None
    one_backward_each: bool
    was_applied: bool
    grad_check: _SavedCheck | None


class _SavedOverflow(StrictModel):
    skipped: Count
    skipped_in_a_row: Count
    nonfinite_in_a_row: Count


class _SavedScaler(StrictModel):
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    step: Count
    last_overflow: Annotated[int, Field(ge=-1)]
    credits: Count


class _SavedSchedule(StrictModel):
    type: str
    state: Any


class _SavedRank(StrictModel):
    random_states: Any
    loader: Any


class _SavedState(_SavedRank):
    """The fields of a saved driver state. `ranks`: the `own_state` of each rank; None if only one rank saved."""

    counts: _SavedCounts
    overflow: _SavedOverflow
    loss_scaler: _SavedScaler | None
    num_applied: Count
    skipped: bool
    groups: Any
    lr_scheduler: _SavedSchedule | None
    modules: dict[str, Any]
    client_state: dict[Any, Any]
    ranks: Annotated[list[_SavedRank], Field(min_length=1)] | None = None


def _decode_state(saved: Any) -> State:
    """Decode a driver state that was read from a file, and check its fields. Raises StoreError."""
    try:
        if type(saved) is not dict:
            raise ValueError(f"expected an object; found {type(saved).__name__}")
        own = {name: from_json(value) for name, value in saved.items()}
        state = _SavedState.model_validate(own).model_dump()
    except ValidationError as error:
        raise StoreError(f"The checkpoint's driver state is not what was saved ({first_problem(error)}).") from None
    except ValueError as error:
        raise StoreError(f"The checkpoint's driver state cannot be read: {error}.") from None
    return state


def read_client_state(saved: Any) -> dict[str, Any]:
    """Return the client_state from a driver state that was read from a file. Raises StoreError."""
    return dict(_decode_state(saved)["client_state"])


# -- capture and restore -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LoadParts:
    """The parts that a load restores. The fields are arguments of DeepSpeed's `load_checkpoint`, with its defaults
    (DeepSpeed 0.19.8, runtime/engine.py, _load_checkpoint). `module_only`: restore only weights and the modules' extra
    state. `optimizer_states`: False keeps this run's optimizer state, learning rates and loss scale.
    `lr_scheduler_states`: False keeps this run's learning rate schedule."""

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False


EVERYTHING: Final = LoadParts()


@final
@dataclass(kw_only=True)
class DriverState:
    """Saves and restores a run's driver state. The fields are the objects that hold this state. Called on the driver
    thread, between two steps. `optimizer`: None if the run evaluates. `loader`: the loader of `training_data`."""

    counts: Any
    overflow: OverflowGuard
    policy: UpdatePolicy
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    loader: TrainingLoader | None = None
    module: nn.Module | None = None

    def capture(self, client_state: Mapping[str, Any] | None) -> State:
        """Return a copy of the driver state, encoded by `to_json`. `client_state`: the user's values. Raises ModelError
        for a scheduler without state_dict() or load_state_dict(), and for a value that cannot be saved (the error names
        it)."""
        if client_state is not None and not isinstance(client_state, Mapping):
            raise ModelError(f"client_state was expected as a dict; found {type(client_state).__name__}.")
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
            "modules": _extra_states(self.module) if self.module is not None else {},
            "client_state": dict(client_state or {}),
        }
        return {name: to_json(value, name) for name, value in state.items()}

    def check(self, saved: Any, parts: LoadParts = EVERYTHING, ranks: Collectives | None = None) -> State:
        """Decode and check a saved driver state, which may be hostile. Return this rank's state for `restore`. Changes
        nothing. `parts`: what to load. `ranks`: the run's collectives; None: the run has one rank. Raises StoreError
        for a damaged state, and ModelError for one that does not fit this run."""
        state = _decode_state(saved)
        num_ranks = _select_rank(state, ranks or Collectives())
        if parts.module_only:
            return state
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

    def restore_optimizer(self, state: State, parts: LoadParts = EVERYTHING) -> None:
        """Restore the param groups and the learning rate schedule. `state`: the result of `check`. Call this before
        optimizer state is loaded, because missing optimizer state is initialized from the param groups. Raises what the
        scheduler raises if it refuses its state."""
        optimizer = self.optimizer
        if optimizer is None or parts.module_only:
            return
        groups, has_schedule = state["groups"], parts.lr_scheduler_states and self.lr_scheduler is not None
        if has_schedule and groups is not None:
            self.lr_scheduler.load_state_dict(_loadable(self.lr_scheduler, state["lr_scheduler"]["state"]))
        elif parts.lr_scheduler_states and state["lr_scheduler"] is not None:
            logger.warning(
                "resumed without an lr_scheduler; the checkpoint has the state of a %s, which is left out",
                state["lr_scheduler"]["type"],
            )
        if parts.optimizer_states:
            optimizer.overflow = state["skipped"]
        if groups is not None and (parts.optimizer_states or has_schedule):
            optimizer.load_group_options(state["options"])

    def restore(self, state: State, parts: LoadParts = EVERYTHING) -> dict[str, Any]:
        """Restore the driver state that `restore_optimizer` does not restore, and return the client_state. `state`: the
        result of `check`. Call this while no update runs."""
        if self.module is not None:
            _restore_extra_states(self.module, state["modules"])
        if parts.module_only:
            return dict(state["client_state"])
        self.counts.load_state_dict(state["counts"])
        self.policy.num_applied = state["num_applied"]
        scaler = state["loss_scaler"] if parts.optimizer_states else None
        self.overflow.restore((OverflowCounts(**state["overflow"]), scaler))
        if self.loader is not None and state["loader"] is None:
            logger.warning("resumed: the checkpoint has no position in training_data, which begins anew")
        elif self.loader is not None:
            self.loader.load_state_dict(state["loader"])
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
            groups = state["groups"] if parts.optimizer_states else _scheduled_options(optimizer, state["groups"])
            state["options"] = optimizer.checked_group_options(groups)
        if has_schedule:
            _check_scheduler(self.lr_scheduler, state["lr_scheduler"])


# -- extra state of modules, by torch's get_extra_state and set_extra_state --------------------------------------------


def _extra_states(model: nn.Module) -> dict[str, Any]:
    """Return module path -> extra state, for each module that has extra state."""
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _restore_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Pass the saved extra states to their modules. Warn about states without a module and modules without a state.
    Raises ModelError if a module refuses its state."""
    own = {
        path: module
        for path, module in model.named_modules()
        if type(module).set_extra_state is not nn.Module.set_extra_state
    }
    for path, module in own.items():
        if path not in saved:
            logger.warning("resumed: the checkpoint has no extra state of module %r, which keeps its own", path)
            continue
        try:
            module.set_extra_state(saved[path])
        except Exception as error:
            raise ModelError(
                f"Module {path!r} does not take the extra state that was saved: {type(error).__name__}: {error}."
            ) from error
    for path in saved.keys() - own.keys():
        logger.warning("resumed: the extra state of module %.200r is left out: there is none in this model", path)


# -- parts that differ between ranks -----------------------------------------------------------------------------------


def own_state(captured: State) -> State:
    """Return the parts of a driver state that differ between ranks (`OWN_PARTS`)."""
    return {name: captured[name] for name in OWN_PARTS}


def join_states(first: State, own: Sequence[Mapping[str, Any]]) -> State:
    """Return the driver state for the manifest. `first`: rank 0's state. `own`: the `own_state` of each rank."""
    return {**first, "ranks": list(own)} if len(own) > 1 else first


def _select_rank(state: State, ranks: Collectives) -> int:
    """Replace the parts of `state` that differ between ranks by the parts that this rank saved. If this rank is new,
    keep rank 0's parts, but set the random states to None. Return the number of ranks that saved."""
    of_ranks = state.pop("ranks", None) or [own_state(state)]
    if ranks.rank < len(of_ranks):
        state.update(of_ranks[ranks.rank])
    else:
        # a new rank takes rank 0's position in the data; with rank 0's random states it would draw the same numbers
        state["random_states"] = None
        logger.warning(
            "resumed: rank %d was not there when %d saved: its random numbers go on as they are",
            *(ranks.rank, len(of_ranks)),
        )
    return len(of_ranks)


# -- learning rate schedules -------------------------------------------------------------------------------------------


def _scheduled_options(optimizer: TieredOptimizer, groups: Any) -> Any:
    """Return this run's param group options; take the options in `_SCHEDULED` from the checkpoint's `groups`."""
    own = optimizer.group_options()
    if type(groups) is not list or {*map(type, groups)} != {dict} or len(groups) != len(own):
        return groups  # the caller refuses them
    scheduled = ({name: group[name] for name in _SCHEDULED if name in group} for group in groups)
    return [{**group, **new} for group, new in zip(own, scheduled, strict=True)]


def _scheduler_state(scheduler: Any) -> State | None:
    """Return a scheduler's class name and state; None without a scheduler. Raises ModelError if the scheduler cannot be
    saved."""
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


def _without_code(state: Any) -> Any:
    """Return the state of a torch scheduler without the functions in it."""
    if type(state) in (dict, Counter):  # MultiStepLR has a Counter. The scheduler that loads has the functions itself
        return {name: _without_code(value) for name, value in state.items() if not isinstance(value, _CODE)}
    if type(state) is list:
        return [_without_code(value) for value in state]
    return state


def _loadable(scheduler: Any, state: Any) -> Any:
    """Copy a scheduler's saved state, and turn a dict into a Counter where the scheduler has a Counter."""
    found = deepcopy(state)
    for one, own in _with_inner(scheduler, found):
        if isinstance(one, LRScheduler) and type(own) is dict:
            own.update({name: Counter(own[name]) for name, value in vars(one).items() if type(value) is Counter})
    return found


def _with_inner(scheduler: Any, state: Any) -> list[tuple[Any, Any]]:
    """Return (scheduler, its part of the saved `state`) for a scheduler and each scheduler inside it. The part is None
    if `state` has none. Raises ModelError if the number of schedulers differs."""
    inner = getattr(scheduler, "_schedulers", ())
    states = state.get("_schedulers") if isinstance(state, dict) and inner else None
    if isinstance(states, list) and len(states) != len(inner):
        # torch would leave some as they are
        raise ModelError(
            f"lr_scheduler: expected the saved states of {len(inner)} schedulers in this run's "
            f"{type(scheduler).__name__}; found {len(states)}. {_OTHERWISE}"
        )
    pairs = zip(inner, states if isinstance(states, list) else [None] * len(inner), strict=True)
    return [(scheduler, state), *(found for pair in pairs for found in _with_inner(*pair))]


_OTHERWISE = "Build the scheduler of the saved run, or load with load_lr_scheduler_states=False to begin a new one."


def _check_scheduler(scheduler: Any, saved: Any) -> None:
    """Raise ModelError if there is no saved scheduler, or one of another class."""
    kind = type(scheduler).__name__
    if saved is None:
        raise ModelError(f"The checkpoint has no lr_scheduler, and this run has a {kind}. {_OTHERWISE}")
    if saved["type"] != kind:
        raise ModelError(
            f"The checkpoint's lr_scheduler is a {saved['type']:.80}; this run's is a {kind}. {_OTHERWISE}"
        )


# -- values as JSON --------------------------------------------------------------------------------------------------


MAX_DEPTH: Final = 50
"""The largest nesting depth of containers in a saved value. Their JSON is nested up to three times as deep, and the
JSON parser accepts 200 levels."""

SAVED_TYPES: Final = (
    "exactly None, bool, int, float, str, bytes, list, tuple, dict, tensors, and numpy's arrays and scalars of numbers"
)

_AS_THEY_ARE = frozenset({type(None), bool, int, float})
_ARRAY_DTYPE = re.compile(r"[<>|][biufc]\d{1,2}")
"""Matches the dtypes of numpy arrays that can be saved: bool and numbers."""

_KEYS = (type(None), bool, int, float, str, bytes, tuple)


def to_json(value: Any, where: str, depth: int = 0) -> Any:
    """Encode `value` as JSON values that share no memory with it. `where`: names the value in errors. Raises ModelError
    for types other than `SAVED_TYPES`, and for nesting deeper than `MAX_DEPTH`."""
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value
    if kind is str:
        return _text(value, where)
    if kind is bytes:
        return {"$bytes": _base64(value)}
    if kind is torch.Tensor:
        return {"$tensor": _tensor(value, where)}
    if kind is numpy.ndarray or isinstance(value, numpy.generic):
        return {"$array": _array(numpy.asarray(value), where)}
    if kind in (list, tuple, dict) and depth == MAX_DEPTH:
        raise ModelError(f"{where}: values nested deeper than {MAX_DEPTH} cannot be saved; does one contain itself?")
    if kind is list or kind is tuple:
        items = [
            one if type(one) in _AS_THEY_ARE else to_json(one, f"{where}[{at}]", depth + 1)
            for at, one in enumerate(value)
        ]
        return items if kind is list else {"$tuple": items}
    if kind is dict:
        is_plain = all(type(key) is str and key.isascii() and not key.startswith("$") for key in value)
        pairs = []
        for key, own in value.items():
            if not is_plain and not _is_key(key):
                raise ModelError(f"{where}: {_type_text(key)} cannot be saved as a key; use a number or text.")
            is_itself = type(own) in _AS_THEY_ARE
            name = key if is_plain else to_json(key, where)
            pairs.append([name, own if is_itself else to_json(own, f"{where}[{key!r}]", depth + 1)])
        return dict(pairs) if is_plain else {"$dict": pairs}
    raise ModelError(
        f"{where}: {_type_text(value)} cannot be saved. Saved are {SAVED_TYPES}, not their subclasses: convert it, or "
        "leave it out."
    )


def from_json(values: Any) -> Any:
    """Decode a result of `to_json`; tensors are on the CPU. Raises ValueError for other input, which may be hostile."""
    if type(values) is list:
        return _items(values)
    if type(values) is not dict:
        return values
    if not any(key.startswith("$") for key in values):
        return dict(zip(values, _items([*values.values()]), strict=True))
    if len(values) > 1:
        raise ValueError(f"an object with the keys {sorted(values)[:4]!a} is no value")
    [(kind, own)] = values.items()
    try:
        if kind == "$tuple" and type(own) is list:
            return tuple(_items(own))
        if kind == "$dict":
            pairs = [(from_json(key), from_json(value)) for key, value in own]
            if len(found := dict(pairs)) == len(pairs) and all(map(_is_key, found)):
                return found
        if kind == "$bytes":
            return base64.b64decode(own, validate=True)
        if kind in ("$array", "$tensor"):
            name, shape, text = own
            # memory only for the bytes of the text: a false shape allocates nothing
            raw = numpy.frombuffer(bytearray(base64.b64decode(text, validate=True)), numpy.uint8)
            if kind == "$tensor":
                return torch.from_numpy(raw).view(torch_dtype(name)).reshape(shape)
            if _ARRAY_DTYPE.fullmatch(name) and type(shape) is list:
                return raw.view(name).reshape(shape)[()]
    except (TypeError, ValueError, OverflowError, RuntimeError, MemoryError, StoreError) as error:
        raise ValueError(f"{kind[:20]!a}: {type(error).__name__}: {str(error)[:200]}") from None
    raise ValueError(f"{kind[:20]!a}: no value of this kind was saved")


def _items(values: list[Any]) -> list[Any]:
    return [*values] if {*map(type, values)} <= _AS_THEY_ARE else [*map(from_json, values)]


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _tensor(tensor: torch.Tensor, where: str) -> list[Any]:
    if tensor.layout is not torch.strided or tensor.is_meta:
        found = "meta" if tensor.is_meta else str(tensor.layout)
        raise ModelError(f"{where}: a {found} tensor cannot be saved; make it a dense one of a plain dtype.")
    try:
        name = dtype_name(tensor.dtype)
    except StoreError as error:
        raise ModelError(f"{where}: {error}") from None
    plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
    return [name, list(plain.shape), _base64(plain.reshape(-1).view(torch.uint8).numpy().tobytes())]


def _array(array: numpy.ndarray[Any, Any], where: str) -> list[Any]:
    if not _ARRAY_DTYPE.fullmatch(array.dtype.str) or array.dtype.char in "gG":  # g: host-specific
        raise ModelError(f"{where}: a numpy array of dtype {array.dtype} cannot be saved; convert it to numbers.")
    return [array.dtype.str, list(array.shape), _base64(array.tobytes())]


def _is_key(key: Any) -> bool:
    """Return whether `key` can be saved as a dict's key: None, a number, text, bytes, or a tuple of these."""
    return type(key) in _KEYS and (type(key) is not tuple or all(map(_is_key, key)))


def _text(text: str, where: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ModelError(
            f"{where}: {text!r:.80} cannot be saved: {text[error.start]!a} is half of a surrogate pair, which no text "
            'file holds. Decode the bytes that it came from with errors="replace", or save them as bytes.'
        ) from None
    return text


def _type_text(value: Any) -> str:
    return f"a value of type {type(value).__module__}.{type(value).__qualname__}".replace("builtins.", "")
