"""Every access of a lane to what compute uses is ordered by an event, whichever placement and policy: logical clocks
over the real engine find what is not, however the threads of this machine happen to run.

Of a missing wait the delays of test_delays.py see what meets a late partner; where the CPU is the device its compute is
never late, so an order between streams shows here alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fakes.clocked_device import ClockedAccelerator, ClockedLane, ComputeAccesses, pass_completions
from tests.support.inspection.insides import GradNorm, Pager, SubGroupIO, assembly_build
from tests.support.models import ParityGPT, batch, rows, two_layers
from tests.support.trainers import PLACEMENTS, adamw, tiered
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.layout.flat import Unit

COURSES = {
    "in backward": ("overlapped", 1, 0.0),
    "in step": ("overlapped", 1, 0.5),
    "barrier": ("barrier", 2, 0.0),
    "delayed": ("delayed", 1, 0.0),
}
"""Update policy, accumulation, clipping: without clipping overlapped updates begin in backward."""

CASES = [
    *((placement, name) for placement in PLACEMENTS for name in ("in backward", "in step")),
    *((placement, "barrier") for placement in (("none", "cpu"), ("cpu", "none"), ("nvme", "nvme"))),
    *((placement, "delayed") for placement in (("none", "cpu"), ("nvme", "nvme"))),
]


def read_until_blocked(device: ClockedAccelerator, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let compute read a unit until the policy has blocked it: the pager itself looks at its values there."""
    block = Pager.block_unit_for_update

    def read_and_block(self: Pager, unit: Unit) -> bool:
        paged = self.units.by_unit[unit]
        if paged.is_resident:
            device.clocks.touch(paged.storage.flat, writes=False)
        return block(self, unit)

    monkeypatch.setattr(Pager, "block_unit_for_update", read_and_block)


def races(monkeypatch: pytest.MonkeyPatch, swap_path: Path, placement: tuple[str, str], *course: Any) -> set[Any]:
    """Train 3 steps; return the pairs of streams that nothing has ordered."""
    policy, accumulation, clipping = course
    device = ClockedAccelerator()
    pass_completions(device.clocks, monkeypatch)
    read_until_blocked(device, monkeypatch)
    monkeypatch.setattr(GradNorm, "fuses", lambda *_: False)  # on a device gradients go by `copy`
    monkeypatch.setattr(assembly_build, "build_accelerator", lambda *_: device)
    torch.manual_seed(0)
    runtime = {"update": policy, "delay_start_step": 1}
    engine = tiered(ParityGPT(num_blocks=1), swap_path, placement, adamw, accumulation, clipping, runtime=runtime)
    with engine, ComputeAccesses(device.clocks):
        for number in range(3 * accumulation):
            engine.backward(engine(*batch(number)))
            engine.step()
    return device.clocks.races


@pytest.mark.parametrize(("placement", "course"), CASES)
def test_streams_are_ordered(placement, course, swap_path, monkeypatch):
    assert not races(monkeypatch, swap_path, placement, *COURSES[course])


def mark_on_the_updates_own_lane(patch: pytest.MonkeyPatch) -> None:
    """As `record_compute()` did, called where the update runs."""
    write = SubGroupIO.write

    def write_after_lane(self: SubGroupIO, work: Any, unit_updates: Any, after: Any, **options: Any) -> None:
        write(self, work, unit_updates, self._runtime.accelerator.record(), **options)

    patch.setattr(SubGroupIO, "write", write_after_lane)


def no_wait_of_compute(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ClockedAccelerator, "wait_on_compute", lambda _, transfer: transfer.check_launched())


def lane_that_waits_for_nothing(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        submit = ClockedLane.submit

        def submit_at_once(self: ClockedLane, job: Any, after: Any = (), *options: Any, **more: Any) -> Any:
            return submit(self, job, () if self.name == name else after, *options, **more)

        patch.setattr(ClockedLane, "submit", submit_at_once)

    return plant


FAULTS = {
    "mark on the update's own lane": (mark_on_the_updates_own_lane, ("none", "cpu"), {("compute", "write_back")}),
    "no wait of compute": (no_wait_of_compute, ("cpu", "cpu"), {("fetch", "compute")}),
    "a fetch after nothing": (lane_that_waits_for_nothing("fetch"), ("cpu", "cpu"), {("compute", "fetch")}),
    "a gradient after nothing": (lane_that_waits_for_nothing("reduce"), ("cpu", "cpu"), {("compute", "reduce")}),
    "new parameters after nothing": (
        lane_that_waits_for_nothing("write_back"),
        ("none", "cpu"),
        {("compute", "write_back")},
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_an_order_that_is_missing_is_found(name, swap_path, monkeypatch):
    plant, placement, expected = FAULTS[name]
    plant(monkeypatch)
    assert races(monkeypatch, swap_path, placement, *COURSES["in backward"]) == expected


def test_calls_and_modules_ask_for_the_stream(swap_path, monkeypatch):
    engine = tiered(two_layers(), swap_path, ("cpu", "cpu"))

    def refuse(_: CpuAccelerator) -> None:
        raise ModelError("another stream")

    with engine:
        loss = engine(rows()).sum()
        model = engine.module
        calls = (lambda: engine(rows()), lambda: engine.backward(loss), engine.step, model.state_dict)
        with monkeypatch.context() as patch:
            patch.setattr(CpuAccelerator, "check_compute", refuse)
            for call in (*calls, lambda: model(rows()), lambda: model[0](rows())):
                with pytest.raises(ModelError, match="another stream"):
                    call()
        engine.backward(engine(rows()).sum())
        engine.step()
