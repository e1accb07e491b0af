"""The lagging device is what it claims to be: late, in order, merciless with memory, and impatient hosts crash."""

import ctypes

import pytest
import torch

from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tiered_zero.hardware.device.streams import CudaAccelerator

LATE_S = 0.03
"""Of a kernel, where only its order or its length is asked for."""


def host_memory(numel: int) -> torch.Tensor:
    return torch.zeros(numel, pin_memory=True)


@on_device
def test_kernels_run_late_and_in_order(device: LaggingDevice):
    with device.held():
        x = torch.ones(4, device="cuda")
        for _ in range(5):
            x = x * 2 + 1
        event = torch.Event("cuda")
        event.record()
        assert not event.query(), "launched, and not run"
        assert not any(name.startswith("host_wait") for name in device.take_counts()), "a launch waits for nothing"
    assert x.tolist() == [63.0] * 4 and event.query()
    assert device.take_counts()["host_wait.copy_to_host"] == 1


@on_device
def test_streams_are_ordered_by_events_alone(device: LaggingDevice):
    x = torch.zeros(4, device="cuda")
    late, own = torch.Stream("cuda"), torch.Stream("cuda")
    torch.accelerator.synchronize()
    with late, device.held():
        x.add_(1)
        with own:
            assert x.tolist() == [0.0] * 4, "another stream has not been waited for"
            own.wait_stream(late)
            seen = x.clone()
            event = own.record_event()
            assert not event.query(), "it waits for the stream that is held"
    event.synchronize()
    assert seen.tolist() == [1.0] * 4


@on_device
def test_freed_memory_is_overwritten_in_order_and_used_again_at_once(device: LaggingDevice):
    device.set(kernel_s=LATE_S)
    x = torch.ones(64, device="cuda")
    address = x.data_ptr()
    doubled = x * 2
    del x
    again = torch.empty(64, device="cuda")
    assert again.data_ptr() == address
    assert doubled.tolist() == [2.0] * 64, "the kernel came before the memory was overwritten"
    assert again.isnan().all()


@on_device
def test_a_stream_that_was_not_ordered_reads_what_is_freed(device: LaggingDevice):
    """And `record_stream` keeps the memory until that stream is done with it."""
    found = {}
    for recorded in (False, True):
        x = torch.ones(1000, device="cuda")
        other = torch.Stream("cuda")
        torch.accelerator.synchronize()
        compute = torch.accelerator.current_stream()
        with other, device.held():
            copy = x.clone()
            if recorded:
                x.record_stream(other)
            with compute:
                del x
                compute.synchronize()
        other.synchronize()
        found[recorded] = copy.tolist()
    assert all(value != value for value in found[False])
    assert found[True] == [1.0] * 1000


@on_device
def test_copies_use_host_memory_late(device: LaggingDevice):
    source, target = host_memory(4), host_memory(4)
    with device.held():
        x = torch.zeros(4, device="cuda")
        x.copy_(source, non_blocking=True)
        target.copy_(x + 1, non_blocking=True)
        source.fill_(7)
        assert target.tolist() == [0.0] * 4
    torch.accelerator.synchronize()
    assert target.tolist() == [8.0] * 4

    pageable = torch.zeros(4)
    x.copy_(pageable, non_blocking=True)
    pageable.fill_(9)
    assert x.tolist() == [0.0] * 4, "pageable memory is copied by the time that the call returns"


@on_device
def test_memory_runs_out_and_is_given_back(device: LaggingDevice):
    torch.accelerator.empty_cache()
    reserved = torch.cuda.memory_reserved()
    device.set(capacity_nbytes=reserved + 8192)
    x = torch.zeros(1024, device="cuda")
    with pytest.raises(torch.OutOfMemoryError, match="lagging device 0"):
        torch.zeros(2048, device="cuda")
    assert x.sum().item() == 0
    del x
    assert torch.zeros(1500, device="cuda").sum().item() == 0, "what is cached is given back first"
    assert torch.cuda.mem_get_info()[1] == reserved + 8192


@on_device
def test_random_numbers_are_those_of_the_launch(device: LaggingDevice):
    drawn = []
    for seed in (-1, 1, 2):
        device.set(delay_seed=seed)
        torch.manual_seed(3)
        first = torch.randn(5, device="cuda")
        state = torch.cuda.get_rng_state()
        second = torch.nn.functional.dropout(torch.ones(50, device="cuda"))
        torch.cuda.set_rng_state(state)
        assert torch.equal(second, torch.nn.functional.dropout(torch.ones(50, device="cuda")))
        drawn.append(first.tolist() + second.tolist())
    assert drawn[0] == drawn[1] == drawn[2]


@on_device
def test_autocast_and_bf16_train(device: LaggingDevice):
    layer, x = torch.nn.Linear(8, 8).cuda(), torch.ones(2, 8, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
    assert layer.weight.grad.dtype == torch.float32 and layer.weight.grad.sum().item() == 128.0
    norm = torch.nn.LayerNorm(8).to("cuda", torch.bfloat16)
    norm(x.bfloat16()).sum().backward()
    assert norm.bias.grad.tolist() == [2.0] * 8


@on_device
def test_there_are_two_devices(device: LaggingDevice):
    assert torch.accelerator.device_count() == torch.cuda.device_count() == 2
    device.set(kernel_s=LATE_S)
    x = torch.ones(4, device="cuda:1") * 2
    assert x.to("cuda:0").tolist() == [2.0] * 4, "a copy between devices is after both"
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(4, device="cuda:0")
    with torch.cuda.device(1):
        assert torch.empty(1, device="cuda").device.index == 1
    assert torch.cuda.current_device() == 0


@on_device
def test_errors_of_kernels_are_raised_by_the_next_wait(device: LaggingDevice):
    table, bad = torch.ones(4, 2, device="cuda"), torch.tensor([9], device="cuda")
    found = torch.nn.functional.embedding(bad, table)
    with pytest.raises(RuntimeError, match="a kernel failed"):
        found.tolist()
    with pytest.raises(RuntimeError, match="same device"):
        table + torch.ones(4, 2)
    table.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        table * 2


@on_device
def test_events_measure_time(device: LaggingDevice):
    start, stop = (torch.Event("cuda", enable_timing=True) for _ in range(2))
    x = torch.ones(4, device="cuda")
    device.set(kernel_s=LATE_S)
    start.record()
    x.add_(1)
    stop.record()
    stop.synchronize()
    assert start.elapsed_time(stop) >= 1000 * LATE_S


@on_device
def test_pinned_memory_under_a_copy_is_counted(device: LaggingDevice):
    runtime, memory = torch.cuda.cudart(), torch.zeros(1024)
    assert runtime.cudaHostRegister(memory.data_ptr(), 4096, 0) == 0 and memory.is_pinned()
    assert runtime.cudaHostRegister(memory.data_ptr() + 8, 8, 0) != 0, "registered already"
    with device.held():
        x = memory.to("cuda", non_blocking=True)
        assert runtime.cudaHostUnregister(memory.data_ptr()) == 0
    assert device.take_counts()["unpinned_under_a_copy"] == 1
    assert x.sum().item() == 0 and not memory.is_pinned()


def read_on_the_host(device: LaggingDevice) -> None:
    x = torch.ones(4, device="cuda")
    torch.accelerator.synchronize()
    ctypes.string_at(x.data_ptr(), 1)


def answer(device: LaggingDevice) -> float:
    return torch.ones(4, device="cuda").sum().item()


def test_the_host_dies_of_touching_device_memory(lagging):
    outcome = lagging.outcome(read_on_the_host)
    assert outcome.error == "exit -11" and "read_on_the_host" in outcome.traceback
    assert lagging.run(answer) == 4.0, "the next body has a new process"


@on_device
def test_a_thread_that_waits_for_the_device_sleeps(device: LaggingDevice):
    """torch.Event has an argument for it, and CUDA's leaves that out."""
    accelerator = CudaAccelerator(torch.device("cuda"))
    on_lane = accelerator.lane("fetch").submit(lambda: None)
    on_lane.wait()
    for transfer in (accelerator.record_compute(), on_lane):
        assert transfer.marker.event.sleeps
        accelerator.wait_on_compute(transfer)
    accelerator.close()
