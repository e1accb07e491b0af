"""Make requests of the planner, from configs with tiers by their names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tiered_zero.config.load import load
from tiered_zero.plan.planner import Plan
from tiered_zero.plan.request import PlanRequest

DEVICES = {"device": "none", "host": "cpu", "nvme": "nvme"}


def plan_request(
    param_tier: str = "host",
    state_tier: str = "host",
    *,
    update: str = "auto",
    clips: bool = False,
    sums_gradients: bool = False,
    state_limits: Mapping[str, int] | None = None,
    activations: Mapping[str, Any] | None = None,
    param: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    zero: Mapping[str, Any] | None = None,
    num_buffers: int | None = None,
    **facts: Any,
) -> PlanRequest:
    """`param`, `state`, `zero`: other keys of offload_param, of offload_optimizer and of zero_optimization.
    `num_buffers`: buffer_count of both. `facts`: of PlanRequest."""
    both = {"nvme_path": "swap", "buffer_count": num_buffers}
    offload_param = {"device": DEVICES[param_tier], "max_in_cpu": 0, **both, **(param or {})}
    offload_optimizer = {"device": DEVICES[state_tier], **both, **(state or {})}
    config = load(
        {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 2 if sums_gradients else 1,
            "gradient_clipping": 1.0 if clips else 0.0,
            "zero_optimization": {
                "stage": 3,
                "offload_param": offload_param,
                "offload_optimizer": offload_optimizer,
                **(zero or {}),
            },
            "tiered_zero": {
                "update": update,
                "gradients": "cpu",
                "state_limits": state_limits or {},
                "activations": activations or {},
            },
        }
    )
    return PlanRequest(config=config, **facts)


def param_tiers(plan: Plan) -> dict[int, str]:
    """Unit index -> tier of its parameters."""
    return {placed.unit.index: placed.param_tier for placed in plan.tiers.units}


def gradient_tiers(plan: Plan) -> dict[int, str]:
    """Index of a unit with gradients -> their tier."""
    return {placed.unit.index: placed.gradient_tier for placed in plan.tiers.units if placed.gradient_tier}
