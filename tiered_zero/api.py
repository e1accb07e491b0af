"""Build an engine from a user's model: `initialize`. Add DeepSpeed's command line arguments: `add_config_arguments`."""

from __future__ import annotations

import os
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.data import Dataset, IterableDataset

from tiered_zero.assembly.build import build
from tiered_zero.assembly.spec import specify_run
from tiered_zero.config.load import load
from tiered_zero.config.schema import Config
from tiered_zero.data import TrainingLoader
from tiered_zero.engine.engine import Engine
from tiered_zero.errors import ConfigError, ModelError
from tiered_zero.hardware.ranks.collectives import Collectives
from tiered_zero.hardware.ranks.launcher import get_world_size
from tiered_zero.hardware.ranks.process_groups import make_collectives
from tiered_zero.hardware.runtime import bind_to_share, choose_device, find_device
from tiered_zero.update.handle import TieredOptimizer


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Optimizer | Callable[[Any], Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | TrainingLoader | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
    mesh_param: Sequence[int] | None = None,
    config_params: Mapping[str, Any] | str | os.PathLike[str] | None = None,
) -> tuple[Engine, TieredOptimizer, TrainingLoader | None, Any]:
    """Plan the run, move the model onto its tiers, and return (engine, optimizer, dataloader, lr_scheduler).

    `config` (or `config_params`): a DeepSpeed-style dict or the path of a JSON file; `args.deepspeed_config` may name
    the file instead. `model`: on any device, and changed in place. Its parameters on another tier than the device hold
    values only while they are used. A model on the meta device gets its values from its own initialisers or from the
    files of the config's `tiered_zero.weights`.

    `optimizer`: any torch optimizer over the model's parameters, or a callable that makes one from them.
    `lr_scheduler`: a scheduler, or a callable that makes one from the optimizer. If given, each of the two replaces
    that of the config. `model_parameters`: the parameters or param groups to train; default: all parameters that
    require a gradient. `training_data`: a `TrainingLoader`, or a dataset, which is read in its order in micro-batches
    of the config's size. `mpu`, `mesh_param`: must not split the model over ranks.

    Raises ConfigError, ModelError, PlanError, StoreError or RankError, where possible before anything is allocated or
    written.
    """
    if isinstance(args, nn.Module):
        raise ModelError(
            "The first positional argument is args, as in DeepSpeed; write model=..., config=... in initialize()."
        )
    if not isinstance(model, nn.Module):
        raise ModelError(f"initialize(model=...) takes a torch.nn.Module; found {type(model).__name__}.")
    if isinstance(model, DistributedDataParallel) and get_world_size() > 1:
        raise ModelError(
            "initialize(model=...) takes the module inside of DistributedDataParallel: pass model.module. The engine "
            "averages the gradients of all ranks itself."
        )
    if config is not None and config_params is not None:
        raise ConfigError("config, config_params: expected one of the two; found both. Leave config_params out.")
    config = config_params if config is None else config
    _check_one_rank(mpu=mpu, mesh_param=mesh_param)
    if isinstance(config, (str, os.PathLike)) and not os.path.isfile(config):
        raise ConfigError(f"config: expected a dict or the path of a JSON file; {os.fspath(config)} is not a file.")
    settings = load(config, args, get_world_size())
    collectives = make_collectives(settings.tiered_zero.comm_timeout_s, dist_init_required)
    try:
        collectives.open()
        choose_device(collectives, settings.tiered_zero.device)
        bind_to_share(collectives, find_device(settings.tiered_zero.device))
        run_spec = specify_run(settings, model, optimizer, model_parameters, collectives=collectives)
        loader = None
        if training_data is not None:
            loader = _training_loader(training_data, collate_fn, settings, collectives)
        engine = build(run_spec, lr_scheduler, collectives, loader)
    except BaseException as error:
        collectives.fail(f"initialize(): {type(error).__name__}: {error}")
        collectives.close()
        raise
    return engine, engine.optimizer, loader, engine.lr_scheduler


def _training_loader(
    data: Dataset[Any] | TrainingLoader,
    collate_fn: Callable[..., Any] | None,
    settings: Config,
    ranks: Collectives,
) -> TrainingLoader:
    if isinstance(data, TrainingLoader):
        if collate_fn is not None:
            raise ConfigError("collate_fn: expected none with a TrainingLoader, which has its own; leave it out.")
        data.split(ranks.rank, ranks.world_size)
        return data
    if isinstance(data, IterableDataset) and ranks.world_size > 1:
        raise ModelError(
            f"training_data: expected a dataset with an index, which is split over {ranks.world_size} ranks; found an "
            f"IterableDataset, {type(data).__name__}. Let it give every rank its own part, and pass "
            "tiered_zero.TrainingLoader(dataset, batch_size)."
        )
    loader = TrainingLoader(
        data,
        settings.train_micro_batch_size_per_gpu,
        collate_fn=collate_fn,
        drop_last=settings.dataloader_drop_last,
    )
    loader.split(ranks.rank, ranks.world_size)
    return loader


def add_config_arguments(parser: ArgumentParser) -> ArgumentParser:
    """Add --deepspeed and --deepspeed_config to `parser`; `initialize(args=...)` reads --deepspeed_config."""
    group = parser.add_argument_group("DeepSpeed", "as in scripts for DeepSpeed")
    group.add_argument("--deepspeed", action="store_true", help="read by scripts; initialize() does not need it")
    group.add_argument("--deepspeed_config", type=str, default=None, help="JSON file of initialize(args=...)")
    return parser


def _check_one_rank(**sizes: object) -> None:
    """Raise ModelError if an argument in `sizes` (its name -> an mpu or a mesh) splits the model over ranks."""
    for name, given in sizes.items():
        ask = getattr(given, "get_model_parallel_world_size", None) or getattr(
            given, "get_tensor_model_parallel_world_size", None
        )
        ranks = ask() if callable(ask) else 1
        for axis in given if isinstance(given, (list, tuple)) else ():
            ranks *= axis
        if ranks != 1:
            raise ModelError(
                f"initialize({name}=...) asks for {ranks} ranks that split the model, which this version does not do. "
                "Leave it out; torchrun gives data-parallel ranks."
            )
