"""The kernel by itself: each level, cut and thread count gives the same bits; gradients are received in one pass."""

import ctypes
import math
import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.native_build import UPDATE_SOURCE, compile_shared
from tiered_zero.native.update import (
    ADDRESSES_PER_SLICE,
    Dtype,
    Flag,
    Hyper,
    Rule,
    UpdateKernel,
    available_cpus,
    supported_levels,
)

DTYPES = {
    Dtype.FLOAT32: torch.float32,
    Dtype.BFLOAT16: torch.bfloat16,
    Dtype.FLOAT16: torch.float16,
    Dtype.REMAINDER: torch.int16,
}


@pytest.fixture(scope="module")
def kernels(library: Path) -> Iterator[list[UpdateKernel]]:
    """One of each level that runs here, with different numbers of threads."""
    levels = supported_levels(library)
    kernels = [UpdateKernel(library, level, num_threads=1 + index) for index, level in enumerate(levels)]
    yield kernels
    for kernel in kernels:
        kernel.close()


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits, with one NaN for all."""
    canonical = tensor if tensor.dtype == torch.int16 else torch.where(tensor.isnan(), float("nan"), tensor)
    return canonical.view({4: torch.int32, 2: torch.int16}[canonical.element_size()])


def wild(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """All sorts of numbers: six decades, zeros, denormals, infinities."""
    if dtype == torch.int16:
        return torch.randint(-(1 << 15), 1 << 15, (numel,), dtype=torch.int16)
    values = torch.randn(numel) * 10.0 ** (torch.rand(numel) * 6 - 3)
    for special, share in ((0.0, 0.02), (1e-40, 0.02), (float("inf"), 0.001)):
        values[torch.rand(numel) < share] = special
    return values.to(dtype)


class Arrays:
    """The arrays of one update, at addresses that are aligned to their element only."""

    def __init__(self, numel: int, hyper: Hyper, with_out: bool) -> None:
        self.numel, self.hyper = numel, hyper
        master, grad, out, state = (
            DTYPES[Dtype(code)] for code in (hyper.master_type, hyper.grad_type, hyper.out_type, hyper.state_type)
        )
        with_out |= hyper.master_type == Dtype.REMAINDER
        kinds = [master, grad, out if with_out else None, state, state, state]
        self.tensors = [None if kind is None else wild(numel + index, kind)[index:] for index, kind in enumerate(kinds)]
        for tensor in self.tensors[4:]:  # second moments
            assert tensor is not None
            tensor.abs_()
        if master == torch.int16:  # whose signs are the marks
            self.tensors[4] *= torch.where(torch.rand(numel + 4)[4:] < 0.5, -1, 1).to(state)

    def copy(self) -> "Arrays":
        twin = object.__new__(Arrays)
        twin.numel, twin.hyper = self.numel, self.hyper
        twin.tensors = [None if tensor is None else tensor.clone() for tensor in self.tensors]
        return twin

    def update(self, kernel: UpdateKernel, cuts: Sequence[int] = ()) -> list[torch.Tensor]:
        edges = [0, *sorted(cuts), self.numel]
        table = numpy.zeros((len(edges) - 1, ADDRESSES_PER_SLICE), numpy.uint64)
        for row, start, end in zip(table, edges[:-1], edges[1:], strict=True):
            addresses = [0 if t is None else t[start:].data_ptr() if start < end else 0 for t in self.tensors]
            row[:] = [*addresses, end - start, ctypes.addressof(self.hyper)]
        kernel.update(table.ctypes.data, len(table))
        return [bits(tensor) for tensor in self.tensors if tensor is not None]


def some_hyper(draw: Callable[[Any], Any]) -> Hyper:
    rule = draw(st.sampled_from(Rule))
    flags = draw(st.sets(st.sampled_from(Flag)))
    master = draw(st.sampled_from([Dtype.FLOAT32, Dtype.REMAINDER])) if rule == Rule.ADAM else Dtype.FLOAT32
    return Hyper(
        rule=rule,
        flags=sum(flags),
        grad_type=draw(st.sampled_from([Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])),
        master_type=master,
        out_type=Dtype.BFLOAT16 if master == Dtype.REMAINDER else draw(st.sampled_from(list(Dtype)[:3])),
        state_type=draw(st.sampled_from([Dtype.FLOAT32, Dtype.BFLOAT16])),
        seed=12345,
        grad_scale=draw(st.sampled_from([1.0, 0.3])),
        l2=0.1,
        decay=0.99,
        weight1=draw(st.sampled_from([0.1, 0.7])),
        beta2=0.99,
        weight2=0.01,
        root2=0.3,
        eps=1e-8,
        rate=-0.02,
    )


@given(data=st.data(), numel=st.integers(0, 700), with_out=st.booleans())
def test_levels_cuts_and_threads_do_not_change_bits(
    kernels: list[UpdateKernel], data: st.DataObject, numel: int, with_out: bool
) -> None:
    arrays = Arrays(numel, some_hyper(data.draw), with_out)
    expected = arrays.copy().update(kernels[-1])
    for kernel in kernels:
        cuts = data.draw(st.lists(st.integers(0, numel), max_size=4))
        for found, wanted in zip(arrays.copy().update(kernel, cuts), expected, strict=True):
            assert torch.equal(found, wanted), kernel.level


@pytest.mark.parametrize("num_threads", [2, 5])
def test_many_threads_do_not_change_bits(library: Path, num_threads: int) -> None:
    """Large enough for many pieces, in runs of all lengths."""
    alone, many = UpdateKernel(library, num_threads=1), UpdateKernel(library, num_threads=num_threads)
    hyper = Hyper(
        rule=Rule.ADAM, grad_type=1, out_type=1, grad_scale=1, decay=1, weight1=0.1, beta2=0.9, weight2=0.1, root2=1,
        eps=1e-8, rate=-0.1,
    )  # fmt: skip
    arrays = Arrays(1_000_003, hyper, True)
    expected = arrays.copy().update(alone)
    cuts = [5, 5, 6, *torch.randint(0, arrays.numel, (999,)).tolist()]
    for _ in range(5):
        for found, wanted in zip(arrays.copy().update(many, cuts), expected, strict=True):
            assert torch.equal(found, wanted)
    alone.close()
    many.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
@pytest.mark.parametrize("flags", [["-O1", "-ffp-contract=fast"], ["-O3", "-march=native", "-ffp-contract=fast"]])
def test_compiler_flags_do_not_change_bits(kernels: list[UpdateKernel], tmp_path: Path, flags: list[str]) -> None:
    path = compile_shared(UPDATE_SOURCE, tmp_path / "_other.so", *flags)
    for rule in Rule:
        for flag in (0, Flag.AMSGRAD | Flag.L2 | Flag.MOMENTUM | Flag.NESTEROV):
            hyper = Hyper(
                rule=rule, flags=flag, grad_type=2, out_type=1, grad_scale=0.3, l2=0.1, decay=0.99, weight1=0.1,
                beta2=0.9, weight2=0.1, root2=0.7, eps=1e-8, rate=-0.1,
            )  # fmt: skip
            arrays = Arrays(1003, hyper, True)
            expected = arrays.copy().update(kernels[0])
            for level in supported_levels(path):
                other = UpdateKernel(path, level, 1)
                for found, wanted in zip(arrays.copy().update(other), expected, strict=True):
                    assert torch.equal(found, wanted), (rule, flag, level)
                other.close()


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_fast_math_is_refused(tmp_path: Path) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        compile_shared(UPDATE_SOURCE, tmp_path / "_fast.so", "-ffast-math")


def convert(kernel: UpdateKernel, source: torch.Tensor, target_dtype: torch.dtype) -> torch.Tensor:
    codes = {dtype: code for code, dtype in DTYPES.items()}
    target = torch.empty(source.shape, dtype=target_dtype)
    types = codes[source.dtype], codes[target_dtype]
    kernel.copy_norms([(source.data_ptr(), target.data_ptr(), source.numel(), *types, False)], fused_tail=False)
    return target


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_16_bit_number_is_read_as_torch_reads_it(kernels: list[UpdateKernel], dtype: torch.dtype) -> None:
    source = torch.arange(1 << 16).to(torch.int16).view(dtype)
    for kernel in kernels:
        assert torch.equal(bits(convert(kernel, source, torch.float32)), bits(source.float())), kernel.level


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_to_16_bits_as_torch_rounds_them(kernels: list[UpdateKernel], dtype: torch.dtype) -> None:
    """Random bits, and the neighbourhood of every number and of every tie between two."""
    exact = torch.arange(1 << 16).to(torch.int16).view(dtype).float().view(torch.int32)
    near = [exact + offset for offset in (-1, 0, 1)]
    step = 1 << (16 if dtype == torch.bfloat16 else 13)
    near += [exact + step // 2 + offset for offset in (-1, 0, 1)]
    source = torch.cat([*near, torch.randint(-(1 << 31), 1 << 31, (200_001,), dtype=torch.int32)]).view(torch.float32)
    for kernel in kernels:
        assert torch.equal(bits(convert(kernel, source, dtype)), bits(source.to(dtype))), kernel.level


def norm(kernel: UpdateKernel, source: torch.Tensor, dtype: Dtype, fused_tail: bool = True) -> float:
    scan = source.data_ptr(), None, source.numel(), dtype, Dtype.FLOAT32, False
    return kernel.copy_norms([scan], fused_tail=fused_tail)[0]


@pytest.mark.parametrize("source_type", [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.FLOAT16])
@pytest.mark.parametrize("fused_tail", [True, False])
def test_the_norm_is_the_same_everywhere(kernels: list[UpdateKernel], source_type: Dtype, fused_tail: bool) -> None:
    for numel in (0, 1, 7, 8, 13, 16, 31, 200_003):
        source = (torch.randn(numel + 3) * 100).to(DTYPES[source_type])[3:]
        found = {norm(kernel, source, source_type, fused_tail) for kernel in kernels}
        assert len(found) == 1
        assert math.isclose(found.pop(), source.double().norm().item(), rel_tol=1e-4)


@pytest.mark.parametrize("bad", [float("inf"), -float("inf"), float("nan")])
def test_one_bad_element_anywhere_is_found(kernels: list[UpdateKernel], bad: float) -> None:
    numel = (1 << 16) + 37
    for place in (0, 15, 16, 40_000, (1 << 16) - 1, 1 << 16, numel - 1):
        source = torch.full((numel,), 3e16, dtype=torch.bfloat16)
        for kernel in kernels:
            source[place] = 3e16
            assert math.isfinite(norm(kernel, source, Dtype.BFLOAT16))
            source[place] = bad
            assert not math.isfinite(norm(kernel, source, Dtype.BFLOAT16))


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 1009])
def test_receiving_copies_or_adds_and_measures_in_one_call(kernels: list[UpdateKernel], numel: int) -> None:
    for kernel in kernels:
        gradient, total = torch.randn(numel).bfloat16(), torch.randn(numel)
        space, expected = torch.zeros(numel + 1, dtype=torch.bfloat16), total + gradient.float()
        copy = gradient.data_ptr(), space.data_ptr(), numel, Dtype.BFLOAT16, Dtype.BFLOAT16, False
        sums = gradient.data_ptr(), total.data_ptr(), numel, Dtype.BFLOAT16, Dtype.FLOAT32, True
        norms = [norm(kernel, gradient, Dtype.BFLOAT16), norm(kernel, expected, Dtype.FLOAT32)]
        assert kernel.copy_norms([copy, sums], fused_tail=True) == norms
        assert torch.equal(space[:-1], gradient) and space[-1] == 0, "and nothing behind it"
        assert torch.equal(total, expected)


def test_arrays_are_copied_and_added_on_all_threads_as_on_one(kernels: list[UpdateKernel]) -> None:
    """Cut where a thread's piece ends; the types that have a loop of their own, and another pair."""
    numels = (0, 1, 17, (1 << 16) - 1, 1 << 16, (1 << 16) + 1, 200_003)
    for kernel in kernels:
        for source_type, target_type, adds in ((1, 0, True), (0, 0, True), (2, 0, False)):
            sources = [torch.randn(numel).to(DTYPES[source_type]) for numel in numels]
            targets = [torch.randn(numel).to(DTYPES[target_type]) for numel in numels]
            expected = [t + s.float() if adds else s.to(t.dtype) for s, t in zip(sources, targets, strict=True)]
            pairs = zip(sources, targets, strict=True)
            kernel.copy([(s.data_ptr(), t.data_ptr(), s.numel(), source_type, target_type, adds) for s, t in pairs])
            assert all(map(torch.equal, targets, expected)), kernel.level
            scans = [(each.data_ptr(), None, each.numel(), target_type, Dtype.FLOAT32, False) for each in targets]
            alone = kernel.copy_norms(scans, fused_tail=True)
            assert kernel.copy_norms(scans, fused_tail=True, threaded=True) == alone


def test_what_overflows_when_it_is_stored_is_not_finite(kernels: list[UpdateKernel]) -> None:
    source, target = torch.full((20,), 1e5), torch.zeros(20, dtype=torch.float16)
    for kernel in kernels:
        copy = source.data_ptr(), target.data_ptr(), 20, Dtype.FLOAT32, Dtype.FLOAT16, False
        assert kernel.copy_norms([copy], fused_tail=True) == [math.inf]


def test_denormals_are_kept_whatever_the_caller_does_to_its_own(library: Path) -> None:
    kernel = UpdateKernel(library, num_threads=2)
    hyper = Hyper(rule=Rule.SGD, grad_scale=1, rate=-1)
    arrays, results = Arrays(0, hyper, False), []
    arrays.numel, arrays.tensors = 100_000, [torch.zeros(100_000), torch.full((100_000,), 1e-40), *[None] * 4]
    for flush in (False, True):
        twin = arrays.copy()
        torch.set_flush_denormal(flush)
        twin.update(kernel)
        torch.set_flush_denormal(False)
        assert twin.tensors[0] is not None
        results.append(twin.tensors[0])
    assert torch.equal(*results) and results[0].abs().min() > 0
    kernel.close()


def large_update(kernel: UpdateKernel) -> list[torch.Tensor]:
    numel = 300_000
    hyper = Hyper(rule=Rule.SGD, grad_scale=1, rate=-0.1)
    arrays = Arrays(0, hyper, False)
    arrays.numel, arrays.tensors = numel, [torch.ones(numel), torch.arange(numel) % 7 + 0.5, *[None] * 4]
    return arrays.update(kernel)


def _update_in_child(kernel: UpdateKernel, expected: list[torch.Tensor], right: Any) -> None:
    torch.set_num_threads(1)  # torch's own threads do not survive a fork
    right.value = all(torch.equal(a, b) for a, b in zip(large_update(kernel), expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_has_threads_of_its_own(library: Path) -> None:
    kernel = UpdateKernel(library, num_threads=4)
    expected = large_update(kernel)
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        right = context.Value("b", False)
        child = context.Process(target=_update_in_child, args=(kernel, expected, right))
        child.start()
        child.join(300)
        assert child.exitcode == 0 and right.value
    assert all(torch.equal(a, b) for a, b in zip(large_update(kernel), expected, strict=True))
    kernel.close()


def test_threads_may_call_at_once(library: Path) -> None:
    kernel = UpdateKernel(library, num_threads=3)
    expected = large_update(kernel)
    wrong = []

    def call() -> None:
        for _ in range(10):
            if not all(torch.equal(a, b) for a, b in zip(large_update(kernel), expected, strict=True)):
                wrong.append(1)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert not wrong
    kernel.close()


def test_close_ends_the_threads(library: Path) -> None:
    large_update(UpdateKernel(library, num_threads=1))
    before, deadline_s = set(os.listdir("/proc/self/task")), time.monotonic() + 60
    for _ in range(5):
        kernel = UpdateKernel(library, num_threads=4)
        assert not set(os.listdir("/proc/self/task")) - before
        large_update(kernel)
        assert len(set(os.listdir("/proc/self/task")) - before) == 3
        kernel.close()
        kernel.close()
        while set(os.listdir("/proc/self/task")) - before and time.monotonic() < deadline_s:
            time.sleep(0.001)  # a joined thread is still about to leave the kernel
    assert not set(os.listdir("/proc/self/task")) - before


def test_threads_come_from_the_affinity_not_from_omp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    assert available_cpus(os.environ, tmp_path) == 8
    assert available_cpus({"LOCAL_WORLD_SIZE": "4"}, tmp_path) == 2
    assert available_cpus({"LOCAL_WORLD_SIZE": "20"}, tmp_path) == 1
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 5, 6})
    assert available_cpus({"LOCAL_WORLD_SIZE": "4"}, tmp_path) == 3  # bound apart already


@pytest.mark.parametrize(
    ("cgroup", "files", "expected"),
    [
        ("0::/job/step", {"job/step/cpu.max": "max 100000", "job/cpu.max": "350000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("0::/job", {"job/cpu.max": "max 100000"}, 8),
        ("0::/job", {}, 8),
        (
            "4:cpu,cpuacct:/box\n3:memory:/box",
            {"cpu,cpuacct/box/cpu.cfs_quota_us": "200000", "cpu,cpuacct/box/cpu.cfs_period_us": "100000"},
            2,
        ),
        ("4:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1", "cpu/box/cpu.cfs_period_us": "100000"}, 8),
    ],
)
def test_threads_respect_the_quota(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, cgroup: str, files: dict[str, str], expected: int
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    for name, text in {"proc/self/cgroup": cgroup, **{f"sys/fs/cgroup/{k}": v for k, v in files.items()}}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    assert available_cpus({}, tmp_path) == expected
    assert available_cpus({"LOCAL_WORLD_SIZE": "2"}, tmp_path) == max(1, expected // 2), "ranks share the quota"
