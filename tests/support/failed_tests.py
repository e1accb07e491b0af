"""Ends what a failed test has left open, so that no test behind it in the same process fails because of it.

pytest keeps the traceback of a failure, whose frames hold the test's engine: its threads and its files would stay, and
be found by the next test that looks for some.
"""

from __future__ import annotations

import gc
import sys
import threading
import traceback
from contextlib import suppress

from tiered_zero import Engine
from tiered_zero.optim import OffloadedOptimizer, ZeroRedundancyOptimizer

_KINDS = (Engine, OffloadedOptimizer, ZeroRedundancyOptimizer)


def end_failed_test(error: BaseException | None) -> None:
    """Close every engine and optimizer that is left, and drop what the frames of `error` hold.

    On a thread, for a minute at most: the test may have left behind what a close waits for.
    """
    gc.enable()  # the test may have disabled it
    sys.setprofile(None)
    closing = threading.Thread(target=_close_all, daemon=True)
    closing.start()
    closing.join(60)
    seen: set[int] = set()
    while error is not None and id(error) not in seen:  # a cause may have the error as its context
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__
    gc.collect()


def _close_all() -> None:
    for left in [each for each in gc.get_objects() if issubclass(type(each), _KINDS)]:
        with suppress(Exception):
            left.close()
