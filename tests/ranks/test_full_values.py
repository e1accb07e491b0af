"""Masters and optimizer state that are sharded, read and set as a whole: the same on every rank, and at every stage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.pool import RankPool
from tests.ranks.saving import Place, build, train, weights_of
from tests.support.tags import equal_bits
from tiered_zero.errors import BudgetError, ModelError
from tiered_zero.update import optimizer_state


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
            patch.setattr(optimizer_state, "available_host_nbytes", lambda: 100)
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
