"""kill -9 at random moments of training runs with in-place commits: each goes on with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.kills import CASES, RANK_CASES, RankCase, kill_command, kill_ranks, kill_script


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES[::3], ids=", ".join)
def test_a_kill(tmp_path: Path, swap_path: Path, case: tuple[str, str, str]) -> None:
    assert kill_script(tmp_path, swap_path, case, 1, 1).num_kills == 1


@pytest.mark.slow
def test_the_command_is_killed_in_mid_training(tmp_path: Path, swap_path: Path) -> None:
    killed = kill_command(tmp_path, swap_path, 1, 1)
    assert (killed.num_kills, killed.num_repeated) == (1, None), "the command does not say which steps it repeats"


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("seed", range(2, 12))
def test_three_hundred_kills(tmp_path: Path, swap_path: Path, seed: int) -> None:
    assert kill_script(tmp_path, swap_path, CASES[seed % len(CASES)], 30, seed).num_kills == 30


@pytest.mark.slow
def test_a_kill_of_ranks(tmp_path: Path, swap_path: Path) -> None:
    assert kill_ranks(tmp_path, swap_path, RankCase(2, 3, "fp32", 2), 1, 1).num_kills == 1


@pytest.mark.thorough
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("case", RANK_CASES, ids=str)
def test_thirty_kills_of_ranks(tmp_path: Path, swap_path: Path, case: RankCase) -> None:
    assert kill_ranks(tmp_path, swap_path, case, 30, 2).num_kills == 30
