"""The Trainer of Transformers and an Accelerator drive an optimizer, of an engine or without one: the bits of plain
PyTorch under them."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

import tiered_zero
from tests.integrations.conftest import LOOP, PLACES, Placement, Sentences, copies, gpt2, optimizer_for, token_ids
from tests.support.inspection.insides import list_tags
from tests.support.trainers import Record, adamw, assert_same_bits, tiered

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other


def with_trainer(
    placement: Placement, swap_path: Path, output: Path, resumes: bool = False, **arguments: Any
) -> Record:
    """Four steps; `resumes`: the last two in another Trainer, from what the first has saved after two."""
    from transformers import Trainer, TrainingArguments

    saving = {"save_strategy": "steps", "save_steps": 2} if resumes else {"save_strategy": "no"}
    seen: list[Any] = []
    for last in (2, 4) if resumes else (4,):
        model = gpt2()
        with optimizer_for(model, placement, swap_path) as optimizer:
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
            trainer = Trainer(
                model=model,
                args=TrainingArguments(
                    output_dir=str(output), per_device_train_batch_size=2, max_steps=last, logging_steps=1,
                    report_to=[], use_cpu=True, disable_tqdm=True, seed=1, **saving, **arguments,
                ),
                train_dataset=Sentences(),
                optimizers=(optimizer, scheduler),
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=str(output / "checkpoint-2") if resumes and last == 4 else None)
            seen += [
                row.get(key) for row in trainer.state.log_history for key in ("loss", "grad_norm", "learning_rate")
            ]
            weights = copies(model.state_dict())
            state = optimizer.state_dict()["state"]
            seen += [value for index in sorted(state) for _, value in sorted(state[index].items())]
    return Record(seen, weights)


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0, 5.0])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_trainer(accumulation, max_grad_norm, placement, swap_path, tmp_path):
    """Losses, norms, learning rates, optimizer state, weights."""
    options = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": accumulation}
    expected = with_trainer(None, swap_path, tmp_path / "plain", **options)
    assert any(isinstance(value, float) and value > 0 for value in expected.seen)
    assert_same_bits(expected, with_trainer(placement, swap_path, tmp_path / "own", **options))


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
def test_trainer_that_resumes(placement, swap_path, tmp_path):
    expected = with_trainer(None, swap_path, tmp_path / "plain", resumes=True, max_grad_norm=1.0)
    found = with_trainer(placement, swap_path, tmp_path / "own", resumes=True, max_grad_norm=1.0)
    assert_same_bits(expected, found)


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
def test_trainer_with_gradient_checkpointing(placement, swap_path, tmp_path):
    options = {"max_grad_norm": 1.0, "gradient_checkpointing": True}
    expected = with_trainer(None, swap_path, tmp_path / "plain", **options)
    assert_same_bits(expected, with_trainer(placement, swap_path, tmp_path / "own", **options))


def with_rotation(engine: tiered_zero.Engine | None, model: nn.Module, optimizer: Optimizer, output: Path) -> Record:
    """Six steps at a rate that makes the loss worse; the last checkpoint and the best are kept, the best is loaded. The
    engine's own checkpoint is saved and copied in each of the Trainer's."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Save(TrainerCallback):
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if engine is not None:
                folder = output / f"checkpoint-{state.global_step}" / "engine"
                engine.save_checkpoint(folder)
                assert [info.complete for info in list_tags(folder)] == [True]
                shutil.copytree(folder, output / "copies" / str(state.global_step))

    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=str(output), per_device_train_batch_size=2, max_steps=6, report_to=[], use_cpu=True,
            disable_tqdm=True, seed=1, eval_strategy="steps", eval_steps=1, save_steps=1, save_total_limit=1,
            load_best_model_at_end=True,
        ),
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        optimizers=(optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 if step < 3 else 100)),
        callbacks=[Save()],
    )  # fmt: skip
    trainer.train()
    best = trainer.state.best_global_step
    assert best < 6
    seen = [*(row.get("eval_loss") for row in trainer.state.log_history), best]
    record = Record(seen, copies(model.state_dict()))
    if engine is not None:
        kept = [path.parent.parent.name for path in output.glob("checkpoint-*/engine/*") if path.is_dir()]
        assert sorted(kept) == sorted(path.name for path in output.glob("checkpoint-*")) == [f"checkpoint-{best}"]
        engine.load_checkpoint(output / "copies" / str(best))
        assert engine.global_steps == best
        assert all(map(torch.equal, record.weights.values(), copies(model.state_dict()).values()))
    return record


@pytest.mark.parametrize("placement", PLACES, ids="-".join)
def test_trainer_that_rotates_checkpoints_and_loads_the_best(placement, swap_path, tmp_path):
    plain, model = gpt2(), gpt2()
    expected = with_rotation(None, plain, adamw(plain), tmp_path / "plain")
    with tiered(model, swap_path, placement, adamw, clipping=None) as engine:
        assert_same_bits(expected, with_rotation(engine, model, engine.optimizer, tmp_path / "own"))


def with_accelerator(
    placement: Placement, swap_path: Path, folder: Path, precision: str, accumulation: int, clipping: float
) -> Record:
    """Four micro-batches, save and load of all state, one step more."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=accumulation)
    own, seen = gpt2(), []
    with optimizer_for(own, placement, swap_path) as given:
        schedule = torch.optim.lr_scheduler.StepLR(given, 1, 0.9)
        model, optimizer, scheduler = accelerator.prepare(own, given, schedule)
        for number in range(5):
            with accelerator.accumulate(model):
                loss = model(input_ids=token_ids(number), labels=token_ids(number)).loss
                accelerator.backward(loss)
                if clipping and accelerator.sync_gradients:
                    seen.append(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), clipping)).clone())
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
                seen += [loss.detach(), *scheduler.get_last_lr()]
            if number == 3:
                seen += copies(accelerator.get_state_dict(model)).values()
                assert accelerator.unwrap_model(model) is own
                accelerator.save_state(str(folder), safe_serialization=False)
                accelerator.load_state(str(folder))
        weights = copies(own.state_dict())
        accelerator.free_memory()
    return Record(seen, weights)


@pytest.mark.parametrize("placement", [*PLACES, LOOP], ids="-".join)
@pytest.mark.parametrize(
    ("precision", "accumulation", "clipping"),
    [("no", 1, 0.0), ("no", 1, 1.0), ("no", 2, 5.0), ("bf16", 1, 0.0), ("fp16", 1, 0.0)],
)
def test_accelerator(precision, accumulation, clipping, placement, swap_path, tmp_path):
    options = (precision, accumulation, clipping)
    expected = with_accelerator(None, swap_path, tmp_path / "plain", *options)
    assert_same_bits(expected, with_accelerator(placement, swap_path, tmp_path / "own", *options))
