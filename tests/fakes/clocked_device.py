"""A device of logical clocks: the CPU computes, and vector clocks say what a GPU's streams would have ordered.

Compute and every lane have a stream. A stream's clock is a vector (Mattern 1989): up to which access of each stream
what it runs next is ordered. A mark carries the vector of the stream that it is recorded on, a wait
joins it, and a host thread that has waited for a mark passes what it knows to whatever it launches. Two accesses to the
same bytes on two streams, one of them a write, are a race where neither's vector contains the other's.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiered_zero.concurrency.transfer import Completion, Transfer
from tiered_zero.hardware.device.accelerator import (
    THIS_THREAD,
    Accelerator,
    Lane,
    LaneTransfer,
    Work,
    copy_bytes,
    on_lane_error,
)

Vector = dict[str, int]
"""Stream -> how many of its accesses came before."""


def join(into: Vector, other: Vector) -> None:
    for stream, count in other.items():
        into[stream] = max(into.get(stream, 0), count)


@dataclass(frozen=True)
class Access:
    """Bytes [start, stop) of a storage, by the `count`-th access of a stream."""

    stream: str
    count: int
    start: int
    stop: int
    writes: bool


@dataclass
class Clocks:
    """The streams' clocks, what each host thread knows to be done, and the accesses so far. `races`: those found."""

    streams: defaultdict[str, Vector] = field(default_factory=lambda: defaultdict(dict))
    accesses: defaultdict[int, list[Access]] = field(default_factory=lambda: defaultdict(list))
    races: set[tuple[str, str]] = field(default_factory=set)
    lock: threading.RLock = field(default_factory=threading.RLock)
    host: threading.local = field(default_factory=threading.local)

    @property
    def known(self) -> Vector:
        """What this thread knows to be done."""
        known: Vector = vars(self.host).setdefault("known", {})
        return known

    @property
    def stream(self) -> str:
        """The current stream of this thread."""
        return str(getattr(self.host, "stream", "compute"))

    def launch(self) -> Vector:
        """Return the current stream's vector, after what this thread knows."""
        vector = self.streams[self.stream]
        join(vector, self.known)
        return vector

    def touch(self, tensor: torch.Tensor, writes: bool) -> None:
        if not tensor.untyped_storage().nbytes() or not tensor.numel():
            return
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
        start = tensor.storage_offset() * tensor.element_size()
        with self.lock:
            vector = self.launch()
            vector[self.stream] = count = vector.get(self.stream, 0) + 1
            stop = start + last * tensor.element_size()
            access = Access(stream=self.stream, count=count, start=start, stop=stop, writes=writes)
            before = self.accesses[tensor.untyped_storage().data_ptr()]
            for other in before:
                overlaps = other.start < access.stop and access.start < other.stop
                if overlaps and (writes or other.writes) and vector.get(other.stream, 0) < other.count:
                    self.races.add((other.stream, access.stream))
            ordered = [o for o in before if access.start <= o.start and o.stop <= access.stop and writes]
            before[:] = [o for o in before if o not in ordered] + [access]


class Mark:
    """An event of the device, which lags: it is done only for a thread that has waited for it."""

    def __init__(self, clocks: Clocks) -> None:
        self._clocks = clocks
        with clocks.lock:
            self.vector = dict(clocks.launch())

    def query(self) -> bool:
        return all(self._clocks.known.get(stream, 0) >= count for stream, count in self.vector.items())

    def synchronize(self) -> None:
        join(self._clocks.known, self.vector)


class ClockedLane(Lane):
    """Passes what the submitting thread knows to the job."""

    clocks: Clocks

    def submit(
        self, job: Any, after: Any = (), holds: Any = (), waits: bool = True, transfer: Any = None
    ) -> LaneTransfer:
        clocks, known = self.clocks, dict(self.clocks.known)

        def run() -> None:
            join(clocks.known, known)
            job()

        return super().submit(run, after, holds, waits, transfer)


def pass_completions(clocks: Clocks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pass what a thread that completes a transfer by hand knows to those that have waited for it."""
    complete, wait, done = Completion.complete, Completion.wait, Completion.done

    def complete_known(self: Completion) -> None:
        vars(self)["known"] = dict(clocks.known)
        complete(self)

    def wait_known(self: Completion) -> None:
        wait(self)
        join(clocks.known, vars(self).get("known", {}))

    def done_known(self: Completion) -> bool:
        if is_done := done(self):
            join(clocks.known, vars(self).get("known", {}))
        return is_done

    monkeypatch.setattr(Completion, "complete", complete_known)
    monkeypatch.setattr(Completion, "wait", wait_known)
    monkeypatch.setattr(Completion, "done", done_known)


class ClockedAccelerator(Accelerator):
    """A GPU as the clocks see it, on which everything has happened at once."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        super().__init__(poison=False)
        self.clocks = Clocks()

    def _build_lane(self, name: str) -> Lane:
        clocks = self.clocks

        def launch(work: Work) -> Mark:
            clocks.host.stream = name
            with clocks.lock:
                for earlier in work.after:
                    if isinstance(earlier, LaneTransfer) and isinstance(earlier.marker, Mark):
                        join(clocks.streams[name], earlier.marker.vector)
            work.job()
            return Mark(clocks)

        lane = ClockedLane(name, launch)
        lane.clocks = clocks
        return lane

    def record_compute(self) -> LaneTransfer:
        if THIS_THREAD.is_lane:
            raise on_lane_error("record_compute()")
        return self.record()

    def record(self) -> LaneTransfer:
        return LaneTransfer(Mark(self.clocks))

    def wait_on_compute(self, transfer: Transfer) -> None:
        if THIS_THREAD.is_lane:
            raise on_lane_error("wait_on_compute()")
        if isinstance(transfer, LaneTransfer) and (transfer.check_launched() or isinstance(transfer.marker, Mark)):
            with self.clocks.lock:
                join(self.clocks.streams["compute"], transfer.marker.vector)
        else:
            transfer.wait()

    def copy(self, target: torch.Tensor, source: torch.Tensor, finish: bool = False) -> None:
        self.clocks.touch(source, writes=False)
        self.clocks.touch(target, writes=True)
        copy_bytes(target, source)
        if finish:
            Mark(self.clocks).synchronize()

    def poison(self, flat: torch.Tensor, dtype: torch.dtype | None = None) -> None:
        """The memory was just allocated, or is about to be freed: compute's stream orders both."""
        if self.clocks.stream == "compute":
            self.clocks.touch(flat, writes=True)

    def pin(self, address: int, nbytes: int) -> bool:
        return False

    def unpin(self, address: int) -> None:
        """Nothing was pinned."""


class ComputeAccesses(TorchDispatchMode):
    """Notes what the model's own operators read and write, in forward and in autograd's nodes."""

    def __init__(self, clocks: Clocks) -> None:
        super().__init__()
        self._clocks = clocks

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        arguments = func._schema.arguments
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in arguments)
        for argument, value in [] if is_view else zip(arguments, args, strict=False):
            writes = argument.alias_info is not None and argument.alias_info.is_write
            for tensor in tree_leaves(value):
                if isinstance(tensor, torch.Tensor):
                    self._clocks.touch(tensor, writes)
        for tensor in [] if is_view else tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._clocks.touch(tensor, writes=True)
        return result
