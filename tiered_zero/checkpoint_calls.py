"""The engine's calls that read and write what a run holds: weights as files, values by a parameter's name."""

from __future__ import annotations

import difflib
import logging
from abc import ABC, abstractmethod
from pathlib import Path

import torch
from torch import nn

from tiered_zero.checkpoint.weights import (
    MAX_SHARD_NBYTES,
    WEIGHTS_NAME,
    model_weights,
    write_model_config,
    write_weights,
)
from tiered_zero.engine_call import on_one_thread
from tiered_zero.errors import ModelError
from tiered_zero.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state
from tiered_zero.params.outside_modes import runs_outside_modes
from tiered_zero.sizes import parse_nbytes
from tiered_zero.train_step import TrainStep

logger = logging.getLogger("tiered_zero")


class CheckpointCalls(ABC):
    """Mixed into Engine; holds no state. Driver thread; blocks."""

    _step: TrainStep

    @property
    @abstractmethod
    def module(self) -> nn.Module: ...

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
        """Write the parameters, in the dtype that they train in, and the buffers as safetensors files, which
        `from_pretrained(save_dir)` of transformers and plain torch load.

        Weights larger than `max_shard_size` go to numbered files with an index. Tied weights are written once. A
        transformers model's config is written besides. Earlier weights of this name are replaced at the end.
        """
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
            return units[param].unit.index

        weights = model_weights(self.module, pager.copies.take, unit_of, exclude_frozen=exclude_frozen_parameters)
        max_nbytes = parse_nbytes(max_shard_size)
        try:
            write_weights(Path(save_dir), weights, max_shard_nbytes=max_nbytes, file_name=name)
        finally:
            pager.copies.end()  # drops the unit read last
        write_model_config(self.module, Path(save_dir))
        return True

    def save_fp16_model(
        self,
        save_dir: str | Path,
        save_filename: str = WEIGHTS_NAME,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """The same as `save_16bit_model`: DeepSpeed's older name."""
        return self.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    # -- values of one parameter ---------------------------------------------------------------------------------------

    @on_one_thread
    def peek(self, name: str, kind: str = "master") -> torch.Tensor | None:
        """Read one value of the parameter `name`, as `module.named_parameters()` calls it: fp32, a copy on the CPU, in
        the parameter's shape, from any tier.

        `kind`: "master", "grad" (between backward and `step()`), or state as torch's optimizer calls it, such as
        "exp_avg". None for what there is not: of a frozen parameter, before the first step, without a gradient. Raises
        ModelError. Waits for every update and reads whole sub-groups: not for every step.
        """
        param = self._named(name)
        if kind == "master":
            return get_master(param)
        return get_grad(param) if kind == "grad" else get_state(param, kind)

    @on_one_thread
    def poke(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Set what `peek` reads, on whatever tier it rests; the next step goes on from it.

        A master takes `value` exactly, and its parameter becomes that rounded to its dtype. State in a lossy
        `state_format` is rounded. Raises ModelError for what there is not.
        """
        param = self._named(name)
        if kind == "master":
            set_master(param, value)
        elif kind == "grad":
            set_grad(param, value)
        else:
            set_state(param, kind, value)

    def _named(self, name: str) -> nn.Parameter:
        found = dict(self.module.named_parameters(remove_duplicate=False))
        if name not in found:
            near = difflib.get_close_matches(str(name), found, n=1)
            ask = f" Did you mean {near[0]!r}?" if near else ""
            raise ModelError(f"Expected a name of module.named_parameters(); found {name!r:.200}.{ask}")
        return found[name]
