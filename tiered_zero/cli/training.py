"""Run `tiered-zero train`: make steps, show progress, save and resume, and print the tables at the end."""

from __future__ import annotations

import logging
import math
import shutil
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

import tiered_zero
from tiered_zero.assembly.choice import predicted_seconds
from tiered_zero.checkpoint.driver import read_client_state
from tiered_zero.checkpoint.tag import find_checkpoint, list_tags, nothing_to_load, open_reader
from tiered_zero.cli.console import DEMO_MODEL, overlay, print_json, print_table
from tiered_zero.config.load import load, read_json
from tiered_zero.demo.corpus import NUM_BYTE_VALUES, Corpus, read_corpus
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import BudgetError, ConfigError, ModelError, NonFiniteError, StoreError, TransferError
from tiered_zero.hardware.ranks.launcher import get_rank, get_world_size
from tiered_zero.plan.gpt_shape import GPTConfig, num_parameters
from tiered_zero.sizes import TIERS, format_nbytes
from tiered_zero.stopping import INTERRUPTED, TERMINATED, StopRequest, stop_on_signals
from tiered_zero.telemetry.advice import explain_pace, explain_prediction
from tiered_zero.telemetry.report import RunReport, RunTotals, StepReport

logger = logging.getLogger("tiered_zero")

_STATE_KEY, _LOSS = "tiered_zero.train", "loss"


def check_options(directory: Path, options: Mapping[str, Any]) -> None:
    """Compare `options` with those in the checkpoint in `directory` from which the run resumes. Raises ConfigError if
    one differs, and StoreError."""
    with open_reader(find_checkpoint(directory)) as reader:
        saved = read_client_state(reader.manifest.driver).get(_STATE_KEY)
    if not isinstance(saved, dict):
        return
    if other := [name for name, value in options.items() if name in saved and saved[name] != value]:
        expected, found = (", ".join(f"{name} {of[name]}" for name in other) for of in (saved, options))
        raise ConfigError(
            f"--resume: the run in {directory} has {expected}; found {found}. Give the same, or another directory to "
            "--save."
        )


def check_new(directory: Path) -> None:
    """Raise ConfigError if `directory` has checkpoints: a new run would replace some of them. Raises StoreError."""
    tags = list_tags(directory) if directory.exists() else []
    # a tag that is not complete may still lead to a later commit of its run
    if saved := [info.tag for info in tags if info.kind]:
        raise ConfigError(
            f"--save: {directory} was expected to have no checkpoints; found some, up to {saved[-1]}. Add --resume "
            "to go on from them, or name another directory."
        )


def warn_of_room(directory: Path, nbytes: int) -> None:
    """Log a warning if the disk of `directory` has less than `nbytes` free. `nbytes`: the smallest possible size of a
    checkpoint."""
    place = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    free_nbytes = shutil.disk_usage(place).free
    if free_nbytes < nbytes:
        logger.warning(
            "--save: a checkpoint takes at least %s; %s are free for %s. Free some space there before the first save.",
            format_nbytes(nbytes),
            format_nbytes(free_nbytes),
            directory,
        )


DIVERGED = 1
"""Exit code if the loss is not finite."""

SECONDS_BETWEEN_LINES = 10.0
STEPS_AVERAGED = 20
"""The number of last steps over which tokens/s and the time left are averaged."""

_MESSAGE = struct.Struct("<dq")
"""The message between ranks after a step: the loss, and the exit code for a signal (0: no signal)."""


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
    """Runs `tiered-zero train` on one rank. Call it on the main thread."""

    def __init__(self, options: TrainOptions) -> None:
        """Read and check the config, the text and the options. Builds no engine. Raises ConfigError, StoreError,
        BadParameter."""
        self._options = options
        model = options.model or DEMO_MODEL
        self._model = model = replace(model, context=options.context or model.context)
        if model.vocab < NUM_BYTE_VALUES:
            raise click.BadParameter(
                f"text is read as bytes: vocab must be at least {NUM_BYTE_VALUES}", param_hint="--model"
            )
        settings = overlay(read_json(options.config), trace=options.trace, report=options.report)
        if options.batch is not None:
            settings.pop("train_batch_size", None)
            settings["train_micro_batch_size_per_gpu"] = options.batch
        self._rank, self._world_size = get_rank(), get_world_size()
        resolved = load(settings, world_size=self._world_size)
        if resolved.optimizer is None:
            raise ConfigError(
                f"optimizer: expected one in {options.config}, to train with; found none. Add for example "
                '"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}.'
            )
        self._corpus = corpus = read_corpus(options.data)
        corpus.check(model.context)
        logger.info("%s parameters, %s; text: %s", f"{num_parameters(model):,}", model, corpus.source)
        self._step_tokens = resolved.train_batch_size * model.context
        self._saved = {
            "--model": str(options.model or DEMO_MODEL),
            "--context": model.context,
            "--seed": options.seed,
            "a text": corpus.identity,  # not its path: a file may be moved, and another may have its name
            "batch": resolved.train_batch_size,
            "micro-batch": resolved.train_micro_batch_size_per_gpu,  # each is drawn as a whole
        }
        """The options that are saved with a checkpoint, because the results depend on them."""
        self._resumes = options.save if options.resume else None
        """The directory with the checkpoint from which the run continues; None: the run begins at step 0."""
        self._resumed_from: str | None = None
        self._loss_before: float | None = None
        """The loss of the last step before the checkpoint from which the run continues."""
        if self._resumes is not None and (why := nothing_to_load(self._resumes)):
            logger.info("no checkpoint in %s yet (%s): starting at step 0", self._resumes, why)
            self._resumes = None
        if self._resumes is not None:
            check_options(self._resumes, self._saved)
            checkpoint = (settings.get("tiered_zero") or {}).get("checkpoint") or {}
            settings = overlay(settings, checkpoint={**checkpoint, "resume": str(self._resumes)})
        if options.save is not None and not options.resume:
            check_new(options.save)
        self._settings = settings
        self._progress = TrainingProgress(options.steps)

    def run(self) -> int:
        """Train, print the tables, and return the exit code. Raises NonFiniteError for a loss that is not finite."""
        with stop_on_signals(at_boundary=False) as stop:
            try:
                engine = open_engine(self._settings, self._model, self._options.seed)
            except ModelError as error:
                if self._resumes is None:
                    raise
                way = f"Take the config of the run in {self._resumes}, or give another directory to --save."
                raise ModelError(f"--resume: {error} {way}") from error
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
        """Make the remaining steps and saves; end early at a signal or a loss that is not finite. Return the exit
        code."""
        options, progress = self._options, self._progress
        if self._resumes is not None and engine.resumed is not None:
            path, client_state = engine.resumed
            self._resumed_from, saved = str(path), client_state.get(_STATE_KEY)
            self._loss_before = saved.get(_LOSS) if isinstance(saved, dict) else None
            logger.info("resumed from %s: %d steps, and their batches, are not made again", path, engine.global_steps)
        if options.save is not None and self._rank == 0 and not engine.config.tiered_zero.checkpoint.in_place:
            warn_of_room(options.save, sum(engine.plan.nbytes(tier, "state") for tier in TIERS))
        progress.begin_at(engine.global_steps)
        stop.at_boundary = options.save is not None or self._world_size > 1  # ranks end after the same step
        if options.save is None or self._rank > 0:
            stop.answer = b"" if self._rank > 0 else b"\nFinishing this step; a second signal ends at once.\n"
        stop_code = None
        for step in range(engine.global_steps, options.steps):
            own_loss = train_step(engine, self._corpus, step, self._model.context, options.seed)
            loss, stop_code = agree(engine, own_loss, stop.code)
            assert engine.step_report is not None
            report = replace(engine.step_report, loss=loss, tokens=self._step_tokens)
            totals.add(report)
            progress.advance(report)
            if not math.isfinite(loss):
                return DIVERGED
            num_steps, every = engine.global_steps, options.save_every or options.steps
            is_last = num_steps == options.steps or stop_code is not None
            if options.save is not None and (is_last or num_steps % every == 0):
                try:
                    engine.flush()  # else this save would only raise the error of an asynchronous one before it
                except (StoreError, TransferError, BudgetError) as error:
                    logger.error("%s", error)
                logger.info("saving %s", options.save / f"global_step{num_steps}")
                try:
                    engine.save_checkpoint(options.save, client_state={_STATE_KEY: {**self._saved, _LOSS: loss}})
                except (StoreError, TransferError, BudgetError) as error:
                    if is_last:
                        raise
                    logger.error("the save of step %d failed, and training goes on: %s", num_steps, error)
            if stop_code is not None:
                break
        engine.flush()  # raises if the last save, an asynchronous one, has failed
        return stop_code or stop.code or 0

    def _show(self, totals: RunTotals, code: int) -> None:
        """Print the run's report, as tables or as JSON."""
        progress, report = self._progress, totals.report()
        num_made = progress.done - progress.first
        if progress.done and not num_made:
            loss = self._loss_before
            report = replace(report, last_loss=loss)
            loss_text = "" if loss is None else f" The loss of its last step was {loss:.3f}."
            steps = self._options.steps
            logger.info("nothing to train: --steps is %d, and %d are made.%s", steps, progress.done, loss_text)
        if self._options.as_json:
            facts = {
                "config": self._options.config,
                "model": str(self._model),
                "interrupted": code in (INTERRUPTED, TERMINATED),
                "resumed_from": self._resumed_from,
                "resumed_step": progress.first,
                "world_size": self._world_size,
            }
            print_json({**facts, **report.to_json()})
        elif num_made:
            print_report(report, num_parameters(self._model))

    def _show_end(self, code: int) -> None:
        """Print after which step a signal ended the run. Raises NonFiniteError for a loss that is not finite."""
        progress, steps = self._progress, self._options.steps
        if code == DIVERGED:
            raise NonFiniteError(
                f"The loss is {progress.loss} after step {progress.done} of {steps}: training has diverged. Lower the "
                "learning rate (optimizer.params.lr), or clip more (gradient_clipping; 0 clips nothing)."
            )
        if code:
            loss_text = f"; loss {progress.loss:.3f}" if progress.done > progress.first else ""
            flag = "" if self._options.resume else " with --resume"
            hint = f" To go on from the last save, give the same command{flag}." if self._options.save else ""
            click.echo(f"Stopped after {progress.done} of {steps} steps{loss_text}.{hint}", err=True)


def train_step(engine: Engine, corpus: Corpus, step: int, context: int, seed: int) -> float:
    """Run one optimizer step, and return the mean loss of this rank's micro-batches."""
    accumulation, size = engine.config.gradient_accumulation_steps, engine.config.train_micro_batch_size_per_gpu
    losses = []
    for micro in range(step * accumulation, (step + 1) * accumulation):
        index = micro * engine.world_size + engine.global_rank  # micro-batches go to the ranks in turn
        tokens, targets = (part.to(engine.device) for part in corpus.batch(index, size, context, seed))
        loss = engine(tokens, targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.detach())
    return float(torch.stack(losses).mean())


def open_engine(settings: Mapping[str, Any], model: GPTConfig, seed: int) -> Engine:
    """Build the model on the `meta` device, and return an engine that has initialized it on its tiers."""
    torch.manual_seed(seed)
    return tiered_zero.initialize(model=build_gpt(model), config=settings)[0]


def print_report(report: RunReport, num_parameters: int) -> None:
    """Print the tables of a run: bytes by tier, seconds of a step by cause, bytes by link; and what limits a step."""
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
    """Logs a line about progress every 10 s. Used by one thread."""

    def __init__(self, num_steps: int) -> None:
        self.done = self.first = 0
        """`done`: the number of steps made. `first`: how many of them an earlier process has made."""
        self.loss = float("nan")
        self._num_steps = num_steps
        self._recent: deque[tuple[float, int]] = deque([(time.monotonic(), 0)], maxlen=STEPS_AVERAGED + 1)
        self._last_line_s = time.monotonic()

    def begin_at(self, step: int) -> None:
        """Note that earlier processes have made `step` steps."""
        self.done = self.first = step

    def advance(self, report: StepReport) -> None:
        """Count one more step, and log the numbers of `report` if the last line is 10 s old."""
        self.done += 1
        self.loss = math.nan if report.loss is None else report.loss
        now_s = time.monotonic()
        self._recent.append((now_s, report.tokens))
        if now_s - self._last_line_s < SECONDS_BETWEEN_LINES:
            return
        self._last_line_s = now_s
        took_s = max(now_s - self._recent[0][0], 1e-9)
        tokens_per_s = sum(count for _, count in list(self._recent)[1:]) / took_s
        left_s = round((self._num_steps - self.done) * took_s / (len(self._recent) - 1))
        known = {"lr": report.lr, "norm": report.grad_norm}
        words = "".join(f"{name} {value:.3g}  " for name, value in known.items() if value is not None)
        figures = f"loss {self.loss:.3f}  {words}{tokens_per_s:,.0f} tokens/s  left {timedelta(seconds=left_s)}"
        logger.info("step %d/%d  %s", self.done, self._num_steps, figures)


def agree(engine: Engine, loss: float, code: int | None) -> tuple[float, int | None]:
    """Return the mean loss of all ranks, and the exit code of a signal that any rank got, or None. `code`: this rank's
    exit code. Every rank calls this. Raises RankError."""
    if engine.world_size == 1:
        return loss, code
    found = [_MESSAGE.unpack(each) for each in engine.exchange(_MESSAGE.pack(loss, code or 0))]
    codes = [theirs for _, theirs in found if theirs]
    return sum(theirs for theirs, _ in found) / len(found), codes[0] if codes else None
