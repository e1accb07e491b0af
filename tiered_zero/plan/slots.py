"""The slots that units, sub-groups and durable copies rest in: one list, from which they are reserved, what in-place
commits take is planned, and a layout is hashed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.placement import Placement
from tiered_zero.plan.request import PlanRequest, SubGroupSize

COMMIT_KINDS = {"param": "commit_param", "param_back": "commit_param", "state": "commit"}
"""Kind of a slot -> what its places on disk besides the first count as, which commits need."""

BUFFERS = -1
"""In place of a unit: the copy of all buffers."""


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """One slot. `index`: of the unit, of the sub-group if `kind` is "state", or BUFFERS.

    `num_durable`: places on disk for in-place commits, which write the one that the last commit does not name; 1:
    written once; 0: no commit holds it.
    """

    kind: str
    index: int
    nbytes: int
    tier: str
    num_durable: int = 0

    @property
    def name(self) -> str:
        return "buffers" if self.index == BUFFERS else f"{self.kind}/{self.index}"

    @property
    def charges(self) -> list[tuple[str, int]]:
        """Return, for each of its places, the kind under which it is counted, and its bytes."""
        more = max(0, self.num_durable - 1)
        return [(self.kind, self.nbytes), *[(COMMIT_KINDS.get(self.kind, self.kind), self.nbytes)] * more]


def list_slots(
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    tiers: Placement,
    request: PlanRequest,
    *,
    delayed: bool,
) -> list[PlannedSlot]:
    """List the slots of a run in the order in which they are reserved: units, sub-groups, buffers.

    A commit makes state durable, and what is not made of it: parameters of no sub-group, buffers, and, where they are
    half of their masters, all parameters. Those that rest in memory have a copy beside the state.
    """
    commits, is_half = request.commits, request.state.format == "bf16_remainder"
    held = {index for subgroup in subgroups for index in subgroup.parts}
    slots: list[PlannedSlot] = []

    def add(kind: str, index: int, nbytes: int, tier: str, num_durable: int) -> None:
        on_disk = num_durable if tier == "nvme" else 0
        slots.append(PlannedSlot(kind=kind, index=index, nbytes=nbytes, tier=tier, num_durable=on_disk))

    for unit in units:
        index, nbytes, tier = unit.index, tiers.home_nbytes(unit), tiers.params[unit.index]
        num_durable = 0 if commits is None or (index in held and not is_half) else 1 + (index in held)
        if not tiers.is_resident(unit):
            add("param", index, nbytes, tier, num_durable)
        if delayed and index in held:
            add("param_back", index, nbytes, tiers.back_tier(unit), num_durable)
        if num_durable and tier != "nvme":
            add("commit_copy", index, nbytes, "nvme", num_durable)
    for index, (subgroup, tier) in enumerate(zip(subgroups, tiers.state, strict=True)):
        add("state", index, subgroup.state_nbytes, tier, 0 if commits is None else 2)
    if commits is not None and commits.buffers_nbytes:
        add("commit_copy", BUFFERS, commits.buffers_nbytes, "nvme", 2)
    return slots
