"""Provide methods of DeepSpeed's engine, for scripts that call them.

Names that are not provided raise MissingNameError with a remedy. Source: DeepSpeed 0.19, runtime/engine.py.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import Any, final

from torch import nn

from tiered_zero.engine.entry import EngineParts
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import MissingNameError, ModelError

_OTHER_CHECKPOINTS = (
    "a checkpoint of engine.save_checkpoint() depends on no placement and no number of ranks; engine.load_checkpoint() "
    "reads it as it is."
)
_PAGED = (
    "the plan says when units are on the device; see stage3_max_live_parameters and tiered_zero.device_memory_limit."
)
_RESTS = (
    "state rests where the config says, between steps too: set zero_optimization.offload_optimizer.device to cpu, "
    "and take the call out."
)
_FIXED_BATCH = "the batch sizes are planned when the run starts. Set them in the config."
_REPORTS = "engine.step_report, engine.memory_report() and tiered_zero.report have the numbers."
_IN_CONFIG = "engine.config has it, in its sections zero_optimization, optimizer and scheduler."
_OTHER_WORK = "pipelines, quantization, compression and curricula are not here; train with the three calls."
MISSING: Mapping[str, str] = {
    **dict.fromkeys(("load_universal_checkpoint", "get_all_ranks_from_group", "checkpoint_engine"), _OTHER_CHECKPOINTS),
    **dict.fromkeys(("offload_states", "reload_states"), _RESTS),
    **dict.fromkeys(("coalesce_grad_reduction", "fetch_parameters"), _PAGED),
    **dict.fromkeys(("set_train_batch_size", "set_train_micro_batch_size"), _FIXED_BATCH),
    **dict.fromkeys(("monitor", "timers", "flops_profiler", "flops_profiler_enabled"), _REPORTS),
    **dict.fromkeys(("train_batch", "eval_batch", "set_custom_curriculum_learning_schedule"), _OTHER_WORK),
    **dict.fromkeys(("eigenvalue", "quantizer", "progressive_layer_drop", "random_ltd_scheduler"), _OTHER_WORK),
    **dict.fromkeys(("zero_sub_group_size", "zero_offload_optimizer", "zero_offload_param"), _IN_CONFIG),
    **dict.fromkeys(("optimizer_name", "optimizer_params", "scheduler_name", "scheduler_params"), _IN_CONFIG),
    **dict.fromkeys(("amp_enabled", "sparse_gradients_enabled"), "it is always False."),
    "wall_clock_breakdown": "engine.config.wall_clock_breakdown says it.",
    "zero_optimization_partition_weights": "it is whether engine.zero_optimization_stage() is 3.",
    **dict.fromkeys(("is_compiled", "is_deepcompile_enabled"), "compile the model with torch.compile."),
    "deepspeed_io": "build a torch.utils.data.DataLoader, or pass training_data to initialize().",
    "training_dataloader": "initialize(training_data=...) returns the loader as its third value.",
    "client_optimizer": "the optimizer passed in is only read; engine.optimizer is the one that steps.",
    "basic_optimizer": "engine.optimizer is the one that steps.",
    "csr_gradients": "gradients are dense; build embeddings with sparse=False.",
}
"""Name in DeepSpeed's engine that this engine lacks -> the end of the error message, which says what to do instead."""


def _reader(path: str, text: str = "") -> Callable[[DeepSpeedNames], Any]:
    """Make a method that returns the config's value at `path`. `text`: the method's docstring."""

    def read(self: DeepSpeedNames) -> Any:
        return attrgetter(path)(self._run.config)

    read.__doc__ = text or f"`{path}` of the config."
    return read


@final
@dataclass(kw_only=True)
class ThroughputTimer:
    """Replacement for DeepSpeed's `engine.tput_timer`: counts epochs and returns the samples per second."""

    samples_per_s: Callable[[], float]
    epoch_count: int = 0

    def update_epoch_count(self) -> None:
        """Count an epoch."""
        self.epoch_count += 1

    def avg_samples_per_sec(self) -> float:
        """Return the samples per second of all ranks in the last optimizer step; 0.0 before the first."""
        return self.samples_per_s()


class DeepSpeedNames(ABC):
    """The methods of `Engine` that only scripts written for DeepSpeed call."""

    _run: EngineParts
    _step: TrainStep

    @abstractmethod
    def close(self) -> None: ...

    # -- calls ---------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Call `close`."""
        self.close()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context manager that does nothing. Raises ModelError if this run reduces gradients over ranks in
        backward."""
        self._step.check_no_sync()
        yield

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Raise ModelError, because the model must be compiled before `initialize`. Accelerate calls this for
        `torch_compile`."""
        raise ModelError(
            "engine.compile(), or torch_compile=True of TrainingArguments: expected a model that is compiled before it "
            "is given to initialize(); found an engine. Leave it out, and compile the model's blocks, each with its "
            "compile method, before initialize()."
        )

    def allreduce_gradients(self, bucket_size: int = 0) -> None:
        """Do nothing: backward or step() reduces gradients over ranks by itself."""
        return

    def empty_partition_cache(self) -> None:
        """Do nothing: fetched units are evicted when their memory is needed."""
        return

    def module_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any]:
        """Return `module.state_dict()`: whole CPU tensors. `exclude_frozen_parameters`: leave frozen parameters out."""
        state: dict[str, Any] = self._run.module.state_dict()
        if exclude_frozen_parameters:
            for name, param in self._run.module.named_parameters(remove_duplicate=False):
                if not param.requires_grad:
                    state.pop(name, None)
        return state

    def load_module_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> None:
        """Load `state_dict` into parameters, buffers and fp32 masters. `strict`: raise for names that do not match."""
        self._run.module.load_state_dict(state_dict, strict=strict)

    def _zero3_consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return `module_state_dict` on rank 0, and None on every other rank. At stage 3 every rank must call it."""
        state = self.module_state_dict(exclude_frozen_parameters)
        return state if self.global_rank == 0 else None

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True: state_dict() always gives whole weights."""
        return True

    @property
    def _modules(self) -> dict[str, nn.Module]:
        """The engine's child modules by name, as in `nn.Module`. The only child is the user's module. Accelerate reads
        this."""
        return {"module": self._run.module}

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every param group."""
        for group in self._run.optimizer.param_groups if self._run.optimizer else []:
            group["lr"] = lr

    # -- questions -----------------------------------------------------------------------------------------------------

    def get_global_grad_norm(self) -> float | None:
        """Return the L2 norm of the last step's gradients before clipping, without the loss scale; None before the
        first step."""
        check = self._step.counts.grad_check
        return check.norm if check is not None else None

    def is_gradient_accumulation_boundary(self) -> bool:
        """Return whether the next `step()` updates the weights. If managed_gradient_accumulation is false, return
        False."""
        return self._run.config.managed_gradient_accumulation and self._step.counts.is_boundary()

    def set_gradient_accumulation_boundary(self, is_boundary: bool | None) -> None:
        """Set whether each `step()` from now on updates the weights. None: the engine decides by counting
        micro-batches. Raises ModelError if managed_gradient_accumulation is false."""
        if not self._run.config.managed_gradient_accumulation:
            raise ModelError(
                "set_gradient_accumulation_boundary() was expected where the engine counts micro-batches; found "
                "managed_gradient_accumulation false, with which every step() updates. Leave step() out instead."
            )
        self._step.counts.boundary = is_boundary

    def was_step_applied(self) -> bool:
        """Return whether the last `step()` updated the weights."""
        return self._step.counts.was_applied

    @property
    def global_samples(self) -> int:
        """The number of samples in all optimizer steps so far, on all ranks."""
        counts, config = self._step.counts, self._run.config
        if not config.managed_gradient_accumulation:
            return counts.micro_steps * config.train_micro_batch_size_per_gpu * self.world_size
        return counts.global_steps * config.train_batch_size

    @property
    def local_rank(self) -> int:
        """The local rank, which the launcher sets in the environment as LOCAL_RANK; 0 without a launcher."""
        given = os.environ.get("LOCAL_RANK", "0")
        return int(given) if given.isdecimal() else 0

    @property
    def global_rank(self) -> int:
        """This process's rank."""
        return self._step.runtime.collectives.rank

    @property
    def world_size(self) -> int:
        """The number of ranks that train together, each on its own batches."""
        return self._step.runtime.collectives.world_size

    dp_world_size = world_size
    mp_world_size = 1

    gradient_accumulation_steps = _reader("gradient_accumulation_steps", "Micro-batches of one update.")
    train_batch_size = _reader("train_batch_size", "Samples of one update.")
    train_micro_batch_size_per_gpu = _reader("train_micro_batch_size_per_gpu", "Samples of one forward.")
    gradient_clipping = _reader("gradient_clipping")
    zero_optimization_stage = _reader("zero_optimization.stage")
    fp16_enabled = _reader("fp16.enabled")
    bfloat16_enabled = _reader("bf16.enabled")

    def get_batch_info(self) -> tuple[int, int, int]:
        """Return (train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps) of the config."""
        return self.train_batch_size(), self.train_micro_batch_size_per_gpu(), self.gradient_accumulation_steps()

    steps_per_print = _reader("steps_per_print", "Optimizer steps between two log lines; None: no lines.")

    @cached_property
    def tput_timer(self) -> ThroughputTimer:
        """The timer with which scripts count epochs and read the samples per second."""
        meter, config = self._step.meter, self._run.config

        def samples_per_s() -> float:
            return config.train_batch_size / meter.report.wall_s if meter.report is not None else 0.0

        return ThroughputTimer(samples_per_s=samples_per_s)

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return [float(group["lr"]) for group in self._run.optimizer.param_groups] if self._run.optimizer else []

    def zero_optimization(self) -> bool:
        """Return whether zero_optimization.stage is above 0."""
        return self._run.config.zero_optimization.stage > 0

    def zero_cpu_offload(self) -> bool:
        """Return whether zero_optimization.offload_optimizer.device is cpu."""
        return self._run.config.zero_optimization.offload_optimizer.device == "cpu"

    def dynamic_loss_scale(self) -> bool:
        """Return whether overflows change the loss scale. They do with fp16 and no fixed scale."""
        return self._run.config.fp16.enabled and self._run.config.fp16.loss_scale == 0

    def get_mom(self) -> list[Any]:
        """Return the momentum of each param group, or its betas if no group has a momentum."""
        groups = self._run.optimizer.param_groups if self._run.optimizer else []
        key = "momentum" if any("momentum" in group for group in groups) else "betas"
        return [group.get(key) for group in groups]

    def __getattr__(self, name: str) -> Any:
        """Return the attribute `name` of the user's module. Python calls this for names that the engine lacks. Raises
        MissingNameError if the module has none, AttributeError if `name` is private."""
        if name.startswith("_"):
            raise AttributeError(name)
        module = self._run.module
        try:
            return getattr(module, name)
        except AttributeError as error:
            if name in MISSING:
                raise MissingNameError(f"engine.{name} of DeepSpeed does not exist here: {MISSING[name]}") from None
            if name in dir(type(module)):  # a property of the model that raises
                raise
            raise MissingNameError(
                f"Neither the engine nor its module ({type(module).__name__}) has an attribute {name!r}."
            ) from error
