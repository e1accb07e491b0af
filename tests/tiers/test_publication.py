"""A unit's update: what it hands over on the way, and when it is made and complete."""

from __future__ import annotations

import threading

import pytest
import torch

from tiered_zero.tiers.publication import Publication

PART = 64


def copy(target: torch.Tensor, source: torch.Tensor) -> None:
    target.copy_(source)


def part(value: int) -> torch.Tensor:
    return torch.full((PART,), value, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("before", "after", "rest"),
    [
        ([], [0, 1, 2, 3], []),
        ([], [2, 0, 3, 1], []),
        ([0], [1, 2, 3], [(0, PART)]),
        ([2, 0], [3, 1], [(0, PART), (2 * PART, 3 * PART)]),
        ([3], [0, 2], [(PART, 2 * PART), (3 * PART, 4 * PART)]),
        ([0, 1, 2, 3], [], [(0, 4 * PART)]),
    ],
)
def test_a_target_gets_what_is_made_from_then_on_and_the_rest_is_named(
    before: list[int], after: list[int], rest: list[tuple[int, int]]
) -> None:
    publication, target = Publication(), torch.zeros(4 * PART, dtype=torch.uint8)
    for index in before:
        publication.hand_over(index * PART, part(index + 1), copy)
    publication.receive(target)
    for index in after:
        publication.hand_over(index * PART, part(index + 1), copy)
    publication.finish_making()
    if rest:
        publication.complete()
    assert publication.take_rest() == rest
    assert target.view(4, PART)[:, 0].tolist() == [index + 1 if index in after else 0 for index in range(4)]


def test_what_was_received_is_usable_before_the_unit_is_home() -> None:
    publication, target = Publication(), torch.zeros(PART, dtype=torch.uint8)
    publication.receive(target)
    publication.hand_over(0, part(7), copy)
    publication.finish_making()
    assert publication.take_rest() == [] and not publication.done()
    publication.hand_over(0, part(9), copy)
    assert target.eq(7).all(), "the target is its owner's again"


def test_the_rest_waits_for_the_unit_to_be_home() -> None:
    publication = Publication()
    publication.receive(torch.zeros(2 * PART, dtype=torch.uint8))
    publication.hand_over(0, part(1), copy)
    publication.finish_making()
    found: list[list[tuple[int, int]]] = []
    waiting = threading.Thread(target=lambda: found.append(publication.take_rest()), daemon=True)
    waiting.start()
    waiting.join(0.05)
    assert waiting.is_alive() and not found
    publication.complete()
    waiting.join(10)
    assert found == [[(PART, 2 * PART)]]


def test_a_second_target_starts_anew() -> None:
    publication = Publication()
    first, second = (torch.zeros(2 * PART, dtype=torch.uint8) for _ in range(2))
    publication.receive(first)
    publication.hand_over(0, part(1), copy)
    publication.receive(second)
    publication.hand_over(PART, part(2), copy)
    publication.complete()
    assert publication.take_rest() == [(0, PART)]
    assert not second[:PART].any() and not first[PART:].any()


@pytest.mark.parametrize("made", [False, True])
def test_a_failure_reaches_who_waits_for_it_and_ends_the_copying(made: bool) -> None:
    publication, target = Publication(), torch.zeros(PART, dtype=torch.uint8)
    publication.receive(target)
    if made:
        publication.finish_making()
    publication.fail(RuntimeError("the disk broke"))
    for wait in (publication.wait, publication.wait_made, publication.take_rest):
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
