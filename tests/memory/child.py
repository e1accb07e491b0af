"""Run as a program by the tests beside it: one training in a process of its own, and what it saw as one line of JSON.

python -m tests.memory.child depth SWAP LAYERS
python -m tests.memory.child interrupt SWAP
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch

import tiered_zero
from tests.support.configs import zero_section
from tests.support.models import ParityGPT, batch
from tests.support.trainers import tiered, train
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

HIDDEN = 512


def resident_nbytes(peak: bool = False) -> int:
    """VmRSS, or VmHWM: the most that it has been."""
    wanted = "VmHWM:" if peak else "VmRSS:"
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(wanted))


def make_engine(swap: str, layers: int) -> tiered_zero.Engine:
    """A GPT built on the meta device, in bf16, everything on NVMe."""
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "bf16": {"enabled": True},
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},
        "zero_optimization": zero_section("nvme", "nvme", swap, sub_group_size=400_000),
        "tiered_zero": {"device": "cpu", "io_uring": False},  # a ring pins what is staged: at every depth, or at none
    }
    model = build_gpt(GPTConfig(layers=layers, hidden=HIDDEN, vocab=256, context=32))
    return tiered_zero.initialize(model=model, config=config)[0]


def take_step(engine: tiered_zero.Engine) -> None:
    tokens = torch.randint(256, (1, 16))
    engine.backward(engine(tokens, tokens))
    engine.step()
    engine.flush()


def depth(swap: str, layers: str) -> dict[str, Any]:
    """Peak of the resident set over birth and three steps, beside what gradients take of it by plan."""
    before = resident_nbytes()
    with make_engine(swap, int(layers)) as engine:
        for _ in range(3):
            take_step(engine)
        engine.flush()
        return {
            "before": before,
            "peak": resident_nbytes(peak=True),
            "gradients": engine.plan.nbytes("host", "gradient"),
            "host": engine.plan.nbytes("host"),
            "ledger": sum(kind["peak"] for kind in engine.memory_report()["host"].values()),
            "device": sum(kind["peak"] for kind in engine.memory_report()["device"].values()),
            "nvme": engine.plan.nbytes("nvme"),
        }


def interrupt(swap: str) -> dict[str, Any]:
    """Trains until it is interrupted, and does not close: what leaves with the process is the process's affair."""
    engine = tiered(ParityGPT(), Path(swap))
    train(engine, batch, 1)
    print(json.dumps({"runs": len(list(Path(swap).iterdir()))}), flush=True)
    while True:
        train(engine, batch, 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    print(json.dumps({"depth": depth, "interrupt": interrupt}[what](*arguments)), flush=True)
