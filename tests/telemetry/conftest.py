"""A clock that only sleeps move, so that no test depends on how busy the machine is."""

import threading

import pytest

from tiered_zero.telemetry import spans


class Clock:
    """In place of the module `time`; any thread."""

    def __init__(self) -> None:
        self._now_s, self._lock = 1000.0, threading.Lock()

    def perf_counter(self) -> float:
        return self._now_s

    def process_time(self) -> float:
        """As if all cores of any machine had worked: none is held by others."""
        return 1024 * self._now_s

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self._now_s += seconds

    def sleep_until(self, due_s: float) -> None:
        with self._lock:
            self._now_s = max(self._now_s, due_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(spans, "time", clock)
    return clock
