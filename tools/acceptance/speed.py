"""What a step costs on each placement, beside the bounds of this machine, and beside FSDP2 with offload."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from tools.acceptance.model import SIZES, Course, Size, Transformer, batch, make_config
from tools.acceptance.report import Report, Site, read_lines

if TYPE_CHECKING:
    from tiered_zero.telemetry.report import StepReport

NUM_WARM_UP, NUM_MEASURED = 2, 3
DRAM_NBYTES_PER_PARAMETER = 28
"""AdamW: read a bf16 gradient, fp32 master and two moments, write the three and a bf16 parameter."""


def size_of(site: Site, name: str) -> Size:
    return SIZES["tiny"] if site.smoke else SIZES[name]


def measure(site: Site, step: Callable[[], object]) -> list[float]:
    seconds = []
    for number in range(NUM_WARM_UP + (1 if site.smoke else NUM_MEASURED)):
        site.synchronize()
        start_s = time.perf_counter()
        step()
        site.synchronize()
        if number >= NUM_WARM_UP:
            seconds.append(time.perf_counter() - start_s)
    return seconds


def measure_compute(report: Report, site: Site, name: str, rows: int) -> None:
    """Forward and backward alone, in bf16 on the device: a bound of every placement."""
    size = size_of(site, name)
    with torch.device("meta"):
        model = Transformer(size, recompute=True)
    model = model.to(torch.bfloat16).to_empty(device=site.device)
    with torch.no_grad():
        for param in model.parameters():
            param.uniform_(-0.02, 0.02)
    tokens = batch(size, 0, site.device, rows)

    def step() -> None:
        model(tokens).backward()
        model.zero_grad()

    report.write(f"compute {name} {rows}", None, seconds=measure(site, step))


def measure_training(report: Report, site: Site, name: str, rows: int, course: Course) -> None:
    import tiered_zero

    size = size_of(site, name)
    with torch.device("meta"):
        model = Transformer(size, recompute=True)
    tokens = batch(size, 0, site.device, rows)
    if site.device.type != "cpu":
        torch.accelerator.reset_peak_memory_stats()
    what = f"{name} {rows} x {size.tokens} tokens, {course.placement} {course.update} clip {course.clip}"
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        runtime = {"device": str(site.device)} | ({"device_memory_limit": "1GiB"} if site.device.type == "cpu" else {})
        try:
            engine = tiered_zero.initialize(
                model=model, config=make_config(course, Path(directory), rows=rows, **runtime)
            )[0]
        except tiered_zero.PlanError as error:
            report.write(what, None, left_out=str(error).splitlines()[0])
            return
        with engine:
            reports: list[StepReport] = []

            def step() -> None:
                engine.backward(engine(tokens))
                engine.step()
                assert engine.step_report is not None
                reports.append(engine.step_report)

            seconds = measure(site, step)
            bounds = bound_of(
                report, name, rows, reports[-1].link_nbytes, sum(param.numel() for param in engine.module.parameters())
            )
            median_s, bound_s = statistics.median(seconds), max(bounds.values(), default=0.0)
            report.write(
                what,
                None,
                seconds=seconds,
                policy=engine.plan.update_policy.policy,
                bounds_s=bounds,
                times_bound=median_s / bound_s if bound_s else None,
                tokens_per_s=tokens.numel() / median_s,
                planned_nbytes={tier: engine.plan.nbytes(tier) for tier in ("device", "host", "nvme")},
                memory=site.memory(),
                link_nbytes=reports[-1].link_nbytes,
                causes_s=reports[-1].seconds,
            )


def bound_of(report: Report, name: str, rows: int, links: dict[str, int], num_params: int) -> dict[str, float]:
    """Seconds that each resource takes at least, by what the sections before have measured."""
    known = {line["what"]: line for line in read_lines(report.path)}
    bounds = {}
    if compute := known.get(f"compute {name} {rows}"):
        bounds["compute"] = statistics.median(compute["seconds"])
    if triad := known.get("triad"):
        bounds["DRAM"] = DRAM_NBYTES_PER_PARAMETER * num_params / triad["bytes_per_s"]
    if copies := known.get("copies"):
        bounds["to device"] = links.get("fetch", 0) / copies["h2d_bytes_per_s"]
        bounds["to host"] = links.get("reduce", 0) / copies["d2h_bytes_per_s"]
    if disk := known.get("disk"):
        bounds["disk"] = sum(links.get(f"disk {way}", 0) / disk[f"{way}_bytes_per_s"] for way in ("read", "write"))
    return bounds


def measure_fsdp2(report: Report, site: Site, name: str, rows: int) -> None:
    """FSDP2 with CPU offload on one process: bf16 compute, fp32 parameters and torch's AdamW in host memory."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if site.simulated is not None:
        report.write(f"FSDP2 {name} {rows}", None, left_out="NCCL needs a real CUDA device")
        return
    size = size_of(site, name)
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        kind = site.device.type
        backend = "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            mesh = init_device_mesh(kind, (1,))
            torch.manual_seed(0)
            model = Transformer(size, recompute=True)
            policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
            offload: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if kind != "cpu" else {}
            for block in model.blocks:
                fully_shard(block, mesh=mesh, mp_policy=policy, **offload)
            fully_shard(model, mesh=mesh, mp_policy=policy, **offload)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            tokens = batch(size, 0, site.device, rows)

            def step() -> None:
                model(tokens).backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

            report.write(f"FSDP2 {name} {rows}", None, seconds=measure(site, step), memory=site.memory())
        finally:
            dist.destroy_process_group()


def record_trace(report: Report, site: Site) -> None:
    """A profile of two steps, as `trace.json` for chrome://tracing or Perfetto."""
    from torch.profiler import ProfilerActivity, profile

    import tiered_zero

    size = size_of(site, "1.3b")
    size = replace(size, layers=min(size.layers, 8))
    with torch.device("meta"):
        model = Transformer(size, recompute=True)
    tokens = batch(size, 0, site.device, 1)
    activities = [ProfilerActivity.CPU]
    if site.device.type == "cuda" and site.simulated is None:
        activities.append(ProfilerActivity.CUDA)
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        runtime = {"device": str(site.device)} | ({"device_memory_limit": "1GiB"} if site.device.type == "cpu" else {})
        config = make_config(Course(bf16=True, clip=1.0), Path(directory), rows=1, **runtime)
        with tiered_zero.initialize(model=model, config=config)[0] as engine:

            def step() -> Any:
                engine.backward(engine(tokens))
                return engine.step()

            step(), step()
            with profile(activities=activities) as profiler:
                step(), step()
                site.synchronize()
    path = site.out / "trace.json"
    profiler.export_chrome_trace(str(path))
    report.write("trace", None, path=path.name, nbytes=path.stat().st_size)
