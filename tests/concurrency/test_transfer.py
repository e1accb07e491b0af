"""Waits that end only when the transfer is over."""

import pytest

from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer, wait_all, wait_quietly
from tiered_zero.errors import TransferError


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
