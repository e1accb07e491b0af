"""Run as a program by the tests beside it: one training in a process of its own, and what it saw as one line of JSON.

python -m tests.memory.child depth SWAP LAYERS
python -m tests.memory.child activations SWAP LAYERS
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tiered_zero
from tests.support.configs import zero_section
from tests.support.trainers import tiered
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.plan.gpt_shape import GPTConfig

HIDDEN = 512
BOUNDARY = (1024, 1024)
"""Of the input of a checkpoint: 4 MiB of fp32."""


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
        "tiered_zero": {"device": "cpu"},
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


class Boundaries(nn.Module):
    """Checkpoints, one after another, of blocks that have hardly any weights."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(BOUNDARY[1], 1, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(lambda x, block=block: x + block(x).tanh(), x, use_reentrant=False)
        return x.mean()


def activations(swap: str, layers: str) -> dict[str, Any]:
    """The same of a chain whose inputs of checkpoints rest on NVMe: what it adds to the resident set, at its peak."""
    model, limit = Boundaries(int(layers)), 80 * 4 * BOUNDARY[0] * BOUNDARY[1]
    section = {"device": "nvme", "nvme_path": swap, "limit": limit}
    x = torch.randn(BOUNDARY, requires_grad=True)
    with tiered(model, Path(swap), ("none", "none"), runtime={"activations": section}) as engine:
        before = resident_nbytes()
        for _ in range(2):
            engine.backward(engine(x))
            engine.step()
        report = engine.step_report
        assert report is not None
        return {
            "added": resident_nbytes(peak=True) - before,
            "moved": report.activations["moved_nbytes"],
            "in_flight": engine.plan.nbytes("device", "activation_in_flight"),
            "staging": engine.plan.nbytes("host", "staging_activation"),
        }


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, *arguments = sys.argv[1:]
    print(json.dumps({"depth": depth, "activations": activations}[what](*arguments)), flush=True)
