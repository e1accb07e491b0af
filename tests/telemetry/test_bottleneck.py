"""A run whose disk, update or model is slowed down says so: the bottleneck of `step_report` names what was delayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered, train
from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.io.engine import File, IOEngine, IOTransfer, Request
from tiered_zero.io.select import Selection, select_engine
from tiered_zero.rules.kernel_rule import NativeRule
from tiered_zero.telemetry.report import StepReport
from tiered_zero.tiers import rack


@dataclass
class LateTransfer(IOTransfer):
    """Done no earlier than `due_s`, which is by time.perf_counter()."""

    inner: IOTransfer
    begun_s: float
    due_s: float

    @property
    def request(self) -> Request:  # type: ignore[override]
        return self.inner.request

    def done(self) -> bool:
        return time.perf_counter() >= self.due_s and self.inner.done()

    def wait(self) -> None:
        time.sleep(max(0.0, self.due_s - time.perf_counter()))
        self.inner.wait()

    @property
    def seconds(self) -> float:
        return max(self.inner.seconds, self.due_s - self.begun_s) if self.done() else 0.0


class LateEngine(IOEngine):
    """A disk that serves requests of one kind one after the other, each in no less than `delay_s`."""

    def __init__(self, inner: IOEngine, kind: str, delay_s: float) -> None:
        self.name, self._inner, self._kind, self._free_s = inner.name, inner, kind, 0.0
        self._delay_s = delay_s

    def _late(self, kind: str, transfer: IOTransfer) -> IOTransfer:
        begun_s = time.perf_counter()
        if kind == self._kind:
            self._free_s = max(self._free_s, begun_s) + self._delay_s
            return LateTransfer(transfer, begun_s, self._free_s)
        return transfer

    def open(self, path: str, *, create: bool = False, writable: bool = True) -> File:
        return self._inner.open(path, create=create, writable=writable)

    def read(self, file: File, offset: int, into: memoryview, *options: Any, **named: Any) -> IOTransfer:
        return self._late("read", self._inner.read(file, offset, into, *options, **named))

    def write(self, file: File, offset: int, data: memoryview) -> IOTransfer:
        return self._late("write", self._inner.write(file, offset, data))

    def drain(self) -> None:
        self._inner.drain()

    def sync(self, file: File) -> IOTransfer:
        return self._inner.sync(file)

    def in_flight(self) -> list[tuple[Request, float]]:
        return self._inner.in_flight()

    def close(self) -> None:
        self._inner.close()


def report_of(swap_path: Path, model: nn.Module) -> StepReport:
    with tiered(model, swap_path, ("nvme", "nvme"), zero={"sub_group_size": 1 << 14}) as engine:
        train(engine, batch, 3)
        engine.flush()
        assert engine.step_report is not None
        return engine.step_report


def slowed(swap_path: Path, model: nn.Module, bottleneck: str, slow_down: Callable[[float], None]) -> StepReport:
    """Train with a delay of twice a step on this machine, as busy as it is now; where it becomes busier, with a longer
    one, up to 16 times as long. Returns the first report that names `bottleneck`, or the last."""
    delay_s = max(0.02, 2 * report_of(swap_path, ParityGPT()).wall_s)
    for _ in range(5):
        slow_down(delay_s)
        report = report_of(swap_path, model)
        if report.bound_by.startswith(f"{bottleneck} ("):
            break
        delay_s *= 2
    return report


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_slow_disk(kind: str, swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow_down(delay_s: float) -> None:
        def select(*args: Any, **options: Any) -> Selection:
            selection = select_engine(*args, **options)
            return replace(selection, engine=LateEngine(selection.engine, kind, delay_s / 2))

        monkeypatch.setattr(rack, "select_engine", select)

    assert slowed(swap_path, ParityGPT(), f"disk {kind}", slow_down).bound_by.startswith(f"disk {kind} (")


def test_a_slow_update(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    update = NativeRule.update

    def slow_down(delay_s: float) -> None:
        def slow(rule: NativeRule, runs: Any) -> None:
            time.sleep(delay_s)
            update(rule, runs)

        monkeypatch.setattr(NativeRule, "update", slow)

    assert slowed(swap_path, ParityGPT(), "update", slow_down).bound_by.startswith("update (")


def test_a_slow_model(swap_path: Path) -> None:
    model, delays_s = ParityGPT(), [0.0]
    model.register_forward_pre_hook(lambda *_: time.sleep(delays_s[-1]))
    report = slowed(swap_path, model, "compute", delays_s.append)
    assert report.bound_by.startswith("compute (") and report.seconds["forward"] > delays_s[-1]
    assert sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=0.05)


def test_saves_are_not_taken_for_the_loop_around_the_engine(swap_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tiered(ParityGPT(), swap_path, ("none", "none")) as engine:
        train(engine, batch, 1)
        delay_s = 0.5 + 2 * engine.step_report.wall_s
        monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: time.sleep(delay_s))
        engine.save_checkpoint(swap_path)
        train(engine, batch, 1)
        report = engine.step_report
    assert report.seconds["save"] >= delay_s and report.bound_by.startswith("save (")
    assert sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=0.05)


@pytest.mark.parametrize("update", ["overlapped", "delayed"])
def test_causes_sum_to_the_wall_time(update: str, swap_path: Path) -> None:
    with tiered(ParityGPT(), swap_path, ("nvme", "nvme"), runtime={"update": update, "delay_start_step": 1}) as engine:
        walls_s, began_s, ended_s = [], [], []
        for _ in range(4):
            began_s.append(time.perf_counter())
            train(engine, batch, 1)
            ended_s.append(time.perf_counter())
            report = engine.step_report
            assert report is not None and sum(report.seconds.values()) == pytest.approx(report.wall_s, rel=0.05)
            walls_s.append(report.wall_s)
        # a step's time begins where the one before ended
        assert began_s[-1] - ended_s[0] <= sum(walls_s[1:]) <= ended_s[-1] - began_s[0]
