"""Gradients on their way from the device to host memory: back-pressure, and when their device memory is freed."""

from __future__ import annotations

from collections import deque
from typing import final

import torch

from tiered_zero.hardware.runtime import Runtime
from tiered_zero.transfer import Transfer

NUM_KEPT = 4
"""Transferred gradients kept before they are freed. Autograd's thread frees them, in order, so that every step meets
the same heap: freed by the reduce lane, at varying times, they left holes of 25 MiB in it.
"""


@final
class InFlightGradients:
    """Bounds the gradients on the device whose transfer has not ended. Driver or autograd's thread."""

    def __init__(self, runtime: Runtime, limit_nbytes: int) -> None:
        """`limit_nbytes`: autograd waits for the oldest when there are more."""
        self._recorder, self._ledger = runtime.recorder, runtime.ledger
        self._limit_nbytes = limit_nbytes
        self._transfers: deque[tuple[Transfer, torch.Tensor]] = deque()
        self._transferred: deque[torch.Tensor] = deque()
        """Gradients that are to be freed, the oldest first."""

    def make_room(self, nbytes: int) -> None:
        """Wait for the oldest until `nbytes` more are within the limit, and charge them."""
        self._wait(max(0, self._limit_nbytes - nbytes))
        self._ledger.charge("device", "gradient_in_flight", nbytes)

    def add(self, event: Transfer, source: torch.Tensor) -> None:
        self._transfers.append((event, source))

    def end_backward(self) -> None:
        """Wait until what is left is within the limit, and free the rest. Raises transfer errors."""
        self._wait(self._limit_nbytes)
        self._free(0, 0)

    def wait_all(self) -> None:
        """Block until every transfer has ended, those of empty gradients too. Raises the first error in a call."""
        self._wait(-1)

    def drain(self) -> None:
        """Wait for every transfer, whatever fails. Raises the first error."""
        failure: BaseException | None = None
        for _ in range(len(self._transfers) + 1):  # each failure ends one wait
            try:
                self.wait_all()
            except BaseException as error:
                failure = failure or error
        if failure is not None:
            raise failure

    def clear(self) -> None:
        """Free everything, also what an interrupted wait has left. The lanes are idle."""
        self._transfers.clear()
        self._transferred.clear()
        self._ledger.correct("device", "gradient_in_flight", 0)

    def _wait(self, allowed_nbytes: int) -> None:
        """Wait for the oldest gradients until at most `allowed_nbytes` are in flight or not freed yet."""
        in_flight_nbytes = sum(source.nbytes for _, source in self._transfers)
        while self._transfers and (in_flight_nbytes > allowed_nbytes or self._transfers[0][0].done()):
            event, source = self._transfers.popleft()
            in_flight_nbytes -= source.nbytes
            self._transferred.append(source)
            with self._recorder.span("compute", "wait_grad"):
                event.wait()
        self._free(NUM_KEPT, allowed_nbytes - in_flight_nbytes)

    def _free(self, num_kept: int, allowed_nbytes: int) -> None:
        """Free the oldest transferred gradients until at most so many, and so many bytes, are left."""
        nbytes = sum(source.nbytes for source in self._transferred)
        while self._transferred and (len(self._transferred) > num_kept or nbytes > allowed_nbytes):
            freed_nbytes = self._transferred.popleft().nbytes
            nbytes -= freed_nbytes
            self._ledger.discharge("device", "gradient_in_flight", freed_nbytes)
