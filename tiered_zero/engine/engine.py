"""Define the engine that a user drives: three calls, questions, control. train_step.py orders what they do."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any, NoReturn

import torch
from torch import nn

from tiered_zero.concurrency.teardown import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.engine.checkpoint_calls import CheckpointCalls
from tiered_zero.engine.deepspeed_names import DeepSpeedNames
from tiered_zero.engine.entry import EngineParts, end_unreferenced_run, on_one_thread
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.outside_modes import runs_outside_modes
from tiered_zero.plan.planner import Plan
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.spans import SAVE_LANE
from tiered_zero.update.handle import TieredOptimizer


class Engine(CheckpointCalls, DeepSpeedNames):
    """Trains one model over the tiers of its plan. Use it from one thread.

    engine(batch) -> loss; engine.backward(loss); engine.step(). A step that raises in forward or backward can be left
    out and training goes on; a failure inside the update latches the engine, because state is rewritten in place.
    """

    def __init__(self, run: EngineParts, step: TrainStep, resources: Teardown) -> None:
        """`resources`: closes everything, in order, when the engine ends."""
        self._run = run
        self._step = step
        self._resources = resources
        self._process = step.pager.driver.process
        self._end = weakref.finalize(self, end_unreferenced_run, self._process, resources)  # at exit too

    def __repr__(self) -> str:
        num_parameters = sum(param.numel() for param in self.module.parameters())
        return (
            f"Engine({type(self.module).__name__}, {num_parameters:,} parameters, device {self.device}, "
            f"{self.plan.update_policy.policy} updates, "
            f"{'closed' if self._step.is_closed else f'step {self.global_steps}'})"
        )

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        raise ModelError(
            "An engine cannot be copied or pickled: it holds threads, files and memory. Copy engine.module, and save "
            "engine.module.state_dict() and engine.optimizer.state_dict(), or call engine.save_checkpoint()."
        )

    # -- the three calls -----------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)

    @on_one_thread
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward, and page its parameters in as they are used."""
        fp16 = self._run.config.fp16
        args = _halved(args) if fp16.enabled and fp16.auto_cast else args
        return self._step.forward(self._run.module, args, kwargs, _count_tokens(args, kwargs))

    @on_one_thread
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Run backward of `loss`, divided by the accumulation steps (if `scale_wrt_gas`) and multiplied by the loss
        scale. Returns the loss as given.

        May be called several times before `step`. An exception drops this step's gradients and is raised.

        `loss.backward()` works too: its gradients are divided by the accumulation steps as they arrive, so the loss
        must not be divided by the caller as well; with fp16 it raises ModelError, because the loss is not scaled. For a
        loss that `scale` returned `.backward()` is right in every case.

        Until `step()` `param.grad` is a live view of the gradient, in the parameter's shape, to be read, changed in
        place and assigned as in plain PyTorch, also by `torch.nn.utils.clip_grad_norm_`. It lies on the tier of
        the gradient (host memory, if the update runs there), and is fp32 if micro-batches of a 16-bit model are summed.
        Reading it raises ModelError if updates begin in backward, or if the loss is scaled.
        """
        self._step.backward(loss, retain_graph, scale_wrt_gas)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by the accumulation steps and multiplied by the loss scale, as `backward` does:
        call `.backward()` on it. For loops that call `backward` themselves, as with DeepSpeed's `engine.scale`."""
        scaled = self._step.scaled(loss)
        if scaled is not loss and scaled.requires_grad:
            self._step.arrivals.expect(scaled)
        return scaled

    @on_one_thread
    @runs_outside_modes
    def step(self, *, by_optimizer: bool = False) -> None:
        """Count a micro-batch; at an accumulation boundary check the gradients and update the weights, or skip the
        step. `by_optimizer`: `optimizer.step()` calls this. It clips only if the config has gradient_clipping, because
        its loop may clip by itself."""
        run, step = self._run, self._step
        if step.step(self.optimizer, run.lr_scheduler, by_optimizer) and (report := step.meter.report) is not None:
            for observer in run.observers:
                observer(report)

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model; `module.state_dict()` gives CPU tensors of real shape from any tier."""
        return self._run.module

    @property
    def optimizer(self) -> TieredOptimizer:
        """The optimizer; None if the engine evaluates."""
        return self._run.optimizer  # type: ignore[return-value]  # of a training engine, which users hold

    @property
    def lr_scheduler(self) -> Any:
        """The scheduler that `step()` steps; None without one. It may be set between two steps: to None by a trainer
        that steps its own."""
        return self._run.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        if scheduler is not None:
            self.optimizer.check_scheduler(scheduler)
        self._run = replace(self._run, lr_scheduler=scheduler)
        self._run.checkpoints.set_scheduler(scheduler)

    @property
    def config(self) -> Config:
        """The config with every default filled in."""
        return self._run.config

    @property
    def plan(self) -> Plan:
        """Every size, placement and policy of the run; `print` shows it as a table."""
        return self._run.plan

    @property
    def device(self) -> torch.device:
        """The device on which the model computes: inputs belong there."""
        return self._step.runtime.accelerator.device

    @property
    def loss_scale(self) -> float:
        """The factor on the next loss; 1.0 without fp16."""
        return self._step.overflow.loss_scale

    @property
    def step_report(self) -> StepReport | None:
        """The report of the last optimizer step; None before the first."""
        return self._step.meter.report

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones included."""
        return self._step.counts.global_steps

    @property
    def skipped_steps(self) -> int:
        """Optimizer steps skipped so far because gradients were not finite."""
        return self._step.overflow.counts.skipped

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far: calls of `step()`."""
        return self._step.counts.micro_steps

    def memory_report(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return tier -> kind -> {"now", "peak", "planned"}: the bytes that the run has allocated."""
        return {
            tier: {
                kind: {"now": now, "peak": peak, "planned": self.plan.nbytes(tier, kind)}
                for kind, (now, peak) in kinds.items()
            }
            for tier, kinds in self._step.runtime.ledger.by_kind().items()
        }

    def rank_report(self) -> dict[str, float]:
        """Return the bytes that this rank has handed to collectives so far (`gathered_nbytes`, `reduced_nbytes`: whole
        flats and buckets), and the seconds that it has waited for other ranks (`waited_s`)."""
        return asdict(self._step.runtime.collectives.traffic)

    # -- control -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode, as `nn.Module.train`."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module's evaluation mode, as `nn.Module.eval`."""
        return self.train(False)

    @on_one_thread
    def exchange(self, data: bytes) -> list[bytes]:
        """Return every rank's `data`, in rank order; with one rank it is this one's. Every rank calls it between the
        same two calls of `step`: to stop together, or to average what was measured. Raises RankError."""
        return self._step.exchange(data)

    @on_one_thread
    def flush(self) -> None:
        """Wait until every update is made and every save is durable. Reading weights waits for updates by itself."""
        self._step.flush()
        with self._step.runtime.recorder.span(SAVE_LANE, "save"):
            self._run.checkpoints.wait()

    @on_one_thread
    @runs_outside_modes
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of this step's backward passes so far; `optimizer.zero_grad()` is the same.

        Right after a `step()` that only counted a micro-batch nothing is dropped, because loops call `zero_grad()`
        after every `step()`; `abort_step()` drops gradients there too. `set_to_none`: False sets them to 0, also those
        that the last `step()` took, so that they count as gradients in the next one. Raises ModelError if updates
        have begun from the gradients."""
        self._step.zero_grad(set_to_none)

    @on_one_thread
    @runs_outside_modes
    def abort_step(self) -> None:
        """Drop this step: drain transfers, evict units, drop gradients. Training goes on with the next forward."""
        self._step.abort()

    def close(self) -> None:
        """Free every tier, stop every thread, remove the swap directory. Idempotent. Parameters off the device are
        gone: take `module.state_dict()` before. Raises EngineFailedError, with everything freed, if an update failed
        and no call has raised yet."""
        if not self._process.is_current():
            return  # a forked child owns nothing
        step = self._step
        with step.pager.driver.entered("engine.close()"):
            step.recover()
            step.is_closed = True
            try:
                if self._end.alive:  # also where a second Ctrl-C broke off an earlier close
                    self._resources.close()
                    self._end.detach()
                    if not step.failures.has_surfaced:
                        step.policy.check()
            finally:
                step.end_hold()

    def _inspect(self) -> TrainStep:
        """Return the parts that tests inspect, through tests/support/inspection."""
        return self._step

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if error is not None:
            self._step.failures.has_surfaced = True
            self._step.runtime.collectives.fail(f"{type(error).__name__}: {error}")
        self.close()


def _count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Count the elements of `input_ids`, or of the first argument, if they are integers; else return 0."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids.numel() if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32) else 0


def _halved(values: Any) -> Any:
    """Cast floating point tensors in lists, tuples and dicts to float16, as DeepSpeed does for fp16.auto_cast."""
    if isinstance(values, torch.Tensor):
        return values.half() if values.is_floating_point() else values
    if isinstance(values, tuple) and hasattr(values, "_fields"):  # a named tuple takes its fields one by one
        return type(values)(*map(_halved, values))
    if type(values) in (list, tuple):
        return type(values)(map(_halved, values))
    return {name: _halved(value) for name, value in values.items()} if type(values) is dict else values
