"""Under torchrun: lightning_child.py ddp|own SWAP OUTPUT fits by DDPStrategy, or by TieredStrategy on nvme."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch

from tests.clients.test_lightning import config_of, make_module
from tests.integrations.conftest import copies
from tests.integrations.test_lightning import Rows
from tiered_zero.integrations.lightning import TieredStrategy


def main(kind: str, swap_path: str, output: str) -> None:
    lightning.seed_everything(0, verbose=False)
    config = config_of(("nvme", "nvme"), Path(swap_path), gradient_clipping=0)
    strategy: Any = "ddp" if kind == "ddp" else TieredStrategy(config)
    module = make_module()
    trainer = lightning.Trainer(
        max_steps=3, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", devices=2, strategy=strategy, accumulate_grad_batches=1,
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(Rows(), 4))
    record = {"seen": module.seen, "weights": copies(module.state_dict())}
    torch.save(record, Path(output) / f"rank{os.environ['RANK']}.pt")
    if kind == "own":
        strategy.engine.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
