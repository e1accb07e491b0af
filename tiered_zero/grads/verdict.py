"""May this step's gradients be applied, and with what factor?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import torch

from tiered_zero.layout.flat import ParamSpec


@dataclass(frozen=True)
class Verdict:
    """`norm`: global L2 norm of the unscaled gradients. `grad_scale`: what the update multiplies gradients by (unscale
    and clip
    in one). `first_bad`: the first parameter whose gradient is not finite."""

    finite: bool
    norm: float
    grad_scale: float
    first_bad: str | None = None


def norm_of(grad: torch.Tensor) -> torch.Tensor:
    """0-d fp32, L2: what clip_grad_norm_ takes of one parameter's gradient. Not finite if an element is not."""
    norm: torch.Tensor = torch.linalg.vector_norm(grad, 2, dtype=torch.float32)
    return norm


def judge(
    gradients: Sequence[tuple[ParamSpec, torch.Tensor]],
    loss_scale: float,
    max_norm: float,
    known_norms: Mapping[int, torch.Tensor] = MappingProxyType({}),
) -> Verdict:
    """The arithmetic of torch.nn.utils.clip_grad_norm_: a norm per parameter, then the norm of the norms, all in fp32.

    `gradients`: [numel] each, scaled by `loss_scale`, in the order of `model.parameters()`. `max_norm`: 0 does not
    clip. `known_norms`: parameter index -> its norm, where it was taken already.
    """
    if not gradients:
        return Verdict(True, 0.0, 1.0 / loss_scale)
    norms = [known_norms[spec.index] if spec.index in known_norms else norm_of(grad) for spec, grad in gradients]
    if len({norm.device for norm in norms}) > 1:  # some gradients rest on the device: their norms come in one copy
        come = iter(torch.stack([norm for norm in norms if norm.device.type != "cpu"]).cpu())
        norms = [norm if norm.device.type == "cpu" else next(come) for norm in norms]
    total = torch.linalg.vector_norm(torch.stack(norms), 2)
    if loss_scale != 1.0:
        total = total / loss_scale
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).item() if max_norm > 0 else 1.0
    bad = None
    if not torch.isfinite(total):
        named = (spec.name for (spec, _), norm in zip(gradients, norms, strict=True) if not torch.isfinite(norm))
        bad = next(named, gradients[0][0].name)
    return Verdict(bad is None, total.item(), scale / loss_scale, bad)
