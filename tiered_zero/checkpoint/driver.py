"""State of the driver thread besides weights and optimizer state: captured at a save, restored at a load.

Counts, loss scale, learning rate schedule, values of the param groups, random states, the position in the training
data, and the user's client_state. A run that restores them continues with the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, final

from torch import nn

from tiered_zero.checkpoint.driver_fields import OWN_PARTS, check_counts, decode_state
from tiered_zero.checkpoint.schedules import (
    check_scheduler,
    checked_options,
    kept_groups,
    loadable,
    options_to_load,
    scheduler_state,
)
from tiered_zero.checkpoint.values import encode
from tiered_zero.data import TrainingLoader
from tiered_zero.errors import ModelError, StoreError
from tiered_zero.grads.overflow import OverflowCounts, OverflowGuard
from tiered_zero.hardware.random_states import check_random_states, random_states, restore_random_states
from tiered_zero.hardware.ranks.collectives import Collectives, SingleRank
from tiered_zero.update.handle import TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy

logger = logging.getLogger("tiered_zero")

State = dict[str, Any]


class Counts(Protocol):
    """Counters of steps."""

    def state_dict(self) -> State: ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


@dataclass(frozen=True, kw_only=True)
class LoadParts:
    """The parts that a load restores: DeepSpeed's arguments of `load_checkpoint`, with its defaults.

    `module_only`: weights alone. Without `optimizer_states` the optimizer, its learning rates and the loss scale stay
    this run's; without `lr_scheduler_states` the schedule. Counts, random states and the position in the training data
    are restored unless `module_only`. Source: DeepSpeed 0.19.8, runtime/engine.py, _load_checkpoint.
    """

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False


@final
@dataclass(frozen=True, kw_only=True)
class DriverState:
    """The parts of one run whose state a checkpoint holds besides arrays. Driver thread, between two steps.

    `optimizer`: None if the run evaluates. `loader`: of `training_data`; None without.
    """

    counts: Counts
    overflow: OverflowGuard
    policy: UpdatePolicy
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    loader: TrainingLoader | None = None
    module: nn.Module | None = None

    def capture(self, client_state: Mapping[str, Any]) -> State:
        """Copy the state as it is now, as `encode` gives it: JSON.

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
            "lr_scheduler": scheduler_state(self.lr_scheduler),
            "random_states": random_states(),
            "loader": self.loader.state_dict() if self.loader is not None else None,
            "modules": _extra_states(self.module) if self.module is not None else {},
            "client_state": _client_state(client_state),
        }
        return {name: encode(value, name) for name, value in state.items()}

    def check(self, saved: Any, parts: LoadParts | None = None, ranks: Collectives | None = None) -> State:
        """Decode what `capture` gave, read from a file: untrusted. Return what `restore` takes, with this rank's own
        parts.

        Raises StoreError for what `capture` does not give, and ModelError for a state that does not fit, with nothing
        changed.
        """
        parts = parts or LoadParts()
        state = decode_state(saved)
        num_ranks = _select_rank(state, ranks or SingleRank())
        _check_extra_states(state["modules"])
        if parts.module_only:
            return state
        check_counts(state)
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
            _restore_extra_states(self.module, state["modules"])
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
            options = options_to_load(optimizer, state["groups"], with_all=parts.optimizer_states)
            state["options"] = checked_options(optimizer, options)
        if has_schedule:
            with kept_groups(optimizer):
                optimizer.load_group_options(state["options"])
                check_scheduler(self.lr_scheduler, state["lr_scheduler"])

    def _restore_optimizer(self, optimizer: TieredOptimizer, state: State, parts: LoadParts) -> None:
        groups, has_schedule = state["groups"], parts.lr_scheduler_states and self.lr_scheduler is not None
        if has_schedule and groups is not None:
            self.lr_scheduler.load_state_dict(loadable(self.lr_scheduler, state["lr_scheduler"]["state"]))
        elif parts.lr_scheduler_states and state["lr_scheduler"] is not None:
            logger.warning(
                "resumed without an lr_scheduler; the checkpoint has the state of a %s, which is left out",
                state["lr_scheduler"]["type"],
            )
        if parts.optimizer_states:
            optimizer.overflow = state["skipped"]
        if groups is not None and (parts.optimizer_states or has_schedule):
            optimizer.load_group_options(state["options"])

    def _restore_position(self, loader: TrainingLoader, saved: State | None) -> None:
        if saved is not None:
            loader.load_state_dict(saved)
        else:
            logger.warning("resumed: the checkpoint has no position in training_data, which begins anew")


# -- what modules keep besides parameters and buffers, by torch's get_extra_state and set_extra_state ------------------


def _extra_states(model: nn.Module) -> dict[str, Any]:
    """List the extra state of every module that has some: by its path."""
    return {
        path: module.get_extra_state()
        for path, module in model.named_modules()
        if type(module).get_extra_state is not nn.Module.get_extra_state
    }


def _check_extra_states(saved: Any) -> None:
    """Raises StoreError for what `_extra_states` never gives: `saved` was read from a file."""
    if type(saved) is not dict or any(type(path) is not str for path in saved):
        raise StoreError(f"The checkpoint's modules were expected to be states by path; found {saved!a:.200}.")


def _restore_extra_states(model: nn.Module, saved: Mapping[str, Any]) -> None:
    """Set the saved states of modules; warn of states and modules without their counterpart. Raises ModelError."""
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


# -- what every rank has its own of ------------------------------------------------------------------------------------


def own_state(captured: State) -> State:
    """The part of what `DriverState.capture` gave that each rank has its own of."""
    return {name: captured[name] for name in OWN_PARTS}


def join_states(first: State, own: Sequence[Mapping[str, Any]]) -> State:
    """Join the states of all ranks for the manifest: rank 0's, and `own_state` of each rank where there are others."""
    return {**first, "ranks": list(own)} if len(own) > 1 else first


def _select_rank(state: State, ranks: Collectives) -> int:
    """Put this rank's own part of what was saved into `state`; return how many ranks have saved theirs.

    A rank that did not exist then keeps its random states, for with rank 0's it would draw rank 0's numbers; its place
    in the data is rank 0's.
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


def _client_state(given: Mapping[str, Any] | None) -> dict[str, Any]:
    if given is not None and not isinstance(given, Mapping):
        raise ModelError(f"client_state was expected as a dict; found {type(given).__name__}.")
    return dict(given or {})
