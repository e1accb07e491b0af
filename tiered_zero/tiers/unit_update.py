"""What the update tells about one unit, and hands on before the unit is home."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch

from tiered_zero.hardware.accelerator import Event

Copy = Callable[[torch.Tensor, torch.Tensor], None]
"""copy(target, source)"""


@final
class UnitUpdate(Event):
    """One unit's update on its way: made once all its new parameters are computed, complete once they are where
    everybody reads them. Any thread.

    Who needs the parameters sooner gives a target, and reads only what is written already: a part that is not is copied
    there before its memory goes to others.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = threading.Event()
        self._complete = threading.Event()
        self._error: BaseException | None = None
        self._held: dict[int, torch.Tensor] = {}
        """First byte -> a part that is not written yet."""
        self._written: dict[int, int] = {}
        """First byte of a part that is -> its last byte + 1."""
        self._target: torch.Tensor | None = None
        self._covered: dict[int, int] = {}
        """The same of what the target got, or its owner reads."""

    # -- the update's side ---------------------------------------------------------------------------------------------

    def hand_over(self, start: int, part: torch.Tensor, copy: Copy) -> None:
        """`part`: [n] uint8, the unit's new bytes from `start` on, which stay where they are until `take_back`."""
        with self._lock:
            self._held[start] = part
            self._pass_on(start, copy)

    def take_back(self, start: int, copy: Copy) -> None:
        """The part is written, and its memory goes to others."""
        with self._lock:
            self._pass_on(start, copy)
            part = self._held.pop(start, None)
            if part is not None:
                self._written[start] = start + part.numel()

    def finish_making(self) -> None:
        """Every part was handed over."""
        self._made.set()

    def complete(self) -> None:
        self._made.set()
        self._complete.set()

    def fail(self, error: BaseException) -> None:
        """The update broke off: whoever waits gets the error. Does nothing once complete."""
        if not self._complete.is_set():
            self._error = error
            with self._lock:
                self._held.clear()
            self.complete()

    # -- the users' side -----------------------------------------------------------------------------------------------

    def receive(self, target: torch.Tensor) -> list[tuple[int, int]]:
        """`target`: [n] uint8, host memory for the whole unit, the update's until `take_rest` returns. Returns which
        bytes, from and to, its owner is to read, since they are written."""
        with self._lock:
            self._target, self._covered = target, dict(self._written)
            return sorted(self._covered.items())

    def withdraw(self) -> None:
        """Nobody will take the rest: the target is its owner's again."""
        with self._lock:
            self._target = None

    def take_rest(self, copy: Copy) -> list[tuple[int, int]]:
        """Block until the unit is made; return which bytes, from and to, are still to be read: they are of no part, for
        the update leaves them as they were. Raises what made the update fail."""
        try:
            self.wait_made()
            with self._lock:
                assert self._target is not None, "receive comes before take_rest"
                for start in self._held:
                    self._pass_on(start, copy)
                nbytes, covered = self._target.numel(), sorted(self._covered.items())
                if self._error is not None:  # its parts may have gone
                    raise self._error
        finally:
            self.withdraw()
        starts = [0, *(stop for _, stop in covered)]
        stops = [*(start for start, _ in covered), nbytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _pass_on(self, start: int, copy: Copy) -> None:
        """A held part to the target, if there is one that has not got it. Under the lock."""
        part = self._held.get(start)
        if self._target is not None and part is not None and start not in self._covered:
            stop = start + part.numel()
            copy(self._target[start:stop], part)
            self._covered[start] = stop

    @property
    def making(self) -> Event:
        """Done once the unit is made; `wait` is `wait_made`."""
        return _Making(self)

    def is_made(self) -> bool:
        return self._made.is_set()

    def wait_made(self) -> None:
        """Block until all parameters are computed. Raises what made that fail."""
        self._made.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._complete.is_set()

    def wait(self) -> None:
        self._complete.wait()
        if self._error is not None:
            raise self._error


@final
class _Making(Event):
    def __init__(self, unit_update: UnitUpdate) -> None:
        self._publication = unit_update

    def done(self) -> bool:
        return self._publication.is_made()

    def wait(self) -> None:
        self._publication.wait_made()
