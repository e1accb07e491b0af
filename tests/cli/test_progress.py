"""Progress: a line now and then, with the right figures."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from tiered_zero.cli import training as module
from tiered_zero.cli.training import TrainingProgress
from tiered_zero.telemetry.report import StepReport


def step_report(loss: float, tokens: int, **facts: Any) -> StepReport:
    return StepReport(step=1, wall_s=1.0, seconds={}, loss=loss, tokens=tokens, lr=1e-3, **facts)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_zero")
    progress = TrainingProgress(100)
    for step in range(30):
        clock[0] += 1.0
        progress.advance(step_report(5.0 - step / 10, 512, grad_norm=None if step < 10 else 0.25))
    assert caplog.messages == [
        "step 10/100  loss 4.100  lr 0.001  512 tokens/s  left 0:01:30",
        "step 20/100  loss 3.100  lr 0.001  norm 0.25  512 tokens/s  left 0:01:20",
        "step 30/100  loss 2.100  lr 0.001  norm 0.25  512 tokens/s  left 0:01:10",
    ]
    assert (progress.done, progress.loss) == (30, pytest.approx(2.1))


def test_speed_is_that_of_the_last_steps(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_zero")
    progress = TrainingProgress(1000)
    clock[0] += 1000.0
    progress.advance(step_report(5.0, 100))
    for _ in range(40):
        clock[0] += 1.0
        progress.advance(step_report(5.0, 100))
    assert "0 tokens/s" in caplog.messages[0]
    assert "100 tokens/s" in caplog.messages[-1]


def test_the_time_left_is_that_of_several_steps(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    """Steps of 40 s and 80 s in turn: the time left is that of their mean, however long one step is."""
    caplog.set_level(logging.INFO, "tiered_zero")
    progress = TrainingProgress(104)
    for step in range(4):
        clock[0] += 40.0 * (1 + step % 2)
        progress.advance(step_report(5.0, 600))
    assert "lr 0.001  10 tokens/s  left 1:40:00" in caplog.messages[-1]
