"""Offloaded activations: the bits of plain PyTorch, whatever is recomputed, wherever they rest."""

from __future__ import annotations

import inspect
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import tiered_zero
from tests.support.models import HIDDEN, VOCAB, Block, batch
from tests.support.trainers import Plain, adamw, assert_same_bits, follow, tiered, train

MODES = ("no checkpoint", "reentrant", "non-reentrant", "selective")


class Blocks(nn.Module):
    """`mode`: how each block is recomputed. The head's weight is that of the embedding."""

    def __init__(self, mode: str, compiled: bool = False) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, HIDDEN)
        self.blocks = nn.ModuleList(Block(dropout=0.1) for _ in range(3))
        self._mode = mode
        if compiled:
            self.blocks[1].mlp.compile(backend="aot_eager")

    def _run(self, block: nn.Module, x: Tensor) -> Tensor:
        if self._mode == "no checkpoint":
            return block(x)  # type: ignore[no-any-return]
        if self._mode == "reentrant":
            return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]
        contexts: dict[str, Any] = {}
        if self._mode == "selective":
            kept = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
            contexts = {"context_fn": partial(create_selective_checkpoint_contexts, kept)}
        return checkpoint(block, x, use_reentrant=False, **contexts)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = self._run(block, x)
        logits = nn.functional.linear(x, self.tokens.weight)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def moved_to(device: str, path: Path, **more: Any) -> dict[str, Any]:
    """Keys of `tiered_zero`; with "cpu" the device lags, as one does that has memory of its own."""
    nvme = {"nvme_path": str(path)} if device == "nvme" else {}
    section = {"device": device, "limit": "4MiB", "min_nbytes": 64, **nvme, **more}
    lagging = {"debug_delay_seed": 7, "debug_poison": True} if device == "cpu" else {}
    return {"activations": section, **lagging}


def assert_moves_and_keeps_bits(
    mode: str, device: str, params: str, path: Path, *, compiled: bool = False, bf16: bool = False
) -> None:
    accumulation = 1 if bf16 else 2
    torch.manual_seed(0)
    plain = Plain(Blocks(mode, compiled), adamw, accumulation, 0.5, dtype=torch.bfloat16 if bf16 else None)
    expected = follow(partial(train, data=batch, steps=2, accumulation=accumulation), plain)
    found: list[dict[str, int]] = []

    def script(trainer: Any) -> list[Any]:
        seen = train(trainer, batch, 2, accumulation)
        found.append(trainer.step_report.activations)
        return seen

    torch.manual_seed(0)
    model, runtime = Blocks(mode, compiled), moved_to(device, path)
    top = {"bf16": {"enabled": True}} if bf16 else {}
    placement = (params, params)
    engine = tiered(model, path, placement, adamw, accumulation, 0.5, runtime=runtime, **top)
    assert_same_bits(expected, follow(script, engine))
    assert found[0]["num_moved"] >= 3 * accumulation, "each block's input has left the device"
    assert "num_kept" not in found[0]
    assert not any(path.iterdir())


@pytest.mark.parametrize("device", ["cpu", "nvme"])
@pytest.mark.parametrize("mode", MODES)
def test_dropout_and_accumulation_keep_their_bits(mode: str, device: str, swap_path: Path) -> None:
    """Every pair of mode, device and tier of parameters."""
    params = ("none", "nvme")[(MODES.index(mode) + (device == "cpu")) % 2]
    assert_moves_and_keeps_bits(mode, device, params, swap_path)


@pytest.mark.filterwarnings("ignore")  # of the compiler's own
def test_a_compiled_part_keeps_its_bits(swap_path: Path) -> None:
    assert_moves_and_keeps_bits("no checkpoint", "nvme", "none", swap_path, compiled=True)


@pytest.mark.parametrize(("mode", "device"), [("no checkpoint", "cpu"), ("reentrant", "nvme")])
def test_bf16_keeps_its_bits(mode: str, device: str, swap_path: Path) -> None:
    assert_moves_and_keeps_bits(mode, device, "nvme", swap_path, bf16=True)


class ChangesWhatIsKept(nn.Module):
    """A block under a selective checkpoint that keeps the first product, and changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def _block(self, x: Tensor) -> Tensor:
        y = self.up(x)
        z = y.tanh()
        y.add_(1)
        return self.down(y + z)

    def forward(self, x: Tensor) -> Tensor:
        arguments: dict[str, Any] = {
            "context_fn": partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        }
        if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:  # torch 2.14
            arguments["respect_saved_tensors_hooks"] = True
        return checkpoint(self._block, x, use_reentrant=False, **arguments).sum()  # type: ignore[no-any-return]


def test_what_a_selective_checkpoint_keeps_is_seen_to_be_changed(swap_path: Path) -> None:
    x = torch.randn(64, HIDDEN, requires_grad=True)
    plain = ChangesWhatIsKept()
    with pytest.raises(RuntimeError, match="has been mutated"):
        plain(x).backward()
    with tiered(ChangesWhatIsKept(), swap_path, ("none", "nvme"), adamw, runtime=moved_to("nvme", swap_path)) as engine:
        loss = engine(x)
        with pytest.raises(RuntimeError, match="has been mutated"):
            engine.backward(loss)


ZERO_R = {
    "train_batch_size": 16,
    "gradient_accumulation_steps": 1,
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"total_num_steps": 300, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 30},
    },
    "fp16": {
        "enabled": True,
        "initial_scale_power": 32,
        "loss_scale_window": 1000,
        "hysteresis": 2,
        "min_loss_scale": 1,
    },
    "zero_optimization": {"stage": 1, "allgather_bucket_size": 5e8, "reduce_bucket_size": 5e8},
    "activation_checkpointing": {
        "partition_activations": True,
        "cpu_checkpointing": True,
        "contiguous_memory_optimization": True,
        "number_checkpoints": 4,
    },
    "zero_allow_untested_optimizer": True,
    "wall_clock_breakdown": False,
    "steps_per_print": 9999999999,
}
"""The whole config of ZeRO-R as courses on DeepSpeed print it."""


@pytest.mark.parametrize("lags", [False, True])
def test_the_config_of_zero_r_runs_as_it_stands(lags: bool, swap_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A device with memory of its own gets it back; on a CPU nothing moves, and a notice says so."""
    config: dict[str, Any] = dict(ZERO_R)
    config["tiered_zero"] = {"device": "cpu", "host_memory_limit": "64MiB"}
    if lags:
        config["tiered_zero"] |= {"debug_delay_seed": 1, "activations": {"min_nbytes": 64}}
    torch.manual_seed(0)
    model = Blocks("non-reentrant")
    with tiered_zero.initialize(model=model, optimizer=adamw(model), config=config)[0] as engine:
        for number in range(2):
            engine.backward(engine(*batch(number)))
            engine.step()
        report = engine.step_report
    assert report is not None
    assert (report.activations.get("num_moved", 0) >= 3) is lags
    assert any("partition_activations" in line for line in caplog.messages)
    assert any("cpu_checkpointing" in line for line in caplog.messages) is not lags
