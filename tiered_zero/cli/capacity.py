"""`tiered-zero swap capacity CONFIG`: bytes in each swap directory, whether they fit, and how they wear the drives."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from tiered_zero.cli.drives import (
    directory_needs,
    drive_lines,
    drive_problems,
    look_at_drives,
    wear,
    written_per_commit,
    written_per_step,
)
from tiered_zero.cli.options import CONFIG_FILE, JSON_OPTION, parse_model, size_option
from tiered_zero.config import Config, load
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.sizes import format_nbytes

if TYPE_CHECKING:
    from tiered_zero.plan.planner import Plan

POSITIVE = click.FloatRange(min=0, min_open=True)

_WRITTEN_BESIDES = {
    "gradient": "gradients are written besides: at most their bytes in each micro-batch, in their own store",
    "activation": "activations are written besides: as many bytes a step as forward saves, in their own store",
}


@click.command("capacity", short_help="Show the bytes that a run would need.")
@click.argument("config", type=CONFIG_FILE)
@click.option("--model", callback=parse_model, metavar="gpt:...", help="Such as gpt:layers=24,hidden=2048.")
@size_option
@click.option("--tbw", type=POSITIVE, metavar="TB", help="What one drive is rated to take, in 10**12 bytes.")
@click.option("--step-seconds", type=POSITIVE, metavar="S", help="Measured time of a step.")
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Steps from one in-place commit to the next.",
)
@JSON_OPTION
@click.pass_context
def capacity(
    ctx: click.Context,
    config: str,
    model: GPTConfig | None,
    sized: GPTConfig | None,
    tbw: float | None,
    step_seconds: float | None,
    save_every: int,
    as_json: bool,
) -> None:
    """Say what a run of CONFIG needs in each swap directory, whether it fits, and how it wears the drives.

    The bytes are those of `tiered-zero plan`, which plans for other machines too. Each file system counts as one drive.
    Exit code 1 if it does not fit.
    """
    shape = model or sized
    if shape is None or (model and sized):
        raise click.UsageError("Give one of --model and --params.")
    from tiered_zero.cli.planned_run import specify_training  # torch takes seconds

    loaded = load(config, to_train=False)
    run = specify_training(loaded, shape)
    plan = run.plan
    directories, drives = look_at_drives(directory_needs(run, save_every=save_every))
    rated_nbytes = None if tbw is None else int(tbw * 1e12)
    report = {
        "model": str(shape),
        "num_parameters": num_parameters(shape),
        "nbytes": plan.nbytes("nvme"),
        "kinds": {row.kind: row.nbytes for row in plan.rows if row.tier == "nvme"},
        "written_nbytes_per_step": sum(written_per_step(run)),
        "written_nbytes_per_commit": written_per_commit(run),
        "save_every": save_every,
        "tbw": tbw,
        "step_seconds": step_seconds,
        "directories": directories,
        "drives": [{**drive, **wear(drive["written_nbytes_per_step"], rated_nbytes, step_seconds)} for drive in drives],
        "fits": all(drive["fits"] for drive in drives),
        "notes": [*_notes(loaded, plan)],
    }
    click.echo(json.dumps(report) if as_json else "\n".join(_lines(report, plan)))
    for problem in drive_problems(drives):
        click.echo(f"Error: {problem}", err=True)
    if not report["fits"]:
        ctx.exit(1)


def _notes(config: Config, plan: Plan) -> Iterator[str]:
    if config.optimizer is None:
        yield "the config names no optimizer; AdamW is planned"
    for kind, note in _WRITTEN_BESIDES.items():
        if plan.nbytes("nvme", kind):
            yield note


def _lines(report: Mapping[str, Any], plan: Plan) -> Iterator[str]:
    """Yield the report in words."""
    yield f"{report['num_parameters']:,} parameters ({report['model']})"
    if not report["nbytes"]:
        yield "Nothing rests on NVMe under this config."
        return
    yield _line("needed on NVMe", report["nbytes"])
    for row in plan.rows:
        if row.tier == "nvme":
            yield _line(f"  {row.what}", row.nbytes)
    yield _line("written per step", report["written_nbytes_per_step"])
    if nbytes := report["written_nbytes_per_commit"]:
        often = "each step" if report["save_every"] == 1 else f"every {report['save_every']} steps"
        yield f"{_line('  and per commit', nbytes)} (one after {often})"
    yield from drive_lines(report["directories"], report["drives"])
    for note in report["notes"]:
        yield f"note: {note}"


def _line(name: str, nbytes: int) -> str:
    return f"{format_nbytes(nbytes):>10} {nbytes:>20,} bytes  {name}"
