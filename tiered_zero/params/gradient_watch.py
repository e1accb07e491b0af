"""Tells who looks for a gradient that the run has taken, where plain PyTorch would have left it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import final

from torch import nn

from tiered_zero.params.storage import FlatStorage, on_grad_asked

logger = logging.getLogger("tiered_zero")


@final
class GradientWatch:
    """From a backward until its step, `param.grad` is None: `clip_grad_norm_` over the parameters does nothing.

    `residents`: storages whose parameters are plain between calls; from `begin` to `end` they are of a class that
    tells. Those that are away are of such a class anyway. `is_held`: whether the run has taken a gradient of the
    parameter. Driver thread.
    """

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        residents: Sequence[FlatStorage],
        is_held: Callable[[nn.Parameter], bool],
    ) -> None:
        self._params = tuple(params)
        self._residents = tuple(residents)
        self._is_held = is_held
        self._is_open = False
        self._told = False
        for param in self._params:
            on_grad_asked(param, self._answer)

    def begin(self) -> None:
        """A backward has ended."""
        self._is_open = True
        for storage in self._residents:
            storage.watch_grads()

    def end(self) -> None:
        """A forward, a backward or a step begins."""
        self._is_open = False
        for storage in self._residents:
            storage.unwatch_grads()

    def close(self) -> None:
        self.end()
        for param in self._params:
            on_grad_asked(param, None)

    def _answer(self, param: nn.Parameter) -> None:
        if self._is_open and not self._told and self._is_held(param):
            self._told = True
            logger.warning(
                "backward has taken the gradients: parameter.grad is None until the next one, and what a loop does "
                "with it (clip_grad_norm_, zero_grad, logging) does nothing. Clip with gradient_clipping in the "
                "config; engine.get_global_grad_norm() has the norm after step(), engine.zero_grad() drops gradients."
            )
