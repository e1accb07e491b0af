"""Progress where there is no terminal: a line now and then, with the right figures."""

from __future__ import annotations

import logging

import pytest

from tiered_zero.cli import training as module
from tiered_zero.cli.training import TrainingProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """clock[0] is the time."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_a_line_every_ten_seconds(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_zero")
    with TrainingProgress(100) as progress:
        for step in range(30):
            clock[0] += 1.0
            progress.advance(5.0 - step / 10, 512)
    assert caplog.messages == [
        "step 10/100  loss 4.100  512 tokens/s  left 1:30",
        "step 20/100  loss 3.100  512 tokens/s  left 1:20",
        "step 30/100  loss 2.100  512 tokens/s  left 1:10",
    ]
    assert (progress.done, progress.loss) == (30, pytest.approx(2.1))


def test_speed_is_that_of_the_last_steps(clock: list[float], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "tiered_zero")
    with TrainingProgress(1000) as progress:
        clock[0] += 1000.0
        progress.advance(5.0, 100)
        for _ in range(40):
            clock[0] += 1.0
            progress.advance(5.0, 100)
    assert "0 tokens/s" in caplog.messages[0]
    assert "100 tokens/s" in caplog.messages[-1]
