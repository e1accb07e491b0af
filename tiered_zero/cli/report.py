"""`tiered-zero report RUN`: one HTML page of a run's record."""

from __future__ import annotations

from pathlib import Path

import click

from tiered_zero.errors import ConfigError
from tiered_zero.telemetry.page import render_page
from tiered_zero.telemetry.runlog import read_run


@click.command()
@click.argument("run", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: RUN with .html for its suffix.")
def report(run: Path, out: Path | None) -> None:
    """Turn RUN, the file that `tiered_zero.report` names, into one HTML page that needs no network."""
    page = render_page(read_run(run), title=run.name)
    path = out or run.with_suffix(".html")
    if path.resolve() == run.resolve():
        raise click.BadParameter("the page would replace the record", param_hint="--out")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The page {path} cannot be written: {error.strerror}. Name another with --out.") from error
    click.echo(path)
