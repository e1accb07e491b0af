"""The first failure is remembered, surfaces once as it happened, and refuses every later use."""

import threading
from functools import partial

import pytest

from tiered_zero.concurrency.failure_latch import FailureLatch, root_cause
from tiered_zero.errors import EngineFailedError, TransferError


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
