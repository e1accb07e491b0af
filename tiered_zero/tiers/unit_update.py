"""Track one unit's update, and copy the update's new bytes to a fetch of the unit before they are written."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tiered_zero.concurrency.transfer import Completion, Transfer, wait_all, wait_quietly

StartCopy = Callable[[torch.Tensor, torch.Tensor], Transfer]
"""start_copy(target, source): start a copy and return its transfer. The copy must not wait for anything that waits for
an update."""


class UnitUpdate:
    """The completion of one unit's update. `computed`: all new parameters are in staging memory or in their slot.
    `written`: all of them are in their slot. Any thread.

    Bytes that are computed and not written can be forwarded to a fetch, as a processor forwards a store to a load. The
    fetch names its target and reads only written bytes; all other parts are copied to the target before the update
    reuses their staging memory."""

    def __init__(self) -> None:
        self.computed = Completion()
        self.written = Completion()
        self._lock = threading.Lock()
        self._pending: dict[int, torch.Tensor] = {}
        """First byte of a part that is computed and not written -> the part."""
        self._retired: dict[int, int] = {}
        """First byte of a written part -> its last byte + 1."""
        self._target: torch.Tensor | None = None
        self._start_copy: StartCopy | None = None
        self._covered: dict[int, int] = {}
        """First byte -> last byte + 1 of each part that was copied to the target, or that the fetch reads itself."""
        self._copies: list[tuple[int, Transfer]] = []
        """The first byte of a part and its copy to a target, for each copy that was started."""

    # -- the update worker ---------------------------------------------------------------------------------------------

    def add_pending(self, start: int, part: torch.Tensor) -> None:
        """Add a computed part of the unit. `part`: [n] uint8, the unit's new bytes from byte `start`. The part stays in
        its memory until `retire` returns."""
        with self._lock:
            self._pending[start] = part
            self._forward(start)

    def retire(self, start: int) -> None:
        """Mark the part at byte `start` as written, and wait until no copy reads it: its memory is about to be
        reused."""
        with self._lock:
            self._forward(start)
            part = self._pending.pop(start, None)
            if part is not None:
                self._retired[start] = start + part.numel()
            copies = [copy for begin, copy in self._copies if begin == start]
        for copy in copies:
            wait_quietly(copy)  # the fetch raises its error

    def complete(self) -> None:
        self.computed.complete()
        self.written.complete()

    def fail(self, error: BaseException) -> None:
        """Fail every wait for this update with `error`, unless the unit is written already. Wait until no copy reads a
        part."""
        if not self.written.done():
            self.computed.fail(error)  # first, so that a fetch without pending parts sees the error
            with self._lock:
                self._pending.clear()
                copies = [copy for _, copy in self._copies]
            for copy in copies:
                wait_quietly(copy)
            self.written.fail(error)

    # -- a fetch -------------------------------------------------------------------------------------------------------

    def forward_to(self, target: torch.Tensor, start_copy: StartCopy) -> list[tuple[int, int]]:
        """Start to copy the parts that are not written to `target`. Return the ranges of written bytes (from, to),
        which the caller must read.

        `target`: [n] uint8, memory for the whole unit. `start_copy`: may write to the target until `finish_forward`
        returns."""
        with self._lock:
            self._target, self._start_copy, self._covered = target, start_copy, dict(self._retired)
            return sorted(self._covered.items())

    def cancel_forward(self) -> None:
        """Start no more copies to the target, and wait for those under way. Raises the error of a copy that has
        failed."""
        with self._lock:
            self._target = self._start_copy = None
            copies = [copy for _, copy in self._copies]
        wait_all(copies)

    def finish_forward(self) -> list[tuple[int, int]]:
        """Block until the unit is computed and its parts are copied. Return the ranges of bytes (from, to) that the
        caller must still read, because the update leaves them unchanged. Raises the error of an update that has failed.
        """
        try:
            self.computed.wait()
            with self._lock:
                assert self._target is not None, "forward_to comes before finish_forward"
                for start in self._pending:
                    self._forward(start)
                nbytes, covered = self._target.numel(), sorted(self._covered.items())
                if self.computed.error is not None:  # parts may be missing
                    raise self.computed.error
        finally:
            self.cancel_forward()
        starts = [0, *(stop for _, stop in covered)]
        stops = [*(start for start, _ in covered), nbytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _forward(self, start: int) -> None:
        """Start to copy the pending part at byte `start` to the target, unless there is no target or it has the part
        already. Called under the lock."""
        part = self._pending.get(start)
        if self._target is None or self._start_copy is None or part is None or start in self._covered:
            return
        stop = start + part.numel()
        self._copies.append((start, self._start_copy(self._target[start:stop], part)))
        self._covered[start] = stop
