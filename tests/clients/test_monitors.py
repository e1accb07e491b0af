"""TensorBoard reads what the `tensorboard` section has written."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import rows, two_layers
from tests.support.trainers import tiered

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]


def test_tensorboard_reads_the_numbers(swap_path: Path, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    losses = []
    chosen = {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}
    with tiered(two_layers(), swap_path, tensorboard=chosen) as engine:
        for number in range(3):
            engine.backward(engine(rows(number)).square().mean())
            engine.step()
            assert engine.step_report is not None
            losses.append(engine.step_report.loss)
    found = EventAccumulator(str(tmp_path / "job"))
    found.Reload()
    events = found.Scalars("Train/Samples/train_loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == pytest.approx(losses)
    assert all(event.value > 0 for event in found.Scalars("Train/Samples/nvme_nbytes"))
