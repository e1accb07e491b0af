"""Listings of directories, as a table or JSON. Names and texts in them may be another user's."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.table import Table
from rich.text import Text

from tiered_zero.cli.console import STDOUT


def printable(text: str) -> str:
    """Text of a foreign directory with what a terminal could take for an order, or cannot show, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(value: Any) -> None:
    """Print one JSON object; records as objects, paths as text."""
    click.echo(json.dumps(value, default=lambda one: str(one) if isinstance(one, Path) else asdict(one), indent=2))


def print_table(columns: tuple[str, ...], rows: list[Any], empty: str = "No runs.") -> None:
    """A table of texts, which may be of a foreign directory; `empty`: instead of one without rows."""
    if not rows:
        click.echo(empty)
        return
    table = Table()
    for column in columns:
        table.add_column(
            column,
            no_wrap=column in ("run", "bytes", "age", "checkpoint", "step"),
            overflow="fold",
            justify="right" if column in ("bytes", "runs", "age", "step") else "left",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    STDOUT.print(table)
