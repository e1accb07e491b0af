"""Resolve what the config asks for into what runs: the update policy, and tiers in host memory if the CPU computes.

[Note: The CPU as the device]
A copy from host memory to the CPU's own memory brings nothing nearer: paging parameters in this way took a third of a
step's CPU time. So offload_param and offload_optimizer with device cpu are resolved to none, which gives the same bits,
and the plan, its notice and every record name what runs. Paging stays

* with `tiered_zero.device_memory_limit`, which asks for a small device;
* with seeded delays, which simulate another machine;
* with several ranks: their gradients are reduced as the tiers say, and a shard is fetched by the same copy from either
  tier.

State stays in host memory if the update policy that was asked for needs it off the device, if it is split over tiers,
and if parameters rest on nvme: from the device its update would read them by one copy more.

What the device holds counts against the limit of host memory, unless the device has a limit of its own or is simulated.
The window, the parameters fetched from nvme that are in memory at once, is process memory like any buffer, and shrinks
to that limit as it does to a device's.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiered_zero.config.schema import Config
from tiered_zero.plan.request import Limits, PlanRequest


@dataclass(frozen=True, kw_only=True)
class UpdateChoice:
    """The update policy of a run. `policy`: "barrier", "overlapped" or "delayed". `reason`: why this one, in words.

    `optimizer_in_backward`: updates start before `step()`, as soon as a unit's gradients are complete.
    """

    policy: str
    reason: str
    optimizer_in_backward: bool = False

    @property
    def text(self) -> str:
        """One line for the log, the plan's table and the run's record."""
        start = ", starting in backward" if self.optimizer_in_backward else ""
        return f"update policy: {self.policy}{start} ({self.reason})"


def choose_update_policy(request: PlanRequest, state_tiers: Collection[str]) -> UpdateChoice:
    """Choose the update policy that runs for `tiered_zero.update`. `state_tiers`: the tiers that hold optimizer state.

    If ranks have shards of the state and whole parameters, `barrier` runs: step() ends with the gather of the new
    parameters. If all state is on the device, its update takes compute's own time: `barrier` runs, even if `overlapped`
    is requested. `barrier` also runs if the CPU is the device and no state comes from NVMe, unless `overlapped` is
    requested.
    """
    policy = request.config.tiered_zero.update
    automatic, asked = policy == "auto", f"tiered_zero.update is {policy}"
    if request.shards_state and not request.shards_params:
        reason = (
            f"{request.world_size} ranks gather the new parameters of each other's shards inside step(), each unit's "
            "while others are updated"
        )
        return UpdateChoice(policy="barrier", reason=reason)
    if policy in ("barrier", "delayed"):
        return UpdateChoice(policy=policy, reason=asked)
    if set(state_tiers) == {"device"}:
        return UpdateChoice(policy="barrier", reason="all optimizer state is on the device, whose own time it takes")
    if automatic and request.shares_cores and "nvme" not in state_tiers:
        return UpdateChoice(policy="barrier", reason="the CPU is the device: an update during compute shares its cores")
    return UpdateChoice(
        policy="overlapped",
        reason="exact, and overlaps compute or disk" if automatic else asked,
        optimizer_in_backward=(
            request.config.tiered_zero.optimizer_in_backward
            and request.config.managed_gradient_accumulation
            and not request.keeps_group_state
            and request.world_size == 1
            and not request.checks_gradients
            and "device" not in state_tiers
        ),
    )


def resolve_host_tiers(config: Config, limits: Limits, *, shares_cores: bool, world_size: int) -> Config:
    """Return `config` with the effective devices of parameters and optimizer state; `config` itself if none differs.

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
