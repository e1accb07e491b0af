"""8-bit moments: how near, what never becomes zero, and that neither cuts nor places change a code."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tiered_zero.layout.subgroups import QUANTIZED_BLOCK_NUMEL
from tiered_zero.native.update import LEVELS, UpdateKernel, supported_levels
from tiered_zero.rules import quantized
from tiered_zero.rules.native_rules import AdamRule, find_torch_root
from tiered_zero.rules.quantized import QuantizedAdam
from tiered_zero.rules.rule import Slice

HYPER: dict[str, Any] = {"lr": 0.01, "amsgrad": True}


@pytest.fixture(params=[*LEVELS, "torch"])
def kernel(request: pytest.FixtureRequest, library: Path) -> Iterator[UpdateKernel | None]:
    if request.param == "torch":
        yield None
        return
    if request.param not in supported_levels(library):
        pytest.skip(f"this processor does not run {request.param}")
    kernel = UpdateKernel(library, request.param, num_threads=3, root=find_torch_root())
    yield kernel
    kernel.close()


def quantize(
    values: torch.Tensor, dtype: torch.dtype, seed: int, kernel: UpdateKernel | None
) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty(values.numel(), dtype=dtype)
    scales = torch.empty(-(-values.numel() // QUANTIZED_BLOCK_NUMEL))
    quantized.quantize(codes, scales, values.clone(), seed, kernel)
    return codes, scales


def dequantize(codes: torch.Tensor, scales: torch.Tensor, kernel: UpdateKernel | None = None) -> torch.Tensor:
    values = torch.empty(codes.numel())
    quantized.dequantize(codes, scales, values, kernel)
    return values


def wild(numel: int) -> torch.Tensor:
    return torch.randn(numel) * 10.0 ** (torch.rand(numel) * 6 - 3)


def largest(values: torch.Tensor) -> torch.Tensor:
    """Of each element's block."""
    padded = torch.nn.functional.pad(values.abs(), (0, -values.numel() % QUANTIZED_BLOCK_NUMEL))
    blocks = padded.view(-1, QUANTIZED_BLOCK_NUMEL).amax(1)
    return blocks.repeat_interleave(QUANTIZED_BLOCK_NUMEL)[: values.numel()]


@pytest.mark.parametrize(("dtype", "codes", "power"), [(torch.int8, 127, 2), (torch.uint8, 255, 4)])
def test_a_value_comes_back_as_a_neighbour(
    kernel: UpdateKernel | None, dtype: torch.dtype, codes: int, power: int
) -> None:
    values = wild(10_007) if dtype is torch.int8 else wild(10_007).abs()
    values[::13] = 0.0
    found = dequantize(*quantize(values, dtype, 7, kernel), kernel)
    root = (values.abs() / largest(values)) ** (1 / power)
    steps = ((found.abs() / largest(values)) ** (1 / power) - root) * codes
    assert steps.abs().max() < 1.01
    assert torch.equal(found[::13], torch.zeros_like(found[::13]))
    assert bool((found * values >= 0).all())
    at_top = values.abs() == largest(values)
    assert torch.equal(found[at_top], values[at_top]), "a block's largest is exact"


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_the_kernel_has_the_bits_of_torch(kernel: UpdateKernel | None, dtype: torch.dtype) -> None:
    values = wild(10_007) if dtype is torch.int8 else wild(10_007).abs()
    values[::13], values[4000:4064], values[9000:] = 0.0, 1e-41, 0.0
    for index, special in enumerate((float("nan"), float("inf"), 1e-45, 3e38)):
        values[100 * index] = special
    ours, theirs = quantize(values, dtype, 0xFFFFFFFF, kernel), quantize(values, dtype, 0xFFFFFFFF, None)
    assert torch.equal(ours[0], theirs[0])
    assert torch.equal(ours[1].nan_to_num(7), theirs[1].nan_to_num(7))
    assert torch.equal(dequantize(*ours, kernel).nan_to_num(7), dequantize(*theirs).nan_to_num(7))


def test_rounding_is_unbiased_in_the_root() -> None:
    value = torch.tensor([1.0, 0.4] + [0.0] * (QUANTIZED_BLOCK_NUMEL - 2)) ** 4
    roots = [dequantize(*quantize(value, torch.uint8, seed, None))[1] ** 0.25 for seed in range(4000)]
    assert sum(roots) / 4000 == pytest.approx(0.4 + 0.0, abs=3 * 0.5 / 255 / 4000**0.5)
    assert len({float(root) for root in roots}) <= 2


def test_a_second_moment_never_becomes_zero_and_a_nan_stays_one(kernel: UpdateKernel | None) -> None:
    values = torch.full((64,), 1e-30)
    values[0] = 1.0
    assert bool((dequantize(*quantize(values, torch.uint8, 1, kernel), kernel) > 0)[:32].all())
    values[40] = float("nan")
    found = dequantize(*quantize(values, torch.uint8, 1, kernel), kernel)
    assert found[32:].isnan().any() and found[:32].isfinite().all(), "in its own block"
    assert torch.equal(dequantize(*quantize(torch.zeros(64), torch.int8, 1, kernel), kernel), torch.zeros(64))


def make_run(rule: QuantizedAdam, master: torch.Tensor) -> Slice:
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in rule.state_fields(tuple(master.shape), HYPER)}
    return Slice(
        master=master,
        grad=torch.empty(0),
        state=state,
        scalars={},
        hyper=HYPER,
        out=torch.zeros(master.numel(), dtype=torch.bfloat16),
    )


def cut(run: Slice, places: list[int]) -> list[Slice]:
    """The same memory as several runs; `places`: in blocks."""
    edges = [0, *(QUANTIZED_BLOCK_NUMEL * place for place in places), run.master.numel()]
    pieces = []
    for a, b in itertools.pairwise(edges):
        blocks = slice(a // QUANTIZED_BLOCK_NUMEL, -(-b // QUANTIZED_BLOCK_NUMEL))
        state = {name: array[blocks if name.endswith("_scale") else slice(a, b)] for name, array in run.state.items()}
        assert run.out is not None
        pieces.append(
            Slice(
                master=run.master[a:b],
                grad=run.grad[a:b],
                state=state,
                scalars=dict(run.scalars),
                hyper=HYPER,
                out=run.out[a:b],
            )
        )
    return pieces


def test_neither_a_cut_between_blocks_nor_the_kernel_changes_a_bit(
    kernel: UpdateKernel | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized, "_CPU_CHUNK_NUMEL", 1 << 14)
    rule, reference = (QuantizedAdam(AdamRule(decoupled=True, kernel=k)) for k in (kernel, None))
    master = wild((1 << 16) + 77)
    whole, parts = make_run(reference, master.clone()), make_run(rule, master.clone())
    for step in range(3):
        whole.grad = wild(master.numel())  # fp32: with the roots of torch
        parts.grad = whole.grad.clone()
        pieces = cut(parts, [1, 2, 700, 2048 + step])
        reference.update([whole])
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
    runs.append(Slice(master=torch.zeros(numel), grad=torch.empty(0), state=state, scalars={}, hyper=HYPER))
    for step in range(200):
        grad = torch.randn(numel) * (10.0 if step < 5 else 1.0)
        for run, rule in zip(runs, (lossy, exact), strict=True):
            run.grad = grad.clone()
            rule.update([run])
    squares = dequantize(runs[0].state["exp_avg_sq"], runs[0].state["exp_avg_sq_scale"])
    assert squares.mean() / runs[1].state["exp_avg_sq"].mean() == pytest.approx(1.0, abs=0.05)
    assert (runs[0].master - runs[1].master).abs().mean() < 0.1 * runs[1].master.abs().mean()
