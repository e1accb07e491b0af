"""List what the plan makes of the config where it differs, for the log of a start."""

from __future__ import annotations

from collections.abc import Iterator

from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.layout.flat import CUT_NUMEL
from tiered_zero.layout.subgroups import MAX_SUB_GROUP_NUMEL, MAX_SUB_GROUPS
from tiered_zero.plan.host_device import describe_resolved_tiers
from tiered_zero.plan.request import splits_masters_off_device
from tiered_zero.sizes import TIERS, format_nbytes


def planning_notices(run_spec: RunSpec) -> list[str]:
    """Return a line for each setting that the plan could not follow to the letter."""
    return [
        *_params_notices(run_spec),
        *_update_notices(run_spec),
        *_memory_notices(run_spec),
        *_size_notices(run_spec),
        *_state_notices(run_spec),
    ]


def _params_notices(run_spec: RunSpec) -> Iterator[str]:
    zero = run_spec.config.zero_optimization
    if (moved := describe_resolved_tiers(run_spec.config, run_spec.effective_config)) is not None:
        yield moved
    if "stage3_param_persistence_threshold" in zero.model_fields_set and zero.stage3_param_persistence_threshold:
        key = "zero_optimization.stage3_param_persistence_threshold"
        if run_spec.plan.tiers.sharded:
            yield f"{key}: no parameter stays whole with many ranks; small ones are gathered with their block"
        elif splits_masters_off_device(run_spec.effective_config):
            yield f"{key}: no parameter stays on the device with bf16_remainder, as each is half of its master"


def _update_notices(run_spec: RunSpec) -> Iterator[str]:
    config, plan, rule = run_spec.config, run_spec.plan, run_spec.rule
    ranks = plan.request.ranks
    if rule.elementwise and any(group.get("fused") for group in run_spec.source.param_groups):
        kept = f"state is kept as {plan.request.state.format}"
        cause = "each rank has parts of parameters" if ranks.shards_params else kept
        yield f"{rule.name} with fused=True is stepped as with fused=False, which rounds otherwise, for {cause}"
    keys = ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor", "communication_data_type")
    defaults = type(config).model_fields
    idle = [key for key in keys if getattr(config, key) not in (defaults[key].default, False)]
    if idle and ranks.world_size == 1:
        yield f"one rank has no gradients to sum with others': without effect are {', '.join(idle)}"
    if plan.request.update.policy == "overlapped" and ranks.shards_state and not ranks.shards_params:
        yield f"tiered_zero.update: overlapped was asked for; {plan.update_policy.text}"


def _memory_notices(run_spec: RunSpec) -> Iterator[str]:
    plan, (_, limit_source) = run_spec.plan, run_spec.plan.limits["host"]
    if run_spec.config.activations_device == "cpu" and plan.activations is None:
        yield (
            "activation_checkpointing.cpu_checkpointing, tiered_zero.activations.device cpu: without effect where the "
            "CPU computes, for activations rest in host memory there; tiered_zero.activations.device nvme frees it"
        )
    if plan.request.gradients == "auto" and (nbytes := plan.nbytes("nvme", "gradient")):
        in_memory = plan.nbytes("host", "gradient") + plan.nbytes("device", "gradient")
        kept = plan.nbytes("host", "param") if plan.request.params.tier == "nvme" else 0
        also = f", where offload_param.max_in_cpu keeps {format_nbytes(kept)} of parameters" if kept else ""
        yield (
            f"tiered_zero.gradients: {format_nbytes(nbytes)} rest on nvme and {format_nbytes(in_memory)} in memory, "
            f"which has no room for more ({limit_source}){also}"
        )
    if plan.activations is not None and not plan.activations.nbytes:
        yield (
            f"tiered_zero.activations: the plan leaves no host memory for them ({limit_source}), so they "
            "stay on the device. Set tiered_zero.activations.limit, or offload more to nvme."
        )


def _size_notices(run_spec: RunSpec) -> Iterator[str]:
    zero, plan, numel = run_spec.config.zero_optimization, run_spec.plan, run_spec.sub_group_numel
    given, ranks = zero.sub_group_size, plan.request.ranks
    if numel < given < 1_000_000_000:  # DeepSpeed's default asks for nothing, here and below
        yield (
            f"zero_optimization.sub_group_size: {given} is a limit; sub-groups are cut at {numel} elements, the "
            f"automatic size (up to {MAX_SUB_GROUP_NUMEL} the value itself)"
        )
    elif numel > max(given, CUT_NUMEL):
        yield (
            f"zero_optimization.sub_group_size: {given} would cut this model into more than {MAX_SUB_GROUPS} pieces; "
            f"sub-groups are cut at {numel} elements"
        )
    if ranks.world_size > 1 and ranks.bucket_numel < zero.reduce_bucket_size != 500_000_000:
        yield (
            f"zero_optimization.reduce_bucket_size: {zero.reduce_bucket_size} is a limit; buckets have "
            f"{ranks.bucket_numel} elements"
        )
    paged = [unit for unit in run_spec.units if not plan.tiers.is_resident(unit)]
    if not paged and run_spec.effective_config.zero_optimization.offload_param.device != "none":
        yield (
            "zero_optimization.offload_param has nothing to move: no parameter has more than "
            f"{zero.stage3_param_persistence_threshold} elements, and all stay on the device. Set "
            "zero_optimization.stage3_param_persistence_threshold to 0 to offload them."
        )
    allowed = zero.stage3_max_live_parameters
    needed = plan.pager_limits.live_nbytes // max((unit.itemsize for unit in paged), default=1)
    if paged and 0 < allowed < needed:  # 0 asks for just what is in use
        yield (
            f"zero_optimization.stage3_max_live_parameters: {allowed} is less than the {needed} elements that are in "
            "use at once; those are kept on the device. Lower tiered_zero.unit_size_cap to need fewer."
        )


def _state_notices(run_spec: RunSpec) -> Iterator[str]:
    plan = run_spec.plan
    asked = {f"tiered_zero.state_limits.{tier}": tier for tier in plan.request.state.limits}
    if run_spec.config.zero_optimization.offload_optimizer.ratio < 1:
        asked["zero_optimization.offload_optimizer.ratio"] = "device"
    slowest = max(map(TIERS.index, plan.tiers.state), default=0)
    smallest = format_nbytes(min((layout.nbytes for layout in run_spec.layouts), default=0))
    for name, tier in asked.items():
        if tier not in plan.tiers.state and TIERS.index(tier) < slowest:
            yield (
                f"{name}: no sub-group rests on tier {tier}, for the smallest needs {smallest}. Lower "
                "zero_optimization.sub_group_size, or give more room."
            )
