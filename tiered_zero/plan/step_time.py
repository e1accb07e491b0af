"""Predict the seconds of a step from the plan and the rates of a machine, before anything runs.

[Note: Predicted seconds] A step is a sequence of phases: the first forward, the other passes of its micro-batches, and
with the policy barrier the update. In a phase units pass through stages in turn, such as fetch and compute; a stage
handles one unit at a time. A phase ends when the last unit leaves the last stage, but lasts at least as long as its
busiest lane works. An overlapped update is a stage, too. If it starts in backward, it is the last stage of the last
backward; otherwise it is the first stage of the first forward. A delayed update may take the whole step. If an update
starts in backward, its reads ahead may take the whole step, too, as far as staging buffers have room for the bytes. If
the CPU computes, compute, update, checksums and copies share one lane of cores.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import ceil
from typing import Final

from tiered_zero.plan.machine import Machine
from tiered_zero.plan.placement import PlacedUnit
from tiered_zero.plan.planner import WINDOW_UNITS, Plan
from tiered_zero.sizes import TIERS

# Calibrated on 2026-11-25 on two cores of an AMD EPYC, GPT-2 of 30 to 350 million parameters at 128 tokens in bf16.

MODEL_SHARE: Final = {"cpu": 0.45}
OTHER_SHARE: Final = 0.75
"""The assumed rate of a whole forward, divided by the rate of its matrix products. Predictions use it if the rates of
the forward's other work were not measured. MODEL_SHARE lists the value of some devices. OTHER_SHARE is for all other
devices."""

PYTHON_S_PER_TENSOR: Final = 1.5e-4
"""Seconds that hooks and autograd take for each trained tensor and micro-batch, if the CPU computes."""

OVERLAP_S_PER_TENSOR: Final = 3.7e-4
"""Additional seconds for each trained tensor and micro-batch, if the CPU computes and updates run on their own
thread."""

PYTHON_S_PER_SUB_GROUP: Final = 7e-4
"""Seconds of Python code between calls of the update's kernel, for each sub-group."""

WEIGHT_PASSES: Final = 8
"""How often forward and backward together read the weights if the CPU computes. The prediction adds the time of these
reads, at the rate of copies, because matrix products of few rows wait for weights."""

DISK_PASSES: Final = 2
"""How often the cores pass over each byte read or written on the disk: once for the checksum, once for a copy."""

HIDDEN_SHARE: Final = 1.05
"""A tier's transfers are hidden if a step takes at most HIDDEN_SHARE times as long as its compute."""

HIDDEN_STEP: Final = 1.1
"""The precision of `_hidden_from`, which searches for a number of tokens. The search ends when the upper bound is at
most HIDDEN_STEP times the lower bound."""

RESOURCES: Final = ("compute", "fetch", "reduce", "update", "disk read", "disk write")

CORES: Final = ("compute", "fetch", "reduce", "update")
"""The resources whose work runs on the processor's cores, if the CPU is the device."""

RESOURCES_OF: Final = {"host": CORES, "nvme": ("compute", "update", "disk read", "disk write")}
"""Tier -> the resources that compute and this tier's bytes keep busy, if the device is an accelerator."""

Seconds = Mapping[str, float]
"""Resource -> the seconds for which work keeps it busy."""

_Stages = tuple[Seconds, ...]
"""A unit's work in one phase: the busy seconds of each stage, in order, such as fetch, then compute."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes and moves: the input of a prediction."""

    tokens: int  # of one micro-batch
    forward_flops: float  # of one micro-batch
    accumulation: int = 1
    dtype: str = "bf16"  # or "fp16", "fp32"
    num_block_elements: int = 0  # of all blocks' inputs in one micro-batch; 0: not known
    num_logits: int = 0  # of one micro-batch; 0: not known
    num_tensors: int = 0  # trained parameters
    recomputes: bool = False  # backward computes each forward again
    activation_nbytes: int = 0  # saved by one micro-batch on the plan's tier of activations

    def scaled(self, factor: float) -> Work:
        """Return the work of a step with `factor` times the tokens."""
        return replace(
            self,
            tokens=max(1, round(self.tokens * factor)),
            forward_flops=self.forward_flops * factor,
            num_block_elements=round(self.num_block_elements * factor),
            num_logits=round(self.num_logits * factor),
            activation_nbytes=round(self.activation_nbytes * factor),
        )


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """The predicted seconds of one step, and the predicted bytes that the step writes to nvme."""

    seconds: float
    by_resource: Mapping[str, float]  # resource -> busy seconds
    tokens: int  # of the whole step
    written_nbytes: Mapping[str, int]  # kind -> bytes written to nvme
    hidden_from_tokens: Mapping[str, int | None] = field(default_factory=dict)  # by tier: see `predict_step`; or None
    searched_tokens: Mapping[str, int] = field(default_factory=dict)  # by tier: the most that were tried

    @property
    def bound_by(self) -> str:
        """Name the resource that is busiest."""
        return max(self.by_resource, key=lambda name: self.by_resource[name])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def forward_flops(units: Iterable[PlacedUnit], tokens: int, *, length: int = 0, width: int = 0) -> float:
    """Count the operations of a forward: matrix products, and causal attention over samples of `length` tokens.
    `width`: layers * hidden size. Without `length` or `width`, attention is not counted."""
    return 2.0 * tokens * (sum(placed.unit.products_numel for placed in units) + length * width)


def missing_rates(plan: Plan, work: Work, machine: Machine) -> list[str]:
    """List the rates that a prediction needs and the machine does not have."""
    needed = {
        f"flops_per_s.{work.dtype}": machine.flops_per_s.get(work.dtype),
        "copy_bytes_per_s": machine.copy_bytes_per_s,
        "update_bytes_per_s": machine.update_bytes_per_s,
    }
    if not plan.request.shares_cores:
        needed["to_device_bytes_per_s"] = machine.to_device_bytes_per_s
        needed["from_device_bytes_per_s"] = machine.from_device_bytes_per_s
    on_disk = plan.activations is not None and plan.activations.tier == "nvme" and work.activation_nbytes
    if _is_used(plan, "nvme") or on_disk:
        needed["disks"] = sum(disk.read_bytes_per_s or 0 for disk in machine.disks)
    return [name for name, rate in needed.items() if not rate]


def predict_step(plan: Plan, work: Work, machine: Machine, *, finds_hidden: bool = True) -> StepSeconds:
    """Predict the seconds of a step of `work` with `plan` on `machine`. `missing_rates(plan, work, machine)` must be
    empty. `finds_hidden`: whether to also search, for each tier, the least number of tokens in a step that hides the
    tier's transfers. A search takes up to ten predictions."""
    seconds, by_resource = _predict(plan, work, _Rates(plan, machine))
    step = StepSeconds(
        seconds=seconds,
        by_resource=by_resource,
        tokens=work.tokens * work.accumulation,
        written_nbytes=plan.written_nbytes(work.accumulation, work.activation_nbytes),
    )
    if not finds_hidden:
        return step
    found = {tier: _hidden_from(tier, plan, work, machine) for tier in ("host", "nvme") if _is_used(plan, tier)}
    hidden = {tier: tokens if is_hidden else None for tier, (tokens, is_hidden) in found.items()}
    return replace(step, hidden_from_tokens=hidden, searched_tokens={tier: found[tier][0] for tier in found})


def _is_used(plan: Plan, tier: str) -> bool:
    """Return whether parameters, state or gradients have to be moved from or to the tier."""
    if tier == "host" and plan.request.shares_cores:
        return False
    return any(tier in (each.param_tier, each.gradient_tier, *each.state) for each in plan.tiers.units)


def _hidden_from(tier: str, plan: Plan, work: Work, machine: Machine) -> tuple[int, bool]:
    """Search for the least number of tokens in a step that hides the transfers of `tier` behind compute. Return
    (number, True), or (largest number tried, False) if no number was found."""
    rates = _Rates(plan, machine) if plan.request.shares_cores else _Rates(plan, machine, only=tier)

    def is_hidden(factor: float) -> bool:
        seconds, by_resource = _predict(plan, work.scaled(factor), rates)
        return seconds <= HIDDEN_SHARE * rates.lanes(by_resource)["compute"]

    lanes = rates.lanes(_predict(plan, work, rates)[1])
    # With `low`, compute takes as long as the busiest other lane.
    low = max(seconds for name, seconds in lanes.items() if name != "compute") / lanes["compute"]
    if is_hidden(low):
        return ceil(low * work.tokens * work.accumulation), True
    if not is_hidden(high := 8 * low):
        return ceil(high * work.tokens * work.accumulation), False
    while high > HIDDEN_STEP * low:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if is_hidden(middle) else (middle, high)
    return ceil(high * work.tokens * work.accumulation), True


def _predict(plan: Plan, work: Work, rates: _Rates) -> tuple[float, dict[str, float]]:
    """Return the seconds of a step, and the busy seconds of each resource."""
    uses = _list_uses(plan, work, rates)
    policy, in_backward = plan.update_policy.policy, plan.update_policy.optimizer_in_backward
    staged_nbytes = max(1, sum(placed.state.get("nvme", 0) for placed in plan.tiers.units))
    ahead = min(1.0, plan.staging.state.total_nbytes / staged_nbytes)  # the share that is read ahead of the update
    on_device: deque[int] = deque(maxlen=WINDOW_UNITS)
    first, again, backward, last = list[_Stages](), list[_Stages](), list[_Stages](), list[_Stages]()
    in_no_phase = list[_Stages]()
    for use, is_missed in _walk(uses, on_device):
        fetch = use.forwarded if policy == "overlapped" else use.fetch
        stages: _Stages = (fetch if is_missed else {}, {"compute": use.forward_s}, use.save)
        first.append((use.update, *stages) if policy == "overlapped" and not in_backward else stages)
    for use, is_missed in _walk(uses[::-1], on_device):
        arrive = _sum((use.restore, use.fetch if is_missed else {}))
        stages = (arrive, {"compute": use.backward_s}, use.gradient)
        backward.append(stages)
        if in_backward:
            read_s = use.update.get("disk read", 0.0)
            in_no_phase.append(({"disk read": ahead * read_s},))
            stages = (*stages, {**use.update, "disk read": (1 - ahead) * read_s})
        last.append(stages)
    for use, is_missed in _walk(uses, on_device):
        again.append((use.fetch if is_missed else {}, {"compute": use.forward_s}, use.save))
    phases = [(1, first), (work.accumulation - 1, backward), (work.accumulation - 1, again), (1, last)]
    updates: list[_Stages] = [(use.update,) for use in uses]
    if policy == "barrier":
        phases.append((1, updates))
    elif policy == "delayed":
        in_no_phase = updates
    seconds = sum(times * rates.phase_s(units) for times, units in phases)
    busy = [
        {name: times * s for name, s in _sum(chain(*units)).items()} for times, units in (*phases, (1, in_no_phase))
    ]
    by_resource = dict.fromkeys(RESOURCES, 0.0) | _sum(busy)
    return max(seconds, *rates.lanes(by_resource).values()), by_resource


def _sum(loads: Iterable[Seconds]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for load in loads:
        for name, seconds in load.items():
            sums[name] = sums.get(name, 0.0) + seconds
    return sums


class _Rates:
    """Turns bytes into seconds, with a machine's rates. `only`: the one tier whose time is counted, together with
    compute; "": count all tiers."""

    def __init__(self, plan: Plan, machine: Machine, only: str = "") -> None:
        self.shares_cores = plan.request.shares_cores
        self.machine, self.only, self._resources = machine, only, RESOURCES_OF.get(only, RESOURCES)
        state_nbytes = sum(sum(placed.state.values()) for placed in plan.tiers.units)
        self._sub_groups_per_byte = len(plan.tiers.state) / max(1, state_nbytes)
        disks = [disk for disk in machine.disks if disk.read_bytes_per_s and disk.write_bytes_per_s]
        self._read = sum(disk.read_bytes_per_s or 0.0 for disk in disks)
        self._write = sum(disk.write_bytes_per_s or 0.0 for disk in disks)
        mixed = sum(disk.mixed_bytes_per_s or 0.0 for disk in disks)
        in_turns = 2 / (1 / self._read + 1 / self._write) if disks else 1.0
        self._both = mixed / in_turns if mixed else 1.0

    def read(self, nbytes: float) -> Seconds:
        return self._disk("disk read", nbytes, self._read)

    def write(self, nbytes: float) -> Seconds:
        return self._disk("disk write", nbytes, self._write)

    def _disk(self, resource: str, nbytes: float, rate: float) -> Seconds:
        if not nbytes:
            return {}
        return {resource: nbytes / rate, **(self.copy("fetch", DISK_PASSES * nbytes) if self.shares_cores else {})}

    def copy(self, resource: str, nbytes: float) -> Seconds:
        """Return the seconds in which `resource` reads or writes `nbytes` of host memory, as a dict with the one key
        `resource`."""
        return {resource: nbytes / (self.machine.copy_bytes_per_s or 1.0)}

    def to_device(self, nbytes: float) -> Seconds:
        """Return the seconds of bringing parameters or activations from host memory to the device."""
        if self.shares_cores:
            return self.copy("fetch", 2 * nbytes)  # read and written
        return {"fetch": nbytes / (self.machine.to_device_bytes_per_s or 1.0)}

    def from_device(self, nbytes: float) -> Seconds:
        return {"reduce": nbytes / (self.machine.from_device_bytes_per_s or 1.0)}

    def update(self, state_nbytes: float, other_nbytes: float) -> Seconds:
        """Return the seconds in which the CPU updates state. `other_nbytes`: the bytes of gradients and parameters in
        the update."""
        seconds = (2 * state_nbytes + other_nbytes) / (self.machine.update_bytes_per_s or 1.0)
        return {"update": seconds + self._sub_groups_per_byte * state_nbytes * PYTHON_S_PER_SUB_GROUP}

    def lanes(self, load: Seconds) -> dict[str, float]:
        """Return lane -> busy seconds. If the CPU computes, "compute" includes everything that shares its cores."""
        load = {name: seconds for name, seconds in load.items() if name in self._resources}
        lanes = {name: load.get(name, 0.0) for name in CORES}
        if self.shares_cores:
            lanes = {"compute": sum(lanes.values())}
        read, write = load.get("disk read", 0.0), load.get("disk write", 0.0)
        opposed_s = 2 * min(read, write) / self._both  # reads and writes at once, as long as there are both
        return {**lanes, "disk": max(read, write, opposed_s + abs(read - write))}

    def phase_s(self, units: Sequence[_Stages]) -> float:
        """Return the seconds of a phase. `units`: the work of each unit, in the order of use."""
        ends = [0.0] * max(map(len, units), default=0)
        for stages in units:
            end_s = 0.0  # of the unit's stage before
            for stage, load in enumerate(stages):
                ends[stage] = end_s = max(ends[stage], end_s) + max(self.lanes(load).values())
        return max(*ends[-1:], *self.lanes(_sum(chain(*units))).values())


@dataclass(frozen=True, kw_only=True)
class _Use:
    """One use of a unit: the seconds that it takes in one micro-batch and in the update."""

    unit: int
    forward_s: float
    backward_s: float
    fetch: Seconds = field(default_factory=dict)  # parameters, from their home to the device
    forwarded: Seconds = field(default_factory=dict)  # parameters, to the device from an update that has just ended
    save: Seconds = field(default_factory=dict)  # activations, to their tier
    restore: Seconds = field(default_factory=dict)  # activations, back to the device
    gradient: Seconds = field(default_factory=dict)  # gradients, to their home
    update: Seconds = field(default_factory=dict)  # with state and gradients from nvme, and what goes back there


def _walk(uses: Sequence[_Use], on_device: deque[int]) -> Iterator[tuple[_Use, bool]]:
    """Yield each use, and whether its unit has to be fetched. `on_device`: the indices of the units on the device, in
    the order of their last use; each use updates it."""
    for use in uses:
        yield use, use.unit not in on_device
        if use.unit in on_device:
            on_device.remove(use.unit)
        on_device.append(use.unit)


def _list_uses(plan: Plan, work: Work, rates: _Rates) -> list[_Use]:
    """List the uses of units in a forward, in order. A tied embedding is used a second time at the end, as the output
    head."""
    uses, heads = [], []
    products = max(1, sum(placed.unit.products_numel for placed in plan.tiers.units))
    trained = max(1, sum(placed.unit.params_numel for placed in plan.tiers.units if placed.state))
    model_s = _forward_s(work, rates.machine)
    accumulates, overlaps = work.accumulation > 1, plan.update_policy.policy != "barrier"
    saved = plan.activations.tier if plan.activations is not None else "device"
    for index, placed in enumerate(plan.tiers.units):
        share = placed.unit.products_numel / products
        forward_s = share * model_s
        # frozen weights have no gradient to compute
        backward_s = (1 + bool(placed.gradient_tier) + work.recomputes) * forward_s
        fetch, forwarded = _fetch(placed, rates)
        if placed.unit.is_tied:  # its product is not computed again
            heads.append(
                _Use(unit=index, forward_s=forward_s, backward_s=2 * forward_s, fetch=fetch, forwarded=forwarded)
            )
            forward_s = backward_s = 0.0
        if rates.shares_cores:
            pass_s, gradient_s = (
                rates.copy("compute", nbytes)["compute"] for nbytes in (placed.param_nbytes, placed.gradient_nbytes)
            )
            forward_s += WEIGHT_PASSES / 3 * pass_s
            backward_s += WEIGHT_PASSES / 1.5 * pass_s + (2.5 if accumulates else 2) * gradient_s
            tensors = work.num_tensors * placed.unit.params_numel / trained if placed.state else 0.0
            backward_s += tensors * (PYTHON_S_PER_TENSOR + overlaps * OVERLAP_S_PER_TENSOR)
        nbytes = share * work.activation_nbytes if saved != "device" else 0.0
        uses.append(
            _Use(
                unit=index,
                forward_s=forward_s,
                backward_s=backward_s,
                fetch=fetch,
                forwarded=forwarded,
                save=rates.write(nbytes) if saved == "nvme" else rates.from_device(nbytes),
                restore=rates.read(nbytes) if saved == "nvme" else rates.to_device(nbytes),
                gradient=_gradient(placed, plan, work, rates),
                update=_update(placed, rates),
            )
        )
    return uses + heads


def _fetch(placed: PlacedUnit, rates: _Rates) -> tuple[Seconds, Seconds]:
    """Return the seconds of fetching a unit's parameters in two cases: from their home, and right after their
    update."""
    if placed.is_resident:
        return {}, {}
    tier, nbytes = placed.param_tier, placed.param_nbytes
    to_device = rates.to_device(nbytes)
    from_home = [rates.read(nbytes)] if tier == "nvme" else []
    if tier != "nvme" or not rates.shares_cores:  # the CPU reads a unit to where it computes
        from_home.append(to_device)
    return _sum(from_home), to_device


def _gradient(placed: PlacedUnit, plan: Plan, work: Work, rates: _Rates) -> Seconds:
    """Return the seconds of moving a unit's gradients of one micro-batch to their home."""
    tier, nbytes = placed.gradient_tier, placed.gradient_nbytes
    loads: list[Seconds] = []
    accumulates = work.accumulation > 1
    if not rates.shares_cores and tier != "device":
        loads.append(rates.from_device(nbytes / 2 if accumulates else nbytes))
        loads.append(rates.copy("reduce", 2.5 * nbytes if accumulates else 0.0))
    if tier == "nvme" and (accumulates or not plan.update_policy.optimizer_in_backward):
        loads.append(rates.write(nbytes))
        loads.append(rates.read(nbytes * (work.accumulation - 1) / work.accumulation))  # the next one is added
    return _sum(loads)


def _update(placed: PlacedUnit, rates: _Rates) -> Seconds:
    """Return the seconds that the update of a unit's state takes on each resource. On an accelerator, updating state
    that rests on the device counts as 0."""
    tiers = TIERS if rates.shares_cores else TIERS[1:]
    nbytes, all_nbytes = sum(placed.state.get(tier, 0) for tier in tiers), sum(placed.state.values())
    if not nbytes:
        return {}
    part = nbytes / all_nbytes
    updated = placed.state.get(rates.only, 0) if rates.only else nbytes
    on_disk = placed.state.get("nvme", 0)
    reads = rates.read(on_disk + part * placed.gradient_nbytes * (placed.gradient_tier == "nvme"))
    writes = rates.write(on_disk + part * placed.param_nbytes * (placed.param_tier == "nvme"))
    update = rates.update(updated, updated / all_nbytes * (placed.gradient_nbytes + placed.param_nbytes))
    return _sum((reads, update, writes))


def _forward_s(work: Work, machine: Machine) -> float:
    """Return the seconds of a forward: its matrix products and its other work."""
    product_s = work.forward_flops / machine.flops_per_s[work.dtype]
    in_blocks, logits = machine.block_elements_per_s.get(work.dtype), machine.logits_per_s.get(work.dtype)
    if not (work.num_block_elements and in_blocks and logits):
        return product_s / MODEL_SHARE.get(machine.device, OTHER_SHARE)
    # These rates are of forward and backward together; backward takes two thirds.
    return product_s + (work.num_block_elements / in_blocks + work.num_logits / logits) / 3
