"""The step as a user drives it: forward, backward, step. Reads like the algorithm; holds no arithmetic."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from tiered_zero.call_phase import Counts, Phase
from tiered_zero.config.schema import Config
from tiered_zero.deepspeed_engine import DeepSpeedNames
from tiered_zero.engine_parts import (
    HIDDEN_BY_SCALE,
    HIDDEN_BY_UPDATE,
    NO_OPTIMIZER,
    Internals,
    Parts,
    complete_update,
    count_tokens,
    end_forgotten_run,
    end_open_update,
    root_cause,
)
from tiered_zero.errors import ModelError, NonFiniteError, TieredZeroError
from tiered_zero.grads.check import GradCheck, check_gradients
from tiered_zero.hardware.process import OwnProcess
from tiered_zero.params.outside_modes import runs_outside_modes
from tiered_zero.plan.planner import Plan
from tiered_zero.telemetry.report import StepReport, build_step_report
from tiered_zero.update.handle import TieredOptimizer

logger = logging.getLogger("tiered_zero")

MAX_SKIPPED_IN_A_ROW = 100

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_Method = Callable[Concatenate["Engine", _Arguments], _Result]


def _on_one_thread(method: _Method[_Arguments, _Result]) -> _Method[_Arguments, _Result]:
    """Refuse a call of `method` while another thread is inside the engine (ModelError)."""

    @wraps(method)
    def entered(self: Engine, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        is_made, num_before = False, self._micro_steps
        try:
            with self._parts.pager.driver.entered(f"engine.{method.__name__}()"):
                result = method(self, *args, **kwargs)
                is_made = True
            return result
        except BaseException as error:
            # a caller cannot know that backward was made, or that step() had not begun, and gives the batch again
            not_begun = self._micro_steps == num_before and not isinstance(error, TieredZeroError)
            if (method.__name__ == "backward" and is_made) or (method.__name__ == "step" and not_begun):
                self._phase = Phase.BACKWARD
                self._recover()
            raise

    return entered


class Engine(DeepSpeedNames):
    """Trains one model over the tiers of its plan. Use it from one thread.

    engine(batch) -> loss; engine.backward(loss); engine.step(). A step that raises in forward or backward can be left
    out and training goes on; a failure inside the update latches the engine, because state is rewritten in place.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._process = OwnProcess()
        parts.resources.try_once(partial(complete_update, parts.policy))
        parts.resources.callback(partial(end_open_update, parts.policy, parts.drain))
        self._end = weakref.finalize(self, end_forgotten_run, self._process, parts.resources)  # at exit too
        self._phase = Phase.IDLE
        self._counts: Counts | None = None
        self._micro_steps = 0
        self._boundary: bool | None = None  # what the user set for the next `step()`; None: by count
        self._closed = False
        self._told = False  # whether a call has raised since the last step, so that its update is known to have failed
        self._num_backwards = 0  # since the last step()
        self._warned_of_no_gradient = False
        self._one_backward_each = True  # in every micro-batch so far, and step() right after it
        self._uses_before_step = 0  # of weights, when the last backward ended
        self._is_accumulating = False  # whether the last `step()` only counted a micro-batch
        self._skipped_in_a_row = 0
        self._step_applied = False
        self._nonfinite_in_a_row = 0
        self._verdict: GradCheck | None = None
        self._report: StepReport | None = None
        self._step_start_s, self._losses = time.perf_counter(), list[torch.Tensor]()
        parts.gradients.hidden = self._why_hidden(False)
        self._tokens = 0
        self.global_steps = 0
        self.skipped_steps = 0

    def __repr__(self) -> str:
        num_parameters = sum(param.numel() for param in self.module.parameters())
        return (
            f"Engine({type(self.module).__name__}, {num_parameters:,} parameters, device {self.device}, "
            f"{self.plan.update_policy.policy} updates, {'closed' if self._closed else f'step {self.global_steps}'})"
        )

    # -- the three calls -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @_on_one_thread
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, its parameters paged in as they are used."""
        self._check_usable()
        parts = self._parts
        with self._surface_failure(), self._phase_scope(Phase.FORWARD):
            if not (torch.is_grad_enabled() and parts.module.training):
                parts.policy.prepare_evaluation()
            self._tokens += count_tokens(args, kwargs) if torch.is_grad_enabled() else 0
            with parts.pager.frame(), parts.hooks.saving_views():
                return parts.module(*args, **kwargs)

    @_on_one_thread
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Backward of `loss`, divided by the accumulation steps (unless not `scale_wrt_gas`) and multiplied by the loss
        scale. Returns the loss as given.

        May be called several times before `step`. An exception drops this step's gradients and is raised.

        `loss.backward()` works too: its gradients are divided by the accumulation steps as they arrive, so the loss
        must not be divided by the caller as well; with fp16 it raises ModelError, because the loss is not scaled. For a
        loss that `scale` returned `.backward()` is right in every case.

        Until `step()` `param.grad` is a live view of the gradient, in the parameter's shape, to be read, changed in
        place and assigned as in plain PyTorch, also by `torch.nn.utils.clip_grad_norm_`. It is where the gradient
        rests (in host memory, if the update runs there), and fp32 where micro-batches of a 16-bit model are summed.
        Where updates begin in backward, or the loss is scaled, reading it raises ModelError.
        """
        self._check_trains()
        parts = self._parts
        with self._surface_failure(), self._phase_scope(Phase.BACKWARD):
            scaled = self._scaled(loss, scale_wrt_gas)
            self._losses.append(parts.checked_loss(loss))
            boundary = self.is_gradient_accumulation_boundary()
            parts.gradients.begin_backward(is_last=boundary)
            self._num_backwards += 1
            only = self._num_backwards == 1 and self._one_backward_each and not retain_graph
            parts.gradients.hidden = self._why_hidden(boundary and only)
            with parts.hooks.saving_views(), parts.arrivals.engine_backward():
                if boundary and only and self.global_steps:
                    parts.policy.begin_backward()
                scaled.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
            self._uses_before_step = parts.pager.num_uses
            return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as `backward` would take it, divided by the accumulation steps and multiplied by the loss scale:
        call `.backward()` on it. For loops that call `backward` themselves, as with DeepSpeed's `engine.scale`."""
        scaled = self._scaled(loss)
        if scaled is not loss and scaled.requires_grad:
            self._parts.arrivals.expect(scaled)
        return scaled

    @_on_one_thread
    @runs_outside_modes
    def step(self) -> None:
        """Count a micro-batch; at an accumulation boundary check the gradients, and update the weights or skip it."""
        self._check_trains()
        with self._surface_failure(), self._changing(Phase.STEP):
            boundary = self.is_gradient_accumulation_boundary()
            self._counts = self._count()
            self._step_applied = False
            self._micro_steps += 1
            used = self._num_backwards and self._parts.pager.num_uses != self._uses_before_step
            self._one_backward_each &= self._num_backwards == 1 and not used  # then no update begins in backward
            self._num_backwards = 0
            self._parts.arrivals.has_noticed = False
            self._is_accumulating = not boundary
            if boundary:
                with self._parts.runtime.recorder.span("compute", "step"):
                    self._take_step()
                self._told = False
        if boundary:
            self._finish_report()

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model; `module.state_dict()` gives CPU tensors of real shape from any tier."""
        return self._parts.module

    @property
    def optimizer(self) -> TieredOptimizer:
        """None where the engine evaluates."""
        return self._parts.optimizer  # type: ignore[return-value]  # of a training engine, which users hold

    @property
    def lr_scheduler(self) -> Any:
        return self._parts.lr_scheduler

    @property
    def config(self) -> Config:
        return self._parts.config

    @property
    def plan(self) -> Plan:
        return self._parts.plan

    @property
    def device(self) -> torch.device:
        return self._parts.runtime.accelerator.device

    @property
    def loss_scale(self) -> float:
        scaler = self._parts.loss_scaler
        return scaler.scale if scaler is not None else 1.0

    @property
    def step_report(self) -> StepReport | None:
        """Of the last optimizer step; None before the first."""
        return self._report

    def get_lr(self) -> list[float]:
        """The learning rate of each param group."""
        return [float(group["lr"]) for group in self.optimizer.param_groups] if self.optimizer else []

    def get_global_grad_norm(self) -> float | None:
        """L2 norm of all gradients of the last step, unscaled and before clipping; None before the first step."""
        return self._verdict.norm if self._verdict is not None else None

    def gradient_accumulation_steps(self) -> int:
        return self.config.gradient_accumulation_steps

    def train_batch_size(self) -> int:
        return self.config.train_batch_size

    def train_micro_batch_size_per_gpu(self) -> int:
        return self.config.train_micro_batch_size_per_gpu

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next `step()` updates the weights."""
        if self._boundary is not None:
            return self._boundary
        return (self._micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Say of this micro-batch, and of those that follow, whether their `step()` updates; None: count again."""
        self._boundary = is_boundary

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far: calls of `step()`."""
        return self._micro_steps

    def was_step_applied(self) -> bool:
        """Whether the last `step()` updated the weights: not within an accumulation, nor where it was skipped."""
        return self._step_applied

    def memory_report(self) -> dict[str, dict[str, dict[str, int]]]:
        """tier -> kind -> {"now", "peak", "planned"} in bytes, of everything that the run has allocated."""
        table: dict[str, dict[str, dict[str, int]]] = {}
        for tier, kinds in self._parts.runtime.ledger.by_kind().items():
            table[tier] = {
                kind: {"now": now, "peak": peak, "planned": self.plan.nbytes(tier, kind)}
                for kind, (now, peak) in kinds.items()
            }
        return table

    # -- control -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        return self.train(False)

    @_on_one_thread
    def flush(self) -> None:
        """Return when every update so far is made. Reading weights does this by itself."""
        self._recover()
        with self._surface_failure():
            self._parts.policy.flush()

    @_on_one_thread
    @runs_outside_modes
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step's backward passes so far; `optimizer.zero_grad()` is the same.

        Right after a `step()` that only counted a micro-batch nothing is dropped, because loops call `zero_grad()`
        after every `step()`; `abort_step()` drops gradients there too. `set_to_none`: False sets them to 0, also those
        that the last `step()` took, so that they count as gradients in the next one. Raises ModelError where updates
        have begun from the gradients."""
        self._recover()
        if self._is_accumulating and not (self._num_backwards or self._parts.arrivals.has_noticed):
            return
        self._parts.policy.check_untouched("Gradients are dropped")
        with self._changing(Phase.BACKWARD):
            if set_to_none:
                self._drop_gradients()
                self._parts.gradients.reset_zero()
            else:
                self._parts.arrivals.reset()
                self._parts.gradients.zero()
                self._parts.visible_gradients.show()
                self._parts.gradients.hidden = self._why_hidden(False)
            self._num_backwards = 0
            self._losses.clear()

    def _recover_between_calls(self) -> None:  # for what the user calls past the engine, perhaps in its forward
        if self._phase is Phase.IDLE:
            self._recover()

    @_on_one_thread
    @runs_outside_modes
    def abort_step(self) -> None:
        """Give this step up: drain transfers, empty units, drop gradients. Training goes on with the next forward."""
        self._recover()
        if not self._closed:
            self._phase = Phase.BACKWARD
            self._drop_step()
            self._phase = Phase.IDLE

    def close(self) -> None:
        """Free every tier, stop every thread, remove the swap directory. Idempotent. Parameters off the device are
        gone: take `module.state_dict()` before. Raises EngineFailedError, with everything freed, if an update failed
        and no call has raised yet."""
        if not self._process.is_current():
            return  # a forked child owns nothing
        with self._parts.pager.driver.entered("engine.close()"):
            self._recover()
            self._closed = True
            if self._end.alive:  # also where an earlier close was interrupted
                self._parts.resources.close()
                self._end.detach()
                if not self._told:
                    self._parts.policy.check()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._told |= error is not None
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _inspect(self) -> Internals:
        parts = self._parts
        return Internals(pager=parts.pager, gradients=parts.gradients, policy=parts.policy, runtime=parts.runtime)

    @contextmanager
    def _changing(self, phase: Phase) -> Iterator[None]:
        """A call goes on inside. See [Note: Interrupted calls]."""
        try:
            self._phase = phase
            yield
            self._phase = Phase.IDLE
        except BaseException:
            self._recover()
            raise

    @contextmanager
    def _phase_scope(self, phase: Phase) -> Iterator[None]:
        """Forward or backward goes on inside."""
        pager = self._parts.pager
        with self._changing(phase):
            self._parts.visible_gradients.hide()
            pager.phase = phase.value
            with self._parts.runtime.recorder.span("compute", phase.value):
                yield
            pager.phase = Phase.IDLE.value
            pager.end_pass()
            self._parts.visible_gradients.show()

    def _scaled(self, loss: torch.Tensor, by_steps: bool = True) -> torch.Tensor:
        steps = self.gradient_accumulation_steps()
        scaled = loss / steps if steps > 1 and by_steps else loss
        scaler = self._parts.loss_scaler
        return scaled if scaler is None else scaled.float() * scaler.scale

    def _why_hidden(self, is_only_backward: bool) -> str | None:
        """Why gradients of this backward cannot be read until step(): the same in every step of a run, though the first
        step's update never begins in backward."""
        if is_only_backward and self.plan.update_policy.optimizer_in_backward:
            return HIDDEN_BY_UPDATE
        return HIDDEN_BY_SCALE if self.loss_scale != 1.0 else None

    def _recover(self) -> None:
        """Clear up after a call that was broken off, if one was. See [Note: Interrupted calls]."""
        parts = self._parts
        if self._closed or not self._process.is_current():
            return
        changing = parts.pager.keeper.changing
        if changing is not None and parts.policy.failure is None:
            self._latch(f"a change by hand of the parameters of {changing.name} was interrupted")
        if self._phase is Phase.IDLE:
            if not parts.pager.was_broken_off:
                return
            self._phase = Phase.BACKWARD if parts.pager.phase == Phase.BACKWARD.value else Phase.FORWARD
        if self._phase is Phase.UPDATE and parts.policy.failure is None:
            self._latch("step() was broken off after its update had begun")
        if self._phase is Phase.FORWARD and not (parts.policy.is_open and parts.pager.needs_drain):
            if parts.pager.needs_drain:
                self._drain()
            parts.pager.abort()
            parts.hooks.abort()
            parts.visible_gradients.show()
        else:
            with suppress(Exception):  # of what is dropped
                self._drop_step()
        self._phase = Phase.IDLE

    def _latch(self, why: str) -> None:
        self._drain()
        self._parts.policy.latch(why)

    def _drain(self) -> None:
        self._parts.policy.give_up()
        self._parts.drain()
        self._parts.policy.cancel_prefetch()

    def _drop_step(self) -> None:
        """Nothing of the step is left. Raises what made a gradient fail on its way."""
        parts = self._parts
        self._drain()
        parts.policy.abort()
        parts.pager.abort()
        parts.hooks.abort()
        self._num_backwards = 0
        self._losses.clear()
        self._tokens = 0
        if self._counts is not None:
            self._restore(self._counts)
        self._micro_steps -= self._micro_steps % self.gradient_accumulation_steps()
        self._is_accumulating = False
        try:
            self._drop_gradients()
        finally:
            parts.arrivals.abort()
            parts.gradients.abort()

    def _count(self) -> Counts:
        scaler = self._parts.loss_scaler
        return Counts(
            self._micro_steps,
            self.global_steps,
            self.skipped_steps,
            self._skipped_in_a_row,
            self._nonfinite_in_a_row,
            self._verdict,
            scaler.state_dict() if scaler is not None else None,
        )

    def _restore(self, counts: Counts) -> None:
        self._micro_steps, self._verdict = counts.micro_steps, counts.verdict
        self.global_steps, self.skipped_steps = counts.global_steps, counts.skipped_steps
        self._skipped_in_a_row, self._nonfinite_in_a_row = counts.skipped_in_a_row, counts.nonfinite_in_a_row
        if counts.loss_scaler is not None and self._parts.loss_scaler is not None:
            self._parts.loss_scaler.load_state_dict(counts.loss_scaler)

    def _take_step(self) -> None:
        parts = self._parts
        parts.gradients.collect_assigned()
        parts.gradients.wait_transfers()
        norms = parts.gradients.norms()
        if not norms and not self._warned_of_no_gradient:
            self._warned_of_no_gradient = True
            logger.warning(
                "step() without backward(): no parameter has a gradient, so this step changes no weight. It counts "
                "as a step for the learning rate schedule; this is said once."
            )
        verdict = check_gradients(norms, self.loss_scale, self.config.gradient_clipping)
        self._verdict = verdict
        self.global_steps += 1
        if self._may_update(verdict):
            parts.policy.prepare()
            self._update(verdict)
        else:
            parts.policy.skip()
            self.optimizer.overflow = True
        self._drop_gradients()
        self._counts = None

    def _drop_gradients(self) -> None:
        self._parts.arrivals.reset()
        self._parts.visible_gradients.hide()
        self._parts.gradients.hidden = self._why_hidden(False)
        self._parts.gradients.discard()

    def _may_update(self, verdict: GradCheck) -> bool:
        """Tell the loss scaler; count and report a skipped step. fp32 goes on with NaNs, as plain PyTorch does."""
        scaler = self._parts.loss_scaler
        checks = scaler is not None or (self.config.bf16.enabled and self.config.bf16.check_grad_overflow)
        self._nonfinite_in_a_row = 0 if verdict.finite else self._nonfinite_in_a_row + 1
        tells = self._nonfinite_in_a_row & (self._nonfinite_in_a_row - 1) == 0  # 1, 2, 4, ...: a warning, not a flood
        if verdict.finite or not checks:
            if not verdict.finite and tells:
                logger.warning("step %d: the gradient of %s is not finite", self.global_steps, verdict.first_bad)
            self._skipped_in_a_row = 0
            if scaler is not None:
                scaler.update(False)
            return True
        self.skipped_steps += 1
        self._skipped_in_a_row += 1
        scale = self.loss_scale
        if scaler is not None:
            try:
                scaler.update(True)
            except NonFiniteError as error:
                self._counts = None  # training ends here, and this step is counted
                raise NonFiniteError(f"{error} First parameter with such a gradient: {verdict.first_bad}.") from error
        if tells:
            logger.warning(
                "step %d skipped: gradient of %s is not finite (%d in a row; stops at %d)%s",
                self.global_steps, verdict.first_bad, self._skipped_in_a_row, MAX_SKIPPED_IN_A_ROW,
                f"; loss scale {scale:g} -> {self.loss_scale:g}" if scaler is not None else "",
            )  # fmt: skip
        if self._skipped_in_a_row >= MAX_SKIPPED_IN_A_ROW:
            self._counts = None
            raise NonFiniteError(
                f"{self._skipped_in_a_row} steps in a row had gradients that are not finite, first in "
                f"{verdict.first_bad}. "
                "Weights are as they were before them. Lower the learning rate, look at the data, or use bf16 for fp16."
            )
        return False

    def _update(self, verdict: GradCheck) -> None:
        parts = self._parts

        def apply() -> None:
            self._phase = Phase.UPDATE
            parts.policy.apply(parts.gradients.detach_step(), verdict.grad_scale)
            self._step_applied = True

        try:
            self.optimizer.update(apply)
            if parts.lr_scheduler is not None:
                parts.lr_scheduler.step()
        except MemoryError:
            raise
        except Exception:
            if self._step_applied:  # the error of a hook, or of the scheduler: the step is made all the same
                self._counts = None
                self._phase = Phase.IDLE
            raise

    def _finish_report(self) -> None:
        now_s = time.perf_counter()
        runtime, verdict = self._parts.runtime, self._verdict
        losses, self._losses = self._losses, []
        tokens, self._tokens = self._tokens, 0
        self._report = build_step_report(
            self.global_steps,
            runtime.recorder.take_totals(),
            now_s - self._step_start_s,
            runtime.ledger,
            loss=sum(float(loss) for loss in losses) / len(losses) if losses else None,
            tokens=tokens,
            grad_norm=verdict.norm if verdict else None,
            loss_scale=self.loss_scale,
            skipped=self._skipped_in_a_row > 0,
        )
        self._step_start_s = now_s
        for observer in self._parts.observers:
            observer(self._report)

    def _check_trains(self) -> None:
        self._check_usable()
        if self._parts.optimizer is None:
            raise ModelError(NO_OPTIMIZER)

    def _check_usable(self) -> None:
        self._recover()
        if self._closed:
            raise ModelError("This engine is closed; its tiers are gone. Make another with tiered_zero.initialize().")
        with self._surface_failure():
            self._parts.check()

    @contextmanager
    def _surface_failure(self) -> Iterator[None]:
        """What is raised inside is told to the user: of a failure that nobody was told of yet, what happened; later,
        that it has (EngineFailedError)."""
        try:
            yield
        except BaseException as error:
            told, self._told = self._told, True
            if told or (cause := root_cause(error)) is error:
                raise
            raise cause from cause.__cause__
