"""A unit's update: what it hands over on the way, and when it is made and complete."""

from __future__ import annotations

import threading
from functools import partial

import pytest
import torch

from tiered_zero.tiers.publication import Publication

PART = 64


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


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
    publication, target = Publication(), torch.zeros(2 * PART, dtype=torch.uint8)
    memory = part(7)
    written: list[tuple[int, int]] = []
    for what in order:
        if what == "receive":
            written = publication.receive(target)
        elif what == "make":
            publication.hand_over(0, memory, copy)
        else:
            publication.take_back(0, copy)
            memory.fill_(9)  # somebody else's now
    publication.finish_making()
    assert publication.take_rest(copy) == [(PART, 2 * PART)]
    if order[-1] == "receive":
        assert written == [(0, PART)] and values(target) == [0, 0]
    else:
        assert written == [] and values(target) == [7, 0]
    assert not publication.done(), "and none of it waits for the unit to be home"


def test_every_part_comes_one_way_or_the_other() -> None:
    publication, target = Publication(), torch.zeros(4 * PART, dtype=torch.uint8)
    parts = {index: part(index + 1) for index in range(4)}
    for index in (2, 0):
        publication.hand_over(index * PART, parts[index], copy)
    publication.take_back(2 * PART, copy)
    assert publication.receive(target) == [(2 * PART, 3 * PART)]
    publication.hand_over(3 * PART, parts[3], copy)
    assert values(target) == [0, 0, 0, 4], "at once"
    publication.take_back(0, copy)
    assert values(target) == [1, 0, 0, 4], "before its memory goes to others"
    publication.hand_over(PART, parts[1], copy)
    publication.finish_making()
    assert publication.take_rest(copy) == []
    assert values(target) == [1, 2, 0, 4]


def test_taking_the_rest_waits_for_the_unit_to_be_made() -> None:
    publication, target = Publication(), torch.zeros(2 * PART, dtype=torch.uint8)
    publication.hand_over(0, part(1), copy)
    publication.receive(target)
    found: list[list[tuple[int, int]]] = []
    waiting = threading.Thread(target=lambda: found.append(publication.take_rest(copy)), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not found and not publication.making.done()
    publication.hand_over(PART, part(2), copy)
    publication.finish_making()
    waiting.join(10)
    publication.making.wait()
    assert publication.making.done() and not publication.done()
    assert found == [[]] and values(target) == [1, 2]


def test_the_target_is_its_owners_again_once_the_rest_is_taken() -> None:
    publication, target = Publication(), torch.zeros(PART, dtype=torch.uint8)
    publication.receive(target)
    publication.hand_over(0, part(7), copy)
    publication.finish_making()
    publication.take_rest(copy)
    publication.hand_over(0, part(9), copy)
    publication.take_back(0, copy)
    assert values(target) == [7]


def test_a_second_target_starts_anew() -> None:
    publication = Publication()
    first, second = (torch.zeros(2 * PART, dtype=torch.uint8) for _ in range(2))
    publication.receive(first)
    publication.hand_over(0, part(1), copy)
    assert publication.receive(second) == []
    publication.hand_over(PART, part(2), copy)
    publication.finish_making()
    assert publication.take_rest(copy) == []
    assert values(second) == [1, 2] and values(first) == [1, 0]


@pytest.mark.parametrize("made", [False, True])
def test_a_failure_reaches_who_waits_for_it_and_ends_the_copying(made: bool) -> None:
    publication, target = Publication(), torch.zeros(PART, dtype=torch.uint8)
    publication.receive(target)
    if made:
        publication.finish_making()
    publication.fail(RuntimeError("the disk broke"))
    for wait in (publication.wait, publication.wait_made, partial(publication.take_rest, copy)):
        with pytest.raises(RuntimeError, match="the disk broke"):
            wait()
    publication.hand_over(0, part(1), copy)
    assert not target.any()


def test_a_failure_after_the_end_is_nobodys() -> None:
    publication = Publication()
    publication.complete()
    publication.fail(RuntimeError("too late"))
    publication.wait()
    publication.wait_made()
