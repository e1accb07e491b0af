"""Gradients on their way between ranks: what moves when, in which order, and what each rank keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.test_failures import rank_and_config
from tests.ranks.training import Case, build_model, make_optimizer, micro_batches


def leave_ranks_out(path: str, stage: int, device: str) -> str:
    """What `no_sync` says; where it is allowed, one backward inside it and one outside, then a step."""
    offload = {"device": device, **({"nvme_path": path} if device == "nvme" else {})}
    rank, config = rank_and_config(path, stage=stage, offload_optimizer=offload)
    model = build_model(rank)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "adamw"), config=config)
    try:
        with engine.no_sync():
            engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
        engine.backward(engine(*micro_batches(Case(), 1, rank, 2)[0]))
        engine.step()
    except tiered_zero.ModelError as error:
        return str(error)
    finally:
        engine.close()
    return ""


@pytest.mark.parametrize(("stage", "device"), [(0, "cpu"), (1, "none"), (1, "cpu"), (2, "none")])
def test_no_sync_is_for_whole_gradients(ranks: RankPool, swap_path: Path, stage: int, device: str) -> None:
    is_whole = (stage, device) in ((0, "cpu"), (1, "none"))
    for text in ranks.run(leave_ranks_out, 2, str(swap_path), stage, device):
        assert (text == "") == is_whole
        assert is_whole or "no_sync() was expected where every rank keeps whole gradients" in text


def drop_on_one_rank(path: str) -> str:
    """Rank 1 drops the gradients of its first backward; both go on."""
    rank, config = rank_and_config(path, stage=2)
    model = build_model(rank)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "adamw"), config=config)
    try:
        engine.backward(engine(*micro_batches(Case(), 0, rank, 2)[0]))
        if rank == 1:
            engine.zero_grad()
        engine.backward(engine(*micro_batches(Case(), 1, rank, 2)[0]))
        engine.step()
    except tiered_zero.errors.RankError as error:
        return str(error)
    finally:
        engine.close()
    return ""


def test_ranks_that_keep_sums_of_other_backwards_are_found(ranks: RankPool, swap_path: Path) -> None:
    for text in ranks.run(drop_on_one_rank, 2, str(swap_path)):
        assert "expected in the same order on every rank; rank 0 runs backward 2 after step 0, with" in text
        assert "rank 1 runs backward 2 after step 0, with 0 sums of gradients" in text
