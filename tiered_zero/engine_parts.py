"""What an engine is made of, and how it ends."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tiered_zero.config.schema import Config
from tiered_zero.errors import EngineFailedError, ModelError, TieredZeroError
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.loss_scaler import LossScaler
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.params.hooks import ModuleHooks
from tiered_zero.params.pager import Pager
from tiered_zero.params.visible_gradients import VisibleGradients
from tiered_zero.plan.planner import Plan
from tiered_zero.teardown import Teardown
from tiered_zero.telemetry.report import StepReport
from tiered_zero.update.handle import TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy

logger = logging.getLogger("tiered_zero")

HIDDEN_BY_UPDATE = (
    'its update begins in backward, as it does where nothing is clipped or checked. Set "tiered_zero": '
    '{"optimizer_in_backward": false} to read and change gradients until step(). To clip, set gradient_clipping; '
    "engine.get_global_grad_norm() has the norm after step()."
)


HIDDEN_BY_SCALE = (
    "it is multiplied by the loss scale of fp16 until step(). To clip, set gradient_clipping; "
    "engine.get_global_grad_norm() has the norm after step(); engine.zero_grad() drops gradients. To read or change "
    "gradients, train in bf16 or fp32."
)


NO_OPTIMIZER = (
    'This engine evaluates: initialize() was given no optimizer, and the config has no section "optimizer". Add one of '
    "the two to train."
)


@dataclass
class Parts:
    """What the assembly has built and joined. `drain`: waits until lanes and disk are idle, also of what
    interrupted calls have begun. `resources`: closes everything, in order, when the engine ends."""

    config: Config
    plan: Plan
    module: nn.Module
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    loss_scaler: LossScaler | None
    pager: Pager
    hooks: ModuleHooks
    gradients: GradientStore
    arrivals: GradientArrivals
    visible_gradients: VisibleGradients
    policy: UpdatePolicy
    runtime: Runtime
    observers: list[Callable[[StepReport], None]]
    drain: Callable[[], None]
    resources: Teardown

    def check(self) -> None:
        """Raise EngineFailedError once an update has failed, ModelError where the model's parameters were replaced."""
        self.policy.check()
        self.hooks.check_parameters()

    def checked_loss(self, loss: torch.Tensor) -> torch.Tensor:
        """Detached. Raises ModelError for one that backward can do nothing with."""
        if not loss.requires_grad:
            raise ModelError(
                "backward() was given a loss that requires no gradient: it was computed under torch.no_grad() or "
                "detached, or every parameter that it depends on is frozen (requires_grad=False) by now."
            )
        return loss.detach()


@dataclass(frozen=True, kw_only=True)
class Internals:
    """What `Engine._inspect` shows to tests. They read it in tests/support/inspection.py alone."""

    pager: Pager
    gradients: GradientStore
    policy: UpdatePolicy
    runtime: Runtime


def end_open_update(policy: UpdatePolicy, drain: Callable[[], None]) -> None:
    """The first act of a run's end."""
    if policy.is_open:
        policy.give_up()
        drain()
    policy.abort()


def complete_update(policy: UpdatePolicy) -> None:
    try:
        policy.finalize()
    except Exception as error:
        logger.error("the last update was not completed: %s", error)


def end_forgotten_run(process: OwnProcess, resources: Teardown) -> None:
    """Nobody holds the engine any more, or the interpreter exits. Garbage is collected on any thread, perhaps on a lane
    of this run, which cannot wait for itself: so only the main thread ends the run at once."""
    if not process.is_current():
        return  # a forked child owns nothing, and has no lane that could end an update
    if threading.current_thread() is threading.main_thread():
        resources.close()
    else:
        threading.Thread(target=resources.close, name="tiered_zero end").start()


def root_cause(error: BaseException) -> BaseException:
    """The failure that latched whatever refuses to go on; `error` itself where that is no refusal."""
    while isinstance(error, EngineFailedError) and isinstance(error.__cause__, TieredZeroError):
        error = error.__cause__
    return error


def count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Elements of `input_ids`, or of the first argument, if they are whole numbers; else 0."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids.numel() if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32) else 0
