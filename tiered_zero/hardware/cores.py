"""Bind the threads of a rank to its share of the processors that it has in common with other ranks."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from tiered_zero.hardware.probe import PROC, SYSTEM
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.system import read_text

logger = logging.getLogger("tiered_zero")

Place = tuple[int, int, int]
"""A processor's NUMA node, package and core. Processors with the same place are threads of one core."""


def bind_to_share(ranks: Collectives, device: torch.device, system: Path = SYSTEM) -> None:
    """Bind this process, and the threads and children that it starts later, to its share of processors. Collective.

    Ranks of one host that may run on exactly the same processors divide these; ranks that the launcher has bound to
    different processors stay as they are. Each rank gets whole cores, on its GPU's NUMA node if that is known, until
    the process ends. Does nothing if there are fewer processors than ranks.
    """
    if ranks.world_size == 1 or not hasattr(os, "sched_setaffinity"):
        return
    cpus, host = sorted(os.sched_getaffinity(0)), read_text(PROC / "sys/kernel/random/boot_id")
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
    """Return the processors of rank `index` of `len(nodes)` ranks; an empty list if there are too few.

    `places`: processor -> place, of the processors to divide. `nodes`: the NUMA node of each rank's GPU; if one is
    unknown (None), all nodes are ignored. Each rank gets a range in the order of places: threads of a core, and cores
    of a node, stay together.
    """
    ordered = sorted(places, key=lambda cpu: (places[cpu], cpu))
    num_sharing, number = len(nodes), index
    if None not in nodes:
        node = nodes[index]
        ordered = [cpu for cpu in ordered if places[cpu][0] == node]
        num_sharing, number = nodes.count(node), nodes[:index].count(node)
    if len(ordered) < num_sharing:
        return []
    return ordered[number * len(ordered) // num_sharing : (number + 1) * len(ordered) // num_sharing]


def place_of(cpu: int, system: Path = SYSTEM) -> Place:
    """Return the place of the processor `cpu`, with zeros for what the system does not tell."""
    folder = system / "devices/system/cpu" / f"cpu{cpu}"
    nodes = [entry.name[4:] for entry in folder.glob("node[0-9]*")]
    package, core = (read_text(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    return int(nodes[0]) if nodes else 0, _number(package) or 0, _number(core) or 0


def gpu_node(device: torch.device, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of an accelerator; None for the CPU, or if torch or the system does not tell."""
    find = getattr(torch.get_device_module(device), "get_device_properties", None)
    if device.type == "cpu" or find is None:
        return None
    found = find(device)
    domain, bus, slot = (getattr(found, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    return pci_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0", system)  # some devices lack one of the three


def near_cpus(device: torch.device, system: Path = SYSTEM) -> set[int]:
    """Return those of this process's processors that are on an accelerator's NUMA node: host memory that they touch
    first is near the device. The set is empty if the system does not tell, or if all or none of the processors are on
    that node."""
    if (node := gpu_node(device, system)) is None or not hasattr(os, "sched_getaffinity"):
        return set()
    cpus = os.sched_getaffinity(0)
    near = {cpu for cpu in cpus if place_of(cpu, system)[0] == node}
    return near if near < cpus else set()


def pci_node(address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of the PCI device at `address` ("0000:3b:00.0"); None if the system does not tell."""
    node = _number(read_text(system / "bus/pci/devices" / address / "numa_node"))
    return node if node is not None and node >= 0 else None


def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None
