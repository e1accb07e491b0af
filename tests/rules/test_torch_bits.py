"""The kernel serves fp32 gradients only where it has torch's bits: a wrong root or a missing fusion is always found."""

import ctypes
import re
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

from tests.fakes.wrong_root import build_wrong_root, plant_root
from tests.support.native_build import UPDATE_SOURCE, compile_shared
from tiered_zero.native.update import Flag, UpdateKernel, supported_levels
from tiered_zero.rules import native_rules
from tiered_zero.rules.native_rules import (
    AdagradRule,
    AdamRule,
    LionRule,
    NativeRule,
    SgdRule,
    choose_root,
    find_torch_root,
)
from tiered_zero.rules.rule import Slice

HEADER = UPDATE_SOURCE.with_name("update_kernel.h")
NUM_FUSED = len(re.findall(r"\bfma_\((?!vf)", HEADER.read_text()))


@pytest.fixture(scope="module")
def wrong_library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return build_wrong_root(tmp_path_factory.mktemp("root"))


@pytest.fixture
def nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a new process."""
    monkeypatch.setattr(native_rules, "_roots", {})
    monkeypatch.setattr(native_rules, "_torch_bits", {})


def assert_bits_of_torch(rule: NativeRule, kind: type[torch.optim.Optimizer], **hyper: Any) -> None:
    parameter = torch.nn.Parameter(torch.randn(5000))
    optimizer = kind([parameter], **hyper)
    state = {f.name: torch.zeros(f.shape, dtype=f.dtype) for f in rule.state_fields((5000,), hyper)}
    run = Slice(master=parameter.detach().clone(), grad=torch.empty(0), state=state, scalars={}, hyper=hyper)
    for _ in range(4):
        parameter.grad = torch.randn(5000)
        run.grad = parameter.grad.clone()
        optimizer.step()
        rule.update([run])
    assert torch.equal(run.master, parameter.detach())


@pytest.fixture
def levels(library: Path) -> list[str]:
    return supported_levels(library)


def test_torchs_own_root_is_taken_where_no_other_has_its_bits(
    library: Path, levels: list[str], monkeypatch: pytest.MonkeyPatch, nothing_known: None
) -> None:
    """Slower than the kernel's own by far, and so asked for last."""
    own_bits = native_rules._has_torch_bits
    monkeypatch.setattr(native_rules, "_has_torch_bits", lambda kernel, flag: flag in tried and own_bits(kernel, flag))
    root, tried = find_torch_root(), [Flag.TORCH_ROOT]
    for level in levels:
        assert choose_root(UpdateKernel(library, level, root=root)) == (Flag.TORCH_ROOT if root else None)


def test_the_roots_of_all_floats_are_torchs(library: Path, levels: list[str], nothing_known: None) -> None:
    """Of every 97th; at every level the same root is taken, in the same order: the quickest first."""
    values = numpy.arange(0, 0x7F800000, 97, dtype=numpy.int32)[: -(-0x7F800000 // 97) // 16 * 16].view(numpy.float32)
    torchs = torch.from_numpy(values).sqrt()
    kernels = [UpdateKernel(library, level, root=find_torch_root()) for level in levels]
    taken = {choose_root(kernel) for kernel in kernels}
    assert len(taken) == 1
    if (flag := taken.pop()) is None:
        return
    for kernel in kernels:
        roots = torch.empty(len(values))
        kernel.square_roots(values.ctypes.data, roots.data_ptr(), len(values), flag)
        assert torch.equal(roots, torchs), kernel.level


@pytest.mark.parametrize(
    "wrong", [(0x7FFFFF, 1000, 7), (0xFFFFFFFF, 1 << 31, 0x40123457)], ids=["1 in 1000", "1 of all"]
)
def test_a_root_that_is_seldom_wrong_is_not_taken(
    library: Path,
    levels: list[str],
    wrong_library: ctypes.CDLL,
    wrong: tuple[int, int, int],
    monkeypatch: pytest.MonkeyPatch,
    nothing_known: None,
) -> None:
    monkeypatch.setattr(native_rules, "_ROOTS", (Flag.TORCH_ROOT, Flag(0)))
    root = plant_root(wrong_library, *wrong)
    for level in levels:
        kernel = UpdateKernel(library, level, root=root)
        assert choose_root(kernel) in (None, Flag(0))
        rule = AdamRule(decoupled=True, kernel=kernel)
        assert_bits_of_torch(rule, torch.optim.AdamW)


def test_an_exact_root_is_taken_only_where_torchs_is_exact(
    library: Path, levels: list[str], monkeypatch: pytest.MonkeyPatch, nothing_known: None
) -> None:
    """A kernel without MKL's root, on a torch that may have it."""
    monkeypatch.setattr(native_rules, "_ROOTS", (Flag(0), Flag.TORCH_ROOT))
    values = torch.arange(1 << 24, dtype=torch.int32).add_(0x3F800000).view(torch.float32)
    exact = torch.equal(values.sqrt(), values.double().sqrt().float())
    for level in levels:
        kernel = UpdateKernel(library, level)
        assert choose_root(kernel) == (Flag(0) if exact else None)
        assert_bits_of_torch(AdamRule(decoupled=False, kernel=kernel), torch.optim.Adam, weight_decay=0.1)


def test_without_a_root_fp32_takes_torchs_code_and_the_log_says_so(
    library: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, nothing_known: None
) -> None:
    monkeypatch.setattr(native_rules, "_has_torch_bits", lambda kernel, flag: False)
    kernel = UpdateKernel(library, root=find_torch_root())
    for rule, kind in (
        (AdamRule(decoupled=True, kernel=kernel), torch.optim.AdamW),
        (AdagradRule(kernel), torch.optim.Adagrad),
    ):
        assert not rule.torch_bits
        assert_bits_of_torch(rule, kind)
        caplog.clear()
        rule.announce()
        assert "rounds otherwise" in caplog.text and "torch's own operations" in caplog.text


@pytest.mark.parametrize("which", [None, *range(NUM_FUSED)])
def test_each_operation_that_is_fused_in_torch_alone_is_found(
    which: int | None, tmp_path: Path, nothing_known: None
) -> None:
    """The kernel with one multiply-add unfused. Also the reverse of a torch that fuses none of them."""
    calls = list(re.finditer(r"\bfma_\((?!vf)", header := HEADER.read_text()))
    if which is not None:
        header = header[: calls[which].start()] + "unfused_(" + header[calls[which].end() :]
    (tmp_path / "update_kernel.h").write_text("#define unfused_(a, b, c) ((a) * (b) + (c))\n" + header)
    for name in ("update.c", "thread_pool.h", "version.h"):
        (tmp_path / name).write_bytes(UPDATE_SOURCE.with_name(name).read_bytes())
    kernel = UpdateKernel(compile_shared(tmp_path / "update.c", tmp_path / "u.so", "-O0"), root=find_torch_root())
    rules = [
        *(AdamRule(decoupled=decoupled, kernel=kernel) for decoupled in (True, False)),
        *(kind(kernel) for kind in (SgdRule, AdagradRule, LionRule)),
    ]
    fuses = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    assert all(rule.torch_bits for rule in rules) == (which is None) or not fuses
