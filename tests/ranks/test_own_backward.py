"""`loss.backward()` past the engine, of ranks that use other parameters, and where it fails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.ranks.pool import RankPool
from tests.ranks.training import assert_all_ranks_agree, differences, make_optimizer, rank_and_config

LAZY = {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": 0, "reduce_bucket_size": 4096}
HIDDEN = 16


class Shifted(nn.Module):
    """x * weight + bias with a weight that is frozen: only the bias has a gradient, if it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4, requires_grad=False)
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x: Tensor, has_bias: bool) -> Tensor:
        return nn.functional.linear(x, self.weight, self.bias if has_bias else None)


class Tuned(nn.Module):
    """Layers behind which come some that are frozen but for a bias."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(num_layers))
        self.shifted = nn.ModuleList(Shifted() for _ in range(3))

    def forward(self, x: Tensor, has_bias: bool) -> Tensor:
        for layer in self.layers:
            x = layer(x).tanh()
        for layer in self.shifted:
            x = layer(x, has_bias)
        return x.square().mean()


def tune(how: str, num_layers: int = 3) -> dict[str, Any]:
    """Rank 1 uses no bias in the second step: its first gradient is that of a unit three gathers after that of rank
    0, and without layers it has none. `how`: backward is begun."""
    rank, config = rank_and_config("", stage=3, offload_optimizer={"device": "none"}, **LAZY)
    config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    model: Any = Tuned(num_layers)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    norms = []
    try:
        for step in range(3):
            rows = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank), requires_grad=True)
            loss = engine(rows, step != 1 or rank == 0)
            trained = [each for each in model.parameters() if each.requires_grad]
            if how == "grad first":
                before = engine.rank_report()["reduced_nbytes"]
                torch.autograd.grad(loss, [rows], retain_graph=True)
                torch.autograd.grad(loss, [rows, *trained], retain_graph=True, allow_unused=True)
                assert engine.rank_report()["reduced_nbytes"] == before
            if how == "engine":
                engine.backward(loss)
            else:
                loss.backward(inputs=[rows, *trained] if how == "inputs" else None)
            engine.step()
            norms.append(engine.get_global_grad_norm())
        weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
        return {"weights": weights, "norms": norms}
    finally:
        engine.close()


@pytest.mark.parametrize(("how", "num_layers"), [("own", 3), ("own", 0), ("inputs", 3), ("grad first", 3)])
def test_first_gradients_may_be_of_other_units_on_each_rank(ranks: RankPool, how: str, num_layers: int) -> None:
    found = ranks.run(tune, 2, how, num_layers)
    assert_all_ranks_agree(found)
    for each, expected in zip(found, ranks.run(tune, 2, "engine", num_layers), strict=True):
        assert each["norms"] == expected["norms"]
        assert differences(each["weights"], expected["weights"]) == []


class Scaled(nn.Module):
    """Autograd saves both weights themselves, not views of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(x) @ self.weight)


class Region(nn.Module):
    """Blocks that backward computes again together, each in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Linear(HIDDEN, HIDDEN)
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(nn.Sequential(*self.blocks), self.first(x), use_reentrant=True).square().mean()  # type: ignore[no-any-return]


def recompute(stage: int) -> dict[str, Any]:
    """Three steps by `loss.backward()`, with room for few units."""
    rank, config = rank_and_config("", stage=stage, offload_optimizer={"device": "none"})
    config["zero_optimization"]["stage3_max_live_parameters"] = 3 * HIDDEN**2
    model = Region()
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
    for step in range(3):
        engine(torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(10 * step + rank))).backward()
        engine.step()
    weights = {name: value.clone() for name, value in engine.module.state_dict().items()}
    engine.close()
    return {"weights": weights, "norms": []}


def test_what_a_reentrant_checkpoint_computes_again_may_be_evicted(ranks: RankPool) -> None:
    found = ranks.run(recompute, 2, 3)
    assert_all_ranks_agree(found)
    assert differences(found[0]["weights"], ranks.run(recompute, 2, 0)[0]["weights"]) == []


def wrap(stage: int, wraps_engine: bool) -> str:
    """Return the error of a loop that leaves DistributedDataParallel in."""
    _, config = rank_and_config("", stage=stage, offload_optimizer={"device": "none"})
    model: Any = Tuned(1)
    try:
        if not wraps_engine:
            tiered_zero.init_distributed()
            model = DistributedDataParallel(model)
        engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "sgd"), config=config)
        with engine:
            wrapped = DistributedDataParallel(engine.module)
            engine.backward(wrapped(torch.ones(5, HIDDEN), True))
            engine.step()
    except tiered_zero.errors.ModelError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_data_parallel_around_the_engine_is_refused(ranks: RankPool, stage: int) -> None:
    for error in ranks.run(wrap, 2, stage, True):
        assert "averages the gradients of all ranks: leave DistributedDataParallel out" in error


def test_a_model_inside_of_data_parallel_is_refused(ranks: RankPool) -> None:
    for error in ranks.run(wrap, 2, 1, False):
        assert "pass model.module. The engine averages the gradients of all ranks itself." in error
