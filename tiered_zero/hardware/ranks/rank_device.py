"""Choose the device of each rank."""

from __future__ import annotations

import os

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.select import find_device
from tiered_zero.hardware.probe import PROC
from tiered_zero.hardware.ranks.agreement import agree
from tiered_zero.hardware.ranks.backends import device_backend
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import local_rank
from tiered_zero.system.process import read_text

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that change which devices indices mean."""


def choose_device(ranks: Collectives, name: str) -> None:
    """Make this rank's device the calling thread's current one: the index in `name` (`tiered_zero.device`), else
    LOCAL_RANK. Driver thread, before the run is planned, on every rank at the same time. Does nothing for one rank, and
    on the CPU. Raises ConfigError, on every rank, if there is no such device, torch has no backend for it, or two ranks
    share one."""
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
