"""Choose the accelerator that a config names, and the device of each rank."""

from __future__ import annotations

import os
from contextlib import suppress

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.accelerator import Accelerator, CpuAccelerator
from tiered_zero.hardware.device.streams import CudaAccelerator, StreamAccelerator
from tiered_zero.hardware.probe import PROC
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import device_backend, local_rank
from tiered_zero.system import read_text

_WITHOUT_STREAMS = frozenset({"meta", "mps"})
"""Device types without memory, or with only torch's own stream: nothing could be fetched during compute."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that change which devices indices mean."""


def build_accelerator(name: str = "auto", poison: bool = False, delay_seed: int | None = None) -> Accelerator:
    """Build the accelerator. `name`: "auto" (an accelerator if there is one), "cpu", or a torch name ("cuda", "xpu:1").
    `poison`: overwrite freed memory with NaN, for debugging. `delay_seed`: seed of random delays, on the CPU only.
    Raises ConfigError."""
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
    """Return whether compute on the device called `name` uses the update's cores: on the CPU it does, unless delays
    simulate another device."""
    return find_device(name).type == "cpu" and delay_seed is None


def choose_device(ranks: Collectives, name: str) -> None:
    """Make this rank's device the current one of the calling thread. Its index is that in `name`
    (`tiered_zero.device`), or else LOCAL_RANK. Driver thread, before the run is planned, on every rank at the same
    time. Does nothing for one rank, and on the CPU. Raises ConfigError, on every rank, if there is no such device,
    torch has no backend for it, or two ranks share a device."""
    if ranks.world_size == 1 or name == "cpu":
        return
    if (device := find_device(name)).type == "cpu":
        return
    own: list[str] = []

    def choose() -> str:
        own.append(_choose(device))
        return own[0]

    found = agree(ranks, "the choice of a device", choose)
    together = [rank for rank, each in enumerate(found) if each == found[ranks.rank]]
    if len(together) > 1:
        texts = ", ".join(map(str, together))
        raise ConfigError(
            f"tiered_zero.device: expected a device of its own for each rank of a host; found ranks {texts} on "
            f"{torch.accelerator.current_accelerator()}:{torch.accelerator.current_device_index()}. Write "
            f"{device.type} without an index, which gives each rank the device of its LOCAL_RANK."
        )


def _choose(device: torch.device) -> str:
    """Make the device current, and return a name that is unique among all hosts."""
    device_backend(device)
    found = torch.accelerator.current_accelerator(check_available=True)
    count = 0 if found is None or found.type != device.type else torch.accelerator.device_count()
    index = local_rank() if device.index is None else device.index
    if index >= count:
        asked = f"the rank with LOCAL_RANK {index}" if device.index is None else f"{device}, as the config says"
        raise ConfigError(
            f"tiered_zero.device: expected {device.type}:{index} for {asked}; this process finds {count} such devices. "
            f"Start as many processes on a host as it has devices (torchrun --nproc-per-node {max(count, 1)}); where "
            f"each process is shown a device of its own, as by CUDA_VISIBLE_DEVICES, name it: {device.type}:0."
        )
    torch.accelerator.set_device_index(index)
    properties = getattr(torch.get_device_module(device.type), "get_device_properties", lambda _: None)(index)
    unique = getattr(properties, "uuid", None)
    if unique is None:
        unique = [os.environ.get(variable) for variable in VISIBLE], index
    return f"{read_text(PROC / 'sys/kernel/random/boot_id')} {device.type} {unique}"
