"""Notices of what a plan makes of the config, for the log of a start."""

from __future__ import annotations

from tiered_zero.assembly.run_spec import RunSpec
from tiered_zero.layout.flat import CUT_NUMEL
from tiered_zero.layout.subgroups import MAX_SUB_GROUPS
from tiered_zero.plan.host_device import describe_resolved_tiers
from tiered_zero.plan.request import splits_masters_off_device
from tiered_zero.sizes import TIERS, format_nbytes


def planning_notices(run_spec: RunSpec) -> list[str]:
    """One line for each setting that the plan could not follow to the letter."""
    zero, plan = run_spec.config.zero_optimization, run_spec.plan
    lines = []
    if (moved := describe_resolved_tiers(run_spec.config, run_spec.effective_config)) is not None:
        lines.append(moved)
    if "stage3_param_persistence_threshold" in zero.model_fields_set and zero.stage3_param_persistence_threshold:
        key = "zero_optimization.stage3_param_persistence_threshold"
        if plan.tiers.sharded:
            lines.append(f"{key}: no parameter stays whole with many ranks; small ones are gathered with their block")
        elif splits_masters_off_device(run_spec.effective_config):
            lines.append(f"{key}: no parameter stays on the device with bf16_remainder, as each is half of its master")
    ranks = plan.request.ranks
    if run_spec.rule.elementwise and any(group.get("fused") for group in run_spec.source.param_groups):
        cause = (
            "each rank has parts of parameters"
            if ranks.shards_params
            else f"state is kept as {plan.request.state.format}"
        )
        lines.append(
            f"{run_spec.rule.name} with fused=True is stepped as with fused=False, which rounds otherwise, for {cause}"
        )
    keys = ("gradient_allreduce_op", "prescale_gradients", "gradient_predivide_factor", "communication_data_type")
    defaults = type(run_spec.config).model_fields
    idle = [key for key in keys if getattr(run_spec.config, key) not in (defaults[key].default, False)]
    if idle and ranks.world_size == 1:
        lines.append(f"one rank has no gradients to sum with others': without effect are {', '.join(idle)}")
    if plan.request.update.policy == "overlapped" and ranks.shards_state and not ranks.shards_params:
        lines.append(f"tiered_zero.update: overlapped was asked for; {plan.update_policy.text}")
    if run_spec.config.activations_device == "cpu" and plan.activations is None:
        lines.append(
            "activation_checkpointing.cpu_checkpointing, tiered_zero.activations.device cpu: without effect where the "
            "CPU computes, for activations rest in host memory there; tiered_zero.activations.device nvme frees it"
        )
    if plan.request.gradients == "auto" and (nbytes := plan.nbytes("nvme", "gradient")):
        in_memory = plan.nbytes("host", "gradient") + plan.nbytes("device", "gradient")
        kept = plan.nbytes("host", "param") if plan.request.params.tier == "nvme" else 0
        also = f", where offload_param.max_in_cpu keeps {format_nbytes(kept)} of parameters" if kept else ""
        lines.append(
            f"tiered_zero.gradients: {format_nbytes(nbytes)} rest on nvme and {format_nbytes(in_memory)} in memory, "
            f"which has no room for more ({plan.limits['host'][1]}){also}"
        )
    if plan.activations is not None and not plan.activations.nbytes:
        lines.append(
            f"tiered_zero.activations: the plan leaves no host memory for them ({plan.limits['host'][1]}), so they "
            "stay on the device. Set tiered_zero.activations.limit, or offload more to nvme."
        )
    given, numel = zero.sub_group_size, run_spec.sub_group_numel
    if numel < given < 1_000_000_000:  # DeepSpeed's default asks for nothing, here and below
        lines.append(f"zero_optimization.sub_group_size: {given} is a limit; sub-groups are cut at {numel} elements")
    elif numel > max(given, CUT_NUMEL):
        lines.append(
            f"zero_optimization.sub_group_size: {given} would cut this model into more than {MAX_SUB_GROUPS} pieces; "
            f"sub-groups are cut at {numel} elements"
        )
    if ranks.world_size > 1 and ranks.bucket_numel < zero.reduce_bucket_size != 500_000_000:
        lines.append(
            f"zero_optimization.reduce_bucket_size: {zero.reduce_bucket_size} is a limit; buckets have "
            f"{ranks.bucket_numel} elements"
        )
    paged = [unit for unit in run_spec.units if not plan.tiers.is_resident(unit)]
    if not paged and run_spec.effective_config.zero_optimization.offload_param.device != "none":
        lines.append(
            "zero_optimization.offload_param has nothing to move: no parameter has more than "
            f"{zero.stage3_param_persistence_threshold} elements, and all stay on the device. Set "
            "zero_optimization.stage3_param_persistence_threshold to 0 to offload them."
        )
    allowed = zero.stage3_max_live_parameters
    needed = plan.pager_limits.live_nbytes // max((unit.itemsize for unit in paged), default=1)
    if paged and 0 < allowed < needed:  # 0 asks for just what is in use
        lines.append(
            f"zero_optimization.stage3_max_live_parameters: {allowed} is less than the {needed} elements that are in "
            "use at once; those are kept on the device. Lower tiered_zero.unit_size_cap to need fewer."
        )
    asked = {f"tiered_zero.state_limits.{tier}": tier for tier in plan.request.state.limits}
    if zero.offload_optimizer.ratio < 1:
        asked["zero_optimization.offload_optimizer.ratio"] = "device"
    used = {TIERS.index(tier) for tier in plan.tiers.state}
    smallest = format_nbytes(min((layout.nbytes for layout in run_spec.layouts), default=0))
    return lines + [
        f"{name}: no sub-group rests on tier {tier}, for the smallest needs {smallest}. Lower "
        "zero_optimization.sub_group_size, or give more room."
        for name, tier in asked.items()
        if TIERS.index(tier) not in used and any(TIERS.index(tier) < other for other in used)
    ]
