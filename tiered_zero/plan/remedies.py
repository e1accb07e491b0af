"""Changes that a user can make to a plan that does not fit, so that it fits.

A setting is named only where the plan shows that it acts: what already rests on nvme is not said to be moved there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tiered_zero.plan.request import RESERVED, RESERVED_SHARE
from tiered_zero.plan.staging import NUM_STATE_STAGING
from tiered_zero.sizes import ceil_nbytes, format_nbytes

if TYPE_CHECKING:
    from tiered_zero.plan.planner import Plan, PlanRow


NUM_NAMED = 3
"""Rows that a refusal names ahead of its table."""


def how_to_fit(plan: Plan, tier: str) -> str:
    """Name the largest rows of a tier that is too small, the settings that free what is missing, largest first, and the
    smallest limit that would do: what can shrink without a change of settings has done so."""
    source, missing_nbytes = plan.limits[tier][1], plan.missing_nbytes(tier)
    rows = sorted(plan.rows_of(tier), key=lambda row: -row.nbytes)
    changes: dict[str, None] = {}
    freed_nbytes = 0
    for row in rows:
        change, share = _change(plan, row, tier)
        if change and freed_nbytes < missing_nbytes:
            changes[change] = None
            freed_nbytes += int(row.nbytes * share)
    fixed = ", which rest nowhere else"
    largest = "Largest: " + "; ".join(
        f"{row.what} {format_nbytes(row.nbytes)}{'' if _change(plan, row, tier)[0] else fixed}"
        for row in rows[:NUM_NAMED]
    )
    more = f"take a machine with more {tier} memory"
    name, reserved, _ = source.partition(RESERVED)
    if name.startswith("--") or name.endswith("memory_limit"):
        least_nbytes = plan.needed_nbytes(tier)
        if reserved:
            least_nbytes += least_nbytes // (RESERVED_SHARE - 1) + 1
        more = f"raise {name} to at least {ceil_nbytes(least_nbytes)}"
    if freed_nbytes < missing_nbytes:
        missing = f"no other setting frees the {format_nbytes(missing_nbytes)} that are missing"
        return f"{largest}. {_sentence(f'{more}: {missing}')}"
    way = " and ".join(changes)
    return f"{largest}. {_sentence(f'{way}; or {more}')}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _change(plan: Plan, row: PlanRow, tier: str) -> tuple[str, float]:
    """(what frees a row's bytes of `tier`, or a part of them; that part), or ("", 0) where nothing does."""
    params, state, ranks = plan.request.params, plan.request.state, plan.request.ranks
    kind, on_host = row.kind, tier == "host"
    if kind == "param" and row.tier == "device":
        if params.tier == "device" and not on_host:
            return "offload parameters (zero_optimization.offload_param, at stage 3)", 1.0
        if params.tier != "device" and ranks.world_size == 1:
            return "lower zero_optimization.stage3_param_persistence_threshold", 1.0
    if kind == "param" and on_host:
        lower = "lower zero_optimization.offload_param.max_in_cpu"
        return lower if params.tier == "nvme" else "set zero_optimization.offload_param.device to nvme", 1.0
    if kind == "gradient_in_flight" and ranks.shards_gradients:
        return "lower zero_optimization.reduce_bucket_size", 1.0
    if kind in ("param_window", "gradient_in_flight", "gradient_window") and not plan.pager_limits.one_module:
        return "lower tiered_zero.unit_size_cap", 1.0
    if kind in ("state", "gradient") and row.tier == "device":
        if state.tier == "device" and not on_host:
            return "offload the optimizer (zero_optimization.offload_optimizer)", 1.0
        if state.tier != "device":
            lower = "lower tiered_zero.state_limits.device"
            return lower if "device" in state.limits else "raise zero_optimization.offload_optimizer.ratio", 1.0
    if kind == "state" and on_host:
        lower = "lower tiered_zero.state_limits.host"
        return lower if state.tier == "nvme" else "set zero_optimization.offload_optimizer.device to nvme", 1.0
    if kind == "gradient" and on_host and plan.request.gradients == "host" and state.tier == "nvme":
        return "set tiered_zero.gradients to auto", 1.0
    if kind == "gradient" and plan.delayed:
        return "set tiered_zero.update to overlapped, which holds gradients once", 0.5
    if kind == "gradient" and plan.gradients.sums and plan.gradients.itemsize < 4:
        return "set gradient_accumulation_steps to 1, which needs no fp32 sums", 0.5
    if kind in ("activation", "activation_in_flight", "staging_activation"):
        return "lower tiered_zero.activations.limit", 1.0
    if kind == "param_back":
        return "set tiered_zero.update to overlapped", 1.0
    if kind == "staging_state" and (count := plan.staging.state.count) > NUM_STATE_STAGING:
        name = "zero_optimization.offload_optimizer.buffer_count"
        return f"set {name} to {NUM_STATE_STAGING}", 1 - NUM_STATE_STAGING / count
    if kind == "staging_param":
        lowered = "buffer_count" if plan.staging.params.count > 1 else "buffer_size"
        return f"lower zero_optimization.offload_param.{lowered}", 1.0
    if kind == "update_temporary":
        return "lower zero_optimization.sub_group_size", 1.0
    if kind == "bucket":
        return "lower zero_optimization.reduce_bucket_size", 1.0
    return "", 0.0
