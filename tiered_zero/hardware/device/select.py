"""Choose the accelerator that a config names."""

from __future__ import annotations

from contextlib import suppress

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.accelerator import Accelerator, CpuAccelerator
from tiered_zero.hardware.device.cuda import CudaAccelerator
from tiered_zero.hardware.device.streams import StreamAccelerator

_WITHOUT_STREAMS = frozenset({"meta", "mps"})
"""Device types without memory, or with only torch's own stream: nothing could be fetched during compute."""


def build_accelerator(name: str = "auto", poison: bool = False, delay_seed: int | None = None) -> Accelerator:
    """Build the accelerator. `name`: "auto" (an accelerator if there is one), "cpu", or a torch name ("cuda", "xpu:1").
    `delay_seed`: CPU only. Raises ConfigError."""
    device = find_device(name)
    if device.type == "cpu":
        return CpuAccelerator(poison, delay_seed)
    if delay_seed is not None:
        raise ConfigError(f"seeded delays test the CPU accelerator; leave them out with tiered_zero.device {name}")
    return (CudaAccelerator if device.type == "cuda" else StreamAccelerator)(device, poison)


def find_device(name: str) -> torch.device:
    """Return the device that `tiered_zero.device` names, whether it exists or not. Raises ConfigError."""
    with suppress(RuntimeError):
        device = _own_device() if name == "auto" else torch.device(name)
        if device.type not in _WITHOUT_STREAMS:
            return device
    raise ConfigError(
        "tiered_zero.device is one of auto, cpu, or a type of accelerator with streams and perhaps an index, as torch "
        f"names it (cuda, cuda:1, xpu); found {name!r}"
    )


def _own_device() -> torch.device:
    found = torch.accelerator.current_accelerator(check_available=True)
    return torch.device("cpu") if found is None or found.type in _WITHOUT_STREAMS else found


def shares_cores(name: str, delay_seed: int | None) -> bool:
    """Return whether compute on that device uses the update's cores: only on the CPU, unless delays simulate a
    device."""
    return find_device(name).type == "cpu" and delay_seed is None
