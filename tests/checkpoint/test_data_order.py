"""A run that is resumed in the middle of an epoch sees the batches, and draws the numbers, of the undisturbed run."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import tiered_zero
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.trainers import same_bits
from tiered_zero.checkpoint.driver import LoadParts
from tiered_zero.data import TrainingLoader
from tiered_zero.deepspeed.utils import RepeatingLoader
from tiered_zero.errors import ModelError

EPOCHS = 3
LENGTH = 7
"""Samples: four batches of two, the last of them partial."""


class Samples(Dataset[Tensor]):
    """`noisy`: as with augmentation, each with draws from three generators."""

    def __init__(self, noisy: bool) -> None:
        self._noisy = noisy

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> Tensor:
        noise = random.random() + numpy.random.rand() + torch.rand(8) if self._noisy else 0.0
        return torch.full((8,), float(index + 1)) + noise


def model(seed: int) -> nn.Module:
    torch.manual_seed(seed), random.seed(seed), numpy.random.seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 8), nn.Dropout(0.2))


def start(swap: Path, tier: str, seed: int, data: Any, **checkpoint: Any) -> tuple[tiered_zero.Engine, TrainingLoader]:
    """`checkpoint`: the section of the config."""
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "optimizer": {"type": "AdamW", "params": {"lr": 0.01}},
        "zero_optimization": zero_section(tier, tier, swap),
        "tiered_zero": {**SMALL_DEVICE, "device": "cpu", "checkpoint": checkpoint},
    }
    engine, _, loader, _ = tiered_zero.initialize(model=model(seed), training_data=data, config=config)
    assert loader is not None
    return engine, loader


def train(trainer: Any, loader: Any, seen: list[Any], epoch: int = 0, stop: int | None = None) -> int | None:
    """The usual loop. Returns the epoch in which it has stopped."""
    while epoch < EPOCHS:
        for batch in loader:
            loss = trainer(batch).square().mean()
            trainer.backward(loss)
            trainer.step()
            seen.append((batch.clone(), loss.detach().clone()))
            if stop is not None and trainer.global_steps == stop:
                if isinstance(trainer, tiered_zero.Engine):
                    trainer.save_checkpoint(SAVE[0], client_state={"epoch": epoch})
                return epoch
        epoch += 1
    return None


SAVE: list[Path] = []


@pytest.fixture(autouse=True)
def _save_directory(tmp_path: Path) -> Iterator[None]:
    SAVE[:] = [tmp_path / "checkpoints"]
    yield
    SAVE.clear()


def ends_with(engine: tiered_zero.Engine) -> list[Any]:
    draws = [torch.rand(2), torch.tensor([random.random(), numpy.random.rand()])]
    return [*engine.module.state_dict().values(), *draws, torch.tensor(engine.global_steps)]


def assert_goes_on(swap: Path, tier: str, stop: int, make_data: Callable[[], Any]) -> None:
    whole: list[Any] = []
    engine, loader = start(swap, tier, 1, make_data())
    with engine:
        assert train(engine, loader, whole) is None
        expected = ends_with(engine)
    first: list[Any] = []
    engine, loader = start(swap, tier, 1, make_data())
    with engine:
        train(engine, loader, first, stop=stop)
    rest: list[Any] = []
    engine, loader = start(swap, tier, 2, make_data())
    with engine:
        _, client_state = engine.load_checkpoint(SAVE[0])
        train(engine, loader, rest, client_state["epoch"])
        found = ends_with(engine)
    seen = [*first, *rest]
    assert len(whole) == len(seen)
    for (batch, loss), (other_batch, other_loss) in zip(whole, seen, strict=True):
        assert same_bits(batch, other_batch) and same_bits(loss, other_loss)
    assert all(map(same_bits, expected, found))


@pytest.mark.parametrize("stop", [1, 3, 4, 5, 8, 11])
def test_a_resumed_epoch_has_the_bits_of_the_undisturbed_one(stop: int, swap_path: Path) -> None:
    assert_goes_on(swap_path, "cpu", stop, lambda: Samples(noisy=True))


@pytest.mark.parametrize("stop", [2, 4, 7])
def test_from_nvme(stop: int, swap_path: Path) -> None:
    assert_goes_on(swap_path, "nvme", stop, lambda: Samples(noisy=True))


@pytest.mark.parametrize("stop", [1, 4, 6])
def test_with_workers_and_shuffled(stop: int, swap_path: Path) -> None:
    def loader() -> TrainingLoader:
        return TrainingLoader(Samples(noisy=False), 2, shuffle=True, seed=3, num_workers=2)

    assert_goes_on(swap_path, "cpu", stop, loader)


def test_the_numbers_are_those_of_plain_pytorch(swap_path: Path) -> None:
    plain, seen = model(1), []
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01, weight_decay=0.0)
    for _ in range(EPOCHS):
        for batch in DataLoader(Samples(noisy=True), batch_size=2):
            loss = plain(batch).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            seen.append((batch, loss.detach()))
    found: list[Any] = []
    engine, loader = start(swap_path, "cpu", 1, Samples(noisy=True))
    with engine:
        train(engine, loader, found)
    assert all(same_bits(x, y) and same_bits(m, n) for (x, m), (y, n) in zip(seen, found, strict=True))


@pytest.mark.parametrize("stop", [2, 4, 7])
def test_from_a_commit_in_place(stop: int, swap_path: Path) -> None:
    """The run begins by taking up the commit, loader and random numbers with it."""
    whole: list[Any] = []
    engine, loader = start(swap_path, "nvme", 1, Samples(noisy=True), in_place=True)
    with engine:
        assert engine.resumed is None
        train(engine, loader, whole)
        expected = ends_with(engine)
    seen: list[Any] = []
    engine, loader = start(swap_path, "nvme", 1, Samples(noisy=True), in_place=True)
    with engine:
        train(engine, loader, seen, stop=stop)
    engine, loader = start(swap_path, "nvme", 2, Samples(noisy=True), in_place=True, resume=str(SAVE[0]))
    with engine:
        assert engine.resumed is not None
        train(engine, loader, seen, engine.resumed[1]["epoch"])
        assert all(map(same_bits, expected, ends_with(engine)))
    assert all(same_bits(x, y) and same_bits(m, n) for (x, m), (y, n) in zip(whole, seen, strict=True))


def test_an_endless_loader_goes_on(swap_path: Path) -> None:
    seen = []
    engine, loader = start(swap_path, "cpu", 1, Samples(noisy=False))
    with engine:
        batches = RepeatingLoader(loader)
        for _ in range(4):  # the last batch, but not the end
            engine.backward(engine(next(batches)).mean())
            engine.step()
        engine.save_checkpoint(SAVE[0])
        seen = [next(batches) for _ in range(5)]
    engine, loader = start(swap_path, "cpu", 2, Samples(noisy=False))
    with engine:
        engine.load_checkpoint(SAVE[0])
        batches = RepeatingLoader(loader)
        assert all(map(same_bits, seen, [next(batches) for _ in range(5)]))


def test_module_only_leaves_the_data_where_it_is(swap_path: Path) -> None:
    engine, loader = start(swap_path, "cpu", 1, Samples(noisy=False))
    with engine:
        train(engine, loader, [], stop=2)
    engine, loader = start(swap_path, "cpu", 2, Samples(noisy=False))
    with engine:
        engine.load_checkpoint(SAVE[0], load_module_only=True)
        assert engine.global_steps == 0 and LoadParts(module_only=True).optimizer_states
        assert same_bits(next(iter(loader))[:, 0], torch.tensor([1.0, 2.0]))


def test_a_run_without_an_optimizer_loads_the_weights_of_one_with(
    swap_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine, loader = start(swap_path, "cpu", 1, Samples(noisy=False))
    with engine:
        train(engine, loader, [], stop=3)
        expected = engine.module.state_dict()
    config = {"train_micro_batch_size_per_gpu": 2, "tiered_zero": {"device": "cpu"}}
    evaluating = tiered_zero.initialize(model=model(2), config=config)[0]
    with evaluating:
        caplog.clear()
        evaluating.load_checkpoint(SAVE[0])
        assert not caplog.records and evaluating.global_steps == 3
        found = evaluating.module.state_dict()
        assert all(same_bits(value, found[name]) for name, value in expected.items())
        evaluating.save_checkpoint(SAVE[0], "evaluated")
    engine, _ = start(swap_path, "cpu", 2, Samples(noisy=False))
    with engine:
        with pytest.raises(ModelError, match="written by an engine that evaluates"):
            engine.load_checkpoint(SAVE[0], "evaluated")
        engine.load_checkpoint(SAVE[0], "evaluated", load_module_only=True)
        assert same_bits(engine.module.state_dict()["0.weight"], expected["0.weight"])
