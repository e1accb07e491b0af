"""Choose the tier of every unit, sub-group and gradient, list their slots, and count the bytes written to nvme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import PlanRequest, SubGroupSize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tiers of all parameters, optimizer state and gradients."""

    params: Mapping[int, str]  # unit index -> tier; a whole unit on "device" never leaves it
    state: Sequence[str]  # the tier of each sub-group's state
    gradients: Mapping[int, str]  # index of a trainable unit -> tier; "device" if all the unit's state is there
    sharded: frozenset[int] = frozenset()  # indices of units; a rank keeps only its shard of each

    def is_resident(self, unit: Unit) -> bool:
        """Return whether the whole unit stays on the device at all times."""
        return self.params[unit.index] == "device" and unit.index not in self.sharded

    def home_nbytes(self, unit: Unit) -> int:
        """Return the bytes of the unit's parameters in their home."""
        return unit.shard_nbytes if unit.index in self.sharded else unit.nbytes

    def back_tier(self, unit: Unit) -> str:
        """Return the tier to which the delayed update writes the unit's new parameters."""
        return "host" if self.is_resident(unit) else self.params[unit.index]


def place(units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest) -> Placement:
    """Choose the tiers of all parameters, state and gradients. Limits are checked later, when the plan is complete."""
    state = place_state(subgroups, request)
    return Placement(
        params=place_params(units, request),
        state=state,
        gradients=_place_gradients(units, subgroups, state, request.state_tier),
        sharded=frozenset(unit.index for unit in units) if request.shards_params else frozenset(),
    )


def place_params(units: Sequence[Unit], request: PlanRequest) -> dict[int, str]:
    """Choose the tier of each unit's parameters; return unit index -> tier."""
    tiers: dict[int, str] = {}
    slowest, room = request.param_tier, request.config.zero_optimization.offload_param.max_in_cpu
    for unit in units:
        tier = "device" if unit.persistent else slowest
        if tier == "nvme" and unit.params_numel <= room:  # `max_in_cpu` elements stay in host memory
            tier = "host"
            room -= unit.params_numel
        tiers[unit.index] = tier
    return tiers


def place_state(subgroups: Sequence[SubGroupSize], request: PlanRequest) -> list[str]:
    """Choose the tier of each sub-group's state. Faster tiers are filled up to their limits before `state_tier`."""
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


def _place_gradients(
    units: Sequence[Unit], subgroups: Sequence[SubGroupSize], state_tiers: Sequence[str], last: str
) -> dict[int, str]:
    """Place each trainable unit's gradients on the device if all its state is there, else in host memory. Return unit
    index -> tier. `last`: the tier of state for units without a sub-group."""
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
    """Move gradients from host memory to nvme, except the first `host_nbytes` of them. Return the new placement.
    `nbytes_of`: returns the bytes of a unit's gradients."""
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
        if nbytes <= host_nbytes:  # the first units are updated first
            host_nbytes -= nbytes
        elif unit.index not in split:  # state on the device is updated from gradients in host memory
            gradients[unit.index] = "nvme"
    return replace(tiers, gradients=gradients)


COMMIT_KINDS = {"param": "commit_param", "param_back": "commit_param", "state": "commit"}
"""Kind of a slot -> the ledger's kind for the slot's second place on disk. Commits write the two places in turn."""

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
        """Return (kind in the ledger, bytes) of each of the slot's places."""
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
    """List the slots of a run in the order in which they are reserved: units, sub-groups, buffers. `delayed`: whether
    each unit that is updated has a second slot for parameters."""
    commits, is_half = request.config.tiered_zero.checkpoint.in_place, request.state_format == "bf16_remainder"
    held = {index for subgroup in subgroups for index in subgroup.parts}
    slots: list[PlannedSlot] = []

    def add(kind: str, index: int, nbytes: int, tier: str, num_durable: int) -> None:
        on_disk = num_durable if tier == "nvme" else 0
        slots.append(PlannedSlot(kind=kind, index=index, nbytes=nbytes, tier=tier, num_durable=on_disk))

    for unit in units:
        index, nbytes, tier = unit.index, tiers.home_nbytes(unit), tiers.params[unit.index]
        # A commit holds what state does not give: parameters outside of sub-groups, or all parameters if they are a
        # part of their masters (bf16_remainder). What rests in memory has a copy on nvme.
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
    """The bytes that a step moves for one unit, and the elements that it computes with."""

    numel: int  # elements of parameters, without padding
    lookups: int  # elements of embeddings that no matrix product reads
    is_tied: bool  # the unit holds an embedding that is also the weight of a product
    params: tuple[str, int]  # (tier, bytes) of the home
    gradients: tuple[str, int]  # (tier, bytes) of the home; ("", 0): the unit has none
    is_paged: bool  # the unit leaves the device
    state: Mapping[str, int]  # tier -> bytes


def list_traffic(
    units: Sequence[Unit],
    subgroups: Sequence[SubGroupSize],
    tiers: Placement,
    request: PlanRequest,
) -> tuple[UnitTraffic, ...]:
    """Return, for each unit in the order of a forward, its bytes of each kind and the tiers on which they rest."""
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
    """Return kind ("param", "state", "gradient") -> bytes that a step of `accumulation` micro-batches writes to nvme.
    `in_backward`: whether updates start in backward. See [Note: Gradients on NVMe]."""
    params = sum(unit.params[1] for unit in units if unit.state and unit.params[0] == "nvme")
    return {
        "param": params,
        "state": sum(unit.state.get("nvme", 0) for unit in units),
        "gradient": sum(_gradient_writes(units, accumulation, in_backward=in_backward)),
    }


def _gradient_writes(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> list[int]:
    """Return the bytes of each write of gradients to nvme, in the order of backward: the last unit comes first."""
    sizes = [unit.gradients[1] for unit in reversed(units) if unit.gradients[0] == "nvme"]
    if in_backward:  # the last backward writes none
        return sizes * (accumulation - 1)
    kept = NUM_GRADIENT_WINDOWS - 1  # in windows when the last backward ends
    return (sizes * accumulation)[: max(0, len(sizes) * accumulation - kept)]
