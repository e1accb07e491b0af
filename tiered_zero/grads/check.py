"""Check a step's gradients: may they be applied, and with what factor?"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tiered_zero.grads.norms import Norm
from tiered_zero.layout.flat import ParamSpec

CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class GradCheck:
    """The result of a gradient check. `norm`: global L2 norm of the unscaled gradients. `grad_scale`: the factor by
    which the update multiplies gradients, to unscale and clip at once. `first_bad`: the first parameter whose gradient
    is not finite."""

    finite: bool
    norm: float
    grad_scale: float
    first_bad: str | None = None


def check_gradients(
    norms: Sequence[tuple[ParamSpec, Norm]],
    loss_scale: float,
    max_norm: float,
    device: torch.device = CPU,
) -> GradCheck:
    """Compute the global norm and clip factor as torch.nn.utils.clip_grad_norm_ does from the norms of parameters, in
    fp32.

    `norms`: norms of gradients scaled by `loss_scale`, in the order of `model.parameters()`. `max_norm`: 0 does not
    clip. `device`: adds up all norms; it is the device of compute, whatever tier gradients rest on. The host waits
    once.
    """
    on_host = torch.tensor([norm for _, norm in norms if isinstance(norm, float)], dtype=torch.float32, device="cpu")
    numbers = iter(on_host.to(device).unbind())
    values = [next(numbers) if isinstance(norm, float) else norm.to(device) for _, norm in norms]
    stacked = torch.stack(values) if values else torch.zeros(0, device=device)
    found = torch.cat([torch.linalg.vector_norm(stacked, 2).view(1), stacked]).cpu()
    total, stacked = found[0], found[1:]
    if loss_scale != 1.0:
        total = total / loss_scale
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).item() if max_norm > 0 else 1.0
    bad = None
    if not torch.isfinite(total):
        named = (spec.name for (spec, _), norm in zip(norms, stacked.tolist(), strict=True) if not math.isfinite(norm))
        bad = next(named, norms[0][0].name)
    return GradCheck(finite=bad is None, norm=total.item(), grad_scale=scale / loss_scale, first_bad=bad)


def check_squares(squares: float, first_bad: str | None, loss_scale: float, max_norm: float) -> GradCheck:
    """Check the gradients of many ranks. `squares`: the fp64 sum of squares over all ranks, of gradients scaled by
    `loss_scale`, the same on every rank. `first_bad`: the first parameter whose gradient is not finite on any rank."""
    finite = first_bad is None
    norm = math.sqrt(squares) / loss_scale if squares >= 0 else math.nan
    total = torch.tensor(norm, dtype=torch.float64, device="cpu")
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0).item() if max_norm > 0 else 1.0
    return GradCheck(finite=finite, norm=norm, grad_scale=scale / loss_scale, first_bad=first_bad)
