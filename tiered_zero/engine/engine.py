"""Define `Engine`, whose methods a user calls. train_step.py runs the steps."""

from __future__ import annotations

import difflib
import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tiered_zero.checkpoint.driver import LoadParts
from tiered_zero.checkpoint.weights import (
    MAX_SHARD_NBYTES,
    WEIGHTS_NAME,
    WeightTensor,
    as_saved,
    model_weights,
    reading_order,
    write_model_config,
    write_together,
    write_weights,
)
from tiered_zero.concurrency.interrupts import Teardown
from tiered_zero.config.schema import Config
from tiered_zero.engine.deepspeed_names import DeepSpeedNames
from tiered_zero.engine.entry import EngineParts, end_unreferenced_run, on_one_thread
from tiered_zero.engine.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.plan.planner import Plan
from tiered_zero.sizes import parse_nbytes
from tiered_zero.telemetry.report import StepReport
from tiered_zero.telemetry.spans import SAVE_LANE
from tiered_zero.update.handle import TieredOptimizer

logger = logging.getLogger("tiered_zero")


class Engine(DeepSpeedNames):
    """Trains one model whose parameters and optimizer state rest on several tiers. Use it from one thread.

    For each step, call engine(batch), engine.backward(loss) and engine.step(). After an error in forward or backward, a
    run with one rank can continue. After a failed update, every call raises EngineFailedError.
    """

    def __init__(self, run: EngineParts, step: TrainStep, resources: Teardown) -> None:
        """Make the engine. `resources`: closes the run's parts, in order, when the engine ends."""
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
        """Run the module's forward and return its result. Parameters are fetched to the device as they are used."""
        fp16 = self._run.config.fp16
        if fp16.enabled and fp16.auto_cast:
            args = tree_map_only(torch.Tensor, lambda value: value.half() if value.is_floating_point() else value, args)
        return self._step.forward(self._run.module, args, kwargs, _count_tokens(args, kwargs))

    @on_one_thread
    def backward(self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> torch.Tensor:
        """Scale `loss` and run its backward. Return `loss` unchanged. The loss is multiplied by the loss scale and, if
        `scale_wrt_gas`, divided by gradient_accumulation_steps. If backward raises, this step's gradients are dropped.

        You can call `loss.backward()` instead; do not divide the loss yourself. With fp16 that raises ModelError: call
        `scale(loss).backward()`.

        Between backward and `step()`, `param.grad` is the gradient without the loss scale. You can read it, change it
        in place, or assign a new one. It lies on the tier of gradients, and may be fp32 in a 16-bit model. Reading it
        raises ModelError with many ranks, or if updates begin in backward.
        """
        self._step.backward(loss, retain_graph, scale_wrt_gas)
        return loss

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss divided by gradient_accumulation_steps and multiplied by the loss scale. Call `.backward()`
        on the result instead of `engine.backward(loss)`."""
        scaled = self._step.scaled(loss)
        if scaled is not loss and scaled.requires_grad:
            self._step.arrivals.expect(scaled)
        return scaled

    @on_one_thread
    @runs_outside_modes
    def step(self, *, by_optimizer: bool = False) -> None:
        """Count a micro-batch. After the last one of an accumulation, check the gradients and update the weights. With
        fp16 or bf16.check_grad_overflow, skip the update if gradients are not finite. `by_optimizer`: whether
        `optimizer.step()` calls this. If so, gradients are clipped only if the config sets gradient_clipping."""
        run, step = self._run, self._step
        if step.step(self.optimizer, self.lr_scheduler, by_optimizer) and (report := step.meter.report) is not None:
            for observer in run.observers:
                observer(report)

    # -- questions -----------------------------------------------------------------------------------------------------

    @property
    def module(self) -> nn.Module:
        """The user's model. `module.state_dict()` returns whole CPU tensors, from any tier."""
        return self._run.module

    @property
    def optimizer(self) -> TieredOptimizer:
        """The optimizer; None if the engine only evaluates."""
        return self._run.optimizer  # type: ignore[return-value]  # users hold an engine that trains

    @property
    def lr_scheduler(self) -> Any:
        """The learning rate scheduler that `step()` steps, or None. Assign it between two steps only. A trainer that
        steps the scheduler itself assigns None."""
        return self._run.checkpoints.driver.lr_scheduler

    @lr_scheduler.setter
    def lr_scheduler(self, scheduler: Any) -> None:
        if scheduler is not None:
            self.optimizer.check_scheduler(scheduler)
        self._run.checkpoints.driver.lr_scheduler = scheduler

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
        """The device on which the model computes. Put the inputs there."""
        return self._step.runtime.accelerator.device

    @property
    def loss_scale(self) -> float:
        """The factor by which backward multiplies the next loss; 1.0 without fp16."""
        return self._step.overflow.loss_scale

    @property
    def step_report(self) -> StepReport | None:
        """The report of the last optimizer step; None before the first."""
        return self._step.meter.report

    @property
    def global_steps(self) -> int:
        """The number of optimizer steps so far, including skipped steps."""
        return self._step.counts.global_steps

    @property
    def skipped_steps(self) -> int:
        """The number of optimizer steps that were skipped so far because gradients were not finite."""
        return self._step.overflow.counts.skipped

    @property
    def micro_steps(self) -> int:
        """The number of micro-batches so far."""
        return self._step.counts.micro_steps

    def memory_report(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return the bytes of each kind on each tier: tier -> kind -> {"now", "peak", "planned"}. "peak": the most so
        far."""
        return {
            tier: {
                kind: {"now": now, "peak": peak, "planned": self.plan.nbytes(tier, kind)}
                for kind, (now, peak) in kinds.items()
            }
            for tier, kinds in self._step.runtime.ledger.by_kind().items()
        }

    def rank_report(self) -> dict[str, float]:
        """Return this rank's traffic with other ranks so far. "gathered_nbytes": bytes of units. "reduced_nbytes":
        bytes of gradients. "waited_s": seconds spent waiting for other ranks."""
        return asdict(self._step.runtime.collectives.traffic)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @on_one_thread
    @runs_outside_modes
    def save_checkpoint(
        self,
        save_dir: str | os.PathLike[str],
        tag: str | None = None,
        client_state: Mapping[str, Any] = MappingProxyType({}),
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Save the whole state of the run as `save_dir/tag` (default tag: global_step{N}), durably. Call it right after
        a `step()` that updates. Every rank calls it; if one rank fails, every rank raises.

        With tiered_zero.checkpoint.async, a save of a run with one rank continues in the background, unless
        checkpoint.in_place is set. `flush()`, `close()` and the next save or load wait for the save and raise its
        error.

        `client_state`: your own plain values, tensors and arrays; rank 0's is saved. `save_latest`: write the tag's
        name to the file `latest`. `exclude_frozen_parameters`: leave frozen parameters out; load such a save with
        load_module_strict=False. Raises ModelError, StoreError or TransferError; training can continue then.
        """

        def begin() -> tuple[int, str]:
            _directory("save_checkpoint", save_dir)
            self._step.check_between_steps("A checkpoint is saved")
            step = self._step.counts.global_steps
            return step, f"global_step{step}" if tag is None else str(tag)

        with self._step.runtime.recorder.span(SAVE_LANE, "save"):
            self._run.checkpoints.save(
                save_dir,
                begin,
                client_state,
                save_latest=save_latest,
                exclude_frozen=exclude_frozen_parameters,
            )
        return True

    @on_one_thread
    @runs_outside_modes
    def load_checkpoint(
        self,
        load_dir: str | os.PathLike[str],
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Callable[..., Any] | None = None,
    ) -> tuple[str | None, dict[str, Any]]:
        """Load the checkpoint `load_dir/tag` and continue from its step. Without a tag, load the checkpoint that the
        file `latest` names. If that cannot be loaded, load the newest complete one. Return its path and client_state;
        (None, {}) if `load_dir` is missing or empty. Every rank calls this. The number of ranks may differ from that of
        the save.

        `load_module_strict`: False ignores missing and unexpected parameters and buffers. `load_optimizer_states`:
        False resets optimizer state and keeps the loss scale. `load_lr_scheduler_states`: False keeps the current
        learning rate schedule. `load_module_only`: True loads only the module, and resets optimizer state.
        `custom_load_fn`: must be None.

        Raises StoreError if `load_dir` has files but no checkpoint. If the checkpoint does not fit, raises ModelError,
        ConfigError or StoreError and changes nothing. If values are damaged, or the scheduler refuses its saved state,
        the engine cannot be used any more.
        """
        if custom_load_fn is not None:
            raise ModelError(
                "load_checkpoint(custom_load_fn=...) would need the whole model in memory. Load without it, and change "
                "weights inside tiered_zero.gathered(module, modify=True)."
            )

        def begin() -> None:
            _directory("load_checkpoint", load_dir)
            self._step.check_between_steps("A checkpoint is loaded")

        found = self._run.checkpoints.find(load_dir, None if tag is None else str(tag), begin)
        if found is None:
            return None, {}
        parts = LoadParts(
            optimizer_states=load_optimizer_states,
            lr_scheduler_states=load_lr_scheduler_states,
            module_only=load_module_only,
        )
        with self._step.failures.surfacing():
            return str(found.path), self._run.checkpoints.load(found, parts, strict=load_module_strict)

    @property
    def resumed(self) -> tuple[Path, dict[str, Any]] | None:
        """The path and client_state of the checkpoint loaded by the setting tiered_zero.checkpoint.resume, or None."""
        return self._run.checkpoints.resumed

    # -- weights -------------------------------------------------------------------------------------------------------

    @on_one_thread
    @runs_outside_modes
    def save_16bit_model(
        self,
        save_dir: str | Path,
        save_filename: str = WEIGHTS_NAME,
        exclude_frozen_parameters: bool = False,
        *,
        max_shard_size: int | str = MAX_SHARD_NBYTES,
    ) -> bool:
        """Write parameters, in their training dtype, and buffers to safetensors files in `save_dir`. transformers'
        `from_pretrained(save_dir)` and the library safetensors can load them. Rank 0 writes; at stage 3 every rank
        calls this.

        `exclude_frozen_parameters`: whether frozen parameters are left out. `max_shard_size`: the most bytes of one
        file, as a number or text such as "5GB"; a larger model is split into files with an index. At the end, these
        files replace those of an earlier save.
        """
        directory = _directory("save_16bit_model", save_dir)
        ranks, is_sharded = self._step.runtime.collectives, self._run.plan.request.shards_params
        if ranks.rank > 0 and not is_sharded:
            return True  # rank 0 has the same weights
        name = save_filename
        if name == "pytorch_model.bin":
            name = WEIGHTS_NAME
            logger.warning("save_16bit_model writes safetensors: %s, not %s", name, save_filename)
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(f"save_filename: expected a name that ends with .safetensors; found {save_filename!r}.")
        self._step.check()
        self._step.before_weights_read()
        pager = self._step.pager
        units = pager.units.by_param

        def unit_of(param: nn.Parameter) -> int:
            return units[param].unit.index if param in units else -1  # without elements it is in none

        weights = model_weights(self._run.module, pager.copies.take, unit_of, exclude_frozen=exclude_frozen_parameters)
        weights = as_saved(self._run.module, weights)
        max_nbytes = parse_nbytes(max_shard_size)

        def write(tensors: Sequence[WeightTensor]) -> None:
            write_weights(directory, tensors, max_shard_nbytes=max_nbytes, file_name=name)
            write_model_config(self._run.module, directory)

        try:
            if is_sharded:
                write_together(ranks, reading_order(weights, max_nbytes), write)
            else:
                write(weights)
        finally:
            pager.copies.end()  # drops the unit read last
        return True

    def save_fp16_model(
        self,
        save_dir: str | Path,
        save_filename: str = WEIGHTS_NAME,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Call `save_16bit_model`: DeepSpeed's older name for the same call."""
        return self.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    # -- values of one parameter ---------------------------------------------------------------------------------------

    @on_one_thread
    def peek(self, name: str, kind: str = "master") -> torch.Tensor | None:
        """Return the master, the gradient or a state tensor of one parameter, copied to the CPU from any tier. This
        waits for every update and reads whole sub-groups, so it is too slow for every step.

        `kind`: "master", "grad" (between backward and `step()`, without the loss scale), or a state tensor's name in
        torch's optimizer, such as "exp_avg". Masters and gradients are fp32 in the parameter's shape; state has torch's
        dtype and shape. Returns None for a frozen parameter, for state before the first step, and for a missing
        gradient. Raises ModelError for an unknown `name` or `kind`, and for "grad" if `param.grad` cannot be read. If
        state is sharded (many ranks, stage 1 and up), every rank calls it.
        """
        param = self._named(name)
        if kind == "master":
            return get_master(param)
        return get_grad(param) if kind == "grad" else get_state(param, kind)

    @on_one_thread
    def poke(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Set the value that `peek(name, kind)` returns. The next step uses it.

        If `kind` is "master", the parameter is also set, to `value` rounded to the parameter's dtype. State in a lossy
        `state_format` is rounded. Raises ModelError if the parameter has no such value. Every rank calls this; all get
        rank 0's `value`.
        """
        param = self._named(name)
        if kind == "master":
            set_master(param, value)
        elif kind == "grad":
            set_grad(param, value)
        else:
            set_state(param, kind, value)

    def _named(self, name: str) -> nn.Parameter:
        found = dict(self._run.module.named_parameters(remove_duplicate=False))
        if name not in found:
            near = difflib.get_close_matches(str(name), found, n=1)
            ask = f" Did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"Expected a name of module.named_parameters(); found {name!r:.200}.{ask}")
        return found[name]

    # -- control -------------------------------------------------------------------------------------------------------

    def train(self, mode: bool = True) -> Engine:
        """Set the module's training mode, as `nn.Module.train` does."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Set the module to evaluation mode, as `nn.Module.eval` does."""
        return self.train(False)

    @on_one_thread
    def exchange(self, data: bytes) -> list[bytes]:
        """Send `data` to every rank, and return the data of all ranks in rank order. Every rank calls this between the
        same two calls of `step`. Raises RankError."""
        return self._step.exchange(data)

    @on_one_thread
    def flush(self) -> None:
        """Wait until every update is complete and every save is durable. Weights may be read without this call."""
        self._step.flush()
        if self._run.checkpoints.async_save.tag is not None:  # else the run's record would show a save
            with self._step.runtime.recorder.span(SAVE_LANE, "save"):
                self._run.checkpoints.wait()

    @on_one_thread
    @runs_outside_modes
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop this step's gradients. Do nothing right after a `step()` that only counted a micro-batch: to drop
        gradients then, call `abort_step()`. Raises ModelError if updates from these gradients have begun.

        `set_to_none`: False sets gradients to 0, as in plain PyTorch.
        """
        self._step.zero_grad(set_to_none)

    @on_one_thread
    @runs_outside_modes
    def abort_step(self) -> None:
        """Drop this step: wait for transfers, evict units, drop gradients. Training continues with the next forward."""
        self._step.abort_step()

    def close(self) -> None:
        """Free every tier, stop every thread, and remove swap directories without a commit. A second call does nothing.
        Parameters off the device lose their values: call `module.state_dict()` first. At the end, raises
        EngineFailedError if an update has failed and no call has raised its error."""
        if not self._process.is_current():
            return  # a forked child owns nothing
        step = self._step
        with step.pager.driver.entered("engine.close()"):
            step.recover()
            step.is_closed = True
            try:
                if self._end.alive:  # also after a second Ctrl-C interrupted an earlier close
                    self._resources.close()
                    self._end.detach()
                    if not step.failures.has_surfaced:
                        step.policy.check()
            finally:
                step.end_hold()

    def _inspect(self) -> TrainStep:
        """Return the `TrainStep`. Only tests/support/inspection calls this."""
        return self._step

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, _kind: object, error: object, _traceback: object) -> None:
        if error is not None:
            self._step.failures.has_surfaced = True
            self._step.runtime.collectives.fail(f"{type(error).__name__}: {error}")
        self.close()


def _count_tokens(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the number of token ids in a forward's arguments: in `input_ids`, else in the first argument. Return 0 if
    these are not integers."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    return ids.numel() if isinstance(ids, torch.Tensor) and ids.dtype in (torch.int64, torch.int32) else 0


def _directory(call: str, given: object) -> Path:
    """Return the directory `given` as a Path. Raises ModelError, which names the method `call`, if it is not a path."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ModelError(f"engine.{call}() expects the path of a directory; found {given!r:.200}.")
    return Path(given)
