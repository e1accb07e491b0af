"""One script, two trainers: plain PyTorch behind the engine's three calls, and the engine itself on any placement."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import tiered_zero
from tests.support.configs import SMALL_DEVICE, zero_section
from tests.support.models import named_weights

OptimizerMaker = Callable[[nn.Module], Optimizer]
SchedulerMaker = Callable[[Optimizer], Any]

TIERS = ("none", "cpu", "nvme")
PLACEMENTS = tuple(itertools.product(TIERS, TIERS))
"""(parameters, optimizer) as `offload_*.device` names them."""

SPREAD = (("none", "nvme"), ("cpu", "none"), ("nvme", "cpu"))
"""Every tier of the parameters, and of the state, once: for features whose code asks the two apart."""

FAR = (("cpu", "cpu"), ("nvme", "nvme"))
"""The two placements with everything away: paging cases run on both."""


def adamw(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=3e-3)


class Plain:
    """A plain PyTorch loop with the engine's names. fp32 in place, or 16 bit with fp32 masters of its own.

    16 bit: the model computes in `dtype`; gradients of each micro-batch are added in fp32; the optimizer steps fp32
    copies of the first values, and parameters are those rounded.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: OptimizerMaker = adamw,
        accumulation: int = 1,
        clipping: float = 0.0,
        make_scheduler: SchedulerMaker | None = None,
        dtype: torch.dtype | None = None,
        loss_scale: float = 1.0,
    ) -> None:
        self.module = model
        self.masters: dict[nn.Parameter, nn.Parameter] = {}
        self.optimizer = make_optimizer(model)
        if dtype is not None:
            self.masters = {p: nn.Parameter(p.detach().clone()) for p in model.parameters() if p.requires_grad}
            for group in self.optimizer.param_groups:
                group["params"] = [self.masters[param] for param in group["params"]]
            for param in model.parameters():
                param.data = param.data.to(dtype) if param.is_floating_point() else param.data  # buffers stay
            for module in model.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.to(dtype)  # torch on the CPU takes no other statistics
        self.scheduler = make_scheduler(self.optimizer) if make_scheduler else None
        self.loss_scale = loss_scale
        self._accumulation = accumulation
        self._clipping = clipping
        self._micro_steps = 0
        self._norm: float | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to close."""

    def train(self) -> None:
        self.module.train()

    def eval(self) -> None:
        self.module.eval()

    def get_lr(self) -> list[float]:
        return [float(group["lr"]) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        return self._norm

    def backward(self, loss: Tensor, retain_graph: bool = False) -> None:
        scaled = loss / self._accumulation if self._accumulation > 1 else loss
        (scaled.float() * self.loss_scale if self.masters else scaled).backward(retain_graph=retain_graph)
        for param, master in self.masters.items():
            if param.grad is not None:
                grad, param.grad = param.grad.float(), None
                master.grad = grad if master.grad is None else master.grad + grad

    def step(self) -> None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation:
            return
        params = list(self.masters.values()) or list(self.module.parameters())
        grads = [param.grad for param in params if param.grad is not None]
        for grad in grads:
            grad /= self.loss_scale
        total = nn.utils.get_total_norm(grads) if grads else torch.tensor(0.0)
        self._norm = total.item()
        if self._clipping:
            nn.utils.clip_grad_norm_(params, self._clipping)
        self.optimizer.step()
        if self.scheduler is not None:
            self.scheduler.step()
        with torch.no_grad():
            for param, master in self.masters.items():
                param.copy_(master)
        self.abort_step()

    def abort_step(self) -> None:
        self._micro_steps -= self._micro_steps % self._accumulation
        for param in [*self.module.parameters(), *self.masters.values()]:
            param.grad = None


def tiered(
    model: nn.Module,
    swap_path: Path,
    placement: tuple[str, str] = ("nvme", "nvme"),
    make_optimizer: OptimizerMaker = adamw,
    accumulation: int = 1,
    clipping: float | None = 0.0,
    make_scheduler: SchedulerMaker | None = None,
    zero: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
    **top: Any,
) -> tiered_zero.Engine:
    """An engine; `zero`, `runtime`, `top` are further keys of zero_optimization, tiered_zero, and the config itself.

    Unless told otherwise nothing persists on the device, and sub-groups are as small as they can be.
    """
    param, optimizer = placement
    section = zero_section(param, optimizer, swap_path, sub_group_size=2048)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": clipping,
        "zero_optimization": _given({**section, **(zero or {})}),
        "tiered_zero": _given({"device": "cpu", **SMALL_DEVICE, **(runtime or {})}),
        **top,
    }
    return tiered_zero.initialize(
        model=model, optimizer=make_optimizer(model), lr_scheduler=make_scheduler, config=_given(config)
    )[0]


def _given(section: dict[str, Any]) -> dict[str, Any]:
    """Without the keys that are None: they have their defaults."""
    return {name: value for name, value in section.items() if value is not None}


Script = Callable[[Any], list[Any]]
"""Trains with a trainer's three calls; returns what it has seen on the way (numbers, tensors)."""


@dataclass
class Record:
    """What a script has seen, and the weights that it ended with."""

    seen: list[Any]
    weights: dict[str, Tensor]


def follow(script: Script, trainer: Any) -> Record:
    """Run the script, take the weights, close the trainer."""
    with trainer:
        seen = script(trainer)
        return Record(seen, dict(named_weights(trainer.module)))


def assert_same_bits(expected: Record, found: Record) -> None:
    """Everything seen and every weight; a NaN equals every NaN."""
    assert len(expected.seen) == len(found.seen)
    for number, (left, right) in enumerate(zip(expected.seen, found.seen, strict=True)):
        assert same_bits(left, right), f"observation {number}: {left} expected, {right} found"
    assert expected.weights.keys() == found.weights.keys()
    different = {
        name: (value - found.weights[name]).abs().max().item()
        for name, value in expected.weights.items()
        if not same_bits(value, found.weights[name])
    }
    assert not different, f"largest differences: {different}"


def num_different(expected: Record, found: Record) -> int:
    """How many observations and weights are not the same to the bit."""
    pairs = zip([*expected.seen, *expected.weights.values()], [*found.seen, *found.weights.values()], strict=True)
    return sum(not same_bits(left, right) for left, right in pairs)


def same_bits(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor):
        left, right = left.detach().cpu(), right.detach().cpu()
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        if left.is_floating_point():
            left, right = (torch.where(x.isnan(), torch.full_like(x, torch.nan), x) for x in (left, right))
        return torch.equal(left.contiguous().view(-1).view(torch.uint8), right.contiguous().view(-1).view(torch.uint8))
    if isinstance(left, float):
        return bool(left == right or (left != left and right != right))
    return bool(left == right)


def assert_parity(
    build: Callable[[], nn.Module],
    script: Script,
    swap_path: Path,
    placements: Sequence[tuple[str, str]] = FAR,
    make_optimizer: OptimizerMaker = adamw,
    accumulation: int = 1,
    clipping: float = 0.0,
    **options: Any,
) -> None:
    """The script sees and leaves the same bits in plain PyTorch and on each placement. `options`: see `tiered`."""
    torch.manual_seed(0)
    expected = follow(script, Plain(build(), make_optimizer, accumulation, clipping))
    for placement in placements:
        torch.manual_seed(0)
        engine = tiered(build(), swap_path, placement, make_optimizer, accumulation, clipping, **options)
        assert_same_bits(expected, follow(script, engine))
    assert not any(swap_path.iterdir()), "closed engines leave nothing in the swap directory"


def train(
    trainer: Any,
    data: Callable[[int], tuple[Any, ...]],
    steps: int = 4,
    accumulation: int = 1,
    backwards: int = 1,
) -> list[Any]:
    """The plain course of training: losses, and after each step the gradient norm and the learning rates.

    Four steps: without state, with state, by the schedule of the first, and once more over what that read ahead."""
    seen: list[Any] = []
    numbers = itertools.count()
    for _ in range(steps):
        for _ in range(accumulation):
            for _ in range(backwards):
                loss = trainer(*data(next(numbers)))
                trainer.backward(loss)
                seen.append(loss.detach())
            trainer.step()
        seen += [trainer.get_global_grad_norm(), *trainer.get_lr()]
    return seen
