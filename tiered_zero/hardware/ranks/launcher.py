"""Read rank, number of ranks, network interface and backends from the launcher's environment and torch.distributed."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.distributed as dist

from tiered_zero.errors import ConfigError, ModelError

_INTERFACE_KEY = "GLOO_SOCKET_IFNAME"

HOST_BACKEND = "gloo"
"""The torch.distributed backend for control messages and for tensors in host memory."""

all_gather_single: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
"""torch's function (output, input, group) that gathers one tensor from each rank into one output tensor. torch 2.11 and
2.12 call it `all_gather_into_tensor`. torch 2.13 has renamed it, and warns about the old name."""


def is_initialized() -> bool:
    """Return whether torch.distributed has a process group."""
    return dist.is_available() and dist.is_initialized()


def barrier() -> None:
    """Wait for the other ranks of torch.distributed's group, if there are any."""
    if is_initialized() and dist.get_world_size() > 1:
        dist.barrier()


def launched_number(variable: str, default: int) -> int:
    """Return the number in `variable`, which a launcher such as torchrun sets. Return `default` if there is no
    number."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def launched_world_size() -> int:
    """Return the launcher's WORLD_SIZE, or 1 if it is not set. Raises ModelError for an invalid number of ranks."""
    launched = os.environ.get("WORLD_SIZE", "") or "1"
    if not launched.isdecimal() or int(launched) < 1:
        raise ModelError(
            f"The environment variable WORLD_SIZE was expected as a number of ranks, from 1; found {launched!r}. Start "
            "the script with torchrun --nproc-per-node N, or unset the variable for one rank."
        )
    return int(launched)


def get_world_size() -> int:
    """Return the number of ranks: torch.distributed's, else the launcher's WORLD_SIZE, else 1."""
    return dist.get_world_size() if is_initialized() else launched_world_size()


def get_rank() -> int:
    """Return this process's rank: torch.distributed's, else the launcher's RANK, else 0."""
    return dist.get_rank() if is_initialized() else launched_number("RANK", 0)


def local_rank() -> int:
    """Return this process's rank on its host: the launcher's LOCAL_RANK, else 0."""
    return launched_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Return the number of ranks on this host: the launcher's LOCAL_WORLD_SIZE, else the number of all ranks."""
    return max(1, launched_number("LOCAL_WORLD_SIZE", get_world_size()))


def is_one_host() -> bool:
    """Return whether all ranks are on this host."""
    return get_world_size() in (1, local_world_size())


def launch_name() -> str:
    """Return the run id that torchrun has set; "" without torchrun. A restart does not change the id."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def num_restarts() -> int:
    """Return how often torchrun's agent on this host has restarted the ranks."""
    return launched_number("TORCHELASTIC_RESTART_COUNT", 0)


@contextmanager
def network_interface() -> Iterator[None]:
    """Make gloo use the network interface that connects the ranks, inside the `with` block. If the user has set
    GLOO_SOCKET_IFNAME, keep the user's value."""
    before = os.environ.get(_INTERFACE_KEY)
    # By itself gloo uses the host's name, which may not resolve, or resolve to loopback.
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")] if is_one_host() else _routed()
    try:
        if before is None and names:
            os.environ[_INTERFACE_KEY] = names[0]
        yield
    finally:
        if before is None:
            os.environ.pop(_INTERFACE_KEY, None)


def _routed() -> list[str]:
    """Return the network interface that sends packets to MASTER_ADDR, in a list. The list is empty if there is no
    route."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sender:
            sender.connect(address)  # sends nothing
            own = sender.getsockname()[0]
    except (OSError, IndexError):
        return []
    return [name for name, addresses in psutil.net_if_addrs().items() if own in [each.address for each in addresses]]


def device_backend(device: torch.device) -> str:
    """Return torch.distributed's backend for tensors on `device`, an accelerator. Raises ConfigError if it has none."""
    try:
        backend = dist.get_default_backend_for_device(device)
    except ValueError:
        backend = ""
    if not backend or backend == HOST_BACKEND or not dist.is_backend_available(backend):
        found = f"its backend {backend} is not in this build" if backend not in ("", HOST_BACKEND) else "it has none"
        raise ConfigError(
            f"tiered_zero.device: expected a device on which this torch ({torch.__version__}) can communicate, as "
            f"several ranks do; found {device.type}, and {found}. Install a build of torch with a backend of "
            f"torch.distributed for {device.type}, set tiered_zero.device to cpu, or start one process."
        )
    return backend
