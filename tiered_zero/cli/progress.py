"""The progress of a training run on stderr: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import logging
import time
from collections import deque

from rich.progress import BarColumn, MofNCompleteColumn, Progress, Task, TextColumn, TimeRemainingColumn
from rich.text import Text

from tiered_zero.cli.console import STDERR

logger = logging.getLogger("tiered_zero")

SECONDS_BETWEEN_LINES = 10.0
STEPS_AVERAGED = 20
"""Tokens/s and time left are those of the last so many steps."""


class _TimeLeft(TimeRemainingColumn):
    """Time left, once it is known."""

    def render(self, task: Task) -> Text:
        return Text() if task.time_remaining is None else Text("left ") + super().render(task)


class TrainingProgress:
    """Loss, tokens/s and time left. One thread."""

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
            _TimeLeft(),
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

    def advance(self, loss: float, num_tokens: int, more: str = "") -> None:
        """Show a step that is done. `more`: text after its figures."""
        self.done += 1
        self.loss = loss
        now_s = time.monotonic()
        self._recent.append((now_s, num_tokens))
        took_s = max(now_s - self._recent[0][0], 1e-9)
        tokens_per_s = sum(count for _, count in list(self._recent)[1:]) / took_s
        figures = f"loss {loss:.3f}  {tokens_per_s:,.0f} tokens/s{more}"
        self._bar.update(self._task, advance=1, figures=figures)
        if self._bar.disable and now_s - self._last_line_s >= SECONDS_BETWEEN_LINES:
            self._last_line_s = now_s
            left_s = (self._num_steps - self.done) * took_s / (len(self._recent) - 1)
            logger.info("step %d/%d  %s  left %d:%02d", self.done, self._num_steps, figures, *divmod(round(left_s), 60))
