"""Programs of the tests of Trainer: trainer_child.py cpu|nvme|in-save SWAP OUTPUT trains and kills itself in step 5, or
in the save of step 6; under torchrun, trainer_child.py plain|zero|zero-nvme SWAP OUTPUT resumes after step 3 of six."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

from tests.clients.conftest import ADAMW, make_trainer, offloaded, seen
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer

SAVING = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine", "max_grad_norm": 0.5}


class KilledInSave(OffloadedOptimizer):
    """Ends the process in its second save, once the files are written."""

    num_saves = 0

    def save_state_dict(self, directory: Any) -> dict[str, Any]:
        saved = super().save_state_dict(directory)
        KilledInSave.num_saves += 1
        if KilledInSave.num_saves == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return saved


def be_killed(device: str, swap_path: Path, output: Path) -> None:
    from transformers import TrainerCallback

    from tiered_zero.integrations.trainer import SaveStateCallback

    class Kill(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 4 and device != "in-save":
                os.kill(os.getpid(), signal.SIGKILL)

    kind, values = offloaded("nvme" if device == "in-save" else device, swap_path)
    kind = KilledInSave if device == "in-save" else kind
    make_trainer(output, (kind, values), [SaveStateCallback(), Kill()], save_total_limit=1, **SAVING).train()


def of_ranks(kind: str, swap_path: Path, output: Path) -> None:
    from tiered_zero.integrations.trainer import SaveStateCallback

    own: dict[str, Any] = {"optimizer_class": torch.optim.AdamW, **ADAMW}
    chosen: dict[str, tuple[Any, dict[str, Any]]] = {
        "plain": (torch.optim.AdamW, ADAMW),
        "zero": (ZeroRedundancyOptimizer, own),
        "zero-nvme": (ZeroRedundancyOptimizer, {**own, "offload": {"device": "nvme", "nvme_path": str(swap_path)}}),
    }
    trainer: Any = None
    for resumed in (None, str(output / "own/checkpoint-3")):
        trainer = make_trainer(output / "own", chosen[kind], [SaveStateCallback()], **SAVING)
        trainer.train(resume_from_checkpoint=resumed)
    optimizer, own_rank = trainer.optimizer.optimizer, int(os.environ["RANK"])
    for rank in range(2):
        if kind != "plain":
            optimizer.consolidate_state_dict(to=rank)
        if rank == own_rank:
            torch.save(vars(seen(trainer, is_closed=False)), output / f"rank{rank}.pt")
    if kind != "plain":
        optimizer.close()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    (of_ranks if "RANK" in os.environ else be_killed)(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
