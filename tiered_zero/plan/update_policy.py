"""Choice of the update policy, with its reason: made with the plan, before anything is allocated."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from tiered_zero.plan.request import RankRequest, UpdateRequest


@dataclass(frozen=True, kw_only=True)
class UpdateChoice:
    """`policy`: "barrier", "overlapped" or "delayed", as it runs. `reason`: why this one, in words.

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


def choose_update_policy(
    request: UpdateRequest, state_tiers: Collection[str], ranks: RankRequest | None = None
) -> UpdateChoice:
    """Resolve `tiered_zero.update`. `state_tiers`: the tiers that hold optimizer state.

    If ranks have shards of the state and whole parameters, `barrier` runs: step() ends with the gather of the new
    parameters. An update of state on the device takes compute's own time: `barrier` runs whatever is requested. The
    same holds if the CPU is the device and no state comes from NVMe, unless `overlapped` is requested.
    """
    automatic = request.policy == "auto"
    asked = f"tiered_zero.update is {request.policy}"
    ranks = ranks or RankRequest()
    if ranks.shards_state and not ranks.shards_params:
        reason = (
            f"{ranks.world_size} ranks gather the new parameters of each other's shards inside step(), each unit's "
            "while others are updated"
        )
        return UpdateChoice(policy="barrier", reason=reason)
    if request.policy in ("barrier", "delayed"):
        return UpdateChoice(policy=request.policy, reason=asked)
    if set(state_tiers) == {"device"}:
        return UpdateChoice(policy="barrier", reason="all optimizer state is on the device, whose own time it takes")
    if automatic and request.shares_cores and "nvme" not in state_tiers:
        return UpdateChoice(policy="barrier", reason="the CPU is the device: an update during compute shares its cores")
    return UpdateChoice(
        policy="overlapped",
        reason="exact, and overlaps compute or disk" if automatic else asked,
        optimizer_in_backward=(
            request.in_backward
            and ranks.world_size == 1
            and not request.checks_gradients
            and "device" not in state_tiers
        ),
    )
