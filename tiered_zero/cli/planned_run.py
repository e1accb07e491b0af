"""Build the model for `tiered-zero plan` on the `meta` device, and specify the run that is planned."""

from __future__ import annotations

import gc
import importlib
import sys
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from tiered_zero.assembly.spec import PlannedMachine, RunSpec, specify_run
from tiered_zero.config.load import read_json
from tiered_zero.config.schema import Config
from tiered_zero.demo.gpt import build_gpt
from tiered_zero.errors import ConfigError
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.plan.gpt_shape import GPTConfig
from tiered_zero.plan.machine import Machine
from tiered_zero.rules.from_config import check_sections


def build_planned(source: GPTConfig | Path | str) -> nn.Module:
    """Build the built-in GPT of a shape, the model of a Hugging Face config.json, or what `module:function` returns.

    Raises ConfigError if it cannot be built.
    """
    if isinstance(source, GPTConfig):
        return _with_checkpoints(build_gpt(source))
    try:
        with torch.device("meta"):
            return _with_checkpoints(_of_hugging_face(source)) if isinstance(source, Path) else _of_function(source)
    except ConfigError:
        raise
    except Exception as error:  # of foreign code
        raise ConfigError(
            f"The model {source} cannot be built on the meta device: {type(error).__name__}: {error}"
        ) from error


def _with_checkpoints(model: nn.Module) -> nn.Module:
    """Mark a model as one that recomputes its blocks, as the estimate of its activations assumes."""
    vars(model)["gradient_checkpointing"] = True
    return model


class _PlannedRanks:
    """Stands for the collectives of rank 0 of a run that is only planned: the other ranks answer as rank 0 does."""

    rank = 0

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size

    def exchange(self, data: bytes, what: str = "", *, kind: str = "") -> list[bytes]:
        return [data] * self.world_size


def specify_planned(
    config: Config,
    model: nn.Module,
    ranks: int = 1,
    device_nbytes: int | None = None,
    host_nbytes: int | None = None,
    rates: Machine | None = None,
) -> RunSpec:
    """Specify the run of rank 0. `device_nbytes`, `host_nbytes`: bytes of the machine's memory, which the ranks share.
    `rates`: rates of the machine for the choice of a placement. None: those of this machine."""
    check_sections(config)
    machine = PlannedMachine(device_nbytes=device_nbytes, host_nbytes=host_nbytes, ranks=ranks)
    collects = gc.isenabled()
    gc.disable()  # for 70e9 parameters a million records are in use, and looking for garbage takes 60% of the time
    try:
        planned = cast(Collectives, _PlannedRanks(ranks))
        return specify_run(config, model, machine=machine, collectives=planned, rates=rates)
    finally:
        if collects:
            gc.enable()


def count_parameters(model: nn.Module) -> int:
    """Count the parameters; tied weights count once."""
    return sum(param.numel() for param in model.parameters())


def _of_hugging_face(path: Path) -> nn.Module:
    """Build the first known class that the config's `architectures` names, without weights: nothing is downloaded."""
    values = read_json(path / "config.json" if path.is_dir() else path)
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"--model-config needs transformers, which knows the models ({error}). Install it, or give --model "
            "module:function."
        ) from error
    known = transformers.CONFIG_MAPPING
    if values.get("model_type") not in known:
        raise ConfigError(
            f"{path}: model_type: expected one that transformers {transformers.__version__} has; found "
            f"{values.get('model_type')!r}. Give --model module:function for a model of your own."
        )
    config = known[values["model_type"]].from_dict(values)
    names = values.get("architectures") or ()
    found: Any = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
    build: Any = found or transformers.AutoModelForCausalLM.from_config
    model: nn.Module = build(config)
    return model


def _of_function(target: str) -> nn.Module:
    """Call `module:function` and return the model that it returns. The module is imported with the working directory
    first on the path, as `python -m` does."""
    module, _, name = target.partition(":")
    sys.path.insert(0, "")
    try:
        function = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"--model {target}: expected a function that returns a model; {error}.") from error
    finally:
        sys.path.remove("")
    model = function()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"--model {target}: expected it to return a torch.nn.Module; found {type(model).__name__}.")
    return model
