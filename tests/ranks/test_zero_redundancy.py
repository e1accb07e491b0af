"""ZeroRedundancyOptimizer beside torch's class: the same bits under DDP on 1, 2 and 4 ranks, names, errors, state."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.ranks import sharded_optimizers as cases
from tests.ranks.pool import RankPool
from tiered_zero.optim import ZeroRedundancyOptimizer


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_numbers_are_those_of_torchs_class(world_size: int, ranks: RankPool, swap_path: Path) -> None:
    ranks.run(cases.train_beside_torch, world_size, str(swap_path))
    assert not list(swap_path.iterdir())


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_of_several_dtypes_are_stepped_as_by_the_plain_optimizer(world_size: int, ranks: RankPool) -> None:
    ranks.run(cases.train_mixed_dtypes, world_size)


def test_offloaded_parameters_of_several_dtypes_are_stepped_in_fp32_also_once_state_is_reset(ranks: RankPool) -> None:
    ranks.run(cases.train_mixed_dtypes_offloaded, 2)


def test_a_process_without_a_process_group_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    cases.train_mixed_dtypes(is_alone=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="process group has not been initialized"):
        ZeroRedundancyOptimizer([torch.nn.Parameter(torch.ones(3))], torch.optim.SGD, lr=0.1)


@pytest.mark.parametrize("offload", [None, {"device": "cpu"}])
def test_state_moves_in_each_direction(offload: dict[str, str] | None, ranks: RankPool) -> None:
    ranks.run(cases.move_state, 2, offload)


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_cases_of_pytorchs_own_tests_pass(world_size: int, ranks: RankPool, swap_path: Path) -> None:
    ranks.run(cases.follow_the_cases_of_torch, world_size, str(swap_path))


def test_the_ranks_open_their_tiers_together_or_not_at_all(ranks: RankPool, swap_path: Path) -> None:
    ranks.run(cases.open_together, 2, str(swap_path))


def test_parameters_are_broadcast_while_those_behind_are_updated(ranks: RankPool) -> None:
    ranks.run(cases.broadcast_in_the_order_of_updates, 2)


def test_any_empty_mapping_starts_the_state_anew() -> None:
    param, plain = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    pairs = [
        (param, ZeroRedundancyOptimizer([param], torch.optim.Adam, lr=0.1)),
        (plain, torch.optim.Adam([plain], lr=0.1)),
    ]
    for reset in (True, False):
        for each, optimizer in pairs:
            each.grad = torch.ones(3)
            optimizer.step()
            if reset:
                optimizer.state = {} if each is param else defaultdict(dict)
    assert torch.equal(param, plain)


def test_ranks_without_parameters_take_part_in_steps_whose_lr_and_gradients_are_0(ranks: RankPool) -> None:
    ranks.run(cases.train_one_parameter_on_two_ranks, 2)
