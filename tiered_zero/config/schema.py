"""Define the typed config: one frozen section per JSON object, with DeepSpeed's names and defaults, and the rules
between keys. `tiered-zero explain` and docs/config.md show the descriptions of the keys."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    StrictBool,
    ValidationInfo,
    field_validator,
    model_validator,
)

from tiered_zero.config.deepspeed_keys import OPTIMIZERS, KeyReport, Reading, notices, reports, runs_as_adamw, table
from tiered_zero.config.section import (
    Device,
    Elements,
    Nbytes,
    Number,
    OffloadSection,
    PathText,
    Section,
    SwitchedSection,
    Whole,
    WholeOrNone,
    switch,
    whole,
)
from tiered_zero.errors import ConfigError


def _steps_per_print(value: Any) -> int | None:
    return None if value in (None, float("inf")) else whole(value)


def _capitalized(value: Any) -> Any:
    return value.capitalize() if isinstance(value, str) else value


def _per_group(value: Any) -> Any:
    numbers = value if isinstance(value, list) else [value]
    if not all(type(item) in (int, float) for item in numbers):
        raise ValueError("expected a number, or a list with one for each param group")
    return value


PerGroup = Annotated[float | list[float], BeforeValidator(_per_group)]
"""A learning rate or momentum: one value, or a list with one for each param group."""


class _PlacedSection(OffloadSection):
    device: Device = Field(
        "none",
        description="where the bytes rest between uses: none (device), cpu (host memory), nvme. If the model computes "
        "on the CPU, cpu means none, except with tiered_zero.device_memory_limit",
    )


class OffloadParamSection(_PlacedSection):
    """Where the model's parameters rest between uses, and the buffers through which they move."""

    buffer_count: Whole = Field(5, ge=1, description="staging buffers for parameters on their way from nvme")
    buffer_size: Elements = Field(
        100_000_000, ge=1, description="elements per staging buffer; unset: as large as the model needs"
    )
    max_in_cpu: Elements = Field(
        1_000_000_000,
        ge=0,
        description="with device nvme: elements that stay in host memory instead, first units first",
    )
    pin_memory: bool = Field(True, description="host memory of parameters is pinned, for asynchronous copies")


class OffloadOptimizerSection(_PlacedSection):
    """Where master weights and optimizer state rest. Honoured at every stage, also with nvme."""

    buffer_count: Whole = Field(4, ge=1, description="staging buffers for sub-groups on their way from and to nvme")
    pin_memory: bool = Field(
        True,
        description="host memory of gradients and staging buffers is pinned. Master weights and state are not pinned: "
        "the CPU updates them where they rest",
    )
    ratio: Number = Field(
        1.0,
        ge=0,
        le=1,
        description="share of master weights and state that leaves the device, to within one sub-group; embeddings "
        "stay first; without effect where device is none",
    )


class ZeroSection(Section):
    """What is sharded over ranks and offloaded, and how much moves at once."""

    stage: Annotated[Literal[0, 1, 2, 3], BeforeValidator(whole)] = Field(
        0, description="ZeRO stage: what is sharded over ranks; 3 also pages parameters"
    )
    offload_param: OffloadParamSection = OffloadParamSection()
    offload_optimizer: OffloadOptimizerSection = OffloadOptimizerSection()
    sub_group_size: Elements = Field(
        1_000_000_000,
        ge=1,
        description="elements that the optimizer steps at once, at most: a larger value than 4194304 asks for the "
        "automatic size, 1048576 where state is transferred; no fewer than a 1024th of the model, up to 1048576",
    )
    reduce_bucket_size: Elements = Field(
        500_000_000,
        ge=1,
        description="elements of gradients that ranks reduce in one collective, at most: units share a "
        "collective up to 262144",
    )
    overlap_comm: bool | None = Field(
        None,
        description="true: many ranks reduce gradients under backward; where all of them rest whole on the device "
        "(stages 0 and 1), under the last backward of a step, which every rank then makes; unset: under backward where "
        "each keeps a shard, else in step(); false: backward waits for each reduction, but at stage 3",
    )
    stage3_prefetch_bucket_size: Elements = Field(
        50_000_000, ge=0, description="elements fetched ahead of their use; 0 fetches on demand"
    )
    stage3_param_persistence_threshold: Elements = Field(
        100_000,
        ge=0,
        description="parameters of at most this many elements stay on the device; with several ranks they move "
        "with their block",
    )
    stage3_model_persistence_threshold: Elements = Field(
        2**63 - 1,
        ge=0,
        description="most elements, in all, that stay on the device by stage3_param_persistence_threshold",
    )
    stage3_max_live_parameters: Elements = Field(
        1_000_000_000,
        ge=0,
        description="elements of fetched parameters on the device at once; the unit in use always fits",
    )
    stage3_max_reuse_distance: Elements = Field(
        1_000_000_000, ge=0, description="a unit expected again within so many elements is kept, room permitting"
    )

    @field_validator("sub_group_size", mode="before")
    @classmethod
    def _zero_is_default(cls, value: Any, info: ValidationInfo) -> Any:
        if value not in (0, "0"):
            return value
        if info.context is not None:
            info.context.append("sub_group_size: 0 read as the default, 1000000000 elements")
        return 1_000_000_000


class Fp16Section(SwitchedSection):
    """float16 with loss scaling."""

    enabled: bool = Field(False, description="compute in float16, with fp32 master weights")
    auto_cast: bool = Field(
        False, description="floating point tensors among the positional arguments of engine(...) are cast to float16"
    )
    loss_scale: Number = Field(0.0, ge=0, description="fixed loss scale; 0 scales dynamically")
    initial_scale_power: Whole = Field(16, ge=0, le=127, description="dynamic: the scale starts at 2 to this power")
    loss_scale_window: Whole = Field(1000, ge=0, description="dynamic: steps without overflow before the scale doubles")
    hysteresis: Whole = Field(2, ge=1, description="dynamic: overflows before the scale is halved")
    consecutive_hysteresis: bool = Field(False, description="dynamic: a good step refills the hysteresis")
    min_loss_scale: Number = Field(1.0, ge=0, description="dynamic: an overflow at this scale is an error")

    @model_validator(mode="after")
    def _dynamic_scale_moves(self) -> Fp16Section:
        if self.enabled and self.loss_scale == 0 and (self.loss_scale_window == 0 or self.min_loss_scale == 0):
            raise ValueError("expected loss_scale_window and min_loss_scale above 0 with a dynamic loss scale")
        return self


class Bf16Section(SwitchedSection):
    """bfloat16 without loss scaling."""

    enabled: bool = Field(False, description="compute in bfloat16, with fp32 master weights")
    check_grad_overflow: bool = Field(True, description="a step whose gradients are not finite is skipped and counted")


class AioSection(Section):
    """How files are read and written."""

    block_size: Whole = Field(4 << 20, ge=4096, description="bytes of one request to the disk")
    queue_depth: Whole = Field(
        16, ge=1, description="requests in flight at once: this number times intra_op_parallelism, at most 32 in all"
    )
    intra_op_parallelism: Whole = Field(1, ge=1, description="multiplies queue_depth")


class TagSection(Section):
    """DeepSpeed's section `checkpoint`: what to do if ranks save under different tags. `tiered_zero.checkpoint` sets
    how a run is saved."""

    tag_validation: Annotated[Literal["Warn", "Fail", "Ignore"], BeforeValidator(_capitalized)] = Field(
        "Warn",
        description="if ranks save under different tags: take rank 0's with a warning (Warn) or without one (Ignore), "
        "or raise an error (Fail)",
    )


class ActivationCheckpointingSection(Section):
    """DeepSpeed's section: whether activations move to host memory. `tiered_zero.activations` sets tiers and sizes."""

    cpu_checkpointing: Annotated[bool, BeforeValidator(switch)] = Field(
        False,
        description="true: what autograd saves for backward rests in host memory until then, as with "
        "tiered_zero.activations.device cpu; where the CPU computes it is there already, and nothing moves",
    )


class OptimizerSection(Section):
    """The optimizer, if the script passes none."""

    type: str = Field(description="Adam (which is AdamW unless adam_w_mode is false), AdamW, or a class of torch.optim")
    params: dict[str, Any] = Field(default_factory=dict, description="arguments of the optimizer")

    @property
    def algorithm(self) -> str:
        """The update rule that runs: "AdamW" for type "Adam" too, unless `params.adam_w_mode` is false."""
        name = OPTIMIZERS.get(self.type.lower(), self.type)
        return "AdamW" if name == "Adam" and runs_as_adamw("adam", self.params.get("adam_w_mode", True)) else name


class SchedulerSection(Section):
    """The learning rate schedule, if the script passes none."""

    type: str = Field(description="a DeepSpeed schedule or a class of torch.optim.lr_scheduler")
    params: dict[str, Any] = Field(
        default_factory=dict, description="arguments of the schedule; steps are optimizer steps"
    )


class Schedule(Section):
    """Arguments of one of DeepSpeed's schedules, from `scheduler.params`."""

    last_batch_iteration: Whole = -1


class LRRangeTest(Schedule):
    lr_range_test_min_lr: PerGroup = 1e-3
    lr_range_test_step_size: Whole = Field(2000, ge=1)
    lr_range_test_step_rate: Number = 1.0
    lr_range_test_staircase: StrictBool = False


class OneCycle(Schedule):
    cycle_min_lr: PerGroup
    cycle_max_lr: PerGroup
    decay_lr_rate: Number = 0.0
    cycle_first_step_size: Whole = Field(2000, ge=1)
    cycle_second_step_size: WholeOrNone = Field(None, ge=0)
    cycle_first_stair_count: Whole = 0
    cycle_second_stair_count: WholeOrNone = None
    decay_step_size: Whole = 0
    cycle_momentum: StrictBool = True
    cycle_min_mom: PerGroup = 0.8
    cycle_max_mom: PerGroup = 0.9
    decay_mom_rate: Number = 0.0


class _Warmup(Schedule):
    warmup_num_steps: Whole = Field(1000, ge=0)
    warmup_type: Literal["log", "linear"] = "log"


class WarmupLR(_Warmup):
    warmup_min_lr: PerGroup = 0.0
    warmup_max_lr: PerGroup | None = None


class WarmupDecayLR(WarmupLR):
    total_num_steps: Whole
    warmup_max_lr: PerGroup | None = 1e-3


class WarmupCosineLR(_Warmup):
    total_num_steps: Whole
    warmup_min_ratio: Number = 0.0
    cos_min_ratio: Number = 1e-4


SCHEDULES: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (LRRangeTest, OneCycle, WarmupLR, WarmupDecayLR, WarmupCosineLR)
}
"""Name of a DeepSpeed schedule -> the class of its arguments. Other types are classes of torch.optim.lr_scheduler."""


_Switch = Annotated[bool, BeforeValidator(switch)]
_WHAT = "loss, lr, loss scale, gradient norm, seconds and bytes by tier of each optimizer step"


class CsvSection(SwitchedSection):
    """Csv files with the numbers of each step: one file for the loss, one for the learning rate, and so on."""

    enabled: _Switch = Field(False, description=f"whether {_WHAT} are written to csv files, by rank 0")
    output_path: PathText = Field("", description="directory in which the directory `job_name` is made")
    job_name: str = Field("DeepSpeedJobName", description="name of the directory of the files")


class TensorboardSection(CsvSection):
    """Files with the numbers of each step for TensorBoard."""

    enabled: _Switch = Field(
        False, description=f"whether {_WHAT} are written for TensorBoard, by rank 0, where the package tensorboard is"
    )


class WandbSection(SwitchedSection):
    """The run at Weights & Biases that gets the numbers of each step."""

    enabled: _Switch = Field(
        False, description=f"whether {_WHAT} are logged to wandb, by rank 0, where the package wandb is"
    )
    group: str | None = Field(None, description="wandb's group")
    team: str | None = Field(None, description="wandb's entity")
    project: str = Field("deepspeed", description="wandb's project")


def _compute_device(value: str) -> str:
    if re.fullmatch(r"auto|[a-z]{2,30}(:\d{1,3})?", value) is None:
        raise ValueError('expected "auto", "cpu", or an accelerator as torch names it ("cuda", "cuda:1", "xpu")')
    return value


def _paths(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StateLimitsSection(Section):
    """How many bytes of master weights and optimizer state may rest on each tier. A tier faster than
    offload_optimizer.device is filled up to its value: first with embeddings, then with the units that the next forward
    needs first. On offload_optimizer.device itself the value is only a limit."""

    device: Nbytes = Field(
        None, description="most bytes of master weights and state on the device; null: what offload_optimizer says"
    )
    host: Nbytes = Field(
        None, description="most bytes of master weights and state in host memory; null: with device nvme none"
    )
    nvme: Nbytes = Field(None, description="most bytes of master weights and state on nvme; null: no bound")

    @property
    def by_tier(self) -> dict[str, int]:
        """Return the limits that are set: tier -> bytes, fastest tier first."""
        return {tier: nbytes for tier, nbytes in self if nbytes is not None}


class ActivationsSection(OffloadSection):
    """Where activations rest between forward and backward. Activations are the inputs of blocks if the model uses
    activation checkpointing, else all tensors that autograd saves."""

    limit: Nbytes = Field(
        None,
        description="bytes that are preallocated for activations on that tier; further activations stay on the device. "
        "null: with cpu a quarter of the host memory that the plan leaves, with nvme 16GiB",
    )
    min_nbytes: Nbytes = Field(1 << 20, description="smaller tensors stay on the device")


class CheckpointSection(Section):
    """How a run is saved and resumed."""

    in_place: bool = Field(
        False,
        description="a save commits masters and state where they rest on nvme. This takes twice their bytes there, and "
        "needs checksums all. The run's swap directory is then the checkpoint of one step, and stays when the run ends",
    )
    async_save: bool = Field(
        False, alias="async", description="a save writes values that rest in memory while training goes on"
    )
    resume: PathText | None = Field(
        None,
        description="what the run goes on from: a directory of checkpoints, one checkpoint, or the swap directory of a "
        "run with in_place, which is adopted without a copy where the layout is the same; null: a new run",
    )
    convert: bool = Field(
        False, description="a checkpoint may be rounded to a lossy tiered_zero.state_format when it is loaded"
    )


class RuntimeSection(Section):
    """The section `tiered_zero`: this project's own settings. DeepSpeed ignores it."""

    device: Annotated[str, AfterValidator(_compute_device)] = Field(
        "auto",
        description="where the model computes: auto (an accelerator if any), cpu, or an "
        "accelerator as torch names it: cuda, cuda:1, xpu; without an index each of several ranks has that of its "
        "LOCAL_RANK",
    )
    device_memory_limit: Nbytes = Field(
        None,
        description='most device memory to plan, without activations: bytes, or text such as "1.5GiB"; null: seven '
        "eighths of what the device has free; on a CPU it is part of host_memory_limit",
    )
    host_memory_limit: Nbytes = Field(
        None,
        description='most host memory to use: bytes, or text such as "8GiB"; null: seven eighths of what machine and '
        "cgroup leave. Buffers and sub-groups shrink to it; a plan that still needs more is refused, with the smallest "
        "limit that would do",
    )
    placement: Literal["as_written", "auto"] = Field(
        "as_written",
        description="auto: where parameters, gradients, masters, state and activations rest, the update policy and "
        "sub_group_size are chosen by predicted seconds, as far as the config leaves them out; offload_optimizer."
        "nvme_path names the disk",
    )
    sequence_length: WholeOrNone = Field(
        None,
        ge=1,
        description="tokens of a sample, for what placement auto predicts; null: what the model takes, at most 4096",
    )
    state_limits: StateLimitsSection = StateLimitsSection()
    checkpoint: CheckpointSection = CheckpointSection()
    activations: ActivationsSection = ActivationsSection()
    gradients: Literal["auto", "cpu", "nvme"] = Field(
        "auto",
        description="with offload_optimizer.device nvme: where gradients rest from backward to the update, in host "
        "memory (cpu) or in files in its nvme_path (nvme); auto: in host memory, and on nvme if there is no room",
    )
    io_engine: Literal["auto", "native", "aiofiles"] = Field(
        "auto", description="how files are read and written; auto tries in the swap directory and takes the best"
    )
    io_timeout_s: Number = Field(60.0, gt=0, description="seconds after which a stalled request is an error")
    comm_timeout_s: Number = Field(
        1800.0, gt=0, description="seconds after which a rank that does not answer the others is an error"
    )
    checksums: Literal["off", "all"] = Field("all", description="whether swapped bytes are verified when read")
    update: Literal["auto", "barrier", "overlapped", "delayed"] = Field(
        "auto",
        description="when the update runs: inside step() (barrier), during the next forward (overlapped; exact), or "
        "one step late (delayed; changes numbers); auto: overlapped if that saves time, else barrier",
    )
    optimizer_in_backward: bool = Field(
        True,
        description="whether overlapped updates begin in backward where nothing is clipped or checked; false keeps "
        "gradients readable and changeable (parameter.grad) until step()",
    )
    delay_start_step: Whole = Field(40, ge=0, description="delayed update: steps that are exact first")
    unit_size_cap: WholeOrNone = Field(
        None,
        ge=1,
        description="most elements that are paged together; null: chosen from the model, compiled blocks whole",
    )
    debug_poison: bool = Field(False, description="freed buffers are filled with NaN, to find reads after free; slow")
    debug_delay_seed: WholeOrNone = Field(
        None, description="seed of random delays on the CPU accelerator's streams, to find races; null: no delays"
    )
    weights: Annotated[tuple[PathText, ...] | None, BeforeValidator(_paths)] = Field(
        None,
        description="weights of a model built on the meta device: safetensors files, the index of such files, or the "
        "directory of a model",
    )
    trace: PathText | None = Field(
        None, description="file for a Chrome trace of every step; one that is there is renamed; null: none"
    )
    report: PathText | None = Field(
        None,
        description="file for one JSON line per step (seconds, bytes, rates); one that is there is renamed; null: none",
    )
    state_format: Literal["fp32", "bf16_remainder", "lossy_bf16_moments", "lossy_8bit_moments"] = Field(
        "fp32",
        description="how Adam's masters and moments are stored: fp32, 12 bytes per parameter besides itself; "
        "bf16_remainder, 10, the same bits (bfloat16 parameters are half of their masters); lossy_bf16_moments, 8, and "
        "lossy_8bit_moments, 6.25, which change numbers",
    )


class Config(Section):
    """The whole config, resolved and frozen. `load` makes it."""

    train_batch_size: Whole = Field(ge=1, description="samples per optimizer step, over all ranks")
    train_micro_batch_size_per_gpu: Whole = Field(ge=1, description="samples per forward on each rank")
    gradient_accumulation_steps: Whole = Field(ge=1, description="forwards and backwards per optimizer step")
    managed_gradient_accumulation: Annotated[bool, BeforeValidator(switch)] = Field(
        True,
        description="false: every step() updates, after as many backwards as the caller makes; each loss is still "
        "divided by gradient_accumulation_steps",
    )
    gradient_clipping: Number = Field(
        1.0,
        ge=0,
        description="largest global L2 norm of the gradients; 0 does not clip. Left out, engine.step() clips to 1 and "
        "optimizer.step() does not clip",
    )
    gradient_allreduce_op: Literal["mean", "sum"] = Field(
        "mean", description="what many ranks make of their gradients: the mean, or the sum"
    )
    prescale_gradients: bool | None = Field(
        None,
        description="true: ranks divide gradients by the number of ranks before they sum them; false: they divide the "
        "sum; unset: true, except with a gradient_predivide_factor",
    )
    gradient_predivide_factor: Number = Field(
        1.0,
        gt=0,
        description="F: ranks divide gradients by F before they sum them, and the sum by (number of ranks / F); 1: "
        "prescale_gradients decides. No effect if prescale_gradients is true",
    )
    communication_data_type: Literal["fp32", "fp16", "bf16"] | None = Field(
        None, description="dtype in which ranks sum gradients; unset: the dtype of the gradients"
    )
    steps_per_print: Annotated[int | None, BeforeValidator(_steps_per_print)] = Field(
        None,
        ge=1,
        description="optimizer steps between two lines with loss, loss scale and learning rate, logged at INFO or else "
        "printed; null: none",
    )
    wall_clock_breakdown: Annotated[bool, BeforeValidator(switch)] = Field(
        False,
        description="true: a second line, with seconds by cause, the resource that bound the step, and bytes by tier; "
        "steps_per_print is 10 then if it is null",
    )
    dataloader_drop_last: bool = Field(
        False, description="the loader made from training_data drops a last partial batch"
    )
    fp16: Fp16Section = Fp16Section()
    bf16: Bf16Section = Bf16Section()
    optimizer: OptimizerSection | None = None
    scheduler: SchedulerSection | None = None
    zero_optimization: ZeroSection = ZeroSection()
    aio: AioSection = AioSection()
    csv_monitor: CsvSection = CsvSection()
    tensorboard: TensorboardSection = TensorboardSection()
    wandb: WandbSection = WandbSection()
    checkpoint: TagSection = TagSection()
    activation_checkpointing: ActivationCheckpointingSection = ActivationCheckpointingSection()
    tiered_zero: RuntimeSection = RuntimeSection()

    _reading: Reading = PrivateAttr(default_factory=Reading)

    @model_validator(mode="after")
    def _sections_agree(self) -> Config:
        if self.fp16.enabled and self.bf16.enabled:
            raise ConfigError("fp16.enabled, bf16.enabled: expected at most one; found both true. Set one to false.")
        _check_offload(self.zero_optimization, self.tiered_zero.activations)
        if not self.managed_gradient_accumulation and self.zero_optimization.stage < 2:
            _check_unmanaged(self.zero_optimization)
        _check_state_limits(self.zero_optimization.offload_optimizer, self.tiered_zero.state_limits)
        _check_in_place(self.zero_optimization.offload_optimizer, self.tiered_zero)
        _check_gradients(self.zero_optimization.offload_optimizer, self.tiered_zero)
        return self

    def filled_in(self, settings: Mapping[str, Any]) -> Config:
        """Return a copy with placement "as_written". Keys that the file leaves out get their values from `settings`
        (path -> value). Raises ValidationError if `settings` contradict a key of the file."""
        values = self.model_dump(by_alias=True, exclude_unset=True)
        for path, value in settings.items():
            *sections, name = path.split(".")
            node = values
            for section in sections:
                node = node.setdefault(section, {})
            node.setdefault(name, value)
        values.get("tiered_zero", {}).pop("placement", None)
        filled = type(self).model_validate(values)
        filled._reading = self._reading
        return filled

    @property
    def activations_device(self) -> Device:
        """Where activations rest: tiered_zero.activations.device if the file sets this key; else cpu if
        cpu_checkpointing is true, and none (the device) if not."""
        own = self.tiered_zero.activations
        if "device" not in own.model_fields_set and self.activation_checkpointing.cpu_checkpointing:
            return "cpu"
        return own.device

    @property
    def param_dtype_name(self) -> Literal["float32", "bfloat16", "float16"]:
        """Return torch's name of the dtype in which the model computes."""
        return "float16" if self.fp16.enabled else "bfloat16" if self.bf16.enabled else "float32"

    @property
    def notices(self) -> tuple[str, ...]:
        """Return the lines to log once at start."""
        return notices(self._reading, table(type(self)))

    @property
    def unfilled(self) -> frozenset[str]:
        """Return the paths of keys that are still "auto": a trainer fills them before a run."""
        return frozenset(self._reading.unfilled)

    def explain(self) -> list[KeyReport]:
        """Return a report on every key: those of the file, and those that have their defaults."""
        return reports(self, self._reading)


def _check_offload(zero: ZeroSection, activations: ActivationsSection) -> None:
    """Raise ConfigError for offload_param below stage 3, and for device nvme without a directory."""
    if zero.offload_param.device != "none" and zero.stage != 3:
        raise ConfigError(
            f"zero_optimization.offload_param.device: expected stage 3 with it; found {zero.offload_param.device!r} at "
            f"stage {zero.stage}. Set zero_optimization.stage to 3, or offload_param.device to none."
        )
    for path, section in (
        ("zero_optimization.offload_param", zero.offload_param),
        ("zero_optimization.offload_optimizer", zero.offload_optimizer),
        ("tiered_zero.activations", activations),
    ):
        if section.device == "nvme" and not section.nvme_paths:
            raise ConfigError(
                f"{path}.nvme_path: expected a directory for device nvme; found {section.nvme_path!r}. Give the path "
                "of a directory on a local disk."
            )


def _check_unmanaged(zero: ZeroSection) -> None:
    if zero.overlap_comm:
        raise ConfigError(
            "zero_optimization.overlap_comm: expected stage 2 or 3 where managed_gradient_accumulation is false, since "
            f"no backward is known to be the last of a step; found true at stage {zero.stage}. Leave it out."
        )


def _check_in_place(state: OffloadOptimizerSection, runtime: RuntimeSection) -> None:
    if not runtime.checkpoint.in_place:
        return
    limits = [tier for tier in ("device", "host") if tier in runtime.state_limits.by_tier]
    if state.device != "nvme" or state.ratio < 1 or limits:
        found = f"offload_optimizer.device {state.device!r}" if state.device != "nvme" else f"ratio {state.ratio:g}"
        found = found if state.device != "nvme" or state.ratio < 1 else f"tiered_zero.state_limits.{limits[0]}"
        raise ConfigError(
            "tiered_zero.checkpoint.in_place: expected all optimizer state on nvme, where a commit makes it durable; "
            f"found {found}. Set zero_optimization.offload_optimizer.device to nvme, with ratio 1 and without "
            "state_limits of faster tiers; or set in_place to false, and save whole checkpoints."
        )
    if runtime.checksums != "all":
        raise ConfigError(
            'tiered_zero.checkpoint.in_place: expected tiered_zero.checksums "all", so that whatever is resumed is '
            f"verified; found {runtime.checksums!r}. Leave checksums out, or set in_place to false."
        )


def _check_gradients(state: OffloadOptimizerSection, runtime: RuntimeSection) -> None:
    if runtime.gradients == "nvme" and state.device != "nvme":
        raise ConfigError(
            "tiered_zero.gradients: expected offload_optimizer.device nvme with nvme, in whose nvme_path they rest; "
            f"found {state.device!r}. Set that, or leave gradients out."
        )


def _check_state_limits(state: OffloadOptimizerSection, limits: StateLimitsSection) -> None:
    if state.ratio < 1 and limits.device is not None:
        raise ConfigError(
            "zero_optimization.offload_optimizer.ratio, tiered_zero.state_limits.device: expected one of them, for "
            f"both say how much stays on the device; found ratio {state.ratio:g} and a limit. Leave one out."
        )
    for tier, devices in (("host", ("cpu", "nvme")), ("nvme", ("nvme",))):
        if tier in limits.by_tier and state.device not in devices:
            raise ConfigError(
                f"tiered_zero.state_limits.{tier}: expected offload_optimizer.device {' or '.join(devices)} with it; "
                f"found {state.device!r}. Name the slowest tier there, or leave the limit out."
            )
