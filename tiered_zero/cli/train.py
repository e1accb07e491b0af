"""Define the command `tiered-zero train CONFIG`: train the built-in GPT on a text, across the tiers of a config."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from tiered_zero.cli.console import CONFIG_FILE, DEMO_MODEL, DEMO_STEPS, DIRECTORY, JSON_OPTION, parse_model


@click.command()
@click.argument("config", type=CONFIG_FILE)
@click.option("--model", callback=parse_model, metavar="gpt:...", help=f"Default {DEMO_MODEL}.")
@click.option("--steps", type=click.IntRange(min=1), default=DEMO_STEPS, show_default=True, help="Optimizer steps.")
@click.option("--data", type=click.Path(exists=True, dir_okay=False), help="A text; default: Python's own reference.")
@click.option("--batch", type=click.IntRange(min=1), help="Samples per forward pass (default: from the config).")
@click.option("--context", type=click.IntRange(min=1), help="Bytes per sample (default: the model's context).")
@click.option("--seed", type=int, default=0, show_default=True, help="Random seed for weights and batches.")
@click.option("--trace", type=click.Path(dir_okay=False), help="Write a Chrome trace (opens in Perfetto).")
@click.option("--report", type=click.Path(dir_okay=False), help="Write the run's record, for `tiered-zero report`.")
@click.option(
    "--save",
    type=DIRECTORY,
    metavar="DIR",
    help="Save here: at the end, and on SIGTERM and Ctrl-C. Without --resume DIR must hold no checkpoints.",
)
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="With --save: every N steps too.")
@click.option(
    "--resume",
    is_flag=True,
    help="With --save: go on from the checkpoint that the file latest there names, else from the newest whole one. "
    "Model, data, batch and seed must be the same.",
)
@JSON_OPTION
@click.pass_context
def train(ctx: click.Context, /, save: Path | None, save_every: int | None, resume: bool, **others: Any) -> None:
    """Train a small GPT across the tiers that CONFIG names.

    Prints tables at the end: planned and peak bytes on each tier, bytes moved and their rates, seconds per step, loss.
    Stops with exit code 1 at the first loss that is not finite.

    With --save and --resume a run that was stopped or killed continues with the same numbers. With --save, SIGTERM and
    Ctrl-C let the run finish its step and save; a second signal ends it at once.
    """
    if save is None and (resume or save_every is not None):
        raise click.UsageError("--resume and --save-every say how to use a directory: name it with --save.")
    from tiered_zero.cli.training import Training, TrainOptions

    ctx.exit(Training(TrainOptions(save=save, save_every=save_every, resume=resume, **others)).run())
