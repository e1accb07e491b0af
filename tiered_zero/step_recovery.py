"""How a step is cleared up that a call has not brought to its end. See [Note: Interrupted calls]."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch

from tiered_zero.errors import ModelError
from tiered_zero.grads.accumulator import GradientStore
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.overflow import OverflowGuard
from tiered_zero.grads.reducer import GradientReducer
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.params.driver_thread import CallPhase, Phase
from tiered_zero.params.pager import Pager
from tiered_zero.params.pass_scope import PassScope
from tiered_zero.params.visible_gradients import VisibleGradients
from tiered_zero.step_counts import StepCounts
from tiered_zero.telemetry.report import StepMeter
from tiered_zero.update.handle import ParamGroupWatch
from tiered_zero.update.policy import UpdatePolicy

CAUGHT = "an exception that its program has caught"


@dataclass(frozen=True, kw_only=True)
class Movers:
    """What `TrainStep` orders. `reducer`: averages gradients over ranks; None where there is one. `drain`: blocks until
    lanes and disk are idle, also after an interrupted call."""

    pager: Pager
    scope: PassScope
    gradients: GradientStore
    visible_gradients: VisibleGradients
    reducer: GradientReducer | None
    policy: UpdatePolicy
    groups: ParamGroupWatch
    runtime: Runtime
    drain: Callable[[], None]


class StepRecovery:
    """What the calls of an engine share: the phase that they are in, and how one that has ended early is cleared up.

    Base of `TrainStep`. Driver thread.
    """

    def __init__(self, movers: Movers, counts: StepCounts, overflow: OverflowGuard, arrivals: GradientArrivals) -> None:
        self.pager, self.scope = movers.pager, movers.scope
        self.gradients, self.visible_gradients = movers.gradients, movers.visible_gradients
        self.policy, self.runtime, self._drain_lanes = movers.policy, movers.runtime, movers.drain
        self._reducer = movers.reducer
        self.phase: CallPhase = movers.pager.phase
        self.overflow = overflow
        self.meter = StepMeter(self.runtime.recorder, self.runtime.ledger)
        self.counts = counts
        self.arrivals = arrivals
        self.is_closed = False
        self.failures = self.policy.failures
        self._process = OwnProcess()
        self._before_step: tuple[Any, Any] | None = None
        """The state of counts and loss scale before a step that is not complete."""

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
        """Name what the caller runs inside of; empty: nothing. Phase and frames may be left of a call that was
        interrupted: the stack is what runs."""
        if torch._C._current_graph_task_id() != -1 and not (may_recompute and self.phase.now is Phase.IDLE):
            return "backward"
        frame = sys._getframe(1) if self.phase.now is not Phase.IDLE or self.scope.is_direct else None
        while frame is not None:
            name = frame.f_code.co_name
            if name in ("forward", "backward", "step") and frame.f_locals.get("self") is self:
                return name
            if name == "_call_impl" and self.scope.is_direct and self.scope.has(frame.f_locals.get("self")):
                return "forward"
            frame = frame.f_back
        return ""

    @contextmanager
    def _changing(self, phase: Phase) -> Iterator[None]:
        """Run the block as a call in `phase`; recover where it raises. See [Note: Interrupted calls]."""
        try:
            self.phase.now = phase
            yield
            self.phase.now = Phase.IDLE
        except BaseException as error:
            self.runtime.collectives.fail(f"{type(error).__name__}: {error}")
            self.recover()
            self._latch_ranks(phase.value, error)
            raise

    def _latch_ranks(self, what: str, error: BaseException) -> None:
        """With other ranks an error ends the run: they have made other collectives than this one."""
        if self.runtime.collectives.world_size > 1 and self.failures.error is None:
            self._latch(f"{what} raised {type(error).__name__}, which ends the run on all ranks")

    @property
    def _others_wait(self) -> bool:
        """Whether a forward or backward past the engine, if it ends early, has made other collectives than the other
        ranks make."""
        return self._reducer is not None and (self._reducer.shards_params or self._reducer.is_open)

    def own_backward_failed(self) -> None:
        """A backward past the engine fails. The program may catch that, and never call the engine again: nothing is
        known here of the error, which comes later. Any thread."""
        if self._others_wait:
            self.runtime.collectives.fail_unless_known(f"its backward past the engine was ended by {CAUGHT}")

    def _fail_ranks(self, error: BaseException | None) -> None:
        """End the run on all ranks where a forward or backward past the engine has ended early on this one, between
        collectives of it: the others wait there, and this rank's program goes on. `error`: None where the program has
        handled it by now, so that it is not known."""
        name = self.phase.now.value
        if not self._others_wait:
            return
        text = CAUGHT if error is None else f"{type(error).__name__}: {error}"
        self.runtime.collectives.fail(f"its {name} past the engine was ended by {text}")
        if self.failures.error is None:
            self._latch(f"a {name} past the engine was ended by {text}, which ends the run on all ranks")

    @contextmanager
    def _pass(self, phase: Phase) -> Iterator[None]:
        """Run the block as a forward or a backward."""
        with self._changing(phase):
            self.visible_gradients.hide()
            with self.runtime.recorder.span("compute", phase.value):
                yield
            self.pager.end_pass()
            self.visible_gradients.show()

    def _recover_between_calls(self) -> None:
        """Recover, unless a call of the engine runs. Called where modules and weights are used past the engine."""
        if self.phase.now is Phase.IDLE:
            self.recover()

    def recover(self) -> None:
        """Clear up after an interrupted call, if there was one. See [Note: Interrupted calls]."""
        if self.is_closed or not self._process.is_current():
            return
        changing = self.pager.offloaded_params.changing
        if changing is not None and self.failures.error is None:
            self._latch(f"a change by hand of the parameters of {changing.name} was interrupted")
        phase = self.phase
        if phase.now is Phase.IDLE:
            if not (self.pager.was_interrupted or self.arrivals.was_interrupted):
                return
            is_backward = phase.has_own_backward or self.arrivals.was_interrupted
            phase.now = Phase.BACKWARD if is_backward else Phase.FORWARD
            self._fail_ranks(_caught_in_backward() if is_backward else None)
        if phase.now is Phase.UPDATE and self.failures.error is None:
            self._latch("step() was interrupted after its update had begun")
        # a drain cancels an open update, and with it the step: where both are there a forward drops the step too
        if phase.now is Phase.FORWARD and not (self.policy.is_open and self.pager.needs_drain):
            if self.pager.needs_drain:
                self._drain()
            self.pager.abort()
            self.scope.abort()
            self.visible_gradients.show()
        else:
            with suppress(Exception):  # errors of what is dropped
                self._drop_step()
        phase.now = Phase.IDLE

    def drop_interrupted(self) -> None:
        """Drop the step of an interrupted call: the caller cannot know how far it came, and repeats the batch."""
        self.phase.now = Phase.DROP
        self.recover()

    def abort(self) -> None:
        """Drop the step: drain transfers, evict units, drop gradients. Raises the error of a gradient's transfer."""
        self.recover()
        if not self.is_closed:
            self.phase.now = Phase.DROP
            self._drop_step()
            self.phase.now = Phase.IDLE

    def _drop_step(self) -> None:
        self._drain()
        self.policy.abort()
        self.pager.abort()
        self.scope.abort()
        self.meter.clear()
        if self._before_step is not None:
            counts, overflow = self._before_step
            self.counts.restore(counts)
            self.overflow.restore(overflow)
        self.counts.drop()
        try:
            self._drop_gradients()
        finally:
            self.arrivals.abort()
            self.gradients.abort()
            if self._reducer is not None:
                self._reducer.abort()

    def _latch(self, why: str) -> None:
        self._drain()
        self.policy.latch(why)

    def _drain(self) -> None:
        self.policy.cancel_open()
        self._drain_lanes()
        self.policy.cancel_prefetch()

    def _drop_gradients(self) -> None:
        self.arrivals.reset()
        self.visible_gradients.hide()
        self.visible_gradients.set_hidden()
        self.gradients.discard()


def _caught_in_backward() -> BaseException | None:
    """Return the exception that the program handles now, if autograd has raised it."""
    error = sys.exc_info()[1]
    frames = traceback.walk_tb(error.__traceback__ if error is not None else None)
    return error if any(frame.f_code.co_name == "_engine_run_backward" for frame, _ in frames) else None
