"""The update of shards: units are gathered in static order, each once its shard is written, under the rest of the
update."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.inspection.insides import StepGradients, UnitShare
from tests.support.tier_rig import make_runtime
from tests.support.units import make_unit
from tiered_zero.concurrency.transfer import Completion, FailureLatch, Transfer
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.update.policy import GatheringPolicy

UNITS = [make_unit(index) for index in range(4)]


class Pipeline:
    """Writes units in the order `order`, each when `may_write` of it is set. Fails before the unit `failing`."""

    view = SimpleNamespace(
        layouts=[SimpleNamespace(subgroup=SimpleNamespace(index=u.index, units=(u,), segments=())) for u in UNITS]
    )

    def __init__(self, runtime: Runtime, order: Sequence[int], failing: int | None = None) -> None:
        self.failures = FailureLatch()
        self.runtime, self.order, self.failing = runtime, order, failing
        self.may_write = [threading.Event() for _ in UNITS]

    def freeze_groups(self) -> list[dict[str, Any]]:
        return [{"lr": 1.0}]

    def step(self, job: Any) -> None:
        for index in self.order:
            assert self.may_write[index].wait(300)
            if index == self.failing:
                error = OSError("the disk is full")
                job.fail(error)
                raise error
            if (unit_update := job.unit_updates.get(UNITS[index])) is not None:
                unit_update.complete()


class Guard:
    def __init__(self, log: list[str]) -> None:
        self._log = log

    def invalidate(self) -> None:
        self._log.append("prepare")

    def end_update(self) -> None:
        self._log.append("end")


class Gather:
    """Completes each gather once the next one is started, and lets the unit behind be written."""

    units = UNITS

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.started: list[int] = []
        self.transfers: list[Completion] = []

    def start(self, unit: Unit) -> Transfer:
        self.started.append(unit.index)
        for waiting in self.transfers:
            waiting.complete()
        self.transfers.append(Completion())
        if unit.index + 1 < len(UNITS):
            self.pipeline.may_write[unit.index + 1].set()
        else:
            self.transfers[-1].complete()
        return self.transfers[-1]


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    made = make_runtime()
    yield made
    made.accelerator.close()


def make_policy(pipeline: Any, log: list[str]) -> tuple[GatheringPolicy, Gather]:
    gather: Any = Gather(pipeline)
    guard: Any = Guard(log)
    return GatheringPolicy(pipeline, guard, gather), gather


def gradients_of(units: Sequence[int]) -> StepGradients:
    shares = {
        unit: UnitShare(
            flat=torch.zeros(1),
            start=0,
            present=frozenset(e.param.index for e in unit.entries if unit.index in units),
            last=None,
        )
        for unit in UNITS
    }
    return StepGradients(shares=shares)


def test_a_unit_is_gathered_while_those_behind_are_updated(runtime: Runtime) -> None:
    """The update of each unit begins only once the gather of the one before has."""
    log: list[str] = []
    pipeline = Pipeline(runtime, [0, 1, 2, 3])
    policy, gather = make_policy(pipeline, log)
    pipeline.may_write[0].set()
    policy.prepare()
    policy.apply(gradients_of(range(4)), 1.0)
    assert gather.started == [0, 1, 2, 3] and log == ["prepare", "end"]
    assert policy.num_applied == 1
    policy.finish()


@pytest.mark.parametrize("order", [[3, 2, 1, 0], [2, 0, 3, 1]])
def test_the_order_of_gathers_is_static_whatever_is_written_first(runtime: Runtime, order: list[int]) -> None:
    pipeline = Pipeline(runtime, order)
    policy, gather = make_policy(pipeline, [])
    for event in pipeline.may_write:
        event.set()
    policy.apply(gradients_of(range(4)), 1.0)
    assert gather.started == [0, 1, 2, 3]


def test_units_that_no_rank_has_a_gradient_of_are_not_gathered(runtime: Runtime) -> None:
    pipeline = Pipeline(runtime, [0, 1, 2, 3])
    policy, gather = make_policy(pipeline, [])
    for event in pipeline.may_write:
        event.set()
    policy.apply(gradients_of([1, 3]), 1.0)
    assert gather.started == [1, 3]


def test_a_failed_update_is_raised_and_nothing_behind_it_is_gathered(runtime: Runtime) -> None:
    log: list[str] = []
    pipeline = Pipeline(runtime, [0, 1, 2, 3], failing=2)
    policy, gather = make_policy(pipeline, log)
    for event in pipeline.may_write:
        event.set()
    with pytest.raises(OSError, match="the disk is full"):
        policy.apply(gradients_of(range(4)), 1.0)
    assert gather.started == [0, 1] and log == []
