"""State on several tiers beside a real device: the overlapped update is ordered as the one inside step() is."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tiered_zero

pytestmark = pytest.mark.gpu


@dataclass(frozen=True)
class Size:
    """Of the model, and of the run: large enough for updates to take longer than their launch."""

    width: int = 512
    vocab: int = 4096
    sub_group_size: int = 100_000
    host_limit: str = "4MiB"
    steps: int = 12


class Tower(nn.Module):
    """An embedding, eight layers and the tied head."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        width = size.width
        self.embed = nn.Embedding(size.vocab, width)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(8))
        self.head = nn.Linear(width, size.vocab, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def weights_after(update: str, param: str, clipping: float, swap: Path, size: Size) -> dict[str, Tensor]:
    torch.manual_seed(0)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": clipping,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": param, "nvme_path": str(swap), "max_in_cpu": 0},
            "offload_optimizer": {"device": "nvme", "nvme_path": str(swap), "ratio": 0.4},
            "stage3_param_persistence_threshold": size.width,
            "sub_group_size": size.sub_group_size,
        },
        "tiered_zero": {"device": "cuda", "update": update, "state_limits": {"host": size.host_limit}},
    }
    with tiered_zero.initialize(model=Tower(size), config=config)[0] as engine:
        assert set(engine.plan.tiers.state) == {"device", "host", "nvme"}
        for number in range(size.steps):
            generator = torch.Generator().manual_seed(number)
            tokens = torch.randint(size.vocab, (4, 64), generator=generator).to(engine.device)
            engine.backward(engine(tokens))
            engine.step()
        return {name: value.cpu() for name, value in engine.module.state_dict().items()}


@pytest.mark.parametrize("clipping", [0.0, 0.5])
@pytest.mark.parametrize("param", ["none", "cpu", "nvme"])
def test_overlapped_has_the_bits_of_barrier(param, clipping, tmp_path, size=Size()):
    barrier, overlapped = (
        weights_after(update, param, clipping, tmp_path, size) for update in ("barrier", "overlapped")
    )
    assert all(torch.equal(barrier[name], overlapped[name]) for name in barrier)
