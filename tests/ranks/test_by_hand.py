"""Weights that users change on many ranks, training data that `initialize` splits, and a bucket that is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tiered_zero
from tests.ranks.pool import RankPool, open_collectives
from tests.ranks.training import (
    Case,
    begin_run,
    build_model,
    differences,
    make_optimizer,
    micro_batches,
    rank_and_config,
)
from tests.support.inspection.insides import planning_notices, specify_run
from tiered_zero.config.load import load


def change_weights(path: str, stage: int) -> dict[str, Any]:
    """Rank 1 sets one weight and rank 0 loads others, between two steps; rank 0 alone evaluates."""
    rank, model, engine = begin_run(path, stage=stage)
    batches = [micro_batches(Case(), step, rank, 2)[0] for step in range(2)]
    engine.backward(engine(*batches[0]))
    engine.step()
    with tiered_zero.zero.GatheredParameters(model.norm.weight, modifier_rank=1), torch.no_grad():
        if rank == 1:
            model.norm.weight.fill_(0.5)
    loaded = {name: value + 0.25 * (rank + 1) for name, value in model.sometimes.state_dict().items()}
    model.sometimes.load_state_dict(loaded)
    if rank == 0:
        with torch.no_grad():
            engine(*batches[0])
        loaded_bias = model.sometimes.state_dict()["bias"]
        assert torch.equal(loaded_bias, loaded["bias"])
    weight = model.norm.weight.detach().clone()
    engine.backward(engine(*batches[1], detour=True))
    engine.step()
    found = {"weight": weight, "weights": {name: value.clone() for name, value in model.state_dict().items()}}
    engine.close()
    return found


def test_changes_by_hand_are_those_of_one_rank(ranks: RankPool, swap_path: Path) -> None:
    found = [each for stage in (0, 1) for each in ranks.run(change_weights, 2, str(swap_path), stage)]
    for each in found:
        assert torch.equal(each["weight"], torch.full_like(each["weight"], 0.5))
        assert differences(each["weights"], found[0]["weights"]) == []


def fail_in_block(path: str, stage: int, failing: list[int]) -> list[str]:
    """Ranks raise inside of a block that changes a weight, and catch it: what each has heard, and then hears."""
    rank, model, engine = begin_run(path, stage=stage)
    engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
    engine.step()
    heard = []
    for _ in range(2):
        try:
            with tiered_zero.gathered([model.norm.weight, model.sometimes.bias], modify=True):
                if rank in failing and not heard:
                    raise ValueError("no such weight")
        except Exception as error:
            heard.append(f"{type(error).__name__}: {error}")
    engine.close()
    return heard


@pytest.mark.parametrize("stage", [1, 3])
def test_a_block_that_raises_on_one_rank_ends_the_run_on_all(ranks: RankPool, swap_path: Path, stage: int) -> None:
    first, second = ranks.run(fail_in_block, 2, str(swap_path), stage, [1])
    assert len(first) == len(second) == 2, "the run has ended"
    why = "the code inside of gathered() has raised on rank 1 alone: ValueError: no such weight"
    assert first[0] == f"RankError: Rank 1 failed, which ends the run on all 2 ranks: {why}"
    assert second[0] == "ValueError: no such weight"
    assert why in first[1] and why in second[1]


def test_a_block_that_raises_on_all_ranks_ends_none(ranks: RankPool, swap_path: Path) -> None:
    assert ranks.run(fail_in_block, 2, str(swap_path), 3, [0, 1]) == [["ValueError: no such weight"]] * 2


def load_data(path: str) -> list[int]:
    rank, config = rank_and_config(path)
    model = build_model(rank)
    data = torch.utils.data.TensorDataset(torch.arange(10))
    engine, _, loader, _ = tiered_zero.initialize(
        model=model, optimizer=make_optimizer(model, "adamw"), config=config, training_data=data
    )
    assert engine.train_batch_size() == 4 and engine.global_rank == rank == engine.local_rank
    assert tiered_zero.comm.get_world_size() == engine.world_size == 2
    samples = [index for (batch,) in loader or () for index in batch.tolist()]
    engine.close()
    return samples


def test_training_data_is_split(ranks: RankPool, swap_path: Path) -> None:
    assert ranks.run(load_data, 2, str(swap_path)) == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]


def notices(path: str, reduce_bucket_size: int) -> list[str]:
    rank, config = rank_and_config(path, reduce_bucket_size=reduce_bucket_size)
    collectives = open_collectives(10.0)
    try:
        model = build_model(rank)
        return planning_notices(
            specify_run(load(config, None, 2), model, make_optimizer(model, "adamw"), collectives=collectives)
        )
    finally:
        collectives.close()


def test_a_bucket_that_is_cut_is_said(ranks: RankPool, swap_path: Path) -> None:
    for size in (10**8, 10**9):
        said = f"zero_optimization.reduce_bucket_size: {size} is a limit; buckets have 4194304 elements"
        assert ranks.run(notices, 2, str(swap_path), size) == [[said]] * 2
    for size in (4096, 500_000_000):  # the second is DeepSpeed's default
        assert ranks.run(notices, 2, str(swap_path), size) == [[], []]
