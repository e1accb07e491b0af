"""Does resident memory grow with the model, at one budget of host memory and everything on NVMe?

    python tools/bench/gradients.py --dir /path/on/nvme --out tools/bench/records/gradients.jsonl

The built-in GPT in bf16, AdamW, clipping, on the CPU, each size in a process of its own: parameters, masters, state
and, as far as the budget leaves no room, gradients rest on NVMe. Per size:

* The highest resident set of the process beyond that of one which has imported everything, beside the bytes that the
  plan has in host memory, the CPU's own included. The rest is `own`, what forward and backward need in any case
  (activations, what kernels of torch work in), and at most `BESIDE_NBYTES`. `own` is that of plain PyTorch in another
  process, where one block serves as all of them, beyond its parameters and gradients.
* The seconds of each step from the third on (the first reads no state, the second no moments), and what they take at
  least: in forward, backward and update, which waits for the norm of all gradients, each the longer of compute, in
  plain PyTorch, and the phase's bytes at the rate that the disk has with reads and writes in that ratio.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple, cast

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import tiered_zero
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig
from tools.bench.bounds import measure_disk
from tools.bench.gpt2 import resident_nbytes
from tools.bench.record import append_record

MIB = 1 << 20
BESIDE_NBYTES = 160 * MIB
"""Of the engine's threads and Python objects, and of what malloc keeps of gradients that are freed, whatever the
model's size: larger blocks than 32 MiB return to the system at once."""
NUM_UNLIKE_STEPS = 2
"""The first steps, which read less than others."""
SIZES = {
    "0.35B": GPTConfig(layers=27, hidden=1024, vocab=8192, context=512),
    "1.3B": GPTConfig(layers=26, hidden=2048, vocab=8192, context=512),
    "2.5B": GPTConfig(layers=32, hidden=2560, vocab=8192, context=512),
    "smoke": GPTConfig(layers=6, hidden=128, vocab=256, context=32),
}


class Phase(NamedTuple):
    """Bytes that the disk moves, and seconds that compute takes."""

    read: int
    write: int
    compute_s: float = 0.0

    @property
    def read_share(self) -> float:
        return self.read / max(1, self.read + self.write)


def read_resident(name: str) -> int:
    nbytes = resident_nbytes(name)
    assert nbytes is not None, "/proc has the resident set"
    return nbytes


def measure_plain(options: argparse.Namespace) -> dict[str, float]:
    """In a process of its own: a forward and backward of the size in plain PyTorch, with the weights of one block."""
    shape = SIZES[options.size]
    base_nbytes = read_resident("VmRSS")
    model = build_gpt(dataclasses.replace(shape, layers=1)).to(torch.bfloat16).to_empty(device="cpu")
    for param in model.parameters():
        nn.init.normal_(param, std=0.01)
        cast(Any, param).register_post_accumulate_grad_hook(_drop_gradient)  # torch gives it no types
    model.blocks = nn.ModuleList(list(model.blocks) * shape.layers)
    tokens = torch.randint(shape.vocab, (1, min(options.tokens, shape.context)))
    forward_s, backward_s = [], []
    for _ in range(3):
        begin_s = time.perf_counter()
        loss = model(tokens, tokens)
        middle_s = time.perf_counter()
        loss.backward()
        forward_s.append(middle_s - begin_s)
        backward_s.append(time.perf_counter() - middle_s)
    with_gradients_nbytes = 2 * sum(param.nbytes for param in model.parameters())
    own_nbytes = read_resident("VmHWM") - base_nbytes - with_gradients_nbytes
    return {"own_nbytes": max(0, own_nbytes), "forward_s": min(forward_s), "backward_s": min(backward_s)}


def _drop_gradient(param: torch.Tensor) -> None:
    param.grad = None


def measure_size(options: argparse.Namespace) -> dict[str, Any]:
    """In a process of its own."""
    base_nbytes = read_resident("VmRSS")
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
        for _ in range(NUM_UNLIKE_STEPS + options.steps):
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
        return {
            "num_parameters": sum(param.numel() for param in model.parameters()),
            "resident_nbytes": read_resident("VmHWM") - base_nbytes,
            "planned_nbytes": plan.needed_nbytes("host"),
            "gradient_nbytes": {tier: plan.nbytes(tier, "gradient") for tier in ("host", "nvme")},
            "update_policy": plan.update_policy.policy,
            "on_nvme": {kind: plan.nbytes("nvme", kind) for kind in ("param", "state")},
            "steps": steps[NUM_UNLIKE_STEPS:],
        }


def split_step(step: dict[str, float], on_nvme: dict[str, int], plain: dict[str, float]) -> dict[str, Phase]:
    """Split a step's bytes: forward reads the parameters; backward reads those that it has not got any more, and writes
    gradients; the update reads these, reads and writes state, and writes parameters."""
    read, write = int(step["read"]), int(step["write"])
    param, state = on_nvme["param"], on_nvme["state"]
    gradients = max(0, write - param - state)
    params_read = max(0, read - state - gradients)
    forward = min(param, params_read)
    return {
        "forward": Phase(forward, 0, plain["forward_s"]),
        "backward": Phase(params_read - forward, gradients, plain["backward_s"]),
        "update": Phase(read - params_read, write - gradients),
    }


def run(options: argparse.Namespace, swap: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    nbytes = (8 if options.smoke else 1024) * MIB
    for size in options.sizes.split(","):
        command = [sys.executable, str(Path(__file__).resolve()), "--size", size, "--dir", swap]
        for name in ("budget", "accumulation", "tokens", "steps"):
            command += [f"--{name}", str(getattr(options, name))]
        plain = _run_child([*command, "--plain"])
        before = dict(zip((1.0, 0.5), measure_disk(swap, nbytes, options.seconds, [1.0, 0.5]), strict=True))
        result = found[size] = _run_child(command)
        result["own_nbytes"] = plain["own_nbytes"]
        result["excess_nbytes"] = result["resident_nbytes"] - result["planned_nbytes"] - plain["own_nbytes"]
        phases = split_step(result["steps"][-1], result["on_nvme"], plain)
        after = measure_disk(swap, nbytes, options.seconds, [each.read_share for each in phases.values()])
        result["phases"], bound_s = {}, 0.0
        for (name, phase), rate in zip(phases.items(), after, strict=True):
            rate = max(rate, *(own for share, own in before.items() if abs(share - phase.read_share) < 0.1), 0.0)
            disk_s = (phase.read + phase.write) / rate
            result["phases"][name] = {**phase._asdict(), "disk_bytes_per_s": rate, "disk_s": disk_s}
            bound_s += max(disk_s, options.accumulation * phase.compute_s)
        result["bound_s"] = bound_s
        print(size, json.dumps(result), file=sys.stderr)
    return found


def _run_child(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the disk that is measured")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--sizes", default="0.35B,1.3B,2.5B", help=", ".join(SIZES))
    parser.add_argument("--size", choices=SIZES, help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--budget", default="2GiB", help="tiered_zero.host_memory_limit")
    parser.add_argument("--accumulation", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2, help="after the first two")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each measurement of the disk")
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    options = parser.parse_args(arguments)
    if options.size:
        print(json.dumps((measure_plain if options.plain else measure_size)(options)))
        return
    if options.smoke:
        options.sizes, options.budget, options.seconds = "smoke", "64MiB", 0.2
        options.steps = 1
    with tempfile.TemporaryDirectory(dir=options.dir) as swap:
        found = run(options, swap)
    shape = {key: getattr(options, key) for key in ("budget", "accumulation", "tokens")}
    samples = {size: [step["seconds"] for step in result["steps"]] for size, result in found.items()}
    bound = {size: result["bound_s"] for size, result in found.items()}
    if options.out:
        append_record(options.out, "gradients", shape, samples, bound, unit="s", sizes=found)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
