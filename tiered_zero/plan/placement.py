"""Choose the tier of every unit, sub-group and gradient, list their slots, and count the bytes written to nvme."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import PlanRequest, SubGroupSize


@dataclass(frozen=True, kw_only=True)
class PlacedUnit:
    """The tiers on which a unit's bytes rest. `param_nbytes`: bytes of the parameters in their home. `is_resident`:
    whether the whole unit always stays on the device. `gradient_tier`: "device" if all the unit's state is there; "" if
    the unit has no gradients. `gradient_nbytes`: bytes of the gradients of one step. `state`: tier -> bytes of masters
    and state."""

    unit: Unit
    param_tier: str
    param_nbytes: int
    is_resident: bool
    gradient_tier: str
    gradient_nbytes: int
    state: Mapping[str, int]

    @property
    def back_tier(self) -> str:
        """The tier to which the delayed update writes the unit's new parameters."""
        return "host" if self.is_resident else self.param_tier

    @property
    def gradients_leave(self) -> bool:
        """Whether the unit's gradients rest in host memory or on nvme."""
        return self.gradient_tier in ("host", "nvme")


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tiers of all parameters, gradients and optimizer state. `units`: in the order of a forward. `state`: for each
    of `subgroups`, the tier of its state."""

    units: tuple[PlacedUnit, ...]
    subgroups: Sequence[SubGroupSize]
    state: Sequence[str]

    @property
    def subgroups_on_device(self) -> list[SubGroupSize]:
        return [subgroup for subgroup, tier in self.placed_subgroups() if tier == "device"]

    def placed_subgroups(self) -> Iterator[tuple[SubGroupSize, str]]:
        """Iterate over (sub-group, tier of its state)."""
        return zip(self.subgroups, self.state, strict=True)


def place_state(subgroups: Sequence[SubGroupSize], request: PlanRequest) -> list[str]:
    """Choose the tier of each sub-group's state. Fill faster tiers up to their limits; put the rest on `state_tier`."""
    total = sum(subgroup.state_nbytes for subgroup in subgroups)
    ratio = request.config.zero_optimization.offload_optimizer.ratio
    room = {"device": round((1 - ratio) * total), **request.state_limits}
    tiers = [request.state_tier] * len(subgroups)
    # Embeddings first: backward completes their gradients last, and a forward needs them first.
    left = sorted(range(len(subgroups)), key=lambda index: (not subgroups[index].embedding, index))
    for tier in request.faster_tiers:
        free, passed = room.get(tier, 0), []
        for index in left:
            nbytes = subgroups[index].state_nbytes
            # Without state a sub-group would be updated on the device, but its parameters may rest on another tier.
            if nbytes <= free and (nbytes or tier != "device"):
                tiers[index] = tier
                free -= nbytes
            else:
                passed.append(index)
        left = passed
    return tiers


def place(
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    state_tiers: Sequence[str],
    request: PlanRequest,
    *,
    host_gradients_nbytes: int,
    delayed: bool = False,
) -> Placement:
    """Choose the tiers of parameters and gradients. Limits are checked later, when the plan is complete.

    A unit's gradients rest on the device if all the unit's state is there. Otherwise they rest in host memory, up to
    `host_gradients_nbytes`, then on nvme. If a part of the unit's state is on the device, its gradients never rest on
    nvme. `state_tiers`: the tier of each sub-group's state. `delayed`: whether gradients are held twice, for the
    delayed update.
    """
    state = _state_by_unit(subgroups, state_tiers)
    slowest, param_room = request.param_tier, request.config.zero_optimization.offload_param.max_in_cpu
    gradient_room = host_gradients_nbytes
    placed = []
    for unit in units:
        own = state[unit.index]
        param_tier = "device" if unit.persistent else slowest
        if param_tier == "nvme" and unit.params_numel <= param_room:  # `max_in_cpu` elements stay in host memory
            param_tier = "host"
            param_room -= unit.params_numel
        gradient_tier, gradient_nbytes = "", 0
        if unit.trainable:
            gradient_tier = "device" if (set(own) or {request.state_tier}) == {"device"} else "host"
            gradient_nbytes = request.gradient_nbytes(unit)
        held_nbytes = (2 if delayed else 1) * gradient_nbytes
        if gradient_tier == "host" and held_nbytes <= gradient_room:  # the first units are updated first
            gradient_room -= held_nbytes
        elif gradient_tier == "host" and "device" not in own:  # the device takes gradients from host memory only
            gradient_tier = "nvme"
        placed.append(
            PlacedUnit(
                unit=unit,
                param_tier=param_tier,
                param_nbytes=unit.shard_nbytes if request.shards_params else unit.nbytes,
                is_resident=param_tier == "device" and not request.shards_params,
                gradient_tier=gradient_tier,
                gradient_nbytes=gradient_nbytes,
                state=own,
            )
        )
    return Placement(units=tuple(placed), subgroups=subgroups, state=state_tiers)


def _state_by_unit(subgroups: Sequence[SubGroupSize], state_tiers: Sequence[str]) -> defaultdict[int, dict[str, int]]:
    """Return unit index -> tier -> bytes of the unit's masters and state on this tier."""
    state = defaultdict[int, dict[str, int]](dict)
    for subgroup, tier in zip(subgroups, state_tiers, strict=True):
        left_nbytes, left_numel = subgroup.state_nbytes, sum(subgroup.parts.values())
        for index, numel in subgroup.parts.items():
            share = left_nbytes * numel // max(1, left_numel)
            state[index][tier] = state[index].get(tier, 0) + share
            left_nbytes, left_numel = left_nbytes - share, left_numel - numel
    return state


COMMIT_KINDS = {"param": "commit_param", "param_back": "commit_param", "state": "commit"}
"""Maps the kind of a slot to the kind under which the ledger counts the slot's second place on disk. Commits write to
the first and the second place in turn."""

NUM_GRADIENT_WINDOWS = 3
"""The number of windows: buffers in host memory, each for one unit's gradients on their way to or from nvme. One is
filled, one waits for its use, and one is written."""

BUFFERS = -1
"""The index of the slot for a copy of the model's buffers."""


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """A region of a tier that the run reserves."""

    kind: str
    index: int  # of the sub-group if `kind` is "state", else of the unit; or BUFFERS
    nbytes: int
    tier: str
    num_durable: int = 0  # places on disk for commits; 2: written in turn; 1: written once; 0: in no commit

    @property
    def name(self) -> str:
        return "buffers" if self.index == BUFFERS else f"{self.kind}/{self.index}"

    @property
    def charges(self) -> list[tuple[str, int]]:
        """List what the ledger counts for the slot, as pairs (kind, bytes): one pair, and a second for a second place
        on disk."""
        more = max(0, self.num_durable - 1)
        return [(self.kind, self.nbytes), *[(COMMIT_KINDS.get(self.kind, self.kind), self.nbytes)] * more]


def list_slots(tiers: Placement, request: PlanRequest, *, delayed: bool) -> list[PlannedSlot]:
    """List the slots of a run in the order in which they are reserved: units, sub-groups, buffers. `delayed`: whether
    updates are delayed; if so, each updated unit has a second slot for its parameters."""
    commits, is_half = request.config.tiered_zero.checkpoint.in_place, request.state_format == "bf16_remainder"
    slots: list[PlannedSlot] = []

    def add(kind: str, index: int, nbytes: int, tier: str, num_durable: int) -> None:
        on_disk = num_durable if tier == "nvme" else 0
        slots.append(PlannedSlot(kind=kind, index=index, nbytes=nbytes, tier=tier, num_durable=on_disk))

    for placed in tiers.units:
        index, nbytes, tier, held = placed.unit.index, placed.param_nbytes, placed.param_tier, bool(placed.state)
        # A commit holds what state does not give: parameters outside of sub-groups, or all parameters if they are a
        # part of their masters (bf16_remainder). What rests in memory has a copy on nvme.
        num_durable = 0 if not commits or (held and not is_half) else 1 + held
        if not placed.is_resident:
            add("param", index, nbytes, tier, num_durable)
        if delayed and held:
            add("param_back", index, nbytes, placed.back_tier, num_durable)
        if num_durable and tier != "nvme":
            add("commit_copy", index, nbytes, "nvme", num_durable)
    for index, (subgroup, tier) in enumerate(tiers.placed_subgroups()):
        add("state", index, subgroup.state_nbytes, tier, 2 if commits else 0)
    if commits and request.buffers_nbytes:
        add("commit_copy", BUFFERS, request.buffers_nbytes, "nvme", 2)
    return slots


def written_on_nvme(units: Sequence[PlacedUnit], accumulation: int, *, in_backward: bool) -> dict[str, int]:
    """Return kind ("param", "state", "gradient") -> bytes that a step of `accumulation` micro-batches writes to nvme.
    `in_backward`: whether updates start in backward. See [Note: Gradients on NVMe]."""
    params = sum(each.param_nbytes for each in units if each.state and each.param_tier == "nvme")
    return {
        "param": params,
        "state": sum(each.state.get("nvme", 0) for each in units),
        "gradient": sum(_gradient_writes(units, accumulation, in_backward=in_backward)),
    }


def _gradient_writes(units: Sequence[PlacedUnit], accumulation: int, *, in_backward: bool) -> list[int]:
    """Return the bytes of each write of gradients to nvme, in the order of backward: the last unit comes first."""
    sizes = [each.gradient_nbytes for each in reversed(units) if each.gradient_tier == "nvme"]
    if in_backward:  # the last backward writes none
        return sizes * (accumulation - 1)
    kept = NUM_GRADIENT_WINDOWS - 1  # in windows when the last backward ends
    return (sizes * accumulation)[: max(0, len(sizes) * accumulation - kept)]
