"""A user's script under torchrun: six steps at stage 3 that are saved after each second one, and resumed; then, in the
attempt that comes to their end, the same steps in one go.

torchrun --nproc-per-node 2 --max-restarts 2 run_restarts.py OUT SWAP

Rank 1 is killed in the fourth step of the first attempt.
"""

import json
import os
import signal
import sys
from pathlib import Path

import torch

import tiered_zero
from tests.ranks.run_loop import build_model, make_config

RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])


def train(swap: str, saved: Path | None) -> dict[str, object]:
    """Return the number of the first step, and the weights after the last."""
    torch.manual_seed(0)
    resumed = {"resume": str(saved)} if saved is not None and saved.exists() else {}
    engine, *_ = tiered_zero.initialize(model=build_model(), config=make_config(3, swap, checkpoint=resumed))
    begun = engine.global_steps
    for step in range(begun, 6):
        inputs = torch.randn(2, 6, generator=torch.Generator().manual_seed(10 * step + RANK))
        engine.backward(engine(inputs).square().mean())
        if saved is not None and (RANK, ATTEMPT, step) == (1, 0, 3):
            os.kill(os.getpid(), signal.SIGKILL)
        engine.step()
        if saved is not None and step % 2:
            engine.save_checkpoint(saved)
            engine.flush()
    weights = [value.tolist() for value in engine.module.state_dict().values()]
    engine.close()
    return {"attempt": ATTEMPT, "begun": begun, "weights": weights}


def main() -> None:
    out, swap = Path(sys.argv[1]), sys.argv[2]
    found = [train(swap, out / "saved"), train(swap, None)]
    (out / f"rank{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
