"""`tiered-zero train CONFIG`: the built-in GPT on real text, across the tiers that the config names."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import torch

import tiered_zero
from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.options import CONFIG_FILE, DEMO_MODEL, DEMO_STEPS, DIRECTORY, JSON_OPTION, parse_model
from tiered_zero.cli.progress import TrainingProgress
from tiered_zero.cli.rank_steps import RankSteps
from tiered_zero.cli.saving import MODEL, Resumption, Saver, warn_of_others
from tiered_zero.cli.tables import run_tables
from tiered_zero.config import load
from tiered_zero.config.json_file import read_json
from tiered_zero.demo.corpus import NUM_BYTE_VALUES, Corpus, read_corpus
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.engine import Engine
from tiered_zero.errors import NonFiniteError
from tiered_zero.hardware.launcher import rank_here, world_size_here
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.stopping import INTERRUPTED, TERMINATED, stop_on_signals
from tiered_zero.telemetry.report import RunReport, RunTotals

logger = logging.getLogger("tiered_zero")

DIVERGED = 1
"""Exit code where the loss is not finite."""

UNSAVED = 3
"""Exit code where training was done, but its last checkpoint could not be saved."""


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
@click.option("--save", type=DIRECTORY, metavar="DIR", help="Save here: at the end, and on SIGTERM and Ctrl-C.")
@click.option("--save-every", type=click.IntRange(min=1), metavar="N", help="With --save: every N steps too.")
@click.option("--resume", is_flag=True, help="With --save: go on from the newest complete checkpoint there.")
@JSON_OPTION
@click.pass_context
def train(
    ctx: click.Context,
    config: str,
    model: GPTConfig | None,
    steps: int,
    data: str | None,
    batch: int | None,
    context: int | None,
    seed: int,
    trace: str | None,
    report: str | None,
    save: Path | None,
    save_every: int | None,
    resume: bool,
    as_json: bool,
) -> None:
    """Train a small GPT across the tiers that CONFIG names.

    Ends with tables: bytes on each tier, planned and at their peak, bytes moved and their rate, seconds per step, loss.
    Stops with exit code 1 at the first loss that is not finite.

    With --save and --resume a run that was stopped or killed goes on as if it never had been. SIGTERM and Ctrl-C then
    finish the step and save first; a second one ends at once.
    """
    if save is None and (resume or save_every is not None):
        raise click.UsageError("--resume and --save-every say how to use a directory: name it with --save.")
    model = model or DEMO_MODEL
    model = replace(model, context=context or model.context)
    if model.vocab < NUM_BYTE_VALUES:
        raise click.BadParameter(
            f"text is read as bytes: vocab must be at least {NUM_BYTE_VALUES}", param_hint="--model"
        )
    settings = overlay(read_json(config), batch, {"trace": trace, "report": report})
    rank, world_size = rank_here(), world_size_here()
    resolved = load(settings, world_size=world_size)
    corpus = read_corpus(data)
    corpus.check(model.context)
    logger.info("%s parameters, %s; text: %s", f"{num_parameters(model):,}", model, corpus.source)
    if corpus.is_binary:
        logger.warning("%s holds NUL bytes, as binary files do. It is trained on byte by byte.", corpus.source)
    options = {MODEL: str(model), "--seed": seed, "--data": corpus.source, "batch": resolved.batch.train}
    resumption = Resumption(save if resume else None, options, in_place=resolved.tiered_zero.checkpoint.in_place)
    settings = resumption.settings(settings)
    if save is not None and not resume:
        warn_of_others(save)
    code, stop_code = 0, None
    with stop_on_signals(at_boundary=False) as stop:
        engine = open_engine(settings, model, seed)
        totals = RunTotals({tier: engine.plan.nbytes(tier) for tier in TIERS})
        progress, ranks = TrainingProgress(steps, is_shown=rank == 0), RankSteps(engine)
        try:
            with engine:
                resumption.load(engine)
                progress.begin_at(engine.global_steps)
                saver = Saver(engine, save, save_every, options) if save is not None else None
                stop.at_boundary = saver is not None or world_size > 1  # ranks end after the same step
                if saver is None or rank > 0:
                    stop.answer = b"" if rank > 0 else b"\nFinishing this step; a second signal ends at once.\n"
                with progress:
                    for step in range(engine.global_steps, steps):
                        own_loss = train_step(engine, corpus, step, model.context, seed)
                        made = ranks.after_step(own_loss, stop.code)
                        loss, num_tokens = made.loss, resolved.batch.train * model.context
                        assert engine.step_report is not None
                        totals.add(replace(engine.step_report, loss=loss, tokens=num_tokens))
                        progress.advance(loss, num_tokens, ranks.pace)
                        if not math.isfinite(loss):
                            code = DIVERGED
                            break
                        if saver is not None:
                            saver.after_step(loss)
                        if (stop_code := made.code) is not None:
                            break
                    if saver is not None and code != DIVERGED:
                        code = 0 if saver.finish() else UNSAVED
                code = stop_code or stop.code or code
        except (KeyboardInterrupt, SystemExit) as interrupt:
            code = INTERRUPTED if isinstance(interrupt, KeyboardInterrupt) else TERMINATED
    if rank == 0 and (progress.done or as_json):
        facts = {"config": config, "model": str(model), "interrupted": code in (INTERRUPTED, TERMINATED)}
        facts |= {"resumed_from": resumption.path, "resumed_step": progress.first}
        facts |= {"world_size": world_size, "rank_step_s": ranks.own_s}
        report_of_run = totals.report()
        if progress.done == progress.first:
            report_of_run = replace(report_of_run, last_loss=resumption.loss)
            loss_text = "" if resumption.loss is None else f" The loss of its last step was {resumption.loss:.3f}."
            logger.info("nothing to train: --steps is %d, and %d are made.%s", steps, progress.done, loss_text)
        if as_json or progress.done > progress.first:
            show(report_of_run, as_json, facts)
        if progress.done > progress.first and not as_json and (line := ranks.describe()):
            click.echo(line)
        if progress.done > progress.first and not as_json and (staging_nbytes := _staging_nbytes(engine)):
            click.echo(
                f"Of the host memory {format_nbytes(staging_nbytes)} are staging buffers, which keep the disk busy and "
                "do not grow with the number of layers."
            )
    if code == DIVERGED and rank == 0:
        raise NonFiniteError(
            f"The loss is {progress.loss} after step {progress.done} of {steps}: training has diverged. Lower the "
            "learning rate (optimizer.params.lr), or lower gradient_clipping."
        )
    if code == UNSAVED:
        ctx.exit(UNSAVED)
    if code:
        loss_text = f"; loss {progress.loss:.3f}" if progress.done > progress.first else ""
        if rank == 0:
            click.echo(f"Stopped after {progress.done} of {steps} steps{loss_text}.", err=True)
        ctx.exit(code)


def train_step(engine: Engine, corpus: Corpus, step: int, context: int, seed: int) -> float:
    """A forward and a backward for each micro-batch; the last `step()` updates. Returns the mean loss of this rank,
    whose micro-batches lie between those of the others."""
    sizes, losses = engine.config.batch, []
    for micro in range(step * sizes.accumulation, (step + 1) * sizes.accumulation):
        index = micro * engine.world_size + engine.global_rank
        tokens, targets = (part.to(engine.device) for part in corpus.batch(index, sizes.micro, context, seed))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def _staging_nbytes(engine: Engine) -> int:
    """Planned bytes of the staging buffers in host memory."""
    kinds = ("staging_param", "staging_state", "staging_gradient")
    return sum(engine.plan.nbytes("host", kind) for kind in kinds)


def open_engine(settings: Mapping[str, Any], model: GPTConfig, seed: int) -> Engine:
    """Build the model on `meta`; the engine initializes it unit by unit, straight into its tiers."""
    torch.manual_seed(seed)
    return tiered_zero.initialize(model=build_gpt(model), config=settings)[0]


def overlay(settings: Mapping[str, Any], batch: int | None, own: Mapping[str, str | None]) -> dict[str, Any]:
    """The file's settings with the options over them; `own` is for the section "tiered_zero"."""
    result = dict(settings)
    if batch is not None:
        result.pop("train_batch_size", None)
        result["train_micro_batch_size_per_gpu"] = batch
    if given := {name: value for name, value in own.items() if value is not None}:
        result["tiered_zero"] = {**(result.get("tiered_zero") or {}), **given}
    return result


def show(report: RunReport, as_json: bool, facts: Mapping[str, Any]) -> None:
    if as_json:
        click.echo(json.dumps({**facts, **report.to_json()}))
    else:
        STDOUT.print(run_tables(report))
