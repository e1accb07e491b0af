"""Check that the parameters of a model can be moved between tiers, before anything is allocated.

A parameter becomes a view of its unit's flat. Another parameter or a buffer that shared its memory until then would
silently keep the old values.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.unit.param_handlers import handler_of


def check_memory(model: nn.Module, specs: Mapping[nn.Parameter, ParamSpec]) -> None:
    """Raise ModelError: compiled TorchScript in the tree; parameters that share memory with each other or with a
    buffer, or whose elements overlap."""
    for path, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ModelError(
                f"Module {path or type(module).__name__} is compiled TorchScript (torch.jit.trace or script): it reads "
                "parameters where they cannot be paged. Pass the nn.Module that it was made of; torch.compile works."
            )
    with torch._C.DisableTorchFunctionSubclass():
        owned = [_Owned(name=f"parameter {spec.name}", tensor=param) for param, spec in specs.items()]
        buffers = {buffer: name for name, buffer in model.named_buffers()}
        owned += [_Owned(name=f"buffer {name}", tensor=buffer) for buffer, name in buffers.items()]
        by_storage: defaultdict[int, list[_Owned]] = defaultdict(list)
        for one in owned:
            if _has_memory(one.tensor) and not _is_paged(one.tensor):
                by_storage[one.tensor.untyped_storage()._cdata].append(one)
        for param, spec in specs.items():
            _check_dense(param, spec.name)
        for sharing in by_storage.values():
            _check_apart(sharing)


@dataclass(frozen=True, eq=False, kw_only=True)
class _Owned:
    name: str
    tensor: torch.Tensor


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and tensor.numel() > 0


def _is_paged(tensor: torch.Tensor) -> bool:
    """Whether an engine that is closed paged it: its values are lost."""
    return isinstance(tensor, nn.Parameter) and handler_of(tensor) is not None


def _check_dense(param: nn.Parameter, name: str) -> None:
    if not _has_memory(param) or torch.ops.aten.is_non_overlapping_and_dense(param):
        return
    spans = sorted((stride, size) for stride, size in zip(param.stride(), param.shape, strict=True) if size > 1)
    reach = 1
    for stride, size in spans:
        if stride < reach:
            raise ModelError(
                f"Elements of parameter {name} share memory with each other (shape {tuple(param.shape)}, strides "
                f"{param.stride()}), as those of an expanded tensor do. Give it memory of its own: "
                "param.data = param.data.contiguous()."
            )
        reach = stride * (size - 1) + reach
    if not torch.empty_like(param, device="meta").is_contiguous():
        raise ModelError(
            f"Parameter {name} is a transposed part of a larger tensor (shape {tuple(param.shape)}, strides "
            f"{param.stride()}), and such strides cannot be kept. Give it memory of its own: "
            "param.data = param.data.contiguous()."
        )


def _check_apart(sharing: list[_Owned]) -> None:
    """`sharing`: distinct tensors on one storage. Parts that do not overlap are fine, as of weights cut out of one."""
    before: list[_Owned] = []
    for one in sorted(sharing, key=lambda own: _extent(own.tensor)):
        for other in before:
            is_param = isinstance(one.tensor, nn.Parameter) or isinstance(other.tensor, nn.Parameter)
            if is_param and _overlap(one.tensor, other.tensor):
                first, second = sorted((one, other), key=sharing.index)  # parameters first, in the model's order
                raise ModelError(
                    f"{first.name[0].upper()}{first.name[1:]} and {second.name} share memory without being the same "
                    "object: a change of one would reach the other in plain PyTorch, but not here. Tie parameters "
                    "by assigning the same nn.Parameter to both modules, or give one of the two a clone."
                )
        before.append(one)


def _extent(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte in the storage, and the one behind the last."""
    start = int(tensor.storage_offset())
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors on one storage share an element."""
    (start, stop), (low, high) = _extent(one), _extent(other)
    if stop <= low or high <= start:
        return False
    itemsize = one.element_size()
    if itemsize != other.element_size():
        return True
    taken = torch.zeros(one.untyped_storage().nbytes() // itemsize, dtype=torch.bool)
    for tensor in (one, other):
        part = taken.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        if bool(part.any()):
            return True
        part.fill_(True)
    return False
