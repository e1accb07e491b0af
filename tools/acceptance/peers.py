"""The same model, values and batches in other libraries that keep state in host memory, where they are installed.

Each trains in bf16 with fp32 AdamW on the CPU and does not clip, as `1.3b tiered cpu/cpu` does.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tools.acceptance.model import Course, Size, batch
from tools.acceptance.report import Record, Section, Site, free_port, left_out
from tools.acceptance.speed import (
    build_seeded,
    compute_name,
    compute_section,
    measure,
    rates,
    size_of,
    training_section,
)

NAME, ROWS, NUM_STEPS = "1.3b", 4, 20
COURSE = Course(bf16=True, lr=1e-4)
ADAMW: dict[str, Any] = {"lr": COURSE.lr, "weight_decay": 0.01}

Step = Callable[[Tensor], Tensor]
"""Takes a step with a batch, and returns its loss."""


def sections() -> list[Section]:
    found = [compute_section(NAME, ROWS)]
    for placement in ("cpu/cpu", "cpu/nvme"):
        course = Course(placement=placement, bf16=True, lr=COURSE.lr)
        found.append(training_section(f"{NAME} tiered {placement}", NAME, ROWS, course, num_steps=NUM_STEPS))
    for title, build in {"FSDP2": fsdp2, "DeepSpeed ZeRO-3": deepspeed, "torchao": torchao}.items():
        name = f"{NAME} {title} offload"
        found.append(Section(name=name, group=name, run=partial(measure_peer, build=build), least_s=60.0, most_s=240.0))
    return found


def measure_peer(site: Site, build: Callable[[Site, Size], Any]) -> Record:
    """What a peer raises is its own: the reason why it is left out."""
    size = size_of(site, NAME)
    try:
        site.reset_peaks()
        with build(site, size) as step:
            found = measure(
                site, lambda number: step(batch(size, number, site.device, ROWS)), 6 if site.smoke else NUM_STEPS
            )
    except Exception as error:
        return left_out(f"{type(error).__name__}: {error}"[:500])
    return {"passed": None, **rates(site, found, compute_name(NAME, ROWS), ROWS * size.tokens)}


@contextmanager
def one_rank(site: Site) -> Iterator[None]:
    """A process group of this process alone."""
    import torch.distributed as dist

    kind = site.device.type
    backend = "gloo" if kind == "cpu" else f"cpu:gloo,{kind}:{dist.get_default_backend_for_device(site.device)}"
    launched = {
        "RANK": "0",
        "WORLD_SIZE": "1",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": free_port(),
    }
    with patch.dict(os.environ, launched), tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def fsdp2(site: Site, size: Size) -> Iterator[Step]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    with one_rank(site):
        model, mesh = build_seeded(size), init_device_mesh(site.device.type, (1,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
        offload = CPUOffloadPolicy(pin_memory=site.device.type != "cpu")
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy, offload_policy=offload)
        optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = model(tokens)
            torch.autograd.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        yield step


@contextmanager
def deepspeed(site: Site, size: Size) -> Iterator[Step]:
    import deepspeed

    on_host = {"device": "cpu", "pin_memory": site.device.type != "cpu"}
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": ADAMW},
        "zero_optimization": {"stage": 3, "offload_optimizer": on_host, "offload_param": on_host},
    }
    with one_rank(site):
        model = build_seeded(size)
        engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]

        def step(tokens: Tensor) -> Tensor:
            loss: Tensor = engine(tokens)
            engine.backward(loss)
            engine.step()
            return loss

        yield step


@contextmanager
def torchao(site: Site, size: Size) -> Iterator[Step]:
    """Weights stay on the device, in fp32 under autocast."""
    from torchao.optim import CPUOffloadOptimizer

    model = build_seeded(size).to(site.device)
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, **ADAMW)

    def step(tokens: Tensor) -> Tensor:
        with torch.autocast(site.device.type, torch.bfloat16):
            loss: Tensor = model(tokens)
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    yield step
