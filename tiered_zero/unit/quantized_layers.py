"""Page layers that bitsandbytes has quantized to 4 bits (`Linear4bit`): their weights and their scales.

[Note: Layers of 4 bits] bitsandbytes' autograd function keeps the packed weight as an attribute of its context, where
hooks for saved tensors do not see it. The weight would stay on the device from forward to backward. So `_Matmul4bit`
runs the same operators, but saves the weight as autograd's own functions do. The layer gets a `forward` of its own that
calls `_Matmul4bit`, because a hook cannot replace the call inside the class's `forward`. The scales of the blocks
(`absmax`, an eighth of the packed bytes) are plain tensors in the weight's `quant_state`. `statistics` makes parameters
of them. These belong to the layer's unit but to no module, and keep their dtype; `state_dict()` has them under
bitsandbytes' own keys. The tables of 16 and 256 values stay on the device, as buffers do."""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from tiered_zero.unit.guard import OffloadedParameter, require_handler


def is_4bit(module: nn.Module) -> bool:
    """Return whether the module is a Linear4bit whose weight is packed and frozen."""
    library: Any = sys.modules.get("bitsandbytes")
    if library is None or not isinstance(module, library.nn.Linear4bit):
        return False
    weight: Any = module.weight
    return getattr(weight, "quant_state", None) is not None and not weight.requires_grad


def statistics(module: nn.Module) -> dict[str, nn.Parameter]:
    """Turn the scales of a layer quantized to 4 bits into parameters. Return bitsandbytes' name -> parameter; return {}
    for another module."""
    if not is_4bit(module):
        return {}
    weight: Any = module.weight
    return {f"weight.{name}": _as_param(owner) for name, owner in _owners(weight.quant_state)}


def _owners(state: Any) -> list[tuple[str, Any]]:
    """Return a pair for each scale of a quant_state: the scale's name, and the object whose attribute `absmax` is the
    scale."""
    return [("absmax", state), *([("nested_absmax", state.state2)] if state.nested else [])]


def _as_param(owner: Any) -> nn.Parameter:
    if not isinstance(owner.absmax, nn.Parameter):
        owner.absmax = nn.Parameter(owner.absmax, requires_grad=False)
    param: nn.Parameter = owner.absmax
    return param


def _with_scales(state: Any, scales: Sequence[torch.Tensor | None]) -> Any:
    """Return a shallow copy of the quant_state `state`, with `scales` instead of its own scales."""
    state = copy.copy(state)
    if state.nested:
        state.state2 = copy.copy(state.state2)
    for (_, owner), absmax in zip(_owners(state), scales, strict=True):
        owner.absmax = absmax
    return state


class Forward4bit:
    """The `forward` of a paged layer quantized to 4 bits. A copy or pickle of the layer has the `forward` of the
    layer's class."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        # not a decorator, which would import the compiler, for a second, in every process
        self._uncompiled: Any = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._uncompiled(x)
        return found

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        module, bias = self._module, self._module.bias
        state = module.weight.quant_state
        scales = [owner.absmax for _, owner in _owners(state)]
        _fault_in([module.weight, *scales, *([] if bias is None else [bias])], type(module).__name__)
        if state.code.device != module.weight.device:
            state.to(module.weight.device)  # the tables: the scales are there already
        plain = _with_scales(state, [torch.Tensor.detach(param) for param in scales])
        if (
            not (torch.is_grad_enabled() and x.requires_grad)  # nothing is kept
            or (bias is not None and (bias.requires_grad or bias.dtype != (module.compute_dtype or x.dtype)))
            or x.shape[-1] != state.shape[-1]  # the weight is packed as [in, out], which is deprecated
        ):
            return self._class_forward(x, plain)
        # what Linear4bit.forward does
        if not module.compute_type_is_set:
            module.set_compute_type(x)
            module.compute_type_is_set = True
        found: torch.Tensor = _Matmul4bit.apply(  # type: ignore[no-untyped-call]
            x if module.compute_dtype is None else x.to(module.compute_dtype), bias, plain, module.weight, *scales
        )
        return found.to(x.dtype)

    def _class_forward(self, x: torch.Tensor, plain: Any) -> torch.Tensor:
        """Run the `forward` of the layer's class with `plain` as the weight's quant_state."""
        weight, state = self._module.weight, self._module.weight.quant_state
        # plain scales: bitsandbytes asks for their addresses, and the engine would then watch a parameter's values
        weight.quant_state = plain
        try:
            found: torch.Tensor = type(self._module).forward(self._module, x)
            return found
        finally:
            weight.quant_state = state

    def __reduce__(self) -> Any:
        return getattr, (self._module, "forward")


def _fault_in(params: Sequence[nn.Parameter], function: str) -> None:
    """Fetch the offloaded parameters among `params`, because the layer calls no function of torch that would fetch
    them."""
    if guarded := [param for param in params if isinstance(param, OffloadedParameter)]:
        others = [param for param in params if not isinstance(param, OffloadedParameter)]
        require_handler(guarded[0]).fault_in([*guarded, *others], function)


class _Matmul4bit(torch.autograd.Function):
    """Multiplies as bitsandbytes' MatMul4Bit does: the same operators in the same order."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor | None,
        quant_state: Any,
        weight: nn.Parameter,
        *scales: nn.Parameter,
    ) -> torch.Tensor:
        library: Any = sys.modules["bitsandbytes"]
        ctx.save_for_backward(weight, *scales)
        ctx.quant_state = _with_scales(quant_state, [None for _ in scales])  # views of scales would keep the unit
        found: torch.Tensor = library.matmul_4bit(x, weight, bias=bias, quant_state=quant_state)  # grad mode is off
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        library: Any = sys.modules["bitsandbytes"]
        weight, *scales = ctx.saved_tensors
        values = library.functional.dequantize_4bit(weight.view(-1, 1), _with_scales(ctx.quant_state, scales))
        return torch.matmul(grad, values.to(grad.dtype)), None, None, None, *(None for _ in scales)
