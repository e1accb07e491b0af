"""Build the update pipeline of parameters that no engine holds: plan, tiers, rule, stepper."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.optim import Optimizer

from tiered_zero.assembly.disk_space import Ranks, check_disk_space
from tiered_zero.concurrency.interrupts import INTERRUPTS
from tiered_zero.concurrency.teardown import Teardown
from tiered_zero.config.load import load
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.select import build_accelerator
from tiered_zero.hardware.probe import available_host_nbytes
from tiered_zero.hardware.ranks.collectives import SingleRank
from tiered_zero.hardware.ranks.launcher import launch_name, local_rank, local_world_size, num_restarts
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.io.preflight import preflight_directory
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import AUTO_SUB_GROUP_NUMEL, SubGroup, pack_params
from tiered_zero.native.update import num_kernel_threads
from tiered_zero.optim.user_params import UserParameters
from tiered_zero.plan.planner import Plan, make_plan
from tiered_zero.plan.request import SubGroupSize, limit_of, plan_request
from tiered_zero.plan.slots import list_slots
from tiered_zero.rules.from_config import make_rule
from tiered_zero.rules.rule import UpdateRule
from tiered_zero.rules.state_layout import FollowingMasters, ParamMasters, StateLayout
from tiered_zero.store.new_parents import make_missing
from tiered_zero.store.runs import clear_restarted, leftover_notices
from tiered_zero.telemetry.ledger import Ledger
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.tiers.inventory import Home, Inventory
from tiered_zero.tiers.rack import TierRack, nvme_needs
from tiered_zero.update.handle import ParamGroupWatch
from tiered_zero.update.optimizer_state import OptimizerState
from tiered_zero.update.param_shards import ParamShards
from tiered_zero.update.policy import BarrierPolicy
from tiered_zero.update.state_view import StateView
from tiered_zero.update.stepper import StreamingStepper

logger = logging.getLogger("tiered_zero")

_IN_PLACE_NUMEL = 1 << 26
"""Elements of a sub-group where nothing is staged: between two the kernel's threads wait for Python, which finds its
objects out of the caches. Of 1 << 24, a step took 5% longer."""
_ORDER = ("state", "lanes", "prefetch", "tiers", "rule", "interrupts")
_SECTION = ("device", "nvme_path", "buffer_count", "pin_memory")
_RUNTIME = ("state_format", "checksums", "host_memory_limit", "io_engine", "io_timeout_s")


def read_offload(offload: Mapping[str, Any]) -> Config:
    """Read `OffloadedOptimizer(offload=...)`: keys of offload_optimizer and tiered_zero. Raises ConfigError."""
    if not isinstance(offload, Mapping):
        raise ConfigError(
            f'offload: expected a mapping such as {{"device": "nvme", "nvme_path": "/path"}}; found {offload!r}.'
        )
    if unknown := [name for name in offload if name not in (*_SECTION, *_RUNTIME)]:
        raise ConfigError(f"offload: expected keys among {[*_SECTION, *_RUNTIME]}; found {unknown[0]!r}. Correct it.")
    if offload.get("device") not in ("cpu", "nvme"):
        raise ConfigError(
            f'offload["device"]: expected "cpu" or "nvme"; found {offload.get("device")!r}. Take the plain optimizer '
            "to keep state where the parameters are."
        )
    if offload["device"] == "nvme" and not offload.get("nvme_path"):
        raise ConfigError(
            f'offload["nvme_path"]: expected a directory for device nvme; found {offload.get("nvme_path")!r}. Give the '
            "path of a directory on a local disk."
        )
    config = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {
                "stage": 2,
                "offload_optimizer": {
                    "pin_memory": True,
                    **{name: offload[name] for name in _SECTION if name in offload},
                },
            },
            "tiered_zero": {"update": "barrier", **{name: offload[name] for name in _RUNTIME if name in offload}},
        }
    )
    if config.tiered_zero.state_format == "bf16_remainder":
        raise ConfigError(
            'offload["state_format"]: expected fp32, lossy_bf16_moments or lossy_8bit_moments; found bf16_remainder, '
            "whose masters are half in the parameters, which a loop may change unseen. Take fp32."
        )
    return config


class _NoGuard:
    """Parameters that no pager holds: nothing of them is cached."""

    def invalidate(self) -> None:
        """There is nothing to drop."""

    def end_update(self) -> None:
        """The update has written the parameters themselves."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """The parts of an offloaded optimizer, from `open_pipeline`. `resources` closes them."""

    params: UserParameters
    units: Sequence[Unit]
    """Of the parameters that have elements, in their order."""
    plan: Plan
    runtime: Runtime
    policy: BarrierPolicy
    stepper: StreamingStepper
    state: OptimizerState
    watch: ParamGroupWatch
    resources: Teardown


def open_pipeline(source: Optimizer, owner: Optimizer, config: Config, ranks: Ranks) -> Pipeline:
    """Plan and allocate the tiers of the state of `owner.param_groups`, which a plain `source` is the rule of.

    `ranks`: those that do so at the same time. Raises ConfigError, ModelError, PlanError, StoreError, with nothing left
    behind.
    """
    groups = owner.param_groups
    params = UserParameters(groups)
    threads = num_kernel_threads(shares_cores=params.device.type == "cpu")
    rule = make_rule(source, config.tiered_zero.state_format, num_threads=threads)
    layouts = _lay_out(params, rule, groups, config)
    plan, in_buffers = _plan(params, layouts, config)
    _prepare_directories(config)
    check_disk_space(nvme_needs(config, plan), ranks)
    with Teardown(_ORDER) as resources:
        INTERRUPTS.keep(resources)
        resources.add("interrupts", partial(INTERRUPTS.drop, resources))
        accelerator = build_accelerator(str(params.device))
        resources.add("lanes", accelerator.close)
        params.connect(accelerator)
        ledger = Ledger({tier: limit for tier, (limit, _) in plan.limits.items()})
        runtime = Runtime(accelerator=accelerator, ledger=ledger, recorder=Recorder())
        resources.add("rule", rule.close)
        torch.ones(1).sqrt()  # MKL's first square root is not safe among threads (pytorch#188792): take it alone
        tiers = Teardown()
        resources.add("tiers", tiers.close)
        rack = TierRack(config, plan, runtime, tiers, model_name=type(source).__name__)
        inventory = Inventory()
        for slot in list_slots([], in_buffers, plan.tiers, plan.request, delayed=False):
            tier = rack.for_state(slot.tier)
            home = Home(tier, tier.reserve(slot.name, slot.nbytes, slot.kind))
            inventory.place(layouts[slot.index].subgroup, slot.kind, home)
        view = StateView(layouts, rule, inventory, rack.state_staging)
        stepper = StreamingStepper(view, runtime, params)
        resources.add("prefetch", stepper.cancel_prefetch)
        by_index = {s.unit.index: s.unit for layout in layouts for s in layout.subgroup.segments}
        units = [unit for _, unit in sorted(by_index.items())]
        named = {spec.name: param for param, (spec, _) in zip(params.params, params.specs, strict=True)}
        shards = ParamShards(SingleRank(), units, frozenset(named), is_sharded=False)
        return Pipeline(
            params=params,
            units=units,
            plan=plan,
            runtime=runtime,
            policy=BarrierPolicy(stepper, groups, _NoGuard()),
            stepper=stepper,
            state=OptimizerState(named, view, shards),  # type: ignore[arg-type]
            watch=ParamGroupWatch([owner]),
            resources=resources,
        )


def _plan(params: UserParameters, layouts: Sequence[StateLayout], config: Config) -> tuple[Plan, list[SubGroupSize]]:
    """Plan the tiers of state within this process's part of the host's memory. Returns the plan, and the sub-groups
    with what passes through staging buffers. Raises PlanError."""
    staged = [params.staged(layout.subgroup.segments) for layout in layouts]
    in_buffers = [
        SubGroupSize(state_nbytes=layout.nbytes, parts={segment.unit.index: segment.numel for segment in segments})
        for layout, segments in zip(layouts, staged, strict=True)
    ]
    free = available_host_nbytes() // local_world_size()
    source = "this process's part of what the machine and its cgroup have free"
    limits = limit_of("host", free, source, config.tiered_zero.host_memory_limit, prefix="")
    request = plan_request(config, limits=limits, shares_cores=params.device.type == "cpu")
    units = {segment.unit.index: segment.unit for segments in staged for segment in segments}
    plan = make_plan(list(units.values()), in_buffers, request)
    plan.check()
    return plan, in_buffers


def _prepare_directories(config: Config) -> None:
    """Make the swap directories that are missing, and say what is odd about each."""
    offload = config.zero_optimization.offload_optimizer
    if offload.device != "nvme":
        return
    make_missing({offload.nvme_paths: "offload.nvme_path"})
    for path in offload.nvme_paths:
        for line in preflight_directory(path, "offload.nvme_path"):
            logger.warning("%s", line)
    if num_restarts() and local_rank() == 0:
        clear_restarted(offload.nvme_paths, launch_name())
    for line in leftover_notices(offload.nvme_paths):
        logger.warning("%s", line)


def _lay_out(
    params: UserParameters, rule: UpdateRule, groups: Sequence[Mapping[str, Any]], config: Config
) -> list[StateLayout]:
    """Cut fp32 parameters, which are their own masters, apart from those of 16 bits, whose masters rest on the tier."""
    streams = config.zero_optimization.offload_optimizer.device == "nvme" or not params.are_in_place
    size = AUTO_SUB_GROUP_NUMEL if streams else _IN_PLACE_NUMEL
    layouts: list[StateLayout] = []
    for masters, is_full in ((ParamMasters(), True), (FollowingMasters(), False)):
        alike = [(spec, group) for spec, group in params.specs if (spec.dtype == torch.float32) == is_full]
        subgroups: list[SubGroup] = pack_params(alike, size, elementwise=rule.elementwise, first_index=len(layouts))
        layouts += [StateLayout(subgroup, rule, groups, masters) for subgroup in subgroups]
        if alike and not is_full:
            logger.warning(
                "%d parameters of 16 bits get fp32 master weights beside their state: 4 bytes a parameter", len(alike)
            )
    return layouts
