"""Find the best of four aio settings for a disk: `tiered-zero bench io DIR`.

Each setting is tried on one file: reads, writes, and both at once. Its score is the geometric mean of the three rates.
The rates of the default setting are saved for `plan`.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from tiered_zero.assembly.machine_rates import save_disk
from tiered_zero.cli.console import JSON_OPTION, print_json, print_table
from tiered_zero.errors import PlanError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.select import MODES, filesystem_type, filesystem_warnings, fill_file, measure_modes, select_engine
from tiered_zero.plan.machine import Disk
from tiered_zero.record.directory import SwapDir
from tiered_zero.sizes import GIB, MIB, format_nbytes
from tiered_zero.stopping import stop_on_signals

SETTINGS = (
    IOSettings(),
    IOSettings(block_size=MIB, queue_depth=4),
    IOSettings(block_size=2 * MIB, queue_depth=4),
    IOSettings(block_size=2 * MIB, queue_depth=16),
)
"""The I/O settings that `bench io` measures. The first is the default. The others were the best in
tools/bench/records/io.jsonl: for reads, for reads and writes at once (measured with fio), and for writes."""

MAX_SECONDS = 60
"""The largest value of --seconds, and its default."""

WANTED_NBYTES = GIB
"""Bytes of the test file if time and space allow: more than the cache of most drives."""

LEAST_NBYTES = 4 * MIB
_LEAST_TRIAL_S = 0.01
_FILL_SHARE, _END_SHARE = 0.15, 0.05
"""Shares of the given seconds. `_FILL_SHARE`: for writing the test file, before the settings are tried. `_END_SHARE`:
kept free, so that the command ends in time."""


@click.group("bench")
def bench() -> None:
    """Measure this machine."""


@bench.command("io")
@click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
@click.option(
    "--seconds",
    type=click.FloatRange(1, MAX_SECONDS),
    default=MAX_SECONDS,
    show_default=True,
    help="The measurement ends before that.",
)
@JSON_OPTION
def io(directory: Path, seconds: float, as_json: bool) -> None:
    """Find the best of four aio settings for the disk of DIRECTORY: measure reads, writes, and both at once.

    Writes a file of at most 1 GiB to DIRECTORY and removes it. Saves the rates of the default setting for `plan`.
    """
    begun_s = time.perf_counter()
    click.echo(f"Measuring {directory} for at most {seconds:g} s.", err=True)
    with stop_on_signals(at_boundary=False):  # SIGTERM raises, so that the file is removed
        report = measure_directory(directory, begun_s + seconds * (1 - _END_SHARE))
    save_disk(report["disk"])
    report["seconds"] = time.perf_counter() - begun_s
    if as_json:
        print_json(report)
    else:
        _print(report)


def measure_directory(directory: Path, end_s: float, choices: Sequence[IOSettings] = SETTINGS) -> dict[str, Any]:
    """Measure the disk of `directory` with each of the I/O settings `choices`, and return the report. The first setting
    must be the default: its rates are the report's "disk". `end_s`: when to end, by time.perf_counter(). Raises
    ConfigError, PlanError, StoreError, TransferError."""
    fstype = filesystem_type(directory)
    notes = [line.removeprefix("nvme_path ") for line in filesystem_warnings(str(directory), fstype)]
    swap = SwapDir.create([directory], owner_note="bench io")
    try:
        free_nbytes = shutil.disk_usage(directory).free
        path = str(swap.paths[0] / "bench.bin")
        nbytes = _fill(path, directory, free_nbytes, (end_s - time.perf_counter()) * _FILL_SHARE, notes)
        tried = list[dict[str, Any]]()
        for index, settings in enumerate(choices):
            selection = select_engine(swap.paths[0], settings=settings)
            seconds = max((end_s - time.perf_counter()) / (len(choices) - index), _LEAST_TRIAL_S)
            try:
                rates = measure_modes(selection.engine, path, nbytes, seconds)
            finally:
                selection.engine.close()
            row = {"io_engine": selection.engine.name, **asdict(settings)}
            tried.append(row | {f"{mode}_bytes_per_s": rate for mode, rate in rates.items()})
    finally:
        swap.remove()
    by_default = {f"{mode}_bytes_per_s": tried[0][f"{mode}_bytes_per_s"] for mode in MODES}
    disk = Disk(path=os.path.realpath(directory), nbytes=free_nbytes, **by_default)
    tried.sort(key=lambda row: math.prod(row[f"{mode}_bytes_per_s"] for mode in MODES), reverse=True)
    notes += selection.reasons[:-1]
    if not selection.engine.direct:
        notes.append("O_DIRECT does not work here: rates are those of the page cache's writeback as well")
    return {
        "directory": str(directory),
        "file_system": fstype,
        "file_nbytes": nbytes,
        "disk": disk,
        "aio": {**{name: tried[0][name] for name in ("block_size", "queue_depth")}, "intra_op_parallelism": 1},
        "tiered_zero": {"io_engine": tried[0]["io_engine"]},
        "direct": selection.engine.direct,
        "tried": tried,
        "notes": notes,
    }


def _fill(path: str, directory: Path, free_nbytes: int, seconds: float, notes: list[str]) -> int:
    """Write the test file `path`, and return its size. The size is WANTED_NBYTES, or less if space or `seconds` do not
    allow more. For a smaller file, add a note to `notes`. Raises PlanError if the disk has no room for LEAST_NBYTES."""
    room_nbytes = free_nbytes * 4 // 5 // MIB * MIB
    if room_nbytes < LEAST_NBYTES:
        raise PlanError(
            f"{format_nbytes(free_nbytes)} are free in {directory}; a measurement needs "
            f"{format_nbytes(LEAST_NBYTES * 5 / 4)}. Free some space."
        )
    nbytes = fill_file(path, min(WANTED_NBYTES, room_nbytes), seconds)
    if nbytes < WANTED_NBYTES:
        notes.append(
            f"the file has {format_nbytes(nbytes)} instead of {format_nbytes(WANTED_NBYTES)}, so that a drive's own "
            f"cache may show: {format_nbytes(free_nbytes)} are free, and {seconds:.2g} s are allowed to fill it"
        )
    return nbytes


def _print(report: dict[str, Any]) -> None:
    rows = [
        (
            row["io_engine"],
            format_nbytes(row["block_size"]),
            str(row["queue_depth"]),
            *(f"{format_nbytes(row[f'{mode}_bytes_per_s'])}/s" for mode in MODES),
        )
        for row in report["tried"]
    ]
    print_table(("engine", "block", "depth", *MODES), rows, title="Best first")
    access = "O_DIRECT" if report["direct"] else "buffered"
    click.echo(
        f"{report['seconds']:.0f} s on a file of {format_nbytes(report['file_nbytes'])}, "
        f"{report['file_system'] or 'unknown file system'}, {access}"
    )
    for note in report["notes"]:
        click.echo(f"note: {note}")
    click.echo(f"\nFor the config:\n{json.dumps({'aio': report['aio']}, indent=2)}")
