"""Choice of the accelerator for a config."""

from __future__ import annotations

from contextlib import suppress

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.device.cpu import CpuAccelerator
from tiered_zero.hardware.device.cuda import CudaAccelerator


def build_accelerator(name: str = "auto", poison: bool = False, delay_seed: int | None = None) -> Accelerator:
    """`name`: "auto" (CUDA where torch finds it), "cpu", "cuda", "cuda:N". `delay_seed`: CPU. Raises ConfigError."""
    device = find_device(name)
    if device.type == "cpu":
        return CpuAccelerator(poison, delay_seed)
    if delay_seed is not None:
        raise ConfigError("seeded delays test the CPU accelerator; leave them out with tiered_zero.device cuda")
    return CudaAccelerator(device, poison)


def find_device(name: str) -> torch.device:
    """The device that `tiered_zero.device` names: "auto", "cpu", "cuda" or "cuda:N". Raises ConfigError."""
    wanted = ("cuda" if torch.cuda.is_available() else "cpu") if name == "auto" else name
    with suppress(RuntimeError):
        if (device := torch.device(wanted)).type in ("cpu", "cuda"):
            return device
    raise ConfigError(f"tiered_zero.device is one of auto, cpu, cuda or cuda:N, not {name!r}")


def shares_cores(name: str, delay_seed: int | None) -> bool:
    """Whether compute on that device takes the cores of the update: the CPU, unless delays simulate another machine."""
    return find_device(name).type == "cpu" and delay_seed is None
