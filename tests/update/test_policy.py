"""What policies share: a job at the cut between two updates, and one memory of a failure."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import tiered_zero
from tests.support.inspection import pipeline, policy
from tests.support.models import ParityGPT, batch
from tests.support.trainers import adamw, tiered, train
from tiered_zero.errors import EngineFailedError, ModelError

POLICIES = {
    "barrier": ({"update": "barrier"}, 1.0),
    "overlapped": ({"update": "overlapped"}, 1.0),
    "overlapped in backward": ({"update": "overlapped"}, 0.0),
    "delayed": ({"update": "delayed", "delay_start_step": 1}, 1.0),
}


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), False)


def build(swap_path: Path, name: str) -> tiered_zero.Engine:
    runtime, clipping = POLICIES[name]
    return tiered(ParityGPT(num_blocks=1), swap_path, ("nvme", "nvme"), adamw, 1, clipping, runtime=runtime)


def logged_updates(engine: tiered_zero.Engine, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    log: list[str] = []
    own = pipeline(engine)
    step = own.step

    def log_step(job: Any) -> None:
        log.append("update begins")
        step(job)
        log.append("update ends")

    monkeypatch.setattr(own, "step", log_step)
    return log


@pytest.mark.parametrize("name", POLICIES)
def test_a_cut_is_behind_one_update_and_before_the_next(
    name: str, swap_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with build(swap_path, name) as engine:
        train(engine, data, 3)
        engine.flush()
        log, gate = logged_updates(engine, monkeypatch), threading.Event()
        train(engine, data, 1)

        def save() -> None:
            log.append("cut begins")
            assert name == "barrier" or gate.wait(60)
            log.append("cut ends")

        cut = policy(engine).at_cut(save)
        engine.backward(engine(*data(4)))
        assert cut.done() == (name == "barrier"), "it does not stop compute"
        gate.set()
        engine.step()
        engine.flush()
        cut.wait()
        update = ["update begins", "update ends"]
        assert log == [*update, "cut begins", "cut ends", *update]


@pytest.mark.parametrize("name", POLICIES)
def test_flush_waits_for_a_cut_whose_error_is_its_own(name: str, swap_path: Path) -> None:
    with build(swap_path, name) as engine:
        train(engine, data, 2)

        def fail() -> None:
            raise OSError("no space")

        cut = policy(engine).at_cut(fail)
        engine.flush()
        assert cut.done()
        with pytest.raises(OSError, match="no space"):
            cut.wait()
        train(engine, data, 1)


def test_there_is_no_cut_within_an_update_or_after_a_failure(swap_path: Path) -> None:
    with build(swap_path, "overlapped in backward") as engine:
        train(engine, data, 2)
        engine.backward(engine(*data(2)))
        with pytest.raises(ModelError, match="State is to be saved before step"):
            policy(engine).at_cut(lambda: None)
        engine.step()
        engine.flush()
        policy(engine).failures.set(OSError("the link is down"))
        with pytest.raises(EngineFailedError, match="the link is down"):
            policy(engine).at_cut(partial(pytest.fail, "run after a failure"))
        policy(engine).failures.error = None
