"""The first values of parameters: from the model as it was built, from safetensors files, or from its own initialisers.

A model built on the meta device has shapes and no bytes. It is materialised module group by module group: values are
made on the CPU in the dtype that the model declares, go to their tiers, and are dropped before the next group is made,
so that a model larger than host memory can start.

[Note: Initialisers run as they do in a constructor]
Each module's `reset_parameters()`, then the model's `_init_weights(module)`, children before parents and the group's
ancestors last: what a parent says of its child's weight holds. They run on a stand-in of the module tree in which all
parameters but the group's are on meta, so it does not matter which are not made yet and which are away already.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec

_NUM_NAMED = 5
"""So many names are spelled out in an error about many."""


class WeightFiles:
    """Tensors by name from safetensors files, read one at a time. Raises ModelError for a file that cannot be read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._files: dict[str, Any] = {}
        for path in paths:
            try:
                file = safe_open(path, framework="pt")
            except Exception as error:
                raise ModelError(f"tiered_zero.weights: {path} cannot be read as safetensors ({error}).") from error
            self._files.update(dict.fromkeys(file.keys(), file))  # type: ignore[no-untyped-call]

    def check(self, model: nn.Module, specs: Mapping[nn.Parameter, ParamSpec]) -> list[str]:
        """Notices about what the files hold in vain. Raises ModelError: a parameter on meta that no file has, or in
        another shape; no parameter on meta at all."""
        wanted = [spec for param, spec in specs.items() if param.is_meta]
        if not wanted:
            raise ModelError(
                "tiered_zero.weights names files for a model built on the meta device; found one with values of its "
                "own, which they would not change. Build it under torch.device('meta'), or remove the key."
            )
        if missing := [spec.name for spec in wanted if self._name(spec) is None]:
            raise ModelError(
                "tiered_zero.weights: expected every parameter on the meta device in the files, which hold "
                f"{len(self._files)} tensors; found none for {_some(missing)}. Name the file that has them."
            )
        for spec in wanted:
            name = self._name(spec)
            if name and (shape := tuple(self._files[name].get_slice(name).get_shape())) != spec.shape:
                raise ModelError(
                    f"tiered_zero.weights: expected {name} of shape {spec.shape}, as in the model; found {shape}. "
                    "Name files of a model of this configuration."
                )
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        extra = sorted(self._files.keys() - known - {name for name, _ in model.named_buffers(remove_duplicate=False)})
        return [f"tiered_zero.weights: the model has no use for {_some(extra)} in the files."] if extra else []

    def fill(self, target: torch.Tensor, names: Iterable[str]) -> None:
        """Copy the tensor under one of `names` into `target`, rounded to its dtype; leave it alone if there is none."""
        for name in names:
            if name in self._files:
                target.copy_(self._files[name].get_tensor(name))
                return

    def _name(self, spec: ParamSpec) -> str | None:
        return next((name for name in (spec.name, *spec.aliases) if name in self._files), None)


def materialize_module(
    model: nn.Module,
    prefix: str,
    params: Sequence[nn.Parameter],
    weights: WeightFiles | None,
    specs: Mapping[nn.Parameter, ParamSpec],
) -> None:
    """Give the meta parameters among `params`, which lie under module `prefix`, and the buffers beside them, values
    on the CPU.

    A parameter keeps its identity, so tied names stay tied. Raises ModelError where nothing initialises it.
    """
    missing = {param: specs[param] for param in params if param.is_meta}
    modules = model.get_submodule(prefix).named_modules(prefix=prefix)
    owners = {path: m for path, m in modules if any(p in missing for p in m.parameters(recurse=False))}
    if missing:
        _materialize(model, prefix, missing, owners, weights)


def materialize_buffers(model: nn.Module, weights: WeightFiles | None) -> None:
    """Give the meta buffers of modules that have no meta parameters beside them values on the CPU.

    Raises ModelError where nothing fills one.
    """
    for path, module in model.named_modules():
        has_meta_buffer = any(buffer.is_meta for buffer in module.buffers(recurse=False))
        if has_meta_buffer and not any(param.is_meta for param in module.parameters(recurse=False)):
            _materialize(model, path, {}, {path: module}, weights)


@torch.no_grad()
def _materialize(
    model: nn.Module,
    prefix: str,
    params: Mapping[nn.Parameter, ParamSpec],
    owners: Mapping[str, nn.Module],
    weights: WeightFiles | None,
) -> None:
    """Memory for `params` and for the meta buffers of `owners`, then their values. See [Note: Initialisers run ...]."""
    blanks: dict[str, tuple[torch.Tensor, int]] = {}
    for param, spec in params.items():
        _give_memory(param, spec.name)
        blanks[spec.name] = param, param._version
        if weights is not None:
            weights.fill(param, (spec.name, *spec.aliases))
    for path, owner in owners.items():
        for name, buffer in list(owner.named_buffers(recurse=False)):
            if buffer.is_meta:
                empty = torch.empty_like(buffer, device="cpu")
                setattr(owner, name, empty)
                full_name = f"{path}.{name}".lstrip(".")
                blanks[full_name] = empty, empty._version
                if weights is not None:
                    weights.fill(empty, (full_name,))
    if _unset(model, blanks):
        _run_initialisers(model, prefix, () if weights is not None else params)
    if names := _unset(model, blanks):
        raise ModelError(
            f"Built on the meta device, and set neither by reset_parameters() of a module around it nor by the model's "
            f"_init_weights(module): {_some(names)}. Set it in one of them, name safetensors files that hold it in "
            "tiered_zero.weights, or build it on the CPU (under torch.device('cpu'))."
        )


def _unset(model: nn.Module, blanks: Mapping[str, tuple[torch.Tensor, int]]) -> list[str]:
    """The names under which still lies what was put there, unwritten."""
    names = []
    for full_name, (tensor, version) in blanks.items():
        path, _, name = full_name.rpartition(".")
        if getattr(model.get_submodule(path), name) is tensor and tensor._version == version and tensor.numel():
            names.append(full_name)
    return names


def _give_memory(param: nn.Parameter, name: str) -> None:
    value = nn.Parameter(torch.empty_like(param, device="cpu"), param.requires_grad)
    value.__dict__.update(param.__dict__)  # what others have noted on it; a swap would take it away
    try:
        torch.utils.swap_tensors(param, value)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise ModelError(
            f"{name} was built on the meta device and cannot be given memory ({error}), as in torch.nn's recurrent "
            "modules. Build its module on the CPU (under torch.device('cpu'))."
        ) from error


def _run_initialisers(model: nn.Module, prefix: str, params: Collection[nn.Parameter]) -> None:
    """Those of the modules under `prefix` and of its ancestors, on a stand-in with no bytes but those of `params`."""
    stand_in = _stand_in(model, params)
    general: Callable[[nn.Module], None] | None = getattr(stand_in, "_init_weights", None)

    def initialise(module: nn.Module) -> None:
        own = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
        if own is not None:
            own()
        if general is not None:  # the model's word on its modules is the last, as when it is built with values
            general(module)

    stand_in.get_submodule(prefix).apply(initialise)
    parts = prefix.split(".") if prefix else []
    for depth in reversed(range(len(parts))):
        initialise(stand_in.get_submodule(".".join(parts[:depth])))


def _stand_in(module: nn.Module, params: Collection[nn.Parameter]) -> nn.Module:
    """A copy of the tree with the same buffers; parameters that are not among `params` are new ones on meta."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__.update(module.__dict__)
    twin._parameters = {
        name: param if param is None or param in params else nn.Parameter(_like(param), param.requires_grad)
        for name, param in module._parameters.items()
    }
    twin._modules = {
        name: None if child is None else _stand_in(child, params) for name, child in module._modules.items()
    }
    return twin


def _like(param: nn.Parameter) -> torch.Tensor:
    return torch.empty(param.shape, dtype=param.dtype, device="meta")


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - _NUM_NAMED} more" if len(names) > _NUM_NAMED else ""
    return ", ".join(names[:_NUM_NAMED]) + more
