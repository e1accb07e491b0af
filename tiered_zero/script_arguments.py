"""The command line arguments that DeepSpeed's launcher and its scripts agree on."""

from __future__ import annotations

from argparse import ArgumentParser


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config; `initialize(args=...)` reads the second."""
    group = parser.add_argument_group("DeepSpeed", "as in scripts for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="read by scripts; initialize() does not need it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of initialize(args=...)")
    return parser
