"""Define the collectives of a run, initialize torch.distributed, and let ranks agree on the results of a call."""

from __future__ import annotations

import ctypes
import functools
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tiered_zero import errors
from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer, wait_all
from tiered_zero.errors import ModelError, RankError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.ranks.launcher import (
    HOST_BACKEND,
    get_world_size,
    is_initialized,
    is_one_host,
    launched_world_size,
    network_interface,
    num_restarts,
)
from tiered_zero.hardware.ranks.rank_failures import RankTraffic
from tiered_zero.telemetry.spans import Recorder

logger = logging.getLogger("tiered_zero")


class Collectives:
    """The collectives of a run. Used on the driver thread only; every rank makes the same calls in the same order.
    `what` names a call in errors. A call raises RankError if another rank fails or does not answer.

    This class is for a run with one rank: each result equals its input, bit for bit. `ProcessGroups` is for several
    ranks."""

    rank = 0
    world_size = 1

    def __init__(self, dist_init_required: bool | None = None) -> None:
        """Prepare the collectives. `dist_init_required`: if it is False, `open` creates no process group."""
        self.traffic = RankTraffic()
        self.recorder = Recorder()
        """Records a span with its bytes for each gather and reduction, and a span `wait_ranks` for each wait of the
        driver thread."""
        self._dist_init_required = dist_init_required
        self._owns_group = False

    def open(self) -> None:
        """Connect to the other ranks. Every rank calls this at the same time, before any other call. Call `close` even
        if this raises. With one rank, create a private process group if there is none, so that scripts can ask
        torch.distributed for a rank. Raises ModelError and RankError."""
        self._check_world_size("the launcher's WORLD_SIZE", launched_world_size())
        if not dist.is_available():
            return
        if dist.is_initialized():
            self._check_world_size("torch.distributed's group", dist.get_world_size())
        elif self._dist_init_required is not False:
            self._create_group()

    def all_gather(
        self,
        flat: torch.Tensor,
        shard: torch.Tensor,
        what: str = "parameters",
        *,
        after: Sequence[Transfer] = (),
        order: str | None = None,
        bounds: Sequence[int] | None = None,
    ) -> Transfer:
        """Start to fill `flat` [W * n] with the shards of all W ranks, in rank order. `shard` [n]: this rank's shard;
        it may be a view of `flat`. Do not use either tensor until the transfer is done. `after`: transfers that fill
        `shard`; if one fails, the returned transfer fails with the same error.

        `order`: a name for the gathered data. If the ranks' names differ, every rank raises RankError. None: names are
        not compared, and all ranks must gather in the same order. `bounds`: W + 1 offsets in `flat`, for shards of
        different sizes; None: all shards have the same size.
        """
        wait_all(after)
        if flat.data_ptr() != shard.data_ptr():
            flat.copy_(shard)
        return COMPLETED

    def reduce_scatter(
        self,
        bucket: torch.Tensor,
        room: torch.Tensor,
        what: str = "gradients",
        *,
        after: Sequence[Transfer] = (),
        bounds: Sequence[int] | None = None,
    ) -> Transfer:
        """Start to sum the buckets of all W ranks. Each rank gets one part: on rank r, part r of `bucket` [W * n]
        becomes the sum over all ranks, added in rank order. The other parts become undefined.

        `room`: a 1-D buffer for received parts: at least W - 1 elements; (W - 1) n elements allow a single exchange. Do
        not use `bucket` and `room` until the transfer is done. `after`: transfers to wait for first. `bounds`: W + 1
        offsets in `bucket`, for parts of different sizes; None: all parts have the same size.
        """
        wait_all(after)
        return COMPLETED

    def broadcast(self, tensor: torch.Tensor, source: int = 0, what: str = "values") -> None:
        """Fill `tensor` with rank `source`'s tensor. Blocks."""

    def exchange(self, data: bytes, what: str = "messages", *, kind: str = "") -> list[bytes]:
        """Return every rank's `data`, of any length, in rank order. Blocks. `what`: names the call in errors. `kind`: a
        name that must be equal on all ranks. If it differs, every rank raises RankError. Default: `what`."""
        return [data]

    def fail(self, message: str) -> None:
        """End the run on every rank: the others raise RankError with `message`. Idempotent; raises nothing."""

    def connect_device(self, accelerator: Accelerator) -> None:
        """Allow gathers and reductions of tensors on the device of `accelerator`. Every rank calls this once, at the
        same time, after `open`. Raises ConfigError and RankError."""

    def close(self) -> None:
        """End the groups and threads that this object has made. Idempotent."""
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def _create_group(self) -> None:
        hook = sys.excepthook
        try:
            with network_interface():
                dist.init_process_group(HOST_BACKEND, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        except (RuntimeError, ValueError, OSError) as error:
            logger.warning("no torch.distributed group was created, scripts that ask for a rank will fail: %s", error)
        else:
            self._owns_group = True
            _keep_group_in_children()
            logger.debug("torch.distributed: made a process group of one rank, without a connection")
        finally:
            sys.excepthook = hook  # torch's hook prefixes tracebacks with [rank0], useless with one rank

    @staticmethod
    def _check_world_size(source: str, world_size: int) -> None:
        if world_size > 1:
            raise ModelError(
                f"expected one rank; {source} has {world_size}. Start the script with one process "
                "(python script.py, or --num_gpus 1)."
            )


def ensure_many(timeout_s: float, dist_init_required: bool | None = None) -> None:
    """Initialize torch.distributed from the launcher's environment if it is not initialized. `timeout_s`: the most
    seconds to wait for another rank. `dist_init_required`: if False, raise ModelError instead. Raises ModelError and
    RankError."""
    if is_initialized():
        return
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    missing = [name for name in names if not os.environ.get(name)]
    if missing or dist_init_required is False or not dist.is_available():
        found = f"without {', '.join(missing)}" if missing else "and no process group may be made for them"
        raise ModelError(
            f"The launcher's WORLD_SIZE has {os.environ.get('WORLD_SIZE')} ranks, {found}. Start the script with "
            "torchrun --nproc-per-node N, or call torch.distributed.init_process_group() before initialize()."
        )
    rank, world_size = os.environ["RANK"], get_world_size()
    if not rank.isdecimal() or int(rank) >= world_size:
        raise ModelError(
            f"The environment variable RANK was expected from 0 to {world_size - 1}, as WORLD_SIZE is {world_size}; "
            f"found {rank!r}. torchrun sets both."
        )
    try:
        _meet(timeout_s)  # never left: the launcher's store accepts no second group
    except (RuntimeError, ValueError, OSError) as error:
        raise RankError(
            f"rank {rank}: the process group of {world_size} ranks cannot be made at {os.environ['MASTER_ADDR']}:"
            f"{os.environ['MASTER_PORT']} (MASTER_ADDR, MASTER_PORT): {str(error).rstrip('.')}. Each rank needs a "
            "process of its own, started at about the same time, and a free port of rank 0's host that all of them "
            "reach."
        ) from error


def _meet(timeout_s: float) -> None:
    """Initialize torch.distributed on a separate thread, and wait for the thread. A signal can interrupt this wait, but
    not a wait inside torch."""
    met = Completion()

    def meet() -> None:
        try:
            with network_interface():
                timeout = timedelta(seconds=timeout_s)
                dist.init_process_group(HOST_BACKEND, timeout=timeout, **_restarted_store(timeout))
            met.complete()
        except Exception as error:
            met.fail(error)

    threading.Thread(target=meet, name="tiered_zero rendezvous", daemon=True).start()
    met.wait()


def _restarted_store(timeout: timedelta) -> dict[str, Any]:
    """Return keyword arguments for `init_process_group`. After a restart of ranks on one host, the arguments include a
    store that hides the addresses of the ended ranks. Otherwise return {}."""
    if not num_restarts() or not is_one_host():  # hosts may count restarts differently
        return {}
    store, rank, world_size = next(dist.rendezvous("env://", timeout=timeout))  # type: ignore[attr-defined]
    prefixed = dist.distributed_c10d.PrefixStore(f"restart {num_restarts()}", store)
    return {"store": prefixed, "rank": rank, "world_size": world_size}


def open_default_group(timeout_s: float = 1800.0, dist_init_required: bool | None = None) -> None:
    """Initialize torch.distributed if it is not initialized: with the launcher's ranks, or with one rank if there is no
    launcher. `timeout_s`: the most seconds to wait for another rank. `dist_init_required`: if False, never initialize
    it. Raises ModelError and RankError."""
    if get_world_size() > 1:
        ensure_many(timeout_s, dist_init_required)
    else:
        Collectives(dist_init_required).open()


@functools.cache
def _keep_group_in_children() -> None:
    """Keep the default group alive in forked children. Its destructor would join gloo's threads, which a child does not
    have."""

    def keep() -> None:
        if dist.is_initialized():
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(dist.group.WORLD))

    os.register_at_fork(after_in_child=keep)


Result = TypeVar("Result")


def agree(
    ranks: Collectives,
    call: str,
    act: Callable[[], Result],
    *,
    encode: Callable[[Result], Any] = lambda result: result,
    decode: Callable[[Any], Result] = lambda value: value,
) -> list[Result]:
    """Run `act` on every rank at the same time, and return the ranks' results in rank order. Used on the driver thread;
    blocks.

    If `act` raises on one rank, every rank raises an error of the same class (other ranks: TieredZeroError for a class
    outside this package), and the run can go on. An `act` that fails between collectives must call `ranks.fail`,
    because the other ranks wait in a collective. `call`: names the act in errors. `encode`, `decode`: convert a result
    to JSON and back. Raises RankError if another rank makes a different `call`, has failed, or does not answer.
    """
    if ranks.world_size == 1:
        return [act()]
    failure: Exception | None = None
    value: Any = None
    try:
        try:
            value = encode(act())
        except Exception as error:
            failure = error
        failed = None if failure is None else [type(failure).__name__, str(failure)]
        messages = ranks.exchange(json.dumps({"call": call, "error": failed, "value": value}).encode(), call)
    except errors.RankError as error:
        if failure is None:
            raise
        raise error from failure
    except (KeyboardInterrupt, SystemExit) as interrupt:
        # the others wait for this rank's answer, or have it and continue
        ranks.fail(f"{call}: {type(interrupt).__name__}")
        raise
    if failure is not None:
        raise failure
    found = [json.loads(message) for message in messages]
    for rank, message in enumerate(found):
        if message["error"] is not None:
            kind, text = message["error"]
            raise _class_of(kind)(f"Rank {rank}: {text}")
    return [decode(message["value"]) for message in found]


def _class_of(name: str) -> type[errors.TieredZeroError]:
    """Return the error class of this package that is called `name`, or TieredZeroError if there is none."""
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, errors.TieredZeroError) else errors.TieredZeroError
