"""The host arena: exact sizes, pinning, and what outlives it."""

import ctypes
import gc
import mmap
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.inspection import held_nbytes
from tiered_zero import system
from tiered_zero.errors import BudgetError
from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.hardware.memory import host_memory
from tiered_zero.hardware.memory.host_memory import HostArena, temporary_zeros, typed_view
from tiered_zero.hardware.probe import huge_pages
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.telemetry.spans import Ledger


class Pinning(CpuAccelerator):
    """Pins at most `limit_nbytes`, and remembers."""

    def __init__(self, limit_nbytes):
        super().__init__(poison=True)
        self.limit_nbytes = limit_nbytes
        self.pinned = {}

    def pin(self, address, nbytes):
        if nbytes > self.limit_nbytes:
            return False
        self.pinned[address] = nbytes
        return True

    def unpin(self, address):
        del self.pinned[address]


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def arena(ledger):
    arena = HostArena(16 * PAGE_NBYTES, CpuAccelerator(poison=True), pin=False, ledger=ledger)
    yield arena
    arena.close()


def test_a_slot_is_whole_pages_and_its_views_are_the_same_bytes(arena, ledger):
    slot = arena.take(5000, "master")
    assert slot.numel() == 2 * PAGE_NBYTES
    assert slot.dtype == torch.uint8 and slot.data_ptr() % PAGE_NBYTES == 0
    slot[:4] = torch.tensor([0, 0, 0x80, 0x3F], dtype=torch.uint8)
    flat = typed_view(slot, torch.float32, 1250)
    assert flat.shape == (1250,) and flat[0] == 1.0
    flat[1] = 2.0
    assert bytes(slot[4:8]) == b"\x00\x00\x00\x40"
    assert held_nbytes(ledger, "host") == slot.nbytes and ledger.by_kind()["host"] == {"master": (8192, 8192)}
    with pytest.raises(BudgetError, match=r"2049 elements of torch.float32 need 8196 bytes; this memory has 8192"):
        typed_view(slot, torch.float32, 2049)


def test_over_capacity_is_a_budget_error_that_says_what_is_free(arena):
    arena.take(10 * PAGE_NBYTES, "a")
    with pytest.raises(BudgetError, match=r"gradients needs 28.0 KiB .* 64.0 KiB, 24.0 KiB are left"):
        arena.take(7 * PAGE_NBYTES, "gradients")
    arena.take(6 * PAGE_NBYTES, "b")


def test_a_ledger_limit_takes_nothing():
    ledger = Ledger({"host": 2 * PAGE_NBYTES})
    arena = HostArena(8 * PAGE_NBYTES, CpuAccelerator(), pin=False, ledger=ledger)
    with pytest.raises(BudgetError, match="allowed"):
        arena.take(3 * PAGE_NBYTES, "a")
    assert held_nbytes(ledger, "host") == 0
    arena.take(2 * PAGE_NBYTES, "a")
    arena.close()


def test_fresh_memory_is_poisoned_too(arena):
    assert typed_view(arena.take(1, "a"), torch.float32, 1024).isnan().all()


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 3 * PAGE_NBYTES), max_size=60))
def test_slots_never_overlap_and_nothing_is_lost(sizes):
    ledger = Ledger()
    arena = HostArena(16 * PAGE_NBYTES, CpuAccelerator(), pin=False, ledger=ledger)
    slots = []
    for nbytes in sizes:
        left_nbytes = arena.capacity_nbytes - sum(slot.nbytes for slot in slots)
        try:
            slots.append(arena.take(nbytes, "a"))
        except BudgetError:
            assert left_nbytes < align_up(nbytes, PAGE_NBYTES)
        spans = [(slot.data_ptr(), slot.data_ptr() + slot.nbytes) for slot in slots]
        assert all(spans[i][1] == spans[i + 1][0] for i in range(len(spans) - 1))
        assert held_nbytes(ledger, "host") == sum(slot.nbytes for slot in slots)
    arena.close()
    assert held_nbytes(ledger, "host") == 0


@pytest.mark.parametrize("nbytes", [MIB + 1, 3 * MIB - 5, 33 * MIB + 17, 100_000_001])
def test_big_sizes_take_at_most_2_percent_more(nbytes):
    accelerator, ledger = Pinning(1 << 40), Ledger()
    accelerator._poison = False  # untouched pages cost nothing
    arena = HostArena(nbytes, accelerator, pin=True, ledger=ledger)
    assert arena.take(nbytes, "a").nbytes <= arena.capacity_nbytes <= 1.02 * nbytes
    assert list(accelerator.pinned.values()) == [arena.pinned_nbytes] and nbytes <= arena.pinned_nbytes <= 1.02 * nbytes
    assert held_nbytes(ledger, "host") <= 1.02 * nbytes
    arena.close()


def test_what_crosses_to_the_device_is_pinned_slot_by_slot(ledger):
    """A slot that cannot be pinned leaves the others pinned; state stays where the CPU updates it."""
    accelerator = Pinning(16 * PAGE_NBYTES)
    arena = HostArena(64 * PAGE_NBYTES, accelerator, pin=True, ledger=ledger)
    kinds = ("param", "gradient", "state", "staging_state", "activation")
    slots = {kind: arena.take(8 * PAGE_NBYTES, kind) for kind in kinds}
    arena.take(17 * PAGE_NBYTES, "param")
    assert accelerator.pinned == {slot.data_ptr(): 8 * PAGE_NBYTES for kind, slot in slots.items() if kind != "state"}
    assert arena.pinned_nbytes == 4 * 8 * PAGE_NBYTES
    arena.close()
    assert not accelerator.pinned and not arena.pinned_nbytes


def resident(slot):
    """How many pages of a slot have memory."""
    found = (ctypes.c_ubyte * (slot.nbytes // PAGE_NBYTES))()
    assert ctypes.CDLL(None).mincore(ctypes.c_void_p(slot.data_ptr()), ctypes.c_size_t(slot.nbytes), found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mincore"), reason="the system does not say what is resident")
def test_pages_are_touched_by_several_threads_before_they_are_pinned(ledger, monkeypatch):
    monkeypatch.setattr(host_memory, "available_cpus", lambda: 3)
    started = []
    monkeypatch.setattr(system.threading.Thread, "start", lambda self: started.append(self))
    monkeypatch.setattr(system.threading.Thread, "join", lambda self, timeout=None: self.run())
    accelerator = Pinning(1 << 40)
    accelerator._poison = False
    arena = HostArena(72 * MIB, accelerator, pin=True, ledger=ledger)
    slots = {kind: arena.take(nbytes, kind) for kind, nbytes in (("param", 50 * MIB), ("state", 20 * MIB))}
    if not resident(slots["param"]):
        pytest.skip("Linux before 5.14 has no MADV_POPULATE_WRITE")
    assert len(started) == 3 and resident(slots["param"]) == 50 * MIB // PAGE_NBYTES
    assert not resident(slots["state"])
    assert not slots["param"].any()
    arena.close()


def test_not_asked_is_pageable_and_works(ledger):
    accelerator = Pinning(64 * PAGE_NBYTES)
    arena = HostArena(64 * PAGE_NBYTES, accelerator, pin=False, ledger=ledger)
    arena.take(64 * PAGE_NBYTES, "param")
    assert not arena.pinned_nbytes and not accelerator.pinned
    arena.close()


def test_views_outlive_the_arena(ledger):
    arena = HostArena(4 * PAGE_NBYTES, CpuAccelerator(), pin=False, ledger=ledger)
    slot = arena.take(PAGE_NBYTES, "a")
    flat = typed_view(slot, torch.float32, 8)
    flat.fill_(3.0)
    arena.close()
    arena.close()
    del slot, arena
    gc.collect()
    assert torch.equal(flat, torch.full((8,), 3.0))
    assert held_nbytes(ledger, "host") == 0


def _resident_nbytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * mmap.PAGESIZE


def test_closing_gives_the_memory_back(ledger):
    gc.collect()  # what is free later does not count
    before = _resident_nbytes()
    for _ in range(3):
        arena = HostArena(64 * MIB, CpuAccelerator(), pin=False, ledger=ledger)
        arena.take(64 * MIB, "a").fill_(1)
        assert _resident_nbytes() - before > 60 * MIB
        arena.close()
        assert _resident_nbytes() - before < 8 * MIB


def test_a_forked_child_does_not_have_the_pages_and_they_may_be_huge(arena):
    """So that a child's copy-on-write cannot take a page from under a direct read that is in flight, and so that direct
    transfers pin few pages."""
    slot = arena.take(PAGE_NBYTES, "a")
    with open("/proc/self/smaps") as smaps:
        text = smaps.read()
    mappings = {line.split()[0]: flags for line, flags in _mappings(text)}
    inside = [
        flags
        for span, flags in mappings.items()
        if int(span.split("-")[0], 16) <= slot.data_ptr() < int(span.split("-")[1], 16)
    ]
    assert len(inside) == 1 and "dc" in inside[0].split()
    assert huge_pages() is None or "hg" in inside[0].split()


def _mappings(smaps):
    header = None
    for line in smaps.splitlines():
        if line.startswith("VmFlags:"):
            yield header, line.removeprefix("VmFlags:")
        elif "-" in line.split()[0]:
            header = line


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (300, 1000)])
def test_temporary_zeros_are_like_any_other(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = temporary_zeros(shape, dtype)
    assert torch.equal(found, torch.zeros(shape, dtype=dtype)) and found.shape == torch.Size(shape)
    assert found.dtype is dtype and found.is_contiguous() and not found.requires_grad


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="glibc before 2.33 does not report heap sizes")
def test_large_ones_that_come_and_go_leave_nothing_in_the_heap() -> None:
    """Small blocks that stay are allocated in between; 30 MiB in all pass by."""
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 1 << 20


SCRIPT = """
import ctypes, torch
from tiered_zero.hardware.memory.host_memory import temporary_zeros

class Figures(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena a b c d e f used free keep".split()]

mallinfo2 = ctypes.CDLL(None).mallinfo2
mallinfo2.restype = Figures
kept = [temporary_zeros((1,), torch.float32)]
before = mallinfo2().arena
for _ in range(30):
    large = temporary_zeros((1 << 18,), torch.float32).fill_(1.0)
    kept.append([bytes(600) for _ in range(10)])
    del large
print(mallinfo2().arena - before)
"""


def test_pinned_memory_is_touched_near_the_device(monkeypatch, ledger):
    touched = []
    monkeypatch.setattr(host_memory, "near_cpus", lambda device: {3})
    monkeypatch.setattr(host_memory, "touch_pages", lambda address, nbytes, threads, cpus: touched.append(cpus))
    arena = HostArena(16 * PAGE_NBYTES, Pinning(MIB), pin=True, ledger=ledger)
    arena.take(PAGE_NBYTES, "param")
    arena.take(PAGE_NBYTES, "state")
    assert touched == [{3}], "the CPU updates state where it rests"
    arena.close()
