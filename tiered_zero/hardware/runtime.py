"""Choose the device and the processors of a rank, and define `Runtime`: the shared objects of a run."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from tiered_zero.errors import ConfigError
from tiered_zero.hardware.device.accelerator import Accelerator, CpuAccelerator
from tiered_zero.hardware.device.streams import CudaAccelerator, StreamAccelerator
from tiered_zero.hardware.probe import PROC, SYSTEM, Place, gpu_node, place_of
from tiered_zero.hardware.ranks.collectives import Collectives, agree
from tiered_zero.hardware.ranks.launcher import device_backend, local_rank
from tiered_zero.system import boot_id
from tiered_zero.telemetry.spans import Ledger, Recorder

logger = logging.getLogger("tiered_zero")

_WITHOUT_STREAMS = frozenset({"meta", "mps"})
"""Device types that are refused: meta has no memory; mps has only one stream, so no fetch can run during compute."""

VISIBLE = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")
"""Environment variables that select the visible devices, and so change the devices' indices."""


def build_accelerator(name: str = "auto", poison: bool = False, delay_seed: int | None = None) -> Accelerator:
    """Build the accelerator. `name`: "auto" (an accelerator if there is one), "cpu", or a torch name ("cuda", "xpu:1").
    `poison`: whether to overwrite freed memory with NaN. `delay_seed`: the seed of random delays, on the CPU only;
    None: no delays. Raises ConfigError if the device cannot be used."""
    device = find_device(name)
    if device.type == "cpu":
        return CpuAccelerator(poison, delay_seed)
    if delay_seed is not None:
        raise ConfigError(f"seeded delays test the CPU accelerator; leave them out with tiered_zero.device {name}")
    return (CudaAccelerator if device.type == "cuda" else StreamAccelerator)(device, poison)


def find_device(name: str) -> torch.device:
    """Convert `name`, a value of `tiered_zero.device`, to a torch device. The device need not exist. Raises ConfigError
    for an unknown name, and for a device without streams."""
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
    """Return whether the device `name` is the CPU, so that compute and the update use the same cores. Return False with
    a `delay_seed`, because the CPU then simulates a separate device."""
    return find_device(name).type == "cpu" and delay_seed is None


def choose_device(ranks: Collectives, name: str) -> None:
    """Make this rank's device current on the calling thread. The device's index comes from `name`
    (`tiered_zero.device`), or else from LOCAL_RANK. Every rank calls this at the same time, before the run is planned.
    Raises ConfigError on every rank if a device is missing or has no backend, and on ranks that share a device."""
    if ranks.world_size == 1 or name == "cpu":
        return
    if (device := find_device(name)).type == "cpu":
        return
    found = agree(ranks, "the choice of a device", lambda: _choose(device))
    together = [rank for rank, each in enumerate(found) if each == found[ranks.rank]]
    if len(together) > 1:
        texts = ", ".join(map(str, together))
        raise ConfigError(
            f"tiered_zero.device: expected a device of its own for each rank of a host; found ranks {texts} on "
            f"{torch.accelerator.current_accelerator()}:{torch.accelerator.current_device_index()}. Write "
            f"{device.type} without an index, which gives each rank the device of its LOCAL_RANK."
        )


def _choose(device: torch.device) -> str:
    """Make this rank's device current, and return a name that is unique among the devices of all hosts."""
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
    return f"{boot_id()} {device.type} {unique}"


def bind_to_share(ranks: Collectives, device: torch.device, system: Path = SYSTEM) -> None:
    """Bind this process, with its threads and children, to its share of the host's processors. Every rank calls this.
    Ranks on one host that may use exactly the same processors divide them, if there are enough. Nothing changes for
    other ranks."""
    if ranks.world_size == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cpus, host = sorted(os.sched_getaffinity(0)), boot_id()
    own = {"host": host, "cpus": cpus, "node": gpu_node(device, system)}
    found = [json.loads(message) for message in ranks.exchange(json.dumps(own).encode(), "processors")]
    together = [rank for rank, each in enumerate(found) if (each["host"], each["cpus"]) == (host, cpus)]
    share = share_of(
        {cpu: place_of(cpu, system) for cpu in cpus},
        [found[rank]["node"] for rank in together],
        together.index(ranks.rank),
    )
    if len(together) == 1 or not share:
        return
    for thread in [entry.name for entry in (PROC / "self/task").iterdir()]:
        with suppress(OSError):  # the thread has ended
            os.sched_setaffinity(int(thread), share)
    logger.info("rank %d of %d runs on processors %s", ranks.rank, ranks.world_size, ", ".join(map(str, share)))


def share_of(places: Mapping[int, Place], nodes: Sequence[int | None], index: int) -> list[int]:
    """Return the processors for rank `index` of `len(nodes)` ranks; an empty list if there are too few processors.
    `places`: the processors to divide, each with its place. `nodes`: the NUMA node of each rank's GPU. If all nodes are
    known, the ranks of a node divide its processors. If a node is None, all ranks divide all processors."""
    ordered = sorted(places, key=lambda cpu: (places[cpu], cpu))  # neighbours share a core or a node
    num_sharing, number = len(nodes), index
    if None not in nodes:
        node = nodes[index]
        ordered = [cpu for cpu in ordered if places[cpu][0] == node]
        num_sharing, number = nodes.count(node), nodes[:index].count(node)
    if len(ordered) < num_sharing:
        return []
    return ordered[number * len(ordered) // num_sharing : (number + 1) * len(ordered) // num_sharing]


@dataclass(frozen=True, kw_only=True)
class Runtime:
    """The objects that the parts of a run share. One per run."""

    accelerator: Accelerator
    ledger: Ledger  # counts the bytes on each tier
    recorder: Recorder  # of timed spans
    collectives: Collectives
