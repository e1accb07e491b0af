"""Does the update run at memory speed, and how much sooner is it done than with torch's operations?

    python tools/bench/update.py --out records/update.jsonl

One AdamW step over bf16 gradients and a bf16 copy of the parameters, 28 bytes a parameter, in turn and in one run:
  triad          STREAM's, compiled here, with the line that a store must first fetch counted: the bound
  kernel         one run of all parameters, by each instruction set
  kernel fp32    the same with fp32 gradients, no copy, and the bits of torch
  small          the same parameters in 10,000 runs: one call of the kernel
  small, packed  and with the table of their addresses made anew, in Python
  whole          norm and overflow check, then the update with unscaling, clipping and the cast folded in
  torch          the same by torch around AdamW(fused=True): upcast, unscale, check, norm, clip, step, cast
  torch, reuse   and with every temporary array made once, which few programs do
  fallback       our update where there was no compiler
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import numpy
import torch

import tiered_zero.native
from tiered_zero.native import find_library
from tiered_zero.native.norms import GradNorm
from tiered_zero.native.update import Dtype, Hyper, UpdateKernel, supported_levels
from tiered_zero.rules.native_rules import AdamRule, find_torch_root
from tiered_zero.rules.rule import Slice
from tools.bench.record import append_record

NBYTES_PER_PARAMETER = 28
MIB = 1 << 20
CLIP, LOSS_SCALE = 1.0, 1024.0


def build(source: Path, folder: str) -> Path:
    path = Path(folder) / f"{source.stem}.so"
    subprocess.run(["cc", "-O3", "-pthread", "-fPIC", "-shared", str(source), "-o", str(path)], check=True)
    return path


def make_slices(numel: int, num_slices: int, grad_dtype: torch.dtype = torch.bfloat16) -> list[Slice]:
    """Runs that cut `numel` elements evenly; each has arrays of its own."""
    hyper = {"lr": 1e-3, "weight_decay": 0.1}
    runs = []
    for index in range(num_slices):
        length = numel * (index + 1) // num_slices - numel * index // num_slices
        master, grad = torch.rand(length), torch.randn(length).to(grad_dtype)
        state = {name: torch.zeros(length) for name in ("exp_avg", "exp_avg_sq")}
        out = master.bfloat16() if grad_dtype is torch.bfloat16 else None
        runs.append(Slice(master=master, grad=grad, state=state, scalars={}, hyper=hyper, out=out))
    return runs


def make_table(rule: AdamRule, runs: list[Slice]) -> tuple[numpy.ndarray, Hyper]:
    """The kernel's table of alike runs, without the checks that the rule makes; the table points to the hyper."""
    hyper = rule._kernel_hyper({**rule._defaults, **runs[0].hyper}, {})
    hyper.grad_type = hyper.out_type = Dtype.BFLOAT16
    hyper.grad_scale = 1.0
    rows = [
        [t.data_ptr() for t in (run.master, run.grad, run.out, *run.state.values()) if t is not None]
        + [0, run.master.numel(), ctypes.addressof(hyper)]
        for run in runs
    ]
    return numpy.array(rows, numpy.uint64), hyper


def whole_update(rule: AdamRule, norms: GradNorm, runs: list[Slice]) -> None:
    """What a step does to gradients that carry a loss scale, of one large run."""
    (run,) = runs
    norm = norms.in_memory([run.grad])[0] / LOSS_SCALE
    if not math.isfinite(norm):
        return
    run.grad_scale = min(1.0, CLIP / (norm + 1e-6)) / LOSS_SCALE
    rule.update(runs)


class TorchUpdate:
    """The same with torch's operations."""

    def __init__(self, run: Slice) -> None:
        self.run = run
        self.parameter = torch.nn.Parameter(run.master.clone())
        self.grad = torch.empty_like(run.master)
        self.out = torch.empty_like(run.master, dtype=torch.bfloat16)
        self.optimizer = torch.optim.AdamW([self.parameter], lr=1e-3, weight_decay=0.1, fused=True)

    def step(self) -> None:
        self.parameter.grad = self.run.grad.float().mul_(1 / LOSS_SCALE)
        if not torch.isfinite(self.parameter.grad).all():
            return
        torch.nn.utils.clip_grad_norm_([self.parameter], CLIP)
        self.optimizer.step()
        self.out.copy_(self.parameter.detach())

    def step_reusing(self) -> None:
        self.parameter.grad = self.grad.copy_(self.run.grad).mul_(1 / LOSS_SCALE)
        norm = torch.linalg.vector_norm(self.grad)
        if not torch.isfinite(norm):
            return
        self.grad.mul_(torch.clamp(CLIP / (norm + 1e-6), max=1.0))
        self.optimizer.step()
        self.out.copy_(self.parameter.detach())


def measure(tasks: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each task, in turn, so that a change of the machine's mood meets all. The first round warms up."""
    samples: dict[str, list[float]] = {name: [] for name in tasks}
    for round_ in range(rounds + 1):
        for name, task in tasks.items():
            start_s = time.perf_counter()
            task()
            if round_:
                samples[name].append(time.perf_counter() - start_s)
    return samples


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--numel", type=int, default=64 * MIB, help="parameters")
    parser.add_argument("--num-small", type=int, default=10_000, help="runs of the small ones")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="two seconds: does it run?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.numel, options.num_small, options.rounds = MIB, 100, 2

    with tempfile.TemporaryDirectory() as folder:
        source = Path(tiered_zero.native.__file__).parent / "update.c"
        library = find_library("_update") or build(source, folder)
        kernels = {level: UpdateKernel(library, level, root=find_torch_root()) for level in supported_levels(library)}
        stream = ctypes.CDLL(str(build(Path(__file__).parent / "triad.c", folder)))
    best = next(iter(kernels.values()))
    rules = {level: AdamRule(decoupled=True, kernel=kernel) for level, kernel in kernels.items()}
    rule, fallback = rules[best.level], AdamRule(decoupled=True, kernel=None)
    norms = GradNorm(best)
    torch.set_num_threads(best.num_threads)

    numel = options.numel
    large, small = make_slices(numel, 1), make_slices(numel, options.num_small)
    fp32 = make_slices(numel, 1, torch.float32)
    by_torch, (table, _hyper) = TorchUpdate(large[0]), make_table(rule, small)
    a, b, c = (torch.rand(numel // 2, dtype=torch.float64) for _ in range(3))
    addresses = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)]
    tasks: dict[str, Callable[[], object]] = {
        "triad": lambda: stream.triad(*addresses, ctypes.c_int64(a.numel()), best.num_threads),
        **{f"kernel {level}": partial(each.update, large) for level, each in rules.items()},
        "kernel fp32": lambda: rule.update(fp32),
        "small": lambda: best.update(table.ctypes.data, len(table)),
        "small, packed": lambda: rule.update(small),
        "whole": lambda: whole_update(rule, norms, large),
        "torch": by_torch.step,
        "torch, reuse": by_torch.step_reusing,
        "fallback": lambda: fallback.update(large),
    }
    samples = measure(tasks, options.rounds)

    seconds = {name: statistics.median(values) for name, values in samples.items()}
    rates = {name: NBYTES_PER_PARAMETER * numel / value * 1e-9 for name, value in seconds.items()}
    rates["triad"] = 4 * a.nbytes / seconds["triad"] * 1e-9
    kernel_name = f"kernel {best.level}"
    ratios = {
        "kernel rate / triad rate": rates[kernel_name] / rates["triad"],
        "kernel fp32 rate / triad rate": rates["kernel fp32"] / rates["triad"],
        "torch / whole": seconds["torch"] / seconds["whole"],
        "torch, reuse / whole": seconds["torch, reuse"] / seconds["whole"],
        "fallback / kernel": seconds["fallback"] / seconds[kernel_name],
        "small / large": seconds["small"] / seconds[kernel_name],
        "small, packed / large": seconds["small, packed"] / seconds[kernel_name],
    }
    report = {"unit": "s", "rates_gb_per_s": rates, "ratios": ratios, "torch_bits": rule.torch_bits}
    shape = {"numel": numel, "num_small": options.num_small, "threads": best.num_threads, "isa": best.level}
    if options.out:
        append_record(options.out, "update", shape, samples, {"triad_gb_per_s": rates["triad"]}, **report)
    print(json.dumps({**shape, **report}, indent=2))
    for kernel in kernels.values():
        kernel.close()
    return report


if __name__ == "__main__":
    main()
