"""How long is a step whose activations rest on disk, and how much memory does it take, beside plain PyTorch's?

    python tools/bench/activations.py --dir /path/on/nvme --out records/activations.jsonl

One step (forward, backward, SGD) of a chain of transformer blocks in fp32 on the CPU, in turn and in one run:
  write, read           the disk's rates for the activations of one step, through the same engine
  plain                 PyTorch, nothing recomputed
  plain, checkpoints    PyTorch, torch.utils.checkpoint around each block
  nvme                  tiered_zero.activations on disk, nothing recomputed
  nvme, checkpoints     the same with checkpoints: their inputs are on disk
A step's bound is the longer of PyTorch's step and of its bytes over the disk, written once and read once. Ratios are
medians of those of each round. Memory is the highest resident set of a step less that before the first step. Where the
CPU is the device, it also moves the bytes: a step's CPU seconds, of all threads, and its page faults are recorded too.

`--plain-blocks` is for a chain whose activations do not fit in memory, as PyTorch's own step cannot be run then:
PyTorch's chain has only that many blocks, its seconds count in proportion to the blocks, and nothing is recomputed.

torch maps large blocks in huge pages where THP_MEM_ALLOC_ENABLE=1 is in the environment; it asks once, when it is
imported. The record says which it was, for PyTorch's own steps as for the engine's.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tiered_zero.hardware.memory.host_memory import trim_malloc
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import fill_file, measure_rate, select_engine
from tools.bench.record import append_record
from tools.bench.update import measure

MIB = 1 << 20
HUGE_PAGES_VARIABLE = "THP_MEM_ALLOC_ENABLE"
"""torch's; 1: blocks of 2 MiB and more begin at a huge page, and ask the system for such."""

MODES = {"": False, ", checkpoints": True}
"""Suffix of a series' name -> whether each block is a checkpoint."""


class Chain(nn.Module):
    """Blocks over [batch, sequence, hidden]; the loss is the mean square of the last output."""

    def __init__(self, hidden: int, num_blocks: int, is_checkpointed: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(hidden, max(1, hidden // 64), 4 * hidden, 0.0, "gelu", 1e-5, True, True)
            for _ in range(num_blocks)
        )
        self._is_checkpointed = is_checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self._is_checkpointed else block(x)
        return x.square().mean()


def peak_of(task: Callable[[], object]) -> int:
    """Run the task; return the highest resident set meanwhile. What others have left in malloc's heap is returned
    first."""
    trim_malloc()
    Path("/proc/self/clear_refs").write_text("5")
    task()
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def counted(task: Callable[[], object], counts: list[tuple[float, int]]) -> Callable[[], object]:
    """The task, which adds the CPU seconds of all threads and the minor page faults of each run to `counts`."""

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF)
        task()
        after = resource.getrusage(resource.RUSAGE_SELF)
        cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        counts.append((cpu_s, after.ru_minflt - before.ru_minflt))

    return run


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the disk that is measured")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--blocks", type=int, default=16)
    parser.add_argument("--plain-blocks", type=int, help="of PyTorch's own chain, where all do not fit; else all")
    parser.add_argument("--sequence", type=int, default=512)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--limit", default="16GiB", help="the budget on disk")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.hidden, options.blocks, options.batch, options.limit, options.rounds = 64, 2, 8, "256MiB", 2
    with ExitStack() as ends:
        report = run(options, ends)
    print(json.dumps(report, indent=2))
    return report


def run(options: argparse.Namespace, ends: ExitStack) -> dict[str, object]:
    swap = ends.enter_context(tempfile.TemporaryDirectory(dir=options.dir))
    x = torch.randn(options.batch, options.sequence, options.hidden)
    settings = IOSettings(block_size=MIB, queue_depth=32, intra_op_parallelism=1)
    disk = select_engine(Path(swap), prefer="auto", settings=settings, io_timeout_s=60.0).engine
    ends.callback(disk.close)
    path, nbytes = f"{swap}/file", (8 if options.smoke else 1024) * MIB
    fill_file(path, nbytes)
    rates: dict[str, list[float]] = {"write": [], "read": []}
    tasks: dict[str, Callable[[], object]] = {
        mode: lambda mode=mode: rates[mode].append(  # type: ignore[misc]
            measure_rate(disk, path, nbytes, mode, 0.2 if options.smoke else 1.0)
        )
        for mode in rates
    }
    engines: dict[str, tiered_zero.Engine] = {}
    plain_blocks = options.plain_blocks or options.blocks
    scale = options.blocks / plain_blocks
    modes = {suffix: is_checkpointed for suffix, is_checkpointed in MODES.items() if scale == 1 or not is_checkpointed}
    for suffix, is_checkpointed in modes.items():
        tasks[f"plain{suffix}"] = plain_step(Chain(options.hidden, plain_blocks, is_checkpointed), x)
        model = Chain(options.hidden, options.blocks, is_checkpointed)
        config = {
            "train_micro_batch_size_per_gpu": options.batch,
            "gradient_clipping": 0.0,
            "tiered_zero": {
                "device": "cpu",
                "activations": {"device": "nvme", "nvme_path": swap, "limit": options.limit},
            },
        }
        engine = tiered_zero.initialize(model=model, optimizer=sgd(model), config=config)[0]
        engines[f"nvme{suffix}"] = ends.enter_context(engine)
        tasks[f"nvme{suffix}"] = engine_step(engine, x)

    before_nbytes = int(psutil.Process().memory_info().rss)
    counts: dict[str, list[tuple[float, int]]] = {name: [] for name in tasks}
    samples = measure({name: counted(task, counts[name]) for name, task in tasks.items()}, options.rounds)
    peaks = {name: peak_of(task) - before_nbytes for name, task in tasks.items() if name not in rates}
    moved = {}
    for name, engine in engines.items():
        assert engine.step_report is not None
        found = engine.step_report.activations
        if found.get("num_kept"):
            raise SystemExit(f"{name}: {found['kept_nbytes']} bytes found no room: expected a larger --limit.")
        moved[name] = found["moved_nbytes"]
    ratios = {}
    for suffix in modes:
        name, plain = f"nvme{suffix}", f"plain{suffix}"
        over_disk_s = [
            moved[name] / rates["write"][n + 1] + moved[name] / rates["read"][n + 1] for n in range(options.rounds)
        ]
        samples[f"disk{suffix}"] = over_disk_s
        rounds = list(zip(samples[name], samples[plain], over_disk_s, strict=True))
        bound = plain if scale == 1 else f"{scale:.2f} {plain}"
        ratios[f"{name} / max({bound}, disk)"] = statistics.median(
            step / max(scale * own, bytes_) for step, own, bytes_ in rounds
        )
    for mode in rates:
        del samples[mode]
    shape = {key: getattr(options, key) for key in ("hidden", "blocks", "sequence", "batch", "limit")}
    shape["threads"] = torch.get_num_threads()
    shape["huge_pages"] = os.environ.get(HUGE_PAGES_VARIABLE) == "1"
    report: dict[str, object] = {
        "unit": "s",
        "ratios": ratios,
        "moved_nbytes": moved,
        "disk_bytes_per_s": {mode: statistics.median(values[1:]) for mode, values in rates.items()},
        "peak_nbytes": peaks,
        "cpu_s": {name: statistics.median(cpu_s for cpu_s, _ in counts[name][1:]) for name in peaks},
        "minor_faults": {name: statistics.median(faults for _, faults in counts[name][1:]) for name in peaks},
    }
    if scale != 1:
        shape["plain_blocks"] = plain_blocks
    if options.out:
        medians = {name: statistics.median(values) for name, values in samples.items() if not name.startswith("nvme")}
        append_record(options.out, "activations", shape, samples, medians, **report)
    return {**shape, **report, "median": {name: statistics.median(values) for name, values in samples.items()}}


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def plain_step(model: nn.Module, x: Tensor) -> Callable[[], object]:
    optimizer = sgd(model)

    def step() -> None:
        model(x).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def engine_step(engine: tiered_zero.Engine, x: Tensor) -> Callable[[], object]:
    def step() -> None:
        engine.backward(engine(x))
        engine.step()

    return step


if __name__ == "__main__":
    main()
