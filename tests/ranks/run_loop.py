"""A user's script under torchrun: the loop of the README, some engines one after another, and ways to fail.

torchrun --nproc-per-node 2 run_loop.py OUT SWAP [raise|exit|kill|stop|close] [--steps N]
"""

import argparse
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist

import tiered_zero as deepspeed


def make_config(stage: int, swap: str, **runtime: object) -> dict[str, object]:
    zero = {"stage": stage, "offload_optimizer": {"device": "nvme", "nvme_path": swap}}
    if stage == 3:
        zero["offload_param"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": 2,
        "dataloader_drop_last": True,
        "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
        "zero_optimization": zero,
        "tiered_zero": {"device": "cpu", "host_memory_limit": "1GiB", **runtime},
    }


def build_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))


def train(stage: int, swap: str) -> dict[str, object]:
    """Two passes over 23 samples."""
    torch.manual_seed(dist.get_rank())  # weights are rank 0's, whatever the others draw
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(23, 6, generator=generator)
    data = torch.utils.data.TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))
    engine, _, loader, _ = deepspeed.initialize(
        model=build_model(), config=make_config(stage, swap), training_data=data
    )
    losses, seen = [], []
    for _ in range(2):
        for features, targets in loader:
            loss = torch.nn.functional.mse_loss(engine(features), targets)
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
            seen += [int((inputs == row).all(dim=1).nonzero()) for row in features]
    weights = [value.flatten().tolist() for value in engine.module.state_dict().values()]
    found = {"losses": losses, "seen": seen, "weights": weights, "batch": engine.train_batch_size()}
    found |= {"rank": engine.global_rank, "local_rank": engine.local_rank, "world": engine.world_size}
    found |= engine.rank_report()
    engine.destroy()
    return found


def fail(how: str, out: Path, swap: str) -> None:
    """All ranks train; rank 1 stops to after its third step, in the way that `how` names."""
    rank = int(os.environ["RANK"])
    config = make_config(1, swap, comm_timeout_s=10 if how == "stop" else 120)
    engine, *_ = deepspeed.initialize(model=build_model(), config=config)
    for step in range(1000):
        engine.backward(engine(torch.ones(2, 6)).sum())
        engine.step()
        if step == 2:
            (out / f"begun{rank}").touch()
        if step == 2 and rank == 1:
            if how == "raise":
                raise ValueError("the data of this rank ends here")
            if how == "exit":
                raise SystemExit(5)
            if how != "wait":
                os.kill(os.getpid(), signal.SIGKILL if how == "kill" else signal.SIGSTOP)
        if how == "wait":
            time.sleep(0.02)


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("out", type=Path)
    parser.add_argument("swap")
    parser.add_argument("how", nargs="?")
    options = parser.parse_args()
    if options.how:
        fail(options.how, options.out, options.swap)
        return
    deepspeed.init_distributed(dist_backend="nccl")
    found = {str(stage): train(stage, options.swap) for stage in (0, 1, 2, 3)}
    found["comm"] = [deepspeed.comm.get_rank(), deepspeed.comm.get_world_size(), deepspeed.comm.get_local_rank()]
    found["affinity"] = sorted(os.sched_getaffinity(0))
    deepspeed.comm.barrier()
    (options.out / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
