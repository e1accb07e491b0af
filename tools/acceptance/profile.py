"""One step by the device's own times: how busy it is, which part of the copies is hidden, and a picture of it."""

from __future__ import annotations

import gzip
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from tools.acceptance.model import Course, batch, make_config, meta_model
from tools.acceptance.report import Record, Site, without_names
from tools.acceptance.speed import size_of
from tools.step_picture import Intervals, cut, draw_png, read_trace, rows_of

MARK = "tiered_zero step"
KEPT = ("traceEvents", "schemaVersion", "deviceProperties", "baseTimeNanoseconds", "displayTimeUnit")
COPIES = {"H2D": "HtoD", "D2H": "DtoH"}
"""Row -> what the profiler calls such a copy."""


def profile_step(site: Site) -> Record:
    """Profile the third step of 1.3B with parameters and state in host memory: `trace.json.gz` and `step.png`.

    The profiler starts a step earlier, so that the update of the second step runs beside the third's forward. Rows of
    and copies are the profiler's, of the device, and that of the update the engine's spans. Without kernels in the
    profile (a simulated device, the CPU) all rows are spans, and compute is the time of its launch.
    """
    from torch.profiler import ProfilerActivity, profile

    import tiered_zero

    rows = 4
    size, course = size_of(site, "1.3b"), Course(bf16=True, clip=1.0)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * site.is_cuda
    with tempfile.TemporaryDirectory(dir=site.directory) as folder:
        engine_trace, raw = Path(folder) / "engine.json", Path(folder) / "profile.json"
        config = make_config(course, Path(folder), site.runtime(trace=str(engine_trace)), rows=rows)
        marks_s = []
        with tiered_zero.initialize(model=meta_model(size), config=config)[0] as engine:

            def step(number: int) -> None:
                marks_s.append(time.perf_counter())
                with torch.profiler.record_function(MARK):
                    engine.backward(engine(batch(size, number, site.device, rows)))
                    engine.step()

            step(0)
            with profile(activities=activities) as profiler:
                for number in range(1, 4):
                    step(number)
                site.synchronize()
        profiler.export_chrome_trace(str(raw))
        trace, window = json.loads(raw.read_text(encoding="utf-8")), (marks_s[2], marks_s[3])
        rows_s = rows_of(read_trace(engine_trace), window)
    events = [event for event in trace["traceEvents"] if "ts" in event and event.get("ph") == "X"]
    first_us = min(event["ts"] for event in events if event["name"] == MARK and event["cat"] == "user_annotation")
    offset_s = marks_s[1] - first_us / 1e6
    kernels, copies = device_times(events, offset_s)
    if kernels:
        rows_s |= {"compute": kernels, **copies}
    around = (window[0] - 0.1, window[1] + 0.1)
    trace["traceEvents"] = [
        without_names(event)
        for event in trace["traceEvents"]
        if event.get("ph") == "M" or ("ts" in event and around[0] < event["ts"] / 1e6 + offset_s < around[1])
    ]
    with gzip.open(site.out / "trace.json.gz", "wt", encoding="utf-8") as file:
        json.dump({name: value for name, value in trace.items() if name in KEPT}, file)
    busy = cut(rows_s["compute"], window)
    device = "device times" if kernels else "host spans"
    title = f"one step of {'tiny' if site.smoke else '1.3b'}, {rows} x {size.tokens} tokens, cpu/cpu, {device}"
    draw_png(rows_s, window, title, site.out / "step.png")
    return {
        "passed": None,
        "times": device,
        "wall_s": window[1] - window[0],
        "busy_part": length(busy) / (window[1] - window[0]),
        "busy_s": {name: length(cut(intervals, window)) for name, intervals in rows_s.items()},
        "copies_hidden_part": {
            name: hidden_part(cut(rows_s[name], window), busy) for name in COPIES if cut(rows_s[name], window)
        },
        "trace_nbytes": (site.out / "trace.json.gz").stat().st_size,
    }


def device_times(events: list[dict[str, Any]], offset_s: float) -> tuple[Intervals, dict[str, Intervals]]:
    """Kernels and copies of a profile, in time.perf_counter() seconds, which are `offset_s` ahead of its own."""
    kernels: list[tuple[float, float]] = []
    copies: dict[str, list[tuple[float, float]]] = {name: [] for name in COPIES}
    for event in events:
        start_s = event["ts"] / 1e6 + offset_s
        interval = (start_s, start_s + event.get("dur", 0) / 1e6)
        if event.get("cat") == "kernel":
            kernels.append(interval)
        elif event.get("cat") == "gpu_memcpy":
            for name, word in COPIES.items():
                if word in event["name"]:
                    copies[name].append(interval)
    return kernels, dict(copies)


def length(intervals: Intervals) -> float:
    return sum(end - start for start, end in intervals)


def hidden_part(copies: Intervals, busy: Intervals) -> float:
    """Which part of the copies' time a kernel runs in; both without overlaps."""
    hidden = sum(length(cut(busy, interval)) for interval in copies)
    return hidden / length(copies)
