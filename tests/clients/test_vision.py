"""A diffusion transformer of diffusers and a vision transformer of timm: the losses, norms and weights of plain
PyTorch with parameters on cpu and on nvme, and optimizer state on nvme."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.trainers import assert_parity, train

pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]  # the libraries warn of each other


class Denoiser(nn.Module):
    """DiT as diffusion trainers call it: the loss is that of the noise it predicts; class 10 stands for no class."""

    def __init__(self) -> None:
        from diffusers import DiTTransformer2DModel

        super().__init__()
        torch.manual_seed(0)
        self.dit = DiTTransformer2DModel(
            num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=4, num_layers=3, sample_size=8,
            patch_size=2, num_embeds_ada_norm=10, norm_num_groups=4,
        )  # fmt: skip

    def forward(self, latents: Tensor, noise: Tensor, timesteps: Tensor, classes: Tensor) -> Tensor:
        predicted = self.dit(latents + noise, timestep=timesteps, class_labels=classes).sample
        return F.mse_loss(predicted, noise)


class Classifier(nn.Module):
    def __init__(self) -> None:
        import timm

        super().__init__()
        torch.manual_seed(0)
        self.vit = timm.create_model(
            "vit_tiny_patch16_224", pretrained=False, img_size=32, patch_size=8, embed_dim=16, depth=3, num_heads=2,
            num_classes=5, drop_path_rate=0.2,
        )  # fmt: skip

    def forward(self, images: Tensor, classes: Tensor) -> Tensor:
        return F.cross_entropy(self.vit(images), classes, label_smoothing=0.1)


def latents(number: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    seed = torch.Generator().manual_seed(number)
    first, noise = torch.randn(2, 2, 4, 8, 8, generator=seed)
    return first, noise, torch.tensor([5, 900]), torch.tensor([number % 10, 10])


def images(number: int) -> tuple[Tensor, Tensor]:
    seed = torch.Generator().manual_seed(number)
    return torch.randn(2, 3, 32, 32, generator=seed), torch.randint(5, (2,), generator=seed)


def checkpointed(make: Callable[[], Any]) -> Any:
    model = make()
    if isinstance(model, Denoiser):
        model.dit.enable_gradient_checkpointing()
    else:
        model.vit.set_grad_checkpointing()
    return model


@pytest.mark.parametrize("parameters", ["cpu", "nvme"])
@pytest.mark.parametrize("is_checkpointed", [False, True], ids=["stored", "checkpointed"])
@pytest.mark.parametrize(("make", "data"), [(Denoiser, latents), (Classifier, images)], ids=["DiT", "ViT"])
def test_it_trains_as_plain(
    make: Callable[[], Any],
    data: Callable[[int], tuple[Tensor, ...]],
    is_checkpointed: bool,
    parameters: str,
    swap_path: Path,
) -> None:
    def build() -> Any:
        return checkpointed(make) if is_checkpointed else make()

    def script(trainer: Any) -> list[Any]:
        return train(trainer, data, accumulation=2)

    assert_parity(build, script, swap_path, [(parameters, "nvme")], accumulation=2, clipping=0.5)
