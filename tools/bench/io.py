"""Does an I/O engine reach what fio reaches, and does it hold that beside a busy interpreter?

    python tools/bench/io.py --dir /mnt/nvme --out records/io.jsonl

On one file in one run: fio (direct=1) at the best of a grid of its I/O engines, block sizes and depths, then each of
our engines at the best of the same blocks and depths, in turns, so that a disk whose speed wanders wanders for all.
Reading, writing, and half of each; and ours again while the main thread runs a pure Python loop. GB/s are 10**9.
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
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # an installed tiered_zero goes before the checkout's; this folder's io.py is not Python's
    sys.path[:1] = []
    sys.path.append(str(Path(__file__).resolve().parents[2]))

from tiered_zero.io.engine import IOSettings
from tiered_zero.io.measure import MODES, fill_file, measure_rate
from tiered_zero.io.select import ENGINES, Selection, select_engine
from tiered_zero.sizes import GIB, KIB, MIB, parse_nbytes
from tools.bench.record import append_record

FIO_MODES = {"read": "read", "write": "write", "mixed": "readwrite"}
FIO_ENGINES = ("psync", "libaio", "io_uring")


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
        """Depth is threads for psync. `offset_increment` gives each thread a part of the file."""
        num_jobs, depth = (way.depth, 1) if way.engine == "psync" else (1, way.depth)
        part_nbytes = self.nbytes // num_jobs // way.block_nbytes * way.block_nbytes
        command = ["fio", "--name=bench", "--direct=1", "--time_based", "--thread", "--group_reporting"]
        command += [f"--filename={self.path}", f"--rw={FIO_MODES[mode]}", f"--runtime={self.seconds}"]
        command += [f"--ioengine={way.engine}", f"--bs={way.block_nbytes}", f"--iodepth={depth}"]
        command += [f"--numjobs={num_jobs}", f"--size={part_nbytes}", f"--offset_increment={part_nbytes}"]
        out = subprocess.run([*command, "--output-format=json"], check=True, capture_output=True, text=True).stdout
        (job,) = json.loads(out[out.index("{") :])["jobs"]
        return float(job["read"]["bw_bytes"] + job["write"]["bw_bytes"]) / 1e9

    def ours(self, mode: str, way: Way) -> float:
        engine = ENGINES[way.engine](
            direct=self.selection.direct,
            alignment=self.selection.alignment,
            settings=IOSettings(block_size=way.block_nbytes, queue_depth=way.depth),
            io_timeout_s=60.0,
        )
        try:
            return measure_rate(engine, self.path, self.nbytes, mode, self.seconds) / 1e9
        finally:
            engine.close()


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


def compare(
    bench: Bench, grid: list[tuple[int, int]], engines: list[str], num_rounds: int, with_fio: bool
) -> tuple[dict[str, Way], dict[str, list[float]]]:
    """(series -> its best way, series -> GB/s of each round)."""
    ways: dict[str, Way] = {}
    series: dict[str, Callable[[], float]] = {}
    quick = bench._replace(seconds=bench.seconds / 3)
    for mode in MODES:
        if with_fio:
            name = f"fio {mode}"
            ways[name] = best(
                (Way(engine, *point) for engine in FIO_ENGINES for point in grid), partial(quick.fio, mode)
            )
            series[name] = partial(bench.fio, mode, ways[name])
        for engine in engines:
            name = f"{engine} {mode}"
            ways[name] = best((Way(engine, *point) for point in grid), partial(quick.ours, mode))
            series[name] = partial(bench.ours, mode, ways[name])
            series[f"{name} beside Python"] = partial(beside_python, series[name])
    samples: dict[str, list[float]] = {name: [] for name in series}
    for _ in range(num_rounds):
        for name, measure in series.items():
            samples[name].append(measure())
    return ways, samples


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", default=".", help="a directory on the disk to measure")
    parser.add_argument("--out", help="append the record to this file of JSON lines")
    parser.add_argument("--nbytes", type=parse_nbytes, default=2 * GIB, help="size of the file")
    parser.add_argument("--seconds", type=float, default=3.0, help="length of one measurement")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--blocks", type=parse_nbytes, nargs="+", default=[256 * KIB, MIB, 4 * MIB])
    parser.add_argument("--depths", type=int, nargs="+", default=[4, 8, 16, 32])
    parser.add_argument("--engines", nargs="+", default=["native", "threads"], choices=list(ENGINES))
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
        ways, samples = compare(bench, grid, options.engines, options.rounds, not options.smoke)

    medians = {name: statistics.median(values) for name, values in samples.items()}
    bound = {mode: medians.get(f"fio {mode}") for mode in MODES}
    ratios = {}
    for name, median in medians.items():
        fio = bound[name.split()[1]]
        ratios[name] = round(median / fio, 3) if fio else None
        way = ways[name.removesuffix(" beside Python")]
        of_fio = f"{median / fio:6.1%} of fio" if fio else ""
        print(f"{name:<30} {median:6.2f} GB/s  {of_fio:<14} {way.engine} {way.block_nbytes // KIB} KiB x {way.depth}")
    if options.out:
        extra = {"unit": "GB/s", "ways": {name: way._asdict() for name, way in ways.items()}, "ratio_to_fio": ratios}
        access = {"direct": selection.direct, "alignment": selection.alignment, "reasons": selection.reasons}
        arguments = {key: value for key, value in vars(options).items() if key not in ("dir", "out")}
        append_record(options.out, "io", arguments, samples, bound, **extra, **access)


if __name__ == "__main__":
    main()
