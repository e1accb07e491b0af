"""The state of all ranks' parameters on one of them: one tensor at a time, and no pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from tiered_zero.errors import ModelError
from tiered_zero.hardware.ranks.shard_group import ShardGroup

ReadState = Callable[[Tensor], Mapping[str, Any]]
"""A parameter of this rank -> its state."""


def consolidate(
    group: ShardGroup, parts: Sequence[Sequence[Tensor]], indices: Mapping[int, int], read: ReadState, to: int
) -> dict[int, dict[str, Any]] | None:
    """Return, on rank `to`, the state of every parameter that has any, by its index: copies on the CPU. None on others.

    `parts`: the parameters of each rank. `indices`: id of a parameter -> its index. Collective.
    """
    if group.rank != to:
        for param in parts[group.rank]:
            _send(group, read(param), to)
        return None
    found: dict[int, dict[str, Any]] = {}
    for rank, params in enumerate(parts):
        for param in params:
            state = _copied(read(param)) if rank == group.rank else _receive(group, rank)
            if state:
                found[indices[id(param)]] = state
    return dict(sorted(found.items()))


def _send(group: ShardGroup, state: Mapping[str, Any], to: int) -> None:
    tensors: list[Tensor] = []
    group.send(json.dumps(describe(dict(state), tensors)).encode(), to)
    for tensor in tensors:
        group.send_tensor(tensor.detach(), to)


def _receive(group: ShardGroup, source: int) -> dict[str, Any]:
    def read(dtype: str, shape: Sequence[int]) -> Tensor:
        tensor = torch.empty(shape, dtype=getattr(torch, dtype))
        group.receive_tensor(tensor, source)
        return tensor

    state: dict[str, Any] = rebuild(json.loads(group.receive(source)), read)
    return state


def _copied(state: Mapping[str, Any]) -> dict[str, Any]:
    tensors: list[Tensor] = []
    described = describe(dict(state), tensors)
    left: Iterable[Tensor] = iter(tensors)
    copied: dict[str, Any] = rebuild(described, lambda *_: next(left).detach().to("cpu", copy=True))  # type: ignore[call-overload]
    return copied


def describe(value: Any, tensors: list[Tensor]) -> list[Any]:
    """Return a value as JSON; its tensors, in order, are added to `tensors`."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return ["tensor", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [describe(item, tensors) for item in value]]
    if isinstance(value, Mapping):
        return ["dict", [[describe(name, tensors), describe(item, tensors)] for name, item in value.items()]]
    if value is None or isinstance(value, (bool, int, float, str)):
        return ["value", value]
    raise ModelError(
        f"The state of a parameter was expected to be tensors, numbers, text, and lists and dicts of these; found "
        f"{type(value).__name__}. Save each rank's own local_state_dict() instead."
    )


def rebuild(described: Sequence[Any], read: Callable[[str, Sequence[int]], Tensor]) -> Any:
    kind, *rest = described
    if kind == "tensor":
        return read(*rest)
    if kind == "value":
        return rest[0]
    if kind == "dict":
        return {rebuild(name, read): rebuild(item, read) for name, item in rest[0]}
    items = [rebuild(item, read) for item in rest[0]]
    return tuple(items) if kind == "tuple" else items
