"""Define what commands share: options and their values, log lines and progress on stderr, tables and JSON on stdout."""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from tiered_zero.errors import ConfigError
from tiered_zero.plan.gpt_shape import GPTConfig, gpt_of_size, parse_count, parse_gpt
from tiered_zero.sizes import parse_nbytes

DEMO_MODEL = GPTConfig(layers=6, hidden=384, context=256)
"""A GPT with 10.8 million parameters. DEMO_STEPS take about two minutes on 2 cores."""

DEMO_STEPS = 200

CONFIG_FILE = click.Path(exists=True, dir_okay=False)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
directory_argument = click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return a click callback that converts an option's text with `parse`. If `parse` raises ConfigError or ValueError,
    the command reports wrong usage."""

    def read(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        try:
            return tuple(map(parse, value)) if isinstance(value, tuple) else None if value is None else parse(value)
        except (ConfigError, ValueError) as error:
            raise click.BadParameter(str(error)) from error

    return read


parse_model = parsed(parse_gpt)
parse_bytes = parsed(parse_nbytes)


def parse_source(text: str) -> GPTConfig | str:
    """Convert "gpt:layers=24" to a GPTConfig; return "module:function" unchanged. Raises ConfigError, ValueError."""
    if text.partition(":")[0] == "gpt":
        return parse_gpt(text)
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"expected gpt:layers=24,hidden=2048 or module:function; found {text!r}")
    return text


def parse_size(text: str) -> GPTConfig:
    """Return the shape of a GPT with about as many parameters as `text` says: "7B" or "7e9". Raises ConfigError."""
    return gpt_of_size(parse_count(text))


def overlay(settings: dict[str, Any], **own: Any) -> dict[str, Any]:
    """Return a copy of the config `settings` with `own` in its section "tiered_zero". A value None is left out."""
    section = settings.get("tiered_zero")
    given = {name: value for name, value in own.items() if value is not None}
    if not given or not isinstance(section, dict | None):
        return dict(settings)  # `load` refuses a section that is no object
    return {**settings, "tiered_zero": {**(section or {}), **given}}


STDERR = Console(stderr=True)
"""The console of log lines."""

_NUMBERS = {
    *("age", "block", "busy", "bytes", "depth", "mixed", "peak", "planned", "rate while busy", "read", "runs"),
    *("seconds", "share", "step", "write"),
}
"""Names of table columns that are aligned right."""


def stdout() -> Console:
    """Return a console for results. It wraps lines at the width of the terminal or COLUMNS, else at 1000 characters."""
    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 1000)


class ConsoleHandler(logging.Handler):
    """Prints log lines on stderr. Lines above INFO begin with their level."""

    def emit(self, record: logging.LogRecord) -> None:
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: {rank_prefix()}"
        STDERR.print(f"{level}{self.format(record)}", markup=False, highlight=False, soft_wrap=True)


def configure_logging() -> None:
    """Configure the package's logger: rank 0 prints INFO and above, other ranks print errors only."""
    logger = logging.getLogger("tiered_zero")
    logger.setLevel(logging.INFO if rank_prefix() in ("", "rank 0: ") else logging.ERROR)
    logger.handlers = [ConsoleHandler()]


def rank_prefix() -> str:
    """Return "rank N: " with the launcher's RANK if there are several ranks; else ""."""
    return f"rank {os.environ.get('RANK', '?')}: " if os.environ.get("WORLD_SIZE", "1") != "1" else ""


def printable(text: str) -> str:
    """Escape characters that are not printable, so that text from files cannot send commands to the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def print_json(value: Any) -> None:
    """Print `value` as JSON, with dataclasses as objects and paths as text."""
    click.echo(json.dumps(value, default=lambda one: str(one) if isinstance(one, Path) else vars(one), indent=2))


def print_table(
    columns: Iterable[str], rows: Sequence[Sequence[str | Text]], empty: str = "No runs.", title: str | None = None
) -> None:
    """Print a table of texts; control characters in them are escaped. `empty`: printed if there are no rows."""
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
