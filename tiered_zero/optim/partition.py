"""Which rank steps which parameter, and what it broadcasts of them after a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

BucketKind = tuple[torch.device, torch.dtype]

MESSAGE_NUMEL = 1 << 20
"""Elements of a bucket that are broadcast at once, at least: those behind them are still updated."""


def partition_groups(groups: Sequence[Mapping[str, Any]], world_size: int) -> list[list[dict[str, Any]]]:
    """Split param groups over ranks: each parameter, largest first, goes to the rank with the fewest elements so far.

    Returns each rank's groups, with the values of the given ones. A group that is added changes no earlier one.
    """
    sizes = [0] * world_size
    parts: list[list[dict[str, Any]]] = [[] for _ in range(world_size)]
    for group in groups:
        of_rank: list[list[Tensor]] = [[] for _ in range(world_size)]
        for param in sorted(group["params"], key=torch.numel, reverse=True):
            rank = sizes.index(min(sizes))
            of_rank[rank].append(param)
            sizes[rank] += param.numel()
        for rank, params in enumerate(of_rank):
            parts[rank].append({**group, "params": params})
    return parts


def params_of(groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
    return [param for group in groups for param in group["params"]]


def sync_groups(source: Sequence[Mapping[str, Any]], target: Sequence[dict[str, Any]]) -> None:
    """Give each group the values of another, also those that are new, and leave it its parameters."""
    for values, group in zip(source, target, strict=True):
        group.update({name: value for name, value in values.items() if name not in ("params", "param_names")})


def build_buckets(parts: Sequence[Sequence[Mapping[str, Any]]]) -> dict[BucketKind, list[Tensor]]:
    """Make the trainable parameters of each rank, device and dtype views of one tensor, in their order; frozen ones get
    memory of their own. Returns the tensor of each rank."""
    buckets: dict[BucketKind, list[Tensor]] = {}
    for kind in dict.fromkeys((param.device, param.dtype) for groups in parts for param in params_of(groups)):
        for groups in parts:
            own = [param for param in params_of(groups) if (param.device, param.dtype) == kind]
            trainable = [param for param in own if param.requires_grad]
            for param in own:
                if not param.requires_grad:
                    param.data = param.data.clone()
            device, dtype = kind
            bucket, start = torch.empty(sum(map(torch.numel, trainable)), dtype=dtype, device=device), 0
            for param in trainable:
                part = bucket[start : start + param.numel()].view(param.shape)
                start += param.numel()
                param.data = part.copy_(param.data)
            buckets.setdefault(kind, []).append(bucket)
    return buckets


@dataclass(frozen=True, kw_only=True)
class Message:
    """What a rank broadcasts at once. `num_params`: of its parameters, in order, that have new values before."""

    tensor: Tensor
    num_params: int


def messages_of(groups: Sequence[Mapping[str, Any]]) -> Iterator[Message]:
    """List what the rank of these groups broadcasts: each parameter, or, of a bucket, neighbours together."""
    run: list[Tensor] = []
    params = params_of(groups)
    for index, param in enumerate(params):
        if not param.numel():
            continue
        flat = _flat(param)
        if run and (sum(map(torch.numel, run)) >= MESSAGE_NUMEL or not _follows(run[-1], flat)):
            yield _joined(run, index)
            run = []
        run.append(flat)
    if run:
        yield _joined(run, len(params))


def _flat(param: Tensor) -> Tensor:
    """View the parameter's elements in the order of its memory, which every rank's replica has alike."""
    if torch.ops.aten.is_non_overlapping_and_dense(param):
        return param.detach().as_strided((param.numel(),), (1,))
    return param.detach()


def _follows(left: Tensor, right: Tensor) -> bool:
    """Whether two parts are neighbours in a bucket."""
    return (
        left.dim() == right.dim() == 1
        and left.dtype == right.dtype
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
        and left.storage_offset() + left.numel() == right.storage_offset()
    )


def _joined(run: Sequence[Tensor], num_params: int) -> Message:
    first = run[0]
    if len(run) == 1:
        return Message(tensor=first, num_params=num_params)
    numel = sum(map(torch.numel, run))
    return Message(tensor=first.as_strided((numel,), (1,)), num_params=num_params)
