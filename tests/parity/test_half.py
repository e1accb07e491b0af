"""bf16 and fp16: one set of bits over all nine placements, and plain PyTorch's with fp32 master weights.

The plain loop (`Plain` with a dtype) rounds the fp32 model once to 16 bit, adds 16-bit gradients up in fp32, unscales
them, clips them with `clip_grad_norm_`, steps fp32 masters with the torch optimizer, and rounds them to 16 bit.

Where the engine may differ from it, and by how much:

* The factors: the engine multiplies by clip / loss scale at once, the loop divides by the loss scale and then
  multiplies by the clip factor. Loss scales are powers of two, so dividing and multiplying by them is exact unless a
  gradient falls below the smallest normal fp32 number, 2^-126; fp16 gradients are multiples of 2^-24, and scaled by
  2^10 here. No difference.
* The norm: both take each parameter's norm in fp32 and then the norm of the norms; the engine from 16-bit elements,
  widened one by one as they are read, the loop from the same elements widened before. Both sum the same fp32 squares in
  an order that the kernel chooses by element type. A sum of n squares has a relative error of at most n * 2^-24
  (Higham, Accuracy and Stability of Numerical Algorithms, section 4.2), its root half of that; with n <= 20,000
  elements the two norms, and with them the clip factors, agree within 2 * 10,000 * 2^-24 < 1.2e-3, before the benefit
  of pairwise sums.
* The square root in Adam: torch takes MKL's, which is off by one unit in the last place in a fifth of all cases; the
  native kernel takes the exact one for 16-bit gradients, and torch's own code where there is no compiler. So the loop
  is run with both (`ExactRoot` rounds a float64 root, which is the exact fp32 root, as 53 bits are more than 2 * 24 +
  2).
* Everything else is the same operation on the same bits.

So without clipping the bound is zero: losses and weights have the bits of the loop, with one of the two roots and the
same one on every placement. With clipping they have them too wherever the norms do; here they do, so that is what is
asserted.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.exact_root import ExactRoot
from tests.support.models import ParityGPT, batch, groups, named_weights
from tests.support.trainers import (
    FAR,
    TIERS,
    OptimizerMaker,
    Plain,
    Record,
    assert_same_bits,
    follow,
    num_different,
    same_bits,
    tiered,
    train,
)

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024}}
PRECISIONS = {"bf16": (torch.bfloat16, 1.0, BF16), "fp16": (torch.float16, 1024.0, FP16)}

NUM_STEPS = 3
COURSES = ((1, 0.0), (3, 0.5), (1, 0.5), (3, 0.0))
"""(accumulation, clipping). Two backwards a step have a test of their own, the last one."""
THIRDS = [[(TIERS[i], TIERS[(i + third) % 3]) for i in range(3)] for third in range(3)]
"""Of the nine placements: each has every tier of the parameters and of the state, and together they are all."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


def exact_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return ExactRoot(groups(model), {"lr": 3e-3})


def momentum(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups(model), lr=0.05, momentum=0.9)


def run_plain(make_optimizer: OptimizerMaker, precision: str, accumulation: int, clipping: float) -> Record:
    dtype, scale, _ = PRECISIONS[precision]
    plain = Plain(build(), make_optimizer, accumulation, clipping, dtype=dtype, loss_scale=scale)
    return follow(lambda own: train(own, data, NUM_STEPS, accumulation), plain)


@pytest.mark.parametrize(
    ("makers", "accumulation", "clipping", "third"),
    [
        *(pytest.param((adamw, exact_adamw), *course, n, id=f"adamw-{course}") for n, course in enumerate(COURSES[:2])),
        *(pytest.param((momentum,), *course, n + 2, id=f"sgd-{course}") for n, course in enumerate(COURSES[2:])),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bit_training_is_the_plain_loop_with_fp32_masters(
    makers: Sequence[OptimizerMaker], precision, accumulation, clipping, third, swap_path
):
    """A third of the placements a course: each precision meets them all, and all agree with one plain loop."""
    records = []
    for placement in THIRDS[(third + (precision == "fp16")) % 3]:
        top = PRECISIONS[precision][2]
        engine = tiered(build(), swap_path, placement, makers[0], accumulation, clipping, **top)
        records.append(follow(lambda own: train(own, data, NUM_STEPS, accumulation), engine))
        assert_same_bits(records[0], records[-1])
    assert records[0].weights["tokens.weight"].dtype == PRECISIONS[precision][0]
    expected = [run_plain(make, precision, accumulation, clipping) for make in makers]
    assert_same_bits(min(expected, key=lambda record: num_different(record, records[0])), records[0])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_start_from_fp32_and_small_updates_add_up(precision, swap_path):
    """A step far below 16-bit resolution moves the masters: after many of them the parameters move too."""

    def run(lr: float, steps: int) -> Record:
        def sgd(model: nn.Module) -> torch.optim.Optimizer:
            return torch.optim.SGD(model.parameters(), lr=lr)

        engine = tiered(build(), swap_path, ("cpu", "cpu"), sgd, **top)
        return follow(lambda own: train(own, lambda _: batch(0), steps), engine)

    top = PRECISIONS[precision][2]
    still = run(0.0, 1).weights["blocks.0.out.weight"]
    few, many = (run(2e-5, steps).weights["blocks.0.out.weight"] for steps in (1, 40))
    assert 0 < (few != still).sum() < (many != still).sum()
    assert (many != still).float().mean() > 4 * (few != still).float().mean()


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_two_backwards_in_a_step_that_was_planned_for_one(placement, swap_path, caplog):
    """Sums turn to fp32 on the way, with one warning; their bits are the plain loop's."""

    def script(own):
        return train(own, data, 4, backwards=2)

    plain = follow(script, Plain(build(), momentum, clipping=0.5, dtype=torch.bfloat16))
    assert_same_bits(plain, follow(script, tiered(build(), swap_path, placement, momentum, clipping=0.5, **BF16)))
    assert sum("backward() called again before step()" in record.message for record in caplog.records) == 1


class Rotary(nn.Module):
    """Buffers that lose by rounding: frequencies, and a running average; beside a batch norm, whose statistics torch
    takes on the CPU in its weight's dtype only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 1)
        self.register_buffer("frequency", 10000 ** -(torch.arange(4) / 4), persistent=False)
        self.register_buffer("average", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.first.weight.dtype
        angle = torch.arange(len(x))[:, None] * self.frequency
        x = self.first(x.to(dtype)) * torch.cat([angle.cos(), angle.sin()], 1).to(dtype)
        self.average.lerp_(x.detach().float().mean(0), 0.1)
        return self.last(self.norm(x)).float().square().mean()


@pytest.mark.parametrize("placement", FAR, ids="-".join)
def test_buffers_keep_their_dtype(placement, swap_path):
    def data(number):
        return (torch.randn(16, 8, generator=torch.Generator().manual_seed(number)),)

    def build():
        torch.manual_seed(0)
        return Rotary()

    def sgd(model):
        return torch.optim.SGD(model.parameters(), lr=0.125)

    expected = follow(lambda own: train(own, data, 2), Plain(build(), sgd, dtype=torch.bfloat16))
    with tiered(build(), swap_path, placement, sgd, **BF16) as engine:
        train(engine, data, 2)
        buffers = dict(engine.module.named_buffers())
        assert {buffers["average"].dtype, buffers["frequency"].dtype} == {torch.float32}
        assert buffers["norm.running_var"].dtype == torch.bfloat16
        assert torch.equal(buffers["frequency"], build().frequency)
        weights = dict(named_weights(engine.module))
    assert all(same_bits(value, weights[name]) for name, value in expected.weights.items())
