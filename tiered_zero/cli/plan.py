"""`tiered-zero plan CONFIG`: the bytes on each tier, before anything is allocated."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

import click

from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.options import CONFIG_FILE, DEMO_MODEL, JSON_OPTION, parse_model, parse_size
from tiered_zero.cli.tables import plan_table
from tiered_zero.config import Config, load
from tiered_zero.demo.gpt import GPTConfig, build_gpt, num_parameters


class PlanLike(Protocol):
    """What this command needs of a plan."""

    def table(self) -> Sequence[dict[str, Any]]:
        """Rows of tier, kind, nbytes."""


@click.command()
@click.argument("config", type=CONFIG_FILE)
@click.option("--model", callback=parse_model, metavar="gpt:...", help=f"Default {DEMO_MODEL}.")
@click.option("--params", "sized", type=float, callback=parse_size, metavar="7e9", help="A GPT of about that size.")
@JSON_OPTION
def plan(config: str, model: GPTConfig | None, sized: GPTConfig | None, as_json: bool) -> None:
    """Show the bytes that a run of CONFIG needs on each tier. Allocates nothing.

    Fails, with the table, where it does not fit.
    """
    if model and sized:
        raise click.UsageError("Give --model or --params, not both.")
    shape = model or sized or DEMO_MODEL
    rows = list(make_plan(load(config), shape).table())
    if as_json:
        click.echo(json.dumps({"model": str(shape), "num_parameters": num_parameters(shape), "rows": rows}))
        return
    STDOUT.print(f"{num_parameters(shape):,} parameters: {shape}", highlight=False)
    STDOUT.print(plan_table(rows))


def make_plan(config: Config, shape: GPTConfig) -> PlanLike:
    """The model is built on `meta`: its units are found as in a run, and it takes no memory."""
    from tiered_zero.plan.planner import plan_for

    plan: PlanLike = plan_for(config, build_gpt(shape))
    return plan
