"""What does a training step cost on each placement, beside plain PyTorch and beside the bounds of this machine?

    python tools/bench/step.py --tokens 64 --dir /mnt/nvme --out records/step.jsonl

On one model in one run, each case in a process of its own, in turns:
  compute     forward and backward alone, in bf16: a bound
  plain       plain PyTorch: bf16 forward and backward, torch.optim.AdamW on fp32 masters, weights copied back
  plain fp32  plain PyTorch, all of it in fp32
  P/O U       tiered_zero: parameters rest on P, masters and state on O (device, cpu, nvme), the update policy is U;
              checksums of all chunks are verified where nothing else is said
The bounds are measured around every placement's run: memory by a triad, the disk through the engine that the runs
choose, reading and writing at once in the case's own ratio of bytes; the best of all counts. A case's bound is the
largest of compute, update at memory speed (their sum where the CPU is the device), and its own bytes at that rate of
the disk. A case is named after the update
policy that ran, whatever was asked for. Peak memory is the resident set beyond that of a process which has imported
torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

from tools.bench.bounds import measure_disk, measure_triad
from tools.bench.gpt2 import MODELS, build_gpt2, gpt2_config, resident_nbytes

DRAM_NBYTES_PER_PARAMETER = 28
"""AdamW: read a bf16 gradient, fp32 master and two moments (14), write the three and a bf16 parameter (14)."""

NUM_WARM_UP = 2
SECTIONS = {"device": "none", "cpu": "cpu", "nvme": "nvme"}
UPDATES = ("barrier", "overlapped", "delayed")
CHECKSUMS = ("all", "off")
MIB = 1 << 20


@dataclass(frozen=True)
class Task:
    """What one process is to measure. `case`: compute, plain, plain fp32, or P/O. `clip`: 0 does not clip.
    `checksums`: which swapped chunks are verified."""

    case: str
    update: str
    checksums: str
    model: str
    tokens: int
    steps: int
    clip: float
    directory: str

    def name(self, update_policy: str) -> str:
        """`update_policy`: the one that ran."""
        suffix = "" if self.checksums == CHECKSUMS[0] else f", checksums {self.checksums}"
        return f"{self.case} {update_policy}".strip() + suffix


@dataclass
class Result:
    """`seconds`: each measured step. `read_nbytes`, `written_nbytes`: on the disk, the mean of these steps.
    `disk_busy`: the part of their time in which it read, or that in which it wrote, whichever is more.
    `update_policy`: the one that ran. `disk_bytes_per_s`: the disk's best rate at this ratio of reads and writes."""

    update_policy: str = ""
    optimizer_in_backward: bool = False
    num_parameters: int = 0
    seconds: list[float] = field(default_factory=list)
    peak_rss_nbytes: int | None = None
    peak_device_nbytes: int | None = None
    read_nbytes: int = 0
    written_nbytes: int = 0
    disk_busy: float | None = None
    disk_bytes_per_s: float | None = None
    bound_by: str = ""
    overlap: float | None = None


# -- in a process of its own -------------------------------------------------------------------------------------------


def measure_task(task: Task) -> Result:
    """Steps to warm up (state is born in the first, the order of use is known after it), then the measured ones."""
    base_nbytes = resident_nbytes("VmRSS")
    reset_peak()
    torch.manual_seed(0)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = gpt2_config(task.model)
    tokens = torch.randint(0, config.vocab_size, (1, task.tokens), device=device)
    result = Result()
    prepare = prepare_placement if "/" in task.case else prepare_plain
    step, end = prepare(task, config, tokens, device, result)
    for _ in range(NUM_WARM_UP):
        step()
    for _ in range(task.steps):
        synchronize(device)
        start_s = time.perf_counter()
        step()
        synchronize(device)
        result.seconds.append(time.perf_counter() - start_s)
    peak_nbytes = resident_nbytes("VmHWM")
    if base_nbytes is not None and peak_nbytes is not None:
        result.peak_rss_nbytes = peak_nbytes - base_nbytes
    if device.type == "cuda":
        result.peak_device_nbytes = torch.cuda.max_memory_allocated()
    end()
    return result


Steps = tuple[Callable[[], object], Callable[[], object]]
"""(take a step, end)"""


def prepare_plain(task: Task, config: Any, tokens: torch.Tensor, device: torch.device, result: Result) -> Steps:
    model: torch.nn.Module = build_gpt2(config)
    model.to(device).train()
    params = list(model.parameters())
    result.num_parameters = sum(param.numel() for param in params)

    def pass_both_ways() -> None:
        model(input_ids=tokens, labels=tokens).loss.backward()

    def compute() -> None:
        pass_both_ways()
        model.zero_grad()

    def clip(trained: Sequence[torch.Tensor]) -> None:
        if task.clip:
            torch.nn.utils.clip_grad_norm_(trained, task.clip)

    def step_fp32() -> None:
        pass_both_ways()
        clip(params)
        optimizer.step()
        optimizer.zero_grad()

    def step_bf16() -> None:
        pass_both_ways()
        for param, master in zip(params, masters, strict=True):
            assert param.grad is not None
            master.grad, param.grad = param.grad.float(), None
        clip(masters)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param, master in zip(params, masters, strict=True):
                param.copy_(master)

    if task.case == "plain fp32":
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        return step_fp32, lambda: None
    masters = [param.detach().clone().requires_grad_() for param in params] if task.case == "plain" else []
    model.bfloat16()
    if task.case == "compute":
        return compute, lambda: None
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    return step_bf16, lambda: None


def prepare_placement(task: Task, config: Any, tokens: torch.Tensor, device: torch.device, result: Result) -> Steps:
    import tiered_zero
    from tiered_zero.telemetry.report import StepReport

    with torch.device("meta"):
        model = build_gpt2(config)
    model.train()
    result.num_parameters = sum(param.numel() for param in model.parameters())
    engine, *_ = tiered_zero.initialize(model=model, config=make_config(task))
    chosen = engine.plan.update_policy
    result.update_policy, result.optimizer_in_backward = chosen.policy, chosen.optimizer_in_backward

    reports: list[StepReport] = []

    def step() -> None:
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
        assert engine.step_report is not None
        reports.append(engine.step_report)

    def end() -> None:
        measured = reports[NUM_WARM_UP:]
        result.read_nbytes, result.written_nbytes = (
            sum(report.link_nbytes.get(f"disk {way}", 0) for report in measured) // len(measured)
            for way in ("read", "write")
        )
        busy_s = max(sum(report.busy_s.get(f"disk {way}", 0.0) for report in measured) for way in ("read", "write"))
        result.disk_busy = busy_s / sum(report.wall_s for report in measured)
        result.bound_by, result.overlap = reports[-1].bound_by, reports[-1].overlap
        engine.close()

    return step, end


def make_config(task: Task) -> dict[str, Any]:
    """With `clip` 0 nothing asks for a verdict over all gradients, so that overlapped updates begin in backward."""
    params, state = (SECTIONS[name] for name in task.case.split("/"))
    paths = {"nvme_path": task.directory}
    return {
        "train_batch_size": 1,
        "gradient_clipping": task.clip,
        "bf16": {"enabled": True, "check_grad_overflow": task.clip > 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.01}},
        "zero_optimization": {
            "stage": 3 if params != "none" else 2,
            "offload_param": {"device": params, "max_in_cpu": 0, **paths},
            "offload_optimizer": {"device": state, **paths},
        },
        "tiered_zero": {
            "update": task.update,
            "delay_start_step": 1,
            "checksums": task.checksums,
            "device_memory_limit": "1TiB",  # page where the CPU is the device too; on a GPU its own memory is less
        },
    }


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak() -> None:
    """VmHWM starts anew (proc(5), clear_refs); where that cannot be, it still holds what imports took at their peak."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError as error:
        print(f"peak memory includes that of the imports: {error}", file=sys.stderr)


# -- the bounds --------------------------------------------------------------------------------------------------------


def bound_of(result: Result, compute_s: float, triad: float) -> dict[str, float]:
    """Seconds by resource that a step takes at least. Where the CPU is the device, the update has the cores that
    compute, so that both take their sum. Reads and writes share the disk, so all its bytes go at the rate that it has
    with both at once, in the step's own ratio."""
    update_s = DRAM_NBYTES_PER_PARAMETER * result.num_parameters / triad
    if torch.cuda.is_available():
        bounds = {"compute": compute_s, "DRAM": update_s}
    else:
        bounds = {"compute and update": compute_s + update_s}
    if result.disk_bytes_per_s is not None:
        bounds["disk"] = (result.read_nbytes + result.written_nbytes) / result.disk_bytes_per_s
    return bounds


# -- all of it ---------------------------------------------------------------------------------------------------------


def run_task(task: Task) -> Result:
    """In a fresh process; its errors are shown where it fails."""
    command = [sys.executable, str(Path(__file__).resolve()), "--task", json.dumps(vars(task))]
    with tempfile.TemporaryFile("w+") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True)
        if done.returncode != 0:
            log.seek(0)
            raise SystemExit(f"{task.name(task.update)}: exit status {done.returncode}\n{log.read()}")
    return Result(**json.loads(done.stdout.splitlines()[-1]))


def list_tasks(options: argparse.Namespace, directory: str) -> list[Task]:
    plain = () if options.no_plain else ("plain", "plain fp32")
    cases = [(case, "", CHECKSUMS[0]) for case in ("compute", *plain)]
    cases += [
        (placement, update, checksums)
        for placement in options.placements
        for update in options.update
        for checksums in (options.checksums if "nvme" in placement else CHECKSUMS[:1])
    ]
    shape: dict[str, Any] = {name: vars(options)[name] for name in ("model", "tokens", "steps", "clip")}
    return [Task(*case, **shape, directory=directory) for case in cases]


def show(results: Mapping[str, Result], bounds: Mapping[str, Mapping[str, float]], ratios: Mapping[str, float]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="One step, medians")
    for title in ("case", "s", "min", "max", "x plain", "bound", "x bound", "busiest in the run", "RSS MiB"):
        table.add_column(title, justify="left" if title in ("case", "bound", "busiest in the run") else "right")
    for name, result in results.items():
        seconds = statistics.median(result.seconds)
        resource = max(bounds.get(name, {"": 0.0}), key=lambda key: bounds.get(name, {"": 0.0})[key])
        bound_s = bounds.get(name, {}).get(resource)
        table.add_row(
            name,
            f"{seconds:.3f}",
            f"{min(result.seconds):.3f}",
            f"{max(result.seconds):.3f}",
            f"{ratios[name]:.2f}" if name in ratios else "",
            f"{bound_s:.3f} {resource}" if bound_s else "",
            f"{seconds / bound_s:.2f}" if bound_s else "",
            result.bound_by,
            f"{result.peak_rss_nbytes / MIB:.0f}" if result.peak_rss_nbytes is not None else "?",
        )
    Console(width=None if sys.stdout.isatty() else 140).print(table)


def names(allowed: Sequence[str], separator: str | None = None) -> Callable[[str], list[str]]:
    """An argument: `allowed` words (or pairs of them), separated by commas."""

    def parse(text: str) -> list[str]:
        given = [name.strip() for name in text.split(",")]
        for name in given:
            words = name.split(separator) if separator else [name]
            if len(words) != (2 if separator else 1) or not set(words) <= set(allowed):
                raise argparse.ArgumentTypeError(f"{name!r}: expected {separator or ''} of {', '.join(allowed)}")
        return given

    return parse


def parse_options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="gpt2-124m")
    parser.add_argument("--tokens", type=int, default=64, help="tokens per step, in one sequence")
    parser.add_argument("--steps", type=int, default=5, help="measured steps a case and round, after two to warm up")
    parser.add_argument("--rounds", type=int, default=2, help="how often every case is run, in turns")
    parser.add_argument("--clip", type=float, default=1.0, help="gradient clipping, in plain PyTorch too; 0: none")
    parser.add_argument(
        "--placements",
        type=names(list(SECTIONS), "/"),
        default=["device/device", "cpu/cpu", "cpu/nvme", "nvme/nvme"],
        help="pairs of device, cpu, nvme: parameters/state, separated by commas",
    )
    parser.add_argument("--update", type=names(UPDATES), default=["overlapped"], help=", ".join(UPDATES))
    parser.add_argument("--checksums", type=names(CHECKSUMS), default=["all"], help=", ".join(CHECKSUMS))
    parser.add_argument("--dir", default=".", help="where the swap directory is made, and the disk measured")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument(
        "--no-plain", action="store_true", help="without plain PyTorch, which takes 20 bytes a parameter"
    )
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny model: does it run?")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.tokens, options.steps, options.rounds = "tiny", 16, 2, 1
    return options


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    options = parse_options(arguments)
    if options.task:
        print(json.dumps(vars(measure_task(Task(**json.loads(options.task))))))
        return {}
    from tools.bench.record import append_record

    file_nbytes, measure_s = (8 * MIB, 0.1) if options.smoke else (2048 * MIB, 1.0)
    triads: list[float] = []
    rates: dict[str, list[float]] = {"disk read": [], "disk write": []}
    results: dict[str, Result] = {}
    asked: dict[Task, str] = {}
    with tempfile.TemporaryDirectory(prefix="bench-step-", dir=options.dir) as directory:

        def measure_bounds(case: str, result: Result | None) -> None:
            """Add to `rates`; those of the disk at a case's ratio are kept by the case's name."""
            os.sync()  # what the last run's removal still has to write is not the disk's fault
            triads.append(measure_triad(MIB if options.smoke else 256 * MIB))
            shares = {"disk read": 1.0, "disk write": 0.0}
            if result and (num_bytes := result.read_nbytes + result.written_nbytes):
                shares[case] = result.read_nbytes / num_bytes
            found = measure_disk(directory, file_nbytes, measure_s, list(shares.values()))
            for name, rate in zip(shares, found, strict=True):
                rates.setdefault(name, []).append(rate)

        for task in list_tasks(options, directory) * options.rounds:
            if "/" in task.case and (early := results.get(asked.get(task, ""))):
                measure_bounds(asked[task], early)
            found = run_task(task)
            name = asked[task] = task.name(found.update_policy)
            if "/" in task.case:
                measure_bounds(name, found)
            found.seconds = (results[name].seconds if name in results else []) + found.seconds
            results[name] = found
    for name, result in results.items():
        result.disk_bytes_per_s = max(rates[name]) if name in rates else None
    triad = max(triads)
    seconds = {name: statistics.median(result.seconds) for name, result in results.items()}
    bound_s = {name: bound_of(result, seconds["compute"], triad) for name, result in results.items() if "/" in name}
    ratios = {name: each / seconds["plain"] for name, each in seconds.items() if "plain" in seconds}
    show(results, bound_s, ratios)
    report = {
        "unit": "s",
        "ratios_to_plain": ratios,
        "ratios_to_bound": {name: seconds[name] / max(each.values()) for name, each in bound_s.items()},
        "bounds_s": bound_s,
        "rates_bytes_per_s": {"triad": triads, **rates},
        "results": {name: {k: v for k, v in vars(each).items() if k != "seconds"} for name, each in results.items()},
    }
    if options.out:
        shape = {key: value for key, value in vars(options).items() if key not in ("out", "task", "dir")}
        samples = {name: result.seconds for name, result in results.items()}
        best = {name: max(each) for name, each in (("triad", triads), *rates.items())}
        measured = {
            f"{name.replace(' ', '_')}_bytes_per_s": best[name] for name in ("triad", "disk read", "disk write")
        }
        append_record(options.out, "step", shape, samples, measured, **report)
    return report


if __name__ == "__main__":
    main()
