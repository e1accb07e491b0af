"""Resolution of tiers in host memory where the CPU is the device.

[Note: The CPU as the device]
A copy from host memory to the CPU's own memory brings nothing nearer: paging parameters in this way took a third of a
step's CPU time. So offload_param and offload_optimizer with device cpu are resolved to none, which gives the same bits,
and the plan, its notice and every record name what runs. Paging stays

* with `tiered_zero.device_memory_limit`, which asks for a small device;
* with seeded delays, which simulate another machine;
* with several ranks: their gradients are reduced as the tiers say, and a shard is fetched by the same copy from either
  tier.

State stays in host memory where the update policy that was asked for needs it off the device, where it is split over
tiers, and where parameters rest on nvme, from which its update would read them by one copy more.

Whatever is paged, what the device holds counts against the limit of host memory, unless the device has one of its own
or is simulated: the window of parameters that rest on nvme is of the process's memory as any buffer is, and shrinks to
that limit as it does to a device's.
"""

from __future__ import annotations

from tiered_zero.config.schema import Config
from tiered_zero.plan.request import Limits


def resolve_host_tiers(config: Config, limits: Limits, *, shares_cores: bool, world_size: int) -> Config:
    """Return `config` with the effective devices of parameters and optimizer state; `config` itself where none differs.

    See [Note: The CPU as the device]. `shares_cores`: the CPU is the device.
    """
    zero, settings = config.zero_optimization, config.tiered_zero
    param, state = zero.offload_param, zero.offload_optimizer
    if not shares_cores or world_size > 1 or "device" in limits or "cpu" not in (param.device, state.device):
        return config
    param_device = "none" if param.device == "cpu" else param.device
    is_split = state.ratio < 1 or bool(settings.state_limits.by_tier)
    stays = is_split or settings.update in ("overlapped", "delayed") or param_device != "none"
    state_device = "none" if state.device == "cpu" and not stays else state.device
    if settings.state_format == "bf16_remainder" and (param_device, state_device) != ("none", "none"):
        return config  # half of a master is the parameter: both rest on one side
    offload = {
        "offload_param": param.model_copy(update={"device": param_device}),
        "offload_optimizer": state.model_copy(update={"device": state_device}),
    }
    return config.model_copy(update={"zero_optimization": zero.model_copy(update=offload)})


def describe_resolved_tiers(asked: Config, effective: Config) -> str | None:
    """Return the notice that names each device which was resolved; None if none was."""
    moved = [
        f"{name}.device {getattr(asked.zero_optimization, name).device} runs as none"
        for name in ("offload_param", "offload_optimizer")
        if getattr(asked.zero_optimization, name).device != getattr(effective.zero_optimization, name).device
    ]
    if not moved:
        return None
    return (
        f"zero_optimization: {' and '.join(moved)}: the CPU is the device, and host memory is its own. Set "
        "tiered_zero.device_memory_limit to page as with a smaller device."
    )
