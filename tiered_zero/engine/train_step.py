"""Run the parts of a step in order. Only this file uses parameters, gradients and updates together."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from tiered_zero.concurrency.interrupts import hold_interrupts
from tiered_zero.config.schema import Config
from tiered_zero.engine.entry import Movers, StepCounts
from tiered_zero.errors import ModelError, TieredZeroError
from tiered_zero.grads.arrivals import GradientArrivals
from tiered_zero.grads.check import GradCheck, OverflowGuard, check_gradients
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.layout.flat import Unit
from tiered_zero.plan.request import UpdateChoice
from tiered_zero.telemetry.report import StepMeter
from tiered_zero.unit.driver import BACKWARD, CallPhase, Phase
from tiered_zero.update.handle import TieredOptimizer, creates_state

logger = logging.getLogger("tiered_zero")

_CAUGHT = "an exception that its program has caught"

NO_OPTIMIZER = (
    'This engine evaluates: initialize() was given no optimizer, and the config has no section "optimizer". Add one of '
    "the two to train."
)


class TrainStep:
    """Runs the parts of one engine's steps in order. Holds no reference to the engine.

    Module hooks, parameters and the engine call it on the driver thread, or on autograd's thread during backward. If a
    forward fails, its units are released. If another call fails, the step is dropped; if the update had begun, later
    calls raise EngineFailedError.
    """

    def __init__(
        self, movers: Movers, config: Config, choice: UpdateChoice, *, trains: bool, overflow: OverflowGuard
    ) -> None:
        self.pager, self.parameters = movers.pager, movers.parameters
        self.gradients = movers.gradients
        self.policy, self.runtime = movers.policy, movers.runtime
        self._ranks = movers.runtime.collectives
        self._drain, self._reclaim = movers.drain, movers.reclaim
        self._reducer = reducer = movers.reducer
        self._marks_uses = reducer is not None and reducer.reduces_in_backward and not reducer.shards_params
        self.phase: CallPhase = movers.pager.phase
        self.overflow = overflow
        num_threads = torch.get_num_threads() if self.runtime.accelerator.shares_cores else 0
        self.meter = StepMeter(self.runtime.recorder, self.runtime.ledger, num_threads)
        self.counts = StepCounts(config.gradient_accumulation_steps, managed=config.managed_gradient_accumulation)
        self.is_closed = False
        self.failures = self.policy.failures
        num_micro_batches, scales_loss = self.counts.num_micro_batches, overflow.scaler is not None
        self.arrivals = GradientArrivals(
            self.gradients, num_micro_batches, scales_loss, self.unit_grads_complete, self._reducer
        )
        self._groups = movers.groups
        self._activations = movers.activations
        self._trains = trains
        self._clipping = config.gradient_clipping
        self._is_clipping_asked = "gradient_clipping" in config.model_fields_set
        self._optimizer_in_backward = choice.optimizer_in_backward
        self._warned_of_no_gradient = False
        self.hold: ExitStack | None = None
        """Holds back KeyboardInterrupt from the start of a backward in which updates may begin to the end of the step.
        None at other times."""
        self._handled = 0
        """id() of the exception that the program was already handling when it called a module directly. Any other
        exception at the end of the call is the call's own error."""
        self._ending: weakref.ref[Callable[[], None]] | None = None
        """The callback for the end of the user's own `loss.backward()`. Only autograd keeps the callback alive."""

    # -- module hooks, on the driver thread or in a recomputation in backward ------------------------------------------

    @runs_outside_modes
    def pre_forward(
        self, units: Sequence[Unit], module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        """Fetch the `units` that `module` uses, before its forward. If the user calls the module directly, also begin a
        forward pass."""
        is_root = module is self.parameters.model
        if is_root and self.pager.direct is not None:  # the root never runs inside itself: that call was interrupted
            self.pager.driver.check("A module's forward")
            self.recover()
        is_direct = not self.pager.frames and self.pager.is_called_directly()
        if not is_direct and not self.pager.frames:  # a recomputation
            self.notice_backward()
        if is_direct:
            self.pager.driver.process.check()
            self.pager.driver.check("A module's forward")
            self.recover()
            if not torch.is_grad_enabled() or (is_root and not module.training):
                self.policy.prepare_evaluation()
            self.pager.begin_direct(module)
            self._handled = id(sys.exc_info()[1])
        if is_direct or is_root:
            self.phase.records = torch.is_grad_enabled()
        self.pager.enter_frame(units)
        if (units or is_direct) and torch._C._current_graph_task_id() == -1:  # autograd sets a recomputation's stream
            self.runtime.accelerator.check_compute()
            if self._marks_uses and units and (self.phase.records or torch.is_grad_enabled()):
                self.arrivals.note_use(units, (*args, *kwargs.values()))
        if is_direct:
            self.pager.save_direct()

    @runs_outside_modes
    def post_forward(self, *_: Any) -> None:
        """Release the units that the module used, after its forward. After a direct call, also end the forward pass."""
        # torch calls this hook also if `pre_forward` has refused the call: then exit_frame() is False
        if self.pager.exit_frame() and self.pager.direct is not None and not self.pager.frames:
            self.pager.end_direct()
            error = sys.exc_info()[1]
            if error is not None and id(error) != self._handled:
                self.phase.now = Phase.FORWARD
                self._fail_ranks(error)
                self.phase.now = Phase.IDLE

    @runs_outside_modes
    def grad_ready(self, param: nn.Parameter) -> None:
        """Move `param.grad`, which this backward has completed, to the gradients' tier. Called on autograd's thread."""
        if not self._trains:
            param.grad = None
            raise ModelError(NO_OPTIMIZER)
        if torch._C._current_graph_task_id() != self.phase.task:
            try:
                self.notice_backward()
            except ModelError:  # another thread is inside the engine
                self.arrivals.refuse(param)
                raise
        self.arrivals.take(param)

    def unit_grads_complete(self, unit: Unit) -> None:
        """Release a unit after its last gradient of this backward. Begin its update if updates begin in backward."""
        self.pager.finish_gradients(unit)
        self.policy.unit_ready(unit)

    # -- events of parameters, past the engine's calls -----------------------------------------------------------------

    def before_weights_read(self) -> None:
        """Wait for every update. Called before `gathered`, a state_dict or a copy reads weights."""
        self.pager.driver.process.check()
        if not self.pager.is_running() and self.phase.now is Phase.IDLE:
            self.recover()
        self.policy.finish()
        self.runtime.accelerator.check_compute()

    def before_weights_write(self) -> None:
        """Wait for every update and drop prefetched state. Called before user code or a load changes weights or
        state."""
        self.policy.finish(before_write=True)

    def latch(self, why: str) -> None:
        """Make every later call raise EngineFailedError with the reason `why`."""
        if self.failures.error is None:
            self.policy.latch(why)

    def pre_state_dict(self, module: nn.Module, *, checks: bool) -> None:
        """Wait for every update, and keep copies of parameters until the state_dict ends. `checks`: raise ModelError if
        parameters were replaced."""
        if checks:
            self.parameters.check()
        self.pager.num_uses += 1
        self.pager.copies.start(self.before_weights_read, module.parameters())  # one copy for all names of a parameter

    def before_use(self, unit: Unit, pass_name: str) -> None:
        """Record that a forward or backward (`pass_name`) is about to gather `unit`. In backward, also reduce
        gradients; see [Note: Places of reductions]. Do nothing for a frozen unit: backward may use one, such as the
        layer under an adapter, before the adapter's last gradient has come."""
        if self._reducer is None or not unit.trainable:
            return
        if pass_name == "backward":
            self.arrivals.note_backward(unit)
        elif self.pager.frames and (self.phase.records or torch.is_grad_enabled()):
            self._reducer.order.note_forward(unit)

    # -- the engine's calls --------------------------------------------------------------------------------------------

    def check_outside(self, call: str, may_recompute: bool = False) -> None:
        """Raise ModelError if a forward, backward or step() is running. The call then comes from a hook or a signal
        handler. `call`: the call's name for the message. `may_recompute`: allow a forward inside a user's
        `loss.backward()`."""
        now, running = self.phase.now, ""
        if torch._C._current_graph_task_id() != -1 and not (may_recompute and now is Phase.IDLE):
            running = "backward"
        elif now is not Phase.IDLE:
            running = now.value if now in (Phase.FORWARD, Phase.BACKWARD) else "step"
        elif self.pager.direct is not None and self.pager.runs_directly():
            running = "forward"
        if running:
            raise ModelError(
                f"{call} was called inside of a {running}, by a hook or a signal's handler, where weights and state "
                "are half of one step and half of the next. Call it after step() has returned: a hook or handler sets "
                "a flag for it, as tiered_zero.stop_on_signals() does."
            )

    def recover(self) -> None:
        """Drop an unfinished step. It is left by an interrupt, a failed `loss.backward()` or a failed direct call of a
        module. Each call of the engine begins with this. Raises ModelError if a forked child process has to drop a
        step."""
        if self.is_closed:
            return
        pager = self.pager
        # an exception has ended a backward of the user, whose callback lives as long as its graph
        is_backward = self._ending is not None and (
            self._ending() is None or (torch._C._current_graph_task_id() == -1 and pager.driver.other() is None)
        )
        is_forward = bool(pager.frames) or (pager.direct is not None and not pager.runs_directly())
        was_broken_off = pager.driver.was_broken_off or (pager.copies.call and pager.copies.was_broken_off())
        if self.phase.now is Phase.IDLE and (is_backward or is_forward or was_broken_off):
            pager.driver.process.check()
            self.phase.now = Phase.BACKWARD if is_backward else Phase.FORWARD
            try:
                if is_backward or is_forward:
                    self._fail_ranks(None)
                self._drop()
            finally:
                self.phase.now = Phase.IDLE

    def check(self, trains: bool = False) -> None:
        """Drop an unfinished step, then check that a call may begin. `trains`: whether the call is part of training.
        Raises EngineFailedError after a failed update. Raises ModelError if the engine is closed; for training, also if
        it has no optimizer or if its param groups hold other parameters than at the start."""
        if self.is_closed:
            raise ModelError("This engine is closed; its tiers are gone. Make another with tiered_zero.initialize().")
        self.recover()
        try:
            self.policy.check()
            if trains:
                self._groups.take_reset()
                self._groups.check()
            self.runtime.accelerator.check_compute()
        except Exception as error:
            self.failures.surface(error)
        if trains and not self._trains:
            raise ModelError(NO_OPTIMIZER)

    def check_between_steps(self, act: str) -> None:
        """Raise ModelError if gradients wait for a step(), or if parameters were replaced. `act`: the error's first
        words, such as "A checkpoint is saved"."""
        self.check()
        self._groups.take_reset()
        self.parameters.check()
        counts = self.counts
        if counts.num_backwards or counts.is_accumulating or self.arrivals.num_own_backwards or self.policy.is_open:
            raise ModelError(
                f"{act} between two steps: expected no gradients that wait for one; found micro-batch "
                f"{counts.micro_steps} of an accumulation under way. Call it right after the step() that updates, or "
                "drop them with engine.abort_step()."
            )

    def check_no_sync(self) -> None:
        """Raise ModelError if this run reduces gradients over ranks in backward, which no_sync() cannot switch off."""
        if self._reducer is not None and self._reducer.reduces_in_backward:
            raise ModelError(
                "no_sync() was expected where every rank keeps whole gradients until step(): zero_optimization.stage "
                "0, or 1 without offload_optimizer, and overlap_comm left out. Here backward reduces gradients. Leave "
                "it out: gradient_accumulation_steps adds micro-batches up too."
            )

    def forward(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], num_tokens: int) -> Any:
        self.check()
        with self._pass(Phase.FORWARD):
            if not (torch.is_grad_enabled() and module.training):
                self.policy.prepare_evaluation()
            self.meter.num_tokens += num_tokens if torch.is_grad_enabled() else 0
            self.pager.enter_frame(())
            try:
                with self.pager.saved_views.saving():
                    return module(*args, **kwargs)
            finally:
                self.pager.exit_frame()

    def backward(self, loss: torch.Tensor, retain_graph: bool, by_steps: bool) -> None:
        """Scale `loss` and run its backward. `by_steps`: divide the loss by gradient_accumulation_steps."""
        self.check(trains=True)
        if not isinstance(loss, torch.Tensor):
            raise ModelError(
                f"backward() takes the loss as a tensor; found {type(loss).__name__}. Pass the tensor itself."
            )
        with self._pass(Phase.BACKWARD):
            scaled = self.scaled(loss, by_steps)
            if not loss.requires_grad:
                raise ModelError(
                    "backward() was given a loss that requires no gradient: it was computed under torch.no_grad() or "
                    "detached, or every parameter that it depends on is frozen (requires_grad=False) by now."
                )
            self.meter.losses.append(loss.detach())
            boundary = self.counts.is_boundary()
            self.gradients.begin_backward(is_last=boundary and self._reducer is None)
            step_follows = self.counts.begin_backward(retain_graph) and boundary
            self.phase.step_follows = boundary  # the same on every rank, which `retain_graph` need not be
            # in the first step too, where updates begin later: `param.grad` behaves alike in all steps
            self.gradients.set_hidden(step_follows and self._optimizer_in_backward)
            self.pager.cache.refuse()
            backward = self.arrivals.engine_backward(is_last=boundary, frees_graph=not retain_graph)
            with self.pager.saved_views.saving(), backward:
                if step_follows and self.counts.global_steps:
                    self.policy.begin_backward()
                    if self.policy.is_open and self.hold is None:
                        self.hold = ExitStack()
                        self.hold.enter_context(hold_interrupts())
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self.counts.end_backward(self.pager.num_uses)

    def end_hold(self) -> None:
        """Stop holding back KeyboardInterrupt, and raise it if one was held back. Do nothing while a call of the engine
        runs, or while an update that backward began waits for step()."""
        is_idle = self.phase.now is Phase.IDLE and not self.policy.is_open
        if self.hold is not None and (self.is_closed or is_idle):
            hold, self.hold = self.hold, None
            hold.close()

    def scaled(self, loss: torch.Tensor, by_steps: bool = True) -> torch.Tensor:
        """Return the loss divided by gradient_accumulation_steps (if `by_steps`) and multiplied by the loss scale."""
        num_steps = self.counts.num_micro_batches
        scaled = loss / num_steps if num_steps > 1 and by_steps else loss
        return scaled if self.overflow.scaler is None else scaled.float() * self.overflow.loss_scale

    def step(self, optimizer: TieredOptimizer, lr_scheduler: Any, by_optimizer: bool = False) -> bool:
        """Count a micro-batch, and return whether it was the last of an accumulation (a boundary). At a boundary, check
        gradients, update, step the scheduler and make the report. `by_optimizer`: whether
        `optimizer.step()` calls this."""
        # Optimizer and scheduler are arguments: modules refer to this object, so attributes would keep the engine.
        self.check(trains=True)
        if by_optimizer:
            if self._creates_state(optimizer):
                return False
            self.counts.check_managed(self.arrivals.num_own_backwards)
        if self.counts.is_boundary():
            self.parameters.check()
        with hold_interrupts(), self._call(Phase.STEP):
            boundary = self.counts.begin_step(self.pager.num_uses)
            self.arrivals.num_own_backwards = 0
            if not boundary:
                self.counts.end_step()
            else:
                lr = optimizer.param_groups[0].get("lr") if optimizer.param_groups else None
                lr = None if lr is None else float(lr)  # before the scheduler sets the next step's
                with self.runtime.recorder.span("compute", "step"):
                    self._take_step(optimizer, lr_scheduler, by_optimizer)
                self.failures.has_surfaced = False
        if boundary:
            self.runtime.accelerator.add_spans()
            check = self.counts.grad_check
            self.meter.finish(
                self.counts.global_steps,
                lr=lr,
                grad_norm=check.norm if check else None,
                loss_scale=self.overflow.loss_scale,
                skipped=self.overflow.counts.skipped_in_a_row > 0,
                activations=self._activations.take_counts() if self._activations is not None else {},
            )
        return boundary

    def _creates_state(self, optimizer: TieredOptimizer) -> bool:
        """Create optimizer state, if torch.distributed.checkpoint has called `optimizer.step()` only to create it.
        Return whether it was created. The engine counts no step."""
        counts = self.counts
        if counts.num_backwards or self.arrivals.num_own_backwards or counts.is_accumulating or optimizer.state:
            return False
        found = self.gradients.assigned()
        # such a call is recognized by zeros: every lr and every assigned gradient
        if not creates_state(optimizer.param_groups, found.values()):
            return False
        with self.failures.surfacing():
            optimizer.update(lambda: self.policy.create_state(found))
        return True

    def exchange(self, data: bytes) -> list[bytes]:
        """Send `data` to every rank, and return the data of all ranks in rank order. A failure latches the engine."""
        self.check()
        ranks = self.runtime.collectives
        with self.failures.surfacing():
            try:
                return ranks.exchange(data, "a message of the program")
            except BaseException as error:
                ranks.fail(f"{type(error).__name__}: {error}")
                self._latch_ranks("exchange", error)
                raise

    def flush(self) -> None:
        self.recover()
        with self.failures.surfacing():
            self.policy.finish()

    def abort_step(self) -> None:
        """Drop the step at the user's request. Do nothing if the engine is closed."""
        self.recover()
        if not self.is_closed:
            self.abort()

    @contextmanager
    def _call(self, phase: Phase) -> Iterator[None]:
        """Run the block as one call of the engine in `phase`. If the block raises, drop the step. (If a forward raises
        an Exception, only release its units.) If the run cannot continue, make all later calls fail. Then raise the
        block's error. The first Exception since the last successful optimizer step is replaced by its `root_cause`."""
        try:
            self.phase.now = phase
            yield
        except GeneratorExit:
            raise  # an interrupt came before the block was entered; the generator is discarded
        except BaseException as error:
            try:
                self._ranks.fail(f"{type(error).__name__}: {error}")
                self._end_failed(error)
                self._latch_ranks(phase.value, error)
            finally:
                self.phase.now = Phase.IDLE
            if isinstance(error, Exception):
                self.failures.surface(error)
            raise
        self.phase.now = Phase.IDLE

    @contextmanager
    def _pass(self, phase: Phase) -> Iterator[None]:
        """Run the block as a forward or backward (`phase`). Inside the block, `param.grad` is autograd's own attribute.
        Outside, `param.grad` reads and sets the gradient in its home."""
        with self._call(phase):
            self.gradients.hide()
            with self.runtime.recorder.span("compute", phase.value):
                yield
            self.pager.end_pass()
            self.gradients.show()

    @property
    def zero_grad_drops(self) -> bool:
        """Whether `zero_grad` drops gradients. False right after a `step()` that only counted a micro-batch, and once
        updates from the gradients have begun."""
        counts = self.counts  # loops call zero_grad() after every step(), also within an accumulation
        has_own = counts.num_backwards > 0 or self.arrivals.num_own_backwards > 0 or not counts.is_accumulating
        return has_own and not self.policy.is_open

    def zero_grad(self, set_to_none: bool) -> None:
        self.recover()
        self.policy.check_untouched("Gradients are dropped")
        if not self.zero_grad_drops:
            return
        with self._call(Phase.DROP):
            if set_to_none:
                self._drop_gradients()
                self.gradients.reset_zero()
            else:
                self.arrivals.reset()
                self.gradients.zero()
                self.gradients.show()
                self.gradients.set_hidden()
            self.counts.num_backwards = 0
            self.meter.losses.clear()

    # -- inside a step -------------------------------------------------------------------------------------------------

    def _take_step(self, optimizer: TieredOptimizer, lr_scheduler: Any, by_optimizer: bool) -> None:
        if self._activations is not None:
            self._activations.end_step()
        self.gradients.collect_assigned()
        self.gradients.wait_transfers()
        check = self._check_gradients(by_optimizer)
        if not self.gradients.has_gradients and not self._warned_of_no_gradient:
            self._warned_of_no_gradient = True
            logger.warning(
                "step() without backward(): no parameter has a gradient, so this step changes no weight. It counts "
                "as a step for the learning rate schedule; this is said once."
            )
        if self.overflow.allows(check):
            self.policy.prepare()
            self._update(optimizer, lr_scheduler, check)
        else:
            self._count_step(check)
            self.policy.finish()  # makes the delayed update of an earlier step visible
            optimizer.overflow = True
            self._drop_gradients()

    def _count_step(self, check: GradCheck) -> None:
        """Count an applied or skipped step, and adapt the loss scale. Dropped steps are not counted. Raises
        NonFiniteError if training cannot go on."""
        self.counts.end_step(check)
        self.overflow.count(check, self.counts.global_steps)

    def _check_gradients(self, by_optimizer: bool) -> GradCheck:
        """Average gradients over ranks. Return their norm and clip factor, and whether all are finite. `by_optimizer`:
        whether the user called `optimizer.step()`. If so, gradients are clipped only if the config sets
        gradient_clipping."""
        loss_scale, counts = self.overflow.loss_scale, self.counts
        # a loop that calls optimizer.step() may clip gradients itself
        clipping = self._clipping if not by_optimizer or self._is_clipping_asked else 0.0
        if self._reducer is None:
            device = self.runtime.accelerator.device
            return check_gradients(self.gradients.norms(), loss_scale, clipping, device)
        values = self._groups.values()
        return self._reducer.check(counts.next_micro_steps, counts.global_steps, loss_scale, clipping, values)

    def _update(self, optimizer: TieredOptimizer, lr_scheduler: Any, check: GradCheck) -> None:
        def apply() -> None:
            self.phase.now = Phase.UPDATE
            self.policy.apply(self.gradients.detach_step(), check.grad_scale)
            self._count_step(check)
            self.counts.was_applied = True

        try:
            optimizer.update(apply)
            if lr_scheduler is not None:
                lr_scheduler.step()
        except MemoryError:
            raise
        except Exception:
            if self.counts.was_applied:  # a hook or the scheduler has raised, after a complete update
                self.phase.now = Phase.IDLE
            raise
        self._drop_gradients(are_taken=True)

    # -- a backward past the engine ------------------------------------------------------------------------------------

    def notice_backward(self) -> None:
        """Begin to follow a `loss.backward()` that the user has called. Called before a parameter is fetched and when a
        gradient arrives. Raises ModelError while another thread is inside the engine."""
        phase, driver, task = self.phase, self.pager.driver, torch._C._current_graph_task_id()
        if task == -1:
            if phase.has_own_backward and driver.other() is None:
                phase.has_own_backward = False  # an exception has ended it; the next call drops the step
                self.pager.end_pass()
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
        self.arrivals.begin_own_backward()

    def _end_backward(self) -> None:
        """End the user's own `loss.backward()`: release its units, and finish the transfers of its gradients."""
        self.pager.end_pass()
        self.arrivals.end_own_backward()
        self.gradients.show()
        self._stop_following()  # last: if this was not reached, the next call drops the step

    def _stop_following(self) -> None:
        self._ending = None
        self.phase.has_own_backward = False
        self.pager.driver.end_backward()

    # -- failures ------------------------------------------------------------------------------------------------------

    def _end_failed(self, error: BaseException) -> None:
        """Drop the step after `error` has ended a call. Latch the engine if the update has begun. If an Exception has
        ended a forward, only end its uses of units, and keep the gradients."""
        if self.phase.now is Phase.FORWARD and isinstance(error, Exception):
            self.phase.has_own_backward = False
            self.pager.abort()
            self.gradients.show()
            return
        if self.phase.now is Phase.UPDATE:
            self.latch("step() has failed after its update had begun")
        self._drop()

    def _drop(self) -> None:
        """Drop the step after a failed call, and ignore errors of transfers. Any other error latches the engine."""
        try:
            self.abort()
        except TieredZeroError:
            pass  # a transfer failed; its gradient is dropped
        except Exception as error:
            self.latch(f"a step could not be dropped ({type(error).__name__}: {error})")
        except BaseException:
            self.pager.driver.was_broken_off = True  # the next call drops the step once more
            raise

    def abort(self) -> None:
        """Drop the step: wait for transfers, evict units, drop gradients. Raises the error of a gradient's transfer."""
        self.phase.has_own_backward = False
        self.policy.drop(self._drain)  # also drops updates begun in backward and state read ahead
        self._stop_following()
        self.pager.abort()
        if self._activations is not None:
            self._activations.abort()
        self.meter.clear()
        self.counts.drop()
        try:
            self._drop_gradients()
        finally:
            self.arrivals.abort()
            self.gradients.abort()
            if self._reducer is not None:
                self._reducer.abort()
            self._reclaim()
            self.pager.driver.was_broken_off = False

    def _drop_gradients(self, are_taken: bool = False) -> None:
        """Drop the step's gradients. `are_taken`: whether the update has taken them. If so, drop only gradients that
        came later."""
        gradients = self.gradients
        self.arrivals.reset()
        gradients.hide()
        gradients.set_hidden()
        if are_taken and not gradients.has_gradients:
            gradients.take_unstored()
        else:
            gradients.discard()

    def _latch_ranks(self, what: str, error: BaseException) -> None:
        """Make all later calls fail if there are many ranks. Called after the call `what` has raised `error` on this
        rank: the ranks then no longer run the same collectives."""
        if self._ranks.world_size > 1 and self.failures.error is None:
            self.latch(f"{what} raised {type(error).__name__}, which ends the run on all ranks")
            self._drain()

    def _fail_ranks(self, error: BaseException | None) -> None:
        """End the run on all ranks, because a `loss.backward()` or a direct call of a module has failed on this rank.
        Do nothing if such calls run no collectives in this run. `error`: the error that ended the call; None if the
        program has caught it."""
        name, reducer = self.phase.now.value, self._reducer
        if reducer is None or not (reducer.shards_params or reducer.is_open):
            return
        text = _CAUGHT if error is None else f"{type(error).__name__}: {error}"
        # the other ranks would wait in a collective that this rank never calls
        self._ranks.fail(f"its {name} past the engine was ended by {text}")
        if self.failures.error is None:
            self.latch(f"a {name} past the engine was ended by {text}, which ends the run on all ranks")
            self._drain()

    # -- the first acts of shutdown ------------------------------------------------------------------------------------

    def end_eager_update(self) -> None:
        """Cancel the update that has begun in backward and still waits for its step(), if there is one."""
        if self.policy.is_open:
            self.policy.drop(self._drain)

    def finish_update(self) -> None:
        """Finish the last update. If it fails, log its error instead of raising it."""
        try:
            self.policy.finish()
        except Exception as error:
            logger.error("the last update was not completed: %s", error)
