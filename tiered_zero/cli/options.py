"""Options that several commands share: the built-in model, and the demo's size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from tiered_zero.cli.drives import Drive, parse_drive
from tiered_zero.errors import ConfigError
from tiered_zero.plan.gpt_shape import GPTConfig, gpt_of_size, parse_count, parse_gpt
from tiered_zero.sizes import parse_hardware_nbytes, parse_nbytes

DEMO_MODEL = GPTConfig(layers=6, hidden=384, context=256)
"""10.8 million parameters: 151 MB with master weights and Adam state, some two minutes for DEMO_STEPS on 2 cores."""

DEMO_STEPS = 200

T = TypeVar("T")
Parsed = TypeVar("Parsed")

CONFIG_FILE = click.Path(exists=True, dir_okay=False)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
directory_argument = click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")


def parse_model(ctx: click.Context, param: click.Parameter, value: str | None) -> GPTConfig | None:
    """Callback: gpt:layers=24,hidden=2048 -> GPTConfig."""
    return None if value is None else _or_usage_error(parse_gpt, value)


def parse_source(ctx: click.Context, param: click.Parameter, value: str | None) -> GPTConfig | str | None:
    """Callback: gpt:layers=24 -> GPTConfig; module:function stays."""
    if value is None or value.partition(":")[0] == "gpt":
        return parse_model(ctx, param, value)
    if not re.fullmatch(r"[\w.]+:\w+", value):
        raise click.BadParameter(f"expected gpt:layers=24,hidden=2048 or module:function; found {value!r}")
    return value


def parse_size(ctx: click.Context, param: click.Parameter, value: str | None) -> GPTConfig | None:
    """Callback: 7B, 7e9 -> a GPT of about that many parameters."""
    return None if value is None else _or_usage_error(lambda text: gpt_of_size(parse_count(text)), value)


size_option = click.option(
    "--params", "sized", callback=parse_size, metavar="7B", help="A GPT of about that size, with a usual vocabulary."
)


def parse_bytes(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback: 24GiB -> bytes."""
    return None if value is None else _or_usage_error(parse_nbytes, value)


def parse_memory(ctx: click.Context, param: click.Parameter, value: str | None) -> int | None:
    """Callback: 24GiB -> bytes of a machine's memory."""
    return None if value is None else _or_usage_error(parse_hardware_nbytes, value)


def parse_drives(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[Drive, ...]:
    """Callback: 2TB:7GB/s,5GB/s:1200TBW, any number of times."""
    return tuple(_or_usage_error(parse_drive, value) for value in values)


def _or_usage_error(parse: Callable[[T], Parsed], value: T) -> Parsed:
    try:
        return parse(value)
    except (ConfigError, ValueError) as error:
        raise click.BadParameter(str(error)) from error
