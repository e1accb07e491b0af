"""`tiered-zero explain CONFIG`: every key with its value, where it comes from, and what it does."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from tiered_zero.config import load
from tiered_zero.errors import ConfigError

_STYLES = {"default": "dim", "auto": "yellow", "derived": "yellow", "renamed": "yellow", "file": "bold"}


@click.command("explain")
@click.argument("config", type=click.Path(dir_okay=False))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
@click.option("--world-size", default=1, show_default=True, type=click.IntRange(min=1), help="Data-parallel ranks.")
def explain(config: str, as_json: bool, world_size: int) -> None:
    """Print each key of CONFIG and each default: its value, its source and its effect."""
    try:
        loaded = load(config, world_size=world_size)
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    rows = loaded.explain()
    if as_json:
        click.echo(json.dumps({"keys": [asdict(row) for row in rows], "notices": loaded.notices}, indent=2))
        return
    columns = [Column(name, overflow="fold") for name in ("key", "value", "source", "effect")]
    table = Table(*columns, title=config, title_justify="left")
    for row in rows:
        effect = row.effect if row.fate.value == "honoured" else f"{row.fate.value}: {row.effect}"
        # Text, not markup: values and paths may hold square brackets.
        cells = (row.path, json.dumps(row.value, default=str), row.source, effect)
        table.add_row(*(Text(cell) for cell in cells), style=_STYLES[row.source])
    console = Console()
    console.print(table)
    for line in loaded.notices:
        console.print(Text(line))
