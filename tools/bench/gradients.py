"""Does resident memory grow with the model, at one budget of host memory and everything on NVMe?

    python tools/bench/gradients.py --dir /path/on/nvme --out tools/bench/records/gradients.jsonl

The built-in GPT in bf16, AdamW, clipping, on the CPU, each size in a process of its own: parameters, masters, state
and, as far as the budget leaves no room, gradients rest on NVMe. Per size: the highest resident set of the process
beyond that of one which has imported everything, beside the bytes that the plan has in host memory; the seconds of each
step after the first; its bytes on disk, and their seconds at the disk's rate with reads and writes in that ratio,
measured before and after the steps (the better counts).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch

import tiered_zero
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig
from tools.bench.gpt2 import resident_nbytes
from tools.bench.record import append_record
from tools.bench.step import measure_disk

MIB = 1 << 20
SIZES = {
    "0.35B": GPTConfig(layers=27, hidden=1024, vocab=8192, context=512),
    "1.3B": GPTConfig(layers=26, hidden=2048, vocab=8192, context=512),
    "2.5B": GPTConfig(layers=32, hidden=2560, vocab=8192, context=512),
    "smoke": GPTConfig(layers=6, hidden=128, vocab=256, context=32),
}


def measure_size(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    base_nbytes = resident_nbytes("VmRSS")
    shape, nvme = SIZES[options.size], {"device": "nvme", "nvme_path": options.dir}
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulation,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**nvme, "max_in_cpu": 0},
            "offload_optimizer": nvme,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"device": "cpu", "host_memory_limit": options.budget},
    }
    tokens = torch.randint(shape.vocab, (1, min(options.tokens, shape.context)))
    steps: list[dict[str, float]] = []
    model = build_gpt(shape)
    with tiered_zero.initialize(model=model, config=config)[0] as engine:
        for _ in range(1 + options.steps):
            start_s = time.perf_counter()
            for _ in range(options.accumulation):
                engine.backward(engine(tokens, tokens))
                engine.step()
            engine.flush()
            seconds, report = time.perf_counter() - start_s, engine.step_report
            assert report is not None
            moved = {kind: report.link_nbytes.get(f"disk {kind}", 0) for kind in ("read", "write")}
            steps.append({"seconds": seconds, **moved})
        plan = engine.plan
        peak_nbytes = resident_nbytes("VmHWM")
        assert base_nbytes is not None and peak_nbytes is not None, "/proc has the resident set"
        return {
            "num_parameters": sum(param.numel() for param in model.parameters()),
            "resident_nbytes": peak_nbytes - base_nbytes,
            "planned_nbytes": plan.needed_nbytes("host"),
            "gradient_nbytes": {tier: plan.nbytes(tier, "gradient") for tier in ("host", "nvme")},
            "update_policy": plan.update_policy.policy,
            "steps": steps[1:],
        }


def run(options: argparse.Namespace, swap: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nbytes = (8 if options.smoke else 1024) * MIB
    for size in options.sizes.split(","):
        command = [sys.executable, str(Path(__file__).resolve()), "--size", size, "--dir", swap]
        for name in ("budget", "accumulation", "tokens", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        before = measure_disk(swap, nbytes, options.seconds, [0.5])[0]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        result = found[size] = json.loads(done.stdout.splitlines()[-1])
        last = result["steps"][-1]
        share = last["read"] / max(1, last["read"] + last["write"])
        rate = max(before, *measure_disk(swap, nbytes, options.seconds, [share]))
        for step in result["steps"]:
            step["disk_s"] = (step["read"] + step["write"]) / rate
        result["disk_bytes_per_s"] = rate
        print(size, json.dumps(result), file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the disk that is measured")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--sizes", default="0.35B,1.3B,2.5B", help=", ".join(SIZES))
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--budget", default="2GiB", help="tiered_zero.host_memory_limit")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="after the first")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of the disk")
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    options = parser.parse_args(arguments)
    if options.size:
        print(json.dumps(measure_size(options)))
        return
    if options.smoke:
        options.sizes, options.budget, options.seconds = "smoke", "64MiB", 0.2
        options.steps = 1
    with tempfile.TemporaryDirectory(dir=options.dir) as swap:
        found = run(options, swap)
    shape = {key: getattr(options, key) for key in ("budget", "accumulation", "tokens")}
    samples = {size: [step["seconds"] for step in result["steps"]] for size, result in found.items()}
    bound = {size: min(step["disk_s"] for step in result["steps"]) for size, result in found.items()}
    if options.out:
        append_record(options.out, "gradients", shape, samples, bound, unit="s", sizes=found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
