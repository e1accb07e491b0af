"""Explain a config (`tiered-zero explain`), and render the record of a run (`tiered-zero report`)."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.text import Text

from tiered_zero.cli.console import JSON_OPTION, print_json, stdout
from tiered_zero.config.deepspeed_keys import KeyReport
from tiered_zero.config.load import load
from tiered_zero.errors import ConfigError
from tiered_zero.telemetry.page import render_page
from tiered_zero.telemetry.runlog import read_run

_STYLES = {"default": "dim", "auto": "yellow", "derived": "yellow", "renamed": "yellow", "file": "bold"}


@click.command("explain")
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--all", "with_defaults", is_flag=True, help="Also the keys that CONFIG leaves to their defaults.")
@JSON_OPTION
@click.option("--world-size", default=1, show_default=True, type=click.IntRange(min=1), help="Data-parallel ranks.")
def explain(config: str, with_defaults: bool, as_json: bool, world_size: int) -> None:
    """Print the keys of CONFIG and the batch sizes that follow from them: each with its value, source and effect."""
    loaded = load(config, world_size=world_size, to_train=False)
    if loaded.optimizer is not None or loaded.scheduler is not None:
        from tiered_zero.rules.from_config import check_sections  # torch takes seconds

        check_sections(loaded)
    every = loaded.explain()
    rows = [row for row in every if with_defaults or row.source != "default"]
    if as_json:
        print_json({"keys": rows, "notices": loaded.notices})
        return
    console = stdout()
    for row in rows:
        console.print(_line(row), soft_wrap=True)  # lines stay whole, so that keys can be searched
    for line in loaded.notices:
        console.print(Text(line), soft_wrap=True)
    if len(rows) < len(every):
        console.print(f"{len(every) - len(rows)} other keys have their defaults; --all shows them.", soft_wrap=True)


def _line(row: KeyReport) -> Text:
    effect = row.effect if row.fate.value == "honoured" else f"{row.fate.value}: {row.effect}"
    text = f"{row.path} = {json.dumps(row.value, default=str)} ({row.source}): {effect}"
    return Text(text, style=_STYLES[row.source])  # no markup: values and paths may hold square brackets


@click.command()
@click.argument("run", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: RUN with .html for its suffix.")
def report(run: Path, out: Path | None) -> None:
    """Turn RUN, a run's record (`tiered_zero.report`), into one HTML page that needs no network."""
    page = render_page(read_run(run), title=run.name)
    path = out or run.with_suffix(".html")
    if path.resolve() == run.resolve():
        raise click.BadParameter("the page would replace the record", param_hint="--out")
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"The page {path} cannot be written: {error.strerror}. Name another with --out.") from error
    click.echo(path)
