"""Read the tensors of a checkpoint, whatever the cuts, tiers and formats of the run that wrote it.

Both sides are ranges of elements in memory order, so that what is wanted meets what was saved by a bisect. A parameter
that lies in another memory order here is read whole and permuted, alone.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from math import prod
from typing import final

import torch

from tiered_zero.checkpoint.tag_manifest import SOURCE_ITEMSIZES, Part, TagManifest, TensorEntry
from tiered_zero.checkpoint.tensors import copy_values, permuted, torch_dtype
from tiered_zero.store.checked_json import MOST_INTEGER
from tiered_zero.store.reader import Broken, Reading, RecordReader, Wanted

_STEP_NUMEL = 1 << 15
"""Elements that are added at once: temporaries stay small, and on the calling thread."""


@final
@dataclass(frozen=True, kw_only=True)
class Target:
    """Elements [start, stop), in memory order, of the tensor `key`, and where they go: `values`, 1-D, of any dtype and
    on any device. `order`: the dimensions from the slowest to the fastest in memory; None: row-major."""

    key: str
    start: int
    stop: int
    values: torch.Tensor
    order: tuple[int, ...] | None = None


@final
@dataclass(frozen=True, kw_only=True)
class TargetReading:
    """Targets that are being read. `finishers`: what is left to do once all bytes are there."""

    reading: Reading
    finishers: list[Callable[[], object]] = field(default_factory=list)


@final
class TensorReader:
    """Reads a tag, or an in-place commit. One thread drives it; `close` ends it, as does the end of a `with` block."""

    def __init__(self, manifest: TagManifest, records: RecordReader, resources: ExitStack | None = None) -> None:
        """`resources`: are closed with it. Raises ValueError if a tensor lies outside of its records."""
        self.manifest = manifest
        self._records = records
        self._resources = resources or ExitStack()
        whole = [records.has(*name, 0, records.extent_nbytes(*name)) for name in manifest.records]
        is_checked = all(whole) and manifest.kind == "full"  # offsets are inside of records that were written
        for key, entry in manifest.tensors.items():
            for part in entry.parts if not is_checked else ():
                for store, record, start, stop in self._places(entry, part, part.start, part.stop):
                    if not records.has(store, record, start, stop):
                        raise ValueError(f"{key[:200]!a} lies outside of its record")

    def __enter__(self) -> TensorReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        self._records.close()
        self._resources.close()

    def submit(self, targets: Iterable[Target]) -> TargetReading:
        """Begin to read; what `values` hold is undefined until `wait`. Raises TransferError, StoreError."""
        wanted: list[Wanted] = []
        finishers: list[Callable[[], object]] = []
        for target in targets:
            entry = self.manifest.tensors[target.key]
            if entry.order == target.order:
                self._add(entry, target.start, target.stop, target.values, wanted, finishers)
                continue
            whole = torch.empty(entry.numel, dtype=torch_dtype(entry.dtype))
            self._add(entry, 0, entry.numel, whole, wanted, finishers)
            finishers.append(partial(_permute, whole, entry, target))
        return TargetReading(reading=self._records.submit(wanted), finishers=finishers)

    def wait(self, reading: TargetReading) -> None:
        """Return when its targets are filled. Raises CorruptionError, TransferError."""
        self._records.wait(reading.reading)
        for finish in reading.finishers:
            finish()
        reading.finishers.clear()

    def damage(self) -> list[Broken]:
        """Read every byte; return the ranges that are not as written."""
        return self._records.damage()

    def read(self, key: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """Read the row-major elements [start, stop) of a tensor, 1-D on the CPU. Raises as `wait`."""
        entry = self.manifest.tensors[key]
        stop = prod(entry.shape) if stop is None else stop
        values = torch.empty(stop - start, dtype=torch_dtype(entry.dtype))
        self.wait(self.submit([Target(key=key, start=start, stop=stop, values=values)]))
        return values

    def _add(
        self,
        entry: TensorEntry,
        start: int,
        stop: int,
        values: torch.Tensor,
        wanted: list[Wanted],
        finishers: list[Callable[[], object]],
    ) -> None:
        """Add what is wanted of each part of a tensor that has elements of [start, stop)."""
        dtype = torch_dtype(entry.dtype)
        first = max(0, bisect_right(entry.parts, (start, MOST_INTEGER)) - 1)
        for part in islice(entry.parts, first, None):
            if part.start >= stop:
                break
            low, high = max(start, part.start), min(stop, part.stop)
            own = values[low - start : high - start]
            places = self._places(entry, part, low, high)
            if entry.form == "joined":
                bits = own if own.dtype == torch.float32 else torch.empty(high - low)
                bits.zero_()
                for place, (kind, shift) in zip(places, _SUMMANDS, strict=True):
                    wanted.append(Wanted(*place, partial(_add, bits.view(torch.int32), kind, shift)))
                if bits is not own:
                    finishers.append(partial(copy_values, own, bits))
            elif entry.form == "rounded":
                wanted.append(Wanted(*places[0], partial(_take_rounded, own, dtype)))
            else:
                wanted.append(Wanted(*places[0], partial(_take, own, dtype, is_marked=entry.form == "magnitude")))

    def _places(self, entry: TensorEntry, part: Part, low: int, high: int) -> list[tuple[int, str, int, int]]:
        """Return where elements [low, high) of a part lie, in each source: store, record, first byte, last + 1."""
        found, own_itemsize = [], entry.itemsize
        for source, itemsize in zip(part.sources, SOURCE_ITEMSIZES[entry.form], strict=True):
            store, name = self.manifest.records[source.record]
            nbytes = itemsize or own_itemsize
            first = source.offset - part.start * nbytes
            found.append((store, name, first + low * nbytes, first + high * nbytes))
        return found


def _take(into: torch.Tensor, dtype: torch.dtype, at: int, memory: memoryview, *, is_marked: bool = False) -> None:
    """Copy elements of `dtype` that were read. `is_marked`: their signs are not their own."""
    values = torch.frombuffer(memory, dtype=dtype)
    own = into[at // dtype.itemsize :][: values.numel()]
    copy_values(own, values)
    if is_marked:
        own.abs_()


def _take_rounded(into: torch.Tensor, dtype: torch.dtype, at: int, memory: memoryview) -> None:
    """Copy what masters round to in `dtype`."""
    values = torch.frombuffer(memory, dtype=torch.float32)
    copy_values(into[at // 4 : at // 4 + values.numel()], values.to(dtype))


_SUMMANDS = ((torch.int16, 0), (torch.int16, 16), (torch.float32, 16))
"""[Note: bf16 and remainder] The bits of a master are a sum of remainder, parameter and mark, the sign of a float: the
dtype of each, and the bits by which it is shifted."""


def _add(bits: torch.Tensor, dtype: torch.dtype, shift: int, at: int, memory: memoryview) -> None:
    """Add what was read of a summand to `bits`, a few at a time."""
    read = torch.frombuffer(memory, dtype=dtype)
    values, first = read.signbit() if dtype.is_floating_point else read, at // dtype.itemsize
    for start in range(0, values.numel(), _STEP_NUMEL):
        own = values[start : start + _STEP_NUMEL].to(bits.device, torch.int32)
        bits[first + start : first + start + own.numel()].add_(own << shift)


def _permute(whole: torch.Tensor, entry: TensorEntry, target: Target) -> None:
    copy_values(target.values, permuted(whole, entry, target.order)[target.start : target.stop])
