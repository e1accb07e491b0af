"""`tiered-zero bench io DIR`: the best settings for a disk in a minute, and the floor of a step that they give.

[Note: how the search is pruned] All settings of the grid, engine x block x depth, share half of the time, the best
quarter half of the rest, and the best three what is left. A trial reads, writes and does both mixed; its score is the
geometric mean of the three rates. If the disk's speed wanders, short trials confuse only settings that lie close to
each other. If time is too short for all (`--seconds`, a slow disk), those nearest to the default are tried, and the
report says so.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.drives import read_per_step, written_per_step
from tiered_zero.cli.options import parse_model
from tiered_zero.cli.tables import make_table
from tiered_zero.config import Config, load
from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.io.engine import IOSettings
from tiered_zero.io.measure import MODES, fill_file, measure_rate
from tiered_zero.io.preflight import filesystem_type, filesystem_warnings
from tiered_zero.io.select import ENGINES, Selection, select_engine
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.sizes import GIB, KIB, MIB, format_nbytes
from tiered_zero.stopping import stop_on_signals
from tiered_zero.store.swap_dir import SwapDir

if TYPE_CHECKING:
    from tiered_zero.assembly.run_spec import RunSpec

BLOCKS = (256 * KIB, 512 * KIB, MIB, 2 * MIB, 4 * MIB)
DEPTHS = (4, 8, 16, 32)
DEFAULT = (IOSettings.block_size, IOSettings.queue_depth)

MAX_SECONDS = 60
"""Longest measurement, and the default."""

WANTED_NBYTES = GIB
"""The file: larger than what most drives cache."""

CHOICE_SHARE = 0.25
"""Of all settings: where fewer were tried, perhaps for a hundredth of a second each, the best of them says little."""

LEAST_NBYTES = 4 * MIB
_TRIAL_NBYTES = 32 * MIB
_REQUEST_NBYTES = 8 * MIB
_LEAST_SLICE_S = 0.01
_FILL_SHARE, _END_SHARE = 0.15, 0.05
"""Of the time: to fill the file, and to be sure to end in time."""


class Setting(NamedTuple):
    """`engine`: of ENGINES. `depth`: system calls on their way at once."""

    engine: str
    block_nbytes: int
    depth: int


Measure = Callable[[Setting, str, float], float]
"""(setting, mode, seconds) -> bytes/s."""


@dataclass(kw_only=True)
class Search:
    """Results of a search. `rates`: setting -> mode -> bytes/s, of its last and longest trial. `ranking`: best first;
    those that came further in the search stand before those that did not."""

    rates: dict[Setting, dict[str, float]] = field(default_factory=dict)
    ranking: list[Setting] = field(default_factory=list)
    num_settings: int = 0

    def score(self, setting: Setting) -> float:
        """Bytes/s, the geometric mean over reading, writing and both mixed."""
        return math.prod(self.rates[setting].values()) ** (1 / len(MODES))


def find_best(
    engines: Sequence[str], measure: Measure, seconds: float, clock: Callable[[], float] = time.perf_counter
) -> Search:
    """See [Note: how the search is pruned]. Takes `seconds` at most, but for the end of one setting's measurements."""
    end_s = clock() + seconds
    # Those nearest to the default come first, so that they are what was tried where time is short.
    grid = sorted(itertools.product(BLOCKS, DEPTHS), key=lambda point: _distance(point, DEFAULT))
    settings = [Setting(engine, *point) for point in grid for engine in engines]
    search = Search(num_settings=len(settings))
    overhead_s = 0.0  # to start and end a setting, outside its slices
    for share, num_in_round in ((0.5, len(settings)), (0.5, max(3, len(settings) // 4)), (1.0, 3)):
        entrants = search.ranking[:num_in_round] or settings
        round_end_s = clock() + (end_s - clock()) * share
        tried: list[Setting] = []
        for setting in entrants:
            begun_s = clock()
            if begun_s >= round_end_s and search.rates:
                break
            own_s = (round_end_s - begun_s) / (len(entrants) - len(tried)) - overhead_s
            slice_s = max(own_s / len(MODES), _LEAST_SLICE_S)
            search.rates[setting] = {mode: measure(setting, mode, slice_s) for mode in MODES}
            overhead_s = max(clock() - begun_s - slice_s * len(MODES), 0.0)
            tried.append(setting)
        tried.sort(key=search.score, reverse=True)
        search.ranking = tried + [setting for setting in search.ranking if setting not in tried]
    return search


def _distance(point: tuple[int, int], other: tuple[int, int]) -> float:
    return sum(abs(math.log2(value / reference)) for value, reference in zip(point, other, strict=True))


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
    """Find the best aio settings for the disk of DIRECTORY: read, write and mixed, over block x depth x engine.

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
    allowed_s = end_s - time.perf_counter()
    fstype = filesystem_type(directory)
    notes = [line.removeprefix("nvme_path ") for line in filesystem_warnings(str(directory), fstype)]
    swap = SwapDir.create([directory], owner_note="bench io")
    try:
        selections, engines_off = _open_engines(swap.paths[0])
        free_nbytes = shutil.disk_usage(directory).free
        path = str(swap.paths[0] / "bench.bin")
        nbytes = _fill(path, free_nbytes, (end_s - time.perf_counter()) * _FILL_SHARE, notes)

        def measure(setting: Setting, mode: str, seconds: float) -> float:
            selection = selections[setting.engine]
            engine = ENGINES[setting.engine](
                direct=selection.direct,
                alignment=selection.alignment,
                settings=IOSettings(block_size=setting.block_nbytes, queue_depth=setting.depth),
                io_timeout_s=60.0,
            )
            try:
                return measure_rate(engine, path, nbytes, mode, seconds, request_nbytes=_REQUEST_NBYTES)
            finally:
                engine.close()

        search = find_best([*selections], measure, end_s - time.perf_counter())
    finally:
        swap.remove()
    best = search.ranking[0]
    chosen = selections[best.engine]
    if len(search.rates) < search.num_settings:
        notes.append(
            f"time was short: {len(search.rates)} of {search.num_settings} settings were tried, those nearest to the "
            "default" + ("; give more --seconds" if allowed_s < 0.9 * MAX_SECONDS else "")
        )
    if not chosen.direct:
        notes.append("O_DIRECT does not work here: rates are those of the page cache's writeback as well")
    return {
        "directory": str(directory),
        "file_system": fstype,
        "free_nbytes": free_nbytes,
        "file_nbytes": nbytes,
        "aio": {"block_size": best.block_nbytes, "queue_depth": best.depth, "intra_op_parallelism": 1},
        "tiered_zero": {"io_engine": best.engine},
        "best": {"direct": chosen.direct, "alignment": chosen.alignment, **_named(search.rates[best])},
        "engines_off": engines_off,
        "num_settings": search.num_settings,
        "is_choice": len(search.rates) >= CHOICE_SHARE * search.num_settings,
        "tried": [
            {"io_engine": s.engine, "block_size": s.block_nbytes, "queue_depth": s.depth, **_named(search.rates[s])}
            for s in search.ranking
        ],
        "notes": notes,
    }


def _open_engines(directory: Path) -> tuple[dict[str, Selection], dict[str, str]]:
    """(engine -> how it works there, engine -> why it does not)."""
    selections: dict[str, Selection] = {}
    off: dict[str, str] = {}
    for name in ENGINES:
        try:
            selections[name] = select_engine(directory, prefer=name)
            selections[name].engine.close()
        except ConfigError as error:
            off[name] = str(error).removeprefix(f"no I/O engine works in {directory}: ").removeprefix(f"{name} is ")
    if not selections:
        raise ConfigError("; ".join(off.values()))
    return selections, off


def _fill(path: str, free_nbytes: int, seconds: float, notes: list[str]) -> int:
    """Make the file as large as wanted, or as space and time allow; its size. Raises PlanError on a full disk."""
    room_nbytes = free_nbytes * 4 // 5 // MIB * MIB
    if room_nbytes < LEAST_NBYTES:
        raise PlanError(
            f"{format_nbytes(free_nbytes)} are free in {os.path.dirname(os.path.dirname(path))}; a measurement needs "
            f"{format_nbytes(LEAST_NBYTES * 5 / 4)}. Free some space."
        )
    trial_nbytes = min(_TRIAL_NBYTES, room_nbytes)
    begun_s = time.perf_counter()
    fill_file(path, trial_nbytes)
    took_s = time.perf_counter() - begun_s
    in_time_nbytes = int(trial_nbytes * max((seconds - took_s) / took_s, 1)) // MIB * MIB
    nbytes = min(WANTED_NBYTES, room_nbytes, in_time_nbytes)
    if nbytes > trial_nbytes:
        os.unlink(path)
        fill_file(path, nbytes)
    nbytes = max(nbytes, trial_nbytes)
    if nbytes < WANTED_NBYTES:
        full = room_nbytes < in_time_nbytes
        reason = f"only {format_nbytes(free_nbytes)} are free" if full else "to fill more would take too long"
        notes.append(
            f"{reason}: the file has {format_nbytes(nbytes)} instead of {format_nbytes(WANTED_NBYTES)}, so that a "
            "drive's own cache may show"
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
    read, written = read_per_step(run), sum(written_per_step(run))
    seconds = max(
        read / best["read_bytes_per_s"],
        written / best["write_bytes_per_s"],
        (read + written) / best["mixed_bytes_per_s"],
    )
    return {"model": model, "read_nbytes": read, "written_nbytes": written, "seconds_per_step": seconds}


def _named(rates: dict[str, float]) -> dict[str, float]:
    return {f"{mode}_bytes_per_s": rate for mode, rate in rates.items()}


_NUM_SHOWN = 5


def _print(report: dict[str, Any]) -> None:
    table = make_table("Best of the settings tried", "engine", *(f">{column}" for column in ("block", "depth", *MODES)))
    for row in report["tried"][:_NUM_SHOWN]:
        rates = (f"{format_nbytes(row[f'{mode}_bytes_per_s'])}/s" for mode in MODES)
        table.add_row(row["io_engine"], format_nbytes(row["block_size"]), str(row["queue_depth"]), *rates)
    STDOUT.print(table)
    access = f"O_DIRECT at {report['best']['alignment']}" if report["best"]["direct"] else "buffered"
    click.echo(
        f"{len(report['tried'])} of {report['num_settings']} settings in {report['seconds']:.0f} s on a file of "
        f"{format_nbytes(report['file_nbytes'])}, {report['file_system'] or 'unknown file system'}, {access}"
    )
    for name, why in report["engines_off"].items():
        click.echo(f"{name}: {why}")
    for note in report["notes"]:
        click.echo(f"note: {note}")
    if report["is_choice"]:
        click.echo("\nFor the config:")
        click.echo(json.dumps({"aio": report["aio"], "tiered_zero": report["tiered_zero"]}, indent=2))
    else:
        click.echo(
            "\nFor the config: nothing. Too few settings were tried to choose one; leave them at their defaults, or "
            f"give --seconds {MAX_SECONDS}."
        )
    if floor := report["floor"]:
        read, written = (format_nbytes(floor[name]) for name in ("read_nbytes", "written_nbytes"))
        click.echo(
            f"\nFloor: {floor['seconds_per_step']:.3g} s per step ({floor['model']}; {read} read, {written} written)"
        )
