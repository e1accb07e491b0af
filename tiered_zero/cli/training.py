"""The run of `tiered-zero train`: from its options to the tables at its end."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import click
import torch

import tiered_zero
from tiered_zero.cli.console import STDOUT
from tiered_zero.cli.options import DEMO_MODEL
from tiered_zero.cli.progress import TrainingProgress
from tiered_zero.cli.rank_steps import RankSteps
from tiered_zero.cli.saving import MODEL, Resumption, Saver, warn_of_others
from tiered_zero.cli.tables import run_tables
from tiered_zero.config import load
from tiered_zero.config.json_file import read_json
from tiered_zero.demo.corpus import NUM_BYTE_VALUES, Corpus, read_corpus
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import ConfigError, NonFiniteError
from tiered_zero.hardware.ranks.launcher import rank_here, world_size_here
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.plan.remedies import open_settings
from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.stopping import INTERRUPTED, TERMINATED, StopRequest, stop_on_signals
from tiered_zero.telemetry.report import RunTotals

logger = logging.getLogger("tiered_zero")

DIVERGED = 1
"""Exit code where the loss is not finite."""

UNSAVED = 3
"""Exit code where training was done, but its last checkpoint could not be saved."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Options of the command line, as `tiered-zero train --help` describes them."""

    config: str
    model: GPTConfig | None
    steps: int
    data: str | None
    batch: int | None
    context: int | None
    seed: int
    trace: str | None
    report: str | None
    save: Path | None
    save_every: int | None
    resume: bool
    as_json: bool


@final
class Training:
    """One run of the command, on each rank. Main thread."""

    def __init__(self, options: TrainOptions) -> None:
        """Check everything that can be checked before an engine is built. Raises ConfigError, StoreError, and
        click.BadParameter for a model that cannot read bytes."""
        self._options = options
        model = options.model or DEMO_MODEL
        self._model = model = replace(model, context=options.context or model.context)
        if model.vocab < NUM_BYTE_VALUES:
            raise click.BadParameter(
                f"text is read as bytes: vocab must be at least {NUM_BYTE_VALUES}", param_hint="--model"
            )
        settings = overlay(read_json(options.config), options.batch, {"trace": options.trace, "report": options.report})
        self._rank, self._world_size = rank_here(), world_size_here()
        resolved = load(settings, world_size=self._world_size)
        if resolved.optimizer is None:
            raise ConfigError(
                f"optimizer: expected one in {options.config}, to train with; found none. Add for example "
                '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}.'
            )
        self._corpus = corpus = read_corpus(options.data)
        corpus.check(model.context)
        logger.info("%s parameters, %s; text: %s", f"{num_parameters(model):,}", model, corpus.source)
        if corpus.is_binary:
            logger.warning("%s holds NUL bytes, as binary files do. It is trained on byte by byte.", corpus.source)
        self._step_tokens = resolved.batch.train * model.context
        self._saved = {
            MODEL: str(model),
            "--seed": options.seed,
            "--data": corpus.source,
            "batch": resolved.batch.train,
        }
        """Kept with a checkpoint, for the numbers depend on it."""
        save, in_place = options.save, resolved.tiered_zero.checkpoint.in_place
        self._resumption = Resumption(save if options.resume else None, self._saved, in_place=in_place)
        self._settings = self._resumption.settings(settings)
        if save is not None and not options.resume:
            warn_of_others(save)
        self._progress = TrainingProgress(options.steps, is_shown=self._rank == 0)

    def run(self) -> int:
        """Train, print the tables, and return the exit code. Raises NonFiniteError for a loss that is not finite."""
        with stop_on_signals(at_boundary=False) as stop:
            engine = open_engine(self._settings, self._model, self._options.seed)
            totals = RunTotals({tier: engine.plan.nbytes(tier) for tier in TIERS}, open_settings(engine.plan))
            ranks = RankSteps(engine)
            try:
                with engine:
                    code = self._train(engine, stop, totals, ranks)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                code = INTERRUPTED if isinstance(interrupt, KeyboardInterrupt) else TERMINATED
        if self._rank == 0:
            self._show(engine, totals, ranks, code)
            self._show_end(code)
        return code

    def _train(self, engine: Engine, stop: StopRequest, totals: RunTotals, ranks: RankSteps) -> int:
        """Make the steps that are not made yet; return the exit code."""
        options, progress = self._options, self._progress
        self._resumption.load(engine)
        progress.begin_at(engine.global_steps)
        saver = Saver(engine, options.save, options.save_every, self._saved) if options.save is not None else None
        stop.at_boundary = saver is not None or self._world_size > 1  # ranks end after the same step
        if saver is None or self._rank > 0:
            stop.answer = b"" if self._rank > 0 else b"\nFinishing this step; a second signal ends at once.\n"
        stop_code = None
        with progress:
            for step in range(engine.global_steps, options.steps):
                own_loss = train_step(engine, self._corpus, step, self._model.context, options.seed)
                loss, stop_code = ranks.after_step(own_loss, stop.code)
                assert engine.step_report is not None
                totals.add(replace(engine.step_report, loss=loss, tokens=self._step_tokens))
                progress.advance(loss, self._step_tokens, ranks.pace)
                if not math.isfinite(loss):
                    return DIVERGED
                if saver is not None:
                    saver.after_step(loss)
                if stop_code is not None:
                    break
            is_saved = saver is None or saver.finish()
        return stop_code or stop.code or (0 if is_saved else UNSAVED)

    def _show(self, engine: Engine, totals: RunTotals, ranks: RankSteps, code: int) -> None:
        """Print what the run took, as tables or as JSON."""
        progress, report = self._progress, totals.report()
        num_made = progress.done - progress.first
        if progress.done and not num_made:
            loss = self._resumption.loss
            report = replace(report, last_loss=loss)
            loss_text = "" if loss is None else f" The loss of its last step was {loss:.3f}."
            steps = self._options.steps
            logger.info("nothing to train: --steps is %d, and %d are made.%s", steps, progress.done, loss_text)
        if self._options.as_json:
            facts = {
                "config": self._options.config,
                "model": str(self._model),
                "interrupted": code in (INTERRUPTED, TERMINATED),
                "resumed_from": self._resumption.path,
                "resumed_step": progress.first,
                "world_size": self._world_size,
                "rank_step_s": ranks.own_s,
            }
            click.echo(json.dumps({**facts, **report.to_json()}))
        elif num_made:
            STDOUT.print(run_tables(report, num_parameters(self._model)))
            if line := ranks.describe():
                click.echo(line)
            staging_nbytes = sum(
                engine.plan.nbytes("host", f"staging_{kind}") for kind in ("param", "state", "gradient")
            )
            if engine.plan.nbytes("nvme"):
                click.echo(
                    f"Of the host memory {format_nbytes(staging_nbytes)} are buffers for what the disk reads and "
                    "writes; they do not grow with the number of layers."
                )

    def _show_end(self, code: int) -> None:
        """Say why the run ended early. Raises NonFiniteError."""
        progress, steps = self._progress, self._options.steps
        if code == DIVERGED:
            raise NonFiniteError(
                f"The loss is {progress.loss} after step {progress.done} of {steps}: training has diverged. Lower the "
                "learning rate (optimizer.params.lr), or clip more (gradient_clipping; 0 clips nothing)."
            )
        if code not in (0, UNSAVED):
            loss_text = f"; loss {progress.loss:.3f}" if progress.done > progress.first else ""
            click.echo(f"Stopped after {progress.done} of {steps} steps{loss_text}.", err=True)


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
