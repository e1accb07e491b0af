"""Gradients that rest on NVMe: the bits of those in host memory, and of plain PyTorch."""

from typing import Any

import pytest
import torch
from torch import nn

import tiered_zero
from tests.support.inspection import gradient_traffic
from tests.support.models import ParityGPT, batch, groups
from tests.support.plan_requests import gradient_tiers
from tests.support.trainers import Plain, Record, assert_same_bits, follow, tiered, train
from tiered_zero.errors import ModelError, PlanError

NUM_BLOCKS = 5
ON_NVME: dict[str, Any] = {"gradients": "nvme", "debug_poison": True, "debug_delay_seed": 3}
"""With poison in what is freed, and lanes that are late."""

BARRIER = {"update": "barrier"}
DELAYED = {"update": "delayed", "delay_start_step": 1}


def build() -> ParityGPT:
    """More units than there are windows."""
    torch.manual_seed(0)
    return ParityGPT(NUM_BLOCKS)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


def course(trainer: Any, accumulation: int) -> list[Any]:
    """A layer has gradients in some micro-batches only."""
    return train(trainer, lambda number: (*batch(number), number % 2 == 0), 4, accumulation)


def engine_of(swap_path: Any, param: str = "nvme", **options: Any) -> tiered_zero.Engine:
    return tiered(build(), swap_path, (param, "nvme"), adamw, **options)


@pytest.mark.parametrize(
    ("update", "accumulation", "clipping", "param"),
    [
        ({}, 3, 0.0, "nvme"),  # updates begin in backward
        ({}, 1, 0.0, "none"),
        ({"optimizer_in_backward": False}, 1, 0.5, "cpu"),
        ({"optimizer_in_backward": False}, 3, 0.0, "none"),
        (BARRIER, 1, 0.0, "cpu"),
        (BARRIER, 3, 0.5, "nvme"),
    ],
)
def test_fp32_has_the_bits_of_plain_pytorch(update, accumulation, clipping, param, swap_path):
    expected = follow(lambda own: course(own, accumulation), Plain(build(), adamw, accumulation, clipping))
    engine = engine_of(swap_path, param, accumulation=accumulation, clipping=clipping, runtime={**ON_NVME, **update})
    assert set(gradient_tiers(engine.plan).values()) == {"nvme"}
    assert_same_bits(expected, follow(lambda own: course(own, accumulation), engine))
    assert not any(swap_path.iterdir()), "closed engines leave nothing in the swap directory"


def both(swap_path: Any, script: Any = course, accumulation: int = 1, **options: Any) -> tuple[Record, Record]:
    """The same course with gradients in host memory and on NVMe."""
    runtime = options.pop("runtime", {})
    records = []
    for own in ({"gradients": "cpu"}, ON_NVME):
        engine = engine_of(swap_path, accumulation=accumulation, runtime={**own, **runtime}, **options)
        records.append(follow(lambda trainer: script(trainer, accumulation), engine))
    return records[0], records[1]


@pytest.mark.parametrize(
    ("runtime", "accumulation", "clipping"),
    [({}, 3, 0.0), (BARRIER, 1, 0.5), (DELAYED, 3, 0.0), ({"state_format": "bf16_remainder"}, 1, 0.0)],
)
def test_bf16_has_the_bits_of_gradients_in_host_memory(runtime, accumulation, clipping, swap_path):
    bf16 = {"bf16": {"enabled": True}}
    assert_same_bits(*both(swap_path, accumulation=accumulation, clipping=clipping, runtime=runtime, **bf16))


def test_fp16_skips_the_same_steps(swap_path):
    def script(trainer, accumulation):
        seen = []
        for number in range(6 * accumulation):
            loss = trainer(*batch(number))
            trainer.backward(loss * float("inf") if number == 2 * accumulation else loss)
            trainer.step()
            seen += [loss.detach(), trainer.get_global_grad_norm(), trainer.skipped_steps]
        assert trainer.skipped_steps == 1
        return seen

    fp16 = {"fp16": {"enabled": True, "initial_scale_power": 10, "hysteresis": 1}}
    assert_same_bits(*both(swap_path, script, 3, clipping=0.5, **fp16))


def test_param_grad_is_read_changed_assigned_and_zeroed(swap_path):
    """As with gradients in host memory, bit for bit."""

    def script(trainer, accumulation):
        seen = []
        idle = ("never_used", "sometimes.weight", "sometimes.bias")
        params = [p for n, p in trainer.module.named_parameters() if p.requires_grad and n not in idle]
        for number in range(4 * accumulation):
            trainer.backward(trainer(*batch(number)))
            seen += [param.grad.clone() for param in params]
            assert params[0].grad is params[0].grad
            params[0].grad.mul_(0.5)
            params[1].grad = None
            params[2].grad = torch.ones_like(params[2])
            value = trainer.peek("blocks.0.out.weight", "grad")
            seen.append(value)
            trainer.poke("blocks.0.out.weight", "grad", value * 2)
            if number % 4 == 1:
                trainer.zero_grad(set_to_none=False)
                seen.append(float(params[0].grad.abs().sum()))
                trainer.backward(trainer(*batch(number)))
            trainer.step()
            seen.append(trainer.get_global_grad_norm())
        return seen

    runtime = {"optimizer_in_backward": False}
    assert_same_bits(*both(swap_path, script, runtime=runtime))
    assert_same_bits(*both(swap_path, script, 2, clipping=0.5, runtime=runtime))


def test_a_dropped_step_leaves_nothing(swap_path):
    """Of one that has half of its micro-batches, and of one whose backward fails."""

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            return x.clone()

        @staticmethod
        def backward(context, grad):
            raise RuntimeError("planted")

    def script(trainer, accumulation):
        seen = []
        for number in range(3):
            for _ in range(2):
                trainer.backward(trainer(*batch(number)))
                trainer.step()
            trainer.abort_step()
            with pytest.raises(RuntimeError, match="planted"):
                for block in trainer.module.blocks[:1]:
                    handle = block.register_forward_hook(lambda *args: Broken.apply(args[-1]))
                try:
                    trainer.backward(trainer(*batch(number)))
                finally:
                    handle.remove()
            for micro in range(accumulation):
                loss = trainer(*batch(number + micro))
                trainer.backward(loss)
                trainer.step()
                seen.append(loss.detach())
        return seen

    assert_same_bits(*both(swap_path, script, 3, clipping=0.5))


def test_updates_in_backward_leave_nothing_to_write(swap_path):
    """From the second step on, the first whose update begins in backward."""
    with engine_of(swap_path, runtime={**ON_NVME, "debug_delay_seed": None}) as engine:
        written = []
        for number in range(4):
            engine.backward(engine(*batch(number)))
            engine.step()
            engine.flush()
            written.append(gradient_traffic(engine)["write"])
        assert written[0] > 0 and len(set(written)) == 1


def test_gradients_in_16_bit_on_nvme_are_not_summed(swap_path):
    with engine_of(swap_path, runtime=ON_NVME, clipping=0.5, bf16={"enabled": True}) as engine:
        engine.backward(engine(*batch(0)))
        with pytest.raises(ModelError, match=r"found another backward.* managed_gradient_accumulation to false"):
            engine.backward(engine(*batch(1)))
        engine.backward(engine(*batch(0)))
        engine.step()
        assert engine.global_steps == 1


def test_the_caller_may_sum_as_many_as_it_likes(swap_path):
    """The key that the refusal names plans fp32, with the bits of host memory."""

    def script(trainer, accumulation):
        seen = []
        for first, count in ((0, 1), (1, 3), (4, 2)):
            for number in range(first, first + count):
                trainer.backward(trainer(*batch(number)))
            trainer.step()
            seen.append(trainer.get_global_grad_norm())
        return seen

    unmanaged = {"managed_gradient_accumulation": False, "bf16": {"enabled": True}}
    assert_same_bits(*both(swap_path, script, clipping=0.5, **unmanaged))


def test_auto_rests_on_nvme_what_host_memory_has_no_room_for(swap_path, caplog):
    """The gradients of the first units stay in host memory."""
    state = {"device": "nvme", "nvme_path": str(swap_path), "buffer_count": 3}

    def engine_with(**runtime: Any) -> tiered_zero.Engine:
        window = {"stage3_max_live_parameters": 1}  # at its least: it shrinks before gradients leave memory
        zero = {"sub_group_size": 2048, "offload_optimizer": state, **window}
        return engine_of(swap_path, runtime=runtime, clipping=0.5, zero=zero)

    with engine_with(gradients="nvme") as least, engine_with() as ample:
        limit = (least.plan.needed_nbytes("host") + ample.plan.needed_nbytes("host")) // 2
        assert set(gradient_tiers(ample.plan).values()) == {"host"}
    caplog.clear()
    engine = engine_with(host_memory_limit=limit)
    assert "gradients" in caplog.text and "rest on nvme" in caplog.text
    tiers = [tier for _, tier in sorted(gradient_tiers(engine.plan).items())]
    assert set(tiers) == {"host", "nvme"} and tiers[0] == "host"
    assert engine.plan.needed_nbytes("host") <= limit
    expected = follow(lambda own: course(own, 1), Plain(build(), adamw, 1, 0.5))
    assert_same_bits(expected, follow(lambda own: course(own, 1), engine))
    with pytest.raises(PlanError, match="gradients"):
        engine_with(host_memory_limit=limit, gradients="cpu")
