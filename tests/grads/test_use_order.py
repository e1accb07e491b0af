"""When a backward has passed a unit, by the order of uses alone."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tiered_zero.grads.reduce import UseOrder


class U(int):
    """A unit with a module of its own."""

    @property
    def module(self) -> int:
        return int(self)


class Half(U):
    """One of two units of a module."""

    @property
    def module(self) -> int:
        return self // 2


ROWS: dict[str, tuple[Sequence[int], Sequence[int], Sequence[list[int]]]] = {
    "a row of units": ([0, 1, 2, 3], [3, 2, 1, 0], [[], [3], [3, 2], [3, 2, 1]]),
    "an embedding that is the head, too": ([0, 1, 2, 0], [0, 2, 1], [[], [], [2]]),
    "a last unit that no loss depends on": ([0, 1, 2, 3], [2, 1, 0], [[], [3, 2], [3, 2, 1]]),
    "units that are called twice": ([0, 1, 2, 0, 1, 2], [2, 1, 0, 2, 1, 0], [[], [], [], [], [2], [2, 1]]),
    "two units in one checkpoint": ([0, 1, 2, 3], [2, 3, 2, 0, 1, 0], [[], [], [3], [3, 2], [3, 2], [3, 2, 1]]),
    "a unit around others": ([0, 1, 2], [0, 2, 1, 0], [[], [], [2], [2, 1]]),
}
"""Uses by forward, uses by backward, and the units that it has passed as each of these begins."""


@pytest.mark.parametrize("name", ROWS)
def test_a_unit_is_passed_as_backward_goes_on_to_another(name: str) -> None:
    forward, backward, expected = ROWS[name]
    order = UseOrder()
    forward, backward = list(map(U, forward)), list(map(U, backward))
    units = sorted(set(forward), reverse=True)
    for step in range(2):
        for index in forward:
            order.note_forward(index)
        assert all(map(order.is_expected, units))
        order.begin_backward(units)
        found = []
        for index in backward:
            order.note_backward(index)
            found.append([index for index in units if not order.is_awaited(index)])
        assert found == expected, step
        order.end_step()
        assert not any(map(order.is_expected, units))


def test_each_micro_batch_and_a_graph_that_runs_twice_pass_their_units() -> None:
    order = UseOrder()
    for is_forward in (True, True, False):
        for index in range(3) if is_forward else ():
            order.note_forward(U(index))
        order.begin_backward(list(map(U, (2, 1, 0))))
        for index in (2, 1, 0):
            order.note_backward(U(index))
        assert [order.is_awaited(U(index)) for index in (2, 1, 0)] == [False, False, True]


def test_units_of_one_module_take_turns() -> None:
    order = UseOrder()
    for index in range(4):
        order.note_forward(Half(index))
    order.begin_backward(list(map(Half, (3, 2, 1, 0))))
    found = []
    for index in (3, 2, 3, 2, 1, 0):
        order.note_backward(Half(index))
        found.append([order.is_awaited(Half(index)) for index in (3, 2)])
    assert found == [[True, True]] * 4 + [[False, False]] * 2
