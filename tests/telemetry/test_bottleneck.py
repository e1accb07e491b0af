"""A run whose disk, update or model is slowed down says so: the bottleneck of `step_report` names what was delayed.

By a clock that only the delays move: the report is of them alone, however busy the machine is."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from tests.fakes.no_workers import FakeEngine, FakeTransfer
from tests.support.inspection.insides import Checkpoints, rack, swap_store
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered, train
from tests.telemetry.conftest import Clock
from tiered_zero.io.engine import File, IOEngine, IOTransfer, Request
from tiered_zero.io.select import Selection, select_engine
from tiered_zero.rules.native_rules import NativeRule
from tiered_zero.telemetry import report
from tiered_zero.telemetry.report import StepReport, bottleneck

DELAY_S = 0.25


@dataclass
class LateTransfer(FakeTransfer):
    """Done once the clock has reached `due_s`, to which waiting for it sets the clock."""

    inner: IOTransfer
    clock: Clock
    begun_s: float
    due_s: float

    @property
    def request(self) -> Request:  # type: ignore[override]
        return self.inner.request

    def done(self) -> bool:
        return self.clock.perf_counter() >= self.due_s and self.inner.done()

    def wait(self) -> None:
        self.clock.sleep_until(self.due_s)
        self.inner.wait()

    @property
    def seconds(self) -> float:
        return self.due_s - self.begun_s if self.done() else 0.0


class PromptTransfer(FakeTransfer):
    """A transfer that takes no time by the clock."""

    def __init__(self, inner: IOTransfer) -> None:
        self._inner = inner

    @property
    def request(self) -> Request:  # type: ignore[override]
        return self._inner.request

    def done(self) -> bool:
        return self._inner.done()

    def wait(self) -> None:
        self._inner.wait()

    @property
    def seconds(self) -> float:
        return 0.0


class LateEngine(FakeEngine):
    """A disk that serves requests of one kind one after the other, each in `DELAY_S`, and all others at once."""

    def __init__(self, inner: IOEngine, kind: str, clock: Clock) -> None:
        self.name, self._inner, self._kind, self._clock, self._free_s = inner.name, inner, kind, clock, 0.0

    def _late(self, kind: str, transfer: IOTransfer) -> IOTransfer:
        if kind != self._kind:
            return PromptTransfer(transfer)
        begun_s = self._clock.perf_counter()
        self._free_s = max(self._free_s, begun_s) + DELAY_S
        return LateTransfer(transfer, self._clock, begun_s, self._free_s)

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


@pytest.fixture
def clock(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Clock:
    for module in (report, swap_store):
        monkeypatch.setattr(module, "time", clock)
    return clock


def report_of(swap_path: Path, model: nn.Module, steps: int = 3) -> StepReport:
    """Of the last of the steps, whose updates the driver runs."""
    runtime = {"update": "barrier"}
    with tiered(model, swap_path, ("nvme", "nvme"), zero={"sub_group_size": 1 << 14}, runtime=runtime) as engine:
        train(engine, batch, steps)
        engine.flush()
        assert engine.step_report is not None
        return engine.step_report


@pytest.mark.parametrize("kind", ["read", "write"])
def test_a_slow_disk(kind: str, swap_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    def select(*args: Any, **options: Any) -> Selection:
        selection = select_engine(*args, **options)
        return replace(selection, engine=LateEngine(selection.engine, kind, clock))

    monkeypatch.setattr(rack, "select_engine", select)
    report = report_of(swap_path, ParityGPT())
    # whether the driver worked or waited meanwhile is for the threads to settle, which this clock does not slow down
    disks = {lane: report.busy_s[lane] for lane in ("disk read", "disk write")}
    assert bottleneck(disks, report.wall_s).startswith(f"disk {kind} (")
    assert sum(disks.values()) == disks[f"disk {kind}"] > DELAY_S


def test_a_slow_update(swap_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    update, num_updates = NativeRule.update, 0

    def slow(rule: NativeRule, runs: Any) -> None:
        nonlocal num_updates
        clock.sleep(DELAY_S)
        num_updates += 1
        update(rule, runs)

    monkeypatch.setattr(NativeRule, "update", slow)
    report = report_of(swap_path, ParityGPT(), steps=1)
    assert num_updates > 1 and report.wall_s == pytest.approx(num_updates * DELAY_S)
    assert report.bound_by == "update (100% busy)"
    assert report.busy_s["compute"] == 0.0 and report.seconds["update"] == pytest.approx(report.wall_s)


def test_a_slow_model(swap_path: Path, clock: Clock) -> None:
    model = ParityGPT()
    model.register_forward_pre_hook(lambda *_: clock.sleep(DELAY_S))
    report = report_of(swap_path, model)
    assert report.bound_by == "compute (100% busy)"
    assert report.seconds["forward"] == sum(report.seconds.values()) == pytest.approx(DELAY_S)


def test_saves_are_not_taken_for_the_loop_around_the_engine(
    swap_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tiered(ParityGPT(), swap_path, ("none", "none")) as engine:
        train(engine, batch, 1)
        monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: clock.sleep(DELAY_S))
        engine.save_checkpoint(swap_path)
        clock.sleep(DELAY_S / 4)  # the loop around the engine
        train(engine, batch, 1)
        report = engine.step_report
    assert report.bound_by == "save (80% busy)"
    assert {cause: spent_s for cause, spent_s in report.seconds.items() if spent_s} == pytest.approx(
        {"save": DELAY_S, "other": DELAY_S / 4}
    )


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
