"""From a laid-out model and the wishes of a config to a Plan."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.rows import PlanRow, format_table
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up, format_nbytes

MAX_AUTO_STAGING_NBYTES = 16 * MIB
"""A parameter staging buffer that nobody sized: enough for full disk rate; units are carried in chunks of it."""

NUM_PARAM_STAGING = 4
NUM_STATE_STAGING = 3
"""One sub-group is read, one updated, one written."""

WINDOW_UNITS = 3
"""Paged units on the device at once: the one in use, the one that is fetched, the one that is given up."""


@dataclass(frozen=True)
class Wishes:
    """What the config asks for, in our units. Sizes are bytes unless named otherwise; None: the planner chooses.

    `param_tier`, `optimizer_tier`: "device", "host" or "nvme". `max_host_param_numel`: with nvme, elements of paged
    parameters that rest in host memory instead. `limits`: tier -> (bytes, the name of the setting or fact that says
    so).
    """

    param_tier: str
    optimizer_tier: str
    limits: Mapping[str, tuple[int, str]]
    sums_gradients: bool = False
    delayed: bool = False
    max_live_numel: int = 1 << 62
    prefetch_numel: int = 1 << 62
    reuse_numel: int = 1 << 62
    max_host_param_numel: int = 0
    staging_numel: int | None = None
    num_param_staging: int | None = None
    num_state_staging: int | None = None
    state_format: str = "fp32"


@dataclass(frozen=True)
class SubGroupNeed:
    """`state_nbytes`: its slot, masters and state. `out_nbytes`: its 16-bit parameters where they are staged."""

    state_nbytes: int
    out_nbytes: int


@dataclass(frozen=True)
class Plan:
    """Every size and placement of a run. `param_tiers`: unit index -> tier, "device" for those that never leave it.

    `live_nbytes`: bytes of paged units on the device at once; `most_live_nbytes`: as many as the config allows, for
    code that uses more units at the same time than a forward of nested modules does. `in_flight_nbytes`: gradients on
    their way to the host.
    """

    param_tiers: Mapping[int, str]
    optimizer_tier: str
    gradient_tier: str
    live_nbytes: int
    prefetch_numel: int
    reuse_numel: int
    in_flight_nbytes: int
    param_staging: tuple[int, int]
    state_staging: tuple[int, int]
    gradient_staging: tuple[int, int]
    sums_gradients: bool
    delayed: bool
    most_live_nbytes: int = 0
    rows: tuple[PlanRow, ...] = ()
    limits: Mapping[str, tuple[int, str]] = field(default_factory=dict)

    def nbytes(self, tier: str, kind: str | None = None) -> int:
        """Planned bytes of a tier, or of one kind on it."""
        return sum(row.nbytes for row in self.rows if row.tier == tier and kind in (None, row.kind))

    def table(self) -> list[dict[str, object]]:
        """Rows as plain values: tier, kind, nbytes, what."""
        return [{"tier": row.tier, "kind": row.kind, "nbytes": row.nbytes, "what": row.what} for row in self.rows]

    @property
    def text(self) -> str:
        return format_table(self.rows, self.limits)

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


def make_plan(units: Sequence[Unit], needs: Sequence[SubGroupNeed], wishes: Wishes) -> Plan:
    """Place every byte. Raises ConfigError where a size that the user fixed cannot work; does not check limits."""
    tiers = place_params(units, wishes)
    paged = [unit for unit in units if tiers[unit.index] != "device"]
    resident = [unit for unit in units if tiers[unit.index] == "device"]
    trainable = [unit for unit in units if unit.trainable]
    on_nvme = [unit for unit in paged if tiers[unit.index] == "nvme"]
    gradient_tier = "device" if wishes.optimizer_tier == "device" else "host"
    copies = 2 if wishes.delayed else 1
    gradients = copies * sum(gradient_nbytes(unit, wishes.sums_gradients) for unit in trainable)
    state = sum(need.state_nbytes for need in needs)
    in_flight = max((unit.nbytes for unit in trainable), default=0) if gradient_tier == "host" else 0
    fixed = _total(resident) + in_flight + (gradients + state if wishes.optimizer_tier == "device" else 0)
    room = wishes.limits.get("device", (1 << 62, ""))[0] - fixed
    live = _live_nbytes(paged, wishes, room)
    most_live = min(room, wishes.max_live_numel * max((unit.dtype.itemsize for unit in paged), default=0))
    param_staging = _param_staging(on_nvme, wishes)
    state_staging = _state_staging(needs, wishes)
    largest_param = max((e.param.numel * u.dtype.itemsize for u in trainable for e in u.entries), default=0)
    gradient_staging = (
        (min(largest_param, MAX_AUTO_STAGING_NBYTES), 1) if gradient_tier == "host" and trainable else (0, 0)
    )
    rows = [
        PlanRow("device", "param", _total(resident), "parameters that stay on the device"),
        PlanRow("device", "param_window", live, "paged parameters in use, fetched ahead or kept"),
        PlanRow("device", "gradient_in_flight", in_flight, "gradients on their way to host memory"),
        PlanRow("host", "param", _total(u for u in paged if tiers[u.index] == "host"), "parameters"),
        PlanRow("nvme", "param", _total(on_nvme), "parameters"),
        *(_back_rows(trainable, tiers) if wishes.delayed else ()),
        PlanRow(
            gradient_tier,
            "gradient",
            gradients,
            "gradients" + (" (fp32 sums)" if wishes.sums_gradients else "") + (", twice" if wishes.delayed else ""),
        ),
        PlanRow(wishes.optimizer_tier, "state", state, f"master weights and optimizer state ({wishes.state_format})"),
        PlanRow("host", "staging_param", _pool(param_staging), "parameter staging buffers"),
        PlanRow("host", "staging_state", _pool(state_staging), "optimizer staging buffers"),
        PlanRow("host", "staging_gradient", _pool(gradient_staging), "gradient staging buffer"),
    ]
    return Plan(
        tiers,
        wishes.optimizer_tier,
        gradient_tier,
        live,
        wishes.prefetch_numel,
        wishes.reuse_numel,
        in_flight,
        param_staging,
        state_staging,
        gradient_staging,
        wishes.sums_gradients,
        wishes.delayed,
        max(live, min(_total(paged), most_live)),
        tuple(row for row in rows if row.nbytes),
        dict(wishes.limits),
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


def place_params(units: Sequence[Unit], wishes: Wishes) -> dict[int, str]:
    """Unit index -> tier. With nvme the first units stay in host memory, as far as `max_host_param_numel` goes."""
    tiers: dict[int, str] = {}
    room = wishes.max_host_param_numel
    for unit in units:
        tier = "device" if unit.persistent else wishes.param_tier
        if tier == "nvme" and sum(entry.param.numel for entry in unit.entries) <= room:
            tier = "host"
            room -= sum(entry.param.numel for entry in unit.entries)
        tiers[unit.index] = tier
    return tiers


def gradient_nbytes(unit: Unit, sums: bool) -> int:
    """What a unit's gradients take at their home: the parameter's dtype, or fp32 where micro-batches are summed."""
    return unit.numel * 4 if sums else unit.nbytes


def _live_nbytes(paged: Sequence[Unit], wishes: Wishes, room_nbytes: int) -> int:
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
    itemsize = max(unit.dtype.itemsize for unit in paged)
    allowed = min(window, wishes.max_live_numel * itemsize)
    if 0 < wishes.max_live_numel * itemsize < _total(chain):
        names = ", ".join(unit.name for unit in chain)
        raise ConfigError(
            f"zero_optimization.stage3_max_live_parameters: {wishes.max_live_numel} elements are allowed on the "
            f"device, but "
            f"{_total(chain) // itemsize} are needed at once ({names}). Raise it to that number, or lower "
            "tiered_zero.unit_size_cap."
        )
    return max(_total(chain), min(allowed, room_nbytes))


def _contains(outer: str, inner: str) -> bool:
    return outer == inner or outer == "" or inner.startswith(outer + ".")


def _param_staging(on_nvme: Sequence[Unit], wishes: Wishes) -> tuple[int, int]:
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
        size = min(largest, align_up(wishes.staging_numel * max(u.dtype.itemsize for u in on_nvme), PAGE_NBYTES))
    return align_up(size, PAGE_NBYTES), wishes.num_param_staging or NUM_PARAM_STAGING


def _state_staging(needs: Sequence[SubGroupNeed], wishes: Wishes) -> tuple[int, int]:
    staged = [need.out_nbytes + (need.state_nbytes if wishes.optimizer_tier == "nvme" else 0) for need in needs]
    if not any(staged):
        return 0, 0
    return max(staged), min(len(needs), wishes.num_state_staging or NUM_STATE_STAGING)


def _pool(staging: tuple[int, int]) -> int:
    nbytes, count = staging
    return align_up(nbytes, PAGE_NBYTES) * count


def _total(units: Iterable[Unit]) -> int:
    return sum(unit.nbytes for unit in units)


def _advice(tier: str, kind: str) -> str:
    if kind == "staging_state":
        return "Lower zero_optimization.sub_group_size."
    if kind == "staging_param":
        return "Lower zero_optimization.offload_param.buffer_count or buffer_size."
    if tier == "device":
        return "Offload more (offload_param, offload_optimizer), or lower tiered_zero.unit_size_cap."
    if tier == "host":
        return "Move it to nvme (offload_param, offload_optimizer, max_in_cpu), or raise tiered_zero.host_memory_limit."
    return "Free space there, or name a larger disk in nvme_path."
