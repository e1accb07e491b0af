"""`overlap_comm`: whole gradients that are reduced under the last backward of a step, with the bits of step()."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.test_gradients import small_config, watch_backward
from tests.ranks.test_parity import assert_equal, reference
from tests.ranks.training import Case, assert_all_ranks_agree, differences, train_tiered
from tests.support.inspection import recorder
from tiered_zero.errors import ModelError


def overlapped(case: Case, stage: int, overlap: bool | None = True) -> Case:
    zero = {"stage": stage, "overlap_comm": overlap, "reduce_bucket_size": 4096}
    return replace(case, zero=zero)


@pytest.mark.parametrize(("stage", "accumulation"), [(0, 2), (1, 1), (1, 3)])
def test_two_ranks_are_distributed_data_parallel(
    ranks: RankPool, swap_path: Path, stage: int, accumulation: int
) -> None:
    """With parameters that are never used, and used by some ranks in some steps; micro-batches are reduced once."""
    case = Case(accumulation=accumulation, optimizer="groups")
    found = ranks.run(train_tiered, 2, overlapped(case, stage), str(swap_path))
    assert_all_ranks_agree(found)
    assert_equal(found, reference(ranks, case))


@pytest.mark.parametrize(("stage", "precision", "accumulation"), [(0, "bf16", 2), (1, "fp32", 1)])
def test_four_ranks_have_the_bits_of_step(
    ranks: RankPool, swap_path: Path, stage: int, precision: str, accumulation: int
) -> None:
    config = {"bf16": {"enabled": precision == "bf16"}}
    case = Case(clipping=0.5, accumulation=accumulation, steps=3, config=config)
    found, plain = (ranks.run(train_tiered, 4, overlapped(case, stage, how), str(swap_path)) for how in (True, None))
    assert_all_ranks_agree(found)
    assert_equal(found, plain)
    assert found[0]["norms"] == plain[0]["norms"]


@pytest.mark.parametrize("stage", [0, 1])
def test_reductions_run_under_backward(ranks: RankPool, swap_path: Path, stage: int) -> None:
    """A bucket's memory is used again once it is reduced, so the third bucket waits for the first."""
    config = small_config(str(swap_path), stage, "none", zero={"reduce_bucket_size": 4096, "overlap_comm": True})
    for found in ranks.run(watch_backward, 2, config):
        assert found["count"] >= 12
        assert found["first_end"] < found["first_layer"]


class Partly(nn.Linear):
    """A layer with a parameter that has no gradient: its unit is complete once backward is through the layer."""

    def __init__(self) -> None:
        super().__init__(128, 128, bias=False)
        self.rest = nn.Parameter(torch.zeros(128))


def keep_losses(path: str) -> dict[str, float]:
    """Two micro-batches, with both losses kept. When the first reduction ended, and when the last backward came to the
    first layer."""
    zero = {"overlap_comm": True, "reduce_bucket_size": 4096}
    config = small_config(path, 1, "none", zero=zero, gradient_accumulation_steps=2)
    config["tiered_zero"]["unit_size_cap"] = 129 * 128 * 4
    engine, *_ = tiered_zero.initialize(model=nn.Sequential(*(Partly() for _ in range(6))), config=config)
    recorder(engine).keep_spans = True
    times: dict[str, float] = {}
    engine.module[0].weight.register_hook(lambda grad: times.update(first_layer=time.perf_counter()))
    losses = []
    for _ in range(2):
        losses.append(engine(torch.ones(2, 128)).square().mean())
        engine.backward(losses[-1])
        engine.step()
    spans = [span for span in recorder(engine).take_spans() if span.lane == "reduce_scatter"]
    engine.close()
    return {**times, "first_end": min(span.end_s for span in spans), "count": len(spans)}


def test_losses_that_are_kept_delay_no_reduction(ranks: RankPool, swap_path: Path) -> None:
    """Graphs of earlier micro-batches, whose gradients have come, are still there."""
    for found in ranks.run(keep_losses, 2, str(swap_path)):
        assert found["count"] >= 12
        assert found["first_end"] < found["first_layer"]


class Factors(nn.Module):
    """x * first * second, `first` where it is used: its gradient comes after that of `second`."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.full((4,), 2.0))
        self.second = nn.Parameter(torch.full((4,), 1.0))

    def forward(self, x: Tensor, uses_first: bool) -> Tensor:
        return (x * self.first if uses_first else x * 1.0) * self.second


def make_engine(path: str, stage: int, overlap: bool | None, **more: Any) -> tiered_zero.Engine:
    config = small_config(path, stage, "none", zero={"overlap_comm": overlap}, **more)
    del config["optimizer"]
    model = Factors()
    return tiered_zero.initialize(
        model=model, optimizer=torch.optim.SGD(model.parameters(), lr=2.0**-4), config=config
    )[0]


def step_oddly(path: str, stage: int, overlap: bool | None, precision: str) -> dict[str, Any]:
    """Small whole numbers, whose sums have no rounding in any order: a parameter whose gradient comes after the bucket
    of its unit has left, on one rank; two backwards before a step; gradients that are dropped before another
    backward."""
    rank = int(os.environ["RANK"])
    engine = make_engine(path, stage, overlap, bf16={"enabled": precision == "bf16"})
    rows = torch.tensor([[1.0, 2.0, 3.0, 4.0], [3.0, 0.0, -1.0, 8.0]])[rank].to(next(engine.module.parameters()).dtype)
    found: list[list[float]] = []

    def backward(scale: int, uses_first: bool) -> None:
        engine.backward(engine(rows * scale, uses_first).sum())

    for step in range(4):
        before = engine.rank_report()["reduced_nbytes"]
        backward(1, uses_first=step > 0 and rank == 1)
        assert (engine.rank_report()["reduced_nbytes"] > before) == (overlap is True), "reduced in backward"
        if step == 2:
            backward(2, uses_first=True)
        if step == 3:
            engine.zero_grad(set_to_none=rank == 0)
            backward(4, uses_first=True)
        engine.step()
        found.append([value for each in engine.module.state_dict().values() for value in each.tolist()])
    engine.close()
    return {"weights": found}


@pytest.mark.parametrize(("stage", "precision"), [(0, "fp32"), (1, "fp32"), (1, "bf16")])
def test_what_comes_after_a_bucket_is_added(ranks: RankPool, swap_path: Path, stage: int, precision: str) -> None:
    found, plain = (ranks.run(step_oddly, 2, str(swap_path), stage, how, precision) for how in (True, None))
    assert found[0] == found[1] == plain[0]


class Factored(nn.Module):
    """A unit of two buckets. Where `early` is used before the call too, its gradient is complete after the mark of the
    call, behind which the buckets leave."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Parameter(torch.randn(64, 320) / 8)
        self.early = nn.Parameter(torch.randn(64, 64) / 8)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.early) @ self.wide


class UsedBeforeItsCall(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(64, 128, bias=False)
        self.last = Factored()

    def forward(self, x: Tensor, is_early: bool) -> Tensor:
        x = self.first(x)[:, :64]
        if is_early:
            x = x + x @ self.last.early
        return self.last(x)  # type: ignore[no-any-return]


def use_before_call(path: str, overlap: bool | None) -> dict[str, Tensor]:
    """In step 1 a gradient comes after the bucket that it belongs to, between two buckets of its unit."""
    rank = int(os.environ["RANK"])
    config = small_config(path, 1, "none", zero={"overlap_comm": overlap, "reduce_bucket_size": 16384})
    del config["optimizer"]
    config["tiered_zero"]["unit_size_cap"] = 64 * 64 * 4
    model = UsedBeforeItsCall()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    weights = {}
    for step in range(3):
        x = torch.randn(2, 64, generator=torch.Generator().manual_seed(10 * step + rank))
        engine.backward(engine(x, step == 1).square().mean() * 10)
        engine.step()
        weights |= {f"{step} {name}": value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return weights


def test_a_late_gradient_brings_no_gradient_of_an_earlier_step(ranks: RankPool, swap_path: Path) -> None:
    """Its parameter is present from then on, but what its flat holds is of the step before."""
    plain, found = (ranks.run(use_before_call, 2, str(swap_path), how) for how in (None, True))
    for weights in found:
        assert differences(weights, plain[0]) == []


def leave_ranks_out(path: str) -> str:
    engine = make_engine(path, 1, True)
    with pytest.raises(ModelError) as error, engine.no_sync():
        pass
    engine.close()
    return str(error.value)


def test_no_sync_leaves_overlap_comm_out(ranks: RankPool, swap_path: Path) -> None:
    for text in ranks.run(leave_ranks_out, 2, str(swap_path)):
        assert "overlap_comm left out" in text
