"""A plain PyTorch training loop, moved to tiered_zero. What changed is marked with numbers.

    python docs/examples/plain_loop.py

The model is three layers of numbers, so that the example ends in a second on a CPU. The five changes are the same for a
model that does not fit into GPU memory.
"""

import torch
from torch import nn
from torch.nn import functional as F

import tiered_zero

# (1) The config says where bytes rest between uses. Here: parameters, and masters with optimizer state, in host memory.
# "nvme" with an "nvme_path" puts them into swap files; "none" leaves them on the device.
CONFIG = {
    "train_micro_batch_size_per_gpu": 16,
    "gradient_clipping": 1.0,
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        # Parameters of at most so many elements stay on the device. 0, because all of this model is small.
        "stage3_param_persistence_threshold": 0,
    },
    # What may be taken of the device's memory. Leave it out on a GPU; on a CPU it makes the example page as there.
    "tiered_zero": {"device_memory_limit": "1GiB"},
}


def build_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))


def main(num_steps: int = 60) -> list[float]:
    """Train; return the loss of every step."""
    torch.manual_seed(0)
    model = build_model()
    # (2) Build the optimizer as always. Any optimizer of torch.optim works; it can also be named in the config.
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    # (3) Hand model and optimizer over. From here on use what is returned.
    engine, optimizer, _, _ = tiered_zero.initialize(model=model, optimizer=optimizer, config=CONFIG)
    losses = []
    with engine:  # closes the engine at the end: frees memory, stops threads, removes swap files
        for _ in range(num_steps):
            inputs = torch.randn(16, 8, device=engine.device)
            targets = inputs.prod(dim=1, keepdim=True)
            loss = F.mse_loss(engine(inputs), targets)
            engine.backward(loss)  # (4) for loss.backward()
            engine.step()  # (5) for clip_grad_norm_(), optimizer.step() and optimizer.zero_grad()
            losses.append(loss.item())

        # Between calls the parameters have a shape and no bytes. Three ways to their values:
        first = engine.module[0]
        with tiered_zero.gathered(first):  # lends the full values of a module or of parameters
            print(f"norm of the first weight: {first.weight.norm().item():.3f}")
        with tiered_zero.gathered(first.bias, modify=True), torch.no_grad():  # keeps what is changed inside
            first.bias.clamp_(-1, 1)
        state = engine.module.state_dict()  # CPU tensors of real shape, wherever they rest
        # Weights are saved as in plain PyTorch: torch.save(state, "weights.pt"). docs/examples/resume.py saves all that
        # training goes on from.
        print(f"{len(state)} tensors; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
