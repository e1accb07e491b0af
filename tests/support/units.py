"""Units out of nothing but sizes, for the tests of everything that moves units."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from tiered_zero.layout.flat import ParamSpec, Unit, equal_bounds, place_params


def make_unit(
    index: int = 0,
    numels: Sequence[int] = (100,),
    dtype: torch.dtype = torch.float32,
    *,
    module: str | None = None,
    trainable: bool = True,
    persistent: bool = False,
    world_size: int = 1,
) -> Unit:
    """A unit of 1-D parameters `u<index>.p<k>`, in a module of its own unless `module` names one."""
    specs = [
        ParamSpec(name=f"u{index}.p{k}", shape=(n,), dtype=dtype, trainable=trainable, index=10_000 * index + k)
        for k, n in enumerate(numels)
    ]
    where = f"u{index}" if module is None else module
    entries = place_params(specs)
    return Unit(
        index=index,
        name=where,
        module=where,
        dtype=dtype,
        trainable=trainable,
        persistent=persistent,
        entries=entries,
        bounds=equal_bounds(entries[-1].stop, dtype.itemsize, world_size),
    )


def make_params(unit: Unit) -> list[nn.Parameter]:
    """Random values, bitwise distinct almost everywhere."""
    return [
        nn.Parameter(torch.randn(entry.param.shape).to(unit.dtype), requires_grad=unit.trainable)
        for entry in unit.entries
    ]


def flat_of(unit: Unit, params: Sequence[nn.Parameter]) -> torch.Tensor:
    """[P]: the values at their places, zeros between."""
    flat = torch.zeros(unit.numel, dtype=unit.dtype)
    for entry, param in zip(unit.entries, params, strict=True):
        flat[entry.start : entry.stop] = param.detach().reshape(-1)
    return flat
