"""Lightning with TieredStrategy: the bits of its plain Trainer, with what accumulates, clips, validates and resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.conftest import copies
from tests.integrations.test_lightning import Rows
from tests.ranks.torchrun import run
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.models import two_layers
from tests.support.trainers import FAR, Record, assert_same_bits
from tiered_zero.errors import ConfigError, ModelError

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other


def make_module() -> Any:
    """A module as users write it; its own parameter is read outside of any layer's forward."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()
            self.scale = nn.Parameter(torch.full((4,), 1.5))
            self.seen: list[Tensor] = []

        def training_step(self, pair: tuple[Tensor, Tensor], _: int) -> Tensor:
            loss = 20 * F.mse_loss(self.net(pair[0]) * self.scale, pair[1])
            self.seen.append(loss.detach().clone())
            return loss

        def validation_step(self, pair: tuple[Tensor, Tensor], _: int) -> None:
            self.seen.append(F.mse_loss(self.net(pair[0]), pair[1]).detach().clone())

        test_step = validation_step

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def config_of(placement: tuple[str, str], swap_path: Path, **top: Any) -> dict[str, Any]:
    section = zero_section(*placement, swap_path, sub_group_size=2048)
    return {"zero_optimization": section, "tiered_zero": {"device": "cpu", **SMALL_DEVICE}, **top}


def fit(strategy: Any, saved: Path, resume: Path | None = None, steps: int = 6, **options: Any) -> Record:
    """Fit, save, test: losses, what the file has, weights."""
    import lightning

    lightning.seed_everything(0, verbose=False)
    module = make_module()
    chosen = {} if strategy is None else {"strategy": strategy}
    trainer = lightning.Trainer(
        max_steps=steps, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, accelerator="cpu", devices=1, **chosen, **options,
    )  # fmt: skip
    loader = torch.utils.data.DataLoader(Rows(), 4)
    trainer.fit(module, loader, torch.utils.data.DataLoader(Rows(), 8), ckpt_path=resume)
    trainer.save_checkpoint(saved)
    trainer.test(module, torch.utils.data.DataLoader(Rows(), 8), verbose=False)
    found = torch.load(saved, weights_only=False)  # written above
    state = found["optimizer_states"][0]["state"]
    values = [torch.as_tensor(value) for index in sorted(state) for _, value in sorted(state[index].items())]
    assert values
    record = Record([*module.seen, *found["state_dict"].values(), *values], copies(module.state_dict()))
    if strategy is not None:
        strategy.engine.close()
    return record


def strategy(*arguments: Any, **chosen: Any) -> Any:
    from tiered_zero.integrations.lightning import TieredStrategy

    return TieredStrategy(config_of(*arguments, **chosen))


COURSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {"accumulate_grad_batches": 2},
    "clipped": {"gradient_clip_val": 1.0},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated and clipped": {"accumulate_grad_batches": 2, "gradient_clip_val": 5.0},
    "validated": {"val_check_interval": 2},
    "in bf16": {"precision": "bf16-mixed"},
}


@pytest.mark.parametrize("placement", [("none", "none"), *FAR], ids="-".join)
@pytest.mark.parametrize("course", COURSES)
def test_it_trains_as_lightning_alone(course: str, placement: tuple[str, str], swap_path: Path, tmp_path: Path) -> None:
    expected = fit(None, tmp_path / "plain", **COURSES[course])
    assert_same_bits(expected, fit(strategy(placement, swap_path), tmp_path / "own", **COURSES[course]))
    assert not list(swap_path.iterdir())


@pytest.mark.parametrize("first", ["plain", "own"])
def test_a_file_of_either_is_resumed(first: str, swap_path: Path, tmp_path: Path) -> None:
    fit(None, tmp_path / "plain", steps=3)
    expected = fit(None, tmp_path / "plain-end", tmp_path / "plain")
    if first == "own":
        fit(strategy(("nvme", "nvme"), swap_path), tmp_path / "own", steps=3)
    found = fit(strategy(("nvme", "nvme"), swap_path), tmp_path / "end", tmp_path / first)
    assert_same_bits(expected, found)


def test_two_ranks_train_as_ddp(swap_path: Path, tmp_path: Path) -> None:
    """Without clipping, at stage 3 with everything on nvme: each rank's losses and weights."""
    records: list[list[dict[str, Any]]] = []
    for kind in ("ddp", "own"):
        (folder := tmp_path / kind).mkdir()
        run([str(Path(__file__).with_name("lightning_child.py")), kind, str(swap_path), str(folder)], folder)
        records.append([torch.load(folder / f"rank{rank}.pt") for rank in range(2)])
    for expected, found in zip(*records, strict=True):
        assert_same_bits(Record(**expected), Record(**found))


def test_what_would_divide_twice_is_refused(swap_path: Path) -> None:
    with pytest.raises(ConfigError, match="accumulate_grad_batches"):
        strategy(("none", "none"), swap_path, gradient_accumulation_steps=2, train_micro_batch_size_per_gpu=1)


def test_a_second_fit_is_refused(swap_path: Path, tmp_path: Path) -> None:
    import lightning

    own = strategy(("cpu", "cpu"), swap_path)
    trainer = lightning.Trainer(
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, accelerator="cpu",
        devices=1, strategy=own, default_root_dir=tmp_path,
    )  # fmt: skip
    module = make_module()
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), 4))
    with pytest.raises(ModelError, match="anew"):
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), 4))
    own.engine.close()
