"""Scripts of Trainer, TRL and Accelerate that differ from their plain form by one argument: the same bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.clients.conftest import ADAMW, arguments, make_trainer, offloaded, seen
from tests.integrations.conftest import VOCAB, copies, gpt2, token_ids
from tests.support.trainers import Record, assert_same_bits
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other

OPTIONS = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5, "lr_scheduler_type": "cosine"}


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {str(number): number for number in range(VOCAB)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="0", eos_token="0", unk_token="0")


def texts(first: int = 0) -> list[str]:
    return [" ".join(map(str, token_ids(first + number)[0].tolist())) for number in range(12)]


def with_trainer(optimizer: Any, output: Path) -> Any:
    return make_trainer(output, optimizer, [], **OPTIONS)


def with_sft(optimizer: Any, output: Path) -> Any:
    import datasets
    import trl

    return trl.SFTTrainer(
        gpt2(),
        args=trl.SFTConfig(**arguments(output, max_length=8, bf16=False, gradient_checkpointing=False, **OPTIONS)),
        train_dataset=datasets.Dataset.from_dict({"text": texts()}),
        processing_class=make_tokenizer(),
        optimizer_cls_and_kwargs=optimizer,
    )


def with_reward(optimizer: Any, output: Path) -> Any:
    import datasets
    import trl
    from transformers import GPT2Config, GPT2ForSequenceClassification

    torch.manual_seed(0)
    model = GPT2ForSequenceClassification(
        GPT2Config(
            vocab_size=VOCAB, n_embd=16, n_layer=2, n_head=2, n_positions=32, num_labels=1, pad_token_id=0,
            resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    return trl.RewardTrainer(
        model,
        args=trl.RewardConfig(**arguments(output, max_length=16, bf16=False, gradient_checkpointing=False, **OPTIONS)),
        train_dataset=datasets.Dataset.from_dict({"chosen": texts(), "rejected": texts(50)}),
        processing_class=make_tokenizer(),
        optimizer_cls_and_kwargs=optimizer,
    )


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("make", [with_trainer, with_sft, with_reward], ids=lambda make: make.__name__)
def test_a_trainer_with_one_argument(
    make: Callable[[Any, Path], Any], device: str, swap_path: Path, tmp_path: Path
) -> None:
    records = []
    for place in (None, device):
        trainer = make(offloaded(place, swap_path), tmp_path / str(place))
        trainer.train()
        assert isinstance(trainer.optimizer.optimizer, OffloadedOptimizer) == (place is not None)
        records.append(seen(trainer))
    assert_same_bits(*records)
    assert not list(swap_path.iterdir())


def accelerated(kind: str, swap_path: Path, folder: Path) -> Record:
    """Four steps, save and load of all state, one step more."""
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    own, values = gpt2(), []
    offload = {"device": "nvme", "nvme_path": str(swap_path)}
    given: dict[str, Callable[[], Any]] = {
        "plain": lambda: torch.optim.AdamW(own.parameters(), **ADAMW),
        "offloaded": lambda: OffloadedOptimizer(own.parameters(), torch.optim.AdamW, offload, **ADAMW),
        "zero": lambda: ZeroRedundancyOptimizer(own.parameters(), torch.optim.AdamW, **ADAMW),
        "zero-nvme": lambda: ZeroRedundancyOptimizer(own.parameters(), torch.optim.AdamW, offload=offload, **ADAMW),
    }
    model, optimizer = accelerator.prepare(own, given[kind]())
    for number in range(10):
        with accelerator.accumulate(model):
            loss: Tensor = model(input_ids=token_ids(number), labels=token_ids(number)).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                values.append(torch.as_tensor(accelerator.clip_grad_norm_(model.parameters(), 0.5)).clone())
            optimizer.step()
            optimizer.zero_grad()
            values.append(loss.detach())
        if number == 7:
            accelerator.save_state(str(folder), safe_serialization=False)
            accelerator.load_state(str(folder))
    weights = copies(own.state_dict())
    getattr(optimizer.optimizer, "close", lambda: None)()
    accelerator.free_memory()
    return Record(values, weights)


@pytest.mark.parametrize("kind", ["offloaded", "zero", "zero-nvme"])
def test_accelerate_with_another_optimizer(kind: str, swap_path: Path, tmp_path: Path) -> None:
    expected = accelerated("plain", swap_path, tmp_path / "plain")
    assert_same_bits(expected, accelerated(kind, swap_path, tmp_path / kind))
    assert not list(swap_path.iterdir())


def test_the_log_has_bytes_by_tier_links_and_wear(swap_path: Path, tmp_path: Path) -> None:
    from transformers import TrainerCallback

    from tiered_zero.integrations.trainer import ReportCallback

    class Behind(TrainerCallback):
        """As a logger that is passed behind it."""

        rows: list[dict[str, float]] = []  # noqa: RUF012

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            self.rows.append(dict(logs))

    callbacks = [ReportCallback(rated="1TB"), Behind()]
    trainer = make_trainer(tmp_path, offloaded("nvme", swap_path), callbacks)
    trainer.train()
    trainer.optimizer.optimizer.close()
    *rows, last = trainer.state.log_history
    written = [row["tiered_zero/written_gb"] for row in rows]
    assert len(rows) == 6 and 0 < written[0] < written[-1]
    assert all(row["tiered_zero/wear"] == pytest.approx(row["tiered_zero/written_gb"] / 1000) for row in rows)
    assert all(row["tiered_zero/nvme_gib"] > 0 and 0 < row["tiered_zero/busy/disk write"] <= 1 for row in rows)
    assert "tiered_zero/wear" not in last
    assert [row.get("tiered_zero/written_gb") for row in Behind.rows] == [*written, None]
