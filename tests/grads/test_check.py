"""The gradient check: the bits of torch.nn.utils.clip_grad_norm_, and what is not finite by name."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tiered_zero.grads.check import GradCheck, check_gradients
from tiered_zero.layout.flat import ParamSpec
from tiered_zero.native.norms import GradNorm

Norms = list[tuple[ParamSpec, float]]


def norms_of(grads: list[torch.Tensor]) -> Norms:
    norms = GradNorm(None)
    return [
        (
            ParamSpec(name=f"p{index}", shape=tuple(grad.shape), dtype=grad.dtype, trainable=True, index=index),
            norms.in_memory([grad.reshape(-1)])[0],
        )
        for index, grad in enumerate(grads)
    ]


def clipped(grads: list[torch.Tensor], max_norm: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What plain PyTorch makes of them: (norm, gradients after clipping)."""
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm = nn.utils.clip_grad_norm_(params, max_norm)
    return norm, [param.grad for param in params if param.grad is not None]


SHAPES = st.lists(
    st.one_of(
        st.just(()),
        st.just((0,)),
        st.tuples(st.integers(0, 9)),
        st.tuples(st.integers(1, 70), st.integers(1, 90)),
        st.just((40_000,)),
        st.just((3, 5, 7, 2)),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60)
@given(
    shapes=SHAPES,
    max_norm=st.sampled_from([1e-3, 1.0, 1e3]),
    scale=st.sampled_from([1e-4, 1.0, 1e4]),
)
def test_norm_and_clipping_are_bitwise_pytorchs(shapes: list[tuple[int, ...]], max_norm: float, scale: float) -> None:
    grads = [torch.randn(shape) * scale for shape in shapes]
    norm, after = clipped(grads, max_norm)
    check = check_gradients(norms_of(grads), 1.0, max_norm)
    assert check.finite and check.norm == norm.item()
    for grad, expected in zip(grads, after, strict=True):
        assert torch.equal(grad.mul_(check.grad_scale), expected)
    if norm < max_norm:
        assert check.grad_scale == 1.0, "left alone, not multiplied by almost one"


def test_no_clipping_leaves_the_scale_alone() -> None:
    grads = norms_of([torch.randn(100) * 1e6])
    assert check_gradients(grads, 1.0, 0.0).grad_scale == 1.0
    assert check_gradients(grads, 1024.0, 0.0).grad_scale == 1 / 1024
    assert check_gradients([], 8.0, 1.0) == GradCheck(finite=True, norm=0.0, grad_scale=1 / 8)


@pytest.mark.parametrize("loss_scale", [2.0, 65536.0])
def test_the_norm_is_that_of_the_unscaled_gradients(loss_scale: float) -> None:
    grads = [torch.randn(1000), torch.randn(3)]
    plain = check_gradients(norms_of(grads), 1.0, 0.5)
    scaled = check_gradients(norms_of([grad * loss_scale for grad in grads]), loss_scale, 0.5)
    assert scaled.norm == plain.norm, "a power of two moves no bit"
    assert scaled.grad_scale * loss_scale == plain.grad_scale


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_norms_of_16_bit_gradients_do_not_stall_at_their_precision(dtype: torch.dtype) -> None:
    grads = [torch.full((70_000,), 3.0, dtype=dtype)]
    assert check_gradients(norms_of(grads), 1.0, 0.0).norm == pytest.approx(3 * math.sqrt(70_000), rel=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_the_first_bad_parameter_is_norms_of(bad: float) -> None:
    grads = [torch.ones(5) for _ in range(4)]
    grads[2][3] = grads[3][0] = bad
    check = check_gradients(norms_of(grads), 1.0, 1.0)
    assert not check.finite and check.first_bad == "p2"
    _, after = clipped(grads, 1.0)  # in fp32 training goes on with what plain PyTorch would have
    for grad, expected in zip(grads, after, strict=True):
        assert torch.equal((grad * check.grad_scale).nan_to_num(77.0), expected.nan_to_num(77.0))


def test_a_norm_beyond_fp32_is_not_finite_though_every_gradient_is() -> None:
    grads = [torch.full((4,), 3e38), torch.ones(2)]
    check = check_gradients(norms_of(grads), 1.0, 1.0)
    assert not check.finite and check.first_bad == "p0"
    _, after = clipped(grads, 1.0)
    assert all(torch.equal(grad * check.grad_scale, want) for grad, want in zip(grads, after, strict=True))
