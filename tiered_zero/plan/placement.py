"""Choose the tier of every unit, sub-group and gradient, list their slots (regions of a tier), and count the bytes that
a step writes to nvme.

One list of slots is used to reserve them, to plan in-place commits, and to hash the layout.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import PlanRequest, SubGroupSize


@dataclass(frozen=True, kw_only=True)
class Placement:
    """The tiers of all parameters, optimizer state and gradients.

    `params`: unit index -> tier of its parameters. `sharded`: indices of units; a rank keeps only its shard of these
    units on their tier. All other units are kept whole, and a whole unit on "device" never leaves it. `state`: the tier
    of each sub-group's state. `gradients`: index of a trainable unit -> tier of its gradients. It is "device" if all
    the unit's state rests on the device: gradients and update then stay there too. Otherwise it is "host", or "nvme"
    after `gradients_to_nvme`.
    """

    params: Mapping[int, str]
    state: Sequence[str]
    gradients: Mapping[int, str]
    sharded: frozenset[int] = frozenset()

    def is_resident(self, unit: Unit) -> bool:
        """Return whether the whole unit stays on the device at all times."""
        return self.params[unit.index] == "device" and unit.index not in self.sharded

    def home_nbytes(self, unit: Unit) -> int:
        """Return the bytes of the unit's parameters in their home, the slot on a tier where they rest."""
        return unit.shard_nbytes if unit.index in self.sharded else unit.nbytes

    def back_tier(self, unit: Unit) -> str:
        """Return the tier to which the delayed update writes the unit's new parameters: host memory for a unit that
        stays on the device, else the tier of its parameters."""
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
    """Choose the tier of each unit's parameters; return unit index -> tier. If parameters are offloaded to nvme, the
    first units stay in host memory, up to `max_in_cpu` elements."""
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
    """Choose the tier of each sub-group's state. Tiers faster than `state_tier` are filled up to their limits; the
    other sub-groups go to `state_tier`.

    Sub-groups of embeddings are placed first: backward completes their gradients last, and a forward needs them first.
    The others follow in the order of a forward. If state is offloaded, a sub-group without bytes of state is not placed
    on the device: its update would then run there, but its parameters may rest on another tier.
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
    """Choose the tier of each trainable unit's gradients; return unit index -> tier. It is "device" if all the unit's
    state is on the device, else "host". `last`: the slowest tier of state; used as the state's tier for units without a
    sub-group."""
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
    """Move gradients from host memory to nvme, except for the first `host_nbytes` of them. Return the new placement.

    Gradients of the first units stay in host memory, because their updates come first. Gradients of a unit with some
    state on the device stay too: that state is updated from gradients in host memory. `nbytes_of`: returns the bytes of
    a unit's gradients."""
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
"""Kind of a slot -> the kind under which the ledger counts the slot's second place on disk, which commits need."""

NUM_GRADIENT_WINDOWS = 3
"""The number of windows: buffers in host memory through which gradients pass to and from nvme, one unit in each. One is
filled, one keeps the gradients of the unit before until they are needed, and one is written."""

BUFFERS = -1
"""The index of the slot that holds a copy of all the model's buffers; used in place of a unit's index."""


@dataclass(frozen=True, kw_only=True)
class PlannedSlot:
    """A slot that the run reserves: a region of a tier. `index`: the index of the sub-group if `kind` is "state", else
    of the unit. A slot for a copy of the model's buffers has the index BUFFERS.

    `num_durable`: the number of the slot's places on disk for in-place commits. 2: each commit writes the place that
    the last commit does not name. 1: the slot is written once. 0: no commit includes the slot.
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
        """Return (kind, bytes) of each of the slot's places. The ledger, which counts every allocation, counts the
        bytes under this kind."""
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

    A commit makes state durable, and everything that cannot be computed from state: parameters that no sub-group holds;
    the model's buffers; all parameters, if they are a part of their masters (bf16_remainder). Each of these that rests
    in memory has a copy on nvme, with a slot of its own. `delayed`: the update is delayed, so each unit that it updates
    has a second slot for parameters.
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
    """The bytes that a step moves for one unit, and the elements that it computes with.

    `numel`: elements of parameters, without padding. `lookups`: elements of embeddings that no matrix product reads.
    `is_tied`: the unit holds an embedding that is also the weight of a product. `params`, `gradients`: (tier, bytes) of
    their home; ("", 0) for a unit without gradients. `is_paged`: the unit leaves the device. `state`: tier -> bytes."""

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
    """Return the traffic of each unit, in the order of a forward."""
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
    """Return kind -> bytes that a step of `accumulation` micro-batches writes to nvme. Kinds: "param" (trained
    parameters), "state" (masters and state), and "gradient" (gradients that cannot stay in a window, a buffer in host
    memory). See [Note: Gradients on NVMe]. `in_backward`: updates start in backward, so the last backward writes no
    gradients."""
    params = sum(unit.params[1] for unit in units if unit.state and unit.params[0] == "nvme")
    return {
        "param": params,
        "state": sum(unit.state.get("nvme", 0) for unit in units),
        "gradient": sum(_gradient_writes(units, accumulation, in_backward=in_backward)),
    }


def _gradient_writes(units: Sequence[UnitTraffic], accumulation: int, *, in_backward: bool) -> list[int]:
    """Return the bytes of each write of gradients to nvme, in the order of backward: the last unit comes first. Each
    backward writes the gradients of all units, except the last backward. When that ends, the gradients of the first
    units are still in windows (buffers in host memory), and are not written. `in_backward`: updates start in backward,
    so the last backward writes no gradients at all."""
    sizes = [unit.gradients[1] for unit in reversed(units) if unit.gradients[0] == "nvme"]
    if in_backward:
        return sizes * (accumulation - 1)
    kept = NUM_GRADIENT_WINDOWS - 1
    return (sizes * accumulation)[: max(0, len(sizes) * accumulation - kept)]
