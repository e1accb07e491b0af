"""`tiered-zero bench io DIR`: the best of four aio settings for a disk, and the floor of a step that it gives.

Each setting reads, writes and does both mixed through the I/O engine that a run would choose there; its score is the
geometric mean of the three rates.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.drives import read_per_step, written_per_step
from tiered_zero.cli.options import parse_model
from tiered_zero.cli.tables import make_table
from tiered_zero.config import Config, load
from tiered_zero.errors import PlanError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.measure import MODES, fill_file, measure_rate
from tiered_zero.io.preflight import filesystem_type, filesystem_warnings
from tiered_zero.io.select import select_engine
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.sizes import GIB, MIB, format_nbytes
from tiered_zero.stopping import stop_on_signals
from tiered_zero.store.swap_dir import SwapDir

if TYPE_CHECKING:
    from tiered_zero.assembly.spec import RunSpec

SETTINGS = (
    IOSettings(),
    IOSettings(block_size=MIB, queue_depth=4),
    IOSettings(block_size=2 * MIB, queue_depth=4),
    IOSettings(block_size=2 * MIB, queue_depth=16),
)
"""The defaults, and what was best of 1..4 MiB x 4..16 in tools/bench/records/io.jsonl: for reads (and for both mixed),
for both mixed by fio, for writes."""

MAX_SECONDS = 60
"""Longest measurement, and the default."""

WANTED_NBYTES = GIB
"""The file: larger than what most drives cache."""

LEAST_NBYTES = 4 * MIB
_LEAST_TRIAL_S = 0.01
_FILL_SHARE, _END_SHARE = 0.15, 0.05
"""Of the time: to fill the file, and to be sure to end in time."""


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
@click.option("--model", callback=parse_model, metavar="gpt:...", help="Also say the floor of its step.")
@click.option("--config", type=click.Path(exists=True, dir_okay=False), help="What of the model is on NVMe; else all.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
def io(directory: Path, seconds: float, model: GPTConfig | None, config: str | None, as_json: bool) -> None:
    """Find the best of four aio settings for the disk of DIRECTORY, by its rates of read, write and both mixed.

    Writes a file of at most 1 GiB there and removes it.
    """
    if config and not model:
        raise click.UsageError("--config goes with --model.")
    run = None
    if model is not None:
        from tiered_zero.cli.planned_run import specify_training  # torch takes seconds

        run = specify_training(load(config, to_train=False) if config else _all_on_nvme(), model)
    begun_s = time.perf_counter()
    click.echo(f"Measuring {directory} for at most {seconds:g} s.", err=True)
    with stop_on_signals(at_boundary=False):  # its file is removed
        report = measure_directory(directory, begun_s + seconds * (1 - _END_SHARE))
    report["seconds"] = time.perf_counter() - begun_s
    report["floor"] = None if run is None else _floor(str(model), run, report["best"])
    if as_json:
        click.echo(json.dumps(report))
    else:
        _print(report)


def measure_directory(directory: Path, end_s: float) -> dict[str, Any]:
    """Everything but the floor. `end_s`: by time.perf_counter(). Raises ConfigError, PlanError, StoreError."""
    fstype = filesystem_type(directory)
    notes = [line.removeprefix("nvme_path ") for line in filesystem_warnings(str(directory), fstype)]
    swap = SwapDir.create([directory], owner_note="bench io")
    try:
        free_nbytes = shutil.disk_usage(directory).free
        path = str(swap.paths[0] / "bench.bin")
        nbytes = _fill(path, directory, free_nbytes, (end_s - time.perf_counter()) * _FILL_SHARE, notes)
        tried = []
        num_left = len(SETTINGS) * len(MODES)
        for settings in SETTINGS:
            selection = select_engine(swap.paths[0], settings=settings)
            row: dict[str, Any] = {
                "io_engine": selection.engine.name,
                "block_size": settings.block_size,
                "queue_depth": settings.queue_depth,
            }
            try:
                for mode in MODES:
                    seconds = max((end_s - time.perf_counter()) / num_left, _LEAST_TRIAL_S)
                    row[f"{mode}_bytes_per_s"] = measure_rate(selection.engine, path, nbytes, mode, seconds)
                    num_left -= 1
            finally:
                selection.engine.close()
            tried.append(row)
    finally:
        swap.remove()
    tried.sort(key=lambda row: math.prod(row[f"{mode}_bytes_per_s"] for mode in MODES), reverse=True)
    notes += selection.reasons[:-1]
    if not selection.direct:
        notes.append("O_DIRECT does not work here: rates are those of the page cache's writeback as well")
    best = {name: tried[0][name] for name in tried[0] if name.endswith("_bytes_per_s")}
    return {
        "directory": str(directory),
        "file_system": fstype,
        "free_nbytes": free_nbytes,
        "file_nbytes": nbytes,
        "aio": {**{name: tried[0][name] for name in ("block_size", "queue_depth")}, "intra_op_parallelism": 1},
        "tiered_zero": {"io_engine": tried[0]["io_engine"]},
        "best": {"direct": selection.direct, "alignment": selection.alignment, **best},
        "tried": tried,
        "notes": notes,
    }


def _fill(path: str, directory: Path, free_nbytes: int, seconds: float, notes: list[str]) -> int:
    """Make the file as large as wanted, or as space and time allow; its size. Raises PlanError on a full disk."""
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


def _all_on_nvme() -> Config:
    """16-bit parameters, master weights and Adam's state, all on NVMe."""
    on_nvme = {"device": "nvme", "nvme_path": "."}
    zero = {"stage": 3, "offload_param": {**on_nvme, "max_in_cpu": 0}, "offload_optimizer": on_nvme}
    zero["stage3_param_persistence_threshold"] = 0
    return load({"train_batch_size": 1, "bf16": {"enabled": True}, "zero_optimization": zero})


def _floor(model: str, run: RunSpec, best: dict[str, Any]) -> dict[str, Any]:
    """The least seconds that this disk takes for one step, whatever else is overlapped with it."""
    read, written = sum(read_per_step(run)), sum(written_per_step(run))
    seconds = max(
        read / best["read_bytes_per_s"],
        written / best["write_bytes_per_s"],
        (read + written) / best["mixed_bytes_per_s"],
    )
    return {"model": model, "read_nbytes": read, "written_nbytes": written, "seconds_per_step": seconds}


def _print(report: dict[str, Any]) -> None:
    table = make_table("Best first", "engine", *(f">{column}" for column in ("block", "depth", *MODES)))
    for row in report["tried"]:
        rates = (f"{format_nbytes(row[f'{mode}_bytes_per_s'])}/s" for mode in MODES)
        table.add_row(row["io_engine"], format_nbytes(row["block_size"]), str(row["queue_depth"]), *rates)
    STDOUT.print(table)
    access = f"O_DIRECT at {report['best']['alignment']}" if report["best"]["direct"] else "buffered"
    click.echo(
        f"{report['seconds']:.0f} s on a file of {format_nbytes(report['file_nbytes'])}, "
        f"{report['file_system'] or 'unknown file system'}, {access}"
    )
    for note in report["notes"]:
        click.echo(f"note: {note}")
    click.echo(f"\nFor the config:\n{json.dumps({'aio': report['aio']}, indent=2)}")
    if floor := report["floor"]:
        read, written = (format_nbytes(floor[name]) for name in ("read_nbytes", "written_nbytes"))
        click.echo(
            f"\nFloor: {floor['seconds_per_step']:.3g} s per step ({floor['model']}; {read} read, {written} written)"
        )
