"""A user's script under torchrun: two steps at stage 3, saved after the first, and resumed in the next attempt.

torchrun --nproc-per-node 2 --max-restarts 1 run_restarts.py OUT SWAP

Rank 1 is killed in the second step of the first attempt.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import tiered_zero
from tests.ranks.run_loop import build_model, make_config


def main() -> None:
    rank, attempt = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    out, swap = Path(sys.argv[1]), sys.argv[2]
    saved = out / "saved"
    resumed = {"resume": str(saved)} if saved.exists() else {}
    engine, *_ = tiered_zero.initialize(model=build_model(), config=make_config(3, swap, checkpoint=resumed))
    begun = engine.global_steps
    for step in range(begun, 2):
        engine.backward(engine(torch.ones(2, 6)).square().mean())
        if (rank, attempt, step) == (1, 0, 1):
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        if step == 0:
            engine.save_checkpoint(saved)
    engine.close()
    (out / f"rank{rank}.json").write_text(json.dumps([attempt, begun]))


if __name__ == "__main__":
    main()
