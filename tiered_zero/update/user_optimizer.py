"""What the user hands in beside the model (optimizer, param groups, scheduler), taken as it is or refused."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tiered_zero.config.schema import OptimizerSection, SchedulerSection
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.optim.from_config import resolve_optimizer
from tiered_zero.optim.lr import build_scheduler
from tiered_zero.update.handle import TieredOptimizer

logger = logging.getLogger("tiered_zero")


def make_optimizer(
    section: OptimizerSection | None,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    """The torch optimizer whose param groups and defaults the run uses; it is never stepped itself. Without one, given
    or in the config, an optimizer without groups.
    """
    if isinstance(optimizer, Optimizer):
        return _chosen(optimizer, section)
    if optimizer is None and section is None:
        none = torch.optim.SGD([torch.zeros(1)])
        none.param_groups.clear()
        return none
    trainable = (param for param in model.parameters() if param.requires_grad)
    params: list[Any] = list(trainable if model_parameters is None else model_parameters)
    if not params:
        raise ModelError("model_parameters is empty. Leave it out, or pass the parameters that are to be trained.")
    if section is None or optimizer is not None:
        made = optimizer(params) if callable(optimizer) else optimizer
        if not isinstance(made, Optimizer):
            raise ModelError(
                f"optimizer must be a torch.optim.Optimizer, or a callable that makes one; found {type(made).__name__}."
            )
        return _chosen(made, section)
    resolved = resolve_optimizer(section.type, section.params)
    logger.info("optimizer: %s", resolved.text)
    source = resolved.optimizer_class([torch.zeros(1, 1, requires_grad=True)], **resolved.defaults)
    source.param_groups.clear()
    source.state.clear()  # Adagrad makes its state when it is made; here it is made on the tiers
    try:
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            source.add_param_group(group)
    except (TypeError, ValueError) as error:
        raise ModelError(f"model_parameters cannot be the optimizer's param groups: {error}. Correct them.") from error
    return source


def _chosen(given: Optimizer, section: OptimizerSection | None) -> Optimizer:
    """The user's optimizer goes before the config's, and that is said."""
    if section is not None:
        logger.warning("config: optimizer %s is not used, for initialize() was given one", section.type)
    return given


def group_params(source: Optimizer, specs: Mapping[nn.Parameter, ParamSpec]) -> dict[str, int]:
    """Parameter name -> index of its param group."""
    group_of: dict[str, int] = {}
    for index, group in enumerate(source.param_groups):
        for param in group["params"]:
            if param not in specs:
                raise ModelError(
                    f"The optimizer's param group {index} holds a parameter of shape {tuple(param.shape)} that is not "
                    "the model's. Build the optimizer over model.parameters(), after the last change to the model."
                )
            group_of[specs[param].name] = index
    if not any(spec.trainable and spec.name in group_of for spec in specs.values()):
        raise ModelError(
            "The optimizer holds no parameter that requires a gradient. Build it over those to be trained."
        )
    return group_of


def make_scheduler(
    given: Any, section: SchedulerSection | None, handle: TieredOptimizer | None, source: Optimizer
) -> Any:
    """The user's scheduler, or what a callable of the user's makes, or else the config's; None where nothing is
    trained. Raises ConfigError.
    """
    if handle is None:
        if given is not None:
            raise ConfigError(
                "lr_scheduler needs an optimizer, and there is none. Pass one to initialize(optimizer=...), or leave "
                "lr_scheduler out to evaluate."
            )
        return None
    if given is None:
        return build_scheduler(section, handle) if section else None
    scheduler = given(handle) if callable(given) else given
    if not hasattr(scheduler, "step"):
        raise ConfigError(
            "lr_scheduler must be a scheduler, or a callable that makes one of an optimizer; found "
            f"{type(scheduler).__name__}."
        )
    if isinstance(scheduler, ReduceLROnPlateau):
        raise ConfigError(
            "ReduceLROnPlateau needs a metric, which engine.step() does not have. Build it on the returned optimizer, "
            "and call its step(metric) in your loop."
        )
    if getattr(scheduler, "optimizer", handle) not in (handle, source):
        raise ConfigError(
            "lr_scheduler drives an optimizer that is not this run's. Build it on the optimizer passed to "
            "initialize(), or pass a callable that takes the optimizer."
        )
    if section is not None:
        logger.warning("config: scheduler %s is not used, for initialize() was given an lr_scheduler", section.type)
    return scheduler


@contextmanager
def restored_on_error(groups: list[dict[str, Any]]) -> Iterator[None]:
    """Schedulers set learning rates when they are made; a run that does not start takes that back."""
    before = [dict(group) for group in groups]
    try:
        yield
    except BaseException:
        for group, values in zip(groups, before, strict=True):
            group.clear()
            group.update(values)
        raise
