"""Follow a backward that the user starts past the engine, as by `loss.backward()`."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import final

import torch

from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.reducer import GradientReducer
from tiered_zero.params.driver_thread import BACKWARD, Phase
from tiered_zero.params.pager import Pager
from tiered_zero.params.visible_gradients import VisibleGradients

CAUGHT = "an exception that its program has caught"


@final
class OwnBackward:
    """Notices a backward that the engine did not start, and follows it to its end.

    Autograd keeps a callback of ours while the backward runs. It calls it at the end, or drops it when an exception
    ends the backward. Backwards that reentrant checkpoints run inside of it are a part of it. Driver thread, or
    autograd's while the driver waits.
    """

    def __init__(
        self,
        pager: Pager,
        arrivals: GradientArrivals,
        visible_gradients: VisibleGradients,
        reducer: GradientReducer | None,
    ) -> None:
        self._pager, self._arrivals, self._visible_gradients = pager, arrivals, visible_gradients
        self._reducer = reducer
        self._phase = pager.phase
        self._ending: weakref.ref[Callable[[], None]] | None = None
        """What autograd calls at the end."""

    def notice(self) -> None:
        """Begin to follow the backward that runs, unless it is the engine's or is followed. Called before a parameter
        is fetched and when a gradient comes. Raises ModelError while another thread is inside the engine."""
        phase, driver, task = self._phase, self._pager.driver, torch._C._current_graph_task_id()
        if task == -1:
            if phase.has_own_backward and not driver.is_other():
                phase.has_own_backward = False  # an exception has ended it; the next call drops the step
                self._pager.end_pass()
            return
        if task == phase.task:
            return
        driver.check(BACKWARD)
        if phase.now is Phase.BACKWARD or (self._ending is not None and self._ending() is not None):
            phase.task = task
            return
        driver.begin_backward()
        phase.task = task
        phase.has_own_backward = phase.pass_name == "idle"
        end = partial(self._end)  # a new object, which nothing but autograd keeps
        self._ending = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._arrivals.begin_own_backward()

    @property
    def has_failed(self) -> bool:
        """Whether an exception has ended the backward that was followed last. Between calls."""
        if self._ending is None or self._ending() is None:
            return self._ending is not None
        return torch._C._current_graph_task_id() == -1 and not self._pager.driver.is_other()

    @property
    def others_wait(self) -> bool:
        """Whether other ranks wait in collectives if a forward or backward past the engine ends early on this one."""
        return self._reducer is not None and (self._reducer.shards_params or self._reducer.is_open)

    def abort(self) -> None:
        """No backward runs any more."""
        self._ending = None
        self._phase.has_own_backward = False
        self._pager.driver.end_backward()

    def _end(self) -> None:
        """Release what the backward holds, and finish the transfers of its gradients. On the thread that waits."""
        self._pager.end_pass()
        self._arrivals.end_own_backward()
        self._visible_gradients.show()
        self.abort()  # last: where this was not reached the next call drops the step
