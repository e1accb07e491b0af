"""Check that the model has the same parameters at the same places while an engine trains them."""

from __future__ import annotations

from typing import final

from torch import nn

from tiered_zero.errors import ModelError


@final
class ParameterSlots:
    """Compares pointers only, in each call of the engine. Driver thread."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._slots = [
            (f"{path}.{name}".lstrip("."), module._parameters, name, param)
            for path, module in model.named_modules()
            for name, param in module._parameters.items()
            if param is not None
        ]
        self._children = self._list_children()

    def _list_children(self) -> list[tuple[dict[str, nn.Module | None], str, nn.Module | None]]:
        modules = [module._modules for module in self._model.modules()]
        return [(children, name, child) for children in modules for name, child in children.items()]

    def check(self) -> None:
        """Raises ModelError where a parameter, or the module that has it, was replaced or removed."""
        for full_name, params, name, param in self._slots:
            if params.get(name) is not param:
                raise _refuse(full_name)
        for children, name, child in self._children:
            if children.get(name) is not child:
                self._check_reachable()
                return

    def _check_reachable(self) -> None:
        """A module was replaced: fine where what replaces it has the same parameters, as torch.compile's wrapper."""
        held = {id(module._parameters) for module in self._model.modules()}
        for full_name, params, _, _ in self._slots:
            if id(params) not in held:
                raise _refuse(full_name)
        self._children = self._list_children()


def _refuse(name: str) -> ModelError:
    return ModelError(
        f"Parameter {name} is not the one that was handed to tiered_zero.initialize(): it, or a module around it, was "
        "replaced or removed, so that the engine would train and save an orphan. Put the former object back; write new "
        "values into it inside `with tiered_zero.gathered(param, modify=True):` or by load_state_dict() without "
        "assign=True; or make a new engine for a changed model."
    )
