"""Define the interface of a tier, the host and device tiers, the table of homes, and the update of one unit.

`read_slot`, `write_slot` and `leased_slot` read and write slots. They block."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from tiered_zero.concurrency.transfer import COMPLETED, Completion, Transfer, wait_all, wait_quietly
from tiered_zero.errors import CorruptionError, StoreError
from tiered_zero.hardware.device.accelerator import Accelerator
from tiered_zero.hardware.memory.host_memory import HostArena, StagingPool
from tiered_zero.hardware.runtime import Runtime
from tiered_zero.layout.flat import Unit
from tiered_zero.layout.subgroups import Segment, SubGroup
from tiered_zero.sizes import MIB, PAGE_NBYTES, align_up
from tiered_zero.telemetry.spans import Ledger

# -- tiers, their slots and buffers ------------------------------------------------------------------------------------


@dataclass(eq=False, kw_only=True)
class Slot:
    """A named region of a tier. `nbytes`: whole pages. `kind`: the category under which the ledger counts it. `tensor`:
    the slot's own bytes, [n] uint8 with n >= nbytes, for use in place; None on nvme."""

    name: str
    nbytes: int
    kind: str
    tensor: torch.Tensor | None = None


class Tier(ABC):
    """A place where bytes rest. Offsets and lengths are in bytes, and multiples of a page. A buffer is page-aligned
    host memory, [nbytes] uint8, such as a part of a leased staging buffer. Transfers raise TransferError or
    CorruptionError."""

    name: str

    @abstractmethod
    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        """Return a new slot, with undefined bytes. `num_durable`: the number of places on disk that in-place commits
        need for the slot: 0 if no commit includes it, 1 if it is written once, 2 if it is written again. Raises
        BudgetError or StoreError if the tier is full."""

    @abstractmethod
    def read(self, slot: Slot, out: torch.Tensor, offset: int = 0) -> Transfer:
        """Start to fill the buffer `out` with the slot's bytes from `offset`. Do not use `out` until the transfer is
        done."""

    @abstractmethod
    def write(self, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> Transfer:
        """Start to write the buffer `data` to the slot, from byte `offset`. Do not change `data` until the transfer is
        done.

        `after`: the write to a device slot begins after this transfer; None: after all work that compute has launched
        so far. A call on a lane's thread must give `after`."""

    @abstractmethod
    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        """Start to copy the slot to `out`, a contiguous device tensor no larger than the slot. The fetch lane copies
        after the work that compute has launched so far. `after`: an update that still writes the slot; `out` gets the
        new bytes."""

    def close(self) -> None:
        """Free the tier's own allocations."""
        return


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of a contiguous tensor, as a [n] uint8 view."""
    return tensor.view(-1).view(torch.uint8)


def own_bytes(slot: Slot) -> torch.Tensor:
    """Return the bytes of a slot on the device or host tier, [n] uint8."""
    assert slot.tensor is not None, "the slot's tier is open and in memory"
    return slot.tensor


class HostTier(Tier):
    """Keeps slots in host memory, which `arena` pins if the machine allows it."""

    name = "host"

    def __init__(self, arena: HostArena, runtime: Runtime) -> None:
        self._arena = arena
        self._accelerator = runtime.accelerator
        self._span = runtime.accelerator.timer(runtime.recorder)

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        memory = self._arena.take(nbytes, kind) if nbytes else torch.empty(0, dtype=torch.uint8)
        return Slot(name=name, nbytes=nbytes, kind=kind, tensor=memory)

    def read(self, slot: Slot, out: torch.Tensor, offset: int = 0) -> Transfer:
        out.copy_(own_bytes(slot)[offset : offset + out.numel()])
        return COMPLETED

    def write(self, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> Transfer:
        own_bytes(slot)[offset : offset + data.numel()].copy_(data)
        return COMPLETED

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        target = as_bytes(out)
        source = own_bytes(slot)[: target.numel()]
        before = [self._accelerator.record_compute(), *([after.computed] if after else [])]  # it is written in place

        def job() -> None:
            with self._span("fetch", "fetch", slot.name, target.numel()):
                self._accelerator.copy(target, source)

        return self._accelerator.lane("fetch").submit(job, after=before, holds=[target], waits=False)


class DeviceTier(Tier):
    """Keeps slots as device tensors. The ledger counts them on tier "device"."""

    name = "device"

    def __init__(self, accelerator: Accelerator, ledger: Ledger) -> None:
        self._accelerator = accelerator
        self._ledger = ledger
        self._slots: list[Slot] = []

    def reserve(self, name: str, nbytes: int, kind: str, *, num_durable: int = 0) -> Slot:
        self._ledger.charge(self.name, kind, nbytes)
        memory = torch.zeros(nbytes, dtype=torch.uint8, device=self._accelerator.device)
        self._slots.append(slot := Slot(name=name, nbytes=nbytes, kind=kind, tensor=memory))
        return slot

    def read(self, slot: Slot, out: torch.Tensor, offset: int = 0) -> Transfer:
        source = own_bytes(slot)[offset : offset + out.numel()]
        return self._copy("write_back", out, source, self._accelerator.record())

    def write(self, slot: Slot, data: torch.Tensor, offset: int = 0, after: Transfer | None = None) -> Transfer:
        target = own_bytes(slot)[offset : offset + data.numel()]
        return self._copy("write_back", target, data, after or self._accelerator.record_compute())

    def fetch(self, slot: Slot, out: torch.Tensor, after: UnitUpdate | None = None) -> Transfer:
        target = as_bytes(out)
        source, written = own_bytes(slot)[: target.numel()], [after.written] if after else []
        return self._copy("fetch", target, source, self._accelerator.record_compute(), *written)

    def close(self) -> None:
        for slot in self._slots:
            slot.tensor = None
            self._ledger.discharge(self.name, slot.kind, slot.nbytes)
        self._slots.clear()

    def _copy(self, lane: str, target: torch.Tensor, source: torch.Tensor, *after: Transfer) -> Transfer:
        accelerator = self._accelerator
        return accelerator.lane(lane).submit(
            lambda: accelerator.copy(target, source), after=after, holds=[target, source], waits=False
        )


# -- the update of a unit ----------------------------------------------------------------------------------------------


StartCopy = Callable[[torch.Tensor, torch.Tensor], Transfer]
"""start_copy(target, source): start a copy that never waits for an update, and return its transfer."""


class UnitUpdate:
    """The update of one unit. `computed`: completes when every new parameter is in staging memory or in its slot.
    `written`: completes when all are in the slot. Any thread may use it.

    A fetch does not have to wait for `written`. It passes its target memory to `begin_copies`. Parts that are not in
    the slot yet are then copied from staging memory to the target."""

    def __init__(self) -> None:
        self.computed = Completion()
        self.written = Completion()
        self._lock = threading.Lock()
        self._pending: dict[int, torch.Tensor] = {}
        """First byte (counted in the unit) of each part that is computed but not written -> the part, [n] uint8."""
        self._retired: dict[int, int] = {}
        """First byte of each written part -> the part's last byte + 1."""
        self._target: torch.Tensor | None = None
        self._start_copy: StartCopy | None = None
        self._covered: dict[int, int] = {}
        """First byte -> last byte + 1 of each part that needs no further copy: a copy of it was started, or the fetch
        reads it from the slot."""
        self._copies: list[tuple[int, Transfer]] = []
        """(first byte of the part, transfer) of each copy that was started."""

    # -- the update worker ---------------------------------------------------------------------------------------------

    def add_pending(self, start: int, part: torch.Tensor) -> None:
        """Add a computed part of the unit. `part`: the part's new bytes, [n] uint8; they must not change before
        `retire` returns. `start`: the part's first byte in the unit."""
        with self._lock:
            self._pending[start] = part
            self._forward(start)

    def retire(self, start: int) -> None:
        """Mark the part at byte `start` as written, and wait for copies from it. The part's memory may then be
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
        """Make every wait for this update raise `error`, and wait for copies under way. Do nothing if the unit is
        written."""
        if not self.written.done():
            self.computed.fail(error)  # first, so that a fetch without pending parts sees the error
            with self._lock:
                self._pending.clear()
                copies = [copy for _, copy in self._copies]
            for copy in copies:
                wait_quietly(copy)
            self.written.fail(error)

    # -- a fetch -------------------------------------------------------------------------------------------------------

    def begin_copies(self, target: torch.Tensor, start_copy: StartCopy) -> list[tuple[int, int]]:
        """Set `target`, [n] uint8, as the memory to which the unit's new bytes are copied. Return the ranges (from, to)
        of bytes that are already in the slot: the caller reads these from there. `start_copy`: starts a copy of another
        part to `target`; called on any thread."""
        with self._lock:
            self._target, self._start_copy, self._covered = target, start_copy, dict(self._retired)
            return sorted(self._covered.items())

    def cancel_copies(self) -> None:
        """Start no more copies to the fetch's memory, and wait for copies under way. Raises their first error."""
        with self._lock:
            self._target = self._start_copy = None
            copies = [copy for _, copy in self._copies]
        wait_all(copies)

    def finish_copies(self) -> list[tuple[int, int]]:
        """Wait until the new bytes are copied to the target. Return the ranges of bytes (from, to) that the update does
        not change: the caller reads these from the slot. Raises the update's error."""
        try:
            self.computed.wait()
            with self._lock:
                assert self._target is not None, "begin_copies comes before finish_copies"
                for start in self._pending:
                    self._forward(start)
                nbytes, covered = self._target.numel(), sorted(self._covered.items())
                if self.computed.error is not None:  # parts may be missing
                    raise self.computed.error
        finally:
            self.cancel_copies()
        starts = [0, *(stop for _, stop in covered)]
        stops = [*(start for start, _ in covered), nbytes]
        return [(start, stop) for start, stop in zip(starts, stops, strict=True) if start < stop]

    def _forward(self, start: int) -> None:
        """Start to copy the part that begins at byte `start` to the target, unless the target has it already. The part
        is computed, but not written yet. Called under the lock."""
        part = self._pending.get(start)
        if self._target is None or self._start_copy is None or part is None or start in self._covered:
            return
        stop = start + part.numel()
        self._copies.append((start, self._start_copy(self._target[start:stop], part)))
        self._covered[start] = stop


# -- homes -------------------------------------------------------------------------------------------------------------


Owner = Unit | SubGroup


@dataclass(frozen=True)
class Home:
    """The slot that holds the bytes of one kind ("param", "state") of a unit or sub-group. `start`: the index in the
    unit's flat of the slot's first element; 0 unless the slot holds a rank's shard."""

    tier: Tier
    slot: Slot
    start: int = 0

    def elements(self, unit: Unit) -> slice:
        """Return the range of the unit's flat that the slot holds."""
        return slice(self.start, self.start + self.slot.nbytes // unit.itemsize)

    def offset_of(self, segment: Segment) -> int:
        """Return the offset of the segment's first byte in the slot."""
        return (segment.unit_start - self.start) * segment.unit.itemsize

    def view_of(self, segment: Segment) -> torch.Tensor | None:
        """Return the segment's elements in the slot, [numel] of the unit's dtype; None if the slot is on nvme."""
        if (raw := self.slot.tensor) is None:
            return None
        start = (segment.unit_start - self.start) * segment.unit.itemsize
        return raw[start : start + segment.nbytes].view(segment.unit.dtype)


class Inventory:
    """The table of homes, and the last update of each unit. A unit without a "param" home lives on the device, in its
    own storage. The driver thread changes the table; the update thread reads it."""

    def __init__(self) -> None:
        self._homes: dict[tuple[Owner, str], Home] = {}
        self._last_updates: dict[Unit, UnitUpdate] = {}

    def place(self, owner: Owner, kind: str, home: Home) -> None:
        assert (owner, kind) not in self._homes, f"{kind} of {owner} has a home already"
        self._homes[owner, kind] = home

    def find(self, owner: Owner, kind: str) -> Home | None:
        return self._homes.get((owner, kind))

    def home(self, owner: Owner, kind: str) -> Home:
        home = self._homes.get((owner, kind))
        assert home is not None, f"nothing rests as {kind} of {owner}"
        return home

    def move(self, homes: Mapping[tuple[Owner, str], Home]) -> None:
        """Set new homes. `homes`: (owner, kind) -> its home from now on."""
        self._homes.update(homes)

    def set_last_update(self, unit: Unit, unit_update: UnitUpdate) -> None:
        """Set the unit's last update. The next use of the unit waits for it."""
        self._last_updates[unit] = unit_update

    def last_update(self, unit: Unit) -> UnitUpdate | None:
        return self._last_updates.get(unit)


# -- plain tensors, to and from slots ----------------------------------------------------------------------------------


def read_slot(home: Home, offset: int, nbytes: int, staging: StagingPool | None) -> torch.Tensor:
    """Return a copy of `nbytes` bytes of the slot from byte `offset`: [nbytes] uint8 on the CPU. `staging`: the buffers
    through which bytes of a slot on NVMe are read."""
    if (view := home.slot.tensor) is not None:
        return view[offset : offset + nbytes].to("cpu", copy=True)
    assert staging is not None, "a tier without views is planned with staging buffers"
    out, at, end = torch.empty(nbytes, dtype=torch.uint8), offset, offset + nbytes
    while at < end:
        exact = range(at, min(at + staging.buffer_nbytes, align_up(end, PAGE_NBYTES)))
        window = _verified_window(home, exact, staging.buffer_nbytes)
        try:
            found = _read(home, window, staging)[at - window.start :]
        except CorruptionError:
            raise
        except StoreError:  # bytes around the wanted ones were never written
            found = _read(home, exact, staging)
        part = out[at - offset :][: found.numel()]
        part.copy_(found[: part.numel()])
        at += part.numel()
    return out


def _verified_window(home: Home, wanted: range, buffer_nbytes: int) -> range:
    """Extend the byte range `wanted` to whole checksum chunks (1 MiB), because only whole chunks are verified. Leave
    out the last chunks if the buffer is too small. If that leaves nothing of `wanted`, return `wanted`."""
    start = wanted.start // MIB * MIB
    stop = min(align_up(wanted.stop, MIB), home.slot.nbytes)
    if stop - start > buffer_nbytes:
        stop = (start + buffer_nbytes) // MIB * MIB
    return range(start, stop) if stop > wanted.start else wanted


def _read(home: Home, window: range, staging: StagingPool) -> torch.Tensor:
    with staging.lease(len(window), home.slot.name) as lease:
        home.tier.read(home.slot, lease.tensor, window.start).wait()
        return lease.tensor.clone()


def write_slot(home: Home, offset: int, data: torch.Tensor, staging: StagingPool | None) -> None:
    """Write `data`, a contiguous tensor of whole pages, to the slot from byte `offset`. `staging`: the buffers
    through which bytes reach a slot on NVMe."""
    raw = as_bytes(data)
    if (view := home.slot.tensor) is not None:
        view[offset : offset + raw.numel()].copy_(raw)
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    for start in range(0, raw.numel(), staging.buffer_nbytes):
        part = raw[start : start + staging.buffer_nbytes]
        with staging.lease(part.numel(), home.slot.name) as lease:
            lease.tensor.copy_(part)
            home.tier.write(home.slot, lease.tensor, offset + start).wait()


@contextmanager
def leased_slot(
    home: Home, staging: StagingPool | None, read: slice, write: slice | None = None
) -> Iterator[torch.Tensor]:
    """A context manager that lends a slot's bytes, [nbytes] uint8: the slot's own memory, perhaps on the device, or a
    staging buffer if the slot is on NVMe.

    `read`: the range to read from NVMe before the block. `write`: the range to write to NVMe after the block, unless
    the block raises. Both ranges are whole pages."""
    if (view := home.slot.tensor) is not None:
        yield view
        return
    assert staging is not None, "a tier without views is planned with staging buffers"
    with staging.lease(home.slot.nbytes, home.slot.name) as lease:
        if read.start < read.stop:
            home.tier.read(home.slot, lease.tensor[read], read.start).wait()
        yield lease.tensor
        if write is not None and write.start < write.stop:
            home.tier.write(home.slot, lease.tensor[write], write.start).wait()
