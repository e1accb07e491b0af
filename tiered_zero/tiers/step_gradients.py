"""Hold the gradients of one step, in memory or on NVMe, until the step's update has read them.

[Note: Gradients on NVMe] A window is a buffer in host memory for the gradients of one unit. There are only a few
windows, so memory does not grow with the model. If all are taken, the oldest window is written to NVMe and freed. If
its unit gets more gradients later, the earlier ones are read back.

The update copies gradients from windows, and reads gradients without a window from NVMe. An update that starts in
backward can keep a unit's window until the update has read it. If backward needs a window, it then waits for the
update, not for a write. But an update that itself waits for gradients frees no window, and these gradients may need
one. So, while an update waits for gradients, kept windows are written to NVMe and freed too.

Gradients are written in the parts that the update reads, so each part has its own checksums."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import final

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Joined, Transfer, wait_quietly
from tiered_zero.errors import TieredZeroError
from tiered_zero.hardware.memory.host_memory import Lease, StagingPool
from tiered_zero.layout.flat import ParamSpec, Unit
from tiered_zero.layout.subgroups import Segment
from tiered_zero.telemetry.spans import Recorder
from tiered_zero.tiers.tier import Home


@dataclass(frozen=True, kw_only=True)
class UnitShare:
    """One unit's gradients in a step, or this rank's shard of them. `flat`: the gradients, 1-D; empty if they are on
    NVMe, in `paged`. `start`: the index in the unit's flat of the first element of the gradients. `present`: the
    indices of the parameters that have a gradient. `last`: the last transfer to `flat`."""

    flat: torch.Tensor
    start: int
    present: frozenset[int]
    last: Transfer | None
    on_device: bool = False
    paged: PagedFlat | None = None


class GradientSource(ABC):
    """The gradients that one update reads, by segment (the part of a unit in one sub-group). Used by one thread at a
    time. The methods with a default suit gradients that are in host memory from the start."""

    @abstractmethod
    def has(self, unit: Unit, param: ParamSpec) -> bool:
        """Return whether the parameter has a gradient in this step."""

    @abstractmethod
    def part(self, segment: Segment) -> torch.Tensor:
        """Return the segment's gradients, [numel]. Elements of parameters without a gradient are undefined."""

    def on_device(self, unit: Unit) -> bool:
        """Return whether `part` returns device memory for segments of the unit."""
        return False

    def has_arrived(self, unit: Unit) -> bool:
        """Return whether `part` can read the unit's gradients now."""
        return True

    def wait_transfers(self, unit: Unit) -> None:
        """Block until the unit's gradients have arrived, so that `part` can read them."""
        return

    def read_part(self, segment: Segment, out: torch.Tensor) -> Transfer | None:
        """Start to fill `out` with the segment's gradients from NVMe. Return the transfer; None if the gradients are
        not on NVMe."""
        return None

    def release(self, unit: Unit) -> None:
        """Release the unit's gradients. Called when the unit's update is computed."""
        return

    def release_all(self) -> None:
        """Release all gradients. Called when the update has ended or failed."""
        return


@dataclass(frozen=True, kw_only=True)
class StepGradients(GradientSource):
    """The gradients of one step of an engine. `shares`: unit -> its gradients. The driver thread adds a unit
    before the update reads it."""

    shares: dict[Unit, UnitShare] = field(default_factory=dict)

    def part(self, segment: Segment) -> torch.Tensor:
        share = self.shares[segment.unit]
        return share.flat[segment.unit_start - share.start :][: segment.numel]

    def on_device(self, unit: Unit) -> bool:
        return self.shares[unit].on_device

    def has(self, unit: Unit, param: ParamSpec) -> bool:
        share = self.shares.get(unit)
        return share is not None and param.index in share.present

    def has_arrived(self, unit: Unit) -> bool:
        last = self.shares[unit].last
        return last is None or last.done()

    def wait_transfers(self, unit: Unit) -> None:
        last = self.shares[unit].last
        if last is None:
            return
        with ExitStack() as stack:
            if not last.done():
                for windows in {share.paged.windows for share in list(self.shares.values()) if share.paged is not None}:
                    stack.enter_context(windows.awaited())
            last.wait()

    def read_part(self, segment: Segment, out: torch.Tensor) -> Transfer | None:
        share = self.shares.get(segment.unit)
        if share is None or share.paged is None:
            return None
        offset = (segment.unit_start - share.start) * share.paged.dtype.itemsize
        return share.paged.windows.read(share.paged, offset, out)

    def release(self, unit: Unit) -> None:
        share = self.shares.get(unit)
        if share is not None and share.paged is not None:
            share.paged.windows.drop(share.paged)

    def release_all(self) -> None:
        for share in list(self.shares.values()):
            if share.paged is not None:
                share.paged.windows.drop(share.paged)

    def fill(self, later: StepGradients) -> None:
        """Add each share of `later` whose unit has no share in `shares` yet."""
        for unit, share in later.shares.items():
            self.shares.setdefault(unit, share)


@final
class PagedFlat:
    """One step's gradients of a unit, or of this rank's shard, with their home on NVMe. Only `FlatWindows` changes its
    fields.

    `cuts`: the indices of elements at which the flat is cut into parts. `padding`: the ranges between and after
    parameters, which are zero in every window. All other elements are undefined until they are written."""

    def __init__(
        self,
        home: Home,
        windows: FlatWindows,
        dtype: torch.dtype,
        numel: int,
        *,
        cuts: Iterable[int] = (),
        padding: tuple[slice, ...] = (),
    ) -> None:
        self.home, self.windows = home, windows
        self.dtype, self.numel, self.padding = dtype, numel, padding
        self.cuts = tuple(sorted({0, numel, *cuts}))
        self.lease: Lease | None = None
        """The lease of the flat's window; None without a window. The window's bytes are newer than the record's."""
        self.arriving: Transfer = COMPLETED
        """The last job that launches copies to the flat's window. See [Note: Waits for gradients]."""
        self.writing: Transfer | None = None
        """The transfer that writes the flat's window to its record; None if no write is under way."""
        self.is_stored = False
        """Whether the record holds the flat's bytes."""
        self.num_users = 0
        """The number of threads that have the flat open."""
        self.is_kept = False
        """Whether the window is kept for an update, which copies from the window and then frees it."""
        self.was_opened = False
        self.previous: PagedFlat | None = None
        """The flat of an earlier step, which uses the same record. It is dropped when this flat is opened."""

    def next(self) -> PagedFlat:
        """Return the flat for the next step: this flat if it was never opened, else a new flat. Opening the new flat
        drops this flat, so the update must have read this flat before."""
        if not self.was_opened:
            return self
        flat = PagedFlat(self.home, self.windows, self.dtype, self.numel, cuts=self.cuts, padding=self.padding)
        flat.previous = self
        return flat

    @property
    def name(self) -> str:
        return self.home.slot.name


def _write(flat: PagedFlat, lease: Lease) -> Transfer:
    """Start to write the window `lease` to the flat's record."""
    parts: list[Transfer] = []
    try:
        for first, stop in pairwise(index * flat.dtype.itemsize for index in flat.cuts):
            parts.append(flat.home.tier.write(flat.home.slot, lease.tensor[first:stop], first))
    except Exception:
        for transfer in parts:
            wait_quietly(transfer)
        raise
    return Joined(*parts)


@final
class FlatWindows:
    """Leases windows (buffers in host memory) to flats of gradients. Any thread may use it. `writes_ahead`: start to
    write the oldest window as soon as no window is free, instead of when another flat needs one."""

    def __init__(self, pool: StagingPool, recorder: Recorder, *, writes_ahead: bool) -> None:
        self._pool, self._recorder = pool, recorder
        self._writes_ahead = writes_ahead
        self._changed = threading.Condition()
        self._open: list[PagedFlat] = []
        """The flats that have a window, in the order in which they got it."""
        self._num_awaited = 0
        """The number of updates that wait for gradients to arrive."""

    @contextmanager
    def open(self, flat: PagedFlat, lane: str) -> Iterator[torch.Tensor]:
        """A context manager that lends the flat's window as a tensor, [numel]. First waits for a free window and the
        flat's bytes. `lane`: the calling lane, for the recorder. Raises transfer errors."""
        self._begin_use(flat, lane)
        try:
            assert flat.lease is not None, "`_begin_use` has leased a window"
            yield flat.lease.view(flat.dtype, flat.numel)
        finally:
            with self._changed:
                flat.num_users -= 1
                self._changed.notify_all()

    def read(self, flat: PagedFlat, offset: int, out: torch.Tensor) -> Transfer | None:
        """Start to fill `out` with the flat's bytes from byte `offset`. Return the transfer; None if the flat holds no
        bytes. Raises StoreError."""
        with self._changed:
            if flat.lease is not None:
                out.copy_(flat.lease.tensor[offset : offset + out.numel()])
                return COMPLETED
            return flat.home.tier.read(flat.home.slot, out, offset) if flat.is_stored else None

    def keep(self, flat: PagedFlat) -> None:
        """Mark the flat's window, if it has one, as kept for an update that will read this window."""
        with self._changed:
            flat.is_kept = flat.lease is not None

    @contextmanager
    def awaited(self) -> Iterator[None]:
        """Allow windows that are kept for updates to be written and freed during the block. Used while an update waits
        for gradients."""
        with self._changed:
            self._num_awaited += 1
            self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._num_awaited -= 1

    def drop(self, flat: PagedFlat) -> None:
        """Discard the flat's bytes and free its window."""
        with self._changed:
            writing = flat.writing
        if writing is not None:
            with suppress(TieredZeroError):
                self._finish_write(flat, writing)
        with self._changed:
            flat.is_kept = flat.is_stored = False
            if flat.lease is not None:
                self._free(flat)

    def finish_writes(self) -> None:
        """Wait for every write under way. Raises the first error."""
        with self._changed:
            writing = [(flat, flat.writing) for flat in self._open if flat.writing is not None]
        for flat, transfer in writing:
            self._finish_write(flat, transfer, "compute")

    # -- inside --------------------------------------------------------------------------------------------------------

    def _begin_use(self, flat: PagedFlat, lane: str) -> None:
        """Lease a window for the flat, unless the flat has one, and fill the window with the flat's bytes. Add 1 to the
        flat's `num_users`. Waits until a window is free."""
        flat.was_opened = True
        if flat.previous is not None:
            self.drop(flat.previous)
            flat.previous = None
        while True:
            with self._changed:
                if (writing := flat.writing) is None:
                    if flat.lease is not None:
                        flat.num_users += 1
                        return
                    if (lease := self._pool.lease_nowait(flat.home.slot.nbytes, flat.name)) is not None:
                        flat.num_users += 1
                        flat.lease = lease
                        self._open.append(flat)
                        break
                    if (oldest := self._next_write()) is None:
                        with self._recorder.span(lane, "wait_lease", flat.name):
                            self._changed.wait()
                        continue
                    victim, writing = oldest
                else:
                    victim = flat
            self._finish_write(victim, writing, lane)
        try:
            if self._writes_ahead:
                self._write_ahead()
            self._fill(flat, lease, lane)
        except BaseException:
            with self._changed:
                flat.num_users -= 1
                self._free(flat)
            raise

    def _fill(self, flat: PagedFlat, lease: Lease, lane: str) -> None:
        if flat.is_stored:
            with self._recorder.span(lane, "wait_grad", flat.name):
                flat.home.tier.read(flat.home.slot, lease.tensor).wait()
            return
        view = lease.view(flat.dtype, flat.numel)
        for part in flat.padding:
            view[part] = 0

    def _write_ahead(self) -> None:
        """Start to write the oldest window if no window is free."""
        while True:
            with self._changed:
                if self._pool.num_free or (oldest := self._next_write()) is None or oldest[0].writing is not None:
                    return
            wait_quietly(oldest[1])

    def _next_write(self) -> tuple[PagedFlat, Transfer] | None:
        """Choose the window to free next, and start to write its gradients to NVMe. Return the window's flat, and the
        transfer to wait for: the write, or copies to the window that are still under way. Return None if all windows
        are in use, or if an update will free one. Called under the lock."""
        for flat in self._open:
            if flat.writing is not None:
                return flat, flat.writing
        if not self._num_awaited and any(flat.is_kept for flat in self._open):
            return None
        for flat in self._open:
            if not flat.num_users and flat.lease is not None:
                if not flat.arriving.done():
                    return flat, flat.arriving
                flat.writing = _write(flat, flat.lease)
                return flat, flat.writing
        return None

    def _finish_write(self, flat: PagedFlat, writing: Transfer, lane: str = "update") -> None:
        """Wait for `writing`: the write of the flat's window to NVMe, or copies to the window. Raises the error of
        `writing`. After a successful write, free the window."""
        is_stored = False
        try:
            with self._recorder.span(lane, "wait_grad", flat.name):
                writing.wait()
            is_stored = True
        finally:
            with self._changed:
                if flat.writing is writing and writing.done():  # else the wait was interrupted
                    flat.writing, flat.is_stored = None, is_stored
                    if is_stored:
                        self._free(flat)
                self._changed.notify_all()

    def _free(self, flat: PagedFlat) -> None:
        """Release the flat's window. Called under the lock."""
        assert flat.lease is not None, "only flats with a window are freed"
        flat.lease.release()
        flat.lease = None
        self._open.remove(flat)
        self._changed.notify_all()
