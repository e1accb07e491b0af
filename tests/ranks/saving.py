"""What ranks run in tests of checkpoints: train, save, load, and everything that a run then holds."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

import tiered_zero
from tests.ranks.training import Case, build_model, make_optimizer, micro_batches
from tiered_zero import Engine


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a run's state rests, and how it is divided. `params`: where parameters rest at stage 3, if elsewhere."""

    world: int
    stage: int = 0
    device: str = "cpu"
    params: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    runtime: Mapping[str, Any] = field(default_factory=dict)


def build(place: Place, swap_path: str, **runtime: Any) -> Engine:
    """The same model on every placement, with tied and frozen parameters and one that is used in some steps."""
    rank = int(os.environ["RANK"])
    section: dict[str, Any] = {"stage": place.stage, "sub_group_size": 1, "stage3_param_persistence_threshold": 0}
    section["offload_optimizer"] = {"device": place.device}
    if place.stage == 3:
        section["offload_param"] = {"device": place.params or place.device, "max_in_cpu": 0}
    for offload in (part for name, part in section.items() if "offload" in name and part["device"] == "nvme"):
        offload["nvme_path"] = swap_path
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_clipping": 0.0,
        "zero_optimization": section,
        "tiered_zero": {
            "device": "cpu", "host_memory_limit": "1GiB", "comm_timeout_s": 60, **place.runtime, **runtime,
        },
        **place.config,
    }  # fmt: skip
    model = build_model(rank)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=make_optimizer(model, "groups"), config=config)
    return engine


def train(engine: Engine, first: int, stop: int) -> list[float]:
    """Steps [first, stop): the losses of this rank. Each draws from the random generator."""
    losses = []
    for step in range(first, stop):
        tokens, targets = micro_batches(Case(), step, engine.global_rank, engine.world_size)[0]
        loss = engine(tokens, targets, detour=step % 2 == 1) * (1 + torch.rand(()) / 8)
        losses.append(loss.item())
        engine.backward(loss)
        engine.step()
    return losses


@contextmanager
def warnings_noted() -> Iterator[list[str]]:
    """What the package warns of in the block."""
    lines: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("tiered_zero")
    logger.addHandler(handler)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in engine.module.state_dict().items()}


def save(place: Place, swap_path: str, save_dir: str, steps: int = 2, more: int = 2) -> dict[str, Any]:
    """Train, save, and go on."""
    engine = build(place, swap_path)
    train(engine, 0, steps)
    engine.save_checkpoint(save_dir, client_state={"of rank": engine.global_rank})
    saved = weights_of(engine)
    losses = train(engine, steps, steps + more)
    found = {"saved": saved, "weights": weights_of(engine), "losses": losses}
    engine.close()
    return found


def load(
    place: Place, swap_path: str, load_dir: str, more: int = 2, save_dir: str | None = None, resume: bool = False
) -> dict[str, Any]:
    """Load into a new run, or begin it from there; save that again where asked, and go on."""
    if resume:
        engine = build(place, swap_path, checkpoint={"resume": load_dir})
        assert engine.resumed is not None
        path, client_state = engine.resumed
    else:
        engine = build(place, swap_path)
        path, client_state = engine.load_checkpoint(load_dir)
    loaded, first = weights_of(engine), engine.global_steps
    if save_dir is not None:
        engine.save_checkpoint(save_dir)
    losses = train(engine, first, first + more)
    found = {"path": path, "client_state": client_state, "loaded": loaded, "weights": weights_of(engine)}
    engine.close()
    return {**found, "losses": losses, "first": first}
