"""Collectives, and the process group: of one rank in this version."""

from __future__ import annotations

import ctypes
import functools
import logging
import os
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol, final

import torch
import torch.distributed as dist

from tiered_zero.errors import ModelError

logger = logging.getLogger("tiered_zero")

_INTERFACE_KEY = "GLOO_SOCKET_IFNAME"


class Collectives(Protocol):
    """What the ranks of a run exchange. Driver thread only: every rank makes the same calls in the same order."""

    rank: int
    world_size: int

    def all_reduce_norm(self, norm: torch.Tensor) -> torch.Tensor:
        """The L2 norm over every rank's elements, from `norm` (0-d fp32) of this rank's. Not finite on any rank where
        it is not finite on one, so that all skip the same steps."""

    def close(self) -> None:
        """Free what this has created. Idempotent."""


@final
class SingleRank:
    """Rank 0 of 1: every collective is the identity, and changes no bit."""

    rank = 0
    world_size = 1

    def __init__(self) -> None:
        self._owns_group = False

    def ensure_process_group(self, dist_init_required: bool | None = None) -> None:
        """Let scripts that ask torch.distributed for a rank go on: create a private one-rank group if there is none.

        It opens no connection: an in-memory store, the loopback interface. `dist_init_required=False` creates none; a
        group that exists is respected. Raises ModelError where more than one rank runs.
        """
        launched = os.environ.get("WORLD_SIZE", "")
        self._check_world_size("the launcher's WORLD_SIZE", int(launched) if launched.isdigit() else 1)
        if not dist.is_available():
            return
        if dist.is_initialized():
            self._check_world_size("torch.distributed's group", dist.get_world_size())
        elif dist_init_required is not False:
            self._create_group()

    def all_reduce_norm(self, norm: torch.Tensor) -> torch.Tensor:
        return norm

    def close(self) -> None:
        """Destroy the group if this object created it. Idempotent."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def _create_group(self) -> None:
        hook = sys.excepthook
        try:
            with _loopback():
                dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("no torch.distributed group was created, scripts that ask for a rank will fail: %s", error)
        else:
            self._owns_group = True
            _keep_group_in_children()
            logger.info("torch.distributed: made a process group of one rank, without a connection")
        finally:
            sys.excepthook = hook  # torch's prefixes every traceback with [rank0], which says nothing of one rank

    @staticmethod
    def _check_world_size(source: str, world_size: int) -> None:
        if world_size > 1:
            raise ModelError(
                f"this version trains with one rank; {source} has {world_size}. Start the script with one process "
                "(python script.py, or --num_gpus 1)."
            )


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


@functools.cache
def _keep_group_in_children() -> None:
    """Once a process. A forked child has none of gloo's threads, and the destructor of a group joins them."""

    def keep() -> None:
        if dist.is_initialized():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))

    os.register_at_fork(after_in_child=keep)


@contextmanager
def _loopback() -> Iterator[None]:
    """Gloo looks its interface up by this variable, else by the host's name, which may not resolve."""
    before = os.environ.get(_INTERFACE_KEY)
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]
    if before is None and names:
        os.environ[_INTERFACE_KEY] = names[0]
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_INTERFACE_KEY, None)
