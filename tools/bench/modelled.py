"""How far is a step on a GPU from its busiest resource? Modelled, for no GPU is at hand.

    python tools/bench/modelled.py --out tools/bench/records/modelled.jsonl

The real engine trains a model of real shape on the simulated device of tests/lagging, in bf16 with AdamW, everything in
host memory. Each side of each matrix is 1/32 of the real one, so bytes are 1/1024; what bytes set (batches of
gradients, sub-groups, prefetch) is scaled alike. Modelled, by sleeping, are the time of each product of matrices, of
each copy over the link, of each sub-group's update, and with `--nvme` of each request of the disk; they take `--slow`
times as long as they would, so that Python's own time, which is not scaled, counts for less. Attention and elementwise
kernels take no time.

Per case: seconds of a step as they would be on the machine that is modelled, the bound (the busiest of compute, link
each way, update, disk each way), and, by counts a step: the host's waits, kernels, copies, bytes each way, and CPU
seconds by thread, which are those of this machine and not scaled.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast
from unittest.mock import patch

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn
from torch.nn import functional

import tiered_zero
from tests.fakes.no_workers import FakeTransfer
from tests.lagging.build import build, why_not
from tests.lagging.cuda import LaggingDevice
from tiered_zero.grads import gradient
from tiered_zero.io.engine import IOTransfer
from tiered_zero.layout.subgroups import IN_PLACE_SUB_GROUP_NUMEL
from tiered_zero.plan import staging
from tiered_zero.record.data_files import StripedFiles
from tiered_zero.rules.native_rules import NativeRule
from tools.bench.record import append_record

SIDE = 32
SCALE = SIDE * SIDE
ROWS = 8
LINK_BYTES_PER_S = 52e9
DISK_BYTES_PER_S = {"read": 6e9, "write": 4e9}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A model, and the seconds that its step's compute and update take. `hidden`, `inner`, `vocab`: as they are."""

    layers: int
    hidden: int
    inner: int
    vocab: int
    compute_s: float
    update_s: float


SHAPES = {
    "7b": Shape(layers=32, hidden=4096, inner=11008, vocab=32000, compute_s=2.1, update_s=1.3),
    "7b, slow CPU": Shape(layers=32, hidden=4096, inner=11008, vocab=32000, compute_s=2.1, update_s=2.0),
    "1.3b": Shape(layers=24, hidden=2048, inner=5504, vocab=32000, compute_s=0.2, update_s=0.26),
    "tiny": Shape(layers=3, hidden=2048, inner=2048, vocab=2048, compute_s=0.05, update_s=0.03),
}
"""7b: 16,384 tokens a step on an H100. 1.3b: 8,192."""


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.weight


class Block(nn.Module):
    """The matrices of a transformer's block, without attention between rows."""

    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.norm, self.norm2 = Norm(hidden), Norm(hidden)
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, hidden, bias=False)
        for part in (self.o, self.down):
            nn.init.normal_(part.weight, std=1e-3)  # the sum over blocks stays small

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        rows = self.norm(values)
        values = values + self.o(self.q(rows) + self.k(rows) + self.v(rows))
        rows = self.norm2(values)
        out: torch.Tensor = values + self.down(self.gate(rows) * self.up(rows))
        return out


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden, inner, vocab = shape.hidden // SIDE, shape.inner // SIDE, shape.vocab // SIDE
        self.embedding = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, inner) for _ in range(shape.layers))
        self.head = nn.Linear(hidden, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        values = self.embedding(tokens)
        for block in self.blocks:
            values = block(values)
        return functional.cross_entropy(self.head(values).float(), tokens)


def config_for(policy: str, clipping: float, accumulation: int, swap_path: str, nvme: bool) -> dict[str, Any]:
    where = {"device": "nvme", "nvme_path": swap_path} if nvme else {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "bf16": {"enabled": True, "check_grad_overflow": clipping > 0},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": where | ({"max_in_cpu": 0} if nvme else {}),
            "offload_optimizer": {"device": "cpu"},
            "sub_group_size": IN_PLACE_SUB_GROUP_NUMEL // SCALE,
            "stage3_prefetch_bucket_size": int(5e7) // SCALE,
            "stage3_param_persistence_threshold": int(1e5) // SCALE + 32,
            "stage3_max_live_parameters": int(1e9) // SCALE,
            "stage3_max_reuse_distance": int(1e9) // SCALE,
        },
        "tiered_zero": {"device": "cuda", "update": policy, "unit_size_cap": (1 << 28) // SCALE},
    }


def thread_cpu_s() -> dict[str, float]:
    """CPU seconds so far of each thread that has run Python, by name: the simulated device's own are not among them."""
    found: dict[str, float] = {}
    for thread in threading.enumerate():
        with suppress(OSError):
            spent_ns = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text().split()[0]
            name = "autograd" if thread.name.startswith("Dummy") else thread.name.removeprefix("tiered_zero ")
            found[name] = found.get(name, 0.0) + int(spent_ns) / 1e9
    return found


class Disk:
    """A disk that serves requests in their order: reads beside writes, or `one_way`, one after the other."""

    def __init__(self, slow: float, one_way: bool) -> None:
        self._queue_of = (
            dict.fromkeys(DISK_BYTES_PER_S, "both") if one_way else {kind: kind for kind in DISK_BYTES_PER_S}
        )
        self._s_per_byte = {kind: slow * SCALE / rate for kind, rate in DISK_BYTES_PER_S.items()}
        self._free_at_s = dict.fromkeys(self._queue_of.values(), 0.0)
        self._lock = threading.Lock()
        self._nbytes = dict.fromkeys(DISK_BYTES_PER_S, 0)

    def submit(self, files: StripedFiles, request: Any, offset: int, memory: memoryview, transfers: list[Any]) -> None:
        """Stand in for `StripedFiles.submit`: what is submitted also takes its time."""
        parts: list[IOTransfer] = []
        SUBMIT(files, request, offset, memory, parts)
        for part in parts:
            kind, nbytes = part.request.kind, part.request.nbytes
            with self._lock:
                begin_s = max(time.perf_counter(), self._free_at_s[queue := self._queue_of[kind]])
                until_s = self._free_at_s[queue] = begin_s + nbytes * self._s_per_byte[kind]
                self._nbytes[kind] += nbytes
            transfers.append(DiskTransfer(part, until_s))

    def take_nbytes(self) -> dict[str, int]:
        """Return bytes since the last call, as they would be."""
        with self._lock:
            found, self._nbytes = self._nbytes, dict.fromkeys(DISK_BYTES_PER_S, 0)
        return {kind: SCALE * nbytes for kind, nbytes in found.items()}


SUBMIT = StripedFiles.submit


class DiskTransfer(FakeTransfer):
    """A request that ends no earlier than at `until_s`."""

    def __init__(self, transfer: IOTransfer, until_s: float) -> None:
        self._transfer, self._until_s = transfer, until_s
        self.request = transfer.request

    @property
    def seconds(self) -> float:
        return self._transfer.seconds

    def done(self) -> bool:
        return time.perf_counter() >= self._until_s and self._transfer.done()

    def wait(self) -> None:
        self._transfer.wait()
        time.sleep(max(0.0, self._until_s - time.perf_counter()))


class Modelled:
    """One shape on the simulated device. `slow`: wall seconds of a modelled second. `one_way`: see `Disk`."""

    def __init__(self, device: LaggingDevice, shape: Shape, slow: float, steps: int, one_way: bool = False) -> None:
        self.device, self.shape, self.slow, self.steps, self.one_way = device, shape, slow, steps, one_way
        self.tokens = torch.arange(ROWS, device="cuda")
        model = Model(shape)
        self.numel = sum(param.numel() for param in model.parameters())
        flops = (
            6 * ROWS * sum(p.numel() for p in model.parameters() if p.dim() == 2 and p is not model.embedding.weight)
        )
        link = LINK_BYTES_PER_S / SCALE / slow
        self.rates = {"flops_per_s": flops / shape.compute_s / slow, "h2d_bytes_per_s": link, "d2h_bytes_per_s": link}

    def measure_launch(self) -> dict[str, float]:
        """CPU seconds a step, by thread, of what the simulation takes to launch the same kernels without the engine."""
        model = Model(self.shape).bfloat16().cuda()
        hook = cast(Any, model.head.weight).register_hook  # torch gives it no types
        hook(lambda grad: threading.current_thread() and None)  # Python meets its thread
        before = {}
        for number in range(1 + self.steps):
            if number == 1:
                before = thread_cpu_s()
            model(self.tokens).backward()
            model.zero_grad()
        found = {name: (spent_s - before.get(name, 0.0)) / self.steps for name, spent_s in thread_cpu_s().items()}
        torch.accelerator.synchronize()
        return found

    def measure(self, policy: str, clipping: float, accumulation: int = 1, nvme: bool = False) -> dict[str, Any]:
        """Steps of the engine, after two to warm up."""
        update, element_s, late_s = NativeRule.update, self.shape.update_s * self.slow / self.numel, 0.0

        def timed_update(rule: NativeRule, runs: Any) -> None:
            nonlocal late_s  # of the last wake-up, which does not delay the next
            until_s = time.perf_counter() - late_s + element_s * sum(run.master.numel() for run in runs)
            update(rule, runs)
            time.sleep(max(0.0, until_s - time.perf_counter()))
            late_s = time.perf_counter() - until_s

        self.device.reset()
        disk = Disk(self.slow, self.one_way)
        batch_nbytes = max(1, gradient.BATCH_NBYTES // SCALE)
        with (
            tempfile.TemporaryDirectory() as swap_path,
            patch.object(NativeRule, "update", timed_update),
            patch.object(gradient, "BATCH_NBYTES", batch_nbytes),
            patch.object(staging, "AUTO_STATE_STAGING_NBYTES", staging.AUTO_STATE_STAGING_NBYTES // SCALE),
            patch.object(StripedFiles, "submit", lambda *request: disk.submit(*request)),
        ):
            config = config_for(policy, clipping, accumulation, swap_path, nvme)
            with tiered_zero.initialize(model=Model(self.shape), config=config)[0] as engine:
                self.device.set(**self.rates)
                ends_s, reports = [], []
                for number in range(2 + self.steps):
                    if number == 2:
                        self.device.take_counts()
                        disk.take_nbytes()
                        before = thread_cpu_s()
                        ends_s.append(time.perf_counter())
                    for _ in range(accumulation):
                        engine.backward(engine(self.tokens))
                        engine.step()
                    if number >= 2:
                        ends_s.append(time.perf_counter())
                        assert engine.step_report is not None
                        reports.append(engine.step_report)
                cpu_s = {
                    name: (spent_s - before.get(name, 0.0)) / self.steps for name, spent_s in thread_cpu_s().items()
                }
                counts = {name: count / self.steps for name, count in self.device.take_counts().items()}
                self.device.reset()
                disk_nbytes = {kind: n / self.steps for kind, n in disk.take_nbytes().items() if n}
                choice = engine.plan.update_policy
                assert not any(report.skipped for report in reports), "gradients are finite"
        seconds = [(stop - start) / self.slow for start, stop in itertools.pairwise(ends_s)]
        copied = {way: SCALE * counts.get(f"copy.{way}.async_bytes", 0) for way in ("h2d", "d2h")}
        return {
            "seconds": seconds,
            "policy": choice.policy,
            "in_backward": choice.optimizer_in_backward,
            "bounds_s": {"compute": accumulation * self.shape.compute_s, "update": self.shape.update_s}
            | {way: nbytes / LINK_BYTES_PER_S for way, nbytes in copied.items()}
            | {f"disk {kind}": nbytes / DISK_BYTES_PER_S[kind] for kind, nbytes in disk_nbytes.items()},
            "host_cpu_s": {name: spent_s for name, spent_s in cpu_s.items() if spent_s > 1e-3},
            "kernels": counts.get("kernel", 0),
            "copies": {way: counts.get(f"copy.{way}.async", 0) for way in copied},
            "copied_nbytes": copied | disk_nbytes,
            "waits": {name.removeprefix("host_wait."): n for name, n in counts.items() if name.startswith("host_wait")},
            "causes_s": {
                cause: statistics.median(report.seconds.get(cause, 0.0) for report in reports) / self.slow
                for cause in reports[-1].seconds
            },
            "busy_s": {
                lane: statistics.median(report.busy_s.get(lane, 0.0) for report in reports) / self.slow
                for lane in reports[-1].busy_s
            },
        }


CASES = {f"{policy}, clipping {clip:g}": (policy, clip) for policy in ("overlapped", "barrier") for clip in (0.0, 1.0)}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SHAPES, default="7b")
    parser.add_argument("--slow", type=float, default=2.5, help="wall seconds of a modelled second")
    parser.add_argument("--steps", type=int, default=3, help="measured steps a case")
    parser.add_argument("--accumulation", type=int, default=1, help="micro-batches a step")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--nvme", action="store_true", help="parameters rest on a disk, with rates of its own")
    parser.add_argument("--one-way", action="store_true", help="that disk does not read and write at once")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny model: does it run?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.model, options.slow, options.steps, options.cases = "tiny", 1.0, 1, options.cases[:2]
    if why := why_not():
        raise SystemExit(why)
    torch.set_num_threads(1)
    device = LaggingDevice(build())
    modelled = Modelled(device, SHAPES[options.model], options.slow, options.steps, options.one_way)
    samples: dict[str, list[float]] = {}
    found: dict[str, Any] = {}
    launch_s = modelled.measure_launch()
    print(f"launch without the engine: {json.dumps(launch_s)}")
    for case in options.cases:
        result = found[case] = modelled.measure(*CASES[case], options.accumulation, options.nvme)
        samples[case] = result.pop("seconds")
        bounds = result["bounds_s"]
        by = max(bounds, key=bounds.__getitem__)
        result["bound_by"], result["times_bound"] = by, statistics.median(samples[case]) / bounds[by]
        seconds = statistics.median(samples[case])
        print(f"{case}: {seconds:.3f} s, {result['times_bound']:.3f} of {by}; {json.dumps(result)}", flush=True)
    bound = {case: max(result["bounds_s"].values()) for case, result in found.items()}
    shape = {key: value for key, value in vars(options).items() if key not in ("out", "cases")}
    if options.out:
        append_record(
            options.out, "modelled", shape, samples, bound, unit="s, modelled", launch_cpu_s=launch_s, results=found
        )
    return found


if __name__ == "__main__":
    main()
