"""What the tests of training tools share: Trainer over a small GPT-2, plain or with its one argument.

The tools come with `pip install -c constraints.txt -e '.[test,integrations]'`. They are imported inside the tests,
which `pytest -m clients` chooses: where a tool is not installed, its tests fail.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.integrations.conftest import Sentences, copies, gpt2
from tests.support.trainers import Record

ADAMW = {"lr": 3e-3}


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    """End what Lightning leaves behind: a process group, and variables by which Accelerate takes it for one rank of
    several."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    os.environ.clear()
    os.environ.update(before)


def offloaded(device: str | None, swap_path: Path) -> tuple[Any, dict[str, Any]]:
    """The one argument: AdamW with its state on `device`; None: plain."""
    from tiered_zero.optim import OffloadedOptimizer

    if device is None:
        return torch.optim.AdamW, dict(ADAMW)
    offload = {"device": device, "nvme_path": str(swap_path)}
    return OffloadedOptimizer, {"optimizer_class": torch.optim.AdamW, "offload": offload, **ADAMW}


def arguments(output: Path, **chosen: Any) -> dict[str, Any]:
    """Of TrainingArguments, or of a class below it: six steps of two rows, each logged."""
    return {
        "output_dir": str(output), "per_device_train_batch_size": 2, "max_steps": 6, "logging_steps": 1, "seed": 1,
        "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True, **chosen,
    }  # fmt: skip


def make_trainer(output: Path, optimizer: tuple[Any, dict[str, Any]], callbacks: list[Any], **chosen: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    return Trainer(
        model=gpt2(),
        args=TrainingArguments(**arguments(output, **chosen)),
        train_dataset=Sentences(),
        optimizer_cls_and_kwargs=optimizer,
        callbacks=callbacks,
    )


def seen(trainer: Any, is_closed: bool = True) -> Record:
    """What a trained Trainer has logged, its optimizer state, and its weights. `is_closed`: its optimizer is, then."""
    rows = [row.get(key) for row in trainer.state.log_history for key in ("loss", "grad_norm", "learning_rate")]
    state = trainer.optimizer.state_dict()["state"]
    values = [value for index in sorted(state) for _, value in sorted(state[index].items())]
    record = Record([*rows, *values], copies(trainer.model.state_dict()))
    assert values
    if is_closed:
        getattr(trainer.optimizer.optimizer, "close", lambda: None)()
    return record
