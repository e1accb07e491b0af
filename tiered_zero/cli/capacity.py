"""`tiered-zero swap capacity CONFIG`: bytes in each swap directory, whether they fit, and how they wear the drives."""

from __future__ import annotations

import json

import click

from tiered_zero.cli.options import parse_model, size_option
from tiered_zero.config import Config, load
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.swap_capacity import SwapNeed, capacity_lines, capacity_report, plan_gpt, state_arrays

POSITIVE = click.FloatRange(min=0, min_open=True)


@click.command("capacity", short_help="Show the bytes that a run would need.")
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", callback=parse_model, metavar="gpt:...", help="Such as gpt:layers=24,hidden=2048.")
@size_option
@click.option("--tbw", type=POSITIVE, metavar="TB", help="What one drive is rated to take, in 10**12 bytes.")
@click.option("--step-seconds", type=POSITIVE, metavar="S", help="Measured time of a step.")
@click.option(
    "--save-every",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    metavar="N",
    help="Steps from one in-place commit to the next.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
@click.pass_context
def capacity(
    ctx: click.Context,
    config: str,
    model: GPTConfig | None,
    sized: GPTConfig | None,
    tbw: float | None,
    step_seconds: float | None,
    save_every: int,
    as_json: bool,
) -> None:
    """Say what a run of CONFIG needs in each swap directory, whether it fits, and how it wears the drives.

    Exit code 1 if it does not fit. tools/swap_capacity.py gives the same answer on a host without torch.
    """
    shape = model or sized
    if shape is None or (model and sized):
        raise click.UsageError("Give one of --model and --params.")
    loaded = load(config, to_train=False)
    report = capacity_report(loaded, shape, swap_need(loaded, shape), tbw, step_seconds, save_every)
    click.echo(json.dumps(report) if as_json else "\n".join(capacity_lines(report)))
    if not report["fits"]:
        ctx.exit(1)


def swap_need(config: Config, shape: GPTConfig) -> SwapNeed:
    """Plan the run from its shape; for an optimizer whose state only torch can count, from the model itself."""
    if state_arrays(config) is not None:
        return SwapNeed.of(plan_gpt(config, shape))
    from tiered_zero.assembly.run_spec import specify_run
    from tiered_zero.demo.gpt import build_gpt

    return SwapNeed.of(specify_run(config, build_gpt(shape)).plan)
