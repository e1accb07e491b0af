"""Each order that the device path rests on, taken out, is found.

A stream is held, so that nothing on it comes to its end: what has to wait for it is seen to go on, and is not without
the fault. No outcome depends on how long anything takes.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.lagging.cuda import LaggingDevice
from tests.lagging.faults import Plant, lane_does_not_wait
from tests.lagging.training import Course, data_on_device, engine_for
from tests.parity.test_activations import Blocks
from tests.support import inspection
from tests.support.inspection.insides import Capture, InFlightGradients, UnitParameters, checkpoint_save
from tests.support.trainers import tiered
from tiered_zero import Engine
from tiered_zero.concurrency.transfer import COMPLETED, Transfer
from tiered_zero.errors import EngineFailedError
from tiered_zero.hardware.device.accelerator import Accelerator, EventMarker, Lane, LaneTransfer
from tiered_zero.hardware.device.streams import StreamAccelerator


def nothing(patch: pytest.MonkeyPatch) -> None:
    """No fault."""


def compute_does_not_wait(patch: pytest.MonkeyPatch) -> None:
    def wait(self: StreamAccelerator, transfer: Transfer) -> None:
        assert isinstance(transfer, LaneTransfer)
        transfer.check_launched()

    patch.setattr(StreamAccelerator, "wait_on_compute", wait)


def copies_do_not_finish(patch: pytest.MonkeyPatch) -> None:
    copy = StreamAccelerator.copy

    def start_copy(self: StreamAccelerator, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        copy(self, target, source)

    patch.setattr(StreamAccelerator, "copy", start_copy)


def marks_are_early(patch: pytest.MonkeyPatch) -> None:
    """Of what was launched before."""
    early = LaneTransfer(EventMarker(torch.accelerator.current_stream().record_event()))
    patch.setattr(StreamAccelerator, "record_compute", lambda self: early)


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


Batch = tuple[Any, ...]


@dataclass(frozen=True, kw_only=True)
class Fault:
    """`held`: whose stream is held, compute's or a lane's. `seen`: what has to wait for it: compute, the host, or, of
    the jobs of `lane`, their launch, their end, or the end of the memory that they use."""

    plant: Plant
    held: str
    seen: str
    lane: str = ""
    act: Callable[[Engine, Course, Batch], None]
    course: Course = field(default_factory=lambda: Course(placement=("cpu", "cpu")))


def forward(engine: Engine, course: Course, batch: Batch) -> None:
    with torch.no_grad():
        engine(*batch)


def step(engine: Engine, course: Course, batch: Batch) -> None:
    for _ in range(course.accumulation):
        engine.backward(engine(*batch))
        engine.step()
    engine.flush()


RESIDENT = Course(placement=("none", "cpu"))
SUMS = Course(placement=("cpu", "cpu"), policy="barrier", precision="bf16", accumulation=2, clipping=0.5)

FAULTS = {
    "compute does not wait for fetches": Fault(plant=compute_does_not_wait, held="fetch", seen="compute", act=forward),
    "fetches do not wait for compute": Fault(
        plant=lane_does_not_wait("fetch"), held="compute", seen="end", lane="fetch", act=forward
    ),
    "gradients do not wait for compute": Fault(
        plant=lane_does_not_wait("reduce"), held="compute", seen="end", lane="reduce", act=step
    ),
    "copies do not finish": Fault(
        plant=copies_do_not_finish,
        held="fetch",
        seen="launch",
        lane="fetch",
        act=forward,
        course=Course(placement=("nvme", "cpu")),
    ),
    "marks of compute are early": Fault(plant=marks_are_early, held="compute", seen="end", lane="fetch", act=forward),
    "the host does not wait for copies to the device": Fault(
        plant=host_does_not_wait, held="write_back", seen="host", act=step, course=RESIDENT
    ),
    "the host does not wait for copies from the device": Fault(
        plant=host_does_not_wait, held="reduce", seen="host", act=step, course=SUMS
    ),
    "gradients are freed early": Fault(
        plant=gradients_are_freed_early, held="reduce", seen="memory", lane="reduce", act=step
    ),
}


class Seen:
    """What goes on while a stream is held. Its methods are called by the thread that acts, but for `is_early`."""

    def __init__(self, fault: Fault) -> None:
        self._fault = fault
        self._jobs: list[tuple[LaneTransfer, list[weakref.ref[torch.Tensor]]]] = []
        self.marks: list[torch.Event] = []
        self.has_ended = False

    def note_jobs(self, patch: pytest.MonkeyPatch) -> None:
        submit = Lane.submit

        def submit_and_note(
            lane: Lane, job: object, after: object = (), holds: Sequence[torch.Tensor] = (), **more: Any
        ):
            used = list(map(weakref.ref, holds))
            transfer = submit(lane, job, after, holds, **more)
            if lane.name == self._fault.lane:
                self._jobs.append((transfer, used))
            return transfer

        patch.setattr(Lane, "submit", submit_and_note)

    def is_early(self) -> bool:
        match self._fault.seen:
            case "compute":
                return any(mark.query() for mark in self.marks)
            case "host":
                return self.has_ended
            case "launch":
                return any(transfer._launched.is_set() for transfer, _ in list(self._jobs))
            case "end":
                return any(transfer.done() for transfer, _ in list(self._jobs))
            case _:
                return any(tensor() is None for _, used in list(self._jobs) for tensor in used)


def stream_of(engine: Engine, name: str) -> torch.Stream:
    found = [torch.accelerator.current_stream()]
    if name != "compute":
        inspection.lane(engine, name).submit(lambda: found.append(torch.accelerator.current_stream())).wait()
    return found[-1]


def comes_early(device: LaggingDevice, name: str, planted: bool, swap_path: Path) -> bool:
    """Act while a stream is held; return whether what has to wait for it was seen to go on."""
    logging.getLogger("tiered_zero").setLevel(logging.CRITICAL)
    fault, found = FAULTS[name], []
    seen, held = Seen(fault), contextlib.ExitStack()

    def watch() -> None:
        deadline = time.monotonic() + (60 if planted else 0.1)
        while not (is_early := seen.is_early()) and time.monotonic() < deadline:
            time.sleep(0.001)
        found.append(is_early)
        held.close()

    with (
        contextlib.suppress(EngineFailedError),
        pytest.MonkeyPatch.context() as patch,
        engine_for(fault.course, swap_path) as engine,
    ):
        batch = data_on_device(1)
        step(engine, fault.course, batch)
        stream = stream_of(engine, fault.held)
        torch.accelerator.synchronize()
        (fault.plant if planted else nothing)(patch)
        seen.note_jobs(patch)
        with stream:
            held.enter_context(device.held())
            torch.zeros(1, device=stream.device)  # no mark of the stream from now on is one of before
        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            fault.act(engine, fault.course, batch)
            seen.marks.append(torch.accelerator.current_stream().record_event())
            seen.has_ended = True
        finally:
            watcher.join()
    return found[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, swap_path, lagging):
    assert lagging.run(comes_early, name=name, planted=True, swap_path=swap_path)
    assert not lagging.run(comes_early, name=name, planted=False, swap_path=swap_path)


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
    found = lagging.outcome(close_under_copies, planted=True, swap_path=swap_path)
    assert found.error == "exit -11" or found.value > 0, found  # a copy that reads memory that is gone ends the process
    lagging.close()
    assert lagging.run(close_under_copies, planted=False, swap_path=swap_path) == 0


def write_back_without_after(patch: pytest.MonkeyPatch) -> None:
    lane_does_not_wait("write_back")(patch)


def write_back_behind_the_lanes_own_mark(patch: pytest.MonkeyPatch) -> None:
    """`record_compute` refuses lanes; `record` does not."""
    write = UnitParameters.write

    def write_behind_own(
        self: UnitParameters, segment: object, kind: str, window: object, after: object, *rest: object
    ) -> object:
        return write(self, segment, kind, window, self._runtime.accelerator.record(), *rest)

    patch.setattr(UnitParameters, "write", write_behind_own)


def write_under_compute(device: LaggingDevice, plant: Plant, is_early: bool, swap_path: Path) -> bool:
    """Step while a kernel that reads a weight has not run yet; return whether it has read what was there."""
    read: list[torch.Tensor] = []
    held = contextlib.ExitStack()
    with pytest.MonkeyPatch.context() as patch, engine_for(RESIDENT, swap_path, optimizer_in_backward=False) as engine:
        plant(patch)
        weight = engine.module.blocks[0].out.weight.detach()
        before = weight.cpu()

        def let_go() -> None:
            """Once the weight is written; where it must not be, at any time."""
            deadline = time.monotonic() + (60 if is_early else 0.1)
            with torch.Stream("cuda"):
                while torch.equal(weight.cpu(), before) and time.monotonic() < deadline:
                    time.sleep(0.001)
            held.close()

        def read_late(*_: object) -> None:
            held.enter_context(device.held())
            read.append(weight.clone())
            threading.Thread(target=let_go).start()

        engine.backward(engine(*data_on_device(0)))
        engine.optimizer.register_step_pre_hook(read_late)
        engine.step()
        engine.flush()
    return torch.equal(read[0].cpu(), before)


@pytest.mark.parametrize(
    ("plant", "is_early"),
    [(write_back_without_after, True), (write_back_behind_the_lanes_own_mark, False), (nothing, False)],
)
def test_parameters_that_are_written_under_compute_are_found(plant, is_early, swap_path, lagging):
    """The update lane's own mark is as late as compute's: its job is launched behind that."""
    has_read = lagging.run(write_under_compute, plant=plant, is_early=is_early, swap_path=swap_path)
    assert has_read == (not is_early)


def saves_do_not_wait(patch: pytest.MonkeyPatch) -> None:
    write = Capture.write

    def write_at_once(self: Capture, state: object, tag: object, ready: object, *rest: object) -> object:
        return write(self, state, tag, COMPLETED, *rest)

    patch.setattr(Capture, "write", write_at_once)


def save_under_compute(device: LaggingDevice, plant: Plant, is_early: bool, swap_path: Path, tmp_path: Path) -> bool:
    """Save while a kernel that changes a frozen weight has not run yet; return whether the change was saved."""

    def engine_of() -> Engine:
        torch.manual_seed(0)
        model = Blocks("no checkpoint")
        list(model.parameters())[-1].requires_grad_(False)
        return tiered(model, swap_path, ("none", "none"), runtime={"device": "cuda", "checkpoint": {"async": True}})

    with pytest.MonkeyPatch.context() as patch, engine_of() as engine, contextlib.ExitStack() as held:
        plant(patch)
        patch.setattr(checkpoint_save, "_MOST_COPIED_NBYTES", 0)  # more than a save copies before it returns
        frozen = list(engine.module.parameters())[-1]
        held.enter_context(device.held())
        frozen.add_(1)
        late = threading.Timer(60 if is_early else 0.1, held.close)
        late.start()
        engine.save_checkpoint(str(tmp_path), tag="t")
        late.cancel()
        held.close()
        expected = frozen.cpu()
    with engine_of() as engine:
        engine.load_checkpoint(str(tmp_path), tag="t")
        return torch.equal(list(engine.module.parameters())[-1].cpu(), expected)


@pytest.mark.parametrize(("plant", "is_early"), [(saves_do_not_wait, True), (nothing, False)])
def test_a_save_that_does_not_wait_is_found(plant, is_early, swap_path, tmp_path, lagging):
    arguments = {"plant": plant, "is_early": is_early, "swap_path": swap_path, "tmp_path": tmp_path}
    assert lagging.run(save_under_compute, **arguments) == (not is_early)
