"""Masters and optimizer state that are sharded, read and set as a whole: the same on every rank, and at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tiered_zero
from tests.parity.test_optimizer_state import assert_same_state, assert_same_weights
from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, train, weights_of
from tests.ranks.training import rank_and_config
from tests.support.inspection.insides import state_view
from tests.support.tags import equal_bits
from tests.support.trainers import same_bits
from tiered_zero.errors import BudgetError, ModelError


def arrays_of(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{number}/{name}": value
        for number, values in state_dict["state"].items()
        for name, value in values.items()
        if isinstance(value, torch.Tensor)
    }


def read_and_set(place: Place, swap_path: str) -> dict[str, Any]:
    """What a run shows of itself after two steps; then it is changed, and goes on."""
    engine = build(place, swap_path)
    before = engine.optimizer.state_dict()["state"]
    train(engine, 0, 2)
    named = dict(engine.module.named_parameters())
    name = max((n for n, p in named.items() if p.requires_grad), key=lambda n: named[n].numel())
    param = named[name]
    frozen = next(n for n, p in named.items() if not p.requires_grad)
    state = engine.optimizer.state_dict()
    arrays = arrays_of(state)
    one = engine.optimizer.read_state(param)
    found: dict[str, Any] = {"before": len(before), "groups": state["param_groups"], "scalars": len(state["state"])}
    peeked = {kind: engine.peek(name, kind) for kind in ("master", "exp_avg")}
    assert engine.peek(frozen, "master") is None and engine.peek(frozen, "exp_avg") is None
    assert torch.equal(one["exp_avg"], peeked["exp_avg"])
    rank = engine.global_rank
    engine.poke(name, "master", peeked["master"] + 0.125 * (1 + rank))  # rank 0's counts
    engine.poke(name, "exp_avg", peeked["exp_avg"] + 0.5 * (1 + rank))
    changed = {f"changed {kind}": engine.peek(name, kind) for kind in ("master", "exp_avg")}
    for kind, by in (("master", 0.125), ("exp_avg", 0.5)):
        assert torch.equal(changed[f"changed {kind}"], peeked[kind] + by)
    texts = []
    for act in (lambda: engine.poke(name, "master", torch.ones(1)), lambda: engine.peek(name, "no such state")):
        with pytest.raises(ModelError) as raised:
            act()
        texts.append(str(raised.value))
    halved = engine.optimizer.state_dict()
    for values in halved["state"].values():
        values["exp_avg"] = values["exp_avg"] / 2
    engine.optimizer.load_state_dict(halved)
    again = arrays_of(engine.optimizer.state_dict())
    train(engine, 2, 4)
    found |= {"arrays": arrays, "again": again, **peeked, **changed, "weights": weights_of(engine), "texts": texts}
    engine.close()
    return found


FP32 = [Place(world=2, stage=stage, device=device) for stage, device in ((0, "cpu"), (1, "nvme"), (3, "nvme"))]
REMAINDER = [
    Place(
        world=2,
        stage=stage,
        device=device,
        config={"bf16": {"enabled": True}},
        runtime={"state_format": "bf16_remainder"},
    )
    for stage, device in ((0, "none"), (1, "none"), (3, "cpu"))
]


@pytest.mark.parametrize("places", [FP32, REMAINDER], ids=["fp32", "remainder"])
def test_sharded_values_are_those_of_a_whole_run(ranks: RankPool, swap_path: Path, places: list[Place]) -> None:
    first, *others = [ranks.run(read_and_set, place.world, place, str(swap_path)) for place in places]
    assert first[0]["before"] == 0 and first[0]["scalars"] > 10
    for found in [*first, *(each for other in others for each in other)]:
        for kind in ("arrays", "again", "weights"):
            assert equal_bits(found[kind], first[0][kind]), kind
        for kind in ("master", "exp_avg", "changed master", "changed exp_avg"):
            assert torch.equal(found[kind], first[0][kind])
        assert found["groups"] == first[0]["groups"]
        assert "Expected shape" in found["texts"][0] and "no such state" in found["texts"][1]


def fail_on_one_rank(place: Place, swap_path: str) -> list[str]:
    """Rank 1 has no memory left, then brings another state: both are raised on both ranks, which train on."""
    engine = build(place, swap_path)
    train(engine, 0, 1)
    good, texts = engine.optimizer.state_dict(), []
    with pytest.MonkeyPatch.context() as patch:
        if engine.global_rank == 1:
            patch.setattr(state_view, "available_host_nbytes", lambda: 100)
        with pytest.raises(BudgetError) as no_room:
            engine.optimizer.state_dict()
    texts.append(str(no_room.value))
    if engine.global_rank == 1:
        for values in good["state"].values():
            values["exp_avg"] = torch.zeros(1)
    with pytest.raises(ModelError) as unfit:
        engine.optimizer.load_state_dict(good)
    texts.append(str(unfit.value))
    train(engine, 1, 2)
    engine.close()
    return texts


def test_an_error_of_one_rank_is_raised_on_all(ranks: RankPool, swap_path: Path) -> None:
    first, second = ranks.run(fail_on_one_rank, 2, Place(world=2, stage=1), str(swap_path))
    assert first[0].startswith("Rank 1: The optimizer state was expected to fit into free host memory")
    assert second[0].startswith("The optimizer state was expected to fit")
    assert first[1] == f"Rank 1: {second[1]}"


class Counted(Optimizer):
    """A user's own: each parameter's state is two numbers, a count of signs and a step, all of their own shapes."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in (param for param in group["params"] if param.grad is not None):
                state = self.state[param]
                if not state:
                    state.update(seen=torch.zeros(2), signs=torch.zeros(1, 3, dtype=torch.int64), step=0)
                state["step"] += 1
                state["seen"] += torch.stack([param.grad.sum().abs(), param.grad.abs().max()])
                state["signs"] += torch.stack([(param.grad.sign() == sign).sum() for sign in (-1, 0, 1)])
                param.sub_(param.grad * group["lr"] / (1 + state["seen"][1] * state["signs"].sum()))


class ScaledNet(nn.Module):
    """Matrices, a vector, and a parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 24), nn.Linear(24, 5, bias=False)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (self.second(self.first(rows).tanh()) * self.scale).square().mean()


def make_whole_rule(name: str, model: nn.Module) -> Optimizer:
    if name == "Muon":
        return torch.optim.Muon([param for param in model.parameters() if param.dim() == 2], lr=0.05)
    if name == "AdamW-fused":
        return torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)
    return {"Adafactor": torch.optim.Adafactor, "Counted": Counted}[name](model.parameters(), lr=0.05)


def follow_whole_rule(name: str, swap_path: str, **zero: Any) -> None:
    """An engine and plain torch on the same batches: every tensor of state is read, set, loaded, and gone on from."""
    plain, model = ScaledNet(), ScaledNet()
    rank, config = rank_and_config(swap_path, **zero)
    reference = make_whole_rule(name, plain)
    optimizer = make_whole_rule(name, model)
    engine, optimizer, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)

    def step_both(number: int) -> None:
        rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(number))
        engine.backward(engine(rows))
        engine.step()
        reference.zero_grad()
        plain(rows).backward()
        reference.step()
        assert_same_weights(plain, engine.module)

    step_both(0)
    step_both(1)
    before = optimizer.state_dict()
    assert_same_state(reference.state_dict(), before)
    for weight, param in plain.named_parameters():
        for key, value in reference.state.get(param, {}).items():
            if not isinstance(value, torch.Tensor):
                continue
            found = engine.peek(weight, key)
            assert found is not None and same_bits(found, value), (weight, key)
            if key != "step":
                reference.state[param][key] = value + 2
                engine.poke(weight, key, value + 2 + rank)  # rank 0's counts
                with pytest.raises(ModelError, match=rf"Expected shape .* that of {key} of {weight}; found \(7, 1\)"):
                    engine.poke(weight, key, torch.ones(7, 1))
    assert_same_state(reference.state_dict(), optimizer.state_dict())
    step_both(2)
    reference.load_state_dict(before)
    for values in reference.state.values():
        values.update({key: value.long() for key, value in values.items() if key == "signs"})  # torch makes it fp32
    optimizer.load_state_dict(before)
    step_both(3)
    assert_same_state(reference.state_dict(), optimizer.state_dict())
    engine.close()


@pytest.mark.parametrize(
    ("name", "world", "stage"),
    [
        *(("Adafactor", 1, 3), ("Adafactor", 2, 0), ("Counted", 2, 0), ("Counted", 2, 1)),
        *(("Muon", 2, 1), ("Muon", 2, 2), ("AdamW-fused", 2, 2), ("AdamW-fused", 1, 3)),
    ],
)
def test_state_has_its_own_shapes(ranks: RankPool, swap_path: Path, name: str, world: int, stage: int) -> None:
    """Of a rule that steps whole parameters: each is whole on one rank, and its state need not have its shape."""
    ranks.run(follow_whole_rule, world, name, str(swap_path), stage=stage)
