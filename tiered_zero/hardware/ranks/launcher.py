"""Facts of this process from the launcher and torch.distributed: its rank, the other ranks, how to reach them."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch.distributed as dist

from tiered_zero.errors import ModelError

_INTERFACE_KEY = "GLOO_SOCKET_IFNAME"


def is_initialized() -> bool:
    """Whether torch.distributed has a process group."""
    return dist.is_available() and dist.is_initialized()


def get_rank() -> int:
    """This process's rank; 0 without a process group."""
    return dist.get_rank() if is_initialized() else 0


def get_world_size() -> int:
    """The number of ranks; 1 without a process group."""
    return dist.get_world_size() if is_initialized() else 1


def barrier() -> None:
    """Wait for the other ranks of torch.distributed's group, if there are any."""
    if get_world_size() > 1:
        dist.barrier()


def launched_number(variable: str, default: int) -> int:
    """The number in a variable of the launcher, as torchrun sets them."""
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else default


def launched_world_size() -> int:
    """The launcher's WORLD_SIZE, else 1. Raises ModelError for what is no number of ranks."""
    launched = os.environ.get("WORLD_SIZE", "") or "1"
    if not launched.isdecimal() or int(launched) < 1:
        raise ModelError(
            f"The environment variable WORLD_SIZE was expected as a number of ranks, from 1; found {launched!r}. Start "
            "the script with torchrun --nproc-per-node N, or unset the variable for one rank."
        )
    return int(launched)


def world_size_here() -> int:
    """The ranks that a run in this process has: torch.distributed's, else the launcher's WORLD_SIZE, else 1."""
    return get_world_size() if is_initialized() else launched_world_size()


def rank_here() -> int:
    """This process's rank: torch.distributed's, else the launcher's RANK, else 0."""
    return get_rank() if is_initialized() else launched_number("RANK", 0)


def local_rank() -> int:
    """This process's rank on its host: the launcher's LOCAL_RANK, else 0."""
    return launched_number("LOCAL_RANK", 0)


def local_world_size() -> int:
    """Ranks on this host: the launcher's LOCAL_WORLD_SIZE, else all of them."""
    return max(1, launched_number("LOCAL_WORLD_SIZE", world_size_here()))


def is_one_host() -> bool:
    """Whether the launcher has all ranks on this host."""
    return world_size_here() in (1, local_world_size())


def launch_name() -> str:
    """The name of torchrun's run, which its restarts keep; "" without torchrun."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "")


def num_restarts() -> int:
    """How often torchrun's agent on this host has restarted the ranks."""
    return launched_number("TORCHELASTIC_RESTART_COUNT", 0)


@contextmanager
def network_interface() -> Iterator[None]:
    """Have gloo take the interface by which the ranks reach each other: loopback where all are on this host, else the
    one that has the route to MASTER_ADDR. It looks its interface up by a variable, else by the host's name, which may
    not resolve, or may resolve to loopback. A variable that is set stays."""
    before = os.environ.get(_INTERFACE_KEY)
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")] if is_one_host() else _routed()
    try:
        if before is None and names:
            os.environ[_INTERFACE_KEY] = names[0]
        yield
    finally:
        if before is None:
            os.environ.pop(_INTERFACE_KEY, None)


def _routed() -> list[str]:
    """The interface with the address from which packets to MASTER_ADDR start; none where there is no route."""
    try:
        found = socket.getaddrinfo(os.environ.get("MASTER_ADDR", ""), 9, type=socket.SOCK_DGRAM)
        family, kind, protocol, _, address = found[0]
        with socket.socket(family, kind, protocol) as sender:
            sender.connect(address)  # sends nothing
            own = sender.getsockname()[0]
    except (OSError, IndexError):
        return []
    return [name for name, addresses in psutil.net_if_addrs().items() if own in [each.address for each in addresses]]
