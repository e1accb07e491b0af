"""What the update tells about one unit, and hands on before the unit is home."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import final

import torch

from tiered_zero.hardware.accelerator import Event


@final
class Publication(Event):
    """One unit's update on its way: made once all its new parameters are computed, complete once they are where
    everybody reads them. Any thread.

    Who needs the parameters sooner gives a target: what is made from then on is copied there too, and only the rest is
    read from the unit's home.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._made = threading.Event()
        self._complete = threading.Event()
        self._error: BaseException | None = None
        self._target: torch.Tensor | None = None
        self._copied: list[tuple[int, int]] = []

    # -- the update's side ---------------------------------------------------------------------------------------------

    def hand_over(self, start: int, part: torch.Tensor, copy: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """`part`: [n] uint8, the unit's new bytes from `start` on."""
        with self._lock:
            if self._target is not None:
                copy(self._target[start : start + part.numel()], part)
                self._copied.append((start, start + part.numel()))

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
            self.complete()

    # -- the users' side -----------------------------------------------------------------------------------------------

    def receive(self, target: torch.Tensor) -> None:
        """`target`: [n] uint8, host memory for the whole unit, the update's until `take_rest` returns."""
        with self._lock:
            self._target, self._copied = target, []

    def withdraw(self) -> None:
        """Nobody will take the rest: the target is its owner's again."""
        with self._lock:
            self._target = None

    def take_rest(self) -> list[tuple[int, int]]:
        """Block until the unit is made; return which bytes of the target, from and to, it did not get. If there are
        any the unit is complete. Raises what made the update fail."""
        try:
            self.wait_made()
        finally:
            with self._lock:
                target, self._target = self._target, None
                copied = sorted(self._copied)
        assert target is not None, "receive comes before take_rest"
        starts = [0, *(stop for _, stop in copied)]
        stops = [*(start for start, _ in copied), target.numel()]
        rest = [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]
        if rest:
            self.wait()
        return rest

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
