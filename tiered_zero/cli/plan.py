"""`tiered-zero plan CONFIG`: the bytes on each tier, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json

import click

from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.options import CONFIG_FILE, DEMO_MODEL, JSON_OPTION, parse_bytes, parse_model, parse_size
from tiered_zero.cli.tables import plan_table
from tiered_zero.config import load
from tiered_zero.errors import PlanError
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters


@click.command()
@click.argument("config", type=CONFIG_FILE)
@click.option("--model", callback=parse_model, metavar="gpt:...", help=f"Default {DEMO_MODEL}.")
@click.option("--params", "sized", type=float, callback=parse_size, metavar="7e9", help="A GPT of about that size.")
@click.option(
    "--device-memory",
    callback=parse_bytes,
    metavar="24GiB",
    help="Plan for a device of this size (default: what the GPU has free, or the config's limit).",
)
@click.option(
    "--host-memory",
    callback=parse_bytes,
    metavar="64GiB",
    help="Plan for a host of this size (default: what is free here).",
)
@JSON_OPTION
@click.pass_context
def plan(
    ctx: click.Context,
    config: str,
    model: GPTConfig | None,
    sized: GPTConfig | None,
    device_memory: int | None,
    host_memory: int | None,
    as_json: bool,
) -> None:
    """Show the bytes that a run of CONFIG needs on each tier. Allocates nothing.

    Exit code 1, with the table and the reason, where it does not fit: into this machine, the limits in CONFIG, or the
    sizes given by option.
    """
    if model and sized:
        raise click.UsageError("Give --model or --params, not both.")
    from tiered_zero.demo.gpt import build_gpt  # not for --help: torch takes seconds
    from tiered_zero.run_spec import specify_run

    shape = model or sized or DEMO_MODEL
    given = {"device": device_memory, "host": host_memory}
    limits = {tier: (nbytes, f"--{tier}-memory") for tier, nbytes in given.items() if nbytes is not None}
    planned = specify_run(load(config), build_gpt(shape), limits=limits).plan
    try:
        planned.check()
        problem = None
    except PlanError as error:
        problem = str(error)
    if as_json:
        facts = {"model": str(shape), "num_parameters": num_parameters(shape), "problem": problem}
        policy = dataclasses.asdict(planned.update_policy)
        click.echo(json.dumps({**facts, "update_policy": policy, "rows": planned.table()}))
    else:
        STDOUT.print(f"{num_parameters(shape):,} parameters: {shape}", highlight=False)
        STDOUT.print(plan_table(planned))
        STDOUT.print(planned.update_policy.text, highlight=False)
    if problem:
        click.echo(f"Error: {problem.partition(chr(10))[0]}", err=True)
        if device_memory is None and planned.nbytes("device") > planned.limits.get("device", (1 << 62, ""))[0]:
            click.echo("To plan for another device, add for example --device-memory 24GiB.", err=True)
        ctx.exit(1)
