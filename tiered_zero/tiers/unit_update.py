"""The update of one unit, and its new bytes on their way to a slot."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from tiered_zero.concurrency.transfer import Completion, Transfer, wait_all, wait_quietly

StartCopy = Callable[[torch.Tensor, torch.Tensor], Transfer]
"""start_copy(target, source); it waits for nothing that waits for an update"""


class UnitUpdate:
    """Completion of one unit's update. `computed`: all its new parameters are in staging memory, or in their slot.
    `written`: all are in their slot. Any thread.

    Bytes that are computed and not written can be forwarded, as a processor forwards a store to a load: a fetch names
    its target and reads only what is written; the other parts are copied to the target before their staging memory is
    used again.
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
        self._start_copy: StartCopy | None = None
        self._covered: dict[int, int] = {}
        """As `_retired`: the parts that the target gets, or that its owner reads."""
        self._copies: list[tuple[int, Transfer]] = []
        """First byte of a part, and its copy to a target."""

    # -- the update worker ---------------------------------------------------------------------------------------------

    def add_pending(self, start: int, part: torch.Tensor) -> None:
        """`part`: [n] uint8, the unit's new bytes from `start` on, which stay where they are until `retire` returns."""
        with self._lock:
            self._pending[start] = part
            self._forward(start)

    def retire(self, start: int) -> None:
        """The part is written, and its memory is about to be used again. Returns once no copy reads it."""
        with self._lock:
            self._forward(start)
            part = self._pending.pop(start, None)
            if part is not None:
                self._retired[start] = start + part.numel()
            copies = [copy for begin, copy in self._copies if begin == start]
        for copy in copies:
            wait_quietly(copy)  # its error is the fetch's

    def complete(self) -> None:
        self.computed.complete()
        self.written.complete()

    def fail(self, error: BaseException) -> None:
        """The update failed: every wait for it raises `error`. Does nothing once the unit is written. Returns once no
        copy reads a part."""
        if not self.written.done():
            self.computed.fail(error)  # first: a fetch that finds no pending part finds the error
            with self._lock:
                self._pending.clear()
                copies = [copy for _, copy in self._copies]
            for copy in copies:
                wait_quietly(copy)
            self.written.fail(error)

    # -- a fetch -------------------------------------------------------------------------------------------------------

    def forward_to(self, target: torch.Tensor, start_copy: StartCopy) -> list[tuple[int, int]]:
        """Have the parts that are not written copied to `target`: [n] uint8, memory for the whole unit, which
        `start_copy` writes to until `finish_forward` returns. Returns the written bytes (from, to), for the caller to
        read.
        """
        with self._lock:
            self._target, self._start_copy, self._covered = target, start_copy, dict(self._retired)
            return sorted(self._covered.items())

    def cancel_forward(self) -> None:
        """Start no more copies to the target; return once those under way are done. Raises the error of one."""
        with self._lock:
            self._target = self._start_copy = None
            copies = [copy for _, copy in self._copies]
        wait_all(copies)

    def finish_forward(self) -> list[tuple[int, int]]:
        """Block until the unit is computed and its parts are copied; return the bytes (from, to) that the caller still
        has to read: they are of no part, for the update leaves them as they were. Raises the error of an update that
        failed."""
        try:
            self.computed.wait()
            with self._lock:
                assert self._target is not None, "forward_to comes before finish_forward"
                for start in self._pending:
                    self._forward(start)
                nbytes, covered = self._target.numel(), sorted(self._covered.items())
                if self.computed.error is not None:  # the parts may be lost
                    raise self.computed.error
        finally:
            self.cancel_forward()
        starts = [0, *(stop for _, stop in covered)]
        stops = [*(start for start, _ in covered), nbytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _forward(self, start: int) -> None:
        """Start to copy a pending part to the target, if there is one that has not got it. Under the lock."""
        part = self._pending.get(start)
        if self._target is None or self._start_copy is None or part is None or start in self._covered:
            return
        stop = start + part.numel()
        self._copies.append((start, self._start_copy(self._target[start:stop], part)))
        self._covered[start] = stop
