"""Describe a torch model to the layout: its parameters and its module tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import PACKED_ALIGNMENT_NBYTES, ParamSpec
from tiered_zero.layout.units import ModuleSpec
from tiered_zero.sizes import PAGE_NBYTES, align_up
from tiered_zero.unit.quantized_layers import statistics


def list_params(
    model: nn.Module, cast: Callable[[torch.dtype], torch.dtype], trains: bool = True
) -> dict[nn.Parameter, ParamSpec]:
    """List every parameter once, by identity, in the order of `model.parameters()`; then scales of layers of 4 bits.

    `cast`: the dtype on the device of a parameter with the given dtype. `trains`: False makes every one frozen. Raises
    ModelError on a model without any, or with one that has no shape yet or no plain memory.
    """
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
    modules = reversed(list(model.modules()))  # the first of those that share a parameter counts
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
    """Describe `model`, whose parameters `specs` lists, module by module. `name`: its qualified name."""
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
        # by its method `compile`, or inside of what torch.compile returns
        is_compiled=model._compiled_call_impl is not None or "_orig_mod" in model._modules,
    )


def _own_params(module: nn.Module) -> list[nn.Parameter]:
    return [*module.parameters(recurse=False), *statistics(module).values()]


def _is_stack(module: nn.Module) -> bool:
    """Whether it holds blocks, or experts, that run one by one. A Sequential of plain layers is the inside of one."""
    if isinstance(module, nn.Sequential):
        return sum(any(True for grandchild in child.children()) for child in module) > 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1


def kept_stride(param: nn.Parameter) -> tuple[int, ...] | None:
    """Strides that are dense but not row-major, as with channels_last: kernels and sums follow the order in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if param.layout is not torch.strided or not param.numel():
            return None
        if not torch.ops.aten.is_non_overlapping_and_dense(param):
            return None
        row_major = torch.empty(param.shape, device="meta").stride()
        return None if param.stride() == row_major else tuple(param.stride())


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """List the buffers that `state_dict()` has, each once, under its first name."""
    found: dict[torch.Tensor, str] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in module._non_persistent_buffers_set:
                found.setdefault(buffer, f"{path}.{name}".lstrip("."))
    return {name: buffer for buffer, name in found.items()}


def packed_nbytes(buffers: Iterable[torch.Tensor]) -> int:
    """Sum whole pages of buffers that lie one after another, each at a multiple of 128 bytes; at least as many bytes as
    they take on any device, where small floats may be fp32."""
    sizes = (buffer.numel() * max(buffer.dtype.itemsize, 4) for buffer in buffers)
    return align_up(sum(align_up(nbytes, PACKED_ALIGNMENT_NBYTES) for nbytes in sizes), PAGE_NBYTES)
