"""Bases of an I/O engine and its transfers that replace every public call, and have no workers."""

from tiered_zero.io.engine import File, IOEngine, IOTransfer, Request


class FakeTransfer(IOTransfer):
    """A subclass says when it is done."""

    def finished_within(self, timeout_s: float) -> bool:
        raise NotImplementedError

    def progressed_s(self) -> float:
        raise NotImplementedError


class FakeEngine(IOEngine):
    """A subclass carries out the requests."""

    def _start(self, file: File, request: Request, view: memoryview) -> IOTransfer:
        raise NotImplementedError

    def _stop(self, idle: bool) -> None:
        raise NotImplementedError
