"""The first values of parameters: from the model as it was built, from safetensors files, or from its own initialisers.

A model built on the meta device has shapes and no bytes. It is materialised module group by module group: values are
made on the CPU in the dtype that the model declares, go to their tiers, and are dropped before the next group is made,
so that a model larger than host memory can start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack

import torch
from safetensors import safe_open
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.layout.flat import ParamSpec


class WeightFiles:
    """Tensors by name from safetensors files, read one at a time. Raises ModelError for a file that cannot be read."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._stack = ExitStack()
        self._files: dict[str, object] = {}
        for path in paths:
            try:
                file = self._stack.enter_context(safe_open(path, framework="pt"))
            except Exception as error:
                raise ModelError(f"tiered_zero.weights: {path} cannot be read as safetensors ({error}).") from error
            self._files.update(dict.fromkeys(file.keys(), file))

    def tensor(self, spec: ParamSpec) -> torch.Tensor:
        """[spec.shape] in the file's dtype. Raises ModelError where no file has it, or has another shape."""
        for name in (spec.name, *spec.aliases):
            if name in self._files:
                value: torch.Tensor = self._files[name].get_tensor(name)  # type: ignore[attr-defined]
                if tuple(value.shape) != spec.shape:
                    raise ModelError(
                        f"tiered_zero.weights: {name} has shape {tuple(value.shape)}, the model {spec.shape}."
                    )
                return value
        raise ModelError(f"tiered_zero.weights: no file has {spec.name}; they hold {len(self._files)} other tensors.")

    def close(self) -> None:
        self._stack.close()


def materialize_module(model: nn.Module, prefix: str, params: Sequence[nn.Parameter], weights: WeightFiles | None,
                       specs: dict[nn.Parameter, ParamSpec]) -> None:  # fmt: skip
    """Give the meta parameters among `params`, which lie under module `prefix`, and the buffers beside them, values on
    the CPU.

    A parameter keeps its identity, so tied names stay tied. Raises ModelError where nothing initialises it.
    """
    missing = {param for param in params if param.is_meta}
    module = model.get_submodule(prefix)
    owners = [(n, m) for n, m in module.named_modules() if any(p in missing for p in m.parameters(recurse=False))]
    for param in missing:
        value = weights.tensor(specs[param]).to(param.dtype) if weights else torch.empty_like(param, device="cpu")
        values = nn.Parameter(value, requires_grad=param.requires_grad)
        torch.utils.swap_tensors(param, values)  # type: ignore[no-untyped-call]
    for name, owner in owners:
        buffers = dict(_empty_buffers(owner))
        if weights is None or buffers:
            own = [p for p in owner.parameters(recurse=False) if p in missing]
            _initialise(model, f"{prefix}.{name}".strip("."), owner, own, weights, specs)
        for buffer_name, (buffer, version) in buffers.items():
            if getattr(owner, buffer_name) is buffer and buffer._version == version:
                raise ModelError(
                    f"Buffer {buffer_name} of {prefix}.{name} was built on the meta device and its module's "
                    f"reset_parameters() does "
                    "not fill it. Fill it there, or build the buffer on the CPU."
                )


def check_buffers(model: nn.Module) -> None:
    """Raises ModelError for a buffer that is still without bytes."""
    for name, buffer in model.named_buffers():
        if buffer.is_meta:
            raise ModelError(
                f"Buffer {name} was built on the meta device, in a module without parameters of its own, so nothing "
                f"fills it. "
                "Build it on the CPU (torch.device('cpu') around its creation)."
            )


def _empty_buffers(module: nn.Module) -> Iterator[tuple[str, tuple[torch.Tensor, int]]]:
    for name, buffer in list(module.named_buffers(recurse=False)):
        if buffer.is_meta:
            empty = torch.empty_like(buffer, device="cpu")
            setattr(module, name, empty)
            yield name, (empty, empty._version)


def _initialise(
    model: nn.Module,
    name: str,
    module: nn.Module,
    params: Sequence[nn.Parameter],
    weights: WeightFiles | None,
    specs: dict[nn.Parameter, ParamSpec],
) -> None:
    """Run the module's own initialiser; with weight files only its buffers keep what it sets."""
    own: Callable[[], None] | None = getattr(module, "reset_parameters", None)
    general: Callable[[nn.Module], None] | None = getattr(model, "_init_weights", None)
    if own is None and general is None:
        raise ModelError(
            f"Module {name or '<root>'} ({type(module).__name__}) was built on the meta device and has neither "
            "reset_parameters() nor does the model have _init_weights(module). Add one, name safetensors files in "
            "tiered_zero.weights, or build the model on the CPU."
        )
    versions = [param._version for param in params]
    with torch.no_grad():
        if own is not None:
            own()
        if general is not None:  # the model's word on its modules is the last, as when it is built with values
            general(module)
        if weights is not None:
            for param in params:
                param.copy_(weights.tensor(specs[param]))
            return
    for param, version in zip(params, versions, strict=True):
        if param._version == version and param.numel():
            raise ModelError(
                f"{specs[param].name} was built on the meta device and the initialiser of {type(module).__name__} "
                f"does not set it. "
                "Set it in reset_parameters(), or name safetensors files in tiered_zero.weights."
            )
