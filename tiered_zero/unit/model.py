"""Describe a model to the layout: its parameters, buffers and module tree. Refuse parameters that cannot be paged."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, ModuleSpec, ParamSpec
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.unit.guard import handler_of
from tiered_zero.unit.quantized_layers import statistics


def list_params(
    model: nn.Module, cast: Callable[[torch.dtype], torch.dtype], trains: bool = True
) -> dict[nn.Parameter, ParamSpec]:
    """List every parameter of the model once, with its ParamSpec, in the order of `model.parameters()`. The scales of
    layers quantized to 4 bits come last. `cast`: maps a parameter's dtype to the dtype that the parameter has on the
    device. `trains`: False marks all as frozen. Raises ModelError if there are no parameters, or if a parameter is lazy
    or no plain tensor."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if is_lazy(param):
            raise ModelError(
                f"Parameter {name} has no shape yet: its module is a lazy one. Run one batch through the model before "
                "tiered_zero.initialize(), or give the module its sizes."
            )
        if type(param).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise ModelError(
                f"Parameter {name}: expected a plain tensor; found {type(param).__name__} of {type(param).__module__}, "
                "whose parts cannot be moved between tiers. Train the model before it is quantized; for adapters over "
                "a quantized base take bitsandbytes' Linear4bit."
            )
        names.setdefault(param, []).append(name)
    if not names:
        raise ModelError(
            "The model has no parameters; there is nothing to train. Pass the torch.nn.Module to be trained."
        )
    scales = {
        param: f"{path}.{name}".lstrip(".")
        for path, module in model.named_modules()
        for name, param in statistics(module).items()
    }
    names |= {param: [name] for param, name in scales.items()}
    modules = reversed(list(model.modules()))  # of modules that share a parameter the first one is its owner
    owners = {param: type(module).__name__ for module in modules for param in _own_params(module)}
    embeddings = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    return {
        param: ParamSpec(
            name=first,
            shape=tuple(param.shape),
            dtype=param.dtype if param in scales else cast(param.dtype),
            trainable=trains and param.requires_grad,
            index=index,
            aliases=tuple(others),
            embedding=param in embeddings,
            stride=kept_stride(param),
            owner=owners[param],
        )
        for index, (param, (first, *others)) in enumerate(names.items())
    }


def module_tree(model: nn.Module, specs: Mapping[nn.Parameter, ParamSpec], name: str = "") -> ModuleSpec:
    """Describe `model` as a tree of modules. `specs`: the ParamSpec of each parameter of the whole model. `name`: the
    qualified name of `model`; empty for the root."""
    return ModuleSpec(
        name=name,
        params=tuple(specs[param].index for param in _own_params(model)),
        children=tuple(
            module_tree(child, specs, f"{name}.{child_name}" if name else child_name)
            for child_name, child in model.named_children()
        ),
        is_stack=_is_stack(model),
        is_list=_is_stack(model) and not isinstance(model, nn.ModuleDict),
        runs=not isinstance(model, (nn.ModuleList, nn.ModuleDict)),
        # by its method `compile`, or wrapped by torch.compile
        is_compiled=model._compiled_call_impl is not None or "_orig_mod" in model._modules,
    )


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    return [*module.parameters(recurse=False), *statistics(module).values()]


def _is_stack(module: nn.Module) -> bool:
    """Return whether the module holds several blocks or experts: a ModuleList or ModuleDict of several modules, or a
    Sequential in which several modules have children."""
    if isinstance(module, nn.Sequential):
        return sum(any(True for grandchild in child.children()) for child in module) > 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1


def kept_stride(param: nn.Parameter) -> tuple[int, ...] | None:
    """Return a parameter's strides if they are dense but not row-major, as with channels_last; else None."""
    with torch._C.DisableTorchFunctionSubclass():
        if param.layout is not torch.strided or not param.numel():
            return None
        if not torch.ops.aten.is_non_overlapping_and_dense(param):
            return None
        # the flat keeps strides that are not row-major: kernels and sums follow the order in memory
        row_major = torch.empty(param.shape, device="meta").stride()
        return None if param.stride() == row_major else tuple(param.stride())


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return name -> buffer for the buffers that `state_dict()` has, each once, under its first name."""
    found: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found.setdefault(buffer, f"{path}.{name}".lstrip("."))
    return {name: buffer for buffer, name in found.items()}


def packed_nbytes(buffers: Iterable[torch.Tensor]) -> int:
    """Return the bytes of `buffers` packed at multiples of 128 bytes, rounded up to whole pages. Count at least 4 bytes
    per element."""
    # at least 4 bytes an element: a device may hold small floats as fp32
    sizes = (buffer.numel() * max(buffer.dtype.itemsize, 4) for buffer in buffers)
    return align_up(sum(align_up(nbytes, PACKED_ALIGNMENT_NBYTES) for nbytes in sizes), PAGE_NBYTES)


def check_memory(model: nn.Module, specs: Mapping[nn.Parameter, ParamSpec]) -> None:
    """Raise ModelError if the model contains compiled TorchScript, if a parameter shares memory with another parameter
    or a buffer, if its own elements share memory, or if its strides cannot be kept."""
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
    """Return whether the tensor is a parameter that an engine pages, or that a closed engine has paged."""
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
    """Raise ModelError if a parameter overlaps another tensor of `sharing`. `sharing`: distinct tensors on one
    storage."""
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
    """Return the offsets in its storage, in bytes, of the tensor's first byte and of the byte after its last."""
    start = int(tensor.storage_offset())
    last = sum(stride * (size - 1) for stride, size in zip(tensor.stride(), tensor.shape, strict=True))
    return start * tensor.element_size(), (start + last + 1) * tensor.element_size()


def _overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors on one storage share an element."""
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
