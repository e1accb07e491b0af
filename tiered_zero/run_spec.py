"""A run on paper: its units, sub-groups and plan, from a config and a model, before a byte is allocated."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.select import shares_cores
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import cut_subgroups, sub_group_numel
from tiered_zero.layout.swap_bytes import TIERS, is_split
from tiered_zero.layout.units import UnitRules, find_units
from tiered_zero.optim.from_config import format_rule, group_params, make_optimizer, make_rule
from tiered_zero.optim.rule import UpdateRule
from tiered_zero.optim.state_formats import check_params, master_format
from tiered_zero.optim.state_layout import StateLayout
from tiered_zero.params.aliases import check_memory
from tiered_zero.params.flat_storage import ClosedEngine, pager_of
from tiered_zero.params.model_spec import list_params, module_tree
from tiered_zero.plan.planner import Plan, PlanRequest, SubGroupSize, make_plan
from tiered_zero.sizes import format_nbytes

TIER_OF_DEVICE = {"none": "device", "cpu": "host", "nvme": "nvme"}


@dataclass(frozen=True)
class RunSpec:
    """Everything that can be known before a byte is allocated."""

    config: Config
    model: nn.Module
    specs: dict[nn.Parameter, ParamSpec]
    units: list[Unit]
    source: Optimizer
    rule: UpdateRule
    layouts: list[StateLayout]
    plan: Plan
    trains: bool = True
    """False where there is no optimizer: the run evaluates."""

    def params_of(self, unit: Unit) -> list[nn.Parameter]:
        by_index = {spec.index: param for param, spec in self.specs.items()}
        return [by_index[entry.param.index] for entry in unit.entries]


def specify_run(
    config: Config,
    model: nn.Module,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    limits: Mapping[str, tuple[int, str]] | None = None,
) -> RunSpec:
    """Lay the model out and plan its bytes. Reads no parameter's bytes; raises ConfigError and ModelError.

    Without an optimizer, given or in the config, the run evaluates: every parameter is frozen to it.
    """
    zero = config.zero_optimization
    trains = optimizer is not None or config.optimizer is not None
    specs = list_params(model, lambda dtype: compute_dtype(config, dtype), trains)
    _check_params(specs, trains)
    _check_embeddings(model)
    check_memory(model, specs)
    units = find_units(
        module_tree(model, specs),
        list(specs.values()),
        UnitRules(
            size_cap_numel=config.tiered_zero.unit_size_cap,
            persistence_numel=zero.stage3_param_persistence_threshold if zero.offload_param.device != "none" else 0,
            max_persistent_numel=zero.stage3_model_persistence_threshold,
        ),
    )
    source = make_optimizer(config.optimizer, model, optimizer, model_parameters)
    state_format = config.tiered_zero.state_format
    rule, masters = format_rule(state_format, make_rule(source)), master_format(state_format)
    group_of = group_params(source, specs) if trains else {}
    size = sub_group_numel(zero.sub_group_size)
    wishes = make_wishes(config, limits or {})
    apart = is_split(wishes.optimizer_tier, wishes.ratio, wishes.state_limits)
    subgroups = cut_subgroups(units, group_of, size, elementwise=rule.elementwise, apart=apart)
    layouts = [StateLayout(subgroup, rule, source.param_groups, masters) for subgroup in subgroups]
    needs = [SubGroupSize(layout.nbytes, layout.subgroup.parts, layout.subgroup.embedding) for layout in layouts]
    if rule.keeps_group_state:  # which changes when a step is taken, and not before
        wishes = replace(wishes, in_backward=False)
    plan = make_plan(units, needs, wishes)
    check_params(masters, subgroups, plan.param_tiers, plan.state_tiers)
    return RunSpec(config, model, specs, units, source, rule, layouts, plan, trains)


def _check_embeddings(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ModelError(
                f"{type(module).__name__} {name!r} has max_norm={module.max_norm:g}: its forward changes rows of its "
                "weight, and the next update, which starts from the values on the tiers, would undo that. Build it "
                "without max_norm; rows can be limited after step(), inside `with tiered_zero.gathered(weight, "
                "modify=True):`."
            )


def _check_params(specs: Mapping[nn.Parameter, ParamSpec], trains: bool) -> None:
    for param, spec in specs.items():
        lender = pager_of(param)
        if isinstance(lender, ClosedEngine):
            raise ModelError(
                f"Parameter {spec.name} has no value: it rested on a tier of an engine that is closed. Take "
                "engine.module.state_dict() before engine.close(), and call model.load_state_dict() with it before "
                "tiered_zero.initialize()."
            )
        if lender is not None:
            raise ModelError(
                f"Parameter {spec.name} belongs to an engine already, which is open. Use that engine, or close it "
                "first."
            )
        if spec.trainable and spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ModelError(
                f"Parameter {spec.name} is {spec.dtype}; trainable ones are float32, bfloat16 or float16. Convert it "
                "(model.float()), or set requires_grad=False for it."
            )
    if not trains:
        return
    if not any(spec.trainable for spec in specs.values()):
        raise ModelError(
            "No parameter of the model requires a gradient; there is nothing to train. Set requires_grad=True."
        )
    if not any(spec.trainable and spec.numel for spec in specs.values()):
        raise ModelError("Every parameter of the model that requires a gradient is empty; there is nothing to train.")


def compute_dtype(config: Config, dtype: torch.dtype) -> torch.dtype:
    """What a tensor of `dtype` is on the device: 16 bit if the config says so and it is a float; else as it is."""
    wanted: torch.dtype = getattr(torch, config.param_dtype_name)
    return wanted if dtype.is_floating_point and wanted != torch.float32 else dtype


def make_wishes(config: Config, given_limits: Mapping[str, tuple[int, str]]) -> PlanRequest:
    zero, settings = config.zero_optimization, config.tiered_zero
    _check_delayed(config)
    param, state = zero.offload_param, zero.offload_optimizer
    limits: dict[str, tuple[int, str]] = {}
    if settings.device_memory_limit is not None:
        limits["device"] = (settings.device_memory_limit, "tiered_zero.device_memory_limit")
    limits["host"] = (available_host_nbytes(), "what this machine and its cgroup have free")
    if settings.host_memory_limit is not None and settings.host_memory_limit <= limits["host"][0]:
        limits["host"] = (settings.host_memory_limit, "tiered_zero.host_memory_limit")
    limits.update(given_limits)
    return PlanRequest(
        TIER_OF_DEVICE[param.device],
        TIER_OF_DEVICE[state.device],
        limits,
        sums_gradients=config.gradient_accumulation_steps > 1,
        update=settings.update,
        shares_cores=shares_cores(settings.device, settings.debug_delay_seed),
        checks_gradients=_checks_gradients(config),
        in_backward=settings.optimizer_in_backward,
        max_live_numel=zero.stage3_max_live_parameters,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        reuse_numel=zero.stage3_max_reuse_distance,
        max_host_param_numel=param.max_in_cpu,
        staging_numel=param.buffer_size if "buffer_size" in param.model_fields_set else None,
        num_param_staging=param.buffer_count if "buffer_count" in param.model_fields_set else None,
        num_state_staging=state.buffer_count if "buffer_count" in state.model_fields_set else None,
        state_format=settings.state_format,
        ratio=state.ratio,
        state_limits=settings.state_limits.by_tier,
    )


def _checks_gradients(config: Config) -> bool:
    """Whether a step's update waits for a gradient check: the global norm for clipping, or a check for overflow."""
    checks_bf16 = config.bf16.enabled and config.bf16.check_grad_overflow
    return config.gradient_clipping > 0 or config.fp16.enabled or checks_bf16


def _check_delayed(config: Config) -> None:
    state, settings = config.zero_optimization.offload_optimizer, config.tiered_zero
    if settings.update != "delayed":
        return
    found = "offload_optimizer.device none" if state.device == "none" else ""
    found = found or (f"offload_optimizer.ratio {state.ratio:g}" if state.ratio < 1 else "")
    found = found or ("tiered_zero.state_limits.device" if settings.state_limits.device else "")
    if found:
        raise ConfigError(
            "tiered_zero.update: delayed needs the whole optimizer off the device, where its update can run beside "
            f"compute; found {found}. Set offload_optimizer.device to cpu or nvme with ratio 1 and without "
            "tiered_zero.state_limits.device, or take overlapped."
        )


def smaller_sub_groups(config: Config) -> list[str]:
    """A line where sub-groups are cut smaller than somebody asked for; DeepSpeed's default, 1e9, asks for nothing."""
    given = config.zero_optimization.sub_group_size
    numel = sub_group_numel(given)
    if numel == given or given >= 1_000_000_000:
        return []
    return [f"zero_optimization.sub_group_size: {given} is a limit; sub-groups are cut at {numel} elements"]


def wider_window(run_spec: RunSpec) -> list[str]:
    """A line where the parameters in use at once are more than stage3_max_live_parameters; 0 asks for just those."""
    allowed = run_spec.config.zero_optimization.stage3_max_live_parameters
    paged = [unit for unit in run_spec.units if run_spec.plan.param_tiers[unit.index] != "device"]
    needed = run_spec.plan.live_nbytes // max((unit.itemsize for unit in paged), default=1)
    if not paged or not 0 < allowed < needed:
        return []
    return [
        f"zero_optimization.stage3_max_live_parameters: {allowed} is less than the {needed} elements that are in use "
        "at once; those are kept on the device. Lower tiered_zero.unit_size_cap to need fewer."
    ]


def unused_tiers(run_spec: RunSpec) -> list[str]:
    """A line for each setting that lets a part of the state rest on a faster tier where no sub-group fits."""
    offload, used = run_spec.config.zero_optimization.offload_optimizer, run_spec.plan.state_tiers
    asked = {f"tiered_zero.state_limits.{tier}": tier for tier in run_spec.config.tiered_zero.state_limits.by_tier}
    if offload.ratio < 1:
        asked["zero_optimization.offload_optimizer.ratio"] = "device"
    smallest = format_nbytes(min((layout.nbytes for layout in run_spec.layouts), default=0))
    return [
        f"{name}: no sub-group rests on tier {tier}, for the smallest needs {smallest}. Lower "
        "zero_optimization.sub_group_size, or give more room."
        for name, tier in asked.items()
        if tier not in used and any(TIERS.index(tier) < TIERS.index(other) for other in used)
    ]
