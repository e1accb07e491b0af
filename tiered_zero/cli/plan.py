"""`tiered-zero plan CONFIG`: the bytes on each tier, before anything is allocated."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.options import CONFIG_FILE, DEMO_MODEL, JSON_OPTION, parse_bytes, parse_source, size_option
from tiered_zero.cli.tables import plan_table
from tiered_zero.config import load
from tiered_zero.config.json_file import read_json
from tiered_zero.errors import PlanError
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.swap_capacity import SwapNeed, directory_needs, look_at_drives
from tiered_zero.sizes import format_nbytes

if TYPE_CHECKING:
    from tiered_zero.plan.activations import ActivationEstimate
    from tiered_zero.plan.planner import Plan

_EVALUATES = (
    "No optimizer is named: this is the plan of an evaluation. To plan training add --optimizer AdamW, or name one in "
    "the config."
)
_NO_ESTIMATE = (
    "Activations are not estimated: the model does not say its hidden size, layers and length (--sequence-length)."
)


@click.command()
@click.argument("config", type=CONFIG_FILE)
@click.option(
    "--model",
    "source",
    callback=parse_source,
    metavar="gpt:...|MODULE:FUNCTION",
    help=f"The built-in GPT (default {DEMO_MODEL}), or a function of yours that returns a model.",
)
@size_option
@click.option(
    "--model-config",
    type=click.Path(exists=True, path_type=Path),
    metavar="config.json",
    help="A Hugging Face model, from its config (needs transformers, and no network).",
)
@click.option("--optimizer", metavar="AdamW", help="Plan with this optimizer in place of the config's.")
@click.option(
    "--sequence-length",
    type=click.IntRange(min=1),
    metavar="TOKENS",
    help="Of a sample, for the estimate of activations (default: the most that the model takes).",
)
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this host.")
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
    /,
    config: str,
    source: GPTConfig | str | None,
    sized: GPTConfig | None,
    model_config: Path | None,
    optimizer: str | None,
    sequence_length: int | None,
    ranks: int,
    device_memory: int | None,
    host_memory: int | None,
    as_json: bool,
) -> None:
    """Show the bytes that a run of CONFIG needs on each tier. Allocates nothing.

    Exit code 1, with the table and the reason, if it does not fit: into this machine and its disks, the limits in
    CONFIG, or the sizes given by option.
    """
    given = [chosen for chosen in (source, sized, model_config) if chosen is not None]
    if len(given) > 1:
        raise click.UsageError("Give one of --model, --params and --model-config.")
    chosen = given[0] if given else DEMO_MODEL
    settings = read_json(config)
    if optimizer is not None:
        settings["optimizer"] = {"type": optimizer}
    # Not imported for --help: torch takes seconds.
    from tiered_zero.cli.planned_run import build_planned, count_parameters, estimate_of, specify_planned
    from tiered_zero.rules.from_config import check_sections

    loaded = load(settings, world_size=ranks, to_train=False)
    check_sections(loaded)
    model = build_planned(chosen)
    run = specify_planned(loaded, model, ranks, device_memory, host_memory)
    paths = loaded.tiered_zero.activations.nvme_paths
    needs = directory_needs(SwapNeed.of(run.plan), loaded.zero_optimization, 1, paths)
    directories, drives = look_at_drives(dataclasses.replace(need, nbytes=ranks * need.nbytes) for need in needs)
    problems = list(_problems(run.plan, drives))
    estimate = estimate_of(model, chosen, loaded, sequence_length)
    if as_json:
        facts = {
            "model": str(chosen),
            "num_parameters": count_parameters(model),
            "trains": run.trains,
            "ranks": ranks,
            "problem": "\n".join(problems) or None,
            "update_policy": dataclasses.asdict(run.plan.update_policy),
            "rows": run.plan.table(),
            "activations": None if estimate is None else dataclasses.asdict(estimate),
            "directories": directories,
            "drives": drives,
        }
        click.echo(json.dumps(facts))
    else:
        if not run.trains:
            click.echo(_EVALUATES)
        click.echo(f"{count_parameters(model):,} parameters: {chosen}")
        if ranks > 1:
            click.echo(f"Rank 0 of {ranks} on one host; the others need the same, or a little less.")
        STDOUT.print(plan_table(run.plan))
        policy = run.plan.update_policy.text
        for line in (*_directory_lines(directories, drives), policy, *_estimate_lines(estimate, run.plan)):
            click.echo(line)
    for problem in problems:
        click.echo(f"Error: {problem.partition(chr(10))[0]}", err=True)
    if problems:
        if device_memory is None and run.plan.missing_nbytes("device") > 0:
            click.echo("To plan for another device, add for example --device-memory 24GiB.", err=True)
        ctx.exit(1)


def _estimate_lines(estimate: ActivationEstimate | None, plan: Plan) -> Iterator[str]:
    """Say what a micro-batch takes beside the plan, and where."""
    if estimate is None:
        yield _NO_ESTIMATE
        return
    offloaded = estimate.offloaded_nbytes(plan.activations)
    kept = estimate.boundaries_nbytes - offloaded
    yield (
        f"Beside the plan, estimated for a micro-batch of {estimate.tokens:,} tokens with each block in a checkpoint: "
        f"inputs of {estimate.num_boundaries} blocks {format_nbytes(estimate.boundaries_nbytes)}, one block's "
        f"activations {format_nbytes(estimate.block_nbytes)}, logits {format_nbytes(estimate.logits_nbytes)}."
    )
    if plan.activations is not None:
        yield f"Of the inputs {format_nbytes(offloaded)} fit the budget on {plan.activations.tier}."
    limit, source = plan.limits.get("device", (None, ""))
    if limit is not None:
        needed, room = kept + estimate.block_nbytes + estimate.logits_nbytes, limit - plan.nbytes("device")
        way = "" if needed <= room else f"; {_way_to_fit(estimate, kept)}"
        yield (
            f"On the device they need {format_nbytes(needed)}; the plan leaves {format_nbytes(max(0, room))} ({source})"
            f"{way}."
        )


def _way_to_fit(estimate: ActivationEstimate, kept_nbytes: int) -> str:
    """Name what helps most against activations that do not fit. `kept_nbytes`: of the inputs, on the device."""
    if estimate.logits_nbytes >= max(kept_nbytes, estimate.block_nbytes):
        return "compute the logits and the loss of a part of the tokens at a time, or take fewer tokens a micro-batch"
    if kept_nbytes >= estimate.block_nbytes:
        return (
            "offload the inputs (tiered_zero.activations, or a larger limit there), or take fewer tokens a micro-batch"
        )
    return "take fewer tokens a micro-batch"


def _problems(plan: Plan, drives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield what does not fit: into memory, and onto disks."""
    try:
        plan.check()
    except PlanError as error:
        yield str(error)
    for drive in drives:
        if not drive["fits"]:
            yield (
                f"The plan needs {format_nbytes(drive['nbytes'])} in {', '.join(drive['directories'])}; "
                f"{format_nbytes(drive['free_nbytes'])} are free there. Free space, or name another disk in nvme_path."
            )


def _directory_lines(directories: Sequence[Mapping[str, Any]], drives: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    free = {path: drive["free_nbytes"] for drive in drives for path in drive["directories"]}
    for row in directories:
        exists = "" if row["exists"] else " (it does not exist yet)"
        path = row["path"]
        yield f"nvme_path {path}: {format_nbytes(row['nbytes'])} of {format_nbytes(free[path])} that are free{exists}"
