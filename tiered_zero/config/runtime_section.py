"""Define the section `tiered_zero`: settings that DeepSpeed does not have."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from tiered_zero.config.section import Nbytes, Number, OffloadSection, PathText, Section, Whole, WholeOrNone


def _compute_device(value: str) -> str:
    if re.fullmatch(r"auto|[a-z]{2,30}(:\d{1,3})?", value) is None:
        raise ValueError('expected "auto", "cpu", or an accelerator as torch names it ("cuda", "cuda:1", "xpu")')
    return value


def _io_engine(value: Any) -> Any:
    if value == "threads":
        raise ValueError('expected "auto"; found the engine threads, which is gone: aiofiles reads at its rate')
    return value


def _paths(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class StateLimitsSection(Section):
    """The most masters and optimizer state on each tier. Tiers faster than offload_optimizer.device are filled up to
    it; for that device it is a limit. Embeddings come first, then what the next forward needs first."""

    device: Nbytes = Field(
        None, description="most bytes of master weights and state on the device; null: what offload_optimizer says"
    )
    host: Nbytes = Field(
        None, description="most bytes of master weights and state in host memory; null: with device nvme none"
    )
    nvme: Nbytes = Field(None, description="most bytes of master weights and state on nvme; null: no bound")

    @property
    def by_tier(self) -> dict[str, int]:
        """Tier -> bytes, fastest first, for limits that are set."""
        return {tier: nbytes for tier, nbytes in self if nbytes is not None}


class ActivationsSection(OffloadSection):
    """Where tensors that autograd saves in forward rest until backward: checkpoints' inputs, or all of them."""

    limit: Nbytes = Field(
        None,
        description="bytes that are preallocated for them there; what finds no room stays on the device. null: with "
        "cpu a quarter of the host memory that the plan leaves, with nvme 16GiB",
    )
    min_nbytes: Nbytes = Field(1 << 20, description="smaller tensors stay on the device")


class CheckpointSection(Section):
    """How a run is saved, and from what it resumes."""

    in_place: bool = Field(
        False,
        description="a save commits masters and state where they rest on nvme, which takes twice their bytes there and "
        "checksums all; the run's swap directory is then the checkpoint, of one step, and stays when the run ends",
    )
    async_save: bool = Field(
        False, alias="async", description="a save of what rests in memory is written while training goes on"
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
    """Our own settings; DeepSpeed ignores the section."""

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
        description="where gradients rest from backward to the update, where offload_optimizer.device is nvme: in host "
        "memory (cpu) or in files in its nvme_path (nvme); auto: those on nvme that host memory has no room for",
    )
    io_engine: Annotated[Literal["auto", "native", "aiofiles"], BeforeValidator(_io_engine)] = Field(
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
