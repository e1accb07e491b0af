"""The tests of a GPU (`pytest -m gpu`) run on the lagging device, so that they are right when there is one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu import test_cuda, test_split
from tests.lagging.child import on_device
from tests.lagging.cuda import LaggingDevice
from tiered_zero.hardware.device.streams import CudaAccelerator

NAMES = [name for name in vars(test_cuda) if name.startswith("test_")]


@pytest.mark.parametrize("name", NAMES)
@on_device
def test_the_accelerator(device: LaggingDevice, name: str):
    """What occupies a GPU takes its time here, too, but no core."""

    def occupy(place: torch.device) -> None:
        device.set(kernel_s=0.02)
        torch.ones(1, device=place)
        device.set(kernel_s=0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(test_cuda, "occupy", occupy)
        accelerator = CudaAccelerator(torch.device("cuda"), poison=True)
        getattr(test_cuda, name)(accelerator)
        accelerator.close()


@pytest.mark.parametrize(("param", "clipping"), [("none", 0.0), ("nvme", 0.5)])
@on_device
def test_state_on_several_tiers(device: LaggingDevice, param: str, clipping: float, tmp_path: Path):
    """Kernels and copies are late whatever their size, so the model is small."""
    device.set(delay_seed=1)
    size = test_split.Size(width=64, vocab=256, sub_group_size=1500, host_limit="100KiB", steps=4)
    test_split.test_overlapped_has_the_bits_of_barrier(param, clipping, tmp_path, size)
