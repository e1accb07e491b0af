"""What a step costs on each placement, beside the bounds of this machine; and the largest model that fits."""

from __future__ import annotations

import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.acceptance.model import SIZES, Course, Size, Transformer, batch, make_config, meta_model
from tools.acceptance.report import Record, Section, Site, left_out

NUM_WARM_UP = 2
DRAM_NBYTES_PER_PARAMETER = 28
"""AdamW: read a bf16 gradient, fp32 master and two moments, write the three and a bf16 parameter."""

GIB = 1 << 30


def size_of(site: Site, name: str) -> Size:
    return SIZES["tiny"] if site.smoke else SIZES[name]


def measure(site: Site, step: Callable[[int], Any], num_steps: int, limit_s: float = 90.0) -> Record:
    """Take `num_steps` steps or as many as the time allows, five at least. `step(number)` returns the loss."""
    seconds: list[float] = []
    losses: list[torch.Tensor] = []
    limit_s = min(limit_s, site.left_s / 2)
    for number in range(num_steps):
        site.synchronize()
        start_s = time.perf_counter()
        losses.append(step(number).detach())
        site.synchronize()
        seconds.append(time.perf_counter() - start_s)
        if number >= 4 and sum(seconds) > limit_s:
            break
    return {
        "seconds": seconds,
        "median_s": statistics.median(seconds[NUM_WARM_UP:]),
        "losses": [float(loss) for loss in losses],
        "memory": site.memory(),
    }


def rates(site: Site, found: Record, compute: str, num_tokens: int) -> Record:
    """Add tokens/s, and which part of it forward and backward alone are, from the record `compute`."""
    alone = site.records().get(compute, {}).get("median_s")
    part = {"compute_part": alone / found["median_s"]} if alone else {}
    return {**found, "tokens_per_s": num_tokens / found["median_s"], **part}


def compute_name(name: str, rows: int) -> str:
    return f"compute {name} {rows} rows"


def compute_section(name: str, rows: int) -> Section:
    run = partial(measure_compute, name=name, rows=rows)
    return Section(name=compute_name(name, rows), group=compute_name(name, rows), run=run)


def training_section(
    title: str, name: str, rows: int, course: Course, *, num_steps: int = 5, instead_of: str = ""
) -> Section:
    """`instead_of`: a section that makes this one needless where it could run."""
    run = partial(measure_training, name=name, rows=rows, course=course, num_steps=num_steps, instead_of=instead_of)
    return Section(name=title, group=title, run=run, least_s=60.0, most_s=300.0)


def measure_compute(site: Site, name: str, rows: int) -> Record:
    """Forward and backward alone, in bf16 on the device: a bound of every placement."""
    size = size_of(site, name)
    site.reset_peaks()
    try:
        model = meta_model(size).to(torch.bfloat16).to_empty(device=site.device)
        with torch.no_grad():
            for param in model.parameters():
                param.uniform_(-0.02, 0.02)

        def step(number: int) -> torch.Tensor:
            loss: torch.Tensor = model(batch(size, number, site.device, rows))
            torch.autograd.backward(loss)
            model.zero_grad()
            return loss

        found = measure(site, step, 3 if site.smoke else 6)
    except torch.OutOfMemoryError:
        return left_out("weights, gradients and activations together do not fit on the device")
    return {"passed": None, "tokens_per_s": rows * size.tokens / found["median_s"], **found}


def measure_training(
    site: Site, name: str, rows: int, course: Course, *, num_steps: int, instead_of: str = ""
) -> Record:
    """Steps of tiered_zero. One that is compared with others begins with the values that they begin with."""
    import tiered_zero

    if "tokens_per_s" in site.records().get(instead_of, {}):
        return left_out(f"{instead_of!r} could run")
    size = size_of(site, name)
    compared = num_steps > 5
    model = build_seeded(size) if compared else meta_model(size)
    site.reset_peaks()
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        try:
            config = make_config(course, Path(directory), site.runtime(), rows=rows)
            engine = tiered_zero.initialize(model=model, config=config)[0]
        except (tiered_zero.PlanError, tiered_zero.errors.StoreError) as error:
            return left_out(str(error).splitlines()[0])
        with engine:

            def step(number: int) -> torch.Tensor:
                loss: torch.Tensor = engine(batch(size, number, site.device, rows))
                engine.backward(loss)
                engine.step()
                return loss

            num_params = sum(param.numel() for param in engine.module.parameters())
            found = measure(site, step, min(num_steps, 6) if site.smoke else num_steps)
            report = engine.step_report
            assert report is not None
            bounds = bounds_of(site, compute_name(name, rows), report.link_nbytes, num_params)
            largest_s = max(bounds.values(), default=0.0)
            policy, planned = (
                engine.plan.update_policy.policy,
                {tier: engine.plan.nbytes(tier) for tier in ("device", "host", "nvme")},
            )
    return {
        "passed": None,
        **rates(site, found, compute_name(name, rows), rows * size.tokens),
        "policy": policy,
        "num_parameters": num_params,
        "bounds_s": bounds,
        "times_bound": found["median_s"] / largest_s if largest_s else None,
        "planned_nbytes": planned,
        "link_nbytes": report.link_nbytes,
        "causes_s": report.seconds,
    }


def build_seeded(size: Size) -> Transformer:
    """In host memory, in fp32, the same values in each process."""
    torch.manual_seed(0)
    return Transformer(size, recompute=True)


def bounds_of(site: Site, compute: str, links: dict[str, int], num_params: int) -> dict[str, float]:
    """Seconds that each resource takes at least, by what the sections before have measured."""
    records = site.records()
    known, bounds = records.get("links", {}), {}
    if alone := records.get(compute, {}).get("median_s"):
        bounds["compute"] = alone
    if rate := known.get("triad_bytes_per_s"):
        bounds["DRAM"] = DRAM_NBYTES_PER_PARAMETER * num_params / rate
        bounds["disk"] = sum(links.get(f"disk {way}", 0) / known[f"{way}_bytes_per_s"] for way in ("read", "write"))
    if "h2d_bytes_per_s" in known:
        bounds["to device"] = links.get("fetch", 0) / known["h2d_bytes_per_s"]
        bounds["to host"] = links.get("reduce", 0) / known["d2h_bytes_per_s"]
    return bounds


# -- the largest model -------------------------------------------------------------------------------------------------

LARGEST_PLACEMENTS = ("cpu/cpu", "cpu/nvme", "nvme/nvme")
MOST_LAYERS, MOST_IN_SMOKE = 1024, 16
PART_TAKEN = 0.9
"""Of the host's memory and the disk: the machine's other programs live on."""


def largest_sections() -> list[Section]:
    found = []
    for title, limit_nbytes in {"largest model": None, "largest model in 24 GiB": 24 * GIB}.items():
        run = partial(train_largest, limit_nbytes=limit_nbytes)
        found.append(Section(name=title, group=title, run=run, least_s=150.0, most_s=420.0))
    return found


def train_largest(site: Site, limit_nbytes: int | None) -> Record:
    """As many layers of the 7B model as the plan finds room for, on the placement that holds the most, bisected; then
    two steps of it. `limit_nbytes`: of the device, all of it without."""
    from tiered_zero.hardware.probe import available_host_nbytes

    host_nbytes = (3 << 19) if site.smoke else int(available_host_nbytes() * PART_TAKEN)
    runtime = site.runtime(host_memory_limit=host_nbytes)
    if limit_nbytes is not None:
        if site.device.type != "cuda":
            return left_out("only CUDA's allocator takes a limit")
        total_nbytes = torch.accelerator.get_memory_info(site.device)[1]
        limit_nbytes = limit_nbytes // 1024 if site.smoke else limit_nbytes
        if total_nbytes <= limit_nbytes:
            return left_out(f"the device has {total_nbytes / GIB:.1f} GiB")
        runtime["device_memory_limit"] = limit_nbytes // 8 * 7
    size = replace(size_of(site, "7b"), layers=0)
    planned = {placement: most_layers(site, size, placement, runtime) for placement in LARGEST_PLACEMENTS}
    placement = max(planned, key=lambda name: planned[name])
    if not planned[placement]:
        return left_out("no placement has room for a single layer")
    site.reset_peaks()
    site.limit_memory(limit_nbytes)
    try:
        found = _take_two_steps(site, replace(size, layers=planned[placement]), placement, runtime)
    finally:
        site.limit_memory(None)
    kept = limit_nbytes is None or found["memory"]["reserved"] <= limit_nbytes
    return {
        "passed": kept and all(math.isfinite(loss) for loss in found["losses"]),
        "layers": planned[placement],
        "layers_by_placement": planned,
        "placement": placement,
        "limit_nbytes": limit_nbytes,
        **found,
    }


def _take_two_steps(site: Site, size: Size, placement: str, runtime: dict[str, Any]) -> Record:
    import tiered_zero

    seconds, losses = [], []
    with tempfile.TemporaryDirectory(dir=site.directory) as directory:
        config = make_config(Course(placement=placement, bf16=True), Path(directory), runtime, rows=1)
        start_s = time.perf_counter()
        with tiered_zero.initialize(model=meta_model(size), config=config)[0] as engine:
            initialize_s = time.perf_counter() - start_s
            for number in range(2):
                start_s = time.perf_counter()
                loss = engine(batch(size, number, site.device, 1))
                engine.backward(loss)
                engine.step()
                losses.append(float(loss.detach()))
                engine.flush()
                seconds.append(time.perf_counter() - start_s)
            return {
                "num_parameters": sum(param.numel() for param in engine.module.parameters()),
                "initialize_s": initialize_s,
                "seconds": seconds,
                "losses": losses,
                "planned_nbytes": {tier: engine.plan.nbytes(tier) for tier in ("device", "host", "nvme")},
                "memory": site.memory(),
            }


def most_layers(site: Site, size: Size, placement: str, runtime: dict[str, Any]) -> int:
    """Bisect the number of layers by the plan; nothing is allocated."""
    from tiered_zero.assembly.spec import specify_run
    from tiered_zero.config.load import load
    from tiered_zero.errors import PlanError

    config = load(make_config(Course(placement=placement, bf16=True), site.directory, runtime, rows=1))
    free_nbytes = disk_free_nbytes(site)

    def fits(layers: int) -> bool:
        try:
            plan = specify_run(config, meta_model(replace(size, layers=layers))).plan
            plan.check()
        except PlanError:
            return False
        return plan.nbytes("nvme") <= free_nbytes * PART_TAKEN

    low, high = 0, 1
    while high < (MOST_IN_SMOKE if site.smoke else MOST_LAYERS) and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def disk_free_nbytes(site: Site) -> int:
    return shutil.disk_usage(site.directory).free
