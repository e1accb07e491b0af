"""Lion against the paper's five lines in fp64, and its arguments."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tiered_zero.rules.native_rules import Lion


@pytest.mark.parametrize("maximize", [False, True])
def test_steps_follow_the_paper(maximize: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    leaf = torch.randn(50, generator=generator).requires_grad_()
    optimizer = Lion([leaf], lr=0.01, betas=(0.8, 0.95), weight_decay=0.1, maximize=maximize)
    weight, momentum = leaf.detach().double(), torch.zeros(50, dtype=torch.float64)
    for _ in range(10):
        leaf.grad = torch.randn(50, generator=generator)
        grad = leaf.grad.double() * (-1 if maximize else 1)
        optimizer.step()
        update = (0.8 * momentum + 0.2 * grad).sign()
        momentum = 0.95 * momentum + 0.05 * grad
        weight = weight - 0.01 * (update + 0.1 * weight)
    # each step adds a few fp32 roundings of numbers below 4
    torch.testing.assert_close(leaf.detach().double(), weight, rtol=0, atol=10 * 3 * 4 * 2**-24)


def test_a_parameter_without_gradient_is_left_alone_and_a_closure_is_run() -> None:
    used, unused = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    optimizer = Lion([used, unused])

    def closure() -> float:
        loss = used.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 2.0
    assert torch.equal(unused.detach(), torch.ones(2)) and unused not in optimizer.state
    assert torch.equal(used.detach(), torch.full((2,), 1.0) - 1e-3)


@pytest.mark.parametrize(
    "options", [{"lr": -1.0}, {"lr": float("nan")}, {"betas": (0.9, 1.0)}, {"betas": (0.9,)}, {"weight_decay": -1.0}]
)
def test_arguments_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="Invalid"):
        Lion([torch.zeros(1, requires_grad=True)], **options)
