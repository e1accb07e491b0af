"""Train LoRA adapters over a frozen model that rests in host memory or on NVMe.

    python docs/examples/lora.py

Frozen parameters have no master, no gradient and no optimizer state. They are read when they are used and never
written back. So of a large model only the adapters cost more than 2 bytes per parameter.

LoRA (Hu et al. 2021, section 4.1): the frozen weight W gets an update B @ A of low rank; A is random and B is 0, so
that training starts from the model as it is.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tiered_zero

CONFIG = {
    "train_micro_batch_size_per_gpu": 8,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2}},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu"},
        "offload_optimizer": {"device": "cpu"},
        # Adapters are small and used in every layer: up to so many elements each they stay on the device.
        "stage3_param_persistence_threshold": 512,
    },
    "tiered_zero": {"device_memory_limit": "1GiB"},  # page on a CPU too
}


class LoRALinear(nn.Module):
    """A frozen linear layer and its adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / rank
        self.a = nn.Parameter(torch.empty(rank, base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.base(inputs) + F.linear(F.linear(inputs, self.a), self.b) * self.scale


def add_adapters(model: nn.Module, rank: int = 4, alpha: float = 8.0) -> None:
    """Freeze the model and replace each of its linear layers. Do this before initialize(): it reads requires_grad."""
    model.requires_grad_(False)
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear):
                setattr(module, name, LoRALinear(child, rank, alpha))


def adapter_state(engine: tiered_zero.Engine) -> dict[str, Tensor]:
    """The adapters alone, to save: as many bytes as were trained."""
    return engine.module_state_dict(exclude_frozen_parameters=True)


def main(num_steps: int = 40) -> list[float]:
    """Train; return the loss of every step."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 4))
    add_adapters(model)
    engine, _, _, _ = tiered_zero.initialize(model=model, config=CONFIG)
    losses = []
    with engine:
        before = engine.module.state_dict()
        for _ in range(num_steps):
            inputs = torch.randn(8, 16, device=engine.device)
            loss = F.mse_loss(engine(inputs), inputs[:, :4])
            engine.backward(loss)
            engine.step()
            losses.append(loss.item())
        after = engine.module.state_dict()
        moved = {name for name in after if not torch.equal(before[name], after[name])}
        trained = adapter_state(engine)
        assert moved == set(trained)  # every adapter and nothing else
        sizes = [sum(tensor.numel() for tensor in state.values()) for state in (trained, after)]
        print(f"{sizes[0]:,} of {sizes[1]:,} elements trained; loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
