"""Terminal output: one console each for stderr and stdout, log lines on stderr, and listings on stdout."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import click
from rich.console import Console, ConsoleDimensions
from rich.table import Table
from rich.text import Text

STDERR = Console(stderr=True)
"""Progress and log share it, so that a line is printed above the bar. It follows sys.stderr if that is replaced."""


class ResultConsole(Console):
    """Wraps at the width of a terminal, or at COLUMNS. A file and a pipe get whole lines, to be searched."""

    @property
    def size(self) -> ConsoleDimensions:
        found = super().size
        fits = self.is_terminal or "COLUMNS" in os.environ
        return found if fits else ConsoleDimensions(width=_FILE_WIDTH, height=found.height)

    @size.setter
    def size(self, new_size: tuple[int, int]) -> None:
        self._width, self._height = new_size


_FILE_WIDTH = 1000
STDOUT = ResultConsole()


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
