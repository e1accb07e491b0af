"""Train the built-in small GPT on a text of your own, with a DataLoader, evaluation and a record of the run.

    python docs/examples/own_data.py [TEXT_FILE [SWAP_DIRECTORY]]

Without a file it trains on this one. The run's record becomes a page that says why a step takes as long as it does:

    tiered-zero report run.jsonl
"""

import sys
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

import tiered_zero
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

CONTEXT = 32


class ByteWindows(Dataset):
    """The text as windows of CONTEXT bytes and, as targets, the same windows one byte further on."""

    def __init__(self, text: bytes) -> None:
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()

    def __len__(self) -> int:
        return (len(self.text) - 1) // CONTEXT

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * CONTEXT
        window = self.text[start : start + CONTEXT + 1]
        return window[:-1], window[1:]


def config(swap_directory: str, record: str | None) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 8,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 3e-3, "betas": [0.9, 0.95]}},
        "zero_optimization": {
            "stage": 3,
            # Mixed placement: parameters in host memory, however small, masters and Adam state on NVMe.
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
            "offload_optimizer": {"device": "nvme", "nvme_path": swap_directory},
        },
        "dataloader_drop_last": True,
        "steps_per_print": 10,  # a line every 10 steps
        "tiered_zero": {"report": record, "device_memory_limit": "1GiB"},  # with it, a CPU pages as a GPU does
    }


def main(text_file: str = __file__, swap_directory: str = "swap", record: str | None = "run.jsonl") -> list[float]:
    """Train for three epochs; return the evaluation loss before the first and after each."""
    torch.manual_seed(0)
    data = ByteWindows(Path(text_file).read_bytes())
    split = max(1, len(data) // 8)
    training, evaluation = torch.utils.data.random_split(data, [len(data) - split, split])

    # training_data gives a DataLoader with the config's micro-batch size. A loader of your own works as well.
    engine, optimizer, loader, _ = tiered_zero.initialize(
        model=build_gpt(GPTConfig(layers=2, hidden=32, heads=2, vocab=256, context=CONTEXT)),
        training_data=training,
        config=config(swap_directory, record),
    )

    def evaluate() -> float:
        engine.eval()
        with torch.no_grad():
            losses = [engine(*(part[None].to(engine.device) for part in sample)).item() for sample in evaluation]
        engine.train()
        return sum(losses) / len(losses)

    with engine:
        results = [evaluate()]
        for epoch in range(3):
            for group in optimizer.param_groups:  # live, as in plain PyTorch
                group["lr"] = 3e-3 / (epoch + 1)
            for tokens, targets in loader:
                engine.backward(engine(tokens.to(engine.device), targets.to(engine.device)))
                engine.step()
            results.append(evaluate())
            print(f"epoch {epoch}: evaluation loss {results[-1]:.3f}, {engine.step_report}")
    return results


if __name__ == "__main__":
    main(*sys.argv[1:3])
