"""Each order that the device path rests on, taken out, is found: other bits, an error, or a crash.

Where copies or kernels take some milliseconds, whoever does not wait for them is too early; the same course without the
fault has the bits of plain PyTorch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from tests.lagging.child import Outcome
from tests.lagging.cuda import LaggingDevice
from tests.lagging.training import Course, data_on_device, differences_of, engine_for
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.grads.in_flight import InFlightGradients
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.device.lanes import Lane, LaneTransfer
from tiered_zero.hardware.device.streams import StreamAccelerator

Plant = Callable[[pytest.MonkeyPatch], None]

LATE_COMPUTE = {"kernel_s": 1e-3}
SLOW_H2D = {"h2d_bytes_per_s": 4e6}
SLOW_D2H = {"d2h_bytes_per_s": 4e6}


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No fault."""


def compute_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    def wait(self: StreamAccelerator, transfer: Transfer) -> None:
        assert isinstance(transfer, LaneTransfer)
        transfer.check_launched()

    patch.setattr(StreamAccelerator, "wait_on_compute", wait)


def lane_does_not_wait(name: str) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        submit = Lane.submit

        def submit_at_once(self: Lane, job: Callable[[], None], after: object = (), *rest: object, **more: object):
            return submit(self, job, () if self.name == name else after, *rest, **more)

        patch.setattr(Lane, "submit", submit_at_once)

    return plant


def copies_do_not_finish(patch: pytest.MonkeyPatch) -> None:
    copy = StreamAccelerator.copy

    def start_copy(self: StreamAccelerator, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        copy(self, target, source)

    patch.setattr(StreamAccelerator, "copy", start_copy)


def marks_are_early(patch: pytest.MonkeyPatch) -> None:
    """Of what was launched by the call before."""
    record, last = StreamAccelerator.record_compute, []

    def record_late(self: StreamAccelerator) -> LaneTransfer:
        last.append(record(self))
        return last[max(0, len(last) - 8)]

    patch.setattr(StreamAccelerator, "record_compute", record_late)


def host_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LaneTransfer, "wait", lambda self: self.check_launched())


def gradients_are_freed_early(patch: pytest.MonkeyPatch) -> None:
    """Once their copies are launched."""
    flush = InFlightGradients.flush

    def flush_and_free(self: InFlightGradients) -> None:
        batch = self._open
        flush(self)
        if batch is not None:
            assert isinstance(batch.job, LaneTransfer)
            batch.job.check_launched()
            batch.arrivals.clear()

    patch.setattr(InFlightGradients, "flush", flush_and_free)


def the_end_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    """Host memory is freed under copies that fly."""
    patch.setattr(StreamAccelerator, "close", Accelerator.close)


@dataclass(frozen=True, kw_only=True)
class Fault:
    plant: Plant
    settings: dict[str, float]
    course: Course = field(default_factory=lambda: Course(placement=("cpu", "cpu")))


RESIDENT = Course(placement=("none", "cpu"))
SUMS = Course(placement=("cpu", "cpu"), policy="barrier", precision="bf16", accumulation=2, clipping=0.5)

FAULTS = {
    "compute does not wait for fetches": Fault(plant=compute_does_not_wait, settings=SLOW_H2D),
    "fetches do not wait for compute": Fault(plant=lane_does_not_wait("fetch"), settings=LATE_COMPUTE),
    "gradients do not wait for compute": Fault(plant=lane_does_not_wait("reduce"), settings=LATE_COMPUTE),
    "copies do not finish": Fault(
        plant=copies_do_not_finish, settings=SLOW_H2D, course=Course(placement=("nvme", "cpu"))
    ),
    "marks of compute are early": Fault(plant=marks_are_early, settings=LATE_COMPUTE),
    "the host does not wait for copies to the device": Fault(
        plant=host_does_not_wait, settings=SLOW_H2D, course=RESIDENT
    ),
    "the host does not wait for copies from the device": Fault(
        plant=host_does_not_wait, settings=SLOW_D2H, course=SUMS
    ),
    "gradients are freed early": Fault(
        plant=gradients_are_freed_early,
        settings=SLOW_D2H,
        course=Course(placement=("cpu", "cpu"), accumulation=2),
    ),
}


def train_with(device: LaggingDevice, name: str, planted: bool, swap_path: Path) -> list[str]:
    logging.getLogger("tiered_zero").setLevel(logging.CRITICAL)
    fault = FAULTS[name]
    device.set(**fault.settings)
    with pytest.MonkeyPatch.context() as patch:
        (fault.plant if planted else nothing)(patch)
        return differences_of(fault.course, swap_path)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, swap_path, lagging):
    outcome: Outcome = lagging.outcome(train_with, name=name, planted=True, swap_path=swap_path)
    assert outcome.value or outcome.error in ("exit -11", "EngineFailedError", "RuntimeError"), outcome
    assert lagging.run(train_with, name=name, planted=False, swap_path=swap_path) == []


def close_under_copies(device: LaggingDevice, planted: bool, swap_path: Path) -> int:
    """Close an engine while its units are fetched; return how much host memory was unpinned under a copy."""
    device.set(h2d_bytes_per_s=2e5)
    with pytest.MonkeyPatch.context() as patch:
        (the_end_does_not_wait if planted else nothing)(patch)
        with engine_for(Course(placement=("cpu", "cpu")), swap_path) as engine, torch.no_grad():
            batch = data_on_device(0)
            engine(*batch)
    return device.take_counts().get("unpinned_under_a_copy", 0)


def test_an_end_that_does_not_wait_is_found(swap_path, lagging):
    assert lagging.run(close_under_copies, planted=True, swap_path=swap_path) > 0
    lagging.close()  # copies read memory that is gone
    assert lagging.run(close_under_copies, planted=False, swap_path=swap_path) == 0
