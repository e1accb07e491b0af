"""Measure, save and load the rates of this machine, in bytes and operations per second, for predictions of a step."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path

from tiered_zero.errors import ConfigError
from tiered_zero.native.update import available_cpus, num_kernel_threads
from tiered_zero.plan.machine import Disk, Machine, default_path, from_description, load_machine
from tiered_zero.sizes import MIB, format_nbytes
from tiered_zero.version import __version__

TO_MEASURE = "measure them with `tiered-zero doctor DIR --measure`, DIR on the disk of nvme_path"

_UPDATED_NUMEL = 32 * MIB
_UPDATED_NBYTES = 28
"""Bytes that AdamW moves for each parameter. It reads and writes the fp32 master and two fp32 moments, reads a 16-bit
gradient, and writes a 16-bit weight."""


def measure_machine(disk: Disk) -> Machine:
    """Measure the rates of processors, memory and the link to the device, in less than 10 s. `disk`: a measured disk,
    to be listed in the result. Call it on the main thread."""
    from tiered_zero.hardware import check
    from tiered_zero.hardware.probe import available_device_nbytes, available_host_nbytes
    from tiered_zero.hardware.runtime import build_accelerator

    accelerator = build_accelerator()
    try:
        # before anything is measured: torch keeps device memory that was used
        free_nbytes = available_device_nbytes(accelerator.device), available_host_nbytes()
        to_device, from_device = check.link_rates(accelerator)
        products = check.product_rates(accelerator)
        in_blocks, logits = check.model_rates(accelerator, products)
        return replace(
            _this_machine(),
            device=accelerator.device.type,
            device_nbytes=free_nbytes[0],
            host_nbytes=free_nbytes[1],
            flops_per_s=products,
            block_elements_per_s=in_blocks,
            logits_per_s=logits,
            copy_bytes_per_s=check.copy_rate(),
            update_bytes_per_s=_update_rate(accelerator.shares_cores),
            to_device_bytes_per_s=to_device,
            from_device_bytes_per_s=from_device,
            disks=(disk,),
        )
    finally:
        accelerator.close()


def _update_rate(shares_cores: bool) -> float:
    """Measure the bytes/s of AdamW on bf16 weights. `shares_cores`: whether the CPU also computes the model."""
    import torch

    from tiered_zero.hardware.check import median_rate
    from tiered_zero.hardware.probe import available_host_nbytes
    from tiered_zero.rules.native_rules import AdamRule, open_kernel
    from tiered_zero.rules.rule import Slice

    numel = min(_UPDATED_NUMEL, available_host_nbytes() // 8 // _UPDATED_NBYTES)
    master, grad = torch.zeros(numel), torch.full((numel,), 1e-3, dtype=torch.bfloat16)
    state = {name: torch.zeros(numel) for name in ("exp_avg", "exp_avg_sq")}
    part = Slice(master=master, grad=grad, state=state, scalars={}, hyper={"lr": 1e-3}, out=master.bfloat16())
    kernel = open_kernel(num_threads=num_kernel_threads(shares_cores=shares_cores))
    try:
        rule = AdamRule(decoupled=True, kernel=kernel)
        return median_rate(_UPDATED_NBYTES * numel, lambda: rule.update([part]))
    finally:
        if kernel is not None:
            kernel.close()


def save_measured(machine: Machine) -> None:
    """Write `machine` to the file with this machine's rates. Disks in the file that `machine` does not list stay
    there."""
    before, paths = on_record()[0], [disk.path for disk in machine.disks]
    kept = [disk for disk in (before.disks if before else ()) if disk.path not in paths]
    replace(machine, disks=(*kept, *machine.disks)).save(default_path())


def save_disk(disk: Disk) -> None:
    """Add a disk to the file with this machine's rates, or replace it there. Other rates stay as they are."""
    save_measured(replace(on_record()[0] or _this_machine(), date=_now(), disks=(disk,)))


def load_measured() -> Machine:
    """Load the rates that were measured on this machine. Raises ConfigError if there are none for this host name and
    number of cores."""
    path = default_path()
    if not path.exists():
        raise ConfigError(f"The rates of this machine are not known; {TO_MEASURE}.")
    machine = load_machine(path)
    if (machine.name, machine.num_cores) != (platform.node(), available_cpus()):
        raise ConfigError(
            f"The rates in {path} were measured on {machine.name} with {machine.num_cores} cores; this is "
            f"{platform.node()} with {available_cpus()}. To replace them, {TO_MEASURE}."
        )
    return machine


def on_record() -> tuple[Machine | None, str]:
    """Return this machine's rates and a line that names their file, or None and the reason."""
    try:
        machine = load_measured()
    except ConfigError as error:
        return None, str(error)
    return machine, f"Rates of this machine, measured {machine.date}, are in {default_path()}."


def machine_to_plan(
    path: Path | None, device_nbytes: int | None, host_nbytes: int | None, disks: Sequence[Disk]
) -> tuple[Machine, str]:
    """Return the machine to plan for, and a line that says where its rates come from or why they are unknown. `path`: a
    file that describes the machine; None: plan for this machine. `device_nbytes`, `host_nbytes`, `disks`: used instead
    of the machine's own memory sizes and disks. Raises ConfigError."""
    base, line = on_record()
    if path is not None:
        base = load_machine(path)
        line = f"The machine is {base.name}, as {path} describes it."
    return from_description(base, device_nbytes=device_nbytes, host_nbytes=host_nbytes, disks=disks), line


def rate_lines(machine: Machine) -> Iterator[str]:
    """Yield lines of text with the measured rates: of compute, memory, the link to the device, and each disk."""
    products = (f"{name} {rate / 1e12:.3g} TFLOPS" for name, rate in machine.flops_per_s.items())
    yield f"products of matrices: {', '.join(products)}"
    for kind, rates in (("elements of blocks", machine.block_elements_per_s), ("logits", machine.logits_per_s)):
        if rates:
            yield f"{kind}: {', '.join(f'{name} {rate / 1e6:.3g} million/s' for name, rate in rates.items())}"
    memory = {"copies": machine.copy_bytes_per_s, "AdamW": machine.update_bytes_per_s}
    link = {"to the device": machine.to_device_bytes_per_s, "from it": machine.from_device_bytes_per_s}
    yield f"memory: {_rates(memory)}"
    if any(link.values()):
        yield f"link: {_rates(link)}"
    for disk in machine.disks:
        both = {"read": disk.read_bytes_per_s, "write": disk.write_bytes_per_s, "at once": disk.mixed_bytes_per_s}
        yield f"disk of {disk.path}: {_rates(both)}"


def _rates(rates: dict[str, float | None]) -> str:
    return ", ".join(f"{name} {format_nbytes(rate)}/s" for name, rate in rates.items() if rate)


def _this_machine() -> Machine:
    name, cores = platform.node(), available_cpus()
    return Machine(name=name, source=f"measured by tiered_zero {__version__}", date=_now(), num_cores=cores)


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
