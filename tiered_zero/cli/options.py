"""Options that several commands share, the types of their values, and the demo's size."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from tiered_zero.errors import ConfigError
from tiered_zero.plan.gpt_shape import GPTConfig, gpt_of_size, parse_count, parse_gpt
from tiered_zero.sizes import parse_nbytes

DEMO_MODEL = GPTConfig(layers=6, hidden=384, context=256)
"""10.8 million parameters: 151 MB with master weights and Adam state, some two minutes for DEMO_STEPS on 2 cores."""

DEMO_STEPS = 200

CONFIG_FILE = click.Path(exists=True, dir_okay=False)
DIRECTORY = click.Path(file_okay=False, path_type=Path)
directory_argument = click.argument("directory", type=click.Path(file_okay=False, exists=True, path_type=Path))
JSON_OPTION = click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout, nothing else.")


def parsed(parse: Callable[[str], Any]) -> Callable[[click.Context, click.Parameter, Any], Any]:
    """Return the callback of an option whose text, or each of whose texts, `parse` reads. Its ConfigError and
    ValueError are wrong usage."""

    def read(_ctx: click.Context, _param: click.Parameter, value: Any) -> Any:
        try:
            return tuple(map(parse, value)) if isinstance(value, tuple) else None if value is None else parse(value)
        except (ConfigError, ValueError) as error:
            raise click.BadParameter(str(error)) from error

    return read


parse_model = parsed(parse_gpt)
parse_bytes = parsed(parse_nbytes)


def parse_source(text: str) -> GPTConfig | str:
    """Read gpt:layers=24 as a GPTConfig, and leave module:function. Raises ConfigError, ValueError."""
    if text.partition(":")[0] == "gpt":
        return parse_gpt(text)
    if not re.fullmatch(r"[\w.]+:\w+", text):
        raise ValueError(f"expected gpt:layers=24,hidden=2048 or module:function; found {text!r}")
    return text


def parse_size(text: str) -> GPTConfig:
    """7B, 7e9 -> a GPT of about that many parameters. Raises ConfigError."""
    return gpt_of_size(parse_count(text))
