"""Run the checks of hardware/check.py and some training steps on the accelerator: `tiered-zero doctor --device`, in
about 30 s."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

import tiered_zero
from tiered_zero.hardware import check
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.runtime import build_accelerator
from tiered_zero.system import BAD, GOOD, Finding

NUM_STEPS = 3
WIDTH = 64


def examine_device(pinned_nbytes: int) -> Iterator[Finding]:
    """Check the accelerator and yield the findings. `pinned_nbytes`: bytes to pin as a test."""
    accelerator = build_accelerator()
    try:
        if accelerator.device.type == "cpu":
            fix = "install a torch for it, and look at its driver (nvidia-smi) and the devices given to this container"
            yield Finding("device", BAD, "torch finds no accelerator on this machine", fix)
            return
        checks: tuple[Callable[[Accelerator], Finding], ...] = (
            check.check_memory, check.check_kernel, check.check_copies, check.check_overlap, check.check_sleep,
            check.check_allocator, partial(check.check_pinning, nbytes=pinned_nbytes), check_steps,
        )  # fmt: skip
        for run in checks:
            try:
                finding = run(accelerator)
            except Exception as error:
                name = getattr(run, "__name__", "check_pinning").removeprefix("check_")
                found = f"could not be found out: {type(error).__name__}: {str(error).partition(chr(10))[0]}"
                finding = Finding(name, BAD, found, "what the error says; else report it")
            yield finding
            if run is check.check_kernel and finding.state == BAD:
                return
    finally:
        accelerator.close()


def check_steps(accelerator: Accelerator) -> Finding:
    """Train a small model with its state in host memory, and compare its weights with those of plain PyTorch."""
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())))
    batches = torch.randn(NUM_STEPS, 8, WIDTH, device=accelerator.device)
    expected = _train_plain(copy.deepcopy(model).to(accelerator.device), batches)
    for policy in ("overlapped", "barrier"):
        found = _train_tiered(copy.deepcopy(model), batches, policy)
        if all(torch.equal(value, found[name]) for name, value in expected.items()):
            if policy == "overlapped":
                return Finding("steps", GOOD, f"{NUM_STEPS} steps have the bits of plain PyTorch")
            fix = 'set "tiered_zero": {"update": "barrier"}, and report this'
            return Finding("steps", BAD, "other weights than plain PyTorch if updates overlap; barrier is equal", fix)
    fix = "CUDA_LAUNCH_BLOCKING=1 puts all work in one order; report this"
    return Finding("steps", BAD, "other weights than plain PyTorch with every update policy", fix)


def _train_plain(model: nn.Module, batches: torch.Tensor) -> dict[str, torch.Tensor]:
    masters = {name: nn.Parameter(param.detach().cpu()) for name, param in model.named_parameters()}
    optimizer = torch.optim.AdamW(masters.values(), lr=1e-3)
    for batch in batches:
        model(batch).square().mean().backward()
        for name, param in model.named_parameters():
            assert param.grad is not None, "every layer is used"
            masters[name].grad, param.grad = param.grad.cpu(), None
        optimizer.step()
        model.load_state_dict(masters)
    return {name: master.detach() for name, master in masters.items()}


def _train_tiered(model: nn.Module, batches: torch.Tensor, policy: str) -> dict[str, torch.Tensor]:
    config = {
        "train_batch_size": 1,
        "gradient_clipping": 0.0,
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "cpu"},
            "offload_optimizer": {"device": "cpu"},
            "stage3_param_persistence_threshold": 0,
        },
        "tiered_zero": {"device": str(batches.device), "update": policy},
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine, *_ = tiered_zero.initialize(model=model, optimizer=optimizer, config=config)
    try:
        for batch in batches:
            engine.backward(engine(batch).square().mean())
            engine.step()
        return engine.module.state_dict()
    finally:
        engine.close()
