"""Lightning's Trainer and Fabric drive an engine's optimizer, and one without an engine: the bits of plain PyTorch."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.integrations.conftest import LOOP, PLACES, Placement, copies, optimizer_for
from tests.support.forked import call_in_fork
from tests.support.models import rows, two_layers
from tests.support.trainers import Record, adamw, assert_same_bits, tiered
from tiered_zero.optim import OffloadedOptimizer

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other


class Rows(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor]:
        return rows(number)[0], rows(number + 100)[0, :4]


def lightning_module(placement: Placement, swap_path: Path, is_manual: bool) -> Any:
    """A LightningModule that builds its engine in `configure_optimizers`, as docs/migrating.md says."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = two_layers()
            self.automatic_optimization = not is_manual
            self.seen: list[Tensor] = []
            self.engine: Any = None

        def loss_of(self, pair: tuple[Tensor, Tensor]) -> Tensor:
            loss = 20 * F.mse_loss(self.net(pair[0]), pair[1])  # of which a clip to 5 takes something
            self.seen.append(loss.detach().clone())
            return loss

        def training_step(self, pair: tuple[Tensor, Tensor], _: int) -> Tensor | None:
            loss = self.loss_of(pair)
            if not is_manual:
                return loss
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def validation_step(self, pair: tuple[Tensor, Tensor], _: int) -> None:
            self.log("validation", self.loss_of(pair))

        def configure_optimizers(self) -> Any:
            if placement is None:
                optimizer = adamw(self)
            elif placement == LOOP:
                offload = {"device": "nvme", "nvme_path": str(swap_path)}
                optimizer = self.engine = OffloadedOptimizer(self.parameters(), torch.optim.AdamW, offload, lr=3e-3)
            else:
                self.engine = tiered(self, swap_path, placement, adamw, clipping=None)
                optimizer = self.engine.optimizer
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Module()


def fit(placement: Placement, swap_path: Path, saved: Path, is_manual: bool = False, **options: Any) -> Record:
    import lightning

    lightning.seed_everything(0, verbose=False)
    module = lightning_module(placement, swap_path, is_manual)
    trainer = lightning.Trainer(
        max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=1, **options,
    )  # fmt: skip
    try:
        loader = torch.utils.data.DataLoader(Rows(), 4)
        trainer.fit(module, loader, torch.utils.data.DataLoader(Rows(), 8))
        trainer.save_checkpoint(saved)
        found = torch.load(saved, weights_only=False)  # written above
        state = found["optimizer_states"][0]["state"]
        values = [torch.as_tensor(value) for index in sorted(state) for _, value in sorted(state[index].items())]
        seen = [*module.seen, *found["state_dict"].values(), *values]
        return Record(seen, copies(module.state_dict()))
    finally:
        if module.engine is not None:
            module.engine.close()


COURSES: dict[str, dict[str, Any]] = {
    "automatic": {},
    "clipped by norm 1": {"gradient_clip_val": 1.0},
    "clipped by norm 5": {"gradient_clip_val": 5.0},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulated": {"accumulate_grad_batches": 2},
    "manual": {"is_manual": True},
    "validated": {"val_check_interval": 2},
    "in bf16": {"precision": "bf16-mixed"},
    "with anomaly detection": {"detect_anomaly": True},
}


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
@pytest.mark.parametrize("course", COURSES)
def test_trainer(course, placement, swap_path, tmp_path):
    """Losses, weights, and what a checkpoint of Lightning's holds of both weights and optimizer state."""
    expected = fit(None, swap_path, tmp_path / "plain", **COURSES[course])
    assert_same_bits(expected, fit(placement, swap_path, tmp_path / "own", **COURSES[course]))


def with_fabric(
    placement: Placement, swap_path: Path, saved: Path, precision: str, clipping: float, is_separate: bool
) -> Record:
    """Four steps, save and load of model and optimizer, one step more."""
    import lightning

    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision=precision)  # type: ignore[arg-type]
    own, seen = two_layers(), []
    with optimizer_for(own, placement, swap_path) as given:
        setup: Callable[[nn.Module, Any], Any] = fabric.setup
        if is_separate:
            setup = lambda model, optimizer: (fabric.setup_module(model), fabric.setup_optimizers(optimizer))  # noqa: E731
        model, optimizer = setup(own, given)
        for number in range(5):
            optimizer.zero_grad()
            loss = F.mse_loss(model(rows(number)).float(), rows(number + 50)[:, :4])
            fabric.backward(loss)
            if clipping:
                seen.append(fabric.clip_gradients(model, optimizer, max_norm=clipping).clone())
            optimizer.step()
            seen.append(loss.detach())
            if number == 3:
                fabric.save(saved, {"model": model, "optimizer": optimizer})
                seen += copies(torch.load(saved, weights_only=False)["model"]).values()
                fabric.load(saved, {"model": model, "optimizer": optimizer})
        return Record(seen, copies(own.state_dict()))


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
@pytest.mark.parametrize(
    ("precision", "clipping", "is_separate"),
    [("32-true", 0.0, False), ("32-true", 0.0, True), ("32-true", 0.05, False), ("bf16-mixed", 0.0, False)],
)
def test_fabric(precision, clipping, is_separate, placement, swap_path, tmp_path):
    options = (precision, clipping, is_separate)
    expected = with_fabric(None, swap_path, tmp_path / "plain", *options)
    assert_same_bits(expected, with_fabric(placement, swap_path, tmp_path / "own", *options))


def end_by_sigterm(swap: str, placement: Placement) -> list[str]:
    """Fit as in a job of SLURM, get SIGTERM in the second step, and say what Lightning did."""
    import lightning
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    module, seen = lightning_module(placement, Path(swap), False), []

    class Watch(lightning.Callback):
        def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 1:
                seen.append(type(signal.getsignal(signal.SIGUSR1)).__name__)
                os.kill(os.getpid(), signal.SIGTERM)

        def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
            seen.append(type(exception).__name__)
            trainer.save_checkpoint(f"{swap}/saved.ckpt")

    os.environ |= {"SLURM_NTASKS": "1", "SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "job", "SLURM_PROCID": "0"}
    os.environ |= {"SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    trainer = lightning.Trainer(
        max_steps=6, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=1, plugins=[SLURMEnvironment()], callbacks=[Watch()],
    )  # fmt: skip
    try:
        trainer.fit(module, torch.utils.data.DataLoader(Rows(), 4))
    except BaseException as error:
        seen.append(f"raised {type(error).__name__}")
    return [
        *seen,
        *(["in time"] if trainer.global_step == 2 else []),
        *(each.name for each in Path(swap).glob("*.ckpt")),
    ]


@pytest.mark.parametrize("placement", [None, ("nvme", "nvme"), LOOP], ids=["plain", "engine", "loop"])
def test_sigterm_ends_gracefully_and_slurms_signal_is_free(placement, swap_path):
    """Lightning calls what it finds for SIGTERM, and sets its own handler of requeueing where there is none."""
    assert call_in_fork(end_by_sigterm, str(swap_path), placement) == [
        "_HandlersCompose", "SIGTERMException", "raised SIGTERMException", "in time", "saved.ckpt",
    ]  # fmt: skip
