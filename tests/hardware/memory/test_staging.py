"""Staging buffers: back-pressure, the count that adds up, deadlocks that speak."""

import logging
import random
import threading
import time

import pytest
import torch

from tests.support.inspection import held_nbytes
from tiered_zero.errors import BudgetError
from tiered_zero.hardware.device.accelerator import CpuAccelerator
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.sizes import PAGE_NBYTES
from tiered_zero.telemetry.spans import Ledger, Recorder


@pytest.fixture
def ledger():
    return Ledger()


@pytest.fixture
def arena(ledger):
    arena = HostArena(32 * PAGE_NBYTES, CpuAccelerator(poison=True), pin=False, ledger=ledger)
    yield arena
    arena.close()


@pytest.fixture
def recorder():
    return Recorder(keep_spans=True)


@pytest.fixture
def pool(arena, recorder):
    pool = StagingPool(arena, 10_000, 2, "param staging", recorder, timeout_s=120.0)
    yield pool
    pool.close()


def test_a_lease_has_the_asked_size_in_whole_pages(pool, ledger):
    assert pool.buffer_nbytes == 3 * PAGE_NBYTES
    assert ledger.by_kind()["host"]["param staging"][0] == 6 * PAGE_NBYTES
    with pool.lease(5000) as lease, pool.lease(12_288) as other:
        assert lease.tensor.numel() == 2 * PAGE_NBYTES
        assert lease.tensor.data_ptr() % PAGE_NBYTES == 0
        assert lease.view(torch.bfloat16, 7).shape == (7,)
        lease.tensor.fill_(1)
        other.tensor.fill_(2)
        assert lease.tensor.eq(1).all() and other.tensor.eq(2).all()
        assert pool.num_free == 0
    assert pool.num_free == 2


def test_after_release_a_lease_is_empty_and_its_bytes_poisoned(pool):
    lease = pool.lease(PAGE_NBYTES)
    flat = lease.view(torch.float32, 1024).fill_(1.0)
    lease.release()
    lease.release()
    assert flat.isnan().all() and lease.tensor.numel() == 0
    assert pool.num_free == 2
    with pytest.raises(BudgetError, match="this memory has 0"):
        lease.view(torch.float32, 1)


def test_a_lease_larger_than_a_buffer_names_both(pool):
    for ask in (pool.lease, pool.lease_nowait):
        with pytest.raises(BudgetError, match=r"20000 bytes.*param staging.*12288 bytes"):
            ask(20_000)


def test_nowait_never_waits(pool):
    first, second = pool.lease_nowait(1, "a"), pool.lease_nowait(1, "b")
    assert first and second and pool.lease_nowait(1) is None
    assert [holder for holder, _ in pool.holders()] == ["a", "b"]
    second.release()
    third = pool.lease_nowait(1)
    assert third
    third.release()
    first.release()


def test_a_wait_is_recorded_under_its_name_and_only_then(pool, recorder):
    held = [pool.lease(1), pool.lease(1)]
    assert not recorder.take_spans()

    def release():
        while not pool._changed._waiters:
            time.sleep(0.001)
        time.sleep(0.03)
        held[0].release()

    thread = threading.Thread(target=release)
    thread.start()
    pool.lease(4096, "unit 3", lane="fetch").release()
    [span] = recorder.take_spans()
    assert (span.lane, span.kind, span.name) == ("fetch", "wait_lease", "param staging unit 3")
    assert span.end_s - span.start_s >= 0.03
    held[1].release()
    thread.join()


def test_a_deadlock_is_an_error_with_the_holders(arena, recorder):
    pool = StagingPool(arena, PAGE_NBYTES, 2, "state staging", recorder, timeout_s=0.05)
    held = [pool.lease(1, "sub-group 0"), pool.lease(1, "sub-group 1")]
    with pytest.raises(
        BudgetError, match=r"(?s)sub-group 2 waited 0.05 s .* 2 state staging.*sub-group 0\n.*sub-group 1\n"
    ):
        pool.lease(1, "sub-group 2")
    for lease in held:
        lease.release()
    pool.lease(1).release()
    pool.close()


def test_a_process_that_was_stopped_is_no_deadlock(arena, recorder):
    """As by Ctrl-Z, for longer than a lease may be waited for: the clock ran on, the buffer's holder did not."""
    pool = StagingPool(arena, PAGE_NBYTES, 1, "state staging", recorder, timeout_s=60.0)
    held = pool.lease(1)
    thread = threading.Thread(target=held.release)

    def time_out(ready, timeout_s):
        del pool._changed.wait_for
        thread.start()
        return ready()

    pool._changed.wait_for = time_out
    pool.lease(1).release()
    thread.join()
    pool.close()


def test_close_wakes_who_waits_and_names_who_holds(arena, recorder, ledger, caplog):
    pool = StagingPool(arena, PAGE_NBYTES, 1, "state staging", recorder)
    lease = pool.lease(1, "sub-group 7")
    errors = []

    def wait():
        try:
            pool.lease(1, "sub-group 8")
        except BudgetError as error:
            errors.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    while not pool._changed._waiters:
        time.sleep(0.001)
    with caplog.at_level(logging.ERROR, "tiered_zero"):
        pool.close()
        pool.close()
    thread.join(300)
    assert len(errors) == 1 and "closed" in errors[0] and "sub-group 8" in errors[0]
    assert ["sub-group 7" in record.getMessage() for record in caplog.records] == [True]
    arena.close()
    assert held_nbytes(ledger, "host") == 0
    lease.release()
    with pytest.raises(BudgetError, match="closed"):
        pool.lease_nowait(1)


def test_an_exception_gives_the_lease_back(pool):
    with pytest.raises(ZeroDivisionError), pool.lease(1):
        raise ZeroDivisionError
    assert pool.num_free == 2


def test_many_threads_share_few_buffers(arena, recorder):
    """No buffer is lent twice: each holder finds its own pattern when it gives its buffer back."""
    pool = StagingPool(arena, 2 * PAGE_NBYTES, 3, "staging", recorder, timeout_s=120.0)
    wrong = []

    def work(seed):
        draw = random.Random(seed)
        for _ in range(40):
            with pool.lease(draw.randint(1, 2 * PAGE_NBYTES), f"thread {seed}") as lease:
                lease.tensor.fill_(seed)
                time.sleep(draw.choice([0, 0, 50e-6]))
                if not bool((lease.tensor == seed).all()):
                    wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and pool.num_free == 3
    pool.close()
