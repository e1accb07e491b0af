"""Norms of gradients have torch's bits, whatever takes them, and come with a copy or a sum in one pass."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from tiered_zero.native import norms as norms_module
from tiered_zero.native.norms import GradCopy, GradNorm
from tiered_zero.native.update import UpdateKernel

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SIZES = (0, 1, 5, 12, 17, 5_000, 200_003)


@pytest.fixture
def norms(library: Path) -> GradNorm:
    return GradNorm(UpdateKernel(library))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_they_have_the_bits_of_torch(numel: int, dtype: torch.dtype, norms: GradNorm) -> None:
    for scale in (1e-3, 1.0, 30.0):
        grad = (torch.randn(numel) * scale).to(dtype)
        expected = torch.linalg.vector_norm(grad, 2, dtype=torch.float32)
        assert GradNorm(None).in_memory([grad]) == norms.in_memory([grad]) == [expected]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("numel", SIZES)
def test_a_copy_brings_every_bit_and_the_same_norm(numel: int, dtype: torch.dtype, norms: GradNorm) -> None:
    target, source = torch.empty(numel, dtype=dtype), torch.randn(numel).to(dtype)
    total, sums = source.float() + source.float(), source.float().clone()
    copies = [GradCopy(index=0, target=target, source=source, adds=False)]
    copies.append(GradCopy(index=1, target=sums, source=source, adds=True))
    if norms.fuses(copies):  # always, where torch is a build for x86
        assert norms.copy(copies) == [*norms.in_memory([source]), *norms.in_memory([total])]
        assert torch.equal(target, source) and torch.equal(sums, total)


def test_the_kernel_takes_them_here(norms: GradNorm) -> None:
    """On x86 with torch's own wheels; elsewhere torch may take them."""
    copy = GradCopy(index=0, target=torch.ones(3), source=torch.ones(3), adds=False)
    assert norms.fuses([copy]) or torch.backends.cpu.get_cpu_capability() not in (
        "AVX2",
        "AVX512",
    )
    assert not GradNorm(None).fuses([copy])


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_shows(bad: float, dtype: torch.dtype, norms: GradNorm) -> None:
    source = torch.ones(100_000).to(dtype)
    source[77_777] = bad
    for each in (norms, GradNorm(None)):
        assert not math.isfinite(each.in_memory([source])[0])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_torchs_defaults_do_not_matter(device: str, library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(norms_module, "_fused_tails", {})
    expected = torch.linalg.vector_norm(grad := torch.randn(1001))
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device(device):
            norm = GradNorm(UpdateKernel(library)).in_memory([grad])
    finally:
        torch.set_default_dtype(torch.float32)
    assert norm == [expected]
