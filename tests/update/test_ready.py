"""The queue between backward and a running update: whatever one side does, the other goes on."""

from types import SimpleNamespace
from typing import Any

from tiered_zero.update.pipeline import ReadyQueue


def layout(index: int) -> Any:
    return SimpleNamespace(subgroup=SimpleNamespace(index=index, segments=(SimpleNamespace(unit=index),)))


def test_the_shallowest_comes_first_and_skipped_ones_are_reported_once() -> None:
    queue = ReadyQueue([layout(3), layout(1)], [layout(2)])
    first = queue.peek()
    assert first is not None and first.subgroup.index == 1
    queue.add(layout(0))  # comes in before what was looked at
    queue.take(first)
    assert [queue.peek().subgroup.index, queue.wait()] == [0, True]  # type: ignore[union-attr]
    assert [item.subgroup.index for item in queue.take_skipped()] == [2] and queue.take_skipped() == []


def test_the_shallowest_whose_gradients_have_arrived_is_chosen() -> None:
    """Backward is launched ahead of the device: what became ready last has its gradients last."""
    arrived: set[int] = set()
    gradients: Any = SimpleNamespace(has_arrived=arrived.__contains__)
    queue = ReadyQueue()
    for index in (5, 4, 3, 2):
        queue.add(layout(index))
    order = []
    for arrives in ((), (5, 4), (3,), (2,)):
        arrived.update(arrives)
        chosen = queue.choose(gradients)
        assert chosen is not None
        queue.take(chosen)
        order.append(chosen.subgroup.index)
    assert order == [5, 4, 3, 2] and queue.choose(gradients) is None
    for index in (8, 7, 6):
        queue.add(layout(index))
    arrived.update((8, 7))
    assert [queue.choose(gradients).subgroup.index, queue.peek().subgroup.index] == [7, 6]  # type: ignore[union-attr]


def test_a_queue_that_is_cleared_between_peek_and_take() -> None:
    queue = ReadyQueue([layout(0), layout(1)])
    seen = queue.peek()
    assert seen is not None
    queue.clear()
    queue.close()
    queue.take(seen)
    assert queue.peek() is None and not queue.wait()
