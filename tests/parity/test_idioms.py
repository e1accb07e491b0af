"""PyTorch's idioms around gradients, on plain PyTorch and on the engine: the same bits, or an error of ours."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest

from tests.parity import idioms
from tests.parity.idioms import IDIOMS, Idiom, build, momentum
from tests.support.pairwise import by_turns
from tests.support.trainers import Plain, Record, assert_same_bits, follow, tiered
from tiered_zero.errors import ModelError

pytestmark = pytest.mark.usefixtures("one_thread")

PLACES = {
    "device": ("none", "none"),
    "host": ("cpu", "cpu"),
    "nvme": ("nvme", "nvme"),
    "state on nvme": ("none", "nvme"),
}
UPDATES: dict[str, dict[str, Any]] = {
    "barrier": {"update": "barrier"},
    "overlapped": {"update": "overlapped", "optimizer_in_backward": False},
}


@functools.cache
def plain(function: Idiom, accumulation: int = 1) -> Record:
    """Of plain PyTorch, once for all places."""
    return follow(function, Plain(build(), momentum, accumulation))


@pytest.mark.parametrize(("function", "place"), by_turns(IDIOMS, list(PLACES), 2))
def test_the_bits_are_plain_pytorchs(function: Idiom, place: str, swap_path: Path) -> None:
    """An idiom meets two places, and both updates in turn."""
    update = list(UPDATES)[(IDIOMS.index(function) // 2 + list(PLACES).index(place)) % 2]
    expected = plain(function)
    engine = tiered(build(), swap_path, PLACES[place], momentum, runtime=UPDATES[update])
    assert_same_bits(expected, follow(function, engine))


@pytest.mark.parametrize(("function", "place"), by_turns(IDIOMS, ["nvme", "state on nvme"]))
def test_where_updates_begin_in_backward_it_is_the_same_or_refused(
    function: Idiom, place: str, swap_path: Path
) -> None:
    expected = plain(function)
    engine = tiered(build(), swap_path, PLACES[place], momentum)
    try:
        found = follow(function, engine)
    except ModelError as error:
        assert "optimizer_in_backward" in str(error)
    else:
        assert_same_bits(expected, found)


@pytest.mark.parametrize(
    ("function", "place"),
    by_turns(
        [
            idioms.clip_by_norm,
            idioms.clamp_the_data_of_gradients,
            idioms.replace_gradients,
            idioms.leave_some_parameters_out,
            idioms.halve_in_a_hook,
        ],
        list(PLACES),
    ),
)
def test_gradients_summed_by_the_engine_are_as_those_summed_by_plain_pytorch(
    function: Idiom, place: str, swap_path: Path
) -> None:
    """Every step() counts a micro-batch, so each idiom acts on a first gradient, and on the sum."""
    expected = plain(function, accumulation=2)
    found = follow(
        function, tiered(build(), swap_path, PLACES[place], momentum, accumulation=2, runtime=UPDATES["overlapped"])
    )
    assert_same_bits(expected, found)
