"""Run the engine in Lightning's Trainer, instead of DistributedDataParallel."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn

import tiered_zero
from tiered_zero.errors import ConfigError, ModelError


class TieredStrategy(DDPStrategy):  # type: ignore[misc, unused-ignore]
    """Puts parameters, gradients and state on the tiers of `config`: `Trainer(strategy=TieredStrategy(config))`.
    Lightning accumulates gradients. With one rank, Lightning also clips them; with several ranks, set
    `gradient_clipping` in the config. The engine stays open after `fit`, until `engine.close()` or the end of the
    strategy."""

    def __init__(self, config: Mapping[str, Any] | str | os.PathLike[str], **options: Any) -> None:
        """Read the config. `options`: arguments of DDPStrategy. Raises ConfigError."""
        super().__init__(process_group_backend="gloo", **options)
        self.config = {"train_micro_batch_size_per_gpu": 1, **config} if isinstance(config, Mapping) else config
        self.engine: tiered_zero.Engine | None = None
        if tiered_zero.load_config(self.config).gradient_accumulation_steps > 1:
            raise ConfigError(
                "gradient_accumulation_steps: expected none, since Lightning divides the loss by "
                "Trainer(accumulate_grad_batches=...); found more than 1. Leave it out of the config."
            )

    def setup(self, trainer: Any) -> None:
        """Build the engine for a fit. A test or validation after the fit uses the same engine."""
        if self.num_nodes * self.num_processes == 1:  # one rank: a distributed sampler would shuffle
            trainer._accelerator_connector.use_distributed_sampler = False
        if self.engine is None or trainer.state.fn == TrainerFn.FITTING:
            super().setup(trainer)
        else:
            self.accelerator.setup(trainer)
            self.model = self.engine

    def model_to_device(self) -> None:
        """Do nothing in a fit, because the engine moves parameters. Outside a fit, let the base class move the
        model."""
        if self.lightning_module.trainer.state.fn != TrainerFn.FITTING:
            super().model_to_device()

    def configure_ddp(self) -> None:
        """Do nothing: the engine averages gradients."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Build the engine from the module and its only optimizer."""
        super().setup_optimizers(trainer)
        found: list[Any] = super().optimizers
        if len(found) != 1 or self.engine is not None:
            raise ModelError(
                f"TieredStrategy: expected one optimizer and one fit; found {len(found)} in the "
                f"{'second' if self.engine else 'first'} fit. Build module, strategy and Trainer anew for another fit."
            )
        self.engine = tiered_zero.initialize(model=self.lightning_module, optimizer=found[0], config=self.config)[0]
        self.model = self.engine
        self.optimizers: Any = [self.engine.optimizer]

    def teardown(self) -> None:
        """Tear down without moving parameters. The base class would move them to the CPU."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
