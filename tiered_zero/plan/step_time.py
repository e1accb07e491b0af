"""Predict the seconds of a step from the plan and the rates of a machine, before anything runs.

[Note: Predicted seconds] A simulation has lanes for compute, the links, the update and the disk; each lane does one job
at a time. A job waits for its lane, and for the event that the run would wait for. A few steps are simulated, until
each step takes as long as the one before. Of many micro-batches three are simulated; each further one takes as long as
the third. If the CPU computes, compute, update, checksums and copies share one lane of cores.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Final

from tiered_zero.plan.machine import Machine
from tiered_zero.plan.placement import UnitTraffic
from tiered_zero.plan.planner import WINDOW_UNITS, Plan
from tiered_zero.plan.request import NUM_STATE_STAGING
from tiered_zero.plan.simulation import Clock, Event, Job, Process, Room, all_of
from tiered_zero.sizes import TIERS

# Calibrated on 2026-11-25 on two cores of an AMD EPYC, GPT-2 of 30 to 350 million parameters at 128 tokens in bf16.

MODEL_SHARE: Final = {"cpu": 0.45}
OTHER_SHARE: Final = 0.75
"""A whole model's speed as a part of the rate of matrix products, if the speed of its other work was not measured."""

PYTHON_S_PER_TENSOR: Final = 1.5e-4
"""Seconds of hooks and autograd for each trained tensor and micro-batch where the CPU computes."""

OVERLAP_S_PER_TENSOR: Final = 3.7e-4
"""Additional seconds for each trained tensor and micro-batch if updates run on a thread of their own."""

PYTHON_S_PER_SUB_GROUP: Final = 7e-4
"""Seconds between two calls of the update's kernel, for each sub-group."""

WEIGHT_PASSES: Final = 8
"""How often forward and backward together read the weights, at the rate of copies. Products of few rows wait for it."""

DISK_PASSES: Final = 2
"""How often the cores pass over each byte of the disk: for its checksum and for its copy."""

MAX_UNITS: Final = 64
"""The most units in the simulation; if there are more, neighbours are joined."""

MAX_PIECES: Final = 192
"""The most pieces of state in the simulation, about."""

WARM_STEPS: Final = 3
NUM_STEPS: Final = 2
"""WARM_STEPS steps are simulated first. The mean of the next NUM_STEPS is the result."""

NUM_MICRO_BATCHES: Final = 3
"""The most micro-batches in the simulation: the first waits for updates, the last starts some."""

HIDDEN_SHARE: Final = 1.05
"""A tier is hidden if a step takes at most HIDDEN_SHARE times its seconds of compute."""

HIDDEN_STEP: Final = 1.1
"""The search for the number of tokens that hides a tier ends when its bounds are within this factor."""

URGENT: Final = -1
"""`Job.order` of reads that compute waits for."""

RESOURCES: Final = ("compute", "fetch", "reduce", "update", "disk read", "disk write")

CORES: Final = {name: "cores" for name in ("compute", "fetch", "reduce", "update")}
DISK: Final = {"disk read": "disk", "disk write": "disk"}
"""Resource -> the lane that it shares with others."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a step computes and moves, from which its seconds are predicted."""

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
    """A predicted step."""

    seconds: float
    by_resource: Mapping[str, float]  # resource -> busy seconds
    tokens: int  # of the whole step
    written_nbytes: Mapping[str, int]  # kind -> bytes written to nvme
    num_events: int  # simulated
    hidden_from_tokens: Mapping[str, int | None] = field(default_factory=dict)  # by tier: see `predict_step`; or None
    searched_tokens: Mapping[str, int] = field(default_factory=dict)  # by tier: the most that were tried

    @property
    def bound_by(self) -> str:
        """Name the resource that is busiest."""
        return max(self.by_resource, key=lambda name: self.by_resource[name])

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds


def forward_flops(units: Iterable[UnitTraffic], tokens: int, *, length: int = 0, width: int = 0) -> float:
    """Count the operations of a forward: matrix products, and causal attention over samples of `length` tokens.
    `width`: layers * hidden size. Without `length` or `width`, attention is not counted."""
    return 2.0 * tokens * (sum(unit.numel - unit.lookups for unit in units) + length * width)


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
    empty. `finds_hidden`: whether to also search, for each tier, how many tokens a step needs so that transfers take no
    longer than compute. The search takes about ten predictions."""
    rates = _Rates(plan, machine)
    seconds, by_resource, num_events = _simulate(plan, work, rates)
    step = StepSeconds(
        seconds=seconds,
        by_resource=by_resource,
        tokens=work.tokens * work.accumulation,
        written_nbytes=plan.written_nbytes(work.accumulation, work.activation_nbytes),
        num_events=num_events,
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
    return any(tier in (unit.params[0], unit.gradients[0], *unit.state) for unit in plan.units)


def _hidden_from(tier: str, plan: Plan, work: Work, machine: Machine) -> tuple[int, bool]:
    """Search the least number of tokens in a step with which transfers of `tier` add no time. Return (number, True). If
    none was found, return (largest number tried, False)."""
    rates = _Rates(plan, machine, only=tier)

    def is_hidden(factor: float) -> bool:
        seconds, by_resource, _ = _simulate(plan, work.scaled(factor), rates)
        return seconds <= HIDDEN_SHARE * _lanes(by_resource, rates)["compute"]

    lanes = _lanes(_simulate(plan, work, rates)[1], rates)
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


def _lanes(by_resource: Mapping[str, float], rates: _Rates) -> dict[str, float]:
    """Return lane -> busy seconds. If the CPU computes, "compute" includes everything that shares its cores."""
    shared = DISK | (dict.fromkeys(CORES, "compute") if rates.shares_cores else {})
    lanes: dict[str, float] = {}
    for name, seconds in by_resource.items():
        lane = shared.get(name, name)
        lanes[lane] = lanes.get(lane, 0.0) + seconds
    return lanes


def _simulate(plan: Plan, work: Work, rates: _Rates) -> tuple[float, dict[str, float], int]:
    """Simulate a step. Return its seconds, its seconds by resource, and the number of events."""
    few = replace(work, accumulation=min(work.accumulation, NUM_MICRO_BATCHES))
    seconds, by_resource, num_events = _Run(plan, few, rates).predict()
    if more := work.accumulation - few.accumulation:  # each takes as long as the last simulated one
        fewer_s, before, num = _Run(plan, replace(few, accumulation=few.accumulation - 1), rates).predict()
        seconds += more * (seconds - fewer_s)
        by_resource = {name: s + more * (s - before[name]) for name, s in by_resource.items()}
        num_events += num
    return seconds, by_resource, num_events


# -- jobs --------------------------------------------------------------------------------------------------------------

Jobs = tuple[Job, ...]


class _Rates:
    """Turns bytes into jobs, with a machine's rates. `only`: the one tier whose bytes take time; "": all tiers."""

    def __init__(self, plan: Plan, machine: Machine, only: str = "") -> None:
        self.shares_cores = plan.request.shares_cores
        self.machine, self._only = machine, only
        disks = [disk for disk in machine.disks if disk.read_bytes_per_s and disk.write_bytes_per_s]
        self._read = sum(disk.read_bytes_per_s or 0.0 for disk in disks)
        self._write = sum(disk.write_bytes_per_s or 0.0 for disk in disks)
        mixed = sum(disk.mixed_bytes_per_s or 0.0 for disk in disks)
        in_turns = 2 / (1 / self._read + 1 / self._write) if disks else 1.0
        self._both = mixed / in_turns if mixed else 1.0

    def counts(self, tier: str) -> bool:
        return self._only in ("", tier)

    def read(self, nbytes: float, order: int = 0) -> Jobs:
        return self._disk("disk read", nbytes, self._read, order)

    def write(self, nbytes: float, order: int = 0) -> Jobs:
        return self._disk("disk write", nbytes, self._write, order)

    def _disk(self, resource: str, nbytes: float, rate: float, order: int) -> Jobs:
        if not nbytes:
            return ()
        seconds = nbytes / rate
        job = Job(resource=resource, seconds=seconds, opposed_s=seconds / self._both, order=order)
        return (job, *self.copy("fetch", DISK_PASSES * nbytes)) if self.shares_cores else (job,)

    def copy(self, resource: str, nbytes: float) -> Jobs:
        """Return the jobs in which `resource` reads or writes `nbytes` of host memory."""
        return self._job(resource, nbytes, self.machine.copy_bytes_per_s)

    def to_device(self, nbytes: float) -> Jobs:
        """Return the jobs that fetch parameters from host memory."""
        if self.shares_cores:
            return self.copy("fetch", 2 * nbytes)  # read and written
        return self._job("fetch", nbytes, self.machine.to_device_bytes_per_s)

    def from_device(self, nbytes: float) -> Jobs:
        return self._job("reduce", nbytes, self.machine.from_device_bytes_per_s)

    def update(self, nbytes: float, num_sub_groups: float, order: int) -> Jobs:
        seconds = nbytes / (self.machine.update_bytes_per_s or 1.0) + num_sub_groups * PYTHON_S_PER_SUB_GROUP
        return (Job(resource="update", seconds=seconds, order=order),)

    def _job(self, resource: str, nbytes: float, rate: float | None) -> Jobs:
        return (Job(resource=resource, seconds=nbytes / rate),) if nbytes and rate else ()


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """A part of one simulated unit's state, updated as a whole."""

    unit: int
    reads: Jobs  # state and gradients, from nvme
    update: Jobs
    writes: Jobs  # state and new parameters, to nvme
    staged_nbytes: int  # in a staging buffer; 0: none is used


@dataclass(frozen=True, kw_only=True)
class _Unit:
    """The work of one simulated unit (neighbouring units, joined) in one micro-batch."""

    forward_s: float
    backward_s: float
    head_s: float  # of forward's product with a tied embedding, after all units
    fetch: Jobs  # parameters, from their home to the device
    forwarded: Jobs  # parameters, to the device from the buffers of an update that has just ended
    save: Jobs  # activations, to their tier
    restore: Jobs  # activations, back to the device
    gradient: Jobs  # gradients, to their home
    is_paged: bool


@dataclass(kw_only=True)
class _Use:
    """One use of a unit in a step: its forward or its backward in a micro-batch."""

    unit: int
    micro: int
    is_forward: bool
    seconds: float
    completes: bool = False  # the unit's gradient of this micro-batch is complete
    is_hit: bool = False  # the device still has the unit
    is_kept: bool = False  # the next use will be a hit


def _join(units: Sequence[UnitTraffic]) -> list[list[UnitTraffic]]:
    """Join neighbouring units until about MAX_UNITS are left. A tied embedding stays alone: it is used at both ends."""
    most = sum(unit.numel for unit in units) / MAX_UNITS
    found: list[list[UnitTraffic]] = []
    for unit in units:
        last = found[-1] if found else []
        fits = last and len(units) > MAX_UNITS and sum(each.numel for each in last) + unit.numel <= most
        if fits and not unit.is_tied and not last[0].is_tied:
            last.append(unit)
        else:
            found.append([unit])
    return found


def _cost(units: Sequence[UnitTraffic], plan: Plan, work: Work, rates: _Rates) -> _Unit:
    machine, accumulates = rates.machine, work.accumulation > 1
    products = sum(unit.numel - unit.lookups for unit in plan.units)
    share = sum(unit.numel - unit.lookups for unit in units) / max(1, products)
    forward_s = share * _forward_s(work, machine)
    numel = max(1, sum(unit.numel for unit in units))  # frozen weights have no gradient to compute
    of_forward = 1 + sum(unit.numel for unit in units if unit.gradients[0]) / numel + work.recomputes
    backward_s = of_forward * forward_s
    head_s, is_tied = 0.0, units[0].is_tied
    if is_tied:
        forward_s, backward_s, head_s = 0.0, 0.0, forward_s  # runs after the blocks, and is not computed again
    param_nbytes = {tier: sum(u.params[1] for u in units if u.params[0] == tier and u.is_paged) for tier in TIERS}
    gradient_nbytes = sum(unit.gradients[1] for unit in units)
    if rates.shares_cores:
        trained = sum(unit.numel for unit in units if unit.state) / max(1, sum(u.numel for u in plan.units if u.state))
        forward_s += WEIGHT_PASSES / 3 * _seconds(rates.copy("compute", sum(unit.params[1] for unit in units)))
        backward_s += WEIGHT_PASSES / 1.5 * _seconds(rates.copy("compute", sum(unit.params[1] for unit in units)))
        overlaps = plan.update_policy.policy != "barrier"
        backward_s += trained * work.num_tensors * (PYTHON_S_PER_TENSOR + overlaps * OVERLAP_S_PER_TENSOR)
        backward_s += _seconds(rates.copy("compute", (2.5 if accumulates else 2) * gradient_nbytes))
    gradient: Jobs = ()
    if not rates.shares_cores and rates.counts("host"):
        moved = sum(unit.gradients[1] for unit in units if unit.gradients[0] != "device")
        gradient += rates.from_device(moved / 2 if accumulates else moved)
        gradient += rates.copy("reduce", 2.5 * moved) if accumulates else ()
    on_nvme = sum(unit.gradients[1] for unit in units if unit.gradients[0] == "nvme") if rates.counts("nvme") else 0
    if not (plan.update_policy.optimizer_in_backward and work.accumulation == 1):
        gradient += rates.write(on_nvme)
        gradient += rates.read(on_nvme * (work.accumulation - 1) / work.accumulation)  # the next micro-batch is added
    fetch: Jobs = ()
    if rates.counts("nvme"):
        fetch += rates.read(param_nbytes["nvme"], URGENT)
    if rates.counts("host") or not rates.shares_cores:
        fetch += rates.to_device(param_nbytes["host"] + (0 if rates.shares_cores else param_nbytes["nvme"]))
    saved = plan.activations.tier if plan.activations is not None else "device"
    nbytes = round(share * work.activation_nbytes) if saved != "device" and rates.counts(saved) else 0
    return _Unit(
        forward_s=forward_s,
        backward_s=backward_s,
        head_s=head_s,
        fetch=fetch,
        forwarded=rates.to_device(sum(param_nbytes.values())),
        save=rates.write(nbytes) if saved == "nvme" else rates.from_device(nbytes),
        restore=rates.read(nbytes, URGENT) if saved == "nvme" else rates.to_device(nbytes),
        gradient=gradient,
        is_paged=any(unit.is_paged for unit in units),
    )


def _forward_s(work: Work, machine: Machine) -> float:
    """Return the seconds of a forward: its matrix products, and its part of all other work."""
    product_s = work.forward_flops / machine.flops_per_s[work.dtype]
    in_blocks, logits = machine.block_elements_per_s.get(work.dtype), machine.logits_per_s.get(work.dtype)
    if not (work.num_block_elements and in_blocks and logits):
        return product_s / MODEL_SHARE.get(machine.device, OTHER_SHARE)
    # These rates are of forward and backward together; backward takes two thirds.
    return product_s + (work.num_block_elements / in_blocks + work.num_logits / logits) / 3


def _cut(joined: Sequence[Sequence[UnitTraffic]], plan: Plan, rates: _Rates) -> list[_Piece]:
    """Cut the state of the units into pieces, in the order of a forward."""
    most = min(MAX_PIECES, len(plan.tiers.state))
    staged_nbytes = sum(unit.state.get("nvme", 0) for unit in plan.units)
    state_nbytes = sum(sum(unit.state.values()) for unit in plan.units)
    pieces: list[_Piece] = []
    for index, units in enumerate(joined):
        order = 0 if rates.shares_cores else index
        all_nbytes = sum(sum(unit.state.values()) for unit in units)
        grad_nbytes = sum(unit.gradients[1] for unit in units if unit.state)
        param_nbytes = {tier: sum(u.params[1] for u in units if u.params[0] == tier and u.state) for tier in TIERS}
        grads_nvme = sum(unit.gradients[1] for unit in units if unit.gradients[0] == "nvme")
        # On an accelerator, an update of state on the device takes no time of the other lanes.
        for tier in TIERS if rates.shares_cores else TIERS[1:]:
            nbytes = sum(unit.state.get(tier, 0) for unit in units)
            if not nbytes or not (rates.counts(tier) or rates.shares_cores):
                continue
            on_disk = nbytes if tier == "nvme" and rates.counts("nvme") else 0
            number = max(1, round(most * nbytes / staged_nbytes)) if tier == "nvme" else 1
            part = nbytes / all_nbytes / number
            params_out = part * param_nbytes["nvme"] if rates.counts("nvme") else 0.0
            grads_in = part * grads_nvme if rates.counts("nvme") else 0.0
            piece = _Piece(
                unit=index,
                reads=rates.read(on_disk / number + grads_in),
                update=rates.update(
                    2 * nbytes / number + part * (grad_nbytes + sum(param_nbytes.values())),
                    len(plan.tiers.state) * nbytes / number / state_nbytes,
                    order,
                ),
                writes=rates.write(on_disk / number + params_out),
                staged_nbytes=round(on_disk / number + params_out + grads_in),
            )
            pieces += [piece] * number
    return pieces


def _seconds(jobs: Jobs) -> float:
    return sum(job.seconds for job in jobs)


# -- the run -----------------------------------------------------------------------------------------------------------


class _Step:
    """The events of one simulated step."""

    def __init__(self, num_uses: int, num_units: int, pieces: Sequence[_Piece]) -> None:
        of_unit = Counter(piece.unit for piece in pieces)
        self.fetched = [Event() for _ in range(num_uses)]  # one for each use of a unit
        self.gradients = [Event() for _ in range(num_units)]
        self.arrived = Event(num_units)  # all gradients are in their home
        self.norm = Event()  # updates may start
        self.updated = [Event(of_unit[index]) for index in range(num_units)]
        self.computed = Event(len(pieces))  # all pieces are updated
        self.written = Event(len(pieces))  # all pieces are back on their tier


class _Run:
    """Simulates a few steps through the lanes."""

    def __init__(self, plan: Plan, work: Work, rates: _Rates) -> None:
        self._rates, self._policy = rates, plan.update_policy.policy
        self._in_backward = plan.update_policy.optimizer_in_backward
        joined = _join(plan.units)
        self._units = [_cost(units, plan, work, rates) for units in joined]
        self._pieces = _cut(joined, plan, rates)
        self._uses = self._list_uses([i for i, units in enumerate(joined) if units[0].is_tied], work.accumulation)
        self._clock = Clock(CORES | DISK if rates.shares_cores else DISK)
        self._window = Room(WINDOW_UNITS)
        largest = max((piece.staged_nbytes for piece in self._pieces), default=0)
        self._buffers = Room(max(NUM_STATE_STAGING, plan.staging.state.total_nbytes // max(1, largest)))
        num_steps = WARM_STEPS + NUM_STEPS
        self._steps = [_Step(len(self._uses), len(self._units), self._pieces) for _ in range(num_steps + 1)]
        self._ends: list[float] = []

    def _list_uses(self, tied: Sequence[int], accumulation: int) -> list[_Use]:
        """List the uses of units in a step, in order. `tied`: indices of the units that are a tied embedding; each pass
        uses them twice."""
        uses: list[_Use] = []
        for micro in range(accumulation):
            for index, unit in enumerate(self._units):
                uses.append(_Use(unit=index, micro=micro, is_forward=True, seconds=unit.forward_s))
            for index in tied:
                uses.append(_Use(unit=index, micro=micro, is_forward=True, seconds=self._units[index].head_s))
            for index in tied:
                seconds = 2 * self._units[index].head_s
                uses.append(_Use(unit=index, micro=micro, is_forward=False, seconds=seconds))
            for index, unit in reversed([*enumerate(self._units)]):
                uses.append(_Use(unit=index, micro=micro, is_forward=False, seconds=unit.backward_s, completes=True))
        # The device keeps a unit if fewer than WINDOW_UNITS other units are used before its next use.
        for number, use in enumerate(uses):
            between: set[int] = set()
            for later in uses[number + 1 :]:
                if later.unit == use.unit:
                    use.is_kept = later.is_hit = True
                    break
                between.add(later.unit)
                if len(between) >= WINDOW_UNITS:
                    break
        return uses

    def predict(self) -> tuple[float, dict[str, float], int]:
        """Return the seconds of a step, its seconds by resource, and the number of simulated jobs."""
        clock = self._clock
        clock.resume(self._fetch())
        for staged in (True, False):
            clock.resume(self._update([p for p in self._pieces if bool(p.staged_nbytes) == staged], staged))
        clock.run(self._drive(), lambda: len(self._ends) == len(self._steps) - 1)
        mean_s = (self._ends[-1] - self._ends[WARM_STEPS - 1]) / NUM_STEPS
        by_resource = self._sum_jobs()
        # A step takes at least as long as all jobs of one lane; the simulation ends before its last writes.
        return max(mean_s, *_lanes(by_resource, self._rates).values()), by_resource, clock.num_events

    def _sum_jobs(self) -> dict[str, float]:
        """Sum the seconds of a step's jobs by resource."""
        sums = dict.fromkeys(RESOURCES, 0.0)
        jobs = [job for piece in self._pieces for job in (*piece.reads, *piece.update, *piece.writes)]
        for use in self._uses:
            unit, is_first = self._units[use.unit], use.is_forward and not use.micro
            sums["compute"] += use.seconds
            jobs += unit.save if use.is_forward else unit.restore
            jobs += unit.gradient if use.completes else ()
            if unit.is_paged and not use.is_hit:
                jobs += unit.forwarded if is_first and self._policy == "overlapped" else unit.fetch
        writes = any(job.resource == "disk write" for job in jobs)
        for job in jobs:
            sums[job.resource] += job.opposed_s if job.opposed_s is not None and writes else job.seconds
        return sums

    def _drive(self) -> Process:
        """Run the uses of all steps in order, as the training loop's thread does."""
        before: _Step | None = None
        last = self._uses[-1].micro
        for step in self._steps:
            is_backward = False
            for use, fetched in zip(self._uses, step.fetched, strict=True):
                unit = self._units[use.unit]
                if before is not None and use.is_forward and not use.micro and self._policy == "overlapped":
                    yield before.updated[use.unit]
                if not use.is_forward and use.micro == last and not is_backward and self._in_backward:
                    is_backward = True
                    if before is not None:
                        yield before.computed
                yield fetched
                if use.seconds:
                    yield Job(resource="compute", seconds=use.seconds)
                if unit.is_paged and not use.is_kept:
                    self._window.leave(self._clock)
                if use.is_forward and unit.save:
                    self._clock.resume(all_of(unit.save))
                if use.completes:
                    self._clock.resume(self._send_gradient(step, use.unit, is_last=use.micro == last))
            yield step.arrived
            if before is not None and not self._in_backward:
                yield before.written
            step.norm.come(self._clock)
            if self._policy == "barrier":
                yield step.written
            self._ends.append(self._clock.now_s)
            before = step

    def _send_gradient(self, step: _Step, index: int, *, is_last: bool) -> Process:
        yield from self._units[index].gradient
        if is_last:
            step.gradients[index].come(self._clock)
            step.arrived.come(self._clock)

    def _fetch(self) -> Process:
        """Bring units to the device in the order of their uses, as far ahead as the window has room."""
        before: _Step | None = None
        for step in self._steps:
            for use, fetched in zip(self._uses, step.fetched, strict=True):
                unit = self._units[use.unit]
                if unit.is_paged and not use.is_hit:
                    jobs = unit.fetch
                    if before is not None and use.is_forward and not use.micro and self._policy != "delayed":
                        yield before.updated[use.unit]
                        if self._policy == "overlapped":
                            jobs = unit.forwarded
                        else:
                            yield before.written
                    yield self._window
                    yield from jobs
                if not use.is_forward:
                    yield from unit.restore
                fetched.come(self._clock)
            before = step

    def _update(self, pieces: Sequence[_Piece], staged: bool) -> Process:
        """Start the update of every piece, in each step. `staged`: whether pieces pass through staging buffers."""
        # The order of the first step; each later step takes the order of the step before it.
        order = [*(reversed(pieces) if self._in_backward else pieces)]
        for step in self._steps if pieces else ():
            left: dict[int, list[_Piece]] = {}
            for piece in order:
                left.setdefault(piece.unit, []).append(piece)
            units, order = sorted(left), []
            while left:
                if staged:
                    yield self._buffers
                # In backward, units with a complete gradient come first, in the order of a forward.
                ready = (u for u in units if u in left and step.gradients[u].has_come) if self._in_backward else ()
                index = next(iter(ready), next(iter(left)))
                order.append(piece := left[index].pop(0))
                if not left[index]:
                    del left[index]
                self._clock.resume(self._update_piece(step, piece))

    def _update_piece(self, step: _Step, piece: _Piece) -> Process:
        yield from piece.reads
        yield step.gradients[piece.unit] if self._in_backward else step.norm
        yield from piece.update
        step.updated[piece.unit].come(self._clock)
        step.computed.come(self._clock)
        yield from piece.writes
        if piece.staged_nbytes:
            self._buffers.leave(self._clock)
        step.written.come(self._clock)
