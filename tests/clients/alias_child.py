"""Programs that import `deepspeed`, or not: alias_child.py trainer|resumed|accelerate|plain CONFIG OUTPUT. CONFIG: the
path of a DeepSpeed JSON, or "" for plain PyTorch. Losses, norms, state and weights go to OUTPUT/rankN.pt."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch

from tests.clients.conftest import ADAMW, make_trainer, seen
from tests.integrations.conftest import copies, gpt2, token_ids
from tests.support.trainers import Record

SAVING = {"save_strategy": "steps", "save_steps": 3, "lr_scheduler_type": "cosine"}


def with_trainer(config: str, output: Path, resumed: bool) -> Record:
    chosen = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "deepspeed": config or None, **SAVING}
    trainer = make_trainer(output / "own", (torch.optim.AdamW, ADAMW), [], **chosen)
    trainer.train(resume_from_checkpoint=str(output / "own/checkpoint-3") if resumed else None)
    check_engine(trainer.model_wrapped, config)
    return seen(trainer)


def with_accelerate(config: str, output: Path) -> Record:
    """Eight micro-batches, save and load of all state, four more."""
    from accelerate import Accelerator
    from accelerate.utils import InitProcessGroupKwargs

    clipping = float(os.environ.get("CLIPPING", "0"))
    group = (
        [InitProcessGroupKwargs(backend="gloo")] if config and "UNNAMED" not in os.environ else []
    )  # the CPU has no other
    num_steps = 1 if int(os.environ.get("WORLD_SIZE", "1")) > 1 else 2  # stage 3 adds up averages (docs/ranks.md)
    accelerator = Accelerator(cpu=not config, gradient_accumulation_steps=num_steps, kwargs_handlers=group)
    own, values = gpt2(), []
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), **ADAMW))
    check_engine(model, config)
    for number in range(12):
        tokens = token_ids(accelerator.num_processes * number + accelerator.process_index)
        with accelerator.accumulate(model):
            loss = model(input_ids=tokens, labels=tokens).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients and clipping:
                accelerator.clip_grad_norm_(model.parameters(), clipping)
            optimizer.step()
            optimizer.zero_grad()
        values.append(loss.detach())
        if number == 7:
            accelerator.save_state(str(output / "state"), safe_serialization=False)
            accelerator.wait_for_everyone()
            accelerator.load_state(str(output / "state"))
    weights = copies(own.state_dict())
    if config:
        model.close()
    return Record(values, weights)


def check_engine(model: Any, config: str) -> None:
    assert type(model).__module__.startswith("tiered_zero.") == ("deepspeed" in sys.modules) == bool(config)
    if config:
        assert model.memory_report()["nvme"]["param"]["now"] > 0


if __name__ == "__main__":
    kind, config, output = sys.argv[1], sys.argv[2], Path(sys.argv[3])
    found = (
        with_accelerate(config, output)
        if kind == "accelerate"
        else with_trainer(config, output, resumed=kind == "resumed")
    )
    torch.save(vars(found), output / f"rank{os.environ.get('RANK', 0)}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
