"""How long is a step of an optimizer whose state rests in host memory or on disk, beside torch's over equal parameters?

    python tools/bench/optimizer.py --dir /path/on/nvme --out records/optimizer.jsonl

One AdamW step over fp32 parameters and gradients of many shapes on the CPU, in turn and in one run:
  triad        STREAM's, compiled here, with the line that a store must first fetch counted: the bound of host memory
  disk         the disk's reads and writes at once, half of each, through the same engine: the bound of nvme
  foreach      torch.optim.AdamW(foreach=True)
  fused        torch.optim.AdamW(fused=True)
  torch ZeRO   torch.distributed.optim.ZeroRedundancyOptimizer, one rank
  host         OffloadedOptimizer, state in host memory
  nvme         OffloadedOptimizer, state in swap files
  ZeRO nvme    ZeroRedundancyOptimizer of one rank, state in swap files
  torchao      torchao.optim.CPUOffloadOptimizer, where torchao is installed and steps these parameters
Ratios are medians of those of each round.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import psutil
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import fill_file, measure_rate, select_engine
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer
from tools.bench.record import append_record
from tools.bench.update import build, measure

DRAM_NBYTES = 28
"""A parameter: parameter, gradient and both moments are read, all but the gradient written, 4 bytes each."""
DISK_NBYTES = 16
"""A parameter: both moments, read and written."""
MIB = 1 << 20


def make_params(numel: int) -> list[nn.Parameter]:
    """Matrices of a quarter, a half and a whole million elements, and a bias for each."""
    params: list[nn.Parameter] = []
    while (left := numel - sum(param.numel() for param in params)) > 0:
        rows = min((256, 512, 1024)[len(params) % 3], -(-left // 1024))
        params += [nn.Parameter(torch.randn(rows, 1024)), nn.Parameter(torch.zeros(rows))]
    for param in params:
        param.grad = torch.randn_like(param)
    return params


def cpu_timed(task: Callable[[], object], seconds: list[float]) -> None:
    """Run the task; add the CPU seconds of all threads, which other load on the machine changes less than its time."""
    start_s = time.process_time()
    task()
    seconds.append(time.process_time() - start_s)


def torchao_step(params: list[nn.Parameter], rates: dict[str, float]) -> tuple[Callable[[], object] | None, str]:
    """Return a step of torchao's optimizer, or None and why there is none."""
    try:
        from torchao.optim import CPUOffloadOptimizer

        step = CPUOffloadOptimizer(params, torch.optim.AdamW, fused=True, **rates).step
        step()
    except Exception as error:  # it asserts that there is a GPU
        return None, f"{type(error).__name__}: {error}"
    return step, "stepped"


def resident_nbytes() -> int:
    return int(psutil.Process().memory_info().rss)


def main(arguments: list[str] | None = None) -> dict[str, object]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="a directory on the disk that is measured")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--numel", type=int, default=64 * MIB, help="parameters")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--smoke", action="store_true", help="seconds: does it run?")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.numel, options.rounds = 2 * MIB, 2
    with ExitStack() as ends:
        report = run(options, ends)
    print(json.dumps(report, indent=2))
    return report


def run(options: argparse.Namespace, ends: ExitStack) -> dict[str, object]:
    folder = ends.enter_context(tempfile.TemporaryDirectory())
    swap = ends.enter_context(tempfile.TemporaryDirectory(dir=options.dir))
    stream = ctypes.CDLL(str(build(Path(__file__).parent / "triad.c", folder)))
    params = make_params(options.numel)
    numel = sum(param.numel() for param in params)
    kind = torch.optim.AdamW
    rates: dict[str, Any] = {"lr": 1e-4, "weight_decay": 0.1}
    nvme = {"device": "nvme", "nvme_path": swap}

    before = resident_nbytes()
    on_nvme = ends.enter_context(OffloadedOptimizer(params, kind, nvme, **rates))
    for _ in range(2):
        on_nvme.step()
    resident = resident_nbytes() - before
    host = ends.enter_context(OffloadedOptimizer(params, kind, {"device": "cpu"}, **rates))
    torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    ends.callback(torch.distributed.destroy_process_group)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch.jit
        from torch.distributed.optim import ZeroRedundancyOptimizer as TorchZero
    own_zero = ends.enter_context(ZeroRedundancyOptimizer(params, kind, offload=nvme, **rates))
    plain = {"foreach": kind(params, foreach=True, **rates), "fused": kind(params, fused=True, **rates)}

    settings = IOSettings(block_size=MIB, queue_depth=32, intra_op_parallelism=1)
    engine = select_engine(Path(swap), prefer="auto", settings=settings, io_timeout_s=60.0).engine
    ends.callback(engine.close)
    path, nbytes = f"{swap}/file", max(32 * MIB, min(1 << 30, DISK_NBYTES // 2 * numel))
    fill_file(path, nbytes)
    seconds = 0.2 if options.smoke else 1.0
    disk_rates: list[float] = []
    a, b, c = (torch.rand(numel // 2, dtype=torch.float64) for _ in range(3))
    addresses = [ctypes.c_void_p(x.data_ptr()) for x in (a, b, c)]
    tasks: dict[str, Callable[[], object]] = {
        "triad": lambda: stream.triad(*addresses, ctypes.c_int64(a.numel()), torch.get_num_threads()),
        "disk": lambda: disk_rates.append(measure_rate(engine, path, nbytes, "mixed", seconds)),
        "foreach": plain["foreach"].step,
        "fused": plain["fused"].step,
        "torch ZeRO": TorchZero(params, kind, fused=True, **rates).step,
        "host": host.step,
        "nvme": on_nvme.step,
        "ZeRO nvme": own_zero.step,
    }
    torchao, torchao_says = torchao_step(params, rates)
    if torchao is not None:
        tasks["torchao"] = torchao
    cpu_s: dict[str, list[float]] = {name: [] for name in tasks}
    samples = measure({name: partial(cpu_timed, task, cpu_s[name]) for name, task in tasks.items()}, options.rounds)
    rounds = range(options.rounds)
    # seconds that the step's bytes would take
    samples["triad"] = [DRAM_NBYTES * numel / (4 * a.nbytes) * value for value in samples["triad"]]
    samples["disk"] = [DISK_NBYTES * numel / rate for rate in disk_rates[1:]]

    def ratio(name: str, *others: str) -> float:
        return statistics.median(samples[name][n] / max(samples[other][n] for other in others) for n in rounds)

    ratios = {
        "host / foreach": ratio("host", "foreach"),
        "host / fused": ratio("host", "fused"),
        "host / triad": ratio("host", "triad"),
        "nvme / max(disk, triad)": ratio("nvme", "disk", "triad"),
        "ZeRO nvme / max(disk, triad)": ratio("ZeRO nvme", "disk", "triad"),
        "ZeRO nvme / torch ZeRO": ratio("ZeRO nvme", "torch ZeRO"),
    }
    shape = {"numel": numel, "num_params": len(params), "threads": torch.get_num_threads()}
    report: dict[str, object] = {
        "unit": "s",
        "ratios": ratios,
        "cpu_s": {name: statistics.median(values[1:]) for name, values in cpu_s.items()},
        "torchao": torchao_says,
        "nvme_planned_host_nbytes": on_nvme.plan.nbytes("host"),
        "nvme_resident_nbytes": resident,
    }
    if options.out:
        bound = {name: statistics.median(samples[name]) for name in ("triad", "disk")}
        append_record(options.out, "optimizer", shape, samples, bound, **report)
    return {**shape, **report}


if __name__ == "__main__":
    main()
