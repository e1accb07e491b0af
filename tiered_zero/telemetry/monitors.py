"""Write a step's numbers where DeepSpeed writes them: csv files, TensorBoard, Weights & Biases, and the log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO

from tiered_zero.errors import ConfigError
from tiered_zero.sizes import format_nbytes
from tiered_zero.telemetry.report import StepReport

logger = logging.getLogger("tiered_zero")

Write = Callable[[str, float, int], object]
"""A function that writes one number. Its arguments: name, number, samples trained so far."""
Open = Callable[[ExitStack], Write]
"""A function that opens a writer and returns the writer's `Write` function. The given ExitStack closes the writer."""


def csv_in(folder: Path) -> Open:
    """Return a function (`Open`) that makes a writer of csv files in `folder`. The writer has one file for each name:
    "Train/Samples/lr" goes to Train_Samples_lr.csv. Rows of an existing file are kept."""

    def open_files(end: ExitStack) -> Write:
        folder.mkdir(parents=True, exist_ok=True)
        files: dict[str, TextIO] = {}

        def write(name: str, value: float, samples: int) -> None:
            if name not in files:
                path = folder / f"{name.replace('/', '_')}.csv"
                header = "" if path.exists() else f"step,{name.rpartition('/')[2]}\n"
                files[name] = end.enter_context(path.open("a", encoding="utf-8", buffering=1))  # a kill keeps rows
                files[name].write(header)
            files[name].write(f"{samples},{value}\n")

        return write

    return open_files


def tensorboard_in(folder: Path) -> Open:
    def open_writer(end: ExitStack) -> Write:
        from torch.utils.tensorboard import SummaryWriter

        writer: Any = SummaryWriter(log_dir=str(folder))  # type: ignore[no-untyped-call, unused-ignore]
        end.callback(writer.close)
        write: Write = writer.add_scalar
        return write

    return open_writer


def wandb_of(**names: str | None) -> Open:
    """Return a function (`Open`) that makes a writer to Weights & Biases. `names`: arguments for `wandb.init`."""

    def open_run(end: ExitStack) -> Write:
        import wandb

        run: Any = wandb.init(**names)
        end.callback(run.finish)
        return lambda name, value, samples: run.log({name: value}, step=samples)

    return open_run


class Monitors:
    """Writes the numbers of each step's report to the chosen monitors. A writer that fails is dropped with a warning.

    `chosen`: name of a monitor's section in the config -> the function that opens its writer. `groups`: the param
    groups in use. `batch_size`: the samples in one step. Raises ConfigError if a writer cannot be opened. A missing
    package only gives a warning.
    """

    def __init__(self, chosen: Mapping[str, Open], groups: Sequence[Mapping[str, Any]], batch_size: int) -> None:
        self._groups, self._batch_size = groups, batch_size
        self._end = ExitStack()
        self._writers: dict[str, Write] = {}
        for section, open_writer in chosen.items():
            try:
                self._writers[section] = open_writer(self._end)
            except ImportError as error:
                logger.warning("%s: nothing is written, for its package is missing (%s). Install it.", section, error)
            except Exception as error:
                self._end.close()
                raise ConfigError(f"{section}: expected to start; it raised {type(error).__name__}: {error}") from error

    def __call__(self, report: StepReport) -> None:
        for section, write in list(self._writers.items()):
            try:
                for name, value in self._numbers(report):
                    write(f"Train/Samples/{name}", float(value), report.step * self._batch_size)
            except Exception as error:
                logger.warning("%s: it ends here, and training goes on: %s: %s", section, type(error).__name__, error)
                del self._writers[section]

    def _numbers(self, report: StepReport) -> Iterator[tuple[str, float]]:
        known = {"train_loss": report.loss, "loss_scale": report.loss_scale, "grad_norm": report.grad_norm}
        yield from ((name, value) for name, value in known.items() if value is not None)
        if self._groups:
            yield "lr", self._groups[0]["lr"]
        yield "step_s", report.wall_s
        yield from ((f"{tier}_nbytes", nbytes) for tier, nbytes in report.tier_nbytes.items())

    def close(self) -> None:
        """Close all writers. Idempotent. Logs a warning if closing fails."""
        try:
            self._end.close()
        except Exception as error:
            logger.warning("monitors: an end is not written: %s: %s", type(error).__name__, error)


class StepLog:
    """Logs the numbers of every `every`-th step in one line. Prints the line if the logger would not show it. `groups`:
    the param groups in use. `breaks_down`: whether to add a line with the step's seconds by cause."""

    def __init__(self, every: int, groups: Sequence[Mapping[str, Any]], breaks_down: bool = False) -> None:
        self._every = every
        self._groups = groups
        self._breaks_down = breaks_down

    def __call__(self, report: StepReport) -> None:
        if report.step % self._every == 0:
            loss = "unknown" if report.loss is None else f"{report.loss:.6g}"
            rates = ", ".join(f"{float(group['lr']):.6g}" for group in self._groups) or "none"
            self._say(f"step {report.step}: loss {loss}, loss scale {report.loss_scale:g}, learning rate {rates}")
            if self._breaks_down:
                causes = ", ".join(f"{cause} {seconds:.3f}" for cause, seconds in report.seconds.items())
                tiers = ", ".join(f"{tier} {format_nbytes(nbytes)}" for tier, nbytes in report.tier_nbytes.items())
                self._say(f"step {report.step}: {report.wall_s:.3f} s ({causes}); bound by {report.bound_by}; {tiers}")

    @staticmethod
    def _say(line: str) -> None:
        if logger.isEnabledFor(logging.INFO) and logger.hasHandlers():
            logger.info("%s", line)
        else:
            print(line, flush=True)
