"""Placement: the tier of each unit, sub-group and gradient."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import ParamRequest, PlanRequest, StateRequest, SubGroupSize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """`params`: unit index -> tier. `sharded`: units of which this rank's shard rests there; the others rest whole, and
    those on "device" never leave it. `state`: tier of each sub-group.

    `gradients`: trainable unit -> "device" where all its state rests there, so that gradients and update stay there
    too; else "host", or "nvme" where `gradients_to_nvme` moves them.
    """

    params: Mapping[int, str]
    state: Sequence[str]
    gradients: Mapping[int, str]
    sharded: frozenset[int] = frozenset()

    def is_resident(self, unit: Unit) -> bool:
        """Whether the unit is whole on the device, and stays there."""
        return self.params[unit.index] == "device" and unit.index not in self.sharded

    def home_nbytes(self, unit: Unit) -> int:
        """Bytes of the unit's parameters at their home."""
        return unit.shard_nbytes if unit.index in self.sharded else unit.nbytes

    def back_tier(self, unit: Unit) -> str:
        """Return the tier to which the delayed update writes the unit's parameters: their own, or host memory for
        resident ones."""
        return "host" if self.is_resident(unit) else self.params[unit.index]


def place(units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest) -> Placement:
    """Give each its tier; limits that cannot be met are checked when the plan is complete."""
    state = place_state(subgroups, request.state)
    return Placement(
        params=place_params(units, request.params),
        state=state,
        gradients=_place_gradients(units, subgroups, state, request.state.tier),
        sharded=frozenset(unit.index for unit in units) if request.ranks.shards_params else frozenset(),
    )


def place_params(units: Sequence[Unit], request: ParamRequest) -> dict[int, str]:
    """Unit index -> tier. With nvme the first units stay in host memory, as far as `max_host_numel` goes."""
    tiers: dict[int, str] = {}
    room = request.max_host_numel
    for unit in units:
        tier = "device" if unit.persistent else request.tier
        if tier == "nvme" and unit.params_numel <= room:
            tier = "host"
            room -= unit.params_numel
        tiers[unit.index] = tier
    return tiers


def place_state(subgroups: Sequence[SubGroupSize], request: StateRequest) -> list[str]:
    """Tier of each sub-group: as much as may rest on each tier faster than `request.tier`, the others there.

    Embeddings come first, whose gradients are the last of a backward, and which a forward needs first; then the units
    as the next forward needs them. State of no bytes rests on the host:
    on the device it would take along the update of parameters that need not lie there.
    """
    total = sum(subgroup.state_nbytes for subgroup in subgroups)
    room = {"device": round((1 - request.ratio) * total), **request.limits}
    tiers = [request.tier] * len(subgroups)
    left = sorted(range(len(subgroups)), key=lambda index: (not subgroups[index].embedding, index))
    for tier in request.faster_tiers:
        free, passed = room.get(tier, 0), []
        for index in left:
            nbytes = subgroups[index].state_nbytes
            if nbytes <= free and (nbytes or tier != "device"):
                tiers[index] = tier
                free -= nbytes
            else:
                passed.append(index)
        left = passed
    return tiers


def _place_gradients(
    units: Sequence[Unit], subgroups: Sequence[SubGroupSize], state_tiers: Sequence[str], last: str
) -> dict[int, str]:
    """A unit that no sub-group holds follows the last tier."""
    tiers_of: dict[int, set[str]] = {}
    for subgroup, tier in zip(subgroups, state_tiers, strict=True):
        for index in subgroup.parts:
            tiers_of.setdefault(index, set()).add(tier)
    return {
        unit.index: "device" if tiers_of.get(unit.index, {last}) == {"device"} else "host"
        for unit in units
        if unit.trainable
    }


def gradients_to_nvme(
    tiers: Placement,
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    nbytes_of: Callable[[Unit], int],
    host_nbytes: int,
) -> Placement:
    """Leave so many bytes of gradients in host memory, those of the first units, whose updates come first; the others
    rest on nvme. A unit of which the device holds some state stays in host memory, from where that is updated.

    `nbytes_of`: of a unit's gradients at their home."""
    split = {
        index
        for subgroup, tier in zip(subgroups, tiers.state, strict=True)
        for index in subgroup.parts
        if tier == "device"
    }
    gradients = dict(tiers.gradients)
    for unit in units:
        nbytes = nbytes_of(unit)
        if gradients.get(unit.index) != "host" or not nbytes:
            continue
        if nbytes <= host_nbytes:
            host_nbytes -= nbytes
        elif unit.index not in split:
            gradients[unit.index] = "nvme"
    return replace(tiers, gradients=gradients)
