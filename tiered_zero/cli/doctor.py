"""Check what works on this machine and in a directory, and say how to fix what does not work: `tiered-zero doctor`."""

from __future__ import annotations

import logging
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path

import click
from rich.text import Text

from tiered_zero.assembly.machine_rates import measure_machine, on_record, rate_lines, save_measured
from tiered_zero.cli.bench_io import measure_directory
from tiered_zero.cli.console import JSON_OPTION, parse_bytes, print_json, stdout
from tiered_zero.errors import ConfigError, TieredZeroError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import ENGINES, filesystem_type, filesystem_warnings, preflight_directory, select_engine
from tiered_zero.native import find_library, why_missing
from tiered_zero.native.update import available_cpus, supported_levels
from tiered_zero.sizes import GIB, MIB, format_nbytes
from tiered_zero.stopping import stop_on_signals
from tiered_zero.system import BAD, GOOD, POOR, UNKNOWN, Finding

_STYLES = {GOOD: "green", POOR: "yellow", BAD: "red", UNKNOWN: "yellow"}
_PIN_TRIAL_NBYTES = 64 * MIB
_DISK_S = 8.0
"""Seconds that --measure spends on the disk, including the time to write the test file."""


@click.command("doctor")
@click.argument("directory", type=click.Path(path_type=Path), default=Path("."))
@JSON_OPTION
@click.option("--device", "on_device", is_flag=True, help="Check the accelerator instead, in about 30 s.")
@click.option("--measure", "measures", is_flag=True, help="Measure rates for `plan` as well, in less than 20 s.")
@click.option("--pin", callback=parse_bytes, default="1GiB", metavar="64GiB", help="With --device: bytes to be pinned.")
@click.pass_context
def doctor(ctx: click.Context, directory: Path, as_json: bool, on_device: bool, measures: bool, pin: int) -> None:
    """Print what works on this machine and in DIRECTORY (meant for nvme_path), and how to fix what does not.

    Writes small files there and removes them. --measure writes one file of at most 1 GiB, and saves rates for `plan`.
    The exit code is 1 if DIRECTORY cannot be used, or, with --device, if a check of the device fails.
    """
    logging.getLogger("tiered_zero").setLevel(logging.ERROR)
    findings = []
    if on_device:
        from tiered_zero.cli.device_check import examine_device

        checks = examine_device(pin)
    else:
        checks = examine(directory)
    for finding in chain(checks, _rates(directory, measures) if measures or not on_device else ()):
        findings.append(finding)
        if not as_json:
            line = Text.assemble((f"{finding.state:<5}", _STYLES[finding.state]), f"{finding.name:<19}{finding.found}")
            stdout().print(line.append(f"; fix: {finding.fix}" if finding.fix else ""), soft_wrap=True)
    if as_json:
        print_json({"directory": directory, "findings": findings, "machine": on_record()[0]})
    asked = [finding for finding in findings if finding.name == "directory" or (on_device and finding.state == BAD)]
    if asked:  # what the user has asked about fails: the directory, or the device
        ctx.exit(1)


def examine(directory: Path) -> Iterator[Finding]:
    """Check this machine and `directory`, and yield the findings. If a check raises, yield its error as a finding."""
    checks: list[tuple[str, Callable[[], Iterator[Finding]]]] = [
        ("directory", lambda: _directory(directory)),
        ("host memory", _memory),
        ("processors", _processors),
        ("update kernel", _kernel),
        ("torch", _torch),
        ("pinned memory", _pinning),
    ]
    for name, check in checks:
        try:
            yield from check()
        except (Exception, SystemExit) as error:
            yield Finding(name, BAD, f"could not be found out: {type(error).__name__}: {error}")


def _directory(directory: Path) -> Iterator[Finding]:
    """Check `directory` and the I/O engines in it. If it cannot be used, check the engines in the temporary
    directory."""
    try:
        preflight_directory(directory)
    except TieredZeroError as error:
        yield Finding("directory", BAD, str(error).removeprefix("nvme_path "))
        yield from _engines(Path(tempfile.gettempdir()))
        return
    yield from _engines(directory)
    fstype = filesystem_type(directory)
    warnings = filesystem_warnings(str(directory), fstype)
    found = warnings[0].removeprefix("nvme_path ") if warnings else fstype or "unknown"
    yield Finding("file system", POOR if warnings else GOOD, found)
    free_nbytes = shutil.disk_usage(directory).free
    fix = "free space, or name another disk; `tiered-zero plan` says how much a run needs"
    yield Finding("free space", *_measured(free_nbytes, GIB, f"{format_nbytes(free_nbytes)} in {directory}", fix))


def _engines(directory: Path) -> Iterator[Finding]:
    for name in ENGINES:
        if name == "native" and find_library("_direct_io") is None:
            yield _missing("engine native", "_direct_io")
            continue
        try:
            selection = select_engine(directory, prefer=name)
        except ConfigError as error:
            yield Finding(f"engine {name}", BAD, str(error).rpartition(" is off: ")[2])
            continue
        selection.engine.close()
        intact = f"a write in {directory} was read back intact"
        if selection.engine.direct:
            yield Finding(f"engine {name}", GOOD, f"O_DIRECT: {intact}")
        else:
            why_not = [reason for reason in selection.reasons if " with O_DIRECT " in reason][-1]
            found = f"buffered, through the page cache ({why_not.rpartition(' is off: ')[2]}): {intact}"
            yield Finding(f"engine {name}", POOR, found, "use a directory on a local ext4, xfs or btrfs")


def _measured(nbytes: int, enough_nbytes: int, found: str, fix: str) -> tuple[str, str, str]:
    return (GOOD, found, "") if nbytes >= enough_nbytes else (POOR, found, fix)


def _memory() -> Iterator[Finding]:
    from tiered_zero.hardware import probe

    total, available = probe.total_host_nbytes(), probe.available_host_nbytes()
    limit = probe.cgroup_memory_limit_nbytes()
    found = f"{format_nbytes(available)} of {format_nbytes(total)} may be taken"
    yield Finding("host memory", *_measured(available, GIB, found, "stop other programs, or add memory"))
    if limit is None or limit >= total:
        yield Finding("cgroup memory", GOOD, "no limit below the machine's memory")
    else:
        yield Finding("cgroup memory", GOOD, f"limited to {format_nbytes(limit)}; plans keep to it")
    pages = probe.huge_pages()
    if pages in ("always", "madvise"):
        yield Finding("huge pages", GOOD, f"{pages}: host memory lies in them, for direct I/O with little of the CPU")
    else:
        found = f"{pages or 'not known'}: direct I/O pins every page of 4 KiB, and may run at half of the disk's rate"
        yield Finding("huge pages", POOR, found, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled, as root")


def _processors() -> Iterator[Finding]:
    all_cpus, usable = os.cpu_count() or 1, available_cpus()
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else all_cpus
    found = f"{usable} of {all_cpus} ({platform.machine()}) may be kept busy; affinity {affinity}"
    if usable < affinity:
        yield Finding("processors", POOR, f"{found}, cgroup quota {usable}", "raise the container's CPU limit")
    elif usable < all_cpus:
        yield Finding("processors", POOR, found, "start without taskset, or with more cores")
    else:
        yield Finding("processors", GOOD, f"{found}, no quota below that")


def _missing(name: str, stem: str, instead: str = "") -> Finding:
    reason, fix = why_missing(stem)
    return Finding(name, BAD, f"no library: {reason}{instead}", fix)


def _kernel() -> Iterator[Finding]:
    path = find_library("_update")
    if path is None:
        yield _missing("update kernel", "_update", "; torch's own operations are used")
        return
    if levels := supported_levels(path):
        yield Finding("update kernel", GOOD, f"{levels[0]} on {available_cpus()} threads (runs: {', '.join(levels)})")
        return
    found = "no code for this processor; torch's own operations are used"
    yield Finding("update kernel", POOR, found, "use a processor with AVX2 and FMA, or with NEON")


def _torch() -> Iterator[Finding]:
    try:
        import torch

        from tiered_zero.hardware.probe import accelerator_kind, accelerator_names
    except ImportError as error:
        yield Finding("torch", BAD, f"cannot be imported: {error}", "install torch 2.11 to 2.14")
        return
    names, kind = accelerator_names(), accelerator_kind()
    yield Finding("torch", GOOD, str(torch.__version__))
    if names:
        yield Finding("accelerator", GOOD, f"{kind}: {', '.join(names)}")
    elif kind is None:
        found = "this torch was built without one; the CPU computes"
        yield Finding("accelerator", BAD, found, "install a torch with CUDA, ROCm or XPU")
    else:
        found = f"torch was built for {kind}, but there is no device; the CPU computes"
        yield Finding(
            "accelerator", BAD, found, "look at the driver (nvidia-smi), and the devices given to this container"
        )


def _pinning() -> Iterator[Finding]:
    from tiered_zero.hardware.check import check_pinning
    from tiered_zero.hardware.runtime import build_accelerator

    accelerator = build_accelerator()
    try:
        if accelerator.device.type == "cpu":
            yield Finding("pinned memory", GOOD, "not needed: the device is the CPU")
        else:
            yield check_pinning(accelerator, _PIN_TRIAL_NBYTES)
    finally:
        accelerator.close()


def _rates(directory: Path, measures: bool) -> Iterator[Finding]:
    """Yield the saved rates of this machine. `measures`: whether to measure and save them first, with the rates of the
    disk of `directory`."""
    if measures:
        load, num_cores = os.getloadavg()[0], os.cpu_count() or 1
        with stop_on_signals(at_boundary=False):  # SIGTERM raises, so that the file on the disk is removed
            report = measure_directory(directory, time.perf_counter() + _DISK_S, (IOSettings(),))
            save_measured(measure_machine(report["disk"]))
        if load > num_cores / 2:
            found = (
                f"measured while other programs ran: a load average of {load:.1f} on {num_cores} cores; rates are low"
            )
            yield Finding("load", POOR, found, "measure again when they have ended")
    machine, line = on_record()
    for found in (line, *(rate_lines(machine) if machine else ())):
        yield Finding("rates", GOOD if machine else UNKNOWN, found)
