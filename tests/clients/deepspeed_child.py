"""Scripts of Trainer, Accelerate and TRL whose one further line is a DeepSpeed config, run with the `deepspeed`
distribution of tiered_zero on the path:

deepspeed_child.py COURSE SWAP OUT KIND...: a KIND is `plain`, or stage and device as `3-nvme`; what each has seen goes
to OUT/KIND-rankR.pt. OUT/pretrained has a model.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.clients.conftest import arguments
from tests.clients.test_one_line import make_tokenizer, texts
from tests.integrations.conftest import Sentences, copies, gpt2, token_ids
from tests.integrations.one_argument import adapted, stop_after
from tests.support.configs import SMALL_DEVICE
from tests.support.trainers import Record

CLIPPED = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}
KEYS = ("loss", "grad_norm", "learning_rate", "eval_loss", "rewards/margins", "reward", "entropy")


def config_of(kind: str, swap_path: Path) -> dict[str, Any]:
    """As a user of Trainer writes it."""
    stage, device = int(kind[0]), kind[2:]
    place = {"device": device, **({"nvme_path": str(swap_path)} if device == "nvme" else {})}
    zero: dict[str, Any] = {"stage": stage, "sub_group_size": 2048}
    if device != "none":
        zero["offload_optimizer"] = place
    if stage == 3:
        zero |= {"stage3_param_persistence_threshold": 0, "stage3_gather_16bit_weights_on_model_save": True}
        if device != "none":
            zero["offload_param"] = {**place, "max_in_cpu": 0}
    return {
        "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
        "zero_optimization": zero, "tiered_zero": {"device": "cpu", **SMALL_DEVICE},
    }  # fmt: skip


class Course:
    """One kind of a course: its config, or none, and what it has seen."""

    def __init__(self, kind: str, swap_path: Path, output: Path) -> None:
        self.kind, self.output, self.pretrained = kind, output / kind, str(output / "pretrained")
        self._config = None if kind == "plain" else config_of(kind, swap_path)
        self.seen: list[Any] = []

    @property
    def deepspeed(self) -> dict[str, Any]:
        return {} if self._config is None else {"deepspeed": self._config}

    def arguments(self, **chosen: Any) -> dict[str, Any]:
        return arguments(self.output, optim="adamw_torch", learning_rate=3e-3, **self.deepspeed, **chosen)

    def take(self, trainer: Any, model: Any = None) -> Record:
        """What was logged, the weights as they are saved, and those of the model."""
        self.seen += [row.get(key) for row in trainer.state.log_history for key in KEYS]
        trainer.save_model(str(saved := self.output / "saved"))
        engine = trainer.model_wrapped
        weights = copies((trainer.model if self._config is None else engine.module).state_dict())
        if trainer.is_world_process_zero():
            from safetensors.torch import load_file

            (file,) = saved.glob("*.safetensors")
            self.seen += [value for _, value in sorted(load_file(file).items())]
        if self._config is not None:
            engine.close()
        return Record(self.seen, weights)


def trainer_of(course: Course, model: Any = None, callbacks: Any = (), **chosen: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    given = TrainingArguments(**course.arguments(**chosen))
    return Trainer(
        model=gpt2() if model is None else model(),
        args=given,
        train_dataset=Sentences(),
        eval_dataset=Sentences(),
        callbacks=list(callbacks),
    )


def train(course: Course, **chosen: Any) -> Record:
    trainer = trainer_of(course, **chosen)
    trainer.train()
    return course.take(trainer)


def resume(course: Course) -> Record:
    """Three steps and a save; a second Trainer goes on from there to six."""
    saving = {"save_strategy": "steps", "save_steps": 3, **CLIPPED}
    first = trainer_of(course, callbacks=[stop_after(3)], **saving)
    first.train()
    course.take(first)
    second = trainer_of(course, **saving)
    second.train(resume_from_checkpoint=str(course.output / "checkpoint-3"))
    return course.take(second)


def best(course: Course) -> Record:
    """A rate that makes the loss worse again; of the checkpoints the last and the best are kept, the best is loaded."""
    trainer = trainer_of(
        course, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=1, save_total_limit=1,
        load_best_model_at_end=True, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.args.learning_rate = 1.0
    trainer.train()
    assert trainer.state.best_global_step < 6
    course.seen.append(trainer.state.best_global_step)
    if trainer.is_world_process_zero():  # which removes the others
        course.seen += sorted(path.name for path in course.output.glob("checkpoint-*"))
    return course.take(trainer)


def from_pretrained(course: Course) -> Any:
    """A Trainer whose model is read once its arguments are made, which is where stage 3 meets zero.Init."""
    from transformers import GPT2LMHeadModel

    return trainer_of(course, lambda: GPT2LMHeadModel.from_pretrained(course.pretrained), max_grad_norm=0.5)


def pretrained(course: Course) -> Record:
    """Train, evaluate, predict, generate."""
    trainer = from_pretrained(course)
    trainer.train()
    course.seen += [trainer.evaluate()["eval_loss"], torch.from_numpy(trainer.predict(Sentences()).predictions)]
    ids = token_ids(3)
    options = {"attention_mask": torch.ones_like(ids), "max_new_tokens": 4, "do_sample": False}
    course.seen.append(trainer.model.eval().generate(ids, **options))
    return course.take(trainer)


def untrained(course: Course) -> Record:
    """Evaluate and predict alone, which transformers allows at stage 3."""
    trainer = from_pretrained(course)
    course.seen += [trainer.evaluate()["eval_loss"], torch.from_numpy(trainer.predict(Sentences()).predictions)]
    return course.take(trainer)


def sft(course: Course) -> Record:
    import datasets
    import trl

    given = course.arguments(max_length=8, bf16=False, gradient_checkpointing=False, **CLIPPED)
    trainer = trl.SFTTrainer(
        gpt2(),
        args=trl.SFTConfig(**given),
        train_dataset=datasets.Dataset.from_dict({"text": texts()}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return course.take(trainer)


def dpo(course: Course) -> Record:
    import datasets
    import trl

    rows = {"prompt": texts(20), "chosen": texts(), "rejected": texts(50)}
    given = course.arguments(max_length=16, bf16=False, gradient_checkpointing=False, **CLIPPED)
    trainer = trl.DPOTrainer(
        gpt2(),
        ref_model=gpt2(),
        args=trl.DPOConfig(**given),
        train_dataset=datasets.Dataset.from_dict(rows),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return course.take(trainer)


def grpo(course: Course) -> Record:
    """Generation by the model in training; the reward counts even tokens."""
    import datasets
    import trl

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [float(sum(int(word) % 2 == 0 for word in text.split())) for text in completions]

    given = course.arguments(
        num_generations=2, max_completion_length=6, beta=0.1, bf16=False, gradient_checkpointing=False,
        model_init_kwargs={"dtype": "float32"}, **CLIPPED,
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        course.pretrained,
        reward_funcs=reward,
        args=trl.GRPOConfig(**given),
        train_dataset=datasets.Dataset.from_dict({"prompt": texts()}),
        processing_class=make_tokenizer(),
    )
    trainer.train()
    return course.take(trainer)


def plugin(course: Course) -> Record:
    """Accelerate's own loop: four steps, save and load of all state, one step more."""
    from accelerate import Accelerator
    from accelerate.utils import DeepSpeedPlugin

    chosen: dict[str, Any] = {"cpu": True}
    if course.deepspeed:
        values = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
        chosen = {"deepspeed_plugin": DeepSpeedPlugin(hf_ds_config={**course.deepspeed["deepspeed"], **values})}
    accelerator = Accelerator(gradient_accumulation_steps=2, **chosen)
    own = gpt2()
    model, optimizer = accelerator.prepare(own, torch.optim.AdamW(own.parameters(), lr=3e-3))
    for number in range(10):
        with accelerator.accumulate(model):
            loss = model(input_ids=token_ids(number), labels=token_ids(number)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        course.seen.append(loss.detach())
        if number == 7:
            accelerator.save_state(str(course.output), safe_serialization=False)
            accelerator.load_state(str(course.output))
    course.seen += [value.clone() for _, value in sorted(accelerator.get_state_dict(model).items())]
    record = Record(course.seen, copies(own.state_dict()))
    accelerator.free_memory()  # which closes an engine
    return record


COURSES: dict[str, Callable[[Course], Record]] = {
    "unclipped": lambda course: train(course, max_grad_norm=0.0),
    "one micro-batch": lambda course: train(course, max_grad_norm=0.5),
    "clipped": lambda course: train(course, **CLIPPED),
    "checkpointed": lambda course: train(course, gradient_checkpointing=True, **CLIPPED),
    "LoRA": lambda course: train(course, model=lambda: adapted(gpt2()), **CLIPPED),
    "resume": resume,
    "best": best,
    "pretrained": pretrained,
    "untrained": untrained,
    "plugin": plugin,
    "SFT": sft,
    "DPO": dpo,
    "GRPO": grpo,
}


def main(name: str, swap_path: str, output: str, *kinds: str) -> None:
    import transformers
    from accelerate.state import AcceleratorState

    transformers.logging.set_verbosity_error()
    for kind in kinds:
        AcceleratorState._reset_state(True)
        record = COURSES[name](Course(kind, Path(swap_path), Path(output)))
        torch.save(vars(record), Path(output) / f"{kind}-rank{os.environ.get('RANK', 0)}.pt")
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()  # whose threads may abort the end of the process


if __name__ == "__main__":
    main(*sys.argv[1:])
