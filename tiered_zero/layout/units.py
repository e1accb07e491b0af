"""Find the units of a module tree: by default one transformer block each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec, Unit, place_params
from tiered_zero.layout.swap_bytes import unit_cap


@dataclass(frozen=True)
class UnitRules:
    """`size_cap_numel`: None lets the walk choose (at least four units where the model has them, 2^28 elements at
    most).

    `persistence_numel`: trainable or frozen parameters of at most this many elements never leave the device, up to
    `max_persistent_numel` of them in all. `cast`: the dtype on the device of a parameter with the given dtype.
    """

    size_cap_numel: int | None = None
    persistence_numel: int = 0
    max_persistent_numel: int = 1 << 62
    world_size: int = 1
    cast: Callable[[torch.dtype], torch.dtype] = lambda dtype: dtype


def list_params(model: nn.Module, cast: Callable[[torch.dtype], torch.dtype]) -> dict[nn.Parameter, ParamSpec]:
    """Every parameter once, by identity, in the order of `model.parameters()`. Raises ModelError on a model without
    any, or with one that has no shape yet.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        if is_lazy(param):
            raise ModelError(
                f"Parameter {name} has no shape yet: its module is a lazy one. Run one batch through the model before "
                "tiered_zero.initialize(), or give the module its sizes."
            )
        names.setdefault(param, []).append(name)
    if not names:
        raise ModelError(
            "The model has no parameters; there is nothing to train. Pass the torch.nn.Module to be trained."
        )
    embeddings = {module.weight for module in model.modules() if isinstance(module, (nn.Embedding, nn.EmbeddingBag))}
    return {
        param: ParamSpec(
            first,
            tuple(param.shape),
            cast(param.dtype),
            param.requires_grad,
            index,
            tuple(others),
            param in embeddings,
            _kept_stride(param),
        )
        for index, (param, (first, *others)) in enumerate(names.items())
    }


def _kept_stride(param: nn.Parameter) -> tuple[int, ...] | None:
    """Strides that are dense but not row-major, as with channels_last: kernels and sums follow the order in memory."""
    with torch._C.DisableTorchFunctionSubclass():
        if param.layout is not torch.strided or not param.numel():
            return None
        if not torch.ops.aten.is_non_overlapping_and_dense(param):
            return None
        row_major = torch.empty(param.shape, device="meta").stride()
        return None if param.stride() == row_major else tuple(param.stride())


def find_units(model: nn.Module, specs: dict[nn.Parameter, ParamSpec], rules: UnitRules) -> list[Unit]:
    """Cut the tree into groups and each group into units by dtype, `requires_grad` and persistence.

    The walk descends while a module holds a container of repeated modules (the stack of blocks) or is larger than the
    cap; what it stops at becomes a group; parameters that a descended module owns itself become a group of that module.
    A tied parameter belongs to the first group that meets it. Order: that of the walk, which is the order of use in
    most models.
    """
    total = sum(spec.numel for spec in specs.values())
    cap = unit_cap(total, rules.size_cap_numel)
    placed: set[nn.Parameter] = set()
    units: list[Unit] = []
    persistent_numel = 0
    for module_name, module, recurse in _walk("", model, cap):
        groups: dict[tuple[torch.dtype, bool, bool], list[ParamSpec]] = {}
        for param in module.parameters(recurse=recurse):
            if param in placed:
                continue
            placed.add(param)
            spec = specs[param]
            persistent = (
                0 < spec.numel <= rules.persistence_numel
                and persistent_numel + spec.numel <= rules.max_persistent_numel
            )
            persistent_numel += spec.numel if persistent else 0
            groups.setdefault((spec.dtype, spec.trainable, persistent), []).append(spec)
        for (dtype, trainable, persistent), params in groups.items():
            parts = [module_name or "<root>", str(dtype).removeprefix("torch.")]
            parts += [] if trainable else ["frozen"]
            parts += ["persistent"] if persistent else []
            entries = place_params(params)
            if entries[-1].stop == 0:  # only empty parameters: nothing rests anywhere, nothing moves
                continue
            units.append(
                Unit(
                    len(units),
                    ":".join(parts),
                    module_name,
                    dtype,
                    trainable,
                    persistent,
                    entries,
                    rules.world_size,
                )
            )
    return units


def _walk(name: str, module: nn.Module, cap: int) -> Iterator[tuple[str, nn.Module, bool]]:
    """(name, module, whole subtree or own parameters only) of each group."""
    has_blocks = any(_is_stack(m) for m in module.modules())
    numel = sum(p.numel() for p in module.parameters())
    children = list(module.named_children())
    if not children or (numel <= cap and not has_blocks):
        yield name, module, True
        return
    if any(True for _ in module.parameters(recurse=False)):
        yield name, module, False
    for child_name, child in children:
        yield from _walk(f"{name}.{child_name}" if name else child_name, child, cap)


def _is_stack(module: nn.Module) -> bool:
    """Holds blocks, or experts, that come and go one by one. A Sequential of plain layers is one block's inside."""
    if isinstance(module, nn.Sequential):
        return sum(any(True for grandchild in child.children()) for child in module) > 1
    return isinstance(module, (nn.ModuleList, nn.ModuleDict)) and len(module) > 1
