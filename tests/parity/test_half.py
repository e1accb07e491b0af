"""bf16 and fp16: one set of bits over all nine placements, and plain PyTorch's with fp32 master weights.

The plain loop (`Plain` with a dtype) rounds the fp32 model once to 16 bit, adds 16-bit gradients up in fp32, unscales them,
clips them with `clip_grad_norm_`, steps fp32 masters with the torch optimizer, and rounds them to 16 bit.

Where the engine may differ from it, and by how much:

* The factors: the engine multiplies by clip / loss scale at once, the loop divides by the loss scale and then multiplies by the
  clip factor. Loss scales are powers of two, so dividing and multiplying by them is exact unless a gradient falls below the
  smallest normal fp32 number, 2^-126; fp16 gradients are multiples of 2^-24, and scaled by at most 2^10 here. No difference.
* The norm: both take each parameter's norm in fp32 and then the norm of the norms; the engine from 16-bit elements, widened one
  by one as they are read, the loop from the same elements widened before. Both sum the same fp32 squares in an order that
  the kernel chooses by element type. A sum of n squares has a relative error of at most n * 2^-24 (Higham, Accuracy and
  Stability of Numerical Algorithms, section 4.2), its root half of that; with n <= 20,000 elements the two norms, and with
  them the clip factors, agree within 2 * 10,000 * 2^-24 < 1.2e-3, before the benefit of pairwise sums.
* Everything else is the same operation on the same bits.

So without clipping the bound is zero: weights and losses must have the loop's bits. With clipping they have them too wherever
the norms do; here they do, so that is what is asserted, and the norm is compared bit by bit first, so that a failure says which
of the two it is.
"""

import functools
from typing import Any

import pytest
import torch

from tests.parity.models import ParityGPT, batch, groups
from tests.parity.trainers import PLACEMENTS, Plain, Record, assert_same_bits, follow, tiered, train

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "loss_scale": 1024}}
PRECISIONS = {"bf16": (torch.bfloat16, 1.0, BF16), "fp16": (torch.float16, 1024.0, FP16)}

COURSES = ((1, 0.0), (3, 0.5), (1, 0.5), (3, 0.0))
"""(accumulation, clipping). Two backwards a step are the accumulation's case with another divisor: see the last test."""


def build() -> ParityGPT:
    torch.manual_seed(0)
    return ParityGPT()


def data(number: int) -> tuple[Any, ...]:
    return (*batch(number), number % 5 == 1)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=3e-3)


@functools.cache
def reference(precision: str, accumulation: int, clipping: float) -> Record:
    dtype, scale, _ = PRECISIONS[precision]
    plain = Plain(build(), adamw, accumulation, clipping, dtype=dtype, loss_scale=scale)
    return follow(lambda own: train(own, data, 8, accumulation), plain)


@pytest.mark.parametrize("placement", PLACEMENTS, ids="-".join)
@pytest.mark.parametrize(("accumulation", "clipping"), COURSES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_sixteen_bit_training_is_the_plain_loop_with_fp32_masters(
    precision, accumulation, clipping, placement, swap_path
):
    engine = tiered(build(), swap_path, placement, adamw, accumulation, clipping, **PRECISIONS[precision][2])
    found = follow(lambda own: train(own, data, 8, accumulation), engine)
    expected = reference(precision, accumulation, clipping)
    assert [value for value in found.seen if isinstance(value, float)] == [
        value for value in expected.seen if isinstance(value, float)
    ]
    assert_same_bits(expected, found)
    assert found.weights["tokens.weight"].dtype == PRECISIONS[precision][0]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_start_from_fp32_and_small_updates_add_up(precision, swap_path):
    """A step far below 16-bit resolution moves the masters: after many of them the parameters move too."""
    small = functools.partial(torch.optim.SGD, lr=0.0)

    def constant_pull(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups(model), lr=2e-4)

    dtype, scale, top = PRECISIONS[precision]
    plain = follow(lambda own: train(own, data, 12), Plain(build(), constant_pull, dtype=dtype, loss_scale=scale))
    found = follow(lambda own: train(own, data, 12), tiered(build(), swap_path, make_optimizer=constant_pull, **top))
    assert_same_bits(plain, found)
    still = follow(
        lambda own: train(own, data, 12), tiered(build(), swap_path, make_optimizer=lambda m: small(groups(m)), **top)
    )
    assert any(not torch.equal(value, still.weights[name]) for name, value in found.weights.items())


@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize("placement", [("none", "none"), ("nvme", "nvme")], ids="-".join)
def test_two_backwards_in_a_step_that_was_planned_for_one(placement, swap_path, caplog):
    """Sums turn to fp32 on the way, with one warning; their bits are the plain loop's."""

    def script(own):
        return train(own, data, 4, backwards=2)

    plain = follow(script, Plain(build(), adamw, clipping=0.5, dtype=torch.bfloat16))
    assert_same_bits(plain, follow(script, tiered(build(), swap_path, placement, adamw, clipping=0.5, **BF16)))
    assert sum("several backward passes" in record.message for record in caplog.records) == 1
