"""Read facts about the machine, such as free memory, processors and NUMA nodes. Works without cgroups, too."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import psutil
import torch

from tiered_zero.system import cgroup_folders, read_text

PROC = Path("/proc")
CGROUP = Path("/sys/fs/cgroup")
SYSTEM = Path("/sys")

Place = tuple[int, int, int]
"""(NUMA node, package, core) of a processor. Processors with the same place are threads of one core."""


def accelerator_kind() -> str | None:
    """Return the accelerator that this torch supports, such as "CUDA 13.0" or "xpu"; None if it supports only the
    CPU."""
    found = torch.accelerator.current_accelerator()
    if found is None:
        return None
    versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
    return next((f"{name} {version}" for name, version in versions.items() if version), found.type)


def accelerator_names() -> list[str]:
    """Return the product names of the accelerators that torch finds, in the order of their indices."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return []
    name = getattr(torch.get_device_module(found.type), "get_device_name", f"{found.type}:{{}}".format)
    return [str(name(index)) for index in range(torch.accelerator.device_count())]


def available_device_nbytes(device: torch.device, own: Iterable[torch.Tensor] = ()) -> int | None:
    """Return the bytes of accelerator memory that this process can still get. They include memory that torch has
    reserved but does not use. They also include the tensors in `own`, which will be freed. Return None for the CPU, or
    if torch does not report the memory."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != device.type:
        return None
    index = torch.accelerator.current_device_index() if device.index is None else device.index
    if index >= torch.accelerator.device_count():
        return None
    try:
        free, _ = torch.accelerator.get_memory_info(index)
        unused = torch.accelerator.memory_reserved(index) - torch.accelerator.memory_allocated(index)
    except RuntimeError:  # its backend has no allocator with these figures
        return None
    return free + unused + sum(tensor.nbytes for tensor in own if tensor.device == torch.device(device.type, index))


def total_host_nbytes() -> int:
    return int(psutil.virtual_memory().total)


def available_host_nbytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int:
    """Return the bytes that this process can allocate: the lesser of MemAvailable and the bytes left in its cgroups."""
    bounds = [int(psutil.virtual_memory().available)]
    for folder in cgroup_folders("memory", proc, cgroup):
        limit = _read_int(folder / "memory.max", folder / "memory.limit_in_bytes")
        usage = _read_int(folder / "memory.current", folder / "memory.usage_in_bytes")
        if limit is not None and usage is not None:
            bounds.append(limit - max(usage - _inactive_file_nbytes(folder), 0))  # the kernel drops this cache first
    return max(min(bounds), 0)


def cgroup_memory_limit_nbytes(proc: Path = PROC, cgroup: Path = CGROUP) -> int | None:
    """Return the smallest memory limit of this process's cgroups, in bytes; None if none of them has a limit."""
    folders = cgroup_folders("memory", proc, cgroup)
    limits = (_read_int(folder / "memory.max", folder / "memory.limit_in_bytes") for folder in folders)
    return min((limit for limit in limits if limit is not None), default=None)


def huge_pages(system: Path = SYSTEM) -> str | None:
    """Return the mode of transparent huge pages: "always", "madvise" (on request) or "never"; None: unknown."""
    words = read_text(system / "kernel" / "mm" / "transparent_hugepage" / "enabled").split()
    return next((word.strip("[]") for word in words if word.startswith("[")), None)  # the present mode has brackets


def _inactive_file_nbytes(folder: Path) -> int:
    stat = dict(line.split(maxsplit=1) for line in read_text(folder / "memory.stat").splitlines())
    return int(stat.get("total_inactive_file") or stat.get("inactive_file") or 0)


def _read_int(*candidates: Path) -> int | None:
    """Return the number in the first file that contains a number, or None. The text "max" is not a number."""
    texts = (read_text(path) for path in candidates)
    return next((int(text) for text in texts if text.isdigit()), None)


def place_of(cpu: int, system: Path = SYSTEM) -> Place:
    """Return the NUMA node, package and core of processor `cpu`. A number that the system does not report is 0."""
    folder = system / "devices/system/cpu" / f"cpu{cpu}"
    nodes = [entry.name[4:] for entry in folder.glob("node[0-9]*")]
    package, core = (read_text(folder / "topology" / name) for name in ("physical_package_id", "core_id"))
    return int(nodes[0]) if nodes else 0, _number(package) or 0, _number(core) or 0


def gpu_node(device: torch.device, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of an accelerator; None for the CPU, or if torch or the system does not report it."""
    find = getattr(torch.get_device_module(device), "get_device_properties", None)
    if device.type == "cpu" or find is None:
        return None
    found = find(device)
    domain, bus, slot = (getattr(found, f"pci_{name}_id", -1) for name in ("domain", "bus", "device"))
    return pci_node(f"{domain:04x}:{bus:02x}:{slot:02x}.0", system)  # some devices lack one of the three


def near_cpus(device: torch.device, system: Path = SYSTEM) -> set[int]:
    """Return the processors of this process that are on the accelerator's NUMA node. Return an empty set if the node is
    unknown, or if all or none of the process's processors are on it."""
    if (node := gpu_node(device, system)) is None or not hasattr(os, "sched_getaffinity"):
        return set()
    cpus = os.sched_getaffinity(0)
    near = {cpu for cpu in cpus if place_of(cpu, system)[0] == node}
    return near if near < cpus else set()


def pci_node(address: str, system: Path = SYSTEM) -> int | None:
    """Return the NUMA node of the PCI device at `address` ("0000:3b:00.0"); None if the system does not report it."""
    node = _number(read_text(system / "bus/pci/devices" / address / "numa_node"))
    return node if node is not None and node >= 0 else None


def _number(text: str) -> int | None:
    return int(text) if text.lstrip("-").isdigit() else None
