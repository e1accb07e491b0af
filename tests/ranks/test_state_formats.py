"""Smaller formats of optimizer state, saved and loaded by any number of ranks at any stage and tier, bit for bit."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, load, save
from tests.ranks.training import differences
from tests.support.pairwise import Case, name_of, pairwise
from tests.support.tags import equal_bits, load_tag

FORMATS = (
    ("bf16_remainder", "bf16_remainder"),
    ("bf16_remainder", "fp32"),
    ("fp32", "bf16_remainder"),
    ("lossy_bf16_moments", "lossy_bf16_moments"),
    ("lossy_bf16_moments", "fp32"),
    ("lossy_8bit_moments", "lossy_8bit_moments"),
    ("lossy_8bit_moments", "fp32"),
)
SIDES = ("save", "load")


def place_of(case: Case, side: str) -> Place:
    return Place(
        world=case[f"{side}_world"],
        stage=case[f"{side}_stage"],
        device=case[f"{side}_device"],
        config={"bf16": {"enabled": True}},
        runtime={"state_format": case["formats"][SIDES.index(side)], "checkpoint": {"convert": True}},
    )


def keeps_half_of_masters_apart(case: Case) -> bool:
    """bf16_remainder needs parameters where the update runs."""
    places = [place_of(case, side) for side in SIDES]
    return any(
        place.runtime["state_format"] == "bf16_remainder" and place.stage < 3 and place.device != "none"
        for place in places
    )


def with_formats(cases: list[Case]) -> list[Case]:
    """Each case with the formats that have been met least often of those that it can have: where a part rests, and how
    its elements are converted, know nothing of each other."""
    met: Counter[tuple[str, str]] = Counter()
    chosen = []
    for case in cases:
        possible = [{**case, "formats": formats} for formats in FORMATS]
        possible = [each for each in possible if not keeps_half_of_masters_apart(each)]
        chosen.append(min(possible, key=lambda each: met[each["formats"]]))
        met[chosen[-1]["formats"]] += 1
    assert len(met) == len(FORMATS)
    return chosen


PLACES = pairwise(
    {
        "save_world": (2, 3),  # parts of 3 and of 2 do not lie in each other
        "load_world": (1, 2, 3),
        "save_stage": (0, 3),
        "load_stage": (1, 3),
        **{f"{side}_device": ("none", "cpu", "nvme") for side in SIDES},
    }
)
CASES = with_formats(PLACES)


@pytest.mark.parametrize("case", CASES, ids=name_of)
def test_any_ranks_hold_the_same_state(ranks: RankPool, tmp_path: Path, swap_path: Path, case: Case) -> None:
    """Saved again by the run that has loaded it, a checkpoint has the same tensors; fp32 holds every value of a lossy
    format, which then takes it back."""
    one, other, back = tmp_path / "one", tmp_path / "other", tmp_path / "back"
    first, second = place_of(case, "save"), place_of(case, "load")
    saved = ranks.run(save, first.world, first, str(swap_path), str(one), more=0)
    for each in ranks.run(load, second.world, second, str(swap_path), str(one), more=0, save_dir=str(other)):
        assert differences(each["loaded"], saved[0]["saved"]) == []
    lossy, wanted = (name.startswith("lossy") for name in case["formats"])
    if lossy and not wanted:
        ranks.run(load, first.world, first, str(swap_path), str(other), more=0, save_dir=str(back))
        other = back
    assert equal_bits(load_tag(one / "global_step2"), load_tag(other / "global_step2"))


@pytest.mark.parametrize(
    ("world", "stage", "device", "state_format"),
    [
        (2, 2, "none", "bf16_remainder"),
        (4, 3, "cpu", "bf16_remainder"),
        (2, 1, "cpu", "lossy_bf16_moments"),
        (2, 3, "nvme", "lossy_8bit_moments"),
    ],
)
def test_the_same_ranks_go_on_with_equal_bits(
    ranks: RankPool, tmp_path: Path, swap_path: Path, world: int, stage: int, device: str, state_format: str
) -> None:
    place = Place(world=world, stage=stage, device=device, config={"bf16": {"enabled": True}})
    place = replace(place, runtime={"state_format": state_format})
    undisturbed: list[dict[str, Any]] = ranks.run(save, world, place, str(swap_path), str(tmp_path))
    resumed = ranks.run(load, world, place, str(swap_path), str(tmp_path))
    for before, after in zip(undisturbed, resumed, strict=True):
        assert differences(after["loaded"], before["saved"]) == []
        assert after["losses"] == before["losses"]
        assert differences(after["weights"], before["weights"]) == []
