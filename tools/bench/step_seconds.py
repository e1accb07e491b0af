"""How far from measured steps are the seconds that a plan predicts?

    python tools/bench/step_seconds.py --dir /mnt/nvme --out records/step_seconds.jsonl

The rates of the machine are measured once, as `tiered-zero doctor --measure` does, and again at the end, to show what
changed meanwhile; predictions use the first. Then every cell trains a few steps in turns: a model, its parameters and
state in host memory ("cpu"), on nvme ("nvme"), or parameters and half of the state in host memory and the rest on nvme
("split"), without and with clipping, with one micro-batch and with four. Run it alone: a prediction says what a step
takes on a machine that does nothing else. Errors count without the model "tiny", whose steps are Python.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

import tiered_zero
from tiered_zero.assembly.choice import make_predictor
from tiered_zero.assembly.machine_rates import measure_machine
from tiered_zero.cli.bench_io import measure_directory
from tiered_zero.config.load import load as load_config
from tiered_zero.io.engine import IOSettings
from tiered_zero.plan.machine import Machine, load_machine
from tiered_zero.telemetry.report import StepReport
from tools.bench.gpt2 import build_gpt2, gpt2_config
from tools.bench.record import append_record

PLACEMENTS = ("cpu", "nvme", "split")
NUM_WARM_UP = 2
DISK_S = 8.0
UNCOUNTED = "tiny"
LARGE = ("gpt2-350m", "gpt2-1.3b")
"""All their steps in one round: their start takes long."""


@dataclass(frozen=True)
class Cell:
    """One kind of step. `clip` 0 does not clip."""

    model: str
    placement: str
    clip: float
    accumulation: int

    def __str__(self) -> str:
        return f"{self.model} {self.placement} clip {self.clip:g} x {self.accumulation}"


CELLS = [
    *itertools.starmap(Cell, itertools.product((UNCOUNTED,), PLACEMENTS, (0.0, 1.0), (1,))),
    *itertools.starmap(Cell, itertools.product(("gpt2-30m", "gpt2-124m", "gpt2-350m"), PLACEMENTS, (0.0, 1.0), (1, 4))),
    *itertools.starmap(Cell, itertools.product(("gpt2-1.3b",), ("nvme",), (0.0, 1.0), (1,))),
]


def make_config(cell: Cell, directory: str, half_nbytes: int, num_tokens: int, dtype: str) -> dict[str, Any]:
    """`half_nbytes`: of the state, where it is split."""
    param, state = ("nvme", "nvme") if cell.placement == "nvme" else ("cpu", "cpu")
    own: dict[str, Any] = {}
    if cell.placement == "split":
        state, own = "nvme", {"state_limits": {"host": half_nbytes}}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": cell.accumulation,
        "gradient_clipping": cell.clip,
        **({"bf16": {"enabled": True, "check_grad_overflow": cell.clip > 0}} if dtype == "bf16" else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": directory, "max_in_cpu": 0},
            "offload_optimizer": {"device": state, "nvme_path": directory},
        },
        "tiered_zero": {"sequence_length": num_tokens, **own},
    }


def measure(cell: Cell, directory: str, num_tokens: int, dtype: str, steps: int, machine: Machine) -> dict[str, Any]:
    """Train a few steps; return their seconds, the lanes' busy seconds and bytes, and what the plan predicts."""
    torch.manual_seed(0)
    config = gpt2_config(cell.model)
    tokens = torch.randint(0, config.vocab_size, (1, num_tokens))
    with torch.device("meta"):
        model = build_gpt2(config)
    model.train()
    numel = sum(param.numel() for param in model.parameters())
    raw = make_config(cell, directory, 6 * numel, num_tokens, dtype)
    seconds: list[float] = []
    reports: list[StepReport] = []
    with tiered_zero.initialize(model=model, config=raw)[0] as engine:
        for number in range(NUM_WARM_UP + steps):
            begun_s = time.perf_counter()
            for _ in range(cell.accumulation):
                engine.backward(engine(input_ids=tokens, labels=tokens).loss)
                engine.step()
            if number >= NUM_WARM_UP:
                seconds.append(time.perf_counter() - begun_s)
                assert engine.step_report is not None
                reports.append(engine.step_report)
        plan = engine.plan
        predicted = make_predictor(load_config(raw), model, machine)(plan)
    gc.collect()
    lanes = {lane for report in reports for lane in report.busy_s}
    return {
        "seconds": seconds,
        "policy": plan.update_policy.text,
        "busy_s": {lane: statistics.median(report.busy_s.get(lane, 0.0) for report in reports) for lane in lanes},
        "causes_s": {
            cause: statistics.median(report.seconds.get(cause, 0.0) for report in reports)
            for cause in reports[-1].seconds
        },
        "nbytes": dict(reports[-1].link_nbytes),
        "cpu_share": statistics.median(report.cpu_share or 0.0 for report in reports),
        "predicted": asdict(predicted),
    }


def load_or_measure(options: argparse.Namespace, directory: str) -> Machine:
    """Return the machine with the disk of `directory`, as `tiered-zero doctor --measure` does."""
    if options.machine is not None:
        return load_machine(options.machine)
    report = measure_directory(Path(directory), time.perf_counter() + DISK_S, (IOSettings(),))
    return measure_machine(report["disk"])


def show(found: dict[str, Any]) -> dict[str, float]:
    """Print each cell, and return its error: predicted over measured, less one."""
    errors = {}
    for name, cell in found.items():
        measured_s, predicted_s = statistics.median(cell["seconds"]), cell["predicted"]["seconds"]
        errors[name] = predicted_s / measured_s - 1
        lanes = cell["predicted"]["by_resource"].items()
        text = ", ".join(f"{lane} {s:.2f}/{cell['busy_s'].get(lane, 0.0):.2f}" for lane, s in lanes if s)
        print(f"{name:32s} {measured_s:7.3f} s, predicted {predicted_s:7.3f} {errors[name]:+5.0%}  {text}", flush=True)
    return errors


def parse_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cells with each of these words: '124m nvme, 30m'")
    parser.add_argument("--tokens", type=int, default=128, help="of a micro-batch, in one sequence")
    parser.add_argument("--dtype", choices=("bf16", "fp32"), default="bf16", help="of parameters")
    parser.add_argument("--steps", type=int, default=2, help="measured steps a cell and round, after two to warm up")
    parser.add_argument(
        "--rounds", type=int, default=2, help="how often each cell is run, in turns; large models at once"
    )
    parser.add_argument("--dir", default=".", help="where the swap directory is made, and the disk measured")
    parser.add_argument("--machine", type=Path, help="take the rates of this file, and measure none")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parse_options(arguments)
    groups = [group.split() for group in options.only.split(",")]
    cells = [cell for cell in CELLS if any(all(word in str(cell) for word in group) for group in groups)]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-seconds-", dir=options.dir) as directory:
        machine = load_or_measure(options, directory)
        print(json.dumps(asdict(machine)), flush=True)
        for number in range(options.rounds):
            for cell in cells:
                is_large = cell.model in LARGE
                if number and is_large:
                    continue
                os.sync()  # what the last cell's removal still has to write is not this one's
                steps = options.steps * (options.rounds if is_large else 1)
                new = measure(cell, directory, options.tokens, options.dtype, steps, machine)
                before = found.get(str(cell), {"seconds": []})
                found[str(cell)] = {**new, "seconds": before["seconds"] + new["seconds"]}
                show({str(cell): found[str(cell)]})
        after = load_or_measure(options, directory)
    errors = show(found)
    counted = [abs(error) for name, error in errors.items() if not name.startswith(UNCOUNTED)]
    summary = {"num": len(counted), "mean": statistics.mean(counted), "worst": max(counted)} if counted else {}
    print(f"errors: {json.dumps(summary)}")
    if options.out:
        shape = {key: value for key, value in vars(options).items() if key not in ("out", "dir", "machine")}
        append_record(
            options.out,
            "step_seconds",
            shape,
            {name: cell.pop("seconds") for name, cell in found.items()},
            None,
            unit="s",
            machine_rates=asdict(replace(machine, name="")),
            machine_rates_after=asdict(replace(after, name="")),
            errors=errors,
            summary=summary,
            cells=found,
        )


if __name__ == "__main__":
    main()
