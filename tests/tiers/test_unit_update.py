"""A unit's update: what it hands over on the way, and when it is made and complete."""

from __future__ import annotations

import threading

import pytest
import torch

from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer
from tiered_zero.tiers.tier import UnitUpdate

PART = 64


def copy(target: torch.Tensor, source: torch.Tensor) -> Transfer:
    target.copy_(source)
    return COMPLETED


def part(value: int) -> torch.Tensor:
    return torch.full((PART,), value, dtype=torch.uint8)


def values(target: torch.Tensor) -> list[int]:
    """One of each part."""
    return target.view(-1, PART)[:, 0].tolist()


@pytest.mark.parametrize(
    "order", [("receive", "make", "write"), ("make", "receive", "write"), ("make", "write", "receive")]
)
def test_a_part_comes_by_copy_or_is_read_but_never_both(order: tuple[str, ...]) -> None:
    """Part 0 is made early, part 1 is neither made nor written: the update leaves it as it was."""
    unit_update, target = UnitUpdate(), torch.zeros(2 * PART, dtype=torch.uint8)
    memory = part(7)
    written: list[tuple[int, int]] = []
    for what in order:
        if what == "receive":
            written = unit_update.begin_copies(target, copy)
        elif what == "make":
            unit_update.add_pending(0, memory)
        else:
            unit_update.retire(0)
            memory.fill_(9)  # used again for another part
    unit_update.computed.complete()
    assert unit_update.finish_copies() == [(PART, 2 * PART)]
    if order[-1] == "receive":
        assert written == [(0, PART)] and values(target) == [0, 0]
    else:
        assert written == [] and values(target) == [7, 0]
    assert not unit_update.written.done(), "and none of it waits for the unit to be written"


def test_every_part_comes_one_way_or_the_other() -> None:
    unit_update, target = UnitUpdate(), torch.zeros(4 * PART, dtype=torch.uint8)
    parts = {index: part(index + 1) for index in range(4)}
    for index in (2, 0):
        unit_update.add_pending(index * PART, parts[index])
    unit_update.retire(2 * PART)
    assert unit_update.begin_copies(target, copy) == [(2 * PART, 3 * PART)]
    unit_update.add_pending(3 * PART, parts[3])
    assert values(target) == [0, 0, 0, 4], "at once"
    unit_update.retire(0)
    assert values(target) == [1, 0, 0, 4], "before its memory goes to others"
    unit_update.add_pending(PART, parts[1])
    unit_update.computed.complete()
    assert unit_update.finish_copies() == []
    assert values(target) == [1, 2, 0, 4]


def test_taking_the_rest_waits_for_the_unit_to_be_made() -> None:
    unit_update, target = UnitUpdate(), torch.zeros(2 * PART, dtype=torch.uint8)
    unit_update.add_pending(0, part(1))
    unit_update.begin_copies(target, copy)
    found: list[list[tuple[int, int]]] = []
    waiting = threading.Thread(target=lambda: found.append(unit_update.finish_copies()), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not found and not unit_update.computed.done()
    unit_update.add_pending(PART, part(2))
    unit_update.computed.complete()
    waiting.join(300)
    unit_update.computed.wait()
    assert unit_update.computed.done() and not unit_update.written.done()
    assert found == [[]] and values(target) == [1, 2]


def test_the_target_is_its_owners_again_once_the_rest_is_taken() -> None:
    unit_update, target = UnitUpdate(), torch.zeros(PART, dtype=torch.uint8)
    unit_update.begin_copies(target, copy)
    unit_update.add_pending(0, part(7))
    unit_update.computed.complete()
    unit_update.finish_copies()
    unit_update.add_pending(0, part(9))
    unit_update.retire(0)
    assert values(target) == [7]


def test_a_second_target_starts_anew() -> None:
    unit_update = UnitUpdate()
    first, second = (torch.zeros(2 * PART, dtype=torch.uint8) for _ in range(2))
    unit_update.begin_copies(first, copy)
    unit_update.add_pending(0, part(1))
    assert unit_update.begin_copies(second, copy) == []
    unit_update.add_pending(PART, part(2))
    unit_update.computed.complete()
    assert unit_update.finish_copies() == []
    assert values(second) == [1, 2] and values(first) == [1, 0]


@pytest.mark.parametrize("made", [False, True])
def test_a_failure_reaches_who_waits_for_it_and_ends_the_copying(made: bool) -> None:
    unit_update, target = UnitUpdate(), torch.zeros(PART, dtype=torch.uint8)
    unit_update.begin_copies(target, copy)
    if made:
        unit_update.computed.complete()
    unit_update.fail(RuntimeError("the disk broke"))
    for wait in (unit_update.written.wait, unit_update.computed.wait, unit_update.finish_copies):
        with pytest.raises(RuntimeError, match="the disk broke"):
            wait()
    unit_update.add_pending(0, part(1))
    assert not target.any()


@pytest.mark.parametrize("end", ["retire", "fail", "cancel", "finish"])
def test_who_ends_a_copy_waits_until_it_is_done(end: str) -> None:
    """As it goes on with memory that the copy reads or writes."""
    unit_update, copying, lost = UnitUpdate(), Completion(), RuntimeError("the device is gone")
    unit_update.begin_copies(torch.zeros(PART, dtype=torch.uint8), lambda target, source: copying)
    unit_update.add_pending(0, part(1))
    unit_update.computed.complete()
    ends = {
        "retire": lambda: unit_update.retire(0),
        "fail": lambda: unit_update.fail(RuntimeError("the disk broke")),
        "cancel": unit_update.cancel_copies,
        "finish": unit_update.finish_copies,
    }
    errors: list[BaseException | None] = []

    def act() -> None:
        try:
            ends[end]()
        except RuntimeError as error:
            errors.append(error)
        else:
            errors.append(None)

    acting = threading.Thread(target=act, daemon=True)
    acting.start()
    acting.join(0.05)
    assert acting.is_alive()
    copying.fail(lost)
    acting.join(300)
    assert errors == [lost if end in ("cancel", "finish") else None], "a copy that fails is the fetch's affair"


def test_a_failure_after_the_end_is_nobodys() -> None:
    unit_update = UnitUpdate()
    unit_update.complete()
    unit_update.fail(RuntimeError("too late"))
    unit_update.written.wait()
    unit_update.computed.wait()
