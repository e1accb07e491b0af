"""The state machine of a unit: its table drawn, and every pair of states walked."""

from __future__ import annotations

import itertools
import re

import pytest
import torch

from tests.house import ROOT
from tests.support.units import make_params, make_unit
from tiered_zero.errors import InternalError
from tiered_zero.unit.guard import ClosedEngine, OffloadedParameter
from tiered_zero.unit.unit import LEGAL_CHANGES, FlatStorage, PagedUnit, State, UnitState, WeightState

ENDED = ClosedEngine("u0")

LETTERS = {"fetch": "F", "acquire": "A", "guard": "G", "evict": "E", "write": "W", "block": "B", "unblock": "U"}

TABLE = """
F fetch  A acquire  G guard  E evict  W write  B block  U unblock
from                   to 1  2  3  4  5  6  7  8
1 OFFLOADED/CURRENT       E  B  F  .  .  .  .  .
2 OFFLOADED/UPDATING      U  E  .  F  .  .  .  .
3 FETCHING/CURRENT        E  .  .  .  .  .  A  .
4 FETCHING/UPDATING       .  E  U  .  .  .  .  .
5 CACHED/CURRENT          E  .  .  .  .  B  A  .
6 CACHED/UPDATING         .  .  .  .  U  .  .  .
7 IN_USE/CURRENT          E  .  .  .  G  .  .  W
8 IN_USE/STALE            E  .  .  .  .  .  .  .
"""

STATES: list[State] = list(itertools.product(UnitState, WeightState))


def describe(state: State) -> str:
    return f"{state[0].name}/{state[1].name}"


def draw() -> str:
    """States that no change leads to or from are left out."""
    legal = [state for state in STATES if any(state in pair for pair in LEGAL_CHANGES)]
    lines = ["  ".join(f"{letter} {act}" for act, letter in LETTERS.items())]
    lines.append(f"{'from':23}to " + "  ".join(str(number) for number in range(1, len(legal) + 1)))
    for number, before in enumerate(legal, start=1):
        acts = [LEGAL_CHANGES.get((before, after)) for after in legal]
        lines.append(f"{number} {describe(before):24}" + "  ".join(LETTERS[act] if act else "." for act in acts))
    return "\n".join(lines)


def make_paged(state: State) -> PagedUnit:
    unit = make_unit(0, [8, 8])
    storage = FlatStorage(unit, make_params(unit), torch.device("cpu"), ENDED)
    storage.fill()
    paged = PagedUnit(
        unit=unit,
        storage=storage,
        is_resident=False,
        own=slice(0, 8),
        params={},
        events=None,
        state=state[0],
        weights=state[1],
    )
    if state[0] is UnitState.IN_USE:
        storage.unguard()
    return paged


def test_the_table() -> None:
    assert draw() == TABLE.strip()


@pytest.mark.parametrize("before", STATES, ids=describe)
@pytest.mark.parametrize("after", STATES, ids=describe)
def test_every_change_is_made_or_refused(before: State, after: State) -> None:
    paged = make_paged(before)
    if (before, after) in LEGAL_CHANGES:
        paged._change(*after)
        expected = after
    else:
        pair = f"Unit u0 cannot change from {describe(before)} to {describe(after)}"
        with pytest.raises(InternalError, match=pair):
            paged._change(*after)
        expected = before
    assert (paged.state, paged.weights) == expected
    guarded = {isinstance(param, OffloadedParameter) for param in paged.storage._params}
    assert guarded == {expected[0] is not UnitState.IN_USE}, "the class of a parameter follows from the state"


def test_abort_finds_a_way_back_from_every_state() -> None:
    """Eviction, of a unit that has a home; one that lives on the device is CACHED or IN_USE, and stays."""
    for before in {before for before, _ in LEGAL_CHANGES} - {(UnitState.CACHED, WeightState.UPDATING)}:
        weights = WeightState.CURRENT if before[1] is WeightState.STALE else before[1]
        assert LEGAL_CHANGES[before, (UnitState.OFFLOADED, weights)] in ("evict", "unblock")


def test_a_unit_that_lives_on_the_device_begins_as_cached() -> None:
    unit = make_unit(0, [8])
    storage = FlatStorage(unit, make_params(unit), torch.device("cpu"), ENDED)
    paged = PagedUnit(unit=unit, storage=storage, is_resident=True, own=slice(0, 8), params={}, events=None)
    assert (paged.state, paged.weights) == (UnitState.CACHED, WeightState.CURRENT)


def test_what_is_evictable() -> None:
    class Fetch:
        """In flight; never asked."""

    paged = make_paged((UnitState.FETCHING, WeightState.CURRENT))
    paged.fetch = Fetch()  # type: ignore[assignment]
    view = paged.storage.flat[:4]
    assert paged.is_evictable, "the transfer holds views of its own"
    paged.begin_use()
    assert not paged.is_evictable
    del view
    assert paged.is_evictable
    paged.add_user()
    assert not paged.is_evictable


def test_one_class_writes_the_state_of_a_unit() -> None:
    writes = re.compile(r"paged\.(num_users|version|state|weights)(, [\w.]+)* [+-]?=(?!=)|\._change\(")
    found = [path.name for path in (ROOT / "tiered_zero").rglob("*.py") if writes.search(path.read_text("utf-8"))]
    assert found == ["unit.py"]
