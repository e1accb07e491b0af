"""Trainer with SaveStateCallback: state goes into files past host memory, and a killed run goes on with its bits."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.clients import trainer_child
from tests.clients.conftest import make_trainer, offloaded, seen
from tests.ranks.torchrun import run
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.errors import ModelError, StoreError

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

OPTIONS = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}


def callback(**chosen: Any) -> Any:
    from tiered_zero.integrations.trainer import SaveStateCallback

    return SaveStateCallback(**chosen)


def plain(folder: Path, **chosen: Any) -> Record:
    trainer = make_trainer(folder / "plain", offloaded(None, folder), [], **OPTIONS | chosen)
    trainer.train()
    return seen(trainer)


@pytest.mark.parametrize("device", ["cpu", "nvme", "in-save"])
def test_a_run_that_is_killed_goes_on_with_the_bits(device: str, swap_path: Path, tmp_path: Path) -> None:
    """kill -9 in step 5, or in the save of step 6, in another process; checkpoint-3 is read by a new one."""
    output = tmp_path / "own"
    command = [sys.executable, trainer_child.__file__, device, str(swap_path), str(output)]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    saved = output / "checkpoint-3"
    found = torch.load(saved / "optimizer.pt")
    assert found["state"] == {} and os.path.getsize(saved / "optimizer.pt") < 4096
    with pytest.raises(ValueError, match="param"):
        torch.optim.AdamW(make_trainer(output, offloaded(None, swap_path), []).model.parameters()).load_state_dict(
            found
        )
    assert (output / "checkpoint-6").exists() == (device == "in-save")
    place = "nvme" if device == "in-save" else device
    trainer = make_trainer(output, offloaded(place, swap_path), [callback()], **OPTIONS)
    trainer.train(resume_from_checkpoint=str(saved) if device == "in-save" else True)
    assert trainer.state.global_step == 6
    assert_same_bits(plain(tmp_path), seen(trainer))


def test_state_that_host_memory_has_no_room_for_is_saved(
    swap_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where state_dict() is refused for its size: the callback's save and resume never ask for the whole."""
    for name in ("first", "second"):
        trainer = make_trainer(tmp_path / "own", offloaded("nvme", swap_path), [callback()], **OPTIONS)
        with monkeypatch.context() as patch:
            patch.setattr(torch.optim.Optimizer, "state_dict", refuse_copy)
            trainer.train(resume_from_checkpoint=str(tmp_path / "own/checkpoint-3") if name == "second" else None)
        if name == "second":
            assert_same_bits(plain(tmp_path), seen(trainer))


def refuse_copy(optimizer: Any) -> Any:
    """The state dict of an optimizer without state, for which Accelerate asks as it wraps one."""
    assert not len(optimizer.state), "the whole state was asked for"
    return {"state": {}, "param_groups": pack(optimizer)}


def pack(optimizer: Any) -> list[dict[str, Any]]:
    ids = iter(range(10**6))
    return [{**group, "params": [next(ids) for _ in group["params"]]} for group in optimizer.param_groups]


def test_a_checkpoint_that_was_moved_is_named(swap_path: Path, tmp_path: Path) -> None:
    first = make_trainer(tmp_path / "own", offloaded("cpu", swap_path), [callback()], **OPTIONS)
    first.train()
    seen(first)
    shutil.move(tmp_path / "own", moved := tmp_path / "moved")
    path = str(moved / "checkpoint-3")
    trainer = make_trainer(tmp_path / "new", offloaded("cpu", swap_path), [callback()], **OPTIONS)
    with pytest.raises(StoreError, match=r"new/checkpoint-3/optimizer_state was expected"):
        trainer.train(resume_from_checkpoint=path)
    trainer = make_trainer(tmp_path / "new", offloaded("cpu", swap_path), [callback(resume_from=path)], **OPTIONS)
    trainer.train(resume_from_checkpoint=path)
    assert_same_bits(plain(tmp_path), seen(trainer))


def test_nothing_steps_from_a_state_that_was_not_read(swap_path: Path, tmp_path: Path) -> None:
    """Without the callback, and with the files of another save."""
    first = make_trainer(tmp_path / "own", offloaded("cpu", swap_path), [callback()], **OPTIONS)
    first.train()
    path = str(tmp_path / "own/checkpoint-3")
    without = make_trainer(tmp_path / "own", offloaded("cpu", swap_path), [], **OPTIONS)
    with pytest.raises(ModelError, match="load_state"):
        without.train(resume_from_checkpoint=path)
    shutil.rmtree(f"{path}/optimizer_state")
    shutil.copytree(tmp_path / "own/checkpoint-6/optimizer_state", f"{path}/optimizer_state")
    other = make_trainer(tmp_path / "own", offloaded("cpu", swap_path), [callback()], **OPTIONS)
    with pytest.raises(StoreError, match="saved with it"):
        other.train(resume_from_checkpoint=path)


@pytest.mark.parametrize("kind", ["zero", "zero-nvme"])
def test_two_ranks_save_and_resume_a_zero_redundancy_optimizer(kind: str, swap_path: Path, tmp_path: Path) -> None:
    """State in memory, and on nvme: the bits of DistributedDataParallel with plain AdamW."""
    records: list[list[dict[str, Any]]] = []
    for name in ("plain", kind):
        (folder := tmp_path / name).mkdir()
        run([trainer_child.__file__, name, str(swap_path), str(folder)], folder)
        records.append([torch.load(folder / f"rank{rank}.pt") for rank in range(2)])
    for expected, found in zip(*records, strict=True):
        assert_same_bits(Record(**expected), Record(**found))
