"""Begin, end and abort the calls of an engine, and count its steps."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, final

import torch
from torch import nn

from tiered_zero.activations.mover import ActivationMover
from tiered_zero.checkpoint.checkpoints import Checkpoints
from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.check import GradCheck, OverflowGuard
from tiered_zero.grads.reduce import GradientReducer
from tiered_zero.grads.store import GradientStore
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.plan.planner import Plan
from tiered_zero.system import OwnProcess
from tiered_zero.telemetry.report import StepMeter, StepReport
from tiered_zero.unit.driver import BACKWARD, Phase
from tiered_zero.unit.pager import Pager
from tiered_zero.update.handle import ParamGroupWatch, TieredOptimizer
from tiered_zero.update.policy import UpdatePolicy

if TYPE_CHECKING:
    from tiered_zero.engine.engine import Engine


@dataclass(frozen=True, kw_only=True)
class Movers:
    """The objects that move bytes; `TrainStep` orders what they do. `reducer`: None with one rank. `activations`: None
    if saved activations stay on the device. `drain`: blocks until lanes and disk are idle. `reclaim`: releases the
    staging buffers that a failed call had leased."""

    pager: Pager
    parameters: ModelParameters
    gradients: GradientStore
    reducer: GradientReducer | None
    policy: UpdatePolicy
    groups: ParamGroupWatch
    activations: ActivationMover | None
    runtime: Runtime
    drain: Callable[[], None]
    reclaim: Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class EngineParts:
    """What an engine holds. `optimizer`: None if it only evaluates. `observers`: called with each step's report."""

    module: nn.Module
    config: Config
    plan: Plan
    optimizer: TieredOptimizer | None
    lr_scheduler: Any
    observers: Sequence[Callable[[StepReport], None]]
    checkpoints: Checkpoints


_Engine = TypeVar("_Engine", bound="Engine")
_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate[_Engine, _Arguments], _Result]


def on_one_thread(method: _Method[_Engine, _Arguments, _Result]) -> _Method[_Engine, _Arguments, _Result]:
    """Decorate a method of the engine to raise ModelError while another thread uses the engine, and inside of a
    forward, backward or step. See [Note: Interrupted calls]."""

    @wraps(method)
    def entered(self: _Engine, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        step, call = self._step, f"engine.{method.__name__}()"
        driver, records = step.pager.driver, torch.is_grad_enabled()
        driver.enter(call)
        try:
            if method.__name__ != "peek":  # it only reads
                step.entrance.check_outside(call, may_recompute=method.__name__ == "forward")
            return method(self, *args, **kwargs)
        except BaseException as error:
            if not isinstance(error, Exception):
                driver.was_broken_off = True
                torch.set_grad_enabled(records)  # a torch.no_grad() may have been broken off as it ended
            raise
        finally:
            driver.leave()
            if step.holds_interrupts:
                step.end_hold()  # raises a KeyboardInterrupt that was held back

    return entered


@final
class ModelParameters:
    """Checks that a model keeps the parameters with which its run began."""

    def __init__(self, model: nn.Module, trains: bool) -> None:
        self.model = model
        self._trains = trains
        named = dict(model.named_parameters())
        self._names = list(named)
        self._own = self._seen = list(map(id, named.values()))
        """The identities of the parameters, in the order of the model: `_own` when the run began, `_seen` at the last
        check."""
        self._params = list(named.values())  # kept alive, so that no new object gets their identity
        self._frozen = {name: param for name, param in named.items() if not param.requires_grad}

    def check(self) -> None:
        """Raise ModelError if a parameter was replaced or removed. In a run that trains, also if a trainable one was
        added or a frozen one was thawed."""
        if (seen := list(map(id, self.model.parameters()))) != self._seen:
            self._check_changed(seen)
            self._seen = seen
        if not (self._frozen and self._trains):
            return
        with torch._C.DisableTorchFunctionSubclass():
            thawed = next((name for name, param in self._frozen.items() if param.requires_grad), None)
        if thawed is not None:
            raise ModelError(
                f"Parameter {thawed} requires a gradient, but was frozen when the run started: it has no optimizer "
                "state, and would never be updated. Freeze parameters that shall wait after tiered_zero.initialize()."
            )

    def _check_changed(self, seen: list[int]) -> None:
        """Raise ModelError if a parameter was replaced or removed; in a run that trains, also if a trainable one was
        added. `seen`: the identities of the present parameters."""
        own = set(self._own)
        kept = [identity for identity in seen if identity in own]
        if kept != self._own:
            changed = next(at for at, identity in enumerate(self._own) if kept[at : at + 1] != [identity])
            raise _replaced_error(self._names[changed])
        for name, param in self.model.named_parameters():
            if id(param) in own:
                continue
            if not param.requires_grad:
                self._frozen[name] = param
            elif self._trains:
                raise ModelError(
                    f"Parameter {name} was added to the model after tiered_zero.initialize(): it has no optimizer "
                    "state, and would be neither updated nor saved. Add it before initialize(), set "
                    "requires_grad=False for it, or keep its module outside of the model."
                )


def _replaced_error(name: str) -> ModelError:
    return ModelError(
        f"Parameter {name} is not the one that was handed to tiered_zero.initialize(): it, or a module around it, was "
        "replaced or removed, so that the engine would train and save an orphan. Put the former object back; write new "
        "values into it inside `with tiered_zero.gathered(param, modify=True):` or by load_state_dict() without "
        "assign=True; or make a new engine for a changed model."
    )


@final
class StepCounts:
    """Holds the numbers of backward passes, micro-batches and steps. Decides whether a `step()` is a boundary: whether
    it updates the weights. Used on the driver thread."""

    def __init__(self, num_micro_batches: int, *, managed: bool = True) -> None:
        """`managed`: managed_gradient_accumulation of the config. If False, every `step()` is a boundary."""
        self.num_micro_batches = num_micro_batches
        self._managed = managed
        self.micro_steps = 0
        self.global_steps = 0
        self.grad_check: GradCheck | None = None
        """The gradient check of the last step."""
        self.boundary: bool | None = None
        """Whether each `step()` is a boundary, as set by the user. None: every `num_micro_batches`-th is one."""
        self.num_backwards = 0
        """Backwards since the last `step()`."""
        self.is_accumulating = False
        """Whether the last `step()` only counted a micro-batch."""
        self.was_applied = False
        """Whether the last `step()` updated the weights."""
        self._one_backward_each = True
        """Whether every micro-batch so far had one backward, with `step()` right after it."""
        self._num_uses = 0
        """The pager's count of uses of weights when the last backward ended."""

    def is_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if not self._managed:
            return True
        return (self.micro_steps + 1) % self.num_micro_batches == 0 if self.boundary is None else self.boundary

    def begin_backward(self, retain_graph: bool) -> bool:
        """Count an `engine.backward()`. Return whether it is probably the only backward of its micro-batch."""
        self.num_backwards += 1
        # with `retain_graph` another backward of the graph will follow
        return self.num_backwards == 1 and self._one_backward_each and not retain_graph

    def end_backward(self, num_uses: int) -> None:
        self._num_uses = num_uses

    def check_managed(self, num_own_backwards: int) -> None:
        """Raise ModelError if the user's loop accumulates gradients by itself: its loss would be divided twice.
        `num_own_backwards`: calls of `loss.backward()` since the last `step()`."""
        num_backwards = self.num_backwards + num_own_backwards
        if self._managed and self.boundary is None and 1 < self.num_micro_batches <= num_backwards:
            raise ModelError(
                f"optimizer.step() came after {num_backwards} backwards and gradient_accumulation_steps is "
                f"{self.num_micro_batches}: the loop accumulates by itself, and the loss would be divided twice. Leave "
                "gradient_accumulation_steps out of the config (1), or call engine.step() after each backward."
            )

    def begin_step(self, num_uses: int) -> bool:
        """Count a micro-batch, and return whether its step is a boundary. `num_uses`: the pager's count of uses."""
        boundary = self.is_boundary()
        self.micro_steps += 1 if self._managed else max(1, self.num_backwards)
        used = self.num_backwards and num_uses != self._num_uses  # weights were used after the backward
        self._one_backward_each &= self.num_backwards == 1 and not used  # else no update begins in backward any more
        self.num_backwards = 0
        self.is_accumulating = not boundary
        return boundary

    def state(self) -> tuple[int, int, GradCheck | None]:
        """Return the counts that `restore` sets: (micro_steps, global_steps, grad_check)."""
        return self.micro_steps, self.global_steps, self.grad_check

    def restore(self, state: tuple[int, int, GradCheck | None]) -> None:
        """Set the counts to `state`, an earlier result of `state()`. Called if the step is dropped."""
        self.micro_steps, self.global_steps, self.grad_check = state

    def state_dict(self) -> dict[str, Any]:
        """Return the counts as plain values. Call it right after a `step()` that updates."""
        return {
            "micro_steps": self.micro_steps,
            "global_steps": self.global_steps,
            "boundary": self.boundary,
            "one_backward_each": self._one_backward_each,
            "was_applied": self.was_applied,
            "grad_check": asdict(self.grad_check) if self.grad_check is not None else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set the counts to `state`, the result of `state_dict()`, which the caller has checked."""
        self.micro_steps, self.global_steps = state["micro_steps"], state["global_steps"]
        self.boundary, self.was_applied = state["boundary"], state["was_applied"]
        if self._managed and self.boundary is None:  # saved with another number of micro-batches
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self._one_backward_each = state["one_backward_each"]
        self.grad_check = GradCheck(**state["grad_check"]) if state["grad_check"] is not None else None
        self.num_backwards = self._num_uses = 0
        self.is_accumulating = False

    def drop(self) -> None:
        """Set the count of micro-batches back to the last boundary."""
        self.num_backwards = 0
        if self._managed:
            self.micro_steps -= self.micro_steps % self.num_micro_batches
        self.is_accumulating = False


def end_unreferenced_run(process: OwnProcess, resources: Teardown) -> None:
    """Close the `resources` of a run that the user did not close. `process`: the one that built the run."""
    if not process.is_current():
        return  # a forked child owns nothing, and has no lane that could end an update
    if threading.current_thread() is threading.main_thread():
        runs_outside_modes(resources.close)()  # garbage collection may run inside a mode, such as a compiler's tracing
    else:  # perhaps a lane of this run, which cannot wait for itself
        threading.Thread(target=resources.close, name="tiered_zero end").start()


_CAUGHT = "an exception that its program has caught"


@final
class Entrance:
    """Begins and ends each call of an engine, and a `loss.backward()` that the user calls. If a forward fails, it ends
    that forward's uses of units. If another call fails, it drops the step, and latches the engine if the update has
    begun. Used on the driver thread, or on autograd's while the driver waits."""

    def __init__(
        self,
        movers: Movers,
        counts: StepCounts,
        overflow: OverflowGuard,
        arrivals: GradientArrivals,
        meter: StepMeter,
    ) -> None:
        self._movers, self._pager = movers, movers.pager
        self._counts, self._overflow, self._arrivals, self._meter = counts, overflow, arrivals, meter
        self._phase = movers.pager.phase
        self._ranks = movers.runtime.collectives
        self._before_step: tuple[Any, Any] | None = None
        self._ending: weakref.ref[Callable[[], None]] | None = None
        """The callback that autograd calls at the end of a `loss.backward()` of the user, while it exists."""

    def check_outside(self, call: str, may_recompute: bool = False) -> None:
        """Raise ModelError if a forward, backward or step() is running: a hook or a signal handler has then made this
        call. `call`: its name in the message. `may_recompute`: whether a forward inside of a user's `loss.backward()`
        is allowed."""
        if running := self._running(may_recompute):
            raise ModelError(
                f"{call} was called inside of a {running}, by a hook or a signal's handler, where weights and state "
                "are half of one step and half of the next. Call it after step() has returned: a hook or handler sets "
                "a flag for it, as tiered_zero.stop_on_signals() does."
            )

    def _running(self, may_recompute: bool) -> str:
        """Return which call is running: "forward", "backward", "step", or "" for none. `may_recompute`: whether to
        ignore a `loss.backward()` of the user."""
        now = self._phase.now
        if torch._C._current_graph_task_id() != -1 and not (may_recompute and now is Phase.IDLE):
            return "backward"
        if now is not Phase.IDLE:
            return now.value if now in (Phase.FORWARD, Phase.BACKWARD) else "step"
        return "forward" if self._pager.direct is not None and self._pager.runs_directly() else ""

    @contextmanager
    def call(self, phase: Phase) -> Iterator[None]:
        """Run the block as one call in `phase`. If the block raises, drop the step (after an Exception in a forward,
        only end its uses of units), and latch the engine if the run cannot go on. Then raise the block's error, or an
        earlier one that no call has raised yet."""
        try:
            self._phase.now = phase
            yield
        except GeneratorExit:
            raise  # an interrupt came before the block was entered; the generator is discarded
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
        """Save the counts and the loss scale. `abort` restores them if the step is dropped."""
        self._before_step = self._counts.state(), self._overflow.state()

    def end_step(self) -> None:
        """Discard what `begin_step` has saved: the step is complete or skipped."""
        self._before_step = None

    def recover(self) -> None:
        """Drop an unfinished step. An interrupt leaves one, and so does a failed forward or `loss.backward()` past the
        engine. Each call begins with this. Raises ModelError if a forked child process has to drop a step."""
        pager = self._pager
        is_backward = self._backward_has_failed()
        is_forward = bool(pager.frames) or (pager.direct is not None and not pager.runs_directly())
        was_broken_off = pager.driver.was_broken_off or (pager.copies.call and pager.copies.was_broken_off())
        if self._phase.now is Phase.IDLE and (is_backward or is_forward or was_broken_off):
            pager.driver.process.check()
            self._phase.now = Phase.BACKWARD if is_backward else Phase.FORWARD
            try:
                if is_backward or is_forward:
                    self.fail_ranks(None)
                self.drop()
            finally:
                self._phase.now = Phase.IDLE

    # -- a backward past the engine --------------------------------------------------------------------------------

    def notice_backward(self) -> None:
        """Begin to follow a `loss.backward()` of the user. Called before a parameter is fetched and when a gradient
        arrives. Raises ModelError while another thread is inside the engine."""
        phase, driver, task = self._phase, self._pager.driver, torch._C._current_graph_task_id()
        if task == -1:
            if phase.has_own_backward and driver.other() is None:
                phase.has_own_backward = False  # an exception has ended it; the next call drops the step
                self._pager.end_pass()
            return
        if task == phase.task:
            return
        driver.check(BACKWARD)
        if phase.now is Phase.BACKWARD or (self._ending is not None and self._ending() is not None):
            phase.task = task  # the engine's own backward, or an inner one of a reentrant checkpoint
            return
        driver.begin_backward()
        phase.task = task
        phase.has_own_backward = phase.pass_name == "idle"
        end = partial(self._end_backward)  # only autograd keeps it, until it calls it or an exception ends the backward
        self._ending = weakref.ref(end)
        torch.autograd.Variable._execution_engine.queue_callback(end)
        self._arrivals.begin_own_backward()

    def _end_backward(self) -> None:
        """End the user's own `loss.backward()`: release its units, and finish the transfers of its gradients."""
        self._pager.end_pass()
        self._arrivals.end_own_backward()
        self._movers.gradients.show()
        self._stop_following()  # last: if this was not reached, the next call drops the step

    def _stop_following(self) -> None:
        self._ending = None
        self._phase.has_own_backward = False
        self._pager.driver.end_backward()

    def _backward_has_failed(self) -> bool:
        """Return whether an exception ended the user's last own `loss.backward()`. Call it between the engine's
        calls."""
        if self._ending is None or self._ending() is None:
            return self._ending is not None
        return torch._C._current_graph_task_id() == -1 and self._pager.driver.other() is None

    # -- failures --------------------------------------------------------------------------------------------------

    def _end_failed(self, error: BaseException) -> None:
        """Drop the step after `error` has ended a call. Latch the engine if the update has begun. If an Exception has
        ended a forward, only end its uses of units, and keep the gradients."""
        if self._phase.now is Phase.FORWARD and isinstance(error, Exception):
            self.abort(keeps_gradients=True)
            return
        if self._phase.now is Phase.UPDATE:
            self.latch("step() has failed after its update had begun")
        self.drop()

    def drop(self) -> None:
        """Drop the step after a failed call, and ignore errors of transfers. Any other error latches the engine."""
        try:
            self.abort()
        except TieredZeroError:
            pass  # a transfer failed; its gradient is dropped
        except Exception as error:
            self.latch(f"a step could not be dropped ({type(error).__name__}: {error})")
        except BaseException:
            self._pager.driver.was_broken_off = True  # the next call drops the step once more
            raise

    def abort(self, *, keeps_gradients: bool = False) -> None:
        """Drop the step: wait for transfers, evict units, drop gradients. Raises the error of a gradient's transfer.
        `keeps_gradients`: whether to keep the step with its gradients, and only end the uses of units: after a failed
        forward."""
        movers = self._movers
        self._phase.has_own_backward = False
        if not keeps_gradients:
            movers.policy.drop(movers.drain)  # also drops updates begun in backward and state read ahead
            self._stop_following()
        movers.pager.abort()
        if keeps_gradients:
            movers.gradients.show()
            return
        if movers.activations is not None:
            movers.activations.abort()
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
            movers.gradients.abort()
            if movers.reducer is not None:
                movers.reducer.abort()
            movers.reclaim()
            movers.pager.driver.was_broken_off = False

    def drop_gradients(self, are_taken: bool = False) -> None:
        """Drop the step's gradients. `are_taken`: whether the update has taken them; then only those are dropped that
        came later."""
        gradients = self._movers.gradients
        self._arrivals.reset()
        gradients.hide()
        gradients.set_hidden()
        if are_taken and not gradients.has_gradients:
            gradients.take_unstored()
        else:
            gradients.discard()

    # -- the end of the run ----------------------------------------------------------------------------------------

    def latch(self, why: str) -> None:
        """Make every later call raise EngineFailedError with the reason `why`."""
        if self._movers.policy.failures.error is None:
            self._movers.policy.latch(why)

    def latch_ranks(self, what: str, error: BaseException) -> None:
        """With many ranks, latch the engine after the call `what` has raised `error` on this rank: the other ranks are
        in other collectives."""
        if self._ranks.world_size > 1 and self._movers.policy.failures.error is None:
            self.latch(f"{what} raised {type(error).__name__}, which ends the run on all ranks")
            self._movers.drain()

    def fail_ranks(self, error: BaseException | None) -> None:
        """End the run on all ranks, after a forward or `loss.backward()` past the engine has failed on this one. Do
        nothing if such calls run no collectives. `error`: None if the program has caught it."""
        name, reducer = self._phase.now.value, self._movers.reducer
        if reducer is None or not (reducer.shards_params or reducer.is_open):
            return
        text = _CAUGHT if error is None else f"{type(error).__name__}: {error}"
        # the other ranks would wait in a collective that this rank never calls
        self._ranks.fail(f"its {name} past the engine was ended by {text}")
        if self._movers.policy.failures.error is None:
            self.latch(f"a {name} past the engine was ended by {text}, which ends the run on all ranks")
            self._movers.drain()
