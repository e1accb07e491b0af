"""The movers that the plan chooses: where gradients gather, which policy updates, who observes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from tiered_zero.activations.extents import HostPlace, NvmePlace, Place
from tiered_zero.activations.mover import ActivationMover, MoverSettings
from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.concurrency.teardown import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.in_flight import InFlightGradients
from tiered_zero.grads.norms import GradNorm
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.grads.reducer import GradientReducer, Reduction
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.buckets import Bucket, cut_buckets
from tiered_zero.native.update import num_kernel_threads
from tiered_zero.params.pager import Pager
from tiered_zero.params.update_guard import ShardGather, UpdateGuard
from tiered_zero.plan.remedies import open_settings
from tiered_zero.plan.request import RankRequest
from tiered_zero.rules.kernel_rule import open_kernel
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.runlog import RunHeader, RunObserver, StepLog
from tiered_zero.tiers.inventory import Inventory
from tiered_zero.tiers.paged_flat import FlatWindows
from tiered_zero.tiers.rack import TierRack
from tiered_zero.update.eager import EagerUpdate
from tiered_zero.update.overlapped import DelayedPolicy, OverlappedPolicy
from tiered_zero.update.policy import BarrierPolicy, GatheringPolicy, UpdatePolicy
from tiered_zero.update.stepper import StreamingStepper


def make_activations(
    run_spec: RunSpec, tiers: TierRack, runtime: Runtime, resources: Teardown
) -> ActivationMover | None:
    """None where saved activations stay on the device."""
    plan, asked = run_spec.plan.activations, run_spec.config.activation_checkpointing
    if plan is None or not plan.nbytes:
        return None
    place: Place
    if tiers.activation_nvme is not None and tiers.activation_staging is not None:
        place = NvmePlace(tiers.activation_nvme, plan.nbytes, plan.in_flight_nbytes, tiers.activation_staging, runtime)
    else:
        place = HostPlace(tiers.host, plan.nbytes, runtime)
    settings = MoverSettings(
        in_flight_nbytes=plan.in_flight_nbytes,
        min_nbytes=plan.min_nbytes,
        synchronize=asked.synchronize_checkpoint_boundary,
        profile=asked.profile,
    )
    mover = ActivationMover(place, plan.nbytes, settings, runtime)
    resources.add("activations", mover.close)
    return mover


def make_gradients(
    run_spec: RunSpec, tiers: TierRack, inventory: Inventory, runtime: Runtime, overflow: OverflowGuard
) -> tuple[GradientStore, GradientReducer | None]:
    plan = run_spec.plan
    trainable = [unit for unit in run_spec.units if unit.trainable]
    on_device = {index for index, tier in plan.tiers.gradients.items() if tier == "device"}
    windows = None
    if tiers.gradient_windows is not None:
        in_backward = plan.update_policy.optimizer_in_backward
        windows = FlatWindows(tiers.gradient_windows, runtime.recorder, writes_ahead=not in_backward)
    cuts: dict[int, list[int]] = {}
    for layout in run_spec.layouts:
        for segment in layout.subgroup.segments:
            cuts.setdefault(segment.unit.index, []).append(segment.unit_start)
    units = [
        UnitGradients.reserve(
            unit,
            tiers.for_gradients(plan.tiers.gradients[unit.index]),
            nbytes=plan.gradients.nbytes(unit),
            dtype=torch.float32 if plan.gradients.sums else unit.dtype,
            has_spare=plan.delayed,
            shard=None if plan.gradients.rank is None else unit.shard(plan.gradients.rank),
            windows=windows,
            cuts=cuts.get(unit.index, ()),
        )
        for unit in trainable
    ]
    entries = {
        param: (unit, entry)
        for unit in trainable
        for param, entry in zip(run_spec.params_of(unit), unit.entries, strict=True)
    }
    threads = num_kernel_threads(shares_cores=plan.request.update.shares_cores)
    norms = GradNorm(run_spec.rule.kernel or open_kernel(num_threads=threads))
    in_flight = InFlightGradients(runtime, plan.gradients.in_flight_nbytes, tiers.gradient_staging, norms)
    store = GradientStore(entries, units, inventory, runtime, in_flight, norms, overflow)
    if runtime.collectives.world_size == 1:
        return store, None
    size, ranks = plan.staging.buckets, plan.request.ranks
    tier = tiers.device if plan.staging.bucket_tier == "device" else tiers.host
    slots = [tier.reserve(f"bucket/{index}", size.nbytes, "bucket") for index in range(size.count)]
    memory = [tier.view(slot)[: size.nbytes] for slot in slots]
    buckets = cut_buckets(trainable, ranks.world_size, ranks.bucket_numel)
    reduction = make_reduction(run_spec.config, ranks, buckets, on_device=len(on_device) == len(trainable))
    return store, GradientReducer(store, units, runtime, memory, reduction)


def paged_gradients(run_spec: RunSpec) -> dict[int, torch.dtype]:
    """Unit -> the dtype of its gradients, of those that rest on NVMe."""
    plan = run_spec.plan
    return {
        unit.index: torch.float32 if plan.gradients.sums else unit.dtype
        for unit in run_spec.units
        if plan.tiers.gradients.get(unit.index) == "nvme"
    }


def make_reduction(config: Config, ranks: RankRequest, buckets: Sequence[Bucket], *, on_device: bool) -> Reduction:
    """Read from `config` how gradients are scaled and summed, as DeepSpeed does: by default they are divided by the
    number of ranks, then summed; where the sum is divided, gradients are divided by a factor before. `on_device`: where
    all of them rest."""
    factor, first = config.gradient_predivide_factor, config.prescale_gradients
    if first is None:
        first = factor == 1.0
    divisor = ranks.world_size if config.gradient_allreduce_op == "mean" else 1
    before, after = (divisor, 1.0) if first else (factor, divisor / factor)
    name = config.communication_data_type
    dtype = None if name is None else {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    return Reduction(
        buckets=buckets,
        gathers=not ranks.shards_state,
        before=before,
        after=after,
        dtype=dtype,
        overlaps=ranks.shards_params or config.zero_optimization.overlap_comm is not False,
        defers=ranks.shards_params,
        in_backward=config.zero_optimization.overlap_comm is True and on_device and not ranks.shards_gradients,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class WholeWeights:
    """Makes the parameters of every unit whole once this rank has written its shards of them, and guards them while
    they change. `gather`: None where the shards are all, or are gathered for each use."""

    guard: UpdateGuard
    gather: ShardGather | None

    def invalidate_all(self) -> None:
        """Drop what the device holds of every unit."""
        self.guard.invalidate_all()

    def end_update(self) -> None:
        """Gather the other ranks' shards, and take the values of resident units as new."""
        if self.gather is not None:
            self.gather.gather()
        self.guard.end_update()


def whole_weights(run_spec: RunSpec, runtime: Runtime, pager: Pager) -> WholeWeights:
    units = [unit for unit in run_spec.units if any(entry.param.name in run_spec.trained for entry in unit.entries)]
    ranks = run_spec.plan.request.ranks
    is_sharded = ranks.shards_state and not ranks.shards_params
    gather = ShardGather(runtime, units, lambda unit: pager.storage(unit).flat) if is_sharded else None
    return WholeWeights(guard=pager.updates, gather=gather)


def make_policy(
    run_spec: RunSpec,
    stepper: StreamingStepper,
    inventory: Inventory,
    runtime: Runtime,
    whole: WholeWeights,
    gradients: GradientStore,
) -> UpdatePolicy:
    """The policy that the plan has chosen. See [Note: State on several tiers]."""
    settings, groups = run_spec.config.tiered_zero, run_spec.source.param_groups
    units = list({s.unit.index: s.unit for layout in run_spec.layouts for s in layout.subgroup.segments}.values())
    choice = run_spec.plan.update_policy
    if choice.policy == "barrier":
        if whole.gather is None:
            return BarrierPolicy(stepper, groups, whole.guard)
        return GatheringPolicy(stepper, groups, whole.guard, runtime, whole.gather)
    if choice.policy == "overlapped":
        open_eagerly = partial(EagerUpdate, run_spec.layouts, gradients.freeze, gradients.keep)
        eagerly = open_eagerly if choice.optimizer_in_backward else None
        return OverlappedPolicy(stepper, groups, inventory, units, runtime, whole.guard, eagerly)
    overlapped = OverlappedPolicy(stepper, groups, inventory, units, runtime, whole.guard)
    return DelayedPolicy(overlapped, settings.delay_start_step)


def make_observers(run_spec: RunSpec, runtime: Runtime, resources: Teardown) -> list[Callable[[StepReport], None]]:
    """Called with the report of each optimizer step: a log line every `steps_per_print`, the run's record and trace."""
    settings = run_spec.config.tiered_zero
    if runtime.collectives.rank > 0:
        return []
    log = StepLog(run_spec.config.steps_per_print, run_spec.source.param_groups)
    if settings.report is None and settings.trace is None:
        return [log]
    planned: dict[str, dict[str, int]] = {}
    for row in run_spec.plan.rows:
        planned.setdefault(row.tier, {})[row.kind] = row.nbytes
    num_parameters = sum(spec.numel for spec in run_spec.specs.values())
    facts = {
        "update": run_spec.plan.update_policy.policy,
        "device": str(runtime.accelerator.device),
        "rule": run_spec.rule.name,
    }
    header = RunHeader(
        model=type(run_spec.model).__name__,
        num_parameters=num_parameters,
        planned_nbytes=planned,
        facts=facts,
        open_settings=open_settings(run_spec.plan),
    )
    observer = RunObserver(runtime.recorder, header, settings.report, settings.trace)
    resources.add("observers", observer.close)
    return [log, observer]
