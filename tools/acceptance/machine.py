"""What the machine is, what its links carry, and the tests that need a GPU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from tools.acceptance.report import Report, Site

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


def describe_machine(report: Report, site: Site) -> None:
    from tiered_zero.hardware.probe import accelerator_kind, accelerator_names, available_host_nbytes
    from tiered_zero.native.update import available_cpus
    from tiered_zero.version import __version__

    space = os.statvfs(site.directory)
    report.write(
        "versions",
        None,
        tiered_zero=__version__,
        torch=torch.__version__,
        python=platform.python_version(),
        accelerator=accelerator_kind(),
        devices=accelerator_names(),
        simulated=site.simulated is not None,
        cpus=available_cpus(),
        host_free_nbytes=available_host_nbytes(),
        disk_free_nbytes=space.f_bavail * space.f_frsize,
    )
    if shutil.which("nvidia-smi") is not None:
        done = subprocess.run(["nvidia-smi"], capture_output=True, text=True)
        report.write("nvidia-smi", None, text=done.stdout)


def measure_links(report: Report, site: Site) -> None:
    """Bytes/s of pinned and pageable copies each way, of both ways at once, of memory and of the disk."""
    from tools.bench.step import measure_disk, measure_triad

    nbytes, rounds = (MIB, 2) if site.smoke else (1024 * MIB, 5)
    report.write("triad", None, bytes_per_s=measure_triad(MIB if site.smoke else 256 * MIB))
    read, write = measure_disk(str(site.directory), 8 * MIB if site.smoke else 2048 * MIB, 0.1, [1.0, 0.0])
    report.write("disk", None, read_bytes_per_s=read, write_bytes_per_s=write)
    if site.device.type != "cpu":
        _measure_copies(report, site, nbytes, rounds)


def _measure_copies(report: Report, site: Site, nbytes: int, rounds: int) -> None:
    from tiered_zero.hardware.device.select import build_accelerator

    accelerator = build_accelerator(str(site.device))
    host = [torch.zeros(nbytes, dtype=torch.uint8) for _ in range(2)]
    device = [torch.zeros(nbytes, dtype=torch.uint8, device=site.device) for _ in range(2)]

    def rate(copy: Callable[[], None], num_bytes: int) -> float:
        best_s = float("inf")
        for _ in range(rounds):
            site.synchronize()
            start_s = time.perf_counter()
            copy()
            site.synchronize()
            best_s = min(best_s, time.perf_counter() - start_s)
        return num_bytes / best_s

    def to_device() -> None:
        accelerator.lane("fetch").submit(lambda: accelerator.copy(device[0], host[0])).wait()

    def to_host() -> None:
        accelerator.lane("reduce").submit(lambda: accelerator.copy(host[1], device[1])).wait()

    def both() -> None:
        jobs = [accelerator.lane("fetch").submit(lambda: accelerator.copy(device[0], host[0]))]
        jobs.append(accelerator.lane("reduce").submit(lambda: accelerator.copy(host[1], device[1])))
        for job in jobs:
            job.wait()

    try:
        pageable = rate(to_device, nbytes)
        start_s = time.perf_counter()
        pinned = [accelerator.pin(memory.data_ptr(), nbytes) for memory in host]
        pin_s = time.perf_counter() - start_s
        report.write(
            "copies",
            all(pinned),
            pinned=all(pinned),
            pin_s_per_gib=pin_s / 2 / (nbytes / (1024 * MIB)),
            pageable_h2d_bytes_per_s=pageable,
            h2d_bytes_per_s=rate(to_device, nbytes),
            d2h_bytes_per_s=rate(to_host, nbytes),
            both_bytes_per_s=rate(both, 2 * nbytes),
        )
        site.synchronize()
        for memory, was_pinned in zip(host, pinned, strict=True):
            if was_pinned:
                accelerator.unpin(memory.data_ptr())
    finally:
        accelerator.close()


def run_gpu_tests(report: Report, site: Site) -> None:
    """`pytest -m gpu`, each failure by its name."""
    if site.device.type != "cuda" or site.simulated is not None:
        report.write("pytest -m gpu", None, left_out="needs a real CUDA device")
        return
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-n", "0", "-q", "-rf", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (site.out / "pytest-gpu.txt").write_text(done.stdout + done.stderr)
    failed = re.findall(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    report.write("pytest -m gpu", done.returncode == 0, result=last, failed=failed)
