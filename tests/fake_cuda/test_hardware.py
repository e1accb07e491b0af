"""Pinning, and the allocators that torch can be told to use."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
import torch

from tests.fake_cuda.child import FakeCuda, FakeCudaProcesses, on_fake_cuda
from tests.fake_cuda.training import PLACEMENTS, Tower, build, step
from tiered_zero.sizes import MIB

pytestmark = pytest.mark.cuda_wheel


class Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@pytest.mark.parametrize("pinnable", [0, 1 * MIB])
@on_fake_cuda
def test_memory_that_cannot_be_pinned_is_used_as_it_is(device: FakeCuda, pinnable: int, swap_path: str) -> None:
    device.set_pinnable(pinnable)
    logging.getLogger("tiered_zero").addHandler(messages := Messages())
    with build(Tower(num_layers=6, width=256), "cpu/cpu", swap_path) as engine:
        for _ in range(3):
            step(engine)
    counts = device.counts()
    assert counts["pageable_copies"] > 6 and counts["registered_nbytes"] == 0
    assert (counts["registrations"] > 0) == (pinnable > 0)
    assert sum("host memory is pageable" in text for text in messages.texts) == 1, messages.texts


def train_everywhere(device: FakeCuda, swap_path: str, backend: str) -> None:
    assert torch.cuda.memory.get_allocator_backend() == backend
    for placement in PLACEMENTS:
        with build(Tower(num_layers=6, width=256), placement, swap_path) as engine:
            for _ in range(3):
                step(engine)
    assert device.counts()["misuses"] == 0, "stderr names them"


@pytest.mark.parametrize(
    ("setting", "backend"), [("expandable_segments:True", "native"), ("backend:cudaMallocAsync", "cudaMallocAsync")]
)
def test_other_allocators_serve(fake_cuda: FakeCudaProcesses, setting: str, backend: str, swap_path: str) -> None:
    environment = {"PYTORCH_CUDA_ALLOC_CONF": setting}
    fake_cuda.run(train_everywhere, environment, swap_path=swap_path, backend=backend)


@on_fake_cuda
def test_the_doctor_finds_the_device_and_pins(device: FakeCuda, swap_path: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tiered_zero", "doctor", swap_path], capture_output=True, text=True, check=True
    )
    print(done.stdout)
    lines = {line[5:24].strip(): line[:4].strip() for line in done.stdout.splitlines()}
    assert lines["accelerator"] == lines["pinned memory"] == "ok", done.stdout
