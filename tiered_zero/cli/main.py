"""Define the command group `tiered-zero`. A command is imported when it runs, so that `--help` needs no torch."""

from __future__ import annotations

import difflib
import importlib
from typing import Any, NamedTuple

import click

from tiered_zero.cli.console import configure_logging, rank_prefix
from tiered_zero.errors import TieredZeroError
from tiered_zero.stopping import INTERRUPTED


class Command(NamedTuple):
    """A command. `target`: its function, as "module:attribute". `summary`: its line in `--help`."""

    target: str
    summary: str


COMMANDS = {
    "demo": Command("tiered_zero.cli.demo:demo", "Train what does not fit, in a minute, compared with plain PyTorch."),
    "train": Command("tiered_zero.cli.train:train", "Train a small GPT across the tiers that a config names."),
    "plan": Command("tiered_zero.cli.plan:plan", "Show the bytes that a run needs on each tier, before it is run."),
    "explain": Command(
        "tiered_zero.cli.explain:explain", "Show what becomes of a config's keys: value, source, effect."
    ),
    "report": Command("tiered_zero.cli.explain:report", "Turn the record of a run into one HTML page."),
    "swap": Command("tiered_zero.cli.swap:swap", "Look at swap directories, and clean them up."),
    "checkpoint": Command(
        "tiered_zero.cli.checkpoint:checkpoint", "List checkpoints, check them, and turn them into weights."
    ),
    "bench": Command("tiered_zero.cli.bench_io:bench", "Measure a disk, and find the best settings for it."),
    "launch": Command(
        "tiered_zero.cli.deepspeed_commands:launch",
        "Start a script on ranks of this host as DeepSpeed's launcher does.",
    ),
    "deepspeed-alias": Command(
        "tiered_zero.cli.deepspeed_commands:deepspeed_alias",
        "Let other tools find tiered_zero where they import deepspeed.",
    ),
    "doctor": Command("tiered_zero.cli.doctor:doctor", "Check this machine: what works, and how to fix the rest."),
}


class LazyGroup(click.Group):
    """A command group that imports a command of COMMANDS when it is used. Turns a TieredZeroError into one message and
    exit code 1."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name].target.partition(":")
        try:
            command = getattr(importlib.import_module(module), attribute)
        except ImportError as error:
            raise click.ClickException(f"{cmd_name} cannot run here: {error}.") from error
        assert isinstance(command, click.Command)
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        if args and args[0] not in COMMANDS and (near := difflib.get_close_matches(args[0], COMMANDS, n=1)):
            raise click.UsageError(f"No such command {args[0]!r}. Did you mean {near[0]!r}?", ctx)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except TieredZeroError as error:
            raise click.ClickException(f"{rank_prefix()}{error}") from error
        except KeyboardInterrupt:
            click.echo(f"{rank_prefix()}Interrupted.", err=True)
            ctx.exit(INTERRUPTED)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="tiered_zero")
def main() -> None:
    """Train PyTorch models that are larger than GPU memory, from a DeepSpeed-style JSON."""
    configure_logging()
