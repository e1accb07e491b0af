"""Waits that end only when the transfer is over; a failure that surfaces once, and refuses every later use."""

import threading
from functools import partial

import pytest

from tiered_zero.concurrency.transfer import (
    COMPLETED,
    Completion,
    FailureLatch,
    Transfer,
    root_cause,
    wait_all,
    wait_quietly,
)
from tiered_zero.errors import EngineFailedError, TransferError


class Scarce(Transfer):
    """Under way until a wait finds memory, after `num_failures` that find none."""

    def __init__(self, num_failures: int) -> None:
        self.num_left = num_failures

    def done(self) -> bool:
        return self.num_left < 0

    def wait(self) -> None:
        self.num_left -= 1
        if not self.done():
            raise MemoryError


def test_a_quiet_wait_drops_the_error_of_a_transfer() -> None:
    for error in (TransferError("no disk"), MemoryError()):
        failed = Completion()
        failed.fail(error)
        wait_quietly(failed)


def test_a_quiet_wait_raises_where_the_transfer_is_still_under_way() -> None:
    with pytest.raises(MemoryError):
        wait_quietly(Scarce(1))


def test_all_are_over_where_one_wait_found_no_memory() -> None:
    scarce = Scarce(1)
    with pytest.raises(MemoryError):
        wait_all([scarce, COMPLETED])
    assert scarce.done()


def test_the_first_failure_is_remembered() -> None:
    latch = FailureLatch()
    latch.check()
    first = TransferError("first")
    for error in (first, TransferError("second")):
        latch.set(error)
    for _ in range(2):
        with pytest.raises(TransferError) as caught:
            latch.check()
        assert caught.value is first is latch.error


def test_a_refusal_names_the_failure_as_its_cause() -> None:
    latch = FailureLatch()
    latch.set(TransferError("EIO"))
    with pytest.raises(EngineFailedError, match=r"^the store failed: EIO$") as caught:
        latch.check("the store failed: {}".format)
    assert caught.value.__cause__ is latch.error


def test_the_original_error_surfaces_once() -> None:
    store, policy, engine = FailureLatch(), FailureLatch(), FailureLatch()
    store.set(original := TransferError("EIO"))
    with pytest.raises(EngineFailedError) as refused:
        store.check("store: {}".format)
    policy.set(refused.value)
    raised = []
    for _ in range(3):
        with pytest.raises((TransferError, EngineFailedError)) as caught, engine.surfacing():
            policy.check("policy: {}".format)
        raised.append(caught.value)
    assert raised[0] is original
    assert [str(error) for error in raised[1:]] == ["policy: store: EIO"] * 2
    assert {root_cause(error) for error in raised} == {original}


def test_an_error_that_is_no_refusal_surfaces_as_it_is() -> None:
    latch = FailureLatch()
    for error in (KeyboardInterrupt(), EngineFailedError("resume from step 3")):
        with pytest.raises(type(error)) as caught, latch.surfacing():
            raise error
        assert caught.value is error


def test_of_many_threads_one_sets_it() -> None:
    latch, barrier = FailureLatch(), threading.Barrier(8)
    errors = [TransferError(str(index)) for index in range(8)]

    def fail(error: TransferError) -> None:
        barrier.wait()
        latch.set(error)

    threads = [threading.Thread(target=partial(fail, error)) for error in errors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert latch.error in errors
