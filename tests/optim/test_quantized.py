"""8-bit moments: how near, what never becomes zero, and that neither cuts nor places change a code."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from tiered_zero.layout.swap_bytes import QUANTIZED_BLOCK_NUMEL
from tiered_zero.optim.adam import AdamRule
from tiered_zero.optim.quantized import QuantizedAdam, decode, encode
from tiered_zero.optim.rule import Run

HYPER: dict[str, Any] = {"lr": 0.01, "amsgrad": True}


def wild(numel: int) -> torch.Tensor:
    return torch.randn(numel) * 10.0 ** (torch.rand(numel) * 6 - 3)


def largest(values: torch.Tensor) -> torch.Tensor:
    """Of each element's block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % QUANTIZED_BLOCK_NUMEL))
    blocks = padded.view(-1, QUANTIZED_BLOCK_NUMEL).amax(1)
    return blocks.repeat_interleave(QUANTIZED_BLOCK_NUMEL)[: values.numel()]


@pytest.mark.parametrize(("dtype", "codes", "power"), [(torch.int8, 127, 2), (torch.uint8, 255, 4)])
def test_a_value_comes_back_as_a_neighbour(dtype: torch.dtype, codes: int, power: int) -> None:
    values = wild(10_007) if dtype is torch.int8 else wild(10_007).abs()
    values[::13] = 0.0
    found = decode(*encode(values, dtype, 7))
    root = (values.abs() / largest(values)) ** (1 / power)
    steps = ((found.abs() / largest(values)) ** (1 / power) - root) * codes
    assert steps.abs().max() < 1.01
    assert torch.equal(found[::13], torch.zeros_like(found[::13]))
    assert bool((found * values >= 0).all())
    at_top = values.abs() == largest(values)
    assert torch.equal(found[at_top], values[at_top]), "a block's largest is exact"


def test_rounding_is_unbiased_in_the_root() -> None:
    value = torch.tensor([1.0, 0.4] + [0.0] * (QUANTIZED_BLOCK_NUMEL - 2)) ** 4
    roots = [decode(*encode(value, torch.uint8, seed))[1] ** 0.25 for seed in range(4000)]
    assert sum(roots) / 4000 == pytest.approx(0.4 + 0.0, abs=3 * 0.5 / 255 / 4000**0.5)
    assert len({float(root) for root in roots}) <= 2


def test_a_second_moment_never_becomes_zero_and_a_nan_stays_one() -> None:
    values = torch.full((64,), 1e-30)
    values[0] = 1.0
    assert bool((decode(*encode(values, torch.uint8, 1)) > 0)[:32].all())
    values[40] = float("nan")
    found = decode(*encode(values, torch.uint8, 1))
    assert found[32:].isnan().any() and found[:32].isfinite().all(), "in its own block"
    assert torch.equal(decode(*encode(torch.zeros(64), torch.int8, 1)), torch.zeros(64))


def make_run(rule: QuantizedAdam, master: torch.Tensor) -> Run:
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in rule.state_fields(tuple(master.shape), HYPER)}
    return Run(master, torch.empty(0), state, {}, HYPER, torch.zeros(master.numel(), dtype=torch.bfloat16))


def cut(run: Run, places: list[int]) -> list[Run]:
    """The same memory as several runs; `places`: in blocks."""
    edges = [0, *(QUANTIZED_BLOCK_NUMEL * place for place in places), run.master.numel()]
    pieces = []
    for a, b in itertools.pairwise(edges):
        blocks = slice(a // QUANTIZED_BLOCK_NUMEL, -(-b // QUANTIZED_BLOCK_NUMEL))
        state = {name: array[blocks if name.endswith("_scale") else slice(a, b)] for name, array in run.state.items()}
        assert run.out is not None
        pieces.append(Run(run.master[a:b], run.grad[a:b], state, dict(run.scalars), HYPER, run.out[a:b]))
    return pieces


def test_no_cut_between_blocks_changes_a_bit() -> None:
    rule = QuantizedAdam(AdamRule(decoupled=True, kernel=None))
    master = wild((1 << 17) + 77)  # more than two chunks
    whole, parts = make_run(rule, master.clone()), make_run(rule, master.clone())
    for step in range(3):
        whole.grad = wild(master.numel()).bfloat16()
        parts.grad = whole.grad.clone()
        pieces = cut(parts, [1, 2, 700, 2048 + step])
        rule.update([whole])
        rule.update(pieces)
        parts.scalars = pieces[0].scalars
    assert torch.equal(whole.master, parts.master) and whole.scalars == parts.scalars == {"step": 3.0}
    for name, array in whole.state.items():
        assert torch.equal(array, parts.state[name]), name
    assert whole.out is not None and torch.equal(whole.out, whole.master.bfloat16())


def test_second_moments_follow_a_change_smaller_than_a_code() -> None:
    """Rounding to nearest would freeze them: one step of decay is a tenth of a code."""
    exact = AdamRule(decoupled=True, kernel=None)
    lossy = QuantizedAdam(exact)
    numel = 20_000
    runs = [make_run(lossy, torch.zeros(numel))]
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in exact.state_fields((numel,), HYPER)}
    runs.append(Run(torch.zeros(numel), torch.empty(0), state, {}, HYPER))
    for step in range(200):
        grad = torch.randn(numel) * (10.0 if step < 5 else 1.0)
        for run, rule in zip(runs, (lossy, exact), strict=True):
            run.grad = grad.clone()
            rule.update([run])
    squares = decode(runs[0].state["exp_avg_sq"], runs[0].state["exp_avg_sq_scale"])
    assert squares.mean() / runs[1].state["exp_avg_sq"].mean() == pytest.approx(1.0, abs=0.05)
    assert (runs[0].master - runs[1].master).abs().mean() < 0.1 * runs[1].master.abs().mean()
