"""List the runs in a swap directory, sum their bytes, and remove those of dead owners: `tiered-zero swap`."""

from __future__ import annotations

from pathlib import Path

import click
from rich.text import Text

from tiered_zero.cli.console import JSON_OPTION, directory_argument, print_json, print_table, printable
from tiered_zero.cli.plan import plan
from tiered_zero.record.directory import collect_garbage, list_runs
from tiered_zero.sizes import format_nbytes

_STATE_STYLES = {"alive": "green", "dead": "red", "unknown": "yellow"}


@click.group("swap")
def swap() -> None:
    """List the runs in swap directories (the config's nvme_path), and clean them up."""


swap.add_command(plan, "capacity")


@swap.command("ls", short_help="List runs: owner, bytes, age, model, step.")
@directory_argument
@JSON_OPTION
def ls(directory: Path, as_json: bool) -> None:
    """List the runs in DIRECTORY: owner alive or dead, bytes, age, model, last committed step."""
    runs = list_runs(directory)
    if as_json:
        return print_json({"runs": runs})
    rows = [
        (
            run.run_id,
            Text(run.state, style=_STATE_STYLES[run.state]),
            format_nbytes(run.nbytes),
            _format_age(run.age_s),
            run.model or "-",
            "-" if run.step is None else str(run.step),
        )
        for run in runs
    ]
    print_table(("run", "owner", "bytes", "age", "model", "step"), rows)
    for run in runs:  # below the table, whose columns leave a reason six characters at 80
        click.echo(printable(f"{run.run_id}: {run.reason}"))


@swap.command("du", short_help="Sum the disk space of runs, by owner's state.")
@directory_argument
@JSON_OPTION
def du(directory: Path, as_json: bool) -> None:
    """Sum the bytes on disk of the runs in DIRECTORY: of runs whose owner is alive, dead or unknown, and of all
    runs."""
    runs = list_runs(directory)
    states = {state: [run.nbytes for run in runs if run.state == state] for state in _STATE_STYLES}
    totals = {state: {"runs": len(sizes), "nbytes": sum(sizes)} for state, sizes in states.items()}
    totals["total"] = {"runs": len(runs), "nbytes": sum(run.nbytes for run in runs)}
    if as_json:
        return print_json(totals)
    rows = [(state, str(row["runs"]), format_nbytes(row["nbytes"])) for state, row in totals.items()]
    print_table(("owner", "runs", "bytes"), rows)


@swap.command("gc", short_help="Remove the runs of dead owners.")
@directory_argument
@JSON_OPTION
@click.option("--dry-run", is_flag=True, help="Only say what would be removed.")
@click.option("--committed", is_flag=True, help="Also remove dead runs that can still be resumed from a commit.")
@click.option("--unknown", is_flag=True, help="Also remove runs whose owner may be alive: it cannot be seen from here.")
def gc(directory: Path, as_json: bool, dry_run: bool, committed: bool, unknown: bool) -> None:
    """Remove the runs in DIRECTORY whose owner is dead. Without --committed, runs that can be resumed stay. Runs of a
    live owner or another user always stay."""
    items = collect_garbage(directory, dry_run=dry_run, committed=committed, unknown=unknown)
    freed_nbytes = sum(item.run.nbytes for item in items if item.removed)
    if as_json:
        return print_json({"dry_run": dry_run, "freed_nbytes": freed_nbytes, "runs": items})
    done = "would be removed" if dry_run else "removed"
    rows = [
        (item.run.run_id, done if item.removed else "kept", format_nbytes(item.run.nbytes), item.reason)
        for item in items
    ]
    print_table(("run", "outcome", "bytes", "why"), rows)
    click.echo(f"{format_nbytes(freed_nbytes)} {'would be' if dry_run else 'were'} freed.")


def _format_age(age_s: float) -> str:
    for unit, length_s in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= length_s:
            return f"{age_s / length_s:.1f} {unit}"
    return f"{age_s:.0f} s"
