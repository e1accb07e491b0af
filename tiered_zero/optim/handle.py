"""The optimizer that the user holds: a real torch.optim.Optimizer whose step is the engine's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer

from tiered_zero.errors import ModelError


class TieredOptimizer(Optimizer):
    """Live `param_groups` over the model's parameters; state rests on the tiers, not in `state`.

    Every LR scheduler of torch drives it, and changes to a group's values take effect at the next step. `param_groups`
    are the very dicts of `source` where the user brought an optimizer, so that schedulers built on that one still work.
    """

    overflow = False
    """Whether the last step was skipped because its gradients were not finite."""

    def __init__(
        self,
        source: Optimizer,
        step: Callable[[], None],
        zero_grad: Callable[[bool], None],
        loss_scale: Callable[[], float],
    ) -> None:
        super().__init__([{"params": list(group["params"])} for group in source.param_groups], dict(source.defaults))
        self.param_groups = source.param_groups
        self._source = source
        self._take_step = step
        self._zero_grad = zero_grad
        self._loss_scale = loss_scale

    @property
    def loss_scale(self) -> float:
        """What `backward` multiplies the loss by: of fp16, else 1."""
        return self._loss_scale()

    @property
    def cur_scale(self) -> float:
        return self._loss_scale()

    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """The same as `engine.step()`: counts a micro-batch, and updates at an accumulation boundary."""
        if closure is not None:
            raise ModelError("Closures re-run forward and backward inside step(), which an offloaded update cannot do.")
        self._take_step()
        return None

    def mark_stepped(self) -> None:
        """An update was made: schedulers check that it came before their own step, by the flag that torch's wrapper
        sets.
        """
        self.overflow = False
        for optimizer in (self, self._source):
            optimizer._opt_called = True  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """The same as `engine.zero_grad()`."""
        self._zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if hasattr(self, "_take_step"):
            raise ModelError(
                "Parameters cannot join after tiered_zero.initialize(): their state is laid out when the run starts. "
                "Pass all parameter groups to initialize(); set requires_grad=False or lr=0 for those that shall wait."
            )
        super().add_param_group(param_group)
