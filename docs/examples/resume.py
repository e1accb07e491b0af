"""Stop training at any moment, by Ctrl-C, SIGTERM or kill -9, and start it again: it ends as if it had never stopped.

    python docs/examples/resume.py

Run it, press Ctrl-C, and run it again. docs/checkpoints.md has what is promised.
"""

import sys
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

import tiered_zero

EPOCHS, SAMPLES, BATCH = 3, 60, 4
NUM_STEPS = EPOCHS * SAMPLES // BATCH


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16))


def data() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return list(torch.randn(SAMPLES, 16, generator=generator).cumsum(dim=1))


def config(swap_directory: str) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": BATCH,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,  # however small they are
            "offload_optimizer": {"device": "nvme", "nvme_path": swap_directory},
        },
        "tiered_zero": {"device_memory_limit": "1GiB"},  # page on a CPU too
    }


def main(directory: str = "ck", swap_directory: str = "swap") -> list[float]:
    """Train; return the losses of all steps, those before a stop included. Exits by 143 or 130 if it is stopped."""
    torch.manual_seed(0)  # of the first start; a resumed run has the generators of the checkpoint
    with tiered_zero.stop_on_signals() as stop:
        engine, _, loader, _ = tiered_zero.initialize(
            model=build(),
            # its position is in the checkpoint, so that no batch is seen twice, and none is left out
            training_data=tiered_zero.TrainingLoader(data(), batch_size=BATCH, shuffle=True),
            lr_scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=1e-2, total_steps=NUM_STEPS + 1),
            config=config(swap_directory),
        )
        assert loader is not None
        with engine:
            path, saved = engine.load_checkpoint(directory)  # (None, {}) at the first start
            losses = saved.get("losses", [])
            if path is not None:
                print(f"resumed from {path}")
            for epoch in range(saved.get("epoch", 0), EPOCHS):
                for batch in loader:
                    batch = batch.to(engine.device)
                    loss = (engine(batch) - batch).square().mean()
                    engine.backward(loss)
                    engine.step()
                    losses.append(loss.item())
                    if stop or engine.global_steps % 10 == 0:
                        engine.save_checkpoint(directory, client_state={"epoch": epoch, "losses": losses})
                    if stop:
                        raise SystemExit(stop.code)
                print(f"epoch {epoch}: loss {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main(*sys.argv[1:3])
