"""The run of `tiered-zero train`: its steps, its progress, what its ranks exchange, and the tables at its end."""

from __future__ import annotations

import logging
import math
import struct
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, final

import click
import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

import tiered_zero
from tiered_zero.assembly.choice import predicted_seconds
from tiered_zero.cli.console import STDERR, print_json, print_table
from tiered_zero.cli.options import DEMO_MODEL
from tiered_zero.cli.saving import MODEL, Resumption, Saver, warn_of_others
from tiered_zero.config import load
from tiered_zero.config.json_file import read_json
from tiered_zero.demo.corpus import NUM_BYTE_VALUES, Corpus, read_corpus
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import ConfigError, NonFiniteError
from tiered_zero.hardware.ranks.launcher import rank_here, world_size_here
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.stopping import INTERRUPTED, TERMINATED, StopRequest, stop_on_signals
from tiered_zero.telemetry.advice import explain_pace, explain_prediction
from tiered_zero.telemetry.report import RunReport, RunTotals, StepReport

logger = logging.getLogger("tiered_zero")

DIVERGED = 1
"""Exit code where the loss is not finite."""

UNSAVED = 3
"""Exit code where training was done, but its last checkpoint could not be saved."""

SECONDS_BETWEEN_LINES = 10.0
STEPS_AVERAGED = 20
"""Tokens/s and time left are those of the last so many steps."""

_MESSAGE = struct.Struct("<dq")
"""Loss, exit code of a signal or 0."""


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
            predicted = predicted_seconds(engine.config, engine.module, engine.plan)
            totals = RunTotals({tier: engine.plan.nbytes(tier) for tier in TIERS}, predicted)
            try:
                with engine:
                    code = self._train(engine, stop, totals)
            except (KeyboardInterrupt, SystemExit) as interrupt:
                code = INTERRUPTED if isinstance(interrupt, KeyboardInterrupt) else TERMINATED
        if self._rank == 0:
            self._show(totals, code)
            self._show_end(code)
        return code

    def _train(self, engine: Engine, stop: StopRequest, totals: RunTotals) -> int:
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
                loss, stop_code = agree(engine, own_loss, stop.code)
                assert engine.step_report is not None
                report = replace(engine.step_report, loss=loss, tokens=self._step_tokens)
                totals.add(report)
                progress.advance(report)
                if not math.isfinite(loss):
                    return DIVERGED
                if saver is not None:
                    saver.after_step(loss)
                if stop_code is not None:
                    break
            is_saved = saver is None or saver.finish()
        return stop_code or stop.code or (0 if is_saved else UNSAVED)

    def _show(self, totals: RunTotals, code: int) -> None:
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
            }
            print_json({**facts, **report.to_json()})
        elif num_made:
            print_report(report, num_parameters(self._model))

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


def print_report(report: RunReport, num_parameters: int) -> None:
    """Print bytes by tier, seconds per step by cause, links, and what sets the pace."""
    sizes = {tier: (report.planned_nbytes.get(tier), report.peak_nbytes.get(tier)) for tier in TIERS}
    tiers = [(tier, *map(_size, pair)) for tier, pair in sizes.items() if pair != (None, None)]
    print_table(("tier", "planned", "peak"), tiers, "Nothing was planned.", title="Bytes by tier")
    causes = [
        (cause, f"{seconds:.3f}", f"{seconds / report.step_s:.0%}" if report.step_s else "-")
        for cause, seconds in report.seconds.items()
    ]
    causes.append(("wall time", f"{report.step_s:.3f}", ""))
    print_table(("spent in", "seconds", "share"), causes, title="A typical step")
    if rows := report.prediction_rows():
        shown = [(name, f"{predicted_s:.3f}", f"{s:.3f}") for name, predicted_s, s in rows]
        print_table(("resource", "predicted", "seconds"), shown, title="A typical step, predicted and measured")
    links = list(report.link_rows())
    print_table(("link", "bytes", "rate while busy", "busy"), links, "Nothing was moved.", title="Links, whole run")
    first, last = ("?" if loss is None else f"{loss:.3f}" for loss in (report.first_loss, report.last_loss))
    if report.start_s:
        click.echo(f"start: {report.start_s:.1f} s, values of {num_parameters:,} parameters")
    click.echo(
        f"{report.steps_text} in {report.total_s:.1f} s, {report.tokens_per_s:,.0f} tokens/s, loss {first} -> {last}\n"
        f"bound by: {report.bound_by}; overlap {report.overlap:.0%}\n{explain_pace(report)}"
    )
    if text := explain_prediction(report):
        click.echo(text)


def _size(nbytes: int | None) -> str:
    return "-" if nbytes is None else format_nbytes(nbytes)


class TrainingProgress:
    """Shows loss, learning rate, gradient norm, tokens/s and time left on stderr: a bar on a terminal, a line now and
    then elsewhere. One thread."""

    def __init__(self, num_steps: int, is_shown: bool = True) -> None:
        """`is_shown`: only rank 0's is."""
        self.done = self.first = 0
        """Steps that were made; those of them that an earlier process made, which are not measured."""
        self.loss = float("nan")
        self._num_steps = num_steps
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=STEPS_AVERAGED + 1)
        self._last_line_s = time.monotonic()
        self._bar = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[figures]}"),
            console=STDERR,
            disable=not STDERR.is_terminal or not is_shown,
        )
        self._task = self._bar.add_task("", total=num_steps, figures="starting")

    def __enter__(self) -> TrainingProgress:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin_at(self, step: int) -> None:
        """Count `step` steps as made."""
        self.done = self.first = step
        self._bar.update(self._task, completed=step)

    def advance(self, report: StepReport) -> None:
        """Show a step that is done."""
        self.done += 1
        self.loss = math.nan if report.loss is None else report.loss
        now_s = time.monotonic()
        self._recent.append((now_s, report.tokens))
        took_s = max(now_s - self._recent[0][0], 1e-9)
        tokens_per_s = sum(count for _, count in list(self._recent)[1:]) / took_s
        left_s = round((self._num_steps - self.done) * took_s / (len(self._recent) - 1))
        known = {"lr": report.lr, "norm": report.grad_norm}
        words = "".join(f"{name} {value:.3g}  " for name, value in known.items() if value is not None)
        figures = f"loss {self.loss:.3f}  {words}{tokens_per_s:,.0f} tokens/s  left {timedelta(seconds=left_s)}"
        self._bar.update(self._task, advance=1, figures=figures)
        if self._bar.disable and now_s - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now_s
            logger.info("step %d/%d  %s", self.done, self._num_steps, figures)


def agree(engine: Engine, loss: float, code: int | None) -> tuple[float, int | None]:
    """Exchange loss and exit code with the other ranks, after each step. Return the mean loss, and the code of
    a signal that any rank has got or None: the same on all ranks. Raises RankError."""
    if engine.world_size == 1:
        return loss, code
    found = [_MESSAGE.unpack(each) for each in engine.exchange(_MESSAGE.pack(loss, code or 0))]
    codes = [theirs for _, theirs in found if theirs]
    return sum(theirs for theirs, _ in found) / len(found), codes[0] if codes else None
