"""Show the bytes on each tier before anything is allocated: `tiered-zero plan CONFIG`. Functions that need torch import
it themselves, so that `--help` is fast."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from tiered_zero.assembly.machine_rates import machine_to_plan
from tiered_zero.cli.console import (
    CONFIG_FILE,
    DEMO_MODEL,
    JSON_OPTION,
    overlay,
    parse_size,
    parse_source,
    parsed,
    print_json,
)
from tiered_zero.cli.plan_lines import (
    directory_needs,
    drive_lines,
    drive_problems,
    estimate_lines,
    fill_drives,
    look_at_drives,
    seconds_facts,
    seconds_lines,
)
from tiered_zero.config.load import load, read_json
from tiered_zero.config.schema import Config
from tiered_zero.errors import ConfigError, PlanError
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.machine import Disk, Machine, parse_disk
from tiered_zero.sizes import parse_hardware_nbytes

if TYPE_CHECKING:
    from torch import nn

    from tiered_zero.assembly.spec import RunSpec
    from tiered_zero.hardware.ranks.collectives import Collectives

_EVALUATES = (
    "No optimizer is named: this is the plan of an evaluation. To plan training add --optimizer AdamW, or name one in "
    "the config."
)


@click.command()
@click.argument("config", type=CONFIG_FILE)
@click.option(
    "--model",
    "source",
    callback=parsed(parse_source),
    metavar="gpt:...|MODULE:FUNCTION",
    help=f"The built-in GPT (default {DEMO_MODEL}), or a function of yours that returns a model.",
)
@click.option(
    "--params",
    "sized",
    callback=parsed(parse_size),
    metavar="7B",
    help="A GPT of about that size, with a usual vocabulary.",
)
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
@click.option(
    "--machine",
    "machine_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    metavar="H100.json",
    help="Plan for the machine of this file, as in configs/machines: its memories, disks and rates (default: this one, "
    "with the rates that `doctor --measure` has found).",
)
@click.option(
    "--choose",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT.json",
    help="Choose the placement as tiered_zero.placement auto does, show the three best with their seconds, and write "
    "the config of the first.",
)
@click.option("--ranks", type=click.IntRange(min=1), default=1, show_default=True, help="Processes on this host.")
@click.option(
    "--device-memory",
    callback=parsed(parse_hardware_nbytes),
    metavar="24GiB",
    help="Plan for an accelerator of this size, of which the plan may take seven eighths (default: the device here, "
    "or the config's limit).",
)
@click.option(
    "--host-memory",
    callback=parsed(parse_hardware_nbytes),
    metavar="64GiB",
    help="Plan for a host of this size, of which the plan may take seven eighths (default: what is free here, or the "
    "config's limit).",
)
@click.option(
    "--disk",
    "disks",
    callback=parsed(parse_disk),
    multiple=True,
    metavar="2TB[:7GB/s,5GB/s[:1200TBW]]",
    help="Plan for a drive of this size, with its rates of reads and writes and what it is rated to take (default: "
    "the disks here), and say after how many steps the rating is reached. Repeat it for more drives.",
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
    machine_file: Path | None,
    choose: Path | None,
    ranks: int,
    device_memory: int | None,
    host_memory: int | None,
    disks: tuple[Disk, ...],
    as_json: bool,
) -> None:
    """Show the bytes that a run of CONFIG needs on each tier. Allocates nothing.

    If the run does not fit into this machine, the limits in CONFIG or the sizes given as options, prints the reason
    after the table and ends with exit code 1. The estimate of activations is checked only if a sequence length is
    given. Otherwise a line says whether activations fit for the longest sample that the model takes.
    """
    machine, whose = machine_to_plan(machine_file, device_memory, host_memory, disks)
    sources = ("--device-memory", "--host-memory")
    if machine_file is not None:
        file = str(machine_file)
        sources = (file if device_memory is None else sources[0], file if host_memory is None else sources[1])
        device_memory, host_memory = machine.device_nbytes, machine.host_nbytes
        if host_memory is None or (device_memory is None and machine.device != "cpu"):
            missing = "host_nbytes" if host_memory is None else "device_nbytes"
            raise ConfigError(f"{machine_file}: expected {missing}; it is missing. Add it, or give the size by option.")
        disks = tuple(disk for disk in machine.disks if disk.nbytes)
    given = [chosen for chosen in (source, sized, model_config) if chosen is not None]
    if len(given) > 1:
        raise click.UsageError("Give one of --model, --params and --model-config.")
    chosen = given[0] if given else DEMO_MODEL
    placement = "auto" if choose is not None else None
    settings = overlay(read_json(config), placement=placement, sequence_length=sequence_length)
    if optimizer is not None:
        settings["optimizer"] = {"type": optimizer}
    # Not imported for --help: torch takes seconds.
    from tiered_zero.assembly.choice import estimate_of, make_predictor
    from tiered_zero.hardware.probe import available_device_nbytes
    from tiered_zero.hardware.runtime import find_device

    loaded = load(settings, world_size=ranks, to_train=False)
    sequence_length = sequence_length or loaded.tiered_zero.sequence_length
    model = build_planned(chosen)
    rates = machine if machine_file is not None or disks else None
    run = specify_planned(loaded, model, ranks, device_memory, host_memory, rates, sources)
    if choose is not None and run.choice is not None:
        run.choice.save(choose)
    step = None
    if run.trains and ranks == 1:
        try:
            predict = make_predictor(loaded, model, rates, finds_hidden=True)
            step = predict(run.plan)
        except ConfigError as error:  # a rate of the machine is not known
            whose = f"{whose} {error}" if str(error) != whose else whose
    estimate = estimate_of(model, loaded, sequence_length)
    offloaded = estimate.offloaded_nbytes(run.plan.activations) if estimate is not None else 0
    needs = directory_needs(run, ranks, offloaded)
    if needs and machine_file is not None and not disks:
        raise ConfigError(
            f"{machine_file}: expected disks with nbytes, for this plan uses nvme; found none. Add one, or give --disk."
        )
    directories, drives = look_at_drives(needs)
    if disks:
        drives = fill_drives(needs, disks) if needs else []
    device_nbytes = device_memory or available_device_nbytes(find_device(loaded.tiered_zero.device))
    lines, short = estimate_lines(estimate, run.plan, device_nbytes, is_given=sequence_length is not None)
    problems = [*drive_problems(drives), *([short] if short else [])]
    try:
        run.plan.check()
    except PlanError as error:
        problems.insert(0, str(error))
    if as_json:
        facts = {
            "model": str(chosen),
            "num_parameters": count_parameters(model),
            "trains": run.trains,
            "ranks": ranks,
            "problem": "\n".join(problems) or None,
            "update_policy": run.plan.update_policy,
            "rows": run.plan.rows,
            "activations": estimate,
            "machine": machine,
            "seconds": seconds_facts(step) if step is not None else None,
            "choice": run.choice.lines if run.choice is not None else None,
            "directories": directories,
            "drives": drives,
        }
        print_json(facts)
    else:
        if not run.trains:
            click.echo(_EVALUATES)
        click.echo(f"{count_parameters(model):,} parameters: {chosen}")
        if ranks > 1:
            click.echo(f"Rank 0 of {ranks} on one host; the others need the same, or a little less.")
        for line in (
            *(run.choice.lines if run.choice is not None else ()),
            str(run.plan),
            *drive_lines(directories, drives),
            *lines,
            whose,
            *(seconds_lines(step, run.plan, machine) if step is not None else ()),
        ):
            click.echo(line)
        if disks and not needs and machine_file is None:
            click.echo("--disk has no effect: nothing of this plan rests on nvme.")
    for problem in problems:
        click.echo(f"Error: {problem.partition(chr(10))[0]}", err=True)
    if problems:
        if device_memory is None and run.plan.missing_nbytes("device") > 0:
            click.echo("To plan for another device, add for example --device-memory 24GiB.", err=True)
        ctx.exit(1)


def build_planned(source: GPTConfig | Path | str) -> nn.Module:
    """Build the model to plan, on the `meta` device. `source`: the shape of a built-in GPT, the path of a Hugging Face
    config.json, or "module:function". Raises ConfigError."""
    import torch

    from tiered_zero.demo.gpt import build_gpt

    if isinstance(source, GPTConfig):
        return _with_checkpoints(build_gpt(source))
    try:
        with torch.device("meta"):
            return _with_checkpoints(_of_hugging_face(source)) if isinstance(source, Path) else _of_function(source)
    except ConfigError:
        raise
    except Exception as error:  # of foreign code
        raise ConfigError(
            f"The model {source} cannot be built on the meta device: {type(error).__name__}: {error}"
        ) from error


def _with_checkpoints(model: nn.Module) -> nn.Module:
    """Set `gradient_checkpointing` on the model, so that predictions include the recomputation in backward."""
    vars(model)["gradient_checkpointing"] = True
    return model


class _PlannedRanks:
    """Replaces the collectives of a run that is only planned. `exchange` returns the caller's data once for each
    rank."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def exchange(self, data: bytes, what: str = "", *, kind: str = "") -> list[bytes]:
        return [data] * self.world_size


def specify_planned(
    config: Config,
    model: nn.Module,
    ranks: int = 1,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    rates: Machine | None = None,
    sources: tuple[str, str] = ("--device-memory", "--host-memory"),
) -> RunSpec:
    """Specify the run of rank 0, without opening anything. `device_nbytes`: device memory of each rank. `host_nbytes`:
    host memory of all `ranks` together. For each, None means the free memory of this machine, at most the config's
    limit. `rates`: the speeds used to choose a placement; None: those measured on this machine. `sources`: the origins
    of `device_nbytes` and `host_nbytes`, as messages name them."""
    from tiered_zero.assembly.spec import PlannedMachine, specify_run
    from tiered_zero.rules.from_config import check_sections

    check_sections(config)
    machine = PlannedMachine(device_nbytes=device_nbytes, host_nbytes=host_nbytes, ranks=ranks, sources=sources)
    collects = gc.isenabled()
    gc.disable()  # at 70e9 parameters a million records are alive, and garbage collection takes 60% of the time
    try:
        planned = cast("Collectives", _PlannedRanks(ranks))
        return specify_run(config, model, machine=machine, collectives=planned, rates=rates)
    finally:
        if collects:
            gc.enable()


def count_parameters(model: nn.Module) -> int:
    """Count the parameters; tied weights count once."""
    return sum(param.numel() for param in model.parameters())


def _of_hugging_face(path: Path) -> nn.Module:
    """Build the model of a Hugging Face config, without weights or a download. Its class: the first of `architectures`
    that transformers has, else the choice of AutoModelForCausalLM. Raises ConfigError."""
    values = read_json(path / "config.json" if path.is_dir() else path)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model-config needs transformers, which knows the models ({error}). Install it, in a checkout "
            "with `pip install -c constraints.txt '.[hf]'`, or give --model module:function."
        ) from error
    known = transformers.CONFIG_MAPPING
    if values.get("model_type") not in known:
        raise ConfigError(
            f"{path}: model_type: expected one that transformers {transformers.__version__} has; found "
            f"{values.get('model_type')!r}. Give --model module:function for a model of your own."
        )
    config = known[values["model_type"]].from_dict(values)
    names = values.get("architectures") or ()
    found: Any = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    build: Any = found or transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config)
    return model


def _of_function(target: str) -> nn.Module:
    """Call the function `target`, "module:function", and return its model. Raises ConfigError."""
    from torch import nn

    module, _, name = target.partition(":")
    sys.path.insert(0, "")  # the working directory first, as with `python -m`
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {target}: expected a function that returns a model; {error}.") from error
    finally:
        sys.path.remove("")
    model = function()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {target}: expected it to return a torch.nn.Module; found {type(model).__name__}.")
    return model
