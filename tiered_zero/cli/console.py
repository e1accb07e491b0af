"""Terminal output: log lines and progress on stderr, results and tables on stdout."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

STDERR = Console(stderr=True)
"""Progress and log share it, so that a line is printed above the bar. It follows sys.stderr if that is replaced."""

_NUMBERS = {
    *("age", "block", "busy", "bytes", "depth", "mixed", "peak", "planned", "rate while busy", "read", "runs"),
    *("seconds", "share", "step", "write"),
}
"""Columns that are aligned right."""


def stdout() -> Console:
    """Return a console for results. It wraps at the width of a terminal, or at COLUMNS; a file and a pipe get whole
    lines, to be searched."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000)


class ConsoleHandler(logging.Handler):
    """Log lines on stderr; above INFO with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {rank_prefix()}"
        STDERR.print(f"{level}{self.format(record)}", markup=False, highlight=False, soft_wrap=True)


def configure_logging() -> None:
    """Configure the one logger that the package uses. Ranks other than the first print errors only."""
    logger = logging.getLogger("tiered_zero")
    logger.setLevel(logging.INFO if rank_prefix() in ("", "rank 0: ") else logging.ERROR)
    logger.handlers = [ConsoleHandler()]


def rank_prefix() -> str:
    """The launcher's RANK before a message, if it has started several: "rank 1: "; else ""."""
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def printable(text: str) -> str:
    """Text of a foreign directory with what a terminal could take for an order, or cannot show, as escapes."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(value: Any) -> None:
    """Print one JSON object; records as objects, paths as text."""
    click.echo(json.dumps(value, default=lambda one: str(one) if isinstance(one, Path) else vars(one), indent=2))


def print_table(
    columns: Iterable[str], rows: Sequence[Sequence[str | Text]], empty: str = "No runs.", title: str | None = None
) -> None:
    """Print a table of texts, which may be of a foreign directory. `empty`: what is printed if there are no rows."""
    if not rows:
        click.echo(empty)
        return
    table = Table(title=title, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(
            column,
            no_wrap=column in ("run", "bytes", "age", "checkpoint", "step"),
            overflow="fold",
            justify="right" if column in _NUMBERS else "left",
        )
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(printable(cell)) for cell in row))
    stdout().print(table)
