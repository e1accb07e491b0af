"""From a laid-out model and the wishes of a config to a Plan."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.swap_bytes import TIERS, place_state
from tiered_zero.plan.rows import PlanRow, format_table
from tiered_zero.plan.update_policy import UpdateChoice, choose_update_policy
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up, format_nbytes

MAX_AUTO_STAGING_NBYTES = 16 * MIB
"""A parameter staging buffer that nobody sized: enough for full disk rate; units are carried in chunks of it."""

NUM_PARAM_STAGING = 4
NUM_STATE_STAGING = 3
"""At least: one sub-group is read, one updated, one written."""

AUTO_STATE_STAGING_NBYTES = 168 * MIB
"""Of state on its way, where nobody counted buffers: what keeps the disk busy while an update or a wait takes long."""

MAX_AUTO_STATE_STAGING_NBYTES = 640 * MIB
MAX_AUTO_STATE_STAGING_SHARE = 16
"""Up to so many bytes, and this part of the host's limit, where a whole unit is staged at once: that of a tied
embedding, whose gradient is backward's last and whose update the next forward waits for first, is then read before."""

WINDOW_UNITS = 3
"""Paged units on the device at once: the one in use, the one that is fetched, the one that is given up."""


@dataclass(frozen=True)
class PlanRequest:
    """What the config asks for, in our units. Sizes are bytes unless named otherwise; None: the planner chooses.

    `param_tier`, `optimizer_tier`: "device", "host" or "nvme". `max_host_param_numel`: with nvme, elements of paged
    parameters that rest in host memory instead. `limits`: tier -> (bytes, the name of the setting or fact that says
    so). `ratio`: the share of the optimizer's bytes that leaves the device. `state_limits`: tier -> most bytes of state
    on it; what may not rest on a faster tier rests on `optimizer_tier`. `update`, `shares_cores`, `checks_gradients`,
    `in_backward`: see `choose_update_policy`.
    """

    param_tier: str
    optimizer_tier: str
    limits: Mapping[str, tuple[int, str]]
    sums_gradients: bool = False
    update: str = "auto"
    shares_cores: bool = False
    checks_gradients: bool = False
    in_backward: bool = True
    max_live_numel: int = 1 << 62
    prefetch_numel: int = 1 << 62
    reuse_numel: int = 1 << 62
    max_host_param_numel: int = 0
    staging_numel: int | None = None
    num_param_staging: int | None = None
    num_state_staging: int | None = None
    state_format: str = "fp32"
    ratio: float = 1.0
    state_limits: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SubGroupSize:
    """`state_nbytes`: its slot, masters and state. `parts`: unit index -> its elements of the unit. `embedding`: it
    goes to faster tiers before others.
    """

    state_nbytes: int
    parts: Mapping[int, int]
    embedding: bool = False


@dataclass(frozen=True)
class Plan:
    """Every size and placement of a run. `param_tiers`: unit index -> tier, "device" for those that never leave it.

    `state_tiers`: sub-group index -> tier. `gradient_tiers`: trainable unit -> "device" where all its state rests
    there, so that gradients and update stay there too, else "host". `live_nbytes`: bytes of paged units on the device
    at once; `most_live_nbytes`: as many as the config allows, for code that uses more units at the same time than a
    forward of nested modules does. `in_flight_nbytes`: gradients on their way to the host.
    """

    param_tiers: Mapping[int, str]
    state_tiers: Sequence[str]
    gradient_tiers: Mapping[int, str]
    live_nbytes: int
    prefetch_numel: int
    reuse_numel: int
    in_flight_nbytes: int
    param_staging: tuple[int, int]
    state_staging: tuple[int, int]
    gradient_staging: tuple[int, int]
    sums_gradients: bool
    update_policy: UpdateChoice
    most_live_nbytes: int = 0
    rows: tuple[PlanRow, ...] = ()
    limits: Mapping[str, tuple[int, str]] = field(default_factory=dict)
    state_limits: Mapping[str, int] = field(default_factory=dict)

    @property
    def delayed(self) -> bool:
        """Whether parameters and gradients are held twice, for the delayed update."""
        return self.update_policy.policy == "delayed"

    def nbytes(self, tier: str, kind: str | None = None) -> int:
        """Planned bytes of a tier, or of one kind on it."""
        return sum(row.nbytes for row in self.rows if row.tier == tier and kind in (None, row.kind))

    def table(self) -> list[dict[str, object]]:
        """Rows as plain values: tier, kind, nbytes, what."""
        return [{"tier": row.tier, "kind": row.kind, "nbytes": row.nbytes, "what": row.what} for row in self.rows]

    @property
    def text(self) -> str:
        return format_table(self.rows, self.limits)

    def __str__(self) -> str:
        return f"{self.text}\n  {self.update_policy.text}"

    def check(self) -> None:
        """Raises PlanError, with the table, for the first tier that is too small."""
        for tier, (limit, source) in self.limits.items():
            needed = self.nbytes(tier)
            if needed <= limit:
                continue
            largest = max((row for row in self.rows if row.tier == tier), key=lambda row: row.nbytes)
            raise PlanError(
                f"The plan needs {format_nbytes(needed)} of {tier} memory; {format_nbytes(limit)} is allowed "
                f"({source}). "
                f"Largest: {largest.what} {format_nbytes(largest.nbytes)}. {_advice(tier, largest.kind)}\n{self.text}"
            )
        for tier, most in self.state_limits.items():
            needed = self.nbytes(tier, "state")
            if needed > most:
                slower = (
                    "let more rest on a faster tier" if tier == "nvme" else "name a slower tier in offload_optimizer"
                )
                raise PlanError(
                    f"The plan puts {format_nbytes(needed)} of master weights and optimizer state on tier {tier}; "
                    f"{format_nbytes(most)} is allowed (tiered_zero.state_limits.{tier}), {needed - most} bytes too "
                    f"little. Raise it, or {slower}.\n{self.text}"
                )


def make_plan(units: Sequence[Unit], needs: Sequence[SubGroupSize], wishes: PlanRequest) -> Plan:
    """Place every byte. Raises ConfigError where a size that the user fixed cannot work; does not check limits."""
    tiers = place_params(units, wishes)
    paged = [unit for unit in units if tiers[unit.index] != "device"]
    resident = [unit for unit in units if tiers[unit.index] == "device"]
    trainable = [unit for unit in units if unit.trainable]
    on_nvme = [unit for unit in paged if tiers[unit.index] == "nvme"]
    sized = [(need.state_nbytes, need.embedding) for need in needs]
    state_tiers = place_state(sized, wishes.optimizer_tier, wishes.ratio, wishes.state_limits)
    gradient_tiers = _place_gradients(trainable, needs, state_tiers, wishes.optimizer_tier)
    update_policy = choose_update_policy(
        wishes.update,
        state_tiers=state_tiers,
        shares_cores=wishes.shares_cores,
        checks_gradients=wishes.checks_gradients,
        in_backward=wishes.in_backward,
    )
    delayed = update_policy.policy == "delayed"
    copies = 2 if delayed else 1
    gradients = dict.fromkeys(TIERS, 0)
    for unit in trainable:
        gradients[gradient_tiers[unit.index]] += copies * gradient_nbytes(unit, wishes.sums_gradients)
    state = dict.fromkeys(TIERS, 0)
    for need, tier in zip(needs, state_tiers, strict=True):
        state[tier] += need.state_nbytes
    to_host = [unit for unit in trainable if gradient_tiers[unit.index] == "host"]
    back = _back_on_device_nbytes(to_host, needs, state_tiers, wishes.sums_gradients)
    in_flight = max([back, *(unit.nbytes for unit in to_host)])
    fixed = _total(resident) + in_flight + gradients["device"] + state["device"]
    room = wishes.limits.get("device", (1 << 62, ""))[0] - fixed
    live = _live_nbytes(paged, wishes, room)
    most_live = min(room, wishes.max_live_numel * max((unit.itemsize for unit in paged), default=0))
    param_staging = _param_staging(on_nvme, wishes)
    itemsizes = {unit.index: unit.itemsize for unit in units}
    state_staging = _state_staging(needs, state_tiers, tiers, itemsizes, wishes)
    largest_param = max((e.param.numel * u.itemsize for u in to_host for e in u.entries), default=0)
    gradient_staging = (min(largest_param, MAX_AUTO_STAGING_NBYTES), 1) if to_host else (0, 0)
    rows = [
        PlanRow("device", "param", _total(resident), "parameters that stay on the device"),
        PlanRow("device", "param_window", live, "paged parameters in use, fetched ahead or kept"),
        PlanRow("device", "gradient_in_flight", in_flight, "gradients on their way to host memory"),
        PlanRow("host", "param", _total(u for u in paged if tiers[u.index] == "host"), "parameters"),
        PlanRow("nvme", "param", _total(on_nvme), "parameters"),
        *(_back_rows(trainable, tiers) if delayed else ()),
        *(
            PlanRow(
                tier,
                "gradient",
                nbytes,
                "gradients" + (" (fp32 sums)" if wishes.sums_gradients else "") + (", twice" if delayed else ""),
            )
            for tier, nbytes in gradients.items()
        ),
        *(
            PlanRow(tier, "state", nbytes, f"master weights and optimizer state ({wishes.state_format})")
            for tier, nbytes in state.items()
        ),
        PlanRow("host", "staging_param", _pool(param_staging), "parameter staging buffers"),
        PlanRow("host", "staging_state", _pool(state_staging), "optimizer staging buffers"),
        PlanRow("host", "staging_gradient", _pool(gradient_staging), "gradient staging buffer"),
    ]
    return Plan(
        tiers,
        state_tiers,
        gradient_tiers,
        live,
        wishes.prefetch_numel,
        wishes.reuse_numel,
        in_flight,
        param_staging,
        state_staging,
        gradient_staging,
        wishes.sums_gradients,
        update_policy,
        max(live, min(_total(paged), most_live)),
        tuple(row for row in rows if row.nbytes),
        dict(wishes.limits),
        dict(wishes.state_limits),
    )


def _place_gradients(
    trainable: Sequence[Unit], needs: Sequence[SubGroupSize], state_tiers: Sequence[str], last: str
) -> dict[int, str]:
    """Unit index -> tier, see Plan. A unit that no sub-group holds follows the last tier."""
    tiers_of: dict[int, set[str]] = {}
    for need, tier in zip(needs, state_tiers, strict=True):
        for index in need.parts:
            tiers_of.setdefault(index, set()).add(tier)
    return {u.index: "device" if tiers_of.get(u.index, {last}) == {"device"} else "host" for u in trainable}


def _back_on_device_nbytes(
    to_host: Sequence[Unit], needs: Sequence[SubGroupSize], state_tiers: Sequence[str], sums: bool
) -> int:
    """Gradients of a unit that is split over tiers go back for the update on the device, a sub-group at a time."""
    itemsizes = {unit.index: 4 if sums else unit.itemsize for unit in to_host}
    return max(
        (
            sum(numel * itemsizes.get(index, 0) for index, numel in need.parts.items())
            for need, tier in zip(needs, state_tiers, strict=True)
            if tier == "device"
        ),
        default=0,
    )


def _back_rows(trainable: Sequence[Unit], tiers: Mapping[int, str]) -> list[PlanRow]:
    """The delayed update writes new parameters behind the scenes: a second home each; host memory for resident ones."""
    rows = []
    for tier in ("host", "nvme"):
        nbytes = _total(u for u in trainable if back_tier(tiers[u.index]) == tier)
        rows.append(PlanRow(tier, "param_back", nbytes, "parameters of the delayed update"))
    return rows


def back_tier(param_tier: str) -> str:
    """Where the delayed update writes the parameters of a unit that rests on `param_tier`."""
    return "nvme" if param_tier == "nvme" else "host"


def place_params(units: Sequence[Unit], wishes: PlanRequest) -> dict[int, str]:
    """Unit index -> tier. With nvme the first units stay in host memory, as far as `max_host_param_numel` goes."""
    tiers: dict[int, str] = {}
    room = wishes.max_host_param_numel
    for unit in units:
        tier = "device" if unit.persistent else wishes.param_tier
        if tier == "nvme" and unit.params_numel <= room:
            tier = "host"
            room -= unit.params_numel
        tiers[unit.index] = tier
    return tiers


def gradient_nbytes(unit: Unit, sums: bool) -> int:
    """What a unit's gradients take at their home: the parameter's dtype, or fp32 where micro-batches are summed."""
    return unit.numel * 4 if sums else unit.nbytes


def _live_nbytes(paged: Sequence[Unit], wishes: PlanRequest, room_nbytes: int) -> int:
    """The largest chain of units that are in use together (a module inside a module), and the next largest to fetch.

    `room_nbytes`: what the device's limit leaves; the window shrinks to it, but not below the chain.
    """
    if not paged:
        return 0
    chains = [
        sorted((other for other in paged if _contains(other.module, unit.module)), key=lambda u: -u.nbytes)
        for unit in paged
    ]
    chain = max(chains, key=_total)
    others = sorted((unit.nbytes for unit in paged if unit not in chain), reverse=True)
    window = _total(chain) + sum(others[: WINDOW_UNITS - 1])
    itemsize = max(unit.itemsize for unit in paged)
    allowed = min(window, wishes.max_live_numel * itemsize)
    return max(_total(chain), min(allowed, room_nbytes))


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or outer == "" or inner.startswith(outer + ".")


def _param_staging(on_nvme: Sequence[Unit], wishes: PlanRequest) -> tuple[int, int]:
    """(bytes a buffer, how many)."""
    if not on_nvme:
        return 0, 0
    largest = max(unit.nbytes for unit in on_nvme)
    if wishes.staging_numel is None:
        size = min(align_up(largest, MIB), MAX_AUTO_STAGING_NBYTES)
    else:
        for unit in on_nvme:
            for entry in unit.entries:
                if entry.param.numel > wishes.staging_numel:
                    raise ConfigError(
                        f"zero_optimization.offload_param.buffer_size: {wishes.staging_numel} elements, but parameter "
                        f"{entry.param.name} has {entry.param.numel}. Set it to at least {entry.param.numel}, or "
                        f"leave it "
                        "out to have it sized from the model."
                    )
        size = min(largest, align_up(wishes.staging_numel * max(u.itemsize for u in on_nvme), PAGE_NBYTES))
    return align_up(size, PAGE_NBYTES), wishes.num_param_staging or NUM_PARAM_STAGING


def _state_staging(
    needs: Sequence[SubGroupSize],
    state_tiers: Sequence[str],
    param_tiers: Mapping[int, str],
    itemsizes: Mapping[int, int],
    wishes: PlanRequest,
) -> tuple[int, int]:
    """State that is not updated in place, and 16-bit parameters that the update cannot write where they belong. See
    SubGroupIO.
    """
    staged = []
    for need, tier in zip(needs, state_tiers, strict=True):
        in_place = "device" if tier == "device" else "host"
        out = sum(numel * itemsizes[i] for i, numel in need.parts.items() if param_tiers[i] != in_place)
        staged.append(out + (need.state_nbytes if tier == "nvme" else 0))
    count = sum(nbytes > 0 for nbytes in staged)
    if not count:
        return 0, 0
    of_unit: Counter[int] = Counter()
    for need, nbytes in zip(needs, staged, strict=True):
        for index, numel in need.parts.items():
            of_unit[index] += nbytes * numel // sum(need.parts.values())
    room = wishes.limits.get("host", (1 << 62, ""))[0] // MAX_AUTO_STATE_STAGING_SHARE
    whole = max(of_unit.values(), default=0) + NUM_STATE_STAGING * max(staged)
    wanted = min(whole, MAX_AUTO_STATE_STAGING_NBYTES, room)
    auto = max(NUM_STATE_STAGING, max(AUTO_STATE_STAGING_NBYTES, wanted) // max(staged))
    return max(staged), min(count, wishes.num_state_staging or auto)


def _pool(staging: tuple[int, int]) -> int:
    nbytes, count = staging
    return align_up(nbytes, PAGE_NBYTES) * count


def _total(units: Iterable[Unit]) -> int:
    return sum(unit.nbytes for unit in units)


def _advice(tier: str, kind: str) -> str:
    if kind == "staging_state":
        return (
            "Set zero_optimization.offload_optimizer.buffer_count to 3, then lower sub_group_size; or raise "
            "tiered_zero.host_memory_limit."
        )
    if kind == "staging_param":
        return "Lower zero_optimization.offload_param.buffer_count or buffer_size."
    if tier == "device" and kind == "param":
        return (
            "Offload more (offload_param), or lower zero_optimization.stage3_param_persistence_threshold where "
            "small parameters stay."
        )
    if tier == "device" and kind in ("param_window", "gradient_in_flight"):
        return "Lower tiered_zero.unit_size_cap, or raise tiered_zero.device_memory_limit."
    if tier == "device":
        return "Offload more (offload_param, offload_optimizer), or raise tiered_zero.device_memory_limit."
    if tier == "host":
        return "Move it to nvme (offload_param, offload_optimizer, max_in_cpu), or raise tiered_zero.host_memory_limit."
    return "Free space there, or name a larger disk in nvme_path."
