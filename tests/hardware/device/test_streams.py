"""Accelerators over recorded streams: which calls are made, in which order, on which stream; what CUDA's class adds.

What the calls do on a device is tested in tests/gpu.
"""

import contextlib
import logging
import threading

import pytest
import torch

from tiered_zero.errors import ConfigError, InternalError, ModelError
from tiered_zero.hardware.device.streams import CudaAccelerator, StreamAccelerator
from tiered_zero.sizes import GIB


class Stream:
    device = torch.device("cuda", 1)

    def __init__(self, name, calls, current):
        self.name, self.calls, self.current = name, calls, current

    def __repr__(self):
        return f"<stream {self.name}>"

    def __enter__(self):
        on_lane = threading.current_thread() is not threading.main_thread()
        assert getattr(self.current, "device", 1 - on_lane) == 1, "leaving would set, and initialise, device 0"
        self.before, self.current.stream = getattr(self.current, "stream", None), self

    def __exit__(self, *_):
        self.current.stream = self.before

    def synchronize(self):
        self.calls.append(f"{self.name} synchronize")


class Marker:
    """An event, of torch.cuda's if it has no device."""

    def __init__(self, device=None, blocking=False):
        assert device == Stream.device or (device is None and blocking)
        self.where, self.complete = None, False

    def record(self, stream):
        self.where = f"{stream.name} {len(stream.calls)}"
        stream.calls.append(f"record {self.where}")

    def wait(self, stream):
        stream.calls.append(f"{stream.name} waits for {self.where}")

    def query(self):
        return self.complete

    def synchronize(self):
        self.complete = True


class Runtime:
    def __init__(self):
        self.code = 0
        self.registered = {}

    def cudaHostRegister(self, address, nbytes, flags):
        if self.code == 0:
            self.registered[address] = nbytes
        return self.code

    def cudaHostUnregister(self, address):
        return 0 if self.registered.pop(address, None) else 1


class Block:
    """Device memory in a tensor's place."""

    is_cuda = True
    is_recorded = False

    def record_stream(self, stream):
        self.is_recorded = True


class LaggingAllocator:
    """torch's caching allocator under a device that lags behind the host: a freed block that another stream was
    recorded on is not reused, since that stream's work is not seen done."""

    def __init__(self):
        self.free, self.num_blocks = [], 0

    def take(self):
        if self.free:
            return self.free.pop()
        self.num_blocks += 1
        return Block()

    def give(self, block):
        if not block.is_recorded:
            self.free.append(block)


@pytest.fixture
def calls():
    return []


@pytest.fixture
def runtime():
    return Runtime()


@pytest.fixture
def current():
    return threading.local()  # a new thread's device is 0


@pytest.fixture
def other_stream(calls, current):
    return Stream("own", calls, current)


@pytest.fixture
def two_devices(monkeypatch, calls, current):
    """torch's accelerator, whatever it is called: two devices whose streams write down what is asked of them."""
    compute = Stream("compute", calls, current)
    fakes = {
        "current_accelerator": lambda check_available=False: torch.device("cuda"),
        "device_count": lambda: 2,
        "current_device_index": lambda: getattr(current, "device", 1),
        "set_device_index": lambda device: setattr(current, "device", device.index),
        "current_stream": lambda device: getattr(current, "stream", None) or compute,
        "synchronize": lambda device: calls.append(f"synchronize {device}"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.accelerator, name, fake)
    monkeypatch.setattr(torch, "Stream", lambda device: Stream("lane", calls, current))
    monkeypatch.setattr(torch, "Event", Marker)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: getattr(current, "captures", False))


@pytest.fixture
def accelerator(two_devices, monkeypatch, runtime, current):
    @contextlib.contextmanager
    def on(device):
        before, current.device = getattr(current, "device", 0), device.index
        yield
        current.device = before

    fakes = {"device": on, "cudart": lambda: runtime, "CudaError": lambda code: f"error {code}", "Event": Marker}
    fakes["current_stream"] = torch.accelerator.current_stream
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    accelerator = CudaAccelerator(torch.device("cuda"))
    yield accelerator
    accelerator.close()


def test_a_job_waits_for_compute_on_the_device_and_marks_its_end(accelerator, calls):
    lane = accelerator.lane("fetch")
    before = accelerator.record_compute()
    event = lane.submit(lambda: calls.append("job"), after=[before], holds=[torch.zeros(1)])
    event.check_launched()
    assert calls == ["record compute 0", "lane waits for compute 0", "job", "record lane 3"]
    assert not event.done() and not before.done()
    accelerator.wait_on_compute(event)
    assert calls[4:] == ["compute waits for lane 3"]
    event.wait()
    assert event.done()


def test_a_lane_is_refused_what_is_about_compute(accelerator, calls):
    """On its thread the current stream is its own, which orders nothing after compute."""
    marks = []
    for call in (accelerator.record_compute, lambda: accelerator.wait_on_compute(marks[0])):
        with pytest.raises(InternalError, match="was called on tiered_zero update, whose current stream is not"):
            accelerator.lane("update").submit(call).wait()
        marks.append(accelerator.record_compute())
    calls.clear()
    accelerator.lane("update").submit(lambda: marks.append(accelerator.record())).wait()
    assert calls[:1] == ["record lane 0"]


def test_another_stream_than_the_engines_is_refused(accelerator, other_stream):
    accelerator.check_compute()
    with (
        other_stream,
        pytest.raises(ModelError, match="was made, <stream compute>; found <stream own>"),
    ):
        accelerator.check_compute()


def test_a_graph_that_is_captured_is_refused_with_the_reason(accelerator, current):
    current.captures = True
    with pytest.raises(ModelError, match="outside of a graph's capture on cuda:1: a graph replays the addresses"):
        accelerator.check_compute()


def test_memory_is_reused_at_once_while_the_device_lags(accelerator):
    """A fetch a unit, its use ordered after it: the host runs ahead, and the budget of one unit holds."""
    allocator = LaggingAllocator()
    for _ in range(20):
        block = allocator.take()
        event = accelerator.lane("fetch").submit(lambda: None, holds=[block])
        accelerator.wait_on_compute(event)
        assert not event.done(), "the device lags"
        allocator.give(block)
    assert allocator.num_blocks == 1


def test_close_waits_for_the_device_after_its_threads(accelerator, calls, monkeypatch, caplog):
    accelerator.lane("fetch").submit(lambda: calls.append("job"))
    accelerator.close()
    assert calls == ["job", "record lane 1", "synchronize cuda:1"]

    def fail(device):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.accelerator, "synchronize", fail)
    accelerator.close()
    assert "waiting for the last work on cuda:1 failed" in caplog.text


def test_host_memory_is_pinned_on_the_lanes_device(accelerator, runtime, current, monkeypatch):
    devices = []
    pin = runtime.cudaHostRegister
    with torch.cuda.device(torch.device("cuda", 0)):
        monkeypatch.setattr(runtime, "cudaHostRegister", lambda *args: devices.append(current.device) or pin(*args))
        accelerator.pin(4096, 4096)
    assert devices == [1]


def test_a_failed_job_has_nothing_on_its_way(accelerator, calls):
    event = accelerator.lane("fetch").submit(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        accelerator.wait_on_compute(event)
    assert calls == ["lane synchronize"] and event.done()


def test_a_copy_that_must_finish_waits_for_its_own_stream(accelerator, calls):
    target, source = torch.zeros(4, requires_grad=True), torch.ones(4)
    accelerator.lane("fetch").submit(lambda: accelerator.copy(target, source, finish=True)).check_launched()
    assert calls[0] == "lane synchronize"
    assert torch.equal(target.data, source) and target._version == 0


def test_synchronize_drains_the_queues_first(accelerator, calls):
    accelerator.lane("fetch").submit(lambda: calls.append("job"))
    accelerator.synchronize()
    assert calls == ["job", "record lane 1", "record lane 2", "synchronize cuda:1"]


def test_the_current_device_is_the_default(accelerator):
    assert accelerator.device == torch.device("cuda", 1)


def test_a_device_that_is_not_there_is_refused(accelerator):
    with pytest.raises(ConfigError, match="cuda:2; there are 2"):
        CudaAccelerator(torch.device("cuda", 2))
    with pytest.raises(ConfigError, match=r"asks for xpu; this torch \(.*\) finds cuda\. Set it to cuda, or install"):
        StreamAccelerator(torch.device("xpu"))


def test_pinning_is_exact_and_undone(accelerator, runtime):
    assert accelerator.pin(4096, 12_288)
    assert runtime.registered == {4096: 12_288}
    accelerator.unpin(4096)
    assert not runtime.registered


def test_pinning_that_fails_is_said_once_and_its_error_cleared(accelerator, runtime, monkeypatch, caplog):
    launches = []

    def launch(*args, device):
        launches.append(device)
        raise RuntimeError("CUDA error: out of memory")  # the stale error, reported by the first launch after it

    monkeypatch.setattr(torch, "zeros", launch)
    runtime.code = 2
    with caplog.at_level(logging.WARNING, "tiered_zero"):
        assert not accelerator.pin(4096, GIB)
        assert not accelerator.pin(8192, GIB)
    assert launches == [accelerator.device] * 2
    [record] = caplog.records
    assert "pageable" in record.getMessage() and "1.0 GiB" in record.getMessage() and "error 2" in record.getMessage()


def test_a_device_that_cannot_pin_says_so_once(two_devices, caplog):
    accelerator = StreamAccelerator(torch.device("cuda"))
    assert accelerator.pins and not accelerator.pin(4096, GIB) and not accelerator.pin(8192, GIB)
    [record] = caplog.records
    assert "1.0 GiB failed (torch has no call that registers host memory with cuda)" in record.getMessage()
    accelerator.close()
