"""Tries tiered_zero on the accelerator of this machine, and keeps what it finds.

    python tools/gpu_acceptance.py --out DIR

Works for ten minutes (--minutes) and stops; the same command again goes on where it stopped, until nothing is left.
Two calls are enough for a GPU of 80 GB with 16 cores. Needs the checkout and no network. Each result is a line of
DIR/results.jsonl as soon as it is known; docs/gpu.md says how to read them. Each section runs in a process of its own,
so that one which crashes takes no other along. Ends with 1 if a check has failed.

--smoke runs everything once on tiny models, within a minute or two: on the GPU if there is one, else on the lagging
device of tests/lagging, else on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from tools.acceptance import correctness, machine, speed
from tools.acceptance.model import Course
from tools.acceptance.report import Report, Site, read_lines

LEAST_S = 20.0
"""No section is begun with less time than this."""

DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""What CUDA reads as it starts."""

Section = Callable[[Report, Site], None]


def sections() -> dict[str, Section]:
    """Name -> what it does, in their order: what decides most comes first."""
    found: dict[str, Section] = {
        "machine": machine.describe_machine,
        "links": machine.measure_links,
        "gpu tests": machine.run_gpu_tests,
        "failures": correctness.check_failures,
        "parity": correctness.check_parity,
        "memory": correctness.check_memory,
    }
    shapes = {("1.3b", 1): ("cpu/cpu", "cpu/nvme"), ("1.3b", 4): ("cpu/cpu",), ("7b", 8): ("cpu/cpu", "cpu/nvme")}
    for (name, rows), placements in shapes.items():
        found[f"compute {name} {rows}"] = partial(speed.measure_compute, name=name, rows=rows)
        for placement in placements:
            for clip in (1.0, 0.0) if placement == "cpu/cpu" else (1.0,):
                course = Course(placement=placement, bf16=True, clip=clip)
                step = partial(speed.measure_training, name=name, rows=rows, course=course)
                found[f"{name} {rows} {placement} clip {clip}"] = step
        if name == "1.3b":
            found[f"FSDP2 {name} {rows}"] = partial(speed.measure_fsdp2, name=name, rows=rows)
    found["trace"] = speed.record_trace
    return found


def run_here(names: list[str], options: argparse.Namespace) -> None:
    """Run sections in this process."""
    out, simulated = Path(options.out), None
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None and options.smoke:
        from tests.lagging import build
        from tests.lagging.cuda import LaggingDevice

        if not build.why_not():
            torch.set_num_threads(1)  # of the streams' threads, too
            simulated = LaggingDevice(build.build())
            found = torch.device("cuda")
    device = torch.device("cpu") if found is None else torch.device(found.type, 0)
    if device.type == "cpu" and not options.smoke:
        raise SystemExit("expected an accelerator; this torch finds none. --smoke tries everything without one.")
    known: dict[str, Section] = {**sections(), "exit": correctness.exit_without_close}
    with tempfile.TemporaryDirectory(prefix="acceptance-", dir=options.dir) as folder:
        site = Site(device=device, directory=Path(folder), out=out, simulated=simulated, smoke=options.smoke)
        for name in names:
            report, start_s = Report(out / "results.jsonl", name), time.perf_counter()
            try:
                known[name](report, site)
            except Exception as error:
                traceback.print_exc()
                report.write("raised", False, error=f"{type(error).__name__}: {error}")
                continue
            if name != "exit":
                report.write("end", None, seconds=time.perf_counter() - start_s)


def run_sections(options: argparse.Namespace) -> int:
    """Run what has no end in the results yet, each section in a process, as far as the time goes."""
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    results, until_s = out / "results.jsonl", time.monotonic() + 60 * options.minutes
    over = {line["section"] for line in read_lines(results) if line["what"] in ("end", "raised", "stopped")}
    left = [name for name in sections() if name not in over]
    groups = [left] if options.smoke and left else [[name] for name in left]
    for names in groups:
        room_s = until_s - time.monotonic()
        if room_s < LEAST_S:
            print(f"out of time, {len(left)} sections left: call again with the same --out", flush=True)
            return 0
        command = [sys.executable, str(Path(__file__).resolve()), "--out", options.out, "--dir", options.dir]
        command += [part for name in names for part in ("--section", name)] + ["--smoke"] * options.smoke
        try:
            code = subprocess.run(command, timeout=room_s, env={**DETERMINISTIC, **os.environ}).returncode
        except subprocess.TimeoutExpired:
            if room_s > 60 * options.minutes - 60:  # it had all the time that there is
                Report(results, names[0]).write("stopped", False, after_s=room_s)
            continue
        ends = [line for line in read_lines(results) if line["section"] in names and line["what"] in ("end", "raised")]
        if code and not ends:
            Report(results, names[0]).write("stopped", False, code=code)
        left = [name for name in left if name not in names]
    lines = read_lines(results)
    failed = [f"{line['section']}: {line['what']}" for line in lines if line["passed"] is False]
    print(f"{sum(line['passed'] is True for line in lines)} checks passed, {len(failed)} failed", *failed, sep="\n  ")
    return 1 if failed else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", required=True, help="where results.jsonl, trace.json and logs go")
    parser.add_argument("--dir", default=".", help="where swap files are made, and the disk measured")
    parser.add_argument("--minutes", type=float, default=10.0, help="for this call")
    parser.add_argument("--smoke", action="store_true", help="tiny models: does all of it run?")
    parser.add_argument("--section", action="append", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.section:
        run_here(options.section, options)
        return 0
    return run_sections(options)


if __name__ == "__main__":
    sys.exit(main())
