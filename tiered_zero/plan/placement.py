"""Place every unit, sub-group and gradient: its tier, its slot, and what a step writes of it on nvme.

Slots are one list, from which they are reserved, in-place commits are planned, and a layout is hashed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import PlanRequest, SubGroupSize


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
        """Return whether the unit is whole on the device, and stays there."""
        return self.params[unit.index] == "device" and unit.index not in self.sharded

    def home_nbytes(self, unit: Unit) -> int:
        """Return the bytes of the unit's parameters at their home."""
        return unit.shard_nbytes if unit.index in self.sharded else unit.nbytes

    def back_tier(self, unit: Unit) -> str:
        """Return the tier to which the delayed update writes the unit's parameters: their own, or host memory for
        resident ones."""
        return "host" if self.is_resident(unit) else self.params[unit.index]


def place(units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest) -> Placement:
    """Choose the tier of each. Limits are checked when the plan is complete."""
    state = place_state(subgroups, request)
    return Placement(
        params=place_params(units, request),
        state=state,
        gradients=_place_gradients(units, subgroups, state, request.state_tier),
        sharded=frozenset(unit.index for unit in units) if request.shards_params else frozenset(),
    )


def place_params(units: Sequence[Unit], request: PlanRequest) -> dict[int, str]:
    """Return unit index -> tier. With nvme the first units stay in host memory, up to `max_in_cpu` elements."""
    tiers: dict[int, str] = {}
    slowest, room = request.param_tier, request.config.zero_optimization.offload_param.max_in_cpu
    for unit in units:
        tier = "device" if unit.persistent else slowest
        if tier == "nvme" and unit.params_numel <= room:
            tier = "host"
            room -= unit.params_numel
        tiers[unit.index] = tier
    return tiers


def place_state(subgroups: Sequence[SubGroupSize], request: PlanRequest) -> list[str]:
    """Return the tier of each sub-group: each tier faster than `state_tier` holds as much as it may, and the rest goes
    to `state_tier`.

    Embeddings come first: their gradients are the last of a backward, and a forward needs them first. Then come the
    units in the order of the next forward. State of no bytes rests on the host: on the device it would bring the update
    of parameters that need not lie there.
    """
    total = sum(subgroup.state_nbytes for subgroup in subgroups)
    ratio = request.config.zero_optimization.offload_optimizer.ratio
    room = {"device": round((1 - ratio) * total), **request.state_limits}
    tiers = [request.state_tier] * len(subgroups)
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
    """Return the tier of each trainable unit's gradients. A unit that no sub-group holds follows `last`."""
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
    """Leave `host_nbytes` of gradients in host memory, those of the first units, whose updates come first; the others
    rest on nvme. A unit with some state on the device stays in host memory, from which that state is updated.

    `nbytes_of`: returns the bytes of a unit's gradients at their home."""
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


COMMIT_KINDS = {"param": "commit_param", "param_back": "commit_param", "state": "commit"}
"""Kind of a slot -> the kind under which its further places on disk, for commits, are counted."""

NUM_GRADIENT_WINDOWS = 3
"""Buffers for gradients that rest on nvme: one unit's are gathered, those before them rest until they are needed, and
those before them are written."""

BUFFERS = -1
"""The index, in place of a unit's, of the copy of all buffers."""


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """One slot. `index`: of the unit, of the sub-group if `kind` is "state", or BUFFERS.

    `num_durable`: places on disk for in-place commits, which write the place that the last commit does not name; 1: the
    slot is written once; 0: no commit holds it.
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
        """Return the kind under which each place is counted, and its bytes."""
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

    A commit makes state durable, and everything that cannot be made from it: parameters of no sub-group, buffers, and
    all parameters if they are half of their masters. Those that rest in memory have a copy next to the state.
    """
    commits, is_half = request.config.tiered_zero.checkpoint.in_place, request.state_format == "bf16_remainder"
    held = {index for subgroup in subgroups for index in subgroup.parts}
    slots: list[PlannedSlot] = []

    def add(kind: str, index: int, nbytes: int, tier: str, num_durable: int) -> None:
        on_disk = num_durable if tier == "nvme" else 0
        slots.append(PlannedSlot(kind=kind, index=index, nbytes=nbytes, tier=tier, num_durable=on_disk))

    for unit in units:
        index, nbytes, tier = unit.index, tiers.home_nbytes(unit), tiers.params[unit.index]
        num_durable = 0 if not commits or (index in held and not is_half) else 1 + (index in held)
        if not tiers.is_resident(unit):
            add("param", index, nbytes, tier, num_durable)
        if delayed and index in held:
            add("param_back", index, nbytes, tiers.back_tier(unit), num_durable)
        if num_durable and tier != "nvme":
            add("commit_copy", index, nbytes, "nvme", num_durable)
    for index, (subgroup, tier) in enumerate(zip(subgroups, tiers.state, strict=True)):
        add("state", index, subgroup.state_nbytes, tier, 2 if commits else 0)
    if commits and request.buffers_nbytes:
        add("commit_copy", BUFFERS, request.buffers_nbytes, "nvme", 2)
    return slots


@dataclass(frozen=True, kw_only=True)
class UnitTraffic:
    """A unit's bytes at their homes. `numel`: elements of parameters, without padding. `lookups`: those of embeddings
    that no product reads. `is_tied`: it holds an embedding that is also a product's weight. `params`, `gradients`: the
    tier and the bytes; the tier is "" without gradients. `is_paged`: it leaves the device. `state`: tier -> bytes."""

    numel: int
    lookups: int
    is_tied: bool
    params: tuple[str, int]
    gradients: tuple[str, int]
    is_paged: bool
    state: Mapping[str, int]


def list_traffic(
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    tiers: Placement,
    request: PlanRequest,
) -> tuple[UnitTraffic, ...]:
    """List the units in the order of a forward."""
    state: dict[int, Counter[str]] = {unit.index: Counter() for unit in units}
    for subgroup, tier in zip(subgroups, tiers.state, strict=True):
        left_nbytes, left_numel = subgroup.state_nbytes, sum(subgroup.parts.values())
        for index, numel in subgroup.parts.items():
            share = left_nbytes * numel // max(1, left_numel)
            state[index][tier] += share
            left_nbytes, left_numel = left_nbytes - share, left_numel - numel
    found = []
    for unit in units:
        embeddings = [entry.param for entry in unit.entries if entry.param.embedding]
        gradients = (tiers.gradients[unit.index], request.gradient_nbytes(unit)) if unit.trainable else ("", 0)
        found.append(
            UnitTraffic(
                numel=unit.params_numel,
                lookups=sum(param.numel for param in embeddings if not param.aliases),
                is_tied=any(param.aliases for param in embeddings),
                params=(tiers.params[unit.index], tiers.home_nbytes(unit)),
                gradients=gradients,
                is_paged=not tiers.is_resident(unit),
                state=dict(state[unit.index]),
            )
        )
    return tuple(found)


def written_on_nvme(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> dict[str, int]:
    """Return by kind the bytes that a step writes: trained parameters, masters and state, and the gradients that find
    no window. See [Note: Gradients on NVMe]. `in_backward`: updates start there, and keep the windows that they
    need."""
    params = sum(unit.params[1] for unit in units if unit.state and unit.params[0] == "nvme")
    return {
        "param": params,
        "state": sum(unit.state.get("nvme", 0) for unit in units),
        "gradient": sum(_gradient_writes(units, accumulation, in_backward=in_backward)),
    }


def _gradient_writes(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> list[int]:
    """Return the bytes of each write of gradients in the order of backward, the last unit's first. Each backward opens
    all of them anew. When the last backward ends, those of the first units are in windows and are not written."""
    sizes = [unit.gradients[1] for unit in reversed(units) if unit.gradients[0] == "nvme"]
    if in_backward:
        return sizes * (accumulation - 1)
    kept = NUM_GRADIENT_WINDOWS - 1
    return (sizes * accumulation)[: max(0, len(sizes) * accumulation - kept)]
