"""The CPU as a device: copies, poison, limits."""

import os
import threading

import pytest
import torch

from tiered_zero.hardware.device.accelerator import CpuAccelerator, copy_bytes


@pytest.fixture
def accelerator():
    accelerator = CpuAccelerator(poison=True)
    yield accelerator
    accelerator.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.uint8, torch.int64, torch.bool])
def test_copy_bytes_copies_exactly_the_bytes_of_a_view(dtype):
    source = torch.randint(0, 2, (100,)).to(dtype)
    target = torch.zeros(100, dtype=dtype)
    copy_bytes(target[10:30], source[50:70])
    assert torch.equal(target[10:30], source[50:70])
    assert not target[:10].any() and not target[30:].any()


def test_copy_bytes_refuses_what_memmove_would_ruin():
    flat = torch.zeros(16)
    emptied = torch.zeros(16)
    emptied.untyped_storage().resize_(0)
    for target, source in [
        (flat, torch.zeros(15)),
        (flat, torch.zeros(16, dtype=torch.float64)),
        (flat, torch.zeros(4, 4).t()),
        (flat, emptied),
        (emptied, flat),
        (flat, torch.zeros(16, device="meta")),
    ]:
        with pytest.raises(ValueError, match="copy_bytes needs"):
            copy_bytes(target, source)


def test_a_copy_in_a_lane_starts_no_threads_and_leaves_torch_settings_alone(accelerator):
    source, target = torch.rand(1 << 21), torch.empty(1 << 21)
    accelerator.synchronize()
    accelerator.lane("fetch").submit(lambda: None).wait()
    before, threads = set(os.listdir("/proc/self/task")), torch.get_num_threads()
    accelerator.lane("fetch").submit(lambda: accelerator.copy(target, source, finish=True)).wait()
    assert set(os.listdir("/proc/self/task")) <= before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [threads] == [torch.get_num_threads()]
    assert torch.equal(source, target)


def test_copy_and_poison_leave_the_version_counter(accelerator):
    flat = torch.zeros(8)
    parameter = torch.nn.Parameter(flat.view(2, 4))
    versions = flat._version, parameter._version
    accelerator.copy(flat, torch.ones(8))
    accelerator.poison(parameter)
    assert (flat._version, parameter._version) == versions
    assert flat.isnan().all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
def test_poisoned_floats_are_nan(accelerator, dtype):
    flat = torch.zeros(9, dtype=dtype)
    accelerator.poison(flat)
    assert flat.float().isnan().all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64, torch.bool])
def test_poisoned_integers_are_a_pattern(accelerator, dtype):
    flat = torch.zeros(9, dtype=dtype)
    accelerator.poison(flat)
    assert (flat.view(torch.uint8) == 0xA5).all()


def test_without_debugging_nothing_is_poisoned():
    flat = torch.ones(9)
    CpuAccelerator(poison=False).poison(flat)
    assert torch.equal(flat, torch.ones(9))


def test_pinning_is_declined(accelerator):
    assert not accelerator.pins and not accelerator.pin(4096, 4096)


def test_compute_is_always_done(accelerator):
    event = accelerator.record_compute()
    assert event.done()
    event.wait()
    accelerator.wait_on_compute(event)


def test_a_job_that_waits_for_nothing_runs_at_once_and_in_order():
    accelerator = CpuAccelerator()
    lane, here, threads, order = accelerator.lane("fetch"), threading.get_ident(), [], []
    job = lambda name: lambda: (threads.append(threading.get_ident()), order.append(name))  # noqa: E731
    assert lane.submit(job("at once"), waits=False).done() and threads == [here]
    gate = threading.Event()
    lane.submit(gate.wait)
    behind = lane.submit(job("behind"), waits=False)
    assert not behind.done()
    gate.set()
    behind.wait()
    assert order == ["at once", "behind"] and threads[1] != here
    with pytest.raises(ZeroDivisionError):
        lane.submit(lambda: 1 / 0, waits=False).wait()
    accelerator.close()


def test_with_delays_the_cpu_is_a_machine_of_its_own():
    accelerator = CpuAccelerator(delay_seed=0)
    threads = []
    accelerator.lane("fetch").submit(lambda: threads.append(threading.get_ident()), waits=False).wait()
    assert threads != [threading.get_ident()] and not accelerator.shares_cores
    accelerator.close()
