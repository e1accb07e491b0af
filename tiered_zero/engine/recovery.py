"""Clean up after a call that did not finish. See [Note: Interrupted calls]."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch

from tiered_zero.activations.mover import ActivationMover
from tiered_zero.engine.counts import StepCounts
from tiered_zero.engine.own_backward import CAUGHT, OwnBackward
from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.grads.reducer import GradientReducer
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.params.driver_thread import Phase
from tiered_zero.params.pager import Pager
from tiered_zero.params.pass_scope import PassScope
from tiered_zero.params.visible_gradients import VisibleGradients
from tiered_zero.telemetry.report import StepMeter
from tiered_zero.update.handle import ParamGroupWatch
from tiered_zero.update.policy import UpdatePolicy


@dataclass(frozen=True, kw_only=True)
class Movers:
    """The movers that `TrainStep` orders. `reducer`: averages gradients over ranks; None where there is one.
    `activations`: None where these stay on the device. `drain`: blocks until lanes and disk are idle, also after a call
    that has failed. `reclaim`: releases the staging buffers that it had leased."""

    pager: Pager
    scope: PassScope
    gradients: GradientStore
    visible_gradients: VisibleGradients
    reducer: GradientReducer | None
    policy: UpdatePolicy
    groups: ParamGroupWatch
    activations: ActivationMover | None
    runtime: Runtime
    drain: Callable[[], None]
    reclaim: Callable[[], None]


@final
class StepRecovery:
    """Drops the step of a call that has failed, or latches the engine where the update has begun. `TrainStep` holds it
    and goes through it into each phase. Driver thread.
    """

    def __init__(
        self,
        movers: Movers,
        counts: StepCounts,
        overflow: OverflowGuard,
        arrivals: GradientArrivals,
        own_backward: OwnBackward,
        meter: StepMeter,
    ) -> None:
        self._movers = movers
        self._own_backward = own_backward
        self._counts, self._overflow, self._arrivals, self._meter = counts, overflow, arrivals, meter
        self._phase = movers.pager.phase
        self._ranks = movers.runtime.collectives
        self._before_step: tuple[Any, Any] | None = None

    def check_outside(self, call: str, may_recompute: bool = False) -> None:
        """Raise ModelError where a hook of the user, or a signal's handler, makes `call` inside of a forward, backward
        or step(). The call would clear up what still runs, and find it half made. `may_recompute`: a backward that the
        user has started past the engine may make it."""
        if running := self._running(may_recompute):
            raise ModelError(
                f"{call} was called inside of a {running}, by a hook or a signal's handler, where weights and state "
                "are half of one step and half of the next. Call it after step() has returned: a hook or handler sets "
                "a flag for it, as tiered_zero.stop_on_signals() does."
            )

    def _running(self, may_recompute: bool) -> str:
        """Name what the caller runs inside of; empty: nothing."""
        now = self._phase.now
        if torch._C._current_graph_task_id() != -1 and not (may_recompute and now is Phase.IDLE):
            return "backward"
        if now is not Phase.IDLE:
            return now.value if now in (Phase.FORWARD, Phase.BACKWARD) else "step"
        scope = self._movers.scope
        return "forward" if scope.is_direct and scope.runs_directly() else ""

    @contextmanager
    def call(self, phase: Phase) -> Iterator[None]:
        """Run the block as a call in `phase`; drop the step, or latch, if it raises, and let the failure surface."""
        try:
            self._phase.now = phase
            yield
        except BaseException as error:
            try:
                self._ranks.fail(f"{type(error).__name__}: {error}")
                self._end_failed(error)
                self.latch_ranks(phase.value, error)
            finally:
                self._phase.now = Phase.IDLE
            if isinstance(error, Exception):
                self._movers.policy.failures.surface(error)
            raise
        self._phase.now = Phase.IDLE

    def begin_step(self) -> None:
        """Remember counts and loss scale, which a step that is dropped gets back."""
        self._before_step = self._counts.state(), self._overflow.state()

    def end_step(self) -> None:
        """Keep the counts: the step is made, or counted as one that is not."""
        self._before_step = None

    def recover(self) -> None:
        """Begin a call: drop the step of a forward or backward past the engine that has failed, which nothing of ours
        has seen, or of a call that was broken off. Raises ModelError in a forked child, which has no lane whose job
        would end."""
        pager, scope = self._movers.pager, self._movers.scope
        is_backward = self._own_backward.has_failed
        is_forward = bool(pager.frames) or (scope.is_direct and not scope.runs_directly())
        was_broken_off = pager.driver.was_broken_off or (pager.copies.call and pager.copies.was_broken_off())
        if self._phase.now is Phase.IDLE and (is_backward or is_forward or was_broken_off):
            pager.driver.process.check()
            self._phase.now = Phase.BACKWARD if is_backward else Phase.FORWARD
            if is_backward or is_forward:
                self.fail_ranks(_caught_in_backward() if is_backward else None)
            self.drop()
            self._phase.now = Phase.IDLE

    def _end_failed(self, error: BaseException) -> None:
        """End the phase of a call that `error` has ended: a forward's frames, or the step, or the engine."""
        if self._phase.now is Phase.FORWARD and isinstance(error, Exception):
            self._end_forward()
            return
        if self._phase.now is Phase.UPDATE:
            self.latch("step() has failed after its update had begun")
        self.drop()

    def _end_forward(self) -> None:
        self._phase.has_own_backward = False
        self._movers.pager.abort()
        self._movers.scope.abort()
        self._movers.visible_gradients.show()

    def drop(self) -> None:
        """Drop the step of a call whose own error is raised."""
        try:
            self.abort()
        except TieredZeroError:
            pass  # of a transfer whose gradient is dropped
        except BaseException as error:
            self.latch(f"a step could not be dropped ({type(error).__name__}: {error})")
            if not isinstance(error, Exception):
                raise

    def abort(self) -> None:
        """Drop the step: drain transfers, evict units, drop gradients. Raises the error of a gradient's transfer."""
        self._movers.policy.drop(self._movers.drain)
        self._own_backward.abort()
        self._movers.pager.abort()
        self._movers.scope.abort()
        if self._movers.activations is not None:
            self._movers.activations.abort()
        self._meter.clear()
        if self._before_step is not None:
            counts, overflow = self._before_step
            self._counts.restore(counts)
            self._overflow.restore(overflow)
            self._before_step = None
        self._counts.drop()
        try:
            self.drop_gradients()
        finally:
            self._arrivals.abort()
            self._movers.gradients.abort()
            if self._movers.reducer is not None:
                self._movers.reducer.abort()
            self._movers.reclaim()
            self._movers.pager.driver.was_broken_off = False

    def drop_gradients(self, are_taken: bool = False) -> None:
        """`are_taken`: the update has them; what is left are those that hooks of the optimizer have assigned since."""
        visible, gradients = self._movers.visible_gradients, self._movers.gradients
        self._arrivals.reset()
        visible.hide()
        visible.set_hidden()
        if are_taken and not gradients.homes.has_gradients:
            gradients.param_grads.take_unstored()
        else:
            gradients.discard()

    # -- the end of the run ----------------------------------------------------------------------------------------

    def latch(self, why: str) -> None:
        """Refuse every later call."""
        if self._movers.policy.failures.error is None:
            self._movers.policy.latch(why)

    def latch_ranks(self, what: str, error: BaseException) -> None:
        """With other ranks an error ends the run: they have made other collectives than this one."""
        if self._ranks.world_size > 1 and self._movers.policy.failures.error is None:
            self.latch(f"{what} raised {type(error).__name__}, which ends the run on all ranks")
            self._movers.drain()

    def fail_ranks(self, error: BaseException | None) -> None:
        """End the run on all ranks where a forward or backward past the engine has ended early on this one, between
        collectives of it: the others wait there, and this rank's program goes on. `error`: None where the program has
        handled it by now, so that it is not known."""
        name = self._phase.now.value
        if not self._own_backward.others_wait:
            return
        text = CAUGHT if error is None else f"{type(error).__name__}: {error}"
        self._ranks.fail(f"its {name} past the engine was ended by {text}")
        if self._movers.policy.failures.error is None:
            self.latch(f"a {name} past the engine was ended by {text}, which ends the run on all ranks")
            self._movers.drain()


def _caught_in_backward() -> BaseException | None:
    """Return the exception that the program handles now, if autograd has raised it."""
    error = sys.exc_info()[1]
    frames = traceback.walk_tb(error.__traceback__ if error is not None else None)
    return error if any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames) else None
