"""The sub-groups that backward makes ready for a running update: whatever one side does, the other goes on."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from tiered_zero.concurrency.transfer import COMPLETED
from tiered_zero.update.pipeline import UpdateJob


@dataclass(frozen=True)
class OwnUnit:
    index: int


def unit(index: int) -> Any:
    return OwnUnit(index)


def layout(index: int) -> Any:
    """A sub-group of one unit with its own index. Units with an odd index get no gradient without backward."""
    segment = SimpleNamespace(unit=unit(index), pieces=[SimpleNamespace(param=index % 2)])
    return SimpleNamespace(subgroup=SimpleNamespace(index=index, segments=(segment,), units=(unit(index),)))


def job(*indices: int, arrived: set[int] | None = None) -> UpdateJob:
    gradients: Any = SimpleNamespace(
        has=lambda _, param: not param,
        has_arrived=lambda own: arrived is None or own.index in arrived,
        release=lambda _: None,
    )
    return UpdateJob([layout(index) for index in indices], gradients, [], COMPLETED)


def add(job: UpdateJob, *indices: int) -> None:
    for index in indices:
        assert job.add_unit(unit(index), COMPLETED) == [unit(index)]


def chosen(job: UpdateJob) -> int | None:
    found = job.choose()
    return None if found is None else found.subgroup.index


def test_the_shallowest_comes_first_and_skipped_ones_are_counted_once() -> None:
    own = job(0, 1, 2, 3, 5)
    add(own, 3, 1)
    first = own.choose()
    assert first is not None and first.subgroup.index == 1
    add(own, 0)  # comes in before what was looked at
    own.take([first.subgroup.index])
    assert [chosen(own), own.wait()] == [0, True] and not own.computed.done()
    own.unit_updates[unit(5)] = update = UnitUpdateOf()
    own.finish(COMPLETED)
    own.count_skipped()
    own.count_skipped()
    assert update.num_completed == 1, "the one without a gradient"
    assert own.take([3, 2, 0]) and own.has_ended()


class UnitUpdateOf:
    def __init__(self) -> None:
        self.num_completed = 0
        self.computed = SimpleNamespace(complete=lambda: None)

    def complete(self) -> None:
        self.num_completed += 1


def test_the_shallowest_whose_gradients_have_arrived_is_chosen() -> None:
    """Backward is launched ahead of the device: what became ready last has its gradients last."""
    arrived: set[int] = set()
    own = job(*range(2, 9), arrived=arrived)
    add(own, 5, 4, 3, 2)
    order = []
    for arrives in ((), (5, 4), (3,), (2,)):
        arrived.update(arrives)
        found = own.choose()
        assert found is not None
        own.take([found.subgroup.index])
        order.append(found.subgroup.index)
    assert order == [5, 4, 3, 2] and own.choose() is None
    add(own, 8, 7, 6)
    arrived.update((8, 7))
    assert chosen(own) == 7


def test_a_job_that_is_cancelled_between_choose_and_take() -> None:
    own = job(0, 1)
    add(own, 0, 1)
    seen = own.choose()
    assert seen is not None
    assert own.cancel()
    own.take([seen.subgroup.index])
    assert own.choose() is None and not own.wait()
    assert not job(0).cancel(), "no sub-group was ready"
