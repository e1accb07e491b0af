"""Name the changes of settings with which a plan that is too large would fit.

A setting is named only if the plan shows that it would free bytes: to move to nvme what rests there already is not
advised.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tiered_zero.plan.placement import NUM_GRADIENT_WINDOWS
from tiered_zero.plan.request import NUM_STATE_STAGING, RESERVED, RESERVED_SHARE
from tiered_zero.sizes import ceil_nbytes, format_nbytes

if TYPE_CHECKING:
    from tiered_zero.plan.planner import Plan, PlanRow


NUM_NAMED = 3
"""Rows that a refusal names ahead of its table."""

_STATE_TO_NVME = "set zero_optimization.offload_optimizer.device to nvme"


def how_to_fit(plan: Plan, tier: str) -> str:
    """Name the largest rows of a tier that is too small, the settings that free the missing bytes, and the smallest
    limit that would do. The plan has already shrunk everything that shrinks without a change of settings."""
    source, missing_nbytes = plan.limits[tier][1], plan.missing_nbytes(tier)
    rows = sorted(plan.rows_of(tier), key=lambda row: -row.nbytes)
    changes: dict[str, None] = {}
    freed_nbytes = 0.0
    for row in rows:
        left_nbytes = float(row.nbytes)
        for change, share in sorted(_changes(plan, row, tier), key=lambda each: each[0] not in changes):
            if freed_nbytes < missing_nbytes:
                changes[change] = None
                freed_nbytes += left_nbytes * share
                left_nbytes -= left_nbytes * share
    fixed = ", which rest nowhere else"
    largest = "Largest: " + "; ".join(
        f"{row.what} {format_nbytes(row.nbytes)}{'' if any(_changes(plan, row, tier)) else fixed}"
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


def _changes(plan: Plan, row: PlanRow, tier: str) -> Iterator[tuple[str, float]]:
    """Yield the changes that free bytes of a row on `tier`, each with the share of the row's bytes that it frees."""
    request = plan.request
    kind, on_host = row.kind, tier == "host"
    if kind == "param" and row.tier == "device" and request.param_tier == "device" and not on_host:
        yield "offload parameters (zero_optimization.offload_param, at stage 3)", 1.0
    elif kind == "param" and row.tier == "device" and request.param_tier != "device" and request.world_size == 1:
        yield "lower zero_optimization.stage3_param_persistence_threshold", 1.0
    elif kind == "param" and on_host:
        lower = "lower zero_optimization.offload_param.max_in_cpu"
        yield lower if request.param_tier == "nvme" else "set zero_optimization.offload_param.device to nvme", 1.0
    elif kind == "gradient_in_flight" and request.shards_gradients:
        yield "lower zero_optimization.reduce_bucket_size", 1.0
    elif kind in ("param_window", "gradient_in_flight", "gradient_window") and not plan.pager_limits.one_module:
        yield "lower tiered_zero.unit_size_cap", 1.0
    elif kind in ("state", "gradient") and row.tier == "device" and request.state_tier == "device" and not on_host:
        yield "offload the optimizer (zero_optimization.offload_optimizer)", 1.0
    elif kind in ("state", "gradient") and row.tier == "device" and request.state_tier != "device":
        lower = "lower tiered_zero.state_limits.device"
        yield lower if "device" in request.state_limits else "raise zero_optimization.offload_optimizer.ratio", 1.0
    elif kind == "state" and on_host:
        yield "lower tiered_zero.state_limits.host" if request.state_tier == "nvme" else _STATE_TO_NVME, 1.0
    elif kind == "gradient":
        yield from _gradient_changes(plan, row, tier)
    elif kind in ("activation", "activation_in_flight", "staging_activation"):
        yield "lower tiered_zero.activations.limit", 1.0
    elif kind == "param_back":
        yield "set tiered_zero.update to overlapped", 1.0
    elif kind == "staging_state" and (count := plan.staging.state.count) > NUM_STATE_STAGING:
        name = "zero_optimization.offload_optimizer.buffer_count"
        yield f"set {name} to {NUM_STATE_STAGING}", 1 - NUM_STATE_STAGING / count
    elif kind == "staging_param":
        lowered = "buffer_count" if plan.staging.params.count > 1 else "buffer_size"
        yield f"lower zero_optimization.offload_param.{lowered}", 1.0
    elif kind == "update_temporary":
        yield "lower zero_optimization.sub_group_size", 1.0
    elif kind == "bucket":
        yield "lower zero_optimization.reduce_bucket_size", 1.0


def _gradient_changes(plan: Plan, row: PlanRow, tier: str) -> Iterator[tuple[str, float]]:
    """Yield the changes for gradients in host memory. Gradients follow state to nvme, except for the windows, the
    buffers through which they pass: for a small model the windows take as much as the gradients."""
    request = plan.request
    if tier == "host" and request.gradient_tier == "host" and request.state_tier == "nvme":
        yield "set tiered_zero.gradients to auto", 1.0
        return
    if plan.delayed:
        yield "set tiered_zero.update to overlapped, which holds gradients once", 0.5
    if request.sums_gradients and plan.grad_itemsize < 4:
        yield "set gradient_accumulation_steps to 1, which needs no fp32 sums", 0.5
    window_nbytes = max((unit.gradients[1] for unit in plan.units), default=0)
    share = 1 - NUM_GRADIENT_WINDOWS * window_nbytes / max(1, row.nbytes)
    stays = request.world_size > 1 and not request.shards_gradients
    if tier == "host" and request.state_tier != "nvme" and share > 0 and not stays:
        yield _STATE_TO_NVME, share
