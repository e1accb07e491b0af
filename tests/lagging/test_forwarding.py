"""New parameters come to the device from the update's buffers while these are being written to disk."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tests.lagging.faults import lane_does_not_wait
from tests.lagging.test_courses import batch_on_device, break_and_go_on, seeded
from tests.lagging.test_planted_faults import stream_of
from tests.lagging.training import Course, differences_of
from tests.parity.test_failures import Fragile
from tests.support import inspection
from tests.support.inspection.insides import SwapStore, UnitUpdate, tier
from tests.support.models import batch
from tests.support.trainers import Plain, assert_same_bits, follow, tiered, train
from tiered_zero.concurrency.transfer import Transfer
from tiered_zero.errors import TieredZeroError, TransferError

PLACEMENTS = [("nvme", "cpu"), ("nvme", "nvme")]
RUNTIME = {"device": "cuda", "debug_poison": True}


class HeldWrite(Transfer):
    """A write that ends once it may, with `error` if there is one."""

    def __init__(self, transfer: Transfer, may_end: threading.Event, error: Exception | None = None) -> None:
        self._transfer, self._may_end, self._error = transfer, may_end, error

    def done(self) -> bool:
        return self._may_end.is_set() and self._transfer.done()

    def wait(self) -> None:
        assert self._may_end.wait(60)
        self._transfer.wait()
        if self._error is not None:
            raise self._error


class LateWrite(Transfer):
    """A write that ends no earlier than at a time."""

    def __init__(self, transfer: Transfer, until_s: float) -> None:
        self._transfer, self._until_s = transfer, until_s

    def done(self) -> bool:
        return time.perf_counter() >= self._until_s and self._transfer.done()

    def wait(self) -> None:
        self._transfer.wait()
        time.sleep(max(0.0, self._until_s - time.perf_counter()))


@contextlib.contextmanager
def held_writes(patch: pytest.MonkeyPatch, error: Exception | None = None) -> Iterator[threading.Event]:
    """Let no write that begins in the block end before the event is set, as it is behind the block."""
    may_end, write = threading.Event(), SwapStore.write
    with patch.context() as own:
        own.setattr(SwapStore, "write", lambda *request: HeldWrite(write(*request), may_end, error))
        try:
            yield may_end
        finally:
            may_end.set()


def make_writes_late(patch: pytest.MonkeyPatch, seed: int) -> None:
    """Half of them, by up to 10 ms: some parts of a unit are written before its fetch begins, some in it."""
    write, draw = SwapStore.write, random.Random(seed)
    late = lambda: time.perf_counter() + max(0.0, draw.uniform(-0.01, 0.01))  # noqa: E731
    patch.setattr(SwapStore, "write", lambda *request: LateWrite(write(*request), late()))


def count(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Count bytes of fetches by where they come from."""
    found = {"disk": 0, "buffers": 0}
    read, begin_copies = SwapStore.read, UnitUpdate.begin_copies

    def counted_read(self: SwapStore, record: Any, into: memoryview, offset: int = 0, *, urgent: bool = False):
        found["disk"] += into.nbytes * urgent
        return read(self, record, into, offset, urgent=urgent)

    def counted_begin(self: UnitUpdate, target: Any, start_copy: Any):
        def counted_copy(part: Any, source: Any) -> Transfer:
            found["buffers"] += part.numel()
            return start_copy(part, source)

        return begin_copies(self, target, counted_copy)

    patch.setattr(SwapStore, "read", counted_read)
    patch.setattr(UnitUpdate, "begin_copies", counted_begin)
    return found


@pytest.mark.parametrize(("placement", "clipping"), list(itertools.product(PLACEMENTS, (0.0, 0.5))))
@on_device
def test_forward_runs_while_no_parameter_is_written(
    device: LaggingDevice, placement: tuple[str, str], clipping: float, swap_path: Path
):
    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(
            lambda own: [*train(own, batch, 2), own(*batch(2))], Plain(seeded(Fragile), clipping=clipping)
        )
    device.set(delay_seed=1)
    engine = tiered(seeded(Fragile), swap_path, placement, clipping=clipping, runtime=RUNTIME)
    with pytest.MonkeyPatch.context() as patch:

        def script(own: Any) -> list[Any]:
            seen = train(own, batch_on_device, 1)
            own.flush()
            with held_writes(patch):
                seen += train(own, lambda number: batch_on_device(number + 1), 1)
                found = count(patch)
                seen.append(own(*batch_on_device(2)).cpu())
                assert found["disk"] == 0 < found["buffers"], found
            return seen

        assert_same_bits(expected, follow(script, engine))


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@on_device
def test_late_writes_change_no_bit(device: LaggingDevice, placement: tuple[str, str], swap_path: Path):
    wrong = {}
    with pytest.MonkeyPatch.context() as patch:
        courses = [*itertools.product(["overlapped"], (0.0, 0.5), (1, 2)), ("barrier", 0.5, 2), ("delayed", 0.5, 2)]
        for seed, (policy, clipping, accumulation) in enumerate(courses):
            course = Course(placement=placement, policy=policy, clipping=clipping, accumulation=accumulation)
            device.set(delay_seed=seed)
            with patch.context() as own:
                make_writes_late(own, seed)
                if differences := differences_of(course, swap_path):
                    wrong[course] = differences
    assert not wrong, wrong


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@on_device
def test_training_goes_on_after_exceptions_while_parameters_are_written(
    device: LaggingDevice, placement: tuple[str, str], swap_path: Path
):
    with sdpa_kernel(SDPBackend.MATH):
        expected = follow(partial(break_and_go_on, data=batch), Plain(seeded(Fragile), clipping=0.5))
    for seed in range(2):
        device.set(delay_seed=seed)
        with pytest.MonkeyPatch.context() as patch:
            make_writes_late(patch, seed)
            engine = tiered(seeded(Fragile), swap_path, placement, clipping=0.5, runtime=RUNTIME)
            assert_same_bits(expected, follow(partial(break_and_go_on, data=batch_on_device), engine))


def no_wait_for_copies(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(tier, "wait_quietly", lambda transfer: None)


FAULTS = {
    "a buffer is released under its copy": (no_wait_for_copies, "write_back", False),
    "a buffer is released under its copy, as a write fails": (no_wait_for_copies, "write_back", True),
    "a copy does not wait for compute": (lane_does_not_wait("write_back"), "compute", False),
}
"""What is planted, whose stream is held, and whether the disk fails."""


def goes_on(device: LaggingDevice, name: str, planted: bool, swap_path: Path) -> bool:
    """Fetch what an update is writing while a stream is held; return whether the update ended, or a copy, before it
    was let go."""
    plant, held, fails = FAULTS[name]
    copies: list[Transfer] = []
    found: list[bool] = []
    begin_copies = UnitUpdate.begin_copies
    with (
        contextlib.suppress(TieredZeroError),  # that the disk failed
        pytest.MonkeyPatch.context() as patch,
        tiered(seeded(Fragile), swap_path, ("nvme", "cpu"), clipping=0.5, runtime=RUNTIME) as engine,
        contextlib.ExitStack() as hold,
    ):
        train(engine, batch_on_device, 1)
        engine.flush()
        stream = stream_of(engine, held)
        with held_writes(patch, TransferError("the disk failed") if fails else None) as may_end:
            train(engine, lambda number: batch_on_device(number + 1), 1)
            tokens = batch_on_device(2)
            torch.accelerator.synchronize()
            end = inspection.lane(engine, "update").submit(lambda: None)
            with stream:
                hold.enter_context(device.held())
                torch.zeros(1, device=stream.device)  # no mark of the stream from now on is one of before
            if planted:
                plant(patch)

            def forward_and_write(own: UnitUpdate, target: torch.Tensor, start_copy: tier.StartCopy) -> Any:
                def noted(*parts: torch.Tensor) -> Transfer:
                    copies.append(copy := start_copy(*parts))
                    may_end.set()
                    return copy

                return begin_copies(own, target, noted)

            def watch() -> None:
                deadline = time.monotonic() + (60 if planted else 0.1)
                while not (early := end.done() or any(copy.done() for copy in list(copies))):
                    if time.monotonic() >= deadline:
                        break
                    time.sleep(0.001)
                found.append(early)
                hold.close()

            patch.setattr(UnitUpdate, "begin_copies", forward_and_write)
            watcher = threading.Thread(target=watch)
            watcher.start()
            try:
                engine(*tokens)
            finally:
                watcher.join()
    assert copies, "nothing was forwarded"
    return found[0]


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name, swap_path, lagging):
    assert lagging.run(goes_on, name=name, planted=True, swap_path=swap_path)
    assert not lagging.run(goes_on, name=name, planted=False, swap_path=swap_path)
