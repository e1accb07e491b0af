"""Connect to axolotl with a plugin. In its YAML:

plugins: [tiered_zero.integrations.axolotl.Plugin]
tiered_zero_offload: {device: nvme, nvme_path: swap}      # offload optimizer state: `offload` of OffloadedOptimizer
tiered_zero_config: {zero_optimization: {stage: 3, ...}}  # or also parameters: an engine's config, or its file
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel
from transformers import Trainer

import tiered_zero
from tiered_zero.errors import ConfigError
from tiered_zero.integrations.trainer import ReportCallback, SaveStateCallback
from tiered_zero.optim import OffloadedOptimizer


class TieredZeroArgs(BaseModel):
    """The keys that the plugin adds to axolotl's config."""

    tiered_zero_offload: dict[str, Any] | None = None
    tiered_zero_config: dict[str, Any] | str | None = None


class Plugin(BasePlugin):  # type: ignore[misc, unused-ignore]
    """Offloads optimizer state, or parameters too; saves offloaded state in separate files; logs bytes by tier."""

    def __init__(self) -> None:
        super().__init__()
        self.engine: tiered_zero.Engine | None = None

    def get_input_args(self) -> str:
        """Return the dotted name of the class that declares the keys that this plugin adds to axolotl's config."""
        return f"{__name__}.{TieredZeroArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        """Build the engine if the config asks for one. axolotl calls this after adapters are added. Raises
        ConfigError."""
        if cfg.tiered_zero_offload and cfg.tiered_zero_config:
            raise ConfigError("tiered_zero_offload, tiered_zero_config: expected one of them; found both.")
        if cfg.tiered_zero_config is None:
            return
        if not str(kind := cfg.optimizer or "adamw").startswith("adamw"):
            raise ConfigError(f"optimizer: expected adamw_torch with tiered_zero_config; found {kind}.")
        config = cfg.tiered_zero_config
        if isinstance(config, Mapping):
            config = {"train_micro_batch_size_per_gpu": cfg.micro_batch_size or 1, **config}
        no_trainer: Any = None  # the method does not use its trainer
        decayed = set(Trainer.get_decay_parameter_names(no_trainer, model))
        groups: list[dict[str, Any]] = [
            {"params": [], "weight_decay": cfg.weight_decay or 0.0},
            {"params": [], "weight_decay": 0.0},
        ]
        for name, param in model.named_parameters():
            if param.requires_grad:
                groups[name not in decayed]["params"].append(param)
        betas = (cfg.adam_beta1 or 0.9, cfg.adam_beta2 or 0.999)
        optimizer = torch.optim.AdamW(groups, lr=float(cfg.learning_rate), betas=betas, eps=cfg.adam_epsilon or 1e-8)
        self.engine = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)[0]

    def create_optimizer(self, cfg: Any, trainer: Any) -> Any:
        """Return the engine's optimizer, or an OffloadedOptimizer with tiered_zero_offload. None: Trainer makes its
        own."""
        if self.engine is not None:
            return self.engine.optimizer
        if cfg.tiered_zero_offload is None or trainer.optimizer_cls_and_kwargs is not None:
            return None  # Trainer makes the optimizer; also in the call below, which asks again
        kind, values = trainer.get_optimizer_cls_and_kwargs(trainer.args, trainer.model)
        values = {"optimizer_class": kind, "offload": dict(cfg.tiered_zero_offload), **values}
        trainer.optimizer_cls_and_kwargs = (OffloadedOptimizer, values)
        return trainer.create_optimizer()

    def add_callbacks_pre_trainer(self, cfg: Any, model: Any) -> list[Any]:
        """Return the callbacks that save state in files and log bytes by tier."""
        return [SaveStateCallback(cfg.resume_from_checkpoint), ReportCallback(self.engine)]
