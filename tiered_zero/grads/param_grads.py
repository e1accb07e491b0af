"""Give users `param.grad` between backward and step(): read, change or assign it, and store it at its home."""

from __future__ import annotations

from collections.abc import Collection
from typing import final

import torch
from torch import nn

from tiered_zero.errors import ModelError
from tiered_zero.grads.homes import CHANGED_GRADIENT, GRAD_SLOT, GradientHomes
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.grads.unit_gradients import UnitGradients
from tiered_zero.layout.flat import FlatEntry


@final
class ParamGrads:
    """Shows users the gradients at their homes, and stores those they assign. Driver thread; `store_shown` and
    `take_unstored` also run on autograd's."""

    def __init__(self, homes: GradientHomes, overflow: OverflowGuard) -> None:
        """`overflow`: holds the loss scale, which multiplies gradients at their homes."""
        self._homes, self._overflow = homes, overflow
        self._hidden: str | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient in this step."""
        return self._homes.has_gradients

    def set_hidden(self, why: str | None) -> None:
        """Refuse to read and assign `param.grad` from now on, with the reason `why`; None allows both again."""
        self._hidden = why

    def read(self, param: nn.Parameter) -> torch.Tensor | None:
        """Return `param.grad` between backward and step(): a live view of the gradient's home that users may change in
        place. Under a loss scale it is an fp32 copy without that factor, whose changes count too. Waits until the
        gradient is there. Raises ModelError while hidden. Driver thread."""
        if (place := self._homes.places.get(param)) is None or place[1].param.index not in place[0].present:
            return None
        self._refuse_if_hidden(place[1])
        return place[0].show(place[1], self._overflow.loss_scale)

    def assign(self, param: nn.Parameter, value: torch.Tensor | None) -> None:
        """Do `param.grad = value`; None drops the gradient. The tensor itself is the gradient until the next backward
        or step() copies it to its home.

        `value`: has the parameter's shape, and the dtype and device of the parameter or of the gradient's home; under a
        loss scale also fp32, without that factor. Raises ModelError for others, and while hidden. Driver thread."""
        if (place := self._homes.places.get(param)) is None:
            return
        gradients, entry = place
        index = entry.param.index
        if value is None and index not in gradients.present:
            return
        if self._hidden is not None and any(each.present - each.assigned or each.waiting for each in self._units()):
            self._refuse_if_hidden(entry)
        if value is None:
            gradients.remove(entry)
            return
        if value is gradients.shown.get(index):  # `param.grad *= 2` assigns the same tensor
            return
        gradients.check_new(entry, value)
        devices, dtypes = (param.device, gradients.flat.device), [gradients.unit.dtype, gradients.flat.dtype]
        if self._overflow.loss_scale != 1.0:
            dtypes.append(torch.float32)
            value = value.detach()  # it may be the copy of another gradient, which expires before this one
        if value.shape != entry.param.shape or value.dtype not in dtypes or value.device not in devices:
            raise ModelError(
                f"A gradient of shape {tuple(entry.param.shape)}, {gradients.unit.dtype}, on {param.device} was "
                f"expected for {entry.param.name}; found shape {tuple(value.shape)}, {value.dtype}, on {value.device}."
            )
        if value.untyped_storage()._cdata in self._homes.storages:
            value = value.detach().clone()  # it views another gradient's home, which may change first
        self._homes.wait_update(gradients.unit)
        gradients.assign(entry, value)

    def collect_assigned(self) -> None:
        """Copy the gradients that users assigned to their homes before a step, including those assigned during forward
        or backward."""
        for param, grad in self.take_unstored():
            self.assign(param, grad)
        for gradients in self._units():
            if gradients.shown:
                self.store_shown(gradients)

    def assigned(self) -> dict[nn.Parameter, torch.Tensor]:
        """Return the gradients that users have assigned and that are not at their homes yet."""
        with torch._C.DisableTorchFunctionSubclass():
            found = {param: GRAD_SLOT.__get__(param) for param in self._homes.places}
        for param, (gradients, entry) in self._homes.places.items():
            if (index := entry.param.index) in gradients.assigned:
                found[param] = gradients.shown[index]
        return {param: grad for param, grad in found.items() if grad is not None}

    def store_shown(self, gradients: UnitGradients) -> None:
        """Copy to their homes the gradients of a unit that users assigned, and the copies that users changed."""
        for entry in gradients.unit.entries if self._hidden is not None else ():
            if entry.param.index in gradients.assigned:
                self._refuse_if_hidden(entry)
        scale = self._overflow.loss_scale
        if scale == 1.0 and gradients.paged is None:
            gradients.store_assigned()
        elif changed := gradients.take_changed(scale):
            if scale != 1.0:
                self._homes.promote(gradients, CHANGED_GRADIENT)
            for entry, value in changed:
                gradients.replace(entry, value if scale == 1.0 else value.to(torch.float32) * scale)

    def take_unstored(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Take the gradients out of autograd's own attribute that no hook has moved to their homes."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():
            for param in self._homes.places:
                if (grad := GRAD_SLOT.__get__(param)) is not None:
                    GRAD_SLOT.__set__(param, None)
                    found.append((param, grad))
        return found

    def _units(self) -> Collection[UnitGradients]:
        return self._homes.units.values()

    def _refuse_if_hidden(self, entry: FlatEntry) -> None:
        if self._hidden is not None:
            raise ModelError(f"The gradient of {entry.param.name} cannot be read or changed now: {self._hidden}")
