"""What the machine is, what its links carry, whether it computes at all, and the tests that need a GPU."""

from __future__ import annotations

import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tools.acceptance import correctness
from tools.acceptance.model import Course
from tools.acceptance.report import Record, Site, left_out, without_names

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20
SMI = "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.max"


def missing_kernels() -> str:
    """Say which compiled libraries are missing, why, and what to do; "" where both are there."""
    from tiered_zero.native import find_library, why_missing

    missing = [stem for stem in ("_update", "_direct_io") if find_library(stem) is None]
    reason, fix = why_missing(missing[0]) if missing else ("", "")
    return f"no library {', '.join(missing)}: {reason}; {fix}" if missing else ""


def describe_machine(site: Site) -> Record:
    from tiered_zero.hardware.probe import accelerator_kind, accelerator_names, available_host_nbytes
    from tiered_zero.io.select import select_engine
    from tiered_zero.native.update import available_cpus
    from tiered_zero.version import __version__

    space, selection = os.statvfs(site.directory), select_engine(site.directory)
    selection.engine.close()
    found: Record = {
        "device": accelerator_names(),
        "simulated": site.simulated is not None,
        "accelerator": accelerator_kind(),
        "kernel": "none: torch's operations update",
        "kernel_missing": missing_kernels(),
        "update_parameters_per_s": 0.0,
        "io_engine": selection.engine.name,
        "direct_io": selection.engine.direct,
        "io_reasons": list(selection.reasons),
        "cpus": available_cpus(),
        "host_free_nbytes": available_host_nbytes(),
        "disk_free_nbytes": space.f_bavail * space.f_frsize,
        "tiered_zero": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    found |= _measure_update(site)
    if shutil.which("nvidia-smi") is not None:
        command = ["nvidia-smi", f"--query-gpu={SMI}", "--format=csv"]
        found["nvidia_smi"] = subprocess.run(command, capture_output=True, text=True).stdout.splitlines()
    return {"passed": None, **found}


def _measure_update(site: Site) -> Record:
    """Parameters/s of AdamW over fp32 masters and bf16 gradients, by the kernel of a run if there is one."""
    from tiered_zero.native.update import num_kernel_threads
    from tiered_zero.rules.native_rules import AdamRule, open_kernel
    from tiered_zero.rules.rule import Slice

    numel = MIB if site.smoke else 64 * MIB
    kernel = open_kernel(num_threads=num_kernel_threads(shares_cores=site.device.type == "cpu"))
    rule = AdamRule(decoupled=True, kernel=kernel)
    master, state = torch.rand(numel), {name: torch.zeros(numel) for name in ("exp_avg", "exp_avg_sq")}
    run = Slice(
        master=master,
        grad=torch.randn(numel).bfloat16(),
        state=state,
        scalars={},
        hyper={"lr": 1e-3, "weight_decay": 0.1},
        out=master.bfloat16(),
    )
    seconds = []
    for _ in range(4):
        start_s = time.perf_counter()
        rule.update([run])
        seconds.append(time.perf_counter() - start_s)
    found: Record = {"update_parameters_per_s": numel / statistics.median(seconds[1:])}
    if kernel:
        found |= {"kernel": kernel.level, "kernel_threads": kernel.num_threads}
        kernel.close()
    return found


# -- contact -----------------------------------------------------------------------------------------------------------


def launch_kernel(site: Site) -> Record:
    """A product of matrices is the CPU's, and the device's instructions are among those of this torch."""
    left, right = (torch.arange(64 * 64).view(64, 64).remainder(7 + shift).float() for shift in range(2))
    found = (left.to(site.device) @ right.to(site.device)).cpu()
    built: list[str] = torch.cuda.get_arch_list() if site.is_cuda else []
    capability = torch.cuda.get_device_capability(site.device) if site.is_cuda else None
    return {"passed": torch.equal(found, left @ right), "capability": capability, "built_for": built}


def copy_both_ways(site: Site) -> Record:
    """What a lane brings to the device and another back has its bytes."""
    if site.device.type == "cpu":
        return left_out("the CPU computes: nothing is copied")
    from tiered_zero.hardware.runtime import build_accelerator

    accelerator, numel = build_accelerator(str(site.device)), MIB
    there, back = torch.arange(numel, dtype=torch.int32), torch.zeros(numel, dtype=torch.int32)
    device = torch.zeros(numel, dtype=torch.int32, device=site.device)
    try:
        pinned = [accelerator.pin(memory.data_ptr(), memory.nbytes) for memory in (there, back)]
        zeroed = accelerator.record_compute()
        fetch = accelerator.lane("fetch").submit(lambda: accelerator.copy(device, there), after=[zeroed])
        accelerator.wait_on_compute(fetch)
        device += 1
        computed = accelerator.record_compute()
        accelerator.lane("reduce").submit(lambda: accelerator.copy(back, device), after=[computed]).wait()
        site.synchronize()
        for memory, was_pinned in zip((there, back), pinned, strict=True):
            if was_pinned:
                accelerator.unpin(memory.data_ptr())
    finally:
        accelerator.close()
    return {"passed": torch.equal(back, there + 1) and all(pinned), "pinned": pinned}


def take_one_step(site: Site) -> Record:
    """One step with parameters and state in host memory has plain PyTorch's bits."""
    with correctness.deterministic():
        course = Course()
        found = correctness.train(site, course, num_steps=1)
        expected = correctness.train_plain(site, course, state_on_device=False, num_steps=1)
    return {"passed": not (left := correctness.different(found, expected)), "differ": left}


# -- links -------------------------------------------------------------------------------------------------------------


def measure_links(site: Site) -> Record:
    """Bytes/s of memory and of the disk; of pinned and pageable copies each way, and of both ways at once."""
    from tools.bench.bounds import measure_disk, measure_triad

    nbytes, rounds, seconds = (MIB, 2, 0.1) if site.smoke else (1024 * MIB, 5, 1.0)
    triad = measure_triad(MIB if site.smoke else 256 * MIB)
    read, write = measure_disk(str(site.directory), 2 * nbytes, seconds, [1.0, 0.0])
    found = {"triad_bytes_per_s": triad, "read_bytes_per_s": read, "write_bytes_per_s": write}
    copies = _measure_copies(site, nbytes, rounds) if site.device.type != "cpu" else {}
    return {"passed": copies.get("pinned"), **found, **copies}


def _measure_copies(site: Site, nbytes: int, rounds: int) -> dict[str, Any]:
    from tiered_zero.hardware.runtime import build_accelerator

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
        found = {
            "pinned": all(pinned),
            "pin_s_per_gib": pin_s / 2 / (nbytes / (1024 * MIB)),
            "pageable_h2d_bytes_per_s": pageable,
            "h2d_bytes_per_s": rate(to_device, nbytes),
            "d2h_bytes_per_s": rate(to_host, nbytes),
            "both_bytes_per_s": rate(both, 2 * nbytes),
        }
        site.synchronize()
        for memory, was_pinned in zip(host, pinned, strict=True):
            if was_pinned:
                accelerator.unpin(memory.data_ptr())
        return found
    finally:
        accelerator.close()


def run_gpu_tests(site: Site) -> Record:
    """`pytest -m gpu`, each failure by its name; without the settings of the project, which need plugins."""
    if not site.is_cuda:
        return left_out("needs a real CUDA device")
    options = ["-c", os.devnull, "--rootdir", ".", "--confcutdir", "tests/gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, "-m", "gpu", "-q", "-rfE", "tests/gpu"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    (site.out / "pytest-gpu.txt").write_text(without_names(done.stdout + done.stderr))
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
    last = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else done.stderr[-200:]
    return {"passed": done.returncode == 0, "result": last, "failed": failed}
