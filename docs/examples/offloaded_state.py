"""A plain PyTorch training loop whose optimizer state rests in swap files: no engine, no config file.

    python docs/examples/offloaded_state.py

Two lines change. The model, its gradients, clipping, accumulation and the schedule stay the loop's own.
"""

import torch
from torch import nn
from torch.nn import functional as F

from tiered_zero.optim import OffloadedOptimizer


def main(nvme_path: str = "swap", num_steps: int = 60) -> list[float]:
    """Train; return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
    # (1) Was: optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    offload = {"device": "nvme", "nvme_path": nvme_path}
    optimizer = OffloadedOptimizer(model.parameters(), torch.optim.AdamW, offload, lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=num_steps)
    losses = []
    for _ in range(num_steps):
        x = torch.randn(32, 8)
        loss = F.mse_loss(model(x).squeeze(1), x.square().sum(1).sqrt())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(optimizer.plan)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    # (2) The end of a `with` block, of the object and of the process do the same.
    optimizer.close()
    return losses


if __name__ == "__main__":
    main()
