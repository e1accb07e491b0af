"""`tiered-zero swap capacity CONFIG`: bytes in each swap directory, whether they fit, and how they wear the drives."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import click

from tiered_zero.config import Config, load
from tiered_zero.layout.swap_bytes import (
    NO_OPTIMIZER,
    GPTShape,
    SwapNeed,
    SwapSettings,
    capacity_lines,
    capacity_report,
    count_state_arrays,
    gpt_need,
    gpt_of_size,
    parse_gpt,
    sub_group_numel,
)

POSITIVE = click.FloatRange(min=0, min_open=True)


def shape_of(parse: Callable[[Any], GPTShape]) -> Callable[[click.Context, click.Parameter, Any], GPTShape | None]:
    """An option's callback: its text or number -> the shape of a GPT. Without torch, so that the answer is quick."""

    def callback(ctx: click.Context, param: click.Parameter, value: Any) -> GPTShape | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from error

    return callback


@click.command("capacity", short_help="Show the bytes that a run would need.")
@click.argument("config", type=click.Path(exists=True, dir_okay=False))
@click.option("--model", callback=shape_of(parse_gpt), metavar="gpt:...", help="Such as gpt:layers=24,hidden=2048.")
@click.option(
    "--params", "sized", type=float, callback=shape_of(gpt_of_size), metavar="7e9", help="A GPT of that size."
)
@click.option("--tbw", type=POSITIVE, metavar="TB", help="What one drive is rated to take, in 10**12 bytes.")
@click.option("--step-seconds", type=POSITIVE, metavar="S", help="Measured time of a step.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object for programs.")
@click.pass_context
def capacity(
    ctx: click.Context,
    config: str,
    model: GPTShape | None,
    sized: GPTShape | None,
    tbw: float | None,
    step_seconds: float | None,
    as_json: bool,
) -> None:
    """Say what a run of CONFIG needs in each swap directory, whether it fits, and how it wears the drives.

    Exit code 1 where it does not fit. tools/swap_capacity.py gives the same answer on a host without this package.
    """
    shape = model or sized
    if shape is None or (model and sized):
        raise click.UsageError("Give one of --model and --params.")
    loaded = load(config)
    need, settings = swap_need(loaded, shape)
    note = "" if loaded.optimizer else NO_OPTIMIZER
    report = capacity_report(str(shape), shape.num_parameters, need, settings, tbw, step_seconds, note)
    click.echo(json.dumps(report) if as_json else "\n".join(capacity_lines(report)))
    if not report["fits"]:
        ctx.exit(1)


def swap_need(config: Config, shape: GPTShape) -> tuple[SwapNeed, SwapSettings]:
    """By formula; for an optimizer that the formulas do not know, by the plan of the run itself."""
    zero, optimizer = config.zero_optimization, config.optimizer
    param, state = zero.offload_param, zero.offload_optimizer
    counted = count_state_arrays(optimizer.type, optimizer.params) if optimizer else count_state_arrays("adamw", {})
    arrays, whole_parameters = counted or (0, False)
    settings = SwapSettings(
        itemsize=4 if config.param_dtype_name == "float32" else 2,
        param_paths=param.nvme_paths if param.device == "nvme" else (),
        state_paths=state.nvme_paths if state.device == "nvme" else (),
        persistence_numel=zero.stage3_param_persistence_threshold if param.device != "none" else 0,
        max_persistent_numel=zero.stage3_model_persistence_threshold,
        max_host_param_numel=param.max_in_cpu,
        unit_cap_numel=config.tiered_zero.unit_size_cap,
        state_arrays=arrays,
        whole_parameters=whole_parameters,
        delayed=config.tiered_zero.update == "delayed",
        state_format=config.tiered_zero.state_format,
        sub_group_numel=sub_group_numel(zero.sub_group_size),
        ratio=state.ratio,
        state_limits=config.tiered_zero.state_limits.by_tier,
    )
    return (gpt_need(shape, settings) if counted else _planned_need(config, shape)), settings


def _planned_need(config: Config, shape: GPTShape) -> SwapNeed:
    from tiered_zero.demo.gpt import build_gpt
    from tiered_zero.demo.gpt import parse_gpt as parse_config
    from tiered_zero.run_spec import specify_run

    planned = specify_run(config, build_gpt(parse_config(str(shape)))).plan
    return SwapNeed(*(planned.nbytes("nvme", kind) for kind in ("param", "param_back", "state")))
