"""Save and load checkpoints and weight files; read and set single values by a parameter's name."""

from __future__ import annotations

import difflib
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

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
from tiered_zero.engine.entry import EngineParts, on_one_thread
from tiered_zero.engine.full_values import get_grad, get_master, get_state, set_grad, set_master, set_state
from tiered_zero.engine.train_step import TrainStep
from tiered_zero.errors import ModelError
from tiered_zero.hardware.device.accelerator import runs_outside_modes
from tiered_zero.sizes import parse_nbytes
from tiered_zero.telemetry.spans import SAVE_LANE

logger = logging.getLogger("tiered_zero")


class CheckpointCalls:
    """The engine's methods that save and load. A base class of Engine without attributes of its own. Its methods run on
    the driver thread, the one that calls the engine, and block."""

    _run: EngineParts
    _step: TrainStep

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
        """Save everything that the run holds as `save_dir/tag` (default tag: global_step{N}). Training that loads the
        checkpoint continues with the same bits, also with other tiers. Call it after a `step()` that updates.

        The checkpoint is complete and durable when this call returns; if it raises, training can go on. With
        checkpoint.async and state in memory, the save goes on in the background: it is complete and durable once
        `flush()`, `close()`, or the next save or load returns, and whichever of these comes first raises an error of
        the save. For state on NVMe, checkpoint.in_place makes saves quick. A delayed update is made visible first.
        `client_state`: the user's own plain values, tensors and arrays. `save_latest`: whether the file `latest` names
        this tag from now on. `exclude_frozen_parameters`: leave frozen parameters out; such a checkpoint is loaded with
        load_module_strict=False. Raises ModelError, StoreError and TransferError.

        With many ranks every rank calls this, and rank 0's `client_state` is saved. If the save fails on one rank,
        every rank raises.
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
        """Load the checkpoint `load_dir/tag` and continue from its step. Without a tag, load the one that the file
        `latest` names, or else the newest complete checkpoint.

        Returns the checkpoint's path and client_state; (None, {}), with a warning, if `load_dir` is missing or empty. A
        directory that holds only other things is refused (StoreError), so that no run begins at step 0 by mistake.

        Masters always get the saved fp32 values, and parameters these values rounded. Without `load_optimizer_states`
        the optimizer state starts anew. `load_module_only` does this too, and leaves counts, learning rate schedule and
        random numbers as they are. `load_module_strict`: False keeps the values of parameters and buffers that the
        checkpoint lacks, and ignores those that the model lacks.

        Nothing is changed if the checkpoint does not fit (ModelError, ConfigError, StoreError); if damage is found
        later, this engine cannot be used any more. No pickle is read. With many ranks every rank calls this; their
        number may differ from the number of ranks that saved.
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
        """The path that tiered_zero.checkpoint.resume named, and the client_state saved there; None for a new run."""
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
        """Write the parameters, in the dtype in which they are trained, and the buffers to safetensors files in
        `save_dir`. `from_pretrained(save_dir)` of transformers and plain torch can load them.

        Weights larger in total than `max_shard_size` (bytes, or text such as "5GB") are split into numbered files with
        an index. Tied weights are written under each of their names, as `load_state_dict(strict=True)` needs them. A
        model of transformers 5 is written as its `save_pretrained` does, experts one by one, with its config. Files of
        an earlier save with the same name are replaced at the end. Rank 0 writes; at stage 3 every rank calls this.
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
        """Call `save_16bit_model`: this is DeepSpeed's older name of it."""
        return self.save_16bit_model(save_dir, save_filename, exclude_frozen_parameters)

    # -- values of one parameter ---------------------------------------------------------------------------------------

    @on_one_thread
    def peek(self, name: str, kind: str = "master") -> torch.Tensor | None:
        """Return the master, the gradient or a state tensor of one parameter, copied to the CPU from any tier.

        `name`: the parameter's name in `module.named_parameters()`. `kind`: "master", "grad" (between backward and
        `step()`, without the loss scale), or the name of a state tensor in torch's optimizer, such as "exp_avg".
        Masters and gradients are fp32 in the parameter's shape; state has torch's dtype and shape. Returns None for a
        frozen parameter, for state before the first step, and for a gradient that does not exist. Raises ModelError.
        Waits for every update and reads whole sub-groups, which is too slow for every step. If masters and state are
        sharded (many ranks, stage 1 and up), every rank calls this.
        """
        param = self._named(name)
        if kind == "master":
            return get_master(param)
        return get_grad(param) if kind == "grad" else get_state(param, kind)

    @on_one_thread
    def poke(self, name: str, kind: str, value: torch.Tensor) -> None:
        """Set what `peek(name, kind)` returns to `value`, on any tier; the next step uses the new value.

        A master becomes exactly `value`, and its parameter becomes `value` rounded to the parameter's dtype. State in a
        lossy `state_format` is rounded. Raises ModelError if the parameter has no value of this kind. With many ranks
        every rank calls this, and rank 0's `value` is set.
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


def _directory(call: str, given: object) -> Path:
    """Return `given`, the directory argument of engine.`call`(), as a Path. Raises ModelError if it is not a path."""
    if not isinstance(given, str | os.PathLike) or not os.fspath(given):
        raise ModelError(f"engine.{call}() expects the path of a directory; found {given!r:.200}.")
    return Path(given)
