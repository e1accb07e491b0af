"""`param.grad` between backward and step()."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from torch import nn

from tiered_zero.unit.param_handlers import GradientHome, set_shown_gradients

_HIDDEN_BY_UPDATE = (
    'its update begins in backward, as it does where nothing is clipped or checked. Set "tiered_zero": '
    '{"optimizer_in_backward": false} to read and change gradients until step(). To clip, set gradient_clipping; '
    "engine.get_global_grad_norm() has the norm after step()."
)
_HIDDEN_BY_RANKS = (
    "it is this rank's own until step(), which averages the gradients of all ranks: leave DistributedDataParallel out. "
    "To clip, set gradient_clipping; engine.get_global_grad_norm() has the norm after step()."
)


@final
class VisibleGradients:
    """Lets `param.grad` of trainable parameters be read from the gradient's home, from backward to step().

    A backward moves each gradient to its home, which may be on another device and, where micro-batches are summed, in
    fp32; autograd's own attribute could hold neither. A parameter in use asks here while there are gradients and no
    call is running; a guarded one at any time. Without gradients autograd's attribute is the place for what users
    assign. Driver thread.
    """

    def __init__(self, home: GradientHome, num_ranks: int = 1) -> None:
        self._params: Sequence[nn.Parameter] = ()
        self.home = home
        self.is_open = False
        self._num_ranks = num_ranks

    def open(self, params: Sequence[nn.Parameter]) -> None:
        """`params`: all that are trainable."""
        self._params = params
        for param in params:
            set_shown_gradients(param, self)

    def set_hidden(self, updates_in_backward: bool = False) -> None:
        """Refuse to read or assign gradients until step(), where an update or other ranks change them.

        `updates_in_backward`: the same in every step, though the first step's update never begins in backward.
        """
        by_ranks = _HIDDEN_BY_RANKS if self._num_ranks > 1 else None
        self.home.set_hidden(_HIDDEN_BY_UPDATE if updates_in_backward else by_ranks)

    def show(self) -> None:
        """Show gradients, if there are any: a forward or a backward has ended."""
        self.is_open = self.home.has_gradients

    def hide(self) -> None:
        """Hide gradients: a forward, a backward or a step begins, or they are dropped."""
        self.is_open = False

    def close(self) -> None:
        self.hide()
        for param in self._params:
            set_shown_gradients(param, None)
