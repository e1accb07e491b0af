"""A course of Trainer, plain or with OffloadedOptimizer as its one more argument. As a program, under torchrun:

one_argument.py DEVICE|plain FULL|LoRA SWAP OUT
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.integrations.conftest import Sentences, copies, gpt2
from tests.support.trainers import Record
from tiered_zero.optim import OffloadedOptimizer

ADAMW = {"lr": 3e-3}
ALL: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}


def adapted(model: nn.Module) -> Any:
    import peft

    torch.manual_seed(1)
    return peft.get_peft_model(
        model, peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, init_lora_weights=False)
    )


def train(device: str | None, swap_path: Path, output: Path, *, is_adapted: bool = False, **arguments: Any) -> Record:
    """Six steps, with state on `device`, None: plain; in the second half a second Trainer resumes what the first has
    saved."""
    from transformers import Trainer, TrainingArguments

    chosen: tuple[Any, dict[str, Any]] = (torch.optim.AdamW, ADAMW)
    if device is not None:
        offload = {"device": device, "nvme_path": str(swap_path)}
        chosen = (OffloadedOptimizer, {"optimizer_class": torch.optim.AdamW, "offload": offload, **ADAMW})
    seen: list[Any] = []
    for stop in (3, 6):
        model = adapted(gpt2()) if is_adapted else gpt2()
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=str(output), per_device_train_batch_size=2, num_train_epochs=1, max_steps=6, logging_steps=1,
                save_steps=3, report_to=[], weight_decay=0.1, use_cpu=True, disable_tqdm=True, seed=1, **arguments,
            ),
            train_dataset=Sentences(),
            optimizer_cls_and_kwargs=chosen,
        )  # fmt: skip
        trainer.add_callback(stop_after(stop))
        trainer.train(resume_from_checkpoint=str(output / "checkpoint-3") if stop == 6 else None)
        seen += [row.get(key) for row in trainer.state.log_history for key in ("loss", "grad_norm", "learning_rate")]
        state = trainer.optimizer.state_dict()["state"]
        seen += [value for index in sorted(state) for _, value in sorted(state[index].items())]
        if device is not None:
            assert isinstance(trainer.optimizer.optimizer, OffloadedOptimizer)
            trainer.optimizer.optimizer.close()
    assert any(isinstance(value, float) and value > 0 for value in seen)
    return Record(seen, copies(model.state_dict()))


def stop_after(step: int) -> Any:
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


def main(device: str, kind: str, swap_path: str, folder: str) -> None:
    rank = int(os.environ["RANK"])
    output, place = Path(folder) / "output", None if device == "plain" else device
    record = train(place, Path(swap_path), output, is_adapted=kind == "LoRA", **ALL)
    torch.save(vars(record), Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()  # whose threads may abort the end of the process


if __name__ == "__main__":
    main(*sys.argv[1:])
