"""Define DeepSpeed's monitors: where each step's numbers are written, in addition to `tiered_zero.report`."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from tiered_zero.config.section import PathText, SwitchedSection, switch

_Switch = Annotated[bool, BeforeValidator(switch)]
_WHAT = "loss, lr, loss scale, gradient norm, seconds and bytes by tier of each optimizer step"


class CsvSection(SwitchedSection):
    """A file for each number."""

    enabled: _Switch = Field(False, description=f"whether {_WHAT} are written to csv files, by rank 0")
    output_path: PathText = Field("", description="directory that holds the one of `job_name`")
    job_name: str = Field("DeepSpeedJobName", description="directory of the files")


class TensorboardSection(CsvSection):
    """Scalars for TensorBoard."""

    enabled: _Switch = Field(
        False, description=f"whether {_WHAT} are written for TensorBoard, by rank 0, where the package tensorboard is"
    )


class WandbSection(SwitchedSection):
    """A run at Weights & Biases."""

    enabled: _Switch = Field(
        False, description=f"whether {_WHAT} are logged to wandb, by rank 0, where the package wandb is"
    )
    group: str | None = Field(None, description="wandb's group")
    team: str | None = Field(None, description="wandb's entity")
    project: str = Field("deepspeed", description="wandb's project")
