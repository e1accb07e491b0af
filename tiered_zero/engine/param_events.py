"""Events of parameters past the engine's calls: uses while guarded, copies, reads and changes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

import torch
from torch import nn

from tiered_zero.engine.entry import Entrance, Movers
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.layout.flat import Unit
from tiered_zero.unit.driver_thread import Phase


@final
class ParamEvents:
    """The handler of an engine's parameters. Guarded parameters, `gathered`, state_dict and copies of modules call it.
    Driver thread, or autograd's while the driver waits in backward.
    """

    def __init__(self, movers: Movers, entrance: Entrance, arrivals: GradientArrivals) -> None:
        self.pager = movers.pager
        self.policy = movers.policy
        self._accelerator = movers.runtime.accelerator
        self._entrance, self._arrivals = entrance, arrivals
        self._reducer = movers.reducer

    def before_weights_read(self) -> None:
        """Wait for every update, and make a delayed one visible. Called by `gathered`, state_dict and copies."""
        self.pager.driver.process.check()
        if not self.pager.is_running() and self.pager.phase.now is Phase.IDLE:
            self._entrance.recover()
        self.policy.finish()
        self._accelerator.check_compute()

    def before_weights_write(self) -> None:
        """Wait for every update, and drop prefetched state. Called before weights or state are changed by hand."""
        self.policy.finish(before_write=True)

    def latch(self, why: str) -> None:
        """Refuse every later call: a change of weights has failed half way."""
        self._entrance.latch(why)

    def pre_state_dict(self, module: nn.Module) -> None:
        """Begin a module's state_dict: make every update visible, and copy each parameter once until it ends."""
        self.pager.num_uses += 1
        self.pager.copies.start(self.before_weights_read, module.parameters())

    def fault_in(self, params: Sequence[nn.Parameter], function: str) -> None:
        """Make `params`, arguments of `function`, usable, or raise; the first is guarded."""
        self._entrance.notice_backward()
        self.pager.fault_in(params, function)

    def notice_backward(self) -> None:
        """A backward is about to need a parameter: follow one that the user has started past the engine."""
        self._entrance.notice_backward()

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """Reduce what backward has passed before another unit is gathered. See [Note: Places of reductions]."""
        if self._reducer is None:
            return
        if pass_name == "backward":
            self._arrivals.note_backward(unit)
        elif self.pager.frames and (self.pager.phase.records or torch.is_grad_enabled()):
            self._reducer.note_forward(unit.index)

    def copy_of(self, param: nn.Parameter) -> torch.Tensor | None:
        """Copy a guarded parameter to the CPU while a state_dict is taken; else return None."""
        return self.pager.copies.take(param) if self.pager.copies.is_open else None

    def idle_copy(self, param: nn.Parameter) -> torch.Tensor | None:
        """Copy a guarded parameter to the CPU for a copy of its module; return None while modules run."""
        return self.pager.idle_copy(param, self.before_weights_read)

    def watch(self, param: nn.Parameter) -> None:
        """Watch the values of a parameter in use, whose memory user code is about to get."""
        self.pager.changes.watch(param)
