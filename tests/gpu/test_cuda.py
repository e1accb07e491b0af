"""The CUDA accelerator on a device: order between streams, exact pinning, errors."""

import time
from collections import deque

import pytest
import torch

from tiered_zero.hardware.device.streams import CudaAccelerator
from tiered_zero.hardware.memory.host_memory import HostArena, typed_view
from tiered_zero.sizes import MIB
from tiered_zero.telemetry.spans import Ledger

pytestmark = pytest.mark.gpu


@pytest.fixture
def accelerator():
    accelerator = CudaAccelerator(torch.device("cuda"), poison=True)
    yield accelerator
    accelerator.close()


def occupy(device):
    """Some milliseconds of compute, so that whoever does not wait comes too early."""
    square = torch.ones(4096, 4096, device=device)
    for _ in range(10):
        square @ square


def test_gather_compute_reduce_over_200_rounds(accelerator):
    """A ring of one device buffer: compute waits for fetch, reduce for compute, the next fetch for compute."""
    arena = HostArena(64 * MIB, accelerator, pin=True, ledger=Ledger())
    numel = 1 << 20
    source = typed_view(arena.take(4 * numel, "source"), torch.float32, numel)
    results = [typed_view(arena.take(4 * numel, "result"), torch.float32, numel) for _ in range(4)]
    flat = torch.empty(numel, device=accelerator.device)
    assert arena.pinned_nbytes == 5 * 4 * numel
    source.copy_(torch.arange(numel))
    carried, held = [], deque(maxlen=4)
    for turn in range(200):
        fetch = accelerator.lane("fetch").submit(
            lambda: accelerator.copy(flat, source), after=[accelerator.record_compute()], holds=[flat]
        )
        accelerator.wait_on_compute(fetch)
        if turn % 20 == 0:
            occupy(accelerator.device)
        result = flat * (turn + 1)
        accelerator.poison(flat)
        target = results[turn % 4]
        if len(carried) >= 4:
            carried[turn - 4].wait()
            assert torch.equal(target, source * (turn - 3))
        carried.append(
            accelerator.lane("reduce").submit(
                lambda target=target, result=result: accelerator.copy(target, result),
                after=[accelerator.record_compute()],
                holds=[result],
            )
        )
        held.append(result)  # the oldest is freed here: its event was waited for above
    accelerator.synchronize()
    assert torch.equal(results[199 % 4], source * 200)
    arena.close()


def test_an_event_is_done_when_the_device_is(accelerator):
    occupy(accelerator.device)
    event = accelerator.record_compute()
    after = accelerator.lane("fetch").submit(lambda: None, after=[event])
    after.wait()
    assert event.done() and after.done()


def test_a_thread_that_waits_for_the_device_sleeps(accelerator):
    """The update needs its core."""
    for _ in range(40):
        occupy(accelerator.device)
    mark = accelerator.record_compute()
    began_s, began_cpu_s = time.perf_counter(), time.thread_time()
    mark.wait()
    waited_s, cpu_s = time.perf_counter() - began_s, time.thread_time() - began_cpu_s
    assert cpu_s < waited_s / 4, f"{cpu_s:.3f} s of a core in {waited_s:.3f} s"


def test_an_error_reaches_who_waits(accelerator):
    def fail():
        raise OSError("the disk is gone")

    event = accelerator.lane("fetch").submit(fail)
    with pytest.raises(OSError, match="the disk is gone"):
        accelerator.wait_on_compute(event)


def test_pinning_is_exact_and_a_failure_leaves_no_error_behind(accelerator):
    arena = HostArena(33 * MIB + 17, accelerator, pin=True, ledger=Ledger())
    slot = arena.take(33 * MIB, "a")
    assert arena.pinned_nbytes == slot.nbytes and slot.is_pinned()
    assert arena.capacity_nbytes <= 1.02 * (33 * MIB + 17)
    assert not accelerator.pin(slot.data_ptr(), MIB)  # registered already
    assert torch.ones(8, device=accelerator.device).sum().item() == 8  # no stale error is reported here
    arena.close()
    assert not slot.is_pinned()
