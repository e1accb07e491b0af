"""A checkpoint to resume that does not fit costs nothing: the model is as it was."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.support.models import rows
from tests.support.trainers import FAR, OptimizerMaker, adamw, tiered
from tiered_zero.errors import CorruptionError, ModelError, ParameterOffloadedError, StoreError, TieredZeroError

pytestmark = pytest.mark.usefixtures("one_thread")

PLACEMENTS = [("none", "none"), *FAR]


def build(width: int = 8) -> nn.Sequential:
    torch.manual_seed(width)
    return nn.Sequential(nn.Linear(8, width), nn.BatchNorm1d(width), nn.Linear(width, 4))


def in_groups(model: nn.Module) -> Optimizer:
    first, *others = model.parameters()
    return torch.optim.AdamW([{"params": [first], "lr": 0.1}, {"params": others}], lr=3e-3)


def step_plain(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    model(rows()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    return [value.clone() for value in model.state_dict().values()]


def save(swap_path: Path, save_dir: Path, placement: tuple[str, str] = ("cpu", "cpu"), **checkpoint: Any) -> None:
    with tiered(build(), swap_path, placement, runtime={"checkpoint": checkpoint}) as engine:
        engine.backward(engine(rows()).square().mean())
        engine.step()
        engine.save_checkpoint(save_dir)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def nothing(_: Path) -> None: ...


REFUSED: dict[str, tuple[int, OptimizerMaker, Callable[[Path], None], type[TieredZeroError]]] = {
    "another model": (16, adamw, nothing, ModelError),
    "other groups": (8, in_groups, nothing, ModelError),
    "another optimizer": (8, lambda model: torch.optim.SGD(model.parameters(), 0.1, 0.9), nothing, ModelError),
    "a changed manifest": (8, adamw, lambda path: flip(path / "global_step1" / "manifest.json", 300), StoreError),
}


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize("case", REFUSED)
def test_a_checkpoint_that_does_not_fit_leaves_the_model(
    case: str, placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    width, make_optimizer, change, error = REFUSED[case]
    save(swap_path, tmp_path)
    change(tmp_path)
    plain, model = build(width), build(width)
    plain_optimizer, optimizer = make_optimizer(plain), make_optimizer(model)
    step_plain(plain, plain_optimizer)
    before = step_plain(model, optimizer)
    runtime = {"checkpoint": {"resume": str(tmp_path)}}
    with pytest.raises(error) as raised:
        tiered(model, swap_path, placement, lambda _: optimizer, runtime=runtime)
    assert not hasattr(raised.value, "__notes__")
    assert all(map(torch.equal, before, model.state_dict().values()))
    assert all(map(torch.equal, step_plain(plain, plain_optimizer), step_plain(model, optimizer)))
    assert not any(swap_path.iterdir())


def test_a_commit_that_is_not_adopted_leaves_the_model(swap_path: Path, tmp_path: Path) -> None:
    """Of a run with another schedule, in the same layout."""
    place = ("nvme", "nvme")
    model = build()
    before = [value.clone() for value in model.state_dict().values()]

    def start(model: nn.Module, gamma: float | None, **checkpoint: Any) -> Any:
        schedule = None if gamma is None else lambda handle: torch.optim.lr_scheduler.ExponentialLR(handle, gamma)
        runtime = {"checkpoint": {"in_place": True, **checkpoint}}
        return tiered(model, swap_path, place, make_scheduler=schedule, runtime=runtime)

    with start(build(), None) as engine:
        engine.backward(engine(rows()).square().mean())
        engine.step()
        engine.save_checkpoint(tmp_path)
    with pytest.raises(ModelError, match="lr_scheduler"):
        start(model, 0.5, resume=str(tmp_path))
    assert all(map(torch.equal, before, model.state_dict().values()))
    start(model, None, resume=str(tmp_path)).close()


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
def test_corrupt_bytes_say_that_the_model_is_to_be_built_anew(
    placement: tuple[str, str], swap_path: Path, tmp_path: Path
) -> None:
    """They are found while they are loaded, so that some values are the checkpoint's by then."""
    save(swap_path, tmp_path)
    (data,) = (tmp_path / "global_step1").glob("*.bin")
    flip(data, data.stat().st_size // 2)
    model = build()
    with pytest.raises(CorruptionError) as raised:
        tiered(model, swap_path, placement, runtime={"checkpoint": {"resume": str(tmp_path)}})
    if sys.version_info >= (3, 11):
        assert "build the model anew" in raised.value.__notes__[-1]
    if placement != ("none", "none"):
        with pytest.raises(ParameterOffloadedError, match="build the model anew"):
            model.state_dict()
