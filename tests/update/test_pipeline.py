"""Read i+1 | update i | write i-1, seen in the order of events; numbers, absences, failures, and few runs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from tests.fakes.slow_tier import Entry, SlowTier
from tests.support.inspection.insides import Home, HostTier, Inventory, UnitUpdate
from tests.support.pairwise import by_turns, pairwise
from tests.support.tier_rig import make_runtime
from tests.support.units import flat_of, make_params, make_unit
from tiered_zero.concurrency.transfer import COMPLETED
from tiered_zero.errors import TransferError
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.layout.flat import CUT_NUMEL, ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment, cut_subgroups
from tiered_zero.rules.rule import Slice, StateField, UpdateRule
from tiered_zero.rules.state_layout import MasterFormat, Parts, StateLayout
from tiered_zero.sizes import MIB
from tiered_zero.update.pipeline import UpdateJob, UpdatePipeline
from tiered_zero.update.state_view import ParamShards, StateView
from tiered_zero.update.subgroup_io import UnitParameters

LATE = 10**9
"""A latency at which transfers are done only when they are waited for."""


class Momentum(UpdateRule):
    """m += g * scale; w -= lr * m. Its state begins as 0.5, so that an initialization that is missed shows."""

    name = "momentum"

    def __init__(self, log: list[Entry], elementwise: bool = True) -> None:
        self.elementwise = elementwise
        self.num_runs: list[int] = []
        self.steps: list[int] = []
        self._log = log

    def state_fields(self, shape: tuple[int, ...], hyper: Mapping[str, Any]) -> list[StateField]:
        return [StateField(name="m", shape=shape, dtype=torch.float32)]

    def init_state(self, state: Mapping[str, torch.Tensor], hyper: Mapping[str, Any]) -> None:
        state["m"].fill_(0.5)

    def update(self, runs: Sequence[Slice]) -> None:
        self._log.append(("update", f"s{len(self.num_runs)}"))
        self.num_runs.append(len(runs))
        for run in runs:
            run.scalars = {"step": run.scalars.get("step", 0) + 1}
            self.steps.append(run.scalars["step"])
            run.state["m"].add_(run.grad.to(torch.float32) * run.grad_scale)
            run.master.sub_(run.hyper["lr"] * run.state["m"])
            if run.out is not None:
                run.out.copy_(run.master)


class Joined(MasterFormat):
    """fp32 masters that say they need the parameters; they leave what is not stepped as it was read."""

    dtypes = (torch.float32,)
    needs_params = True

    def split(self, master: torch.Tensor) -> Parts:
        raise NotImplementedError

    def join(self, parts: Parts, params: torch.Tensor | None) -> torch.Tensor:
        raise NotImplementedError

    def replace(self, parts: Parts, master: torch.Tensor) -> Parts:
        raise NotImplementedError

    def follow(self, parts: Parts, new: torch.Tensor, old: torch.Tensor | None) -> Parts | None:
        raise NotImplementedError

    def copy_unstepped(self, master: torch.Tensor, out: torch.Tensor) -> None: ...


class Gradients:
    """One step's gradients: unit index -> parameter index in the unit -> gradient."""

    def __init__(self, world: World, absent: Sequence[ParamSpec] = ()) -> None:
        self.absent = {spec.index for spec in absent}
        self.flats = {unit.index: torch.zeros(unit.numel, dtype=unit.dtype) for unit in world.units}
        for unit in world.units:
            for entry in unit.entries:
                if entry.param.index not in self.absent:
                    self.flats[unit.index][entry.start : entry.stop] = torch.randn(entry.param.numel)
        self.landed: set[int] = set()

    def part(self, segment: Segment) -> torch.Tensor:
        assert segment.unit.index in self.landed, "read before it was there"
        return self.flats[segment.unit.index][segment.unit_start :][: segment.numel]

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        return param.index not in self.absent

    def has_arrived(self, unit: Unit) -> bool:
        return True

    def wait_transfers(self, unit: Unit) -> None:
        self.landed.add(unit.index)

    def release(self, unit: Unit) -> None:
        """They rest in memory."""

    def release_all(self) -> None:
        """They rest in memory."""


class World:
    """Units with parameters in host memory or on a slow tier, sub-groups with state on the slow tier, a pipeline."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        size_numel: int = CUT_NUMEL,
        num_buffers: int = 3,
        latency: int = 0,
        offloads: bool = False,
        elementwise: bool = True,
        groups: Mapping[str, int] | None = None,
        masters: MasterFormat | None = None,
    ) -> None:
        self.units = list(units)
        self.tier = SlowTier(latency=latency)
        self.runtime = make_runtime(seed=None)
        self.inventory = Inventory()
        self.hyper = [{"lr": 0.1}, {"lr": 0.01}]
        self.rule = Momentum(self.tier.log, elementwise)
        arena = HostArena(128 * MIB, self.runtime.accelerator, False, self.runtime.ledger)
        host = HostTier(arena, self.runtime)
        self.params: Home | None = None
        self.masters = {unit.index: flat_of(unit, make_params(unit)).to(torch.float32) for unit in units}
        self.moments = {unit.index: torch.full((unit.numel,), 0.5) for unit in units}
        self.group_of = {e.param.name: (groups or {}).get(e.param.name, 0) for u in units for e in u.entries}
        for unit in units:
            tier = self.tier if offloads else host
            slot = tier.reserve(f"u{unit.index}", unit.nbytes, "param")
            self.inventory.place(unit, "param", Home(tier, slot))
        subgroups = cut_subgroups(self.units, self.group_of, size_numel, elementwise=elementwise)
        self.layouts = [StateLayout(subgroup, self.rule, self.hyper, masters) for subgroup in subgroups]
        for layout in self.layouts:
            slot = self.tier.reserve(f"s{layout.subgroup.index}", layout.nbytes, "state")
            self.inventory.place(layout.subgroup, "state", Home(self.tier, slot))
            master = layout.master(self.tier.contents[slot.name])
            for segment in layout.subgroup.segments:
                part = self.masters[segment.unit.index][segment.unit_start : segment.unit_start + segment.numel]
                master[segment.start : segment.stop] = part
        out_nbytes = sum(unit.nbytes for unit in units)
        buffer_nbytes = max(layout.nbytes for layout in self.layouts) + out_nbytes
        self.staging = StagingPool(arena, buffer_nbytes, num_buffers, "staging", self.runtime.recorder, 5.0)
        params = UnitParameters(self.inventory, self.runtime, lambda unit: torch.empty(0))
        shards = ParamShards(Collectives(), self.units, frozenset(), is_sharded=False)
        view = StateView(self.layouts, self.rule, self.inventory, self.staging, self.hyper, {}, shards)
        self.pipeline = UpdatePipeline(view, self.runtime, params)

    def job(self, gradients: Gradients | None = None, grad_scale: float = 1.0, param_kind: str = "param") -> UpdateJob:
        """One that backward adds units to."""
        own: Any = gradients or Gradients(self)
        return UpdateJob(self.layouts, own, self.hyper, COMPLETED, grad_scale, param_kind)

    def step(
        self,
        gradients: Gradients | None = None,
        grad_scale: float = 1.0,
        param_kind: str = "param",
        unit_updates: Mapping[Unit, UnitUpdate] | None = None,
    ) -> None:
        job = self.job(gradients, grad_scale, param_kind)
        job.unit_updates.update(unit_updates or {})
        job.finish(COMPLETED)
        self.run(job)

    def run(self, job: UpdateJob) -> None:
        self.pipeline.step(job)
        gradients: Any = job.gradients
        for unit in self.units:
            for entry in unit.entries:
                if entry.param.index in gradients.absent:
                    continue
                part = slice(entry.start, entry.stop)
                moment = self.moments[unit.index][part]
                moment.add_(gradients.flats[unit.index][part].to(torch.float32) * job.grad_scale)
                self.masters[unit.index][part].sub_(self.hyper[self.group_of[entry.param.name]]["lr"] * moment)

    def check(self) -> None:
        """Masters, moments and parameters are those of the reference, wherever they rest."""
        places = {entry.param.index: (unit, entry) for unit in self.units for entry in unit.entries}
        for layout in self.layouts:
            raw = self.tier.contents[f"s{layout.subgroup.index}"]
            for piece in layout.subgroup.pieces:
                unit, entry = places[piece.param.index]
                first = entry.start + piece.param_start
                expected = self.masters[unit.index][first : first + piece.numel]
                assert torch.equal(layout.master(raw)[piece.start : piece.stop], expected)
                moment = layout.state(raw, piece)["m"].reshape(-1)
                assert torch.equal(moment, self.moments[unit.index][first : first + moment.numel()])
        for unit in self.units:
            home = self.inventory.home(unit, "param")
            raw = self.tier.contents[home.slot.name] if home.tier is self.tier else home.slot.tensor
            assert raw is not None
            flat = raw[: unit.nbytes].view(unit.dtype)
            for entry in unit.entries:
                part = slice(entry.start, entry.stop)
                assert torch.equal(flat[part], self.masters[unit.index][part].to(unit.dtype))

    def check_buffers(self) -> None:
        """All are there once nothing is read ahead."""
        self.pipeline.cancel_prefetch()
        assert self.staging.num_free == self.staging.count

    def at(self, what: str, name: str) -> int:
        """When it first happened, by its place in the log."""
        return self.tier.log.index((what, name))


def six(**options: Any) -> World:
    """Six sub-groups of a page's worth each, over one unit."""
    return World([make_unit(0, [6 * CUT_NUMEL - 100], torch.bfloat16)], **options)


# -- the order of events -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_buffers", [3, 4])
def test_reads_run_ahead_and_writes_behind(num_buffers: int) -> None:
    """Transfers take three more log entries: longer than an update, so that a wait that comes too early is seen."""
    world = six(num_buffers=num_buffers, latency=3)
    world.step()
    for i in range(5):
        assert world.at("read", f"s{i + 1}") < world.at("update", f"s{i}"), "read i+1 is on its way under update i"
        assert world.at("write done", f"s{i}") > world.at("update", f"s{i + 1}"), "and write i under update i+1"
    world.check()


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 5, 9])
def test_a_buffer_that_comes_back_is_used_at_once(num_buffers: int) -> None:
    """Transfers are done only when waited for: the pipeline waits for one write, not for all, before it reads on."""
    world = six(num_buffers=num_buffers, latency=LATE)
    world.step()
    for i in range(6 - num_buffers):
        returned, taken = world.at("write done", f"s{i}"), world.at("read", f"s{i + num_buffers}")
        assert taken == returned + 1
    world.check()


def test_updates_are_in_order_and_each_after_its_read() -> None:
    world = six(latency=LATE)
    world.step()
    for i in range(6):
        assert world.at("read done", f"s{i}") < world.at("update", f"s{i}") < world.at("write", f"s{i}")
    updates = [name for what, name in world.tier.log if what == "update"]
    assert updates == sorted(updates)


def test_at_the_end_everything_is_written_and_every_buffer_back() -> None:
    world = six(latency=LATE, offloads=True)
    world.step()
    assert sum(what == "write done" for what, _ in world.tier.log) == sum(what == "write" for what, _ in world.tier.log)
    world.check_buffers()


# -- ahead of the step -------------------------------------------------------------------------------------------------


def last(world: World, what: str, name: str) -> int:
    return max(index for index, entry in enumerate(world.tier.log) if entry == (what, name))


def wait_for(condition: Callable[[], bool], what: object) -> None:
    deadline_s = time.monotonic() + 300.0
    while not condition():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.001)


def reads(world: World) -> list[str]:
    return [name for what, name in world.tier.log if what == "read"]


def test_what_the_next_step_begins_with_is_read_at_the_end_of_this_one() -> None:
    world = six(num_buffers=4, latency=LATE, offloads=True)
    world.pipeline.prefetch()
    assert not reads(world), "nothing is known before the first step"
    world.step()
    assert reads(world) == [f"s{index}" for index in (*range(6), 0, 1, 2)]
    assert world.staging.num_free == 1, "a buffer is left to others"
    for index in range(3):
        assert world.tier.log.index(("write done", f"s{index}")) < last(world, "read", f"s{index}")
    assert last(world, "read", "s0") < world.at("write done", "s5"), "while it still has writes of its own to do"
    world.tier.log.clear()
    world.pipeline.prefetch()
    assert not reads(world), "all that there is room for is read"
    world.step()
    assert reads(world) == [f"s{index}" for index in (3, 4, 5, 0, 1, 2)], "none is read twice"
    world.check()
    world.check_buffers()


def test_what_is_expected_is_read_while_gradients_are_waited_for() -> None:
    """And a buffer that a write releases is used for the next."""
    units = [make_unit(index, [CUT_NUMEL - 50]) for index in range(6)]
    world = World(units, num_buffers=3)
    world.step()
    world.tier.log.clear()
    job = world.job()
    stepping = threading.Thread(target=lambda: world.run(job), daemon=True)
    stepping.start()
    for index, unit in enumerate(units):
        job.add_unit(unit, COMPLETED)
        wait_for(lambda index=index: ("write", f"s{index}") in world.tier.log, index)  # type: ignore[misc]
        if index + 2 < len(units):
            wait_for(lambda index=index: f"s{index + 2}" in reads(world), index)  # type: ignore[misc]
    assert sorted(reads(world)) == ["s2", "s3", "s4", "s5"], "s0 and s1 at the end of the last step"
    job.finish(COMPLETED)
    stepping.join(300)
    assert not stepping.is_alive()
    world.check()
    world.check_buffers()


@pytest.mark.parametrize("num_buffers", [2, 3, 4])
def test_another_order_than_expected_takes_the_buffers_back(num_buffers: int) -> None:
    units = [make_unit(index, [CUT_NUMEL - 50]) for index in range(4)]
    world = World(units, num_buffers=num_buffers, latency=LATE)
    world.step()
    world.step(Gradients(world, [unit.entries[0].param for unit in units[:3]]))
    assert reads(world)[-1] == "s3", "the last step's order counts"
    world.check()
    world.step()
    world.check()
    world.check_buffers()


def test_what_was_prefetched_waits_for_no_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """No buffer is free, and it needs none."""
    world = World([make_unit(index, [CUT_NUMEL - 50]) for index in range(3)], num_buffers=3, latency=LATE)
    world.step()
    world.tier.log.clear()
    job, update = world.job(), world.rule.update
    job.add_unit(world.units[2], COMPLETED)

    def update_and_add(runs: Sequence[Slice]) -> None:
        update(runs)
        if not job.has_ended():
            job.add_unit(world.units[0], COMPLETED)
            job.add_unit(world.units[1], COMPLETED)
            job.finish(COMPLETED)

    monkeypatch.setattr(world.rule, "update", update_and_add)
    world.run(job)
    assert reads(world)[:1] == ["s2"], "s0 and s1 were read at the end of the last step"
    assert world.at("write", "s1") < world.at("write done", "s2")
    world.check()
    world.check_buffers()


def test_a_step_of_the_other_kind_reads_anew() -> None:
    """What was opened for it has room for other parameters."""
    world = six(num_buffers=4, offloads=True)
    (unit,) = world.units
    world.inventory.place(unit, "param_back", Home(world.tier, world.tier.reserve("b0", unit.nbytes, "param_back")))
    world.step()
    world.tier.log.clear()
    world.step(param_kind="param_back")
    assert reads(world) == [f"s{index}" for index in (*range(6), 0, 1, 2)]
    homes = world.inventory.home(unit, "param"), world.inventory.home(unit, "param_back")
    world.inventory.move({(unit, "param_back"): homes[0], (unit, "param"): homes[1]})
    world.check()
    world.check_buffers()


def test_state_that_changes_is_read_again() -> None:
    world = six(num_buffers=4)
    world.step()
    world.check_buffers()
    layout = world.layouts[0]
    layout.master(world.tier.contents["s0"]).fill_(3.0)
    for segment in layout.subgroup.segments:
        world.masters[segment.unit.index][segment.unit_start : segment.unit_start + segment.numel] = 3.0
    world.pipeline.prefetch()
    world.step()
    world.check()


def test_a_failed_read_ahead_fails_the_step_or_nobody() -> None:
    world = six(num_buffers=4, latency=LATE)
    world.step()
    before = {name: raw.clone() for name, raw in world.tier.contents.items()}
    world.pipeline.cancel_prefetch()
    world.tier.failing.add(("read", "s1"))
    world.pipeline.prefetch()
    world.pipeline.cancel_prefetch()
    world.pipeline.prefetch()
    with pytest.raises(TransferError, match="read of s1"):
        world.step()
    assert world.staging.num_free == world.staging.count
    assert torch.equal(world.tier.contents["s1"], before["s1"])


# -- parameters that are read ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("latency", [0, 3])
def test_parameters_that_masters_need_are_read_ahead_with_the_state(latency: int) -> None:
    world = six(latency=latency, offloads=True, masters=Joined())
    world.tier.contents["u0"].copy_(torch.arange(world.tier.contents["u0"].numel()) % 251)
    padding = world.tier.contents["u0"][2 * world.units[0].entries[0].stop :].clone()
    world.step()
    world.check()
    assert torch.equal(world.tier.contents["u0"][-padding.numel() :], padding), "what was not stepped is what was read"
    reads = [index for index, entry in enumerate(world.tier.log) if entry == ("read", "u0")]
    updates = [index for index, entry in enumerate(world.tier.log) if entry[0] == "update"]
    assert len(updates) == 6 and len(reads) == 8, "two for the step after"
    reads = reads[:6]
    assert all(ahead < now for ahead, now in zip(reads[1:], updates[:-1], strict=True)), "i+1 before update i"


@pytest.mark.parametrize("how", ["failing", "refusing"])
@pytest.mark.parametrize("latency", [0, LATE])
def test_a_parameter_that_cannot_be_read_raises_and_gives_every_buffer_back(how: str, latency: int) -> None:
    world = six(latency=latency, offloads=True, masters=Joined())
    world.step()
    world.pipeline.cancel_prefetch()
    before = {name: raw.clone() for name, raw in world.tier.contents.items()}
    getattr(world.tier, how).add(("read", "u0"))
    with pytest.raises(TransferError, match="read of u0"):
        world.step()
    assert world.staging.num_free == world.staging.count
    assert all(torch.equal(raw, before[name]) for name, raw in world.tier.contents.items())


# -- the numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_buffers", "latency", "offloads", "dtype"),
    [
        tuple(case.values())
        for case in pairwise(
            {
                "num_buffers": [1, 3],
                "latency": [0, 3, LATE],
                "offloads": [True, False],
                "dtype": [torch.float32, torch.bfloat16],
            }
        )
    ],
)
def test_three_steps_give_the_numbers(num_buffers: int, latency: int, offloads: bool, dtype: torch.dtype) -> None:
    units = [make_unit(0, [3000, 1, 0, 70], dtype), make_unit(1, [5000], dtype)]
    world = World(units, num_buffers=num_buffers, latency=latency, offloads=offloads)
    for scale in (1.0, 0.25, 2.0):
        world.step(grad_scale=scale)
        world.check()


def test_whole_parameters_for_a_rule_that_needs_them() -> None:
    world = World([make_unit(0, [3000, 40]), make_unit(1, [5000])], elementwise=False)
    for _ in range(2):
        world.step()
    assert world.rule.num_runs == [2, 1] * 2
    world.check()


def test_param_groups_have_their_own_values() -> None:
    world = World([make_unit(0, [100, 100, 100, 100])], groups={"u0.p1": 1, "u0.p2": 1})
    world.step()
    assert world.rule.num_runs == [3], "neighbours of one group are one run"
    world.hyper[1]["lr"] = 5.0
    world.step()
    world.check()


# -- absences ----------------------------------------------------------------------------------------------------------


def test_a_parameter_without_a_gradient_is_left_as_it_is() -> None:
    unit = make_unit(0, [100, 100, 100], torch.bfloat16)
    world = World([unit])
    absent = unit.entries[1].param
    world.step(Gradients(world, [absent]))
    assert world.rule.num_runs == [2]
    world.check()
    world.step()  # its own first step, the others' second
    assert world.rule.num_runs[1] == 3, "different histories do not share a run"
    assert world.rule.steps[2:] == [2, 1, 2]
    world.check()
    world.step(Gradients(world, [absent]))
    world.check()


def test_a_subgroup_without_any_gradient_is_not_touched() -> None:
    units = [make_unit(index, [CUT_NUMEL - 50]) for index in range(3)]
    world = World(units)
    world.step()  # parameters are at home from here on
    world.tier.log.clear()
    world.step(Gradients(world, [units[1].entries[0].param]))
    assert {name for what, name in world.tier.log if what == "read"} == {"s0", "s2"}
    world.check()


def test_nothing_at_all_to_step() -> None:
    world = six()
    unit_update = UnitUpdate()
    world.step(Gradients(world, [world.units[0].entries[0].param]), unit_updates={world.units[0]: unit_update})
    assert world.tier.log == []
    unit_update.written.wait()


def test_a_delayed_update_writes_the_parameters_of_every_subgroup() -> None:
    units = [make_unit(index, [CUT_NUMEL - 50], torch.bfloat16) for index in range(3)]
    world = World(units)
    for unit in units:
        world.inventory.place(unit, "param_back", world.inventory.home(unit, "param"))
    world.step(Gradients(world, [units[1].entries[0].param]), param_kind="param_back")
    world.check()  # also of the unit without a gradient, whose home was never written before


# -- unit_updates ------------------------------------------------------------------------------------------------------


def test_a_unit_is_published_when_its_last_part_is_written() -> None:
    units = [make_unit(0, [2 * CUT_NUMEL - 60]), make_unit(1, [CUT_NUMEL - 60])]
    world = World(units, latency=LATE)

    class Logged(UnitUpdate):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def complete(self) -> None:
            world.tier.log.append(("published", self.name))
            super().complete()

    world.step(unit_updates={world.units[0]: Logged("u0"), world.units[1]: Logged("u1")})
    assert world.at("write done", "s1") < world.at("published", "u0") < world.at("published", "u1")
    assert world.at("write done", "s2") < world.at("published", "u1")


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", ["read", "write"])
@pytest.mark.parametrize(
    ("which", "how", "latency"),
    [
        (which, *case)
        for which, case in by_turns(
            range(6), [("failing", 0), ("refusing", LATE), ("failing", LATE), ("refusing", 0)], 2
        )
    ],
)
def test_a_failing_transfer_raises_in_the_step_and_gives_every_buffer_back(
    how: str, what: str, which: int, latency: int
) -> None:
    world = six(latency=latency)
    world.step()
    world.pipeline.cancel_prefetch()
    before = {name: raw.clone() for name, raw in world.tier.contents.items()}
    getattr(world.tier, how).add((what, f"s{which}"))
    unit_updates = {world.units[0]: UnitUpdate()}
    world.tier.log.clear()
    world.rule.num_runs.clear()
    with pytest.raises(TransferError, match=f"{what} of s{which}"):
        world.step(unit_updates=unit_updates)
    assert world.staging.num_free == world.staging.count
    with pytest.raises(TransferError):
        unit_updates[world.units[0]].written.wait()
    for kind, name in [entry for entry in world.tier.log if entry[0] in ("read", "write")]:
        assert (f"{kind} done", name) in world.tier.log, "nothing still uses a buffer that went back"
    if what == "read":
        for index in range(which, 6):
            assert torch.equal(world.tier.contents[f"s{index}"], before[f"s{index}"]), "unchanged from there on"


def test_a_rule_that_raises_gives_every_buffer_back() -> None:
    world = six(latency=LATE)

    num_calls = [0]

    def fail(runs: Sequence[Slice]) -> None:
        num_calls[0] += 1
        raise ZeroDivisionError

    world.rule.update = fail  # type: ignore[method-assign]
    for _ in range(2):  # nothing is updated after a failure: state may be partly new
        with pytest.raises(ZeroDivisionError):
            world.step()
        assert world.staging.num_free == world.staging.count
    assert num_calls == [1]


# -- many small parameters ---------------------------------------------------------------------------------------------


def test_ten_thousand_small_parameters_are_few_runs() -> None:
    units = [make_unit(index, [7] * 2500, torch.bfloat16) for index in range(4)]
    world = World(units, size_numel=4 * 10**6)
    for _ in range(2):
        world.step()
    world.check()
    assert world.rule.num_runs == [4, 4], "one for each span of a unit"
    assert len([entry for entry in world.tier.log if entry[0] == "write"]) == 2, "and one request a step"
