"""Which accelerator a name gives."""

import pytest
import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.hardware.runtime import build_accelerator, find_device


@pytest.fixture
def finds(monkeypatch):
    """Let torch find that type of accelerator."""

    def find(name):
        device = None if name is None else torch.device(name)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: device)

    return find


@pytest.mark.parametrize("found", [None, "mps"])
def test_cpu_by_name_and_where_there_is_no_accelerator_with_streams(finds, found):
    finds(found)
    for name in ("cpu", "auto"):
        accelerator = build_accelerator(name, poison=True, delay_seed=1)
        assert isinstance(accelerator, CpuAccelerator)
        accelerator.close()


def test_any_accelerator_of_torch_by_default_and_by_index(finds):
    finds("xpu")
    assert find_device("auto") == torch.device("xpu")
    assert find_device("xpu:1") == torch.device("xpu", 1)


@pytest.mark.parametrize("name", ["gpu", "", "mps", "meta", "cuda:x"])
def test_another_name_is_refused(name):
    with pytest.raises(ConfigError, match=r"is one of auto, cpu, or a type of accelerator with streams .* found"):
        build_accelerator(name)


def test_a_device_that_is_not_there_is_refused(finds):
    finds(None)
    with pytest.raises(ConfigError, match=r"finds only the CPU\. Set it to cpu, or install"):
        build_accelerator("cuda")
    with pytest.raises(ConfigError, match="delays test the CPU"):
        build_accelerator("cuda", delay_seed=1)
