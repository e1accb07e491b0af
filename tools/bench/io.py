"""Does an I/O engine reach what fio reaches, and does it hold that beside a busy interpreter?

    python tools/bench/io.py --dir /mnt/nvme --out records/io.jsonl

On one file in one run: fio (direct=1) at the best of a grid of its I/O engines, block sizes and depths, then each of
our engines at the best of the same blocks and depths. Reading, writing, and half of each; and ours again while the main
thread runs a pure Python loop. GB/s are 10**9.

Both work from the same memory: huge pages, block x depth of them. fio's few MiB stay in the processor's cache, so ours
must too: a virtio disk, whose host copies every byte, was 12% slower from 64 MiB than from 8 with any engine.

A disk's speed wanders. So fio is measured before and after each measurement of ours, which is held against the mean of
these two; `ratio_to_fio` is the median of that over the rounds, `ratio_of_medians` what the plain medians give.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).resolve().parent)]
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import ENGINES, MODES, Selection, fill_file, measure_rate, select_engine
from tiered_zero.sizes import GIB, KIB, MIB, parse_nbytes
from tools.bench.record import append_record

FIO_MODES = {"read": "read", "write": "write", "mixed": "readwrite"}
FIO_ENGINES = ("psync", "libaio", "io_uring")
IN_FLIGHT_NBYTES = 128 * MIB
"""Beside Python a thread gets its turn after 5 ms or later; a disk of 6 GB/s moves 32 MiB in that time, and with 64 MiB
on their way it was seen to run dry."""

HUGE_PAGES = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""fio has its buffers from malloc; glibc 2.35 and later asks for huge pages (madvise) if told so."""


class Way(NamedTuple):
    """How to do it: `engine` of fio or ours, bytes a system call, calls at once."""

    engine: str
    block_nbytes: int
    depth: int


class Bench(NamedTuple):
    """One file of `nbytes` that holds data, and how long a measurement lasts. The measurements give GB/s."""

    path: str
    nbytes: int
    seconds: float
    selection: Selection

    def fio(self, mode: str, way: Way) -> float:
        return run_fio(self.path, self.nbytes, mode, way, "--time_based", f"--runtime={self.seconds}")

    def ours(self, mode: str, way: Way) -> float:
        engine = ENGINES[way.engine](
            direct=self.selection.engine.direct,
            settings=IOSettings(block_size=way.block_nbytes, queue_depth=way.depth),
            io_timeout_s=60.0,
        )
        try:
            nbytes = way.block_nbytes * way.depth
            measure = partial(measure_rate, engine, self.path, self.nbytes, mode, self.seconds)
            num_in_flight = max(IN_FLIGHT_NBYTES // nbytes, 2)
            return measure(request_nbytes=nbytes, num_in_flight=num_in_flight, one_memory=True) / 1e9
        finally:
            engine.close()


def run_fio(path: str, nbytes: int, mode: str, way: Way, *options: str) -> float:
    """GB/s of fio on the first `nbytes` of a file. Depth is threads for psync, each of which has a part of the file."""
    num_jobs, depth = (way.depth, 1) if way.engine == "psync" else (1, way.depth)
    part_nbytes = nbytes // num_jobs // way.block_nbytes * way.block_nbytes
    command = ["fio", "--name=bench", "--direct=1", "--thread", "--group_reporting", *options]
    command += [f"--filename={path}", f"--rw={FIO_MODES[mode]}"]
    command += [f"--ioengine={way.engine}", f"--bs={way.block_nbytes}", f"--iodepth={depth}"]
    command += [f"--numjobs={num_jobs}", f"--size={part_nbytes}", f"--offset_increment={part_nbytes}"]
    command += ["--iomem_align=2m", "--output-format=json"]
    environment = {**os.environ, **HUGE_PAGES}
    out = subprocess.run(command, check=True, capture_output=True, text=True, env=environment).stdout
    (job,) = json.loads(out[out.index("{") :])["jobs"]
    return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9


def beside_python(measure: Callable[[], float]) -> float:
    """`measure` on another thread, while this one runs Python and nothing else."""
    found: list[float] = []
    thread = threading.Thread(target=lambda: found.append(measure()))
    thread.start()
    total = 0
    while thread.is_alive():
        total += sum(number * number for number in range(1000))
    return found[0]


def best(ways: Iterable[Way], measure: Callable[[Way], float]) -> Way:
    rates = {}
    for way in ways:
        try:
            rates[way] = measure(way)
        except subprocess.CalledProcessError:
            continue  # an I/O engine of fio's that this kernel does not have
    return max(rates, key=lambda way: rates[way])


class Comparison(NamedTuple):
    """By series: its best way; GB/s of each measurement; of ours, their ratios to fio right before and after each."""

    ways: dict[str, Way]
    samples: dict[str, list[float]]
    ratios: dict[str, list[float]]


def compare(
    bench: Bench, grid: list[tuple[int, int]], engines: list[str], num_rounds: int, with_fio: bool
) -> Comparison:
    ways, samples, ratios = found = Comparison({}, defaultdict(list), defaultdict(list))
    ours: dict[str, dict[str, Callable[[], float]]] = {mode: {} for mode in MODES}
    quick = bench._replace(seconds=bench.seconds / 3)
    for mode in MODES:
        if with_fio:
            candidates = (Way(engine, *point) for engine in FIO_ENGINES for point in grid)
            ways[f"fio {mode}"] = best(candidates, partial(quick.fio, mode))
        for engine in engines:
            name = f"{engine} {mode}"
            ways[name] = best((Way(engine, *point) for point in grid), partial(quick.ours, mode))
            idle = ours[mode][name] = partial(bench.ours, mode, ways[name])
            ours[mode][f"{name} beside Python"] = partial(beside_python, idle)
    for _, mode in itertools.product(range(num_rounds), MODES):
        fio = f"fio {mode}"
        if with_fio:
            samples[fio].append(bench.fio(mode, ways[fio]))
        for name, measure in ours[mode].items():
            samples[name].append(measure())
            if with_fio:
                samples[fio].append(bench.fio(mode, ways[fio]))
                ratios[name].append(samples[name][-1] / statistics.mean(samples[fio][-2:]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--nbytes", type=parse_nbytes, default=2 * GIB, help="size of the file")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=parse_nbytes, nargs="+", default=[256 * KIB, MIB, 4 * MIB])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--engines", nargs="+", default=["native", "aiofiles"], choices=list(ENGINES))
    parser.add_argument("--smoke", action="store_true", help="two seconds, without fio: does it run?")
    options = parser.parse_args()
    if options.smoke:
        options.nbytes, options.seconds, options.rounds = 32 * MIB, 0.05, 1
        options.blocks, options.depths = [MIB], [8]

    selection = select_engine(options.dir)
    selection.engine.close()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="bench-io-") as directory:
        path = os.path.join(directory, "data")
        fill_file(path, options.nbytes)
        bench = Bench(path, options.nbytes, options.seconds, selection)
        grid = list(itertools.product(options.blocks, options.depths))
        ways, samples, ratios = compare(bench, grid, options.engines, options.rounds, not options.smoke)

    medians = {name: statistics.median(values) for name, values in samples.items()}
    bound = {mode: medians.get(f"fio {mode}") for mode in MODES}
    to_fio = {name: round(statistics.median(values), 3) for name, values in ratios.items()}
    of_medians = {name: round(medians[name] / medians[f"fio {name.split()[1]}"], 3) for name in ratios}
    for name, median in medians.items():
        way = ways[name.removesuffix(" beside Python")]
        of_fio = f"{to_fio[name]:4.0%} of fio, {of_medians[name]:4.0%} by medians" if name in ratios else ""
        print(f"{name:<28} {median:5.2f} GB/s  {of_fio:<28}  {way.engine} {way.block_nbytes // KIB} KiB x {way.depth}")
    if options.out:
        extra = {"unit": "GB/s", "ways": {name: way._asdict() for name, way in ways.items()}}
        extra |= {"ratio_to_fio": to_fio, "ratio_of_medians": of_medians}
        engine, reasons = selection.engine, selection.reasons
        access = {"direct": engine.direct, "reasons": reasons}
        arguments = {key: value for key, value in vars(options).items() if key not in ("dir", "out")}
        append_record(options.out, "io", arguments, samples, bound, **extra, **access)


if __name__ == "__main__":
    main()
