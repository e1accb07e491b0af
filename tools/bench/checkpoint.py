"""What do a save, a load and a commit in place cost, beside the disk's own rate and beside torch.save and torch.load?

    python tools/bench/checkpoint.py --dir /mnt/nvme --out records/checkpoint.jsonl

Cases, on one model of linear layers (fp32, AdamW: 12 bytes of state a parameter):
  full      masters and state in host memory: save, load; torch.save (synced) and torch.load of the same tensors
  in_place  masters and state on nvme: the commit of a step
  async     masters and state in host memory: steps while an asynchronous save runs, against steps without one

A disk's speed wanders: fio (direct=1, the best of its engines, block sizes and depths on this disk) is measured before
and after each save and each load, which is held against the mean of the two. fio does what they do: it writes as many
bytes once to a new file whose blocks are reserved, and syncs it; it reads the checkpoint's own file once. Each save has
a tag of its own, and no file is removed before the last round: a file system that discards what it frees does so while
the next thing is measured, and takes up to a third of the disk's rate from it. A round takes four times the state on
the disk, 6.5 GB by default. What torch.load reads is dropped from the page cache before. A commit is held against the
larger of 2% of the time to copy the state once (its bytes read and written, at fio's rate with both at once) and 1.5
times four syncs of a page each, measured right before it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

import torch
from torch import nn

import tiered_zero
from tiered_zero.io.select import fill_file
from tiered_zero.sizes import MIB
from tools.bench.io import FIO_ENGINES, Bench, Way, best, run_fio
from tools.bench.record import append_record

CASES = ("full", "in_place", "async")
STATE_NBYTES_PER_PARAMETER = 12

Samples = defaultdict[str, list[float]]
"""Series -> its measurements, in seconds."""


class Disk:
    """The directory's disk by fio; `is_measured`: False leaves fio out, and every rate is None."""

    def __init__(self, directory: Path, nbytes: int, seconds: float, is_measured: bool) -> None:
        self._ways: dict[str, Way] = {}
        self._directory = directory
        self._num_written = 0
        if not is_measured:
            return
        path = directory / "fio.bin"
        fill_file(str(path), nbytes)
        self._bench = Bench(str(path), nbytes, seconds, None)  # type: ignore[arg-type]  # fio alone is measured
        grid = [(MIB, 16), (4 * MIB, 8), (4 * MIB, 16)]
        quick = self._bench._replace(seconds=seconds / 3)
        for mode in ("read", "write", "mixed"):
            ways = [Way(engine, *point) for engine in FIO_ENGINES for point in grid]
            self._ways[mode] = best(ways, lambda way, mode=mode: quick.fio(mode, way))  # type: ignore[misc]

    def mixed_rate(self) -> float | None:
        """Bytes/s now, over and over on one file."""
        return self._bench.fio("mixed", self._ways["mixed"]) * 1e9 if self._ways else None

    def read_rate(self, path: Path) -> float | None:
        """Bytes/s of reading a file once."""
        if not self._ways:
            return None
        return run_fio(str(path), path.stat().st_size, "read", self._ways["read"], "--readonly") * 1e9

    def write_rate(self, nbytes: int) -> float | None:
        """Bytes/s of writing a new file once, until it is durable."""
        if not self._ways:
            return None
        self._num_written += 1
        path = self._directory / f"fio-new-{self._num_written}.bin"
        with path.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, nbytes)
        return run_fio(str(path), nbytes, "write", self._ways["write"], "--end_fsync=1", "--fallocate=none") * 1e9


@contextmanager
def around(rate: Callable[[], float | None], rates: list[float]) -> Iterator[None]:
    """Add to `rates` the mean rate before and after the block."""
    before = rate()
    yield
    after = rate()
    if before is not None and after is not None:
        rates.append((before + after) / 2)


def model_of(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(options.hidden, options.hidden, bias=False) for _ in range(options.layers)))


def open_engine(options: argparse.Namespace, directory: Path, tier: str, **checkpoint: bool) -> tiered_zero.Engine:
    place = {"device": tier, "nvme_path": str(directory / "swap")}
    config = {
        "train_micro_batch_size_per_gpu": options.batch,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {**place, "max_in_cpu": 0},
            "offload_optimizer": place,
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"checkpoint": checkpoint, "device_memory_limit": "1TiB"},  # tiers stay where the CPU computes
    }
    engine: tiered_zero.Engine = tiered_zero.initialize(model=model_of(options), config=config)[0]
    return engine


def take_step(engine: tiered_zero.Engine, options: argparse.Namespace) -> None:
    engine.backward(engine(torch.ones(options.batch, options.hidden)).square().mean())
    engine.step()


def timed(act: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    act()
    return time.perf_counter() - start_s


def sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def drop_from_cache(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)


# -- the cases ---------------------------------------------------------------------------------------------------------


def measure_full(options: argparse.Namespace, directory: Path, disk: Disk, samples: Samples) -> dict[str, Any]:
    """Each round: save, torch.save, load, torch.load; the rates of fio around the first and the third."""
    save_dir = directory / "ck"
    rates: dict[str, list[float]] = {"save": [], "load": []}
    nbytes = STATE_NBYTES_PER_PARAMETER * options.layers * options.hidden**2
    with open_engine(options, directory, "cpu") as engine:
        for _ in range(2):
            take_step(engine, options)
        kinds = ("master", "exp_avg", "exp_avg_sq")
        state = {f"{kind}/{name}": engine.peek(name, kind) for name, _ in engine.named_parameters() for kind in kinds}

        def save(tag: str) -> None:
            engine.save_checkpoint(save_dir, tag)

        def torch_save(plain: Path) -> None:
            torch.save(state, plain)
            sync(plain)

        def measure_round(tag: str) -> None:
            nonlocal nbytes
            plain = directory / f"{tag}.pt"
            with around(lambda: disk.write_rate(nbytes), rates["save"]):
                samples["save"].append(timed(lambda: save(tag)))
            (file,) = (save_dir / tag).glob("*.bin")
            nbytes = file.stat().st_size
            samples["torch.save"].append(timed(lambda: torch_save(plain)))
            with around(lambda: disk.read_rate(file), rates["load"]):
                samples["load"].append(timed(lambda: engine.load_checkpoint(save_dir, tag)))
            drop_from_cache(plain)
            samples["torch.load"].append(timed(lambda: torch.load(plain, weights_only=True)))

        engine.flush()
        for number in range(options.rounds):
            measure_round(f"round{number}")
    for tag in save_dir.glob("round*"):
        samples["removal of a checkpoint"].append(timed(lambda tag=tag: shutil.rmtree(tag)))  # type: ignore[misc]
    for path in (*directory.glob("fio-new-*.bin"), *directory.glob("round*.pt")):
        path.unlink()
    os.sync()
    ratios = {}
    for name, own in rates.items():
        samples[f"fio {name}"] += [nbytes / rate for rate in own]
        ratios[name] = median([nbytes / taken / rate for taken, rate in zip(samples[name], own, strict=False)])
    return {"full_nbytes": nbytes, "ratios_to_fio": ratios}


def measure_in_place(options: argparse.Namespace, directory: Path, disk: Disk, samples: Samples) -> dict[str, Any]:
    state_nbytes = STATE_NBYTES_PER_PARAMETER * options.layers * options.hidden**2
    ratios = []
    with open_engine(options, directory, "nvme", in_place=True) as engine:
        take_step(engine, options)
        for _ in range(2 * options.rounds):
            take_step(engine, options)
            engine.flush()
            samples["four syncs"].append(timed(lambda: four_syncs(directory / "page")))

            def commit() -> None:
                engine.save_checkpoint(directory / "commits", "now")

            samples["commit in place"].append(timed(commit))
            bound_s = 1.5 * samples["four syncs"][-1]
            if (rate := disk.mixed_rate()) is not None:
                samples["copy of the state"].append(2 * state_nbytes / rate)
                bound_s = max(bound_s, 0.02 * samples["copy of the state"][-1])
            ratios.append(samples["commit in place"][-1] / bound_s)
    return {"in_place_state_nbytes": state_nbytes, "commit_to_bound": median(ratios)}


def four_syncs(path: Path) -> None:
    """Write a page and make it durable, four times."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        for number in range(4):
            os.pwrite(fd, bytes(4096), 4096 * number)
            os.fsync(fd)
    finally:
        os.close(fd)


def measure_async(options: argparse.Namespace, directory: Path, samples: Samples) -> dict[str, Any]:
    """The steps from an asynchronous save on, until it is durable, against as many without one before."""
    slowdowns = []
    with open_engine(options, directory, "cpu", **{"async": True}) as engine:
        for _ in range(2):
            take_step(engine, options)
        for number in range(options.rounds):
            engine.flush()
            alone = [timed(lambda: take_step(engine, options)) for _ in range(options.steps)]
            path = directory / "async" / str(number)
            saving = [timed(lambda path=path: engine.save_checkpoint(path.parent, path.name))]  # type: ignore[misc]
            while path.exists() and not (path / "manifest.json").exists():  # a save that fails removes the directory
                saving.append(timed(lambda: take_step(engine, options)))
            engine.flush()  # raises the error of the save
            samples["step alone"] += alone
            samples["call of an asynchronous save"].append(saving[0])
            samples["step while saving"] += saving[1:]
            usual_s, num_steps = statistics.median(alone), len(saving) - 1
            slowdowns.append((sum(saving) - num_steps * usual_s) / (max(1, num_steps) * usual_s))
    return {"async_slowdown": median(slowdowns)}


def median(values: list[float]) -> float | None:
    return round(statistics.median(values), 4) if values else None


# -- all of it ---------------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="where checkpoints and the swap directory are made")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--hidden", type=int, default=2048, help="of each layer, which has its square of parameters")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--batch", type=int, default=64, help="rows of a step")
    parser.add_argument("--steps", type=int, default=5, help="steps without a save in each round")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--smoke", action="store_true", help="seconds, on a tiny model, without fio: does it run?")
    options = parser.parse_args()
    if options.smoke:
        options.hidden, options.layers, options.batch, options.steps, options.rounds = 64, 3, 2, 2, 1
    samples: Samples = defaultdict(list)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bench-checkpoint-", dir=options.dir) as name:
        directory = Path(name)
        disk = Disk(directory, 1024 * MIB, 1.5, not options.smoke)
        if "full" in options.cases:
            found |= measure_full(options, directory, disk, samples)
        if "in_place" in options.cases:
            found |= measure_in_place(options, directory, disk, samples)
        if "async" in options.cases:
            found |= measure_async(options, directory, samples)
    measured = {series: values for series, values in samples.items() if values}
    for series, values in measured.items():
        print(f"{series:<28} {statistics.median(values):9.4f} s   {min(values):.4f} to {max(values):.4f}")
    for key, value in found.items():
        print(f"{key}: {value}")
    if options.out:
        arguments = {key: value for key, value in vars(options).items() if key not in ("dir", "out")}
        bound: dict[str, Any] = {
            series: median(samples[series]) for series in ("fio save", "fio load", "four syncs") if series in measured
        }
        append_record(options.out, "checkpoint", arguments, measured, bound, unit="s", **found)


if __name__ == "__main__":
    main()
