"""The update of one unit, and its new bytes on their way to a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tiered_zero.concurrency.transfer import Completion

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""copy(target, source)"""


class UnitUpdate:
    """Completion of one unit's update. `computed`: all its new parameters are in staging memory, or in their slot.
    `written`: all are in their slot. Any thread.

    Bytes that are computed and not written can be forwarded, as a processor forwards a store to a load: a fetch names
    its target and reads only what is written; the update copies the other parts to the target before their staging
    memory is used again.
    """

    def __init__(self) -> None:
        self.computed = Completion()
        self.written = Completion()
        self._lock = threading.Lock()
        self._pending: dict[int, torch.Tensor] = {}
        """First byte -> a part that is computed and not written."""
        self._retired: dict[int, int] = {}
        """First byte of a part that is written -> its last byte + 1."""
        self._target: torch.Tensor | None = None
        self._covered: dict[int, int] = {}
        """As `_retired`: the parts that the target has got, or that its owner reads."""

    # -- the update worker ---------------------------------------------------------------------------------------------

    def add_pending(self, start: int, part: torch.Tensor, copy: Copy) -> None:
        """`part`: [n] uint8, the unit's new bytes from `start` on, which stay where they are until `retire`."""
        with self._lock:
            self._pending[start] = part
            self._forward(start, copy)

    def retire(self, start: int, copy: Copy) -> None:
        """The part is written, and its memory is about to be used again."""
        with self._lock:
            self._forward(start, copy)
            part = self._pending.pop(start, None)
            if part is not None:
                self._retired[start] = start + part.numel()

    def complete(self) -> None:
        self.computed.complete()
        self.written.complete()

    def fail(self, error: BaseException) -> None:
        """The update failed: every wait for it raises `error`. Does nothing once the unit is written."""
        if not self.written.done():
            self.computed.fail(error)  # first: a fetch that finds no pending part finds the error
            with self._lock:
                self._pending.clear()
            self.written.fail(error)

    # -- a fetch -------------------------------------------------------------------------------------------------------

    def forward_to(self, target: torch.Tensor) -> list[tuple[int, int]]:
        """Have the parts that are not written copied to `target`: [n] uint8, host memory for the whole unit, which the
        update writes to until `finish_forward` returns. Returns the written bytes (from, to), for the caller to read.
        """
        with self._lock:
            self._target, self._covered = target, dict(self._retired)
            return sorted(self._covered.items())

    def cancel_forward(self) -> None:
        """Stop writing to the target."""
        with self._lock:
            self._target = None

    def finish_forward(self, copy: Copy) -> list[tuple[int, int]]:
        """Block until the unit is computed; return the bytes (from, to) that the caller still has to read: they are of
        no part, for the update leaves them as they were. Raises the error of an update that failed."""
        try:
            self.computed.wait()
            with self._lock:
                assert self._target is not None, "forward_to comes before finish_forward"
                for start in self._pending:
                    self._forward(start, copy)
                nbytes, covered = self._target.numel(), sorted(self._covered.items())
                if self.computed.error is not None:  # the parts may be lost
                    raise self.computed.error
        finally:
            self.cancel_forward()
        starts = [0, *(stop for _, stop in covered)]
        stops = [*(start for start, _ in covered), nbytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _forward(self, start: int, copy: Copy) -> None:
        """Copy a pending part to the target, if there is one that has not got it. Under the lock."""
        part = self._pending.get(start)
        if self._target is not None and part is not None and start not in self._covered:
            stop = start + part.numel()
            copy(self._target[start:stop], part)
            self._covered[start] = stop
