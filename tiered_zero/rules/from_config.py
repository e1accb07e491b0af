"""Make the torch optimizer that a user names in JSON or passes as an object, and choose its update rule.

Source of names and defaults: DeepSpeed 0.19, runtime/config.py and runtime/engine.py (_configure_basic_optimizer).
"""

from __future__ import annotations

import difflib
import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tiered_zero.config.deepspeed_keys import OTHER_WORDS, runs_as_adamw
from tiered_zero.config.schema import Config, OptimizerSection
from tiered_zero.config.section import switch
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.rules.lr import build_scheduler
from tiered_zero.rules.native_rules import (
    BIAS_CORRECTION,
    AdagradRule,
    AdamRule,
    Lion,
    LionRule,
    NativeRule,
    SgdRule,
    open_kernel,
)
from tiered_zero.rules.quantized import QuantizedAdam
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.torch_rule import REFUSED, TorchRule

logger = logging.getLogger("tiered_zero")

_ADAM = {"adam", "adamw"}
_CLASSES: dict[str, type[Optimizer]] = {
    name.lower(): kind
    for name, kind in vars(torch.optim).items()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind is not Optimizer
} | {"lion": Lion}

_FLAG_OR_NULL = ("foreach", "fused")
_TORCH_CODE = ("fused", "foreach", "capturable", "differentiable")
"""Options with which torch's own code makes the step instead of the native kernel."""
_REFUSED_OPTIONS = {"capturable", "differentiable"}
_NATIVE: dict[type, type[NativeRule]] = {torch.optim.SGD: SgdRule, torch.optim.Adagrad: AdagradRule, Lion: LionRule}
"""Optimizer class -> its rule on the native kernel. `make_rule` itself handles Adam and AdamW."""


@dataclass(frozen=True, kw_only=True)
class ResolvedOptimizer:
    """The torch class and arguments of the optimizer that the config names."""

    optimizer_class: type[Optimizer]
    defaults: dict[str, Any]
    text: str  # for the log
    bias_correction: bool = True  # False: Adam without it, which DeepSpeed has and torch does not


def make_optimizer(
    section: OptimizerSection | None,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None,
    model_parameters: Iterable[Any] | None,
) -> Optimizer:
    """Return a torch optimizer that holds the run's param groups and defaults; it is never stepped.

    `optimizer`: the user's optimizer, or a function that makes one from `model_parameters`; None: the config's
    `section` names one. If both are None, the result has no param groups. `model_parameters`: parameters or param
    groups; None: all parameters that require a gradient. Raises ModelError and ConfigError.
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
    source = _example(resolved.optimizer_class, resolved.defaults)
    source.param_groups.clear()
    if not resolved.bias_correction:
        source.defaults[BIAS_CORRECTION] = False  # applies to every group, as in DeepSpeed
    source.state.clear()  # Adagrad's constructor makes state; the run makes it on the tiers
    try:
        for group in params if isinstance(params[0], dict) else [{"params": params}]:
            source.add_param_group(group)
    except (TypeError, ValueError) as error:
        raise ModelError(f"model_parameters cannot be the optimizer's param groups: {error}. Correct them.") from error
    return source


def _chosen(given: Optimizer, section: OptimizerSection | None) -> Optimizer:
    """Return `given`, the user's optimizer; warn if the config names one too. Raises ModelError if a param group of an
    Adam or AdamW has bias_correction false."""
    if section is not None:
        logger.warning("config: optimizer %s is not used, for initialize() was given one", section.type)
    if type(given) in (torch.optim.Adam, torch.optim.AdamW) and _is_uncorrected(given):
        raise ModelError(
            f"The optimizer's param groups have {BIAS_CORRECTION} False, which torch's {type(given).__name__} does not "
            "know. Name the optimizer in the config, with that in optimizer.params, or leave it out."
        )
    return given


def _is_uncorrected(optimizer: Optimizer) -> bool:
    return any(not group.get(BIAS_CORRECTION, True) for group in optimizer.param_groups)


def group_params(source: Optimizer, specs: Mapping[nn.Parameter, ParamSpec]) -> dict[str, int]:
    """Return parameter name -> index of its param group in `source`. Raises ModelError if a parameter in `source` is
    not in the model, or if no parameter in `source` requires a gradient."""
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


def make_rule(
    source: Optimizer, state_format: str = "fp32", *, steps_parts: bool = False, num_threads: int | None = None
) -> UpdateRule:
    """Make the update rule for the optimizer `source`. Adam, AdamW, SGD, Adagrad and Lion get the native kernel, unless
    a param group has an option of torch's own code (_TORCH_CODE).

    `steps_parts`: whether each rank steps only parts of parameters. If `steps_parts` is true, or state is not fp32,
    these five classes ignore fused and foreach. `num_threads`: the number of the kernel's threads; None:
    `available_cpus()`. Raises ConfigError if the optimizer's options do not fit `state_format` or each other, and
    ModelError as `refuse_class` does.
    """
    is_own = steps_parts or state_format != "fp32"
    given = [option for option in _TORCH_CODE if any(group.get(option) for group in source.param_groups)]
    special = [option for option in given if not (is_own and option in ("fused", "foreach"))]
    if special and _is_uncorrected(source):
        raise ConfigError(
            f"optimizer.params.{BIAS_CORRECTION}: expected true with {special[0]}, for which torch's own code takes "
            "the step, and always corrects; found false. Leave one of the two out."
        )
    kind = type(source)
    is_adam = kind in (torch.optim.Adam, torch.optim.AdamW) and not special
    if state_format != "fp32" and not is_adam:
        raise ConfigError(
            f"tiered_zero.state_format: expected fp32 with {kind.__name__} as it is given; found {state_format!r}. The "
            "others are made of the moments of Adam and AdamW, stepped by the project's own rule: without capturable "
            "and differentiable. Write fp32, or change the optimizer."
        )
    if is_adam:
        dtype = torch.bfloat16 if state_format == "lossy_bf16_moments" else torch.float32
        kernel, decoupled = open_kernel(num_threads=num_threads), kind is torch.optim.AdamW
        adam = AdamRule(decoupled=decoupled, kernel=kernel, state_dtype=dtype)
        return QuantizedAdam(adam) if state_format == "lossy_8bit_moments" else adam
    if special or kind not in _NATIVE:
        return TorchRule(source)
    return _NATIVE[kind](open_kernel(num_threads=num_threads))


def resolve_optimizer(type_name: str, params: Mapping[str, Any]) -> ResolvedOptimizer:
    """Find the torch class and its arguments for `optimizer.type` and `optimizer.params` of a loaded config. Raises a
    ConfigError that names the wrong key."""
    name = type_name.strip().lower()
    kind = _CLASSES.get(name)
    if kind is None:
        known = {kind.__name__ for kind in _CLASSES.values() if kind not in REFUSED}
        raise ConfigError(_unknown("optimizer.type", type_name, known))
    if kind in REFUSED:
        raise ConfigError(f"optimizer.type {type_name!r} is not supported: {REFUSED[kind]}.")
    options, corrected = dict(params), True
    if name in _ADAM:
        kind, corrected = _adam_class(name, options)
    defaults = _checked(kind, options)
    text = _text(name, kind, defaults) + ("" if corrected else ", without bias correction")
    return ResolvedOptimizer(optimizer_class=kind, defaults=defaults, text=text, bias_correction=corrected)


def check_sections(config: Config) -> None:
    """Check the config's optimizer and scheduler: build them over small parameters. A scheduler with unfilled "auto"
    values is not built. Raises ConfigError."""
    optimizer, scheduler = config.optimizer, config.scheduler
    resolved = resolve_optimizer(*(("Adam", {}) if optimizer is None else (optimizer.type, optimizer.params)))
    if scheduler is None or any(path.startswith("scheduler.") for path in config.unfilled):
        return
    example = _example(resolved.optimizer_class, resolved.defaults)
    lists = [len(value) for value in scheduler.params.values() if isinstance(value, list)]
    for _ in range(1, max(lists, default=1)):  # lists have one value per param group
        example.add_param_group({"params": [torch.zeros(1, 1, requires_grad=True)]})
    build_scheduler(scheduler, example)


def _adam_class(name: str, options: dict[str, Any]) -> tuple[type[Optimizer], bool]:
    """Return Adam or AdamW, chosen as DeepSpeed does, and the value of bias_correction. Change `options` to arguments
    of that class. Raises ConfigError."""
    flags: dict[str, Any] = {"adam_w_mode": True, "torch_adam": False, BIAS_CORRECTION: True}
    for key in flags:
        given = options.pop(key, flags[key])
        flags[key] = switch(given) if key == BIAS_CORRECTION else given
        if not isinstance(flags[key], bool):
            raise ConfigError(f"optimizer.params.{key} must be true or false; found {flags[key]!r}.")
    if options.pop("set_grad_none", True) is not True:
        raise ConfigError(
            "optimizer.params.set_grad_none must be true, as gradients are always set to None here and ignoring "
            "another value would change the numbers. Remove it."
        )
    if not flags["torch_adam"]:
        options.setdefault("weight_decay", 0.0)  # as in DeepSpeed's own kernels
    kind = torch.optim.AdamW if runs_as_adamw(name, flags["adam_w_mode"]) else torch.optim.Adam
    return kind, flags[BIAS_CORRECTION]


def _checked(kind: type[Optimizer], options: Mapping[str, Any]) -> dict[str, Any]:
    """Return `options` as keyword arguments of `kind`. Raises ConfigError for arguments that `kind` refuses, or if
    capturable or differentiable is true."""
    accepted = {name: p.default for name, p in inspect.signature(kind).parameters.items() if name != "params"}
    defaults: dict[str, Any] = {}
    for key, value in options.items():
        path, default = f"optimizer.params.{key}", accepted.get(key)
        if key not in accepted:
            raise ConfigError(_unknown(path, key, set(accepted), f"parameter of {kind.__name__}"))
        if key in _REFUSED_OPTIONS and value not in (False, None):
            raise ConfigError(
                f"{path} must be false; found {value!r}. It serves a graph over the update; there is none."
            )
        is_flag = isinstance(default, bool) or key in _FLAG_OR_NULL
        if isinstance(value, bool) != is_flag and not (is_flag and value is None is default):
            raise ConfigError(f"{path} must be {'true or false' if is_flag else 'no flag'}; found {value!r}.")
        defaults[key] = tuple(value) if isinstance(default, tuple) and isinstance(value, list) else value
    try:
        _example(kind, defaults)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"optimizer.params: {kind.__name__} does not take {defaults}: {error}. Correct it."
        ) from error
    return defaults


def _example(kind: type[Optimizer], defaults: Mapping[str, Any]) -> Optimizer:
    return kind([torch.zeros(1, 1, requires_grad=True)], **defaults)


def _unknown(path: str, given: str, known: set[str], what: str = "known optimizer") -> str:
    name = OTHER_WORDS.get(given, given)
    near = difflib.get_close_matches(name.lower(), {entry.lower() for entry in known}, n=1)
    nearest = [f" Did you mean {entry!r}?" for entry in known if near and entry.lower() == near[0]]
    return f"{path}: {given!r} is no {what}.{''.join(nearest)} Known: {', '.join(sorted(known))}."


def _text(name: str, kind: type[Optimizer], defaults: Mapping[str, Any]) -> str:
    built = _example(kind, defaults).defaults
    given = [f"{key} {value}" for key, value in defaults.items()]
    settings = ", ".join(given if "lr" in defaults or "lr" not in built else [f"lr {built['lr']} by default", *given])
    text = f"{kind.__name__} ({settings})" if settings else kind.__name__
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        decoupled = built["decoupled_weight_decay"]
        text += ", decoupled weight decay" if decoupled else ", weight decay as L2 in the gradient"
        if name == "adam" and kind is torch.optim.AdamW:
            text += '; "Adam" means AdamW as in DeepSpeed, unless optimizer.params.adam_w_mode is false'
    return text
