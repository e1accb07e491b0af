"""Make the plan of a run: the bytes that it needs on each tier, row by row. If a tier is too small, name the settings
that make the run fit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tiered_zero.errors import PlanError
from tiered_zero.layout.buckets import cut_buckets
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.activations import ActivationPlan, plan_activations
from tiered_zero.plan.placement import (
    NUM_GRADIENT_WINDOWS,
    Placement,
    PlannedSlot,
    list_slots,
    place,
    place_state,
    written_on_nvme,
)
from tiered_zero.plan.request import (
    NO_LIMIT,
    NUM_STATE_STAGING,
    RESERVED,
    RESERVED_SHARE,
    Limits,
    PlanRequest,
    SubGroupSize,
    UpdateChoice,
    choose_update_policy,
)
from tiered_zero.plan.staging import Staging, size_staging
from tiered_zero.sizes import MIB, TIERS, align_up, ceil_nbytes, format_nbytes

WINDOW_UNITS = 3
"""The number of paged units on the device at once: one is in use, one is fetched, and one is evicted."""

SHARED_SEGMENT_NBYTES, SEGMENT_NBYTES = 20 * MIB, 2 * MIB
LEAST_SEGMENT_NBYTES = 10 * MIB
"""Sizes of the segments in which torch's allocator takes memory on CUDA. A block of at least LEAST_SEGMENT_NBYTES has
its own segment, whose size is a multiple of SEGMENT_NBYTES. Smaller blocks of more than 1 MiB share segments of
SHARED_SEGMENT_NBYTES."""

UPDATE_CHUNK_NUMEL, COPIES_CHUNK_NUMEL = 1 << 26, 1 << 22
"""The most elements that an update on the device steps at once: the first for fp32 state, the second for other
formats."""

NUM_UPDATE_COPIES = 12
"""The number of temporary fp32 arrays in an update of state that is not fp32: for copies of the state, and for
rounding. Each has at most COPIES_CHUNK_NUMEL elements."""


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """The planned bytes of one kind on a tier."""

    tier: str
    kind: str  # in the ledger
    nbytes: int
    what: str  # the kind in words, for tables and messages


_Row = tuple[str, str, int, str]
"""The fields of a PlanRow, in order. A row without bytes is left out of the plan."""


@dataclass(frozen=True, kw_only=True)
class PagerLimits:
    """Limits for paged units (units that can leave the device) while they are on the device."""

    live_nbytes: int  # planned bytes on the device at once
    reserved_nbytes: int = 0  # memory that the device's allocator takes for these bytes
    most_live_nbytes: int = 0  # the most, for code that uses more units together than a forward does
    one_module: bool = False  # all parameters of the largest unit belong to one module, which no size cap cuts
    limited_by: tuple[str, ...] = ()  # settings that make the window smaller, and the tier if it has too little room
    tier: str = "device"  # the tier whose limit applies to these units: "device" or "host"
    prefetch_numel: int = NO_LIMIT  # the most elements fetched ahead of their use
    reuse_numel: int = NO_LIMIT  # a unit used again within this many elements is kept if there is room


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every size, placement and policy of a run.

    `in_flight_nbytes`: the most bytes of gradients in transfer between device and host memory, or between ranks.
    `grad_itemsize`: bytes of one gradient element in the widest dtype that autograd produces. `activations`: how
    activations are offloaded; None: they stay on the device.
    """

    tiers: Placement
    pager_limits: PagerLimits
    in_flight_nbytes: int
    grad_itemsize: int
    staging: Staging
    update_policy: UpdateChoice
    rows: tuple[PlanRow, ...]
    request: PlanRequest
    activations: ActivationPlan | None = None

    @property
    def delayed(self) -> bool:
        """Whether parameters and gradients are held twice, for the delayed update."""
        return self.update_policy.policy == "delayed"

    @cached_property
    def slots(self) -> list[PlannedSlot]:
        """The slots for units, for sub-groups, and for the copies that commits need."""
        return list_slots(self.tiers, self.request, delayed=self.delayed)

    @property
    def limits(self) -> Limits:
        """Tier -> (bytes that may be used, the name of the setting or fact that sets this limit)."""
        return self.request.limits

    def nbytes(self, tier: str, kind: str | None = None) -> int:
        """Return the planned bytes on a tier; if `kind` is given, only the bytes of this kind."""
        return sum(row.nbytes for row in self.rows if row.tier == tier and kind in (None, row.kind))

    def needed_nbytes(self, tier: str) -> int:
        """Return the planned bytes that count against the tier's limit."""
        return sum(row.nbytes for row in self.rows_of(tier))

    def rows_of(self, tier: str) -> list[PlanRow]:
        """List the rows that count against the tier's limit."""
        return [row for row in self.rows if row.tier in self.request.counted_tiers(tier)]

    @property
    def text(self) -> str:
        """The table of bytes by tier and kind."""
        lines = []
        for tier in TIERS:
            own = [row for row in self.rows if row.tier == tier]
            if not own:
                continue
            limit, source = self.limits.get(tier, (None, ""))
            allowed = "" if limit is None else f" of {format_nbytes(limit)} ({source})"
            allowed += ", in host memory" if tier == "device" and self.request.device_is_host else ""
            lines.append(f"  {tier}: {format_nbytes(self.nbytes(tier))}{allowed}")
            lines += [f"    {format_nbytes(row.nbytes):>10}  {row.what}" for row in own]
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.text}\n  {self.update_policy.text}"

    def written_nbytes(self, accumulation: int, activation_nbytes: int) -> dict[str, int]:
        """Return kind -> bytes that a step of `accumulation` micro-batches writes to nvme. `activation_nbytes`: the
        bytes of activations that one micro-batch saves on their tier."""
        in_backward = self.update_policy.optimizer_in_backward
        on_nvme = self.activations is not None and self.activations.tier == "nvme"
        written = written_on_nvme(self.tiers.units, accumulation, in_backward=in_backward)
        return {**written, "activation": accumulation * activation_nbytes * on_nvme}

    def missing_nbytes(self, tier: str) -> int:
        """Return the bytes by which the plan exceeds the tier's limit; 0 or less if it fits."""
        return self.needed_nbytes(tier) - self.request.limit_nbytes(tier)

    def check(self) -> None:
        """Raise PlanError, with the table of bytes, for the first limit that the plan exceeds."""
        for tier, (limit, source) in self.limits.items():
            if self.missing_nbytes(tier) <= 0:
                continue
            needed, device = self.needed_nbytes(tier), self.nbytes("device")
            both = tier == "host" and self.request.device_is_host and "device" in self.limits
            within = f"{format_nbytes(device)} under {self.limits['device'][1]}" if both else ""
            raise PlanError(
                f"The plan needs {format_nbytes(needed)} of {tier} memory{f', with {within}' if both else ''}; "
                f"{format_nbytes(limit)} is allowed ({source}). {how_to_fit(self, tier)}\n{self.text}"
            )
        for tier, most in self.request.state_limits.items():
            needed = self.nbytes(tier, "state") + self.nbytes(tier, "commit")
            if needed > most:
                way = "let more rest on a faster tier" if tier == "nvme" else "name a slower tier in offload_optimizer"
                raise PlanError(
                    f"The plan puts {format_nbytes(needed)} of master weights and optimizer state on tier {tier}; "
                    f"{format_nbytes(most)} is allowed (tiered_zero.state_limits.{tier}), {needed - most} bytes too "
                    f"little. Raise it, or {way}.\n{self.text}"
                )


def make_plan(units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest) -> Plan:
    """Make the plan of a run. It may exceed limits: see `Plan.check`. Raises ConfigError for an impossible size in the
    config.

    To keep the limits, first shrink the window of paged units, then the gradients in memory (the others go to nvme),
    then the staging buffers of state. A plan that still exceeds a limit is the smallest for these units, sub-groups and
    settings.
    """
    plan = _plan_gradients(units, subgroups, request)
    if plan.missing_nbytes("host") <= 0 or request.num_state_buffers is not None:
        return plan
    few = _plan_gradients(units, subgroups, replace(request, fewest_buffers=True))
    return replace(few, request=request)


def _plan_gradients(units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest) -> Plan:
    """Make a plan with gradients on the tier that the config sets. "auto" fills host memory first, then nvme."""
    if request.gradient_tier == "nvme":
        return _plan(units, subgroups, request, 0)
    # Parameters of `max_in_cpu` come before gradients: in a step of n micro-batches, a byte of memory saves the disk 2n
    # + 1 bytes of a parameter, but at most 2n bytes of a gradient.
    plan = _plan(units, subgroups, request, NO_LIMIT)
    if request.gradient_tier == "host" or plan.missing_nbytes("host") <= 0:
        return plan
    least = _plan(units, subgroups, request, 0)
    if least.needed_nbytes("host") >= plan.needed_nbytes("host"):
        return plan  # a small model: buffers would take more than they free
    return _plan(units, subgroups, request, max(0, request.limit_nbytes("host") - least.needed_nbytes("host")))


def _plan(
    units: Sequence[Unit], subgroups: Sequence[SubGroupSize], request: PlanRequest, host_gradients_nbytes: int
) -> Plan:
    """Make a plan with at most `host_gradients_nbytes` of gradients in host memory; the others go to nvme."""
    state_tiers = place_state(subgroups, request)
    update_policy = choose_update_policy(request, state_tiers)
    delayed = update_policy.policy == "delayed"
    tiers = place(units, subgroups, state_tiers, request, host_gradients_nbytes=host_gradients_nbytes, delayed=delayed)
    trainable = [unit for unit in units if unit.trainable]
    to_host = [placed.unit for placed in tiers.units if placed.gradients_leave]
    returned = _returned_nbytes(tiers, request)
    in_flight_nbytes = max([returned, *(unit.nbytes for unit in to_host), _waiting_nbytes(trainable, request)])
    grad_itemsize = max((unit.itemsize for unit in trainable), default=4)
    staging = size_staging(tiers, request)
    rows = _rows(tiers, staging, request, delayed=delayed)
    temporary_nbytes = _update_nbytes(tiers.subgroups_on_device, request, grad_itemsize)
    rows.append(("device", "update_temporary", temporary_nbytes, "temporaries of an update on the device"))
    activations = plan_activations(request, _room_nbytes("host", rows, request))
    if activations is not None:
        rows += [
            ("device", "activation_in_flight", activations.in_flight_nbytes, "activations on their way"),
            (activations.tier, "activation", activations.nbytes, "activations saved for backward"),
            ("host", "staging_activation", activations.staging.total_nbytes, "activation staging buffers"),
        ]
    rooms = {each: _room_nbytes(each, rows, request) for each in ("device", "host")}
    tier = "host" if request.device_is_host and rooms["host"] < rooms["device"] else "device"
    room = rooms[tier] - in_flight_nbytes
    paged = [placed.unit for placed in tiers.units if not placed.is_resident]
    pager_limits = _pager_limits(paged, request, room, tier)
    in_flight_nbytes += _second_in_flight_nbytes(to_host, request, room - pager_limits.reserved_nbytes)
    to = "the ranks that keep them" if request.shards_gradients else "host memory"
    rows[1:1] = [
        ("device", "param_window", pager_limits.reserved_nbytes, "paged parameters in use, fetched ahead or kept"),
        ("device", "gradient_in_flight", in_flight_nbytes, f"gradients on their way to {to}"),
    ]
    return Plan(
        tiers=tiers,
        pager_limits=pager_limits,
        in_flight_nbytes=in_flight_nbytes,
        grad_itemsize=grad_itemsize,
        staging=staging,
        update_policy=update_policy,
        rows=tuple(PlanRow(tier=tier, kind=kind, nbytes=n, what=what) for tier, kind, n, what in rows if n),
        request=request,
        activations=activations,
    )


def _room_nbytes(tier: str, rows: Iterable[_Row], request: PlanRequest) -> int:
    """Return the tier's limit minus the bytes of the plan's `rows` that count against this limit. May be negative."""
    counted = request.counted_tiers(tier)
    return request.limit_nbytes(tier) - sum(nbytes for own, _, nbytes, _ in rows if own in counted)


def _rows(tiers: Placement, staging: Staging, request: PlanRequest, *, delayed: bool) -> list[_Row]:
    """List the rows of the plan's table for bytes that rest on a tier, and for staging buffers. `_plan` adds more
    rows."""
    on_device = sum(placed.param_nbytes for placed in tiers.units if placed.param_tier == "device")
    gradients = Counter[str]()
    for placed in tiers.units:
        gradients[placed.gradient_tier] += (2 if delayed else 1) * placed.gradient_nbytes
    part = "parameters, this rank's part" if request.shards_params else ""
    shards = f" of rank {request.rank}'s shards" if request.shards_gradients else ""
    of_step = f"gradients{shards}{' (fp32 sums)' if request.sums_gradients else ''}{', twice' if delayed else ''}"
    charged = Counter[tuple[str, str]]()
    for slot in list_slots(tiers, request, delayed=delayed):
        for kind, nbytes in slot.charges:
            charged[slot.tier, kind] += nbytes

    def rows_of(kind: str, what: str, tiers: Sequence[str] = TIERS) -> list[_Row]:
        return [(tier, kind, charged[tier, kind], what) for tier in tiers]

    return [
        ("device", "param", on_device, part or "parameters that stay on the device"),
        *rows_of("param", part or "parameters", ("host", "nvme")),
        *rows_of("param_back", "parameters of the delayed update"),
        *((tier, "gradient", gradients[tier], of_step) for tier in TIERS),
        *rows_of("state", f"master weights and optimizer state ({request.state_format})"),
        *rows_of("commit_param", "parameters, second slot for commits", ("nvme",)),
        *rows_of("commit", "master weights and optimizer state, second slot for commits", ("nvme",)),
        *rows_of("commit_copy", "parameters in memory, and buffers, copies for commits", ("nvme",)),
        ("host", "staging_param", staging.params.total_nbytes, "parameter staging buffers"),
        ("host", "staging_state", staging.state.total_nbytes, "optimizer staging buffers"),
        ("host", "staging_gradient", staging.gradients.total_nbytes, "gradient staging buffer"),
        ("host", "gradient_window", staging.gradient_windows.total_nbytes, "gradients on their way to and from nvme"),
        (staging.bucket_tier, "bucket", staging.buckets.total_nbytes, "buckets of gradients that ranks reduce"),
    ]


def _second_in_flight_nbytes(to_host: Sequence[Unit], request: PlanRequest, room_nbytes: int) -> int:
    """Return the bytes that a second unit's gradients add to the gradients in flight; 0 if the CPU computes or the
    device has no room."""
    # On an accelerator a gradient is in flight from the launch of its computation on. With room for one unit only, the
    # host could not launch backward ahead of the device.
    second = sorted((unit.nbytes for unit in to_host), reverse=True)[1:2]
    return 0 if request.shares_cores or sum(second) > room_nbytes else sum(second)


def _update_nbytes(on_device: Sequence[SubGroupSize], request: PlanRequest, grad_itemsize: int) -> int:
    """Return the temporary bytes of the largest update on an accelerator; 0 if no update runs there. `on_device`: the
    sub-groups with state on the device."""
    count = request.temporaries
    if count is None or not on_device:
        return 0
    largest = max(on_device, key=lambda group: sum(group.parts.values()))
    numel = sum(largest.parts.values())
    if request.state_format != "fp32":
        return 4 * NUM_UPDATE_COPIES * min(numel, COPIES_CHUNK_NUMEL)
    casts = grad_itemsize < 4 and not request.sums_gradients
    # The rule's temporaries, fp32 gradients, and state that torch creates before it is copied to its slot.
    nbytes = 4 * numel * (count + casts) + largest.state_nbytes - 4 * numel
    return nbytes * min(numel, UPDATE_CHUNK_NUMEL) // max(1, numel)


def _waiting_nbytes(trainable: Sequence[Unit], request: PlanRequest) -> int:
    """Return the most bytes of gradients that wait on the device for their bucket; 0 if gradients are not sharded over
    ranks."""
    if not request.shards_gradients:
        return 0
    buckets = cut_buckets(trainable, request.world_size, request.bucket_numel)
    return max((sum(part.unit.nbytes for part in bucket.parts) for bucket in buckets), default=0)


def _returned_nbytes(tiers: Placement, request: PlanRequest) -> int:
    """Return the most bytes of gradients that one update copies back to the device."""
    itemsizes = {
        placed.unit.index: request.gradient_itemsize(placed.unit) for placed in tiers.units if placed.gradients_leave
    }
    # If a unit's state is split over tiers, the part with state on the device is updated there.
    returned = (
        sum(numel * itemsizes.get(index, 0) for index, numel in subgroup.parts.items())
        for subgroup in tiers.subgroups_on_device
    )
    return max(returned, default=0)


def _pager_limits(paged: Sequence[Unit], request: PlanRequest, room_nbytes: int, tier: str) -> PagerLimits:
    """Size the window, the device memory for paged units. The window holds the largest chain (the paged units of a
    module and of all modules around it) and, to fetch ahead, the two largest other units. `room_nbytes` and the
    config's limit can make the window smaller, but not smaller than the chain."""
    if not paged:
        return PagerLimits(live_nbytes=0)
    zero = request.config.zero_optimization
    by_module: dict[str, list[Unit]] = {}
    for unit in paged:
        by_module.setdefault(unit.module, []).append(unit)
    chain = max(([u for m in _around(module) for u in by_module.get(m, ())] for module in by_module), key=_total)
    others = sorted((unit.nbytes for unit in paged if unit not in chain), reverse=True)
    sizes = [*(unit.nbytes for unit in chain), *others[: WINDOW_UNITS - 1]]
    window = sum(sizes)
    reserved = _reserved_nbytes(sizes) if request.segments else window
    room_nbytes = room_nbytes * window // max(1, reserved)
    allowed = zero.stage3_max_live_parameters * max(unit.itemsize for unit in paged)
    live = max(_total(chain), min(window, allowed, room_nbytes))
    most_live = max(live, min(_total(paged), room_nbytes, allowed))
    modules = {entry.param.name.rpartition(".")[0] for entry in max(chain, key=lambda unit: unit.nbytes).entries}
    ahead_nbytes = zero.stage3_prefetch_bucket_size * min(unit.itemsize for unit in paged)
    limits = {"stage3_max_live_parameters": allowed, "stage3_prefetch_bucket_size": _total(chain) + ahead_nbytes}
    return PagerLimits(
        live_nbytes=live,
        reserved_nbytes=-(-live * reserved // max(1, window)),
        most_live_nbytes=most_live,
        limited_by=tuple(name for name, most in {**limits, tier: room_nbytes}.items() if most < window),
        one_module=len(modules) == 1,
        tier=tier,
        prefetch_numel=zero.stage3_prefetch_bucket_size,
        reuse_numel=zero.stage3_max_reuse_distance,
    )


def _reserved_nbytes(sizes: Iterable[int]) -> int:
    """Return the bytes that the device's allocator takes, in segments, for blocks of these sizes."""
    shared = own = 0
    for nbytes in sizes:
        if MIB < nbytes < LEAST_SEGMENT_NBYTES:
            shared += SHARED_SEGMENT_NBYTES // (SHARED_SEGMENT_NBYTES // nbytes)
        else:
            own += nbytes if nbytes <= MIB else align_up(nbytes, SEGMENT_NBYTES)
    return own + align_up(shared, SHARED_SEGMENT_NBYTES)


def _around(module: str) -> list[str]:
    """List a module's dotted name and the names of its parents, the root ("") last."""
    names = module.split(".") if module else []
    return [".".join(names[:depth]) for depth in range(len(names), -1, -1)]


def _total(units: Iterable[Unit]) -> int:
    return sum(unit.nbytes for unit in units)


NUM_NAMED = 3
"""The number of largest rows that `how_to_fit` names."""

_STATE_TO_NVME = "set zero_optimization.offload_optimizer.device to nvme"


def how_to_fit(plan: Plan, tier: str) -> str:
    """Describe how to make a plan fit on a tier that is too small: the largest rows, the settings that free the missing
    bytes, and the smallest limit that is enough."""
    source, missing_nbytes = plan.limits[tier][1], plan.missing_nbytes(tier)
    rows = sorted(plan.rows_of(tier), key=lambda row: -row.nbytes)
    changes: dict[str, None] = {}
    freed_nbytes = 0.0
    for row in rows:
        left_nbytes = float(row.nbytes)
        for change, share in sorted(_changes(plan, row, tier), key=lambda each: each[0] not in changes):
            if freed_nbytes < missing_nbytes:
                changes[change] = None
                freed_nbytes += left_nbytes * share
                left_nbytes -= left_nbytes * share
    fixed = ", which rest nowhere else"
    largest = "Largest: " + "; ".join(
        f"{row.what} {format_nbytes(row.nbytes)}{'' if any(_changes(plan, row, tier)) else fixed}"
        for row in rows[:NUM_NAMED]
    )
    more = f"take a machine with more {tier} memory"
    name, reserved, _ = source.partition(RESERVED)
    if name.startswith("--") or name.endswith("memory_limit"):
        least_nbytes = plan.needed_nbytes(tier)
        if reserved:
            least_nbytes += least_nbytes // (RESERVED_SHARE - 1) + 1
        more = f"raise {name} to at least {ceil_nbytes(least_nbytes)}"
    if freed_nbytes < missing_nbytes:
        missing = f"no other setting frees the {format_nbytes(missing_nbytes)} that are missing"
        return f"{largest}. {_sentence(f'{more}: {missing}')}"
    way = " and ".join(changes)
    return f"{largest}. {_sentence(f'{way}; or {more}')}"


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _changes(plan: Plan, row: PlanRow, tier: str) -> Iterator[tuple[str, float]]:
    """Yield changes of settings that free a part of the row's bytes on `tier`, as pairs: the change, in words, and the
    freed part, from 0 to 1."""
    request = plan.request
    kind, on_host = row.kind, tier == "host"
    if kind == "param" and row.tier == "device" and request.param_tier == "device" and not on_host:
        yield "offload parameters (zero_optimization.offload_param, at stage 3)", 1.0
    elif kind == "param" and row.tier == "device" and request.param_tier != "device" and request.world_size == 1:
        yield "lower zero_optimization.stage3_param_persistence_threshold", 1.0
    elif kind == "param" and on_host:
        lower = "lower zero_optimization.offload_param.max_in_cpu"
        yield lower if request.param_tier == "nvme" else "set zero_optimization.offload_param.device to nvme", 1.0
    elif kind == "gradient_in_flight" and request.shards_gradients:
        yield "lower zero_optimization.reduce_bucket_size", 1.0
    elif kind in ("param_window", "gradient_in_flight", "gradient_window") and not plan.pager_limits.one_module:
        yield "lower tiered_zero.unit_size_cap", 1.0
    elif kind in ("state", "gradient") and row.tier == "device" and request.state_tier == "device" and not on_host:
        yield "offload the optimizer (zero_optimization.offload_optimizer)", 1.0
    elif kind in ("state", "gradient") and row.tier == "device" and request.state_tier != "device":
        lower = "lower tiered_zero.state_limits.device"
        yield lower if "device" in request.state_limits else "raise zero_optimization.offload_optimizer.ratio", 1.0
    elif kind == "state" and on_host:
        yield "lower tiered_zero.state_limits.host" if request.state_tier == "nvme" else _STATE_TO_NVME, 1.0
    elif kind == "gradient":
        yield from _gradient_changes(plan, row, tier)
    elif kind in ("activation", "activation_in_flight", "staging_activation"):
        yield "lower tiered_zero.activations.limit", 1.0
    elif kind == "param_back":
        yield "set tiered_zero.update to overlapped", 1.0
    elif kind == "staging_state" and (count := plan.staging.state.count) > NUM_STATE_STAGING:
        name = "zero_optimization.offload_optimizer.buffer_count"
        yield f"set {name} to {NUM_STATE_STAGING}", 1 - NUM_STATE_STAGING / count
    elif kind == "staging_param":
        lowered = "buffer_count" if plan.staging.params.count > 1 else "buffer_size"
        yield f"lower zero_optimization.offload_param.{lowered}", 1.0
    elif kind == "update_temporary":
        yield "lower zero_optimization.sub_group_size", 1.0
    elif kind == "bucket":
        yield "lower zero_optimization.reduce_bucket_size", 1.0


def _gradient_changes(plan: Plan, row: PlanRow, tier: str) -> Iterator[tuple[str, float]]:
    """Yield changes of settings that free a part of the gradients' bytes on `tier`, as pairs: the change, in words, and
    the freed part, from 0 to 1."""
    request = plan.request
    if tier == "host" and request.gradient_tier == "host" and request.state_tier == "nvme":
        yield "set tiered_zero.gradients to auto", 1.0
        return
    if plan.delayed:
        yield "set tiered_zero.update to overlapped, which holds gradients once", 0.5
    if request.sums_gradients and plan.grad_itemsize < 4:
        yield "set gradient_accumulation_steps to 1, which needs no fp32 sums", 0.5
    window_nbytes = max((placed.gradient_nbytes for placed in plan.tiers.units), default=0)
    share = 1 - NUM_GRADIENT_WINDOWS * window_nbytes / max(1, row.nbytes)  # only windows stay there
    stays = request.world_size > 1 and not request.shards_gradients
    if tier == "host" and request.state_tier != "nvme" and share > 0 and not stays:
        yield _STATE_TO_NVME, share
