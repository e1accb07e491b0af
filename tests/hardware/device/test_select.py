"""Which accelerator a name gives."""

import pytest
import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.cpu import CpuAccelerator
from tiered_zero.hardware.device.select import build_accelerator


def test_cpu_by_name_and_by_default(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("cpu", "auto"):
        accelerator = build_accelerator(name, poison=True, delay_seed=1)
        assert isinstance(accelerator, CpuAccelerator)
        accelerator.close()


@pytest.mark.parametrize("name", ["gpu", "", "mps", "cuda:x"])
def test_another_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"tiered_zero.device is one of auto, cpu, cuda or cuda:N"):
        build_accelerator(name)


def test_cuda_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="torch finds no CUDA device"):
        build_accelerator("cuda")
    with pytest.raises(ConfigError, match="delays test the CPU"):
        build_accelerator("cuda", delay_seed=1)
