"""What the schedule expects after what it has seen."""

from __future__ import annotations

from itertools import islice

from hypothesis import given
from hypothesis import strategies as st

from tiered_zero.unit.cache import Schedule, Use


def observe(schedule: Schedule, phase: str, *units: int) -> None:
    for unit in units:
        if not schedule.observe(phase, unit, 1):
            schedule.end_expected()


def upcoming(schedule: Schedule, count: int | None = None) -> list[Use]:
    """Expect as many uses as are known, and return the first ones."""
    schedule.end_expected()
    for _ in schedule.expect_next(current=-1):
        pass
    return list(islice(schedule._ahead, count))


def expect(schedule: Schedule, count: int) -> list[int]:
    return [unit for _, unit in upcoming(schedule, count)]


def train(schedule: Schedule, forward: list[int]) -> None:
    observe(schedule, "forward", *forward)
    observe(schedule, "backward", *reversed(forward))


def test_nothing_is_expected_before_anything_was_seen_twice() -> None:
    schedule = Schedule()
    assert expect(schedule, 9) == []
    train(schedule, [0, 1, 2])
    assert expect(schedule, 9) == []


def test_the_second_step_is_known_from_its_second_use_on() -> None:
    schedule = Schedule()
    train(schedule, [0, 1, 2, 3])
    observe(schedule, "forward", 0)
    observe(schedule, "forward", 1)
    assert expect(schedule, 6) == [2, 3, 3, 2, 1, 0]
    observe(schedule, "forward", 2, 3)
    assert upcoming(schedule, 2) == [("backward", 3), ("backward", 2)]


def test_from_the_third_step_on_the_next_step_is_expected_at_the_end_of_the_last() -> None:
    schedule = Schedule()
    for _ in range(2):
        train(schedule, [0, 1, 2])
    assert expect(schedule, 3) == [0, 1, 2]


def test_a_tied_unit_is_distinguished_by_what_came_before() -> None:
    """Embedding and head share unit 0: after its first visit block 1 follows, after its second backward begins."""
    schedule = Schedule()
    for _ in range(2):
        train(schedule, [0, 1, 2, 0])
    observe(schedule, "forward", 0)
    assert expect(schedule, 3) == [1, 2, 0]
    observe(schedule, "forward", 1, 2, 0)
    assert upcoming(schedule, 3) == [("backward", 0), ("backward", 2), ("backward", 1)]


def test_evaluation_in_between_costs_one_step_of_guesses_at_most() -> None:
    schedule = Schedule()
    for _ in range(2):
        train(schedule, [0, 1, 2])
    observe(schedule, "forward", 0, 1, 2)  # evaluation: no backward follows
    observe(schedule, "forward", 0, 1)
    assert expect(schedule, 1) == [2]
    observe(schedule, "forward", 2)
    observe(schedule, "backward", 2, 1)
    assert expect(schedule, 1) == [0], "nothing was forgotten"


def test_a_changed_order_is_followed_after_one_sight() -> None:
    schedule = Schedule()
    for _ in range(2):
        train(schedule, [0, 1, 2, 3])
    train(schedule, [0, 2, 1, 3])
    observe(schedule, "forward", 0, 2)
    assert expect(schedule, 2) == [1, 3]


def test_repeated_use_of_one_unit_is_one_use() -> None:
    schedule = Schedule()
    for _ in range(2):
        observe(schedule, "forward", 0, 0, 1, 1, 1, 2)
    observe(schedule, "forward", 0, 1)
    assert expect(schedule, 2) == [2, 0]


USES = st.lists(st.tuples(st.sampled_from(["forward", "backward"]), st.integers(0, 5)), max_size=60)


@given(uses=USES)
def test_guessing_always_ends_and_remembers_no_more_than_pairs(uses: list[Use]) -> None:
    schedule = Schedule()
    for phase, unit in uses:
        schedule.observe(phase, unit, 1)
    assert len(upcoming(schedule)) <= len(schedule._next) <= len(set(zip([None, *uses], uses, strict=False))) + 1


def test_only_units_that_are_not_expected_yet_are_to_be_provided_for() -> None:
    schedule = Schedule()
    for _ in range(2):
        train(schedule, [0, 1, 2])
    observe(schedule, "forward", 0)
    ahead = schedule.expect_next(current=0, until="backward")
    assert next(ahead) == 1 and next(ahead) == 2
    ahead.close()
    assert list(schedule._ahead) == [("forward", 1)], "2 was not provided for"
    assert list(schedule.expect_next(current=0)) == [2]
    assert set(schedule.expected) == {0, 1, 2} and schedule.expected_numel == 2, "0 is in use"
    observe(schedule, "forward", 1, 2)
    assert schedule.expected_numel == 2, "each is used again"


@given(order=st.permutations(range(6)), repeats=st.integers(2, 4))
def test_any_cycle_is_known_after_two_rounds(order: list[int], repeats: int) -> None:
    schedule = Schedule()
    for _ in range(repeats):
        train(schedule, order)
    train_uses = [("forward", u) for u in order] + [("backward", u) for u in reversed(order)]
    for position, (phase, unit) in enumerate(train_uses):
        schedule.observe(phase, unit, 1)
        rest = train_uses[position + 1 :]
        assert upcoming(schedule, len(rest)) == rest
